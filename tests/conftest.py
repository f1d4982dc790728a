"""Fixtures: a small text made on the spot, and a run small enough for seconds."""

from __future__ import annotations

import random
import re
import signal
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from warm_processes import WarmProcesses

from bellmask.config import RunConfig, override
from bellmask.presets import tiny

if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    # started in the background of a shell; tests interrupt processes, which would inherit that
    signal.signal(signal.SIGINT, signal.default_int_handler)

WORDS = "the a cat dog sat ran on under mat tree and then saw old new red sun moon was".split()


def pytest_make_parametrize_id(config: pytest.Config, val: object, argname: str) -> str | None:
    """Objects by what they are, without memory addresses: processes that share tests must agree."""
    is_plain = val is None or isinstance(val, str | bytes | int | float | bool | type)
    return None if is_plain else re.sub(r" at 0x[0-9a-f]+", "", str(val))


@pytest.fixture(scope="session")
def text_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sixty thousand characters of word salad, the same on every machine."""
    draw = random.Random(7)
    lines = (" ".join(draw.choices(WORDS, k=draw.randint(4, 12))) + "." for _ in range(1500))
    path = tmp_path_factory.mktemp("text") / "salad.txt"
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


@pytest.fixture(scope="session")
def small_config(
    text_file: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., RunConfig]:
    """``small_config("--train.steps", "3")``: a run of seconds on the text file."""
    cache = tmp_path_factory.mktemp("cache")

    def build(*args: str, start: RunConfig | None = None) -> RunConfig:
        config = start or tiny()
        config = replace(
            config,
            data=replace(config.data, train=str(text_file), block_length=16, cache=str(cache)),
        )
        defaults = (
            "--model.num-layers 2 --model.width 16 --model.num-heads 2 --train.steps 6 "
            "--train.batch-size 8 --optim.warmup-steps 2 --validation.every never "
            "--validation.blocks 32 --log.every 2 --checkpoint.every never"
        )
        return override(config, [*defaults.split(), *args]).check()

    return build


@pytest.fixture(scope="session")
def warm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WarmProcesses]:
    """Processes without the seconds of importing."""
    processes = WarmProcesses(tmp_path_factory.mktemp("warm"))
    yield processes
    processes.close()
