"""``bellmask evaluate MODEL... --suite paper``: the benchmarks of the paper's Table 4."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from bellmask.config.presets import parse_command
from bellmask.utils.errors import UserError, look_up
from bellmask.utils.files import check_folder

if TYPE_CHECKING:
    from bellmask.downstream.contestants import Contestant
    from bellmask.downstream.data_sources import TaskRecords
    from bellmask.storage.loading import Loaded

TASK_NAMES = (
    "lambada",
    "openbookqa",
    "winogrande",
    "piqa",
    "social_iqa",
    "infilling",
    "triviaqa",
    "hellaswag",
)
BASELINES = ("random", "unigram")


@dataclass(frozen=True)
class PaperOptions:
    """Multiple choice, completion and infilling: the paper's Table 4 for any model bellmask loads.

    Accuracy of OpenBookQA, WinoGrande, PIQA, Social IQA and HellaSwag, last words of LAMBADA,
    answers of TriviaQA, ROUGE of ROCStories' missing sentences. Mean ± deviation over evaluation
    seeds, errors over questions, paired differences to the first model; beside them what guessing
    and a unigram get. Six tasks come in a wheel, so they need no hub. A suite that was stopped goes
    on; more tasks, questions or seeds do only what is new.

    Examples:
    bellmask evaluate runs/base runs/bell --suite paper --skip-missing

    bellmask evaluate runs/bell --suite paper --tasks piqa openbookqa --limit 100

    bellmask evaluate runs/base runs/bell --suite paper --data-dir benchmarks --limit 0
    """

    models: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="MODEL...")]
    """Run folders, exports or names on the hub; others are compared with the first."""
    tasks: tuple[str, ...] = TASK_NAMES
    """Which of lambada openbookqa winogrande piqa social_iqa infilling triviaqa hellaswag."""
    data_dir: str | None = None
    """Folder with <task>.jsonl, .json, .parquet, .arrow or .csv; other tasks are fetched."""
    skip_missing: bool = False
    """Go on without tasks whose data cannot be had; the table says so."""
    limit: int = 500
    """Questions per task, the same ones every time; 0 means all."""
    seeds: int = 5
    """Evaluation seeds: masks of long continuations, and what is sampled."""
    seed: int = 0
    """The first of them; the others follow it."""
    estimator: Literal["auto", "exact", "strata", "bernoulli", "diffullama", "left_to_right"] = (
        "auto"
    )
    """How a masked model's log-probability of a choice is found. auto: all masks of short ones,
    evenly spread mask counts for longer ones. The others for comparison."""
    draws: int = 16
    """Masks per longer choice, the same for all choices of a question; orders of an AoARM."""
    longest_exact: int = 6
    """Tokens up to which auto takes all masks (2^n - 1 of them)."""
    prompts: Literal["auto", "plain", "tuned"] = "auto"
    """plain: lm-eval's. tuned: those of fine-tuning on tasks. auto: tuned for fine-tuned runs."""
    ending: Literal["auto", "none", "eos"] = "auto"
    """eos: a choice is scored with the EOS behind it. auto: so for tuned prompts."""
    baselines: bool = True
    """Rows for guessing and for the unigram of the first model's training text."""
    batch_tokens: int = 8192
    """Tokens per forward pass; changes no score."""
    checkpoint: str = "latest"
    """latest, best, or a step."""
    weights: Literal["auto", "ema", "raw"] = "auto"
    """auto: the moving average where there is one."""
    out: str | None = None
    """Folder for paper.json, paper.md, paper.tex and all answers; default MODEL/paper for a single
    run folder, else runs/paper."""
    cache_dir: str | None = None
    """Folder for fetched data; default $BELLMASK_CACHE or ~/.cache/bellmask."""
    device: str = "auto"
    """auto, cpu, cuda, ..."""


def _check(options: PaperOptions) -> None:
    check_folder(options.out)
    if not options.models:
        raise UserError("evaluate --suite paper needs at least one model")
    for name in options.tasks:
        look_up("task", name, dict.fromkeys(TASK_NAMES))
    if not options.tasks or len(set(options.tasks)) < len(options.tasks):
        raise UserError("--tasks wants one or more names, each once")
    if options.seeds < 1:
        raise UserError(f"--seeds must be at least 1, got {options.seeds}")
    if options.limit < 0:
        raise UserError(f"--limit must be 0 (all questions) or more, got {options.limit}")
    if options.data_dir is not None and not Path(options.data_dir).is_dir():
        raise UserError(f"--data-dir {options.data_dir}: there is no such folder")
    if "infilling" in options.tasks:
        from bellmask.downstream.grading import check_rouge

        check_rouge()


