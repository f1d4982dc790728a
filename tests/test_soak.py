"""The soak's own arithmetic against other ways to get it, and (long) a soak of half a minute."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from fault_tools import checkpoints
from safetensors.torch import save_file

from bellmask.storage.checkpoint import find_damage

sys.path.insert(0, str(Path(__file__).parents[1] / "evidence"))
import soak_compare
import soak_faults
import soak_report
import soak_watch

ROOT = Path(__file__).parents[1]
MIB = 2**20


def test_slope_is_numpys_fit():
    draw = np.random.default_rng(3)
    times = np.sort(draw.uniform(0, 900, 60))
    values = 400 + 0.02 * times + draw.normal(0, 3, 60)
    (rate, _), covariance = np.polyfit(times, values, 1, cov=True)
    found = soak_watch.slope(times.tolist(), values.tolist())
    assert found == pytest.approx((rate, np.sqrt(covariance[0, 0])))
    assert np.isnan(soak_watch.slope([1, 2], [1, 2])).all()
    assert np.isnan(soak_watch.slope([1, 1, 1], [1, 2, 3])).all()


def sample(time, **pids):
    """``rank_0=(pid, MiB)``."""
    processes = [
        {
            "role": role.replace("_", " "),
            "pid": pid,
            "rss": int(rss * MIB),
            "files": 9,
            "threads": 4,
        }
        for role, (pid, rss) in pids.items()
    ]
    return {"time": time, "step": int(time), "processes": processes, "folder": {"bytes": MIB}}


def test_memory_is_told_life_by_life():
    """Rank 0 dies at 100 s: the first life is level, the second grows by 1 MiB per 10 s."""
    samples = [sample(t, rank_0=(7, 300.0), agent=(5, 200.0)) for t in range(0, 110, 10)]
    samples += [
        sample(t, rank_0=(8, 300.0 + (t - 110) / 10), agent=(5, 200.0)) for t in range(110, 320, 10)
    ]
    told = soak_watch.memory(samples, warm_up=20, least=30)
    rank = told["rank 0"]
    assert (rank["lives"], told["agent"]["lives"]) == (2, 1)
    assert rank["longest"]["minutes"] == pytest.approx(190 / 60)  # the last sample is left out
    assert rank["longest"]["rate"] == pytest.approx(360)
    assert rank["longest"]["rate_error"] == pytest.approx(0, abs=1e-6)
    assert (rank["longest"]["rss_first"], rank["longest"]["rss_peak"]) == (302.0, 319.0)
    assert told["agent"]["longest"]["rate"] == 0
    assert "rank 1" not in told


def test_one_flipped_bit_is_one_bit_and_is_noticed(copy_run):
    (folder,), draw = checkpoints(copy_run("bell")), random.Random(5)
    for path in sorted(folder.iterdir()):
        before = path.read_bytes()
        for _ in range(5):
            soak_faults.flip_a_bit(path, draw)
            pairs = zip(before, path.read_bytes(), strict=True)
            assert sum((a ^ b).bit_count() for a, b in pairs) == 1
            assert find_damage(folder) is not None, path.name
            path.write_bytes(before)
    assert find_damage(folder) is None


def line(step, kind="train", loss=1.0):
    return {"kind": kind, "step": step, "loss": loss, "tokens": step, "masked_share": 0.5, "lr": 1}


def test_lost_doubled_and_changed_lines_are_counted():
    whole = [line(1), line(2), line(2, "validation"), line(3)]
    counts = {"lines": 4, "lost": 0, "too_many": 0, "different": 0, "out_of_order": 0}
    for lines, found in [
        (whole, {}),
        ([line(1), line(2), line(3)], {"lines": 3, "lost": 1}),
        ([*whole[:2], *whole[1:]], {"lines": 5, "too_many": 1}),
        ([*whole[:3], line(3, loss=1.5)], {"different": 1}),
        ([line(2), line(1), *whole[2:]], {"out_of_order": 1}),
    ]:
        assert soak_compare.compare_lines(lines, whole) == counts | found


def write_run(folder, *, value=1.0, losses=(3.0, 2.0)):
    """A finished run as the comparison reads it."""
    checkpoint = folder / "checkpoints" / "step-000000002"
    for part in (checkpoint, folder / "validation", folder / "samples"):
        part.mkdir(parents=True)
    save_file({"model.w": torch.tensor([1.0, 2.0])}, checkpoint / "a.safetensors")
    save_file({"model.w": torch.tensor([3.0, value])}, checkpoint / "b.safetensors")
    np.savez(folder / "validation" / "step-000000002.npz", nll=[value], name=np.array("x"))
    (folder / "samples" / "step-000000002.txt").write_text("a sample")
    lines = [line(step, loss=loss) | {"seconds": value} for step, loss in enumerate(losses, 1)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(x) + "\n" for x in lines))
    return folder


def test_runs_are_the_same_or_not(tmp_path, monkeypatch):
    def is_same(a, b):
        return soak_compare.is_same(soak_compare.compare_runs(a, b, 2))

    monkeypatch.setattr(soak_compare, "find_damage", lambda folder: None)
    a, b = write_run(tmp_path / "a"), write_run(tmp_path / "b")
    assert is_same(a, b)
    other = write_run(tmp_path / "c", value=1.0 + 2**-23)  # the last bit of one number
    compared = soak_compare.compare_runs(a, other, 2)
    assert compared["weights"] == {"tensors": 1, "different": 1}
    assert compared["validations"]["different"] == 1
    assert compared["metrics"]["different"] == 0  # only its clock differs
    assert not is_same(a, other)
    (b / "samples" / "step-000000002.txt").unlink()
    assert not is_same(a, b)
    assert not is_same(b, a)
    monkeypatch.setattr(soak_compare, "find_damage", lambda folder: "a.safetensors is missing")
    assert not is_same(a, a)


def test_a_broken_promise_is_not_overlooked():
    same = {"is_same": True, "one": {"noise_differs": 0}}
    good = {"visits": {"evaluate": {"done": 2}}, "marks": [], "marks_wrong": 0, "leftovers": 0}
    good |= {"flips": 1, "flips_noticed": 1, "reference": same}
    assert soak_report.is_kept(good)
    for broken in (
        {"visits": {"evaluate": {"failed": 1}}},
        {"leftovers": 1},
        {"marks": ["RESUME_ME"]},
        {"marks_wrong": 1},
        {"flips_noticed": 0},
        {"reference": same | {"is_same": False}},
        {"reference": same | {"one": {"noise_differs": 1}}},
    ):
        assert not soak_report.is_kept(good | broken), broken


@pytest.mark.long
def test_a_soak_of_half_a_minute(tmp_path, text_file):
    """Faults every few seconds, and still the undisturbed run bit for bit."""
    options = {"out": tmp_path / "out", "docs": tmp_path, "data": text_file, "minutes": 0.5}
    args = [str(word) for name, value in options.items() for word in (f"--{name}", value)]
    done = subprocess.run(
        [sys.executable, str(ROOT / "evidence" / "soak.py"), *args, "--period", "3"],
        capture_output=True,
        text=True,
        timeout=900,
        env={**os.environ, "OMP_NUM_THREADS": "1", "BELLMASK_CACHE": str(tmp_path / "cache")},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    told = json.loads((tmp_path / "results" / "soak.json").read_text())
    assert told["is_kept"]
    assert told["reference"]["is_same"]
    assert sum(fault["count"] for fault in told["faults"].values()) >= 1
    assert told["memory"].keys() == {"rank 0", "rank 1", "agent"}
