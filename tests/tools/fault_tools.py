"""Runs that are disturbed, and what an undisturbed one must equal.

The truth is an undisturbed run of the same command: every tensor of its last checkpoint (put
together from the shards by our own reader, not by the one under test) and every line of
metrics.jsonl but for times.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from bellmask.config import RunConfig
from bellmask.records import TIME_FIELDS

LONGEST = 240.0
"""Seconds within which any run here ends, restarts included; longer is a hang."""


# -- what a run has become ------------------------------------------------------------------------


def checkpoints(run: Path) -> list[Path]:
    """Checkpoint folders, oldest first."""
    return sorted((run / "checkpoints").glob("step-*"))


def last_step(run: Path) -> int:
    """The step of the newest checkpoint; 0 when there is none."""
    found = checkpoints(run)
    return int(found[-1].name.split("-")[1]) if found else 0


def tensors_of(checkpoint: Path) -> dict[str, Tensor]:
    """Whole tensors by name, whatever number of processes wrote parts of them."""
    parts: dict[str, list[tuple[list[int], Tensor]]] = {}
    for shard in sorted(checkpoint.glob("*.safetensors")):
        with safe_open(shard, "pt") as stream:
            places = json.loads((stream.metadata() or {}).get("DCP_SHARDING_INFO", "{}"))
            for name in stream.keys():  # noqa: SIM118  (not a dictionary)
                tensor = stream.get_tensor(name)
                place = places.get(name, {}).get("saved_offsets", [0] * tensor.ndim)
                parts.setdefault(name, []).append((place, tensor))
    return {name: _assemble(found) for name, found in parts.items()}


def _assemble(parts: list[tuple[list[int], Tensor]]) -> Tensor:
    first = parts[0][1]
    ends = [[o + n for o, n in zip(place, t.shape, strict=True)] for place, t in parts]
    whole = torch.empty([max(sizes) for sizes in zip(*ends, strict=True)], dtype=first.dtype)
    for place, tensor in parts:
        whole[tuple(slice(o, o + n) for o, n in zip(place, tensor.shape, strict=True))] = tensor
    assert math.prod(whole.shape) <= sum(t.numel() for _, t in parts)
    return whole


def digest(run: Path) -> str:
    """SHA-256 of all tensors of the newest checkpoint: names, types, shapes and bytes."""
    total = hashlib.sha256()
    for name, tensor in sorted(tensors_of(checkpoints(run)[-1]).items()):
        total.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        total.update(tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return total.hexdigest()


def lines_of(run: Path) -> list[dict[str, Any]]:
    """metrics.jsonl without times; every line must be whole."""
    text = (run / "metrics.jsonl").read_text()
    return [
        {k: v for k, v in json.loads(line).items() if k not in TIME_FIELDS}
        for line in text.splitlines()
    ]


def assert_same(run: Path, truth: Path, aside: Sequence[str] = ()) -> None:
    """The same end, the same history, and nothing of the disturbance left behind.

    ``aside``: names of damaged checkpoints, which are kept under other names.
    """
    assert last_step(run) == last_step(truth) > 0
    names = set(tensors_of(checkpoints(run)[-1]))
    assert {name.split(".")[0] for name in names} == {"model", "optimizer", "ema"}
    assert digest(run) == digest(truth)
    assert lines_of(run) == lines_of(truth)
    assert [c.name for c in checkpoints(run)] == [c.name for c in checkpoints(truth)]
    assert leftovers(run) == [f"checkpoints/.damaged-{name}" for name in sorted(aside)]
    assert not (run / "RESUME_ME").exists()
    assert not (run / "FAILED").exists()


def leftovers(run: Path) -> list[str]:
    """Hidden files and folders: what an interrupted write or a damaged checkpoint leaves."""
    return sorted(str(p.relative_to(run)) for p in run.rglob(".*"))


def mark_of(run: Path) -> dict[str, Any]:
    """What RESUME_ME says."""
    found = json.loads((run / "RESUME_ME").read_text())
    assert isinstance(found, dict)
    return found


def assert_no_traceback(said: str) -> None:
    """Errors a user meets are sentences."""
    assert "Traceback" not in said, said


# -- commands -------------------------------------------------------------------------------------


def command(config: RunConfig, out: Path, *args: str) -> list[str]:
    """``train`` with a config that is kept beside the run folder."""
    path = out.with_suffix(".json")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(config.to_dict()))
    return ["train", str(path), "--out", str(out), "--resume", "auto", *args]


def wait_for(what: Callable[[], Any], alive: Callable[[], bool], seconds: float = LONGEST) -> Any:
    """Poll until there is an answer; fails when the process ends, or time is up, before."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        found = what()
        if found:
            return found
        if not alive():
            break
        time.sleep(0.002)
    raise AssertionError(f"did not happen (alive: {alive()})")


