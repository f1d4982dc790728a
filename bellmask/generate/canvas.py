"""Canvases: rows to generate, in which any positions may be given; and views of each step."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from torch import Tensor

from bellmask.data.tokenizers import ByteTokenizer, Tokenizer
from bellmask.utils.errors import UserError

_GAP = re.compile(r"\[MASK(?:\*([0-9]{1,9}))?\]")
_ALMOST_GAP = re.compile(r"\[\s*mask[^\]]*\]", re.IGNORECASE)

LONGEST = 1 << 20
"""Maximum tokens of a canvas: more than any network supports, but little memory."""


@dataclass(frozen=True)
class Canvas:
    """Ids of one row, the mask id where a token is to be generated."""

    ids_L: Tensor

    def __len__(self) -> int:
        return len(self.ids_L)

    def repeat(self, count: int) -> Tensor:
        """The canvas ``count`` times, [count, L]."""
        return self.ids_L[None].repeat(count, 1)


def canvas_from_pieces(
    tokenizer: Tokenizer,
    pieces: Sequence[str | int],
    before: Sequence[int] = (),
    behind: Sequence[int] = (),
) -> Canvas:
    """Texts are given; a number is that many tokens to generate: ``["The ", 12, " sat."]``.

    ``before`` and ``behind`` are ids around them, BOS and EOS say.
    """
    ids = list(before)
    for piece in pieces:
        if isinstance(piece, str):
            ids += tokenizer.encode(piece).tolist()
        elif piece < 1:
            raise UserError(f"a gap needs at least one token, got {piece}")
        elif len(ids) + piece > LONGEST:
            raise UserError(f"a canvas can have at most {LONGEST:,} tokens")
        else:
            ids += [tokenizer.mask_id] * piece
    return Canvas(torch.tensor([*ids, *behind]))


def read_gaps(text: str) -> list[str | int]:
    """``"The [MASK*12] sat on the [MASK]."`` as pieces: [MASK*n] is a gap of n tokens."""
    pieces: list[str | int] = []
    for number, part in enumerate(_GAP.split(text)):
        if number % 2:
            pieces.append(int(part or "1"))
        elif odd := _ALMOST_GAP.search(part):
            raise UserError(f"{odd[0]} is not a gap; write [MASK] or [MASK*12]")
        elif part:
            pieces.append(part)
    if all(isinstance(piece, str) for piece in pieces):
        raise UserError("the canvas has no gap; write [MASK*12] to generate 12 tokens there")
    return pieces


# Steps of a generation as observers see them: the rows after each step, and tokens as text.
#
# Observers get a :class:`Step` per step. B rows of one batch, L length.

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


@dataclass(frozen=True, eq=False)
class Step:
    """The rows of one batch after a step. Tokens may appear, change, or be masked again."""

    number: int
    """0 is the initial canvas, then 1, 2, ... for each step."""
    num_steps: int
    """Steps planned in all."""
    num_calls: int
    """Network calls so far, for this batch."""
    t: float
    """Time after the step: 1 all masked, 0 clean. With blocks, by the fraction of masked tokens of
    the batch."""
    first_sample: int
    """Sample number of row 0."""
    ids_BL: Tensor
    """On the CPU, int64, the mask id where masked. Do not modify it; the
    sampler may change it later, so copy what you keep."""


OnStep = Callable[[Step], None]


def token_texts(tokenizer: Tokenizer) -> Callable[[int], str]:
    """The text of each token inside a text; ids must not be the mask.

    A token is decoded after another one, since some decoders treat the first token of a text
    differently (a space is dropped, a word piece keeps its sign). Bytes that are not a character
    by themselves are shown as ``\\xNN`` for byte tokens, else as the replacement character;
    special tokens, which decoding omits, by name.
    """
    decode, first = tokenizer.decode, tokenizer.encode("a")
    before = decode(first)
    named = {tokenizer.pad_id: "<pad>", tokenizer.bos_id: "<bos>", tokenizer.eos_id: "<eos>"}

    @cache
    def text_of(token: int) -> str:
        alone, both = decode(np.array([token])), decode(np.append(first, token))
        if token in named and not alone:
            return named[token]
        text = both[len(before) :] if both.startswith(before) else alone
        if isinstance(tokenizer, ByteTokenizer) and text == REPLACEMENT:
            return f"\\x{token:02x}"
        return text or REPLACEMENT

    return text_of
