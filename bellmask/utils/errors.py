"""Errors that a user can fix, and look-ups with suggestions for misspelled names.

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
"""OSErrors that are not the user's input, so the exit code is 1."""


MOST_LISTED = 30
"""Maximum number of names listed in an error; of more names, only the nearest are shown."""


class UserError(ValueError):
    """Invalid input; the message says what to change."""


class TrainingError(RuntimeError):
    """Training cannot continue (e.g. a non-finite loss); the message explains why. Exit code 1."""


class LostProcessError(RuntimeError):
    """Another process of the run has died; torchrun restarts all if allowed. Exit code 1."""


class SavingError(RuntimeError):
    """A checkpoint could not be written; earlier ones are intact. Exit code 1."""


def unknown(kind: str, name: str, allowed: Iterable[str]) -> UserError:
    """The error for an unknown name: nearest names first, then all of them if they are few."""
    names = sorted(allowed)
    is_long = len(names) > MOST_LISTED
    cutoff = 0.5 if len(name) > 3 else 0.7  # short names resemble too many others
    near = difflib.get_close_matches(name, names, n=5 if is_long else 3, cutoff=cutoff)
    hint = f"; did you mean {' or '.join(repr(n) for n in near)}?" if near else ""
    listed = "" if is_long else f" ({', '.join(names)})"
    return UserError(f"unknown {kind} {name!r}{hint}{listed}")


def check_least(options: object, **least: int) -> None:
    """Reject options below their minimum, unless they are None."""
    for name, low in least.items():
        value = getattr(options, name)
        if value is not None and value < low:
            raise UserError(f"--{name.replace('_', '-')} must be at least {low}, got {value}")


def refuse(problems: Mapping[str, object], who: str = "") -> None:
    """UserError with the first of these messages that holds, behind ``who``."""
    for words, is_there in problems.items():
        if is_there:
            raise UserError(f"{who}{words}")


def look_up(kind: str, name: str, table: Mapping[str, T]) -> T:
    """``table[name]``, or the error of :func:`unknown`."""
    if name not in table:
        raise unknown(kind, name, table)
    return table[name]
