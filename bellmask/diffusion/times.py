"""Time laws: the distributions of t on [0, 1] (paper Table 3).

Everything is computed in float64 on the CPU and can be cast afterwards: a float32 ``erfinv`` has
few digits left beyond four sigma. A law is usable on its own in any training loop::

    law = TruncatedGaussian(0.5, 0.1)
    t = law.stratified(len(x0))                   # [B], one draw from each of B equal strata
    xt, is_masked = mask_tokens(x0, 1 - t, mask_id=mask_id)

Accuracy, against 40-digit arithmetic, for locations in [-50, 50] and scales in [1e-4, 1e4]: cdf
and density agree to about 1e-13 (relative), the inverse cdf to about 1e-16 (absolute).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from bellmask.diffusion.density import DensityLaw
from bellmask.diffusion.gaussian import TruncatedGaussian
from bellmask.diffusion.law import (
    TimeLaw,
    as_float64,
    check_location_scale,
    edges_around,
    strata,
)

__all__ = [
    "DensityLaw",
    "Dirac",
    "TimeLaw",
    "TruncatedGaussian",
    "TruncatedLaplace",
    "Uniform",
    "as_float64",
    "strata",
]


@dataclass(frozen=True)
class Uniform(TimeLaw):
    """The conventional choice: every mask rate equally often."""

    def log_pdf(self, t: Tensor | float) -> Tensor:
        """Zero."""
        return torch.zeros_like(as_float64(t))

    def cdf(self, t: Tensor | float) -> Tensor:
        """t, clipped to [0, 1]."""
        return as_float64(t).clamp(0, 1)

    def icdf(self, u: Tensor | float) -> Tensor:
        """The level u itself."""
        return as_float64(u).clone()


@dataclass(frozen=True)
class Dirac(TimeLaw):
    """All mass at one time."""

    mu: float = 0.5
    has_density = False

    def __post_init__(self) -> None:
        if not 0 <= self.mu <= 1:
            raise ValueError(f"dirac needs 0 <= mu <= 1, got mu={self.mu}")

    def log_pdf(self, t: Tensor | float) -> Tensor:
        """Refused: a point mass has no density."""
        raise ValueError(f"dirac({self.mu}) has no density; use its cdf")

    def cdf(self, t: Tensor | float) -> Tensor:
        """A step at mu."""
        return (as_float64(t) >= self.mu).to(torch.float64)

    def icdf(self, u: Tensor | float) -> Tensor:
        """Mu, whatever u."""
        return torch.full_like(as_float64(u), self.mu)

    def expectation(self, function: Callable[[Tensor], Tensor]) -> float:
        """The value at mu."""
        return float(function(as_float64(self.mu)))


@dataclass(frozen=True)
class TruncatedLaplace(TimeLaw):
    """exp(-|t - mu| / b), restricted to [0, 1]."""

    mu: float = 0.5
    b: float = 0.1

    def __post_init__(self) -> None:
        check_location_scale("laplace", self.mu, self.b, "b")

    @property
    def _peak(self) -> float:
        """A peak outside [0, 1] gives the same law as one at the nearer end."""
        return min(max(self.mu, 0.0), 1.0)

    def breaks(self) -> Sequence[float]:
        """The kink and its flanks."""
        return edges_around(self._peak, self.b)

    @property
    def _masses(self) -> tuple[float, float]:
        """Unnormalised mass left and right of the peak, in units of b."""
        return -math.expm1(-self._peak / self.b), -math.expm1(-(1 - self._peak) / self.b)

    def log_pdf(self, t: Tensor | float) -> Tensor:
        """Log density at t in [0, 1]."""
        return -(as_float64(t) - self._peak).abs() / self.b - math.log(self.b * sum(self._masses))

    def cdf(self, t: Tensor | float) -> Tensor:
        """P(T <= t)."""
        t, peak = as_float64(t).clamp(0, 1), self._peak
        left, right = self._masses
        below = torch.exp((t.clamp(max=peak) - peak) / self.b) * -torch.expm1(-t / self.b)
        above = left - torch.expm1(-(t.clamp(min=peak) - peak) / self.b)
        return torch.where(t <= peak, below, above) / (left + right)

    def icdf(self, u: Tensor | float) -> Tensor:
        """Closed form, from the nearer end."""
        u = as_float64(u)
        left, right = self._masses
        total = left + right
        below = self._from_end(u * total, self._peak)
        above = 1 - self._from_end((1 - u) * total, 1 - self._peak)
        return torch.where(u * total <= left, below, above).clamp(0, 1)

    def _from_end(self, mass: Tensor, peak: float) -> Tensor:
        """Distance from an end of [0, 1] that holds ``mass``, the peak being ``peak`` away."""
        if peak > 30 * self.b:
            return peak + self.b * torch.log(mass + math.exp(-peak / self.b))
        return self.b * torch.log1p(mass * math.exp(peak / self.b))
