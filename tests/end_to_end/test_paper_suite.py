"""``bellmask evaluate --suite paper`` as a person types it."""

from __future__ import annotations

import json
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from downstream_tools import TASKS, write_records

from bellmask.assemble import train_run
from bellmask.cli import run_command
from bellmask.commands.options import parse_command
from bellmask.commands.paper_suite import TASK_NAMES, PaperOptions
from bellmask.config import RunConfig
from bellmask.downstream import questions
from bellmask.downstream.contestants import RunContestant
from bellmask.downstream.suite import Suite
from bellmask.errors import UserError
from bellmask.run import Run

Command = Callable[[str], tuple[int, str, str]]


@pytest.fixture(scope="module")
def runs(small_config: Callable[..., RunConfig], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """base_1, bell and arm, one that must be refused, and a folder with all eight tasks."""
    folder = tmp_path_factory.mktemp("runs")
    kinds = {
        "base_1": "--objective nelbo --law uniform",
        "bell": "--train.seed 1",
        "arm": "--framework arm",
        "sigma": "--framework sigma_arm",
    }
    for name, more in kinds.items():
        config = small_config("--train.steps", "4", "--data.block-length", "32", *more.split())
        train_run(config, folder / name, is_quiet=True)
    shutil.copytree(folder / "bell", folder / "random")
    write_records(folder / "data")
    return folder


@pytest.fixture
def command(
    runs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Command:
    """``command("bell --seeds 1")`` beside the runs, without a network: (code, stdout, stderr)."""

    def unreachable(*_: Any, **__: Any) -> None:
        raise UserError("cannot be reached")

    monkeypatch.chdir(runs)
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr("bellmask.downstream.data_sources.validation_records", unreachable)
    monkeypatch.setattr("bellmask.downstream.data_sources._on_hub", unreachable)

    def run(text: str) -> tuple[int, str, str]:
        capsys.readouterr()
        try:
            code = run_command(["evaluate", *shlex.split(text), "--suite", "paper"])
        except SystemExit as stop:
            code = int(stop.code or 0)
        return (code, *capsys.readouterr())

    return run


def read(folder: Path) -> dict[str, Any]:
    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is not JSON")

    text = (folder / "paper.json").read_text(encoding="utf-8")
    return json.loads(text, parse_constant=refuse)


def count_answers(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows by the size of each batch that a run answers."""
    sizes: list[int] = []
    for name in ("score", "write"):
        whole = getattr(RunContestant, name)

        def counted(self: Any, asked: Any, *args: Any, whole: Any = whole, **more: Any) -> Any:
            sizes.append(len(asked))
            return whole(self, asked, *args, **more)

        monkeypatch.setattr(RunContestant, name, counted)
    return sizes


def test_two_models_on_all_tasks_twice(
    runs: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    totals: list[int] = []
    missing = Suite.missing
    monkeypatch.setattr(Suite, "missing", lambda self: totals.append(missing(self)) or totals[-1])
    sizes = count_answers(monkeypatch)
    options = "base_1 bell --data-dir data --seeds 2 --draws 2 --longest-exact 3"
    code, out, err = command(options)
    assert (code, err) == (0, "")
    folder = runs / "runs" / "paper"
    files = ["kept", "paper.json", "paper.md", "paper.tex"]
    assert sorted(path.name for path in folder.iterdir()) == files
    found = read(folder)
    assert [m["name"] for m in found["models"]] == ["base_1", "bell", "random", "unigram"]
    assert [task["name"] for task in found["tasks"]] == list(TASK_NAMES)
    assert (found["seeds"], found["draws"], found["longest_exact"]) == ([0, 1], 2, 3)
    for task in found["tasks"]:
        assert task["num_questions"] == 5
        assert list(task["results"]) == ["base_1", "bell", "random", "unigram"]
        value = task["results"]["bell"]["scores"][task["main"]]
        assert f"{value['mean']:.2f} ± {value['deviation']:.2f}" in out
    for title in ("LAMBADA (%)†", "Obqa (%)", "Wino (%)", "Infilling†", "TriQA (%)†"):
        assert title in out
    assert r"base\_1, step 4" in (folder / "paper.tex").read_text(encoding="utf-8")
    assert "| base_1, step 4 |" in (folder / "paper.md").read_text(encoding="utf-8")
    assert totals == [sum(sizes)]
    before = {path.name: path.read_bytes() for path in folder.glob("**/*") if path.is_file()}
    sizes.clear()
    assert command(options) == (0, out, "")
    assert (sizes, totals[1]) == ([], 0)
    after = {path.name: path.read_bytes() for path in folder.glob("**/*") if path.is_file()}
    assert after == before
    assert command(f"{options} --seeds 3")[0] == 0
    texts = 2 * 3 * 5 * 2
    assert texts < sum(sizes) < totals[0] / 2 + 1


def test_a_stopped_suite_goes_on(
    runs: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = "bell --data-dir data --seeds 1 --draws 2 --longest-exact 2"
    monkeypatch.setattr("bellmask.downstream.work.CHUNK", 20)
    do = Suite.do

    def stop(self: Suite, advance: Callable[[int], None]) -> None:
        def tell(done: int) -> None:
            if done > 50:
                raise KeyboardInterrupt
            advance(done)

        do(self, tell)

    monkeypatch.setattr(Suite, "do", stop)
    assert command(f"{options} --out stopped")[0] == 130
    assert [path.name for path in (runs / "stopped").iterdir()] == ["kept"]
    (kept,) = (runs / "stopped" / "kept").iterdir()
    done = len(kept.read_text(encoding="utf-8").splitlines())
    assert 30 < done <= 50
    monkeypatch.setattr(Suite, "do", do)
    sizes = count_answers(monkeypatch)
    assert command(f"{options} --out stopped")[0] == 0
    going_on = sum(sizes)
    sizes.clear()
    monkeypatch.setattr("bellmask.downstream.work.CHUNK", 128)
    assert command(f"{options} --out whole --batch-tokens 64")[0] == 0
    assert going_on == sum(sizes) - done
    assert read(runs / "stopped") == read(runs / "whole")


def test_a_causal_model_sees_nothing_behind_a_gap(
    runs: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows: list[list[int]] = []
    whole = RunContestant.write

    def spy(self: RunContestant, given: Any, *args: Any, **more: Any) -> Any:
        rows.extend(row.tolist() for row in given)
        return whole(self, given, *args, **more)

    monkeypatch.setattr(RunContestant, "write", spy)
    options = "--data-dir data --tasks infilling piqa --seeds 1 --no-baselines"
    assert command(f"arm {options} --out arm-out")[0] == 0
    assert rows
    assert all(row[-1] == 259 for row in rows)
    (piqa,) = [task for task in read(runs / "arm-out")["tasks"] if task["name"] == "piqa"]
    result = piqa["results"]["arm"]
    assert (result["exact_share"], result["num_passes"]) == (1.0, 10)
    assert result["scores"]["raw"]["deviation"] is None
    rows.clear()
    assert command(f"bell {options} --out bell-out")[0] == 0
    assert all(row[-1] != 259 for row in rows)


def test_a_single_model_has_the_files_in_its_folder(runs: Path, command: Command) -> None:
    code, out, _ = command("bell --data-dir data --tasks piqa lambada --limit 2 --seeds 1")
    assert code == 0
    found = read(runs / "bell" / "paper")
    assert [task["num_questions"] for task in found["tasks"]] == [2, 2]
    assert found["tasks"][0]["results"]["random"]["scores"]["raw"]["mean"] == 50
    assert "written: bell/paper/paper.json" in out


def test_missing_tasks_are_left_out_if_asked(runs: Path, command: Command) -> None:
    shutil.copytree(runs / "data", runs / "part", dirs_exist_ok=True)
    (runs / "part" / "triviaqa.jsonl").unlink()
    options = "bell --data-dir part --tasks piqa triviaqa --seeds 1 --limit 1"
    code, out, err = command(f"{options} --out refused")
    assert (code, out) == (2, "")
    assert "triviaqa: no records" in err
    assert "--skip-missing" in err
    assert not (runs / "refused").exists()
    code, out, err = command(f"{options} --out part-out --skip-missing")
    assert code == 0
    assert "note: left out: triviaqa" in err
    assert "Left out, no data: triviaqa." in out
    found = read(runs / "part-out")
    assert list(found["missing"]) == ["triviaqa"]
    assert [task["name"] for task in found["tasks"]] == ["piqa"]


def test_without_the_training_text_there_is_no_unigram(
    runs: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    def gone(self: Run) -> None:
        raise UserError("the text is gone")

    monkeypatch.setattr(Run, "blocks", gone)
    code, _, err = command("bell --data-dir data --tasks piqa --seeds 1 --limit 1 --out no-text")
    assert code == 0
    assert "note: no unigram without the training text: the text is gone" in err
    assert [m["name"] for m in read(runs / "no-text")["models"]] == ["bell", "random"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("", ["needs at least one model"]),
        ("bell --tasks pica", ["unknown task 'pica'; did you mean 'piqa'"]),
        ("bell --tasks piqa piqa", ["each once"]),
        ("bell --limit -1", ["--limit must be 0 (all questions) or more, got -1"]),
        ("bell --seeds 0", ["--seeds must be at least 1, got 0"]),
        ("bell --draws 0", ["--draws must be at least 1"]),
        ("bell --longest-exact 40", ["--longest-exact must be from 0 to 12"]),
        ("bell --batch-tokens 0", ["--batch-tokens must be at least 1"]),
        ("bell --data-dir gone", ["--data-dir gone: there is no such folder"]),
        ("bell --tasks piqa --data-dir bell", ["piqa: no records", "--skip-missing"]),
        ("bell --tasks piqa --data-dir bell --skip-missing", ["no data for any of the tasks"]),
        ("nowhere --data-dir data", ["nowhere is not a run folder"]),
        ("bell bell --data-dir data", ["given twice"]),
        ("random --data-dir data", ["called random already", "--no-baselines"]),
        ("bell sigma --data-dir data", ["sigma is a sigma-ARM"]),
        ("bell --data-dir data --checkpoint 99", ["99"]),
        ("bell --out data/piqa.jsonl", ["is a file; give a folder"]),
    ],
)
def test_mistakes_are_told_before_anything_is_asked(
    runs: Path, command: Command, monkeypatch: pytest.MonkeyPatch, options: str, words: list[str]
) -> None:
    def never(*_: Any, **__: Any) -> None:
        raise AssertionError("nothing may be asked")

    monkeypatch.setattr(RunContestant, "score", never)
    monkeypatch.setattr(RunContestant, "write", never)
    out_option = "" if "--out" in options else "--out refused"
    code, out, err = command(f"{options} {out_option}")
    assert (code, out) == (2, "")
    (line,) = [line for line in err.splitlines() if not line.startswith("note: ")]
    assert line.startswith("error: ")
    for word in words:
        assert word in line
    assert not (runs / "refused").exists()


def test_a_run_may_be_called_random_without_baselines(runs: Path, command: Command) -> None:
    options = "random --data-dir data --tasks piqa --limit 1 --seeds 1 --no-baselines --out r"
    assert command(options)[0] == 0
    assert [m["name"] for m in read(runs / "r")["models"]] == ["random"]


def test_the_tasks_are_those_of_the_paper() -> None:
    assert TASK_NAMES == tuple(questions.TASKS) == TASKS


def test_help_names_every_option_and_its_examples_parse(command: Command) -> None:
    code, out, err = command("--help")
    assert (code, err) == (0, "")
    for word in ("--data-dir", "--skip-missing", "--no-baselines", "--ending", "Table 4"):
        assert word in out
    lines = [line.strip(" │").removeprefix("Examples: ") for line in out.splitlines()]
    examples = [line for line in lines if line.startswith("bellmask evaluate ")]
    assert len(examples) == 3
    for line in examples:
        args = [a for a in shlex.split(line)[2:] if a not in ("--suite", "paper")]
        parse_command(PaperOptions, args, command="evaluate")
