"""Step → global batch → this rank's slice: a function of (seed, step), without state."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from bellmask.utils.rng import IndexPermutation, shuffle, stream_key

MIXTURE_PERIOD = 1000
"""Mixture weights hold exactly in every run of this many samples."""


@dataclass(frozen=True)
class BatchPlan:
    """Sample i of step s is number g = s B + i of an endless run of shuffled epochs.

    With ``sizes`` and ``weights`` the blocks are several corpora one after another, drawn in
    proportion to the weights; each goes through its own epochs.
    """

    num_blocks: int
    batch_size: int
    seed: int
    sizes: tuple[int, ...] = ()
    weights: tuple[float, ...] = ()

    def rows(self, step: int) -> Tensor:
        """Block numbers of the global batch at a step, int64 [batch_size]."""
        g = step * self.batch_size + torch.arange(self.batch_size)
        if not self.sizes:
            return self._shuffled(g, self.num_blocks, "data")
        pattern, rank, counts = self._pattern()
        cycle, place = g // MIXTURE_PERIOD, g % MIXTURE_PERIOD
        rows, offset = torch.empty_like(g), 0
        for corpus, size in enumerate(self.sizes):
            inside = pattern[place] == corpus
            number = cycle[inside] * counts[corpus] + rank[place[inside]]
            rows[inside] = offset + self._shuffled(number, size, f"data {corpus}")
            offset += size
        return rows

    def _shuffled(self, number: Tensor, size: int, stream: str) -> Tensor:
        """Each number's block: its place in its epoch, through that epoch's permutation."""
        epoch, place = number // size, number % size
        rows = torch.empty_like(number)
        for e in torch.unique(epoch).tolist():
            inside = epoch == e
            permuted = IndexPermutation(size, stream_key(self.seed, stream, e))
            rows[inside] = permuted(place[inside])
        return rows

    def _pattern(self) -> tuple[Tensor, Tensor, list[int]]:
        """(corpus of each place in a period, its rank among that corpus's places, counts)."""
        counts = share_out(self.weights, MIXTURE_PERIOD)
        corpus = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
        pattern = corpus[shuffle(stream_key(self.seed, "mixture"), MIXTURE_PERIOD)]
        rank = torch.zeros_like(pattern)
        for number in range(len(counts)):
            inside = pattern == number
            rank[inside] = torch.arange(int(inside.sum()))
        return pattern, rank, counts


def share_out(weights: Sequence[float], total: int) -> list[int]:
    """Whole numbers in proportion to weights that add up to ``total`` (largest remainders)."""
    exact = [w / sum(weights) * total for w in weights]
    counts = [int(e) for e in exact]
    by_remainder = sorted(range(len(exact)), key=lambda i: counts[i] - exact[i])
    for i in by_remainder[: total - sum(counts)]:
        counts[i] += 1
    return counts


def rank_share(batch_size: int, rank: int, world_size: int) -> range:
    """The global indices of this rank's samples: one contiguous run."""
    share = batch_size // world_size
    return range(rank * share, (rank + 1) * share)
