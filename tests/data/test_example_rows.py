"""Rows of examples: the prompt is given, the response learned; blocks of them, held-out apart."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from example_tools import encode_example
from hypothesis import given, settings
from hypothesis import strategies as st

from bellmask.config.options import DataOptions, SftOptions
from bellmask.data import blocks as blocks_module
from bellmask.data import examples as example_blocks
from bellmask.data.blocks import join, read_card
from bellmask.data.chat_templates import PromptPart, Template
from bellmask.data.example_files import Example
from bellmask.data.examples import (
    ExampleRules,
    canvas_length,
    load_example_blocks,
    open_examples,
)
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
    assert (first.start, first.length) == (4, 12)
    for bos_first in (False, True):  # an empty prompt gets BOS once
        row = row_of("", "xyz", bos_first=bos_first)
        assert (row.start, row.ids.tolist()[:5]) == (1, [BOS, *b"xyz", EOS])


@pytest.mark.parametrize(("tokens", "length"), [(0, 8), (6, 8), (7, 8), (8, 16), (15, 16)])
def test_there_is_always_an_eos(tokens, length):
    assert canvas_length(tokens, 8) == length
    assert canvas_length(tokens, 1) == tokens + 1


def test_a_long_prompt_loses_its_oldest_tokens_and_a_long_response_is_left_out():
    prompt = b"0123456789" * 4
    for begin in ([], [BOS]):
        row = row_of(prompt.decode(), "xyz", bos_first=bool(begin))
        assert (row.start, row.length) == (24, 32)
        assert row.ids[:24].tolist() == [*begin, *prompt[-24 + len(begin) :]]
    assert row_of("p", "x" * 22).length == 1 + 24
    assert row_of("p", "x" * 23) is None, "24 tokens with the space: a canvas of 32, no prompt left"
    assert row_of("p", "  ") is not None, "a space alone is a token of this tokenizer"
    assert row_of("p ", "  ") is None, "nothing to learn"


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


class BeginsWithBos(ByteTokenizer):
    """Like the special token that some chat templates write."""

    def encode_batch(self, texts):
        found = super().encode_batch([text.removeprefix("<s>") for text in texts])
        begun = [[BOS] if text.startswith("<s>") else [] for text in texts]
        return [np.concatenate([np.array(b, int), ids]) for b, ids in zip(begun, found)]


@pytest.mark.parametrize("size", [3, 60])
def test_a_prompt_that_begins_with_bos_does_not_get_another(size):
    row = row_of("<s>" + "p" * size, "r", BeginsWithBos(), bos_first=True)
    assert row.start == min(size + 1, 24)
    assert row.ids[: row.start].tolist() == [BOS, *b"p" * (row.start - 1)]


# --- blocks ----------------------------------------------------------------------------------


@pytest.fixture
def load(tmp_path):
    def run(train, valid=None, length=64, whole=False, **sft):
        data = DataOptions(block_length=length, cache=str(tmp_path / "cache"), valid_fraction=0.1)
        made = load_example_blocks(data, SftOptions(train=str(train), valid=valid, **sft), BYTES)
        return made if whole else (made.train, made.valid)

    return run


def folders(tmp_path):
    return sorted((tmp_path / "cache" / "blocks").iterdir())


def counts_of(load, *args):
    return load(*args, whole=True).counts


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


def test_all_examples_are_there_once_and_held_out_ones_apart(load, tmp_path):
    train, valid = load("toy:copy:2")
    source = open_examples("toy:copy:2", SftOptions(), tmp_path)
    found = decoded(train) + decoded(valid)
    assert len(found) == 676
    assert set(found) == {(e.prompt_messages[0].text, " " + e.response) for e in source}
    assert (len(train), len(valid)) == (608, 68)
    assert load("toy:copy:2")[1].fingerprint == valid.fingerprint
    assert counts_of(load, "toy:copy:2") == {"rows": 676, "documents": 676}
    assert read_card(folders(tmp_path)[0])["num_response_tokens"] == 676 * 32
    train, valid = load("toy:copy:1", "toy:sums:1")
    assert (len(train), len(valid)) == (26, 100)


def test_rows_are_the_same_in_shards_and_whatever_is_encoded_together(load, tmp_path, monkeypatch):
    whole = load("toy:sums:1")[0]
    monkeypatch.setattr(blocks_module, "TOKENS_PER_SHARD", 64 * 7)
    monkeypatch.setattr(example_blocks, "EXAMPLES_AT_ONCE", 3)
    monkeypatch.setattr(example_blocks, "VERSION", 10**6)
    cut = load("toy:sums:1")[0]
    assert len(list((tmp_path / "cache").glob("blocks/*/tokens-*"))) == 1 + -(-100 // 7)
    for index in (slice(0, 90), slice(33, 41)):
        assert (whole.rows(index) == cut.rows(index)).all()
    assert (whole.starts == cut.starts).all()
    assert (whole.documents == cut.documents).all()


def test_a_conversation_is_never_in_both_parts_and_others_do_not_move_it(load, tmp_path):
    path = write_lines(tmp_path / "a.jsonl", map(conversation, range(40)))
    train, valid = load(path, length=128)
    assert not set(train.documents) & set(valid.documents)
    assert (len(train), len(valid)) == (108, 12)
    numbers = [{reply.split(".")[0] for _, reply in decoded(part)} for part in (train, valid)]
    assert not numbers[0] & numbers[1]
    prompt, response = decoded(valid)[2]
    n = response.strip().split(".")[0][1:]
    assert prompt == (
        f"user: u{n}.0\nassistant: a{n}.0\nuser: u{n}.1\nassistant: a{n}.1\n"
        f"user: u{n}.2\nassistant:"
    )
    all_of_them = decoded(join([train, valid]))
    path = write_lines(tmp_path / "b.jsonl", map(conversation, range(15)))
    few = decoded(join(load(path, length=128)))
    assert [pair for pair in all_of_them if pair in set(few)] == few
    assert few != sorted(few, key=lambda p: int(p[1].split(".")[0][2:])), "in a random order"


def test_the_cache_is_keyed_by_all_that_matters(tmp_path):
    data = DataOptions(block_length=64, cache=str(tmp_path / "cache"))
    sft = SftOptions("toy:copy:1")
    variants = [(data, sft), (replace(data, block_length=65), sft), (data, sft, "{{ messages }}")]
    for change in ({"round_to": 16}, {"template": "chat"}, {"train": "toy:copy:2"}):
        variants.append((data, replace(sft, **change)))
    made = [load_example_blocks(*some[:2], BYTES, *some[2:]) for some in variants]
    made.append(load_example_blocks(data, sft, BYTES, bos_first=True))
    assert len({one.train.fingerprint for one in made}) == len(folders(tmp_path)) == 7


def test_what_was_taken_and_what_was_left_out_is_counted(load, tmp_path):
    rows = [{"prompt": "p" * n, "response": "r" * m} for n, m in ((1, 1), (1, 60), (50, 9), (1, 2))]
    talk = [{"role": "user", "content": "u"}, {"role": "assistant", "content": "a" * 200}]
    path = write_lines(tmp_path / "a.jsonl", [*rows, conversation(1), {"messages": talk}])
    assert counts_of(load, path) == {
        "rows": 6,
        "documents": 4,
        "answers in conversations": 3,
        "left out: response longer than the block": 2,
        "prompts cut on the left": 3,
    }


def test_mistakes_are_named_and_leave_nothing_behind(load, tmp_path):
    bad = write_lines(tmp_path / "bad.jsonl", [{"prompt": "p", "response": "r" * 99}])
    one = write_lines(tmp_path / "one.jsonl", [conversation(1)])
    half = tmp_path / "half.jsonl"
    half.write_text('{"prompt": "p", "response": "r"}\n{"prompt"')
    for train, options, words in (
        (bad, {}, r"=64 \(left out: response longer"),
        (half, {}, "line 2"),
        ("toy:copy", {"length": 32}, r"data\.block_length=32"),
    ):
        with pytest.raises(UserError, match=words):
            load(train, **options)
    assert folders(tmp_path) == []
    with pytest.raises(UserError, match=r"3 example\(s\) of 1 document"):
        load(one, length=128)
    with pytest.raises(UserError, match=r"sft\.train"):
        load("toy:copy:1", "toy:copy:1")
    data = DataOptions(cache=str(tmp_path))
    with pytest.raises(UserError, match="symbols"):
        load_example_blocks(data, SftOptions("toy:copy"), SymbolTokenizer(8))
