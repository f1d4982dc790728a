"""Numbers with their errors, and standard errors of a mean for stratified or clustered values.

The naive std / sqrt(n) is 2.9 times too wide for one stratified draw per block: most of the spread
between blocks is due to mask counts, which stratification averages out.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Labels = NDArray[np.int64]

MIN_CLUSTERS = 20
"""With fewer documents than this, errors between documents cannot be estimated; blocks are used."""
NEIGHBORS = 8
"""Blocks on each side, in order of stratum, that predict a block's value."""
MIN_SEEDS = 3
"""Minimum number of paired seeds for an interval."""

# quantiles of Student's t at 0.975 for 1, 2, ... degrees of freedom
_T_975: tuple[float, ...] = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)
_T_975 += (2.228, 2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086)


@dataclass(frozen=True)
class Estimate:
    """A mean of ``n`` values and its standard error (None for a single value)."""

    value: float
    se: float | None
    n: int

    @staticmethod
    def over_seeds(values: Sequence[float]) -> Estimate:
        """The mean over seeds, and its error by their spread."""
        count = len(values)
        se = statistics.stdev(values) / math.sqrt(count) if count > 1 else None
        return Estimate(statistics.fmean(values), se, count)

    @staticmethod
    def paired(ours: Sequence[float], theirs: Sequence[float]) -> Estimate:
        """The difference, seed by seed."""
        return Estimate.over_seeds([a - b for a, b in zip(ours, theirs, strict=True)])

    @property
    def deviation(self) -> float | None:
        """Standard deviation of a single value: the paper's ±."""
        return None if self.se is None else self.se * math.sqrt(self.n)

    @property
    def interval(self) -> tuple[float, float] | tuple[None, None]:
        """95 % by Student's t, from three values on."""
        if self.se is None or self.n < MIN_SEEDS:
            return None, None
        freedom = self.n - 1
        quantile = _T_975[freedom - 1] if freedom <= len(_T_975) else 1.96 + 2.4 / freedom
        return self.value - quantile * self.se, self.value + quantile * self.se


def plus_minus(value: float | None, spread: float | None, digits: int = 2, sign: str = "") -> str:
    """``31.42 ± 0.27``; a dash for unknown values, no error where there is none (None, nan).

    ``sign="+"`` shows the sign.
    """
    if value is None:
        return "-"
    value = round(value, digits) + 0.0  # never -0.00
    has_spread = spread is not None and not math.isnan(spread)
    return f"{value:{sign}.{digits}f}" + (f" ± {spread:.{digits}f}" if has_spread else "")


def document_clusters(document: Labels) -> Labels | None:
    """The documents as clusters, when they span blocks and there are enough of them."""
    num_documents = len(np.unique(document))
    return document if MIN_CLUSTERS <= num_documents < len(document) else None


def collapsed_strata_error(value: Floats, level: Floats, cluster: Labels | None = None) -> float:
    """Standard error of mean(value), one value per stratum of ``level``.

    Neighboring strata are collapsed in pairs, whose difference is free of the trend over strata.
    With clusters, each value's residual from its neighbors in stratum is summed within clusters.
    """
    order = np.argsort(level, kind="stable")
    if cluster is None:
        return _pairs_error(value[order])
    return clustered_error(_local_residuals(value[order]), cluster[order])


def _pairs_error(ordered: Floats) -> float:
    """sqrt(sum of squared differences of neighbors) / n; a last odd value joins its pair."""
    count = len(ordered)
    even = count - 3 if count % 2 else count
    pairs = ordered[:even].reshape(-1, 2)
    squares = float(((pairs[:, 0] - pairs[:, 1]) ** 2).sum())
    if count % 2:
        squares += 3 * float(ordered[even:].var(ddof=1))
    return squares**0.5 / count


def _local_residuals(ordered: Floats) -> Floats:
    """Each value minus what a line through its neighbors predicts, with the value's variance.

    A line, not a mean: at the ends all neighbors lie on one side.
    """
    count = len(ordered)
    reach = min(NEIGHBORS, (count - 1) // 2)
    start = np.clip(np.arange(count) - reach, 0, count - 2 * reach - 1)
    window = start[:, None] + np.arange(2 * reach + 1)
    others = window[window != np.arange(count)[:, None]].reshape(count, 2 * reach)
    x = others - others.mean(1, keepdims=True)
    here = np.arange(count) - others.mean(1)
    y = ordered[others]
    spread = (x**2).sum(1)
    predicted = y.mean(1) + (x * y).sum(1) / spread * here
    return (ordered - predicted) / np.sqrt(1 + 1 / (2 * reach) + here**2 / spread)


def clustered_error(value: Floats, cluster: Labels | None = None) -> float:
    """Standard error of mean(value) when values within a cluster may move together.

    nan for a single cluster.
    """
    if cluster is None:
        return float(value.std(ddof=1) / np.sqrt(len(value)))
    _, place = np.unique(cluster, return_inverse=True)
    sums = np.bincount(place, weights=value - value.mean())
    count = len(sums)
    if count < 2:
        return float("nan")
    return float(np.sqrt((sums**2).sum() * count / (count - 1)) / len(value))
