"""One training in its own process: ``python -m bellmask.compare.worker FOLDER``, config on stdin.

The parent keeps the other end of stdin open; when it dies, even by SIGKILL, the worker finishes its
step, saves a checkpoint and ends. A lock keeps two workers out of one folder.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bellmask.compare.execute import BROKE_DOWN
from bellmask.config.config import RunConfig, override, to_args
from bellmask.train.train_run import train_run
from bellmask.utils.allocator import keep_freed_memory
from bellmask.utils.errors import SavingError, TrainingError, UserError


@contextlib.contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """Wait until no other process trains in the folder."""
    locks = folder.parent / ".locks"
    locks.mkdir(parents=True, exist_ok=True)
    with (locks / folder.name).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _stop_without_parent() -> None:
    """Ask the training to stop when stdin is closed."""
    while os.read(sys.stdin.fileno(), 1):  # not the buffered reader: its lock outlives the thread
        pass
    os.kill(os.getpid(), signal.SIGTERM)


def main(folder: Path) -> int:
    """Train; exit codes are those of ``bellmask train``, but for a training that broke down."""
    tree: dict[str, Any] = json.loads(sys.stdin.readline())
    threading.Thread(target=_stop_without_parent, daemon=True).start()
    keep_freed_memory()
    try:
        config = override(RunConfig(), to_args(tree)).check()
        with alone_in(folder):
            result = train_run(config, folder, resume="auto", is_quiet=True)
    except (UserError, TrainingError, SavingError, OSError) as error:
        print(error, file=sys.stderr)
        if isinstance(error, SavingError):
            return 1
        return BROKE_DOWN if isinstance(error, TrainingError) else 2
    return 0 if result.stopped_by is None else 128 + result.stopped_by


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
