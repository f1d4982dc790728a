"""Command lines: each subcommand is a dataclass parsed by tyro; some also take options of a run.

This file also has the two commands about options themselves, ``bellmask config`` and ``presets``.
"""

from __future__ import annotations

import contextlib
import inspect
import io
import json
import re
import sys
import typing
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, TextIO, TypeVar

import tyro

from bellmask.config.config import (
    RunConfig,
    load_config,
    override,
    override_with_file,
    parse_options,
)
from bellmask.config.options import DataOptions
from bellmask.config.presets import PRESETS, preset
from bellmask.utils.console import tell
from bellmask.utils.errors import UserError, look_up

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class PresetOptions:
    """Options of commands that build a run."""

    preset: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="PRESET")]
    """A name from 'bellmask presets', a run folder, or its config.json."""
    config: Annotated[
        tyro.conf.UseAppendAction[tuple[str, ...]], tyro.conf.arg(metavar="FILE")
    ] = ()
    """JSON or TOML file of options, applied after the preset and before the command line."""


EVERY_COMMAND = (
    "Every command takes --quiet (only results, warnings and errors) and --verbose (more messages)."
)


def wants_help(args: Sequence[str]) -> bool:
    """True when the command line asks for help."""
    return any(arg in ("-h", "--help") for arg in args)


def parse_command(kind: type[T], args: Sequence[str], *, command: str) -> T:
    """Options of a command, described by a dataclass whose docstring is its help text."""
    if wants_help(args):
        _print_help(kind, None, command)
        sys.exit(0)
    return parse_options(kind, None, args, f"bellmask {command}")


def parse_run_command(
    kind: type[T], args: Sequence[str], *, command: str, needs: str = ""
) -> tuple[T, list[str]]:
    """Split arguments into (a command's own options, options of a run).

    Positional arguments come before the first option. Options of a run are applied later, by
    :func:`resolve`; the help shows them with the defaults of the preset that is given before it.
    """
    needs = needs or f"a preset as its first argument: {', '.join(families())}, ..."
    return _parse_both(
        kind, args, command, needs, lambda name: start_config(name) if name else RunConfig()
    )


@dataclass(frozen=True)
class DataSection:
    """Data options of a run."""

    data: DataOptions = field(default_factory=DataOptions)


def parse_data_command(kind: type[T], args: Sequence[str], *, command: str) -> tuple[T, list[str]]:
    """Split arguments into (a command's own options, ``--data`` options)."""
    needs = "a corpus or a path as its first argument ('bellmask data list')"
    own, rest = _parse_both(kind, args, command, needs, lambda name: DataSection())
    for name in (arg.partition("=")[0] for arg in rest if arg.startswith("--")):
        if not name.startswith("--data."):
            raise UserError(f"bellmask {command}: unknown option {name}; it takes --data options")
    return own, rest


def _parse_both(
    kind: type[T], args: Sequence[str], command: str, needs: str, find: Callable[[str], Any]
) -> tuple[T, list[str]]:
    """(a command's own options, others); help also shows the options that ``find`` returns."""
    own, rest = split_args(kind, args, command)
    name = "" if not own or own[0].startswith("-") else own[0]
    if wants_help(args):
        default = find(name)
        _print_help(kind, None, command)
        _print_help(type(default), default, f"{command} ...")
        sys.exit(0)
    if not name:
        raise UserError(f"bellmask {command} needs {needs}")
    return parse_options(kind, None, own, f"bellmask {command}"), rest


def _print_help(kind: Any, default: Any, command: str) -> None:
    about = inspect.cleandoc(kind.__doc__ or "").replace("Examples:\n", "Examples:\n\n")
    about = "\n\n".join(" ".join(part.split()) for part in about.split("\n\n"))
    if kind is RunConfig:
        about = "Options of a run."
    told = _HelpText(sys.stdout)
    named: dict[str, Any] = {"prog": f"bellmask {command}", "description": about}
    hush = contextlib.suppress(SystemExit)
    with hush, _joined_lines(), contextlib.redirect_stdout(told):
        tyro.cli(kind, default=default, args=["--help"], config=(tyro.conf.DisallowNone,), **named)
    print(without_none(told.getvalue()), end="" if default is not None else f"\n{EVERY_COMMAND}\n")


class _HelpText(io.StringIO):
    """Help text with the frames and colors that its stream supports."""

    def __init__(self, stream: TextIO) -> None:
        super().__init__()
        self._stream = stream

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return getattr(self._stream, "encoding", None) or "ascii"

    def isatty(self) -> bool:
        return self._stream.isatty()


def without_none(text: str) -> str:
    """Help without "(default: None)" and "(default: )", also where a line ends in between."""
    kept = r"(\x1b\[[0-9;]*m|│|\n)"  # colors, frames and lines stay as they are

    def blank(found: re.Match[str]) -> str:
        parts = re.split(kept, found[0])
        return "".join(part if n % 2 else " " * len(part) for n, part in enumerate(parts))

    cleared = re.sub(rf"\(default:(?:{kept}|\s)*(?:None)?\)", blank, text)
    pairs = zip(text.split("\n"), cleared.split("\n"), strict=True)
    # a line with nothing else on it is dropped
    return "\n".join(n for old, n in pairs if n == old or re.sub(rf"{kept}|\s", "", n))


@contextlib.contextmanager
def _joined_lines() -> Iterator[None]:
    """Descriptions of options without the line breaks of the source.

    tyro joins lines only where they are not indented, as those of a field's docstring are.
    """
    import docstring_parser

    parse = docstring_parser.parse_from_object

    def parse_joined(*args: Any, **options: Any) -> docstring_parser.Docstring:
        parsed = parse(*args, **options)
        for field_doc in parsed.params:
            field_doc.description = " ".join((field_doc.description or "").split())
        return parsed

    docstring_parser.parse_from_object = parse_joined
    try:
        yield
    finally:
        docstring_parser.parse_from_object = parse


