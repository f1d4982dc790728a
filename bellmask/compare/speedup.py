"""How many times sooner a variant reaches the reference's final NLL, and how sure that is.

y* is the reference's NLL at its last step T. A variant arrives at tau, where the final run of its
evaluations with NLL <= y* starts, interpolated linearly in (log step, NLL) from the evaluation
before. The speed-up is T / tau. Nothing is extrapolated: a variant that is above y* at its end has
not arrived, and one that was below y* from its first evaluation on has a lower bound only.

E evaluations, B blocks, R bootstrap replicates.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

MIN_SEEDS = 3
"""Paired seeds from which on an interval is given."""

# quantiles of Student's t at 0.975 for 1, 2, ... degrees of freedom
_T_975: tuple[float, ...] = (
    12.706,
    4.303,
    3.182,
    2.776,
    2.571,
    2.447,
    2.365,
    2.306,
    2.262,
    2.228,
    2.201,
    2.179,
)
_T_975 += (2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086)


@dataclass(frozen=True)
class Arrival:
    """Where a curve comes to stay at or below a target."""

    step: float
    is_bound: bool = False
    """True when the first evaluation was there already: it arrived at this step or before."""


def arrival(steps: Sequence[float], nll: Sequence[float], target: float) -> Arrival | None:
    """The start of the final run of evaluations with NLL <= target; None if the last is above."""
    if len(steps) != len(nll) or len(steps) == 0:
        raise ValueError(f"{len(steps)} steps and {len(nll)} values: they must agree, and not be 0")
    above = [i for i, value in enumerate(nll) if not value <= target]  # nan counts as above
    if not above:
        return Arrival(float(steps[0]), is_bound=True)
    last = above[-1]
    if last == len(nll) - 1:
        return None
    drop = nll[last] - nll[last + 1]
    share = (nll[last] - target) / drop if math.isfinite(drop) else 1.0
    log_step = math.log(steps[last]) * (1 - share) + math.log(steps[last + 1]) * share
    return Arrival(math.exp(log_step))


@dataclass(frozen=True)
class SpeedUp:
    """One seed's comparison with its reference run."""

    target: float
    """y*: the reference's last NLL."""
    ratio: float | None
    """T / tau; None when the variant did not arrive."""
    time_ratio: float | None
    """The same in seconds of training."""
    is_bound: bool
    """True when the ratio is a lower bound."""
    gap: float
    """The variant's last NLL minus the target."""


def speed_up(
    reference: tuple[Sequence[float], Sequence[float], Sequence[float]],
    variant: tuple[Sequence[float], Sequence[float], Sequence[float]],
) -> SpeedUp:
    """Compare two (steps, nll, seconds); the reference's last evaluation is the target."""
    steps, nll, seconds = variant
    target = reference[1][-1]
    there = arrival(steps, nll, target)
    gap = nll[-1] - target
    if there is None:
        return SpeedUp(target, None, None, False, gap)
    at = float(np.interp(there.step, [0, *steps], [0.0, *seconds]))
    time_ratio = reference[2][-1] / at if at > 0 else None
    return SpeedUp(target, reference[0][-1] / there.step, time_ratio, there.is_bound, gap)


@dataclass(frozen=True)
class SeedInterval:
    """Geometric mean over paired seeds, with a t-interval of the log ratios."""

    mean: float
    low: float | None
    """None with fewer than three seeds."""
    high: float | None
    num_seeds: int


def over_seeds(ratios: Sequence[float]) -> SeedInterval:
    """The headline: geometric mean and 95 % t-interval."""
    logs = np.log(np.asarray(ratios, dtype=np.float64))
    mean, count = float(logs.mean()), len(logs)
    if count < MIN_SEEDS:
        return SeedInterval(math.exp(mean), None, None, count)
    freedom = count - 1
    quantile = _T_975[freedom - 1] if freedom <= len(_T_975) else 1.96 + 2.4 / freedom
    reach = quantile * float(logs.std(ddof=1)) / math.sqrt(count)
    return SeedInterval(math.exp(mean), math.exp(mean - reach), math.exp(mean + reach), count)


@dataclass(frozen=True)
class Bootstrap:
    """What another sample of validation blocks would change; training noise is not in it."""

    low: float | None
    """2.5 % quantile over the replicates that arrive."""
    high: float | None
    never_share: float
    """Share of replicates in which the variant does not arrive."""


def paired_bootstrap(
    reference: tuple[Sequence[float], Floats],
    variant: tuple[Sequence[float], Floats],
    weight_B: Floats,
    cluster_B: NDArray[np.int64] | None = None,
    *,
    replicates: int = 1000,
    seed: int = 0,
) -> Bootstrap:
    """Redraw blocks (whole documents, with clusters), the same for both curves at all steps.

    Each curve is (steps, NLL per block [E, B]); ``weight_B`` are the blocks' token counts.
    """
    labels = np.arange(len(weight_B)) if cluster_B is None else cluster_B
    _, owner = np.unique(labels, return_inverse=True)
    num_clusters = int(owner.max()) + 1
    draw = np.random.default_rng(seed)
    times_RC = draw.multinomial(num_clusters, np.full(num_clusters, 1 / num_clusters), replicates)
    total_R1 = times_RC @ np.bincount(owner, weight_B)[:, None]
    base_RE, other_RE = (
        times_RC @ _sums(values_EB * weight_B, owner, num_clusters).T / total_R1
        for _, values_EB in (reference, variant)
    )
    ratios = []
    for base, other in zip(base_RE, other_RE):
        there = arrival(variant[0], other.tolist(), float(base[-1]))
        ratios.append(math.nan if there is None else reference[0][-1] / there.step)
    found = np.asarray(ratios)
    never = float(np.isnan(found).mean())
    if never == 1:
        return Bootstrap(None, None, never)
    low, high = np.nanquantile(found, [0.025, 0.975])
    return Bootstrap(float(low), float(high), never)


def _sums(values_EB: Floats, owner_B: NDArray[np.int64], num_clusters: int) -> Floats:
    """Sums over the blocks of each cluster, [E, C]."""
    sums = np.zeros((len(values_EB), num_clusters))
    np.add.at(sums.T, owner_B, values_EB.T)
    return sums


def detrended_spread(values: Sequence[float]) -> float | None:
    """Standard deviation about a slowly changing trend, from second differences.

    Over the last half of the values, where the trend is nearly straight; None for fewer than four.
    """
    late = np.asarray(values[len(values) // 2 :] if len(values) >= 8 else values, dtype=np.float64)
    if len(late) < 4 or not np.isfinite(late).all():
        return None
    return float(np.sqrt(np.mean(np.diff(late, 2) ** 2) / 6))
