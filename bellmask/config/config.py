"""The tree of a run's options: where values come from, and how they are checked.

Precedence, lowest first: the preset, then the file given with ``--config`` (JSON or TOML, any
subset of options), then the command line. All layers share one typed parser, so a
misspelled option in a file is an error, as on the command line. The resolved options go to
``config.json`` in the run folder, and that file can be given in place of a preset.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import functools
import hashlib
import io
import json
import re
import tomllib
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from bellmask.config import options as opt
from bellmask.config.checks import find_problems
from bellmask.config.options import DEFAULT_ENCODINGS, TIMELESS, Affects, Marks
from bellmask.utils.errors import UserError, unknown
from bellmask.utils.files import load_json

# Dataclasses of options and command lines: typed parsing, and choices.

T = TypeVar("T")


def _choices(kind: Any) -> tuple[str, ...]:
    """Names of a Literal, also inside Annotated, a union or a tuple; empty for other types."""
    if typing.get_origin(kind) is typing.Literal:
        return typing.get_args(kind)
    if typing.get_origin(kind) in (typing.Annotated, typing.Union, types.UnionType, tuple):
        inner = typing.get_args(kind)
        if int in inner:  # a number, or a word in its place
            return ()
        found = next(filter(None, map(_choices, inner)), ())
        return (*found, "None") if found and types.NoneType in inner else found
    return ()


def choices_of(options: Any, prefix: str = "") -> Iterator[tuple[str, Any, tuple[str, ...]]]:
    """(option, value, allowed values) of every option with choices."""
    hints = typing.get_type_hints(type(options), include_extras=True)
    for option in dataclasses.fields(options):
        value = getattr(options, option.name)
        if dataclasses.is_dataclass(value):
            yield from choices_of(value, f"{prefix}{option.name}.")
        elif choices := _choices(hints[option.name]):
            yield prefix + option.name, value, choices


def _plain(text: str) -> str:
    """The parser's message without colors and frames."""
    text = re.sub(r"\x1b\[[0-9;]*m", "", text)
    lines = [line.strip("│╭╮╰╯─| ") for line in text.splitlines()]
    lines = [line for line in lines if not re.match(r"^[-+]*$|^For full help", line)]
    is_twice = len(lines) > 1 and lines[1].startswith(lines[0])  # a repeated heading
    return "\n".join(lines[is_twice:])


def _in_one_line(text: str) -> str:
    """The parser's message as one sentence; unchanged if it is not recognized."""
    told = " ".join(text.split())
    wrong = r"Error parsing (\S+): (invalid literal|could not convert)[^']*'(.*?)'"
    if found := re.search(wrong, told):
        flag, problem, given = found.groups()
        if problem != "invalid literal":
            return f"{flag} needs a number, not {given!r}"
        with contextlib.suppress(ValueError, OverflowError):
            if float(given) == int(float(given)):
                return f"{flag} needs a whole number; write {int(float(given))}, not {given}"
        return f"{flag} needs a whole number, not {given!r}"
    union = r"Error parsing (\S+): no type matching (\S+) could be instantiated from \['(.*?)'"
    if found := re.search(union, told):
        flag, kinds, given = found.groups()
        words = {"INT": "a whole number", "FLOAT": "a number"}
        needed = [words.get(kind, kind.strip("{}")) for kind in kinds.split("|")]
        return f"{flag} needs {' or '.join(needed)}, not {given!r}"
    if found := re.search(r"invalid choice '(.*?)' for argument '(.*?)'.*one of \((.*?)\)", told):
        given, flag, allowed = found.groups()
        kind = "time law" if flag == "--law" else flag
        return str(unknown(kind, given, re.findall(r"'(.*?)'", allowed)))
    if found := re.search(r"Missing value for argument '(.*?)'. Expected (\d+) values", told):
        flag, count = found.groups()
        return f"{flag} needs a value" if count == "1" else f"{flag} needs {count} values"
    if found := re.search(r"Unrecognized options: ([^\s,]+)", told):
        near = re.findall(r"^(--\S+)", text, re.MULTILINE)[:3]
        hint = f"; did you mean {' or '.join(near)}?" if near else ""
        kind = "option" if found[1].startswith("-") else "argument"
        return f"unknown {kind} {found[1]}{hint}"
    if found := re.search(r"Missing from [a-z\s-]+: (\S+)", told):
        return f"{found[1]} is missing; see --help"
    return text


def parse_options(kind: type[T], default: Any, args: Sequence[str], where: str) -> T:
    """Typed parsing of ``args`` over ``default``; all errors become a :class:`UserError`."""
    import tyro

    if own := [arg for arg in args if arg.startswith("--tyro-")]:  # the parser's, some write files
        raise UserError(f"{where}: unknown option {own[0]}")
    stream = io.StringIO()
    try:
        with contextlib.redirect_stderr(stream):
            return tyro.cli(kind, default=default, args=list(args), prog=where)
    except SystemExit as stop:
        if stop.code in (0, None):  # --help in place of a value
            raise UserError(f"{where}: a value is missing before --help or -h") from None
        raise UserError(f"{where}: {_in_one_line(_plain(stream.getvalue()))}") from None


