"""Losses and gradients that are not numbers: no update, a note of the batch, and on it goes."""

from __future__ import annotations

import json
import math
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from fault_tools import (
    assert_no_traceback,
    assert_same,
    checkpoints,
    command,
    lines_of,
    tensors_of,
    wait_for,
)
from warm_processes import WarmProcesses

from bellmask.build import build_law
from bellmask.config import RunConfig
from bellmask.data.batches import BatchPlan

Config = Callable[..., RunConfig]
STEPS, BAD = 8, [4, 5]
OPTIONS = (
    f"--train.steps {STEPS} --checkpoint.every 1 --checkpoint.keep-last 20 --log.every 1 "
    "--model.dropout 0.1"
).split()


def skipped_of(run: Path) -> list[dict[str, Any]]:
    path = run / "skipped.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def check_skipped(run: Path, config: RunConfig, bad: list[int]) -> None:
    """Exactly these steps changed nothing, are counted, and have their batches written down."""
    found = {int(c.name[5:]): tensors_of(c) for c in checkpoints(run)}
    assert list(found) == list(range(1, config.train.steps + 1))
    for step in range(2, config.train.steps + 1):
        before, after = found[step - 1], found[step]
        same = {k.split(".")[0] for k in after if after[k].equal(before[k])}
        changed = {k.split(".")[0] for k in after if not after[k].equal(before[k])}
        assert changed == (set() if step in bad else {"model", "optimizer", "ema"}), step
        assert step not in bad or same == {"model", "optimizer", "ema"}
        assert all(bool(torch.isfinite(t).all()) for t in after.values())
    lines = {line["step"]: line for line in lines_of(run)}
    assert [step for step in lines if lines[step]["skipped"]] == bad
    for step in bad:
        assert lines[step]["loss"] is None
    check_batches(run, config, bad)


def check_batches(run: Path, config: RunConfig, bad: list[int]) -> None:
    """Rows and times of skipped.jsonl are those that the step was to train on."""
    num_blocks = json.loads((run / "run.json").read_text())["train_blocks"]
    plan = BatchPlan(num_blocks, config.train.batch_size, config.train.seed)
    notes = skipped_of(run)
    assert [note["step"] for note in notes] == bad
    for note in notes:
        assert note["rows"] == plan.rows(note["step"] - 1).tolist()
        assert len(note["times"]) == len(note["rows"])
        assert not math.isfinite(float(note["loss"])) or not math.isfinite(
            float(note["gradient_norm"])
        )
        # one time in each stratum: the law's distribution function spreads them evenly
        law = build_law(config.law)
        shares = sorted(law.cdf(torch.tensor(note["times"], dtype=torch.float64)).tolist())
        assert [int(u * len(shares)) for u in shares] == list(range(len(shares)))


@pytest.mark.parametrize("value", [math.nan, pytest.param(math.inf, marks=pytest.mark.long)])
def test_steps_without_update_are_skipped_and_written_down(
    value: float, small_config: Config, warm: WarmProcesses, tmp_path: Path
) -> None:
    config, run = small_config(*OPTIONS), tmp_path / "run"
    said = warm.run(command(config, run), prepare=("fault_hooks.spoil_loss", BAD, value))
    assert said.count("warning: step") == len(BAD)
    check_skipped(run, config, BAD)


@pytest.mark.parametrize("sharding", ["full", pytest.param("none", marks=pytest.mark.long)])
def test_what_one_process_finds_both_skip(
    sharding: str, small_config: Config, warm: WarmProcesses, tmp_path: Path
) -> None:
    config = small_config(*OPTIONS, "--scale.sharding", sharding)
    run = tmp_path / "run"
    warm.run(command(config, run), 2, prepare=("fault_hooks.spoil_loss", BAD, math.nan, 1))
    check_skipped(run, config, BAD)


@pytest.mark.parametrize("size", [1, pytest.param(2, marks=pytest.mark.long)])
def test_too_many_in_a_row_end_the_run(
    size: int, small_config: Config, warm: WarmProcesses, tmp_path: Path
) -> None:
    """Three are allowed here, with a good step between even four; the fourth in a row is not."""
    config = small_config(*OPTIONS, "--train.skip-limit", "3", "--train.steps", "12")
    run, bad = tmp_path / "run", [2, 3, 4, 6, 7, 8, 9, 10]
    prepare = ("fault_hooks.spoil_loss", bad, math.nan)
    args = command(config, run)
    if size > 1:
        group = warm.start_group(args, size, prepare)
    else:
        group = [warm.start(args, prepare=prepare)]
    assert [process.wait() for process in group] == [1] * size
    said = "".join(process.text() for process in group)
    assert_no_traceback(said)
    assert said.count("error: step 9: the loss is nan") == 1
    assert "--train.skip-limit is 3" in said
    assert not (run / "RESUME_ME").exists()
    failed = json.loads((run / "FAILED").read_text())
    assert failed["state"] == "failed"
    assert "skip-limit" in failed["reason"]
    assert checkpoints(run)[-1].name == "step-000000008"
    assert [note["step"] for note in skipped_of(run)] == bad[:7]
    # the same again ends the same; without the cause it goes on to the end, and the mark goes
    again = warm.start(args, prepare=prepare) if size == 1 else None
    assert again is None or again.wait() == 1
    warm.run(args, size)
    assert not (run / "FAILED").exists()
    assert [note["step"] for note in skipped_of(run)] == bad[:6]


def test_stopping_around_skipped_steps_changes_nothing(
    small_config: Config, warm: WarmProcesses, tmp_path: Path
) -> None:
    """Killed or stopped between skipped steps: weights, lines and notes are the same."""
    config = small_config(*OPTIONS, "--train.steps", "16", "--log.every", "3")
    whole, run = tmp_path / "whole", tmp_path / "run"
    bad = [3, 4, 5, 9, 10, 14]
    prepare = ("fault_hooks.spoil_loss", bad, math.nan)
    warm.run(command(config, whole), prepare=prepare)
    for stop, number in ((3, signal.SIGKILL), (4, signal.SIGTERM), (9, signal.SIGTERM)):
        process = warm.start(command(config, run), prepare=prepare)
        there = run / "checkpoints" / f"step-{stop:09d}"
        wait_for(there.exists, process.is_alive)
        process.signal(number)
        assert process.wait() in (-signal.SIGKILL, 128 + signal.SIGTERM)
    warm.run(command(config, run), prepare=prepare)
    assert_same(run, whole)
    assert skipped_of(run) == skipped_of(whole)
    assert [note["step"] for note in skipped_of(run)] == bad
    check_batches(run, config, bad)
