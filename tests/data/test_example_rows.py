"""One row: the prompt is given, the response is learned, nothing else is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bellmask.data.example_rows import ExampleRules, canvas_length, encode_example
from bellmask.data.messages import Example, Message
from bellmask.data.packing import Row
from bellmask.data.templates import Part, Template
from bellmask.data.tokenizer import ByteTokenizer, Ids

BYTES = ByteTokenizer()


class AsItIs(Template):
    """The prompt and nothing else, so that rows are easy to foresee."""

    def parts(self, messages: Sequence[Message], is_conversation: bool) -> tuple[Part, ...]:
        return (Part(messages[0].text),)


PLAIN = AsItIs("plain")


def row_of(prompt: str, response: str, **rules: Any) -> Row | None:
    given = ExampleRules(**{"block_length": 32, "round_to": 8, **rules})
    return encode_example(Example.plain(prompt, response), BYTES, PLAIN, given, number=5)


def must(row: Row | None) -> Row:
    assert row is not None
    return row


def test_a_row_is_prompt_response_eos_pads() -> None:
    row = must(row_of("ab:", "xyz"))
    eos, pad = BYTES.eos_id, BYTES.pad_id
    assert row.ids.tolist() == [*b"ab: xyz", *[eos] * 4, *[pad] * 21]
    assert (row.start, row.length, row.document) == (3, 11, 5)
    first = must(row_of("ab:", "xyz", bos_first=True))
    assert first.ids.tolist() == [BYTES.bos_id, *row.ids.tolist()[:-1]]
    assert (first.start, first.length) == (4, 12)


@pytest.mark.parametrize(("tokens", "length"), [(0, 8), (6, 8), (7, 8), (8, 16), (15, 16)])
def test_there_is_always_an_eos(tokens: int, length: int) -> None:
    assert canvas_length(tokens, 8) == length
    assert canvas_length(tokens, 1) == tokens + 1


def test_an_empty_prompt_gets_bos_once() -> None:
    for bos_first in (False, True):
        row = must(row_of("", "xyz", bos_first=bos_first))
        assert row.start == 1
        assert row.ids.tolist()[:5] == [BYTES.bos_id, *b"xyz", BYTES.eos_id]


def test_a_long_prompt_loses_its_oldest_tokens() -> None:
    row = must(row_of("0123456789" * 4, "xyz"))
    assert (row.start, row.length) == (24, 32)
    assert bytes(row.ids[:24].tolist()).decode() == ("0123456789" * 4)[-24:]
    row = must(row_of("0123456789" * 4, "xyz", bos_first=True))
    assert (row.start, row.length) == (24, 32)
    assert row.ids[0] == BYTES.bos_id
    assert bytes(row.ids[1:24].tolist()).decode() == ("0123456789" * 4)[-23:]


def test_a_response_that_does_not_fit_is_left_out() -> None:
    assert must(row_of("p", "x" * 22)).length == 1 + 24
    assert row_of("p", "x" * 23) is None, "24 tokens with the space: a canvas of 32, no prompt left"
    assert row_of("p", "  ") is not None, "a space alone is a token of this tokenizer"
    assert row_of("p ", "  ") is None, "nothing to learn"


texts = st.text(st.characters(codec="utf-8"), max_size=30)


@settings(deadline=None, derandomize=True, max_examples=200)
@given(texts, texts, st.integers(1, 9), st.integers(10, 60), st.booleans())
def test_only_the_response_and_its_eos_can_be_masked(
    prompt: str, response: str, round_to: int, block_length: int, bos_first: bool
) -> None:
    rules = {"block_length": block_length, "round_to": round_to, "bos_first": bos_first}
    row = row_of(prompt, response, **rules)
    text = PLAIN.response(Example.plain(prompt, response))
    size = len(text.encode())
    if row is None:
        assert size == 0 or -(-(size + 1) // round_to) * round_to >= block_length
        return
    learned = row.ids[row.start : row.length].tolist()
    assert learned == [*text.encode(), *[BYTES.eos_id] * (len(learned) - size)]
    assert len(learned) % round_to == 0
    assert 0 < len(learned) - size <= round_to
    assert set(row.ids[row.length :].tolist()) <= {BYTES.pad_id}
    assert len(row.ids) == block_length
    is_first = bos_first or not prompt
    given_ids = row.ids[: row.start].tolist()
    assert given_ids[:is_first] == [BYTES.bos_id] * is_first
    assert 1 <= len(given_ids) <= is_first + len(prompt.encode())
    assert prompt.encode().endswith(bytes(given_ids[is_first:]))
    if len(given_ids) < is_first + len(prompt.encode()):
        assert row.length == block_length, "cut only as far as needed"
    assert BYTES.decode(row.ids[row.start : row.length]) == text


class BeginsWithBos(ByteTokenizer):
    """Like the special token that some chat templates write."""

    def encode_batch(self, texts: Sequence[str]) -> list[Ids]:
        begun = [text.startswith("<s>") for text in texts]
        found = super().encode_batch([text.removeprefix("<s>") for text in texts])
        return [
            np.concatenate([[self.bos_id], ids]) if is_begun else ids
            for ids, is_begun in zip(found, begun, strict=True)
        ]


@pytest.mark.parametrize("size", [3, 60])
def test_a_prompt_that_begins_with_bos_does_not_get_another(size: int) -> None:
    example = Example.plain("<s>" + "p" * size, "r")
    rules = ExampleRules(32, 8, bos_first=True)
    row = must(encode_example(example, BeginsWithBos(), PLAIN, rules))
    assert row.start == min(size + 1, 24)
    assert row.ids[: row.start].tolist() == [BYTES.bos_id, *b"p" * (row.start - 1)]
