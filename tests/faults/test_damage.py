"""Checkpoints not as they were written: an older one and a warning, or one clear error.

Every kind of damage is found in tests/storage/test_checkpoint.py; here a training meets some.
"""

from __future__ import annotations

import shutil

import pytest
from fault_tools import checkpoints, flip

LONG = pytest.mark.long
SHARD = "*.safetensors"


def flip_shards(run, which=slice(None)):
    for checkpoint in checkpoints(run)[which]:
        flip(sorted(checkpoint.glob(SHARD))[-1], 1)


@pytest.mark.parametrize("part", [SHARD, "state.json", pytest.param("manifest.json", marks=LONG)])
def test_a_damaged_file_costs_one_checkpoint(damaged, part):
    path = damaged.begin().part(part)
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    damaged.expect_older()


@pytest.mark.long
@pytest.mark.parametrize("seed", range(24))
def test_flipped_bits_anywhere(damaged, seed):
    """Of the manifest's bits too; some of those are spaces, which do no harm."""
    flip(damaged.begin().part([SHARD, "state.json", "manifest.json"][seed % 3]), seed)
    damaged.expect_harmless()


def test_two_damaged_checkpoints_cost_two_and_three_are_an_error(damaged):
    flip_shards(damaged.begin().run, slice(1, None))
    damaged.expect_older(2)
    flip_shards(damaged.run)
    damaged.expect_error(says="no intact checkpoint is left")


def test_the_policy_stop_refuses(damaged):
    flip_shards(damaged.begin().run, slice(-1, None))
    damaged.expect_error("--checkpoint.when-damaged", "stop", says="is damaged")


@pytest.mark.parametrize("name", [None, pytest.param("zzz.safetensors", marks=LONG)])
def test_a_shard_of_another_run_is_not_loaded(damaged, name):
    """In the place of its own, or beside it."""
    other = damaged.plan(*damaged.OPTIONS, "--train.seed", "5").truth()
    (shard,) = checkpoints(other)[-1].glob(SHARD)
    damaged.begin()
    shutil.copy(shard, damaged.newest / name if name else damaged.part(SHARD))
    damaged.expect_older()


@pytest.mark.long
@pytest.mark.parametrize("sharding", ["none", "full"])
def test_two_processes_agree_on_an_older_one(damaged, sharding):
    damaged.begin("--scale.sharding", sharding, size=2)
    shards = sorted(damaged.newest.glob(SHARD))
    assert len(shards) == 2
    shards[1].unlink()
    said = damaged.finish(aside=[damaged.newest.name])
    assert said.count("is damaged") == 1
    assert shards[1].name in said
