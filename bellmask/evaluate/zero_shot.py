"""``bellmask evaluate RUN... --suite zero-shot``: perplexity on other texts (paper Table 7).

The protocol of mdlm and duo: the set's published detokenizer, the run's own tokenizer and block
length, documents packed without overlap, every token of a block scored. What differs is the
estimate: exact mask counts instead of times, several draws, errors (App. C.3, docs/evaluating.md).
A pilot chooses the number of draws. Evaluations are cached, so an interrupted command continues.
"""

from __future__ import annotations

import logging
import math
import re
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
from bellmask.data.readers import find_files, is_word
from bellmask.evaluate.likelihood import Likelihood, evaluate_run, perplexity_of
from bellmask.evaluate.suite import SuiteOptions, on_all_ranks, write_results
from bellmask.storage.loading import Loaded, run_fingerprint
from bellmask.storage.runs import by_folder
from bellmask.utils.console import plural
from bellmask.utils.distributed import World
from bellmask.utils.errors import UserError, look_up
from bellmask.utils.files import without_nan
from bellmask.utils.progress import Progress, progress_bar
from bellmask.utils.rng import stream_key
from bellmask.utils.stats import Estimate, plus_minus
from bellmask.utils.store import FileStore, content_key
from bellmask.utils.table import Table, markdown_page

logger = logging.getLogger(__name__)

# Options

SETS = ("ptb", "wikitext2", "lm1b", "lambada", "ag_news", "pubmed", "arxiv")
"""Those of the paper's Table 7, in its order. The paper does not say which WikiText: WikiText-103's
raw validation text equals WikiText-2's, which comes in a wheel and does not need the hub."""
EosPolicy = Literal["mdlm", "duo"]
Runs = Mapping[str, Loaded]


@dataclass(frozen=True, kw_only=True)
class ZeroShotOptions(SuiteOptions):
    """Perplexity on texts that runs were not trained on (the paper's Table 7).

    Perplexity ± standard error, mean ± deviation over evaluation seeds, bits per byte, and with
    several runs their paired differences to the first one. Blocks of the run's own length, packed
    without overlap, from each set's validation text. WikiText is WikiText-2 unless --corpora says
    wikitext103. If interrupted, the same command continues where it stopped.

    Examples:
    bellmask evaluate runs/base runs/bell --suite zero-shot

    bellmask evaluate runs/bell --suite zero-shot --from ptb=ptb.valid.txt --from ag_news=test.csv
    --skip-missing

    bellmask evaluate runs/bell --suite zero-shot --corpora wikitext103 lambada --blocks 0

    bellmask evaluate runs/bell --suite zero-shot --corpora wikitext2 my.txt pages.jsonl

    bellmask evaluate runs/bell --suite zero-shot --from mails='mails/*.txt'
    """

    corpora: tuple[str, ...] = ()
    """Corpora from 'bellmask data list', or your own files (text, JSONL, JSON, CSV, Parquet).
    Default: the paper's seven, or none of them where --from names only your own."""
    from_files: Annotated[
        tyro.conf.UseAppendAction[tuple[str, ...]], tyro.conf.arg(name="from", metavar="NAME=PATH")
    ] = ()
    """Local files (path or glob) of a corpus, read by its own rules instead of downloaded; or your
    own corpus under any other name. May be repeated."""
    column: Annotated[
        tyro.conf.UseAppendAction[tuple[str, ...]], tyro.conf.arg(metavar="NAME=COLUMN")
    ] = ()
    """Text column in a corpus's local JSONL, CSV or Parquet files, if it is named differently
    from the published corpus."""
    skip_missing: bool = False
    """Skip corpora that are not available; the table says so."""
    eos: EosPolicy = "mdlm"
    """mdlm: end each document with EOS, which is scored. duo: insert none. Whether rows are
    wrapped in BOS ... EOS depends on the run."""
    blocks: int = 256
    """Blocks of each corpus, spread evenly over it; 0 means all."""
    draws: int | None = None
    """Masks per block and seed, at least 2; default: chosen by a pilot evaluation."""
    precision: float = 0.01
    """The pilot chooses the fewest draws for which masks change no perplexity, averaged over seeds,
    by more than this fraction (one standard deviation)."""
    seed: int = 1234
    """The first evaluation seed: a set of masks."""
    batch_size: int = 64
    """Blocks per forward pass."""


