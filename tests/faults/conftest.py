"""Fixtures of the fault tests: warm processes, and undisturbed runs to compare with."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from damage_tools import OPTIONS, Damaged
from fault_tools import command, copy_run
from warm_processes import WarmProcesses

from bellmask.config import RunConfig


@pytest.fixture(scope="session")
def truth(warm: WarmProcesses, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """``truth(config, 2)``: the folder of an undisturbed run in so many processes, made once."""
    made: dict[tuple[str, int], Path] = {}

    def build(config: RunConfig, size: int = 1) -> Path:
        key = (str(config.to_dict()), size)
        if key not in made:
            folder = tmp_path_factory.mktemp("truth") / "run"
            warm.run(command(config, folder), size)
            made[key] = folder
        return made[key]

    return build


@pytest.fixture
def damaged(
    small_config: Callable[..., RunConfig],
    truth: Callable[..., Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> Damaged:
    """A copy of an undisturbed run, to be damaged."""
    config = small_config(*OPTIONS)
    whole = truth(config)
    return Damaged(config, copy_run(whole, tmp_path / "run"), whole, capsys)
