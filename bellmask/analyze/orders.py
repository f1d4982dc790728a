"""Orders of generation on one backbone: is locality hard, or the number of orders (Fig. 2)?"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import tyro
from matplotlib.figure import Figure

from bellmask.analyze.base import Analysis, OutOptions
from bellmask.compare.compare import PLAN, from_comparison, from_runs
from bellmask.compare.results import RunRecord, check_comparable
from bellmask.report.figures import COLORS, finish_axes, new_figure, trim_start
from bellmask.storage.runs import names_of
from bellmask.utils.errors import UserError
from bellmask.utils.progress import Progress
from bellmask.utils.stats import Estimate
from bellmask.utils.table import Table


@dataclass(frozen=True, kw_only=True)
class OrdersOptions(OutOptions):
    """Training curves of ARM, sigma-ARM and AoARM on one backbone: Fig. 2, Finding 1 (Sec. 3.1).

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

GAPS = [
    ("locality", "sigma_arm", "arm"),
    ("locality, crossed", "sigma_arm+crossed", "arm"),
    ("number of orders", "aoarm+crossed", "sigma_arm+crossed"),
    ("number of orders and encoding", "aoarm", "sigma_arm"),
    ("encoding", "aoarm+crossed", "aoarm"),
    ("encoding", "sigma_arm+crossed", "sigma_arm"),
]
"""Differences of final NLLs between groups, if both are present."""


def _measure(options: OrdersOptions, progress: Progress) -> dict[str, Any]:
    records = _records(options.runs)
    check_comparable(records)
    groups: dict[str, list[RunRecord]] = {}
    for name, record in zip(names_of([r.config for r in records]), records):
        groups.setdefault(name, []).append(record)
    progress.advance(len(records))
    return {
        "groups": {name: _curve(runs) for name, runs in groups.items()},
        "data": records[0].config.data.train,
        "steps": records[0].config.train.steps,
        "unigram_nll": records[0].description.get("unigram_nll"),
        "gaps": [
            {"name": f"{what}: {left} minus {right}", **_gap(groups[left], groups[right])}
            for what, left, right in GAPS
            if left in groups and right in groups
        ],
    }


def _records(folders: Sequence[str]) -> list[RunRecord]:
    """Duplicate runs count once."""
    if not folders:
        raise UserError("orders needs run folders or the folder of a comparison")
    found: dict[Path, RunRecord] = {}
    for folder in map(Path, folders):
        is_comparison = (folder / PLAN).exists()
        entries, *_ = from_comparison(folder) if is_comparison else from_runs([folder])
        found |= {entry.record.folder.resolve(): entry.record for entry in entries}
    return list(found.values())


def _curve(runs: Sequence[RunRecord]) -> dict[str, Any]:
    """Mean over runs, and their standard deviation where there are several."""
    points = [Estimate.over_seeds(values) for values in zip(*(run.nll for run in runs))]
    return {
        "runs": [run.folder.name for run in runs],
        "seeds": [run.config.train.seed for run in runs],
        "is_exact": runs[0].last.is_exact,
        "steps": runs[0].steps,
        "nll": [point.value for point in points],
        "sd_over_runs": [point.deviation for point in points],
        "final": [run.nll[-1] for run in runs],
        "final_se": [run.nll_se[-1] for run in runs],
    }


def _gap(left: Sequence[RunRecord], right: Sequence[RunRecord]) -> dict[str, Any]:
    """Of mean final NLLs; the error is paired over blocks for single runs, else over runs."""
    if len(left) == len(right) == 1:
        gap, error = left[0].last.difference(right[0].last)
        return {"gap": gap, "se": error, "over": "blocks, paired"}
    ours, theirs = _final(left), _final(right)
    error = math.hypot(ours.se or 0.0, theirs.se or 0.0)
    return {"gap": ours.value - theirs.value, "se": error, "over": "runs"}


def _final(runs: Sequence[RunRecord]) -> Estimate:
    """The last NLL; its error is over runs where there are several, else over blocks."""
    if len(runs) == 1:
        return Estimate(runs[0].nll[-1], runs[0].nll_se[-1], 1)
    return Estimate.over_seeds([run.nll[-1] for run in runs])


# Tables


def _tables(numbers: dict[str, Any]) -> list[Table]:
    rows = []
    for name, group in numbers["groups"].items():
        spread, kind = group["sd_over_runs"][-1], "exact" if group["is_exact"] else "bound"
        last = [f"{group['nll'][-1]:.4f}", "-" if spread is None else f"{spread:.4f}"]
        rows.append([name, kind, str(len(group["runs"])), *last])
    title = f"{numbers['data']}, step {numbers['steps']}: final NLL, nats per token (Fig. 2)"
    tables = [Table(title, ["framework", "NLL is", "runs", "mean", "sd over runs"], rows)]
    gaps = [
        [gap["name"], f"{gap['gap']:+.4f}", f"{gap['se']:.4f}", gap["over"]]
        for gap in numbers["gaps"]
    ]
    if gaps:
        tables.append(Table("cost of each change", ["difference", "nats", "error", "over"], gaps))
    return tables


# Figure


# Paper: Fig. 2
def orders_figure(numbers: Mapping[str, Any]) -> Figure:
    """Validation NLL against step for each framework; one-sigma band over runs."""
    figure, (axes,) = new_figure(7.2, 4.6)
    groups, title = numbers["groups"], Path(numbers["data"]).name
    for (name, group), color in zip(groups.items(), itertools.cycle(COLORS)):
        count, steps, mean = len(group["runs"]), group["steps"], np.array(group["nll"])
        label = f"{name} ({'exact' if group['is_exact'] else 'bound'}"
        label += f", {count} runs)" if count > 1 else ")"
        style = "o--" if name.endswith("crossed") else "o-"
        axes.plot(steps, mean, style, markersize=2.5, color=color, label=label)
        if count > 1:
            spread = np.array(group["sd_over_runs"])
            axes.fill_between(steps, mean - spread, mean + spread, color=color, alpha=0.2, lw=0)
            title = f"{Path(numbers['data']).name}; band: one standard deviation over runs"
    if numbers["unigram_nll"] is not None:
        axes.axhline(numbers["unigram_nll"], color="0.4", linestyle=":", label="unigram")
    trim_start(axes, [group["nll"] for group in groups.values()])
    finish_axes(axes, "training step", "validation NLL (nats per token)", title, legend=2)
    return figure


# Paper: Fig. 2, Finding 1
ORDERS = Analysis("orders", OrdersOptions, _measure, _tables, orders_figure, "runs")
