"""Runs that are disturbed, and what an undisturbed one must equal.

The truth is an undisturbed run of the same command: every tensor of its last checkpoint and every
line of metrics.jsonl but for times.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from commands import bellmask, refuses, succeeds
from safetensors.torch import load_file
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
    """Tensors, or the parts that each process wrote, by name."""
    shards = sorted(checkpoint.glob("*.safetensors"))
    return {
        f"{name} {n}" if len(shards) > 1 else name: tensor
        for n, shard in enumerate(shards)
        for name, tensor in load_file(shard).items()
    }


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

    OPTIONS = "--train.steps 6 --checkpoint.every 2 --log.every 1 --checkpoint.keep-last 3".split()
    """Of a run whose newest checkpoint is damaged."""

    def __init__(self, configure, warm, folder, undisturbed):
        self.configure, self.warm, self.folder = configure, warm, folder
        self.undisturbed = undisturbed
        self.run = folder / "my run"
        """With a space: the command that continues it must work all the same."""

    def plan(self, *options: str, size: int = 1) -> Lab:
        """What is trained, and in how many processes."""
        self.config, self.size = self.configure(*options), size
        return self

    def begin(self, *options: str, size: int = 1) -> Path:
        """A finished run of three checkpoints; the newest, to be damaged."""
        self.plan(*self.OPTIONS, *options, size=size)
        shutil.copytree(self.truth(), self.run)
        return checkpoints(self.run)[-1]

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
        """The folder of an undisturbed run; how it is saved makes no difference."""
        return self.undisturbed(self.config.with_options({"checkpoint.saving": "auto"}), self.size)

    def finish(self, *args: str, aside: Sequence[str] = ()) -> str:
        """The same command (or another) once more: the run ends as if nothing had been."""
        said = self.warm.run(args or self.args, self.size)
        assert_same(self.run, self.truth(), aside)
        return said

    def uses_older(self, num_damaged: int = 1) -> None:
        """A warning for each damaged checkpoint, which is kept; the end is as it should be."""
        folders = checkpoints(self.run)[-num_damaged:]
        before = [fingerprint(folder) for folder in folders]
        said = succeeds(*self.args, "--quiet").err
        warnings = [line for line in said.splitlines() if line.startswith("warning: ")]
        for folder, warning in zip(reversed(folders), warnings, strict=True):
            assert f"{folder.name} is damaged: " in warning
        assert_same(self.run, self.truth(), [folder.name for folder in folders])
        kept = [folder.with_name(f".damaged-{folder.name}") for folder in folders]
        assert [fingerprint(folder) for folder in kept] == before

    def refused(self, *args: str, names: str) -> None:
        """One message, exit code 2, and the folder as it was."""
        before = fingerprint(self.run)
        refuses(*self.args, "--quiet", *args, names=names)
        assert fingerprint(self.run) == before

    def unharmed(self) -> None:
        """Nothing that counts is damaged, or an older one is used, or there is a clear error."""
        newest = checkpoints(self.run)[-1].name
        said = bellmask(*self.args, "--quiet")
        assert said.code in (0, 2), said.err
        if said.code == 0:
            assert_same(self.run, self.truth(), [newest] if "is damaged" in said.err else [])
        else:
            assert said.err.startswith("error: ")


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
    """One torchrun agent and its workers, as a user starts them; a block that ends ends them."""

    def __init__(self, args: Sequence[str], *options: str, log: Path, size: int = 2) -> None:
        self.log = log
        start = [sys.executable, "-m", "torch.distributed.run", *options]
        start += ["--nproc-per-node", str(size), "-m", "bellmask", *args]
        # tests run side by side: without --standalone torchrun would always take port 29500
        port = {} if "--standalone" in options else {"PET_MASTER_PORT": str(free_port())}
        env = {**os.environ, "OMP_NUM_THREADS": "1", **port}
        with log.open("a") as out:
            self.process = subprocess.Popen(
                start, stdout=out, stderr=subprocess.STDOUT, env=env, start_new_session=True
            )

    def __enter__(self) -> Torchrun:
        return self

    def __exit__(self, *_: object) -> None:
        for pid in [*self.workers().values(), self.process.pid] if self.is_alive() else []:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait(30)

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
        """The exit code; a hang raises."""
        return self.process.wait(seconds)

    def text(self) -> str:
        """What all processes have said."""
        return self.log.read_text(errors="replace")


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
