"""The soak notices lost and changed lines; (long) a soak of half a minute."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "evidence"))
import soak_compare

ROOT = Path(__file__).parents[1]


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


@pytest.mark.long
def test_a_soak_of_half_a_minute(tmp_path, text_file):
    """Faults every few seconds, and still the undisturbed run bit for bit."""
    script, env = ROOT / "evidence" / "soak.py", {"BELLMASK_CACHE": str(tmp_path / "cache")}
    args = f"--out {tmp_path}/out --docs {tmp_path} --data {text_file} --minutes 0.5 --period 3"
    done = subprocess.run(
        [sys.executable, str(script), *args.split()],
        capture_output=True,
        text=True,
        timeout=900,
        env={**os.environ, "OMP_NUM_THREADS": "1", **env},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    told = json.loads((tmp_path / "results" / "soak.json").read_text())
    assert told["is_kept"]
    assert told["reference"]["is_same"]
    assert sum(fault["count"] for fault in told["faults"].values()) >= 1
    assert told["memory"].keys() == {"rank 0", "rank 1", "agent"}
