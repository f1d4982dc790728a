"""The figure of red and blue by context count, and of where rows are drawn (Prop. 3.1)."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from bellmask.report.context_plots import CONTEXT_LABEL
from bellmask.report.figures import COLOURS


def decompose_figure(numbers: Mapping[str, Any]) -> Figure:
    """Irreducible loss by framework, what is left to learn by run, draws of base, bell, oracle."""
    masked = [run for run in numbers["runs"] if "spend" in run["stages"][-1]]
    count = 3 if masked else 2
    figure = Figure(figsize=(4.6 * count, 4.2), layout="constrained")
    panels = figure.subplots(1, count)
    _draw_red(panels[0], numbers)
    _draw_blue(panels[1], numbers)
    if masked:
        _draw_draws(panels[2], masked[0])
    for axes in panels:
        axes.set_xlabel(CONTEXT_LABEL)
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=2)
    title = f"{numbers['source']}: rows of {numbers['block_length']}"
    figure.suptitle(f"{title}, {numbers['num_symbols']} symbols", fontsize=11)
    return figure


def _draw_red(axes: Axes, numbers: Mapping[str, Any]) -> None:
    """One curve per way of drawing contexts: AoARM's is MDM's."""
    drawn: dict[str, Any] = {}
    for run in numbers["runs"]:
        kind = "MDM, AoARM" if run["framework"] in ("mdm", "aoarm") else run["name"]
        drawn.setdefault(kind, run["stages"][-1]["red"])
    for (kind, red), colour in zip(drawn.items(), itertools.cycle(COLOURS)):
        axes.plot(range(len(red)), red, color=colour, label=kind)
    how = "closed form" if numbers["is_closed_form"] else "forward-backward"
    axes.set_title(f"irreducible: entropy of the data ({how})", fontsize=10)
    axes.set_ylabel("nats per prediction")


def _draw_blue(axes: Axes, numbers: Mapping[str, Any]) -> None:
    """First and last checkpoint of each run."""
    for run, colour in zip(numbers["runs"], itertools.cycle(COLOURS)):
        first, last = run["stages"][0], run["stages"][-1]
        contexts = range(len(last["blue"]))
        if first["step"] != last["step"]:
            axes.plot(
                contexts,
                first["blue"],
                ":",
                color=colour,
                linewidth=1,
                label=f"{run['name']}, step {first['step']}",
            )
        axes.plot(contexts, last["blue"], color=colour, label=f"{run['name']}, step {last['step']}")
    axes.set_yscale("log")
    axes.set_title("reducible: KL(data || model)", fontsize=10)
    axes.set_ylabel("nats per prediction")


def _draw_draws(axes: Axes, run: Mapping[str, Any]) -> None:
    """Base and bell, and the oracle at the first and last checkpoint."""
    first, last = run["stages"][0], run["stages"][-1]
    contexts = range(len(last["blue"]))
    for law, colour in (("base", COLOURS[0]), ("bell", COLOURS[1])):
        axes.plot(contexts, last["spend"][law]["draws"], color=colour, label=law)
    for stage, style in ((first, ":"), (last, "-")) if first is not last else ((last, "-"),):
        label = f"oracle of {run['name']}, step {stage['step']}"
        axes.plot(contexts, stage["spend"]["oracle"]["draws"], style, color="0.2", label=label)
    axes.set_ylim(bottom=0)
    axes.set_title("rows drawn at each context count", fontsize=10)
    axes.set_ylabel("share of rows")
