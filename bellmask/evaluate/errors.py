"""Standard errors of a mean, for values that are stratified, clustered or both.

The naive std / sqrt(n) is 2.9 times too wide for one stratified draw per block: most of the spread
between blocks is the difference between mask counts, which the strata have already averaged out.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Labels = NDArray[np.int64]

NEIGHBOURS = 8
"""Blocks on each side, in order of stratum, that say what a block's value should have been."""


def collapsed_strata_error(value: Floats, level: Floats, cluster: Labels | None = None) -> float:
    """Standard error of mean(value), one value per stratum of ``level``.

    Neighbouring strata are collapsed in pairs, whose difference is free of the trend over strata.
    With clusters, each value's residual from its neighbours in stratum is summed within clusters.
    """
    order = np.argsort(level, kind="stable")
    if cluster is None:
        return _pairs_error(value[order])
    return clustered_error(_local_residuals(value[order]), cluster[order])


def _pairs_error(ordered: Floats) -> float:
    """sqrt(sum of squared differences of neighbours) / n; a last odd value joins its pair."""
    count = len(ordered)
    even = count - 3 if count % 2 else count
    pairs = ordered[:even].reshape(-1, 2)
    squares = float(((pairs[:, 0] - pairs[:, 1]) ** 2).sum())
    if count % 2:
        squares += 3 * float(ordered[even:].var(ddof=1))
    return squares**0.5 / count


def _local_residuals(ordered: Floats) -> Floats:
    """Each value minus the mean of its neighbours, scaled so that its variance is the value's."""
    count = len(ordered)
    reach = min(NEIGHBOURS, (count - 1) // 2)
    total = np.concatenate([[0.0], np.cumsum(ordered)])
    start = np.clip(np.arange(count) - reach, 0, count - 2 * reach - 1)
    window = total[start + 2 * reach + 1] - total[start]
    mean = (window - ordered) / (2 * reach)
    return (ordered - mean) * np.sqrt(2 * reach / (2 * reach + 1))


def clustered_error(value: Floats, cluster: Labels | None = None) -> float:
    """Standard error of mean(value) when values within a cluster may move together."""
    if cluster is None:
        return float(value.std(ddof=1) / np.sqrt(len(value)))
    _, place = np.unique(cluster, return_inverse=True)
    sums = np.bincount(place, weights=value - value.mean())
    count = len(sums)
    return float(np.sqrt((sums**2).sum() * count / (count - 1)) / len(value))
