"""Variants: a name → the options it sets on top of a config shared by all variants.

NAME[:NUMBERS][+SUFFIX...], for example ``base``, ``bell``, ``laplace:0.5,0.2``, ``bell+muon``,
``bell+conv+lr2+warmup0.2`` (twice the learning rate, a fifth of its warm-up), ``bell+uniform0.05``
(a share of uniform times); or
``LABEL=OPTIONS`` for anything else, for example ``deep=--model.num-layers 6``. A suite is a list of
them under one name: the paper's ablations.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from bellmask.config.config import RunConfig, override, read_tree, to_args
from bellmask.config.options import FrameworkOptions, LawOptions, ObjectiveOptions, ScheduleOptions
from bellmask.config.presets import FAST_RATE, FAST_WARMUP, scaled
from bellmask.utils.errors import UserError, look_up

_FACTOR = re.compile(r"(lr|warmup|uniform)(\d+(?:\.\d+)?)")
_RATE, _WARMUP = f"lr{FAST_RATE:g}", f"warmup{FAST_WARMUP:g}"
_LABEL = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.+ -]*")
OWNED = ("--framework", "--law", "--schedule", "--objective")
"""Options that variants decide."""


@dataclass(frozen=True)
class Variant:
    """A label and the command-line options behind it."""

    name: str
    options: tuple[str, ...]
    is_custom: bool = False
    """True for the user's own options, which override the shared ones."""
    rate: float = 1.0
    warmup: float = 1.0
    """Factors of the shared learning rate and warm-up."""

    def apply(self, shared: RunConfig, grid: Sequence[str] = ()) -> RunConfig:
        """The shared config with the variant's options, then those of a grid point."""
        if not self.is_custom:  # a named variant decides all of these sections
            given, default = shared.objective, ObjectiveOptions()
            floor = given.time_floor if "nelbo" in self.options else default.time_floor
            shared = replace(
                shared,
                framework=FrameworkOptions(),
                objective=replace(default, divide_by_c=given.divide_by_c, time_floor=floor),
                law=LawOptions(),
                schedule=ScheduleOptions(),
            )
        config = override(shared, self.options, where=f"variant {self.name}")
        config = override(config, grid, where="--grid")
        return replace(config, optim=scaled(config.optim, self.rate, self.warmup)).check()


_LAW, _SCHEDULE = (("--law.mu", "--law.scale"), ("--schedule.mu", "--schedule.scale"))
_BELL = "--objective bell --law"
_IMPORTANCE = "--objective importance --law gaussian --objective"

NAMES: dict[str, tuple[str, tuple[str, ...]]] = {
    "base": ("--objective nelbo --law uniform", ()),
    "bell": (f"{_BELL} gaussian", ()),
    "uniform": (f"{_BELL} uniform", ()),
    "dirac": (f"{_BELL} dirac", _LAW[:1]),
    "gaussian": (f"{_BELL} gaussian", _LAW),
    "laplace": (f"{_BELL} laplace", _LAW),
    "band": (f"{_BELL} band", ("--law.low", "--law.high")),
    "progress": (f"{_BELL} progress", ()),
    "importance": (f"{_IMPORTANCE}.no-divide-by-t", _LAW),
    "importance_t": (f"{_IMPORTANCE}.divide-by-t", _LAW),
    "middle_flat": ("--objective nelbo --law uniform --schedule middle_flat", _SCHEDULE),
    "arm": ("--framework arm", ()),
    "sigma_arm": ("--framework sigma_arm", ()),
    "aoarm": ("--framework aoarm", ()),
}
"""Name → its options, and those that its numbers set; 0.5 and 0.1 where they are left out. The last
three are causal models on the same backbone."""

FAST = f"bell+muon+conv+{_RATE}+{_WARMUP}"
"""What ``fast`` is short for: the recipe of the presets ``X_fast``, its parts by name."""

SUFFIXES = {
    "conv": "--model.local-conv 5",
    "muon": "--optimizer muon",
    "adamw": "--optimizer adamw",
    "unstratified": "--train.no-stratified",
    "growing": "--train.batch-warmup 200",
    "crossed": "--framework.encoding crossed",
    "literal": "--framework.encoding literal",
    "source": "--framework.encoding source",
}


def split_words(text: str, where: str) -> list[str]:
    """The words of a text, as a shell splits them."""
    try:
        return shlex.split(text)
    except ValueError as error:
        raise UserError(f"{where}: {error}") from None


