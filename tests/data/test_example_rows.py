"""Rows of examples: the prompt is given, the response learned; blocks of them, held-out apart."""

from __future__ import annotations

import json

import numpy as np
import pytest
from example_tools import encode_example
from hypothesis import given, settings
from hypothesis import strategies as st

from bellmask.config.options import DataOptions, SftOptions
from bellmask.data import blocks as blocks_module
from bellmask.data import examples as module
from bellmask.data.blocks import join
from bellmask.data.chat_templates import Example, PromptPart, Template
from bellmask.data.examples import ExampleRules, begin_row, load_example_blocks
from bellmask.data.tokenizers import ByteTokenizer, SymbolTokenizer
from bellmask.utils.errors import UserError

BYTES = ByteTokenizer()
BOS, EOS, PAD = BYTES.bos_id, BYTES.eos_id, BYTES.pad_id


class AsItIs(Template):
    """The prompt and nothing else, so that rows are easy to foresee."""

    def parts(self, messages, is_conversation):
        return (PromptPart(messages[0].text),)


PLAIN = AsItIs("plain")


def row_of(prompt, response, tokenizer=BYTES, **rules):
    rules = ExampleRules(**{"block_length": 32, "round_to": 8, **rules})
    return encode_example(Example.plain(prompt, response), tokenizer, PLAIN, rules, number=5)


def test_a_row_is_prompt_response_eos_pads():
    row, first = row_of("ab:", "xyz"), row_of("ab:", "xyz", bos_first=True)
    assert row.ids.tolist() == [*b"ab: xyz", *[EOS] * 4, *[PAD] * 21]
    assert (row.start, row.length, row.document) == (3, 11, 5)
    assert first.ids.tolist() == [BOS, *row.ids.tolist()[:-1]]
    assert row_of("p", "x" * 22).length == 1 + 24
    assert row_of("p", "x" * 23) is None, "24 tokens with the space: a canvas of 32, no prompt left"
    for size in (3, 60):  # a template may write BOS itself
        ids, is_cut = begin_row(np.array([BOS, *b"p" * size]), 24, BYTES, bos_first=True)
        assert ids.tolist() == [BOS, *b"p" * min(size, 23)]
        assert is_cut == (size == 60)


texts = st.text(st.characters(codec="utf-8"), max_size=30)


@settings(deadline=None, derandomize=True, max_examples=100)
@given(texts, texts, st.integers(1, 9), st.integers(10, 60), st.booleans())
def test_only_the_response_and_its_eos_can_be_masked(
    prompt, response, round_to, block_length, bos_first
):
    rules = {"block_length": block_length, "round_to": round_to, "bos_first": bos_first}
    row = row_of(prompt, response, **rules)
    text = PLAIN.response(Example.plain(prompt, response))
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
        return load_example_blocks(data, SftOptions(str(train), valid, **sft), tokenizer)

    return run


def decoded(blocks):
    ends = zip(blocks.rows(slice(None)).numpy(), blocks.starts, blocks.lengths)
    return [(BYTES.decode(row[:start]), BYTES.decode(row[start:stop])) for row, start, stop in ends]


def write_lines(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


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
        (bad, {}, r"=64 \(left out: response longer"),
        (half, {}, "line 2"),
        ("toy:copy", {"length": 32}, r"data\.block_length=32"),
        ("toy:copy", {"tokenizer": SymbolTokenizer(8)}, "symbols"),
    ):
        with pytest.raises(UserError, match=words):
            load(train, **options)
    assert list((tmp_path / "cache" / "blocks").iterdir()) == []
    with pytest.raises(UserError, match=r"1 document"):
        load(write_lines(tmp_path / "one.jsonl", [conversation(1)]), length=128)
    with pytest.raises(UserError, match=r"sft\.train"):
        load("toy:copy:1", "toy:copy:1")
