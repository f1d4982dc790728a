"""Prompts with responses: from files, the hub, ShareGPT and toy tasks."""

from __future__ import annotations

import json
import re
from collections import Counter

import numpy as np
import pytest
from example_tools import encode_example
from hypothesis import given, settings
from hypothesis import strategies as st

from bellmask.config.options import DataOptions, SftOptions
from bellmask.data import blocks as blocks_module
from bellmask.data import examples as module
from bellmask.data.blocks import join
from bellmask.data.chat_templates import Example, PromptPart, Template, response_after
from bellmask.data.tokenizers import ByteTokenizer, SymbolTokenizer
from bellmask.utils.errors import UserError


def opened(source):
    return module.open_examples(str(source))


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
        ("taks", "", "'taks'.*tasks:FOLDER.*toy:sums"),
        ("toy:copi", "", "'copy'"),
        ("toy:copy:13", "", "1 to 12"),
        ("toy:sums:0", "", "1 to 9"),
        ("sharegpt:", "", "sharegpt:"),
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
        assert module.clean_conversation(record, Counter()) == ()


# What is cleaned and put in order is in ``golden.json``.
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


# --- toys ------------------------------------------------------------------------


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


BYTES = ByteTokenizer()
BOS, EOS, PAD = BYTES.bos_id, BYTES.eos_id, BYTES.pad_id


class AsItIs(Template):
    """The prompt and nothing else, so that rows are easy to foresee."""

    def parts(self, messages, is_conversation):
        return (PromptPart(messages[0].text),)


PLAIN = AsItIs("plain")


def row_of(prompt, response, tokenizer=BYTES, **rules):
    rules = module.ExampleRules(**{"block_length": 32, "round_to": 8, **rules})
    return encode_example(Example.plain(prompt, response), tokenizer, PLAIN, rules, number=5)


def test_a_row_is_prompt_response_eos_pads():
    row, first = row_of("ab:", "xyz"), row_of("ab:", "xyz", bos_first=True)
    assert row.ids.tolist() == [*b"ab: xyz", *[EOS] * 4, *[PAD] * 21]
    assert (row.start, row.length, row.document) == (3, 11, 5)
    assert first.ids.tolist() == [BOS, *row.ids.tolist()[:-1]]
    assert row_of("p", "x" * 22).length == 1 + 24
    assert row_of("p", "x" * 23) is None, "24 tokens with the space: a canvas of 32, no prompt left"
    for size in (3, 60):  # a template may write BOS itself
        ids, is_cut = module.begin_row(np.array([BOS, *b"p" * size]), 24, BYTES, bos_first=True)
        assert ids.tolist() == [BOS, *b"p" * min(size, 23)]
        assert is_cut == (size == 60)


any_text = st.text(st.characters(codec="utf-8"), max_size=30)


