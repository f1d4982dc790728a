"""Step → its rows, times, masks and attention: a function of (seed, step), without state.

Only a law that changes while training has state; it says itself what it is at a step.

B batch, L block length. Noise belongs to a sample's place in the global batch, so it does not
matter which process or microbatch a sample is computed in.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from bellmask.config.config import RunConfig
from bellmask.config.options import TrainOptions
from bellmask.data.blocks import BatchPlan, Blocks, rank_share
from bellmask.diffusion.laws import strata
from bellmask.diffusion.objectives import Objective
from bellmask.diffusion.theory import CountLaw
from bellmask.model.dit import same_document
from bellmask.model.transformer import AttentionRules
from bellmask.utils.distributed import World
from bellmask.utils.errors import UserError
from bellmask.utils.rng import shuffle, stream_key, uniform, uniform_rows


@dataclass(frozen=True)
class Microbatch:
    """One forward pass's share of a step, on the CPU."""

    first: int
    """Its place in the global batch, which keys its dropout noise."""
    x0_BL: Tensor
    u_BL: Tensor
    t_B: Tensor
    is_real_BL: Tensor | None
    """False at padding; None when no row of the corpus is padded."""
    is_maskable_BL: Tensor | None
    """What may be masked and scored: neither padding nor prompts; None: everything."""
    rules: AttentionRules
    weight_B: Tensor | None
    """Of each row's cross-entropies: w(t), and 1 / its maskable tokens where examples count the
    same; None: 1."""
    context_B: Tensor | None
    """Tokens to leave where that is drawn as a number; None: each by chance, at its time."""
    is_open_LL: Tensor | None
    """Edges that are there while attention is annealed (CPT); None: all."""

    def attention_mask(self) -> Tensor | None:
        """Who may look at whom."""
        mask = self.rules.mask(self.x0_BL, self.is_real_BL)
        if self.is_open_LL is None:
            return mask
        edges = self.is_open_LL[None, None]
        if mask is None:
            return edges
        return edges & (same_document(mask) if mask.ndim == 2 else mask)


@dataclass(frozen=True)
class StepPlan:
    """A whole optimizer step on this rank, and what all ranks know of it."""

    microbatches: list[Microbatch]
    num_maskable: int
    """M: maskable tokens of the whole step, over all ranks and microbatches."""
    scale: float
    """Makes a sum of w ce the loss: 1 / (M c), or by examples where those count the same."""


def is_automatic(options: TrainOptions, device: torch.device) -> bool:
    """True where the microbatch is chosen by the memory of the device."""
    size = options.microbatch_size
    return size == "auto" or (size is None and device.type in ("cuda", "mps"))


def microbatch_sizes(options: TrainOptions, num_processes: int) -> list[int]:
    """All that divide a process's rows, also those of batch_warmup's steps; largest first."""
    share = options.batch_size // num_processes
    fewest = share // (4 if options.batch_warmup else 1)
    divisors = (n for n in range(share, 0, -1) if share % n == 0)
    return [n for n in divisors if fewest % n == 0 or n % fewest == 0]


def split_batch(options: TrainOptions, num_processes: int) -> int:
    """Rows per microbatch (all for ``auto``); UserError if the batch is not divisible."""
    batch, size = options.batch_size, options.microbatch_size
    if not isinstance(size, int):
        size = None
    unit = num_processes * (size or 1) * (4 if options.batch_warmup else 1)
    if batch % unit:
        below = batch // unit * unit
        near = " or ".join(str(n) for n in (below, below + unit) if n)
        times = f" times train.microbatch_size={size}" if size else ""
        times += " times 4 (train.batch_warmup)" if options.batch_warmup else ""
        raise UserError(
            f"train.batch_size={batch} must be a multiple of {num_processes} processes{times}: "
            f"{near}"
        )
    return size or batch // num_processes