def _check(options: ZeroShotOptions) -> None:
    options.check(batch_size=1, blocks=0)
    if options.draws is not None and options.draws < 2:
        raise UserError("--draws must be at least 2, so that each block covers all context counts")
    if not 0 < options.precision < 1:
        raise UserError(f"--precision is a fraction, such as 0.01, got {options.precision}")


# Texts: the sets, and how a run reads them.

_SHORT_TITLES = ("PTB", "WikiText-2", "WikiText-103", "LM1B", "LAMBADA", "PubMed", "arXiv")
TITLES = {title.lower().replace("-", ""): title for title in _SHORT_TITLES}
"""By a corpus's name, where its own title is too long for a column."""


@dataclass(frozen=True)
class TextSet:
    """One set of the table, and the local files to read it from where they are given."""

    name: str
    """Name of a corpus, of a file, or from --from."""
    files: str | None = None
    column: str | None = None

    @property
    def title(self) -> str:
        """Heading of the table's column."""
        known = CORPORA.get(self.name)
        return TITLES.get(self.name, self.name if known is None else known.title)


def parse_sets(options: ZeroShotOptions) -> list[TextSet]:
    """The sets to measure, with the files they are read from."""
    files = _pairs(options.from_files, "from")
    own = [name for name in files if name not in CORPORA]
    asked = options.corpora or (() if files and len(own) == len(files) else SETS)
    names = []
    for given in asked:
        if given in CORPORA or is_word(given):
            look_up("corpus", given, CORPORA)
        else:  # a file is a set with the file's name
            find_files(given)
            files[name := Path(given).name] = given
            given = name
        names.append(given)
    names += [name for name in own if name not in names]
    if len(set(names)) < len(names):
        raise UserError(f"--corpora names a set twice: {' '.join(names)}; --from NAME=PATH renames")
    columns = _pairs(options.column, "column")
    for option, named in (("from", files), ("column", columns)):
        for name in named:
            look_up(f"set of --corpora in --{option}", name, dict.fromkeys(names))
    for name in columns:
        if name not in files:
            raise UserError(f"--column {name}=... needs local files: give --from {name}=PATH")
    for name in own:  # it may be a misspelled one
        logger.info("%s is not a named corpus; %s is read without special rules", name, files[name])
    return [TextSet(name, files.get(name), columns.get(name)) for name in names]


def _pairs(items: Sequence[str], option: str) -> dict[str, str]:
    """``NAME=VALUE`` by name; UserError for a name that comes twice."""
    found: dict[str, str] = {}
    for item in items:
        name, sign, value = item.partition("=")
        if not (name and sign and value):
            raise UserError(f"--{option} needs NAME=VALUE, such as ptb=ptb.valid.txt; got {item!r}")
        if name in found:
            raise UserError(f"--{option} lists {name} twice; give several files as one quoted glob")
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
    """Reject runs that cannot read these corpora as in training."""
    if is_toy(run.config.data.train):
        raise UserError(f"{run.folder} was trained on {run.config.data.train}, not on text")
    if eos == "duo" and run.config.data.document_attention:
        raise UserError(f"{run.folder} attends within documents, which needs --eos mdlm")


def own_family(run: Loaded, text: TextSet) -> bool | None:
    """True when the run was trained on the set's own training text: not zero-shot.

    None for an imported run, where it is unknown.
    """
    data = run.config.data
    if data.train == IMPORTED:
        return None
    trained = [data.train, *parse_mixture(data.mixture)]
    if text.name not in CORPORA:
        return text.files in (*trained, data.from_files)
    return text.name.rstrip("0123456789") in [name.rstrip("0123456789") for name in trained]


# Paper: Table 7
def load_blocks(
    runs: Sequence[Loaded], sets: Sequence[TextSet], options: ZeroShotOptions
) -> tuple[dict[TextSet, list[Blocks]], dict[str, str]]:
    """(blocks of each set, one for each run; names of sets that are not available, and why).

    All sets are looked for before the first one is read.
    """
    found: dict[TextSet, list[Any]] = {}
    missing: dict[str, str] = {}
    with progress_bar("preparing", "documents") as progress:
        for work in (Preparation, partial(prepare, progress=progress)):
            for text in (text for text in sets if text.name not in missing):
                try:
                    found[text] = [
                        work(set_options(run, text, options.eos), run.tokenizer, "valid")
                        for run in runs
                    ]
                except UserError as error:
                    missing[text.name] = str(error).partition(" Offline?")[0]
                    found.pop(text, None)
            refuse_missing(missing, sets, options.skip_missing)
    return found, missing


