"""Plots, as PNG and SVG, without a display."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import matplotlib
from matplotlib.figure import Figure
from matplotlib.mathtext import MathTextParser
from matplotlib.text import Text

from bellmask.utils.console import visible_lines
from bellmask.utils.files import replacing

COLOURS = ["tab:red", "tab:blue", "tab:green", "tab:orange", "tab:purple", "tab:brown"]
COLOURS += ["tab:pink", "tab:olive", "tab:cyan", "0.3"]
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
    """Names that people give may hold dollar signs: what is no formula is drawn as it is."""
    for axes in figure.axes:
        axes.get_xticklabels(), axes.get_yticklabels()  # gives the labels their texts
    for text in figure.findobj(Text):
        text.set_text(visible_lines(text.get_text()))
        if "$" in text.get_text() and not _is_formula(text.get_text()):
            text.set_parse_math(False)


def _is_formula(text: str) -> bool:
    try:
        MathTextParser("path").parse(text)
    except ValueError:
        return False
    return True


def plot_context_curve(
    points: Sequence[Mapping[str, Any]], lines: Mapping[str, float], path: Path, *, title: str
) -> list[Path]:
    """NLL against context count with error bars, beside horizontal reference lines."""
    figure = Figure(figsize=(7, 4.2))
    axes = figure.subplots()
    middle = [(p["low"] + p["high"]) / 2 for p in points]
    axes.errorbar(
        middle,
        [p["nll"] for p in points],
        yerr=[1.96 * p["standard_error"] for p in points],
        fmt="o-",
        markersize=4,
        capsize=3,
        label="model (95 % interval)",
    )
    for (label, value), style in zip(lines.items(), ("--", ":", "-.")):
        axes.axhline(value, linestyle=style, color="0.35", linewidth=1.2, label=label)
    axes.set_xlabel("observed tokens $N_c$ in the block")
    axes.set_ylabel("cross-entropy of a target token (nats)")
    axes.set_title(title, fontsize=10)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    return save_figure(figure, path)
