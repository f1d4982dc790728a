"""The truncated gaussian, accurate in both tails and for any location and scale."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from bellmask.diffusion.law import TimeLaw, as_float64, check_location_scale, edges_around
from bellmask.diffusion.quadrature import gauss_legendre
from bellmask.diffusion.solve import solve_increasing


@dataclass(frozen=True)
class TruncatedGaussian(TimeLaw):
    """exp(-(t - mu)^2 / 2 sigma^2), restricted to [0, 1]; the paper's default is (0.5, 0.1).

    Exponents are taken relative to the point of [0, 1] nearest to mu, so that a peak far outside
    costs no digits.
    """

    mu: float = 0.5
    sigma: float = 0.1

    def __post_init__(self) -> None:
        check_location_scale("gaussian", self.mu, self.sigma, "sigma")

    def breaks(self) -> Sequence[float]:
        """The peak and its flanks."""
        return edges_around(self.mu, self.sigma)

    def _exponent(self, t: Tensor) -> Tensor:
        """((t - mu)^2 - (r - mu)^2) / 2 sigma^2 with r the point of [0, 1] nearest to mu."""
        nearest = min(max(self.mu, 0.0), 1.0)
        return (t - nearest) * ((t - self.mu) + (nearest - self.mu)) / (2 * self.sigma**2)

    def _log_mass(self, low: Tensor, high: Tensor) -> Tensor:
        """Log of the integral of exp(-exponent) from low to high, in units of sigma."""
        width = high - low
        z_low, z_high = ((edge - self.mu) / (self.sigma * 2**0.5) for edge in (low, high))
        across = math.sqrt(math.pi / 2) * (torch.special.erf(z_high) - torch.special.erf(z_low))
        # one-sided: measured from the edge nearer to mu, outwards
        is_above = z_low >= 0
        near = torch.where(is_above, z_low, -z_high)
        far = torch.where(is_above, z_high, -z_low)
        drop = width / (2 * self.sigma**2) * ((low - self.mu) + (high - self.mu)).abs()
        ratio = torch.special.erfcx(far) / torch.special.erfcx(near.clamp(min=0))
        start = self._exponent(torch.where(is_above, low, high))
        outwards = torch.log(torch.special.erfcx(near) * math.sqrt(math.pi / 2)) - start
        outwards = outwards + torch.log1p(-ratio * torch.exp(-drop))
        straddles = (z_low < 0) & (z_high > 0)
        result = torch.where(straddles, torch.log(across), outwards)
        # differences of nearly equal numbers cancel: integrate there instead
        is_narrow = (drop < 0.5) & (width < self.sigma)
        nodes, weights = gauss_legendre(16)
        inside = torch.exp(
            -self._exponent(low[..., None] + width[..., None] * nodes) + start[..., None]
        )
        narrow = torch.log(width / self.sigma) + torch.log((inside * weights).sum(-1)) - start
        return torch.where(is_narrow, narrow, result)

    @functools.cache  # noqa: B019 - laws are few, small and compare by value
    def _log_total(self) -> float:
        return float(self._log_mass(as_float64(0.0), as_float64(1.0)))

    def log_pdf(self, t: Tensor | float) -> Tensor:
        """Eq. for f_TG in App. C.4 with [l, h] = [0, 1]."""
        return -self._exponent(as_float64(t)) - math.log(self.sigma) - self._log_total()

    def log_cdf(self, t: Tensor | float) -> Tensor:
        """Log P(T <= t), accurate in the lower tail."""
        t = as_float64(t).clamp(0, 1)
        return self._log_mass(torch.zeros_like(t), t) - self._log_total()

    def cdf(self, t: Tensor | float) -> Tensor:
        """P(T <= t)."""
        return self.log_cdf(t).exp()

    def icdf(self, u: Tensor | float) -> Tensor:
        """Each half of the law is solved from its own end, so both tails keep their digits."""
        u = as_float64(u)
        mirrored = TruncatedGaussian(1 - self.mu, self.sigma)
        return torch.where(u <= 0.5, self._icdf_low(u), 1 - mirrored._icdf_low(1 - u))

    def _icdf_low(self, u: Tensor) -> Tensor:
        target = u.clamp(min=0, max=0.75)
        a, b = (torch.special.ndtr(as_float64((e - self.mu) / self.sigma)) for e in (0.0, 1.0))
        guess = self.mu + self.sigma * torch.special.ndtri(a + target * (b - a))
        guess = torch.where(torch.isfinite(guess), guess, as_float64(0.5)).clamp(1e-12, 1)

        def log_slope(t: Tensor) -> Tensor:
            return torch.exp(self.log_pdf(t) - self.log_cdf(t))

        t = solve_increasing(self.log_cdf, log_slope, torch.log(target), guess)
        return torch.where(target == 0, torch.zeros_like(t), t)
