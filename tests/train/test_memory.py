"""Devices: the microbatch that fits, chosen and used again; precision; deterministic kernels."""

from __future__ import annotations

import json
import os
from dataclasses import replace

import pytest
import torch

import bellmask
from bellmask.config.options import TrainOptions
from bellmask.evaluate.scorer import Request, Scorer
from bellmask.model.transformer import Denoiser
from bellmask.storage.run_folder import read_metrics
from bellmask.train import memory
from bellmask.train.planning import is_automatic, microbatch_sizes
from bellmask.train.train_run import train_run
from bellmask.utils.distributed import World, deterministic, open_world, pick_device
from bellmask.utils.errors import UserError


def test_automatic_on_gpus_only():
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    given = {None: [False, True], "auto": [True, True], 4: [False, False]}
    for size, expected in given.items():
        options = TrainOptions(microbatch_size=size)
        assert [is_automatic(options, device) for device in (cpu, gpu)] == expected


@pytest.mark.parametrize("warmup", [0, 5])
def test_sizes_divide_every_step(warmup):
    for batch in (24, 64, 120):
        sizes = microbatch_sizes(TrainOptions(batch_size=batch, batch_warmup=warmup), 2)
        shares = [batch // 2 // part for part in ((1, 2, 4) if warmup else (1,))]
        brute = [n for n in range(1, 61) if n <= shares[0]]
        brute = [n for n in brute if all(share % min(n, share) == 0 for share in shares)]
        assert sizes == brute[::-1]


class Deaf(World):
    """Another process ran out of memory, the first so many times."""

    times = 1

    def any(self, flag):
        Deaf.times -= 1
        return flag or Deaf.times >= 0


def test_processes_agree_on_what_fits():
    tried = []
    assert memory.first_that_runs([12, 6, 4, 3, 2, 1], tried.append, Deaf()) == 6
    assert tried == [12, 6]

    def fail(size):
        raise torch.OutOfMemoryError

    with pytest.raises(UserError, match="single row"):
        memory.first_that_runs([12, 6, 4], fail, World())


def losses(folder):
    return [line["loss"] for line in read_metrics(folder / "metrics.jsonl")]


def test_a_run_finds_its_microbatch_and_keeps_it(small_config, tmp_path, monkeypatch):
    """Nothing but rounding differs, and a resumed run has the same numbers, with dropout too."""
    config = small_config(*"--train.steps 4 --log.every 1 --model.dropout 0.1".split())
    auto = config.with_options({"train.microbatch_size": "auto"})
    forward, most = Denoiser.forward, 3

    def scarce(self, x_BL, *args, **more):
        if type(x_BL) is torch.Tensor and torch.is_grad_enabled() and len(x_BL) > most:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return forward(self, x_BL, *args, **more)

    with monkeypatch.context() as patch:
        patch.setattr(Denoiser, "forward", scarce)
        train_run(auto, tmp_path / "auto", is_quiet=True)
        half = replace(auto, train=replace(auto.train, steps=2))
        train_run(half, tmp_path / "parts", is_quiet=True)
    given = config.with_options({"train.microbatch_size": 2})
    train_run(given, tmp_path / "given", is_quiet=True)
    assert json.loads((tmp_path / "auto" / "run.json").read_text())["microbatch"] == 2
    assert losses(tmp_path / "auto") == losses(tmp_path / "given")
    # with all the memory of this machine 8 rows would fit
    train_run(auto, tmp_path / "parts", resume="yes", is_quiet=True)
    assert losses(tmp_path / "parts") == losses(tmp_path / "given")
    assert memory.estimate_memory(auto, World(), 1e12, "float32").microbatch == 8
    other = config.with_options({"train.microbatch_size": 4, "train.steps": 6})
    with pytest.raises(UserError, match="dropout's noise depends, has changed"):
        train_run(other, tmp_path / "parts", resume="yes", is_quiet=True)


def test_kernels_are_deterministic_inside_only(monkeypatch):
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    cudnn = torch.backends.cudnn
    for is_wanted in (False, True):
        with deterministic(is_wanted):
            found = torch.are_deterministic_algorithms_enabled(), cudnn.deterministic
            assert found == (is_wanted, is_wanted)
            assert ("CUBLAS_WORKSPACE_CONFIG" in os.environ) == is_wanted
        assert not torch.are_deterministic_algorithms_enabled()
        assert not cudnn.deterministic


def test_float32_is_tf32_on_a_gpu_and_its_memory_may_grow(monkeypatch):
    """Before anything is on the GPU; a setting of the user's stays."""
    told = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch, "set_float32_matmul_precision", told.append)
    monkeypatch.setenv("LOCAL_RANK", "6")
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "max_split_size_mb:128")
    assert pick_device("auto") == torch.device("cuda:2")
    assert os.environ["PYTORCH_ALLOC_CONF"] == "max_split_size_mb:128"
    monkeypatch.delenv("PYTORCH_ALLOC_CONF")
    assert pick_device("cuda:1") == torch.device("cuda:1")
    assert os.environ["PYTORCH_ALLOC_CONF"] == "expandable_segments:True"
    assert (pick_device("cpu"), told) == (torch.device("cpu"), ["high", "high"])


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_a_run_is_used_in_the_precision_that_it_was_trained_in(precision, copy_run):
    folder, seen = copy_run("bell"), set()
    config = json.loads((folder / "config.json").read_text())
    config["train"]["precision"] = precision
    (folder / "config.json").write_text(json.dumps(config))
    run = bellmask.load_run(folder, device="cpu")
    blocks = run.blocks()[1].slice(0, 2)
    run.model.blocks[0].qkv.register_forward_hook(lambda _, __, made: seen.add(made.dtype))
    for use in (
        lambda: run.sample(1, length=4, steps=2),
        lambda: run.evaluate(blocks, batch_size=2),
        lambda: Scorer(run).token_losses([Request((1,), (2, 3))]),
    ):
        seen.clear()
        use()
        assert seen == {getattr(torch, precision)}


def test_a_macs_gpu_is_a_device(monkeypatch):
    with pytest.raises(UserError, match="device mps is not available"):
        pick_device("mps")
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    assert pick_device("auto") == pick_device("mps") == torch.device("mps")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert pick_device("auto") == torch.device("cpu")
    with pytest.raises(UserError, match="one process"), open_world("mps"):
        pass
