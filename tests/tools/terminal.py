"""A command in a terminal of its own, as a fork of the warm process."""

from __future__ import annotations

import os
import pty
import re
import select
import sys
import time


def attach(path):
    """In the fork: that terminal is its input, output and errors."""
    os.setsid()
    handle = os.open(path, os.O_RDWR)
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        os.dup2(handle, number)
        setattr(sys, name, os.fdopen(number, "w" if number else "r", closefd=False))


class Terminal:
    """``with Terminal(warm, "chat", run)``; the command is ended with the block, if not before."""

    def __init__(self, warm, *args):
        self.screen, self._theirs = pty.openpty()
        self.process = warm.start(
            args,
            env={"TERM": "xterm", "COLUMNS": "80"},
            prepare=["terminal.attach", os.ttyname(self._theirs)],
        )
        self.seen = ""

    def __enter__(self):
        return self

    def __exit__(self, *error):
        if self.process.is_alive():
            self.process.signal(9)
            self.process.wait()
        os.close(self._theirs)
        os.close(self.screen)

    def until(self, pattern, seconds=60):
        """What appears up to a pattern."""
        end = time.monotonic() + seconds
        while not (found := re.search(pattern, self.seen, re.DOTALL)):
            assert time.monotonic() < end, f"no {pattern!r} in {self.seen!r}"
            if select.select([self.screen], [], [], 0.1)[0]:
                self.seen += os.read(self.screen, 65536).decode(errors="replace")
        before, self.seen = self.seen[: found.end()], self.seen[found.end() :]
        return before

    def type(self, text):
        os.write(self.screen, text.encode())
