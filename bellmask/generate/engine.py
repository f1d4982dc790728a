"""Ancestral sampling of the reverse process (Sec. 2.1) on canvases with given tokens.

From t to s each masked token is revealed with probability (alpha_s - alpha_t) / (1 - alpha_t),
independently of what the network says. Equivalently, each position has one uniform number u and is
revealed once alpha passes u. So the reveal times are known beforehand: the network is called only
when something is revealed, only on rows where it is, and its head only on those positions. This is
exact for time-conditioned models too (they are told the t of the step in which they are called).

B canvases, L length, N positions revealed at once, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from bellmask.diffusion.schedule import Linear, Schedule
from bellmask.model.attention import attention_mask
from bellmask.model.head import CHUNK_ROWS
from bellmask.rng import stream_key, uniform, uniform_rows


@dataclass(frozen=True)
class Generation:
    """Finished rows and what they cost."""

    ids_BL: Tensor
    num_calls: int
    """Network calls, over all steps in which anything was revealed."""
    num_rows: int
    """Rows sent through the network in total; num_steps * B without the savings."""


def choose(
    logits_NV: Tensor, counters_N: Tensor, key: int, temperature: float, dtype: torch.dtype
) -> Tensor:
    """One token per row by the Gumbel trick, its noise keyed by the row's counter.

    float64 by default: float32 noise cannot reach the tail and lowers the effective temperature.
    """
    if temperature == 0:
        return logits_NV.argmax(dim=1)
    device, num_tokens = logits_NV.device, logits_NV.shape[1]
    column = torch.arange(num_tokens, device=device)
    smallest, largest = torch.finfo(dtype).tiny, 1 - torch.finfo(dtype).eps
    chosen = []
    for logits, counters in zip(
        logits_NV.split(CHUNK_ROWS), counters_N.to(device).split(CHUNK_ROWS), strict=True
    ):
        u = uniform(key, counters[:, None] * num_tokens + column).to(dtype)
        noise = -torch.log(-torch.log(u.clamp(smallest, largest)))
        chosen.append((logits.to(dtype) / temperature + noise).argmax(dim=1))
    return torch.cat(chosen)


@torch.no_grad()
def generate(
    model: Callable[..., Tensor],
    canvas_BL: Tensor,
    grid: Tensor,
    *,
    mask_id: int,
    seed: int = 0,
    first_sample: int = 0,
    schedule: Schedule | None = None,
    temperature: float = 1.0,
    noise_dtype: torch.dtype = torch.float64,
    is_real_BL: Tensor | None = None,
    device: torch.device | None = None,
    on_step: Callable[[int, Tensor], None] | None = None,
) -> Generation:
    """Fill every masked position of the canvases; given tokens never change.

    Sample ``first_sample + i`` has its own noise: the same whatever the batch it is in.
    ``model(x, rows, t_B=, mask=)`` returns logits [N, V]; ``on_step(k, ids)`` may watch.
    """
    schedule, device = schedule or Linear(), device or torch.device("cpu")
    x_BL = canvas_BL.clone()
    num_samples, length = x_BL.shape
    samples = first_sample + torch.arange(num_samples)
    reveal_BL = uniform_rows(stream_key(seed, "reveal"), samples, length)
    place_BL = samples[:, None] * length + torch.arange(length)
    alpha = schedule.alpha(grid)
    num_calls = num_rows = 0
    for k, (t, alpha_s) in enumerate(zip(grid[:-1], alpha[1:])):
        is_last = k == len(grid) - 2
        is_revealed_BL = (x_BL == mask_id) & ((reveal_BL < alpha_s) | is_last)
        active = is_revealed_BL.any(dim=1).nonzero().squeeze(1)
        if len(active):
            revealed = is_revealed_BL[active]
            rows_N = revealed.flatten().nonzero().squeeze(1)
            mask = None if is_real_BL is None else attention_mask(is_real_BL[active])
            logits_NV = model(
                x_BL[active].to(device),
                rows_N.to(device),
                t_B=torch.full((len(active),), float(t), device=device),
                mask=None if mask is None else mask.to(device),
            )
            key = stream_key(seed, "gumbel")
            counters_N = place_BL[active].flatten()[rows_N]
            tokens_N = choose(logits_NV, counters_N, key, temperature, noise_dtype).cpu()
            x_BL[active] = x_BL[active].masked_scatter(revealed, tokens_N)
            num_calls += 1
            num_rows += len(active)
        if on_step:
            on_step(k, x_BL)
    return Generation(x_BL, num_calls, num_rows)
