"""Records (dicts) from JSONL, JSON, Parquet and Arrow files or the hub, and examples from records.

A record is a prompt with its response under one of a few well-known pairs of column names, or a
list of messages with roles. What it is, is told by its columns; anything else is refused by name.
"""

from __future__ import annotations

import hashlib
import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from bellmask.data.formats import kind_of, parse_json, readable_errors, text_stream
from bellmask.data.messages import Example, ExampleSource, Numbered, turns
from bellmask.data.sharegpt import tidy
from bellmask.data.sources import find_files, find_on_hub
from bellmask.utils.errors import UserError
from bellmask.utils.files import sound

Record = dict[str, Any]
PAIRS = {"prompt": "response", "instruction": "output", "question": "answer"}
"""Column of the prompt → column of the response. ``input``, if any, follows an instruction."""
LISTS = {"messages": ("role", "content"), "conversations": ("from", "value")}
"""Column of the turns → keys of (role, text) in a turn."""


@dataclass(frozen=True)
class RecordSource:
    """Records, and where they come from."""

    name: str
    identity: str
    read: Callable[[], Iterator[Record]]
    origin: dict[str, str]


# --- reading ---------------------------------------------------------------------------------


def read_records(path: Path) -> Iterator[Record]:
    """The records of a file, told apart by its name: .jsonl, .json (a list, or a record per line),
    .parquet, .arrow; the first two also .gz, .xz, .zst.
    """
    if path.suffix in (".parquet", ".arrow"):
        yield from _read_table(path)
    elif kind_of(path.name) == "json":
        compression = path.suffix if path.suffix in (".gz", ".xz", ".zst") else ""
        with (
            readable_errors(str(path)),
            path.open("rb") as stream,
            text_stream(stream, compression) as lines,
        ):
            yield from _read_json(lines, str(path))
    else:
        raise UserError(f"{path}: examples come as .jsonl, .json, .parquet or .arrow files")


def _read_json(lines: Any, name: str) -> Iterator[Record]:
    first = next((line for line in lines if line.strip()), "")
    if first.lstrip().startswith("["):
        for number, row in enumerate(parse_json(first + lines.read(), name), start=1):
            yield _record(row, f"{name}, record {number}")
        return
    for number, line in enumerate((first, *lines), start=1):
        if line.strip():
            place = f"{name}, record {number}"
            yield _record(parse_json(line, place), place)


def _record(row: Any, place: str) -> Record:
    if not isinstance(row, dict):
        raise UserError(f"{place} is not a JSON object")
    return row


def _read_table(path: Path) -> Iterator[Record]:
    try:
        import pyarrow.parquet
    except ImportError:
        raise UserError(f"{path.suffix} files need pyarrow: pip install 'bellmask[text]'") from None
    with readable_errors(str(path)), path.open("rb") as stream:
        if path.suffix == ".arrow":
            yield from read_arrow(stream)
            return
        for batch in pyarrow.parquet.ParquetFile(stream).iter_batches(batch_size=256):
            yield from batch.to_pylist()


def read_arrow(stream: BinaryIO) -> Iterator[Record]:
    """The records of an Arrow IPC stream."""
    import pyarrow

    with pyarrow.ipc.open_stream(stream) as batches:
        for batch in batches:
            yield from batch.to_pylist()


def identity_of(parts: Sequence[str]) -> str:
    """A hash of what pins a source."""
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def record_files(paths: Sequence[Path], name: str) -> RecordSource:
    """Files one after another; content and kind of file are the identity, not names."""
    root = os.path.commonpath([path.absolute().parent for path in paths])
    origin = {}
    for path in paths:
        with readable_errors(str(path)), path.open("rb") as stream:
            mark = hashlib.file_digest(stream, "sha256").hexdigest()
        origin[os.path.relpath(path.absolute(), root)] = mark
    marks = [f"{p.suffix}:{mark}" for p, mark in zip(paths, origin.values(), strict=True)]

    def read() -> Iterator[Record]:
        for path in paths:
            yield from read_records(path)

    return RecordSource(name, identity_of(marks), read, origin)


def hub_records(
    name: str, repository: str, config: str | None, split: str, revision: str | None = None
) -> RecordSource:
    """A split of a data set on the hub, streamed; its commit is its identity."""
    found = find_on_hub(
        name, repository, config, split, revision, "instead: --sft.train FILE or tasks:FOLDER"
    )
    return RecordSource(name, identity_of([found.mark]), found.rows, found.origin)


# --- records → examples ----------------------------------------------------------------------


def text_of(record: Record, column: str, place: str) -> str:
    """A column's text ('' where there is none); half surrogate pairs become question marks."""
    value = record.get(column)
    if value is None:
        return ""
    if not isinstance(value, str):
        raise UserError(f"{place}: column {column!r} holds {type(value).__name__}, not text")
    return sound(value)


def examples_of(record: Record, counts: Counter[str], place: str) -> tuple[Example, ...]:
    """The examples of a record: one, or one per assistant turn; none if it has no response."""
    for column, (role, text) in LISTS.items():
        if column in record:
            listed = record[column]
            if not isinstance(listed, list) or not all(isinstance(turn, dict) for turn in listed):
                raise UserError(f"{place}: {column!r} is not a list of turns with roles")
            said = [(str(turn.get(role)), text_of(turn, text, place)) for turn in listed]
            return turns(tidy(said, counts))
    for asked, answered in PAIRS.items():
        if asked in record and answered in record:
            prompt, response = (text_of(record, column, place) for column in (asked, answered))
            extra = text_of(record, "input", place) if asked == "instruction" else ""
            prompt = f"{prompt}\n\n{extra}" if extra.strip() else prompt
            if not response.strip():
                counts["left out: no response"] += 1
                return ()
            return (Example.plain(prompt, response),)
    allowed = [f"{asked} and {answered}" for asked, answered in PAIRS.items()]
    raise UserError(
        f"{place} has the columns {', '.join(map(str, record)) or '(none)'}; an example needs "
        f"{', or '.join([*allowed, *LISTS])}"
    )


def from_records(source: RecordSource) -> ExampleSource:
    """Examples of records by their columns."""

    def read(counts: Counter[str]) -> Iterator[Numbered]:
        for number, record in enumerate(source.read()):
            place = f"{source.name}, record {number + 1}"
            for example in examples_of(record, counts, place):
                yield number, example

    return ExampleSource(source.name, f"records-1/{source.identity}", read, source.origin)


def example_files(pattern: str) -> ExampleSource:
    """Examples of local files (path or glob)."""
    return from_records(record_files(find_files(pattern), pattern))


def hub_named(name: str) -> RecordSource:
    """The records of ``[sharegpt:]hub:OWNER/NAME[:CONFIG[:SPLIT]]``."""
    _, _, place = name.partition("hub:")
    repository, _, rest = place.partition(":")
    config, _, split = rest.partition(":")
    if repository.count("/") != 1:
        raise UserError(f"{name!r}: write hub:OWNER/NAME, hub:OWNER/NAME:CONFIG or with :SPLIT")
    return hub_records(name, repository, config or None, split or "train")
