"""What processes are told of their device, and together of a batch that cannot be shared."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from warm_processes import WarmProcesses

from bellmask.config import RunConfig
from bellmask.train.distributed import pick_device, pick_precision


def test_a_process_that_is_late_at_the_end_ends_well(
    small_config: Callable[..., RunConfig], tmp_path: Path, warm: WarmProcesses
) -> None:
    """The main process holds the store here, as on several machines: it must not leave first."""
    path = tmp_path / "config.json"
    path.write_text(json.dumps(small_config("--train.steps", "2").to_dict()))
    late = ["fault_hooks.leave_late", 1, 2.0]
    warm.run(["train", path, "--out", tmp_path / "run"], 2, prepare=late)
    assert not (tmp_path / "run" / "RESUME_ME").exists()


def test_a_late_process_hears_what_went_wrong(
    small_config: Callable[..., RunConfig], tmp_path: Path, warm: WarmProcesses
) -> None:
    path = tmp_path / "config.json"
    config = small_config("--data.train", str(tmp_path / "nothing.txt"))
    path.write_text(json.dumps(config.to_dict()))
    late = ["fault_hooks.hear_late", 1, 2.0]
    group = warm.start_group(["train", path, "--out", tmp_path / "run"], prepare=late)
    assert [process.wait() for process in group] == [2, 2]
    said = "".join(process.text() for process in group)
    assert said.count("error: ") == 1
    assert "nothing.txt" in said


def test_a_batch_that_does_not_divide_is_refused_once(
    small_config: Callable[..., RunConfig], tmp_path: Path, warm: WarmProcesses
) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(small_config("--train.batch-size", "9").to_dict()))
    group = warm.start_group(["train", path, "--out", tmp_path / "run"])
    assert [process.wait() for process in group] == [2, 2]
    said = "".join(process.text() for process in group)
    assert said.count("must be a multiple of 2 processes") == 1
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("is_native", [False, True])
def test_precision_auto_is_float32_on_every_cpu(
    is_native: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: is_native)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: is_native)
    assert pick_precision("auto", torch.device("cpu")) == torch.float32
    assert pick_precision("bfloat16", torch.device("cpu")) == torch.bfloat16


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_a_missing_gpu_is_an_error_with_advice() -> None:
    assert pick_device("auto") == torch.device("cpu")
    with pytest.raises(ValueError, match="torch sees no GPU here"):
        pick_device("cuda")
