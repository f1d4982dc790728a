"""Faults inside a process: what tests give to warm processes as ``prepare``.

Each function changes the process that it is called in, before the command begins.
"""

from __future__ import annotations

import errno
import io
import itertools
import os
import resource
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch


def limit_file_size(size: int, rank: int | None = None) -> None:
    """No file may grow beyond ``size`` bytes: writes fail as on a full disk (EFBIG)."""
    if rank is None or int(os.environ.get("RANK", "0")) == rank:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))


def wait_in_step(step: int, seconds: float, note: str) -> None:
    """One step takes long; ``note`` is a file that appears when it has begun."""
    from bellmask.train.step import TrainStep

    call = TrainStep.__call__

    def slow(self: TrainStep, number: int) -> Any:
        if number == step:
            Path(note).touch()
            until = time.monotonic() + seconds
            while time.monotonic() < until:
                time.sleep(0.01)
        return call(self, number)

    TrainStep.__call__ = slow  # type: ignore[method-assign]


def hold_in_step(step: int, note: str, go: str, first: Callable[[], None] | None = None) -> None:
    """One step waits until the file ``go`` is there; ``note`` appears when it has begun."""
    from bellmask.train.step import TrainStep

    call = TrainStep.__call__

    def held(self: TrainStep, number: int) -> Any:
        if number == step:
            if first is not None:
                first()
            Path(f"{note}-{os.environ.get('RANK', '0')}").touch()
            while not Path(go).exists():
                time.sleep(0.01)
        return call(self, number)

    TrainStep.__call__ = held  # type: ignore[method-assign]


def nobody_reads_at_all() -> None:
    """Output goes into a pipe without a reader."""
    reader, writer = os.pipe()
    os.close(reader)
    for stream in (1, 2):
        os.dup2(writer, stream)


def nobody_reads(step: int, note: str, go: str) -> None:
    """Output goes into a pipe whose reader leaves when :func:`hold_in_step` begins to wait."""
    reader, writer = os.pipe()
    for stream in (1, 2):
        os.dup2(writer, stream)
    hold_in_step(step, note, go, lambda: os.close(reader))


def leave_late(rank: int, seconds: float) -> None:
    """One process comes late to the end of its training."""
    from bellmask.train.trainer import Trainer

    fit = Trainer.fit

    def slow(self: Trainer) -> int | None:
        stopped_by = fit(self)
        time.sleep(seconds if self.world.rank == rank else 0)
        return stopped_by

    Trainer.fit = slow  # type: ignore[method-assign]


def hear_late(rank: int, seconds: float) -> None:
    """One process comes late to everything that the main one does alone."""
    from bellmask.train.distributed import World

    on_main = World.on_main

    def slow(self: World, work: Callable[[], object]) -> None:
        time.sleep(seconds if self.rank == rank else 0)
        on_main(self, work)

    World.on_main = slow  # type: ignore[method-assign]


def kill_at_touch(countdown: int) -> None:
    """SIGKILL at the so-manieth time that a save touches the disk."""
    from bellmask.train import checkpoint

    touches = itertools.count(1)

    def deadly(function: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(*args: Any, **more: Any) -> Any:
            if next(touches) > countdown:
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*args, **more)

        return wrapper

    owners = (
        (checkpoint, ("write_text", "digest", "_sync")),
        (checkpoint.dcp, ("save",)),
        (os, ("replace",)),
        (shutil, ("rmtree",)),
    )
    for owner, names in owners:
        for name in names:
            setattr(owner, name, deadly(getattr(owner, name)))


def no_space_for(part: str, rank: int) -> None:
    """On one rank, no file whose path has that part can be opened for writing (ENOSPC)."""
    if int(os.environ.get("RANK", "0")) != rank:
        return
    real = io.open

    def full(file: Any, mode: str = "r", *args: Any, **more: Any) -> Any:
        if part in str(file) and set(mode) & set("wax+"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(file))
        return real(file, mode, *args, **more)

    io.open = full  # type: ignore[assignment]  # what pathlib calls


def no_space_for_line(step: int) -> None:
    """The lines of metrics.jsonl from that step on cannot be written (ENOSPC)."""
    from bellmask.records import MetricsFile

    write = MetricsFile.write

    def full(self: MetricsFile, record: dict[str, Any]) -> None:
        if record["step"] >= step:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.path))
        write(self, record)

    MetricsFile.write = full  # type: ignore[method-assign]


def spoil_loss(steps: list[int], value: float, rank: int | None = None) -> None:
    """The loss of these steps (counted from 1) is multiplied by ``value``; on one rank, or all."""
    from bellmask.train.step import TrainStep

    if rank is not None and int(os.environ.get("RANK", "0")) != rank:
        return
    forward = TrainStep._forward

    def spoilt(self: TrainStep, step: int, *args: Any) -> Any:
        loss, *rest = forward(self, step, *args)
        factor = value if step + 1 in steps else 1.0
        return (loss * torch.tensor(factor), *rest)

    TrainStep._forward = spoilt  # type: ignore[method-assign]
