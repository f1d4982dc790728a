"""Analyses that need no run: time laws, schedules, and masks with long runs under them.

Nothing is drawn or trained except one histogram; everything else is exact up to quadrature in
float64. Measured on one core: 2 s for the laws at length 128, 1 s for the schedules.
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, get_args

import numpy as np
import torch
from matplotlib import colormaps
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from torch import Tensor

from bellmask.analyze.base import Analysis, OutOptions
from bellmask.compare.variants import parse_variant
from bellmask.config.config import RunConfig
from bellmask.config.options import LawName
from bellmask.diffusion.laws import TimeLaw, TruncatedGaussian, Uniform, composite_rule, panel_edges
from bellmask.diffusion.objectives import Bell, Nelbo
from bellmask.diffusion.schedules import Cosine, Linear, MiddleFlat, Polynomial, Schedule
from bellmask.diffusion.theory import bell_test, context_weights
from bellmask.report.figures import COLORS, draw_histogram, finish_axes, new_figure
from bellmask.storage.build import build_law
from bellmask.utils.errors import UserError, check_least, unknown
from bellmask.utils.progress import Progress
from bellmask.utils.table import Table

# Laws by name, block lengths

_NUMBERS = [f"{mu},{scale}" for scale in (0.1, 0.2) for mu in (0.4, 0.5, 0.6)]
SHIPPED_LAWS = ("uniform", *(f"dirac:{mu}" for mu in (0.4, 0.5, 0.6)))
SHIPPED_LAWS += (*(f"gaussian:{n}" for n in _NUMBERS), *(f"laplace:{n}" for n in _NUMBERS))
"""The laws the paper trains with (Sec. 5.1, App. C.2), and the laplace at the same numbers."""
LONGEST = 4096
"""Up to this length, quadratic tables stay below a few gigabytes."""


def parse_law(text: str) -> TimeLaw:
    """``gaussian:0.3,0.1`` → the law, by the rules of ``bellmask compare``'s variants."""
    name = text.partition(":")[0]
    if name not in get_args(LawName) or "+" in text:
        raise unknown("time law", text, get_args(LawName))
    return build_law(parse_variant(text).apply(RunConfig()).law)


def check_length(length: int, shortest: int = 1) -> None:
    """UserError for a block that is too short, or too long for memory."""
    if not shortest <= length <= LONGEST:
        raise UserError(f"--length {length} must be between {shortest} and {LONGEST}")


# Time laws (Table 3, Definition 4.1)

TIMES = torch.linspace(0, 1, 201, dtype=torch.float64)
"""Of a curve over t in [0, 1]."""


@dataclass(frozen=True, kw_only=True)
class TimeLawsOptions(OutOptions):
    """Compare time laws (Table 3, Definition 4.1): density, mean, spread, the bell test with
    its numbers, and the weight that Eq. L_pi puts on each context count, relative to the NELBO's.

    Examples:
    bellmask analyze time-laws

    bellmask analyze time-laws --laws uniform gaussian:0.3,0.1 laplace:0.5,0.05 --length 1024
    """

    laws: tuple[str, ...] = SHIPPED_LAWS
    """Laws as NAME:MU,SCALE, for example gaussian:0.3,0.1, laplace:0.5,0.2, dirac:0.5, uniform."""
    length: int = 128
    """Tokens in a block."""


