"""Checkpoints and run folders whose files are whole but are not this run's, or make no sense."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from damage_tools import OPTIONS, Damaged, flip, sign
from fault_tools import checkpoints

from bellmask.config import RunConfig

Config = Callable[..., RunConfig]
Truth = Callable[..., Path]


def edit_state(checkpoint: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change state.json, and the manifest with it."""
    state = json.loads((checkpoint / "state.json").read_text())
    change(state)
    (checkpoint / "state.json").write_text(json.dumps(state))
    sign(checkpoint)


STATES: dict[str, Callable[[dict[str, Any]], object]] = {
    "another version": lambda state: state.update(format=99),
    "no step": lambda state: state.pop("step"),
    "a step of words": lambda state: state.update(step="six"),
    "another step": lambda state: state.update(step=5),
    "a step below zero": lambda state: state.update(step=-1),
    "no window": lambda state: state.pop("window"),
    "a window of something else": lambda state: state.update(window={"colour": 1}),
    "tokens of words": lambda state: state.update(tokens="many"),
}


@pytest.mark.parametrize("name", STATES)
def test_a_state_that_makes_no_sense_does_no_harm(damaged: Damaged, name: str) -> None:
    edit_state(damaged.newest, STATES[name])
    damaged.expect_harmless()


def test_a_checkpoint_without_tensors_does_no_harm(damaged: Damaged) -> None:
    """Neither the shard nor its line in the manifest is there."""
    damaged.part("shard").unlink()
    sign(damaged.newest)
    damaged.expect_harmless()


def test_a_shard_that_is_no_safetensors_does_no_harm(damaged: Damaged) -> None:
    damaged.part("shard").write_bytes(b"\xff" * 1000)
    sign(damaged.newest)
    damaged.expect_harmless()


@pytest.mark.parametrize("change", ["--model.width 32", "--model.num-layers 1", "--train.seed 5"])
def test_a_checkpoint_of_another_config_does_no_harm(
    damaged: Damaged, small_config: Config, truth: Truth, change: str
) -> None:
    """A whole checkpoint folder, with a manifest that fits."""
    other = truth(small_config(*OPTIONS, *change.split()))
    shutil.rmtree(damaged.newest)
    shutil.copytree(checkpoints(other)[-1], damaged.run / "checkpoints" / "step-000000006")
    damaged.expect_harmless()


def test_a_folder_of_another_config_is_refused(damaged: Damaged, small_config: Config) -> None:
    other = small_config(*OPTIONS, "--model.width", "32")
    (damaged.run / "config.json").write_text(json.dumps(other.resolved().to_dict()))
    damaged.expect_error(says="model.width: was 32, now 16")


@pytest.mark.parametrize("name", ["config.json", "run.json", "tokenizer.json"])
@pytest.mark.parametrize(
    "content",
    [
        b"{",
        b"[" * 100_000,
        *(pytest.param(c, marks=pytest.mark.long) for c in (b"", b"5", b"[]", b"{}", b"\xff")),
    ],
)
def test_descriptions_of_garbage_are_an_error_or_written_anew(
    damaged: Damaged, name: str, content: bytes
) -> None:
    (damaged.run / name).write_bytes(content)
    damaged.expect_harmless()


def test_lines_of_garbage_in_metrics_are_dropped(damaged: Damaged) -> None:
    flip(damaged.part("shard"), random.Random(1))  # so that there is something left to train
    lines = [b"5", b"null", b"[]", b"{}", b'{"step": "x"}', b"\xff\xfe", b"[" * 100_000, b'{"st']
    with (damaged.run / "metrics.jsonl").open("ab") as stream:
        stream.write(b"\n".join(lines))
    damaged.expect_older()
