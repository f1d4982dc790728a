"""Figures of gradient similarities (Tables 1 and 2)."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

from matplotlib.figure import Figure

from bellmask.report.figures import COLOURS

PARTS = ("whole", "embedding", "trunk", "head")


def _figure(numbers: Mapping[str, Any], label: str) -> Figure:
    """One panel per model, a line per part, the paper's numbers dashed."""
    models = numbers["models"]
    figure = Figure(figsize=(1.5 + 3.6 * len(models), 3.9), layout="constrained")
    panels = figure.subplots(1, len(models), sharey=True, squeeze=False)[0]
    for model, axes in zip(models, panels):
        settings = [str(row["setting"]) for row in model["rows"]]
        for part, colour in zip(PARTS, itertools.cycle(COLOURS)):
            points = [
                (n, row[part])
                for n, row in enumerate(model["rows"])
                if row[part]["mean"] is not None
            ]
            if points:
                axes.errorbar(
                    [n for n, _ in points],
                    [point["mean"] for _, point in points],
                    yerr=[1.96 * (point["se"] or 0) for _, point in points],
                    fmt="o-" if part == "whole" else "o:",
                    markersize=4,
                    capsize=2,
                    color=colour,
                    label="whole model" if part == "whole" else part,
                )
        paper = numbers["paper"]
        known = [(n, paper[s]) for n, s in enumerate(settings) if s in paper]
        if known:
            axes.plot(*zip(*known), "k--", linewidth=1, label="paper (LM1B, 1M steps)")
        axes.set_xticks(range(len(settings)), settings)
        axes.set_title(model["name"], fontsize=10)
        axes.set_xlabel(label)
        axes.grid(alpha=0.3)
    panels[0].set_ylabel("cosine similarity (95 % interval)")
    panels[0].legend(fontsize=8)
    return figure


def radius_figure(numbers: Mapping[str, Any]) -> Figure:
    """Similarity against the radius in which 8 tokens were masked."""
    return _figure(numbers, f"radius r, {numbers['masks']} tokens masked within it")


def additivity_figure(numbers: Mapping[str, Any]) -> Figure:
    """Similarity against the number of masks."""
    return _figure(numbers, "number of masks")
