"""Figures of a comparison: curves with the target, time laws, context weights, NLL by context."""

from __future__ import annotations

import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from bellmask.report.figures import COLOURS, save_figure, write_svg

SHORT_ARROW = 1.4
"""Speed-ups below it have arrows too short to centre a label on."""


def colour_of(results: Mapping[str, Any], name: str) -> str:
    """Red for the reference; the others in order."""
    names = [n for n in results["variants"] if n != results["reference"]]
    return (
        "tab:red"
        if name == results["reference"]
        else COLOURS[1:][names.index(name) % len(COLOURS[1:])]
    )


def shown_name(results: Mapping[str, Any], name: str) -> str:
    """The name, and that its NLL is exact where others' are bounds."""
    return f"{name} (exact)" if results["variants"][name].get("is_exact") else name


def _mean_curve(variant: Mapping[str, Any], axis: str) -> tuple[Any, Any]:
    x = np.mean([run[axis] for run in variant["runs"]], axis=0)
    y = np.mean([run["nll"] for run in variant["runs"]], axis=0)
    return x, y


def _draw_curves(axes: Axes, results: Mapping[str, Any], axis: str) -> None:
    for name, variant in results["variants"].items():
        colour = colour_of(results, name)
        if len(variant["runs"]) > 1:
            for run in variant["runs"]:
                axes.plot(run[axis], run["nll"], color=colour, linewidth=0.7, alpha=0.35)
        x, y = _mean_curve(variant, axis)
        axes.plot(x, y, color=colour, linewidth=1.8, label=shown_name(results, name))
    target = results["variants"][results["reference"]]["nll"]
    axes.axhline(target, color="0.4", linestyle="--", linewidth=1)
    axes.grid(alpha=0.3)
    _trim(axes, results)


