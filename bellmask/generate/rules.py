"""Rules of sampling: which masked positions are revealed in a step.

Blind rules know the positions before the network is called, so it predicts those alone; they sample
the model's own distribution as steps get finer (first-hitting in as many calls as tokens). Scored
rules look at the predictions for all masked positions and reveal the most certain ones: better text
in few calls, no longer samples of that distribution.

B canvases, L length, N predicted positions, V vocabulary.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from bellmask.diffusion.schedules import Schedule


@dataclass(frozen=True)
class Moment:
    """The input of a rule in the step from time t to an earlier time s."""

    is_open_BL: Tensor
    """Masked, and may be revealed now."""
    is_made_BL: Tensor
    """Revealed in an earlier step."""
    alpha_t: float
    alpha_s: float
    """Share of tokens visible before and after the step."""
    budget_B: Tensor
    """How many to reveal so that 1 - alpha_s of what was open at the start is still masked."""
    t_B: Tensor
    """The step's time; with blocks, ``count_t_B``."""
    count_t_B: Tensor
    """The time at which as many tokens of the row are masked, on average, as now."""
    is_alone: bool
    """True without blocks."""
    u_BL: Tensor
    """A number in [0, 1) for each position, the same in every step."""
    fresh: Callable[[str], Tensor]
    """``fresh(name)``: numbers of this step's own, [B, L]."""
    schedule: Schedule


class Rule(ABC):
    """A rule for the step from t to s."""

    is_repeated: bool = False
    """A position may be predicted more than once, so each step needs its own noise."""
    takes_grid: bool = True
    """False: the rule has its own times."""
    score: Callable[[Tensor, Tensor], Tensor] | None = None
    """(log-probabilities [N, V], drawn tokens [N]) to a certainty score; None: not needed."""

    @abstractmethod
    def candidates(self, moment: Moment) -> Tensor:
        """Positions to predict, bool [B, L]."""

    def times(self, moment: Moment) -> Tensor:
        """Time input of a time-conditioned model, [B]."""
        return moment.count_t_B

    def revealed(self, moment: Moment, is_candidate_BL: Tensor, score_N: Tensor) -> Tensor:
        """Candidates that keep their drawn token, bool [B, L]; here all."""
        return is_candidate_BL

    def forgotten(self, moment: Moment) -> Tensor | None:
        """Generated tokens to mask again, bool [B, L]; None: none."""
        return None


# Paper: Sec. 2.1: reverse process
class Ancestral(Rule):
    """The reverse process (Sec. 2.1): from t to s a masked token is revealed with probability
    (alpha_s - alpha_t) / (1 - alpha_t), that is, once alpha has passed its number.
    """

    def candidates(self, moment: Moment) -> Tensor:
        """Those whose number alpha_s has passed; in the last step, where alpha_s = 1, all."""
        return moment.is_open_BL & (moment.u_BL < moment.alpha_s)

    def times(self, moment: Moment) -> Tensor:
        return moment.t_B


# Paper: Sec. 2.1: reverse process
class FirstHitting(Rule):
    """The reverse process without a grid (Zheng et al. 2024): token after token, each at the very
    time at which alpha reaches its number. Exact, in as many calls as tokens.
    """

    takes_grid = False

    def candidates(self, moment: Moment) -> Tensor:
        """The open position with the smallest number."""
        return _first(moment.is_open_BL, moment.u_BL, moment.is_open_BL.any(dim=1).long())

    def times(self, moment: Moment) -> Tensor:
        """When alpha reaches that number; where blocks take turns, by count."""
        if not moment.is_alone:
            return moment.count_t_B
        first_B = torch.where(moment.is_open_BL, moment.u_BL, 1.0).amin(dim=1)
        return moment.schedule.inverse(first_B)


class RandomOrder(Rule):
    """A random order, as many tokens in each step as the grid says."""

    def candidates(self, moment: Moment) -> Tensor:
        """The open positions with the smallest numbers."""
        return _first(moment.is_open_BL, moment.u_BL, moment.budget_B)


