"""x0 and a visible share → xt: which tokens are hidden. B batch, L block length."""

from __future__ import annotations

import torch
from torch import Tensor


def mask_tokens(
    x0_BL: Tensor,
    alpha_B: Tensor,
    *,
    mask_id: int,
    u_BL: Tensor | None = None,
    is_maskable_BL: Tensor | None = None,
    generator: torch.Generator | None = None,
) -> tuple[Tensor, Tensor]:
    """Hide each maskable token with probability 1 - alpha; return (xt, is_masked).

    ``u_BL`` are the uniforms that decide (float64 where exactness across machines matters); drawn
    from ``generator`` when not given. Tokens that are not maskable (pads, prompts) stay visible.
    """
    if u_BL is None:
        u_BL = torch.rand(
            x0_BL.shape, dtype=torch.float64, device=x0_BL.device, generator=generator
        )
    is_masked_BL = u_BL < (1 - alpha_B.to(u_BL))[:, None]
    if is_maskable_BL is not None:
        is_masked_BL = is_masked_BL & is_maskable_BL
    return torch.where(is_masked_BL, mask_id, x0_BL), is_masked_BL


def mask_exactly(
    x0_BL: Tensor,
    count_B: Tensor,
    *,
    mask_id: int,
    u_BL: Tensor,
    is_maskable_BL: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Hide exactly ``count`` maskable tokens of each row (all, where there are fewer)."""
    if is_maskable_BL is not None:
        u_BL = torch.where(is_maskable_BL, u_BL, torch.inf)
    rank_BL = u_BL.argsort(dim=1, stable=True).argsort(dim=1)
    is_masked_BL = rank_BL < count_B[:, None]
    if is_maskable_BL is not None:
        is_masked_BL = is_masked_BL & is_maskable_BL
    return torch.where(is_masked_BL, mask_id, x0_BL), is_masked_BL
