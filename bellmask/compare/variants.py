"""What is compared: a name → the options it sets, over a config that all variants share.

NAME[:NUMBERS][+SUFFIX...], for example ``base``, ``bell``, ``laplace:0.5,0.2``, ``bell+muon``; or
``LABEL=OPTIONS`` for anything else, for example ``deep=--model.num-layers 6``. A suite is a list of
them under one name: the paper's ablations.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from bellmask.config.config import RunConfig, override, read_tree, to_args
from bellmask.config.options import (
    DEFAULT_MU,
    DEFAULT_SCALE,
    FrameworkOptions,
    LawOptions,
    ObjectiveOptions,
    ScheduleOptions,
)
from bellmask.utils.errors import UserError, look_up

_LABEL = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.+ -]*")
OWNED = ("--framework", "--law", "--schedule", "--objective")
"""Options that variants decide."""


@dataclass(frozen=True)
class Variant:
    """A label and the command-line options behind it."""

    name: str
    options: tuple[str, ...]
    is_custom: bool = False
    """True for options of the user's own, which go over the shared ones as they are."""

    def apply(self, shared: RunConfig) -> RunConfig:
        """The shared config with the variant's options."""
        if not self.is_custom:  # a named variant decides all of these sections
            given, default = shared.objective, ObjectiveOptions()
            floor = given.time_floor if "nelbo" in self.options else default.time_floor
            objective = replace(default, divide_by_c=given.divide_by_c, time_floor=floor)
            shared = replace(
                shared,
                framework=FrameworkOptions(),
                objective=objective,
                law=LawOptions(),
                schedule=ScheduleOptions(),
            )
        return override(shared, self.options, where=f"variant {self.name}").check()


def _plain(law: str = "uniform", objective: str = "nelbo", *more: str) -> list[str]:
    return ["--objective", objective, "--schedule", "linear", "--law", law, *more]


def _located(law: str) -> Callable[..., list[str]]:
    def build(mu: float = DEFAULT_MU, scale: float = DEFAULT_SCALE) -> list[str]:
        return _plain(law, "bell", "--law.mu", str(mu), "--law.scale", str(scale))

    return build


def _dirac(mu: float = DEFAULT_MU) -> list[str]:
    return _plain("dirac", "bell", "--law.mu", str(mu))


def _importance(mu: float = DEFAULT_MU, scale: float = DEFAULT_SCALE) -> list[str]:
    law = ["--law.mu", str(mu), "--law.scale", str(scale)]
    return _plain("gaussian", "importance", *law, "--objective.no-divide-by-t")


def _importance_t(mu: float = DEFAULT_MU, scale: float = DEFAULT_SCALE) -> list[str]:
    return [*_importance(mu, scale)[:-1], "--objective.divide-by-t"]


def _middle_flat(mu: float = DEFAULT_MU, scale: float = DEFAULT_SCALE) -> list[str]:
    law = ["--schedule.mu", str(mu), "--schedule.scale", str(scale)]
    return ["--objective", "nelbo", "--law", "uniform", "--schedule", "middle_flat", *law]


NAMES: dict[str, Callable[..., list[str]]] = {
    "base": _plain,
    "bell": lambda: _located("gaussian")(),
    "uniform": lambda: _plain("uniform", "bell"),
    "dirac": _dirac,
    "gaussian": _located("gaussian"),
    "laplace": _located("laplace"),
    "importance": _importance,
    "importance_t": _importance_t,
    "middle_flat": _middle_flat,
    "arm": lambda: ["--framework", "arm"],
    "sigma_arm": lambda: ["--framework", "sigma_arm"],
    "aoarm": lambda: ["--framework", "aoarm"],
}
"""base: NELBO, uniform times. bell: gaussian 0.5, 0.1, unweighted. uniform: uniform, unweighted.
The last three are causal models on the same trunk."""

SUFFIXES: dict[str, list[str]] = {
    "muon": ["--optimizer", "muon"],
    "adamw": ["--optimizer", "adamw"],
    "unstratified": ["--train.no-stratified"],
    "crossed": ["--framework.encoding", "crossed"],
    "literal": ["--framework.encoding", "literal"],
    "source": ["--framework.encoding", "source"],
}

_TAKES_NUMBERS = {"dirac": 1, "gaussian": 2, "laplace": 2}
_TAKES_NUMBERS |= {"importance": 2, "importance_t": 2, "middle_flat": 2}


