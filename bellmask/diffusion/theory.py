"""Exact properties of objectives and laws: context weights, the bell test, numbers of masks."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from bellmask.diffusion import laws
from bellmask.diffusion.objectives import Bell, ChainRule, Importance, Nelbo, Objective
from bellmask.diffusion.schedules import Linear, Schedule

# The weight each objective puts on each context count (Sec. 2.2's shared form), exactly.
#
# omega(N_c) = (L - N_c) C(L, N_c) * integral of w(t) alpha^N_c (1 - alpha)^(L - N_c) dpi(t), so
# that the objective is the sum over N_c of omega(N_c) / (L c) times the loss at N_c observed
# tokens. The base objective has omega = 1; a bell law has next to nothing at both ends.


# Paper: Eq. 4, Prop. 4.2, Lemma B.3, Eq. 18, App. B.2: weights omega(N_c)
def context_weights(objective: Objective, block_length: int) -> Tensor:
    """omega(N_c) for N_c = 0 .. L-1, float64; they sum to L c."""
    if block_length < 1:
        raise ValueError(f"block_length must be at least 1, got {block_length}")
    if isinstance(objective, ChainRule):
        return torch.ones(block_length, dtype=torch.float64)
    if isinstance(objective, Nelbo):
        return _nelbo_weights(objective, block_length)
    if isinstance(objective.law, laws.Dirac):
        alpha = objective.schedule.alpha(laws.as_float64(objective.law.mu))
        log_w = torch.zeros(1, dtype=torch.float64)
        return _integrate(log_w, alpha[None], block_length)
    if not isinstance(objective, Bell | Importance):
        raise TypeError(f"no context weights are known for {type(objective).__name__}")
    # panels no wider than half the spread of a binomial, which is what alpha^n (1-alpha)^m is
    width = min(1 / 16, 0.5 / math.sqrt(block_length))
    t, weight = laws.composite_rule(laws.panel_edges(objective.law.breaks(), max_width=width))
    log_w = torch.log(weight) + objective.law.log_pdf(t)
    if isinstance(objective, Importance) and objective.divide_by_t:
        log_w = log_w - torch.log(t)
    return _integrate(log_w, objective.schedule.alpha(t), block_length)


def _log_binomial(length: int) -> Tensor:
    n = torch.arange(length, dtype=torch.float64)
    return math.lgamma(length + 1) - torch.lgamma(n + 1) - torch.lgamma(length - n + 1)


def _integrate(log_w: Tensor, alpha: Tensor, length: int) -> Tensor:
    """Sum over nodes of exp(log_w) (L-N) C(L,N) alpha^N (1-alpha)^(L-N), in log space."""
    n = torch.arange(length, dtype=torch.float64)[:, None]
    log_terms = torch.xlogy(n, alpha) + torch.xlogy(length - n, 1 - alpha) + log_w
    log_sum = torch.logsumexp(log_terms, dim=1) + _log_binomial(length)
    return (length - n[:, 0]) * log_sum.exp()


def _nelbo_weights(objective: Nelbo, length: int) -> Tensor:
    """P(Binomial(L, 1 - floor) > N_c) / (1 - first time): exactly one without a floor."""
    alpha = laws.as_float64(1 - objective.time_floor)
    n = torch.arange(length, dtype=torch.float64)
    log_pmf = _log_binomial(length) + torch.xlogy(n, alpha) + torch.xlogy(length - n, 1 - alpha)
    at_the_top = alpha**length  # P(Binomial = L), which is not among N_c = 0 .. L-1
    above = log_pmf.exp().flip(0).cumsum(0).flip(0) - log_pmf.exp() + at_the_top
    return above / (1 - objective.first_time)


# Is a law bell-shaped? Definition 4.1, decided on the law of the *mask rate* m = 1 - alpha_t.
#
# The margin is m(a) = P(a <= rate <= 1 - a) - (1 - 2a). A law is bell-shaped when the margin is
# never negative on [0, 1/2) and somewhere positive. For a density its extrema are roots of f(a) +
# f(1 - a) = 2, which are found on a fine grid and bisected to full precision.

TOLERANCE = 1e-12
_POINTS_PER_PANEL = 64
_BISECTIONS = 60


@dataclass(frozen=True)
class BellTest:
    """The verdict and its numbers."""

    is_bell_shaped: bool
    min_margin: float
    """Smallest margin on the interior; 0 when it is nowhere negative."""
    max_margin: float
    argmax: float
    """The a at which the margin is largest."""


# Paper: Def. 4.1
def bell_test(law: laws.TimeLaw, schedule: Schedule | None = None) -> BellTest:
    """Test Definition 4.1 for the mask rates that a law of times gives under a schedule."""
    schedule = schedule or Linear()
    if isinstance(law, laws.Dirac):
        return _test_atom(float(1 - schedule.alpha(laws.as_float64(law.mu))))
    low_times, high_times = (lambda a: schedule.inverse(1 - a)), (lambda a: schedule.inverse(a))

    def margin(a: Tensor) -> Tensor:
        return law.cdf(high_times(a)) - law.cdf(low_times(a)) - (1 - 2 * a)

    def fall(a: Tensor) -> Tensor:
        """Minus the margin's derivative: f(a) + f(1 - a) - 2."""
        times = (low_times(a), high_times(a))
        return sum((law.pdf(t) / -schedule.derivative(t) for t in times), torch.zeros_like(a)) - 2

    a = _extrema(fall, law, schedule)
    values = margin(a)
    top = int(values.argmax())
    is_symmetric_peak = (
        isinstance(law, laws.TruncatedGaussian | laws.TruncatedLaplace)
        and law.mu == 0.5
        and isinstance(schedule, Linear)
    )
    lowest, highest = min(0.0, float(values.min())), float(values[top])
    is_bell = is_symmetric_peak or (lowest >= -TOLERANCE and highest > TOLERANCE)
    return BellTest(is_bell, lowest, highest if highest > TOLERANCE else 0.0, float(a[top]))


