"""``bellmask analyze`` as a user runs it: files, tables, help, and errors without a traceback."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import xml.etree.ElementTree as ET
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from bellmask import __version__
from bellmask.assemble import train_run
from bellmask.cli import run_command
from bellmask.commands.analyze import ANALYSES
from bellmask.commands.options import parse_command
from bellmask.config import RunConfig
from bellmask.data.toy_corpora import NUM_ROWS

CITES = {
    "orders": "Fig. 2",
    "context-curve": "Fig. 3, left",
    "context-drop": "Fig. 3, right",
    "gradient-radius": "Table 1",
    "gradient-additivity": "Table 2",
    "inefficient-masks": "Fig. 4",
    "time-laws": "Table 3",
    "schedules": "App. C.4",
    "decompose": "Prop. 3.1",
    "estimators": "App. C.3",
    "choices": "Table 4",
}
every_name = pytest.mark.parametrize("name", list(CITES))


@pytest.fixture(scope="module")
def runs(small_config: Callable[..., RunConfig], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """bell and arm on text, toy and toy-arm on a sticky chain."""
    folder = tmp_path_factory.mktemp("runs")
    common = "--train.steps 4 --validation.every 2 --model.num-layers 1".split()
    toy = "--data.train toy:sticky --data.tokenizer symbols:8 --data.block-length 8".split()
    options = {
        "bell": ["--checkpoint.keep-steps", "2", "4"],
        "arm": ["--framework", "arm"],
        "toy": [*toy, "--checkpoint.keep-steps", "2", "4"],
        "toy-arm": [*toy, "--framework", "arm"],
    }
    with pytest.MonkeyPatch.context() as patch:
        for split in NUM_ROWS:
            patch.setitem(NUM_ROWS, split, 128)
        for name, more in options.items():
            train_run(small_config(*common, *more), folder / name, is_quiet=True)
    return folder


@pytest.fixture
def analyze(
    runs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str, str]]:
    """``analyze("orders arm --out here")`` in the folder of the runs: (code, stdout, stderr)."""
    monkeypatch.chdir(runs)
    monkeypatch.setenv("COLUMNS", "200")
    for split in NUM_ROWS:
        monkeypatch.setitem(NUM_ROWS, split, 128)

    def run(command: str) -> tuple[int, str, str]:
        capsys.readouterr()
        try:
            code = run_command(["analyze", *shlex.split(command)])
        except SystemExit as stop:
            code = int(stop.code or 0)
        return (code, *capsys.readouterr())

    return run


def strict_json(path: Path) -> dict[str, Any]:
    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is not JSON")

    return json.loads(path.read_text(encoding="utf-8"), parse_constant=refuse)


def check_files(folder: Path, name: str) -> dict[str, Any]:
    """NAME.json, .png and .svg and nothing else of that name."""
    assert sorted(p.suffix for p in folder.glob(f"{name}.*")) == [".json", ".png", ".svg"]
    picture = (folder / f"{name}.png").read_bytes()
    assert picture.startswith(b"\x89PNG\r\n")
    assert len(picture) > 5000
    drawing = ET.parse(folder / f"{name}.svg").getroot()
    assert drawing.tag.endswith("svg")
    assert sum(1 for _ in drawing.iter()) > 50
    found = strict_json(folder / f"{name}.json")
    assert (found["analysis"], found["bellmask"]) == (name, __version__)
    return found


@pytest.mark.parametrize(
    ("command", "place", "words"),
    [
        (
            "orders arm bell",
            "runs/analysis/orders",
            ["final NLL, nats per token (Fig. 2)", "exact"],
        ),
        ("context-curve bell --bins 3", "bell/analysis", ["0", "6-10", "unigram", "position-wise"]),
        ("context-drop toy --blocks 0", "toy/analysis", ["bell: fall of the NLL", "2 to 4"]),
        (
            "gradient-radius bell --draws 2 --radii 4 8",
            "bell/analysis",
            ["bell, untrained", "no gradient", "0.108"],
        ),
        (
            "gradient-additivity bell --draws 2 --counts 2 5 --out some/where",
            "some/where",
            ["bell, step 4", "(Table 2)", "0.999"],
        ),
        (
            "inefficient-masks --length 8 --laws dirac:0.5 --max-k 4",
            "runs/analysis/inefficient-masks",
            ["Prop. 4.4", "L=8"],
        ),
        ("time-laws --laws uniform gaussian:0.5,0.1 --out laws", "laws", ["Definition 4.1"]),
        ("schedules --draws 2000 --out laws", "laws", ["middle_flat"]),
        (
            "decompose toy toy-arm --rows 8",
            "runs/analysis/decompose",
            ["H(X) = 7.7093 exactly", "irreducible (red)", "oracle's mask rate"],
        ),
    ],
    ids=lambda value: value.split()[0] if isinstance(value, str) and " " in value else "",
)
def test_an_analysis_prints_a_table_and_writes_three_files(
    analyze: Callable[..., tuple[int, str, str]],
    runs: Path,
    command: str,
    place: str,
    words: list[str],
) -> None:
    name = command.split()[0]
    code, out, err = analyze(command)
    assert (code, err) == (0, "")
    assert "┃" in out
    for word in words:
        assert word in out
    assert out.endswith(f"written: {place}/{name}.json, .png and .svg\n")
    found = check_files(runs / place, name)
    assert len(found) > 3


def test_every_analysis_is_among_those_tried() -> None:
    assert list(ANALYSES) == list(CITES)


def test_numbers_can_be_repeated(
    analyze: Callable[..., tuple[int, str, str]], runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file of one run is in its folder, and the same when it is made again."""
    monkeypatch.setattr("bellmask.report.plots.save_figure", lambda figure, path: [])
    texts = []
    for seed in (1, 1, 2):
        assert analyze(f"decompose toy-arm --rows 4 --seed {seed}")[0] == 0
        texts.append((runs / "toy-arm" / "analysis" / "decompose.json").read_text())
    assert texts[0] == texts[1] != texts[2]


