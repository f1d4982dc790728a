"""Files → pieces of documents: text, JSONL, CSV and Parquet, also compressed.

A reader yields :class:`Piece` objects and never holds more than about a megabyte of one document,
so memory does not grow with a file. Compression is told by the last suffix (.gz, .xz, .zst), the
format by the one before.
"""

from __future__ import annotations

import contextlib
import csv
import gzip
import io
import json
import lzma
import re
import tarfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from bellmask.utils.errors import UserError, look_up
from bellmask.utils.files import count_of, sound

PIECE_CHARACTERS = 1 << 20
"""A long document is handed on in pieces of about this size, cut after a line."""


@dataclass(frozen=True)
class Piece:
    """Text of a document; the document goes on in the next piece unless this one ends it."""

    text: str
    is_end: bool = True


Rule = Callable[[Iterable[str]], Iterator[Piece]]


def _whole(lines: Iterable[str]) -> Iterator[Piece]:
    """All lines are one document."""
    held: list[str] = []
    size = 0
    for line in lines:
        # cut only between two lines that neither end nor begin with white space: every
        # tokenizer's words end there anyway
        before = held[-1].rstrip("\r\n") if held else ""
        is_clean = before != "" and not before[-1].isspace() and not line[:1].isspace()
        if size >= PIECE_CHARACTERS and is_clean and held[-1].endswith("\n"):
            yield Piece("".join(held), is_end=False)
            held, size = [], 0
        held.append(line)
        size += len(line)
    if held:
        yield Piece("".join(held))


def _by_line(lines: Iterable[str]) -> Iterator[Piece]:
    """Each line that is not blank is a document, without its end of line."""
    for line in lines:
        if line.strip():
            yield Piece(line.rstrip("\r\n"))


def _between(is_border: Callable[[str], bool], keep_border: bool) -> Rule:
    """Documents between border lines; ``keep_border`` makes the line the next one's first."""

    def rule(lines: Iterable[str]) -> Iterator[Piece]:
        held: list[str] = []
        for line in lines:
            if not is_border(line):
                held.append(line)
                continue
            if any(part.strip() for part in held):
                yield Piece("".join(held) if keep_border else "".join(held).strip("\r\n"))
                held = []
            held = [*held, line] if keep_border else []
        if any(part.strip() for part in held):
            yield Piece("".join(held) if keep_border else "".join(held).strip("\r\n"))

    return rule


_HEADING = re.compile(r"^ = [^=\s](?:.*[^=\s])? = $")

RULES: dict[str, Rule] = {
    "file": _whole,
    "line": _by_line,
    "paragraph": _between(lambda line: not line.strip(), keep_border=False),
    "article": _between(lambda line: bool(_HEADING.match(line.rstrip("\r\n"))), keep_border=True),
    "endoftext": _between(lambda line: line.strip() == "<|endoftext|>", keep_border=False),
}
"""What one document is in plain text."""


class _ZstdReader(io.RawIOBase):
    """Decompressed frames; unlike the library's own reader it notices when the last one is cut."""

    CHUNK = 1 << 12
    """Bytes unpacked at once: even of nothing but repetitions they give 128 MB at most."""

    def __init__(self, stream: BinaryIO, decompressor: Any) -> None:
        self._stream, self._decompressor = stream, decompressor
        self._frame = decompressor.decompressobj()
        self._ready = memoryview(b"")
        self._is_inside = False

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._ready:
            chunk = self._stream.read(self.CHUNK)
            if not chunk:
                if self._is_inside:
                    raise EOFError("the compressed file ended before its end mark was reached")
                return 0
            self._feed(chunk)
        count = min(len(buffer), len(self._ready))
        buffer[:count], self._ready = self._ready[:count], self._ready[count:]
        return count

    def _feed(self, chunk: bytes) -> None:
        ready = []
        while chunk:
            ready.append(self._frame.decompress(chunk))
            self._is_inside = not self._frame.eof
            chunk = self._frame.unused_data if self._frame.eof else b""
            if self._frame.eof:
                self._frame = self._decompressor.decompressobj()
        self._ready = memoryview(b"".join(ready))


def _decompress(stream: BinaryIO, suffix: str) -> BinaryIO:
    if suffix == ".gz":
        return gzip.GzipFile(fileobj=stream)  # type: ignore[return-value]
    if suffix == ".xz":
        return lzma.LZMAFile(stream)  # type: ignore[return-value]
    if suffix == ".zst":
        try:
            import zstandard
        except ImportError:
            raise UserError(".zst files need zstandard: pip install 'bellmask[text]'") from None
        return io.BufferedReader(_ZstdReader(stream, zstandard.ZstdDecompressor()))  # type: ignore[return-value]
    return stream


_COMPRESSED = (".gz", ".xz", ".zst")