def _extrema(fall: Callable[[Tensor], Tensor], law: laws.TimeLaw, schedule: Schedule) -> Tensor:
    """Points of (0, 1/2) that contain every local extremum of the margin."""
    sharp = (1 - schedule.alpha(torch.tensor(list(law.breaks()), dtype=torch.float64))).tolist()
    edges = laws.panel_edges([*sharp, *(1 - s for s in sharp)])
    edges = edges[edges <= 0.5]
    inside = torch.linspace(0, 1, _POINTS_PER_PANEL + 1, dtype=torch.float64)[:-1]
    grid = (edges[:-1, None] + (edges[1:] - edges[:-1])[:, None] * inside).reshape(-1)
    grid = grid[(grid > 0) & (grid < 0.5)]
    sign = torch.sign(fall(grid))
    changes = sign[:-1] * sign[1:] < 0
    low, high, low_sign = grid[:-1][changes], grid[1:][changes], sign[:-1][changes]
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        same = torch.sign(fall(middle)) == low_sign
        low, high = torch.where(same, middle, low), torch.where(same, high, middle)
    return torch.cat([grid, (low + high) / 2])


def _test_atom(rate: float) -> BellTest:
    """A point mass: the margin is 2a up to the nearer end's distance d, then 2a - 1."""
    distance = min(rate, 1 - rate)
    is_centered = abs(rate - 0.5) <= 1e-15
    lowest = 0.0 if is_centered else 2 * distance - 1
    return BellTest(is_centered, lowest, 2 * distance, distance)


# Drawing the number of masks directly, for responses that might stay unmasked at a drawn time.
#
# The number n of masks of a row of L maskable tokens is drawn from w_pi(n | n >= 1), the law of n
# when times come from pi, given that there is a mask. A row's weight undoes the condition, so the
# expected loss is the objective's own; only its noise is smaller.


class CountLaw:
    """Numbers of masks, at least one, and the weights that go with them."""

    def __init__(self, objective: Objective) -> None:
        self.objective = objective
        drawn = laws.Uniform() if isinstance(objective, Importance) else objective.law
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
