"""The tree of a run's options, where its values come from, and the checks that span sections.

Precedence, lowest first: the preset, then the file given with ``--config`` (JSON or TOML, any
subset of options), then the command line. Each layer goes through the same typed parser, so a
misspelt option in a file is refused as one on the command line is. The resolved options go to
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

from bellmask.config.checks import find_problems
from bellmask.config.options import (
    DEFAULT_ENCODINGS,
    DEFAULT_MU,
    DEFAULT_POWER,
    DEFAULT_SCALE,
    Affects,
    CheckpointOptions,
    DataOptions,
    FrameworkOptions,
    LawOptions,
    LogOptions,
    ModelOptions,
    ObjectiveOptions,
    OptimOptions,
    ScaleOptions,
    ScheduleOptions,
    SftOptions,
    StartOptions,
    TrainOptions,
    ValidationOptions,
)
from bellmask.utils.errors import UserError, unknown
from bellmask.utils.files import load_json

# What a law, schedule or framework that takes another's place does not inherit from it.


def forget_replaced(before: RunConfig, after: RunConfig, args: Sequence[str]) -> RunConfig:
    """A new law or schedule does not inherit the old one's parameters."""
    sections: dict[str, Any] = {}
    for section, names in (("law", ("mu", "scale")), ("schedule", ("power", "mu", "scale"))):
        old, new = getattr(before, section), getattr(after, section)
        if old.name != new.name:
            stale = {n: None for n in names if f"--{section}.{n}" not in args}
            sections[section] = replace(new, **stale)
    sections |= _forget_replaced_framework(before, after, args)
    return replace(after, **sections)


def _forget_replaced_framework(
    before: RunConfig, after: RunConfig, args: Sequence[str]
) -> dict[str, Any]:
    """A new framework brings its own encoding and order; causal ones have no times."""
    old, new = before.framework, after.framework
    if old.name == new.name:
        return {}
    stale: dict[str, Any] = {
        name: None
        for name in ("encoding", "order_seed")
        if f"--framework.{name.replace('_', '-')}" not in args
    }
    sections: dict[str, Any] = {"framework": replace(new, **stale)}
    if new.name != "mdm":
        untimed = {
            "law": LawOptions("uniform"),
            "schedule": ScheduleOptions(),
            "objective": ObjectiveOptions("nelbo"),
        }
        for section, value in untimed.items():
            if not any(arg.split(".")[0] == f"--{section}" for arg in args):
                sections[section] = value
    return sections


# Dataclasses of options and command lines: typed parsing, and the choices that options have.

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

    if own := [arg for arg in args if arg.startswith("--tyro-")]:  # the parser's, some write files
        raise UserError(f"{where}: unknown option {own[0]}")
    stream = io.StringIO()
    try:
        with contextlib.redirect_stderr(stream):
            return tyro.cli(kind, default=default, args=list(args), prog=where)
    except SystemExit as stop:
        if stop.code in (0, None):  # help, asked for in the place of a value
            raise UserError(f"{where}: a value is missing before --help or -h") from None
        raise UserError(f"{where}: {_plain(stream.getvalue())}") from None


