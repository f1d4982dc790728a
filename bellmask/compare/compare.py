"""``bellmask compare``, ``report`` and ``demo``: plan, train, measure, report.

A comparison trains unfinished runs and writes its report from the run folders, which
``comparison.json`` lists, so that ``bellmask report`` can rebuild it. The demo is a comparison with
fixed variants.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro

from bellmask.compare import stages
from bellmask.compare.execute import TrainingOptions, execute, for_comparison, parse_grid, plan_runs
from bellmask.compare.report import curves_figure, print_comparison, render_page
from bellmask.compare.results import Entry, read_run, summarize, write_json
from bellmask.compare.variants import SUITES, Variant, check_shared, parse_variants
from bellmask.config.command_line import PresetOptions, parse_command, parse_run_command, resolve
from bellmask.config.config import RunConfig
from bellmask.config.presets import tiny
from bellmask.generate.trace import main as report_trace
from bellmask.report.figures import save_figure
from bellmask.storage.runs import names_of
from bellmask.utils.errors import TrainingError, UserError, check_least, look_up
from bellmask.utils.files import has_kinds, inside, read_json, sanitize, without_nan, write_text

# ``bellmask compare``

PLAN = "comparison.json"


@dataclass(frozen=True, kw_only=True)
class CompareOptions(TrainingOptions, PresetOptions):
    """Measure the speed-up of variants: how many times fewer steps a variant needs to reach the
    reference's final NLL.

    Trains variants that differ only in what is compared: same initial weights, data order, batch
    size, steps and evaluation masks. If interrupted, the same command continues where it stopped.
    Options of 'bellmask train' can follow and apply to all variants. The suite cpt_sft (Table 4)
    has its own options and no PRESET: bellmask compare --suite cpt_sft --help

    Examples:
    bellmask compare tiny base bell --seeds 3 --jobs 2

    bellmask compare small --suite families --jobs 2

    bellmask compare small base bell arm --seeds 3 --jobs 2

    bellmask compare tiny base bell --grid optim.lr=3e-3,6e-3 --train.steps 300

    bellmask compare tiny bell 'wide=--law gaussian --law.scale 0.2' --reference bell
    """

    variants: Annotated[
        tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="[VARIANT ...]")
    ] = ()
    """base, bell, fast, uniform, dirac:MU, gaussian:MU,SIGMA, laplace:MU,B, importance,
    importance_t, middle_flat; causal: arm, sigma_arm, aoarm (+crossed); with +muon, +adamw,
    +conv, +lrFACTOR, +warmupFACTOR, +growing or +unstratified; or 'LABEL=--option value'. Default:
    base bell."""
    suite: str | None = None
    """A predefined list of variants. The paper's ablations: families, variance, mean, dirac,
    gaussian, laplace, alternatives, stratification, orders. Our own: optimizers, fast."""
    reference: str | None = None
    """The variant whose final NLL is the target; default: base if present, else the first one."""
    grid: Annotated[
        tyro.conf.UseAppendAction[tuple[str, ...]], tyro.conf.arg(metavar="OPTION=V1,V2")
    ] = ()
    """A grid searched for every variant; the best of each are compared."""
    out: str | None = None
    """Folder for results.json, curves.png/.svg and report.html; default:
    runs/compare-PRESET-VARIANTS."""


def compare(
    shared: RunConfig,
    variants: Sequence[Variant],
    options: TrainingOptions,
    *,
    reference: str,
    out: Path,
    grid: Sequence[Mapping[str, str]] = ({},),
    title: str = "",
) -> dict[str, Any]:
    """Train every variant (finished runs are reused), write the report, return the results."""
    names = [variant.name for variant in variants]
    look_up("reference", reference, dict.fromkeys(names))
    if len(variants) < 2:
        raise UserError("a comparison needs at least two variants")
    check_least(options, seeds=1, jobs=1, processes_per_job=1)
    planned = plan_runs(for_comparison(shared), variants, options, grid)
    out.mkdir(parents=True, exist_ok=True)
    try:
        failed = execute(planned, options, may_fail=len(grid) > 1)
    except KeyboardInterrupt:
        raise KeyboardInterrupt("interrupted; the same command continues") from None
    trained = [run for run in planned if run.folder not in failed]
    for run in planned:  # with a grid some may fail, but every variant needs one that did not
        if run.variant not in {other.variant for other in trained}:
            raise TrainingError(f"all runs of {run.variant} failed: {failed[run.folder]}")
    plan = {
        "root": os.path.relpath(options.runs, out),  # so that both can be moved together
        "reference": reference,
        "title": title,
        "failed": list(failed.values()),
        "runs": [
            {
                "variant": run.variant,
                "seed": run.config.train.seed,
                "point": run.point,
                "run": run.folder.name,
            }
            for run in trained
        ],
    }
    write_json(out / PLAN, plan, is_quiet=options.quiet)
    return write_report(out, *from_comparison(out))


def write_report(
    out: Path, entries: Sequence[Entry], reference: str, title: str, failed: Sequence[str]
) -> dict[str, Any]:
    """results.json, curves.png/.svg and report.html in ``out``; returns the results."""
    results = without_nan({**summarize(entries, reference), "failed": list(failed)})
    others = ", ".join(name for name in results["variants"] if name != reference)
    # everything that can fail comes before the first file
    page = render_page(results, title or f"bellmask: {others} against {reference}")
    out.mkdir(parents=True, exist_ok=True)
    save_figure(curves_figure(results), out / "curves")
    write_json(out / "results.json", results, is_quiet=True)
    write_text(out / "report.html", page)
    return results


def _finish(results: dict[str, Any], out: Path) -> int:
    """Print the results and the path of the report."""
    print_comparison(results)
    print(f"report: {out / 'report.html'}")
    return 0


def pick_reference(names: Sequence[str]) -> str:
    """Base where it is among them, else the first one."""
    return "base" if "base" in names else names[0]


def main(args: Sequence[str]) -> int:
    """Measure the speed-up of variants."""
    if stages.is_meant(args):
        return stages.main(args)
    options, rest = parse_run_command(CompareOptions, args, command="compare")
    if options.suite is not None and options.variants:
        raise UserError("give variants or --suite, not both")
    texts: Sequence[str] = options.variants or ("base", "bell")
    if options.suite is not None:
        texts = look_up("suite", options.suite, SUITES)
    variants = parse_variants(texts)
    check_shared(rest, options.config)
    stem, config = resolve(options, rest, "bellmask compare")
    what = options.suite or "-".join(v.name.split("=")[0] for v in variants)[:60]
    default = f"runs/compare-{stem}-{what}".replace(":", "").replace(",", "_")
    out = Path(options.out or default)
    reference = options.reference or pick_reference([v.name for v in variants])
    grid = parse_grid(options.grid)
    return _finish(compare(config, variants, options, reference=reference, out=out, grid=grid), out)


# ``bellmask report``


@dataclass(frozen=True)
class ReportOptions:
    """Rebuild results.json, curves.png/.svg and report.html from run folders.

    Takes the folder of a 'bellmask compare', or two or more run folders of 'bellmask train'.
    Nothing is trained. Runs that differ in text, tokenizer, masks or steps are refused. For a saved
    generation: bellmask report trace --help

    Examples:
    bellmask report runs/compare-tiny-base-bell

    bellmask report runs/base runs/bell --out runs/base-bell

    bellmask report trace runs/bell/trace.json
    """

    folders: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="FOLDER ...")]
    """The folder of a comparison, or run folders."""
    reference: str | None = None
    """Reference variant; default: the comparison's; for run folders base, else the first one."""
    out: str | None = None
    """Output folder; default: the comparison's; for run folders 'report' next to the first one."""


