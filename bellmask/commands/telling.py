"""What a command says to a reader who may be gone, as after ``| head`` or a Ctrl-C for both."""

from __future__ import annotations

import contextlib
import os
import sys
from typing import TextIO


def tell(text: str, stream: TextIO) -> None:
    """Say something that changes no exit code when nobody reads it."""
    with contextlib.suppress(OSError):
        print(text, file=stream, flush=True)


def finish_telling() -> None:
    """To be called at the end: else Python complains of what nobody read, with its own code."""
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None:  # a closed one is None
                stream.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