def flags_of(kind: Any) -> Iterator[tuple[str, int]]:
    """(option as typed, number of values: 0 or 1) of each option of a command."""
    for name, hint in typing.get_type_hints(kind, include_extras=True).items():
        about = typing.get_args(hint) if typing.get_origin(hint) is Annotated else ()
        if tyro.conf.Positional in about:
            continue
        called = next((n for a in about if (n := getattr(a, "name", None)) is not None), name)
        flag = called.replace("_", "-")
        if hint is bool:
            yield from ((f"--{flag}", 0), (f"--no-{flag}", 0))
        else:
            yield f"--{flag}", 1


def split_args(kind: Any, args: Sequence[str], command: str) -> tuple[list[str], list[str]]:
    """(positional arguments and options of a command, all other options)."""
    flags = dict(flags_of(kind))
    first = next((place for place, arg in enumerate(args) if arg.startswith("-")), len(args))
    own, rest = list(args[:first]), list[str]()
    target, values_left = own, 0
    for arg in args[first:]:
        if values_left and not arg.startswith("--"):
            values_left -= 1
        else:
            flag, is_joined, _ = arg.partition("=")
            if not flag.startswith("-"):
                raise UserError(f"bellmask {command}: put {flag} before the first option")
            flag = flag.replace("_", "-")
            target = own if flag in flags else rest
            values_left = 0 if is_joined else flags.get(flag, len(args))  # others may take many
        target.append(arg)
    return own, rest


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


def families() -> list[str]:
    """Presets that do not derive from another one (NAME_base, NAME_bell, NAME_arm, ...)."""
    derived = ("_base", "_bell", "fast", "_arm", "_aoarm")
    return [name for name in PRESETS if not name.endswith(derived)]


def start_config(name: str) -> RunConfig:
    """The config of a preset, config file or run folder."""
    path = Path(name)
    if path.is_dir() and (path / "config.json").exists():
        return load_config(path / "config.json")
    if path.suffix in (".json", ".toml"):
        return load_config(path)
    return preset(name)


def resolve(options: PresetOptions, args: Sequence[str], where: str) -> tuple[str, RunConfig]:
    """Preset < files < command line: (name for the run folder, checked config)."""
    name = options.preset
    config = start_config(name)
    for file in options.config:
        config = override_with_file(config, Path(file))
    config = override(config, args, where=f"{where} {name}")
    stem = Path(name).parent.name if name.endswith("config.json") else Path(name).stem
    return stem or "run", config.check()


@dataclass(frozen=True, kw_only=True)
class ConfigShowOptions(PresetOptions):
    """Print all options of a run as JSON, including defaults.

    Examples:
    bellmask config show lm1b --optim.lr 1e-4
    """


@dataclass(frozen=True)
class ConfigDiffOptions:
    """Print the options that differ between two runs.

    Examples:
    bellmask config diff tiny_base tiny_bell

    bellmask config diff lm1b runs/mine/config.json
    """

    left: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="FIRST")]
    """Preset, config file or run folder."""
    right: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="SECOND")]
    """Preset, config file or run folder to compare it with."""


def config_main(args: Sequence[str]) -> int:
    """Show or compare resolved options.

    usage: bellmask config show PRESET [options]
           bellmask config diff PRESET|FILE|RUN PRESET|FILE|RUN

    examples:
      bellmask config show lm1b --optim.lr 1e-4
      bellmask config diff tiny_base tiny_bell
    """  # noqa: D405
    if not args or args[0] in ("-h", "--help"):
        print(f"{inspect.getdoc(config_main)}\n")
        return 0
    action, *rest = args
    return look_up("config action", action, {"show": _show, "diff": _diff})(rest)


def _show(args: Sequence[str]) -> int:
    options, rest = parse_run_command(ConfigShowOptions, args, command="config show")
    _, config = resolve(options, rest, "bellmask config show")
    if network := config.start.model or config.start.architecture:
        text = f"note: the network will be that of {network}, not of the model section, of which "
        tell(f"{text}only dropout and local_conv apply; 'bellmask plan' describes it", sys.stderr)
    print(json.dumps(config.resolved().to_dict(), indent=2))
    return 0


def _diff(args: Sequence[str]) -> int:
    options = parse_command(ConfigDiffOptions, args, command="config diff")
    left, right = (start_config(n).resolved().flat() for n in (options.left, options.right))
    for option in left:
        if left[option] != right[option]:
            print(f"{option}: {json.dumps(left[option])} -> {json.dumps(right[option])}")
    return 0


@dataclass(frozen=True)
class PresetsOptions:
    """List the presets.

    Examples:
    bellmask presets
    """


def presets_main(args: Sequence[str]) -> int:
    parse_command(PresetsOptions, args, command="presets")
    for name in families():
        print(f"{name:<15} {(PRESETS[name].__doc__ or '').strip().splitlines()[0]}")
    print("All but arm_tiny exist as NAME_base (NELBO, uniform times) and NAME_bell (= NAME).")
    print("Those before arm_tiny exist as causal models (NAME_arm, NAME_sigma_arm, NAME_aoarm)")
    print("and as NAME_fast, the fast recipe (docs/performance.md); fast is tiny_fast.")
    print("sft_tiny and sft_tasks exist as NAME_CPT_SFT, base or bell at each stage (Table 4).")
    return 0
