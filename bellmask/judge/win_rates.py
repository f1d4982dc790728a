"""Win rates of A against B, with errors over tasks, by category, by turn and over seeds.

Turns of one task move together, so a task is a cluster. Rates lie between 0 and 1; a rate of
nothing is nan.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from bellmask.judge.length_control import LengthControlled, two_term
from bellmask.judge.published_length_control import (
    Calibration,
    PublishedRate,
    published_rate,
)
from bellmask.judge.verdicts import Judged
from bellmask.utils.stats import Floats, Labels, clustered_error


@dataclass(frozen=True)
class Rate:
    """A share, with its standard error over tasks (nan where one task is all there is)."""

    value: float
    error: float


@dataclass(frozen=True)
class WinRates:
    """How A did against B on some answers."""

    wins: int
    losses: int
    ties: int
    unreadable: int
    """Pairs without a readable verdict in both orders; they are in no rate."""
    win_rate: Rate
    """Mean preference for A: ties count half, a judge's probabilities as they are."""
    non_tie: Rate
    """wins / (wins + losses), the paper's MT-Bench number (Tab. 5)."""

    @property
    def judged(self) -> int:
        """Pairs with an outcome."""
        return self.wins + self.losses + self.ties


@dataclass(frozen=True)
class OverSeeds:
    """Mean ± deviation of a number over seeds (Tab. 5 has five)."""

    mean: float
    deviation: float
    """Sample standard deviation; nan for a single seed."""
    count: int
    """Seeds that have the number."""


def win_rates(judged: Sequence[Judged]) -> WinRates:
    """All outcomes together."""
    results = [one.outcome.result for one in judged]
    return WinRates(
        results.count("win"),
        results.count("loss"),
        results.count("tie"),
        results.count("unreadable"),
        win_rate=_rate(*_preferences(judged)),
        non_tie=_non_tie(judged),
    )


def by_category(judged: Sequence[Judged]) -> dict[str, list[Judged]]:
    """Outcomes of each category, in the benchmark's order."""
    return _by(judged, lambda one: one.pair.task.category)


def by_turn(judged: Sequence[Judged]) -> dict[str, list[Judged]]:
    """Outcomes of each turn, named "1", "2", ..."""
    return _by(judged, lambda one: str(one.pair.turn + 1))


def length_controlled(judged: Sequence[Judged]) -> LengthControlled | None:
    """The two-term length-controlled win rate; None where nothing was judged."""
    known = readable(judged)
    if not known:
        return None
    preference_N, cluster_N = _preferences(known)
    length_a, length_b = lengths(known)
    return two_term(preference_N, length_a, length_b, cluster_N)


def published_length_controlled(
    judged: Sequence[Judged], calibration: Calibration
) -> PublishedRate:
    """AlpacaEval's own length-controlled win rate of A; B must be its baseline's answers."""
    known = readable(judged)
    preference_N, index_N = _preferences(known)
    return published_rate(preference_N, *lengths(known), index_N.tolist(), calibration)


def lengths(judged: Sequence[Judged]) -> tuple[Floats, Floats]:
    """Characters of A's and B's answers to the turns judged."""
    a = np.array([len(one.pair.answers_a[-1]) for one in judged], dtype=np.float64)
    b = np.array([len(one.pair.answers_b[-1]) for one in judged], dtype=np.float64)
    return a, b


def readable(judged: Sequence[Judged]) -> list[Judged]:
    """Those with an outcome."""
    return [one for one in judged if one.outcome.preference is not None]


def over_seeds(values: Sequence[float]) -> OverSeeds:
    """Mean and sample standard deviation of what is a number."""
    known = np.array([value for value in values if np.isfinite(value)])
    nan = float("nan")
    mean = float(known.mean()) if len(known) else nan
    return OverSeeds(mean, float(known.std(ddof=1)) if len(known) > 1 else nan, len(known))


def _by(judged: Sequence[Judged], name: Callable[[Judged], str]) -> dict[str, list[Judged]]:
    groups: dict[str, list[Judged]] = {}
    for one in judged:
        groups.setdefault(name(one), []).append(one)
    return groups


def _preferences(judged: Sequence[Judged]) -> tuple[Floats, Labels]:
    """(preferences, tasks) of what has an outcome."""
    known = [
        (one.outcome.preference, one.pair.task.index)
        for one in judged
        if one.outcome.preference is not None
    ]
    preference_N = np.array([value for value, _ in known], dtype=np.float64)
    return preference_N, np.array([task for _, task in known], dtype=np.int64)


def _non_tie(judged: Sequence[Judged]) -> Rate:
    chosen = [one for one in judged if one.outcome.result in ("win", "loss")]
    won_N = np.array([one.outcome.result == "win" for one in chosen], dtype=np.float64)
    return _rate(won_N, np.array([one.pair.task.index for one in chosen], dtype=np.int64))


def _rate(value_N: Floats, cluster_N: Labels) -> Rate:
    if not len(value_N):
        return Rate(float("nan"), float("nan"))
    return Rate(float(value_N.mean()), clustered_error(value_N, cluster_N))