def refuse_missing(missing: Mapping[str, str], sets: Sequence[TextSet], skip_missing: bool) -> None:
    """Given files must be readable; other corpora may be skipped if requested."""
    given = {text.name for text in sets if text.files}
    may_skip = skip_missing and len(missing) < len(sets)
    bad = {n: why for n, why in missing.items() if n in given or not may_skip}
    if not bad:
        return
    lines = [f"{len(bad)} of {len(sets)} sets are not available; nothing was measured:"]
    lines += [f"  {name}: {why}" for name, why in bad.items()]
    if files := " ".join(f"--from {name}=PATH" for name in bad if name not in given):
        lines += [f"give local files, read by the set's own rules: {files}"]
        lines += ["or skip them with --skip-missing, or choose others with --corpora"]
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


# Paper: Table 7
@dataclass(frozen=True)
class Case:
    """One run on one set, with the blocks that will be used."""

    run: str
    text: TextSet
    blocks: Blocks
    evaluate: Callable[..., Likelihood]
    """Called as ``evaluate(blocks, draws=, seed=, progress=)``."""
    is_exact: bool = False
    key: str = ""
    """What decides a measurement besides draws and seed, which an exact NLL has none of."""

    def measure(
        self, draws: int, seeds: Sequence[int], store: FileStore[Likelihood], progress: Progress
    ) -> list[Likelihood]:
        """One evaluation per seed, unless it is in the store; a single one of an exact NLL."""
        results = []
        for seed in seeds[:1] if self.is_exact else seeds:
            key = self.key if self.is_exact else f"{self.key}-{draws}-{seed}"
            if store.get(key) is not None:
                progress.advance(len(self.blocks))
            make = partial(self.evaluate, self.blocks, draws=draws, seed=seed, progress=progress)
            results.append(store.get_or_make(key, make))
        return results


def make_cases(runs: Runs, blocks: Mapping[TextSet, Sequence[Blocks]], **how: Any) -> list[Case]:
    """Every run on every available corpus; ``how`` are batch_size and world of an evaluation."""
    marks = {name: run_fingerprint(run) for name, run in runs.items()}
    cases = []
    for text, by_run in blocks.items():
        for (name, run), own in zip(runs.items(), by_run, strict=True):
            data = run.config.data
            parts = [marks[name], own.fingerprint, data.document_attention, data.pads]
            called = re.sub(r"[^\w.-]", "_", text.name)  # a part of a file's name
            key = f"{run.folder.name}-{called}-{content_key(__version__, parts)}"
            evaluate = partial(evaluate_run, run, **how)
            cases.append(Case(name, text, own, evaluate, run.framework.is_exact, key))
    return cases


@dataclass(frozen=True)
class Pilot:
    """The chosen number of draws, and the reason."""

    draws: int
    precision: float | None = None
    """The largest noise allowed, as a fraction of the perplexity; None without a limit."""
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
        found = f"{self.noise:.2%} ({self.where})"
        most = f"; masks change a mean over seeds by {found} at most"
        if self.noise > self.precision:
            return f"{self.draws} draws per block and seed are too few{most}; use more --blocks"
        return f"{self.draws} draws per block and seed{most}"


# Paper: Table 7
def choose_draws(cases: Sequence[Case], options: ZeroShotOptions) -> Pilot:
    """As given, or the fewest draws, the same for all cases, with which every one has noise below
    ``--precision``.

    A case that is below it is not tried again with more; an exact one needs a single draw.
    """
    left, tried = [case for case in cases if not case.is_exact], list[dict[str, Any]]()
    if options.draws is not None or not left:
        return Pilot(options.draws if left and options.draws else 1)
    with progress_bar("pilot", "trials") as progress:
        for draws in LADDER:
            noise = []
            for case in left:
                noise.append(mask_noise(case, draws, options.seed, options.seeds))
                progress.advance()
            worst = left[int(np.argmax(noise))]
            where = f"{worst.text.title}, {worst.run}"
            tried.append({"draws": draws, "noise": max(noise), "where": where})
            left = [case for case, value in zip(left, noise) if value > options.precision]
            if not left:
                break
    pilot = Pilot(precision=options.precision, **tried[-1], tried=tried)
    print(f"pilot: {pilot.reason}")
    return pilot


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