def parse_variant(text: str) -> Variant:
    """The variant that a text names; UserError with the nearest names otherwise."""
    label, is_custom, options = text.partition("=")
    if is_custom:
        if not _LABEL.fullmatch(label) or label == "arm" or not options.startswith("--"):
            raise UserError(
                f"write a variant of your own as 'LABEL=--option value', not {text!r}; a label has "
                "letters, digits, spaces and . + - _, begins with one of the first two, not 'arm'"
            )
        try:
            return Variant(label, tuple(shlex.split(options)), is_custom=True)
        except ValueError as error:
            raise UserError(f"variant {text!r}: {error}") from None
    name, *suffixes = text.split("+")
    name, _, numbers = name.partition(":")
    build = look_up("variant", name, NAMES)
    try:
        values = [float(number) for number in numbers.split(",")] if numbers else []
    except ValueError:
        raise UserError(
            f"variant {text!r}: {numbers!r} must be numbers, as in {name}:0.5"
        ) from None
    if len(values) > _TAKES_NUMBERS.get(name, 0):
        raise UserError(
            f"variant {text!r}: {name} takes {_TAKES_NUMBERS.get(name, 0)} number(s) at most"
        )
    more = [part for suffix in suffixes for part in look_up("variant suffix", suffix, SUFFIXES)]
    return Variant(text, (*build(*values), *more))


def parse_variants(texts: list[str]) -> list[Variant]:
    """All of them; labels must differ."""
    variants = [parse_variant(text) for text in texts]
    names = [variant.name for variant in variants]
    if len(set(names)) < len(names):
        raise UserError(f"variants must have different names, got {', '.join(names)}")
    return variants


def check_shared(args: Sequence[str], files: Sequence[Path] = ()) -> None:
    """Refuse options for all variants that the variants themselves decide, also in files."""
    given = [arg.split("=")[0].replace("_", "-") for arg in args]
    for file in files:
        given += [arg for arg in to_args(read_tree(file)) if arg.startswith("--")]
    for name in given:
        if name.split(".")[0] in OWNED and not name.endswith("divide-by-c"):
            raise UserError(
                f"{name} is decided by the variants; compare 'NAME={name} ...' as one of them "
                "instead"
            )


# Suites: which variants, the first one being the reference
#
# Runs are keyed by content, so a variant that is in several suites is trained once.


def families() -> list[str]:
    """Fig. 5, left (Sec. 5.1): which family of time laws."""
    return ["base", "uniform", "dirac:0.5", "gaussian:0.5,0.1", "laplace:0.5,0.1"]


def variance() -> list[str]:
    """Fig. 5, middle (Sec. 5.1): how wide the bell is."""
    return ["base", "gaussian:0.5,0.1", "gaussian:0.5,0.2", "uniform"]


def mean() -> list[str]:
    """Fig. 5, right (Sec. 5.1): where the bell is."""
    return ["base", "gaussian:0.4,0.1", "gaussian:0.5,0.1", "gaussian:0.6,0.1"]


def dirac() -> list[str]:
    """App. C.2: one fixed time."""
    return ["base", "dirac:0.4", "dirac:0.5", "dirac:0.6"]


def gaussian() -> list[str]:
    """App. C.2: location and width together."""
    return ["base", *(f"gaussian:{mu},{sigma}" for sigma in (0.1, 0.2) for mu in (0.4, 0.5, 0.6))]


def laplace() -> list[str]:
    """App. C.2: the laplace's width."""
    return ["base", "laplace:0.5,0.1", "laplace:0.5,0.2"]


def alternatives() -> list[str]:
    """Sec. 5.4 and App. C.4: other ways to stress the middle."""
    return ["base", "bell", "importance", "importance_t", "middle_flat"]


def stratification() -> list[str]:
    """App. C.5: stratified or independent times."""
    return ["base", "base+unstratified", "bell", "bell+unstratified"]


def orders() -> list[str]:
    """Fig. 2 (Sec. 3.1): is it the order's locality or the number of orders that is hard?"""
    causal = ["sigma_arm", "sigma_arm+crossed", "aoarm", "aoarm+crossed"]
    return ["base", "arm", *causal]


def optimizers() -> list[str]:
    """Does the gain survive another optimizer: {base, bell} x {AdamW, Muon}."""
    return ["base+adamw", "bell+adamw", "base+muon", "bell+muon"]


SUITES: dict[str, Callable[[], list[str]]] = {
    build.__name__: build
    for build in (
        families,
        variance,
        mean,
        dirac,
        gaussian,
        laplace,
        alternatives,
        stratification,
        optimizers,
        orders,
    )
}
