"""What generation shows of itself while it runs: the rows after each step, and tokens as text.

Whoever watches gets a :class:`Step` per step. B rows of one batch, L length.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from bellmask.data.tokenizers import ByteTokenizer, Tokenizer

if TYPE_CHECKING:
    from torch import Tensor

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