# help


def examples_in(text: str) -> list[list[str]]:
    lines = [line.strip(" │").removeprefix("Examples: ") for line in text.splitlines()]
    return [shlex.split(line) for line in lines if line.startswith("bellmask analyze ")]


@every_name
def test_help_cites_the_paper_and_its_examples_parse(
    analyze: Callable[..., tuple[int, str, str]], name: str
) -> None:
    code, out, err = analyze(f"{name} --help")
    assert (code, err) == (0, "")
    assert f"usage: bellmask analyze {name}" in out
    text = re.sub(r"\s+", " ", out)
    assert CITES[name] in text
    assert "--out" in out
    examples = examples_in(out)
    assert len(examples) >= 2
    entry = ANALYSES[name]
    analysis = getattr(import_module(f"bellmask.analyze.{entry.module}"), entry.constant)
    assert analysis.name == name
    for _, _, own, *args in examples:
        assert own == name
        options = parse_command(analysis.options, args, command=f"analyze {name}")
        assert list(getattr(options, "runs", ())) == [a for a in args if a.startswith("runs/")]


@pytest.mark.parametrize("command", ["", "--help", "-h"])
def test_the_overview_lists_all_with_what_they_show(
    analyze: Callable[..., tuple[int, str, str]], command: str
) -> None:
    code, out, err = analyze(command)
    assert (code, err) == (0, "")
    for name, cited in CITES.items():
        (line,) = [part for part in out.splitlines() if part.split()[:1] == [name]]
        assert cited in line
    examples = examples_in(out)
    assert len(examples) == 3
    for _, _, name, *args in examples:
        entry = ANALYSES[name]
        analysis = getattr(import_module(f"bellmask.analyze.{entry.module}"), entry.constant)
        parse_command(analysis.options, args, command="analyze")


