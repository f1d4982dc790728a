"""Files: read safely from untrusted sources; written completely or not at all."""

from __future__ import annotations

import contextlib
import json
import math
import os
import shutil
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeGuard

import numpy as np
from numpy.typing import NDArray

from bellmask.utils.errors import UserError

# Untrusted input: JSON, file names, text, numbers.
#
# A file may come from anywhere. Its bytes must not crash a reader, a name inside it must
# not lead out of its folder, and its text must not control a terminal or a page.

MOST_LEVELS = 100
"""Maximum nesting of JSON: far above any file of ours; more would exhaust Python's stack."""


def load_json(text: str | bytes) -> Any:
    """``json.loads`` that fails with a ValueError and nothing else, however deep the nesting."""
    try:
        found = json.loads(text)
    except RecursionError:
        raise ValueError("its lists or objects are nested too deeply") from None
    if isinstance(found, dict | list) and len(text) > MOST_LEVELS:
        _check_levels(found)
    return found


def _check_levels(found: Any) -> None:
    """Level by level, without recursion."""
    level = [found]
    for _ in range(MOST_LEVELS):
        held = [one.values() if isinstance(one, dict) else one for one in level]
        level = [part for some in held for part in some if isinstance(part, dict | list)]
        if not level:
            return
    raise ValueError("its lists or objects are nested too deeply")


def read_json(path: Path) -> Any:
    """The content of a JSON file; OSError or ValueError if it cannot be read."""
    if path.exists() and not path.is_file():  # a pipe would block
        raise ValueError("not a file")
    return load_json(path.read_text(encoding="utf-8"))


def read_object(path: Path) -> dict[str, Any]:
    """The object in a JSON file; a UserError says what is wrong with the file."""
    try:
        found = read_json(path)
    except (OSError, ValueError) as error:
        raise UserError(f"cannot read {path}: {error}") from None
    if not isinstance(found, dict):
        raise UserError(f"{path} is damaged: expected an object, found {type(found).__name__}")
    return found


def inside(folder: Path, name: Any, where: str) -> Path:
    """``folder / name`` for a plain file name; UserError for one that would lead elsewhere.

    ``where`` is the file that gives the name.
    """
    is_name = isinstance(name, str) and name not in ("", ".", "..")
    if not is_name or any(sign in name for sign in "/\\\0\n\r"):
        raise UserError(f"{where} names the file {name!r}; only files in its own folder are read")
    return folder / name


def sanitize(text: str) -> str:
    """Replace lone surrogates, which neither tokenizers nor files accept, by question marks."""
    return text.encode("utf-8", "replace").decode("utf-8")


def count_of(text: str) -> int | None:
    """The integer in a string of digits; None for anything else, or thousands of digits."""
    return int(text) if text.isdecimal() and len(text) < 16 else None


def is_whole(value: Any, least: int = 0) -> bool:
    """True for an integer that is not thousands of digits long."""
    return type(value) is int and least <= value < 1 << 63


def is_number(value: Any) -> bool:
    """True for an int or float, nan and infinity included, but not for a bool."""
    return isinstance(value, float) or is_whole(value, -(1 << 63))


def is_finite(value: Any) -> TypeGuard[float]:
    """True for a finite number."""
    return is_number(value) and abs(value) < 1e100


def has_kinds(record: Any, kinds: Mapping[str, type | tuple[type, ...]]) -> bool:
    """True for an object with these keys, each value of its type."""
    return isinstance(record, dict) and all(
        name in record and isinstance(record[name], kind) for name, kind in kinds.items()
    )


def without_nan(value: Any) -> Any:
    """Plain values with None for nan, which JSON cannot represent."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {key: without_nan(item) for key, item in value.items()}
    return [without_nan(item) for item in value] if isinstance(value, list) else value


# Atomic folders and files: written under another name, then renamed.


def check_free(path: Path, what: str, *, is_file: bool = False) -> None:
    """Reject a path that exists or cannot be written; an empty folder may be reused."""
    is_empty = path.is_dir() and not is_file and not any(path.iterdir())
    if path.exists() and not is_empty:
        raise UserError(f"{path} exists; choose another --out for {what}")
    parent = path.absolute().parent
    while not parent.exists():
        parent = parent.parent
    if not parent.is_dir() or not os.access(parent, os.W_OK):
        raise UserError(f"cannot write {what} to {path}: {parent} is not a writable folder")


@contextlib.contextmanager
def whole_folder(path: Path, what: str) -> Iterator[Path]:
    """A folder to write into; it is renamed to ``path`` at the end, or removed."""
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
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as scratch:
        yield scratch


def check_folder(path: str | None, option: str = "--out") -> None:
    """Reject a file in place of an output folder."""
    if path is not None and Path(path).exists() and not Path(path).is_dir():
        raise UserError(f"{option} {path} is a file; give a folder")


def scratch_of(path: Path) -> Path:
    """Temporary name of :func:`replacing`, which a killed process can leave behind."""
    return path.with_name(f".{path.name}.writing")


def write_text(path: Path, text: str) -> None:
    """Replace a small file atomically and durably; invalid text becomes question marks."""
    with replacing(path) as scratch, scratch.open("x", encoding="utf-8") as stream:
        stream.write(sanitize(text))
        stream.flush()
        os.fsync(stream.fileno())


def write_json(path: Path, content: Any, **how: Any) -> None:
    """The same of plain values; ``how`` is ``json.dumps``'s."""
    write_text(path, json.dumps(content, indent=1, **how) + "\n")


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A temporary name next to ``path`` to write to; it is renamed to ``path`` at the end."""
    scratch = scratch_of(path)
    scratch.unlink(missing_ok=True)  # left by a kill, or a planted link
    try:
        yield scratch
        os.replace(scratch, path)
    except BaseException as error:
        if isinstance(error, OSError):
            error.filename = error.filename or str(path)  # a failed write does not name the file
        scratch.unlink(missing_ok=True)
        raise


# Untrusted .npz files: no objects, and no arrays that fill memory.

MOST_BYTES = 1 << 30
"""A file of a few kilobytes can claim terabytes; ours have some megabytes."""


def read_arrays(path: Path) -> dict[str, NDArray[Any]]:
    """All arrays of an .npz file; OSError or ValueError where it cannot be read."""
    try:
        with path.open("rb") as stream:
            _check_size(stream)
            with np.load(stream, allow_pickle=False) as stored:
                return {name: stored[name] for name in stored.files}
    except (OSError, ValueError):
        raise
    except Exception as error:  # damaged zips fail in their own, zlib's and struct's ways
        raise ValueError(f"not a complete .npz file ({error or type(error).__name__})") from None


def _check_size(stream: Any) -> None:
    """Checked by the archive's own table and by the declared shape of each array."""
    formats = np.lib.format
    look_at = {(1, 0): formats.read_array_header_1_0, (2, 0): formats.read_array_header_2_0}
    with zipfile.ZipFile(stream) as archive:
        if sum(info.file_size for info in archive.infolist()) > MOST_BYTES:
            raise ValueError(f"its arrays take more than {MOST_BYTES >> 20} MB")
        for info in archive.infolist():
            with archive.open(info) as member:
                read = look_at[np.lib.format.read_magic(member)]
                shape, _, dtype = read(member)
                if dtype.itemsize * math.prod(shape) > info.file_size:
                    raise ValueError(f"{info.filename} is shorter than its header says")
    stream.seek(0)
