"""Bytes on disk: checkpoints by the retention rules, and prepared data where its size is known."""

from __future__ import annotations

import math
from dataclasses import dataclass

from bellmask.config.config import RunConfig
from bellmask.config.options import Interval
from bellmask.data.corpora import find_policy
from bellmask.plan.network import Parameters
from bellmask.plan.trace import Update

BYTES_PER_NAME = 330
"""A tensor's name and shape in a checkpoint's headers, about."""
BYTES_PER_ROW = 16
"""Length and document number beside each prepared row."""


@dataclass(frozen=True)
class Checkpoints:
    """What a run leaves on disk."""

    each: int
    kept: int
    """Most that are there at once."""

    @property
    def total(self) -> int:
        """With the one that is being written."""
        return self.each * (self.kept + 1)


def checkpoint_sizes(
    config: RunConfig, parameters: Parameters, update: Update, tokens_per_step: int
) -> Checkpoints:
    """Weights, optimizer and average in float32, and how many of them the rules keep."""
    each = 4 * parameters.total + update.optimizer_bytes + update.average_bytes
    each += BYTES_PER_NAME * update.num_tensors
    options, steps = config.checkpoint, config.train.steps
    interval = Interval.parse(options.every)
    per_save = {"steps": interval.amount, "tokens": interval.amount / tokens_per_step}
    every = per_save.get(interval.unit, 1.0)  # by the clock: as many as the rules can keep
    made = math.ceil(steps / every) if every else 1  # the last step is always saved
    made += len(options.keep_steps)
    kept = options.keep_last + int(options.keep_best) + len(options.keep_steps)
    if options.keep_every:
        kept += steps // options.keep_every
    return Checkpoints(each, min(kept, made))


@dataclass(frozen=True)
class Known:
    """How large a corpus is."""

    documents: int
    tokens: float
    """With one EOS per document."""
    source: str


LM1B_SENTENCES = 30_301_028
LM1B_TOKENS_PER_SENTENCE = 28.62 + 1
CORPUS_SIZES: dict[tuple[str, str], Known] = {
    ("lm1b", "bert-base-uncased"): Known(
        LM1B_SENTENCES,
        LM1B_SENTENCES * LM1B_TOKENS_PER_SENTENCE,
        "published number of sentences, times 28.6 tokens and EOS (mean of 12,216 held-out ones)",
    ),
    ("openwebtext", "gpt2"): Known(
        7_913_769,
        9_040_017_095 * 7_913_769 / 8_013_769,
        "published count of GPT-2 tokens, less 100,000 documents for validation",
    ),
    ("fineweb_edu", "gpt2"): Known(9_672_101, 10e9, "the sample is made to hold 10 B GPT-2 tokens"),
}
EXAMPLE_COUNTS = {"tasks": (210_000, "App. C.1"), "sharegpt": (103_000, "App. C.1")}


@dataclass(frozen=True)
class DataSize:
    """Prepared training rows."""

    rows: int | None
    num_bytes: int | None
    source: str


def data_size(config: RunConfig, num_tokens: int) -> DataSize:
    """From the tables above; None where nothing is known before the data is prepared."""
    length = config.data.block_length
    row_bytes = length * (2 if num_tokens < 2**16 else 4) + BYTES_PER_ROW
    if config.sft.train is not None:
        name = config.sft.train.partition(":")[0]
        rows, source = EXAMPLE_COUNTS.get(name, (None, ""))
        if rows is None:
            return DataSize(None, None, f"{config.sft.train}: known after it is prepared")
        return DataSize(rows, rows * (row_bytes + 8), f"examples: {source}")
    data = config.data
    tokenizer = data.tokenizer if config.start.model is None else _family(config.start.model)
    known = CORPUS_SIZES.get((data.train, tokenizer))
    if known is None or data.mixture or data.from_files:
        return DataSize(None, None, f"{data.train} in {tokenizer}: 'bellmask data show' counts it")
    policy = find_policy(data, data.train)
    rows = known.documents
    if data.packing == "packed":
        rows = int(known.tokens / (length - (2 if policy.wrap else 0)))
    return DataSize(rows, rows * row_bytes, known.source)


def _family(model: str) -> str:
    """Whose tokenizer a causal LM has, where its name says so."""
    return "gpt2" if model.rsplit("/", 1)[-1].startswith("gpt2") else model
