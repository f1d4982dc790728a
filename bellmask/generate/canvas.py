"""Canvases: rows being generated, in which any positions may be given; what each step shows."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from bellmask.data.tokenizers import ByteTokenizer, Tokenizer
from bellmask.diffusion.frameworks import Framework, Ordered
from bellmask.utils.errors import UserError
from bellmask.utils.files import count_of

_GAP = re.compile(r"\[MASK(?:\*([0-9]+))?\]")
_ALMOST_GAP = re.compile(r"\[\s*mask[^\]]*\]", re.IGNORECASE)

LONGEST = 1 << 20
"""Tokens of a canvas: far more than a network can take at once, and little for the memory."""


@dataclass(frozen=True)
class Canvas:
    """Ids of one row, the mask id where a token is to be generated."""

    ids_L: Tensor
    mask_id: int

    def __len__(self) -> int:
        return len(self.ids_L)

    @property
    def is_given_L(self) -> Tensor:
        """True where the token is kept."""
        return self.ids_L != self.mask_id

    def repeat(self, count: int) -> Tensor:
        """The canvas ``count`` times, [count, L]."""
        return self.ids_L[None].repeat(count, 1)


def check_rows(canvas_BL: Tensor, mask_id: int) -> None:
    """Refuse canvases that no sampler can fill."""
    if canvas_BL.ndim != 2 or not canvas_BL.numel():
        raise UserError(f"canvases are rows of tokens, got a tensor of shape {[*canvas_BL.shape]}")
    low, high = int(canvas_BL.min()), int(canvas_BL.max())
    if low < 0 or high > mask_id:
        raise UserError(
            f"the canvas holds id {low if low < 0 else high}, the model knows 0 to {mask_id} (the "
            "last is the mask)"
        )


def empty_canvas(tokenizer: Tokenizer, length: int) -> Canvas:
    """Nothing given."""
    return canvas_from_pieces(tokenizer, [length])


def canvas_from_pieces(tokenizer: Tokenizer, pieces: Sequence[str | int]) -> Canvas:
    """Texts are given; a number is that many tokens to generate: ``["The ", 12, " sat."]``."""
    ids: list[int] = []
    for piece in pieces:
        if isinstance(piece, str):
            ids += tokenizer.encode(piece).tolist()
        elif piece < 1:
            raise UserError(f"a gap needs at least one token, got {piece}")
        elif len(ids) + piece > LONGEST:
            raise UserError(f"a canvas has {LONGEST:,} tokens at most")
        else:
            ids += [tokenizer.mask_id] * piece
    if not ids:
        raise UserError("the canvas is empty")
    return Canvas(torch.tensor(ids), tokenizer.mask_id)


def canvas_from_text(tokenizer: Tokenizer, text: str) -> Canvas:
    """``"The [MASK*12] sat on the [MASK]."``: [MASK*n] is a gap of n tokens."""
    pieces: list[str | int] = []
    end = 0
    for gap in _GAP.finditer(text):
        size = count_of((gap[1] or "1").lstrip("0") or "0")
        pieces += [text[end : gap.start()], LONGEST + 1 if size is None else size]
        end = gap.end()
    pieces.append(text[end:])
    for piece in pieces:
        if isinstance(piece, str) and (odd := _ALMOST_GAP.search(piece)):
            raise UserError(f"{odd[0]} is not a gap; write [MASK] or [MASK*12]")
    if len(pieces) == 1:
        raise UserError(
            "the canvas has no gap; write [MASK*12] where 12 tokens are to be generated"
        )
    return canvas_from_pieces(tokenizer, [p for p in pieces if p != ""])


def canvas_from_prefix(tokenizer: Tokenizer, prefix: str, length: int) -> Canvas:
    """A given beginning; the rest of ``length`` tokens is to be generated."""
    num_given = len(tokenizer.encode(prefix))
    if num_given >= length:
        raise UserError(
            f"the prefix has {num_given} tokens, the canvas {length}: nothing is left to generate"
        )
    return canvas_from_pieces(tokenizer, [prefix, length - num_given])


def begin_canvas(canvas: Canvas, tokenizer: Tokenizer) -> Canvas:
    """BOS before a canvas, for models that predict from what is before and so need a beginning."""
    return Canvas(torch.cat([torch.tensor([tokenizer.bos_id]), canvas.ids_L]), canvas.mask_id)


def frame_canvas(canvas: Canvas, tokenizer: Tokenizer, framework: Framework) -> Canvas:
    """BOS before and EOS behind a canvas, as wrapped rows have them.

    A model with a fixed order takes only what comes first in it: BOS at most; EOS it writes itself.
    """
    begin, end = tokenizer.bos_id, tokenizer.eos_id
    if isinstance(framework, Ordered) and framework.rank_L is not None:
        begin = begin if int(framework.rank_L[0]) == 0 else canvas.mask_id
        end = canvas.mask_id
    ids = torch.cat([torch.tensor([begin]), canvas.ids_L, torch.tensor([end])])
    return Canvas(ids, canvas.mask_id)


# What generation shows of itself while it runs: the rows after each step, and tokens as text.
#
# Whoever watches gets a :class:`Step` per step. B rows of one batch, L length.

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


@dataclass(frozen=True, eq=False)
class Step:
    """The rows of one batch after a step. Tokens may appear, change, or be masked again."""

    number: int
    """0 is the canvas as it was given; then 1, 2, ... for each step."""
    num_steps: int
    """Steps planned in all."""
    num_calls: int
    """Network calls so far, for this batch."""
    t: float
    """Time after the step: 1 all masked, 0 clean. Where blocks take turns, by the share of masked
    tokens of the batch."""
    first_sample: int
    """Which of all samples row 0 is."""
    ids_BL: Tensor
    """On the CPU, int64, the mask id where masked. Not to be changed by who receives it; the
    sampler may change it later, so copy what is kept."""


OnStep = Callable[[Step], None]


def to_all(*receivers: OnStep) -> OnStep:
    """One receiver that hands each step to several, in order."""

    def on_step(step: Step) -> None:
        for receive in receivers:
            receive(step)

    return on_step


class TokenTexts:
    """The text of each token by itself, as it stands inside a text.

    A token is decoded behind another one, since some decoders treat the first token of a text
    differently (a space is dropped, a word piece keeps its sign). Bytes that are no character by
    themselves are shown as ``\\xNN`` where a token is a byte, else as the replacement character;
    special tokens, which decoding leaves out, by name.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._before = tokenizer.encode("a")
        self._known = {
            tokenizer.pad_id: "<pad>",
            tokenizer.bos_id: "<bos>",
            tokenizer.eos_id: "<eos>",
        }
        self._known = {token: name for token, name in self._known.items() if self._is_hidden(token)}

    def _is_hidden(self, token: int) -> bool:
        return token >= 0 and not self._tokenizer.decode(np.array([token]))

    def __call__(self, token: int) -> str:
        """The text of one id that is not the mask."""
        if token not in self._known:
            self._known[token] = self._decode(token)
        return self._known[token]

    def _decode(self, token: int) -> str:
        decode = self._tokenizer.decode
        before, both = decode(self._before), decode(np.append(self._before, token))
        text = both[len(before) :] if both.startswith(before) else decode(np.array([token]))
        if isinstance(self._tokenizer, ByteTokenizer) and text == REPLACEMENT:
            return f"\\x{token:02x}"
        return text or REPLACEMENT
