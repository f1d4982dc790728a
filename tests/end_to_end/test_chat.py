"""Talking to a run: in a terminal, through a pipe, and in batches of prompts."""

from __future__ import annotations

import io
import json
import re
import signal
from pathlib import Path

import pytest
from commands import refuses, succeeds
from terminal import Terminal
from tuned_runs import tuned

from bellmask.utils.console import visible

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def runs(zoo, tmp_path_factory):
    """A run fine-tuned on prompts, one on conversations, one on text alone."""
    folder = tmp_path_factory.mktemp("runs")
    kinds = {"single": False, "turns": True}
    made = {name: tuned(zoo / "bell", folder / name, kind) for name, kind in kinds.items()}
    return {**made, "plain": zoo / "bell"}


@pytest.fixture
def chat(monkeypatch):
    """``chat(run, *options, lines="a\\nb\\n")``: what a pipe into it gives."""

    def call(*args, lines="", run=succeeds, **more):
        given = lines.encode() if isinstance(lines, str) else lines
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(given), "utf-8"))
        return run("chat", *args, **more)

    return call


def words(text):
    """Without control sequences."""
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text).replace("\r", "")


def test_a_chat_in_a_terminal(runs, warm):
    """Live, one command, an answer that is stopped, and the end by Ctrl-D."""
    with Terminal(warm, "chat", runs["single"], "--length", 30, "--fps", 30) as chat:
        assert "fine-tuned on single prompts" in words(chat.until("> "))
        chat.type("Say 5\n")
        shown = chat.until("tokens/s")
        assert "░" * 30 in words(shown), "all masked at first"
        assert "\x1b[1A" in shown, "the view is redrawn"
        assert re.search(r"64 steps, \d+ calls, \d+ tokens, \d+\.\d\d s", words(shown))
        chat.until("> ")
        chat.type("/steps nine\n")
        assert "'nine'" in words(chat.until("> "))
        chat.type("/steps 900\n")
        chat.until(r"\x1b\[2msteps 900.*> ")
        chat.type("Say 6\n")
        chat.until("step 1")
        chat.process.signal(signal.SIGINT)
        assert "stopped" in words(chat.until("> "))
        chat.type("\x04")
        assert chat.process.wait(60) == 0


def test_a_pipe_and_a_batch_give_the_same_answers(runs, chat, tmp_path):
    """An answer per line, an empty one for empty ones, whatever bytes there are."""
    lines = "Say 5\n\nSay something longer than that\nSay 5\n"
    said = chat(runs["single"], "--seed", 3, lines=lines).out.splitlines()
    (tmp_path / "asked.txt").write_text(lines)
    asked = ["generate", runs["single"], "--prompts", tmp_path / "asked.txt", "--seed", 3]
    rows = [json.loads(line) for line in succeeds(*asked, "--format", "jsonl").out.splitlines()]
    assert said.pop(1) == ""
    assert said == [visible(row["response"]) for row in rows]
    assert rows[0]["response"] != rows[2]["response"], "other numbers, other noise"
    said = chat(runs["plain"], "--length", 8, lines=b"ab\n \r\nc\xff\x1b[31md")
    assert [bool(line) for line in said.out.splitlines()] == [True, False, True]
    assert "not fine-tuned" in said.err
    assert not re.search(r"[\x00-\x09\x0b-\x1f]", said.out + said.err), "no control codes"


def test_conversations_are_remembered_where_they_were_trained(runs, chat):
    many = "tell me all that you know, please\n" * 3
    brief = [runs["turns"], "--length", 16, "--steps", 4]
    said = chat(*brief, lines=many)
    assert "fine-tuned on conversations" in said.err
    assert said.err.count("its oldest tokens were dropped") == 2, "all but the first question"
    for option, lines in ((["--memory", "off"], many), ([], many.replace("\n", "\n/reset\n"))):
        assert "dropped" not in chat(*brief, *option, lines=lines).err


