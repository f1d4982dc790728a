"""The tools that judge a rebuilding can fail."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from pathlib import Path

import same_numbers


def test_every_difference_is_reported(capsys):
    old = {"a": {"same": math.nan, "changed": 1.0, "gone": 2}, "b": {"failed": "no"}}
    new = {"a": {"same": math.nan, "changed": 1.0 + 1e-16 * 4, "new": 3}, "b": {"failed": "no"}}
    lines = list(same_numbers.differences(old["a"], new["a"]))
    assert [line.split(":")[0] for line in lines] == ["changed", "gone", "new"]
    assert not same_numbers.report(old, new)
    assert "failed: no" in capsys.readouterr().out
    assert same_numbers.report({"a": old["a"]}, {"a": old["a"]})
    assert not same_numbers.report({"a": {}}, {"a": {}})
    assert not same_numbers.report({"a": {"x": 1}}, {"a": {"x": 1}, "b": {"x": 1}})


def test_the_gpus_benchmark_is_refused_without_one():
    script = Path(__file__).parents[1] / "benchmarks" / "step.py"
    command = [sys.executable, str(script), "--gpu"]
    env = os.environ | {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(script.parents[1])}
    done = subprocess.run(command, capture_output=True, text=True, env=env, check=False)
    assert done.returncode == 1
    assert "finds no GPU" in done.stderr
    assert "Traceback" not in done.stderr
