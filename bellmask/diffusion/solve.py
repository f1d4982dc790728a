"""Roots of increasing functions on [0, 1], many at once."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

_MAX_STEPS = 200
_NEWTON_CLOSE = 1e-9
"""Newton's method doubles its digits: a step this small (relative) was the last one needed."""


def solve_increasing(
    value: Callable[[Tensor], Tensor],
    slope: Callable[[Tensor], Tensor],
    target: Tensor,
    guess: Tensor,
) -> Tensor:
    """The x in [0, 1] with value(x) = target: Newton's method, kept inside a shrinking bracket."""
    low, high, x = torch.zeros_like(target), torch.ones_like(target), guess
    for _ in range(_MAX_STEPS):
        error = value(x) - target
        low, high = torch.where(error <= 0, x, low), torch.where(error >= 0, x, high)
        newton = torch.where(error == 0, x, x - error / slope(x))
        is_safe = (newton >= low) & (newton <= high)  # also false for nan
        is_close = (newton - x).abs() <= _NEWTON_CLOSE * x.abs()
        x = torch.where(is_safe | is_close, newton.clamp(0, 1), (low + high) / 2)
        if bool((is_close | (high - low <= 1e-16)).all()):
            break
    return x