@settings(deadline=None, derandomize=True, max_examples=100)
@given(any_text, any_text, st.integers(1, 9), st.integers(10, 60), st.booleans())
def test_only_the_response_and_its_eos_can_be_masked(
    prompt, response, round_to, block_length, bos_first
):
    rules = {"block_length": block_length, "round_to": round_to, "bos_first": bos_first}
    row = row_of(prompt, response, **rules)
    text = response_after(prompt, response)
    size = len(text.encode())
    if row is None:
        assert size == 0 or -(-(size + 1) // round_to) * round_to >= block_length
        return
    learned = row.ids[row.start : row.length].tolist()
    assert learned == [*text.encode(), *[EOS] * (len(learned) - size)]
    assert len(learned) % round_to == 0
    assert 0 < len(learned) - size <= round_to
    assert row.ids[row.length :].tolist() == [PAD] * (block_length - row.length)
    is_first = bos_first or not prompt
    given_ids = row.ids[: row.start].tolist()
    assert given_ids[:is_first] == [BOS] * is_first
    assert 1 <= len(given_ids) <= is_first + len(prompt.encode())
    assert prompt.encode().endswith(bytes(given_ids[is_first:]))
    if len(given_ids) < is_first + len(prompt.encode()):
        assert row.length == block_length, "cut only as far as needed"


# --- blocks ----------------------------------------------------------------------------------


@pytest.fixture
def load(tmp_path):
    def run(train, valid=None, length=64, tokenizer=BYTES, **sft):
        data = DataOptions(block_length=length, cache=str(tmp_path / "cache"), valid_fraction=0.1)
        return module.load_example_blocks(data, SftOptions(str(train), valid, **sft), tokenizer)

    return run


def decoded(blocks):
    ends = zip(blocks.rows(slice(None)).numpy(), blocks.starts, blocks.lengths)
    return [(BYTES.decode(row[:start]), BYTES.decode(row[start:stop])) for row, start, stop in ends]


def conversation(number):
    roles = [(role, t) for t in range(3) for role in ("user", "assistant")]
    said = [{"role": role, "content": f"{role[0]}{number}.{t}"} for role, t in roles]
    return {"messages": said}


def test_rows_are_the_same_in_shards_and_whatever_is_encoded_together(load, tmp_path, monkeypatch):
    whole = load("toy:sums:1").train
    monkeypatch.setattr(blocks_module, "TOKENS_PER_SHARD", 64 * 7)
    monkeypatch.setattr(module, "EXAMPLES_AT_ONCE", 3)
    monkeypatch.setattr(module, "VERSION", 10**6)
    parts = load("toy:copy:1", "toy:sums:1")
    assert len(list((tmp_path / "cache").glob("blocks/*/tokens-*"))) == 1 + -(-100 // 7) + 4
    assert decoded(parts.valid)[: len(whole)] == decoded(whole)


def test_only_first_answers_where_asked(load, tmp_path):
    path = write_lines(tmp_path / "talks.jsonl", map(conversation, range(20)))
    every = load(path, round_to=8)
    first = load(path, round_to=8, turns="first")
    assert (len(every.train) + len(every.valid), len(first.train) + len(first.valid)) == (60, 20)
    for prompt, response in decoded(first.train):
        number = prompt.removeprefix("user: u").partition(".")[0]
        assert prompt == f"user: u{number}.0\nassistant:"
        assert response.strip("\x00").startswith(f" a{number}.0")


def test_a_conversation_is_never_in_both_parts_and_others_do_not_move_it(load, tmp_path):
    data, fewer = (
        load(write_lines(tmp_path / f"{n}.jsonl", map(conversation, range(n))), length=128)
        for n in (40, 15)
    )
    assert not set(data.train.documents) & set(data.valid.documents)
    assert (len(data.train), len(data.valid)) == (108, 12)
    every, few = (decoded(join([one.train, one.valid])) for one in (data, fewer))
    assert [pair for pair in every if pair in set(few)] == few
    assert few != sorted(few, key=lambda p: int(p[1].split(".")[0][2:])), "in a random order"


def test_what_was_taken_and_what_was_left_out_is_counted(load, tmp_path):
    rows = [{"prompt": "p" * n, "response": "r" * m} for n, m in ((1, 1), (1, 60), (50, 9), (1, 2))]
    talk = [{"role": "user", "content": "u"}, {"role": "assistant", "content": "a" * 200}]
    path = write_lines(tmp_path / "a.jsonl", [*rows, conversation(1), {"messages": talk}])
    assert load(path).counts == {
        "rows": 6,
        "documents": 4,
        "answers in conversations": 3,
        "left out: response longer than the block": 2,
        "prompts cut on the left": 3,
    }


def test_mistakes_are_named_and_leave_nothing_behind(load, tmp_path):
    bad = write_lines(tmp_path / "bad.jsonl", [{"prompt": "p", "response": "r" * 99}])
    half = tmp_path / "half.jsonl"
    half.write_text('{"prompt": "p", "response": "r"}\n{"prompt"')
    for train, options, words in (
        (bad, {}, r"length \(left out: response longer"),
        (half, {}, "line 2"),
        ("toy:copy", {"length": 32}, r"data.block_length"),
        ("toy:copy", {"tokenizer": SymbolTokenizer(8)}, "symbols"),
    ):
        with pytest.raises(UserError, match=words):
            load(train, **options)
    assert list((tmp_path / "cache" / "blocks").iterdir()) == []
    with pytest.raises(UserError, match="too few to hold some out"):
        load(write_lines(tmp_path / "one.jsonl", [conversation(1)]), length=128)
    with pytest.raises(UserError, match=r"sft\.train"):
        load("toy:copy:1", "toy:copy:1")
