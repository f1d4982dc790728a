"""``bellmask lm-eval``: lm-eval's tasks on runs, from local data or the hub; and its own command.

``bellmask lm-eval -- ARGS`` passes everything after the dashes to lm-eval. Stock tasks read local
data through small YAML files that include the stock ones. Prompts, metrics and filters stay those
of lm-eval; only the source of the documents differs: the validation sets inside a wheel, or files
in a folder. The hub is not used. Two tasks use another split than in lm-eval, and have separate
names:

openbookqa_validation  OpenBookQA's validation split (stock openbookqa: test)
triviaqa_wikipedia     TriviaQA rc.wikipedia.nocontext (stock triviaqa: rc.nocontext)
"""

from __future__ import annotations

import math
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from bellmask.config.command_line import parse_command
from bellmask.data.readers import Record, cache_folder, read_records
from bellmask.data.tasks import BENCHMARKS, SUFFIXES, TABLE_4, find_in, validation_records
from bellmask.evaluate.scorer import RequestOptions
from bellmask.evaluate.suite import on_all_ranks, write_results
from bellmask.storage.runs import by_folder
from bellmask.utils.console import announced, tell
from bellmask.utils.distributed import World
from bellmask.utils.errors import UserError, check_least, look_up
from bellmask.utils.files import check_folder, write_text
from bellmask.utils.libraries import import_optional
from bellmask.utils.stats import plus_minus
from bellmask.utils.table import Table

if TYPE_CHECKING:
    from types import ModuleType

    from bellmask.evaluate.lm_eval_model import BellmaskLM


# Options


@dataclass(frozen=True, kw_only=True)
class HarnessOptions(RequestOptions):
    """Run lm-eval's tasks on runs: its prompts and metrics, on local data, without the hub.

    Six tasks come with a wheel from the package index; LAMBADA is read from --data-dir.
    Log-probabilities of masked models and AoARMs are lower bounds. Standard errors are lm-eval's,
    over documents; documents draw independent masks, so the noise of the estimates is part of
    them. Its size is printed below the scores. Prompts are plain text, without a
    chat template. Arguments after '--' are passed to lm-eval itself, with the additional model
    bellmask.

    Examples:
    bellmask lm-eval runs/base runs/bell --tasks piqa,winogrande --limit 200

    bellmask lm-eval runs/bell --data-dir data --out scores

    bellmask lm-eval runs/bell --stock --tasks arc_easy boolq

    bellmask lm-eval -- --model bellmask --model_args run=runs/bell,draws=32 --tasks piqa

    bellmask lm-eval -- ls tasks
    """

    runs: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="RUN...")] = ()
    """Run folders, exports or names on the hub."""
    tasks: tuple[str, ...] = ()
    """Task names, separated by spaces or commas: lambada, openbookqa, winogrande, piqa, social_iqa,
    triviaqa, hellaswag; with --stock any task of lm-eval. Default: those of the seven with data
    available."""
    limit: int | None = None
    """Use only this many documents of each task, the first ones; default: all."""
    data_dir: str | None = None
    """Folder with TASK.jsonl (.json, .parquet, .arrow), or with folders TASK of such files."""
    stock: bool = False
    """Use lm-eval's own data from the hub; allows all of its tasks."""
    cache: str | None = None
    """Folder for downloads; default: $BELLMASK_CACHE or ~/.cache/bellmask."""
    out: str | None = None
    """Folder for results.json; default RUN/lm-eval for a single run, else runs/lm-eval."""


def _check(options: HarnessOptions) -> None:
    check_folder(options.out)
    if not options.runs:
        raise UserError("lm-eval needs a run folder: bellmask lm-eval RUN")
    check_least(options, limit=1)
    if options.stock and options.data_dir is not None:
        raise UserError("--stock reads from the hub and cannot be combined with --data-dir")
    options.check()


# Stock tasks on local data.

LOADER = "bellmask.evaluate.lm_eval.load_split"
STOCK = {name: stock for name in TABLE_4 if (stock := BENCHMARKS[name].stock) is not None}
"""Tasks that lm-eval has too, by our names."""


