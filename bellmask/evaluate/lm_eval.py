"""``bellmask lm-eval``: lm-eval's tasks on runs, from local data or the hub; and its own command.

``bellmask lm-eval -- ARGS`` hands everything behind the dashes to lm-eval. Stock tasks read local
data through small YAML files that include the stock ones. Prompts, metrics and filters stay those
of lm-eval; only where the documents come from is another place: the validation sets inside a wheel,
or files in a folder. Nothing asks the hub. Two tasks are not scored on the split that lm-eval
takes, and have names of their own:

openbookqa_validation  OpenBookQA's validation split (stock openbookqa: test)
triviaqa_wikipedia     TriviaQA rc.wikipedia.nocontext (stock triviaqa: rc.nocontext)
"""

from __future__ import annotations

import importlib.util
import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from bellmask import __version__
from bellmask.config.command_line import parse_command
from bellmask.data.example_files import Record, read_records
from bellmask.data.readers import cache_folder
from bellmask.data.tasks import SUFFIXES, VALIDATION, validation_records
from bellmask.evaluate.paper_tasks import find_in
from bellmask.evaluate.scorer import RequestOptions
from bellmask.storage.runs import by_folder
from bellmask.utils.errors import UserError, look_up
from bellmask.utils.files import check_folder, without_nan, write_text
from bellmask.utils.table import Table

if TYPE_CHECKING:
    from types import ModuleType

    from bellmask.evaluate.lm_eval_model import BellmaskLM


# Options


@dataclass(frozen=True)
class HarnessOptions:
    """Tasks of lm-eval on runs: its prompts and metrics, on local data, without the hub.

    Six tasks come with a wheel from the package index; LAMBADA is read from --data-dir.
    Log-probabilities of masked models and AoARMs are lower bounds. Standard errors are lm-eval's,
    over documents; documents draw their masks apart, so that the noise of the estimates is part of
    them. How large that noise is, is printed below the scores. Prompts are plain text, without a
    chat template. Behind '--' everything goes to lm-eval itself, which then knows the model
    bellmask.

    Examples:
    bellmask lm-eval runs/base runs/bell --tasks piqa,winogrande --limit 200

    bellmask lm-eval runs/bell --data-dir data --out scores

    bellmask lm-eval runs/bell --stock --tasks arc_easy boolq

    bellmask lm-eval --write-tasks tasks

    bellmask lm-eval -- --model bellmask --model_args run=runs/bell,draws=32 --tasks piqa

    bellmask lm-eval -- ls tasks
    """

    runs: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="RUN...")] = ()
    """Run folders, exports or names on the hub."""
    tasks: tuple[str, ...] = ()
    """Names, with spaces or commas between them: lambada, openbookqa, winogrande, piqa, social_iqa,
    triviaqa, hellaswag; with --stock any of lm-eval's. Default: all of the seven that there is data
    of."""
    limit: int | None = None
    """First documents of each task; default: all."""
    data_dir: str | None = None
    """Folder with TASK.jsonl (.json, .parquet, .arrow) or folders TASK of such files."""
    stock: bool = False
    """lm-eval's own data from the hub, and all of its tasks."""
    requests: Annotated[RequestOptions, tyro.conf.arg(name="")] = field(
        default_factory=RequestOptions
    )
    """How requests are answered."""
    bootstraps: int = 1000
    """Resamples for standard errors that have no formula (perplexity)."""
    cache: str | None = None
    """Folder for what is fetched; default $BELLMASK_CACHE or ~/.cache/bellmask."""
    write_tasks: str | None = None
    """Only write the YAML files of the local tasks into this folder, for lm-eval's
    --include_path."""
    out: str | None = None
    """Folder for results.json; default RUN/lm-eval for a single run, else runs/lm-eval."""


def _check(options: HarnessOptions) -> None:
    check_folder(options.out)
    check_folder(options.write_tasks, "--write-tasks")
    if not options.runs and options.write_tasks is None:
        raise UserError("lm-eval needs a run folder: bellmask lm-eval RUN")
    if options.write_tasks is not None and (options.runs or options.stock):
        raise UserError("--write-tasks only writes tasks on local data: no run, no --stock")
    if options.limit is not None and options.limit < 1:
        raise UserError(f"--limit must be at least 1, got {options.limit}")
    if options.bootstraps < 1:
        raise UserError(f"--bootstraps must be at least 1, got {options.bootstraps}")
    if options.stock and options.data_dir is not None:
        raise UserError("--stock reads from the hub: it does not go with --data-dir")
    if options.data_dir is not None and not Path(options.data_dir).is_dir():
        raise UserError(f"there is no folder {options.data_dir} to read with --data-dir")
    options.requests.check()


# Stock tasks on local data.

LOADER = "bellmask.evaluate.lm_eval.load_split"


