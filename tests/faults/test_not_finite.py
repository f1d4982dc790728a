"""Losses and gradients that are not numbers: no update, a note of the batch, and on it goes."""

from __future__ import annotations

import json
import math

import pytest
import torch
from fault_tools import checkpoints, lines_of, tensors_of

from bellmask.data.blocks import BatchPlan
from bellmask.storage.build import build_law

LONG = pytest.mark.long
OPTIONS = (
    "--train.steps 8 --checkpoint.every 1 --checkpoint.keep-last 20 --log.every 1 "
    "--model.dropout 0.1"
).split()


def skipped_of(run):
    return [json.loads(line) for line in (run / "skipped.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(
    ("value", "size", "sharding", "rank", "is_late", "optimizer"),
    [
        (math.nan, 1, "none", None, False, "adamw"),
        (math.nan, 1, "none", None, True, "muon"),
        pytest.param(math.inf, 1, "none", None, False, "adamw", marks=LONG),
        pytest.param(math.nan, 2, "none", 1, False, "adamw", marks=LONG),
        pytest.param(math.nan, 2, "full", 1, False, "adamw", marks=LONG),
        pytest.param(math.nan, 2, "full", 1, True, "muon", marks=LONG),
    ],
)
def test_steps_without_update_are_skipped_and_written_down(
    lab, value, size, sharding, rank, is_late, optimizer
):
    """What one process finds, all skip: these steps change nothing and are counted."""
    bad, parts = [4, 5], {"model", "optimizer", "ema"}
    lab.plan(*OPTIONS, "--scale.sharding", sharding, "--optimizer", optimizer, size=size)
    said = lab.ends(0, lab.start("fault_hooks.spoil_loss", bad, value, rank, is_late))
    assert said.count("warning: step") == len(bad)
    assert said.count("the first gradient that is not finite: embedding.weight") == len(bad)
    found = {int(c.name[5:]): tensors_of(c) for c in checkpoints(lab.run)}
    assert list(found) == list(range(1, 9))
    for step in range(2, 9):
        before, after = found[step - 1], found[step]
        changed = {k.split(".")[0] for k in after if not after[k].equal(before[k])}
        assert changed == (set() if step in bad else parts), step
        assert all(bool(torch.isfinite(t).all()) for t in after.values())
    lines = lines_of(lab.run)
    assert [line["step"] for line in lines if line["skipped"]] == bad
    assert [line["step"] for line in lines if line["loss"] is None] == bad
    # rows and times written down are those that the step was to train on
    train = lab.config.train
    num_blocks = json.loads((lab.run / "run.json").read_text())["train_blocks"]
    plan = BatchPlan(num_blocks, train.batch_size, train.seed)
    notes = skipped_of(lab.run)
    assert [note["step"] for note in notes] == bad
    for note in notes:
        assert note["rows"] == plan.rows(note["step"] - 1).tolist()
        assert not math.isfinite(float(note["loss"]) + float(note["gradient_norm"]))
        # one time in each stratum: the law's distribution function spreads them evenly
        times = torch.tensor(note["times"], dtype=torch.float64)
        shares = sorted(build_law(lab.config.law).cdf(times).tolist())
        assert [int(u * len(shares)) for u in shares] == list(range(len(note["rows"])))


@pytest.mark.parametrize("size", [1, pytest.param(2, marks=LONG)])
def test_too_many_in_a_row_end_the_run(lab, size):
    """Three are allowed here, with a good step between even four; the fourth in a row is not."""
    lab.plan(*OPTIONS, "--train.skip-limit", "3", "--train.steps", "12", size=size)
    bad = [2, 3, 4, 6, 7, 8, 9, 10]
    for _ in range(2):  # the same again ends the same
        said = lab.ends(1, lab.start("fault_hooks.spoil_loss", bad, math.nan))
        assert said.count("error: step 9: the loss is nan") == 1
        assert "--train.skip-limit is 3" in said
        assert not (lab.run / "RESUME_ME").exists()
        failed = json.loads((lab.run / "FAILED").read_text())
        assert failed["state"] == "failed"
        assert "skip-limit" in failed["reason"]
        assert checkpoints(lab.run)[-1].name == "step-000000008"
        assert [note["step"] for note in skipped_of(lab.run)] == bad[:7]
    # without the cause it goes on to the end, and the mark goes
    lab.ends(0, lab.start())
    assert not (lab.run / "FAILED").exists()
    assert [note["step"] for note in skipped_of(lab.run)] == bad[:6]
