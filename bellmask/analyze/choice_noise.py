"""How noisy scores of choices are: spread, flips, and the passes that buy equal noise.

Noise is always the standard deviation over repetitions with fresh masks on the same questions; no
formula is trusted. Questions have masks of their own, so they are independent, and errors of what
is averaged over them are jackknifed over them: what masks and what the choice of questions did.

K repetitions, N questions, C choices, D numbers of draws.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Found = dict[str, float]
"""``value`` and its ``error``."""
ROUNDING = 1e-6
"""Nats per token: sums of the same numbers in other batches differ by less."""
SLOPES = (-1.0, -0.25)
"""Noise falls as passes to a power in between: independent masks as -1/2, strata faster at first.
What noisy points say beyond is not believed."""


@dataclass(frozen=True)
class Repeats:
    """All repetitions of one way of estimating with one number of draws."""

    score_KNC: Floats
    """Log-probability per token; minus infinity where a question has no such choice."""
    passes_N: Floats
    """Rows through the network that a question's choices took together, mean over repetitions."""

    def differences(self, pair_N2: NDArray[np.int64]) -> Floats:
        """What decides, in each repetition and question [K, N]."""
        both_KN2 = np.take_along_axis(self.score_KNC, pair_N2[None], axis=2)
        return np.asarray(both_KN2[..., 0] - both_KN2[..., 1])

    def difference_noise(self, pair_N2: NDArray[np.int64]) -> Floats:
        """Per question: the standard deviation of the difference; 0 where it is just rounding."""
        noise_N = self.differences(pair_N2).std(axis=0, ddof=1)
        return np.where(noise_N > ROUNDING, noise_N, 0.0)

    def picks(self) -> NDArray[np.int64]:
        """The choice of each repetition and question [K, N]; the first of equals."""
        return self.score_KNC.argmax(axis=2)

    def flips(self) -> Floats:
        """Per question: the chance that two repetitions pick differently, without bias."""
        pick_KN = self.picks()
        count, num_choices = len(pick_KN), self.score_KNC.shape[2]
        votes_NC = (pick_KN[..., None] == np.arange(num_choices)).sum(axis=0)
        return 1 - (votes_NC * (votes_NC - 1)).sum(axis=1) / (count * (count - 1))

    def accuracies(self, gold_N: NDArray[np.int64]) -> Floats:
        """Percent right in each repetition."""
        return 100 * (self.picks() == gold_N).mean(axis=1)


def two_best(score_NC: Floats) -> NDArray[np.int64]:
    """The two choices between which a question is decided [N, 2]."""
    return np.argsort(-score_NC, axis=1, kind="stable")[:, :2]


def spread(values: Floats) -> Found:
    """Standard deviation of repeated values, and its own error by the delta method."""
    variance = float(values.var(ddof=1))
    if not variance:
        return {"value": 0.0, "error": 0.0}
    fourth = float(((values - values.mean()) ** 4).mean())
    error = math.sqrt(max(fourth - variance**2, 0.0) / len(values)) / (2 * math.sqrt(variance))
    return {"value": math.sqrt(variance), "error": error}


def mean(value_N: Floats) -> Found:
    """Mean over questions, and its standard error."""
    error = float(value_N.std(ddof=1) / math.sqrt(len(value_N))) if len(value_N) > 1 else math.nan
    return {"value": float(value_N.mean()), "error": error}


def squared_bias(found: Repeats, truth: Repeats, pair_N2: NDArray[np.int64]) -> Floats:
    """Per question: how far the mean difference is from that of an unbiased way, squared.

    What the noise of both adds is taken off, so a question's may be negative.
    """
    both = [one.differences(pair_N2) for one in (found, truth)]
    noise_N = sum(gap_KN.var(axis=0, ddof=1) / len(gap_KN) for gap_KN in both)
    return np.asarray((both[0].mean(axis=0) - both[1].mean(axis=0)) ** 2 - noise_N)


