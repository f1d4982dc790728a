"""Dataclasses of options and command lines: typed parsing, and the choices that options have."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import re
import types
import typing
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

from bellmask.errors import UserError

T = TypeVar("T")


def _literal_choices(kind: Any) -> tuple[str, ...] | None:
    """The choices of a Literal, also inside Annotated, a union or a tuple; None for other types."""
    origin = typing.get_origin(kind)
    if origin is typing.Literal:
        return typing.get_args(kind)
    if origin in (typing.Annotated, typing.Union, types.UnionType, tuple):
        found = [c for arg in typing.get_args(kind) if (c := _literal_choices(arg))]
        return found[0] if found else None
    return None


def choices_of(config: Any, prefix: str = "") -> Iterator[tuple[str, Any, tuple[str, ...]]]:
    """(option, value, allowed) for every option that is a choice among names."""
    hints = typing.get_type_hints(type(config), include_extras=True)
    for option in dataclasses.fields(config):
        value = getattr(config, option.name)
        if dataclasses.is_dataclass(value):
            yield from choices_of(value, f"{prefix}{option.name}.")
        elif choices := _literal_choices(hints[option.name]):
            if types.NoneType in typing.get_args(hints[option.name]):
                choices = (*choices, "None")
            yield prefix + option.name, value, choices


def _plain(text: str) -> str:
    """The parser's message without colours and frames."""
    text = re.sub(r"\x1b\[[0-9;]*m", "", text)
    lines = [line.strip("│╭╮╰╯─| ") for line in text.splitlines()]
    lines = [line for line in lines if not re.match(r"^[-+]*$|^For full help", line)]
    is_twice = len(lines) > 1 and lines[1].startswith(lines[0])  # a heading that is said again
    return "\n".join(lines[is_twice:])


def parse_options(kind: type[T], default: Any, args: Sequence[str], where: str) -> T:
    """Typed parsing of ``args`` over ``default``; every fault becomes one :class:`UserError`."""
    import tyro

    stream = io.StringIO()
    try:
        with contextlib.redirect_stderr(stream):
            return tyro.cli(kind, default=default, args=list(args), prog=where)
    except SystemExit as stop:
        if stop.code in (0, None):  # help, asked for in the place of a value
            raise UserError(f"{where}: a value is missing before --help or -h") from None
        raise UserError(f"{where}: {_plain(stream.getvalue())}") from None
