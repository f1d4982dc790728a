"""How many tokens a text is, without the judge's tokenizer: an estimate and an upper bound."""

from __future__ import annotations

import math
from collections.abc import Sequence

CHARACTERS_PER_TOKEN = 4
"""Of English text; other letters count as a token each."""
TOKENS_PER_MESSAGE = 8
"""Role and separators, rounded up."""


def estimate_tokens(text: str) -> int:
    """About how many tokens; within a third or so for English prose."""
    num_ascii = sum(letter < "\x80" for letter in text)
    return math.ceil(num_ascii / CHARACTERS_PER_TOKEN + len(text) - num_ascii)


def most_tokens(text: str) -> int:
    """No byte-level tokenizer makes more: a token is at least one byte."""
    return len(text.encode("utf-8", errors="replace"))


def prompt_tokens(messages: Sequence[tuple[str, str]]) -> int:
    """The estimate for a whole prompt."""
    return sum(estimate_tokens(content) + TOKENS_PER_MESSAGE for _, content in messages)


def most_prompt_tokens(messages: Sequence[tuple[str, str]]) -> int:
    """The upper bound for a whole prompt."""
    return sum(most_tokens(content) + TOKENS_PER_MESSAGE for _, content in messages)
