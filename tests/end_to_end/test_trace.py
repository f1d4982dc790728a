"""From a run to its trace to the page and the strip, as a user does it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from bellmask.assemble import train_run
from bellmask.cli import run_command
from bellmask.config import RunConfig
from bellmask.generate.trace import load_trace

Bellmask = Callable[..., tuple[str, str]]


@pytest.fixture
def bellmask(capsys: pytest.CaptureFixture[str]) -> Bellmask:
    """A command line's (output, errors), after a look at its exit code."""

    def call(*args: str | Path, code: int = 0) -> tuple[str, str]:
        found = run_command([str(arg) for arg in args])
        out, err = capsys.readouterr()
        assert found == code, f"exit {found}\n{out}\n{err}"
        return out, err

    return call


@pytest.fixture(scope="module")
def run(small_config: Callable[..., RunConfig], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "run"
    train_run(small_config("--train.steps", "4"), folder, is_quiet=True)
    return folder


def test_watch_trace_and_report(bellmask: Bellmask, run: Path, tmp_path: Path) -> None:
    file = tmp_path / "four.json"
    command = f"generate {run} --num 3 --batch-size 2 --steps 8 --format jsonl".split()
    plain, _ = bellmask(*command, "--prefix", "the ")
    out, err = bellmask(*command, "--prefix", "the ", "--watch", "--trace", str(file))
    assert out == plain, "watching changes nothing"
    assert "step 8 of 8" in err
    assert "\x1b" not in err
    trace = load_trace(file)
    rows = [json.loads(line) for line in out.splitlines()]
    assert [sample.text for sample in trace.samples] == [row["text"] for row in rows]
    for sample, row in zip(trace.samples, rows, strict=True):
        assert "".join(text or "" for text in sample.tokens) == "the "
        assert sample.num_steps == 8
        for text, token in zip(sample.at(8), row["ids"], strict=True):
            if token < 128:
                assert text == chr(token)
    made, _ = bellmask("report", "trace", file, "--out", tmp_path / "new", "--frames", "3")
    names = ["four.html", "four.png", "four.svg"]
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == names
    assert all(name in made for name in names)
    page = (tmp_path / "new" / "four.html").read_text()
    assert page.startswith("<!doctype html>")


def test_mistakes_are_told_and_nothing_is_written(
    bellmask: Bellmask, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        run_command(["report", "trace", "--help"])
    assert stop.value.code == 0
    assert "--sample 2 --frames 8" in capsys.readouterr().out
    out = ("--out", tmp_path / "new")
    _, err = bellmask("report", "trace", tmp_path / "none.json", *out, code=2)
    assert err.startswith("error: there is no trace")
    file = tmp_path / "trace.json"
    file.write_text('{"version": 9}')
    _, err = bellmask("report", "trace", file, *out, code=2)
    assert "version 9" in err
    sample = {"given": [False], "tokens": [None], "steps": [], "text": "", "num_steps": 1}
    trace = {"version": 1, "title": "", "settings": {}, "num_calls": 0, "samples": [sample]}
    file.write_text(json.dumps(trace))
    for options, message in (("--sample 1", "--sample must be"), ("--frames 1", "--frames must")):
        _, err = bellmask("report", "trace", file, *out, *options.split(), code=2)
        assert message in err
    assert not (tmp_path / "new").exists()
    _, err = bellmask("report", "trace", file, "--out", file, code=2)
    assert "is a file" in err
    bellmask("report", "trace", file, *out)
    assert len(list((tmp_path / "new").iterdir())) == 3
