"""The paper's claims that comparisons of this size can speak to, and how each is judged.

A claim compares final NLLs. What training noise does to a difference is estimated from the
headline's paired seeds: ``reach`` is Student's t times the standard deviation of their gaps.
A smaller difference is inconclusive.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from pages import AGREES, DISAGREES, INCONCLUSIVE, Verdict, worst

Results = Mapping[str, Any]
Judge = Callable[[Results, float], Verdict]


@dataclass(frozen=True)
class Claim:
    """A sentence of the paper, the suite that speaks to it, and how to read that suite."""

    paper: str
    text: str
    suite: str
    judge: Judge


def nll(results: Results, name: str) -> float:
    """Mean final NLL of a variant."""
    return float(results["variants"][name]["nll"])


def _word(difference: float, reach: float) -> str:
    """Agrees when clearly below zero."""
    if abs(difference) < reach:
        return INCONCLUSIVE
    return AGREES if difference < 0 else DISAGREES


def better(winner: str, loser: str) -> Judge:
    """``winner`` has the lower NLL."""
    return all_better([winner], loser)


def all_better(winners: list[str], loser: str) -> Judge:
    """Every one of ``winners`` has a lower NLL than ``loser``."""

    def judge(results: Results, reach: float) -> Verdict:
        gaps = [nll(results, name) - nll(results, loser) for name in winners]
        ends = " to ".join(f"{gap:+.3f}" for gap in sorted({min(gaps), max(gaps)}))
        return Verdict(worst(_word(gap, reach) for gap in gaps), ends)

    return judge


def same(first: str, second: str) -> Judge:
    """A difference that is surely below half of bell's gain; mere noise shows nothing."""

    def judge(results: Results, reach: float) -> Verdict:
        gap = nll(results, first) - nll(results, second)
        gain = nll(results, "base") - nll(results, "bell")
        is_same, is_other = abs(gap) + reach < gain / 2, abs(gap) > reach
        word = AGREES if is_same else DISAGREES if is_other else INCONCLUSIVE
        return Verdict(word, f"{gap:+.3f}")

    return judge


def spread_below_gain(names: list[str], loser: str) -> Judge:
    """The family matters less than having a bell at all."""

    def judge(results: Results, reach: float) -> Verdict:
        values = [nll(results, name) for name in names]
        spread, gain = max(values) - min(values), nll(results, loser) - max(values)
        word = _word(spread - gain, reach)
        return Verdict(word, f"spread {spread:.3f}, smallest gain {gain:.3f}")

    return judge


def less_stable(rough: str, smooth: str) -> Judge:
    """``rough`` has the larger detrended spread of NLL; a factor of 1.5 counts."""

    def judge(results: Results, reach: float) -> Verdict:
        left, right = (results["variants"][n]["runs"][0]["nll_spread"] for n in (rough, smooth))
        if left is None or right is None:
            return Verdict(INCONCLUSIVE, "too few evaluations")
        ratio = left / right
        word = AGREES if ratio > 1.5 else DISAGREES if ratio < 1 / 1.5 else INCONCLUSIVE
        return Verdict(word, f"spread {left:.4f}, Gaussian's {right:.4f}")

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
]