@dataclass(frozen=True)
class StockTask:
    """A task of lm-eval that can be read from local data."""

    file: str
    """In lm-eval's folder of tasks."""
    stock_name: str
    local_name: str
    """Differs from the stock name where the documents do."""
    split: str
    note: str = ""


STOCK_TASKS = {
    "lambada": StockTask(
        "lambada/lambada_openai.yaml", "lambada_openai", "lambada_openai", split="test"
    ),
    "openbookqa": StockTask(
        "openbookqa/openbookqa.yaml",
        "openbookqa",
        "openbookqa_validation",
        split="validation",
        note="validation split; stock lm-eval takes the test split",
    ),
    "winogrande": StockTask(
        "winogrande/default.yaml", "winogrande", "winogrande", split="validation"
    ),
    "piqa": StockTask("piqa/piqa.yaml", "piqa", "piqa", split="validation"),
    "social_iqa": StockTask("siqa/siqa.yaml", "social_iqa", "social_iqa", split="validation"),
    "triviaqa": StockTask(
        "triviaqa/default.yaml",
        "triviaqa",
        "triviaqa_wikipedia",
        split="validation",
        note="rc.wikipedia.nocontext; stock lm-eval takes rc.nocontext",
    ),
    "hellaswag": StockTask("hellaswag/hellaswag.yaml", "hellaswag", "hellaswag", "validation"),
}
"""By our names, in the order of the paper's Table 4."""


def task_name(name: str) -> str:
    """Our name of a task given by ours or by one of lm-eval's."""
    names = {
        n: ours for ours, task in STOCK_TASKS.items() for n in (task.stock_name, task.local_name)
    }
    names |= {ours: ours for ours in STOCK_TASKS}
    return look_up("task with local data", name, names)


def write_overlays(
    folder: Path,
    data_dir: Path | None,
    cache: Path,
    tasks: Sequence[str],
    *,
    limit: int | None = None,
) -> list[str]:
    """Write a YAML file per task into ``folder``; lm-eval's names of the tasks, in order.

    Files of ``data_dir`` come first, then the wheel (kept in the cache, fetched if need be). With a
    limit there are no more documents than that: the first ones, as lm-eval's own limit takes them,
    but without reading the others again and again.
    """
    import yaml

    if data_dir is not None and not data_dir.is_dir():
        raise UserError(f"there is no folder {data_dir} with the data of tasks")
    root = _stock_folder()
    made = {}
    for name in tasks:
        task = STOCK_TASKS[task_name(name)]
        source = _source(task_name(name), data_dir, cache)
        overlay = {
            "include": str(root / task.file),
            "task": task.local_name,
            "tag": None,
            "dataset_path": LOADER,
            "dataset_name": None,
            "dataset_kwargs": {"split": task.split, "limit": limit, **source},
            "training_split": None,
            "validation_split": None,
            "test_split": None,
            f"{task.split}_split": task.split,
        }
        made[task.local_name] = f"{yaml.safe_dump(overlay)}custom_dataset: !function {LOADER}\n"
    folder.mkdir(parents=True, exist_ok=True)
    for local_name, text in made.items():
        write_text(folder / f"{local_name}.yaml", text)
    return list(made)


def _stock_folder() -> Path:
    spec = importlib.util.find_spec("lm_eval")
    if spec is None or spec.origin is None:
        raise UserError("tasks of lm-eval need the package: pip install 'bellmask[eval]'")
    return Path(spec.origin).parent / "tasks"


def _source(task: str, data_dir: Path | None, cache: Path) -> dict[str, Any]:
    """What :func:`load_split` is given: files, or the cache that holds the wheel."""
    if files := _find(data_dir, task):
        return {"files": [str(path.absolute()) for path in files]}
    if task in VALIDATION:
        return {"wheel_task": task, "cache": str(cache.absolute())}
    place = "DIR" if data_dir is None else str(data_dir)
    raise UserError(
        f"{task} is in no wheel: put {task}.jsonl (.json, .parquet, .arrow, or a folder {task} of "
        f"such files) into {place} and give --data-dir {place}; or read it from the hub with "
        "--stock"
    )


def tasks_with_data(data_dir: Path | None) -> list[str]:
    """Our names of the tasks that a folder or the wheel has documents of."""
    return [name for name in STOCK_TASKS if name in VALIDATION or _find(data_dir, name)]


def _find(data_dir: Path | None, task: str) -> list[Path]:
    """A task's files in a folder; CSV files have no types, which lm-eval's tasks rely on."""
    found = [] if data_dir is None else find_in(str(data_dir), task)
    for path in found:
        if path.suffix not in SUFFIXES:
            raise UserError(f"{path}: lm-eval's tasks are read from {', '.join(SUFFIXES)} files")
    return found


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
    return {split: datasets.Dataset.from_list(records[:limit])}


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
    Table(f"lm-eval's tasks{limit}", ["task", "metric", *runs], rows).print()
    for task, note in numbers["notes"].items():
        print(f"* {task}: {note}")
    noise = [
        [name, task, *_noise_cells(one)]
        for name, run in runs.items()
        for task, one in run["noise"].items()
    ]
    if noise:
        columns = ["run", "task", "log-probabilities", "exact", "median error (nats)", "passes"]
        Table("noise of what is not exact, a part of ± above", columns, noise).print()


