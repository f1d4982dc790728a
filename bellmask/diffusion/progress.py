"""A law that tunes itself: it draws most often the mask rates at which most is being learned.

A periodic probe measures the NLL at fixed mask rates, on fixed rows with nested masks. The signal
that a row carries at a rate is the fall of that NLL, less the fall at rate 1 (where only token
frequencies can be learned), times the number of masked tokens. The law is a Gaussian with the mean
and width of the signal's fourth power, with a share of uniform times: every context count is drawn,
so Prop. 4.2 holds at every step.

In any training loop::

    law = ProgressLaw()
    if step % law.every == 0:
        law.update(probe(network, rows, mask_id=mask_id))   # bellmask.probe
    t = law.stratified(len(x0))

K mask rates, B rows of the probe.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from bellmask.diffusion.laws import TimeLaw, TruncatedGaussian, WithUniform

NUM_RATES = 16
RATES = (*((k + 0.5) / NUM_RATES for k in range(NUM_RATES)), 1.0)
"""Mask rates of a probe; at the last one nothing is seen."""
NUM_ROWS = 16
POWER = 4
"""Of the signal. With 1 the law is as wide as the uniform one."""
LEAST_WIDTH = 0.1
UNIFORM_SHARE = 0.05
MEMORY = 3
"""Falls are averaged over about the last third of the probes so far, to reduce their noise."""
CAUTION = 2
"""Weight of t (1 - t), in standard errors of the falls."""


class AdaptiveLaw(TimeLaw):
    """A law that probes of the network change while it trains; elsewhere it is the newest one."""

    every = 50
    """Steps from one probe to the next."""
    first: Sequence[float] = ()
    """Parameters until there are measured ones."""
    _laws: list[list[float]]
    """The last two: the first step of each, and its parameters."""
    _last: list[list[float]]
    _fall: list[list[float]]
    _count: int

    def __init__(self) -> None:
        self.load_state({})

    @abstractmethod
    def build(self, parameters: Sequence[float]) -> TimeLaw:
        """The law with these parameters."""

    @abstractmethod
    def measure(self, nll_KB: Tensor) -> Sequence[float] | None:
        """New parameters from the NLL of each row at each rate; None: as before."""

    def update(self, nll_KB: Tensor, start: int = 0) -> None:
        """Take in a probe. A trainer that plans steps ahead names the first step of the new law."""
        if not bool(torch.isfinite(nll_KB).all()):
            return
        found = self.measure(nll_KB)
        if found is not None:
            self._laws = [self._laws[-1], [start, *found]]

    @property
    def parameters(self) -> list[float]:
        """Those of the newest law."""
        return self._laws[-1][1:]

    def average_fall(self, nll_KB: Tensor) -> Tensor | None:
        """Mean fall of each NLL from probe to probe, over about the last third of them."""
        last, self._last = self._last, nll_KB.tolist()
        if not last:
            return None
        fall_KB, self._count = torch.tensor(last, dtype=torch.float64) - nll_KB, self._count + 1
        if self._fall:
            before_KB = torch.tensor(self._fall, dtype=torch.float64)
            fall_KB = before_KB + (fall_KB - before_KB) * min(1.0, MEMORY / self._count)
        self._fall = fall_KB.tolist()
        return fall_KB

    def state(self) -> dict[str, Any]:
        """All that later laws depend on, ready for JSON."""
        return {"laws": self._laws, "last": self._last, "fall": self._fall, "count": self._count}

    def load_state(self, state: dict[str, Any]) -> None:
        """Continue from what :meth:`state` gave; {} begins anew."""
        self._laws = state.get("laws", [[0, *self.first]])
        self._last, self._fall = state.get("last", []), state.get("fall", [])
        self._count = state.get("count", 0)

    def at(self, step: int) -> TimeLaw:
        """The law of a step (from 0)."""
        begun = [found for found in self._laws if found[0] <= step] or self._laws[:1]
        return self.build(begun[-1][1:])

    def breaks(self) -> Sequence[float]:
        """Those of the newest law, as all that follow."""
        return self.build(self.parameters).breaks()

    def log_pdf(self, t: Tensor | float) -> Tensor:
        """Log density at t."""
        return self.build(self.parameters).log_pdf(t)

    def cdf(self, t: Tensor | float) -> Tensor:
        """P(T <= t)."""
        return self.build(self.parameters).cdf(t)

    def icdf(self, u: Tensor | float) -> Tensor:
        """The time below which a share u of the law lies."""
        return self.build(self.parameters).icdf(u)

    def expectation(self, function: Callable[[Tensor], Tensor]) -> float:
        """E[function(T)]."""
        return self.build(self.parameters).expectation(function)

    def __str__(self) -> str:
        return type(self).__name__


class ProgressLaw(AdaptiveLaw):
    """Most rows where most is being learned: parameters are a Gaussian's mu and sigma."""

    first = (0.5, 0.1)

    def build(self, parameters: Sequence[float]) -> TimeLaw:
        """A Gaussian, and a share of uniform times."""
        return WithUniform(TruncatedGaussian(*parameters), UNIFORM_SHARE)

    def measure(self, nll_KB: Tensor) -> Sequence[float] | None:
        """Moments of the signal over the rates, in hundredths: small differences between
        machines or numbers of processes do not reach the times.

        Noise cannot move the law: t (1 - t), the signal if one neighbor determines a token, is
        added in proportion to the falls' errors over rows.
        """
        fall_KB = self.average_fall(nll_KB.double())
        if fall_KB is None:
            return None
        rate, fall = torch.tensor(RATES, dtype=torch.float64), fall_KB.mean(1)
        prior = rate * (1 - rate)
        noise = rate * fall_KB.var(1, correction=0).sqrt() / max(1, fall_KB.shape[1] - 1) ** 0.5
        gain = rate * (fall - fall[-1].clamp(min=0)).clamp(min=0)
        gain = (gain + CAUTION * noise.norm() / prior.norm() * prior) ** POWER
        if not float(gain.sum()) > 0:
            return None
        gain = gain / gain.sum()
        mean = float((gain * rate).sum())
        width = float((gain * (rate - mean) ** 2).sum()) ** 0.5
        return round(mean, 2), round(max(width, LEAST_WIDTH), 2)
