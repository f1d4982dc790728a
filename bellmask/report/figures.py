"""Plots, as PNG and SVG, without a display."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.mathtext import MathTextParser
from matplotlib.text import Text

from bellmask.utils.console import visible_lines
from bellmask.utils.files import replacing

COLORS = ["tab:red", "tab:blue", "tab:green", "tab:orange", "tab:purple", "tab:brown"]
COLORS += ["tab:pink", "tab:olive", "tab:cyan", "0.3"]
"""The reference is red."""


def save_figure(figure: Figure, path: Path) -> list[Path]:
    """Write PNG and SVG, the same bytes for the same figure; returns their paths."""
    png, svg = path.with_name(f"{path.name}.png"), path.with_name(f"{path.name}.svg")
    _settle_texts(figure)
    with replacing(png) as scratch:
        figure.savefig(scratch, format="png", dpi=150, bbox_inches="tight")
    with replacing(svg) as scratch:
        write_svg(figure, scratch, bbox_inches="tight")
    return [png, svg]


def write_svg(figure: Figure, target: Path | IO[str], **options: Any) -> None:
    """SVG without a date and with names that depend on the drawing alone."""
    _settle_texts(figure)
    with matplotlib.rc_context({"svg.hashsalt": "bellmask"}):
        figure.savefig(target, format="svg", metadata={"Date": None}, **options)


def _settle_texts(figure: Figure) -> None:
    """Names may contain dollar signs; text that is not a formula is drawn literally."""
    for axes in figure.axes:
        axes.get_xticklabels(), axes.get_yticklabels()  # gives the labels their texts
    for text in figure.findobj(Text):
        text.set_text(visible_lines(text.get_text()))
        if "$" in text.get_text():
            try:
                MathTextParser("path").parse(text.get_text())
            except ValueError:
                text.set_parse_math(False)


# Panels that look alike


def new_figure(
    width: float, height: float, columns: int = 1, **shared: Any
) -> tuple[Figure, list[Axes]]:
    """A figure of this size in inches, with its panels side by side."""
    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, list(figure.subplots(1, columns, squeeze=False, **shared)[0])


def finish_axes(
    axes: Axes, x: str, y: str = "", title: str = "", *, legend: int | None = None
) -> None:
    """Labels, title, grid; a legend inside the panel, or below it in ``legend`` columns."""
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.set_title(title, fontsize=10)
    axes.grid(alpha=0.3)
    if legend:  # below, so that it hides no curve
        below = (0.5, -0.16)
        axes.legend(fontsize=8, ncols=legend, loc="upper center", bbox_to_anchor=below)
    elif legend == 0:
        axes.legend(fontsize=8)


def draw_intervals(
    axes: Axes,
    x: Sequence[float],
    values: Sequence[float],
    errors: Sequence[float | None],
    **look: Any,
) -> None:
    """Values with 95 % intervals, where the error is known."""
    reach = [1.96 * (error or 0) for error in errors]
    axes.errorbar(x, values, reach, **{"fmt": "o-", "markersize": 3, "capsize": 2, **look})


def draw_bins(
    axes: Axes, points: Sequence[Mapping[str, Any]], value: str, error: str = "se", **look: Any
) -> None:
    """A value for each bin of context counts ``low`` to ``high``, with 95 % intervals."""
    middle = [(point["low"] + point["high"]) / 2 for point in points]
    draw_intervals(axes, middle, [p[value] for p in points], [p[error] for p in points], **look)


def draw_histogram(axes: Axes, heights: Sequence[float], label: str) -> None:
    """Bars of equal width over [0, 1]."""
    centers = [(number + 0.5) / len(heights) for number in range(len(heights))]
    axes.bar(centers, heights, 1 / len(heights), color="0.82", label=label)


def trim_start(axes: Axes, curves: Sequence[Sequence[float]]) -> None:
    """Leave out the first fall from the uniform prediction, which would flatten the rest."""
    low = min(map(min, curves))
    top = max(max(curve[len(curve) // 10 :]) for curve in curves)
    room = 0.05 * (top - low or 1)
    axes.set_ylim(low - room, top + room)


def plot_context_curve(
    points: Sequence[Mapping[str, Any]], lines: Mapping[str, float], path: Path, *, title: str
) -> list[Path]:
    """NLL against context count with error bars, with horizontal reference lines."""
    figure, (axes,) = new_figure(7, 4.2)
    draw_bins(axes, points, "nll", "standard_error", label="model (95 % interval)")
    for (label, value), style in zip(lines.items(), ("--", ":", "-.")):
        axes.axhline(value, linestyle=style, color="0.35", linewidth=1.2, label=label)
    x, y = "observed tokens $N_c$ in the block", "cross-entropy of a target token (nats)"
    finish_axes(axes, x, y, title, legend=0)
    return save_figure(figure, path)