def from_comparison(folder: Path) -> tuple[list[Entry], str, str, list[str]]:
    """(entries, reference, title, failures) of a comparison, read from its run folders."""
    path = folder / PLAN
    try:
        plan = read_json(path)
        root, reference, title = folder / plan["root"], plan["reference"], plan["title"]
        runs, failed = plan["runs"], plan["failed"]
        kinds = dict.fromkeys(("variant", "point"), str)
        texts = [reference, title, *failed]
        if not all(isinstance(text, str) and text == sanitize(text) for text in texts):
            raise TypeError("its text fields are damaged")
        if not runs or not all(has_kinds(run, kinds) for run in runs):
            raise TypeError("it names no runs")
        folders = [inside(root, run["run"], str(path)) for run in runs]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"cannot read {path} ({error}); run the comparison again") from None
    records = {place: read_run(place) for place in folders}
    entries = [Entry(r["variant"], r["point"], records[at]) for r, at in zip(runs, folders)]
    return entries, reference, title, failed


def from_runs(folders: Sequence[Path]) -> tuple[list[Entry], str, str, list[str]]:
    """The same of plain run folders, named by what they train on."""
    records = [read_run(folder) for folder in folders]
    names = names_of([record.config for record in records])
    places = [(name, record.config.train.seed) for name, record in zip(names, records)]
    for name, seed in places:
        if places.count((name, seed)) > 1:
            raise UserError(f"two runs are {name} with seed {seed}; give only one of them")
    entries = [Entry(name, "", record) for name, record in zip(names, records)]
    return entries, pick_reference(names), "", []


