"""lm-eval's stock tasks on local data: small YAML files that include the stock ones.

Prompts, metrics and filters stay those of lm-eval; only where the documents come from is another
place: the validation sets inside a wheel, or files in a folder. Nothing asks the hub. Two tasks
are not scored on the split that lm-eval takes, and have names of their own:

openbookqa_validation  OpenBookQA's validation split (stock openbookqa: test)
triviaqa_wikipedia     TriviaQA rc.wikipedia.nocontext (stock triviaqa: rc.nocontext)
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bellmask.data.example_files import Record, read_records
from bellmask.data.tasks import SUFFIXES, VALIDATION, validation_records
from bellmask.downstream.data_sources import find_in
from bellmask.utils.errors import UserError, look_up
from bellmask.utils.files import write_text

LOADER = "bellmask.downstream.overlays.load_split"


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


TASKS = {
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
    names = {n: ours for ours, task in TASKS.items() for n in (task.stock_name, task.local_name)}
    names |= {ours: ours for ours in TASKS}
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
        task = TASKS[task_name(name)]
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
    return [name for name in TASKS if name in VALIDATION or _find(data_dir, name)]


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
