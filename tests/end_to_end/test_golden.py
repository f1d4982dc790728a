"""Losses of the tiny preset, written down once: a refactor must give the same ones.

To write them anew after a change that is meant to change them:
``BELLMASK_WRITE_GOLDEN=1 python -m pytest tests/end_to_end/test_golden.py``.
"""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from bellmask.assemble import train_run
from bellmask.config import override
from bellmask.presets import preset
from bellmask.records import read_metrics

GOLDEN = Path(__file__).parents[1] / "golden" / "tiny.json"
VARIANTS = {
    "base": ("tiny_base", ""),
    "bell": ("tiny_bell", ""),
    "importance": ("tiny", "--objective importance"),
    "middle_flat": ("tiny_base", "--schedule middle_flat --schedule.scale 0.2"),
    "muon": ("tiny", "--optimizer muon"),
    "unpacked": ("tiny", "--data.packing unpacked --data.documents line --model.modulation time"),
}
SHORT = "--train.steps 8 --log.every 1 --validation.every 4 --validation.blocks 64"


@pytest.mark.parametrize("variant", VARIANTS)
def test_losses_are_those_written_down(variant: str, text_file: Path, tmp_path: Path) -> None:
    name, options = VARIANTS[variant]
    config = preset(name)
    data = replace(config.data, train=str(text_file), cache=str(tmp_path / "cache"))
    config = override(replace(config, data=data), [*SHORT.split(), *options.split()])
    train_run(config, tmp_path / "run", is_quiet=True)
    lines = read_metrics(tmp_path / "run" / "metrics.jsonl")
    found = [line["loss"] if line["kind"] == "train" else line["nll"] for line in lines]
    golden = json.loads(GOLDEN.read_text()) if GOLDEN.exists() else {}
    if os.environ.get("BELLMASK_WRITE_GOLDEN"):
        golden[variant] = [round(value, 7) for value in found]
        GOLDEN.write_text(json.dumps(golden, indent=1) + "\n")
    assert found == pytest.approx(golden[variant], abs=1e-4)
    assert len(found) == 10
