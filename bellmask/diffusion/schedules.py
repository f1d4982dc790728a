"""Schedules: alpha(t), the share of tokens still visible at time t; alpha(0) = 1, alpha(1) = 0.

Each has its derivative, its inverse and the NELBO weight -alpha' / (1 - alpha) of Eq. L_MDM. The
NELBO does not depend on the schedule (App. C.4); what a finite batch sees does.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, field

import torch
from torch import Tensor

from bellmask.diffusion.laws import TimeLaw, TruncatedGaussian


class Schedule(ABC):
    """A strictly decreasing alpha(t) from 1 to 0."""

    @abstractmethod
    def alpha(self, t: Tensor) -> Tensor:
        """Probability that a token is still visible at time t."""

    @abstractmethod
    def derivative(self, t: Tensor) -> Tensor:
        """Slope of alpha at t, negative."""

    @abstractmethod
    def inverse(self, alpha: Tensor) -> Tensor:
        """The time at which alpha has the given value."""

    # Paper: Eq. 28, Eq. 32, Eq. 33
    def weight(self, t: Tensor) -> Tensor:
        """-alpha'(t) / (1 - alpha(t)), the NELBO's weight on a masked row (infinite at t = 0)."""
        return -self.derivative(t) / (1 - self.alpha(t))


# Paper: Sec. 2.1: forward process
@dataclass(frozen=True)
class Linear(Schedule):
    """alpha = 1 - t, the paper's."""

    def alpha(self, t: Tensor) -> Tensor:
        """1 - t."""
        return 1 - t

    def derivative(self, t: Tensor) -> Tensor:
        """-1."""
        return -torch.ones_like(t)

    def inverse(self, alpha: Tensor) -> Tensor:
        """1 - alpha."""
        return 1 - alpha

    def weight(self, t: Tensor) -> Tensor:
        """1 / t, without the rounding of 1 - (1 - t)."""
        return 1 / t


@dataclass(frozen=True)
class Cosine(Schedule):
    """alpha = 1 - sin(pi t / 2), the cosine schedule of MD4 and MaskGIT.

    (mdlm gives the name to another curve, cos(pi t / 2).)
    """

    def alpha(self, t: Tensor) -> Tensor:
        """1 - sin(pi t / 2)."""
        return 1 - torch.sin(t * (math.pi / 2))

    def derivative(self, t: Tensor) -> Tensor:
        """-pi/2 cos(pi t / 2)."""
        return -(math.pi / 2) * torch.cos(t * (math.pi / 2))

    def inverse(self, alpha: Tensor) -> Tensor:
        """2/pi asin(1 - alpha)."""
        return torch.asin(1 - alpha) * (2 / math.pi)

    def weight(self, t: Tensor) -> Tensor:
        """pi/2 cot(pi t / 2)."""
        return (math.pi / 2) / torch.tan(t * (math.pi / 2))


@dataclass(frozen=True)
class Polynomial(Schedule):
    """alpha = 1 - t^power."""

    power: float = 2.0

    def __post_init__(self) -> None:
        if not (math.isfinite(self.power) and self.power > 0):
            raise ValueError(f"polynomial schedule needs power > 0, got {self.power}")

    def alpha(self, t: Tensor) -> Tensor:
        """1 - t^power."""
        return 1 - t**self.power

    def derivative(self, t: Tensor) -> Tensor:
        """-power t^(power - 1)."""
        return -self.power * t ** (self.power - 1)

    def inverse(self, alpha: Tensor) -> Tensor:
        """(1 - alpha)^(1 / power)."""
        return (1 - alpha) ** (1 / self.power)

    def weight(self, t: Tensor) -> Tensor:
        """Power / t."""
        return self.power / t


# Paper: Eq. 31
@dataclass(frozen=True)
class MiddleFlat(Schedule):
    """alpha = F^-1(1 - t) for a law F of visible shares (App. C.4): flat where F is dense.

    Under uniform t the *visible share* alpha has density f, so the mask rate has density f(1 - m):
    its mean is 1 - mu. Computed in float64 on the CPU, then cast.
    """

    law: TimeLaw = field(default_factory=TruncatedGaussian)

    def __post_init__(self) -> None:
        if not self.law.has_density:
            raise ValueError(f"middle-flat needs a law with a density, got {self.law}")

    def alpha(self, t: Tensor) -> Tensor:
        """F^-1(1 - t)."""
        return self.law.icdf(1 - t.double()).to(t)

    # Paper: Eq. 32, Eq. 33
    def derivative(self, t: Tensor) -> Tensor:
        """-1 / f(alpha)."""
        return (-1 / self.law.pdf(self.law.icdf(1 - t.double()))).to(t)

    def inverse(self, alpha: Tensor) -> Tensor:
        """1 - F(alpha)."""
        return (1 - self.law.cdf(alpha.double())).to(alpha)