@contextlib.contextmanager
def readable_errors(name: str) -> Iterator[None]:
    """Turn what can be wrong with a file's bytes into one message."""
    try:
        yield
    except UnicodeDecodeError as error:
        bad = error.object[error.start]
        raise UserError(f"{name} is not UTF-8 text: it holds the byte 0x{bad:02x}") from None
    except (EOFError, gzip.BadGzipFile, lzma.LZMAError, zlib.error, tarfile.TarError) as error:
        raise UserError(f"{name} is truncated or damaged ({error})") from None
    except OSError as error:
        raise UserError(f"cannot read {name}: {error.strerror or error}") from None
    except Exception as error:
        if type(error).__module__.split(".")[0] in ("zstd", "zstandard", "pyarrow"):
            raise UserError(f"{name} is truncated or damaged ({error})") from None
        raise


def parse_json(text: str, place: str) -> Any:
    """What a JSON text holds; ``place`` is named where it cannot be read."""
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise UserError(f"{place} is not JSON: {error}") from None
    except (ValueError, RecursionError) as error:  # a number without end, lists in lists in lists
        raise UserError(f"{place} cannot be read: {error}") from None


def _suffixes(path: Path) -> tuple[str, str]:
    """(format suffix, compression suffix or nothing)."""
    if path.suffix in _COMPRESSED:
        return Path(path.stem).suffix, path.suffix
    return path.suffix, ""


def kind_of(name: str) -> str:
    """How a file of this name is read: text, json, csv or parquet."""
    kind, _ = _suffixes(Path(name))
    table = {".jsonl": "json", ".ndjson": "json", ".json": "json", ".csv": "csv"}
    return "parquet" if name.endswith(".parquet") else table.get(kind, "text")


def text_stream(stream: BinaryIO, compression: str) -> io.TextIOWrapper:
    """Strict UTF-8 text of a possibly compressed stream, line ends kept, a byte-order mark not."""
    raw = _decompress(stream, compression)
    return io.TextIOWrapper(raw, encoding="utf-8-sig", errors="strict", newline="")


def _column(row: dict[str, Any], column: str, name: str) -> str:
    if column not in row:
        raise UserError(f"{name} has no column {column!r}; it has: {', '.join(map(str, row))}")
    value = row[column]
    if isinstance(value, list):
        value = "\n".join(map(str, value))
    if not isinstance(value, str):
        raise UserError(f"{name}: column {column!r} holds {type(value).__name__}, not text")
    # JSON can hold half of a surrogate pair, which is not text: it becomes a question mark
    return sound(value)


def _read_json_lines(lines: Iterable[str], column: str, name: str) -> Iterator[Piece]:
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        row = parse_json(line, f"{name}, line {number}")
        if not isinstance(row, dict):
            raise UserError(f"{name}, line {number} is not a JSON object")
        yield Piece(_column(row, column, f"{name}, line {number}"))


def _read_csv(lines: Iterable[str], column: str, name: str) -> Iterator[Piece]:
    """Columns by name where there is a header, else by number from 0; several joined with '+'."""
    wanted = column.split("+")
    csv.field_size_limit(1 << 30)
    rows = (row for row in csv.reader(lines) if row)
    try:
        numbers = [number for part in wanted if (number := count_of(part)) is not None]
        if len(numbers) == len(wanted):
            for row in rows:
                yield Piece(" ".join(row[number] for number in numbers))
            return
        header = next(rows, [])
        for row in rows:
            named = dict(zip(header, row))
            yield Piece(" ".join(_column(named, part, name) for part in wanted))
    except (csv.Error, IndexError) as error:
        raise UserError(f"{name} is not the CSV that was expected: {error}") from None


def _read_parquet(path: Path, column: str) -> Iterator[Piece]:
    try:
        import pyarrow.parquet
    except ImportError:
        raise UserError("Parquet files need pyarrow: pip install 'bellmask[text]'") from None
    with readable_errors(str(path)):
        table = pyarrow.parquet.ParquetFile(path)
        names = table.schema_arrow.names
        if column not in names:
            raise UserError(f"{path} has no column {column!r}; it has: {', '.join(names)}")
        for batch in table.iter_batches(batch_size=256, columns=[column]):
            for value in batch.column(0).to_pylist():
                yield Piece(_column({column: value}, column, str(path)))


def read_stream(
    stream: BinaryIO, file_name: str, *, rule: str, column: str, label: str
) -> Iterator[Piece]:
    """Pieces of the documents in an open file, told apart by its name."""
    kind, compression = _suffixes(Path(file_name))
    with readable_errors(label), text_stream(stream, compression) as lines:
        if kind in (".jsonl", ".ndjson", ".json"):
            yield from _read_json_lines(lines, column, label)
        elif kind == ".csv":
            yield from _read_csv(lines, column, label)
        else:
            yield from look_up("document rule", rule, RULES)(lines)


def read_file(path: Path, *, rule: str, column: str) -> Iterator[Piece]:
    """Pieces of the documents in a file."""
    if path.suffix == ".parquet":
        yield from _read_parquet(path, column)
        return
    with readable_errors(str(path)), path.open("rb") as stream:
        yield from read_stream(stream, path.name, rule=rule, column=column, label=str(path))
