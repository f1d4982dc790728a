"""Quality against diversity: generative perplexity over unigram entropy."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter, ScalarFormatter

from bellmask.report.figures import COLOURS


def quality_diversity_figure(numbers: Mapping[str, Any]) -> Figure:
    """A line per run over NFE, with deviations over seeds both ways; real text is a star."""
    figure = Figure(figsize=(7.2, 4.6), layout="constrained")
    axes = figure.subplots()
    for record, colour in zip(numbers["runs"], itertools.cycle(COLOURS)):
        _draw(axes, record, colour, "o-", markersize=5)
    for record, colour in zip(numbers["real_text"], itertools.cycle(["0.1", "0.4", "0.6"])):
        _draw(axes, record, colour, "*", markersize=14)
    axes.set_yscale("log")
    _round_ticks(axes)
    axes.set_xlabel("unigram entropy of a sample (nats; more diverse to the right)")
    axes.set_ylabel(f"generative perplexity under {numbers['scorer']['name']}")
    axes.set_title(f"small numbers: NFE; bars: deviation over {numbers['over']}", fontsize=9)
    axes.grid(alpha=0.3, which="both")
    axes.legend(fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.13), ncols=3)
    return figure


def _draw(
    axes: Axes, record: Mapping[str, Any], colour: str, style: str, markersize: float
) -> None:
    settings = [s for s in record["settings"] if s["mean"]["perplexity"] is not None]
    axes.errorbar(
        [s["mean"]["entropy"] for s in settings],
        [s["mean"]["perplexity"] for s in settings],
        xerr=[s["sd"]["entropy"] or 0 for s in settings],
        yerr=[s["sd"]["perplexity"] or 0 for s in settings],
        fmt=style,
        markersize=markersize,
        capsize=2,
        elinewidth=0.7,
        linewidth=1.4,
        color=colour,
        label=record["name"],
    )
    # fewest and most NFE only: in between they would hide one another
    ends = sorted([*settings[:1], *settings[1:][-1:]], key=lambda s: -s["mean"]["perplexity"])
    for s, side in zip(ends, (1, -1)):
        if s["nfe"] is not None:
            axes.annotate(
                f"{s['nfe']}",
                (s["mean"]["entropy"], s["mean"]["perplexity"]),
                (6 * side, 5 * side),
                textcoords="offset points",
                ha="right" if side < 0 else "left",
                va="top" if side < 0 else "bottom",
                fontsize=7,
                color=colour,
            )


def _round_ticks(axes: Axes) -> None:
    """Plain numbers, also where the axis spans less than a power of ten."""
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.yaxis.set_major_formatter(ScalarFormatter())
    axes.yaxis.set_minor_formatter(NullFormatter())