# Results of all seeds together.


# Paper: Table 7
def join_seeds(results: Sequence[Likelihood], blocks: Blocks, seeds: Sequence[int]) -> Likelihood:
    """The draws of all seeds as one evaluation: its error has the masks of all of them.

    Exact and estimated values of the same blocks stay paired.
    """
    counts = np.hstack([result.count_BR for result in results])
    losses = np.hstack([result.ce_BR for result in results])
    fingerprint = f"{blocks.fingerprint}/{'+'.join(map(str, seeds))}"
    return replace(results[0], count_BR=counts, ce_BR=losses, fingerprint=fingerprint)


# Paper: Table 7
def summarize(results: Sequence[Likelihood], joined: Likelihood) -> dict[str, Any]:
    """Perplexity with its two errors: over documents and masks, and over evaluation seeds.

    The standard error is carried from nats by the delta method: d ppl = ppl d nll.
    """
    each = [result.perplexity for result in results]
    over_seeds = Estimate.over_seeds(each)
    return {
        **joined.summary(),
        "num_draws": results[0].num_draws,
        "num_seeds": len(results),
        "perplexity_se": joined.perplexity * joined.standard_error,
        "seed_perplexities": each,
        "seed_mean": over_seeds.value,
        "seed_deviation": over_seeds.deviation,
    }


def compare(joined: Likelihood, first: Likelihood) -> dict[str, float] | None:
    """Difference to the first run in nats per token, paired; None for different tokens or
    blocks.
    """
    if not joined.is_paired_with(first):
        return None
    difference, error = joined.difference(first)
    return {"difference": difference, "se": error, "perplexity_ratio": perplexity_of(difference)}


def collect(
    runs: Runs,
    sets: Sequence[TextSet],
    missing: Mapping[str, str],
    results: Sequence[tuple[Case, Sequence[Likelihood]]],
    seeds: Sequence[int],
) -> dict[str, Any]:
    """All numbers of the table, ready for JSON."""
    about_sets = []
    for text in sets:
        here = [(case, found) for case, found in results if case.text == text]
        joined = {case.run: join_seeds(found, case.blocks, seeds) for case, found in here}
        summaries = {case.run: summarize(found, joined[case.run]) for case, found in here}
        for case, _ in here:
            summaries[case.run]["is_own_text"] = own_family(runs[case.run], text)
            summaries[case.run]["data_fingerprint"] = case.blocks.fingerprint
        first, *others = joined or [""]
        differences = {name: compare(joined[name], joined[first]) for name in others}
        about = {"name": text.name, "title": text.title, "files": text.files}
        about |= {"missing": missing.get(text.name)}
        about_sets.append({**about, "results": summaries, "differences": differences})
    about_runs = [
        {"name": name, "run": run.folder.name, "step": run.step, "wraps_rows": run.is_wrapped}
        for name, run in runs.items()
    ]
    return dict(without_nan({"runs": about_runs, "sets": about_sets}))


# Tables: on the screen, and like the paper's Table 7 in Markdown.

NOT_HERE = "not here"
EOS = {
    "mdlm": "Each document ends with EOS (mdlm's policy)",
    "duo": "No EOS after documents (duo's policy)",
}


def _over_seeds(result: Mapping[str, Any] | None) -> str:
    """Mean ± deviation over evaluation seeds; an exact value has none."""
    if result is None:
        return NOT_HERE
    star = " *" if result["is_own_text"] else ""
    if result["is_exact"]:
        return f"{result['perplexity']:.2f} (exact){star}"
    return plus_minus(result["seed_mean"], result["seed_deviation"]) + star


def paper_table(numbers: Mapping[str, Any]) -> Table:
    """The paper's Table 7: runs by sets."""
    sets = numbers["sets"]
    rows = []
    for run in numbers["runs"]:
        cells = [_over_seeds(text["results"].get(run["name"])) for text in sets]
        rows.append([f"{run['name']}, step {run['step']}", *cells])
    return Table("", ["run", *(text["title"] for text in sets)], rows)