def _trim(axes: Axes, results: Mapping[str, Any]) -> None:
    """Leave out the first fall from the uniform prediction, which would flatten the rest."""
    lasts = [min(min(run["nll"]) for run in v["runs"]) for v in results["variants"].values()]
    starts = [run["nll"] for v in results["variants"].values() for run in v["runs"]]
    early = max(max(nll[len(nll) // 10 :]) for nll in starts)
    low, top = min(lasts), max(early, results["variants"][results["reference"]]["nll"])
    room = 0.05 * (top - low or 1)
    axes.set_ylim(low - room, top + room)


def _draw_arrow(axes: Axes, results: Mapping[str, Any]) -> None:
    """From the reference's end back to where variants arrived; of many, the first to arrive.

    None where the reference has not even learned token frequencies: no speed-up counts then.
    """
    if (results["progress"]["below_unigram"] or 0) < 0:
        return
    target = results["variants"][results["reference"]]["nll"]
    compared = {n: v["comparison"] for n, v in results["variants"].items() if "comparison" in v}
    reached = {n: c for n, c in compared.items() if c["speed_up"] is not None}
    low, high = axes.get_ylim()
    if len(reached) > 2:
        fastest = max(reached, key=lambda name: reached[name]["speed_up"]["mean"])
        reached = {fastest: reached[fastest]}
    for number, (name, comparison) in enumerate(reached.items()):
        ratio, steps = comparison["speed_up"]["mean"], results["steps"]
        height = target + (0.04 + 0.07 * number) * (high - low)
        colour = colour_of(results, name)
        axes.annotate(
            "",
            xy=(steps / ratio, height),
            xytext=(steps, height),
            arrowprops={"arrowstyle": "->", "color": colour, "linewidth": 1.5},
        )
        at_least = "≥ " if comparison["is_bound"] else ""
        is_short = ratio < SHORT_ARROW  # its label would reach beyond the last step
        axes.text(
            steps if is_short else (steps + steps / ratio) / 2,
            height + 0.012 * (high - low),
            f"{at_least}{ratio:.2f}x sooner" + (f" ({name})" if len(compared) > 1 else ""),
            color=colour,
            ha="right" if is_short else "center",
            va="bottom",
            fontsize=9,
            bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.7, "pad": 0.5},
        )


def curves_figure(results: Mapping[str, Any], *, with_time: bool = True) -> Figure:
    """NLL against step, and against training time where times can be compared."""
    figure = Figure(figsize=(11 if with_time else 6.6, 4.4), layout="constrained")
    panels = figure.subplots(1, 2 if with_time else 1, sharey=True, squeeze=False)[0]
    left, last = panels[0], panels[-1]
    _draw_curves(left, results, "steps")
    _draw_arrow(left, results)
    if with_time:
        _draw_curves(last, results, "seconds")
        last.set_xlabel("training time (seconds, evaluation excluded)")
    left.set_xlabel("training step")
    is_mixed = any(variant.get("is_exact") for variant in results["variants"].values())
    bound = "NLL, a bound unless exact" if is_mixed else "NLL bound"
    left.set_ylabel(f"validation {bound} (nats per token)")
    last.legend(*left.get_legend_handles_labels(), fontsize=8)
    left.text(
        0.01,
        results["variants"][results["reference"]]["nll"],
        f"{results['reference']} at its last step",
        transform=left.get_yaxis_transform(),
        fontsize=8,
        va="top",
        color="0.3",
    )
    return figure


def law_figure(results: Mapping[str, Any], name: str) -> Figure:
    """A variant's mask rates, drawn and as a density, and its weight on each context count."""
    law = results["variants"][name]["law"]
    figure = Figure(figsize=(7, 2.6), layout="constrained")
    left, right = figure.subplots(1, 2)
    if law["mask_rate_histogram"] is None:
        left.text(0.5, 0.5, "no times: every context\ncount of a row, once", ha="center")
        left.set_axis_off()
    else:
        _draw_law(left, law, colour_of(results, name))
    weights = law["context_weights"]
    right.plot(range(len(weights)), weights, color=colour_of(results, name))
    right.set_ylim(0, 1.15 * max(weights))
    right.set_xlabel("observed tokens $N_c$")
    right.set_ylabel("weight in the objective")
    for axes in (left, right):
        axes.grid(alpha=0.3)
        axes.tick_params(labelsize=8)
    return figure


def _draw_law(axes: Axes, law: Mapping[str, Any], colour: str) -> None:
    histogram = law["mask_rate_histogram"]
    width = 1 / len(histogram)
    centres = [(i + 0.5) * width for i in range(len(histogram))]
    axes.bar(centres, histogram, width, color="0.8", label="drawn mask rates")
    if law["density"] is not None:
        axes.plot(law["t"], law["density"], color=colour, label="density of the law")
    axes.set_xlabel("time t, mask rate")
    axes.set_ylabel("density")
    axes.set_ylim(0, 1.4 * max([*histogram, *(law["density"] or [])]))  # room for the legend
    axes.legend(fontsize=8)


def context_figure(results: Mapping[str, Any]) -> Figure:
    """Final NLL by context count, first seed of each variant."""
    figure = Figure(figsize=(7, 3.8), layout="constrained")
    axes = figure.subplots()
    for name, variant in results["variants"].items():
        points = variant["runs"][0]["nll_by_context"]
        axes.errorbar(
            [(p["low"] + p["high"]) / 2 for p in points],
            [p["nll"] for p in points],
            yerr=[1.96 * (p["se"] or 0) for p in points],
            fmt="o-",
            markersize=3,
            capsize=2,
            color=colour_of(results, name),
            label=shown_name(results, name),
        )
    axes.set_xlabel("observed tokens $N_c$ in the block")
    axes.set_ylabel("cross-entropy of a target token (nats)")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    return figure


def write_curves(results: Mapping[str, Any], folder: Path) -> list[Path]:
    """curves.png and curves.svg."""
    return save_figure(curves_figure(results), folder / "curves")


def as_svg(figure: Figure) -> str:
    """The figure as an <svg> element that can stand inside a page."""
    stream = io.StringIO()
    write_svg(figure, stream)
    text = stream.getvalue()
    return text[text.index("<svg") :]
