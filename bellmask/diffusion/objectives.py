"""Objectives: the law times are drawn from, the weight on a masked row, and the normalizer c.

loss = sum over masked rows of w(t) * cross-entropy / (M c), with M the maskable tokens of the whole
optimizer step and c = E[w(t) (1 - alpha_t)], analytic. Then every objective is an average over
context counts whose weights sum to one, so losses are on one scale and clipping at 1.0 means the
same thing for all. Only these combinations exist; anything else is refused when it is built.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field, replace
from functools import lru_cache

import torch
from torch import Tensor

from bellmask.diffusion import laws
from bellmask.diffusion.schedules import Linear, Schedule

SMALLEST_DENSITY = 1e-200
"""A density below this somewhere on [0, 1] counts as zero: its NELBO weight would overflow."""


class Objective(ABC):
    """A training loss: times from levels, weights from times, and the normalizer c."""

    law: laws.TimeLaw
    schedule: Schedule
    is_unweighted = False
    """True when w(t) = 1 for all t, so that plain sums of cross-entropy suffice."""

    @abstractmethod
    def times(self, u_B: Tensor) -> Tensor:
        """The times at levels u in [0, 1) of the drawing law (float64)."""

    @abstractmethod
    def weight(self, t_B: Tensor) -> Tensor:
        """The factor w(t) on a masked row's cross-entropy (float64)."""

    @property
    @abstractmethod
    def normalizer(self) -> float:
        """The constant c = E[w(t) (1 - alpha_t)] over the drawing law."""

    def at(self, step: int) -> Objective:
        """The objective of a training step: itself, unless its law changes while training."""
        return self


def _check_fixed(name: str, law: laws.TimeLaw) -> None:
    if law.at(0) is not law:
        raise ValueError(f"objective {name} needs a fixed law, not {law}; use objective bell")


# Paper: Eq. 1, Eq. 28
@dataclass(frozen=True)
class Nelbo(Objective):
    """The NELBO of Eq. L_MDM: w = -alpha' / (1 - alpha) / pi(t) for any density pi.

    ``time_floor`` is the smallest mask rate that is drawn: times are mapped affinely to
    [alpha^-1(1 - floor), 1], as mdlm does with 1e-3. Without it the weight's variance diverges
    (logarithmically) at t = 0. With 0 the objective is the NELBO exactly.
    """

    law: laws.TimeLaw = field(default_factory=laws.Uniform)
    schedule: Schedule = field(default_factory=Linear)
    time_floor: float = 0.0

    def __post_init__(self) -> None:
        _check_fixed("nelbo", self.law)
        if not self.law.has_density:
            raise ValueError(f"objective nelbo divides by the law's density; {self.law} has none")
        if not 0 <= self.time_floor < 1:
            raise ValueError(f"time_floor must be in [0, 1), got {self.time_floor}")
        t, _ = laws.composite_rule(laws.panel_edges(self.law.breaks()))
        largest = float((self.schedule.weight(t) * (1 - self.schedule.alpha(t))).max())
        if float(self.law.pdf(t).min()) < SMALLEST_DENSITY or largest > 1 / SMALLEST_DENSITY:
            raise ValueError(
                f"objective nelbo divides by a density that is zero (or below 1e-200) somewhere in "
                f"(0, 1), under {self.law} and {self.schedule}; widen it or use objective bell"
            )

    @property
    def first_time(self) -> float:
        """alpha^-1(1 - floor): the floor itself for the linear schedule."""
        return float(self.schedule.inverse(laws.as_float64(1 - self.time_floor)))

    def times(self, u_B: Tensor) -> Tensor:
        """first + (1 - first) * F^-1(u), with first the time of the smallest mask rate."""
        first = self.first_time
        return first + (1 - first) * self.law.icdf(u_B)

    def weight(self, t_B: Tensor) -> Tensor:
        """-alpha' / (1 - alpha) / pi."""
        t_B = laws.as_float64(t_B)
        unfloored = (t_B - self.first_time) / (1 - self.first_time)
        return self.schedule.weight(t_B) / self.law.log_pdf(unfloored).exp()

    @property
    def normalizer(self) -> float:
        """(1 - floor) / (1 - first time): one for the linear schedule and where the floor is 0."""
        return (1 - self.time_floor) / (1 - self.first_time)


# Paper: Eq. 6, Eq. 34
@dataclass(frozen=True)
class Bell(Objective):
    """The paper's objective, Eq. L_pi: t ~ pi, every masked row counts the same."""

    law: laws.TimeLaw = field(default_factory=laws.TruncatedGaussian)
    schedule: Schedule = field(default_factory=Linear)
    is_unweighted = True

    def __post_init__(self) -> None:
        if not self.normalizer > 0:
            raise ValueError(f"no token is ever masked under {self.law}")

    def at(self, step: int) -> Objective:
        """The same with the law of that step."""
        law = self.law.at(step)
        return self if law is self.law else _with_law(self, law)

    def times(self, u_B: Tensor) -> Tensor:
        """F^-1(u)."""
        return self.law.icdf(u_B)

    def weight(self, t_B: Tensor) -> Tensor:
        """One."""
        return torch.ones_like(laws.as_float64(t_B))

    @property
    def normalizer(self) -> float:
        """The mean mask rate."""
        if isinstance(self.schedule, Linear):
            return self.law.mean
        return self.law.expectation(lambda t: 1 - self.schedule.alpha(t))


@lru_cache(maxsize=4)
def _with_law(objective: Bell, law: laws.TimeLaw) -> Bell:
    """Cached, because the normalizer is an integral and laws change once in many steps."""
    return replace(objective, law=law)


# Paper: App. C.4: importance sampling
@dataclass(frozen=True)
class Importance(Objective):
    """Uniform times, rows weighted by the bell's density: w = f(t), or f(t) / t (App. C.4).

    Without 1/t it has the same expectation as :class:`Bell`, from a noisier batch.
    """

    law: laws.TimeLaw = field(default_factory=laws.TruncatedGaussian)
    divide_by_t: bool = False
    schedule: Schedule = field(default_factory=Linear)

    def __post_init__(self) -> None:
        if not isinstance(self.schedule, Linear):
            raise ValueError("objective importance is defined for the linear schedule only")
        _check_fixed("importance", self.law)
        if not self.law.has_density:
            raise ValueError(f"objective importance weighs by the density; {self.law} has none")

    def times(self, u_B: Tensor) -> Tensor:
        """Uniform: u itself."""
        return laws.as_float64(u_B).clone()

    def weight(self, t_B: Tensor) -> Tensor:
        """f(t), or f(t) / t."""
        weight = self.law.pdf(t_B)
        return weight / laws.as_float64(t_B) if self.divide_by_t else weight

    @property
    def normalizer(self) -> float:
        """One with 1/t, else the bell's mean mask rate."""
        return 1.0 if self.divide_by_t else self.law.mean


# Paper: Eq. 2
@dataclass(frozen=True)
class ChainRule(Bell):
    """Causal frameworks: every context count of every row once, each with weight one.

    It has no times; those it returns are never used.
    """

    law: laws.TimeLaw = field(default_factory=laws.Uniform)

    @property
    def normalizer(self) -> float:
        """One: each token of a row is scored once."""
        return 1.0
