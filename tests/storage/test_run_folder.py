"""Run folders: which versions of them can be read."""

from __future__ import annotations

import json

import pytest
from commands import refuses, succeeds

from bellmask.run import load
from bellmask.storage.run_folder import FORMAT, read_description
from bellmask.utils.errors import UserError


def change(folder, **values):
    path = folder / "run.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def test_new_runs_and_exports_say_their_format(small_config, tmp_path):
    run, export = tmp_path / "run", tmp_path / "export"
    config = tmp_path / "config.json"
    config.write_text(json.dumps(small_config("--train.steps", "1").to_dict()))
    succeeds("train", config, "--out", run, "--quiet")
    succeeds("export", run, "--format", "hf", "--out", export)
    for folder in (run, export):
        assert read_description(folder)["format"] == FORMAT


def test_a_run_without_format_is_read(copy_run):
    run = copy_run("bell")
    assert "format" not in read_description(run)
    assert load(run).nll(["the cat sat"])


def test_a_newer_run_is_refused(copy_run, tmp_path):
    """Also where its options are not known here, which would be another error."""
    run = copy_run("bell")
    change(run, format=FORMAT + 1)
    commands = (
        ("evaluate", run),
        ("generate", run),
        ("export", run, "--format", "hf", "--out", tmp_path / "export"),
        ("analyze", "context-curve", run, "--out", tmp_path / "analysis"),
        ("report", run, copy_run("base"), "--out", tmp_path / "report"),
    )
    again = ("train", run / "config.json", "--out", run, "--resume", "auto")
    refuses(*again, names="update bellmask")
    options = json.loads((run / "config.json").read_text())
    (run / "config.json").write_text(json.dumps(options | {"unheard_of": {"option": 1}}))
    for command in commands:
        refuses(*command, names="update bellmask")


@pytest.mark.parametrize("value", ["1", None, True, -1, 1.5])
def test_a_format_that_is_no_number_is_damage(copy_run, value):
    run = copy_run("bell")
    change(run, format=value)
    with pytest.raises(UserError, match=r"run\.json is damaged"):
        load(run)
