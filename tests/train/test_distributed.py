"""One process, two processes and accumulation: the same noise exactly, the same losses nearly."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from bellmask.assemble import train_run
from bellmask.config import RunConfig
from bellmask.records import read_metrics
from bellmask.run import load_run
from bellmask.train.distributed import pick_device, pick_precision

OPTIONS = (
    "--train.steps 6 --model.dropout 0 --validation.every 3 --log.every 1 --validation.blocks 50 "
    "--validation.batch-size 8"
).split()


def run_two_processes(
    config: RunConfig, folder: Path, *args: str
) -> subprocess.CompletedProcess[str]:
    path = folder.with_suffix(".json")
    path.write_text(json.dumps(config.to_dict()))
    return subprocess.run(
        [
            sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
            "-m", "bellmask", "train", str(path), "--out", str(folder), *args,
        ],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip


def losses(folder: Path, kind: str = "train", field: str = "loss") -> list[float]:
    return [r[field] for r in read_metrics(folder / "metrics.jsonl") if r["kind"] == kind]


def test_two_processes_and_accumulation_give_the_losses_of_one(
    small_config: Callable[..., RunConfig], tmp_path: Path
) -> None:
    config = small_config(*OPTIONS)
    train_run(config, tmp_path / "one", is_quiet=True)
    train_run(
        small_config(*OPTIONS, "--train.microbatch-size", "2"), tmp_path / "four", is_quiet=True
    )
    done = run_two_processes(config, tmp_path / "two")
    assert done.returncode == 0, done.stderr
    for other in ("four", "two"):
        assert losses(tmp_path / other) == pytest.approx(losses(tmp_path / "one"), rel=1e-5)
        for field in ("masked_share", "tokens"):  # the noise itself: exactly the same
            assert losses(tmp_path / other, field=field) == losses(tmp_path / "one", field=field)
        nll = losses(tmp_path / other, "validation", "nll")
        assert nll == pytest.approx(losses(tmp_path / "one", "validation", "nll"), rel=1e-5)
        a, b = load_run(tmp_path / other), load_run(tmp_path / "one")
        for p, q in zip(a.model.parameters(), b.model.parameters(), strict=True):
            torch.testing.assert_close(p, q, rtol=1e-3, atol=1e-4)
    check_resume_with_another_number_of_processes(small_config, tmp_path)


def check_resume_with_another_number_of_processes(
    small_config: Callable[..., RunConfig], tmp_path: Path
) -> None:
    """What two processes wrote one continues, and the other way round."""
    longer = small_config(*OPTIONS, "--train.steps", "8")
    train_run(longer, tmp_path / "eight", is_quiet=True)
    train_run(longer, tmp_path / "two", resume="yes", is_quiet=True)
    done = run_two_processes(longer, tmp_path / "four", "--resume", "yes")
    assert done.returncode == 0, done.stderr
    expected = losses(tmp_path / "eight")
    for folder in ("two", "four"):
        assert losses(tmp_path / folder) == pytest.approx(expected, rel=1e-5)


def test_two_processes_give_an_any_order_model_the_orders_of_one(
    small_config: Callable[..., RunConfig], tmp_path: Path
) -> None:
    config = small_config(*OPTIONS, "--framework", "aoarm", "--validation.draws", "2")
    train_run(config, tmp_path / "one", is_quiet=True)
    done = run_two_processes(config, tmp_path / "two")
    assert done.returncode == 0, done.stderr
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "one"), rel=1e-5)
    nll = losses(tmp_path / "two", "validation", "nll")
    assert nll == pytest.approx(losses(tmp_path / "one", "validation", "nll"), rel=1e-5)


def test_a_batch_that_does_not_divide_is_refused_once(
    small_config: Callable[..., RunConfig], tmp_path: Path
) -> None:
    done = run_two_processes(small_config("--train.batch-size", "9"), tmp_path / "run")
    assert done.returncode != 0
    assert done.stderr.count("must be a multiple of 2 processes") == 1
    assert not (tmp_path / "run").exists()


def test_precision_auto_is_float32_without_native_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = torch.device("cpu")
    for native, expected in ((False, torch.float32), (True, torch.bfloat16)):
        monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda n=native: n)
        monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
        assert pick_precision("auto", cpu) == expected
    assert pick_precision("bfloat16", cpu) == torch.bfloat16


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_a_missing_gpu_is_an_error_with_advice() -> None:
    assert pick_device("auto") == torch.device("cpu")
    with pytest.raises(ValueError, match="torch sees no GPU here"):
        pick_device("cuda")
