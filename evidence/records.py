"""Runs without their weights, in evidence/records: a later machine trains only what is missing.

A record holds what comparisons read of a finished run: options, metrics, the per-block values of
every validation, and samples. Inside, the folder has the run's key as its name, so a record of
other options or of another text is never used.
"""

from __future__ import annotations

import tarfile
from collections.abc import Sequence
from pathlib import Path

from bellmask.compare.execute import PlannedRun, TrainingOptions, execute, is_finished

RECORDS = Path("evidence/records")
PARTS = ("config.json", "run.json", "metrics.jsonl", "validation", "samples")


def archive(setting: str, run: PlannedRun) -> Path:
    return RECORDS / f"{setting}-{run.variant}-seed{run.config.train.seed}.tar.xz"


def record(setting: str, run: PlannedRun) -> None:
    """Store a finished run, with nothing of the machine in it."""

    def anonymous(info: tarfile.TarInfo) -> tarfile.TarInfo:
        info.mtime = info.uid = info.gid = 0
        info.uname = info.gname = ""
        return info

    path = archive(setting, run)
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w:xz") as tar:
        for part in PARTS:
            if (run.folder / part).exists():
                tar.add(run.folder / part, f"{run.folder.name}/{part}", filter=anonymous)


def recorded(setting: str, run: PlannedRun, place: Path) -> Path | None:
    """The folder of a stored run, unpacked in ``place``; None where there is none."""
    folder = place / run.folder.name
    if not folder.exists() and (path := archive(setting, run)).exists():
        with tarfile.open(path) as tar:
            tar.extractall(place, filter="data")
    return folder if folder.exists() else None


def folders(
    setting: str, runs: Sequence[PlannedRun], options: TrainingOptions, place: Path
) -> list[Path]:
    """Where each run can be read: records first, then what is trained now and stored at once."""
    missing = [run for run in runs if recorded(setting, run, place) is None]
    at_once = options.jobs or 1
    for first in range(0, len(missing), at_once):
        some = missing[first : first + at_once]
        execute(some, options)
        for run in filter(is_finished, some):
            record(setting, run)
    return [recorded(setting, run, place) or run.folder for run in runs]
