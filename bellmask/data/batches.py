"""Step → global batch → this rank's slice: a function of (seed, step), without state."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from bellmask.rng import IndexPermutation, stream_key


@dataclass(frozen=True)
class BatchPlan:
    """Sample i of step s is number g = s B + i of an endless run of shuffled epochs."""

    num_blocks: int
    batch_size: int
    seed: int

    def rows(self, step: int) -> Tensor:
        """Block numbers of the global batch at a step, int64 [batch_size]."""
        g = step * self.batch_size + torch.arange(self.batch_size)
        epoch, place = g // self.num_blocks, g % self.num_blocks
        rows = torch.empty_like(g)
        for e in range(int(epoch[0]), int(epoch[-1]) + 1):
            inside = epoch == e
            shuffled = IndexPermutation(self.num_blocks, stream_key(self.seed, "data", e))
            rows[inside] = shuffled(place[inside])
        return rows


def rank_share(batch_size: int, rank: int, world_size: int) -> range:
    """The global indices of this rank's samples: one contiguous run."""
    share = batch_size // world_size
    return range(rank * share, (rank + 1) * share)
