"""The ``bellmask`` command inside the test's process: no seconds of importing."""

from __future__ import annotations

import contextlib
import io
import os
from dataclasses import dataclass
from unittest import mock

from bellmask.cli import run_command


@dataclass(frozen=True)
class Said:
    """How a command ended and what it printed."""

    code: int
    out: str
    err: str

    @property
    def text(self) -> str:
        """Both streams with single spaces, whatever the width of the screen."""
        return " ".join(f"{self.out} {self.err}".split())


def bellmask(*args: object) -> Said:
    """``bellmask("evaluate", run, "--out", folder)``; a string with spaces is one argument."""
    out, err = io.StringIO(), io.StringIO()
    wide = mock.patch.dict(os.environ, COLUMNS="200")  # tables are not wrapped
    with wide, contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = run_command([str(arg) for arg in args])
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else 1
    return Said(code, out.getvalue(), err.getvalue())


def succeeds(*args: object) -> Said:
    """Exit code 0."""
    said = bellmask(*args)
    assert said.code == 0, said.text
    return said


def refuses(*args: object, names: str) -> str:
    """Exit code 2 and one message without a traceback, in which the option is named."""
    said = bellmask(*args)
    assert said.code == 2, said.text
    assert said.err.count("error:") == 1, said.err
    assert "Traceback" not in said.text
    message = " ".join(said.err.split())
    assert names in message, message
    return message