@dataclass(frozen=True)
class Remasking(Rule):
    """ReMDM (Wang et al. 2025): a generated token is masked again with probability sigma, and so
    many more are revealed that the share of visible tokens stays that of the reverse process.
    """

    strength: float
    """eta: 0 is ancestral sampling with fresh noise in each step."""
    kind: str = "cap"
    """cap: sigma = min(eta, largest); rescale: sigma = eta * largest."""
    is_repeated = True

    def sigma(self, moment: Moment) -> float:
        """Probability that a generated token is masked again; at most (1 - alpha_s) / alpha_t."""
        alpha_t, alpha_s = moment.alpha_t, moment.alpha_s
        largest = 1.0 if 1 - alpha_s >= alpha_t else (1 - alpha_s) / alpha_t
        return min(self.strength, largest) if self.kind == "cap" else self.strength * largest

    def candidates(self, moment: Moment) -> Tensor:
        """Each with probability (alpha_s - (1 - sigma) alpha_t) / (1 - alpha_t)."""
        alpha_t, alpha_s = moment.alpha_t, moment.alpha_s
        revealed = (alpha_s - (1 - self.sigma(moment)) * alpha_t) / (1 - alpha_t)
        return moment.is_open_BL & (moment.fresh("reveal") < revealed)

    def times(self, moment: Moment) -> Tensor:
        return moment.t_B

    def forgotten(self, moment: Moment) -> Tensor:
        return moment.is_made_BL & (moment.fresh("forget") < self.sigma(moment))


@dataclass(frozen=True)
class Scored(Rule):
    """Predict all open positions, reveal the ``budget_B`` ones with the highest scores."""

    score: Callable[[Tensor, Tensor], Tensor]
    is_repeated = True

    def candidates(self, moment: Moment) -> Tensor:
        """All open positions of rows that reveal something now."""
        return moment.is_open_BL & (moment.budget_B > 0)[:, None]

    def revealed(self, moment: Moment, is_candidate_BL: Tensor, score_N: Tensor) -> Tensor:
        """Those with the highest scores."""
        number_BL = torch.zeros(is_candidate_BL.shape, dtype=torch.float64)
        number_BL[is_candidate_BL] = -score_N.double()
        return _first(is_candidate_BL, number_BL, moment.budget_B)


def confidence(log_p_NV: Tensor, tokens_N: Tensor) -> Tensor:
    """Log-probability of the drawn token."""
    return log_p_NV.gather(1, tokens_N[:, None]).squeeze(1)


def margin(log_p_NV: Tensor, tokens_N: Tensor) -> Tensor:
    """Probability of the likeliest token minus that of the next."""
    first, second = log_p_NV.topk(2, dim=1).values.exp().unbind(1)
    return first - second


def negative_entropy(log_p_NV: Tensor, tokens_N: Tensor) -> Tensor:
    """Sum of p log p: largest where the distribution is narrow."""
    return torch.xlogy(log_p_NV.exp(), log_p_NV.exp()).sum(dim=1)


def _first(is_open_BL: Tensor, number_BL: Tensor, count_B: Tensor) -> Tensor:
    """The ``count_B`` open positions of each row with the smallest numbers."""
    order_BL = torch.where(is_open_BL, number_BL, torch.inf).argsort(dim=1, stable=True)
    rank_BL = torch.arange(order_BL.shape[1]).expand_as(order_BL)
    rank_BL = torch.empty_like(order_BL).scatter_(1, order_BL, rank_BL)
    return is_open_BL & (rank_BL < count_B[:, None])


RULES: dict[str, Rule] = {
    "ancestral": Ancestral(),
    "first_hitting": FirstHitting(),
    "random": RandomOrder(),
    "most_confident": Scored(confidence),
    "margin": Scored(margin),
    "entropy": Scored(negative_entropy),
}
"""Rules by name, as in options and settings; :class:`Remasking` has its own parameter."""

if TYPE_CHECKING:
    RuleName = str
else:
    RuleName = Literal[tuple(RULES)]
