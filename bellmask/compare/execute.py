"""Run the planned trainings, one after another or several side by side, and show how far they are.

Every training is a process of its own that resumes by itself, so stopping and repeating a
comparison loses at most the steps since each run's last checkpoint, and gives the same results.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from bellmask.compare.plan import PlannedRun
from bellmask.storage.run_folder import read_metrics
from bellmask.utils.errors import TrainingError, UserError

POLL_SECONDS = 0.5
BROKE_DOWN = 3
"""Exit code of a worker whose loss is not finite; any other fault exits with 1."""


def is_finished(run: PlannedRun) -> bool:
    """True when the run's last step has been validated and saved."""
    steps = run.config.train.steps
    records = read_metrics(run.folder / "metrics.jsonl")
    is_validated = any(r["kind"] == "validation" and r["step"] == steps for r in records)
    return is_validated and (run.folder / "checkpoints" / f"step-{steps:09d}").exists()


@dataclass
class _Job:
    run: PlannedRun
    process: subprocess.Popen[bytes]
    errors: IO[bytes]

    @classmethod
    def start(cls, run: PlannedRun, threads: int | None) -> _Job:
        environment = dict(os.environ)
        if threads is not None:
            environment |= {"OMP_NUM_THREADS": str(threads)}
        errors = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the job
        process = subprocess.Popen(
            [sys.executable, "-m", "bellmask.compare.worker", str(run.folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=errors,
            env=environment,
        )
        assert process.stdin is not None
        process.stdin.write(json.dumps(run.config.to_dict()).encode() + b"\n")
        process.stdin.flush()
        return cls(run, process, errors)

    def end(self) -> str:
        """Let the worker finish its step, save and end; what it wrote on stderr."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()
        with self.errors as errors:
            errors.seek(0)
            return errors.read().decode(errors="replace").strip()


class _Screen:
    """One bar over all steps, with the newest validation of each active run beside it."""

    def __init__(self, runs: Sequence[PlannedRun], is_quiet: bool) -> None:
        self.console = Console(stderr=True, quiet=is_quiet, highlight=False)
        self.bar = Progress(
            TextColumn("[bold]comparing"),
            BarColumn(),
            TextColumn("{task.percentage:>3.0f}%"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            TextColumn("{task.fields[note]}"),
            console=self.console,
            disable=is_quiet or not self.console.is_terminal,
        )
        total = sum(run.config.train.steps for run in runs)
        self.task = self.bar.add_task("comparing", total=total, note="")
        self.runs = runs

    def show(self, jobs: Sequence[_Job], done: int) -> None:
        if self.bar.disable:
            return
        steps, notes = done, []
        for job in jobs:
            records = read_metrics(job.run.folder / "metrics.jsonl")
            now = records[-1]["step"] if records else 0
            nll = [r["nll"] for r in records if r["kind"] == "validation"]
            speed = [r["tokens_per_second"] for r in records if r["kind"] == "train"]
            parts = [f"{job.run.label}: {now}/{job.run.config.train.steps}"]
            parts += [f"nll {nll[-1]:.3f}"] if nll else []
            parts += [f"{speed[-1]:,.0f} tokens/s"] if speed else []
            steps += now
            notes.append(" ".join(parts))
        self.bar.update(self.task, completed=steps, note=" | ".join(notes))

    def say(self, text: str) -> None:
        self.console.print(text, markup=False, soft_wrap=True)


def execute(
    runs: Sequence[PlannedRun], *, jobs: int = 1, is_quiet: bool = False, may_fail: bool = False
) -> dict[Path, str]:
    """Train what is not finished yet; returns the folders of failed runs with their messages.

    With ``jobs`` > 1 each training gets one thread. ``may_fail`` goes on when a training breaks
    down (a learning rate of a grid that is too high); otherwise that is the end.
    """
    open_runs = [run for run in runs if not is_finished(run)]
    failed: dict[Path, str] = {}
    active: list[_Job] = []
    screen, started = _Screen(open_runs, is_quiet), time.monotonic()
    if open_runs:
        kept = len(runs) - len(open_runs)
        reuse = f"; {kept} finished before" if kept else ""
        screen.say(f"{len(open_runs)} training(s) to do{reuse}, {jobs} at a time")
    done, waiting = 0, list(open_runs)
    try:
        with screen.bar:
            while waiting or active:
                while waiting and len(active) < jobs:
                    active.append(_Job.start(waiting.pop(0), 1 if jobs > 1 else None))
                time.sleep(POLL_SECONDS)
                for job in [job for job in active if job.process.poll() is not None]:
                    active.remove(job)
                    _close(job, screen, started, failed, may_fail)
                    done += job.run.config.train.steps
                screen.show(active, done)
    finally:
        for job in active:
            job.end()
    return failed


def _close(
    job: _Job, screen: _Screen, started: float, failed: dict[Path, str], may_fail: bool
) -> None:
    complaint, code = job.end(), job.process.returncode
    if code == 0:
        nll = read_metrics(job.run.folder / "metrics.jsonl")
        last = next(r["nll"] for r in reversed(nll) if r["kind"] == "validation")
        screen.say(
            f"{time.monotonic() - started:6.0f} s  {job.run.label}: NLL {last:.4f} nats/token"
        )
        return
    if code in (128 + 2, 128 + 15, -2, -15):
        raise KeyboardInterrupt
    message = f"{job.run.label}: {complaint or f'the training process died ({code})'}"
    if code == BROKE_DOWN and may_fail:
        failed[job.run.folder] = message
        screen.say(f"failed: {message.splitlines()[0]}")
        return
    raise (UserError if code == 2 else TrainingError)(message)
