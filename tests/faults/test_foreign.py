"""Checkpoints and run folders whose files are whole but are not this run's, or make no sense."""

from __future__ import annotations

import json
import shutil

import pytest
from fault_tools import checkpoints, flip, sign

LONG = pytest.mark.long
STATES = {
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
def test_a_state_that_makes_no_sense_does_no_harm(damaged, name):
    path = damaged.begin().part("state.json")
    state = json.loads(path.read_text())
    STATES[name](state)
    path.write_text(json.dumps(state))
    sign(damaged.newest)
    damaged.expect_harmless()


@pytest.mark.parametrize("content", [None, b"\xff" * 1000])
def test_a_checkpoint_without_tensors_does_no_harm(damaged, content):
    """Neither the shard nor its line in the manifest is there; or it is no safetensors."""
    shard = damaged.begin().part("*.safetensors")
    shard.unlink()
    if content:
        shard.write_bytes(content)
    sign(damaged.newest)
    damaged.expect_harmless()


@pytest.mark.parametrize(
    "change",
    [pytest.param("--model.num-layers 1", marks=LONG), "--model.width 32", "--train.seed 5"],
)
def test_a_checkpoint_of_another_config_does_no_harm(damaged, change):
    """A whole checkpoint folder, with a manifest that fits."""
    other = damaged.plan(*damaged.OPTIONS, *change.split()).truth()
    newest = damaged.begin().newest
    shutil.rmtree(newest)
    shutil.copytree(checkpoints(other)[-1], newest)
    damaged.expect_harmless()


def test_a_folder_of_another_config_is_refused(damaged):
    other = damaged.configure(*damaged.OPTIONS, "--model.width", "32").resolved().to_dict()
    (damaged.begin().run / "config.json").write_text(json.dumps(other))
    damaged.expect_error(says="model.width: was 32, now 16")


GARBAGE = [b"{", *(pytest.param(c, marks=LONG) for c in (b"", b"5", b"{}", b"\xff", b"[" * 10**5))]


@pytest.mark.parametrize("name", ["config.json", "run.json", "tokenizer.json"])
@pytest.mark.parametrize("content", GARBAGE)
def test_descriptions_of_garbage_are_an_error_or_written_anew(damaged, name, content):
    (damaged.begin().run / name).write_bytes(content)
    damaged.expect_harmless()


def test_lines_of_garbage_in_metrics_are_dropped(damaged):
    flip(damaged.begin().part("*.safetensors"), 1)  # so that there is something left to train
    lines = [b"5", b"null", b"[]", b"{}", b'{"step": "x"}', b"\xff\xfe", b"[" * 100_000, b'{"st']
    with (damaged.run / "metrics.jsonl").open("ab") as stream:
        stream.write(b"\n".join(lines))
    damaged.expect_older()
