"""Time laws and schedules as numbers: ``bellmask analyze time-laws`` and ``... schedules``.

Nothing is drawn or trained except one histogram; everything else is exact up to quadrature in
float64. Measured on one core: 2 s for the laws at length 128, 1 s for the schedules.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, get_args

import numpy as np
import torch
from matplotlib.figure import Figure
from torch import Tensor

from bellmask.analyze.base import Analysis, OutOptions
from bellmask.compare.variants import parse_variant
from bellmask.config.config import RunConfig
from bellmask.config.options import LawName, ScheduleOptions
from bellmask.diffusion.laws import TimeLaw, TruncatedGaussian, Uniform, composite_rule, panel_edges
from bellmask.diffusion.objectives import Bell, Nelbo
from bellmask.diffusion.schedules import MiddleFlat, Polynomial, Schedule
from bellmask.diffusion.theory import bell_test, context_weights
from bellmask.report.figures import COLOURS, draw_histogram, finish_axes, new_figure
from bellmask.storage.build import build_law, build_schedule
from bellmask.utils.errors import UserError, unknown
from bellmask.utils.progress import Progress
from bellmask.utils.table import Table

# Shared with :mod:`bellmask.analyze.masks`: laws by name, block lengths

_NUMBERS = [f"{mu},{scale}" for scale in (0.1, 0.2) for mu in (0.4, 0.5, 0.6)]
SHIPPED_LAWS = ("uniform", *(f"dirac:{mu}" for mu in (0.4, 0.5, 0.6)))
SHIPPED_LAWS += (*(f"gaussian:{n}" for n in _NUMBERS), *(f"laplace:{n}" for n in _NUMBERS))
"""The laws the paper trains with (Sec. 5.1, App. C.2), and the laplace at the same numbers."""
LONGEST = 4096
"""Tables of a length by itself, or by quadrature nodes, stay below a few gigabytes up to here."""


def parse_law(text: str) -> TimeLaw:
    """``gaussian:0.3,0.1`` → the law, by the rules of ``bellmask compare``'s variants."""
    name = text.partition(":")[0]
    if name not in get_args(LawName) or "+" in text:
        raise unknown("time law", text, get_args(LawName))
    return build_law(parse_variant(text).apply(RunConfig()).law)


def check_length(length: int, shortest: int = 1) -> None:
    """UserError for a block that is too short to speak of, or too long for memory."""
    if not shortest <= length <= LONGEST:
        raise UserError(f"--length {length} must be between {shortest} and {LONGEST}")


# Time laws (Table 3, Definition 4.1)

TIMES = torch.linspace(0, 1, 201, dtype=torch.float64)
"""Of a curve over t in [0, 1]."""


@dataclass(frozen=True, kw_only=True)
class TimeLawsOptions(OutOptions):
    """Time laws side by side (Table 3, Definition 4.1): density, mean, spread, the bell test with
    its numbers, and the weight that Eq. L_pi puts on each context count, relative to the NELBO's.

    Examples:
    bellmask analyze time-laws

    bellmask analyze time-laws --laws uniform gaussian:0.3,0.1 laplace:0.5,0.05 --length 1024
    """

    laws: tuple[str, ...] = SHIPPED_LAWS
    """NAME:MU,SCALE, for example gaussian:0.3,0.1, laplace:0.5,0.2, dirac:0.5, uniform."""
    length: int = 128
    """Tokens in a block."""


def measure_time_laws(options: TimeLawsOptions, progress: Progress) -> dict[str, Any]:
    """The numbers of every law."""
    check_length(options.length)
    if not options.laws:
        raise UserError("--laws needs at least one law, for example gaussian:0.5,0.1")
    laws = {text: parse_law(text) for text in options.laws}
    described: dict[str, Any] = {}
    progress.start(len(laws))
    for text, law in laws.items():
        described[text] = describe_law(law, options.length)
        progress.advance()
    return {
        "length": options.length,
        "contexts": contexts(options.length),
        "t": TIMES.tolist(),
        "laws": described,
    }


