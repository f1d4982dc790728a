"""Shift, scale and gate of each branch: learned constants, or AdaLN fed with the time.

B batch, L length, D width, N selected rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

CONDITION_WIDTH = 128
NUM_SINUSOIDS = 256
TIME_SCALE = 1000.0
"""t in [0, 1] is stretched by this before the sinusoids, whose slowest period is 10 000."""
SIGMA_MARGIN = 1e-3
"""What mdlm's schedule leaves visible at t = 1, so that its total noise sigma stays finite."""

TIME_INPUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "stretched": lambda t: t * TIME_SCALE,
    "sigma": lambda t: -torch.log((1 - t) + SIGMA_MARGIN * t),
}
"""What the sinusoids are fed, by name: 1000 t, or the total noise of mdlm's schedule (in the form
that loses no digits of float32 near t = 1)."""


class TimeEmbedding(nn.Module):
    """t → 256 sinusoids → 128 → SiLU → 128 → SiLU."""

    def __init__(self, time_input: str = "stretched") -> None:
        super().__init__()
        self.time_input = TIME_INPUTS[time_input]
        self.into = nn.Linear(NUM_SINUSOIDS, CONDITION_WIDTH)
        self.out = nn.Linear(CONDITION_WIDTH, CONDITION_WIDTH)

    def forward(self, t_B: Tensor) -> Tensor:
        """[B, 128]."""
        half = NUM_SINUSOIDS // 2
        rate = torch.exp(-math.log(1e4) / half * torch.arange(half, device=t_B.device))
        angle = self.time_input(t_B.float())[:, None] * rate
        waves = torch.cat([angle.cos(), angle.sin()], dim=1)
        return F.silu(self.out(F.silu(self.into(waves))))


class ConstantModulation(nn.Module):
    """Learned vectors, the same for every input; zero at first."""

    def __init__(self, width: int, num_vectors: int) -> None:
        super().__init__()
        self.vectors = nn.Parameter(torch.zeros(num_vectors, width))

    def forward(self, condition: Tensor | None) -> tuple[Tensor, ...]:
        """Vectors of shape [D]."""
        return self.vectors.unbind(0)


class TimeModulation(nn.Module):
    """AdaLN: a linear map of the time's embedding; zero at first."""

    def __init__(self, width: int, num_vectors: int) -> None:
        super().__init__()
        self.linear = nn.Linear(CONDITION_WIDTH, num_vectors * width)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)
        self.num_vectors = num_vectors

    def forward(self, condition: Tensor | None) -> tuple[Tensor, ...]:
        """Vectors of shape [B, 1, D]."""
        assert condition is not None
        return self.linear(condition)[:, None].chunk(self.num_vectors, dim=-1)


def make_modulation(kind: str, width: int, num_vectors: int) -> nn.Module:
    """The modulation of a kind that the options allow."""
    table = {"constant": ConstantModulation, "time": TimeModulation}
    return table[kind](width, num_vectors)


class ModulatedNorm(nn.Module):
    """Layer norm with weight only, then x * (1 + scale) + shift."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
        """One fused kernel where shift and scale are vectors."""
        shape, weight = self.weight.shape, self.weight.to(x.dtype)
        if shift.ndim == 1:
            return F.layer_norm(x, shape, weight * (1 + scale.to(x.dtype)), shift.to(x.dtype))
        return F.layer_norm(x, shape, weight) * (1 + scale) + shift


def pick_vectors(vectors: Sequence[Tensor], rows_N: Tensor, length: int) -> list[Tensor]:
    """The modulation of each row: the same [D] for all, or its sample's [1, D]."""
    return [v if v.ndim == 1 else v.squeeze(1).index_select(0, rows_N // length) for v in vectors]
