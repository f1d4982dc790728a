"""What a time law is: a distribution of t on [0, 1], drawn from one stratum per sample."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from bellmask.diffusion.quadrature import composite_rule, panel_edges


def as_float64(value: Tensor | float) -> Tensor:
    """A float64 tensor on the CPU."""
    return torch.as_tensor(value, dtype=torch.float64, device="cpu")


def strata(order_B: Tensor, jitter_B: Tensor) -> Tensor:
    """Levels u in [0, 1): sample i sits in stratum ``order[i]`` of B, at ``jitter[i]`` inside it.

    The order must be a random permutation: without one, contiguous slices (ranks, microbatches)
    would get only small or only large times (App. C.5 leaves the order open).
    """
    return (order_B.to(torch.float64) + jitter_B.to(torch.float64)) / len(order_B)


class TimeLaw(ABC):
    """A probability distribution of times on [0, 1]."""

    has_density: bool = True

    @abstractmethod
    def log_pdf(self, t: Tensor | float) -> Tensor:
        """Log density at t in [0, 1]."""

    @abstractmethod
    def cdf(self, t: Tensor | float) -> Tensor:
        """P(T <= t)."""

    @abstractmethod
    def icdf(self, u: Tensor | float) -> Tensor:
        """The time below which a share u of the law lies."""

    def breaks(self) -> Sequence[float]:
        """Points where the density is sharp or has a kink; integration panels end there."""
        return ()

    def pdf(self, t: Tensor | float) -> Tensor:
        """Density at t; zero outside [0, 1]."""
        t = as_float64(t)
        inside = (t >= 0) & (t <= 1)
        return torch.where(inside, self.log_pdf(t.clamp(0, 1)).exp(), torch.zeros_like(t))

    def expectation(self, function: Callable[[Tensor], Tensor]) -> float:
        """E[function(T)] for a smooth function, by quadrature."""
        t, weight = composite_rule(panel_edges(self.breaks()))
        return float((weight * self.log_pdf(t).exp() * function(t)).sum())

    @property
    def mean(self) -> float:
        """E[T]."""
        return self.expectation(lambda t: t)

    @property
    def is_bell_shaped(self) -> bool:
        """Definition 4.1 under the linear schedule; ``bell_test`` gives the numbers behind it."""
        from bellmask.diffusion.bell_test import bell_test

        return bell_test(self).is_bell_shaped

    def sample(
        self,
        count: int,
        *,
        generator: torch.Generator | None = None,
        dtype: torch.dtype | None = None,
    ) -> Tensor:
        """``count`` independent times."""
        u = torch.rand(count, dtype=torch.float64, generator=generator)
        return self.icdf(u).to(dtype or torch.get_default_dtype())

    def stratified(
        self,
        count: int,
        *,
        generator: torch.Generator | None = None,
        dtype: torch.dtype | None = None,
    ) -> Tensor:
        """``count`` times, one from each of ``count`` equal-probability strata, in random order.

        Each time alone follows the law; their average has far less variance (App. C.5).
        """
        order = torch.randperm(count, generator=generator)
        jitter = torch.rand(count, dtype=torch.float64, generator=generator)
        return self.icdf(strata(order, jitter)).to(dtype or torch.get_default_dtype())


def check_location_scale(name: str, mu: float, scale: float, symbol: str) -> None:
    """ValueError unless mu is finite and the scale positive and finite."""
    if not math.isfinite(mu) or not math.isfinite(scale) or scale <= 0:
        raise ValueError(f"{name} needs finite mu and {symbol} > 0, got mu={mu}, {symbol}={scale}")


def edges_around(mu: float, scale: float) -> list[float]:
    """Panel edges around a peak, one scale apart at first, then further and further."""
    steps = [0.5, 1, 2, 3, 4, 5, 6, 8, 11, 16, 23, 32]
    return [mu, *(mu + sign * k * scale for k in steps for sign in (-1, 1))]
