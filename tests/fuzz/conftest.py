"""What fuzzing needs: a small finished run, and a limit on memory instead of a dead machine."""

from __future__ import annotations

import resource
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from bellmask.assemble import train_run
from bellmask.config import RunConfig

ROOM = 8 << 30
"""Address space that a test may take beyond what is taken: what asks for more gets an error."""


@pytest.fixture(autouse=True)
def limited_memory() -> Iterator[None]:
    taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (taken + ROOM, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, before)


@pytest.fixture(scope="session")
def finished_run(
    small_config: Callable[..., RunConfig], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """A run of two steps, validated and saved after the last."""
    folder = tmp_path_factory.mktemp("runs") / "whole"
    options = "--train.steps 2 --log.every 1 --optim.ema 0 --validation.every".split()
    config = small_config(*options, "2 steps")
    train_run(config, folder, is_quiet=True)
    return folder
