"""``bellmask evaluate RUN... --suite zero-shot``: perplexity on other texts (paper Table 7).

The protocol of mdlm and duo: the set's published detokenizer, the run's own tokenizer and block
length, documents packed without overlap, every token of a block scored. What differs is the
estimate: exact mask counts instead of times, several draws, errors (App. C.3,
docs/zero-shot.md). A pilot chooses the number of draws. Each evaluation is cached, so a command
that was stopped continues.
"""

from __future__ import annotations

import hashlib
import json
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import tyro

from bellmask import __version__
from bellmask.config.command_line import parse_command
from bellmask.config.options import DataOptions
from bellmask.data.blocks import Blocks
from bellmask.data.corpora import CORPORA, IMPORTED, is_toy
from bellmask.data.prepare import Preparation, parse_mixture, prepare
from bellmask.evaluate.likelihood import evaluate_run
from bellmask.evaluate.result import Likelihood, perplexity_of
from bellmask.model.transformer import hash_weights
from bellmask.storage.loading import Loaded, LoadOptions
from bellmask.storage.runs import by_folder
from bellmask.utils.console import print_lines
from bellmask.utils.errors import UserError, look_up
from bellmask.utils.files import check_folder, without_nan, write_text
from bellmask.utils.progress import NO_PROGRESS, Progress, progress_bar
from bellmask.utils.rng import stream_key
from bellmask.utils.table import Table, in_markdown

# Options

SETS = ("ptb", "wikitext2", "lm1b", "lambada", "ag_news", "pubmed", "arxiv")
"""Those of the paper's Table 7, in its order. It does not say which WikiText: the raw validation
text of WikiText-103 is that of WikiText-2, which comes in a wheel and needs no hub."""


@dataclass(frozen=True, kw_only=True)
class ZeroShotOptions(LoadOptions):
    """Perplexity on texts that runs were not trained on: the paper's Table 7 in one command.

    Perplexity ± standard error, mean ± deviation over evaluation seeds, bits per byte, and with
    several runs their paired differences to the first one. Blocks of the run's own length, packed
    without overlap, from each set's validation text. WikiText is WikiText-2 unless --corpora says
    wikitext103. A run that was stopped goes on with the sets and seeds that are left.

    Examples:
    bellmask evaluate runs/base runs/bell --suite zero-shot

    bellmask evaluate runs/bell --suite zero-shot --from ptb=ptb.valid.txt --from ag_news=test.csv
    --skip-missing

    bellmask evaluate runs/bell --suite zero-shot --corpora wikitext103 lambada --blocks 0
    """

    runs: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="RUN...")]
    """Run folders; others are compared with the first."""
    corpora: tuple[str, ...] = SETS
    """Sets, by the names of 'bellmask data list'; default: the seven of the paper."""
    from_files: Annotated[
        tyro.conf.UseAppendAction[tuple[str, ...]],
        tyro.conf.arg(name="from", metavar="NAME=PATH"),
    ] = ()
    """Local files (path or glob) to read a set from, by the set's own rules, instead of fetching
    it; may be repeated."""
    column: Annotated[
        tyro.conf.UseAppendAction[tuple[str, ...]], tyro.conf.arg(metavar="NAME=COLUMN")
    ] = ()
    """Column with the text in a set's local JSONL, CSV or Parquet files where it has another name
    than in the published set; may be repeated."""
    skip_missing: bool = False
    """Go on without sets that cannot be had; the table says so."""
    eos: Literal["mdlm", "duo"] = "mdlm"
    """mdlm: each document ends with EOS, which is scored. duo: none is inserted. Whether rows are
    wrapped in BOS ... EOS is the run's own rule either way."""
    blocks: int = 256
    """Blocks of each set, spread evenly over it; 0 means all."""
    draws: int | None = None
    """Masks per block and seed, at least 2; default: chosen by a pilot."""
    precision: float = 0.01
    """The pilot takes the fewest draws with which masks move no perplexity, in the mean over seeds,
    by more than this share of it (one standard deviation)."""
    seeds: int = 5
    """Evaluation seeds: sets of masks."""
    seed: int = 1234
    """The first of them; the others follow it."""
    batch_size: int = 64
    """Blocks per forward pass."""
    out: str | None = None
    """Folder for zero_shot.json, zero_shot.md and the values of all blocks; default RUN/zero-shot
    for a single run, else runs/zero-shot."""


