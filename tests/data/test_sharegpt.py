"""ShareGPT: every rule on a small case, and what becomes of 300 real conversations."""

from __future__ import annotations

import json
import os
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from bellmask.data.examples import open_examples
from bellmask.data.sharegpt import (
    ROLES,
    clean_conversation,
    clean_text,
    conversation_id,
    tidy,
)
from bellmask.stage_options import SftOptions

SHARED = Path(os.environ.get("BELLMASK_TEST_DATA", Path(__file__).parents[3] / "shared" / "data"))
SHORT = {"h": "human", "g": "gpt", "s": "system", "x": "critic"}


def tidied(*said: str) -> tuple[list[tuple[str, str]], Counter[str]]:
    """``h:hello`` is what a human says."""
    counts: Counter[str] = Counter()
    pairs = [(SHORT[turn[0]], turn[2:]) for turn in said]
    return [(m.role[0], m.text) for m in tidy(pairs, counts)], counts


@pytest.mark.parametrize(
    ("said", "kept", "counted"),
    [
        (("h:1", "g:2"), "u:1 a:2", {}),
        (("s:0", "h:1", "g:2"), "s:0 u:1 a:2", {}),
        (("g:0", "h:1", "g:2"), "u:1 a:2", {"turns before the first question": 1}),
        (("s:0", "g:0", "h:1", "g:2"), "s:0 u:1 a:2", {"turns before the first question": 1}),
        (("h:1", "s:0", "g:2"), "u:1 a:2", {"turns of the system on the way": 1}),
        (("h:1", "g:2", "h:3"), "u:1 a:2", {"turns without an answer": 1}),
        (("h:1", "h:2", "g:3"), "u:1\n\n2 a:3", {"turns joined to the one before": 1}),
        (
            ("h:1", "g:2", "h: ", "g:3"),
            "u:1 a:2\n\n3",
            {"turns empty": 1, "turns joined to the one before": 1},
        ),
        (("g:1", "g:2"), "", {"turns before the first question": 2, "left out: nobody answers": 1}),
        (("h:1", "x:2"), "", {"left out: role 'critic' is unknown": 1}),
        ((), "", {"left out: nobody answers": 1}),
        (("h:1", "g:2", "h:3", "g:4"), "u:1 a:2 u:3 a:4", {}),
    ],
)
def test_turns_are_put_in_order(said: tuple[str, ...], kept: str, counted: dict[str, int]) -> None:
    found, counts = tidied(*said)
    assert " ".join(f"{role}:{text}" for role, text in found) == kept
    assert counts == counted


def test_roles_have_one_name_each() -> None:
    assert {ROLES[name] for name in ("gpt", "chatgpt", "bing", "assistant")} == {"assistant"}
    assert {ROLES[name] for name in ("human", "user")} == {"user"}
    found = tidy([("User", "a"), ("ChatGPT", "b")], Counter())
    assert [message.role for message in found] == ["user", "assistant"]


@pytest.mark.parametrize(
    ("raw", "clean"),
    [
        ("Hi.<br>you &amp; me&nbsp;&lt;3", "Hi.\nyou & me <3"),
        ('<div class="markdown prose">Text<span> here</span></div>', "Text here"),
        ("a < b and List<String> x", "a < b and List<String> x"),
        ("```html\n<div>&amp;</div>\n```\n<p>done</p>", "```html\n<div>&amp;</div>\n```\ndone"),
        ("Use `<div>` &gt; x", "Use `<div>` > x"),
        ("```pythonCopy codeprint(1)\n```", "```python\nprint(1)\n```"),
        ("one\nCopy123 chars / 45 words\ntwo", "one\ntwo"),
        ("unfinished ```\n<div>", "unfinished ```\n<div>"),
    ],
)
def test_what_the_page_left_goes_and_code_stays(raw: str, clean: str) -> None:
    assert clean_text(raw, "assistant") == clean


@pytest.mark.parametrize(
    ("raw", "clean"),
    [
        ("Is it? 2 / 2", "Is it?"),
        ("the group.4 / 4", "the group."),
        ("him.\n9 / 9", "him."),
        ("Which?\n1 / 3", "Which?"),
        ("What is 2 / 2", "What is 2 / 2"),
        ("(3.25 / 12) = 30 / 5", "(3.25 / 12) = 30 / 5"),
        ("Halves. 1 / 2", "Halves. 1 / 2"),
    ],
)
def test_page_marks_end_what_a_person_wrote(raw: str, clean: str) -> None:
    assert clean_text(raw, "user") == clean
    assert clean_text(raw, "assistant") == raw


def test_records_of_another_shape_are_counted() -> None:
    for record in ({}, {"conversations": None}, {"conversations": ["a"]}):
        counts: Counter[str] = Counter()
        assert clean_conversation(record, counts) == ()
        assert sum(counts.values()) == 1
        assert next(iter(counts)).startswith("left out: no list")
    counts = Counter()
    odd: dict[str, Any] = {"conversations": [{"from": "human", "value": None}, {"from": "gpt"}]}
    assert clean_conversation(odd, counts) == ()
    assert counts["turns empty"] == 2


def test_parts_of_a_conversation_share_its_id() -> None:
    assert conversation_id({"id": "fud9GZG_7"}) == conversation_id({"id": "fud9GZG_0"}) == "fud9GZG"
    assert conversation_id({"id": "plain"}) == "plain"
    assert conversation_id({}) == ""


def test_documents_are_conversations_not_parts(tmp_path: Path) -> None:
    said = [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}] * 2
    rows = [{"id": name, "conversations": said} for name in ("x_0", "y_0", "x_9")]
    rows += [{"conversations": said}] * 2
    path = tmp_path / "a.json"
    path.write_text(json.dumps(rows))
    source = open_examples(f"sharegpt:{path}", SftOptions(), tmp_path)
    assert [number for number, _ in source.read(Counter())] == [0, 0, 1, 1, 0, 0, 2, 2, 3, 3]


def test_real_conversations() -> None:
    path = SHARED / "sharegpt" / "sharegpt_v3_sample.jsonl"
    if not path.exists():
        pytest.skip("needs sharegpt in the folder $BELLMASK_TEST_DATA")
    records = [json.loads(line) for line in path.read_text("utf-8").strip().split("\n")]
    source = open_examples(f"sharegpt:{path}", SftOptions(), Path("unused"))
    counts: Counter[str] = Counter()
    found = list(source.read(counts))
    # counted from the raw file: 1096 answers; 90 conversations begin with one; 2 follow an empty
    # question and are joined to the answer before; one human writes twice
    begun = sum(record["conversations"][0]["from"] == "gpt" for record in records)
    answers = sum(t["from"] == "gpt" for record in records for t in record["conversations"])
    assert (len(records), answers, begun) == (300, 1096, 90)
    assert len(found) == answers - begun - 2 == 1004
    assert counts == {
        "conversations": 300,
        "turns before the first question": 90,
        "turns empty": 2,
        "turns joined to the one before": 3,
    }
    assert len({number for number, _ in found}) == len(
        {conversation_id(r) for r in records if len(r["conversations"]) > 1}
    )
    for _, example in found:
        assert example.is_conversation
        assert example.response.strip()
        roles = [message.role for message in example.messages]
        assert roles == ["user", "assistant"] * (len(roles) // 2)
    changed = [
        turn["value"]
        for record in records
        for turn in record["conversations"]
        if clean_text(turn["value"], ROLES[turn["from"]]) != turn["value"].strip()
    ]
    assert len(changed) == 5
    assert all(text[-5] + " / " + text[-5] == text[-5:] for text in changed)
