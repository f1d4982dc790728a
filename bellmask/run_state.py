"""Marks in a run folder that say how a training stands, for people and for job scripts.

``RESUME_ME`` is there from the first step until the last one is done: whoever finds it without a
process that trains can continue the run. ``FAILED`` is there instead when continuing would only
repeat the failure. A finished run has neither. (Exit codes do not serve: torchrun's is always 1.)
"""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path

from bellmask.files import write_text

RESUME, FAILED = "RESUME_ME", "FAILED"


def resume_command(folder: Path, num_processes: int) -> str:
    """What continues a run."""
    launch = "bellmask"
    if num_processes > 1:
        launch = f"torchrun --nproc-per-node {num_processes} -m bellmask"
    return f"{launch} train {folder / 'config.json'} --out {folder} --resume auto"


class RunState:
    """Writes the marks of one run."""

    def __init__(self, folder: Path, steps: int, num_processes: int) -> None:
        self.folder, self.steps = folder, steps
        self.command = resume_command(folder, num_processes)

    def running(self, step: int) -> None:
        """Training begins, or goes on, after ``step``."""
        (self.folder / FAILED).unlink(missing_ok=True)
        self._write(RESUME, "running", step, "running, or killed before it could say more")

    def stopped(self, step: int, number: int) -> None:
        """A signal ended it; everything up to ``step`` is saved."""
        self._write(RESUME, "stopped", step, f"stopped by {signal.Signals(number).name}")

    def failed(self, step: int, reason: str) -> None:
        """It cannot go on as it is."""
        self._write(FAILED, "failed", step, reason)
        (self.folder / RESUME).unlink(missing_ok=True)

    def done(self) -> None:
        """All steps are done and saved."""
        (self.folder / RESUME).unlink(missing_ok=True)

    def _write(self, name: str, state: str, step: int, reason: str) -> None:
        content = {"state": state, "step": step, "steps": self.steps, "reason": reason}
        if name == RESUME:
            content["resume"] = self.command
        content["written"] = time.strftime("%Y-%m-%d %H:%M:%S")
        write_text(self.folder / name, json.dumps(content, indent=1) + "\n")
