"""Checkpoints not as they were written: an older one and a warning, or one clear error."""

from __future__ import annotations

import hashlib
import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from damage_tools import OPTIONS, Damaged, flip
from fault_tools import assert_no_traceback, assert_same, checkpoints, command, copy_run
from warm_processes import WarmProcesses

from bellmask.config import RunConfig

Config = Callable[..., RunConfig]
Truth = Callable[..., Path]
PARTS = ["shard", "state.json", "manifest.json"]
LONG = pytest.mark.long


WAYS: dict[str, Callable[[Path], object]] = {
    "cut": lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
    "longer": lambda path: path.write_bytes(path.read_bytes() + b"\0"),
    "emptied": lambda path: path.write_bytes(b""),
    "removed": lambda path: path.unlink(),
    "a folder": lambda path: (path.unlink(), path.mkdir()),
    "other bytes": lambda path: path.write_bytes(random.Random(3).randbytes(path.stat().st_size)),
}


CASES = [
    (part, way) if part == "shard" or way == "cut" else pytest.param(part, way, marks=LONG)
    for part in PARTS
    for way in WAYS
]


@pytest.mark.parametrize(("part", "way"), CASES)
def test_a_damaged_file_costs_one_checkpoint(damaged: Damaged, part: str, way: str) -> None:
    WAYS[way](damaged.part(part))
    damaged.expect_older()


@pytest.mark.parametrize("part", ["shard", "state.json"])
@pytest.mark.parametrize("seed", range(2))
def test_one_flipped_bit_is_found(damaged: Damaged, part: str, seed: int) -> None:
    flip(damaged.part(part), random.Random(seed))
    damaged.expect_older()


@pytest.mark.long
@pytest.mark.parametrize("seed", range(60))
def test_flipped_bits_anywhere(damaged: Damaged, seed: int) -> None:
    """Of the manifest's bits too; some of those are spaces, which do no harm."""
    draw = random.Random(seed)
    flip(damaged.part(draw.choice(PARTS)), draw)
    damaged.expect_harmless()


def test_two_damaged_checkpoints_cost_two(damaged: Damaged) -> None:
    for checkpoint in checkpoints(damaged.run)[1:]:
        flip(next(checkpoint.glob("*.safetensors")), random.Random(1))
    damaged.expect_older(2)


def test_no_intact_checkpoint_left_is_an_error(damaged: Damaged) -> None:
    for checkpoint in checkpoints(damaged.run):
        (checkpoint / "state.json").unlink()
    damaged.expect_error(says="no intact checkpoint is left")


def test_the_policy_stop_refuses(damaged: Damaged) -> None:
    flip(damaged.part("shard"), random.Random(1))
    damaged.expect_error("--checkpoint.when-damaged", "stop", says="is damaged")
    damaged.expect_older()


MANIFESTS = {
    "no JSON": "{",
    "a list": "[1, 2]",
    "a number": "5",
    "nothing": "null",
    "empty": "{}",
    "deep": "[" * 100_000,
    "deep objects": '{"a":' * 50_000 + "1" + "}" * 50_000,
    "no UTF-8": b"\xff\xfe\x00",
    "numbers for hashes": '{"state.json": 5}',
    "a long number": '{"state.json": ' + "9" * 5000 + "}",
}


@pytest.mark.parametrize(
    "name",
    [n if n in ("a list", "empty", "deep") else pytest.param(n, marks=LONG) for n in MANIFESTS],
)
def test_a_manifest_of_garbage_costs_one_checkpoint(damaged: Damaged, name: str) -> None:
    content = MANIFESTS[name]
    damaged.part("manifest.json").write_bytes(
        content if isinstance(content, bytes) else content.encode()
    )
    damaged.expect_older()


ELSEWHERE = ["../x", "/etc/hostname", "..", ".", "", "a\0b", "x/y"]


@pytest.mark.parametrize("name", ["../../x", *(pytest.param(n, marks=LONG) for n in ELSEWHERE)])
def test_a_manifest_cannot_name_files_elsewhere(damaged: Damaged, name: str) -> None:
    """Even where the file is there and its hash is right."""
    for place in (damaged.run / "x", damaged.run / "checkpoints" / "x"):
        place.write_bytes(b"text")
    known = {"bytes": 4, "sha256": hashlib.sha256(b"text").hexdigest()}
    path = damaged.part("manifest.json")
    path.write_text(json.dumps({**json.loads(path.read_text()), name: known}))
    code, said = damaged.train()
    assert code == 0, said
    assert "is damaged" in said


def test_a_shard_of_another_run_is_not_loaded(
    damaged: Damaged, small_config: Config, truth: Truth
) -> None:
    other = truth(small_config(*OPTIONS, "--train.seed", "5"))
    (shard,) = checkpoints(other)[-1].glob("*.safetensors")
    shutil.copy(shard, damaged.part("shard"))
    damaged.expect_older()


def test_a_shard_that_nobody_named_is_not_loaded(
    damaged: Damaged, small_config: Config, truth: Truth
) -> None:
    other = truth(small_config(*OPTIONS, "--train.seed", "5"))
    (shard,) = checkpoints(other)[-1].glob("*.safetensors")
    shutil.copy(shard, damaged.newest / "zzz.safetensors")
    damaged.expect_older()


@pytest.mark.parametrize("sharding", [pytest.param("none", marks=pytest.mark.long), "full"])
def test_two_processes_agree_on_an_older_one(
    sharding: str, small_config: Config, warm: WarmProcesses, truth: Truth, tmp_path: Path
) -> None:
    config = small_config(*OPTIONS, "--scale.sharding", sharding)
    whole = truth(config, 2)
    run = copy_run(whole, tmp_path / "run")
    shards = sorted(checkpoints(run)[-1].glob("*.safetensors"))
    assert len(shards) == 2
    shards[1].unlink()
    said = warm.run(command(config, run), 2)
    assert said.count("is damaged") == 1
    assert f"{shards[1].name} is missing" in said
    assert_same(run, whole, [shards[1].parent.name])


def test_two_processes_end_together_where_nothing_can_be_used(
    small_config: Config, warm: WarmProcesses, truth: Truth, tmp_path: Path
) -> None:
    config = small_config(*OPTIONS, "--scale.sharding", "full")
    run = copy_run(truth(config, 2), tmp_path / "run")
    for checkpoint in checkpoints(run):
        flip(sorted(checkpoint.glob("*.safetensors"))[1], random.Random(1))
    for args in ((), ("--checkpoint.when-damaged", "stop")):
        group = warm.start_group(command(config, run, *args))
        assert [process.wait() for process in group] == [2, 2]
        said = "".join(process.text() for process in group)
        assert said.count("error: ") == 1
        assert_no_traceback(said)
