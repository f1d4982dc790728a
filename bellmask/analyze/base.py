"""``bellmask analyze NAME RUN...``: what an analysis is, the table of all, and the command.

An analysis turns options into numbers, and those into tables and a figure. Its module is imported
when it is asked for.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from bellmask import __version__
from bellmask.config.command_line import parse_command
from bellmask.report.figures import save_figure
from bellmask.utils.console import print_plain_table, staged_bar
from bellmask.utils.errors import UserError, look_up
from bellmask.utils.files import without_nan, write_text

OnProgress = Callable[[int, int], None]
"""Told (steps done, steps in all) now and then."""


@dataclass(frozen=True)
class Table:
    """A table of an analysis, as text; the first column names the row."""

    title: str
    columns: list[str]
    rows: list[list[str]]


@dataclass(frozen=True)
class Analysis:
    """One analysis: :func:`run_analysis` calls the functions in this order."""

    name: str
    options: type
    """A frozen dataclass; its docstring is the help text, and names the paper's figure."""
    measure: Callable[[Any, OnProgress], dict[str, Any]]
    """Options → numbers and their errors, ready for JSON. Everything shown is made from them."""
    tables: Callable[[dict[str, Any]], list[Table]]
    figure: Callable[[dict[str, Any]], Figure]
    unit: str = "steps"
    """What the progress bar counts."""


# The table of analyses


@dataclass(frozen=True)
class AnalysisEntry:
    """Where an analysis is, and a line about it."""

    module: str
    constant: str
    line: str


ANALYSES = {
    "orders": AnalysisEntry("orders", "ORDERS", "Fig. 2: ARM, sigma-ARM and AoARM on one trunk"),
    "context-curve": AnalysisEntry(
        "context", "CONTEXT_CURVE", "Fig. 3, left: NLL by observed tokens"
    ),
    "context-drop": AnalysisEntry(
        "context", "CONTEXT_DROP", "Fig. 3, right: what each stage of training learned, by context"
    ),
    "gradient-radius": AnalysisEntry(
        "gradients", "GRADIENT_RADIUS", "Table 1: does masking far tokens change the gradient?"
    ),
    "gradient-additivity": AnalysisEntry(
        "gradients", "GRADIENT_ADDITIVITY", "Table 2: is a joint gradient the sum of single ones?"
    ),
    "inefficient-masks": AnalysisEntry(
        "masks", "INEFFICIENT_MASKS", "Fig. 4, Prop. 4.4: patterns outside E_k, exactly"
    ),
    "time-laws": AnalysisEntry(
        "time_laws", "TIME_LAWS", "Table 3, Def. 4.1: densities and bell test"
    ),
    "schedules": AnalysisEntry(
        "time_laws", "SCHEDULES", "App. C.4: middle-flat and other schedules"
    ),
    "decompose": AnalysisEntry(
        "decompose",
        "DECOMPOSE",
        "Prop. 3.1 on toy sources: irreducible and reducible loss, exactly",
    ),
}

# The command

HELP = """The paper's analyses on your runs, and exact ones that need no run.

usage: bellmask analyze NAME [RUN ...] [options]    (bellmask analyze NAME --help says more)

Each prints a table and writes NAME.json, NAME.png and NAME.svg.

{names}

examples:
  bellmask analyze inefficient-masks --length 1024
  bellmask analyze context-curve runs/base runs/arm
  bellmask analyze decompose runs/toy-base runs/toy-bell
"""


def open_analysis(name: str) -> Analysis:
    """The analysis of that name; its module is imported now."""
    entry = look_up("analysis", name, ANALYSES)
    return getattr(import_module(f"bellmask.analyze.{entry.module}"), entry.constant)


def main(args: list[str]) -> int:
    """Run the analysis that is named first."""
    if not args or args[0] in ("-h", "--help"):
        names = "\n".join(f"  {name:<20} {entry.line}" for name, entry in ANALYSES.items())
        print(HELP.format(names=names))
        return 0
    name, *rest = args
    if name.startswith("-"):
        raise UserError(f"give the analysis first: bellmask analyze {', '.join(ANALYSES)}")
    analysis = open_analysis(name)
    run_analysis(analysis, parse_command(analysis.options, rest, command=f"analyze {name}"))
    return 0


def run_analysis(analysis: Analysis, options: Any) -> None:
    """Measure, print the tables, write the three files."""
    with staged_bar(analysis.name, analysis.unit) as on_progress:
        numbers = analysis.measure(options, on_progress)
    for table in analysis.tables(numbers):
        print_plain_table(table.title, table.columns, table.rows)
    folder = _folder(analysis.name, options)
    _write(analysis.name, numbers, analysis.figure(numbers), folder)
    print(f"written: {folder / analysis.name}.json, .png and .svg")


def _folder(name: str, options: Any) -> Path:
    """--out, else inside the run where there is a single one, else runs/analysis/NAME."""
    if options.out:
        return Path(options.out)
    runs: tuple[str, ...] = getattr(options, "runs", ())
    return Path(runs[0]) / "analysis" if len(runs) == 1 else Path("runs/analysis") / name


def _write(name: str, numbers: dict[str, Any], figure: Any, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    if (folder / f"{name}.json").exists():
        print(f"note: the results that {folder} held are replaced; --out keeps them apart")
    content = without_nan({"analysis": name, "bellmask": __version__, **numbers})
    write_text(folder / f"{name}.json", json.dumps(content, indent=1, allow_nan=False) + "\n")
    save_figure(figure, folder / name)
