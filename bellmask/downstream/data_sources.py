"""Where a downstream task's records come from: ``--data-dir``, a wheel, or the hub; in this order.

The wheel carries six validation splits, so those need no hub. LAMBADA's test split and the stories
come from a folder or the hub. What is scored is always told (``TaskRecords.origin``), and where it
is not the split that lm-eval scores, that too.
"""

from __future__ import annotations

import csv
import hashlib
import json
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bellmask.data.example_files import read_records
from bellmask.data.readers import readable_errors, text_stream
from bellmask.data.tasks import (
    PARQUET_BRANCH,
    SUFFIXES,
    VALIDATION,
    WHEEL,
    validation_records,
)
from bellmask.downstream.prompts import Record
from bellmask.utils.errors import UserError, look_up
from bellmask.utils.libraries import first_line, quiet

TABLES = {".csv": ",", ".tsv": "\t"}
"""Suffix → what is between two columns."""


class MissingData(UserError):
    """A task's records are nowhere to be found (``--skip-missing`` goes on without the task)."""


@dataclass(frozen=True)
class TaskRecords:
    """A task's records and what they are."""

    records: list[Record]
    origin: str
    """Which split from where, for the notes under a table."""
    identity: str
    """Hash of the records' content."""


@dataclass(frozen=True)
class _Place:
    """Where a task's records may be."""

    repository: str
    """On the hub, where every data set has a Parquet copy in a branch of its own."""
    config: str = ""
    split: str = "validation"
    """'' takes all splits of the configuration."""
    other_names: tuple[str, ...] = ()
    """How its files are called in public releases."""
    is_flat: bool = False
    """No lists in its records: it may come as CSV."""
    caution: str = ""
    """How the wheel's and the hub's records differ from what lm-eval scores."""
    advice: str = ""
    """Where else it can be had."""


PLACES = {
    "lambada": _Place(
        "EleutherAI/lambada_openai",
        "default",
        "test",
        other_names=("lambada_test_openai", "lambada_test"),
        is_flat=True,
    ),
    "openbookqa": _Place("allenai/openbookqa", "main", caution="lm-eval scores the test split"),
    "winogrande": _Place("allenai/winogrande", "winogrande_xl", is_flat=True),
    "piqa": _Place("ybisk/piqa", is_flat=True),
    "social_iqa": _Place("allenai/social_i_qa", other_names=("siqa",), is_flat=True),
    "infilling": _Place(
        "juletxara/xstory_cloze",
        "en",
        split="",
        other_names=(
            "rocstories",
            "cloze_test_val__spring2016",
            "cloze_test_val__spring2016 - cloze_test_ALL_val",
        ),
        is_flat=True,
        caution="the English Story Cloze validation 2016 of XStoryCloze, 1871 stories",
        advice=" The release itself (cloze_test_val__spring2016.csv) is free, but must be "
        "requested from its authors: https://cs.rochester.edu/nlp/rocstories. A table with the "
        "columns sentence1 .. sentence5 serves too.",
    ),
    "triviaqa": _Place(
        "mandarjoshi/trivia_qa",
        "rc.wikipedia.nocontext",
        caution="the Wikipedia part, rc.wikipedia.nocontext; lm-eval scores rc.nocontext",
    ),
    "hellaswag": _Place("Rowan/hellaswag", other_names=("hellaswag_val",)),
}


def open_task(task: str, data_dir: str | None, cache: Path) -> TaskRecords:
    """A task's records; :class:`MissingData` where neither folder, wheel nor hub has them."""
    place = look_up("downstream task", task, PLACES)
    caution = f" ({place.caution})" if place.caution else ""
    if data_dir is not None and (paths := find_in(data_dir, task)):
        records = [record for path in paths for record in _read(path)]
        others = f" and {len(paths) - 1} more" if len(paths) > 1 else ""
        return _loaded(task, records, f"{paths[0].name}{others} of --data-dir")
    reasons = [] if data_dir is None else [f"{data_dir} has no {_looked_for(task)}"]
    origins: dict[str, Callable[[], list[Record]]] = {}
    if task in VALIDATION:
        label = f"validation split from the wheel {WHEEL.name} {WHEEL.version}{caution}"
        origins[label] = lambda: validation_records(task, cache)
    label = f"{place.split or 'all'} of {place.repository} on the hub{caution}"
    origins[label] = lambda: list(_on_hub(place, task))
    for origin, load in origins.items():
        try:
            return _loaded(task, load(), origin)
        except UserError as error:
            reasons.append(str(error))
    raise MissingData(
        f"{task}: no records. {'; '.join(reasons)}. Give a folder with {_looked_for(task)} by "
        f"--data-dir, or leave the task out.{place.advice}"
    )