def task_name(name: str) -> str:
    """Our name of a task given by ours or by one of lm-eval's."""
    names = {n: ours for ours, stock in STOCK.items() for n in (stock.name, stock.local_name, ours)}
    return look_up("task with local data", name, names)


def write_overlays(folder: Path, options: HarnessOptions) -> list[str]:
    """Write a YAML file per task (default: all with data) into ``folder``; return lm-eval's names
    of the tasks, in order.

    Files of ``--data-dir`` come first, then the wheel (cached, fetched if need be). With a limit
    there are no more documents than that: the first ones, as lm-eval's own limit takes them, but
    without reading the others again and again.
    """
    tasks, cache = task_names(options.tasks), cache_folder(options.cache)
    sources = {n: _source(n, options.data_dir, cache) for n in map(task_name, tasks or STOCK)}
    names = []
    for name, source in sources.items():
        if source is None and tasks:
            raise UserError(f"{name} is in no wheel: give --data-dir with {name}.jsonl, or --stock")
        if source is not None:
            stock, split = STOCK[name], BENCHMARKS[name].hub.split
            source = {"split": split, "limit": options.limit, **source}
            write_overlay(folder, stock.local_name, [stock_folder() / stock.file], source)
            names.append(stock.local_name)
    return names


def _source(task: str, data_dir: str | None, cache: Path) -> dict[str, Any] | None:
    """What :func:`load_split` is given: files, or the cache that holds the wheel."""
    files = [] if data_dir is None else find_in(data_dir, task)
    for path in files:
        if path.suffix not in SUFFIXES:  # CSV files have no types, which stock tasks rely on
            raise UserError(f"{path}: lm-eval's tasks are read from {', '.join(SUFFIXES)} files")
    if files:
        return {"files": [str(path.absolute()) for path in files]}
    if BENCHMARKS[task].wheel is not None:
        return {"wheel_task": task, "cache": str(cache.absolute())}
    return None


def write_overlay(
    folder: Path, task: str, include: Sequence[Path], source: Mapping[str, Any]
) -> None:
    """Write a task's YAML file: other ones, the last going first, on the documents of
    :func:`load_split`.
    """
    import yaml

    unset = ("tag", "dataset_name", "training_split", "validation_split", "test_split")
    overlay = {
        "include": [str(path) for path in include],
        "task": task,
        **dict.fromkeys(unset),
        "dataset_path": LOADER,
        "dataset_kwargs": dict(source),
        f"{source['split']}_split": source["split"],
    }
    folder.mkdir(parents=True, exist_ok=True)
    text = f"{yaml.safe_dump(overlay)}custom_dataset: !function {LOADER}\n"
    write_text(folder / f"{task}.yaml", text)


def stock_folder() -> Path:
    import lm_eval

    return Path(lm_eval.__file__).parent / "tasks"


def load_split(
    split: str,
    files: Sequence[str] = (),
    wheel_task: str | None = None,
    cache: str | None = None,
    limit: int | None = None,
    **_: Any,
) -> dict[str, Any]:
    """The data set of a task, called by lm-eval (with the task's metadata too)."""
    import datasets

    records: list[Record]
    if wheel_task is not None and cache is not None:
        records = validation_records(wheel_task, Path(cache))
    else:
        records = [record for path in files for record in read_records(Path(path))]
    if not records:
        raise UserError(f"{', '.join(files)}: no records")
    try:
        return {split: datasets.Dataset.from_list(records[:limit])}
    except (TypeError, ValueError) as error:
        raise UserError(f"{', '.join(files)}: records differ in their columns: {error}") from None


# Tables

Numbers = dict[str, Any]


