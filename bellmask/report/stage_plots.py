"""Validation curves of the four fine-tunings of the suite ``cpt_sft``."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from bellmask.report.figures import save_figure

COLOURS = {"base": "tab:red", "bell": "tab:blue"}
STYLES = {"base": "--", "bell": "-"}
"""Colour says which continual pretraining, the line which fine-tuning."""


def stage_figure(results: Mapping[str, Any]) -> Figure:
    """NLL of held-out responses against the fine-tuning's steps; thin lines are single seeds."""
    figure = Figure(figsize=(7, 4.4), layout="constrained")
    axes = figure.subplots()
    for row in results["rows"]:
        if row["section"] != "sft":
            continue
        colour, style = COLOURS[row["cpt"]], STYLES[row["sft"]]
        curves = np.array([run["nll"] for run in row["runs"]])
        steps = row["runs"][0]["steps"]
        if len(curves) > 1:
            for curve in curves:
                axes.plot(steps, curve, style, color=colour, linewidth=0.7, alpha=0.35)
        label = f"CPT {row['cpt']}, SFT {row['sft']} ({100 * row['exact_match']:.1f} % exact)"
        axes.plot(steps, curves.mean(0), style, color=colour, linewidth=1.8, label=label)
    axes.set_xlabel("fine-tuning step")
    axes.set_ylabel("validation NLL bound of responses (nats per token)")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=9)
    return figure


def write_stage_curves(results: Mapping[str, Any], folder: Path) -> list[Path]:
    """curves.png and curves.svg."""
    return save_figure(stage_figure(results), folder / "curves")
