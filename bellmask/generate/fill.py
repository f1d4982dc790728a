"""Fill canvases with any framework: ancestral sampling for masked models, else token by token."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from bellmask.diffusion.orders import Framework, Mdm, Ordered
from bellmask.generate.engine import Generation, generate
from bellmask.generate.grids import uniform_grid
from bellmask.generate.sequential import generate_in_order


def fill(
    model: Callable[..., Tensor],
    canvas_BL: Tensor,
    framework: Framework,
    *,
    steps: int,
    mask_id: int,
    seed: int = 0,
    first_sample: int = 0,
    temperature: float = 1.0,
    noise_dtype: torch.dtype = torch.float64,
    device: torch.device | None = None,
) -> Generation:
    """Fill all masked positions; ``steps`` matters to masked models only."""
    if isinstance(framework, Ordered):
        return generate_in_order(
            model,
            canvas_BL,
            framework,
            mask_id=mask_id,
            seed=seed,
            first_sample=first_sample,
            temperature=temperature,
            noise_dtype=noise_dtype,
            device=device,
        )
    assert isinstance(framework, Mdm)
    return generate(
        model,
        canvas_BL,
        uniform_grid(steps),
        mask_id=mask_id,
        seed=seed,
        first_sample=first_sample,
        schedule=framework.schedule,
        temperature=temperature,
        noise_dtype=noise_dtype,
        device=device,
    )
