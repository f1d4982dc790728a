"""Passes through the network that one ask takes, as rows, and the score that they add up to.

R passes of an ask, L tokens of its target.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bellmask.downstream.asks import Ask, Score
from bellmask.downstream.masks import Plan
from bellmask.utils.rng import stream_key, uniform

SHOWN_FIRST = -1e6
"""Where an order puts what is shown: before all that is asked for."""


# --- rows ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """One pass of one ask."""

    ask: Ask
    tokens: Tensor
    """With masks where they are."""
    is_scored: Tensor
    rate: float = 0.0
    numbers: Any = None
    """The order of a causal run's tokens, smallest first."""


def clean(ask: Ask) -> list[int]:
    """All tokens of an ask, none masked."""
    return [*ask.given, *ask.target, *ask.after]


def masked_row(
    ask: Ask,
    mask_id: int,
    is_masked_L: NDArray[np.bool_],
    is_scored_L: NDArray[np.bool_],
    rate: float,
) -> Row:
    """Some of the target masked; ``rate`` is for time-conditioned models."""
    start, stop = len(ask.given), len(ask.given) + len(ask.target)
    tokens = torch.tensor(clean(ask))
    tokens[start:stop][torch.from_numpy(is_masked_L)] = mask_id
    is_scored = torch.zeros(len(tokens), dtype=torch.bool)
    is_scored[start:stop] = torch.from_numpy(is_scored_L)
    return Row(ask, tokens, is_scored, rate)


def ordered_row(ask: Ask, number_L: Tensor) -> Row:
    """What is shown comes first, in its own order, then the target, smallest number first."""
    tokens = torch.tensor(clean(ask))
    numbers = SHOWN_FIRST + torch.arange(len(tokens), dtype=torch.float64)
    numbers[len(ask.given) : len(ask.given) + len(ask.target)] = number_L
    return Row(ask, tokens, torch.ones(len(tokens), dtype=torch.bool), numbers=numbers)


# --- jobs ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class MaskedJob:
    """An ask to a masked model."""

    ask: Ask
    plan: Plan
    mask_id: int

    def __len__(self) -> int:
        return len(self.plan.weight_R)

    def is_needed(self, place: int) -> bool:
        """A pass that scores nothing is not made."""
        return bool(self.plan.is_scored_RL[place].any())

    def row(self, place: int) -> Row:
        """One pass as a row of tokens."""
        return masked_row(
            self.ask,
            self.mask_id,
            self.plan.is_masked_RL[place],
            self.plan.is_scored_RL[place],
            float(self.plan.rate_R[place]),
        )

    def conclude(self, sum_R: NDArray[np.float64]) -> Score:
        """The score from the sums of all passes."""
        return self.plan.conclude(sum_R)


@dataclass(frozen=True)
class OrderedJob:
    """An ask to a causal model: left to right, or for an AoARM in random orders."""

    ask: Ask
    draws: int
    key: int
    """Names the orders that are drawn."""
    is_exact: bool

    def __len__(self) -> int:
        return self.draws

    def is_needed(self, place: int) -> bool:
        """All are."""
        return True

    def row(self, place: int) -> Row:
        """One pass as a row of tokens: the target in a drawn order."""
        key = stream_key(self.key, "orders", place)
        return ordered_row(self.ask, uniform(key, torch.arange(len(self.ask.target))))

    def conclude(self, sum_R: NDArray[np.float64]) -> Score:
        """Mean over orders."""
        error = 0.0 if self.is_exact else np.nan
        if self.draws > 1:
            error = float(sum_R.std(ddof=1) / np.sqrt(self.draws))
        length = len(self.ask.target)
        return Score(-float(sum_R.mean()), error, length, self.draws, self.is_exact)


Job = MaskedJob | OrderedJob