# Paper: App. C.1: continual pretraining
class StepPlanner:
    """step → its data and noise. Holds no state."""

    def __init__(
        self,
        blocks: Blocks,
        objective: Objective,
        config: RunConfig,
        world: World,
        *,
        rules: AttentionRules | None = None,
        mixture: tuple[tuple[int, ...], tuple[float, ...]] = ((), ()),
        microbatch: int | None = None,
    ) -> None:
        """``mixture``: sizes and weights of its corpora; ``microbatch``: what ``auto`` became."""
        self.blocks, self.objective, self.world = blocks, objective, world
        self.config, self.options, self.rules = config, config.train, rules or AttentionRules()
        self.microbatch = microbatch or split_batch(self.options, world.size)
        size, seed = self.options.batch_size, self.options.seed
        self.batches = BatchPlan(len(blocks), size, seed, *mixture)
        self.is_padded = blocks.is_padded  # looks at all rows
        self.counts = CountLaw(objective) if config.sft.min_masks else None
        self.later_counts = lru_cache(maxsize=2)(CountLaw)  # of a law that has changed
        is_sft = config.sft.train is not None
        # rows of like length share a microbatch, cut to its longest: same loss, less padding
        self.sorts_by_length = is_sft
        # each row has the same weight in the loss, not each token
        self.counts_examples = is_sft and config.sft.average == "examples"

    def batch_size(self, step: int) -> int:
        """Rows of the global batch at a step."""
        full, until = self.options.batch_size, self.options.batch_warmup
        return full // (4 if 2 * step < until else 2 if step < until else 1)

    def levels(self, step: int) -> Tensor:
        """Uniform numbers of the whole global batch, one per stratum (App. C.5), float64."""
        seed, count = self.options.seed, self.batch_size(step)
        levels = uniform(stream_key(seed, "times", step), torch.arange(count))
        if self.options.stratified:
            levels = strata(shuffle(stream_key(seed, "strata", step), count), levels)
        return levels

    # Paper: App. C.5: stratified sampling
    def times(self, step: int) -> Tensor:
        """Times of the whole global batch, float64 [batch_size]."""
        return self.objective.at(step).times(self.levels(step))

    def length(self, step: int) -> int:
        """Block length at a step: shorter now and then, if the options say so."""
        full = self.blocks.block_length
        which, how_long = uniform(
            stream_key(self.options.seed, "length", step), torch.arange(2)
        ).tolist()
        return 1 + int(how_long * full) if which < self.options.random_length_fraction else full

    def open_edges(self, step: int, length: int) -> Tensor | None:
        """One matrix [L, L] per step, whatever the batch: causal edges, others by chance p.

        p = (s + 1) / anneal_steps. From p = 1 on there is none: full attention needs no mask.
        """
        share = (step + 1) / self.config.start.anneal_steps
        if share >= 1:
            return None
        full = self.blocks.block_length
        key = stream_key(self.options.seed, "attention", step)
        u_LL = uniform_rows(key, torch.arange(length), full)[:, :length]
        return torch.ones(length, length, dtype=torch.bool).tril() | (u_LL < share)

    def __call__(self, step: int) -> StepPlan:
        """Everything random about a step."""
        length, levels, objective = self.length(step), self.levels(step), self.objective.at(step)
        rows = self.batches.rows(step)[: len(levels)]
        real = self.blocks.row_lengths(rows).clamp(max=length)  # tokens before padding
        start = torch.minimum(self.blocks.row_starts(rows), real)  # first maskable position
        key = stream_key(self.options.seed, "masks", step)

        def microbatch(first: int, samples: Tensor) -> Microbatch:
            ends_B, starts_B = real[samples], start[samples]
            width = max(1, int(ends_B.max())) if self.sorts_by_length else length
            place = torch.arange(width)
            is_real_BL = place < ends_B[:, None] if self.is_padded else None
            is_maskable_BL = is_real_BL
            if self.blocks.starts is not None:
                is_maskable_BL = (starts_B[:, None] <= place) & (place < ends_B[:, None])
            t_B = objective.times(levels[samples])
            context_B, weight_B = self._draw_counts(
                objective, t_B, levels[samples], ends_B - starts_B
            )
            return Microbatch(
                first,
                self.blocks.rows(rows[samples])[:, :width],
                uniform_rows(key, samples, self.blocks.block_length)[:, :width],
                t_B,
                is_real_BL,
                is_maskable_BL,
                self.rules,
                weight_B,
                context_B,
                self.open_edges(step, width),
            )

        num_maskable = int((real - start).sum())
        count = len(rows) if self.counts_examples else num_maskable
        c = objective.normalizer if self.config.objective.divide_by_c else 1.0
        microbatches = [microbatch(*share) for share in self._shares(real)]
        return StepPlan(microbatches, num_maskable, 1 / max(1, count) / c)

    def _draw_counts(
        self, objective: Objective, t_B: Tensor, levels_B: Tensor, maskable_B: Tensor
    ) -> tuple[Tensor | None, Tensor | None]:
        """(tokens left where their number is drawn, weights of rows where they differ)."""
        context_B, weight_B = None, None
        if self.counts is not None:
            counts = self.counts if objective is self.objective else self.later_counts(objective)
            count_B, weight_B = counts.draw(levels_B, maskable_B)
            context_B = maskable_B - count_B
        elif not objective.is_unweighted:
            weight_B = objective.weight(t_B)
        if self.counts_examples:
            share_B = 1 / maskable_B.clamp(min=1).double()
            weight_B = share_B if weight_B is None else weight_B * share_B
        return context_B, weight_B

    def _shares(self, real: Tensor) -> Iterator[tuple[int, Tensor]]:
        """This rank's microbatches: (number of the first sample, samples)."""
        world, total = self.world, len(real)
        size = min(self.microbatch, total // world.size)
        if not self.sorts_by_length:
            share = rank_share(total, world.rank, world.size)
            for first in range(share.start, share.stop, size):
                yield first, torch.arange(first, first + size)
            return
        by_length = torch.argsort(real, stable=True)
        for first in range(world.rank * size, total, world.size * size):
            yield first, by_length[first : first + size].sort().values