def _cell(result: Numbers, metric: str, way: str) -> str:
    value, error = result[f"{metric},{way}"], result.get(f"{metric}_stderr,{way}")
    return f"{_number(value)} ± {_number(error)}" if isinstance(error, float) else _number(value)


def _number(value: Any) -> str:
    if not isinstance(value, int | float):
        return str(value)
    return f"{value:.4f}" if abs(value) < 100 else f"{value:.4g}"


def _noise_cells(one: Numbers) -> list[str]:
    error = "-" if one["median_error"] is None else f"{one['median_error']:.3f}"
    return [f"{one['requests']:,}", f"{one['exact_share']:.0%}", error, f"{one['passes']:,}"]


# The command


def _harness() -> ModuleType:
    try:
        from bellmask.evaluate import lm_eval_model as harness
    except ImportError as error:
        if (error.name or "").partition(".")[0] in ("lm_eval", "datasets"):
            raise UserError("lm-eval is not installed: pip install 'bellmask[eval]'") from None
        raise
    return harness


def _given_names(options: HarnessOptions) -> list[str]:
    """Each once, in order."""
    names = [name for given in options.tasks for name in given.split(",") if name]
    if len(set(names)) < len(names):
        raise UserError(f"--tasks names a task twice: {' '.join(names)}")
    return names


def _stock_names(options: HarnessOptions) -> list[str]:
    ours = {name: task.stock_name for name, task in STOCK_TASKS.items()}
    return [ours.get(name, name) for name in _given_names(options) or STOCK_TASKS]


def _write_tasks(options: HarnessOptions, folder: Path) -> list[str]:
    data_dir = None if options.data_dir is None else Path(options.data_dir)
    tasks = _given_names(options) or tasks_with_data(data_dir)
    cache = cache_folder(options.cache)
    return write_overlays(folder, data_dir, cache, tasks, limit=options.limit)


def _load_models(options: HarnessOptions, harness: ModuleType) -> dict[str, BellmaskLM]:
    """All of them before the first is evaluated: some may be refused."""
    return {
        name: harness.BellmaskLM(run=str(folder), **asdict(options.requests))
        for name, folder in by_folder(options.runs).items()
    }


def _conclude(
    options: HarnessOptions, models: Mapping[str, BellmaskLM], found: Mapping[str, Numbers]
) -> None:
    kept = ("results", "n-samples", "n-shot", "versions", "higher_is_better", "lm_eval_version")
    requests = asdict(options.requests)
    del requests["device"]  # decides no score
    notes = {} if options.stock else {t.local_name: t.note for t in STOCK_TASKS.values() if t.note}
    numbers = {
        "bellmask": __version__,
        "data": "hub" if options.stock else "local",
        "notes": {task: note for task, note in notes.items() if _has(found, task)},
        "limit": options.limit,
        "options": requests,
        "runs": {
            name: {**model.get_model_info(), **{key: found[name].get(key) for key in kept}}
            for name, model in models.items()
        },
    }
    folder = _folder(options)
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps(without_nan(numbers), indent=1, allow_nan=False, default=str)
    write_text(folder / "results.json", text + "\n")
    _show(numbers)
    print(f"written: {folder}/results.json")


def _has(found: Mapping[str, Numbers], task: str) -> bool:
    return any(task in one["results"] for one in found.values())


def _folder(options: HarnessOptions) -> Path:
    if options.out:
        return Path(options.out)
    only = Path(options.runs[0])
    return (only if len(options.runs) == 1 and only.is_dir() else Path("runs")) / "lm-eval"


def main(args: Sequence[str]) -> int:
    """Evaluate, print and write; or hand over to lm-eval."""
    if args and args[0] == "--":
        return int(_harness().run_command_line(args[1:]))
    options = parse_command(HarnessOptions, args, command="lm-eval")
    _check(options)
    os.environ.setdefault("TQDM_DISABLE", "1")  # lm-eval's many short bars; ours stay
    harness = _harness()
    if options.write_tasks is not None:
        names = _write_tasks(options, Path(options.write_tasks))
        print(f"written: {options.write_tasks}, for lm-eval's --include_path: {', '.join(names)}")
        return 0
    with tempfile.TemporaryDirectory() as scratch:
        include = None if options.stock else Path(scratch)
        tasks = _stock_names(options) if include is None else _write_tasks(options, include)
        models = _load_models(options, harness)
        found = {
            name: harness.evaluate_tasks(
                model,
                tasks,
                include=include,
                limit=options.limit,
                bootstraps=options.bootstraps,
            )
            for name, model in models.items()
        }
    _conclude(options, models, found)
    return 0