@dataclass(frozen=True)
class RunConfig:
    """All options of one run."""

    data: opt.DataOptions = field(default_factory=opt.DataOptions)
    sft: opt.SftOptions = field(default_factory=opt.SftOptions)
    start: opt.StartOptions = field(default_factory=opt.StartOptions)
    model: opt.ModelOptions = field(default_factory=opt.ModelOptions)
    framework: opt.FrameworkOptions = field(default_factory=opt.FrameworkOptions)
    law: opt.LawOptions = field(default_factory=opt.LawOptions)
    schedule: opt.ScheduleOptions = field(default_factory=opt.ScheduleOptions)
    objective: opt.ObjectiveOptions = field(default_factory=opt.ObjectiveOptions)
    optim: opt.OptimOptions = field(default_factory=opt.OptimOptions)
    train: opt.TrainOptions = field(default_factory=opt.TrainOptions)
    scale: opt.ScaleOptions = field(default_factory=opt.ScaleOptions, metadata={"affects": "speed"})
    validation: opt.ValidationOptions = field(default_factory=opt.ValidationOptions)
    checkpoint: opt.CheckpointOptions = field(
        default_factory=opt.CheckpointOptions, metadata={"affects": "nothing"}
    )
    log: opt.LogOptions = field(default_factory=opt.LogOptions, metadata={"affects": "nothing"})

    def check(self) -> RunConfig:
        """Return the config, or raise a :class:`UserError` that lists every problem."""
        for name, value, choices in choices_of(self):
            for item in value if isinstance(value, tuple) else (value,):
                if str(item) not in choices:
                    raise unknown(name, str(item), choices)
        if problems := find_problems(self, self.flat(), run_options().values()):
            raise UserError("\n".join(problems))
        return self

    def with_options(self, options: Mapping[str, Any]) -> RunConfig:
        """A config with some options changed: ``{"optim.lr": 1e-3, "law.name": "laplace"}``.

        Values pass the same checks as on the command line.
        """
        return override(self, to_args(options)).check()

    def resolved(self) -> RunConfig:
        """The config with the defaults of framework, law and schedule filled in."""
        values, found = self.flat(), self
        unset: dict[str, Any] = {"framework.encoding": DEFAULT_ENCODINGS.get(self.framework.name)}
        unset["framework.order_seed"] = self.train.seed
        for path, option in run_options().items():
            if values[path] is None and not option.marks.belongs_to(values):
                section, name = path.split(".")
                value = unset.get(path, option.marks.unset)
                filled = replace(getattr(found, section), **{name: value})
                found = replace(found, **{section: filled})
        return found

    def to_dict(self) -> dict[str, Any]:
        """Nested values for JSON."""
        return json.loads(json.dumps(dataclasses.asdict(self)))

    def flat(self) -> dict[str, Any]:
        return dict(_flatten(self.to_dict()))

    def key_options(self, *affecting: Affects) -> dict[str, Any]:
        """The options that affect these things, with defaults filled in: the content of keys."""
        flat = self.resolved().flat()
        return {
            name: flat[name]
            for name, o in run_options().items()
            if o.affects in affecting and not (o.marks.is_late and flat[name] is None)
        }

    def fingerprint(self) -> str:
        """Hash of the options that affect the result: the key of the default run folder."""
        text = json.dumps(self.key_options("result"), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:8]


@dataclass(frozen=True)
class Option:
    """One option of a run."""

    path: str
    """``optim.weight_decay``."""
    flag: str
    """``--optim.weight-decay``, as it is typed."""
    name: str
    """In its section."""
    default: Any
    choices: tuple[str, ...]
    """Empty for options without choices."""
    is_switch: bool
    """True for ``--x`` and ``--no-x``; a switch that may be None takes True or False as a value."""
    marks: Marks
    affects: Affects


@functools.cache
def run_options() -> dict[str, Option]:
    """All options of a run by their paths."""
    defaults, found = RunConfig().flat(), {}
    for section in dataclasses.fields(RunConfig):
        kind = typing.get_type_hints(RunConfig)[section.name]
        hints = typing.get_type_hints(kind, include_extras=True)
        for one in dataclasses.fields(kind):
            path, hint = f"{section.name}.{one.name}", hints[one.name]
            flag, marks = path, one.metadata.get("marks", Marks())
            for about in getattr(hint, "__metadata__", ()):
                if called := getattr(about, "name", None):  # tyro.conf.arg
                    flag = f"{section.name}.{called}" if about.prefix_name is None else called
            affects = marks.affects or section.metadata.get("affects", "result")
            flag = "--" + flag.replace("_", "-")
            known = (defaults[path], _choices(hint), hint is bool, marks, affects)
            found[path] = Option(path, flag, one.name, *known)
    return found