# errors


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("contxt-curve bell", "unknown analysis 'contxt-curve'; did you mean 'context-curve'"),
        ("decomposition toy", "did you mean 'decompose'?"),
        ("--length 16 inefficient-masks", "give the analysis first: bellmask analyze orders, "),
        ("context-curve", "at least one run folder"),
        ("orders", "needs run folders"),
        ("context-curve nowhere", "nowhere is not a run folder"),
        ("orders nowhere", "there is no folder nowhere"),
        ("context-drop arm", "arm has a single checkpoint; a drop needs two or more"),
        ("context-drop bell --checkpoints 2 3", "no checkpoint at step 3; it has 2, 4"),
        ("context-curve bell toy", "bell and toy have different text or tokenizers"),
        ("context-curve bell --bins 0", "--bins must be at least 1"),
        ("gradient-radius arm", "arm is a causal model"),
        ("gradient-radius bell --checkpoint 7", "no checkpoint '7'"),
        ("gradient-radius bell --radii 2", "--radii 2: each must have at least --masks 8"),
        ("gradient-additivity bell", "blocks of 16 tokens; this analysis needs 32"),
        ("orders arm toy-arm", "cannot be compared"),
        ("decompose bell", "whose conditionals nobody knows; train on a toy"),
        ("decompose toy --rows 1", "--rows must be at least 2"),
        ("time-laws --laws gausian:0.5", "did you mean 'gaussian'"),
        ("inefficient-masks --length -3", "-3"),
        ("decompose toy-arm --rows 2 --out toy/config.json", "toy/config.json"),
        ("context-curve bell --device nothing", "nothing"),
    ],
)
def test_bad_input_is_one_line_and_code_two(
    analyze: Callable[..., tuple[int, str, str]], runs: Path, command: str, words: str
) -> None:
    before = {p: p.stat().st_mtime_ns for p in runs.rglob("*")}
    code, out, err = analyze(command)
    assert code == 2
    assert err.startswith("error: ")
    assert words in err
    assert err.count("\n") == 1
    if "--out" not in command:  # a folder that cannot be made is seen when it is written to
        assert out == ""
    assert {p: p.stat().st_mtime_ns for p in runs.rglob("*")} == before


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("context-curve bell --binns 4", "--bins INT"),
        ("decompose toy --rows many", "invalid literal for int() with base 10: 'many'"),
        ("time-laws bell", "bell"),
    ],
)
def test_a_wrong_option_is_named(
    analyze: Callable[..., tuple[int, str, str]], command: str, words: str
) -> None:
    code, out, err = analyze(command)
    assert (code, out) == (2, "")
    assert err.startswith(f"error: bellmask analyze {command.split()[0]}: ")
    assert words in err
    assert "Traceback" not in err
    assert err.count("\n") < 8


@pytest.mark.parametrize("file", ["config.json", "run.json", "tokenizer.json"])
def test_a_damaged_run_folder_is_named(
    analyze: Callable[..., tuple[int, str, str]], runs: Path, tmp_path: Path, file: str
) -> None:
    copy = tmp_path / "copy"
    copy.mkdir()
    for name in ("config.json", "run.json", "tokenizer.json"):
        (copy / name).write_text((runs / "toy-arm" / name).read_text())
    (copy / "checkpoints").symlink_to(runs / "toy-arm" / "checkpoints")
    (copy / file).write_text('{"half": ')
    code, out, err = analyze(f"decompose toy {copy} --rows 2")
    assert (code, out) == (2, "")
    assert err.startswith("error: ")
    assert str(copy / file) in err
    assert "Traceback" not in err


def test_another_process_ends_the_same_way(runs: Path) -> None:
    def bellmask(*args: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "bellmask", "analyze", *args],
            capture_output=True,
            text=True,
            cwd=runs,
            env={**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "100"},
        )

    bad = bellmask("contxt-curve", "bell")
    assert (bad.returncode, bad.stdout) == (2, "")
    assert bad.stderr.startswith("error: unknown analysis 'contxt-curve'; did you mean")
    assert bad.stderr.count("\n") == 1