def _check(options: ZeroShotOptions) -> None:
    check_folder(options.out)
    if not options.runs:
        raise UserError("evaluate --suite zero-shot needs at least one run folder")
    if options.seeds < 1 or options.batch_size < 1 or options.blocks < 0:
        raise UserError("--seeds and --batch-size must be at least 1, --blocks at least 0")
    if options.draws is not None and options.draws < 2:
        raise UserError("--draws must be at least 2: then each block covers all context counts")
    if not 0 < options.precision < 1:
        raise UserError(
            f"--precision is a share between 0 and 1, such as 0.01: {options.precision}"
        )


# Texts: the sets, and how a run reads them.

EosPolicy = Literal["mdlm", "duo"]
TITLES = {
    "ptb": "PTB",
    "wikitext2": "WikiText-2",
    "wikitext103": "WikiText-103",
    "lm1b": "LM1B",
    "lambada": "LAMBADA",
    "ag_news": "AG News",
    "pubmed": "PubMed",
    "arxiv": "arXiv",
}


@dataclass(frozen=True)
class TextSet:
    """One set of the table, and the local files to read it from where they are given."""

    name: str
    files: str | None = None
    column: str | None = None

    @property
    def title(self) -> str:
        """As the table's column is called."""
        return TITLES.get(self.name, CORPORA[self.name].title)


def parse_sets(options: ZeroShotOptions) -> list[TextSet]:
    """The sets to measure, with the files they are read from."""
    for name in options.corpora:
        look_up("corpus", name, CORPORA)
    if not options.corpora or len(set(options.corpora)) < len(options.corpora):
        raise UserError("--corpora wants one or more names, each once")
    files = _pairs(options.from_files, "from", options.corpora)
    columns = _pairs(options.column, "column", options.corpora)
    for name in columns:
        if name not in files:
            raise UserError(f"--column {name}=... speaks of local files: give --from {name}=PATH")
    return [TextSet(name, files.get(name), columns.get(name)) for name in options.corpora]


def _pairs(items: Sequence[str], option: str, sets: Sequence[str]) -> dict[str, str]:
    """``NAME=VALUE`` by name; UserError for a name that is not measured or comes twice."""
    found: dict[str, str] = {}
    for item in items:
        name, sign, value = item.partition("=")
        if not (name and sign and value):
            raise UserError(f"--{option} wants NAME=VALUE, such as ptb=ptb.valid.txt; got {item!r}")
        if name in SETS and name not in sets:
            raise UserError(f"--{option} {item}: {name} is not among --corpora {' '.join(sets)}")
        look_up("set", name, dict.fromkeys(sets))
        if name in found:
            raise UserError(f"--{option} names {name} twice; several files are one quoted glob")
        found[name] = value
    return found


def set_options(run: Loaded, text: TextSet, eos: EosPolicy) -> DataOptions:
    """How a run reads a set: the set's own rules for text, the run's for tokens and rows.

    mdlm ends every document of these sets with EOS, duo none.
    """
    return replace(
        run.config.data,
        train=text.name,
        from_files=text.files,
        valid=None,
        mixture=(),
        documents="auto",
        column=text.column,
        detokenizer="auto",
        packing="packed",
        remainder="drop",
        wrap=run.is_wrapped,
        insert_eos=eos == "mdlm",
    )


def check_run(run: Loaded, eos: EosPolicy) -> None:
    """Refuse runs that cannot read these sets as they were trained to read."""
    if is_toy(run.config.data.train):
        raise UserError(f"{run.folder} was trained on {run.config.data.train}: it reads no text")
    if eos == "duo" and run.config.data.document_attention:
        raise UserError(
            f"{run.folder} keeps attention inside documents, which are told apart by EOS: "
            "--eos duo leaves that out; use --eos mdlm"
        )


