"""The paper's claims that comparisons of this size can speak to, and how each is judged.

A claim compares final NLLs of runs with the same seeds. From three seeds on, the 95 % t-interval of
the paired differences decides: it must exclude zero (for a claim of equality, it must lie within
half of bell's gain). With fewer seeds ``reach`` stands in: Student's t times the standard deviation
of the headline's paired gaps. A smaller difference is inconclusive.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from pages import AGREES, DISAGREES, INCONCLUSIVE, Verdict, outside_zero, worst

from bellmask.utils.stats import Estimate

Results = Mapping[str, Any]
Judge = Callable[[Results, float], Verdict]


@dataclass(frozen=True)
class Claim:
    """A sentence of the paper, the suite that speaks to it, and how to read that suite."""

    paper: str
    text: str
    suite: str
    judge: Judge


def final_nlls(results: Results, name: str) -> dict[int, float]:
    """Final NLL of a variant, by seed."""
    return {run["seed"]: float(run["nll"][-1]) for run in results["variants"][name]["runs"]}


Ends = tuple[float, float, float]
"""A mean and its 95 % interval."""


def _estimate(values: Sequence[float], reach: float) -> Ends:
    found = Estimate.over_seeds(values)
    low, high = found.interval
    if low is None or high is None:
        low, high = found.value - reach, found.value + reach
    return found.value, low, high


def _by_seed(results: Results, names: Sequence[str]) -> list[list[float]]:
    """The variants' final NLLs, one row per seed that all of them have."""
    found = [final_nlls(results, name) for name in names]
    shared = sorted(set.intersection(*(set(one) for one in found)))
    return [[one[seed] for one in found] for seed in shared]


def difference(results: Results, first: str, second: str, reach: float) -> Ends:
    """Final NLL of the first less that of the second."""
    return _estimate([a - b for a, b in _by_seed(results, [first, second])], reach)


def _word(ends: Ends) -> str:
    """Agrees when the whole interval is below zero."""
    _, low, high = ends
    return outside_zero(-high, -low)


def _said(ends: Ends) -> str:
    mean, low, high = ends
    return f"{mean:+.3f} ({low:+.3f} to {high:+.3f})"


def better(winner: str, loser: str) -> Judge:
    """``winner`` has the lower NLL."""
    return all_better([winner], loser)


def all_better(winners: list[str], loser: str) -> Judge:
    """Every one of ``winners`` has a lower NLL than ``loser``."""

    def judge(results: Results, reach: float) -> Verdict:
        gaps = [difference(results, name, loser, reach) for name in winners]
        shown = [min(gaps), max(gaps)] if len(gaps) > 1 else gaps
        return Verdict(worst(_word(gap) for gap in gaps), "; ".join(_said(gap) for gap in shown))

    return judge


def same(first: str, second: str) -> Judge:
    """A difference that is surely below half of bell's gain; mere noise shows nothing."""

    def judge(results: Results, reach: float) -> Verdict:
        gap = difference(results, first, second, reach)
        gain = difference(results, "base", "bell", reach)[0]
        _, low, high = gap
        is_same, is_other = max(-low, high) < gain / 2, low > 0 or high < 0
        word = AGREES if is_same else DISAGREES if is_other else INCONCLUSIVE
        return Verdict(word, _said(gap))

    return judge


def spread_below_gain(names: list[str], loser: str) -> Judge:
    """The family matters less than having a bell at all."""

    def judge(results: Results, reach: float) -> Verdict:
        rows = _by_seed(results, [*names, loser])
        spreads = [max(own) - min(own) for *own, _ in rows]
        gains = [other - max(own) for *own, other in rows]
        ends = _estimate([s - g for s, g in zip(spreads, gains, strict=True)], reach)
        said = f"spread {fmean(spreads):.3f}, smallest gain {fmean(gains):.3f}"
        return Verdict(_word(ends), said)

    return judge


def less_stable(rough: str, smooth: str) -> Judge:
    """``rough`` has the larger detrended spread of NLL; with one seed a factor of 1.5 counts."""

    def judge(results: Results, reach: float) -> Verdict:
        runs = [results["variants"][name]["runs"] for name in (rough, smooth)]
        pairs = [(a["nll_spread"], b["nll_spread"]) for a, b in zip(*runs)]
        if any(None in pair for pair in pairs):
            return Verdict(INCONCLUSIVE, "too few evaluations")
        _, low, high = _estimate([math.log(a / b) for a, b in pairs], math.log(1.5))
        left, right = (fmean(values) for values in zip(*pairs))
        return Verdict(outside_zero(low, high), f"spread {left:.4f}, Gaussian's {right:.4f}")

    return judge


G, L = "gaussian:0.5,0.1", "laplace:0.5,0.1"
DIRACS = ["dirac:0.4", "dirac:0.5", "dirac:0.6"]
GAUSSIANS = [f"gaussian:{mu},{sigma}" for sigma in (0.1, 0.2) for mu in (0.4, 0.5, 0.6)]
FAMILIES = ["dirac:0.5", G, L]

CLAIMS = [
    Claim("Fig. 5", "All bell-shaped laws beat the base", "families", all_better(FAMILIES, "base")),
    Claim("Fig. 5", "The family matters little", "families", spread_below_gain(FAMILIES, "base")),
    Claim("Fig. 5", "The Dirac is less stable", "families", less_stable("dirac:0.5", G)),
    Claim("Fig. 5", "sigma 0.1 beats 0.2", "variance", better(G, "gaussian:0.5,0.2")),
    Claim("Fig. 5", "sigma 0.1 beats uniform times", "variance", better(G, "uniform")),
    Claim(
        "Fig. 5",
        "Mean 0.6 is worse than 0.4 and 0.5",
        "mean",
        all_better(["gaussian:0.4,0.1", G], "gaussian:0.6,0.1"),
    ),
    Claim(
        "Fig. 7", "Importance sampling equals the base", "alternatives", same("importance", "base")
    ),
    Claim("Fig. 7", "The same with batches of 128", "batch128", same("importance", "base")),
    Claim("App. C.4", "The same, 1/t kept", "alternatives", same("importance_t", "base")),
    Claim("Fig. 7", "The base beats middle-flat", "alternatives", better("base", "middle_flat")),
    Claim("Fig. 7", "The bell beats importance", "alternatives", better("bell", "importance")),
    Claim("Fig. 8", "All Diracs beat the base", "dirac", all_better(DIRACS, "base")),
    Claim("Fig. 8", "Dirac 0.6 is the worst", "dirac", all_better(DIRACS[:2], "dirac:0.6")),
    Claim("Fig. 9", "All Gaussians beat the base", "gaussian", all_better(GAUSSIANS, "base")),
    Claim(
        "Fig. 9",
        "At mean 0.6, sigma 0.2 beats 0.1",
        "gaussian",
        better("gaussian:0.6,0.2", "gaussian:0.6,0.1"),
    ),
    Claim(
        "Fig. 10",
        "Both Laplaces beat the base",
        "laplace",
        all_better([L, "laplace:0.5,0.2"], "base"),
    ),
    Claim("Fig. 10", "The narrower Laplace is better", "laplace", better(L, "laplace:0.5,0.2")),
    Claim(
        "-",
        "Clipping is not why: bell beats an unclipped base",
        "clipping",
        better("bell", "base unclipped"),
    ),
]