def parse_variant(text: str) -> Variant:
    """Parse a variant; a UserError suggests the nearest names."""
    label, is_custom, options = text.partition("=")
    if is_custom:
        if not _LABEL.fullmatch(label) or label == "arm" or not options.startswith("--"):
            raise UserError(
                f"write your own variant as 'LABEL=--option value', not {text!r}; a label has "
                "letters, digits, spaces and . + - _, starts with a letter or digit, is not 'arm'"
            )
        return Variant(label, tuple(split_words(options, f"variant {text!r}")), is_custom=True)
    name, *suffixes = text.split("+")
    if name == "fast":
        name, *suffixes = [*FAST.split("+"), *suffixes]
    name, _, numbers = name.partition(":")
    options, takes = look_up("variant", name, {**NAMES, "fast": ("", ())})
    values = numbers.split(",") if numbers else []
    if len(values) > len(takes):
        raise UserError(f"variant {text!r}: {name} takes {len(takes)} number(s) at most")
    found = {suffix: _FACTOR.fullmatch(suffix) for suffix in suffixes}
    factors = {one[1]: float(one[2]) for one in found.values() if one}
    if len(factors) < sum(bool(_FACTOR.fullmatch(suffix)) for suffix in suffixes):
        raise UserError(f"variant {text!r} sets a factor twice (fast is short for {FAST})")
    known = {**SUFFIXES, "lrFACTOR": "", "warmupFACTOR": "", "uniformSHARE": ""}
    more = [look_up("variant suffix", suffix, known) for suffix in suffixes if not found[suffix]]
    given = [f"{option} {value}" for option, value in zip(takes, values)]
    given += [f"--law.uniform-share {factors['uniform']}"] if "uniform" in factors else []
    words = tuple(" ".join([options, *given, *more]).split())
    return Variant(text, words, rate=factors.get("lr", 1.0), warmup=factors.get("warmup", 1.0))


def parse_variants(texts: Sequence[str]) -> list[Variant]:
    """All of them; labels must differ."""
    variants = [parse_variant(text) for text in texts]
    names = [variant.name for variant in variants]
    if len(set(names)) < len(names):
        raise UserError(f"variants must have different names, got {', '.join(names)}")
    return variants


def check_shared(args: Sequence[str], files: Sequence[str] = (), where: str = "") -> None:
    """Reject shared options, also in files, that the variants set themselves."""
    given = [arg.split("=")[0].replace("_", "-") for arg in args]
    for file in files:
        given += [arg for arg in to_args(read_tree(Path(file))) if arg.startswith("--")]
    for name in given:
        if name.split(".")[0] in OWNED and not name.endswith("divide-by-c"):
            raise UserError(f"{where}{name} is set by the variants; omit it, or 'LABEL={name} ...'")


# Runs are keyed by content, so a variant that is in several suites is trained once.
# Paper: Fig. 2, Fig. 5, Fig. 7, Fig. 8, Fig. 9, Fig. 10
SUITES: dict[str, list[str]] = {
    # Fig. 5 (Sec. 5.1): which family of time laws, how wide the bell is, where it is
    "families": ["base", "uniform", "dirac:0.5", "gaussian:0.5,0.1", "laplace:0.5,0.1"],
    "variance": ["base", "gaussian:0.5,0.1", "gaussian:0.5,0.2", "uniform"],
    "mean": ["base", "gaussian:0.4,0.1", "gaussian:0.5,0.1", "gaussian:0.6,0.1"],
    # App. C.2: one fixed time; location and width together; the laplace's width
    "dirac": ["base", "dirac:0.4", "dirac:0.5", "dirac:0.6"],
    "gaussian": ["base", *(f"gaussian:{mu},{s}" for s in (0.1, 0.2) for mu in (0.4, 0.5, 0.6))],
    "laplace": ["base", "laplace:0.5,0.1", "laplace:0.5,0.2"],
    # Sec. 5.4 and App. C.4: other ways to stress the middle
    "alternatives": ["base", "bell", "importance", "importance_t", "middle_flat"],
    # App. C.5: stratified or independent times
    "stratification": ["base", "base+unstratified", "bell", "bell+unstratified"],
    # the fast recipe, and the same without each part: warm-up, rate, convolution, Muon, bell
    "fast": [
        "base",
        "bell",
        "fast",
        f"bell+muon+conv+{_RATE}",
        f"bell+muon+conv+{_WARMUP}",
        f"bell+muon+{_RATE}+{_WARMUP}",
        f"bell+conv+{_RATE}+{_WARMUP}",
        f"base+muon+conv+{_RATE}+{_WARMUP}",
    ],
    # does the gain survive another optimizer?
    "optimizers": ["base+adamw", "bell+adamw", "base+muon", "bell+muon"],
    # Fig. 2 (Sec. 3.1): is it the order's locality or the number of orders that is hard?
    "orders": ["base", "arm", "sigma_arm", "sigma_arm+crossed", "aoarm", "aoarm+crossed"],
}
"""The paper's ablations, and our own; the first variant is the reference."""
