"""Which trainings a comparison needs, and the folder each one has: a key of its content.

The key covers every option that is not free of consequences, the evaluation, and the fingerprints
of text and tokenizer. So variants, suites, grids and repetitions share runs, and a changed text
file never meets old results.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bellmask.compare.variants import Variant
from bellmask.config.config import RunConfig, override
from bellmask.config.options import Interval
from bellmask.utils.errors import UserError

TRAINING_FORMAT = 1
"""Raised when code changes what a run with the same options learns: old runs are not reused."""
_NOT_IN_KEY = (
    "log.trackers",
    "log.project",
    "checkpoint.",
    "scale.",
    "train.device",
    "data.cache",
    "validation.batch_size",
)
_SAME_FOR_ALL = ("data.", "validation.", "train.batch_size")


@dataclass(frozen=True)
class PlannedRun:
    """One training: a variant at a grid point with a seed."""

    variant: str
    seed: int
    point: str
    """The grid's options, as typed, e.g. ``optim.lr=0.003``; empty without a grid."""
    config: RunConfig
    folder: Path

    @property
    def label(self) -> str:
        """What a person calls it."""
        return " ".join(filter(None, [self.variant, self.point, f"seed {self.seed}"]))


def content_key(config: RunConfig, text: str) -> str:
    """Hash of what decides a run's results; ``text`` identifies the data and the tokenizer."""
    options = config.key_options()
    kept = {name: v for name, v in options.items() if not name.startswith(_NOT_IN_KEY)}
    content = json.dumps([TRAINING_FORMAT, kept, text], sort_keys=True)
    return hashlib.sha256(content.encode()).hexdigest()[:16]


def parse_grid(texts: Sequence[str]) -> list[dict[str, str]]:
    """``["optim.lr=1e-3,3e-3"]`` as all combinations; one empty point without a grid."""
    axes: dict[str, list[tuple[str, str]]] = {}
    for text in texts:
        option, _, values = text.partition("=")
        if not option or not values or option.startswith("-"):
            raise UserError(f"write a grid as 'optim.lr=1e-3,3e-3', not {text!r}")
        axes.setdefault(option, []).extend((option, value) for value in values.split(","))
        if len(set(axes[option])) < len(axes[option]):
            raise UserError(f"--grid {text}: each value must be given once")
    return [dict(point) for point in itertools.product(*axes.values())]


def name_point(point: Mapping[str, str]) -> str:
    """A grid point as text."""
    return " ".join(f"{option}={value}" for option, value in point.items())


def for_comparison(config: RunConfig) -> RunConfig:
    """The shared config with what a comparison needs: an evaluation at the end, samples there."""
    options = config.validation
    interval = Interval.parse(options.every)
    if interval.unit != "steps":
        raise UserError(
            "a comparison evaluates all runs at the same steps; give --validation.every in steps"
        )
    if not 0 < interval.amount <= config.train.steps / 2:
        raise UserError(
            f"a comparison needs a curve, and --validation.every {options.every!r} gives none in "
            f"{config.train.steps} steps; set, e.g., '{max(1, config.train.steps // 10)} steps'"
        )
    samples = f"{config.train.steps} steps"
    return replace(config, validation=replace(options, samples_every=samples))


def plan_runs(
    shared: RunConfig,
    variants: Sequence[Variant],
    *,
    seeds: int,
    grid: Sequence[Mapping[str, str]],
    root: Path,
    text: str,
) -> list[PlannedRun]:
    """All trainings, seeds outermost, so that every variant has its first result early."""
    runs = []
    for number in range(seeds):
        for variant, point in itertools.product(variants, grid):
            args = [part for option, value in point.items() for part in (f"--{option}", value)]
            config = override(variant.apply(shared), args, where="--grid")
            _check_fair(config, shared, variant.name)
            seed = shared.train.seed + number
            config = replace(config, train=replace(config.train, seed=seed)).check()
            folder = root / content_key(config, text)
            runs.append(PlannedRun(variant.name, seed, name_point(point), config, folder))
    return runs


def place_runs(runs: Sequence[PlannedRun], root: Path, text: str) -> list[PlannedRun]:
    """The same runs in the folders that belong to this text."""
    return [replace(run, folder=root / content_key(run.config, text)) for run in runs]


def _check_fair(config: RunConfig, shared: RunConfig, name: str) -> None:
    """Refuse, before anything is trained, variants that could not be compared afterwards."""
    mine, theirs = config.flat(), shared.flat()
    for option in mine:
        is_fixed = option.startswith(_SAME_FOR_ALL) or option in ("train.seed", "train.steps")
        if is_fixed and mine[option] != theirs[option]:
            raise UserError(
                f"variant {name} changes {option}, which must be the same for all"
                + ("; use --seeds" if option == "train.seed" else "")
            )


def distinct(runs: Sequence[PlannedRun]) -> list[PlannedRun]:
    """One run per folder, in order."""
    first: dict[Path, PlannedRun] = {}
    for run in runs:
        first.setdefault(run.folder, run)
    return list(first.values())


def describe_plan(runs: Sequence[PlannedRun]) -> list[dict[str, Any]]:
    """The runs as plain values, for comparison.json."""
    return [
        {"variant": r.variant, "seed": r.seed, "point": r.point, "run": r.folder.name} for r in runs
    ]
