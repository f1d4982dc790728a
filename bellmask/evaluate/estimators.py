"""mdlm's estimators of the NELBO, for comparison with exact mask counts.

A mask rate m is drawn for each block, each token is hidden with probability m, and the sum of
cross-entropies of hidden tokens is divided by m (Eq. L_MDM with uniform times): per token,
its mean over m in (0, 1) is the NELBO. Rates are stratified over a group of blocks, as mdlm does
over its evaluation batch, or independent.

At m -> 0 the weight 1/m makes the variance infinite (its integral diverges like a logarithm), so
mdlm draws m from [floor, 1]. That leaves out what is easiest to predict: a bias upwards.

A pass is one block seen once. B blocks, L block length, N masked rows.
"""

from __future__ import annotations

import math
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bellmask.diffusion.frameworks import Mdm
from bellmask.evaluate.likelihood import Scorer
from bellmask.utils.distributed import autocast
from bellmask.utils.rng import stream_key, uniform, uniform_rows
from bellmask.utils.stats import clustered_error

TIME_FLOOR = 1e-3
"""mdlm's smallest mask rate."""
GROUP = 16
"""Blocks over which mdlm's evaluation stratifies: its batch."""

Kind = Literal["stratified", "independent"]


def mask_rates(
    count: int, seed: int, *, kind: Kind, group: int = GROUP, time_floor: float = TIME_FLOOR
) -> Tensor:
    """A mask rate in [floor, 1) for each of ``count`` blocks, float64.

    Stratified: in each group of consecutive blocks one from each of as many equal strata, in
    random order.
    """
    u_B = uniform(stream_key(seed, "estimator rates"), torch.arange(count))
    if kind == "stratified":
        group_B = torch.arange(count) // group
        first_B = group_B * group
        # sorting random numbers, group after group, gives random orders of strata
        noise_B = uniform(stream_key(seed, "estimator strata"), torch.arange(count))
        order_B = (group_B + noise_B).argsort() - first_B
        u_B = (order_B + u_B) / (count - first_B).clamp(max=group)
    return time_floor + (1 - time_floor) * u_B


@torch.no_grad()
def weighted_sums(scorer: Scorer, index_B: Tensor, rate_B: Tensor, key: int) -> Tensor:
    """Sum of hidden tokens' cross-entropies over the mask rate, for each block, float64 [B]."""
    framework, device = scorer.framework, scorer.world.device
    assert isinstance(framework, Mdm)
    x0_BL, length_B = scorer.blocks.rows(index_B), scorer.blocks.row_lengths(index_B)
    is_real_BL = torch.arange(x0_BL.shape[1]) < length_B[:, None]
    real = None if bool(is_real_BL.all()) else is_real_BL
    problem = framework.training(
        x0_BL,
        framework.schedule.inverse(1 - rate_B),
        uniform_rows(key, index_B, x0_BL.shape[1]),
        mask_id=scorer.mask_id,
        is_real_BL=real,
    )
    with autocast(device, scorer.precision):
        mask = scorer.rules.mask(x0_BL, real)
        ce_N = problem.ask(scorer.model, device, mask=mask, reduce=False).double().cpu()
    owner_N = problem.rows_N // x0_BL.shape[1]
    return torch.zeros(len(index_B), dtype=torch.float64).index_add_(0, owner_N, ce_N) / rate_B


def one_pass(
    scorer: Scorer,
    seed: int,
    *,
    kind: Kind,
    group: int = GROUP,
    time_floor: float = TIME_FLOOR,
    batch_size: int = 64,
) -> float:
    """The NELBO per token, nats, from one mask for each block."""
    count = len(scorer.blocks)
    rate_B = mask_rates(count, seed, kind=kind, group=group, time_floor=time_floor)
    key = stream_key(seed, "estimator masks")
    total = sum(
        float(weighted_sums(scorer, index_B, rate_B[index_B], key).sum())
        for index_B in torch.arange(count).split(batch_size)
    )
    return total / int(scorer.blocks.row_lengths(slice(None)).sum())


def low_rate_loss(
    scorer: Scorer, seed: int, *, draws: int, time_floor: float = TIME_FLOOR, batch_size: int = 64
) -> NDArray[np.float64]:
    """Mean cross-entropy of hidden tokens at mask rates below the floor, for each block.

    Given that a token is hidden, the L - 1 others are so with probability m each: the count of
    masks is 1 + Binomial(L - 1, m), and the mean loss at that count is measured. No weight occurs.
    """
    length_B = scorer.blocks.row_lengths(slice(None))
    total_B = torch.zeros(len(length_B), dtype=torch.float64)
    for draw in range(draws):
        for index_B in torch.arange(len(length_B)).split(batch_size):
            level_B = uniform(stream_key(seed, "low rate", draw), index_B)
            rate_B = time_floor * (draw + level_B) / draws
            u_BL = uniform_rows(
                stream_key(seed, "low count", draw), index_B, scorer.blocks.block_length
            )
            is_other_BL = torch.arange(u_BL.shape[1]) < length_B[index_B, None] - 1
            others_B = ((u_BL < rate_B[:, None]) & is_other_BL).sum(1)
            context_B = length_B[index_B] - 1 - others_B
            key = stream_key(seed, "low masks", draw)
            total_B[index_B] += scorer.mean(index_B, context_B, key) / draws
    return total_B.numpy()


def floor_bias(
    nelbo_B: NDArray[np.float64],
    low_B: NDArray[np.float64],
    length_B: NDArray[np.int64],
    time_floor: float,
) -> tuple[float, float]:
    """(bias of the floor in nats per token, standard error over blocks).

    With g(m) the loss at rate m, mean g over [floor, 1] - mean g over [0, 1] is
    floor / (1 - floor) (NELBO - mean g over [0, floor]).
    """
    scale = time_floor / (1 - time_floor)
    weight_B = length_B / length_B.mean()
    gap_B = weight_B * (nelbo_B - low_B)
    mean = float(gap_B.mean())
    error = clustered_error(gap_B - weight_B * mean) if len(gap_B) > 1 else math.nan
    return scale * mean, scale * error
