"""Prompts with responses: from files, the hub, ShareGPT, toy tasks and stories."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path

import pytest

from bellmask.config.options import SftOptions
from bellmask.data.examples import (
    clean_conversation,
    open_examples,
    questions,
)
from bellmask.utils.errors import UserError


def opened(source):
    return open_examples(str(source), SftOptions(train=str(source)), Path("unused"))


def pairs(source):
    found = [example for _, example in source.read(Counter())]
    return [(example.prompt_messages[-1].text, example.response) for example in found]


def write_lines(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


# --- files and the hub -----------------------------------------------------------------------

ROWS = [
    {"prompt": "p", "response": "r"},
    {"instruction": "i", "input": "x", "output": "o"},
    {"instruction": "i", "input": "", "output": "o"},
    {"question": "q?", "answer": "a", "id": 7},
    {"messages": [{"role": "user", "content": "u"}, {"role": "assistant", "content": "v"}]},
    {"conversations": [{"from": "human", "value": "h"}, {"from": "gpt", "value": "g"}]},
]
FOUND = [("p", "r"), ("i\n\nx", "o"), ("i", "o"), ("q?", "a"), ("u", "v"), ("h", "g")]


def test_all_column_names_are_known_documents_are_records_and_drops_are_counted(tmp_path):
    chat = [{"role": r, "content": c} for r, c in (("user", "1"), ("assistant", "2")) * 2]
    odd = [{"prompt": "p", "response": " "}, {"messages": chat}, {"messages": []}]
    source = opened(write_lines(tmp_path / "a.jsonl", [*ROWS, *odd]))
    assert pairs(source) == pairs(source) == [*FOUND, ("1", "2"), ("1", "2")]
    counts = Counter()
    found = list(source.read(counts))
    assert [number for number, _ in found] == [*range(6), 7, 7]
    assert [example.is_conversation for _, example in found] == [False] * 4 + [True] * 4
    assert counts == {"left out: no response": 1, "left out: nobody answers": 1}


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("a.json", '{"text": "a", "n": 1}', "record 1.*text, n"),
        ("a.json", '{"prompt": 3, "response": "a"}', "record 1.*'prompt'"),
        ("a.json", '{"messages": "hello"}', "'messages'"),
        ("a.json", "[1]", "record 1"),
        ("a.json", '["a"', r"a\.json"),
        ("taks", "", "'taks'.*tasks"),
        ("toy:copi", "", "'copy'"),
        ("toy:copy:13", "", "1 to 12"),
        ("toy:sums:0", "", "1 to 9"),
        ("stories:", "", "stories:"),
        ("no/such.jsonl", "", "no/such.jsonl"),
        (__file__, "", r"\.jsonl"),
    ],
)
def test_what_is_no_example_is_named(tmp_path, monkeypatch, name, text, words):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(UserError, match=words):
        pairs(opened(name))


# --- ShareGPT --------------------------------------------------------------------------------


def talk(*said, **more):
    sides = ("human", "gpt") * len(said)
    return {"conversations": [{"from": s, "value": v} for s, v in zip(sides, said)], **more}


def test_parts_of_a_conversation_are_one_document(tmp_path):
    rows = [
        talk("Hi 1 / 1", "<div>Hello &amp; welcome</div>", id="a_0"),
        talk("Code? 1 / 1", "```pythonCopy codex = 1\n```", id="b"),
        talk("More?", "Yes<br>no", id="a_2"),
        talk("alone", id="c"),
        talk("1", "2", "3", "4"),
        talk("1", "2"),
    ]
    found = list(opened(f"sharegpt:{write_lines(tmp_path / 'a.jsonl', rows)}").read(Counter()))
    answers = ["Hello & welcome", "```python\nx = 1\n```", "Yes\nno", "2", "4", "2"]
    assert [(n, e.response) for n, e in found] == list(zip([0, 1, 0, 3, 3, 4], answers))
    assert all(example.is_conversation for _, example in found)
    odd = {"conversations": [{"from": "human", "value": None}, {"from": "gpt"}]}
    for record in ({}, {"conversations": None}, {"conversations": ["a"]}, odd):
        assert clean_conversation(record, Counter()) == ()


# What is cleaned, put in order and asked otherwise is in ``golden.json``.
FIRST, JOINED = "turns before the first question", "turns joined to the one before"


def test_real_conversations(shared_file):
    """Counted in the raw file: 1096 answers; 90 conversations begin with one; 2 answers follow an
    empty question and are joined to the one before; one human writes twice.
    """
    counts = Counter()
    path = shared_file("sharegpt/sharegpt_v3_sample.jsonl")
    found = list(opened(f"sharegpt:{path}").read(counts))
    assert len(found) == 1096 - 90 - 2
    assert counts == {"conversations": 300, FIRST: 90, "turns empty": 2, JOINED: 3}
    for _, example in found:
        assert example.response.strip()
        roles = [message.role for message in example.messages]
        assert roles == ["user", "assistant"] * (len(roles) // 2)


# --- toys and stories ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "count"),
    [("toy:copy", 20_000), ("toy:sums", 8_100), ("toy:sums:1", 100), ("toy:reverse:12", 20_000)],
)
def test_toys_are_right_and_never_repeat_a_prompt(name, count):
    found = pairs(opened(name))
    assert len({prompt for prompt, _ in found}) == len(found) == count
    size = int(name.split(":")[2]) if name.count(":") == 2 else None
    for prompt, response in found:
        kind, text = re.fullmatch(r"(Copy|Reverse|Sum): (.*)\nAnswer:", prompt).groups()
        signs = text.replace(" ", "")
        if kind == "Sum":
            a, b = signs.split("+")
            assert len(a) == len(b) == (size or 2)
            assert int(response.replace(" ", "")) == int(a) + int(b)
        else:
            assert response.split() == list(signs if kind == "Copy" else reversed(signs))
            assert len(signs) == size if size else 4 <= len(signs) <= 8


def test_stories_are_asked_only_what_they_answer():
    found = questions("There was a little car named Beep. Beep loved to go fast. The end.")
    begin = "Story: There was a little car named Beep. Beep loved to go fast. The end.\nQuestion: "
    asked = [(example.prompt_messages[0].text, example.response) for _, example in found]
    assert [(prompt.removeprefix(begin), answer) for prompt, answer in asked] == [
        ("What is the car's name?\nAnswer:", "Beep"),
        ("What is Beep?\nAnswer:", "a car"),
        ("What did Beep love to do?\nAnswer:", "go fast"),
    ]
