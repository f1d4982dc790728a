"""A finished run whose newest checkpoint a test damages, and what training must then do."""

from __future__ import annotations

import hashlib
import json
import random
from dataclasses import dataclass
from pathlib import Path

import pytest
from fault_tools import assert_same, checkpoints, command

from bellmask.cli import run_command
from bellmask.config import RunConfig

OPTIONS = "--train.steps 6 --checkpoint.every 2 --log.every 1 --checkpoint.keep-last 3".split()
"""Of a run with three checkpoints."""


@dataclass
class Damaged:
    """A finished run whose newest checkpoint a test damages."""

    config: RunConfig
    run: Path
    truth: Path
    capsys: pytest.CaptureFixture[str]

    @property
    def newest(self) -> Path:
        """The checkpoint to damage."""
        return checkpoints(self.run)[-1]

    def part(self, name: str) -> Path:
        """One of its files; ``shard`` is the one with tensors."""
        return next(self.newest.glob("*.safetensors")) if name == "shard" else self.newest / name

    def train(self, *args: str) -> tuple[int, str]:
        """The same command again: exit code, and what it says. A traceback fails the test."""
        self.capsys.readouterr()
        code = run_command([*command(self.config, self.run), "--quiet", *args])
        return code, self.capsys.readouterr().err

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
            assert warning.endswith("; using an older one")
        assert_same(self.run, self.truth, names[-damaged:])
        kept = [self.run / "checkpoints" / f".damaged-{name}" for name in names[-damaged:]]
        assert [fingerprint(c) for c in kept] == before

    def expect_error(self, *args: str, says: str = "") -> None:
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
            assert_same(self.run, self.truth, [newest] if "is damaged" in said else [])
        else:
            assert said.startswith("error: ")


def fingerprint(folder: Path) -> dict[str, str]:
    """All files and their hashes."""
    files = [p for p in sorted(folder.rglob("*")) if p.is_file()]
    return {str(p.relative_to(folder)): hashlib.sha256(p.read_bytes()).hexdigest() for p in files}


def sign(checkpoint: Path) -> None:
    """Make the manifest fit what is there: damage that only a look at the content can find."""
    files = [p for p in sorted(checkpoint.iterdir()) if p.name != "manifest.json"]
    manifest = {
        p.name: {"bytes": p.stat().st_size, "sha256": hashlib.sha256(p.read_bytes()).hexdigest()}
        for p in files
    }
    (checkpoint / "manifest.json").write_text(json.dumps(manifest))


def flip(path: Path, draw: random.Random) -> None:
    """One random bit of a file."""
    content = bytearray(path.read_bytes())
    content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
    path.write_bytes(content)
