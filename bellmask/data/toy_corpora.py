"""Toy sources as corpora: ``--data.train toy:local:0.5 --data.tokenizer symbols:8``.

Rows are drawn in memory, each its own document, from keys that depend on the toy, its length and
the split alone: the same on every machine and every rank. 2^18 rows of 128 symbols take a few
seconds. :func:`toy_source` gives an analysis the exact source of a run's data.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass, fields

import numpy as np
import torch

from bellmask.config.options import DataOptions
from bellmask.data.blocks import Blocks
from bellmask.data.corpora import TOY_PREFIX
from bellmask.data.tokenizer import Tokenizer
from bellmask.data.toy import ToySource
from bellmask.utils.errors import UserError, look_up
from bellmask.utils.rng import stream_key, uniform_rows

NUM_SYMBOLS = 8
NUM_ROWS = {"train": 1 << 18, "valid": 4096}
FORMAT = 1
"""Part of every fingerprint and key; raise it when rows would come out differently."""
_ROWS_AT_ONCE = 1 << 13
_OWN_OPTIONS = ("train", "tokenizer", "block_length", "cache")


@dataclass(frozen=True)
class _Toy:
    """A toy by name; where ``default`` is None it takes no number."""

    build: Callable[[int, float], ToySource]
    """(length, number) → source."""
    default: float | None = None
    number: str = ""
    highest: float = 1.0
    """The number runs from 0 to this."""


TOYS = {
    "sticky": _Toy(
        lambda length, stay: ToySource.sticky(NUM_SYMBOLS, length, stay), 0.8, "stay", 0.999
    ),
    "order2": _Toy(lambda length, _: ToySource.order_two(NUM_SYMBOLS, length)),
    "hidden": _Toy(lambda length, _: ToySource.hidden(NUM_SYMBOLS, length)),
    "local": _Toy(
        lambda length, locality: ToySource.local(NUM_SYMBOLS, length, locality), 0.5, "locality"
    ),
}


def toy_source(options: DataOptions) -> ToySource:
    """The exact source of a run's rows."""
    name, number = _parse(options.train)
    return TOYS[name].build(options.block_length, number)


def toy_blocks(options: DataOptions, tokenizer: Tokenizer) -> tuple[Blocks, Blocks]:
    """Training and validation rows, held in memory."""
    source = toy_source(options)
    _check(options)
    if tokenizer.num_tokens != source.num_tokens:
        raise UserError(
            f"data.train={options.train} has {source.num_tokens} symbols; give "
            f"--data.tokenizer symbols:{source.num_tokens}, not {options.tokenizer}"
        )
    return _draw(options, source, "train"), _draw(options, source, "valid")


def _parse(train: str) -> tuple[str, float]:
    """(name, number) of ``toy:NAME[:NUMBER]``."""
    name, colon, text = train.removeprefix(TOY_PREFIX).partition(":")
    toy = look_up("toy corpus", name, TOYS)
    if toy.default is None:
        if colon:
            raise UserError(f"data.train={train}: {TOY_PREFIX}{name} takes no number")
        return name, 0.0
    try:
        number = float(text) if colon else toy.default
    except ValueError:
        number = -1.0
    if not 0 <= number <= toy.highest:
        raise UserError(
            f"data.train={train}: the {toy.number} of {TOY_PREFIX}{name} is a number from 0 to "
            f"{toy.highest:g}; write {TOY_PREFIX}{name}:{toy.default:g}"
        )
    return name, number


def _check(options: DataOptions) -> None:
    """Refuse options about text and documents."""
    plain = DataOptions()
    given = [
        "--data.from" if field.name == "from_files" else f"--data.{field.name.replace('_', '-')}"
        for field in fields(options)
        if field.name not in _OWN_OPTIONS
        and getattr(options, field.name) != getattr(plain, field.name)
    ]
    if given:
        raise UserError(
            f"data.train={options.train} is drawn symbol by symbol, not read from text: "
            f"leave out {', '.join(given)}"
        )


def _draw(options: DataOptions, source: ToySource, split: str) -> Blocks:
    name, number = _parse(options.train)
    count = NUM_ROWS[split]
    parts = {
        "toy": name,
        "number": number,
        "symbols": source.num_tokens,
        "length": source.length,
        "rows": count,
        "split": split,
        "format": FORMAT,
    }
    mark = json.dumps(parts, sort_keys=True)
    key = stream_key(0, "toy corpus", mark)
    tokens = np.empty((count, source.length), dtype=np.uint8)
    for rows in torch.arange(count).split(_ROWS_AT_ONCE):
        drawn = source.draw(uniform_rows(key, rows, source.num_uniforms))
        tokens[rows[0] : rows[-1] + 1] = drawn.numpy()
    lengths = np.full(count, source.length, dtype=np.int64)
    fingerprint = hashlib.sha256(mark.encode()).hexdigest()
    return Blocks(tokens, lengths, np.arange(count, dtype=np.int64), fingerprint)