def result_table(numbers: Mapping[str, Any]) -> Table:
    """A row for each set and run."""
    columns = ["set", "run", "perplexity ± error"]
    columns += [f"mean ± deviation, {plural(len(numbers['seeds']), 'seed')}", "bits per byte"]
    rows = []
    for text in numbers["sets"]:
        if text["missing"] is not None:
            rows.append([text["title"], "-", NOT_HERE, *["-"] * 4])
        for name, result in text["results"].items():
            perplexity = plus_minus(result["perplexity"], result["perplexity_se"])
            cells = [_over_seeds(result), plus_minus(result["bits_per_byte"], None, 4)]
            sizes = [str(result["num_blocks"]), f"{result['num_tokens']:,}"]
            rows.append([text["title"], name, perplexity, *cells, *sizes])
    title = "zero-shot perplexity (Table 7)"
    return Table(title, [*columns, "blocks", "tokens"], rows, notes(numbers))


def difference_table(numbers: Mapping[str, Any]) -> Table:
    """Each later run against the first, paired."""
    columns = ["set", "run", "nats per token ± paired error", "perplexity ratio"]
    rows = []
    for text in numbers["sets"]:
        for name, found in text["differences"].items():
            cells = ["other tokens: not comparable", "-"]
            if found is not None:
                nats = plus_minus(found["difference"], found["se"], 4, sign="+")
                cells = [nats, f"{found['perplexity_ratio']:.4f}"]
            rows.append([text["title"], name, *cells])
    return Table(f"difference to {numbers['runs'][0]['name']}", columns, rows)


def notes(numbers: Mapping[str, Any]) -> list[str]:
    """Notes needed to compare these numbers with others."""
    results = [r for text in numbers["sets"] for r in text["results"].values()]
    owns = [result["is_own_text"] for result in results]
    has_bound = not all(result["is_exact"] for result in results)
    lines = {
        f"{EOS[numbers['eos']]}; {numbers['draws_reason']}.": True,
        "Error: over documents (and the remaining noise of the masks).": True,
        "Deviation: over seeds of the masks, on the same blocks.": True,
        "* trained on this corpus, so not zero-shot; named corpora use held-out text.": any(owns),
        "Imported runs: their training text is not known.": None in owns,
        "Bits per byte use the bytes per token of the whole corpus.": True,
        "Perplexities of masked models and AoARMs are upper bounds; exact ones say so.": has_bound,
    }
    return [line for line, is_said in lines.items() if is_said]


# Paper: Table 7
def markdown(numbers: Mapping[str, Any]) -> str:
    """The paper's Table 7 (runs by sets, mean ± deviation over seeds), then all the rest."""
    full = replace(result_table(numbers), title="In full")
    over = plural(len(numbers["seeds"]), "evaluation seed")
    about = f"Mean ± deviation over {over} (the paper's Table 7)."
    differences = [table] if (table := difference_table(numbers)).rows else []
    tables = [paper_table(numbers), full, *differences]
    return markdown_page("Zero-shot perplexity", *tables, introduction=about)


# The command


def main(args: Sequence[str]) -> int:
    """Find the texts, choose the draws, measure, print and write."""
    options = parse_command(ZeroShotOptions, args, command="evaluate --suite zero-shot")
    _check(options)
    return on_all_ranks(_measure, options, options.models, "zero-shot")


def _measure(options: ZeroShotOptions, world: World, folder: Path) -> None:
    sets = parse_sets(options)
    runs = {name: options.load(folder) for name, folder in by_folder(options.models).items()}
    for run in runs.values():
        check_run(run, options.eos)
    found, missing = load_blocks([*runs.values()], sets, options)
    blocks = {text: [b.spread(options.blocks) for b in some] for text, some in found.items()}
    cases = make_cases(runs, blocks, batch_size=options.batch_size, world=world)
    pilot = choose_draws(cases, options)
    store = FileStore(folder / "blocks", ".npz", Likelihood.load, Likelihood.save)
    seeds = options.all_seeds
    total = sum(len(case.blocks) * (1 if case.is_exact else len(seeds)) for case in cases)
    with progress_bar("zero-shot", "blocks", total) as progress:
        results = [(case, case.measure(pilot.draws, seeds, store, progress)) for case in cases]
    numbers = {
        "suite": "zero-shot",
        "eos": options.eos,
        "weights": options.weights,
        "seeds": seeds,
        "draws": pilot.draws,
        "draws_reason": pilot.reason,
        "pilot": asdict(pilot),
        **collect(runs, sets, missing, results, seeds),
    }
    write_results(folder, numbers, "zero_shot", md=markdown(numbers))
    for table in (result_table(numbers), difference_table(numbers)):
        if table.rows:
            table.print()
    print(f"written: {folder}/zero_shot.json, zero_shot.md, blocks/")
