"""Processes that come late, and what a run decides for its device and number of processes."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
import torch
from fault_tools import command

from bellmask.storage.run_folder import resume_command
from bellmask.train.parallel import plan_parallel
from bellmask.utils.distributed import World, open_world, pick_device, pick_precision
from bellmask.utils.errors import UserError


def test_a_process_that_is_late_at_the_end_ends_well(small_config, tmp_path, warm):
    """The main process holds the store here, as on several machines: it must not leave first."""
    args = command(small_config("--train.steps", "2"), tmp_path / "run")
    warm.run(args, 2, prepare=["fault_hooks.leave_late", 1, 1.0])
    assert not (tmp_path / "run" / "RESUME_ME").exists()


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--data.train", "nothing.txt"], "nothing.txt"),
        pytest.param(["--train.batch-size", "9"], "train.batch_size=9", marks=pytest.mark.long),
    ],
)
def test_a_late_process_hears_what_went_wrong(options, named, small_config, tmp_path, warm):
    args = command(small_config(*options), tmp_path / "run")
    group = warm.start_group(args, prepare=["fault_hooks.hear_late", 1, 1.0])
    assert [process.wait() for process in group] == [2, 2]
    said = "".join(process.text() for process in group)
    assert said.count("error: ") == 1
    assert named in said
    assert not (tmp_path / "run").exists()


def test_restarts_on_several_machines_need_a_new_store(monkeypatch):
    told = {"WORLD_SIZE": "2", "GROUP_WORLD_SIZE": "2", "TORCHELASTIC_MAX_RESTARTS": "3"}
    for name, value in (told | {"TORCHELASTIC_USE_AGENT_STORE": "True"}).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match="SHARE_RDZV_TCP_STORE=1"), open_world("cpu"):
        pass


def test_devices_and_precisions(monkeypatch):
    """auto is float32 on every CPU, whatever it can do."""
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: True)
    assert pick_device("auto") == torch.device("cpu")
    assert pick_precision("auto", torch.device("cpu")) == torch.float32
    assert pick_precision("bfloat16", torch.device("cpu")) == torch.bfloat16
    for option in ("cuda", "cuda:1", "tpu"):
        with pytest.raises(UserError, match=option):
            pick_device(option)


FULL, SHORT = "--scale.sharding full", "--scale.reduce bfloat16"


@pytest.mark.parametrize(
    ("options", "size", "named", "kernel"),
    [
        ("", 1, [], "torch"),
        (FULL, 1, ["scale.sharding"], "torch"),
        ("--scale.sharding hybrid --scale.shard-size 1", 2, ["scale.sharding"], "torch"),
        (f"{FULL} {SHORT}", 2, ["scale.reduce=bfloat16"], "torch"),
        (f"{FULL} {SHORT} --train.precision bfloat16", 2, [], "chunked"),
        ("--objective nelbo --law uniform", 1, [], "chunked"),
        ("--scale.loss chunked", 1, [], "chunked"),
    ],
)
def test_options_that_do_not_apply_are_named(options, size, named, kernel, small_config):
    """And the kernel is the one that suits the options."""
    world = World(size=size, machine_size=size)
    plan = plan_parallel(small_config(*options.split()), world)
    assert len(plan.notes) == len(named)
    assert all(name in note for note, name in zip(plan.notes, named, strict=True))
    assert plan.describe()["loss_kernel"] == kernel


@pytest.mark.parametrize(
    ("processes", "per_machine", "launch"),
    [
        (1, 1, "bellmask"),
        (4, 4, "torchrun --nproc-per-node 4 -m bellmask"),
        (16, 8, "torchrun --nnodes 2 --nproc-per-node 8 -m bellmask"),
    ],
)
def test_the_command_that_continues(processes, per_machine, launch):
    words = shlex.split(resume_command(Path("my runs/x"), processes, per_machine))
    rest = ["train", "my runs/x/config.json", "--out", "my runs/x", "--resume", "auto"]
    assert words == [*launch.split(), *rest]
