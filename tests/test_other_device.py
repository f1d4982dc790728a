"""Training, evaluation and sampling on a fake device: nothing is on the wrong one.

A tensor on the wrong device raises in ``tools/other_device.py``. How often the CPU waits for the
device is part of the speed on GPUs, so the counts stand here.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent / "tools" / "other_device.py"


def check(names: list[str], zoo: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(zoo, tmp_path / "zoo")
    command = [sys.executable, str(SCRIPT), *names]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(SCRIPT.parents[2])}
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout)
    assert "found at least two devices, cpu and other:0" in found.pop("mixing")
    for what, waits in found.items():
        if what.startswith("train"):  # the loss and the gradient's norm
            assert waits == {"cpu": 1, "item": 1}, what
        elif what.endswith("most_confident"):  # drawn tokens, and how sure they are
            assert waits == {"cpu": 2}, what
        else:  # cross-entropies of a batch, or drawn tokens
            assert waits == {"cpu": 1}, what
    assert len(found) >= len(names)


def test_mdm_arm_and_pretrained_causal_lm(zoo: Path, tmp_path: Path) -> None:
    check(["bell", "arm", "cpt"], zoo, tmp_path)


@pytest.mark.long
def test_all_that_trains(zoo: Path, tmp_path: Path) -> None:
    check([], zoo, tmp_path)
