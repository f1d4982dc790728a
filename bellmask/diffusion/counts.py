"""How many tokens to mask, drawn as a number: for responses that a time might leave unmasked.

The number n of masks of a row of L maskable tokens is drawn from w_pi(n | n >= 1), the law of n
when times come from pi, given that there is a mask. A row's weight undoes the condition, so the
expected loss is the objective's own; only its noise is smaller.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from bellmask.diffusion.context_weights import context_weights
from bellmask.diffusion.objectives import Bell, Importance, Objective
from bellmask.diffusion.times import Uniform


class CountLaw:
    """Numbers of masks, at least one, and the weights that go with them."""

    def __init__(self, objective: Objective) -> None:
        self.objective = objective
        drawn = Uniform() if isinstance(objective, Importance) else objective.law
        self._times_alone = Bell(drawn, objective.schedule)
        self.table = cache(self._table)

    def _table(self, length: int) -> tuple[Tensor, Tensor]:
        """(q(n), w(n)) for n = 1 .. L: probabilities, and the factor on a masked row's loss.

        q(n) w(n) n = omega(L - n), the objective's context weight: nothing else is needed for the
        same expected loss.
        """
        n = torch.arange(1, length + 1, dtype=torch.float64)
        share = context_weights(self._times_alone, length).flip(0) / n  # P(n masks), n >= 1
        q = share / share.sum()
        omega = context_weights(self.objective, length).flip(0)
        tiny = torch.finfo(torch.float64).tiny
        return q, torch.where(q > tiny, omega / (n * q.clamp(min=tiny)), 0.0)

    def draw(self, level_B: Tensor, length_B: Tensor) -> tuple[Tensor, Tensor]:
        """(n [B], weight [B]) at levels in [0, 1); 0 and 0 for rows without a maskable token."""
        count_B = torch.zeros_like(length_B)
        weight_B = torch.zeros(len(length_B), dtype=torch.float64)
        for row, (level, length) in enumerate(zip(level_B.tolist(), length_B.tolist())):
            if length < 1:
                continue
            q, weight = self.table(length)
            place = int(torch.searchsorted(q.cumsum(0), level, right=True))
            place = min(place, length - 1)
            count_B[row], weight_B[row] = place + 1, weight[place]
        return count_B, weight_B
