"""Sampling token by token with a causal model, in the order it was trained for.

One call per token, and one for all given ones: a model that can keep keys and values sees each slot
once; any other gets the whole prefix each time.

B canvases, L length.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from bellmask.diffusion.frameworks import Ordered
from bellmask.generate.canvas import OnStep, Step, check_rows
from bellmask.generate.sampler import Generation, TokenChoice
from bellmask.utils.errors import UserError
from bellmask.utils.rng import stream_key, uniform_rows


@torch.no_grad()
def generate_in_order(
    model: Callable[..., Tensor],
    canvas_BL: Tensor,
    framework: Ordered,
    *,
    mask_id: int,
    choice: TokenChoice | None = None,
    seed: int = 0,
    first_sample: int = 0,
    device: torch.device | None = None,
    on_step: OnStep | None = None,
) -> Generation:
    """Fill the masked positions; all canvases have the same ones.

    Given tokens must come first: any of them can where orders are random; a fixed order has its own
    first ones (for an ARM the prefix). Sample ``first_sample + i`` has its own noise.
    """
    check_rows(canvas_BL, mask_id)
    device, choice = device or torch.device("cpu"), choice or TokenChoice()
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
    make_cache = getattr(model, "new_cache", None)
    cache = make_cache() if make_cache else None
    made_BL, num_steps = canvas_BL.clone(), length - num_given
    if on_step:
        on_step(Step(0, num_steps, 0, 1.0, first_sample, made_BL))
    for number, slot in enumerate(range(num_given, length), start=1):
        seen = slice(0 if cache is None or number == 1 else slot, slot + 1)
        width = seen.stop - seen.start
        logits_BV = model(
            torch.cat([begin_B, slots_BL], dim=1)[:, seen].to(device),
            (torch.arange(num_samples) * width + width - 1).to(device),
            positions=position_BL[:, seen].to(device),
            target_positions=position_BL[:, seen.start + 1 : slot + 2].to(device),
            **({} if cache is None else {"cache": cache}),
        )
        counters_B = samples * length + order_BL[:, slot]
        slots_BL[:, slot] = choice.draw(logits_BV, counters_B, stream_key(seed, "gumbel")).cpu()
        made_BL.scatter_(1, order_BL[:, slot, None], slots_BL[:, slot, None])
        if on_step:
            left = 1 - number / num_steps
            on_step(Step(number, num_steps, number, left, first_sample, made_BL))
    return Generation(made_BL, num_steps, num_steps * num_samples)


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