def is_free_option(option: str) -> bool:
    """True for options that do not affect the result: a resumed run may have others."""
    return run_options()[option].affects != "result"


def _flatten(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from _flatten(value, f"{prefix}{key}.")
        else:
            yield prefix + str(key), value


def to_args(tree: Mapping[str, Any]) -> list[str]:
    """Nested values as command-line arguments, so that files and the command line share a parser.

    Unknown names are rejected here: the parser has options of its own, some of which
    write files.
    """
    args: list[str] = []
    by_flag = {option.flag[2:].replace("-", "_"): option for option in run_options().values()}
    for path, value in _flatten(tree):
        option = run_options().get(path) or by_flag.get(path)
        if option is None:
            near = difflib.get_close_matches(path, run_options(), 3, 0.75)
            hint = f"; did you mean {' or '.join(near)}?" if near else ""
            raise UserError(f"unknown option {path!r}{hint}")
        if isinstance(value, bool) and option.is_switch:
            section, _, name = option.flag.rpartition(".")
            args.append(option.flag if value else f"{section}.no-{name}")
        elif isinstance(value, list | tuple):
            args += [option.flag, *map(str, value)]
        else:
            args += [option.flag, str(value)]
    return args


# names whose right one the parser does not suggest
_OTHER_NAMES = {
    "--law.sigma": "--law.scale",
    "--law.b": "--law.scale",
    "--schedule.sigma": "--schedule.scale",
    "--steps": "--train.steps",
    "--data": "--data.train",
    "--sft": "--sft.train",
}


def _typed(arg: str) -> list[str]:
    """``--optim.weight_decay=0.1`` → ``--optim.weight-decay``, ``0.1``: one spelling for all."""
    if not arg.startswith("--"):
        return [arg]
    name, *value = arg.split("=", 1)
    return [name.replace("_", "-"), *value]


def forget_replaced(before: RunConfig, after: RunConfig, args: Sequence[str]) -> RunConfig:
    """A law, schedule or framework that replaces another inherits none of its options.

    Causal frameworks have no times and ignore pads, unless ``args`` set these options.
    """
    changed: dict[str, Any] = {}
    for section in ("law", "schedule", "framework"):
        old, new = getattr(before, section), getattr(after, section)
        if old.name != new.name:
            own = [o for o in run_options().values() if o.path.startswith(f"{section}.")]
            stale = {o.name: None for o in own if o.marks.only_with and o.flag not in args}
            changed[section] = replace(new, **stale)
    is_other = before.start.model is not None and after.start.architecture is not None
    if is_other and "--start.model" not in args:  # random weights take the place of a preset's
        changed["start"] = replace(after.start, model=None, mask_token=None)
    if "framework" in changed and after.framework.name != "mdm":
        for section, timeless in TIMELESS.items():
            if not any(arg.split(".")[0] == f"--{section}" for arg in args):
                changed[section] = timeless
        if "--data.pads" not in args:
            changed["data"] = replace(after.data, pads="ignored")
    return replace(after, **changed)


def override(config: RunConfig, args: Sequence[str], where: str = "options") -> RunConfig:
    """``config`` with command-line style arguments applied: one layer of precedence."""
    args = [part for arg in args for part in _typed(arg)]
    for given, meant in _OTHER_NAMES.items():
        if given in args:
            raise UserError(f"unknown option {given}; did you mean {meant}?")
    return forget_replaced(config, parse_options(RunConfig, config, args, where), args)


def override_with_file(config: RunConfig, path: Path) -> RunConfig:
    """``config`` with the options of a JSON or TOML file applied."""
    tree = read_tree(path)
    try:
        args = to_args(tree)
    except UserError as error:
        raise UserError(f"{path}: {error}") from None
    return override(config, args, where=str(path))


def read_tree(path: Path) -> dict[str, Any]:
    """The nested options in a JSON or TOML file."""
    if path.suffix not in (".json", ".toml"):
        raise UserError(f"config file {path} must be .json or .toml")
    if path.exists() and not path.is_file():
        raise UserError(f"cannot read config file {path}: not a file")
    try:
        text = path.read_text(encoding="utf-8")
        tree = tomllib.loads(text) if path.suffix == ".toml" else load_json(text)
    except FileNotFoundError:
        raise UserError(f"there is no config file {path}") from None
    except (OSError, ValueError, RecursionError) as error:  # not text, not JSON, too deep
        raise UserError(f"cannot read config file {path}: {error}") from None
    if not isinstance(tree, dict):
        raise UserError(f"config file {path} must hold sections, not a {type(tree).__name__}")
    return tree


def load_config(path: str | Path) -> RunConfig:
    """The whole config in a file that a run wrote."""
    missing = {f.name for f in dataclasses.fields(RunConfig)} - read_tree(Path(path)).keys()
    if missing:
        raise UserError(f"{path} is not a complete config; give a preset and --config {path}")
    return override_with_file(RunConfig(), Path(path)).check()
