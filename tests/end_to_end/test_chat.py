"""Talking to a run: in a terminal, through a pipe, and in batches of prompts."""

from __future__ import annotations

import io
import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from bellmask.assemble import train_run
from bellmask.cli import run_command
from bellmask.config import RunConfig
from bellmask.report.tokens import visible

ROOT = Path(__file__).parents[2]
Said = Callable[..., tuple[str, str]]


def examples(path: Path, is_conversation: bool) -> Path:
    def record(n: int) -> dict[str, object]:
        if not is_conversation:
            return {"prompt": f"Say {n}", "response": f"{n} {n}"}
        said = [("user", f"Say {n}"), ("assistant", f"{n} {n}"), ("user", "Go"), ("assistant", "a")]
        return {"messages": [{"role": role, "content": text} for role, text in said]}

    path.write_text("\n".join(json.dumps(record(n)) for n in range(64)))
    return path


@pytest.fixture(scope="module")
def runs(
    small_config: Callable[..., RunConfig], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, str]:
    """A run fine-tuned on prompts, one on conversations, one on text alone."""
    folder = tmp_path_factory.mktemp("runs")
    wide = ["--data.block-length", "96", "--train.steps", "4"]
    made = {"plain": small_config("--train.steps", "2")}
    for name in ("single", "turns"):
        file = examples(folder / f"{name}.jsonl", name == "turns")
        made[name] = small_config("--sft.train", str(file), "--sft.round-to", "8", *wide)
    for name, config in made.items():
        train_run(config, folder / name, is_quiet=True)
    return {name: str(folder / name) for name in made}


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Said:
    """Run a command in this process with lines on standard input; (stdout, stderr)."""

    def call(*args: str, lines: str | bytes = "", code: int = 0) -> tuple[str, str]:
        given = lines.encode() if isinstance(lines, str) else lines
        capsys.readouterr()
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(given), "utf-8"))
        assert run_command([*args]) == code
        out, err = capsys.readouterr()
        assert "Traceback" not in err
        return out, err

    return call


# --- a terminal --------------------------------------------------------------------------------


class Terminal:
    """A command in a terminal of its own; ended with the block, if not before."""

    def __init__(self, *args: str) -> None:
        self.screen, theirs = pty.openpty()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "bellmask", *args],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            start_new_session=True,
            env={**os.environ, "TERM": "xterm", "OMP_NUM_THREADS": "1", "COLUMNS": "80"},
        )
        os.close(theirs)
        self.seen = ""

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *error: object) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self.screen)

    def until(self, pattern: str, seconds: float = 60) -> str:
        """What appears up to a pattern."""
        end = time.monotonic() + seconds
        while not (found := re.search(pattern, self.seen, re.DOTALL)):
            assert time.monotonic() < end, f"no {pattern!r} in {self.seen!r}"
            if select.select([self.screen], [], [], 0.1)[0]:
                self.seen += os.read(self.screen, 65536).decode(errors="replace")
        before, self.seen = self.seen[: found.end()], self.seen[found.end() :]
        return before

    def type(self, text: str) -> None:
        os.write(self.screen, text.encode())


def words(text: str) -> str:
    """Without control sequences."""
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text).replace("\r", "")


def test_a_chat_in_a_terminal(runs: dict[str, str]) -> None:
    """Live, one command, an answer that is stopped, and the end by Ctrl-D."""
    with Terminal("chat", runs["single"], "--length", "30", "--fps", "30") as chat:
        intro = words(chat.until("> "))
        assert "answers of up to 30 tokens in 64 steps" in intro
        assert "fine-tuned on single prompts" in intro
        assert "each line is asked alone" in intro
        chat.type("Say 5\n")
        shown = chat.until(r"tokens/s")
        assert "░" * 30 in words(shown), "all masked at first"
        assert "\x1b[1A" in shown, "the view is redrawn"
        numbers = r"64 steps, \d+ calls, \d+\.\d\d s, \d+ tokens, \d+ tokens/s"
        assert re.search(numbers, words(shown))
        chat.until("> ")
        chat.type("/steps nine\n")
        assert "error: 'nine' is not a whole number" in words(chat.until("> "))
        chat.type("/steps 900\n")
        chat.until("900 steps.*> ")
        chat.type("Say 6\n")
        chat.until("step 1")
        chat.process.send_signal(signal.SIGINT)
        assert "stopped" in words(chat.until("> "))
        chat.type("\x04")
        assert chat.process.wait(60) == 0


# --- a pipe ------------------------------------------------------------------------------------