@dataclass(frozen=True)
class RunConfig:
    """All options of one run."""

    data: DataOptions = field(default_factory=DataOptions)
    sft: SftOptions = field(default_factory=SftOptions)
    start: StartOptions = field(default_factory=StartOptions)
    model: ModelOptions = field(default_factory=ModelOptions)
    framework: FrameworkOptions = field(default_factory=FrameworkOptions)
    law: LawOptions = field(default_factory=LawOptions)
    schedule: ScheduleOptions = field(default_factory=ScheduleOptions)
    objective: ObjectiveOptions = field(default_factory=ObjectiveOptions)
    optim: OptimOptions = field(default_factory=OptimOptions)
    train: TrainOptions = field(default_factory=TrainOptions)
    scale: ScaleOptions = field(default_factory=ScaleOptions, metadata={"affects": "speed"})
    validation: ValidationOptions = field(default_factory=ValidationOptions)
    checkpoint: CheckpointOptions = field(
        default_factory=CheckpointOptions, metadata={"affects": "nothing"}
    )
    log: LogOptions = field(default_factory=LogOptions, metadata={"affects": "nothing"})

    def check(self) -> RunConfig:
        """The config itself, or a :class:`UserError` that names everything that cannot work."""
        for name, value, choices in choices_of(self):
            for item in value if isinstance(value, tuple) else (value,):
                if str(item) not in choices:
                    raise unknown(name, str(item), choices)
        problems = find_problems(self)
        if problems:
            raise UserError("\n".join(problems))
        return self

    def with_options(self, options: Mapping[str, Any]) -> RunConfig:
        """A config with some options changed: ``{"optim.lr": 1e-3, "law.name": "laplace"}``.

        Values pass the same checks as on the command line.
        """
        return override(self, to_args(options)).check()

    def resolved(self) -> RunConfig:
        """With the defaults of the framework, law and schedule written out."""
        law, schedule, framework = self.law, self.schedule, self.framework
        if framework.name != "mdm" and framework.encoding is None:
            encoding = DEFAULT_ENCODINGS.get(framework.name)
            framework = replace(framework, encoding=encoding)
        if framework.name == "sigma_arm" and framework.order_seed is None:
            framework = replace(framework, order_seed=self.train.seed)
        if law.mu is None and law.name != "uniform":
            law = replace(law, mu=DEFAULT_MU)
        if law.scale is None and law.name in ("gaussian", "laplace"):
            law = replace(law, scale=DEFAULT_SCALE)
        if schedule.name == "polynomial" and schedule.power is None:
            schedule = replace(schedule, power=DEFAULT_POWER)
        if schedule.name == "middle_flat":
            mu = DEFAULT_MU if schedule.mu is None else schedule.mu
            scale = DEFAULT_SCALE if schedule.scale is None else schedule.scale
            schedule = replace(schedule, mu=mu, scale=scale)
        return replace(self, framework=framework, law=law, schedule=schedule)

    def to_dict(self) -> dict[str, Any]:
        """Nested plain values, ready for JSON."""
        return json.loads(json.dumps(dataclasses.asdict(self)))

    def flat(self) -> dict[str, Any]:
        """``{"optim.lr": 0.0003, ...}``."""
        return dict(_flatten(self.to_dict()))

    def key_options(self, *affecting: Affects) -> dict[str, Any]:
        """The options that affect these things, defaults written out: what keys are made of."""
        flat = self.resolved().flat()
        return {name: value for name, value in flat.items() if _affects()[name] in affecting}

    def fingerprint(self) -> str:
        """Hash of the options that decide what is learned: the key of the default run folder."""
        text = json.dumps(self.key_options("result"), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:8]


@functools.cache
def _affects() -> dict[str, Affects]:
    """What each option affects, by the marks of its section and its field."""
    found: dict[str, Affects] = {}
    for section in dataclasses.fields(RunConfig):
        for option in dataclasses.fields(typing.get_type_hints(RunConfig)[section.name]):
            marks = {"affects": "result", **section.metadata, **option.metadata}
            found[f"{section.name}.{option.name}"] = marks["affects"]
    return found


def is_free_option(option: str) -> bool:
    """True for options that do not affect the result: a resumed run may have others."""
    return _affects()[option] != "result"


_FLAT_NAMES = {
    "framework.name": "framework",
    "law.name": "law",
    "schedule.name": "schedule",
    "objective.name": "objective",
    "optim.name": "optimizer",
    "data.from_files": "data.from",
}
"""Options whose command-line name is not their path."""


