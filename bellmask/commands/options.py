"""Parsing of a subcommand's own options, with the same errors as a run's."""

from __future__ import annotations

import dataclasses
import inspect
import sys
from collections.abc import Sequence
from typing import TypeVar

from bellmask.config import parse_options

T = TypeVar("T")


def parse_command(kind: type[T], args: Sequence[str], *, command: str) -> T:
    """Options of a command, described by a dataclass whose docstring is its help text."""
    import tyro

    if any(arg in ("-h", "--help") for arg in args):
        tyro.cli(
            kind,
            args=["--help"],
            prog=f"bellmask {command}",
            description=inspect.cleandoc(kind.__doc__ or ""),
        )
        sys.exit(0)
    assert dataclasses.is_dataclass(kind)
    return parse_options(kind, None, args, f"bellmask {command}")