def run(args: Sequence[str]) -> int:
    """Measure, print, write."""
    options = parse_command(PaperOptions, args, command="evaluate MODEL... --suite paper")
    names = [name for given in options.tasks for name in given.split(",") if name]
    options = replace(options, tasks=tuple(names))
    _check(options)

    from bellmask.downstream.suite import Suite
    from bellmask.utils.console import progress_bar

    contestants = _load_contestants(options)
    loaded, missing = _load_tasks(options)
    folder = _folder(options)
    seeds = range(options.seed, options.seed + options.seeds)
    suite = Suite(contestants, loaded, options.limit, seeds, folder / "kept")
    with progress_bar("paper suite", "answers", suite.missing()) as advance:
        try:
            suite.do(advance)
        except KeyboardInterrupt:
            words = (
                f"interrupted; answers so far are kept in {folder}/kept: the same command goes on"
            )
            raise KeyboardInterrupt(words) from None
    _write(options, {**suite.numbers(), "missing": missing}, folder)
    return 0


def _write(options: PaperOptions, found: dict[str, Any], folder: Path) -> None:
    from bellmask import __version__
    from bellmask.report.downstream_tables import latex, markdown, show
    from bellmask.utils.files import write_text

    numbers = {
        "bellmask": __version__,
        "suite": "paper",
        "estimator": options.estimator,
        "draws": options.draws,
        "longest_exact": options.longest_exact,
        "weights": options.weights,
        "limit": options.limit,
        **found,
    }
    folder.mkdir(parents=True, exist_ok=True)
    write_text(folder / "paper.json", json.dumps(numbers, indent=1, allow_nan=False) + "\n")
    write_text(folder / "paper.md", markdown(numbers))
    write_text(folder / "paper.tex", latex(numbers))
    show(numbers)
    print(f"written: {folder}/paper.json, paper.md, paper.tex; all answers in {folder}/kept")


def _folder(options: PaperOptions) -> Path:
    if options.out:
        return Path(options.out)
    only = Path(options.models[0])
    return only / "paper" if len(options.models) == 1 and only.is_dir() else Path("runs/paper")


def _load_contestants(options: PaperOptions) -> dict[str, Contestant]:
    """By name: the models, then those that know nothing."""
    from bellmask.analyze.runs import by_folder
    from bellmask.downstream.contestants import RunContestant
    from bellmask.downstream.masks import Estimator
    from bellmask.storage.loading import load

    estimator = Estimator(options.estimator, options.draws, options.longest_exact).check()
    places = by_folder(options.models)
    for name in BASELINES if options.baselines else ():
        if name in places:
            raise UserError(
                f"a row is called {name} already; rename {places[name]} or give --no-baselines"
            )
    models = {
        name: RunContestant(
            load(
                place,
                checkpoint=options.checkpoint,
                weights=options.weights,
                device=options.device,
            ),
            estimator,
            prompts=options.prompts,
            ending=options.ending,
            batch_tokens=options.batch_tokens,
        )
        for name, place in places.items()
    }
    first = next(iter(models.values())).run
    return {**models, **(_load_baselines(first) if options.baselines else {})}


def _load_baselines(run: Loaded) -> dict[str, Contestant]:
    from bellmask.downstream.baselines import guesser_for, unigram_of

    found: dict[str, Contestant] = {"random": guesser_for(run)}
    try:
        found["unigram"] = unigram_of(run)
    except UserError as error:
        print(f"note: no unigram without the training text: {error}", file=sys.stderr)
    return found


def _load_tasks(options: PaperOptions) -> tuple[dict[str, TaskRecords], dict[str, str]]:
    """(records by task, why others are missing)."""
    from bellmask.data.readers import cache_folder
    from bellmask.downstream.data_sources import MissingData, open_task

    loaded, missing = {}, {}
    for task in options.tasks:
        try:
            loaded[task] = open_task(task, options.data_dir, cache_folder(options.cache_dir))
        except MissingData as error:
            missing[task] = str(error)
            if options.skip_missing:
                print(f"note: left out: {error}", file=sys.stderr)
    if missing and not options.skip_missing:
        raise UserError(f"{' '.join(missing.values())} (--skip-missing goes on without)")
    if not loaded:
        raise UserError("there is no data for any of the tasks")
    return loaded, missing
