"""Faults inside a process: what tests give to warm processes as ``prepare``.

Each function changes the process that it is called in, before the command begins.
"""

from __future__ import annotations

import errno
import hashlib
import io
import itertools
import os
import resource
import shutil
import signal
import time
from pathlib import Path

import torch
from torch.distributed import checkpoint

from bellmask.storage.run_folder import MetricsFile
from bellmask.train.step import TrainStep
from bellmask.utils.distributed import World

RANK = os.environ.get("RANK", "0")


def instead_of(owner, name):
    """Decorates what is called from now on, with the original as its first argument."""
    original = getattr(owner, name)

    def replace(function):
        setattr(owner, name, lambda *args, **more: function(original, *args, **more))

    return replace


def limit_file_size(size):
    """No file of the main process may grow beyond this: writes fail as on a full disk (EFBIG)."""
    if RANK == "0":
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))


def hold_in_step(step, note, go, first=lambda: None):
    """One step waits until the file ``go`` is there; ``note`` appears when it has begun."""

    @instead_of(TrainStep, "begin")
    def held(call, self, number):
        if number == step:
            first()
            Path(f"{note}-{RANK}").touch()
            while not Path(go).exists():
                time.sleep(0.01)
        return call(self, number)


def nobody_reads(step, note, go):
    """Output goes into a pipe whose reader leaves when :func:`hold_in_step` waits."""
    reader, writer = os.pipe()
    for stream in (1, 2):
        os.dup2(writer, stream)
    hold_in_step(step, note, go, lambda: os.close(reader))


def hear_late(rank, seconds):
    """One process comes late to everything that the main one does alone."""

    @instead_of(World, "on_main")
    def slow(on_main, self, work):
        time.sleep(seconds if self.rank == rank else 0)
        on_main(self, work)


def kill_at_touch(countdown):
    """SIGKILL at the so-manieth time that something is written for good, renamed or removed."""
    touches = itertools.count(1)

    def deadly(function, *args, **more):
        if next(touches) > countdown:
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*args, **more)

    for owner, name in ((os, "replace"), (os, "fsync"), (shutil, "rmtree"), (checkpoint, "save")):
        instead_of(owner, name)(deadly)
    instead_of(hashlib, "file_digest")(deadly)


def no_space_for(part, rank):
    """On one rank, no file whose path has that part can be opened for writing (ENOSPC)."""

    @instead_of(io, "open")  # what pathlib calls
    def full(real, file, mode="r", *args, **more):
        if int(RANK) == rank and part in str(file) and set(mode) & set("wax+"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(file))
        return real(file, mode, *args, **more)


def no_space_for_line(step):
    """The lines of metrics.jsonl from that step on cannot be written (ENOSPC)."""

    @instead_of(MetricsFile, "write")
    def full(write, self, record):
        if record["step"] >= step:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.path))
        write(self, record)


def read_late():
    """As on a GPU: a step's numbers are read a step later, and the device skips updates."""

    @instead_of(TrainStep, "__init__")
    def late(init, self, *args, **more):
        init(self, *args, **more)
        self.reads_late = True


def spoil_loss(steps, value, rank=None, is_late=False):
    """The loss of these steps (counted from 1) is multiplied by ``value``; on one rank, or all."""
    if is_late:
        read_late()

    @instead_of(TrainStep, "_forward")
    def spoilt(forward, self, step, each):
        is_here = step + 1 in steps and rank in (None, int(RANK))
        return forward(self, step, each) * torch.tensor(value if is_here else 1.0)
