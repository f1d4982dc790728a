"""Plan, train, measure, report: what ``bellmask compare``, ``demo`` and ``report`` share."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bellmask.compare.execute import execute
from bellmask.compare.naming import names_of
from bellmask.compare.plan import (
    PlannedRun,
    describe_plan,
    distinct,
    for_comparison,
    place_runs,
    plan_runs,
)
from bellmask.compare.records import RunRecord, read_json, read_run
from bellmask.compare.results import Entry, summarize
from bellmask.compare.variants import Variant
from bellmask.config.config import RunConfig
from bellmask.data.inputs import load_inputs
from bellmask.data.prepare import make_tokenizer
from bellmask.report.comparison_plots import write_curves
from bellmask.report.page import render_page
from bellmask.start import open_start
from bellmask.utils.console import preparing_bar
from bellmask.utils.errors import TrainingError, UserError
from bellmask.utils.files import has_kinds, inside, is_whole, sound, without_nan, write_text

PLAN = "comparison.json"


def text_identity(config: RunConfig, *, is_quiet: bool = False) -> str:
    """Fingerprints of tokenizer, text and first weights; prepares the text if need be."""
    start = open_start(config)
    tokenizer = start.tokenizer or make_tokenizer(config.data)
    with preparing_bar(is_quiet=is_quiet) as on_progress:
        data = load_inputs(start.config, tokenizer, start.backbone, on_progress)
    marks = [tokenizer.fingerprint, data.train.fingerprint, data.valid.fingerprint]
    return "/".join([*marks, *([start.fingerprint] if start.fingerprint else [])])


def compare(
    shared: RunConfig,
    variants: Sequence[Variant],
    *,
    reference: str,
    out: Path,
    root: Path,
    seeds: int = 1,
    grid: Sequence[Mapping[str, str]] = ({},),
    jobs: int = 1,
    is_quiet: bool = False,
    title: str = "",
) -> dict[str, Any]:
    """Train every variant (what is finished is reused), write the report, return the results."""
    if reference not in [variant.name for variant in variants]:
        names = ", ".join(variant.name for variant in variants)
        raise UserError(f"the reference {reference!r} is not among the variants: {names}")
    if len(variants) < 2:
        raise UserError("a comparison needs at least two variants")
    if seeds < 1 or jobs < 1:
        raise UserError("--seeds and --jobs must be at least 1")
    shared = for_comparison(shared)
    # bad variants are refused before a large corpus is prepared, whose identity is in the keys
    planned = plan_runs(shared, variants, seeds=seeds, grid=grid, root=root, text="")
    planned = place_runs(planned, root, text_identity(shared, is_quiet=is_quiet))
    out.mkdir(parents=True, exist_ok=True)
    root.mkdir(parents=True, exist_ok=True)
    try:
        failed = execute(distinct(planned), jobs=jobs, is_quiet=is_quiet, may_fail=len(grid) > 1)
    except KeyboardInterrupt:
        raise KeyboardInterrupt(
            "interrupted; the trainings are saved, and the same command goes on with them"
        ) from None
    kept = [run for run in planned if run.folder not in failed]
    _check_something_left(planned, kept, failed)
    messages = list(failed.values())
    _say_if_replacing(out, kept, is_quiet)
    _write_plan(out, kept, root, reference, title, messages)
    return write_report(_entries(kept), reference, out, title, messages)


def _check_something_left(
    planned: Sequence[PlannedRun], kept: Sequence[PlannedRun], failed: Mapping[Path, str]
) -> None:
    """With a grid some runs may fail, but every variant needs one that did not."""
    for run in planned:
        if run.variant not in {other.variant for other in kept}:
            raise TrainingError(f"no training of {run.variant} survived: {failed[run.folder]}")


def _say_if_replacing(out: Path, runs: Sequence[PlannedRun], is_quiet: bool) -> None:
    """A notice when the folder holds another comparison's report; its runs stay where they are."""
    if not (out / PLAN).exists() or is_quiet:
        return
    before = read_json(out / PLAN)
    if not isinstance(before, dict) or before.get("runs") != describe_plan(runs):
        print(f"note: {out} held the report of another comparison, which is replaced")


