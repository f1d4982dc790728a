"""How often training sees masks with long runs: ``bellmask analyze inefficient-masks``.

Definition 4.3 calls a mask pattern k-inefficient when it has k masks or k non-masks in a row. Here
P(not in E_k) is exact: efficient patterns are counted in integers for each number of masks, so
that q(n) and both lemmas of App. B.3 involve no rounding; a time law enters by its law of mask
counts, which quadrature gives to a relative 1e-11. Measured on one core with the default options
(31 values of k, 16 laws): 1.6 s at length 128, 9 s at 1024.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle, pairwise
from typing import Any

import torch
from matplotlib import colormaps
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from torch import Tensor

from bellmask.analyze.base import Analysis, OutOptions
from bellmask.analyze.time_laws import SHIPPED_LAWS, check_length, parse_law
from bellmask.diffusion.laws import TimeLaw, Uniform
from bellmask.diffusion.objectives import Bell
from bellmask.diffusion.theory import bell_test, context_weights
from bellmask.report.figures import COLOURS, finish_axes, new_figure
from bellmask.utils.errors import UserError
from bellmask.utils.progress import Progress
from bellmask.utils.table import Table

DEFAULT_KS = (4, 6, 8, 10, 12, 16)
DEFAULT_MAX_K = 32


@dataclass(frozen=True, kw_only=True)
class InefficientMasksOptions(OutOptions):
    """Probability that a mask has no k masks and no k non-masks in a row (Sec. 4.2, Fig. 4,
    Definition 4.3), by number of observed tokens and by time law, with Prop. 4.4 and its lemmas
    checked at every k. Exact; no run is needed.

    Examples:
    bellmask analyze inefficient-masks

    bellmask analyze inefficient-masks --length 1024

    bellmask analyze inefficient-masks --ks 3 5 --laws dirac:0.5 gaussian:0.3,0.1 --max-k 128
    """

    length: int = 128
    """Tokens in a block."""
    ks: tuple[int, ...] = ()
    """Run lengths of the left panel; default: those of 4 6 8 10 12 16 that fit into the block."""
    max_k: int | None = None
    """The right panel goes from k = 2 to this; default 32, or the block length where shorter."""
    laws: tuple[str, ...] = ("dirac:0.5", "gaussian:0.5,0.1", "gaussian:0.5,0.2", "laplace:0.5,0.1")
    """Time laws of the right panel, as NAME:MU,SCALE, beside uniform."""


# Measurement

ACCURACY = 1e-11
"""Relative accuracy of the mask-count law up to length 1024, with room (seen: 1e-12)."""
TIME_STEPS = 16
"""R(t) is evaluated, in integers, at multiples of 1/16."""


def efficient_counts(length: int, k: int) -> list[int]:
    """N(n): strings of n masks and L - n non-masks without k equal symbols in a row, n = 0 .. L.

    Symbol by symbol: a string that ends in a mask is any string and a mask, except those whose last
    run just reached k, which are a string that ended in a non-mask (or nothing) and k masks.
    The polynomial in x that counts masks is one long integer, with a slot for each power of x, so
    that a step is three operations on long integers: 0.1 s at length 1024, whatever k.
    """
    slot = 8 * (length // 8 + 1)  # bits; no count exceeds 2^length
    total, ends_masked, ends_shown = 1, deque([1], maxlen=k), deque([1], maxlen=k)
    for position in range(1, length + 1):
        masked, shown = total << slot, total
        if position >= k:
            masked -= ends_shown[0] << (k * slot)
            shown -= ends_masked[0]
        ends_masked.append(masked)
        ends_shown.append(shown)
        total = masked + shown
    size = slot // 8
    digits = total.to_bytes((length + 1) * size, "little")
    return [int.from_bytes(digits[n * size : (n + 1) * size], "little") for n in range(length + 1)]


def mask_count_law(law: TimeLaw, length: int) -> Tensor:
    """w(n): the probability of n masks, n = 0 .. L, when t follows the law (App. B.3)."""
    if isinstance(law, Uniform):
        return torch.full((length + 1,), 1 / (length + 1), dtype=torch.float64)
    # omega(N_c) of the bell objective is L - N_c times the probability of N_c observed tokens
    observed = context_weights(Bell(law), length) / torch.arange(length, 0, -1)
    none_masked = law.expectation(lambda t: (1 - t) ** length)
    return torch.cat([torch.tensor([none_masked], dtype=torch.float64), observed.flip(0)])


def check_counts(counts: Sequence[int]) -> dict[str, Any]:
    """The lemma on q(n), in integers: symmetric, and never falling towards the middle.

    q(n) <= q(n+1) is (L-n) N(n) <= (n+1) N(n+1). ``level_steps`` counts the steps where both are
    equal and not zero: the lemma allows them.
    """
    length = len(counts) - 1
    steps = [
        ((length - n) * counts[n], (n + 1) * counts[n + 1]) for n in range(length) if 2 * n < length
    ]
    return {
        "is_symmetric": list(counts) == list(reversed(counts)),
        "rises_to_the_middle": all(before <= after for before, after in steps),
        "level_steps": sum(before == after > 0 for before, after in steps),
    }


def time_weights(length: int) -> list[list[int]]:
    """i^n (G-i)^(L-n) for t = i/G in [0, 1/2]: R(t) G^L is their sum against N(n)."""
    grid = range(TIME_STEPS // 2 + 1)
    return [[i**n * (TIME_STEPS - i) ** (length - n) for n in range(length + 1)] for i in grid]


def rises_in_time(counts: Sequence[int], weights: Sequence[Sequence[int]]) -> bool:
    """The lemma on R(t), in integers: strictly increasing along the grid up to t = 1/2."""
    values = [sum(c * w for c, w in zip(counts, row)) for row in weights]
    return all(before < after for before, after in pairwise(values))


@dataclass(frozen=True)
class Efficiency:
    """q(n) and 1 - q(n) as floats, each with all its digits.

    q is divided by 2^-shift, about its maximum: at length 1024, q for k = 2 is below 1e-307.
    """

    shift: int
    scaled: Tensor
    inefficient: Tensor

    @classmethod
    def from_counts(cls, counts: Sequence[int]) -> Efficiency:
        """N(n) / C(L, n); Python rounds a ratio of integers correctly."""
        length = len(counts) - 1
        totals = [math.comb(length, n) for n in range(length + 1)]
        middle = length // 2
        shift = totals[middle].bit_length() - counts[middle].bit_length()
        scaled = [(count << shift) / total for count, total in zip(counts, totals)]
        missing = [(total - count) / total for count, total in zip(counts, totals)]
        as_tensor = torch.tensor([scaled, missing], dtype=torch.float64)
        return cls(shift, as_tensor[0], as_tensor[1])

    def probability(self, weights: Tensor) -> dict[str, Any]:
        """P(not in E_k), its logarithm (None where it is zero in floats) and P(in E_k)."""
        scaled = float(weights @ self.scaled)
        log10 = math.log10(scaled) - self.shift * math.log10(2) if scaled > 0 else None
        return {
            "efficient": math.ldexp(scaled, -self.shift),
            "log10_efficient": log10,
            "inefficient": float(weights @ self.inefficient),
        }

    def margin(self, weights: Tensor, uniform: Tensor) -> dict[str, Any]:
        """P(law) - P(uniform), from the smaller of P and 1 - P so that little cancels.

        ``relative`` is the margin divided by that smaller number under uniform times; ``verdict``
        says whether it is further from zero than the rounding errors of both sums.
        """
        is_rare = math.ldexp(float(uniform @ self.scaled), -self.shift) <= 0.5
        values = self.scaled if is_rare else self.inefficient
        mine, base = float(weights @ values), float(uniform @ values)
        relative = (mine - base) / base if is_rare else (base - mine) / base
        doubt = ACCURACY * (mine + base) / base
        size = math.ldexp(base, -self.shift) if is_rare else base
        verdict = "holds" if relative > doubt else "fails" if relative < -doubt else "undecided"
        return {"margin": relative * size, "relative": relative, "verdict": verdict}


def measure(options: InefficientMasksOptions, progress: Progress) -> dict[str, Any]:
    """Every k for the figure and the checks, every law at every k."""
    ks, all_ks, max_k = run_lengths(options)
    laws = {text: parse_law(text) for text in ("uniform", *options.laws, *SHIPPED_LAWS)}
    progress.start(len(laws) + len(all_ks))
    weights: dict[str, Tensor] = {}
    for text, law in laws.items():
        weights[text] = mask_count_law(law, options.length)
        progress.advance()
    in_time = time_weights(options.length)
    results = []
    for k in all_ks:
        counts = efficient_counts(options.length, k)
        lemmas = check_counts(counts) | {"rises_in_time": rises_in_time(counts, in_time)}
        results.append({"k": k, "lemmas": lemmas, **_by_law(counts, weights, k in ks)})
        progress.advance()
    return {
        "length": options.length,
        "ks": ks,
        "max_k": max_k,
        "shown": list(dict.fromkeys(["uniform", *options.laws])),
        "is_bell_shaped": {text: bell_test(law).is_bell_shaped for text, law in laws.items()},
        "accuracy": ACCURACY,
        "by_k": results,
    }


def run_lengths(options: InefficientMasksOptions) -> tuple[list[int], list[int], int]:
    """(k of the left panel, every k that is measured, the right panel's last k)."""
    length = options.length
    check_length(length, shortest=2)
    ks = list(options.ks) or [k for k in DEFAULT_KS if k <= length] or [length]
    max_k = min(DEFAULT_MAX_K, length) if options.max_k is None else options.max_k
    for name, k in [*(("--ks", k) for k in ks), ("--max-k", max_k)]:
        if not 2 <= k <= length:
            raise UserError(f"{name} {k} must be between 2 and the block length, {length}")
    return sorted(set(ks)), sorted({*ks, *range(2, max_k + 1)}), max_k


def _by_law(counts: list[int], weights: dict[str, Tensor], with_curve: bool) -> dict[str, Any]:
    """What each law gives at one k; and q against N_c = L - n, where it is drawn."""
    efficiency = Efficiency.from_counts(counts)
    laws = {text: efficiency.probability(weight) for text, weight in weights.items()}
    for text, weight in weights.items():
        if text != "uniform":
            laws[text] |= efficiency.margin(weight, weights["uniform"])
    if not with_curve:
        return {"laws": laws}
    by_context = torch.ldexp(efficiency.scaled, torch.tensor(-efficiency.shift)).flip(0)
    return {"laws": laws, "by_context": by_context.tolist()}


# Tables

LEMMAS = {
    "q(n) = q(L-n)": "is_symmetric",
    "q(n) <= q(n+1) up to the middle": "rises_to_the_middle",
    f"R(t) strictly rises, t = 0, 1/{TIME_STEPS}, .., 1/2": "rises_in_time",
}


def tables(results: dict[str, Any]) -> list[Table]:
    """Probabilities, Prop. 4.4 law by law, and the lemmas."""
    by_k, shown = results["by_k"], results["shown"]
    probabilities = [
        [str(at["k"]), *(_probability(at["laws"][text]) for text in shown)]
        for at in by_k
        if at["k"] in results["ks"]
    ]
    proposition = []
    for text, is_bell in results["is_bell_shaped"].items():
        if text != "uniform":
            found = {at["k"]: at["laws"][text] for at in by_k}
            least = [_least(found, name) for name in ("margin", "relative")]
            undecided = _where("below double precision", found, "undecided")
            verdict = "; ".join([*_where("fails", found, "fails"), *undecided])
            verdict = verdict or f"holds at all {len(found)} k"
            proposition.append([text, "yes" if is_bell else "no", *least, verdict])
    lemmas = []
    for text, key in LEMMAS.items():
        broken = [str(at["k"]) for at in by_k if not at["lemmas"][key]]
        lemmas.append([text, f"fails at k={', '.join(broken)}" if broken else "holds"])
    title = f"P(no run of k masks or k non-masks), L={results['length']}"
    columns = ["law", "bell-shaped", "least margin", "least relative margin", "P(law) > P(uniform)"]
    margins = "Prop. 4.4, at every k; relative to the smaller of P and 1 - P"
    exact = f"lemmas of App. B.3, in exact integers, {len(by_k)} k"
    return [
        Table(title, ["k", *shown], probabilities),
        Table(margins, columns, proposition),
        Table(exact, ["lemma", "verdict"], lemmas),
    ]


def _probability(value: dict[str, Any]) -> str:
    """Four decimals, or the end that they would hide."""
    if value["efficient"] > 0.9999:
        return f"1 - {value['inefficient']:.2e}"
    if value["efficient"] >= 1e-4:
        return f"{value['efficient']:.4f}"
    log10 = value["log10_efficient"]
    return "0 in float64" if log10 is None else f"{10 ** (log10 % 1):.2f}e{math.floor(log10)}"


def _least(found: dict[int, dict[str, Any]], name: str) -> str:
    k = min(found, key=lambda k: found[k][name])
    underflows = found[k][name] == 0 and found[k]["relative"] > 0
    return f"{'< 1e-323' if underflows else format(found[k][name], '.3g')} (k={k})"


def _where(what: str, found: dict[int, dict[str, Any]], verdict: str) -> list[str]:
    """``fails at k=3, 4``, or nothing."""
    ks = [str(k) for k, at in found.items() if at["verdict"] == verdict]
    return [f"{what} at k={', '.join(ks)}"] if ks else []


# Figure


def inefficient_masks_figure(results: Mapping[str, Any]) -> Figure:
    """Fig. 4: P(not in E_k) by number of observed tokens, and by k for several time laws."""
    figure, (left, right) = new_figure(11, 4.4, 2)
    length = results["length"]
    curves = {at["k"]: at["by_context"] for at in results["by_k"] if "by_context" in at}
    shades = colormaps["viridis"].resampled(len(curves) + 1)
    for number, (k, values) in enumerate(curves.items()):
        left.plot(range(len(values)), values, color=shades(number), label=f"k = {k}")
    inside = [at for at in results["by_k"] if at["k"] <= results["max_k"]]
    for text, colour in zip(results["shown"], cycle(COLOURS)):
        chances = [at["laws"][text]["efficient"] for at in inside]
        ks = [at["k"] for at in inside]
        right.plot(ks, chances, "o-", markersize=3, color=colour, label=text)
    y = "P(mask is not in $\\mathcal{E}_k$)"
    title = f"masks with $L - N_c$ masked tokens, L = {length}"
    finish_axes(left, "observed tokens $N_c$ in the block", y, title, legend=6)
    title = f"masks drawn with times of a law, L = {length}"
    finish_axes(right, "run length k", y, title, legend=3)
    for axes in (left, right):
        axes.set_ylim(-0.02, 1.04)
    left.set_xticks(sorted({round(length * i / 4) for i in range(5)}))
    right.xaxis.set_major_locator(MaxNLocator(integer=True))
    return figure


INEFFICIENT_MASKS = Analysis(
    "inefficient-masks", InefficientMasksOptions, measure, tables, inefficient_masks_figure
)
