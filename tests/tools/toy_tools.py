"""Rows of a toy source from a generator."""

from __future__ import annotations

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