def _write_plan(
    out: Path,
    runs: Sequence[PlannedRun],
    root: Path,
    reference: str,
    title: str,
    failed: Sequence[str],
) -> None:
    """comparison.json: which run folders belong to the comparison, for ``bellmask report``."""
    content = {
        "root": os.path.relpath(root, out),  # so that both can be moved together
        "reference": reference,
        "title": title,
        "failed": list(failed),
        "runs": describe_plan(runs),
    }
    write_text(out / PLAN, json.dumps(content, indent=1) + "\n")


def _entries(runs: Sequence[PlannedRun]) -> list[Entry]:
    read: dict[Path, RunRecord] = {}
    for run in runs:
        if run.folder not in read:
            read[run.folder] = read_run(run.folder)
    return [Entry(run.variant, run.seed, run.point, read[run.folder]) for run in runs]


def write_report(
    entries: Sequence[Entry],
    reference: str,
    out: Path,
    title: str = "",
    failed: Sequence[str] = (),
) -> dict[str, Any]:
    """results.json, curves.png/.svg and report.html in ``out``; returns the results."""
    results = without_nan({**summarize(entries, reference), "failed": list(failed)})
    others = ", ".join(name for name in results["variants"] if name != reference)
    title = title or f"bellmask: {others} against {reference}"
    page = render_page(results, title)  # all that can fail comes before the first file
    out.mkdir(parents=True, exist_ok=True)
    write_curves(results, out)
    write_text(out / "results.json", json.dumps(results, indent=1, allow_nan=False) + "\n")
    write_text(out / "report.html", page)
    return results


def from_comparison(folder: Path) -> tuple[list[Entry], str, str, list[str]]:
    """(entries, reference, title, failures) of a comparison, read from its run folders."""
    plan = read_json(folder / PLAN)
    try:
        root = folder / plan["root"]
        runs = [_planned(run, root, folder / PLAN) for run in plan["runs"]]
        reference, title, failed = plan["reference"], plan["title"], plan["failed"]
        texts = [reference, title, *failed]
        if not all(isinstance(text, str) and text == sound(text) for text in texts):
            raise TypeError
    except (KeyError, TypeError):
        raise UserError(f"{folder / PLAN} is damaged; repeat the comparison") from None
    if not runs:
        raise UserError(f"{folder / PLAN} names no runs; repeat the comparison")
    entries = [Entry(variant, seed, point, read_run(run)) for variant, seed, point, run in runs]
    return entries, reference, title, failed


def _planned(run: Any, root: Path, where: Path) -> tuple[str, int, str, Path]:
    """(variant, seed, point, folder) of a run of the plan; its folder is one of ``root``'s own."""
    if not has_kinds(run, {"variant": str, "point": str}) or not is_whole(run["seed"]):
        raise TypeError
    return run["variant"], run["seed"], run["point"], inside(root, run["run"], str(where))


def from_runs(folders: Sequence[Path]) -> tuple[list[Entry], str]:
    """(entries, reference) of plain run folders, named by what they train on."""
    records = [read_run(folder) for folder in folders]
    names = names_of([record.config for record in records])
    entries = [
        Entry(name, record.config.train.seed, "", record)
        for name, record in zip(names, records, strict=True)
    ]
    seen: set[tuple[str, int]] = set()
    for entry in entries:
        if (entry.variant, entry.seed) in seen:
            raise UserError(
                f"two runs are {entry.variant} with seed {entry.seed}; give one of them"
            )
        seen.add((entry.variant, entry.seed))
    return entries, pick_reference(names)


def pick_reference(names: Sequence[str]) -> str:
    """Base where it is among them, else the first one."""
    return "base" if "base" in names else names[0]
