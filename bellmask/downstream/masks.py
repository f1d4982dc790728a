"""Which masks estimate a continuation's log-probability, and with which weights.

The bound is a sum over mask counts n = 1 .. L of E[mean cross-entropy | n of L masked] (shared form
of Sec. 2.2, N_c = L - n visible tokens of the continuation). Every estimator is a plan: R passes
with masks and weights, log p ~ - sum_r weight_r * (sum of cross-entropies that pass r scores).

| kind          | masks                                      | weight of a pass | noise    |
|---------------|--------------------------------------------|------------------|----------|
| exact         | all 2^L - 1                                | 1 / (n C(L, n))  | none     |
| strata        | n = 1 + floor(L (r + u) / R), then any n   | L / (R n)        | unbiased |
| bernoulli     | rate t = (r + 1 - u) / R, each token apart | 1 / (R t)        | unbiased |
| diffullama    | rate t = (r + 1) / R, each token apart     | L / (R n)        | biased   |
| left_to_right | token i and all behind it; scores i        | 1                | none     |

bernoulli's variance is infinite, if only by a logarithm: a mask at a tiny rate has a huge weight.
diffullama counts a pass without a mask as 0, and with one draw it always masks all. left_to_right
is another chain of factors, the likelihood of writing the tokens in that order.

R passes, L tokens of the continuation.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray

from bellmask.downstream.asks import Ask, Score
from bellmask.utils.errors import UserError, look_up
from bellmask.utils.rng import stream_key, uniform
from bellmask.utils.stats import collapsed_strata_error

Kind = Literal["auto", "exact", "strata", "bernoulli", "diffullama", "left_to_right"]
KINDS: tuple[Kind, ...] = ("auto", "exact", "strata", "bernoulli", "diffullama", "left_to_right")
MOST_EXACT = 12
"""4095 masks; twice as many with each further token."""
_STRIDE = 1 << 20
"""Counters of one draw; no continuation is longer."""


@dataclass(frozen=True)
class Estimator:
    """How a masked model's log-probability of a continuation is estimated."""

    kind: Kind = "auto"
    """auto: exact for short continuations, strata for longer ones."""
    draws: int = 16
    """Masks per continuation where they are drawn; orders of an AoARM."""
    longest_exact: int = 6
    """Tokens up to which auto takes all masks."""
    is_common: bool = True
    """Choices of a question draw the same numbers; False, for comparison: each draws its own."""

    def check(self) -> Estimator:
        """This, or a :class:`UserError`."""
        look_up("estimator", self.kind, dict.fromkeys(KINDS))
        if self.draws < 1:
            raise UserError(f"--draws must be at least 1, got {self.draws}")
        if not 0 <= self.longest_exact <= MOST_EXACT:
            raise UserError(
                f"--longest-exact must be from 0 to {MOST_EXACT} (2^n - 1 masks), got "
                f"{self.longest_exact}"
            )
        return self

    def key(self, ask: Ask, seed: int) -> int:
        """Names the random numbers of an ask."""
        own = () if self.is_common else ("-".join(map(str, (*ask.given, *ask.target))),)
        return stream_key(seed, "continuations", ask.noise, *own)

    def kind_for(self, length: int, uses_time: bool = False) -> Kind:
        """The kind that a continuation of so many tokens gets.

        A time-conditioned model needs a time that its mask may have come from: always drawn.
        """
        if self.kind == "auto":
            is_short = length <= self.longest_exact and not uses_time
            return "exact" if is_short else "strata"
        if uses_time and self.kind in ("exact", "left_to_right"):
            raise UserError(f"a time-conditioned run has no {self.kind} estimator; use strata")
        if self.kind == "exact" and length > MOST_EXACT:
            raise UserError(
                f"a continuation of {length} tokens has too many masks to take all (at most "
                f"{MOST_EXACT} tokens); use auto, which does so for short ones only"
            )
        return self.kind


@dataclass(frozen=True)
class Plan:
    """Passes of one ask."""

    kind: Kind
    is_masked_RL: NDArray[np.bool_]
    is_scored_RL: NDArray[np.bool_]
    weight_R: NDArray[np.float64]
    rate_R: NDArray[np.float64]
    """A mask rate that such a mask may have come from, for time-conditioned models."""

    @property
    def is_noisy(self) -> bool:
        """Other random numbers would give another value."""
        return self.kind in ("strata", "bernoulli", "diffullama")

    def conclude(self, sum_R: NDArray[np.float64]) -> Score:
        """The score from each pass's sum of cross-entropies."""
        value_R = self.weight_R * sum_R
        count = len(value_R)
        error = 0.0
        if self.is_noisy:
            level = np.arange(count, dtype=np.float64)
            error = collapsed_strata_error(count * value_R, level) if count > 1 else math.nan
        passes = int(self.is_scored_RL.any(axis=1).sum())
        length = self.is_masked_RL.shape[1]
        return Score(-math.fsum(value_R), error, length, passes, not self.is_noisy)


def make_plan(ask: Ask, estimator: Estimator, *, seed: int, uses_time: bool = False) -> Plan:
    """The passes that estimate an ask's log-probability."""
    length = len(ask.target)
    kind = estimator.kind_for(length, uses_time)
    if kind == "exact":
        return _exact(length)
    if kind == "left_to_right":
        return _left_to_right(length)
    u_R, u_RL = _numbers(ask, estimator, seed)
    draws, place_R = estimator.draws, np.arange(estimator.draws)
    if kind == "strata":
        count_R = 1 + np.floor(length * (place_R + u_R) / draws).astype(np.int64)
        count_R = count_R.clip(max=length)
        # the n smallest numbers; the largest of them is a rate that masks just these
        order_RL = np.sort(u_RL, axis=1)
        rate_R = order_RL[place_R, count_R - 1]
        is_masked = u_RL <= rate_R[:, None]
        return Plan(kind, is_masked, is_masked, length / (draws * count_R), rate_R)
    if kind == "bernoulli":
        rate_R = (place_R + 1 - u_R) / draws  # never 0
        is_masked = u_RL < rate_R[:, None]
        return Plan(kind, is_masked, is_masked, 1 / (draws * rate_R), rate_R)
    rate_R = (place_R + 1) / draws
    is_masked = u_RL < rate_R[:, None]
    weight_R = length / (draws * is_masked.sum(1).clip(min=1))
    return Plan(kind, is_masked, is_masked, weight_R, rate_R)


def _exact(length: int) -> Plan:
    number = np.arange(1, 2**length)
    is_masked = (number[:, None] >> np.arange(length)) & 1 == 1
    count_R = is_masked.sum(1)
    ways_R = np.array([math.comb(length, n) for n in count_R])
    return Plan("exact", is_masked, is_masked, 1 / (count_R * ways_R), count_R / (length + 1))


def _left_to_right(length: int) -> Plan:
    is_masked = np.triu(np.ones((length, length), dtype=bool))
    rate_R = is_masked.sum(1) / (length + 1)
    scored = np.eye(length, dtype=bool)
    return Plan("left_to_right", is_masked, scored, np.ones(length), rate_R)


def _numbers(
    ask: Ask, estimator: Estimator, seed: int
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """(the shared shift of all strata, one number per pass and token), both in [0, 1)."""
    key = estimator.key(ask, seed)
    draws, length = estimator.draws, len(ask.target)
    counters = torch.arange(draws)[:, None] * _STRIDE + torch.arange(length)
    u_RL = uniform(key, counters).numpy()
    level = uniform(stream_key(key, "level"), torch.zeros(1, dtype=torch.int64)).numpy()
    return np.repeat(level, draws), u_RL
