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
from typing import Any

import pytest

LONG = pytest.mark.long
SCRIPT = Path(__file__).parent / "tools" / "other_device.py"


def on_other_device(zoo: Path, tmp_path: Path, *names: str) -> dict[str, Any]:
    folder = shutil.copytree(zoo, tmp_path / "zoo")
    command = [sys.executable, str(SCRIPT), *names]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(SCRIPT.parents[2])}
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


def test_no_float64_is_on_a_device_without_it(zoo: Path, tmp_path: Path) -> None:
    """A Mac's, in evaluation and sampling."""
    found = on_other_device(zoo, tmp_path, "without_float64")
    assert found["float64"].endswith("float64 on a device that has none")


@pytest.mark.parametrize(
    "names",
    [pytest.param(["bell", "arm", "cpt"], id="some"), pytest.param([], id="all", marks=LONG)],
)
def test_devices_and_waits(names: list[str], zoo: Path, tmp_path: Path) -> None:
    found = on_other_device(zoo, tmp_path, *names)
    assert "found at least two devices, cpu and other:0" in found.pop("mixing")
    assert len(found) >= len(names)
    for what, waits in found.items():
        if what.startswith("sample"):  # a step's rows, when nothing is left to wait for
            assert waits.pop("upload") <= 5, what
        # cross-entropies of a batch, drawn tokens; of a step the loss and the gradient's norm
        # together, a step later
        assert waits == {"cpu": 1}, what
