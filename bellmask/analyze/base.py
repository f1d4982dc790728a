"""``bellmask analyze NAME RUN...``: the table of analyses, and the command.

An analysis turns options into numbers, and numbers into tables and a figure. Its module is imported
on use.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import tyro
from matplotlib.figure import Figure

from bellmask.config.command_line import parse_command
from bellmask.diffusion.frameworks import Framework
from bellmask.evaluate.suite import write_results
from bellmask.report.figures import save_figure
from bellmask.storage.runs import NamedRun
from bellmask.utils.errors import look_up
from bellmask.utils.progress import Progress, progress_bar
from bellmask.utils.table import Table


@dataclass(frozen=True)
class Analysis:
    """One analysis: :func:`run_analysis` calls the functions in this order."""

    name: str
    options: type
    """A frozen dataclass; its docstring is the help text, and names the paper's figure."""
    measure: Callable[[Any, Progress], dict[str, Any]]
    """Options → numbers and their errors, ready for JSON. Tables and figures use nothing else."""
    tables: Callable[[dict[str, Any]], list[Table]]
    figure: Callable[[dict[str, Any]], Figure]
    unit: str = "steps"
    """What the progress bar counts."""


# Shared by analyses: options, description of a run


@dataclass(frozen=True, kw_only=True)
class OutOptions:
    """Where results go."""

    out: str | None = None
    """Folder for the results; default: RUN/analysis for a single run, else runs/analysis/NAME."""


@dataclass(frozen=True, kw_only=True)
class RunsOptions(OutOptions):
    """The runs to analyze."""

    runs: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="RUN...")]
    """Run folders."""
    seed: int = 1234
    """Seed of all draws, shared by all runs."""


@dataclass(frozen=True, kw_only=True)
class StageOptions(RunsOptions):
    """Runs at several of their checkpoints."""

    checkpoints: tuple[int, ...] = ()
    """Steps to analyze; default: all saved checkpoints of each run."""
    device: str = "auto"
    """auto, cpu, cuda, mps, ..."""


def describe_run(
    run: NamedRun, framework: Framework, stages: list[dict[str, Any]]
) -> dict[str, Any]:
    """Description of a run, without its numbers at each checkpoint."""
    return {
        "name": run.name,
        "run": run.folder.name,
        "framework": run.config.framework.name,
        "is_exact": framework.is_exact,
        "stages": stages,
    }


# The table of analyses

ANALYSES = {
    "orders": ("orders", "Fig. 2: ARM, sigma-ARM and AoARM on one backbone"),
    "context-curve": ("context", "Fig. 3, left: NLL by observed tokens"),
    "context-drop": ("context", "Fig. 3, right: what each stage of training learned, by context"),
    "gradient-radius": ("gradients", "Table 1: does masking far tokens change the gradient?"),
    "gradient-additivity": ("gradients", "Table 2: is a joint gradient the sum of single ones?"),
    "inefficient-masks": ("time_laws", "Fig. 4, Prop. 4.4: patterns outside E_k, exactly"),
    "time-laws": ("time_laws", "Table 3, Def. 4.1: densities and bell test"),
    "schedules": ("time_laws", "App. C.4: middle-flat and other schedules"),
    "decompose": ("decompose", "Prop. 3.1 on toy sources: irreducible and reducible loss, exactly"),
}
"""Name → (module, a line about it); the module's constant is the name in capitals."""

# The command


def open_analysis(name: str) -> Analysis:
    """The analysis of that name; its module is imported now."""
    module, _ = look_up("analysis", name, ANALYSES)
    constant = name.upper().replace("-", "_")
    return getattr(import_module(f"bellmask.analyze.{module}"), constant)


def main(args: list[str]) -> int:
    """The paper's analyses on your runs, and exact ones that need no run.

    usage: bellmask analyze NAME [RUN ...] [options]    (see bellmask analyze NAME --help)

    Each prints a table and writes NAME.json, NAME.png and NAME.svg.

    {names}

    examples:
      bellmask analyze inefficient-masks --length 1024
      bellmask analyze context-curve runs/base runs/arm
      bellmask analyze decompose runs/toy-base runs/toy-bell
    """  # noqa: D405
    if not args or args[0] in ("-h", "--help"):
        names = "\n".join(f"  {name:<20} {line}" for name, (_, line) in ANALYSES.items())
        print(f"{inspect.getdoc(main)}\n".format(names=names))
        return 0
    name, *rest = args
    analysis = open_analysis(name)
    run_analysis(analysis, parse_command(analysis.options, rest, command=f"analyze {name}"))
    return 0


def run_analysis(analysis: Analysis, options: Any) -> None:
    """Measure, print the tables, write the three files."""
    name = analysis.name
    runs: tuple[str, ...] = getattr(options, "runs", ())
    folder = Path(runs[0]) / "analysis" if len(runs) == 1 else Path("runs/analysis") / name
    folder = Path(options.out or folder)
    with progress_bar(name, analysis.unit) as progress:
        numbers = analysis.measure(options, progress)
    for table in analysis.tables(numbers):
        table.print()
    figure = analysis.figure(numbers)
    if (folder / f"{name}.json").exists():
        print(f"note: replaced the previous results in {folder}; use --out to keep them")
    write_results(folder, {"analysis": name, **numbers}, name)
    save_figure(figure, folder / name)
    print(f"written: {folder / name}.json, .png and .svg")
