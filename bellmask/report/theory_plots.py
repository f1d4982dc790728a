"""Figures of the analyses that need no run: masks with long runs, time laws, schedules.

Each takes the measured numbers (what is in the JSON file) and nothing else.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from bellmask.report.figures import COLOURS

STYLES = ["-", "--", ":", "-."]


def _finish(axes: Axes, x: str, y: str, title: str) -> None:
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.set_title(title, fontsize=10)
    axes.grid(alpha=0.3)


def _legend_below(axes: Axes, columns: int) -> None:
    """Under the panel, where it hides no curve."""
    below = (0.5, -0.16)
    axes.legend(fontsize=8, ncols=columns, frameon=False, loc="upper center", bbox_to_anchor=below)


def inefficient_masks_figure(results: Mapping[str, Any]) -> Figure:
    """Fig. 4: P(not in E_k) by number of observed tokens, and by k for several time laws."""
    figure = Figure(figsize=(11, 4.4), layout="constrained")
    left, right = figure.subplots(1, 2)
    _draw_by_context(left, results)
    _draw_by_k(right, results)
    return figure


def _draw_by_context(axes: Axes, results: Mapping[str, Any]) -> None:
    curves = {at["k"]: at["by_context"] for at in results["by_k"] if "by_context" in at}
    shades = colormaps["viridis"].resampled(len(curves) + 1)
    for number, (k, values) in enumerate(curves.items()):
        axes.plot(range(len(values)), values, color=shades(number), label=f"k = {k}")
    length = results["length"]
    _finish(
        axes,
        "observed tokens $N_c$ in the block",
        "P(mask is not in $\\mathcal{E}_k$)",
        f"masks with $L - N_c$ masked tokens, L = {length}",
    )
    axes.set_ylim(-0.02, 1.04)
    axes.set_xticks(sorted({round(length * i / 4) for i in range(5)}))
    _legend_below(axes, 6)


def _draw_by_k(axes: Axes, results: Mapping[str, Any]) -> None:
    inside = [at for at in results["by_k"] if at["k"] <= results["max_k"]]
    for number, text in enumerate(results["shown"]):
        axes.plot(
            [at["k"] for at in inside],
            [at["laws"][text]["efficient"] for at in inside],
            "o-",
            markersize=3,
            color=COLOURS[number % len(COLOURS)],
            label=text,
        )
    _finish(
        axes,
        "run length k",
        "P(mask is not in $\\mathcal{E}_k$)",
        f"masks drawn with times of a law, L = {results['length']}",
    )
    axes.set_ylim(-0.02, 1.04)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    _legend_below(axes, 3)


def time_laws_figure(results: Mapping[str, Any]) -> Figure:
    """Densities (Table 3), and the weight of each context count relative to the NELBO's."""
    figure = Figure(figsize=(12.5, 4.6), layout="constrained")
    left, middle, right = figure.subplots(1, 3)
    for text, look in _looks(list(results["laws"])).items():
        law = results["laws"][text]
        if law["density"] is None:
            left.axvline(law["mean"], label=text, **look)
        else:
            left.plot(results["t"], law["density"], label=text, **look)
        for axes in (middle, right):
            axes.plot(range(results["length"]), law["relative_weights"], **look)
    _finish(left, "time t (mask rate)", "density", "time laws (vertical: a point mass)")
    left.set_ylim(bottom=0)
    weight = "weight relative to the NELBO's"
    context = "observed tokens $N_c$"
    _finish(middle, context, weight, f"weight in $L_\\pi$, L = {results['length']}")
    _finish(right, context, weight, "the same, logarithmic: the ends")
    middle.set_ylim(bottom=0)
    right.set_yscale("log")
    smallest = min(min(law["relative_weights"]) for law in results["laws"].values())
    right.set_ylim(bottom=max(1e-9, 0.5 * smallest))  # below, a run of millions sees nothing
    for axes in (middle, right):
        axes.axhline(1, color="0.5", linewidth=0.8)
    columns = min(5, max(1, len(results["laws"])))
    figure.legend(loc="outside lower center", ncols=columns, fontsize=8)
    return figure


def _looks(texts: Sequence[str]) -> dict[str, dict[str, Any]]:
    """A colour for each name and scale; within it a line style by location, solid nearest 1/2."""
    families: dict[str, list[str]] = {}
    for text in texts:
        name, _, numbers = text.partition(":")
        families.setdefault(f"{name} {numbers.partition(',')[2]}", []).append(text)
    looks = {}
    for number, family in enumerate(families.values()):
        colour = COLOURS[number % len(COLOURS)]
        for place, text in enumerate(sorted(family, key=_distance)):
            style = STYLES[place % len(STYLES)]
            width = 1.7 if place == 0 else 1.1
            looks[text] = {"color": colour, "linestyle": style, "linewidth": width}
    return {text: looks[text] for text in texts}


def _distance(text: str) -> float:
    """How far the location in ``name:mu,scale`` is from 1/2, where one is given."""
    location = text.partition(":")[2].partition(",")[0]
    return abs(float(location) - 0.5) if location else 0.0


def schedules_figure(results: Mapping[str, Any]) -> Figure:
    """Fig. of App. C.4: alpha(t), the visible shares it gives, and what a sequence weighs."""
    figure = Figure(figsize=(12.5, 4.2), layout="constrained")
    left, middle, right = figure.subplots(1, 3)
    share = results["share"]
    for colour, (name, schedule) in zip(COLOURS, results["schedules"].items()):
        label = name.replace("_", "-")
        left.plot(results["t"], schedule["alpha"], color=colour, label=label)
        right.plot(share, schedule["weight"], color=colour, label=label)
    _finish(left, "time t", "visible share $\\alpha(t)$", "schedules")
    _legend_below(left, 2)
    _draw_shares(middle, results)
    _finish(
        right,
        "visible share $\\alpha$",
        "$w(t)\\,(1 - \\alpha) = -\\alpha'(t)$",
        "weight of a sequence in the NELBO",
    )
    right.set_yscale("log")
    _legend_below(right, 2)
    return figure


def _draw_shares(axes: Axes, results: Mapping[str, Any]) -> None:
    """The middle-flat schedule's draws under its target; the others' densities, thin."""
    histogram = results["schedules"]["middle_flat"]["histogram"]
    width = 1 / len(histogram)
    centres = [(i + 0.5) * width for i in range(len(histogram))]
    drawn = f"{results['draws']:,} draws"
    axes.bar(centres, histogram, width, color="0.82", label=drawn)
    target = f"target ({results['mu']:g}, {results['sigma']:g})"
    axes.plot(results["share"], results["target_density"], color="black", label=target)
    for colour, (name, schedule) in zip(COLOURS, results["schedules"].items()):
        label = name.replace("_", "-")
        axes.plot(results["share"], schedule["density"], "--", color=colour, label=label)
    top = max([*histogram, *results["target_density"]])
    _finish(axes, "visible share $\\alpha$", "density", "visible shares under uniform times")
    axes.set_ylim(0, max(2.0, 1.1 * top))  # cosine and polynomial have an infinite end
    _legend_below(axes, 3)
