"""The paper's ablations as named comparisons: which variants, the first one being the reference.

Runs are keyed by content, so a variant that is in several suites is trained once.
"""

from __future__ import annotations

from collections.abc import Callable


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
    """Does the gain survive another optimiser: {base, bell} x {AdamW, Muon}."""
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
