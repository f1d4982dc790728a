"""Figures of loss by number of observed tokens (Fig. 3)."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from bellmask.report.figures import COLOURS

CONTEXT_LABEL = "observed tokens $N_c$"


def _draw(
    axes: Axes, points: Sequence[Mapping[str, Any]], colour: str, label: str, style: str = "o-"
) -> None:
    """Values with 95 % intervals, at the middle of each bin."""
    axes.errorbar(
        [(p["low"] + p["high"]) / 2 for p in points],
        [p["value"] for p in points],
        yerr=[1.96 * (p["se"] or 0) for p in points],
        fmt=style,
        markersize=3,
        capsize=2,
        linewidth=1.3,
        color=colour,
        label=label,
    )


def curve_figure(numbers: Mapping[str, Any]) -> Figure:
    """NLL against N_c at the last checkpoint of each run, and the optimum without context."""
    figure = Figure(figsize=(7.2, 4.4), layout="constrained")
    axes = figure.subplots()
    for run, colour in zip(numbers["runs"], itertools.cycle(COLOURS)):
        stage = run["stages"][-1]
        kind = "exact" if run["is_exact"] else "bound"
        _draw(axes, stage["nll"], colour, f"{run['name']}, step {stage['step']} ({kind})")
    lines = (
        ("unigram", "unigram_cross_entropy", "--"),
        ("position-wise", "position_wise_cross_entropy", ":"),
    )
    for name, key, style in lines:
        axes.axhline(
            numbers[key],
            color="0.35",
            linestyle=style,
            linewidth=1.2,
            label=f"{name} cross-entropy",
        )
    axes.set_xlabel(CONTEXT_LABEL)
    axes.set_ylabel("NLL of a target token (nats, 95 % interval)")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.14), ncols=2)
    return figure


def drop_figure(numbers: Mapping[str, Any]) -> Figure:
    """One panel per run: the fall of the NLL from each checkpoint to the next."""
    runs = numbers["runs"]
    figure = Figure(figsize=(1.2 + 4.6 * len(runs), 4.2), layout="constrained")
    panels = figure.subplots(1, len(runs), sharey=True, squeeze=False)[0]
    for run, axes in zip(runs, panels):
        before = run["stages"][0]["step"]
        for stage, colour in zip(run["stages"][1:], itertools.cycle(COLOURS[1:])):
            _draw(axes, stage["drop"], colour, f"step {before} to {stage['step']}")
            before = stage["step"]
        axes.axhline(0, color="0.4", linewidth=0.8)
        axes.set_title(run["name"], fontsize=10)
        axes.set_xlabel(CONTEXT_LABEL)
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
    panels[0].set_ylabel("fall of the NLL (nats, 95 % interval)")
    return figure
