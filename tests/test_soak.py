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
from fault_tools import checkpoints

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
