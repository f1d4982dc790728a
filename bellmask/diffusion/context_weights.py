"""The weight each objective puts on each context count (Sec. 2.2's shared form), exactly.

omega(N_c) = (L - N_c) C(L, N_c) * integral of w(t) alpha^N_c (1 - alpha)^(L - N_c) dpi(t), so that
the objective is the sum over N_c of omega(N_c) / (L c) times the loss at N_c observed tokens. The
base objective has omega = 1; a bell law has next to nothing at both ends.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from bellmask.diffusion.objectives import Bell, ChainRule, Importance, Nelbo, Objective
from bellmask.diffusion.quadrature import composite_rule, panel_edges
from bellmask.diffusion.times import Dirac, as_float64


def context_weights(objective: Objective, block_length: int) -> Tensor:
    """omega(N_c) for N_c = 0 .. L-1, float64; they sum to L c."""
    if block_length < 1:
        raise ValueError(f"block_length must be at least 1, got {block_length}")
    if isinstance(objective, ChainRule):
        return torch.ones(block_length, dtype=torch.float64)
    if isinstance(objective, Nelbo):
        return _nelbo_weights(objective, block_length)
    if isinstance(objective.law, Dirac):
        alpha = objective.schedule.alpha(as_float64(objective.law.mu))
        log_w = torch.zeros(1, dtype=torch.float64)
        return _integrate(log_w, alpha[None], block_length)
    if not isinstance(objective, Bell | Importance):
        raise TypeError(f"no context weights are known for {type(objective).__name__}")
    # panels no wider than half the spread of a binomial, which is what alpha^n (1-alpha)^m is
    width = min(1 / 16, 0.5 / math.sqrt(block_length))
    t, weight = composite_rule(panel_edges(objective.law.breaks(), max_width=width))
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
    if objective.time_floor == 0:
        return torch.ones(length, dtype=torch.float64)
    alpha = as_float64(1 - objective.time_floor)
    n = torch.arange(length, dtype=torch.float64)
    log_pmf = _log_binomial(length) + torch.xlogy(n, alpha) + torch.xlogy(length - n, 1 - alpha)
    at_the_top = alpha**length  # P(Binomial = L), which is not among N_c = 0 .. L-1
    above = log_pmf.exp().flip(0).cumsum(0).flip(0) - log_pmf.exp() + at_the_top
    return above / (1 - objective.first_time)
