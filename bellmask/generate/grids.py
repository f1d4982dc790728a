"""Time grids for sampling: from 1 (all masked) down to 0 (clean), float64 [steps + 1]."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from bellmask.diffusion.schedules import Linear, Schedule


def _check(num_steps: int) -> None:
    if num_steps < 1:
        raise ValueError(f"sampling needs at least one step, got {num_steps}")


def uniform_grid(num_steps: int) -> Tensor:
    """``num_steps`` equal steps from t = 1 to t = 0."""
    _check(num_steps)
    return torch.linspace(1, 0, num_steps + 1, dtype=torch.float64)


def cosine_grid(num_steps: int) -> Tensor:
    """t = cos(pi/2 k/K): few tokens in the first steps, when little is known, many in the last."""
    _check(num_steps)
    share = torch.arange(num_steps, dtype=torch.float64) / num_steps
    return torch.cat([torch.cos(share * (math.pi / 2)), torch.zeros(1, dtype=torch.float64)])


def count_grid(num_tokens: int, per_step: int = 1, schedule: Schedule | None = None) -> Tensor:
    """The times at which ``per_step`` tokens more of ``num_tokens`` are visible."""
    if num_tokens < 1 or per_step < 1:
        raise ValueError(f"cannot reveal {per_step} of {num_tokens} tokens in a step")
    steps = torch.arange(math.ceil(num_tokens / per_step) + 1, dtype=torch.float64)
    return (schedule or Linear()).inverse((steps * per_step / num_tokens).clamp(max=1))


GRIDS: dict[str, Callable[[int], Tensor]] = {"uniform": uniform_grid, "cosine": cosine_grid}
"""Grids of a number of steps; ``count`` goes by tokens instead."""