def own_family(run: Loaded, text: TextSet) -> bool | None:
    """True when the run was trained on the set's own training text: not zero-shot.

    None where nobody knows, of an imported run.
    """
    data = run.config.data
    if data.train == IMPORTED:
        return None
    trained = [data.train, *parse_mixture(data.mixture)]
    return text.name.rstrip("0123456789") in [name.rstrip("0123456789") for name in trained]


def find_missing(runs: Sequence[Loaded], sets: Sequence[TextSet], eos: EosPolicy) -> dict[str, str]:
    """Sets that cannot be had, and why; nothing is read but what tells a file from another."""
    return _try_each(sets, lambda text: [_locate(run, text, eos) for run in runs])[1]


def _locate(run: Loaded, text: TextSet, eos: EosPolicy) -> Path:
    return Preparation(set_options(run, text, eos), run.tokenizer, "valid").folder


def load_sets(
    runs: Sequence[Loaded],
    sets: Sequence[TextSet],
    eos: EosPolicy,
    progress: Progress = NO_PROGRESS,
) -> tuple[dict[str, list[Blocks]], dict[str, str]]:
    """(blocks of each set, one for each run; sets that cannot be read, and why)."""

    def load(text: TextSet) -> list[Blocks]:
        wanted = [set_options(run, text, eos) for run in runs]
        return [prepare(o, run.tokenizer, "valid", progress) for o, run in zip(wanted, runs)]

    return _try_each(sets, load)


def _try_each(
    sets: Sequence[TextSet], work: Callable[[TextSet], Any]
) -> tuple[dict[str, Any], dict[str, str]]:
    found, missing = {}, {}
    for text in sets:
        try:
            found[text.name] = work(text)
        except UserError as error:
            missing[text.name] = str(error).partition(" Offline?")[0]
    return found, missing


def refuse_missing(missing: Mapping[str, str], sets: Sequence[TextSet], skip_missing: bool) -> None:
    """A file that was given must be readable; a set that was not may be left out if so wished."""
    given = {text.name for text in sets if text.files}
    bad = {n: why for n, why in missing.items() if n in given or not skip_missing}
    if not bad:
        if len(missing) == len(sets):
            raise UserError("none of the sets is here: " + "; ".join(missing.values()))
        return
    lines = [f"{len(bad)} of {len(sets)} sets cannot be had; nothing was measured:"]
    lines += [f"  {name}: {why}" for name, why in bad.items()]
    absent = [name for name in bad if name not in given]
    if absent:
        files = " ".join(f"--from {name}=PATH" for name in absent)
        lines += [f"give local files, read by the set's own rules: {files}"]
        lines += ["or leave them out with --skip-missing, or name others with --corpora"]
    raise UserError("\n".join(lines))


