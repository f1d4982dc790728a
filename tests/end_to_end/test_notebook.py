"""The notebook among the examples: it runs, and is stored without outputs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

NOTEBOOK = Path(__file__).parents[2] / "examples" / "quickstart.ipynb"
SMALL = {
    "train.steps": 4,
    "train.batch_size": 4,
    "validation.every": "2 steps",
    "validation.blocks": 8,
    "data.block_length": 16,
}


def code_cells():
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    return [cell for cell in cells if cell["cell_type"] == "code"]


def test_it_is_stored_without_outputs():
    assert all(not cell["outputs"] and cell["execution_count"] is None for cell in code_cells())


@pytest.mark.long
def test_it_runs(tmp_path, text_file, monkeypatch, capsys):
    """With smaller settings, on a text that is there."""
    import matplotlib

    monkeypatch.chdir(tmp_path)
    matplotlib.use("agg")
    names = {}
    settings, *cells = ("".join(cell["source"]) for cell in code_cells())
    exec(settings, names)
    names["OPTIONS"] |= SMALL | {"data.train": str(text_file), "data.cache": str(tmp_path)}
    for cell in cells:
        exec(cell, names)
    names["plt"].close("all")
    assert "bell: validation NLL" in capsys.readouterr().out
    assert list(names["curves"]["bell"]) == [2, 4]
