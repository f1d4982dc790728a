"""Orders of generation on one trunk: what is hard, locality or the number of orders (Fig. 2)?"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import tyro
from matplotlib.figure import Figure

from bellmask.analyze.base import Analysis, OutOptions, finish_axes
from bellmask.compare.compare import PLAN, from_comparison
from bellmask.compare.results import RunRecord, check_comparable, read_run
from bellmask.report.figures import COLOURS
from bellmask.storage.runs import names_of
from bellmask.utils.errors import UserError
from bellmask.utils.progress import Progress
from bellmask.utils.table import Table


@dataclass(frozen=True, kw_only=True)
class OrdersOptions(OutOptions):
    """Training curves of ARM, sigma-ARM and AoARM on one trunk: Fig. 2, Finding 1 (Sec. 3.1).

    If the number of orders were what makes any-order learning hard, sigma-ARM (one fixed order)
    would be far ahead of AoARM (all orders). Runs that differ in their seed only are drawn as mean
    and one-sigma band: train sigma-ARM with five seeds, each of which brings its own order. ARM and
    sigma-ARM give exact NLLs, AoARM and masked models upper bounds.

    Examples:
    bellmask analyze orders runs/arm runs/sigma-1 runs/sigma-2 runs/aoarm

    bellmask analyze orders runs/compare-small-orders
    """

    runs: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="FOLDER...")]
    """Run folders, or folders of 'bellmask compare', on the same text."""


# Measurement


def _measure(options: OrdersOptions, progress: Progress) -> dict[str, Any]:
    if not options.runs:
        raise UserError("orders needs run folders or a comparison's folder")
    records = _records(options.runs)
    check_comparable(records)
    groups: dict[str, list[RunRecord]] = {}
    for name, record in zip(names_of([r.config for r in records]), records):
        groups.setdefault(name, []).append(record)
    found = {name: _curve(runs) for name, runs in groups.items()}
    progress.advance(len(records))
    return {
        "groups": found,
        "data": records[0].config.data.train,
        "steps": records[0].config.train.steps,
        "unigram_nll": records[0].description.get("unigram_nll"),
        "gaps": _gaps(groups),
    }


def _records(folders: Sequence[str]) -> list[RunRecord]:
    found: dict[Path, RunRecord] = {}
    for folder in map(Path, folders):
        if (folder / PLAN).exists():
            entries, *_ = from_comparison(folder)
            found |= {entry.record.folder.resolve(): entry.record for entry in entries}
        else:
            found[folder.resolve()] = read_run(folder)
    return list(found.values())


def _curve(runs: Sequence[RunRecord]) -> dict[str, Any]:
    """Mean over runs, and their standard deviation where there are several."""
    columns = list(zip(*(run.nll for run in runs)))
    spread = [statistics.stdev(column) if len(runs) > 1 else None for column in columns]
    return {
        "runs": [run.folder.name for run in runs],
        "seeds": [run.config.train.seed for run in runs],
        "is_exact": runs[0].last.is_exact,
        "steps": runs[0].steps,
        "nll": [statistics.mean(column) for column in columns],
        "sd_over_runs": spread,
        "final": [run.nll[-1] for run in runs],
        "final_se": [run.nll_se[-1] for run in runs],
    }


_GAPS = [
    ("locality", "sigma_arm", "arm"),
    ("locality, crossed", "sigma_arm+crossed", "arm"),
    ("number of orders", "aoarm+crossed", "sigma_arm+crossed"),
    ("number of orders and encoding", "aoarm", "sigma_arm"),
    ("encoding", "aoarm+crossed", "aoarm"),
    ("encoding", "sigma_arm+crossed", "sigma_arm"),
]


def _gaps(groups: dict[str, list[RunRecord]]) -> list[dict[str, Any]]:
    """Differences of mean final NLLs with their errors."""
    found = []
    for what, left, right in _GAPS:
        if left in groups and right in groups:
            gap, error, over = _gap(groups[left], groups[right])
            name = f"{what}: {left} minus {right}"
            found.append({"name": name, "gap": gap, "se": error, "over": over})
    return found


def _gap(left: Sequence[RunRecord], right: Sequence[RunRecord]) -> tuple[float, float, str]:
    """(gap, error, over what): paired over blocks for single runs, else over runs."""
    if len(left) == len(right) == 1:
        return *left[0].last.difference(right[0].last), "blocks, paired"
    means = [statistics.mean(run.nll[-1] for run in runs) for runs in (left, right)]
    return means[0] - means[1], math.hypot(_error(left), _error(right)), "runs"


def _error(runs: Sequence[RunRecord]) -> float:
    """Over runs where there are several, else over validation blocks."""
    if len(runs) == 1:
        return runs[0].nll_se[-1] or 0.0
    return statistics.stdev(run.nll[-1] for run in runs) / len(runs) ** 0.5


# Tables


def _tables(numbers: dict[str, Any]) -> list[Table]:
    rows = []
    for name, group in numbers["groups"].items():
        spread = group["sd_over_runs"][-1]
        rows.append(
            [
                name,
                "exact" if group["is_exact"] else "bound",
                str(len(group["runs"])),
                f"{group['nll'][-1]:.4f}",
                "-" if spread is None else f"{spread:.4f}",
            ]
        )
    gaps = [
        [gap["name"], f"{gap['gap']:+.4f}", f"{gap['se']:.4f}", gap["over"]]
        for gap in numbers["gaps"]
    ]
    title = f"{numbers['data']}, step {numbers['steps']}: final NLL, nats per token (Fig. 2)"
    tables = [Table(title, ["framework", "NLL is", "runs", "mean", "sd over runs"], rows)]
    return (
        [*tables, Table("what costs what", ["difference", "nats", "error", "over"], gaps)]
        if gaps
        else tables
    )


# Figure


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
    finish_axes(axes, "training step", "validation NLL (nats per token)")
    has_band = any(len(group["runs"]) > 1 for group in numbers["groups"].values())
    band = "; band: one standard deviation over runs" if has_band else ""
    axes.set_title(Path(numbers["data"]).name + band, fontsize=9)
    axes.legend(fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.13), ncols=2)
    return figure


ORDERS = Analysis("orders", OrdersOptions, _measure, _tables, orders_figure, "runs")
