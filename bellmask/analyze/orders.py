"""Orders of generation on one trunk: what is hard, locality or the number of orders (Fig. 2)?"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro

from bellmask.analyze.analysis import Analysis, OnProgress, Table
from bellmask.compare.comparison import PLAN, from_comparison
from bellmask.compare.naming import names_of
from bellmask.compare.records import RunRecord, check_comparable, read_run
from bellmask.errors import UserError
from bellmask.report.order_plots import orders_figure


@dataclass(frozen=True)
class OrdersOptions:
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
    out: str | None = None
    """Folder for the results; default FOLDER/analysis for one folder, else runs/analysis/orders."""


def _records(folders: Sequence[str]) -> list[RunRecord]:
    found: dict[Path, RunRecord] = {}
    for folder in map(Path, folders):
        if (folder / PLAN).exists():
            entries, *_ = from_comparison(folder)
            found |= {entry.record.folder.resolve(): entry.record for entry in entries}
        else:
            found[folder.resolve()] = read_run(folder)
    return list(found.values())


def _measure(options: OrdersOptions, on_progress: OnProgress) -> dict[str, Any]:
    if not options.runs:
        raise UserError("orders needs run folders or a comparison's folder")
    records = _records(options.runs)
    check_comparable(records)
    groups: dict[str, list[RunRecord]] = {}
    for name, record in zip(names_of([r.config for r in records]), records):
        groups.setdefault(name, []).append(record)
    found = {name: _curve(runs) for name, runs in groups.items()}
    on_progress(len(records), len(records))
    return {
        "groups": found,
        "data": records[0].config.data.train,
        "steps": records[0].config.train.steps,
        "unigram_nll": records[0].description.get("unigram_nll"),
        "gaps": _gaps(found),
    }


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


def _gaps(groups: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """Differences of final NLLs, with the error that runs and validation blocks give them."""
    wanted = [
        ("locality: sigma_arm minus arm", "sigma_arm", "arm"),
        ("locality, crossed: sigma_arm+crossed minus arm", "sigma_arm+crossed", "arm"),
        (
            "number of orders: aoarm+crossed minus sigma_arm+crossed",
            "aoarm+crossed",
            "sigma_arm+crossed",
        ),
        ("number of orders and encoding: aoarm minus sigma_arm", "aoarm", "sigma_arm"),
        ("encoding: aoarm+crossed minus aoarm", "aoarm+crossed", "aoarm"),
        ("encoding: sigma_arm+crossed minus sigma_arm", "sigma_arm+crossed", "sigma_arm"),
    ]
    found = []
    for name, left, right in wanted:
        if left in groups and right in groups:
            gap = groups[left]["nll"][-1] - groups[right]["nll"][-1]
            error = (_error(groups[left]) ** 2 + _error(groups[right]) ** 2) ** 0.5
            found.append({"name": name, "gap": gap, "se": error})
    return found


def _error(group: dict[str, Any]) -> float:
    """Over runs where there are several, else over validation blocks."""
    count, spread = len(group["final"]), group["sd_over_runs"][-1]
    return spread / count**0.5 if spread is not None else group["final_se"][0] or 0.0


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
    gaps = [[gap["name"], f"{gap['gap']:+.4f}", f"{gap['se']:.4f}"] for gap in numbers["gaps"]]
    title = f"{numbers['data']}, step {numbers['steps']}: final NLL, nats per token (Fig. 2)"
    tables = [Table(title, ["framework", "NLL is", "runs", "mean", "sd over runs"], rows)]
    return (
        [*tables, Table("what costs what", ["difference", "nats", "error"], gaps)]
        if gaps
        else tables
    )


ORDERS = Analysis("orders", OrdersOptions, _measure, _tables, orders_figure, "runs")
