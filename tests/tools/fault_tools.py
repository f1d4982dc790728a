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
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from commands import bellmask
from safetensors import safe_open
from torch import Tensor
from warm_processes import WarmProcess, free_port

from bellmask.config.config import RunConfig
from bellmask.storage.run_folder import TIME_FIELDS

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
    ends = [[o + n for o, n in zip(place, t.shape, strict=True)] for place, t in parts]
    whole = torch.empty([max(sizes) for sizes in zip(*ends, strict=True)], dtype=parts[0][1].dtype)
    for place, tensor in parts:
        whole[tuple(slice(o, o + n) for o, n in zip(place, tensor.shape, strict=True))] = tensor
    assert math.prod(whole.shape) <= sum(t.numel() for _, t in parts)
    return whole


def lines_of(run: Path) -> list[dict[str, Any]]:
    """metrics.jsonl without times; every line must be whole."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if k not in TIME_FIELDS} for line in lines]


def assert_same(run: Path, truth: Path, aside: Sequence[str] = ()) -> None:
    """The same end, bit for bit, the same history, and nothing of the disturbance left behind.

    ``aside``: names of damaged checkpoints, which are kept under other names.
    """
    assert last_step(run) == last_step(truth) > 0
    ours, theirs = (tensors_of(checkpoints(folder)[-1]) for folder in (run, truth))
    assert {name.split(".")[0] for name in ours} == {"model", "optimizer", "ema"}
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert tensor.dtype == theirs[name].dtype
        assert torch.equal(tensor, theirs[name]), name
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
    return dict(json.loads((run / "RESUME_ME").read_text()))


def fingerprint(folder: Path) -> dict[str, str]:
    """All files and their hashes."""
    files = [p for p in sorted(folder.rglob("*")) if p.is_file()]
    return {str(p.relative_to(folder)): hashlib.sha256(p.read_bytes()).hexdigest() for p in files}


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
        time.sleep(0.004)
    raise AssertionError(f"did not happen (alive: {alive()})")


class Lab:
    """One run that a test disturbs, and the undisturbed one that it must end like."""

    def __init__(self, configure, warm, folder, truths, place):
        """``truths``: undisturbed runs made so far, each in a folder of ``place``."""
        self.configure, self.warm, self.folder = configure, warm, folder
        self.truths, self.place = truths, place
        self.run = folder / "my run"
        """With a space: the command that continues it must work all the same."""

    def plan(self, *options: str, size: int = 1) -> Lab:
        """What is trained, and in how many processes."""
        self.config, self.size = self.configure(*options), size
        return self

    @property
    def args(self) -> list[str]:
        """The command that starts the run, or continues it."""
        return command(self.config, self.run)

    def start(self, *prepare: object) -> list[WarmProcess]:
        """One process or a group, with a fault (``"fault_hooks.name", *values``) inside."""
        return self.warm.start_group(self.args, self.size, prepare)

    def ends(self, code: int, group: list[WarmProcess]) -> str:
        """All must end with this exit code and without a traceback; what they say."""
        codes = [process.wait() for process in group]
        said = "\n".join(process.text() for process in group)
        assert codes == [code] * len(group), said
        assert "Traceback" not in said, said
        return said

    def truth(self) -> Path:
        """The folder of an undisturbed run, made once for all tests and ways to save it."""
        key = (str(self.config.with_options({"checkpoint.saving": "auto"}).to_dict()), self.size)
        if key not in self.truths:
            folder = self.place / str(len(self.truths))
            self.warm.run(command(self.config, folder), self.size)
            self.truths[key] = folder
        return self.truths[key]

    def finish(self, *args: str, aside: Sequence[str] = ()) -> str:
        """The same command (or another) once more: the run ends as if nothing had been."""
        said = self.warm.run(args or self.args, self.size)
        assert_same(self.run, self.truth(), aside)
        return said


class Damaged(Lab):
    """A finished run of three checkpoints whose newest a test damages."""

    OPTIONS = "--train.steps 6 --checkpoint.every 2 --log.every 1 --checkpoint.keep-last 3".split()

    def begin(self, *options: str, size: int = 1) -> Damaged:
        """The run, as it was."""
        self.plan(*self.OPTIONS, *options, size=size)
        shutil.copytree(self.truth(), self.run)
        return self

    @property
    def newest(self) -> Path:
        """The checkpoint to damage."""
        return checkpoints(self.run)[-1]

    def part(self, pattern: str) -> Path:
        """One of its files."""
        return next(self.newest.glob(pattern))

    def train(self, *args: str) -> tuple[int, str]:
        """The same command again: exit code, and what it says. A traceback fails the test."""
        said = bellmask(*self.args, "--quiet", *args)
        return said.code, said.err

    def expect_older(self, damaged: int = 1) -> None:
        """A warning for each damaged checkpoint; the end of the run is as it should be."""
        names = [c.name for c in checkpoints(self.run)]
        before = [fingerprint(c) for c in checkpoints(self.run)[-damaged:]]
        code, said = self.train()
        assert code == 0, said
        warnings = [line for line in said.splitlines() if line.startswith("warning: ")]
        assert len(warnings) == damaged, said
        for name, warning in zip(reversed(names), warnings, strict=False):
            assert f"{name} is damaged: " in warning
        assert_same(self.run, self.truth(), names[-damaged:])
        kept = [self.run / "checkpoints" / f".damaged-{name}" for name in names[-damaged:]]
        assert [fingerprint(c) for c in kept] == before

    def expect_error(self, *args: str, says: str) -> None:
        """One message, exit code 2, and the folder as it was."""
        before = fingerprint(self.run)
        code, said = self.train(*args)
        assert code == 2, said
        assert said.startswith("error: ")
        assert says in said
        assert fingerprint(self.run) == before

    def expect_harmless(self) -> None:
        """Nothing that counts is damaged, or an older one is used, or there is a clear error."""
        newest = self.newest.name
        code, said = self.train()
        assert code in (0, 2), said
        if code == 0:
            assert_same(self.run, self.truth(), [newest] if "is damaged" in said else [])
        else:
            assert said.startswith("error: ")


def sign(checkpoint: Path) -> None:
    """Make the manifest fit what is there: damage that only a look at the content can find."""
    files = [p for p in sorted(checkpoint.iterdir()) if p.name != "manifest.json"]
    hashes = fingerprint(checkpoint)
    manifest = {p.name: {"bytes": p.stat().st_size, "sha256": hashes[p.name]} for p in files}
    (checkpoint / "manifest.json").write_text(json.dumps(manifest))


def flip(path: Path, seed: int) -> None:
    """One random bit of a file."""
    draw, content = random.Random(seed), bytearray(path.read_bytes())
    content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
    path.write_bytes(content)


# -- torchrun -------------------------------------------------------------------------------------


class Torchrun:
    """One torchrun agent and its workers, as a user starts them."""

    def __init__(self, args: Sequence[str], *options: str, log: Path, size: int = 2) -> None:
        self.log = log
        start = [sys.executable, "-m", "torch.distributed.run", *options]
        start += ["--nproc-per-node", str(size), "-m", "bellmask", *args]
        # tests run side by side: without --standalone torchrun would always take port 29500
        port = {} if "--standalone" in options else {"PET_MASTER_PORT": str(free_port())}
        with log.open("a") as stream:
            self.process = subprocess.Popen(
                start,
                stdout=stream,
                stderr=subprocess.STDOUT,
                env={**os.environ, "OMP_NUM_THREADS": "1", **port},
                start_new_session=True,
            )

    def is_alive(self) -> bool:
        """True until torchrun has ended."""
        return self.process.poll() is None

    def workers(self) -> dict[int, int]:
        """rank: process id, of workers that run now."""
        pid, found = self.process.pid, {}
        with contextlib.suppress(OSError):  # any may end while we look
            for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
                environ = Path(f"/proc/{child}/environ").read_bytes().split(b"\0")
                state = Path(f"/proc/{child}/stat").read_text().rsplit(")", 1)[1].split()[0]
                ranks = [e for e in environ if e.startswith(b"RANK=")]
                if ranks and state not in "ZX":
                    found[int(ranks[0][5:])] = int(child)
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
        for pid in [*self.workers().values(), self.process.pid]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait(30)

    def text(self) -> str:
        """What all processes have said."""
        return self.log.read_text(errors="replace")


@contextlib.contextmanager
def torchrun(args: Sequence[str], *options: str, log: Path, size: int = 2) -> Iterator[Torchrun]:
    """A torchrun that is ended, with its workers, whatever happens in the block."""
    agent = Torchrun(args, *options, log=log, size=size)
    try:
        yield agent
    finally:
        if agent.is_alive():
            agent.kill_all()


def kill_worker(agents, total, run, moment, draw, old) -> int:
    """SIGKILL one of ``total`` workers at a moment of a run that is under way; its process id.

    ``moment`` waits for it, given what tells whether all agents are alive. ``old`` has workers of
    before the last restart.
    """

    def is_alive():
        return all(agent.is_alive() for agent in agents)

    def workers():
        found = [pid for agent in agents for pid in agent.workers().values()]
        return found if len(found) == total and not old & set(found) else None

    before = wait_for(workers, is_alive)
    moment(is_alive)
    assert workers() == before  # nothing ended by itself
    assert not checkpoints(run) or (run / "RESUME_ME").exists()  # not at its end
    victim = draw.choice(before)
    os.kill(victim, signal.SIGKILL)
    old |= set(before)
    return victim
