"""Results on disk by content key, so that nothing is computed or requested twice.

A :class:`Store` is a file that only grows, one JSON object per line, ``{"key": ..., ...}``. A line
is on disk before :meth:`Store.add` returns; the torn last line of a process that was killed is
dropped, and its result is computed again. A :class:`FileStore` is a folder with a file per key, for
arrays.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from bellmask.utils.errors import UserError
from bellmask.utils.files import load_json

T = TypeVar("T")


def content_key(*parts: Any) -> str:
    """A hash of everything that determines a result."""
    text = json.dumps(parts, sort_keys=True, ensure_ascii=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:24]


class Store(dict[str, dict[str, Any]]):
    """Records by key; of two with the same key the first counts.

    ``is_right`` says whether a record of the file is valid; others are damaged.
    """

    def __init__(
        self, path: Path | None, is_right: Callable[[dict[str, Any]], bool] = lambda record: True
    ) -> None:
        """Without a path, records are only in memory."""
        super().__init__()
        self.path, self._is_right = path or Path(), is_right
        self._is_in_memory = path is None
        self._is_torn = False
        if path is not None and path.exists():
            for record in self._read():
                self.setdefault(record["key"], record)

    def _read(self) -> Iterator[dict[str, Any]]:
        lines = self.path.read_bytes().split(b"\n")
        self._is_torn = lines[-1] != b""
        for number, line in enumerate(lines[:-1], start=1):
            try:
                record = load_json(line)
                if not isinstance(record["key"], str) or not self._is_right(record):
                    raise TypeError
            except (ValueError, KeyError, TypeError):
                if line:  # an empty one follows a torn one
                    raise UserError(f"{self.path} is damaged: delete line {number}") from None
            else:
                yield record

    def missing(self, keys: Iterable[str]) -> list[str]:
        """Missing keys, each once, in order."""
        return [key for key in dict.fromkeys(keys) if key not in self]

    def get_or_make(self, key: str, make: Callable[[], Mapping[str, Any]]) -> dict[str, Any]:
        """The record of a key; created and stored if missing."""
        if key not in self:
            self.add([{"key": key, **make()}])
        return self[key]

    def add(self, records: Iterable[Mapping[str, Any]]) -> None:
        """Store records, each with its ``key``; they are on disk when this returns."""
        new = [dict(record) for record in records if record["key"] not in self]
        if new and not self._is_in_memory:
            self._append(new)
        for record in new:
            self.setdefault(record["key"], record)

    def _append(self, records: Iterable[Mapping[str, Any]]) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        lines = b"".join(json.dumps(r, ensure_ascii=True).encode() + b"\n" for r in records)
        if self._is_torn:
            with self.path.open("r+b") as stream:
                content = stream.read()
                stream.truncate(content.rfind(b"\n") + 1)
        self._is_torn = True  # until all of it is there
        with self.path.open("ab") as stream:
            stream.write(lines)
            stream.flush()
            os.fsync(stream.fileno())
        self._is_torn = False


@dataclass(frozen=True)
class FileStore(Generic[T]):
    """Values by key, each in a file of its own; a damaged file counts as missing.

    ``write`` writes beside and renames; ``read`` fails with an OSError or a ValueError.
    """

    folder: Path
    suffix: str
    read: Callable[[Path], T]
    write: Callable[[T, Path], object]

    def get(self, key: str) -> T | None:
        """The value of a key; None if it is missing or damaged."""
        try:
            return self.read(self._path(key))
        except (OSError, ValueError):
            return None

    def get_or_make(self, key: str, make: Callable[[], T]) -> T:
        """The value of a key; created and stored if missing."""
        found = self.get(key)
        if found is None:
            found = make()
            self.folder.mkdir(parents=True, exist_ok=True)
            self.write(found, self._path(key))
        return found

    def _path(self, key: str) -> Path:
        return self.folder / f"{key}{self.suffix}"
