"""Faults for a training under torchrun: kills at every bad moment, stops, a flipped bit.

Each fault takes the training and a random generator, acts, and returns what it did. The
soak waits until the run continues.
"""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from soak_watch import AGENT, children, leftovers, rank_of, read_folder, read_process

MOST_RESTARTS = 10_000
STOPPING_SECONDS = 120.0
WAITING_SECONDS = 240.0
"""A run that makes no step for so long after a fault counts as hanging."""


class Hangs(RuntimeError):
    """The run did not continue."""


class Training:
    """One run under torchrun, started as often as needed."""

    def __init__(self, args: Sequence[str], folder: Path, log: Path) -> None:
        self.args, self.folder, self.log = list(args), folder, log
        self.agent: subprocess.Popen[bytes] | None = None
        self.steps = 0

    def start(self, steps: int) -> None:
        """Start (again) with two processes and ``--resume auto``."""
        self.steps = steps
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += ["--nproc-per-node", "2", "--max-restarts", str(MOST_RESTARTS)]
        command += ["-m", "bellmask", "train", *self.args, "--out", str(self.folder)]
        command += ["--resume", "auto", "--train.steps", str(steps)]
        with self.log.open("ab") as stream:
            self.agent = subprocess.Popen(
                command,
                stdout=stream,
                stderr=stream,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        """Of torchrun itself."""
        assert self.agent is not None
        return self.agent.pid

    def workers(self) -> dict[int, int]:
        """Rank to process id."""
        found = {rank_of(pid): pid for pid in children(self.pid)}
        return {rank: pid for rank, pid in found.items() if rank is not None}

    def both_workers(self, besides: Sequence[int] = ()) -> dict[int, int]:
        """Wait until two workers (none of ``besides``) are there."""
        for _ in patience(f"no two workers of {self.folder}"):
            found = self.workers()
            if len(found) == 2 and not set(found.values()) & set(besides):
                return found
        raise AssertionError

    def newest(self) -> tuple[int, Path | None]:
        """Step and folder of the newest checkpoint."""
        try:
            names = os.listdir(self.folder / "checkpoints")
        except OSError:
            return 0, None
        steps = [int(m[1]) for name in names if (m := re.fullmatch(r"step-(\d+)", name))]
        last = max(steps, default=0)
        return last, self.folder / "checkpoints" / f"step-{last:09d}" if steps else None

    def wait_beyond(self, step: int) -> float:
        """Seconds until a checkpoint of a later step is there."""
        began = time.monotonic()
        for _ in patience(f"no checkpoint after step {step} in {self.folder}"):
            if self.newest()[0] > step:
                break
            if self.has_ended():
                raise Hangs(f"torchrun has ended by itself; see {self.log}")
        return time.monotonic() - began

    def has_ended(self) -> bool:
        """True when torchrun is gone."""
        return self.agent is None or self.agent.poll() is not None

    def kill_all(self) -> None:
        """SIGKILL to torchrun and every worker; they are gone afterwards."""
        pids = [self.pid, *children(self.pid)]
        for pid in pids:
            kill(pid)
        assert self.agent is not None
        self.agent.wait()
        for _ in patience("killed processes are still there"):
            if not any(read_process(pid) for pid in pids):
                return

    def stop(self) -> int:
        """SIGTERM to torchrun; its exit code."""
        assert self.agent is not None
        self.agent.send_signal(signal.SIGTERM)
        return self.agent.wait(STOPPING_SECONDS)

    def look(self) -> dict[str, Any]:
        """A sample for the watcher."""
        processes = []
        if not self.has_ended():
            roles = {AGENT: self.pid} | {f"rank {r}": pid for r, pid in self.workers().items()}
            for role, pid in roles.items():
                found = read_process(pid)
                processes += [{"role": role, "pid": pid, **found}] if found else []
        folder = read_folder(self.folder)
        return {"step": self.newest()[0], "processes": processes, "folder": folder}


def patience(complaint: str, every: float = 0.05) -> Iterator[None]:
    """Look again and again; Hangs when it takes too long."""
    end = time.monotonic() + WAITING_SECONDS
    while time.monotonic() < end:
        yield
        time.sleep(every)
    raise Hangs(f"{complaint} within {WAITING_SECONDS:.0f} s")


def kill(pid: int) -> None:
    """SIGKILL, if it is still there."""
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return


def kill_rank(training: Training, rank: int) -> dict[str, Any]:
    """One worker dies; torchrun ends the other and starts both again."""
    kill(training.both_workers()[rank])
    return {"rank": rank}


def kill_in_save(training: Training, draw: random.Random) -> dict[str, Any]:
    """A worker dies while a checkpoint is being written."""
    rank, delay = draw.randrange(2), draw.uniform(0, 0.03)
    pid = training.both_workers()[rank]
    for _ in patience("no save was seen", every=0.001):
        if any(name.startswith(".writing-") for name in leftovers(training.folder)):
            break
    time.sleep(delay)
    kill(pid)
    time.sleep(0.05)
    return {"rank": rank, "is_half_written": bool(leftovers(training.folder))}


def kill_in_start(training: Training, draw: random.Random) -> dict[str, Any]:
    """A worker dies, and so does one of those that take over, while it starts."""
    first = training.both_workers()
    kill(first[draw.randrange(2)])
    second = training.both_workers(besides=list(first.values()))
    time.sleep(draw.uniform(0, 5))
    kill(second[draw.randrange(2)])
    return {}


def stop_and_start(training: Training, draw: random.Random) -> dict[str, Any]:
    """SIGTERM to torchrun; what it leaves says that the run can go on."""
    code = training.stop()
    mark = training.folder / "RESUME_ME"
    state = json.loads(mark.read_text())["state"] if mark.exists() else None
    training.start(training.steps)
    return {"code": code, "mark": state}


def kill_everything(training: Training, draw: random.Random) -> dict[str, Any]:
    """As when the machine loses power, but for the disk."""
    training.kill_all()
    training.start(training.steps)
    return {}


def flip_a_bit(path: Path, draw: random.Random) -> None:
    """One bit of a file, anywhere in it."""
    content = bytearray(path.read_bytes())
    place = draw.randrange(8 * len(content))
    content[place // 8] ^= 1 << place % 8
    path.write_bytes(content)


def damage_and_kill(training: Training, draw: random.Random) -> dict[str, Any]:
    """A worker dies, and the newest checkpoint is damaged before anyone reads it."""
    for _ in patience("no second checkpoint"):
        if len(list(training.folder.glob("checkpoints/step-*"))) > 1:
            break
    kill(training.both_workers()[0])
    time.sleep(0.2)
    step, folder = training.newest()
    assert folder is not None
    path = draw.choice(sorted(p for p in folder.iterdir() if p.is_file()))
    flip_a_bit(path, draw)
    return {"step": step, "file": path.name}


FAULTS: dict[str, Callable[[Training, random.Random], dict[str, Any]]] = {
    "kill rank 0": lambda training, draw: kill_rank(training, 0),
    "kill rank 1": lambda training, draw: kill_rank(training, 1),
    "kill inside a save": kill_in_save,
    "kill again during the restart": kill_in_start,
    "SIGTERM, start again": stop_and_start,
    "kill everything, start again": kill_everything,
    "flip a bit of the newest checkpoint, kill": damage_and_kill,
}


def plan_faults(seed: int, period: float) -> Iterator[tuple[float, str]]:
    """(seconds to wait, fault) without end: all faults in a new order, then again."""
    draw = random.Random(seed)
    while True:
        for name in draw.sample(list(FAULTS), len(FAULTS)):
            yield draw.uniform(0.5, 1.5) * period, name
