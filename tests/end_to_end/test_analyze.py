"""``bellmask analyze`` as a user runs it: files, tables, help, and what it refuses."""

from __future__ import annotations

import json
import re
import shlex
import shutil

import pytest
from changed_runs import change_run
from commands import refuses, succeeds

from bellmask.analyze.base import ANALYSES, open_analysis
from bellmask.config.command_line import parse_command


@pytest.fixture(scope="module")
def in_runs(zoo, tmp_path_factory):
    """Where runs of the zoo are, and some that cannot be analyzed."""
    folder = tmp_path_factory.mktemp("runs")
    for name in ("bell", "arm", "steps", "toy"):
        shutil.copytree(zoo / name, folder / name)
    for name, options in {
        "apart": {"data.document_attention": True},
        "timed": {"model.modulation": "time", "schedule.name": "cosine"},
    }.items():
        change_run(zoo / "bell", folder / name, options)
    change_run(zoo / "toy", folder / "hidden", {"data.train": "toy:hidden"})
    shutil.rmtree(shutil.copytree(zoo / "bell", folder / "empty") / "checkpoints")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        yield folder


@pytest.mark.parametrize(
    ("command", "place"),
    [
        ("orders arm bell", "runs/analysis/orders"),
        ("context-drop steps --blocks 16 --out some/where", "some/where"),
        ("context-curve bell --blocks 8", "bell/analysis"),
    ],
)
def test_an_analysis_prints_a_table_and_writes_three_files(in_runs, command, place):
    """The others: tests/frozen."""
    name = command.split()[0]
    said = succeeds("analyze", *command.split())
    assert "┃" in said.out
    assert f"{place}/{name}.json" in said.text
    files = {path.suffix: path.read_bytes() for path in (in_runs / place).glob(f"{name}.*")}
    assert set(files) == {".json", ".png", ".svg"}
    assert files[".png"].startswith(b"\x89PNG\r\n")
    assert files[".svg"].count(b"<path") > 20
    assert json.loads(files[".json"])["analysis"] == name
    assert not re.search(rb"\b(NaN|Infinity)\b", files[".json"])


def test_help_lists_all_and_its_examples_parse():
    overview = succeeds("analyze").out
    for name in ANALYSES:
        assert f"  {name} " in overview
        analysis = open_analysis(name)
        assert analysis.name == name
        shown = succeeds("analyze", name, "--help").out.splitlines()
        lines = [line.strip(" │").removeprefix("Examples: ") for line in shown]
        examples = [line for line in lines if line.startswith(f"bellmask analyze {name}")]
        assert len(examples) >= 2
        for example in examples:
            args = shlex.split(example)[3:]
            options = parse_command(analysis.options, args, command=f"analyze {name}")
            assert list(getattr(options, "runs", ())) == [a for a in args if "runs/" in a]


@pytest.mark.parametrize(
    ("command", "named"),
    [
        ("contxt-curve bell", "did you mean 'context-curve'"),
        ("context-curve", "run folder"),
        ("orders .", "config.json"),
        ("context-curve empty", "empty has no checkpoint"),
        ("context-curve bell bell", "twice"),
        ("context-curve bell toy", "bell and toy"),
        ("context-curve steps --checkpoints 3", "step 3"),
        ("context-curve bell --bins 0", "--bins"),
        ("context-drop steps --checkpoints 60", "--checkpoints"),
        ("gradient-radius arm", "arm is a causal model"),
        ("gradient-radius apart", "attention to documents"),
        ("gradient-radius timed", "schedule"),
        ("gradient-radius bell --radii 3 8", "--radii"),
        ("gradient-radius bell --masks 16 --radii 8", "needs 17"),
        ("gradient-additivity bell", "needs 32"),
        ("gradient-additivity bell --counts 0 2", "--counts"),
        ("decompose bell", "not trained on a toy"),
        ("decompose toy hidden", "toy and hidden"),
        ("decompose toy --rows 1", "--rows"),
        ("time-laws --laws gausian:0.5", "did you mean 'gaussian'"),
        ("time-laws --laws", "law"),
        ("time-laws --length 5000", "5000"),
        ("inefficient-masks --length 8 --ks 9", "--ks 9"),
        ("schedules --power 0.5", "power"),
        ("schedules --sigma 0.01", "sigma"),
    ],
)
def test_what_cannot_be_measured_is_refused(in_runs, command, named):
    before = {p: p.stat().st_mtime_ns for p in in_runs.rglob("*")}
    refuses("analyze", *command.split(), names=named)
    assert {p: p.stat().st_mtime_ns for p in in_runs.rglob("*")} == before
