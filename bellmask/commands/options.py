"""What subcommands share: options taken off a command line, presets and files resolved."""

from __future__ import annotations

import dataclasses
import inspect
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

from bellmask.config import (
    RunConfig,
    load_config,
    override,
    override_with_file,
)
from bellmask.errors import UserError
from bellmask.parsing import parse_options
from bellmask.presets import PRESETS, preset

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


def wants_help(args: Sequence[str]) -> bool:
    """True when the command line asks for help."""
    return any(arg in ("-h", "--help") for arg in args)


def take_option(args: list[str], name: str) -> list[str]:
    """Remove every ``name VALUE`` (or ``name=VALUE``) from args; return the values."""
    values: list[str] = []
    while True:
        place = next((i for i, a in enumerate(args) if a == name or a.startswith(name + "=")), None)
        if place is None:
            return values
        given = args.pop(place)
        if "=" in given:
            values.append(given.split("=", 1)[1])
        elif place < len(args) and not args[place].startswith("--"):
            values.append(args.pop(place))
        else:
            raise UserError(f"{name} needs a value")


def peek_option(args: Sequence[str], name: str) -> list[str]:
    """The values that ``take_option`` would take."""
    return take_option(list(args), name)


def start_config(name: str) -> RunConfig:
    """The config of a preset, of a config file, or of a run folder."""
    path = Path(name)
    if path.is_dir() and (path / "config.json").exists():
        return load_config(path / "config.json")
    if path.suffix in (".json", ".toml"):
        return load_config(path)
    return preset(name)


def resolve(args: list[str], where: str) -> tuple[str, RunConfig]:
    """Preset < files < command line: (name for the run folder, checked config)."""
    if not args or args[0].startswith("-"):
        raise UserError(f"{where} needs a preset first: {', '.join(PRESETS)}")
    name = args.pop(0)
    config = start_config(name)
    for file in take_option(args, "--config"):
        config = override_with_file(config, Path(file))
    config = override(config, args, where=f"{where} {name}")
    stem = Path(name).parent.name if name.endswith("config.json") else Path(name).stem
    return stem or "run", config.check()