def contexts(length: int) -> list[int]:
    """The context counts of the table: both ends and eighths or quarters between them."""
    inside = [length // 8, length // 4, length // 2, 3 * length // 4]
    return sorted({0, *inside, length - 1})


def describe_law(law: TimeLaw, length: int) -> dict[str, Any]:
    """One law: density, moments, Definition 4.1, and omega(N_c) / c of the bell objective.

    omega / c is relative to the base objective, whose omega and c are one. ``all_masked`` is
    E[t^L], how often a sequence shows nothing at all.
    """
    mean, bell = law.mean, Bell(law)
    return {
        "density": law.pdf(TIMES).tolist() if law.has_density else None,
        "mean": mean,
        "sd": math.sqrt(max(0.0, law.expectation(lambda t: (t - mean) ** 2))),
        "bell_test": asdict(bell_test(law)),
        "normaliser": bell.normaliser,
        "relative_weights": (context_weights(bell, length) / bell.normaliser).tolist(),
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
        weights.append([text, f"{law['normaliser']:.4f}", *relative, rare])
    title = "Definition 4.1: P(a <= t <= 1-a) - (1-2a), over a in (0, 1/2)"
    columns = ["law", "c", *(f"N_c={n}" for n in results["contexts"]), "all masked, per 1M"]
    weight = f"weight of a context count relative to the NELBO's, L={results['length']}"
    return [
        Table(title, ["law", "mean", "sd", *BELL_COLUMNS], bells),
        Table(weight, columns, weights),
    ]


STYLES = ["-", "--", ":", "-."]


def time_laws_figure(results: Mapping[str, Any]) -> Figure:
    """Densities (Table 3), and the weight of each context count relative to the NELBO's."""
    figure, (left, middle, right) = new_figure(12.5, 4.6, 3)
    laws, length = results["laws"], results["length"]
    for text, look in _looks(list(laws)).items():
        law = laws[text]
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


def _looks(texts: Sequence[str]) -> dict[str, dict[str, Any]]:
    """A colour for each name and scale; within it a line style by location, solid nearest 1/2."""
    families: dict[str, list[str]] = {}
    for text in texts:
        name, _, numbers = text.partition(":")
        families.setdefault(f"{name} {numbers.partition(',')[2]}", []).append(text)
    looks = {}
    for colour, family in zip(itertools.cycle(COLOURS), families.values()):
        for place, text in enumerate(sorted(family, key=_distance)):
            style, width = STYLES[place % len(STYLES)], 1.1 if place else 1.7
            looks[text] = {"color": colour, "linestyle": style, "linewidth": width}
    return {text: looks[text] for text in texts}


def _distance(text: str) -> float:
    """How far the location in ``name:mu,scale`` is from 1/2, where one is given."""
    location = text.partition(":")[2].partition(",")[0]
    return abs(float(location) - 0.5) if location else 0.0


# Schedules (App. C.4)

BINS = 40
"""Of the histogram of visible shares."""
SHARES = (torch.arange(200, dtype=torch.float64) + 0.5) / 200
"""Visible shares inside (0, 1): densities of some schedules are infinite at an end."""


@dataclass(frozen=True, kw_only=True)
class SchedulesOptions(OutOptions):
    """Schedules side by side (App. C.4 and its figure of the middle-flat schedule): alpha(t), the
    visible shares that uniform times give, drawn and as a density, and why a flat middle is noisy.

    Examples:
    bellmask analyze schedules

    bellmask analyze schedules --mu 0.4 --sigma 0.2 --batch-size 128
    """

    mu: float = 0.5
    """Location of the middle-flat schedule's gaussian of visible shares."""
    sigma: float = 0.1
    """Scale of that gaussian."""
    power: float = 2.0
    """Exponent of the polynomial schedule."""
    batch_size: int = 512
    """Sequences in a stratified batch."""
    draws: int = 100_000
    """Times drawn for the histograms."""
    seed: int = 0
    """Decides the draws."""


def measure_schedules(options: SchedulesOptions, progress: Progress) -> dict[str, Any]:
    """The numbers of every schedule; all are given the same times."""
    if options.batch_size < 1 or options.draws < 1:
        raise UserError("--batch-size and --draws must be at least 1")
    schedules = _schedules(options)
    generator = torch.Generator().manual_seed(options.seed)
    times = Uniform().sample(options.draws, generator=generator, dtype=torch.float64)
    described: dict[str, Any] = {}
    for name, schedule in schedules.items():
        described[name] = describe_schedule(schedule, times, options.batch_size)
        progress.advance()
    return {
        "mu": options.mu,
        "sigma": options.sigma,
        "batch_size": options.batch_size,
        "draws": options.draws,
        "t": TIMES.tolist(),
        "share": SHARES.tolist(),
        "target_density": TruncatedGaussian(options.mu, options.sigma).pdf(SHARES).tolist(),
        "schedules": described,
    }


def _schedules(options: SchedulesOptions) -> dict[str, Schedule]:
    """Name → schedule; refused where the variance of NELBO weights is infinite or overflows."""
    if not options.power > 0.5:
        raise UserError(
            f"--power {options.power} must be above 0.5: below, the weights' variance is infinite"
        )
    given = [
        ScheduleOptions("linear"),
        ScheduleOptions("cosine"),
        ScheduleOptions("polynomial", power=options.power),
        ScheduleOptions("middle_flat", mu=options.mu, scale=options.sigma),
    ]
    try:
        Nelbo(TruncatedGaussian(options.mu, options.sigma))  # weighs as middle-flat does
        return {one.name: build_schedule(one) for one in given}
    except ValueError as error:
        raise UserError(str(error)) from None


def describe_schedule(schedule: Schedule, times: Tensor, batch_size: int) -> dict[str, Any]:
    """One schedule under uniform times.

    A sequence adds w(t) (1 - alpha) = -alpha' to the NELBO, 1 on average. ``widest_two`` is the
    share of the mask-rate axis that the two widest of the batch's strata stand for.
    """
    edges = torch.linspace(0, 1, batch_size + 1, dtype=torch.float64)
    widths = -torch.diff(schedule.alpha(edges))
    histogram, deviation = _histogram(schedule, times)
    return {
        "name": str(schedule),
        "alpha": schedule.alpha(TIMES).tolist(),
        "density": (-1 / schedule.derivative(schedule.inverse(SHARES))).tolist(),
        "weight": _steepness(schedule, SHARES).tolist(),
        "histogram": histogram,
        "histogram_deviation": deviation,
        "mean_mask_rate": Uniform().expectation(lambda t: 1 - schedule.alpha(t)),
        "second_moment": second_moment(schedule),
        "widest_two": float(widths.topk(min(2, batch_size)).values.sum()),
        "bell_test": asdict(bell_test(Uniform(), schedule)),
    }


def _steepness(schedule: Schedule, alpha: Tensor) -> Tensor:
    """-alpha' where the visible share is alpha; without the rounding of t near 0 and 1."""
    if isinstance(schedule, MiddleFlat):
        return 1 / schedule.law.pdf(alpha)
    return -schedule.derivative(schedule.inverse(alpha))


def _histogram(schedule: Schedule, times: Tensor) -> tuple[list[float], float]:
    """Drawn visible shares as a density, and their largest deviation in standard errors."""
    edges = torch.linspace(0, 1, BINS + 1, dtype=torch.float64)
    counts = torch.from_numpy(np.histogram(schedule.alpha(times).numpy(), edges.numpy())[0])
    share = -torch.diff(schedule.inverse(edges))
    error = torch.sqrt(len(times) * share * (1 - share)).clamp(min=1.0)  # one draw, where rarer
    deviation = float(((counts - len(times) * share).abs() / error).max())
    return (counts * BINS / len(times)).tolist(), deviation


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
        noise = [f"{schedule['second_moment']:.5g}", f"{100 * schedule['widest_two']:.3g} %"]
        drawn = f"{schedule['histogram_deviation']:.1f}"
        rows.append([name, rate, *_bell(schedule["bell_test"]), *noise, drawn])
    columns = ["schedule", "mean mask rate", *BELL_COLUMNS, "E[(w(1-alpha))^2]"]
    columns += [f"axis on 2 of {results['batch_size']}", "draws off by (SE)"]
    return [Table("mask rates and NELBO weights under uniform times (App. C.4)", columns, rows)]


def schedules_figure(results: Mapping[str, Any]) -> Figure:
    """Fig. of App. C.4: alpha(t), the visible shares it gives, and what a sequence weighs."""
    figure, (left, middle, right) = new_figure(12.5, 4.2, 3)
    schedules, share, target = results["schedules"], results["share"], results["target_density"]
    drawn = schedules["middle_flat"]["histogram"]
    draw_histogram(middle, drawn, label=f"{results['draws']:,} draws")
    label = f"target ({results['mu']:g}, {results['sigma']:g})"
    middle.plot(share, target, color="black", label=label)
    for colour, (name, schedule) in zip(COLOURS, schedules.items()):
        look = {"color": colour, "label": name.replace("_", "-")}
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


# Both as commands

TIME_LAWS = Analysis(
    "time-laws", TimeLawsOptions, measure_time_laws, time_laws_tables, time_laws_figure, "laws"
)
SCHEDULES = Analysis(
    "schedules", SchedulesOptions, measure_schedules, schedules_tables, schedules_figure
)