def report_main(args: Sequence[str]) -> int:
    """Rebuild a comparison's report from run folders; or show a trace."""
    if args and args[0] == "trace":
        return report_trace(args[1:])
    options = parse_command(ReportOptions, args, command="report")
    folders = [Path(name) for name in options.folders]
    if not folders:
        raise UserError("report needs the folder of a comparison, or run folders")
    if len(folders) == 1:
        if not (folders[0] / PLAN).exists():
            raise UserError(f"{folders[0]} is not a comparison; give two or more run folders")
        (entries, reference, title, failed), out = from_comparison(folders[0]), folders[0]
    else:
        (entries, reference, title, failed), out = from_runs(folders), folders[0].parent / "report"
    out = Path(options.out or out)
    results = write_report(out, entries, options.reference or reference, title, failed)
    return _finish(results, out)


# ``bellmask demo``


@dataclass(frozen=True)
class DemoOptions:
    """Compare base and bell on a laptop in minutes: the paper's headline result.

    Trains both on WikiText-2 bytes with the same options and three paired seeds, and prints how
    many times fewer steps bell needs to reach base's final NLL. If interrupted, the same command
    continues where it stopped.

    Examples:
    bellmask demo

    bellmask demo --data book.txt --out runs/book
    """

    data: str | None = None
    """Your own text (path or quoted glob) instead of WikiText-2."""
    seeds: int = 3
    """Paired training seeds."""
    jobs: int = 2 if (os.cpu_count() or 1) > 1 else 1
    """Runs trained in parallel, one thread each."""
    steps: int = 1000
    """Steps of each run."""
    out: str = "runs/demo"
    """Folder for runs and results."""
    quiet: bool = False
    """Print only errors and the result."""


def demo_main(args: Sequence[str]) -> int:
    """Base against bell on a laptop, in minutes."""
    options = parse_command(DemoOptions, args, command="demo")
    check_least(options, steps=1)
    every = f"{max(1, min(100, options.steps // 10))} steps"
    changed = {"train.steps": options.steps, "validation.every": every}
    changed |= {} if options.data is None else {"data.train": options.data}
    config, out = tiny().with_options(changed), Path(options.out)
    training = TrainingOptions(
        seeds=options.seeds, jobs=options.jobs, runs=str(out / "runs"), quiet=options.quiet
    )
    pair, title = parse_variants(["base", "bell"]), "bellmask: base against bell"
    results = compare(config, pair, training, reference="base", out=out, title=title)
    return _finish(results, out)
