"""Checkpoints and folders not as this run wrote them: an older one is used, or one clear error.

Every kind of damaged file is found in tests/storage/test_checkpoint.py; here a training meets some.
"""

from __future__ import annotations

import json
import shutil

import pytest
from fault_tools import checkpoints, flip, sign

LONG = pytest.mark.long
SHARD, STATE, MANIFEST = "*.safetensors", "state.json", "manifest.json"


def flip_shards(run, which):
    for checkpoint in checkpoints(run)[which]:
        flip(sorted(checkpoint.glob(SHARD))[-1], 1)


@pytest.mark.parametrize("part", [SHARD, STATE, pytest.param(MANIFEST, marks=LONG)])
def test_a_damaged_file_costs_one_checkpoint(lab, part):
    """Lines of garbage in metrics.jsonl are dropped meanwhile."""
    (path,) = lab.begin().glob(part)
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    lines = [b"5", b"null", b"[]", b"{}", b'{"step": "x"}', b"\xff\xfe", b"[" * 100_000, b'{"st']
    with (lab.run / "metrics.jsonl").open("ab") as stream:
        stream.write(b"\n".join(lines))
    lab.uses_older()


def test_two_damaged_checkpoints_cost_two_and_three_are_an_error(lab):
    lab.begin()
    flip_shards(lab.run, slice(1, None))
    lab.refused("--checkpoint.when-damaged", "stop", names="is damaged")
    lab.uses_older(2)
    flip_shards(lab.run, slice(None))
    lab.refused(names="no intact checkpoint is left")


@pytest.mark.parametrize("name", [None, pytest.param("zzz.safetensors", marks=LONG)])
def test_a_shard_of_another_run_is_not_loaded(lab, name):
    """In the place of its own, or beside it."""
    other = lab.plan(*lab.OPTIONS, "--train.seed", "5").truth()
    (shard,), newest = checkpoints(other)[-1].glob(SHARD), lab.begin()
    shutil.copy(shard, newest / name if name else next(newest.glob(SHARD)))
    lab.uses_older()


@pytest.mark.long
@pytest.mark.parametrize("sharding", ["none", "full"])
def test_two_processes_agree_on_an_older_one(lab, sharding):
    newest = lab.begin("--scale.sharding", sharding, size=2)
    _, second = sorted(newest.glob(SHARD))
    second.unlink()
    said = lab.finish(aside=[newest.name])
    assert said.count("is damaged") == 1
    assert second.name in said


# --- whole files, with a manifest that fits, which are not this run's or make no sense


STATES = [{"format": 99}, {"step": None}, {"step": "six"}, {"step": 5}, {"step": -1}]
STATES += [{"window": None}, {"window": {"color": 1}}, {"tokens": "many"}]


@pytest.mark.parametrize("changed", STATES)
def test_a_state_that_makes_no_sense_does_no_harm(lab, changed):
    path = lab.begin() / STATE
    path.write_text(json.dumps(json.loads(path.read_text()) | changed))
    sign(path.parent)
    lab.unharmed()


@pytest.mark.parametrize("content", [None, b"\xff" * 1000])
def test_a_checkpoint_without_tensors_does_no_harm(lab, content):
    (shard,) = lab.begin().glob(SHARD)
    shard.unlink()
    if content:
        shard.write_bytes(content)
    sign(shard.parent)
    lab.unharmed()


@pytest.mark.parametrize("change", ["--model.width 32", "--train.seed 5"])
def test_a_checkpoint_or_a_folder_of_another_config_does_no_harm(lab, change):
    other = lab.plan(*lab.OPTIONS, *change.split()).truth()
    newest = lab.begin()
    shutil.rmtree(newest)
    shutil.copytree(checkpoints(other)[-1], newest)
    lab.unharmed()
    shutil.copy(other / "config.json", lab.run)
    lab.refused(names=f"{change.split()[0][2:]}: was {change.split()[1]}, now ")


GARBAGE = [b"{", *(pytest.param(c, marks=LONG) for c in (b"", b"5", b"{}", b"\xff", b"[" * 10**5))]


@pytest.mark.parametrize("name", ["config.json", "run.json", "tokenizer.json"])
@pytest.mark.parametrize("content", GARBAGE)
def test_descriptions_of_garbage_are_an_error_or_written_anew(lab, name, content):
    lab.begin()
    (lab.run / name).write_bytes(content)
    lab.unharmed()
