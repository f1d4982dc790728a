"""One example → one row: the prompt is given, the response and the EOS after it can be masked.

A row is [BOS], prompt, response, EOS up to a multiple of ``round_to`` tokens (one at least), pads
up to the block length. So the part to fill depends on the example alone, never on its batch.
``Row.start`` is the number of prompt tokens, ``Row.length`` that of prompt and filled response;
pads are neither attended, masked nor scored. Prompt and response are encoded apart: no token spans
both. A prompt too long for the block loses its oldest tokens; a response that does not fit with one
token before it is left out and counted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from bellmask.data.messages import Example, Numbered
from bellmask.data.packing import Row
from bellmask.data.templates import Kind, PromptEncoder, Template, join, response_after
from bellmask.data.tokenizer import Ids, Tokenizer

TOO_LONG = "left out: response longer than the block"
EMPTY = "left out: response without tokens"
CUT = "prompts cut on the left"


@dataclass(frozen=True)
class ExampleRules:
    """Everything but the template's text that decides how an example becomes a row."""

    block_length: int
    round_to: int = 32
    template: Kind = "auto"
    bos_first: bool = False


def canvas_length(num_tokens: int, round_to: int) -> int:
    """Tokens of a response with its EOS: one more, rounded up. Generation uses the same rule."""
    return -(-(num_tokens + 1) // round_to) * round_to


def encode_example(
    example: Example, tokenizer: Tokenizer, template: Template, rules: ExampleRules, number: int = 0
) -> Row | None:
    """The row of one example; None if its response does not fit."""
    encoder = PromptEncoder(tokenizer, template)
    return next(encode_examples([(number, example)], encoder, rules, Counter()))[0]


def encode_examples(
    examples: Iterable[Numbered], encoder: PromptEncoder, rules: ExampleRules, counts: Counter[str]
) -> Iterator[tuple[Row | None, str]]:
    """(row, response text) of each example, encoded together."""
    kept = list(examples)
    template, tokenizer = encoder.template, encoder.tokenizer
    prompts = [template.parts(e.prompt_messages, e.is_conversation) for _, e in kept]
    responses = [
        response_after(join(prompt), example.response)
        for prompt, (_, example) in zip(prompts, kept, strict=True)
    ]
    encoded = zip(encoder.encode(prompts), tokenizer.encode_batch(responses), strict=True)
    for (number, _), (prompt_ids, response_ids), text in zip(kept, encoded, responses, strict=True):
        yield _row(prompt_ids, response_ids, tokenizer, rules, number, counts), text


def begin_row(prompt: Ids, room: int, tokenizer: Tokenizer, bos_first: bool) -> tuple[Ids, bool]:
    """(BOS if need be and the prompt, its oldest tokens dropped where there is no room; are they).

    Training and generation begin a row alike.
    """
    begins = len(prompt) > 0 and prompt[0] == tokenizer.bos_id  # a template may write it
    first = [tokenizer.bos_id] if not len(prompt) or (bos_first and not begins) else []
    is_cut = len(first) + len(prompt) > room
    if is_cut:
        first = [tokenizer.bos_id] if bos_first else first
        prompt = prompt[len(prompt) - (room - len(first)) :]
    return np.concatenate([np.array(first, dtype=np.int64), prompt]), is_cut


def _row(
    prompt: Ids,
    response: Ids,
    tokenizer: Tokenizer,
    rules: ExampleRules,
    number: int,
    counts: Counter[str],
) -> Row | None:
    canvas = canvas_length(len(response), rules.round_to)
    room = rules.block_length - canvas
    if room < 1 or not len(response):
        counts[TOO_LONG if room < 1 else EMPTY] += 1
        return None
    given, is_cut = begin_row(prompt, room, tokenizer, rules.bos_first)
    if is_cut:
        counts[CUT] += 1
    start = len(given)
    ids = np.full(rules.block_length, tokenizer.pad_id, dtype=np.int64)
    ids[:start] = given
    ids[start : start + canvas] = tokenizer.eos_id
    ids[start : start + len(response)] = response
    return Row(ids, start + canvas, number, start)