def test_lines_of_a_pipe_are_asked(runs: dict[str, str], said: Said) -> None:
    """An answer per line, an empty one for empty ones, whatever bytes there are."""
    out, err = said("chat", runs["plain"], "--length", "8", lines=b"ab\n\n \r\nc\xff\x1b[31md")
    assert [bool(line) for line in out.splitlines()] == [True, False, False, True]
    assert "never fine-tuned on prompts: it just continues your text" in err
    assert not re.search(r"[\x00-\x09\x0b-\x1f]", out + err), "no control codes"


def test_a_pipe_and_a_batch_give_the_same_answers(
    runs: dict[str, str], said: Said, tmp_path: Path
) -> None:
    lines = "Say 5\nSay something longer than that\nSay 5\n"
    out, _ = said("chat", runs["single"], "--seed", "3", lines=lines)
    (tmp_path / "asked.txt").write_text(lines)
    asked = ["generate", runs["single"], "--prompts", str(tmp_path / "asked.txt"), "--seed", "3"]
    rows = [json.loads(line) for line in said(*asked, "--format", "jsonl")[0].splitlines()]
    assert len(out.splitlines()) == 3
    assert out.splitlines() == [visible(row["response"]) for row in rows]
    assert rows[0]["response"] != rows[2]["response"], "other numbers, other noise"


def test_conversations_are_remembered_where_they_were_trained(
    runs: dict[str, str], said: Said
) -> None:
    _, err = said("chat", runs["turns"], lines="a\n")
    assert "fine-tuned on conversations (template auto)" in err
    assert "what was said before is part of the prompt" in err
    many = "tell me all that you know, please\n" * 3
    _, err = said("chat", runs["turns"], "--length", "16", lines=many)
    assert err.count("its oldest tokens were dropped") == 2, "all but the first question"
    for option, lines in ((["--memory", "off"], many), ([], many.replace("\n", "\n/reset\n"))):
        _, err = said("chat", runs["turns"], "--length", "16", *option, lines=lines)
        assert "dropped" not in err


def test_commands_change_what_follows(runs: dict[str, str], said: Said) -> None:
    ask = "Say 5\n"
    first, _ = said("chat", runs["single"], lines=f"/length 12\n/steps 3\n{ask}")
    options = ["--length", "12", "--steps", "3", "--temperature", "1"]
    assert said("chat", runs["single"], *options, lines=ask)[0] == first
    two, _ = said("chat", runs["single"], lines=f"{ask}/retry\n/quit\n{ask}")
    assert len(set(two.splitlines())) == 2, "another answer, and none after the end"
    cold = f"/temperature 0\n{ask}{ask}"
    out, _ = said("chat", runs["single"], "--rule", "first_hitting", lines=cold)
    assert len(out.splitlines()) == 2
    _, err = said("chat", runs["single"], lines="/help\n")
    for name in "reset retry steps length temperature system help quit".split():
        assert f"/{name}" in err
    spoken = [said("chat", runs["turns"], lines=f"{one}{ask}")[0] for one in ("/system Hm\n", "")]
    assert spoken[0] != spoken[1]
    assert said("chat", runs["turns"], "--system", "Hm", lines=ask)[0] == spoken[0]
    out, _ = said("chat", runs["single"], lines="/etc/hosts\n /reset\n")
    assert len(out.splitlines()) == 2, "not commands"


@pytest.mark.parametrize(
    ("args", "lines", "message"),
    [
        ("chat {single}", "/stps 3\n", "unknown command '/stps'; did you mean '/steps'"),
        ("chat {single}", "/steps\n", "/steps needs N: /steps 32"),
        ("chat {single}", "/reset all\n", "/reset takes nothing"),
        ("chat {single}", "/retry\n", "nothing has been asked yet"),
        ("chat {single}", "/length 96\n", "1 to 95 tokens, got 96"),
        ("chat {single}", "/temperature hot\n", "'hot' is not a number"),
        ("chat {single}", "/temperature -1\n", "must not be negative"),
        ("chat {single} --length 0", "", "1 to 95 tokens, got 0"),
        ("chat {single} --fps -1", "", "--fps must be 0"),
        ("chat {single} --steps 0", "", "--steps must be from 1"),
        ("chat", "", "RUN"),
        ("chat nowhere", "", "there is no folder nowhere"),
        ("generate {single} --prompt a --prefix b", "", "--prefix and --prompt do not go together"),
        ("generate {single} --prompt a --prompts b", "", "--prompt and --prompts do not go"),
        ("generate {single} --prompts none.txt", "", "there is no file of prompts none.txt"),
        ("generate {single} --prompt a --length 96", "", "1 to 95 tokens"),
        ("generate {single} {plain} --side-by-side --prompts {file}", "", "plain: not fine-tuned"),
        ("generate {plain} --prompts {file}", "", "'id' is not known"),
    ],
)
def test_mistakes_get_one_message(
    args: str, lines: str, message: str, runs: dict[str, str], said: Said, tmp_path: Path
) -> None:
    (tmp_path / "p.jsonl").write_text('{"id": 1, "prompt": "a"}\n')
    filled = args.format(file=tmp_path / "p.jsonl", **runs)
    out, err = said(*filled.split(), lines=lines, code=2)
    assert message in " ".join(err.split())
    assert err.count("error:") == 1
    assert out == ""