def _show(numbers: Numbers) -> None:
    runs = numbers["runs"]
    first = next(iter(runs.values()))["results"]
    rows = [
        [
            f"{task} *" if task in numbers["notes"] else task,
            metric if way == "none" else f"{metric} ({way})",
            *(_cell(run["results"][task], metric, way) for run in runs.values()),
        ]
        for task, result in first.items()
        for metric, _, way in (key.partition(",") for key in result if "," in key)
        if not metric.endswith("_stderr")
    ]
    limit = "" if numbers["limit"] is None else f", first {numbers['limit']:,} documents"
    notes = [f"* {task}: {note}" for task, note in numbers["notes"].items()]
    Table(f"lm-eval's tasks{limit}", ["task", "metric", *runs], rows, notes).print()
    noise = []
    for name, run in runs.items():
        for task, one in run["noise"].items():
            share, error = f"{one['exact_share']:.0%}", plus_minus(one["median_error"], None, 3)
            noise.append([name, task, f"{one['requests']:,}", share, error, f"{one['passes']:,}"])
    if noise:
        columns = ["run", "task", "log-probabilities", "exact", "median error (nats)", "passes"]
        Table("noise of the estimates, included in ± above", columns, noise).print()


def _cell(result: Numbers, metric: str, way: str) -> str:
    value, error = result[f"{metric},{way}"], result.get(f"{metric}_stderr,{way}")
    if not isinstance(value, int | float):
        return str(value)
    digits = ".4f" if abs(value) < 100 else ".4g"
    has_error = isinstance(error, float) and not math.isnan(error)
    return f"{value:{digits}}" + (f" ± {error:{digits}}" if has_error else "")


# The command


def import_harness() -> ModuleType:
    """The module that imports lm-eval, or a UserError that says how to get it."""
    import_optional("lm_eval", "this command", "eval")
    from bellmask.evaluate import lm_eval_model

    return lm_eval_model


def task_names(given: Sequence[str]) -> list[str]:
    """Of ``--tasks``, with spaces or commas between them; each once, in order."""
    names = [name for part in given for name in part.split(",") if name]
    if len(set(names)) < len(names):
        raise UserError(f"--tasks lists a task twice: {' '.join(names)}")
    return names


def _request_options(options: HarnessOptions) -> dict[str, Any]:
    return {field.name: getattr(options, field.name) for field in fields(RequestOptions)}


def _results(
    options: HarnessOptions, models: Mapping[str, BellmaskLM], found: Mapping[str, Numbers]
) -> Numbers:
    told = ("results", "n-samples", "n-shot", "versions", "higher_is_better", "lm_eval_version")
    requests = _request_options(options)
    del requests["device"]  # decides no score
    tasks = () if options.stock else next(iter(found.values()))["results"]
    cautions = {stock.local_name: BENCHMARKS[name].caution for name, stock in STOCK.items()}
    return {
        "data": "hub" if options.stock else "local",
        "notes": {name: text for name, text in cautions.items() if text and name in tasks},
        "limit": options.limit,
        "options": requests,
        "runs": {
            name: {**model.get_model_info(), **{key: found[name].get(key) for key in told}}
            for name, model in models.items()
        },
    }


def main(args: Sequence[str]) -> int:
    """Evaluate, print and write; or pass on to lm-eval."""
    if args and args[0] == "--":
        return int(import_harness().run_command_line(args[1:]))
    options = parse_command(HarnessOptions, args, command="lm-eval")
    _check(options)
    with announced("loading lm-eval"):
        harness = import_harness()
    return on_all_ranks(partial(_measure, harness), options, options.runs, "lm-eval")


def _measure(harness: ModuleType, options: HarnessOptions, world: World, folder: Path) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        include = None if options.stock else Path(scratch)
        if include is None:
            given = task_names(options.tasks) or STOCK
            tasks = [STOCK[name].name if name in STOCK else name for name in given]
        else:
            with announced("fetching the tasks' data"):
                tasks = write_overlays(include, options)
        # load all runs before the first is evaluated: some may be rejected
        requests = _request_options(options)
        runs = by_folder(options.runs).items()
        models = {name: harness.BellmaskLM(run=str(place), **requests) for name, place in runs}
        found = {}
        for name, model in models.items():
            tell(f"{name}: {', '.join(tasks)} ...", sys.stderr)  # lm-eval's own lines are silenced
            model.world = world
            found[name] = harness.evaluate_tasks(model, tasks, include, options.limit)
    if not world.is_main:
        return
    numbers = _results(options, models, found)
    write_results(folder, numbers, "results")
    _show(numbers)
    print(f"written: {folder}/results.json")
