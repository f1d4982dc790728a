"""Standard error of the NELBO against forward passes, for each estimator."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import matplotlib.ticker
from matplotlib.figure import Figure

from bellmask.report.figures import COLOURS

LINES = {
    "exact": ("exact counts (ours)", "o-", COLOURS[1]),
    "stratified": ("stratified rates (mdlm)", "s-", COLOURS[0]),
    "independent": ("independent rates", "^-", COLOURS[3]),
}


def _plain(value: float, _: int) -> str:
    return f"{value:g}"


def estimators_figure(numbers: Mapping[str, Any]) -> Figure:
    """A log-log panel for each run; grey lines fall as passes^-1/2 and passes^-1."""
    runs = numbers["runs"]
    figure = Figure(figsize=(1.2 + 4.6 * len(runs), 4.2), layout="constrained")
    panels = figure.subplots(1, len(runs), sharey=True, squeeze=False)[0]
    for run, axes in zip(runs, panels):
        passes = [row["passes"] for row in run["rows"]]
        for kind, (label, style, colour) in LINES.items():
            axes.errorbar(
                passes,
                [row[kind]["se"] for row in run["rows"]],
                yerr=[row[kind]["error"] for row in run["rows"]],
                fmt=style,
                color=colour,
                markersize=4,
                capsize=3,
                label=label,
            )
        start = run["rows"][0]["exact"]["se"]
        for power, style in ((-0.5, "--"), (-1.0, ":")):
            falling = [start * (count / passes[0]) ** power for count in passes]
            label = f"passes$^{{{power:g}}}$"
            axes.plot(passes, falling, style, color="0.6", linewidth=1, zorder=0, label=label)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xticks(passes, [f"{count:,}" for count in passes])
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_minor_formatter(matplotlib.ticker.NullFormatter())
        axes.yaxis.set_major_formatter(matplotlib.ticker.FuncFormatter(_plain))
        axes.yaxis.set_major_locator(matplotlib.ticker.LogLocator(subs=(1.0, 2.0, 5.0)))
        axes.set_title(f"{run['name']}, step {run['step']}", fontsize=10)
        axes.set_xlabel("forward passes (blocks x masks)")
        axes.grid(alpha=0.3)
    panels[0].set_ylabel(
        "standard error of the NELBO over masks\n(nats per token, ± its own error)"
    )
    panels[0].legend(fontsize=8)
    return figure