def summary(
    found: Repeats,
    truth: Repeats,
    pair_N2: NDArray[np.int64],
    gold_N: NDArray[np.int64],
    members: Mapping[str, NDArray[np.bool_]],
) -> dict[str, Any]:
    """What is told of one way with one number of draws, for each group of questions."""
    right_K, flips_N = found.accuracies(gold_N), found.flips()
    noise_N, bias_N = found.difference_noise(pair_N2), squared_bias(found, truth, pair_N2)
    return {
        "accuracy": float(right_K.mean()),
        "accuracy_noise": spread(right_K),
        "passes": {group: float(found.passes_N[here].mean()) for group, here in members.items()},
        "noise": {group: mean(noise_N[here]) for group, here in members.items()},
        "bias": {g: math.sqrt(max(0.0, float(bias_N[here].mean()))) for g, here in members.items()},
        "flips": {group: float(flips_N[here].mean()) for group, here in members.items()},
    }


@dataclass(frozen=True)
class Curve:
    """Noise against passes: one row per number of draws, one column per question."""

    passes_DN: Floats
    noise_DN: Floats

    def of(self, is_kept_N: NDArray[np.bool_]) -> Curve:
        """Some of the questions."""
        return Curve(self.passes_DN[:, is_kept_N], self.noise_DN[:, is_kept_N])

    def points(self) -> tuple[Floats, Floats]:
        """(passes, noise), mean over questions."""
        return self.passes_DN.mean(axis=1), self.noise_DN.mean(axis=1)


@dataclass(frozen=True)
class Line:
    """log noise = start + slope log passes where passes were measured, slope -1/2 beyond."""

    start: float
    slope: float
    low: float
    high: float
    """log of the fewest and most passes."""

    def log_noise(self, log_passes: Floats | float) -> Floats:
        """Of so many passes."""
        inside = np.clip(log_passes, self.low, self.high)
        return np.asarray(self.start + self.slope * inside - (log_passes - inside) / 2)

    def log_passes(self, log_noise: Floats | float) -> Floats:
        """For so much noise."""
        inside = np.clip((log_noise - self.start) / self.slope, self.low, self.high)
        return np.asarray(inside - 2 * (log_noise - self.start - self.slope * inside))


def fit_line(passes_D: Floats, noise_D: Floats) -> Line | None:
    """By least squares, the slope within :data:`SLOPES`; None where there is no noise."""
    is_noisy = (noise_D > 0) & (passes_D > 0)
    x, y = np.log(passes_D[is_noisy]), np.log(noise_D[is_noisy])
    if not len(x):
        return None
    wide = x - x.mean()
    slope = float((wide * y).sum() / (wide**2).sum()) if np.ptp(x) > 0 else -0.5
    slope = min(max(slope, SLOPES[0]), SLOPES[1])
    return Line(float(y.mean() - slope * x.mean()), slope, float(x.min()), float(x.max()))


def passes_needed(ours: Curve, other: Curve) -> Found:
    """How many times our passes another way takes to have our noise: geometric mean over draws.

    Infinite where ours has none and the other has; nan where neither has.
    """
    return _jackknife(ours, other, _log_times)


def noise_at(passes_N: Floats, other: Curve) -> Found:
    """The noise that another way has left after so many passes."""
    fixed = Curve(passes_N[None], np.zeros((1, len(passes_N))))
    return _jackknife(fixed, other, _log_noise)


def _log_times(ours: Curve, other: Curve) -> float:
    passes_D, noise_D = ours.points()
    line = fit_line(*other.points())
    if line is None:
        return math.nan
    if not (noise_D > 0).all():
        return math.inf
    return float(np.mean(line.log_passes(np.log(noise_D)) - np.log(passes_D)))


def _log_noise(fixed: Curve, other: Curve) -> float:
    line = fit_line(*other.points())
    return -math.inf if line is None else float(line.log_noise(math.log(fixed.passes_DN.mean())))


def _jackknife(
    ours: Curve,
    other: Curve,
    log_value: Callable[[Curve, Curve], float],
) -> Found:
    """A value computed as a logarithm; its error by leaving out one question at a time."""
    value = log_value(ours, other)
    count = ours.passes_DN.shape[1]
    if not math.isfinite(value) or count < 2:
        return {"value": math.exp(value), "error": math.nan}
    kept = ~np.eye(count, dtype=bool)
    without = np.array([log_value(ours.of(rest), other.of(rest)) for rest in kept])
    error = math.sqrt((count - 1) * float(without.var())) if np.isfinite(without).all() else np.nan
    return {"value": math.exp(value), "error": math.exp(value) * error}
