"""Sampling token by token with a causal model, in the order it was trained for.

One call per token, the whole prefix each time: plain, and quick enough for blocks of a few hundred.
B canvases, L length.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from bellmask.diffusion.orders import Ordered
from bellmask.errors import UserError
from bellmask.generate.engine import Generation, choose
from bellmask.rng import stream_key, uniform_rows


@torch.no_grad()
def generate_in_order(
    model: Callable[..., Tensor],
    canvas_BL: Tensor,
    framework: Ordered,
    *,
    mask_id: int,
    seed: int = 0,
    first_sample: int = 0,
    temperature: float = 1.0,
    noise_dtype: torch.dtype = torch.float64,
    device: torch.device | None = None,
) -> Generation:
    """Fill the masked positions; all canvases have the same ones.

    Given tokens must come first: any of them can where orders are random; a fixed order has its own
    first ones (for an ARM the prefix). Sample ``first_sample + i`` has its own noise.
    """
    device = device or torch.device("cpu")
    num_samples, length = canvas_BL.shape
    samples = first_sample + torch.arange(num_samples)
    is_given_L = canvas_BL[0] != mask_id
    assert bool(((canvas_BL != mask_id) == is_given_L).all()), "canvases differ in what is given"
    num_given = int(is_given_L.sum())
    order_BL = _order(
        framework, uniform_rows(stream_key(seed, "order"), samples, length), is_given_L
    )
    slots_BL = canvas_BL.gather(1, order_BL)
    begin_B = torch.full((num_samples, 1), mask_id)
    position_BL = torch.cat([torch.zeros_like(begin_B), order_BL + 1], dim=1)
    for slot in range(num_given, length):
        seen = slice(0, slot + 1)
        logits_BV = model(
            torch.cat([begin_B, slots_BL], dim=1)[:, seen].to(device),
            (torch.arange(num_samples) * (slot + 1) + slot).to(device),
            positions=position_BL[:, seen].to(device),
            target_positions=position_BL[:, 1 : slot + 2].to(device),
        )
        counters_B = samples * length + order_BL[:, slot]
        key = stream_key(seed, "gumbel")
        slots_BL[:, slot] = choose(logits_BV, counters_B, key, temperature, noise_dtype).cpu()
    made_BL = torch.empty_like(canvas_BL).scatter_(1, order_BL, slots_BL)
    num_calls = length - num_given
    return Generation(made_BL, num_calls, num_calls * num_samples)


def _order(framework: Ordered, u_BL: Tensor, is_given_L: Tensor) -> Tensor:
    """Positions in the order they come, given ones first; [B, L]."""
    length = len(is_given_L)
    if framework.rank_L is None:
        return torch.where(is_given_L, u_BL - 1, u_BL).argsort(dim=1)
    is_arm = bool((framework.rank_L.diff() > 0).all())
    if length > len(framework.rank_L) and not is_arm:
        raise UserError(
            f"this model has an order for {len(framework.rank_L)} tokens, the canvas {length}"
        )
    order_L = torch.arange(length) if is_arm else framework.orders(u_BL[:1]).reshape(-1)
    if bool(is_given_L[order_L].long().diff().gt(0).any()):
        raise UserError(
            "this model writes in a fixed order, and the given tokens are not the first in it: an "
            "ARM takes a prefix, a sigma-ARM nothing; gaps are for masked models and AoARMs"
        )
    return order_L.expand(len(u_BL), -1).contiguous()