def measure_time_laws(options: TimeLawsOptions, progress: Progress) -> dict[str, Any]:
    """The numbers of every law."""
    check_length(options.length)
    if not options.laws:
        raise UserError("--laws needs at least one law, for example gaussian:0.5,0.1")
    laws = {text: parse_law(text) for text in options.laws}
    length, described = options.length, dict[str, Any]()
    progress.start(len(laws))
    for text, law in laws.items():
        described[text] = describe_law(law, length)
        progress.advance()
    # of the table: both ends and eighths or quarters between them
    contexts = sorted({0, length // 8, length // 4, length // 2, 3 * length // 4, length - 1})
    return {"length": length, "contexts": contexts, "t": TIMES.tolist(), "laws": described}


def describe_law(law: TimeLaw, length: int) -> dict[str, Any]:
    """One law: density, moments, Definition 4.1, and omega(N_c) / c of the bell objective.

    omega / c is relative to the base objective, whose omega and c are one. ``all_masked`` is
    E[t^L], how often a sequence shows nothing at all.
    """
    bell = Bell(law)
    return {
        "density": law.pdf(TIMES).tolist() if law.has_density else None,
        "mean": law.mean,
        "sd": law.deviation,
        "bell_test": asdict(bell_test(law)),
        "normalizer": bell.normalizer,
        "relative_weights": (context_weights(bell, length) / bell.normalizer).tolist(),
        "all_masked": law.expectation(lambda t: t**length),
    }


BELL_COLUMNS = ["bell-shaped", "least margin", "largest margin", "at a"]


def _bell(test: dict[str, Any]) -> list[str]:
    """Definition 4.1 in four cells; no largest margin, no place of it."""
    margins = [f"{round(test[name], 4) + 0:.4f}" for name in ("min_margin", "max_margin")]
    place = f"{test['argmax']:.3f}" if test["max_margin"] > 0 else "-"
    return ["yes" if test["is_bell_shaped"] else "no", *margins, place]


def time_laws_tables(results: dict[str, Any]) -> list[Table]:
    """Definition 4.1, then the weights."""
    bells, weights = [], []
    for text, law in results["laws"].items():
        bells.append([text, f"{law['mean']:.4f}", f"{law['sd']:.4f}", *_bell(law["bell_test"])])
        relative = [f"{law['relative_weights'][n]:.2g}" for n in results["contexts"]]
        rare = f"{1e6 * law['all_masked']:.2g}"
        weights.append([text, f"{law['normalizer']:.4f}", *relative, rare])
    title = "Definition 4.1: P(a <= t <= 1-a) - (1-2a), over a in (0, 1/2)"
    columns = ["law", "c", *(f"N_c={n}" for n in results["contexts"]), "all masked, per 1M"]
    weight = f"weight of a context count relative to the NELBO's, L={results['length']}"
    return [
        Table(title, ["law", "mean", "sd", *BELL_COLUMNS], bells),
        Table(weight, columns, weights),
    ]


def time_laws_figure(results: Mapping[str, Any]) -> Figure:
    """Densities (Table 3), and the weight of each context count relative to the NELBO's."""
    figure, (left, middle, right) = new_figure(12.5, 4.6, 3)
    laws, length = results["laws"], results["length"]
    looks = itertools.product(("-", "--", ":", "-."), COLORS)
    for (text, law), (style, color) in zip(laws.items(), itertools.cycle(looks)):
        look: dict[str, Any] = {"color": color, "linestyle": style}
        if law["density"] is None:
            left.axvline(law["mean"], label=text, **look)
        else:
            left.plot(results["t"], law["density"], label=text, **look)
        for axes in (middle, right):
            axes.plot(range(length), law["relative_weights"], **look)
    finish_axes(left, "time t (mask rate)", "density", "time laws (vertical: a point mass)")
    titles = f"weight in $L_\\pi$, L = {length}", "the same, logarithmic: the ends"
    for axes, title in zip((middle, right), titles):
        finish_axes(axes, "observed tokens $N_c$", "weight relative to the NELBO's", title)
        axes.axhline(1, color="0.5", linewidth=0.8)
    left.set_ylim(bottom=0)
    middle.set_ylim(bottom=0)
    right.set_yscale("log")
    smallest = min(min(law["relative_weights"]) for law in laws.values())
    right.set_ylim(bottom=max(1e-9, 0.5 * smallest))  # below, a run of millions sees nothing
    figure.legend(loc="outside lower center", ncols=min(5, len(laws)), fontsize=8)
    return figure


# Schedules (App. C.4)

BINS = 40
"""Of the histogram of visible shares."""
SHARES = (torch.arange(200, dtype=torch.float64) + 0.5) / 200
"""Visible shares inside (0, 1): densities of some schedules are infinite at an end."""


@dataclass(frozen=True, kw_only=True)
class SchedulesOptions(OutOptions):
    """Compare schedules (App. C.4 and its figure of the middle-flat schedule): alpha(t), the
    visible shares that uniform times give, drawn and as a density, and why a flat middle is noisy.

    Examples:
    bellmask analyze schedules

    bellmask analyze schedules --mu 0.4 --sigma 0.2
    """

    mu: float = 0.5
    """Location of the middle-flat schedule's gaussian of visible shares."""
    sigma: float = 0.1
    """Scale of that gaussian."""
    power: float = 2.0
    """Exponent of the polynomial schedule."""
    draws: int = 100_000
    """Times drawn for the histograms."""
    seed: int = 0
    """Seed of the draws."""


def measure_schedules(options: SchedulesOptions, progress: Progress) -> dict[str, Any]:
    """The numbers of every schedule, all for the same times."""
    check_least(options, draws=1)
    if not options.power > 0.5:
        raise UserError(f"--power must be above 0.5 for a finite variance, got {options.power}")
    try:
        target = TruncatedGaussian(options.mu, options.sigma)
        Nelbo(target)  # same weights as middle-flat: rejected if its variance overflows
        schedules: dict[str, Schedule] = {
            "linear": Linear(),
            "cosine": Cosine(),
            "polynomial": Polynomial(options.power),
            "middle_flat": MiddleFlat(target),
        }
    except ValueError as error:
        raise UserError(str(error)) from None
    generator = torch.Generator().manual_seed(options.seed)
    times = Uniform().sample(options.draws, generator=generator, dtype=torch.float64)
    return {
        **{name: getattr(options, name) for name in ("mu", "sigma", "draws")},
        "t": TIMES.tolist(),
        "share": SHARES.tolist(),
        "target_density": target.pdf(SHARES).tolist(),
        "schedules": {name: describe_schedule(one, times) for name, one in schedules.items()},
    }


def describe_schedule(schedule: Schedule, times: Tensor) -> dict[str, Any]:
    """One schedule under uniform times.

    A sequence adds w(t) (1 - alpha) = -alpha' to the NELBO, 1 on average.
    """
    counts, _ = np.histogram(schedule.alpha(times).numpy(), BINS, range=(0, 1))
    return {
        "name": str(schedule),
        "alpha": schedule.alpha(TIMES).tolist(),
        "density": (-1 / schedule.derivative(schedule.inverse(SHARES))).tolist(),
        "weight": _steepness(schedule, SHARES).tolist(),
        "histogram": (counts * BINS / len(times)).tolist(),
        "mean_mask_rate": Uniform().expectation(lambda t: 1 - schedule.alpha(t)),
        "second_moment": second_moment(schedule),
        "bell_test": asdict(bell_test(Uniform(), schedule)),
    }


def _steepness(schedule: Schedule, alpha: Tensor) -> Tensor:
    """-alpha' where the visible share is alpha; without the rounding of t near 0 and 1."""
    if isinstance(schedule, MiddleFlat):
        return 1 / schedule.law.pdf(alpha)
    return -schedule.derivative(schedule.inverse(alpha))


# Paper: Eq. 32, Eq. 33
def second_moment(schedule: Schedule) -> float:
    """E[(w (1 - alpha))^2] = integral of -alpha' over the visible shares; 1 for linear."""
    if isinstance(schedule, Polynomial):  # its integrand may be infinite at alpha = 1
        return schedule.power**2 / (2 * schedule.power - 1)
    breaks = schedule.law.breaks() if isinstance(schedule, MiddleFlat) else ()
    alpha, weight = composite_rule(panel_edges(breaks))
    return float((weight * _steepness(schedule, alpha)).sum())


def schedules_tables(results: dict[str, Any]) -> list[Table]:
    """One row for each schedule."""
    rows = []
    for name, schedule in results["schedules"].items():
        rate = f"{schedule['mean_mask_rate']:.4f}"
        noise = f"{schedule['second_moment']:.5g}"
        rows.append([name, rate, *_bell(schedule["bell_test"]), noise])
    columns = ["schedule", "mean mask rate", *BELL_COLUMNS, "E[(w(1-alpha))^2]"]
    return [Table("mask rates and NELBO weights under uniform times (App. C.4)", columns, rows)]


# Paper: Fig. 11
def schedules_figure(results: Mapping[str, Any]) -> Figure:
    """Fig. of App. C.4: alpha(t), the visible shares it gives, and what a sequence weighs."""
    figure, (left, middle, right) = new_figure(12.5, 4.2, 3)
    schedules, share, target = results["schedules"], results["share"], results["target_density"]
    drawn = schedules["middle_flat"]["histogram"]
    draw_histogram(middle, drawn, label=f"{results['draws']:,} draws")
    label = f"target ({results['mu']:g}, {results['sigma']:g})"
    middle.plot(share, target, color="black", label=label)
    for color, (name, schedule) in zip(COLORS, schedules.items()):
        look = {"color": color, "label": name.replace("_", "-")}
        left.plot(results["t"], schedule["alpha"], **look)
        middle.plot(share, schedule["density"], "--", **look)
        right.plot(share, schedule["weight"], **look)
    middle.set_ylim(0, max(2.0, 1.1 * max(*drawn, *target)))  # cosine's end is infinite
    right.set_yscale("log")
    alpha = "visible share $\\alpha$"
    finish_axes(left, "time t", f"{alpha}$(t)$", "schedules", legend=2)
    finish_axes(middle, alpha, "density", "visible shares under uniform times", legend=3)
    weight = "$w(t)\\,(1 - \\alpha) = -\\alpha'(t)$"
    finish_axes(right, alpha, weight, "weight of a sequence in the NELBO", legend=2)
    return figure


# Masks with long runs (Sec. 4.2, Fig. 4, Prop. 4.4)
#
# Definition 4.3 calls a mask pattern k-inefficient when it has k masks or k non-masks in a row.
# P(not in E_k) is exact: efficient patterns are counted in integers for each number of masks, so
# that q(n) and both lemmas of App. B.3 involve no rounding; a time law enters by its law of mask
# counts, which quadrature gives to a relative 1e-11. Measured on one core with the default options
# (31 values of k, 16 laws): 1.6 s at length 128, 9 s at 1024.

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
    """Time laws of the right panel, as NAME:MU,SCALE, in addition to uniform."""


# Measurement

ACCURACY = 1e-11
"""Relative accuracy of the mask-count law up to length 1024, with room (seen: 1e-12)."""
TIME_STEPS = 16
"""R(t) is evaluated, in integers, at multiples of 1/16."""


# Paper: Def. 4.3
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


# Paper: Eq. 24
def mask_count_law(law: TimeLaw, length: int) -> Tensor:
    """w(n): the probability of n masks, n = 0 .. L, when t follows the law (App. B.3)."""
    if isinstance(law, Uniform):
        return torch.full((length + 1,), 1 / (length + 1), dtype=torch.float64)
    # omega(N_c) of the bell objective is L - N_c times the probability of N_c observed tokens
    observed = context_weights(Bell(law), length) / torch.arange(length, 0, -1)
    none_masked = law.expectation(lambda t: (1 - t) ** length)
    return torch.cat([torch.tensor([none_masked], dtype=torch.float64), observed.flip(0)])


# Paper: Lemma B.5, Eq. 20
def check_counts(counts: Sequence[int]) -> dict[str, Any]:
    """The lemma on q(n), in integers: symmetric, and never falling toward the middle.

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


# Paper: Eq. 25, Eq. 26, Eq. 27
def time_weights(length: int) -> list[list[int]]:
    """i^n (G-i)^(L-n) for t = i/G in [0, 1/2]: R(t) G^L is their sum against N(n)."""
    grid = range(TIME_STEPS // 2 + 1)
    return [[i**n * (TIME_STEPS - i) ** (length - n) for n in range(length + 1)] for i in grid]


# Paper: Lemma B.6
def rises_in_time(counts: Sequence[int], weights: Sequence[Sequence[int]]) -> bool:
    """The lemma on R(t), in integers: strictly increasing along the grid up to t = 1/2."""
    values = [sum(c * w for c, w in zip(counts, row)) for row in weights]
    return all(before < after for before, after in itertools.pairwise(values))


class Efficiency:
    """q(n) = N(n) / C(L, n) and 1 - q(n) as floats, each with all its digits.

    q is divided by 2^-shift, about its maximum: at length 1024, q for k = 2 is below 1e-307.
    """

    def __init__(self, counts: Sequence[int]) -> None:
        length = len(counts) - 1
        totals = [math.comb(length, n) for n in range(length + 1)]
        middle = length // 2
        self.shift = totals[middle].bit_length() - counts[middle].bit_length()
        # Python rounds a ratio of integers correctly
        scaled = [(count << self.shift) / total for count, total in zip(counts, totals)]
        missing = [(total - count) / total for count, total in zip(counts, totals)]
        self.scaled, self.inefficient = torch.tensor([scaled, missing], dtype=torch.float64)

    # Paper: Eq. 19, Eq. 23, Eq. 25, Eq. 26, Eq. 27
    def probability(self, weights: Tensor) -> dict[str, Any]:
        """P(not in E_k), its logarithm (None where it is zero in floats) and P(in E_k)."""
        scaled = float(weights @ self.scaled)
        log10 = math.log10(scaled) - self.shift * math.log10(2) if scaled > 0 else None
        return {
            "efficient": math.ldexp(scaled, -self.shift),
            "log10_efficient": log10,
            "inefficient": float(weights @ self.inefficient),
        }

    # Paper: Prop. 4.4
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


def measure_masks(options: InefficientMasksOptions, progress: Progress) -> dict[str, Any]:
    """Every k for the figure and the checks, every law at every k."""
    ks, all_ks, max_k = run_lengths(options)
    laws = {text: parse_law(text) for text in ("uniform", *options.laws, *SHIPPED_LAWS)}
    progress.start(len(laws) + len(all_ks))
    weights: dict[str, Tensor] = {}
    for text, law in laws.items():
        weights[text] = mask_count_law(law, options.length)
        progress.advance()
    in_time = time_weights(options.length)
    results: list[dict[str, Any]] = []
    for k in all_ks:
        counts = efficient_counts(options.length, k)
        lemmas = check_counts(counts) | {"rises_in_time": rises_in_time(counts, in_time)}
        efficiency = Efficiency(counts)
        by_law = {text: efficiency.probability(weight) for text, weight in weights.items()}
        for text, weight in weights.items():
            if text != "uniform":
                by_law[text] |= efficiency.margin(weight, weights["uniform"])
        results.append({"k": k, "lemmas": lemmas, "laws": by_law})
        if k in ks:  # q against N_c = L - n, where it is drawn
            by_context = torch.ldexp(efficiency.scaled, torch.tensor(-efficiency.shift)).flip(0)
            results[-1]["by_context"] = by_context.tolist()
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


# Tables

LEMMAS = {
    "q(n) = q(L-n)": "is_symmetric",
    "q(n) <= q(n+1) up to the middle": "rises_to_the_middle",
    f"R(t) strictly rises, t = 0, 1/{TIME_STEPS}, .., 1/2": "rises_in_time",
}


def masks_tables(results: dict[str, Any]) -> list[Table]:
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
            where = {"fails": "fails", "undecided": "below double precision"}
            ks = {word: [str(k) for k in found if found[k]["verdict"] == word] for word in where}
            said = [f"{where[word]} at k={', '.join(at)}" for word, at in ks.items() if at]
            verdict = "; ".join(said) or f"holds at all {len(found)} k"
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


# Figure


# Paper: Fig. 4
def masks_figure(results: Mapping[str, Any]) -> Figure:
    """Fig. 4: P(not in E_k) by number of observed tokens, and by k for several time laws."""
    figure, (left, right) = new_figure(11, 4.4, 2)
    length = results["length"]
    curves = {at["k"]: at["by_context"] for at in results["by_k"] if "by_context" in at}
    shades = colormaps["viridis"].resampled(len(curves) + 1)
    for number, (k, values) in enumerate(curves.items()):
        left.plot(range(len(values)), values, color=shades(number), label=f"k = {k}")
    inside = [at for at in results["by_k"] if at["k"] <= results["max_k"]]
    for text, color in zip(results["shown"], itertools.cycle(COLORS)):
        chances = [at["laws"][text]["efficient"] for at in inside]
        ks = [at["k"] for at in inside]
        right.plot(ks, chances, "o-", markersize=3, color=color, label=text)
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


# All three as commands

TIME_LAWS = Analysis(
    "time-laws", TimeLawsOptions, measure_time_laws, time_laws_tables, time_laws_figure, "laws"
)
# Paper: Fig. 11
SCHEDULES = Analysis(
    "schedules", SchedulesOptions, measure_schedules, schedules_tables, schedules_figure
)
# Paper: Fig. 4
INEFFICIENT_MASKS = Analysis(
    "inefficient-masks", InefficientMasksOptions, measure_masks, masks_tables, masks_figure
)
