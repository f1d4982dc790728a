"""Noise of multiple choice against forward passes, for each way of scoring a choice."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import matplotlib.ticker
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from bellmask.report.figures import COLOURS

LINES = {
    "auto": ("ours: exact if short, else strata", "o-", COLOURS[1]),
    "strata": ("strata, common numbers", "s-", COLOURS[8]),
    "strata_apart": ("strata, own numbers", "s--", COLOURS[8]),
    "bernoulli": ("Bernoulli, common numbers", "^-", COLOURS[3]),
    "bernoulli_apart": ("Bernoulli, own numbers", "^--", COLOURS[3]),
    "diffullama": ("DiffuLLaMA's, own numbers (biased)", "v--", COLOURS[0]),
}
EXACT = "ours, exact: no noise left"
WORDS = {"short": "short choices", "long": "long choices"}


def choices_figure(numbers: Mapping[str, Any]) -> Figure:
    """A row for each run, log-log panels for each task's short and long questions."""
    runs = numbers["runs"]
    kinds = [
        (place, group)
        for place in range(len(runs[0]["tasks"]))
        for group in WORDS
        if any(group in run["tasks"][place]["questions"] for run in runs)
    ]
    size = (1.2 + 3.6 * len(kinds), 0.9 + 3.3 * len(runs))
    figure = Figure(figsize=size, layout="constrained")
    panels = figure.subplots(len(runs), len(kinds), squeeze=False)
    for run, line in zip(runs, panels):
        for (place, group), axes in zip(kinds, line):
            task = run["tasks"][place]
            count = task["questions"].get(group, 0)
            title = f"{task['task']}, {WORDS[group]} ({count} question{'s' * (count != 1)})"
            axes.set_title(title if len(runs) == 1 else f"{run['name']}\n{title}", fontsize=9)
            if count:
                _panel(axes, task, group)
        line[0].set_ylabel("noise of the difference of the\ntwo best choices (nats per token)")
    for axes in panels[-1]:
        axes.set_xlabel("forward passes per question")
    _legend(figure, panels.flat)
    return figure


def _legend(figure: Figure, panels: Iterable[Axes]) -> None:
    """What any panel has, in the order of :data:`LINES`."""
    found: dict[str, Any] = {}
    for axes in panels:
        handles, labels = axes.get_legend_handles_labels()
        found.update(zip(labels, handles))
    labels = [label for label in (EXACT, *(line[0] for line in LINES.values())) if label in found]
    handles = [found[label] for label in labels]
    columns = 4 if figure.get_figwidth() > 9 else 2
    figure.legend(handles, labels, loc="outside lower center", ncols=columns, fontsize=8)


def _panel(axes: Axes, task: Mapping[str, Any], group: str) -> None:
    """Every way that has noise; where ours is exact, what that costs."""
    for way, (label, style, colour) in LINES.items():
        is_ours = way == "auto"  # broad and behind: without short choices it lies on strata's line
        rows = [row for row in task["rows"] if row["way"] == way]
        rows = [row for row in rows if row["noise"][group]["value"] > 0]
        if not rows:
            continue
        axes.errorbar(
            [row["passes"][group] for row in rows],
            [row["noise"][group]["value"] for row in rows],
            yerr=[row["noise"][group]["error"] for row in rows],
            fmt=style,
            color=colour,
            markersize=7 if is_ours else 4,
            capsize=2,
            linewidth=3 if is_ours else 1.2,
            elinewidth=1.2,
            alpha=0.6 if is_ours else 1,
            label=label,
            zorder=2 if is_ours else 3,
        )
    if group == "short":
        passes = task["exact"]["passes"]
        axes.axvline(passes, color=COLOURS[1], linewidth=2, label=EXACT)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(matplotlib.ticker.FuncFormatter(_plain))
        axis.set_minor_formatter(matplotlib.ticker.NullFormatter())
    axes.yaxis.set_major_locator(matplotlib.ticker.LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.grid(alpha=0.3)


def _plain(value: float, _: int) -> str:
    return f"{value:g}"
