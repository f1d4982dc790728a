"""Standard errors of a mean, for values that are stratified, clustered or both.

The naive std / sqrt(n) is 2.9 times too wide for one stratified draw per block: most of the spread
between blocks is the difference between mask counts, which the strata have already averaged out.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Labels = NDArray[np.int64]

MIN_CLUSTERS = 20
"""With fewer documents than this, errors between documents cannot be estimated; blocks are used."""
NEIGHBOURS = 8
"""Blocks on each side, in order of stratum, that say what a block's value should have been."""


def document_clusters(document: Labels) -> Labels | None:
    """The documents as clusters, when they span blocks and there are enough of them."""
    num_documents = len(np.unique(document))
    return document if MIN_CLUSTERS <= num_documents < len(document) else None


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
    """Each value minus what a line through its neighbours predicts, with the value's variance.

    A line, not a mean: at the ends all neighbours lie on one side.
    """
    count = len(ordered)
    reach = min(NEIGHBOURS, (count - 1) // 2)
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

    nan where one cluster is all there is.
    """
    if cluster is None:
        return float(value.std(ddof=1) / np.sqrt(len(value)))
    _, place = np.unique(cluster, return_inverse=True)
    sums = np.bincount(place, weights=value - value.mean())
    count = len(sums)
    if count < 2:
        return float("nan")
    return float(np.sqrt((sums**2).sum() * count / (count - 1)) / len(value))