def writing(run: Path) -> str | None:
    """The name of a folder that is being written into."""
    folder = run / "checkpoints"
    names = os.listdir(folder) if folder.exists() else []
    return next((n for n in names if n.startswith(".writing-")), None)


def steps_logged(run: Path) -> int:
    """Lines of metrics.jsonl so far."""
    path = run / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


# -- torchrun -------------------------------------------------------------------------------------


class Torchrun:
    """One torchrun agent and its workers, as a user starts them."""

    def __init__(self, args: Sequence[str], *options: str, log: Path, size: int = 2) -> None:
        self.log = log
        with log.open("a") as stream:
            self.process = subprocess.Popen(
                _launcher(options, size) + list(args),
                stdout=stream,
                stderr=subprocess.STDOUT,
                env={**os.environ, "OMP_NUM_THREADS": "1"} | _where_to_meet(options),
                start_new_session=True,
            )

    def is_alive(self) -> bool:
        """True until torchrun has ended."""
        return self.process.poll() is None

    def workers(self) -> dict[int, int]:
        """rank: process id, of workers that run now."""
        found = {}
        for pid in _children(self.process.pid):
            with contextlib.suppress(OSError):  # it may end while we look
                environ = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
                state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
                ranks = [e for e in environ if e.startswith(b"RANK=")]
                if ranks and state not in "ZX":
                    found[int(ranks[0][5:])] = pid
        return found

    def wait(self, seconds: float = LONGEST) -> int:
        """The exit code; a hang ends in an assertion, and in the end of all processes."""
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.kill_all()
            raise AssertionError(f"still running after {seconds} s:\n{self.text()}") from None

    def kill_all(self) -> None:
        """SIGKILL to torchrun and to all workers at once."""
        pids = [*self.workers().values(), self.process.pid]
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait(30)

    def text(self) -> str:
        """What all processes have said."""
        return self.log.read_text(errors="replace")


def _launcher(options: Sequence[str], size: int) -> list[str]:
    start = [sys.executable, "-m", "torch.distributed.run", *options]
    return [*start, "--nproc-per-node", str(size), "-m", "bellmask"]


def _where_to_meet(options: Sequence[str]) -> dict[str, str]:
    """Tests run side by side: without --standalone torchrun would always take port 29500."""
    from warm_processes import free_port

    return {} if "--standalone" in options else {"PET_MASTER_PORT": str(free_port())}


def _children(pid: int) -> list[int]:
    with contextlib.suppress(OSError):
        return [int(c) for c in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return []


@contextlib.contextmanager
def torchrun(args: Sequence[str], *options: str, log: Path, size: int = 2) -> Iterator[Torchrun]:
    """A torchrun that is ended, with its workers, whatever happens in the block."""
    agent = Torchrun(args, *options, log=log, size=size)
    try:
        yield agent
    finally:
        if agent.is_alive():
            agent.kill_all()


def copy_run(run: Path, to: Path) -> Path:
    """A copy to be damaged."""
    shutil.copytree(run, to)
    return to
