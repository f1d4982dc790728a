"""Marks in a run folder that say how a training stands, for people and for job scripts.

``RESUME_ME`` is there from the first step until the last one is done: whoever finds it without a
process that trains can continue the run. ``FAILED`` is there instead when continuing would only
repeat the failure. A finished run has neither. (Exit codes do not serve: torchrun's is 1 whatever
ended a run early.)
"""

from __future__ import annotations

import json
import shlex
import signal
import time
from pathlib import Path

from bellmask.utils.files import write_text

RESUME, FAILED = "RESUME_ME", "FAILED"


def resume_command(folder: Path, num_processes: int = 1, per_machine: int = 1) -> str:
    """What continues a run; of several machines what each of them is told."""
    words = ["bellmask"]
    if num_processes > 1:
        words = ["torchrun", "--nproc-per-node", str(per_machine), "-m", "bellmask"]
    if num_processes > per_machine:
        words[1:1] = ["--nnodes", str(num_processes // per_machine)]
    words += ["train", str(folder / "config.json"), "--out", str(folder), "--resume", "auto"]
    return shlex.join(words)


class RunState:
    """Writes the marks of one run."""

    def __init__(self, folder: Path, steps: int, command: str) -> None:
        self.folder, self.steps, self.command = folder, steps, command

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

    @property
    def has_failed(self) -> bool:
        """True where it ended so before."""
        return (self.folder / FAILED).exists()

    def done(self) -> None:
        """All steps are done and saved."""
        (self.folder / RESUME).unlink(missing_ok=True)

    def _write(self, name: str, state: str, step: int, reason: str) -> None:
        content = {"state": state, "step": step, "steps": self.steps, "reason": reason}
        if name == RESUME:
            content["resume"], content["from"] = self.command, str(Path.cwd())
        content["written"] = time.strftime("%Y-%m-%d %H:%M:%S")
        write_text(self.folder / name, json.dumps(content, indent=1) + "\n")