def _loaded(task: str, records: list[Record], origin: str) -> TaskRecords:
    if not records:
        raise UserError(f"{task}: there is not one record in {origin}")
    digest = hashlib.sha256()
    for record in records:
        digest.update(json.dumps(record, sort_keys=True, default=str).encode() + b"\n")
    return TaskRecords(records, origin, digest.hexdigest())


# --- a folder --------------------------------------------------------------------------------


def find_in(data_dir: str, task: str) -> list[Path]:
    """The files of a task in a folder: <task>.jsonl (and so on), or all in a folder <task>.

    Of a folder with several splits, only the files of the one that is scored.
    """
    root, place = Path(data_dir), PLACES[task]
    if not root.is_dir():
        raise UserError(f"--data-dir {data_dir}: there is no such folder")
    names = (task, *place.other_names)
    paths = [root / f"{name}{suffix}" for name in names for suffix in _suffixes(task)]
    found = [path for path in paths if path.is_file()]
    folders = [root / name for name in names if (root / name).is_dir()]
    if len(found) + len(folders) > 1:
        both = " and ".join(path.name for path in (*found, *folders))
        raise UserError(f"--data-dir {data_dir} has {both} for {task}; keep one")
    if folders:
        inside = sorted(p for p in folders[0].iterdir() if p.suffix in _suffixes(task))
        inside = [p for p in inside if p.name not in ("dataset_info.json", "state.json")]
        return _of_split(inside, place.split or "validation", folders[0])
    return found


SPLITS = {
    "train": r"train(ing)?",
    "validation": r"validation|valid|val|dev|eval",
    "test": r"test",
}


def _of_split(paths: list[Path], split: str, folder: Path) -> list[Path]:
    """Files named after the split, else all, if none is named after the training split."""
    if named := [path for path in paths if _names(path, split)]:
        return named
    if training := [path for path in paths if _names(path, "train")]:
        raise UserError(
            f"{folder} has {training[0].name} but no {split} split, which is what is scored"
        )
    return paths


def _names(path: Path, split: str) -> bool:
    """Whether a file's name has the split as a word of its own: 'validation-00000-of-00001'."""
    return bool(re.search(rf"(?<![a-z])({SPLITS[split]})(?![a-z])", path.name.lower()))


def _suffixes(task: str) -> tuple[str, ...]:
    return (*SUFFIXES, *TABLES) if PLACES[task].is_flat else SUFFIXES


def _looked_for(task: str) -> str:
    """What a folder may hold for a task, in words."""
    first, *rest = _suffixes(task)
    files = f"{task}{first} ({', '.join(rest)}, or a folder {task} of such files)"
    return " or ".join([files, *PLACES[task].other_names])


def _read(path: Path) -> Iterator[Record]:
    return _read_table(path) if path.suffix in TABLES else read_records(path)


def _read_table(path: Path) -> Iterator[Record]:
    """The rows of a table with a header, each with all of its columns."""
    with (
        readable_errors(str(path)),
        path.open("rb") as stream,
        text_stream(stream, "") as lines,
    ):
        rows = csv.DictReader(lines, delimiter=TABLES[path.suffix])
        try:
            for number, row in enumerate(rows, start=1):
                if None in row or None in row.values():
                    width = len(rows.fieldnames or ())
                    raise UserError(f"{path}, row {number} has not {width} columns as the header")
                yield dict(row)
        except csv.Error as error:
            raise UserError(f"{path} is not the table that was expected: {error}") from None


# --- the hub ---------------------------------------------------------------------------------


def _on_hub(place: _Place, task: str) -> Iterator[Record]:
    """The Parquet files of a configuration and split, downloaded once by the hub's own cache."""
    try:
        import huggingface_hub as hub
    except ImportError:
        raise UserError(
            f"{place.repository} comes from the hub, which needs huggingface_hub: "
            "pip install 'bellmask[eval]'"
        ) from None
    print(f"note: {task}: looking for {place.repository} on the hub", file=sys.stderr)
    where: dict[str, Any] = {"repo_type": "dataset", "revision": PARQUET_BRANCH}
    try:
        with quiet():
            names = hub.list_repo_files(place.repository, **where)
            wanted = _of_place(names, place)
            paths = [Path(hub.hf_hub_download(place.repository, name, **where)) for name in wanted]
    except Exception as error:
        raise UserError(
            f"cannot read {place.repository} on the hub ({first_line(error)})"
        ) from None
    for path in paths:
        yield from read_records(path)


def _of_place(names: Sequence[str], place: _Place) -> list[str]:
    """The Parquet files of a configuration ('' : there is only one) and split, in order."""
    folder = f"{place.config}/" if place.config else ""
    found = sorted(n for n in names if n.startswith(folder) and n.endswith(".parquet"))
    if place.split:
        found = [name for name in found if _names(Path(name.replace("/", "-")), place.split)]
    if not found:
        raise UserError(f"no Parquet file of {folder}{place.split} among its {len(names)} files")
    return found