# --- batches -----------------------------------------------------------------------------------


def test_prompts_in_answers_out(runs: dict[str, str], said: Said, tmp_path: Path) -> None:
    """Order, own keys, numbers; the same in any batch, watched and traced."""
    asked = [
        {"id": 7, "prompt": "Say 5"},
        {"messages": [{"role": "system", "content": "é"}, {"role": "user", "content": "b"}]},
        {"prompt": "x" * 200, "note": [1, None]},
        {"id": "\ud800", "prompt": "Say 5"},
    ]
    (tmp_path / "q.jsonl").write_text("\n".join(map(json.dumps, asked)))
    args = ["generate", runs["single"], "--prompts", str(tmp_path / "q.jsonl"), "--num", "2"]
    args += ["--format", "jsonl", "--steps", "6"]
    out, err = said(*args)
    rows = [json.loads(line) for line in out.splitlines()]
    assert [row["sample"] for row in rows] == list(range(8))
    for row, given in zip(rows, [one for one in asked[:3] for _ in range(2)], strict=False):
        assert list(row)[: len(given)] == list(given)
        assert {key: row[key] for key in given} == given
        assert set(row) - set(given) == {"sample", "response", "num_tokens", "prompt_cut"}
        assert 0 <= row["num_tokens"] <= 8
    assert [row["prompt_cut"] for row in rows] == [False] * 4 + [True] * 2 + [False] * 2
    assert "1 of 4 prompts did not fit" in err
    assert "it has not seen conversations" in err
    assert rows[6]["id"] == "?", "half of a surrogate pair"
    for more in (["--batch-size", "1"], ["--watch", "--fps", "0"]):
        assert said(*args, *more)[0] == out
    trace, target = tmp_path / "trace.json", tmp_path / "out.jsonl"
    assert said(*args, "--trace", str(trace), "--output", str(target))[0] == ""
    assert target.read_text() == out
    texts = [sample["text"] for sample in json.loads(trace.read_text())["samples"]]
    assert texts == [row["response"] for row in rows]


def test_one_prompt(runs: dict[str, str], said: Said) -> None:
    args = ["generate", runs["single"], "--prompt", "Say 5", "--num", "2"]
    out, err = said(*args)
    assert "2 answers" in err
    rows = [json.loads(line) for line in said(*args, "--format", "jsonl")[0].splitlines()]
    assert out == "\n--------\n".join(row["response"] for row in rows) + "\n"
    assert {row["prompt"] for row in rows} == {"Say 5"}
    literal, _ = said("generate", runs["single"], "--prompt", "Say\\n5", "--format", "jsonl")
    assert json.loads(literal)["prompt"] == "Say\\n5", "as typed"
    _, err = said("generate", runs["plain"], "--prompt", "ab", "--length", "6")
    assert "not fine-tuned on prompts: it continues them as text" in err


def test_answers_side_by_side(runs: dict[str, str], said: Said, tmp_path: Path) -> None:
    """The example file, which has the four kinds of prompts of App. E."""
    file = ROOT / "examples" / "prompts.jsonl"
    prompts = [json.loads(line) for line in file.read_text().splitlines()]
    assert [prompt["id"] for prompt in prompts] == ["salary", "feedback", "method", "opinion"]
    args = ["generate", runs["single"], runs["turns"], "--prompts", str(file), "--side-by-side"]
    out, _ = said(*args, "--output", str(tmp_path / "page"), "--steps", "2")
    assert "What is your opinion" in out
    page = (tmp_path / "page" / "comparison.md").read_text()
    assert page.count("**single**") == page.count("**turns**") == 4


def test_beginnings_are_still_continued_by_other_runs(
    runs: dict[str, str], said: Said, tmp_path: Path
) -> None:
    (tmp_path / "p.txt").write_text("ab\n")
    asked = ["generate", runs["plain"], "--prompts", str(tmp_path / "p.txt"), "--format", "jsonl"]
    row = json.loads(said(*asked)[0])
    assert set(row) == {"sample", "prompt", "text", "ids"}
    assert row["text"].startswith("ab")