# How many masks per block an evaluation needs: the smallest number whose noise is small enough.
#
# Each trial evaluates a few blocks twice with fresh masks; half the mean square of the differences
# is the variance that masks alone cause in a block's value, whatever its source: which tokens were
# hidden, or where the mask counts fell. It shrinks faster than 1 / draws, so it is measured at each
# number of draws and not extrapolated from one.
LADDER = (2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
"""Draws that are tried. At least 2: then each block covers all context counts by itself."""
PILOT_BLOCKS = 32
"""Blocks of each set that a trial evaluates; the noise found is good to about an eighth."""
Evaluate = Callable[..., Likelihood]
"""Called as ``evaluate(blocks, draws=, seed=)``."""


@dataclass(frozen=True)
class Case:
    """One run on one set, with the blocks that will be used."""

    run: str
    set: str
    blocks: Blocks
    evaluate: Evaluate


@dataclass(frozen=True)
class Pilot:
    """The number of draws that was chosen, and why."""

    draws: int
    precision: float | None = None
    """The largest noise allowed, as a share of the perplexity; None where none was asked for."""
    noise: float | None = None
    """The largest one found at this number of draws."""
    where: str = ""
    """The set and run that have it."""
    tried: list[dict[str, Any]] = field(default_factory=list)

    @property
    def reason(self) -> str:
        """A sentence for the reader."""
        if self.precision is None or self.noise is None:
            return f"{self.draws} draws per block and seed, as given" if self.draws > 1 else "exact"
        found = f"{self.noise:.2%} of the perplexity ({self.where})"
        if self.noise > self.precision:
            return (
                f"{self.draws} draws per block and seed, the most that are tried: masks still move "
                f"{found}, more than the {self.precision:.2%} asked for; more --blocks help"
            )
        return (
            f"{self.draws} draws per block and seed: the fewest with which masks move no mean "
            f"over seeds by more than {self.precision:.2%}; most of all {found}"
        )


def choose_draws(
    cases: Sequence[Case],
    precision: float,
    *,
    seed: int,
    num_seeds: int = 1,
    ladder: Sequence[int] = LADDER,
    progress: Progress = NO_PROGRESS,
) -> Pilot:
    """The fewest draws, the same for all cases, with which every one has noise below precision.

    A case that is below it is not tried again with more.
    """
    left, tried, done = list(cases), list[dict[str, Any]](), 0
    for draws in ladder:
        noise: list[float] = []
        for case in left:
            progress.start(done + len(left) - len(noise))
            noise.append(mask_noise(case, draws, seed, num_seeds))
            progress.advance()
            done += 1
        worst = max(range(len(left)), key=noise.__getitem__)
        where = f"{left[worst].set}, {left[worst].run}"
        tried.append({"draws": draws, "noise": noise[worst], "where": where})
        left = [case for case, value in zip(left, noise) if value > precision]
        if not left:
            break
    last = tried[-1]
    return Pilot(last["draws"], precision, last["noise"], last["where"], tried)


def mask_noise(case: Case, draws: int, seed: int, num_seeds: int = 1) -> float:
    """Standard deviation, over masks alone, of the set's NLL in the mean over evaluation seeds.

    d ppl / ppl = d nll, so nats are shares of the perplexity.
    """
    few = case.blocks.spread(PILOT_BLOCKS)
    one, two = (
        case.evaluate(few, draws=draws, seed=stream_key(seed, "pilot", draws, again)).block_nll
        for again in (1, 2)
    )
    return math.sqrt(float(((one - two) ** 2).mean()) / 2 / len(case.blocks) / num_seeds)


# Measurement: an evaluation for each set, run and seed, and what they say together.


def measure(
    run: Loaded,
    blocks: Blocks,
    *,
    draws: int,
    seeds: Sequence[int],
    batch_size: int = 64,
    keep: Sequence[Path] = (),
    progress: Progress = NO_PROGRESS,
) -> list[Likelihood]:
    """One evaluation per seed; an exact NLL has no masks and needs a single one.

    ``keep`` are files for the seeds' evaluations: one that is there is not made again.
    """
    results = []
    for number, seed in enumerate(seeds[:1] if run.framework.is_exact else seeds):
        path = keep[number] if keep else None
        if path is not None and (kept := _kept(path)):
            results.append(kept)
            progress.advance(len(blocks))
            continue
        result = evaluate_run(
            run, blocks, draws=draws, seed=seed, batch_size=batch_size, progress=progress
        )
        if path is not None:
            result.save(path)
        results.append(result)
    return results


def _kept(path: Path) -> Likelihood | None:
    """A kept evaluation; None where there is none, or a damaged one."""
    try:
        return Likelihood.load(path)
    except (OSError, ValueError):
        return None


def result_key(run: Loaded, weights: str, blocks: Blocks, draws: int) -> str:
    """What decides a measurement besides its seed: the hash of the weights, blocks and draws."""
    data, schedule = run.config.data, run.config.schedule
    parts = [__version__, run.config.framework.name, weights, blocks.fingerprint]
    parts += [str(schedule), str(data.document_attention), data.pads]
    parts += ["exact"] if run.framework.is_exact else [str(draws)]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def join_seeds(results: Sequence[Likelihood], blocks: Blocks, seeds: Sequence[int]) -> Likelihood:
    """The draws of all seeds as one evaluation: its error has the masks of all of them.

    Exact and estimated values of the same blocks stay paired.
    """
    fingerprint = f"{blocks.fingerprint}/{'+'.join(map(str, seeds))}"
    return replace(
        results[0],
        count_BR=np.concatenate([result.count_BR for result in results], axis=1),
        ce_BR=np.concatenate([result.ce_BR for result in results], axis=1),
        fingerprint=fingerprint,
    )


def summarize(results: Sequence[Likelihood], joined: Likelihood) -> dict[str, Any]:
    """Perplexity with its two errors: over documents and masks, and over evaluation seeds.

    The standard error is carried from nats by the delta method: d ppl = ppl d nll.
    """
    each = [result.perplexity for result in results]
    return {
        **joined.summary(),
        "num_draws": results[0].num_draws,
        "num_seeds": len(results),
        "perplexity_se": joined.perplexity * joined.standard_error,
        "seed_perplexities": each,
        "seed_mean": statistics.fmean(each),
        "seed_deviation": statistics.stdev(each) if len(each) > 1 else math.nan,
    }


def compare(joined: Likelihood, first: Likelihood) -> dict[str, float] | None:
    """Nats per token more than the first run, paired; None on other tokens or blocks."""
    if not joined.is_paired_with(first):
        return None
    difference, error = joined.difference(first)
    return {"difference": difference, "se": error, "perplexity_ratio": perplexity_of(difference)}


def collect(
    runs: Mapping[str, Loaded],
    sets: Sequence[TextSet],
    blocks: Mapping[str, Sequence[Blocks]],
    missing: Mapping[str, str],
    results: Mapping[tuple[str, str], Sequence[Likelihood]],
    seeds: Sequence[int],
) -> dict[str, Any]:
    """All numbers of the table, ready for JSON; results go by (set, run)."""
    told = []
    for text in sets:
        here = zip(runs.items(), blocks.get(text.name, ()))
        joined = {n: join_seeds(results[text.name, n], own, seeds) for (n, _), own in here}
        names = list(joined)
        told.append(
            {
                "name": text.name,
                "title": text.title,
                "files": text.files,
                "missing": missing.get(text.name),
                "results": {
                    name: {
                        **summarize(results[text.name, name], joined[name]),
                        "is_own_text": own_family(runs[name], text),
                        "data_fingerprint": own.fingerprint,
                    }
                    for name, own in zip(names, blocks.get(text.name, ()))
                },
                "differences": {n: compare(joined[n], joined[names[0]]) for n in names[1:]},
            }
        )
    kinds = [
        {"name": name, "run": run.folder.name, "step": run.step, "wraps_rows": run.is_wrapped}
        for name, run in runs.items()
    ]
    return {"runs": kinds, "sets": told}


# Zero-shot perplexities as tables: on the screen, and like the paper's Table 7 in Markdown.
NOT_HERE = "not here"
EOS = {
    "mdlm": "Each document ends with EOS (mdlm's policy)",
    "duo": "No EOS after documents (duo's policy)",
}


def plus_minus(value: float | None, error: float | None, digits: int = 2) -> str:
    """``31.42 ± 0.27``; a dash for what is not known."""
    if value is None:
        return "-"
    return f"{value:.{digits}f} ± " + ("-" if error is None else f"{error:.{digits}f}")


def over_seeds(result: Mapping[str, Any]) -> str:
    """Mean ± deviation over evaluation seeds; an exact value has none."""
    if result["is_exact"]:
        return f"{result['perplexity']:.2f} (exact)"
    return plus_minus(result["seed_mean"], result["seed_deviation"])


def _name(result: Mapping[str, Any], name: str) -> str:
    return f"{name} *" if result["is_own_text"] else name


def result_rows(numbers: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    """(columns, rows): a row for each set and run."""
    columns = ["set", "run", "perplexity ± error"]
    columns += [f"mean ± deviation, {len(numbers['seeds'])} seeds", "bits per byte"]
    columns += ["blocks", "tokens"]
    rows = []
    for text in numbers["sets"]:
        if text["missing"] is not None:
            rows.append([text["title"], "-", NOT_HERE, *["-"] * 4])
        for name, result in text["results"].items():
            bits = result["bits_per_byte"]
            row = [text["title"], _name(result, name)]
            row += [plus_minus(result["perplexity"], result["perplexity_se"]), over_seeds(result)]
            row += ["-" if bits is None else f"{bits:.4f}"]
            rows.append([*row, str(result["num_blocks"]), f"{result['num_tokens']:,}"])
    return columns, rows


def difference_rows(numbers: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    """(columns, rows): each later run against the first, paired."""
    columns = ["set", "run", "nats per token ± paired error", "perplexity ratio"]
    rows = []
    for text in numbers["sets"]:
        for name, found in text["differences"].items():
            if found is None:
                rows.append([text["title"], name, "other tokens: not comparable", "-"])
                continue
            value = f"{found['difference']:+.4f} ± " + (
                "-" if found["se"] is None else f"{found['se']:.4f}"
            )
            rows.append([text["title"], name, value, f"{found['perplexity_ratio']:.4f}"])
    return columns, rows


def notes(numbers: Mapping[str, Any]) -> list[str]:
    """What a reader must know to compare these numbers with others."""
    lines = [f"{EOS[numbers['eos']]}; {numbers['draws_reason']}."]
    lines += ["Error: another sample of documents (and what is left of the masks' noise)."]
    lines += ["Deviation: one seed's masks against another's, on the same blocks."]
    results = [r for text in numbers["sets"] for r in text["results"].values()]
    if any(result["is_own_text"] for result in results):
        lines += ["* trained on this corpus: held-out text, but not zero-shot."]
    if any(result["is_own_text"] is None for result in results):
        lines += ["Imported runs: what they were trained on is not known here."]
    lines += ["Bits per byte take the whole set's bytes per token, also of some of its blocks."]
    if any(not result["is_exact"] for result in results):
        lines += ["Perplexities of masked models and AoARMs are upper bounds; exact ones say so."]
    return lines


def show(numbers: Mapping[str, Any]) -> None:
    """Both tables and the notes, on the screen."""
    Table("zero-shot perplexity (Table 7)", *result_rows(numbers)).print()
    columns, rows = difference_rows(numbers)
    if rows:
        Table(f"difference to {numbers['runs'][0]['name']}", columns, rows).print()
    print_lines(notes(numbers))


def markdown(numbers: Mapping[str, Any]) -> str:
    """The paper's Table 7 (runs by sets, mean ± deviation over seeds), then all the rest."""
    sets = numbers["sets"]
    paper = []
    for run in numbers["runs"]:
        found = [text["results"].get(run["name"]) for text in sets]
        cells = [
            over_seeds(r) + (" *" if r["is_own_text"] else "") if r else NOT_HERE for r in found
        ]
        paper.append([f"{run['name']}, step {run['step']}", *cells])
    seeds = len(numbers["seeds"])
    parts = [
        "# Zero-shot perplexity",
        f"Mean ± deviation over {seeds} evaluation seeds (the paper's Table 7).",
        Table("", ["run", *(text["title"] for text in sets)], paper).markdown().rstrip(),
        "## In full",
        Table("", *result_rows(numbers)).markdown().rstrip(),
    ]
    columns, rows = difference_rows(numbers)
    if rows:
        parts += [
            f"## Difference to {numbers['runs'][0]['name']}",
            Table("", columns, rows).markdown().rstrip(),
        ]
    return (
        "\n\n".join([*parts, "\n".join(f"- {in_markdown(line)}" for line in notes(numbers))]) + "\n"
    )


# The command


def _load_runs(options: ZeroShotOptions) -> dict[str, Loaded]:
    """Runs by the name of their folder."""
    return {name: options.load(folder) for name, folder in by_folder(options.runs).items()}


def _load_blocks(
    options: ZeroShotOptions, runs: Sequence[Loaded], sets: Sequence[TextSet]
) -> tuple[dict[str, list[Blocks]], dict[str, str]]:
    """Everything that will be measured, prepared before the first measurement."""
    for run in runs:
        check_run(run, options.eos)
    missing = find_missing(runs, sets, options.eos)
    refuse_missing(missing, sets, options.skip_missing)
    here = [text for text in sets if text.name not in missing]
    with progress_bar("preparing", "documents") as progress:
        found, unreadable = load_sets(runs, here, options.eos, progress)
    missing = {**missing, **unreadable}
    refuse_missing(missing, sets, options.skip_missing)
    used = {name: [b.spread(options.blocks) for b in blocks] for name, blocks in found.items()}
    return used, missing


def _choose_draws(options: ZeroShotOptions, cases: Sequence[Case]) -> Pilot:
    if not cases:  # exact ones only
        return Pilot(1)
    if options.draws is not None:
        return Pilot(options.draws)
    with progress_bar("pilot", "trials") as progress:
        pilot = choose_draws(
            cases,
            options.precision,
            seed=options.seed,
            num_seeds=options.seeds,
            progress=progress,
        )
    print(f"pilot: {pilot.reason}")
    return pilot


class _Measurer:
    """Measures runs on sets, keeping each evaluation in the folder of the results."""

    def __init__(self, options: ZeroShotOptions, runs: Mapping[str, Loaded], folder: Path) -> None:
        self.options, self.runs, self.kept = options, runs, folder / "blocks"
        self.seeds = [options.seed + number for number in range(options.seeds)]

    def cases(self, blocks: Mapping[str, Sequence[Blocks]], sets: Sequence[TextSet]) -> list[Case]:
        """What the pilot tries: all but exact ones."""
        return [
            Case(
                name,
                text.title,
                own,
                partial(evaluate_run, run, batch_size=self.options.batch_size),
            )
            for text in sets
            for (name, run), own in zip(self.runs.items(), blocks.get(text.name, ()))
            if not run.framework.is_exact
        ]

    def measure(
        self, blocks: Mapping[str, Sequence[Blocks]], sets: Sequence[TextSet], draws: int
    ) -> dict[tuple[str, str], list[Likelihood]]:
        """(set, run) → an evaluation per seed."""
        work = [
            (text.name, name, run, own)
            for text in sets
            for (name, run), own in zip(self.runs.items(), blocks.get(text.name, ()))
        ]
        sizes = [len(own) * (1 if r.framework.is_exact else len(self.seeds)) for *_, r, own in work]
        self.kept.mkdir(parents=True, exist_ok=True)
        weights = {name: hash_weights(run.model) for name, run in self.runs.items()}
        found = {}
        with progress_bar("zero-shot", "blocks", sum(sizes)) as progress:
            for text, name, run, own in work:
                key = result_key(run, weights[name], own, draws)
                start = f"{run.folder.name}-{text}-{key}"
                found[text, name] = measure(
                    run,
                    own,
                    draws=draws,
                    seeds=self.seeds,
                    batch_size=self.options.batch_size,
                    keep=[self.kept / f"{start}-{seed}.npz" for seed in self.seeds],
                    progress=progress,
                )
        return found


def _folder(options: ZeroShotOptions) -> Path:
    if options.out:
        return Path(options.out)
    only = Path(options.runs[0]) if len(options.runs) == 1 else Path("runs")
    return only / "zero-shot"


def main(args: Sequence[str]) -> int:
    """Find the texts, choose the draws, measure, print and write."""
    options = parse_command(ZeroShotOptions, args, command="evaluate --suite zero-shot")
    _check(options)
    sets = parse_sets(options)

    runs = _load_runs(options)
    blocks, missing = _load_blocks(options, list(runs.values()), sets)
    folder = _folder(options)
    measurer = _Measurer(options, runs, folder)
    pilot = _choose_draws(options, measurer.cases(blocks, sets))
    results = measurer.measure(blocks, sets, pilot.draws)
    numbers = {
        "bellmask": __version__,
        "suite": "zero-shot",
        "eos": options.eos,
        "weights": options.weights,
        "seeds": measurer.seeds,
        "draws": pilot.draws,
        "draws_reason": pilot.reason,
        "pilot": asdict(pilot),
        **collect(runs, sets, blocks, missing, results, measurer.seeds),
    }
    numbers = without_nan(numbers)
    write_text(folder / "zero_shot.json", json.dumps(numbers, indent=1, allow_nan=False) + "\n")
    write_text(folder / "zero_shot.md", markdown(numbers))
    show(numbers)
    print(f"written: {folder}/zero_shot.json, zero_shot.md, blocks/")
    return 0