def test_commands_change_what_follows(runs, chat):
    ask, single, turns = "Say 5\n", [runs["single"], "--steps", 4], [runs["turns"], "--steps", 4]
    first = chat(runs["single"], lines=f"/length 12\n/steps 3\n{ask}").out
    options = ["--length", 12, "--steps", 3, "--temperature", 1]
    assert chat(runs["single"], *options, lines=ask).out == first
    two = chat(*single, lines=f"{ask}/retry\n/quit\n{ask}").out
    assert len(set(two.splitlines())) == 2, "another answer, and none after the end"
    cold = chat(runs["single"], "--rule", "first_hitting", lines=f"/temperature 0\n{ask}{ask}").out
    assert len(cold.splitlines()) == 2
    spoken = [chat(*turns, lines=f"{one}{ask}").out for one in ("/system Hm\n", "")]
    assert spoken[0] != spoken[1]
    assert chat(*turns, "--system", "Hm", lines=ask).out == spoken[0]
    assert "/retry" in chat(*single, lines="/help\n").err
    assert len(chat(*single, lines="/etc/hosts\n /reset\n").out.splitlines()) == 2, "not commands"


@pytest.mark.parametrize(
    ("args", "lines", "names"),
    [
        ("chat {single}", "/stps 3\n", "'/stps'; did you mean '/steps'"),
        ("chat {single}", "/steps\n", "/steps"),
        ("chat {single}", "/reset now\n", "/reset takes no argument"),
        ("chat {single}", "/length 96\n", "96"),
        ("chat {single}", "/temperature hot\n", "'hot'"),
        ("chat {single} --fps -1", "", "--fps"),
        ("generate {single} --prompt a --prefix b", "", "--prefix and --prompt"),
        ("generate {single} --prompts none.txt", "", "none.txt"),
        ("generate {single} {plain} --side-by-side --prompts {file}", "", "not fine-tuned"),
        ("generate {plain} --prompts {file}", "", "'id'"),
    ],
)
def test_mistakes_get_one_message(args, lines, names, runs, chat, tmp_path):
    (tmp_path / "p.jsonl").write_text('{"id": 1, "prompt": "a"}\n')
    command, *rest = args.format(file=tmp_path / "p.jsonl", **runs).split()
    if command == "chat":
        chat(*rest, lines=lines, run=refuses, names=names)
    else:
        refuses(command, *rest, names=names)


def test_prompts_in_answers_out(runs, tmp_path):
    """Order, own keys, numbers; the same in any batch, watched and traced."""
    asked = [
        {"id": 7, "prompt": "Say 5"},
        {"messages": [{"role": "system", "content": "é"}, {"role": "user", "content": "b"}]},
        {"prompt": "x" * 200, "note": [1, None]},
        {"id": "\ud800", "prompt": "Say 5"},
    ]
    (tmp_path / "q.jsonl").write_text("\n".join(map(json.dumps, asked)))
    args = ["generate", runs["single"], "--prompts", tmp_path / "q.jsonl", "--num", 2]
    args += ["--format", "jsonl", "--steps", 6]
    said = succeeds(*args)
    rows = [json.loads(line) for line in said.out.splitlines()]
    assert [row["sample"] for row in rows] == list(range(8))
    for row, given in zip(rows, [one for one in asked[:3] for _ in range(2)], strict=False):
        assert list(row)[: len(given)] == list(given)
        assert {key: row[key] for key in given} == given
        assert set(row) - set(given) == {"sample", "response", "num_tokens", "prompt_cut"}
        assert 0 <= row["num_tokens"] <= 8
    assert [row["prompt_cut"] for row in rows] == [False] * 4 + [True] * 2 + [False] * 2
    assert "1 of 4 prompts did not fit" in said.err
    assert "it has not seen conversations" in said.err
    assert rows[6]["id"] == "?", "half of a surrogate pair"
    trace, target = tmp_path / "trace.json", tmp_path / "out.jsonl"
    more = ["--batch-size", 1, "--watch", "--fps", 0, "--trace", trace, "--out", target]
    assert succeeds(*args, *more).out == ""
    assert target.read_text() == said.out
    texts = [sample["text"] for sample in json.loads(trace.read_text())["samples"]]
    assert texts == [row["response"] for row in rows]


def test_answers_side_by_side(runs, tmp_path):
    """The example file, which has the four kinds of prompts of App. E."""
    file = ROOT / "examples" / "prompts.jsonl"
    args = ["generate", runs["single"], runs["turns"], "--prompts", file, "--side-by-side"]
    said = succeeds(*args, "--out", tmp_path / "page", "--steps", 2)
    assert "What is your opinion" in said.out
    page = (tmp_path / "page" / "comparison.md").read_text()
    assert page.count("**single**") == page.count("**turns**") == 4
    said = succeeds("generate", runs["plain"], "--prompt", "a", "--num", 2, "--length", 4)
    assert said.out.count("\n--------\n") == 1
    assert "not fine-tuned on prompts" in said.err
