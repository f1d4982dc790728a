"""``bellmask evaluate RUN... --suite zero-shot``: perplexity on other texts (paper Table 7)."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from bellmask.config.presets import parse_command
from bellmask.utils.errors import UserError, look_up
from bellmask.utils.files import check_folder

if TYPE_CHECKING:
    from bellmask.data.blocks import Blocks
    from bellmask.evaluate.pilot import Case, Pilot
    from bellmask.evaluate.result import Likelihood
    from bellmask.evaluate.zero_shot import TextSet
    from bellmask.storage.loading import Loaded

SETS = ("ptb", "wikitext2", "lm1b", "lambada", "ag_news", "pubmed", "arxiv")
"""Those of the paper's Table 7, in its order. It does not say which WikiText: the raw validation
text of WikiText-103 is that of WikiText-2, which comes in a wheel and needs no hub."""


@dataclass(frozen=True)
class ZeroShotOptions:
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
    checkpoint: str = "latest"
    """latest, best, or a step."""
    weights: Literal["auto", "ema", "raw"] = "auto"
    """auto: the moving average where there is one."""
    out: str | None = None
    """Folder for zero_shot.json, zero_shot.md and the values of all blocks; default RUN/zero-shot
    for a single run, else runs/zero-shot."""
    device: str = "auto"
    """auto, cpu, cuda, ..."""


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


def parse_sets(options: ZeroShotOptions) -> list[TextSet]:
    """The sets to measure, with the files they are read from."""
    from bellmask.data.corpora import CORPORA
    from bellmask.evaluate.zero_shot import TextSet

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


def _load_runs(options: ZeroShotOptions) -> dict[str, Loaded]:
    """Runs by the name of their folder."""
    from bellmask.analyze.runs import by_folder
    from bellmask.storage.loading import load

    return {
        name: load(
            folder, checkpoint=options.checkpoint, weights=options.weights, device=options.device
        )
        for name, folder in by_folder(options.runs).items()
    }


def _load_blocks(
    options: ZeroShotOptions, runs: Sequence[Loaded], sets: Sequence[TextSet]
) -> tuple[dict[str, list[Blocks]], dict[str, str]]:
    """Everything that will be measured, prepared before the first measurement."""
    from bellmask.evaluate.zero_shot import (
        check_run,
        find_missing,
        load_sets,
        refuse_missing,
    )
    from bellmask.utils.console import preparing_bar

    for run in runs:
        check_run(run, options.eos)
    missing = find_missing(runs, sets, options.eos)
    refuse_missing(missing, sets, options.skip_missing)
    here = [text for text in sets if text.name not in missing]
    with preparing_bar() as on_progress:
        found, unreadable = load_sets(runs, here, options.eos, on_progress)
    missing = {**missing, **unreadable}
    refuse_missing(missing, sets, options.skip_missing)
    used = {name: [b.spread(options.blocks) for b in blocks] for name, blocks in found.items()}
    return used, missing


def _choose_draws(options: ZeroShotOptions, cases: Sequence[Case]) -> Pilot:
    from bellmask.evaluate.pilot import Pilot, choose_draws
    from bellmask.utils.console import staged_bar

    if not cases:  # exact ones only
        return Pilot(1)
    if options.draws is not None:
        return Pilot(options.draws)
    with staged_bar("pilot", "trials") as on_trial:
        pilot = choose_draws(
            cases,
            options.precision,
            seed=options.seed,
            num_seeds=options.seeds,
            on_trial=on_trial,
        )
    print(f"pilot: {pilot.reason}")
    return pilot


def _later(advance: Callable[[int], None], before: int, done: int) -> None:
    """Move a bar that other work has moved before."""
    advance(before + done)


class _Measurer:
    """Measures runs on sets, keeping each evaluation in the folder of the results."""

    def __init__(self, options: ZeroShotOptions, runs: Mapping[str, Loaded], folder: Path) -> None:
        self.options, self.runs, self.kept = options, runs, folder / "blocks"
        self.seeds = [options.seed + number for number in range(options.seeds)]

    def cases(self, blocks: Mapping[str, Sequence[Blocks]], sets: Sequence[TextSet]) -> list[Case]:
        """What the pilot tries: all but exact ones."""
        from bellmask.evaluate.likelihood import evaluate_run
        from bellmask.evaluate.pilot import Case

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
        from bellmask.evaluate.zero_shot import measure, result_key
        from bellmask.model.transformer import hash_weights
        from bellmask.utils.console import progress_bar

        work = [
            (text.name, name, run, own)
            for text in sets
            for (name, run), own in zip(self.runs.items(), blocks.get(text.name, ()))
        ]
        sizes = [len(own) * (1 if r.framework.is_exact else len(self.seeds)) for *_, r, own in work]
        self.kept.mkdir(parents=True, exist_ok=True)
        weights = {name: hash_weights(run.model) for name, run in self.runs.items()}
        found, before = {}, 0
        with progress_bar("zero-shot", "blocks", sum(sizes)) as advance:
            for (text, name, run, own), size in zip(work, sizes):
                key = result_key(run, weights[name], own, draws)
                start = f"{run.folder.name}-{text}-{key}"
                found[text, name] = measure(
                    run,
                    own,
                    draws=draws,
                    seeds=self.seeds,
                    batch_size=self.options.batch_size,
                    keep=[self.kept / f"{start}-{seed}.npz" for seed in self.seeds],
                    on_batch=partial(_later, advance, before),
                )
                before += size
                advance(before)
        return found


def run(args: Sequence[str]) -> int:
    """Find the texts, choose the draws, measure, print and write."""
    options = parse_command(ZeroShotOptions, args, command="evaluate --suite zero-shot")
    _check(options)
    sets = parse_sets(options)

    from bellmask import __version__
    from bellmask.compare.results import without_nan
    from bellmask.evaluate.zero_shot import collect
    from bellmask.report.zero_shot_tables import markdown, show
    from bellmask.utils.files import write_text

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


def _folder(options: ZeroShotOptions) -> Path:
    if options.out:
        return Path(options.out)
    only = Path(options.runs[0]) if len(options.runs) == 1 else Path("runs")
    return only / "zero-shot"
