"""The NELBO per token on fixed masks, with an honest standard error.

A block of L_b tokens gets masks of exactly n tokens, n spread evenly over 1 .. L_b; the mean
cross-entropy of the masked rows, averaged over n, is the NELBO per token (paper Eq. L_MDM and the
shared form of Sec. 2.2 with N_c = L_b - n). There is no time floor and no weight that explodes.
Masks are a function of the seed and the set of blocks alone: two models that are compared see the
same ones.

B blocks, R draws per block, L block length.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import torch
from torch import Tensor

from bellmask.data.blocks import Blocks
from bellmask.diffusion.corruption import mask_exactly
from bellmask.diffusion.schedule import Linear, Schedule
from bellmask.evaluate.result import Likelihood
from bellmask.model.attention import AttentionRules
from bellmask.rng import shuffle, stream_key, uniform, uniform_rows
from bellmask.train.distributed import World, autocast

Model = Callable[..., Tensor]


def mask_counts(
    length_B: Tensor, draws: int, seed: int, row_keys: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """(levels [B], counts [B, R]): n = 1 + floor(L_b (r + u_b) / R).

    One draw: the u_b are one per stratum, in random order over blocks. Several: each block covers
    all of 1 .. L_b by itself.
    """
    num_blocks = len(length_B)
    keys = torch.arange(num_blocks) if row_keys is None else row_keys
    level = uniform(stream_key(seed, "evaluation levels"), keys)
    if draws == 1 and row_keys is None:
        level = (shuffle(stream_key(seed, "evaluation strata"), num_blocks) + level) / num_blocks
    share_BR = (torch.arange(draws) + level[:, None]) / draws
    counts = 1 + (length_B[:, None] * share_BR).floor().long()
    return level, torch.minimum(counts, length_B[:, None])


def evaluate(
    model: Model,
    blocks: Blocks,
    *,
    mask_id: int,
    draws: int = 1,
    seed: int = 1234,
    batch_size: int = 64,
    schedule: Schedule | None = None,
    world: World | None = None,
    precision: torch.dtype = torch.float32,
    rules: AttentionRules | None = None,
    row_keys: Tensor | None = None,
    on_batch: Callable[[int], None] | None = None,
) -> Likelihood:
    """Measure the NELBO of a denoiser on all the given blocks.

    ``model(x, rows, targets, t_B=, mask=, reduce=False)`` returns each row's cross-entropy. Ranks
    share the work; each gets the whole result. ``on_batch`` is told the blocks done so far. Masks
    of block b are those of ``row_keys[b]``, by default b itself.
    """
    world = world or World()
    length_B = blocks.row_lengths(slice(None))
    level_B, count_BR = mask_counts(length_B, draws, seed, row_keys)
    ce_BR = torch.zeros(count_BR.shape, dtype=torch.float64)
    for part in _parts(len(blocks), batch_size, world):
        index = torch.arange(part.start, part.stop)
        for draw in range(draws):
            key = stream_key(seed, "evaluation masks", draw)
            ce_BR[part, draw] = masked_mean(
                model,
                blocks,
                index,
                count_BR[part, draw],
                key,
                mask_id,
                schedule,
                world,
                precision,
                rules,
                None if row_keys is None else row_keys[part],
            )
        if on_batch:
            on_batch(part.stop)
    ce_BR = world.add_up(ce_BR.to(world.device)).cpu()
    return Likelihood(
        length_B.numpy(),
        level_B.numpy(),
        count_BR.numpy(),
        ce_BR.numpy(),
        np.asarray(blocks.documents),
        blocks.num_bytes,
        f"{blocks.fingerprint}/{seed}",
    )


def _parts(total: int, size: int, world: World) -> Iterator[slice]:
    """This rank's batches of blocks: every world.size-th."""
    for number, start in enumerate(range(0, total, size)):
        if number % world.size == world.rank:
            yield slice(start, min(start + size, total))


@torch.no_grad()
def masked_mean(
    model: Model,
    blocks: Blocks,
    index_B: Tensor,
    count_B: Tensor,
    key: int,
    mask_id: int,
    schedule: Schedule | None,
    world: World,
    precision: torch.dtype,
    rules: AttentionRules | None = None,
    row_keys_B: Tensor | None = None,
) -> Tensor:
    """Mean cross-entropy of exactly ``count`` masked rows of each block, float64 [B]."""
    x0_BL, length_B = blocks.rows(index_B), blocks.row_lengths(index_B)
    block_length = x0_BL.shape[1]
    is_real = torch.arange(block_length) < length_B[:, None]
    u_BL = uniform_rows(key, index_B if row_keys_B is None else row_keys_B, block_length)
    xt_BL, is_masked_BL = mask_exactly(
        x0_BL, count_B, mask_id=mask_id, u_BL=u_BL, is_maskable_BL=is_real
    )
    rows_N = is_masked_BL.flatten().nonzero().squeeze(1)
    rules = rules or AttentionRules()
    is_padded = bool((length_B < block_length).any())
    mask = rules.mask(x0_BL, is_real if is_padded else None)
    # given n masks, the mask rate follows Beta(n, L - n + 1): the law of the n-th smallest uniform
    rate_B = torch.where(is_masked_BL, u_BL, -1.0).amax(dim=1)
    if rules.sees_pads:  # pads are noised at the same rate as the text before them
        xt_BL = torch.where(~is_real & (u_BL < rate_B[:, None]), mask_id, xt_BL)
    device = world.device
    with autocast(device, precision):
        ce_N = model(
            xt_BL.to(device),
            rows_N.to(device),
            x0_BL.flatten()[rows_N].to(device),
            t_B=(schedule or Linear()).inverse(1 - rate_B).float().to(device),
            mask=None if mask is None else mask.to(device),
            reduce=False,
        )
    total_B = torch.zeros(len(index_B), dtype=torch.float64)
    total_B.index_add_(0, rows_N // block_length, ce_N.double().cpu())
    return total_B / count_B
