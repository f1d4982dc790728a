"""What comes from outside, made safe to handle: JSON, names of files, text, numbers.

A file may have been written by anybody. Its bytes must not crash a reader, a name inside it must
not lead out of the folder it lies in, and its text must not steer a screen or a page.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeGuard

from bellmask.errors import UserError

MOST_LEVELS = 100
"""Lists in lists in lists: no file of ours comes near, and more would exhaust Python's stack."""


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
    """What a JSON file holds; OSError or ValueError where it cannot be read."""
    if path.exists() and not path.is_file():  # a pipe would be waited for
        raise ValueError("not a file")
    return load_json(path.read_text(encoding="utf-8"))


def inside(folder: Path, name: Any, where: str) -> Path:
    """``folder / name`` for a plain file name; UserError for one that would lead elsewhere.

    ``where`` is the file that gives the name.
    """
    is_name = isinstance(name, str) and name not in ("", ".", "..")
    if not is_name or any(sign in name for sign in "/\\\0\n\r"):
        raise UserError(f"{where} names the file {name!r}; only names in its own folder are read")
    return folder / name


def sound(text: str) -> str:
    """Halves of surrogate pairs, which neither tokenizers nor files take, as question marks."""
    return text.encode("utf-8", "replace").decode("utf-8")


def count_of(text: str) -> int | None:
    """The number that digits write; None for anything else, thousands of digits included."""
    return int(text) if text.isdecimal() and len(text) < 16 else None


def is_whole(value: Any, least: int = 0) -> bool:
    """A whole number, and not one of thousands of digits."""
    return type(value) is int and least <= value < 1 << 63


def is_number(value: Any) -> bool:
    """Whole or not, nan and infinity too; no truth value."""
    return isinstance(value, float) or is_whole(value, -(1 << 63))


def is_finite(value: Any) -> TypeGuard[float]:
    """A number that can be calculated with."""
    return is_number(value) and abs(value) < 1e100


def has_kinds(record: Any, kinds: Mapping[str, type | tuple[type, ...]]) -> bool:
    """An object with these keys, each value of its kind."""
    return isinstance(record, dict) and all(
        name in record and isinstance(record[name], kind) for name, kind in kinds.items()
    )
