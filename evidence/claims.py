"""The paper's claims that runs of this size can speak to, and how each is judged.

A claim compares final NLLs. What training noise does to a difference is estimated from the
headline's three paired seeds: the standard deviation of their gaps. A difference counts beyond
4.3 of them, the 97.5 % quantile of Student's t with two degrees of freedom; less cannot be told.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

AGREES, DISAGREES, UNTOLD = "agrees", "disagrees", "cannot be told at this scale"
NOISE_UNITS = 4.303

Results = Mapping[str, Any]


@dataclass(frozen=True)
class Verdict:
    """What the runs say about a claim."""

    word: str
    measured: str


@dataclass(frozen=True)
class Claim:
    """A sentence of the paper, the suite that speaks to it, and how to read that suite."""

    section: str
    text: str
    suite: str
    judge: Callable[[Results, float], Verdict]


def nll(results: Results, name: str) -> float:
    """Mean final NLL of a variant."""
    return float(results["variants"][name]["nll"])


def _word(difference: float, noise: float) -> str:
    """Agrees when clearly below zero."""
    if abs(difference) < NOISE_UNITS * noise:
        return UNTOLD
    return AGREES if difference < 0 else DISAGREES


def better(winner: str, loser: str) -> Callable[[Results, float], Verdict]:
    """``winner`` has the lower NLL."""

    def judge(results: Results, noise: float) -> Verdict:
        gap = nll(results, winner) - nll(results, loser)
        return Verdict(_word(gap, noise), f"{winner} minus {loser}: {gap:+.3f}")

    return judge


def all_better(winners: list[str], loser: str) -> Callable[[Results, float], Verdict]:
    """Every one of ``winners`` has a lower NLL than ``loser``."""

    def judge(results: Results, noise: float) -> Verdict:
        gaps = {name: nll(results, name) - nll(results, loser) for name in winners}
        words = {_word(gap, noise) for gap in gaps.values()}
        word = next(w for w in (DISAGREES, UNTOLD, AGREES) if w in words)
        listed = ", ".join(f"{name} {gap:+.3f}" for name, gap in gaps.items())
        return Verdict(word, f"against {loser}: {listed}")

    return judge


def same(first: str, second: str) -> Callable[[Results, float], Verdict]:
    """A difference that is surely below half of bell's gain; mere noise shows nothing."""

    def judge(results: Results, noise: float) -> Verdict:
        gap, reach = nll(results, first) - nll(results, second), NOISE_UNITS * noise
        gain = nll(results, "base") - nll(results, "bell")
        word = AGREES if abs(gap) + reach < gain / 2 else DISAGREES if abs(gap) > reach else UNTOLD
        return Verdict(word, f"{first} minus {second}: {gap:+.3f}")

    return judge


def spread_below_gain(names: list[str], loser: str) -> Callable[[Results, float], Verdict]:
    """The family matters less than having a bell at all."""

    def judge(results: Results, noise: float) -> Verdict:
        values = [nll(results, name) for name in names]
        spread, gain = max(values) - min(values), nll(results, loser) - max(values)
        measured = f"spread of {', '.join(names)}: {spread:.3f}; smallest gain {gain:+.3f}"
        if abs(spread - gain) < NOISE_UNITS * noise:
            return Verdict(UNTOLD, measured)
        return Verdict(AGREES if spread < gain else DISAGREES, measured)

    return judge


def less_stable(rough: str, smooth: str) -> Callable[[Results, float], Verdict]:
    """``rough`` has the larger detrended spread of NLL; a factor of 1.5 counts."""

    def judge(results: Results, noise: float) -> Verdict:
        left, right = (results["variants"][n]["runs"][0]["nll_spread"] for n in (rough, smooth))
        if left is None or right is None:
            return Verdict(UNTOLD, "too few evaluations")
        ratio = left / right
        word = AGREES if ratio > 1.5 else DISAGREES if ratio < 1 / 1.5 else UNTOLD
        return Verdict(word, f"spread {left:.4f} against {right:.4f}")

    return judge


G, L = "gaussian:0.5,0.1", "laplace:0.5,0.1"

CLAIMS = [
    Claim(
        "5.1",
        "All bell-shaped laws outperform the base.",
        "families",
        all_better(["dirac:0.5", G, L], "base"),
    ),
    Claim(
        "5.1",
        "The class of distribution is not particularly important.",
        "families",
        spread_below_gain(["dirac:0.5", G, L], "base"),
    ),
    Claim("5.1", "The Dirac delta is less stable.", "families", less_stable("dirac:0.5", G)),
    Claim("5.1", "sigma = 0.1 outperforms 0.2.", "variance", better(G, "gaussian:0.5,0.2")),
    Claim("5.1", "sigma = 0.1 outperforms uniform.", "variance", better(G, "uniform")),
    Claim(
        "5.1",
        "Shifting the mean to 0.6 is worst.",
        "mean",
        all_better(["gaussian:0.4,0.1", G], "gaussian:0.6,0.1"),
    ),
    Claim(
        "5.4",
        "Importance sampling trains as fast as the base.",
        "alternatives",
        same("importance", "base"),
    ),
    Claim("C.4", "The same with 1/t kept.", "alternatives", same("importance_t", "base")),
    Claim(
        "5.4",
        "The middle-flat scheduler is worse than the base.",
        "alternatives",
        better("base", "middle_flat"),
    ),
    Claim(
        "5.4",
        "Bell-shaped sampling is better than importance sampling.",
        "alternatives",
        better("bell", "importance"),
    ),
    Claim(
        "C.2",
        "All Dirac variants outperform the base.",
        "dirac",
        all_better(["dirac:0.4", "dirac:0.5", "dirac:0.6"], "base"),
    ),
    Claim(
        "C.2",
        "delta(0.6) is the worst Dirac.",
        "dirac",
        all_better(["dirac:0.4", "dirac:0.5"], "dirac:0.6"),
    ),
    Claim(
        "C.2",
        "All Gaussian variants improve over the base.",
        "gaussian",
        all_better(
            [f"gaussian:{mu},{sigma}" for sigma in (0.1, 0.2) for mu in (0.4, 0.5, 0.6)], "base"
        ),
    ),
    Claim(
        "C.2",
        "At mean 0.6, sigma = 0.2 is better than 0.1.",
        "gaussian",
        better("gaussian:0.6,0.2", "gaussian:0.6,0.1"),
    ),
    Claim(
        "C.2",
        "Both Laplace widths outperform the base.",
        "laplace",
        all_better([L, "laplace:0.5,0.2"], "base"),
    ),
    Claim(
        "C.2", "The narrower Laplace is slightly better.", "laplace", better(L, "laplace:0.5,0.2")
    ),
]
