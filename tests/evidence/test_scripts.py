"""The studies as scripts: what they write, and what they refuse."""

from __future__ import annotations

import json
import runpy
import shutil
import sys
from pathlib import Path

import pytest

EVIDENCE = Path(__file__).parents[2] / "evidence"
COMMANDS = [
    "estimators bell --blocks 8 --draws 2 4 --repeats 4",
    "choices bell --data-dir tasks --tasks piqa --questions 3 --draws 2 4 --repeats 4",
]


@pytest.fixture
def run_script(zoo, tmp_path, monkeypatch):
    for name in ("bell", "arm", "tasks"):
        shutil.copytree(zoo / name, tmp_path / name)
    monkeypatch.chdir(tmp_path)

    def run(command):
        name, *args = command.split()
        monkeypatch.setattr(sys, "argv", [f"{name}.py", *args])
        runpy.run_path(str(EVIDENCE / f"{name}.py"), run_name="__main__")

    return run


@pytest.mark.parametrize("command", COMMANDS)
def test_a_study_prints_tables_and_writes_three_files(run_script, capsys, command):
    run_script(command)
    name = command.split()[0]
    assert "┃" in capsys.readouterr().out
    files = {path.suffix: path.read_bytes() for path in Path("bell/analysis").glob(f"{name}.*")}
    assert set(files) == {".json", ".png", ".svg"}
    assert files[".svg"].count(b"<path") > 20
    assert json.loads(files[".json"])["analysis"] == name


def test_what_cannot_be_measured_is_refused(run_script):
    for command, named in {"estimators bell --time-floor 0": "floor", "choices arm": "arm"}.items():
        with pytest.raises(SystemExit, match=f"error: .*{named}"):
            run_script(command)
