"""``bellmask lm-eval``: tasks of lm-eval on runs, from local data or the hub; and its own command.

``bellmask lm-eval -- ARGS`` hands everything behind the dashes to lm-eval.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from bellmask.config.presets import parse_command
from bellmask.downstream.harness_options import RequestOptions
from bellmask.utils.errors import UserError
from bellmask.utils.files import check_folder

if TYPE_CHECKING:
    from types import ModuleType

    from bellmask.downstream.harness import BellmaskLM

Numbers = dict[str, Any]


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
    device: str = "auto"
    """auto, cpu, cuda, ..."""


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


def run(args: Sequence[str]) -> int:
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


def _harness() -> ModuleType:
    try:
        from bellmask.downstream import harness
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
    from bellmask.downstream.overlays import TASKS

    ours = {name: task.stock_name for name, task in TASKS.items()}
    return [ours.get(name, name) for name in _given_names(options) or TASKS]


def _write_tasks(options: HarnessOptions, folder: Path) -> list[str]:
    from bellmask.data.readers import cache_folder
    from bellmask.downstream.overlays import tasks_with_data, write_overlays

    data_dir = None if options.data_dir is None else Path(options.data_dir)
    tasks = _given_names(options) or tasks_with_data(data_dir)
    cache = cache_folder(options.cache)
    return write_overlays(folder, data_dir, cache, tasks, limit=options.limit)


def _load_models(options: HarnessOptions, harness: ModuleType) -> dict[str, BellmaskLM]:
    """All of them before the first is evaluated: some may be refused."""
    from bellmask.analyze.runs import by_folder

    device = None if options.device == "auto" else options.device
    return {
        name: harness.BellmaskLM(run=str(folder), device=device, **asdict(options.requests))
        for name, folder in by_folder(options.runs).items()
    }


# --- results ---------------------------------------------------------------------------------


def _conclude(
    options: HarnessOptions, models: Mapping[str, BellmaskLM], found: Mapping[str, Numbers]
) -> None:
    from bellmask import __version__
    from bellmask.compare.results import without_nan
    from bellmask.downstream.overlays import TASKS
    from bellmask.utils.files import write_text

    kept = ("results", "n-samples", "n-shot", "versions", "higher_is_better", "lm_eval_version")
    notes = {} if options.stock else {t.local_name: t.note for t in TASKS.values() if t.note}
    numbers = {
        "bellmask": __version__,
        "data": "hub" if options.stock else "local",
        "notes": {task: note for task, note in notes.items() if _has(found, task)},
        "limit": options.limit,
        "options": asdict(options.requests),
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


def _show(numbers: Numbers) -> None:
    from bellmask.utils.console import print_plain_table

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
    print_plain_table(f"lm-eval's tasks{limit}", ["task", "metric", *runs], rows)
    for task, note in numbers["notes"].items():
        print(f"* {task}: {note}")
    noise = [
        [name, task, *_noise_cells(one)]
        for name, run in runs.items()
        for task, one in run["noise"].items()
    ]
    if noise:
        columns = ["run", "task", "log-probabilities", "exact", "median error (nats)", "passes"]
        print_plain_table("noise of what is not exact, a part of ± above", columns, noise)


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
