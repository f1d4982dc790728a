"""Dropout whose randomness is drawn outside the blocks, and costs little on CPUs too.

``F.dropout`` draws one number at a time from a serial generator there: an eighth of a training step
at width 128. Here 16 bits decide an element, and a vectorised generator makes them.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

LEVELS = 1 << 16
"""An element is dropped with a probability that is a multiple of 1 / LEVELS."""


def draw_kept(shape: torch.Size | tuple[int, ...], rate: float, device: torch.device) -> Tensor:
    """Which elements stay (bool), decided by torch's generator of the device."""
    if device.type != "cpu":
        return torch.rand(shape, device=device) >= round(rate * LEVELS) / LEVELS
    size = torch.Size(shape)
    seed = int(torch.randint(2**62, ()))
    bits = np.random.SFC64(seed).random_raw(-(-size.numel() // 4)).view(np.uint16)
    return torch.from_numpy(bits[: size.numel()] >= round(rate * LEVELS)).view(size)


def dropout_scale(rate: float) -> float:
    """What is kept is multiplied by this, so that the mean stays."""
    return LEVELS / (LEVELS - round(rate * LEVELS))
