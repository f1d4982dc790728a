"""Errors a user can mend, and look-ups that help when a name is misspelled.

A :class:`UserError` is printed as one message without a traceback and ends a command with exit
code 2. It says what was given, what is allowed and what to change.
"""

from __future__ import annotations

import difflib
import errno
from collections.abc import Iterable, Mapping
from typing import TypeVar

T = TypeVar("T")
DISK_FAILURES = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
"""Of an OSError: not what the user gave, so the exit code is 1."""


class UserError(ValueError):
    """Something the user gave cannot work; the message says what to change."""


class TrainingError(RuntimeError):
    """Training cannot go on (a non-finite loss, say); the message explains it. Exit code 1."""


class LostProcessError(RuntimeError):
    """Another process of the run is gone; torchrun starts all again where it may. Exit code 1."""


class SavingError(RuntimeError):
    """A checkpoint could not be written; earlier ones are intact. Exit code 1."""


def unknown(kind: str, name: str, allowed: Iterable[str]) -> UserError:
    """The error for a name that is not in a table: nearest names first, then the whole list."""
    names = sorted(allowed)
    near = difflib.get_close_matches(name, names, n=3, cutoff=0.5)
    hint = f"; did you mean {' or '.join(repr(n) for n in near)}?" if near else ""
    return UserError(f"unknown {kind} {name!r}{hint} ({', '.join(names)})")


def check_least(options: object, **least: int) -> None:
    """Refuse options, unless they are None, below their least value."""
    for name, low in least.items():
        value = getattr(options, name)
        if value is not None and value < low:
            raise UserError(f"--{name.replace('_', '-')} must be at least {low}, got {value}")


def look_up(kind: str, name: str, table: Mapping[str, T]) -> T:
    """``table[name]``, or the error of :func:`unknown`."""
    if name not in table:
        raise unknown(kind, name, table)
    return table[name]
