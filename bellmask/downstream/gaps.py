"""Rows with a gap: what a contestant is shown, and masks where it is to write."""

from __future__ import annotations

import math
from typing import Literal

from bellmask.downstream.asks import Tokens
from bellmask.downstream.contestants import Contestant
from bellmask.downstream.questions import Choice, Completion, Infilling, Item

Variant = Literal["gold", "own"]
VARIANTS: tuple[Variant, ...] = ("gold", "own")
"""The gap has the gold answer's length, or one that tells nothing about it."""
OWN_WORDS = {"word": 4, "answer": 8}
"""Room in a gap of the second kind, in words of the prompt's mean length; a run that was tuned to
answer has a length of its own."""
TEMPERATURE = {"word": 1.0, "answer": 1.0, "story": 0.95}
"""As in DiffuLLaMA's scripts."""


def make_row(one: Contestant, kind: str, item: Item, variant: int | Variant) -> Tokens:
    """Given tokens and masks. Where they do not fit, the gap is cut to half of the block, then what
    is furthest from it is left out.
    """
    length = _gold_length(one, item)
    behind: Tokens = ()
    if isinstance(item, Completion):
        before, _ = one.pair(item.prompt, item.answer)
        if variant == "own":
            length = one.own_length or _words(before, item.prompt, OWN_WORDS[kind])
    else:
        assert isinstance(item, Infilling)
        before = _encode(one, item.before)
        after = _encode_after(one, item.before, item.after)
        behind = after if one.sees_behind else ()
        if variant == "own":  # as the story's other four sentences
            length = round((len(before) + len(after)) / 4)
    length = min(max(1, length), _longest(one))
    room = one.block_length - length
    shown = len(one.begin(before, one.block_length))
    behind = behind[: max(room // 2, room - shown)]
    gap = [one.tokenizer.mask_id] * length
    return (*one.begin(before, room - len(behind)), *gap, *behind)


def is_cut(one: Contestant, item: Item) -> bool:
    """The gold answer is longer than any gap: it cannot be written."""
    return _gold_length(one, item) > _longest(one)


def is_shortened(one: Contestant, item: Item) -> bool:
    """Not all that the item shows fits into a row with what is asked for."""
    if isinstance(item, Choice):
        pairs = map(one.pair, item.contexts, item.continuations)
        return any(
            len(_whole(one, before)) + len(target) > one.block_length for before, target in pairs
        )
    length = min(_gold_length(one, item), _longest(one))
    if isinstance(item, Completion):
        before, behind = one.pair(item.prompt, item.answer)[0], 0
    else:
        before = _encode(one, item.before)
        behind = len(_encode_after(one, item.before, item.after)) if one.sees_behind else 0
    return len(_whole(one, before)) + length + behind > one.block_length


def _whole(one: Contestant, before: Tokens) -> Tokens:
    """With the begin sign, whatever its length."""
    return one.begin(before, len(before) + one.block_length)


def _longest(one: Contestant) -> int:
    return one.block_length // 2


def _gold_length(one: Contestant, item: Item) -> int:
    if isinstance(item, Completion):
        return len(one.pair(item.prompt, item.answer)[1])
    assert isinstance(item, Infilling)
    return len(_encode_after(one, item.before, item.gold))


def _encode_after(one: Contestant, before: str, text: str) -> Tokens:
    """A text's tokens where it stands: alone, some tokenizers put a space in front of it."""
    return _encode(one, before + text)[len(_encode(one, before)) :]


def _words(tokens: Tokens, text: str, count: int) -> int:
    """Tokens of so many words, if they are as long as those of the text."""
    return math.ceil(count * len(tokens) / max(1, len(text.split())))


def _encode(one: Contestant, text: str) -> Tokens:
    return tuple(one.tokenizer.encode(text.encode("utf-8", "replace").decode()).tolist())
