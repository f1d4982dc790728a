"""Folders and files that appear whole or not at all: written beside, then renamed."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from bellmask.errors import UserError
from bellmask.outside import sound


def check_free(path: Path, what: str, *, is_file: bool = False) -> None:
    """Refuse a place that is taken or cannot be written; an empty folder is free for a folder."""
    is_empty = path.is_dir() and not is_file and not any(path.iterdir())
    if path.exists() and not is_empty:
        raise UserError(f"{path} exists; choose another --out for {what}")
    parent = path.absolute().parent
    while not parent.exists():
        parent = parent.parent
    if not parent.is_dir() or not os.access(parent, os.W_OK):
        raise UserError(f"cannot write {what} to {path}: {parent} is not a folder one can write to")


@contextlib.contextmanager
def whole_folder(path: Path, what: str) -> Iterator[Path]:
    """A folder beside ``path`` to write into; it gets the name at the end, or is removed."""
    check_free(path, what)
    scratch = path.with_name(f".{path.name}.writing-{os.getpid()}")
    path.parent.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir()
    try:
        yield scratch
        os.replace(scratch, path)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


@contextlib.contextmanager
def whole_file(path: Path, what: str) -> Iterator[Path]:
    """The same for one file."""
    check_free(path, what, is_file=True)
    scratch = path.with_name(f".{path.name}.writing-{os.getpid()}")
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        yield scratch
        os.replace(scratch, path)
    finally:
        scratch.unlink(missing_ok=True)


def check_folder(path: str | None, option: str = "--out") -> None:
    """Refuse a file where results are to go into a folder."""
    if path is not None and Path(path).exists() and not Path(path).is_dir():
        raise UserError(f"{option} {path} is a file; give a folder")


def scratch_of(path: Path) -> Path:
    """Where :func:`replacing` writes first: what a kill can leave behind."""
    return path.with_name(f".{path.name}.writing")


def write_text(path: Path, text: str) -> None:
    """Replace a small file as a whole, durably; what is not text in it becomes question marks."""
    with replacing(path) as scratch, scratch.open("x", encoding="utf-8") as stream:
        stream.write(sound(text))
        stream.flush()
        os.fsync(stream.fileno())


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A name beside ``path`` to write to, free until then; the file gets its own at the end."""
    scratch = scratch_of(path)
    scratch.unlink(missing_ok=True)  # of a kill, or a link that somebody put there
    try:
        yield scratch
        os.replace(scratch, path)
    except BaseException as error:
        if isinstance(error, OSError):
            error.filename = error.filename or str(path)  # a failed write does not say of what
        scratch.unlink(missing_ok=True)
        raise
