"""Generative perplexity (paper Table 8), with what it must be read beside.

Each (run, NFE, seed) is a cell: samples are drawn, decoded, tokenised again by a scorer and scored
under it; perplexity = exp(total NLL / total counted tokens) over the cell. A run's own validation
text, in as many blocks, gives the reference. Samples of a cell are kept as JSONL, its numbers
beside them, both keyed by all that decides them: what is there is not made again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from bellmask import __version__
from bellmask.data.tokenizers import Ids
from bellmask.evaluate.diversity import diversity, unigram_entropy
from bellmask.evaluate.result import perplexity_of
from bellmask.evaluate.sample_files import Place, Sample, key_of
from bellmask.evaluate.scorers import TextScorer
from bellmask.generate.canvas import Step
from bellmask.generate.fill import fill_canvas, run_canvas
from bellmask.generate.settings import Sampling
from bellmask.storage.loading import Loaded
from bellmask.utils.errors import UserError

NUMBERS = (
    "perplexity",
    "entropy",
    "distinct_1",
    "distinct_2",
    "distinct_3",
    "repetition",
    "length",
    "calls",
)
"""What a cell measures; the table has mean and deviation over seeds of each."""

OnPart = Callable[[float], None]
"""Told how many samples of a cell are done."""


@dataclass(frozen=True)
class Request:
    """What is asked of every run."""

    num: int = 100
    nfe: tuple[int, ...] = (512, 1024, 2048)
    seeds: tuple[int, ...] = (0, 1, 2, 3, 4)
    length: int | None = None
    sampling: Sampling = field(default_factory=Sampling)
    batch_size: int = 64
    """Samples drawn at once; the samples do not depend on it."""
    scorer_batch_size: int = 8


@dataclass(frozen=True)
class Subject:
    """Whose samples are measured: a run at a checkpoint, or the text that it learned from."""

    name: str
    key: str
    """Everything that decides the samples but NFE and seed."""
    about: dict[str, Any]
    settings: list[int | None]
    """NFE values; None alone where there is nothing to choose."""
    seeds: list[int]
    draw: Callable[[int | None, int, OnPart], list[Sample]]


def cut_row(run: Loaded, row: Ids) -> tuple[Ids, list[str]]:
    """(the row's own tokens, its documents as text).

    A packed row is split at EOS, of which specials are left out; a single document ends at EOS.
    """
    start = int(run.is_wrapped and len(row) > 0 and row[0] == run.tokenizer.bos_id)
    ends = start + np.flatnonzero(row[start:] == run.tokenizer.eos_id)
    if run.config.data.packing == "unpacked":
        row, ends = row[: ends[0] if len(ends) else len(row)], ends[:0]
    return row, [run.tokenizer.decode(part) for part in np.split(row, ends)]


def draw_samples(
    run: Loaded, request: Request, nfe: int | None, seed: int, on_part: OnPart
) -> list[Sample]:
    """The samples of a cell: the one place that calls the sampler."""

    def on_step(step: Step) -> None:
        on_part(step.first_sample + len(step.ids_BL) * step.number / max(1, step.num_steps))

    made = fill_canvas(
        run,
        run_canvas(run, length=request.length),
        request.num,
        sampling_for(run, request.sampling, nfe),
        seed=seed,
        batch_size=request.batch_size,
        on_step=on_step,
    )
    cut = [cut_row(run, row.numpy()) for row in made.ids_BL]
    return [Sample(documents, ids.tolist(), made.nfe) for ids, documents in cut]


def sampling_for(run: Loaded, sampling: Sampling, nfe: int | None) -> Sampling:
    """The settings that apply to a run: to a causal one only how a token is chosen."""
    if run.framework.is_causal:
        return sampling.for_causal()
    return replace(sampling, steps=nfe)


def run_subject(name: str, run: Loaded, fingerprint: str, request: Request) -> Subject:
    """A run's samples, after a trial on a few tokens that finds settings it cannot do."""
    length = len(run_canvas(run, length=request.length))
    framework = run.config.framework.name
    if framework == "sigma_arm" and length > run.config.data.block_length:
        raise UserError(
            f"{run.folder} has an order for {run.config.data.block_length} tokens; --length "
            f"{length} is more"
        )
    has_steps = request.sampling.has_steps and not run.framework.is_causal
    settings = list(dict.fromkeys(request.nfe)) if has_steps else [None]
    trial = sampling_for(run, request.sampling, 1 if settings != [None] else None)
    fill_canvas(run, run_canvas(run, length=min(length, 4 + 2 * run.is_wrapped)), 1, trial)
    kept = asdict(sampling_for(run, request.sampling, None))
    data, schedule = run.config.data, asdict(run.config.schedule)
    texts = [run.tokenizer.fingerprint, run.is_wrapped, data.packing, schedule]
    key = key_of(__version__, fingerprint, kept, request.num, length, texts)
    about = {"run": run.folder.name, "step": run.step, "framework": framework, "tokens": length}
    return Subject(
        name,
        key,
        {**about, "is_causal": run.framework.is_causal},
        [*settings],
        list(request.seeds),
        lambda nfe, seed, on_part: draw_samples(run, request, nfe, seed, on_part),
    )


def text_subject(name: str, run: Loaded, request: Request) -> Subject:
    """The run's validation text: a group of ``num`` blocks for each seed, as far as it goes."""
    train, valid = run.blocks()
    run.check_same_data(train)
    num_groups = max(1, min(len(request.seeds), len(valid) // request.num))
    blocks = valid.spread(num_groups * request.num)
    longest = min(len(run_canvas(run, length=request.length)), blocks.block_length)

    def draw(_: int | None, group: int, on_part: OnPart) -> list[Sample]:
        index = np.arange(group, len(blocks), num_groups)
        found = []
        for row, length in zip(np.asarray(blocks.tokens[index]), blocks.lengths[index]):
            ids, documents = cut_row(run, row[: min(longest, length)].astype(np.int64))
            found.append(Sample(documents, ids.tolist()))
        on_part(len(found))
        return found

    key = key_of(__version__, blocks.fingerprint, run.tokenizer.fingerprint, num_groups, longest)
    about = {"blocks": len(blocks), "tokens": longest}
    return Subject(name, key, about, [None], list(range(num_groups)), draw)


def measure_cell(
    samples: Sequence[Sample], scorer: TextScorer, batch_size: int, on_part: OnPart
) -> dict[str, Any]:
    """The numbers of a cell; samples of fewer than two scorer tokens are left out of them all."""
    scores = scorer.score(
        [sample.documents for sample in samples], batch_size=batch_size, on_batch=on_part
    )
    kept = [(a, b) for a, b in zip(samples, scores) if b.num_tokens]
    total, count = sum(b.nll for _, b in kept), sum(b.num_tokens for _, b in kept)
    if not math.isfinite(total):
        raise UserError(f"scorer {scorer.name!r} gives text no finite likelihood; use another one")
    return {
        "perplexity": perplexity_of(total / count) if count else None,
        "entropy": float(np.mean([unigram_entropy(a.ids) for a, _ in kept])) if kept else None,
        **asdict(diversity([b.ids for _, b in kept])),
        "length": count / len(kept) if kept else None,
        "calls": samples[0].calls if samples else None,
        "samples": len(samples),
        "left_out": len(samples) - len(kept),
        "cut": sum(b.is_cut for b in scores),
        "nll": [b.nll for b in scores],
        "counted_tokens": [b.num_tokens for b in scores],
    }


def measure(
    subjects: Sequence[Subject],
    scorer: TextScorer,
    request: Request,
    folder: Path,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[dict[str, Any]]:
    """Every cell of every subject: a record per subject, its cells by setting and seed."""
    cells = [
        (subject, nfe, seed, Place.of(folder, subject.name, subject.key, nfe, seed, scorer))
        for subject in subjects
        for nfe in subject.settings
        for seed in subject.seeds
    ]
    missing = [place for *_, place in cells if place.read_numbers() is None]
    total, done = len(missing) * request.num, 0
    on_progress(0, total)

    def half(start: float) -> OnPart:
        return lambda part: on_progress(int(start + part / 2), total)

    found: dict[tuple[str, int | None], list[dict[str, Any]]] = {}
    for subject, nfe, seed, place in cells:
        numbers = place.read_numbers()
        if numbers is None:
            samples = place.read_samples()
            if samples is None:
                place.write_samples(subject.draw(nfe, seed, half(done)))
                samples = place.read_samples()
            assert samples is not None
            on_part = half(done + request.num / 2)
            numbers = measure_cell(samples, scorer, request.scorer_batch_size, on_part)
            place.write_numbers(numbers)
            done += request.num
            on_progress(done, total)
        kept = {name: numbers[name] for name in (*NUMBERS, "samples", "left_out", "cut")}
        found.setdefault((subject.name, nfe), []).append({"seed": seed, **kept})
    return [
        {
            "name": subject.name,
            **subject.about,
            "settings": [_summary(nfe, found[subject.name, nfe]) for nfe in subject.settings],
        }
        for subject in subjects
    ]


def _summary(nfe: int | None, cells: list[dict[str, Any]]) -> dict[str, Any]:
    """Mean and standard deviation (n - 1) over seeds; None where there is no value, or one only."""
    mean: dict[str, float | None] = {}
    deviation: dict[str, float | None] = {}
    for name in NUMBERS:
        values = [cell[name] for cell in cells if cell[name] is not None]
        mean[name] = float(np.mean(values)) if values else None
        deviation[name] = float(np.std(values, ddof=1)) if len(values) > 1 else None
    return {"nfe": nfe, "mean": mean, "sd": deviation, "cells": cells}
