"""``bellmask lm-eval`` as a person types it, and lm-eval's own command behind ``--``."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bellmask.cli import COMMANDS, run_command
from bellmask.commands.harness import run as lm_eval_command
from bellmask.run import Run

pytest.importorskip("lm_eval")

pytestmark = pytest.mark.usefixtures("short_report")
Command = Callable[[str], tuple[int, str, str]]


@pytest.fixture
def command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Command:
    """``command("RUN --tasks piqa")`` in a folder with data of PIQA: (code, stdout, stderr)."""
    record = {"goal": "sit", "sol1": "on a mat", "sol2": "in a red tree", "label": 0}
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "piqa.jsonl").write_text(json.dumps(record) + "\n" + json.dumps(record))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setitem(COMMANDS, "lm-eval", lm_eval_command)

    def run(text: str) -> tuple[int, str, str]:
        capsys.readouterr()
        try:
            code = run_command(["lm-eval", *shlex.split(text)])
        except SystemExit as stop:
            code = int(stop.code or 0)
        return (code, *capsys.readouterr())

    return run


def test_two_runs_on_a_task(command: Command, masked: Run, arm: Run, tmp_path: Path) -> None:
    runs = f"{masked.folder} {arm.folder}"
    code, out, _ = command(f"{runs} --tasks piqa --data-dir data --draws 3 --out scores")
    assert code == 0
    found = json.loads((tmp_path / "scores" / "results.json").read_text(encoding="utf-8"))
    assert list(found["runs"]) == ["masked", "arm"]
    assert (found["options"]["draws"], found["data"], found["notes"]) == (3, "local", {})
    for name in ("masked", "arm"):
        one = found["runs"][name]
        assert one["results"]["piqa"]["acc,none"] in (0, 1), "the same question twice"
        assert one["results"]["piqa"]["acc_stderr,none"] == 0
        assert one["n-samples"]["piqa"]["effective"] == 2
        assert one["noise"]["piqa"]["requests"] == 4
    assert found["runs"]["arm"]["noise"]["piqa"]["exact_share"] == 1
    assert found["runs"]["masked"]["noise"]["piqa"]["exact_share"] == 0
    assert found["runs"]["masked"]["noise"]["piqa"]["median_error"] > 0
    accuracy = found["runs"]["arm"]["results"]["piqa"]["acc,none"]
    assert f"{accuracy:.4f} ± 0.0000" in out
    assert "median error (nats)" in out
    assert "100%" in out


def test_brackets_in_names_are_letters(
    command: Command, masked: Run, arm: Run, tmp_path: Path
) -> None:
    names = "[red]x", "[bold]y"
    for name, run in zip(names, (masked, arm), strict=True):
        (tmp_path / name).symlink_to(run.folder)
    runs = " ".join(shlex.quote(name) for name in names)
    code, out, err = command(f"{runs} --tasks piqa --data-dir data --draws 2 --out scores")
    assert code == 0, err
    head = next(line for line in out.splitlines() if "metric" in line)
    assert all(name in head for name in names)
    assert len([line for line in out.splitlines() if "│ [red]x " in line]) == 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "needs a run folder"),
        ("RUN --tasks pqa", "did you mean 'piqa'"),
        ("RUN --tasks piqa,piqa", "twice"),
        ("RUN --limit 0", "--limit"),
        ("RUN --tasks lambada", "lambada.jsonl"),
        ("RUN --data-dir nowhere", "no folder nowhere"),
        ("RUN --stock --data-dir data", "--stock"),
        ("RUN --tasks piqa --data-dir data --draws 0", "at least 1"),
        ("RUN --draws x", "draws"),
        ("nowhere --tasks piqa --data-dir data", "nowhere"),
        ("RUN --out data/piqa.jsonl", "is a file"),
        ("--write-tasks tasks RUN", "only writes"),
    ],
)
def test_what_cannot_work_is_told(text: str, message: str, command: Command, masked: Run) -> None:
    code, _, err = command(text.replace("RUN", str(masked.folder)))
    assert code == 2
    assert message in err
    assert "Traceback" not in err
    assert not (masked.folder / "lm-eval").exists()


def test_help_and_a_missing_package(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    code, out, _ = command("--help")
    assert code == 0
    assert "bellmask lm-eval -- --model bellmask" in out
    assert "--longest-exact" in out
    import bellmask.downstream

    monkeypatch.setitem(sys.modules, "lm_eval", None)
    monkeypatch.delitem(sys.modules, "bellmask.downstream.harness", raising=False)
    monkeypatch.delattr(bellmask.downstream, "harness", raising=False)
    for text in ("RUN --tasks piqa", "-- ls tasks"):
        code, _, err = command(text)
        assert code == 2
        assert "pip install 'bellmask[eval]'" in err


def test_lm_evals_own_command(
    command: Command, masked: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the tasks that we write; those of lm-eval take it 15 seconds to find."""
    from lm_eval.tasks import manager

    begin = manager.TaskManager.__init__

    def quickly(self: Any, *args: Any, **options: Any) -> None:
        begin(self, *args, **{**options, "include_defaults": False})

    monkeypatch.setattr(manager.TaskManager, "__init__", quickly)
    code, out, _ = command("--write-tasks tasks --tasks piqa --data-dir data")
    assert code == 0
    assert "piqa" in out
    own = f"--model bellmask --model_args run={masked.folder},draws=3 --tasks piqa"
    before = list(sys.argv)
    code, out, _ = command(f"-- {own} --include_path tasks --output_path results")
    assert code == 0
    assert "piqa" in out
    assert sys.argv == before
    (path,) = (tmp_path / "results").rglob("results_*.json")
    config = json.loads(path.read_text(encoding="utf-8"))["config"]
    assert config["noise"]["piqa"]["requests"] == 4
    assert config["step"] == masked.step
    code, _, err = command(f"-- {own.replace('draws', 'drws')} --include_path tasks")
    assert code == 2
    assert "did you mean 'draws'" in err
    assert command("-- --no-such-option")[0] == 2


@pytest.mark.long
def test_lm_evals_own_command_in_a_process(command: Command, masked: Run, tmp_path: Path) -> None:
    assert command("--write-tasks tasks --tasks piqa --data-dir data")[0] == 0
    start = "import sys; from bellmask.commands.harness import run; sys.exit(run(sys.argv[1:]))"
    args = f"-- --model bellmask --model_args run={masked.folder} --tasks piqa"
    done = subprocess.run(
        [sys.executable, "-c", start, *args.split(), "--include_path", "tasks"],
        cwd=tmp_path, env={**os.environ, "HF_HUB_OFFLINE": "1"}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "piqa" in done.stdout


@pytest.mark.long
def test_the_other_models_of_lm_eval_stay_known() -> None:
    """In a process that has imported nothing else."""
    start = "import bellmask.downstream.harness; from lm_eval.api.registry import get_model"
    code = f"{start}; print(get_model('dummy').__name__, get_model('bellmask').__name__)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.split() == ["DummyLM", "BellmaskLM"], done.stderr
