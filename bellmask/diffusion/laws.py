"""Time laws: the distributions of t on [0, 1] (paper Table 3).

Everything is computed in float64 on the CPU and can be cast afterwards. A law is usable on its own
in any training loop::

    law = TruncatedGaussian(0.5, 0.1)
    t = law.stratified(len(x0))                   # [B], one draw from each of B equal strata
    xt, is_masked = mask_tokens(x0, mask_rate=t, mask_id=mask_id)

Accuracy of Gaussians against 60-digit arithmetic, tested at locations in [-50, 50] and scales in
[1e-4, 1e3]: the density agrees to 1e-11 (relative), a level to 2e-14, besides the rounding of the
time itself, 1e-16 near 1. That costs a level up to 1e-12 for locations in [0, 1], and up to 1e-6
(the density as much) for one that is far above 1 in units of its scale.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property

import torch
from torch import Generator, Tensor

# Roots of increasing functions on [0, 1], many at once.

_MAX_STEPS = 200
_NEWTON_CLOSE = 1e-9
"""Newton's method doubles its digits: a step this small, relative to the distance to the nearer
end of [0, 1], was the last one needed."""


def solve_increasing(
    value: Callable[[Tensor], Tensor],
    slope: Callable[[Tensor], Tensor],
    target: Tensor,
    guess: Tensor,
) -> Tensor:
    """The x in [0, 1] with value(x) = target: Newton's method inside a shrinking bracket.

    Each root stops at its own last step, so it is the same to the last bit for any microbatch or
    number of processes.
    """
    low, high, x = torch.zeros_like(target), torch.ones_like(target), guess
    is_done = torch.zeros_like(target, dtype=torch.bool)
    for _ in range(_MAX_STEPS):
        error = value(x) - target
        low, high = torch.where(error <= 0, x, low), torch.where(error >= 0, x, high)
        newton = torch.where(error == 0, x, x - error / slope(x))
        is_safe = (newton >= low) & (newton <= high)  # also false for nan
        is_close = (newton - x).abs() <= _NEWTON_CLOSE * torch.minimum(x, 1 - x)
        step = torch.where(is_safe | is_close, newton.clamp(0, 1), (low + high) / 2)
        x = torch.where(is_done, x, step)
        is_done = is_done | is_close | (high - low <= 2**-53)  # neighbors, near 1
        if bool(is_done.all()):
            break
    return x


# Gauss-Legendre integration on [0, 1], fine where a law of times or a binomial is sharp.

NODES_PER_PANEL = 32
_END_PANELS = 50
"""Panels halve this many times toward 0 and 1, so a boundary layer of width 2^-50 is resolved."""


@cache
def gauss_legendre(count: int = NODES_PER_PANEL) -> tuple[Tensor, Tensor]:
    """Nodes in (0, 1) and weights that sum to one (Golub and Welsch's eigenvalue method)."""
    with torch.inference_mode(False):  # cached: also for use with gradients
        k = torch.arange(1, count, dtype=torch.float64, device="cpu")
        beside = k / torch.sqrt(4 * k * k - 1)
        values, vectors = torch.linalg.eigh(torch.diag(beside, 1) + torch.diag(beside, -1))
        return (values + 1) / 2, vectors[0] ** 2


def panel_edges(breaks: Iterable[float] = (), max_width: float = 1 / 16) -> Tensor:
    """Sorted edges from 0 to 1: geometric toward both ends, uniform between, and ``breaks``."""
    geometric = [2.0**-k for k in range(1, _END_PANELS)]
    count = max(2, int(1 / max_width) + 1)
    uniform = torch.linspace(0, 1, count, dtype=torch.float64, device="cpu").tolist()
    inside = [b for b in breaks if 0 < b < 1]
    return as_float64(sorted({*uniform, *geometric, *(1 - g for g in geometric), *inside}))


def composite_rule(edges: Tensor) -> tuple[Tensor, Tensor]:
    """Nodes and weights of the rule that uses one Gauss-Legendre panel between any two edges."""
    nodes, weights = gauss_legendre()
    left, width = edges[:-1, None], (edges[1:] - edges[:-1])[:, None]
    return (left + width * nodes).reshape(-1), (width * weights).reshape(-1)


# Time laws: distributions of t on [0, 1], drawn from one stratum per sample.


def as_float64(value: Tensor | float | list[float]) -> Tensor:
    """A float64 tensor on the CPU."""
    return torch.as_tensor(value, dtype=torch.float64, device="cpu")


# Paper: App. C.5: stratified sampling
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
    def deviation(self) -> float:
        """Standard deviation of T."""
        mean = self.mean
        return max(0.0, self.expectation(lambda t: (t - mean) ** 2)) ** 0.5

    def at(self, step: int) -> TimeLaw:
        """The law of a training step: itself, unless it changes while training."""
        return self

    def sample(
        self, count: int, *, generator: Generator | None = None, dtype: torch.dtype | None = None
    ) -> Tensor:
        """``count`` independent times."""
        u = torch.rand(count, dtype=torch.float64, generator=generator)
        return self.icdf(u).to(dtype or torch.get_default_dtype())

    # Paper: App. C.5: stratified sampling
    def stratified(
        self, count: int, *, generator: Generator | None = None, dtype: torch.dtype | None = None
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


# Laws known by their density up to a factor: normalized, and inverted, by quadrature.


class IntegratedLaw(TimeLaw):
    """A law whose density is ``exp(log_shape(t))`` up to a factor."""

    @abstractmethod
    def log_shape(self, t: Tensor) -> Tensor:
        """Log density at t in [0, 1] up to a constant, float64."""

    @cached_property
    def _panels(self) -> tuple[Tensor, Tensor]:
        """Edges of panels, and the mass below each of them."""
        with torch.inference_mode(False):  # cached: also for use with gradients
            edges = panel_edges(self.breaks(), max_width=1 / 256)
            nodes, weights = composite_rule(edges)
            mass = (weights * self.log_shape(nodes).exp()).reshape(len(edges) - 1, -1).sum(1)
            return edges, torch.cat([torch.zeros_like(mass[:1]), mass.cumsum(0)])

    # Paper: Eq. 29, Eq. 30
    def log_pdf(self, t: Tensor | float) -> Tensor:
        """Log of the normalized density."""
        return self.log_shape(as_float64(t)) - self._panels[1][-1].log()

    # Paper: Eq. 29, Eq. 30
    def cdf(self, t: Tensor | float) -> Tensor:
        """Whole panels, plus one Gauss-Legendre panel up to t."""
        (edges, below), t = self._panels, as_float64(t).clamp(0, 1)
        panel = (torch.searchsorted(edges, t, right=True) - 1).clamp(0, len(edges) - 2)
        nodes, weights = gauss_legendre()
        start, width = edges[panel], t - edges[panel]
        shape = self.log_shape(start[..., None] + width[..., None] * nodes).exp()
        # not as a product of matrices, whose rounding depends on the number of rows
        return (below[panel] + width * (shape * weights).sum(-1)) / below[-1]

    def icdf(self, u: Tensor | float) -> Tensor:
        """By safeguarded Newton's method on the cdf."""
        (edges, below), u = self._panels, as_float64(u)
        panel = (torch.searchsorted(below / below[-1], u) - 1).clamp(0, len(edges) - 2)
        guess = (edges[panel] + edges[panel + 1]) / 2
        t = solve_increasing(self.cdf, self.pdf, u, guess)
        return torch.where(u <= 0, 0.0, torch.where(u >= 1, 1.0, t))


# Paper: Table 3
@dataclass(frozen=True)
class DensityLaw(IntegratedLaw):
    """A law defined by any non-negative function on [0, 1], which is normalized.

    ``kinks`` names points where the function is sharp or not smooth, so that integration is exact
    there. The function gets and returns float64 tensors.
    """

    density: Callable[[Tensor], Tensor]
    kinks: Sequence[float] = field(default=(), hash=False)

    def __post_init__(self) -> None:
        nodes, _ = composite_rule(panel_edges(self.breaks()))
        values = self.density(nodes)
        if values.shape != nodes.shape or not bool(torch.isfinite(values).all()):
            raise ValueError("a density must return one finite number for each time in (0, 1)")
        if bool((values < 0).any()) or float(values.sum()) <= 0:
            raise ValueError("a density must be non-negative and not zero everywhere on (0, 1)")

    def breaks(self) -> Sequence[float]:
        """Narrow panels: the function may be sharp anywhere."""
        return panel_edges(self.kinks, max_width=1 / 256)[1:-1].tolist()

    def log_shape(self, t: Tensor) -> Tensor:
        """Log of the function."""
        return self.density(t).log()


# Paper: Table 3
@dataclass(frozen=True)
class TruncatedGaussian(IntegratedLaw):
    """exp(-(t - mu)^2 / 2 sigma^2), restricted to [0, 1]; the paper's default is (0.5, 0.1)."""

    mu: float = 0.5
    sigma: float = 0.1

    def __post_init__(self) -> None:
        check_location_scale("gaussian", self.mu, self.sigma, "sigma")

    def breaks(self) -> Sequence[float]:
        """The peak and its flanks."""
        return edges_around(self.mu, self.sigma)

    def log_shape(self, t: Tensor) -> Tensor:
        """Relative to the point of [0, 1] nearest to mu: a peak far outside costs no digits."""
        nearest = min(max(self.mu, 0.0), 1.0)
        return -(t - nearest) * ((t - self.mu) + (nearest - self.mu)) / (2 * self.sigma**2)


# Paper: Table 3
@dataclass(frozen=True)
class TruncatedLaplace(IntegratedLaw):
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

    def log_shape(self, t: Tensor) -> Tensor:
        """The distance to the peak, in units of b."""
        return -(t - self._peak).abs() / self.b


# The other laws of Table 3.


# Paper: Table 3
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


# Paper: Table 3
@dataclass(frozen=True)
class Dirac(TimeLaw):
    """All mass at one time."""

    mu: float = 0.5
    has_density = False

    def __post_init__(self) -> None:
        if not 0 <= self.mu <= 1:
            raise ValueError(f"dirac needs 0 <= mu <= 1, got mu={self.mu}")

    def log_pdf(self, t: Tensor | float) -> Tensor:
        """Raises: a point mass has no density."""
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
class Band(TimeLaw):
    """Every mask rate between two ends equally often: LLaDA2 fine-tunes with (0.3, 0.8)."""

    low: float = 0.3
    high: float = 0.8

    def __post_init__(self) -> None:
        if not 0 <= self.low < self.high <= 1:
            raise ValueError(f"band needs 0 <= low < high <= 1, got {self.low} and {self.high}")

    def breaks(self) -> Sequence[float]:
        """Both ends."""
        return self.low, self.high

    def log_pdf(self, t: Tensor | float) -> Tensor:
        """-log(high - low) inside."""
        t = as_float64(t)
        is_inside = (t >= self.low) & (t <= self.high)
        inside = torch.full_like(t, -math.log(self.high - self.low))
        return torch.where(is_inside, inside, -math.inf)

    def cdf(self, t: Tensor | float) -> Tensor:
        """Linear between the ends."""
        return ((as_float64(t) - self.low) / (self.high - self.low)).clamp(0, 1)

    def icdf(self, u: Tensor | float) -> Tensor:
        """low + u (high - low)."""
        return (self.low + as_float64(u) * (self.high - self.low)).clamp(self.low, self.high)


@dataclass(frozen=True)
class WithUniform(TimeLaw):
    """Another law with a share of uniform times, so that every context count occurs."""

    law: TimeLaw
    share: float = 0.05

    def __post_init__(self) -> None:
        if not 0 < self.share < 1 or not self.law.has_density:
            raise ValueError(f"a uniform share needs 0 < share < 1 and a density, got {self}")
        if self.law.at(0) is not self.law:
            raise ValueError(f"{self.law} tunes itself and has a uniform share already")

    def breaks(self) -> Sequence[float]:
        """The other law's."""
        return self.law.breaks()

    def log_pdf(self, t: Tensor | float) -> Tensor:
        """Log of the weighted mean of both densities."""
        return torch.log((1 - self.share) * self.law.pdf(t) + self.share)

    def cdf(self, t: Tensor | float) -> Tensor:
        """The weighted mean of both."""
        return (1 - self.share) * self.law.cdf(t) + self.share * as_float64(t).clamp(0, 1)

    def icdf(self, u: Tensor | float) -> Tensor:
        """By safeguarded Newton's method on the cdf."""
        u = as_float64(u)
        return solve_increasing(self.cdf, self.pdf, u, self.law.icdf(u))

    @property
    def mean(self) -> float:
        """The weighted mean of both."""
        return (1 - self.share) * self.law.mean + self.share / 2
