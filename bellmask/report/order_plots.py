"""The figure of orders (Fig. 2): curves, with a band where there are several runs."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from bellmask.report.figures import COLOURS


def orders_figure(numbers: Mapping[str, Any]) -> Figure:
    """Validation NLL against step for each framework; one-sigma band over runs."""
    figure = Figure(figsize=(7.2, 4.6), layout="constrained")
    axes = figure.subplots()
    for (name, group), colour in zip(numbers["groups"].items(), itertools.cycle(COLOURS)):
        kind = "exact" if group["is_exact"] else "bound"
        count = len(group["runs"])
        label = f"{name} ({kind}" + (f", {count} runs)" if count > 1 else ")")
        style = "--" if name.endswith("crossed") else "-"
        axes.plot(
            group["steps"],
            group["nll"],
            "o",
            markersize=2.5,
            color=colour,
            linestyle=style,
            label=label,
        )
        if count > 1:
            mean, spread = np.array(group["nll"]), np.array(group["sd_over_runs"])
            axes.fill_between(
                group["steps"], mean - spread, mean + spread, color=colour, alpha=0.2, linewidth=0
            )
    if numbers["unigram_nll"] is not None:
        axes.axhline(numbers["unigram_nll"], color="0.4", linestyle=":", label="unigram")
    tops = [max(group["nll"][len(group["nll"]) // 10 :]) for group in numbers["groups"].values()]
    lows = [min(group["nll"]) for group in numbers["groups"].values()]
    room = 0.05 * (max(tops) - min(lows) or 1)
    axes.set_ylim(min(lows) - room, max(tops) + room)
    axes.set_xlabel("training step")
    axes.set_ylabel("validation NLL (nats per token)")
    has_band = any(len(group["runs"]) > 1 for group in numbers["groups"].values())
    band = "; band: one standard deviation over runs" if has_band else ""
    axes.set_title(Path(numbers["data"]).name + band, fontsize=9)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.13), ncols=2)
    return figure
