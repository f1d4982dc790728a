"""Rows of a toy source from a generator, and any rows as blocks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from bellmask.data.blocks import Blocks, Row
from bellmask.data.toys import ToySource


def sample(source: ToySource, count: int, generator: torch.Generator) -> torch.Tensor:
    """int64 [count, L]."""
    size = (count, source.num_uniforms)
    return source.draw(torch.rand(size, generator=generator, dtype=torch.float64))


def toy_rows(source: ToySource, count: int, generator: torch.Generator) -> Blocks:
    """As blocks, each its own document."""
    rows = sample(source, count, generator).numpy()
    return Blocks.from_rows(Row(ids, source.length, n) for n, ids in enumerate(rows))


def blocks_of(rows: Sequence[Any], lengths: Sequence[int] | None = None) -> Blocks:
    """Rows of tokens, all of their tokens or the first ``lengths``, each its own document."""
    lengths = lengths or [len(row) for row in rows]
    triples = zip(rows, lengths, range(len(rows)), strict=True)
    return Blocks.from_rows(Row(np.asarray(row), n, b) for row, n, b in triples)
