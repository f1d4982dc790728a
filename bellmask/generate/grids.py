"""Time grids for sampling: from 1 (all masked) down to 0 (clean)."""

from __future__ import annotations

import torch
from torch import Tensor


def uniform_grid(num_steps: int) -> Tensor:
    """``num_steps`` equal steps from t = 1 to t = 0, float64 [num_steps + 1]."""
    if num_steps < 1:
        raise ValueError(f"sampling needs at least one step, got {num_steps}")
    return torch.linspace(1, 0, num_steps + 1, dtype=torch.float64)
