"""The row of a single example."""

from __future__ import annotations

from collections import Counter

from bellmask.data.blocks import Row
from bellmask.data.chat_templates import Example, PromptEncoder, Template
from bellmask.data.examples import ExampleRules, encode_examples
from bellmask.data.tokenizers import Tokenizer


def encode_example(
    example: Example, tokenizer: Tokenizer, template: Template, rules: ExampleRules, number: int = 0
) -> Row | None:
    """As fine-tuning encodes it; None if its response does not fit."""
    encoder = PromptEncoder(tokenizer, template)
    return next(encode_examples([(number, example)], encoder, rules, Counter()))
