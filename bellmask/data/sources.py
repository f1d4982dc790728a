"""Where documents come from: local files, a file inside a wheel, or a data set on the hub.

A source knows what it is (its identity, part of every cache key) before it is read, can be read any
number of times, and yields the same pieces each time.
"""

from __future__ import annotations

import glob
import hashlib
import io
import os
import tarfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bellmask.data.formats import (
    RULES,
    Piece,
    kind_of,
    read_file,
    read_stream,
    readable_errors,
)
from bellmask.data.wheels import Wheel
from bellmask.utils.errors import UserError
from bellmask.utils.libraries import first_line


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
                found = RULES[row_rule](piece.text for piece in found)
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
class OnHub:
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
) -> OnHub:
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

    return OnHub(place, str(commit), rows)


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
        return RULES[line_rule](texts())

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


def is_hub_name(name: str) -> bool:
    """``hub:owner/name`` or ``hub:owner/name:config``."""
    return name.startswith("hub:") and not os.path.exists(name)