def _flatten(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from _flatten(value, f"{prefix}{key}.")
        else:
            yield prefix + str(key), value


def option_name(path: str) -> str:
    """``optim.weight_decay`` as it is typed: ``--optim.weight-decay``."""
    return "--" + _FLAT_NAMES.get(path, path).replace("_", "-")


def to_args(tree: Mapping[str, Any]) -> list[str]:
    """Nested values as command-line arguments, so that files and commands share one parser.

    Names that are no options are refused here: the parser has options of its own, some of which
    write files.
    """
    args: list[str] = []
    for path, value in _flatten(tree):
        name = option_name(path)
        if name not in option_names():
            near = difflib.get_close_matches(path, [n[2:] for n in option_names()], 3, 0.75)
            hint = f"; perhaps you meant {' or '.join(near)}" if near else ""
            raise UserError(f"unknown option {path!r}{hint}")
        if isinstance(value, bool) and path not in _optional_switches():
            section, _, option = name[2:].rpartition(".")
            no = f"{section}.no-{option}" if section else f"no-{option}"
            args.append(name if value else f"--{no}")
        elif isinstance(value, list | tuple):
            args += [name, *map(str, value)]
        else:
            args += [name, str(value)]
    return args


@functools.cache
def option_names() -> frozenset[str]:
    """All options as they are typed."""
    return frozenset(option_name(path) for path in RunConfig().flat())


@functools.cache
def _optional_switches() -> frozenset[str]:
    """Switches that may also be None: they take True or False as a value."""
    found = set()
    for section in dataclasses.fields(RunConfig):
        kind = typing.get_type_hints(RunConfig)[section.name]
        for name, hint in typing.get_type_hints(kind).items():
            if set(typing.get_args(hint)) == {bool, types.NoneType}:
                found.add(f"{section.name}.{name}")
    return frozenset(found)


def _check_names(args: Sequence[str], default: RunConfig) -> None:
    """Refuse an unknown name for a choice with the nearest ones (the parser only lists all)."""
    allowed = {option_name(path): (path, c) for path, _, c in choices_of(default)}
    current = ""
    for arg in args:
        if arg.startswith("--"):
            current = arg
        elif current in allowed and arg not in allowed[current][1]:
            path, choices = allowed[current]
            raise unknown(_KINDS.get(path, current), arg, choices)


_OTHER_NAMES = {
    "--law.sigma": "--law.scale",
    "--law.b": "--law.scale",
    "--schedule.sigma": "--schedule.scale",
    "--lr": "--optim.lr",
    "--steps": "--train.steps",
    "--seed": "--train.seed",
}

_KINDS = {
    **{f"{part}.name": part for part in ("framework", "schedule", "objective")},
    "law.name": "time law",
}


def _typed(arg: str) -> list[str]:
    """``--optim.weight_decay=0.1`` → ``--optim.weight-decay``, ``0.1``: one spelling for all."""
    if not arg.startswith("--"):
        return [arg]
    name, *value = arg.split("=", 1)
    return [name.replace("_", "-"), *value]


def override(config: RunConfig, args: Sequence[str], where: str = "options") -> RunConfig:
    """``config`` with command-line style arguments applied: one layer of precedence."""
    args = [part for arg in args for part in _typed(arg)]
    for given, meant in _OTHER_NAMES.items():
        if given in args:
            raise UserError(f"unknown option {given}; did you mean {meant}?")
    _check_names(args, config)
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
        raise UserError(
            f"config file {path} must hold an object of sections, not {type(tree).__name__}"
        )
    return tree


def load_config(path: str | Path) -> RunConfig:
    """The whole config in a file that a run wrote."""
    missing = {f.name for f in dataclasses.fields(RunConfig)} - read_tree(Path(path)).keys()
    if missing:
        raise UserError(
            f"{path} is not a whole config: it has nothing on {', '.join(sorted(missing))}; "
            f"use it over a preset: bellmask train PRESET --config {path}"
        )
    return override_with_file(RunConfig(), Path(path)).check()
