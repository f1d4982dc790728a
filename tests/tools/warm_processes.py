"""Processes that have imported everything already: forks of one that waits.

A training process takes seconds to import and a small run a tenth of one. ``WarmProcesses`` starts
one process that imports the package and then forks for every command; a fork runs the command
line just as ``python -m bellmask`` does. Several forks with the variables of torchrun are the
processes of one run.

Run as a script, this file is that process: it reads requests from its standard input, one JSON
object per line, and answers each with one line.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

LONGEST = 120.0
"""Seconds after which a process that does not end is a defect (and is killed)."""


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@dataclass
class WarmProcess:
    """One fork."""

    pid: int
    log: Path
    """All that it says, standard output and error together."""
    owner: WarmProcesses
    code: int | None = field(default=None)
    """Exit code once it has ended; minus the signal's number when that ended it."""

    def wait(self, seconds: float = LONGEST) -> int:
        """The exit code; fails (and kills the process) when it does not come in time."""
        if self.code is None:
            self.code = self.owner._ask(wait=self.pid, seconds=seconds)
        if self.code is None:
            self.signal(9)
            raise AssertionError(f"still running after {seconds} s: {self.text()}")
        return self.code

    def is_alive(self) -> bool:
        """True until it has ended."""
        if self.code is None:
            self.code = self.owner._ask(wait=self.pid, seconds=0)
        return self.code is None

    def signal(self, number: int) -> None:
        """Send it a signal."""
        os.kill(self.pid, number)

    def text(self) -> str:
        """What it has said so far."""
        return self.log.read_text(errors="replace") if self.log.exists() else ""


class WarmProcesses:
    """Starts forks; ``folder`` gets what they say."""

    def __init__(self, folder: Path) -> None:
        self.folder, self._count = folder, 0
        self._server = subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )

    def _ask(self, **request: Any) -> Any:
        self._server.stdin.write(json.dumps(request) + "\n")
        self._server.stdin.flush()
        return json.loads(self._server.stdout.readline())

    def start(self, args: Sequence[object], *, env: Any = None, prepare: Any = ()) -> WarmProcess:
        """Run ``bellmask *args``; before it ``module.function(*values)`` of ``prepare``."""
        self._count += 1
        log = self.folder / f"process-{self._count}.log"
        request = {"args": [str(a) for a in args], "env": env or {}, "prepare": list(prepare)}
        return WarmProcess(self._ask(start=request, log=str(log)), log, self)

    def start_group(self, args: Any, size: int = 2, prepare: Any = ()) -> list[WarmProcess]:
        """Several processes of one run, as torchrun would start them; or one alone."""
        if size == 1:
            return [self.start(args, prepare=prepare)]
        shared = {"WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size), "GROUP_WORLD_SIZE": "1"}
        shared |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        ranks = [{"RANK": str(r), "LOCAL_RANK": str(r), "GROUP_RANK": "0"} for r in range(size)]
        return [self.start(args, env=shared | rank, prepare=prepare) for rank in ranks]

    def run(self, args: Sequence[object], size: int = 1, prepare: Sequence[object] = ()) -> str:
        """Run to a good end; what all processes said."""
        group = self.start_group(args, size, prepare)
        codes = [process.wait() for process in group]
        said = "\n".join(process.text() for process in group)
        assert codes == [0] * size, said
        return said

    def close(self) -> None:
        """End the waiting process, and with it forks that are left."""
        self._server.stdin.close()
        self._server.wait(30)
        self._server.stdout.close()


def _wait(pid: int, seconds: float) -> int | None:
    """The exit code of a fork, or None when it has none after so many seconds."""
    until = time.monotonic() + seconds
    while True:
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() >= until:
            return None
        time.sleep(0.005)


def _become(start: dict[str, Any], log: str) -> None:
    """In the fork: own streams, environment and preparation."""
    handle = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(handle, stream)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.environ.update(start["env"])
    sys.argv = ["bellmask", *start["args"]]
    if start["prepare"]:
        import importlib

        name, *values = start["prepare"]
        module, function = name.split(".")
        getattr(importlib.import_module(module), function)(*values)


def serve() -> None:
    """Answer requests until there are no more; returns in a fork, ready to run its command."""
    # all that a training imports sooner or later, once for all forks
    import safetensors.torch  # noqa: F401
    import torch._dynamo  # noqa: F401

    import bellmask.cli  # noqa: F401

    forks: set[int] = set()
    for line in iter(sys.stdin.readline, ""):
        request = json.loads(line)
        answer: int | None
        if "start" in request:
            answer = os.fork()
            if answer == 0:
                return _become(request["start"], request["log"])
            forks.add(answer)
        else:
            answer = _wait(request["wait"], request["seconds"])
            if answer is not None:
                forks.discard(request["wait"])
        print(json.dumps(answer), flush=True)
    for pid in forks:
        os.kill(pid, 9)
        os.waitpid(pid, 0)
    sys.exit()


if __name__ == "__main__":
    serve()
    from bellmask.cli import main

    main()
