"""Prompts with responses: from files, the hub, ShareGPT, toy tasks and stories."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path

import pytest

from bellmask.config.options import SftOptions
from bellmask.data.examples import (
    MOST_WORDS,
    clean_conversation,
    clean_text,
    open_examples,
    opening,
    questions,
    tidy,
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


SIDES = {"h": "human", "g": "ChatGPT", "s": "system", "x": "critic"}
FIRST, JOINED = "turns before the first question", "turns joined to the one before"


@pytest.mark.parametrize(
    ("said", "kept", "counted"),
    [
        ("s:0 h:1 g:2", "s:0 u:1 a:2", {}),
        ("s:0 g:0 h:1 g:2", "s:0 u:1 a:2", {FIRST: 1}),
        ("h:1 s:0 g:2", "u:1 a:2", {"turns of the system on the way": 1}),
        ("h:1 g:2 h:3", "u:1 a:2", {"turns without an answer": 1}),
        ("h:1 h:2 g:3", "u:1\n\n2 a:3", {JOINED: 1}),
        ("h:1 g:2 h: g:3", "u:1 a:2\n\n3", {"turns empty": 1, JOINED: 1}),
        ("g:1 g:2", "", {FIRST: 2, "left out: nobody answers": 1}),
        ("h:1 x:2", "", {"left out: role 'critic' is unknown": 1}),
        ("h:1 g:2 h:3 g:4", "u:1 a:2 u:3 a:4", {}),
    ],
)
def test_turns_are_put_in_order(said, kept, counted):
    """``h:hello`` is what a human says."""
    counts = Counter()
    found = tidy([(SIDES[turn[0]], turn[2:]) for turn in said.split()], counts)
    assert " ".join(f"{message.role[0]}:{message.text}" for message in found) == kept
    assert counts == counted


def test_what_the_page_left_goes_and_code_stays():
    for raw, clean in {
        "Hi.<br>you &amp; me&nbsp;&lt;3": "Hi.\nyou & me <3",
        '<div class="markdown prose">Text<span> here</span></div>': "Text here",
        "a < b and List<String> x": "a < b and List<String> x",
        "```html\n<div>&amp;</div>\n```\n<p>done</p>": "```html\n<div>&amp;</div>\n```\ndone",
        "Use `<div>` &gt; x": "Use `<div>` > x",
        "one\nCopy123 chars / 45 words\ntwo": "one\ntwo",
        "unfinished ```\n<div>": "unfinished ```\n<div>",
    }.items():
        assert clean_text(raw, "assistant") == clean
    for raw, clean in {  # page marks end what a person wrote
        "Is it? 2 / 2": "Is it?",
        "the group.4 / 4": "the group.",
        "Which?\n1 / 3": "Which?",
        "What is 2 / 2": "What is 2 / 2",
        "Halves. 1 / 2": "Halves. 1 / 2",
    }.items():
        assert clean_text(raw, "user") == clean
        assert clean_text(raw, "assistant") == raw


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


def asked(story):
    found = [(example.prompt_messages[0].text, example.response) for _, example in questions(story)]
    begin = f"Story: {opening(story)}\nQuestion: "
    assert all(prompt.startswith(begin) for prompt, _ in found)
    return [(prompt[len(begin) :].removesuffix("\nAnswer:"), answer) for prompt, answer in found]


def test_stories_are_asked_only_what_they_answer():
    assert asked("There was a little car named Beep. Beep loved to go fast. The end.") == [
        ("What is the car's name?", "Beep"),
        ("What is Beep?", "a car"),
        ("What did Beep love to do?", "go fast"),
    ]
    assert asked("An old ant called Andy sat. He liked to sit.")[1] == ("What is Andy?", "an ant")
    for unclear in (
        "A boy named Tim met a boy named Tom.",
        "The boy named Tim met the boy named Tom.",
        "Two girls lived here. A girl named Lily sang.",
        "There was a boy. Another boy named Tim came.",
    ):
        assert not [q for q, _ in asked(unclear) if "name?" in q], unclear
    both = [question for question, _ in asked("A cat named Max met a dog named Max.")]
    assert both == ["What is the cat's name?", "What is the dog's name?"]
    for nothing in (
        "A girl named Lily and Mia sang.",
        "It was named Max.",
        "Tim loved to run. Tim loved to sing.",
        "Tim loved to run, and she loved to sing.",
        "Tim said he loved Max to bits.",
    ):
        assert asked(nothing) == [], nothing
    assert opening("One two three. " * 50) == ("One two three. " * (MOST_WORDS // 3)).strip()
