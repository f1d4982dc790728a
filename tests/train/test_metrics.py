"""What a run shows: passes over its data, use of the device, and the profiler's trace."""

from __future__ import annotations

import json

import pytest
import torch
from fault_tools import lines_of

from bellmask.config.presets import preset
from bellmask.train import trainer
from bellmask.train.metrics import Display, device_use
from bellmask.train.train_run import train_run

GPU, CPU = torch.device("cuda", 0), torch.device("cpu")


def test_a_gpu_is_compared_with_its_data_sheet(monkeypatch):
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 7)
    assert device_use(CPU, 50.0, 200.0) == {}
    assert device_use(GPU, 50.0, 200.0) == {"mfu": 0.25, "peak_memory": 7}
    assert device_use(GPU, 50.0, None) == {"peak_memory": 7}


def test_a_profile_holds_three_steps_and_lines_say_how_a_gpu_is_used(
    small_config, tmp_path, monkeypatch, capsys
):
    use = {"mfu": 0.4, "peak_memory": 3e9}
    monkeypatch.setattr(trainer, "device_use", lambda *_: use)
    config = small_config("--log.profile", "--train.steps", "7", start=preset("tiny"))
    train_run(config, tmp_path / "run")
    events = json.loads((tmp_path / "run" / "profile.json").read_text())["traceEvents"]
    names = {event.get("name") for event in events}
    steps = {name for name in names if str(name).startswith("ProfilerStep")}
    assert steps == {"ProfilerStep#3", "ProfilerStep#4", "ProfilerStep#5"}
    assert "aten::_fused_adamw_" in names
    lines = [line for line in lines_of(tmp_path / "run") if line["kind"] == "train"]
    assert lines
    assert all(line.items() >= use.items() for line in lines)
    assert "40% MFU  3.0 GB" in capsys.readouterr().out


@pytest.mark.parametrize(("use", "note"), [({}, "9 tokens/s"), ({"mfu": 0.5}, "tokens/s  50% MFU")])
def test_only_what_is_known_is_shown(use, note, capsys):
    Display(10, is_quiet=False).logged(5, {"loss": 1.0, "tokens_per_second": 9.0, **use})
    assert capsys.readouterr().out.rstrip().endswith(note)


@pytest.mark.parametrize(
    ("steps", "told"), [(3, []), (6, ["note: the run reads its 24 rows 2.0 times"])]
)
def test_a_run_says_how_often_it_reads_its_rows(steps, told, small_config, tmp_path, capsys):
    """25 rows of 16 bytes, of which the last is held out; 8 rows per step."""
    (tmp_path / "a.txt").write_text("sixteen letters\n" * 25)
    args = f"--data.train {tmp_path}/a.txt --data.insert-eos False --train.steps {steps}"
    train_run(small_config(*args.split()), tmp_path / "run")
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if "reads its" in line] == told
