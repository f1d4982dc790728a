"""What no model can beat: the irreducible entropy by context count, the red part of Prop 3.1.

H^n = H(X^I | Z_n, I) in nats per prediction, for n = 0 .. L - 1 context tokens. An ``order_L`` is a
permutation of places 0 .. L - 1: the target of count n is ``order_L[n]``, its context the places
before it in the order (ARM: 0, 1, 2, ...; sigma-ARM: any fixed one). None stands for MDM, where
context and target are drawn at random; AoARM, which averages over all orders, has the same H^n.
For each framework the H^n add up to H(X).
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Callable

import torch
from torch import Tensor

from bellmask.analyze.analysis import OnProgress
from bellmask.data.toys import ToySource
from bellmask.utils.errors import UserError
from bellmask.utils.rng import stream_key, uniform_rows

Places = tuple[int, ...]

MOST_SUMMANDS = 1 << 27
"""Enumeration adds V^L probabilities for each of 2^L sets of places: some seconds at this many."""
NUMBERS_AT_ONCE = 1 << 22
"""Entries of the largest array of a Monte Carlo batch."""


def entropy(p: Tensor) -> Tensor:
    """Nats, over the last axis."""
    return -torch.xlogy(p, p).sum(-1)


def chain_entropy(source: ToySource) -> Tensor:
    """H^n of MDM (and AoARM) for a stationary order-1 chain, in closed form, float64 [L].

    Let h(d) = H(X^d | X^0). By the chain rule a symbol whose nearest observed neighbours are a to
    the left and b to the right has entropy h(a) + h(b) - h(a + b), or h(a) with a single one. Of
    all (target, context) with n observed, (L - a - b) C(L-1-a-b, n-2) have the neighbours (a, b),
    and C(L - a, n) only one at distance a to the left (as many to the right), out of L C(L-1, n).
    """
    length = source.length
    h = _entropy_at_distance(source)
    n, d = torch.arange(1, length)[:, None], torch.arange(1, length)
    pairs_D = 2 * (h.cumsum(0)[:-2]) - (d - 1) * h[1:-1]  # sum over a + b = d
    all_N1 = math.log(length) + _log_binomial(torch.tensor(length - 1), n)
    two = torch.exp(_log_binomial(length - 1 - d, n - 2) - all_N1) * (length - d)
    one = 2 * torch.exp(_log_binomial(length - d, n) - all_N1)
    return torch.cat([h[-1:], two @ pairs_D + one @ h[1:-1]])


def ordered_chain_entropy(source: ToySource, order_L: Tensor) -> Tensor:
    """H^n of ARM or sigma-ARM for a stationary order-1 chain, exact, float64 [L]."""
    length, h = source.length, _entropy_at_distance(source).tolist()
    seen: list[int] = []
    found = []
    for place in _checked(order_L, length):
        at = bisect.bisect(seen, place)
        a = place - seen[at - 1] if at > 0 else length
        b = seen[at] - place if at < len(seen) else length
        found.append(h[a] + h[b] - h[min(a + b, length)])
        seen.insert(at, place)
    return torch.tensor(found, dtype=torch.float64)


def enumerated_entropy(source: ToySource, order_L: Tensor | None = None) -> Tensor:
    """H^n of any small source from the table of all its rows, float64 [L]; they add up to H(X).

    A target drawn at random joins its context to a random set of n + 1 places, so H^n of MDM is
    the mean entropy of n + 1 places less that of n.
    """
    length, kinds = source.length, source.num_tokens
    if (2 * kinds) ** length > MOST_SUMMANDS:
        raise UserError(
            f"{kinds} symbols at {length} places are too many to enumerate; use sampled_entropy"
        )
    rows = torch.cartesian_prod(*[torch.arange(kinds)] * length).view(-1, length)
    table = source.log_probability(rows).exp().view([kinds] * length)

    def entropy_of(places: Places) -> float:
        others = [place for place in range(length) if place not in places]
        return float(entropy((table.sum(others) if others else table).flatten()))

    if order_L is None:
        total = [_mean_entropy(length, count, entropy_of) for count in range(length + 1)]
    else:
        order = _checked(order_L, length)
        total = [entropy_of(tuple(order[:count])) for count in range(length + 1)]
    return torch.tensor(total, dtype=torch.float64).diff()


def sampled_entropy(
    source: ToySource,
    order_L: Tensor | None = None,
    *,
    num_rows: int = 256,
    seed: int = 0,
    on_progress: OnProgress | None = None,
) -> tuple[Tensor, Tensor]:
    """(H^n, its standard error over rows), float64 [L] each, of any source by Monte Carlo.

    Only rows and contexts are drawn; at each context the entropy of the exact conditional is
    taken, not -log p of a drawn symbol. For MDM every row goes through a random order of its own,
    and all masked places of a context count. Row r depends on the seed and r alone.
    """
    length = source.length
    order = None if order_L is None else torch.tensor(_checked(order_L, length))
    batch = max(1, NUMBERS_AT_ONCE // (length * length * len(source.initial_S)))
    found = []
    for rows in torch.arange(num_rows).split(batch):
        u = uniform_rows(stream_key(seed, "entropy", "orders"), rows, length)
        order_BL = u.argsort(1) if order is None else order.expand(len(rows), -1)
        found.append(_row_entropies(source, _rows(source, seed, rows), order_BL, order is None))
        if on_progress is not None:
            on_progress(int(rows[-1]) + 1, num_rows)
    return _mean_and_error(torch.cat(found))


def row_entropy(
    source: ToySource, *, num_rows: int = 1 << 14, seed: int = 0
) -> tuple[float, float]:
    """(H(X) in nats, its standard error): exact where the source has an order, else Monte Carlo."""
    if source.order is not None:
        return source.entropy, 0.0
    batch = max(1, NUMBERS_AT_ONCE // (source.length * len(source.initial_S)))
    parts = torch.arange(num_rows).split(batch)
    found = [-source.log_probability(_rows(source, seed, rows)) for rows in parts]
    mean, error = _mean_and_error(torch.cat(found)[:, None])
    return float(mean), float(error)


def _rows(source: ToySource, seed: int, rows: Tensor) -> Tensor:
    """Rows of the source by number."""
    return source.draw(uniform_rows(stream_key(seed, "entropy", "rows"), rows, source.num_uniforms))


def _row_entropies(source: ToySource, x_BL: Tensor, order_BL: Tensor, is_mdm: bool) -> Tensor:
    """The conditional entropy for each row and context count, [B, L]: of the next place in the
    order, or the mean over all masked places.
    """
    batch, length = x_BL.shape
    rank_BL = order_BL.argsort(1)
    is_masked_BNL = rank_BL[:, None] >= torch.arange(length)[:, None]
    z_BNL = torch.where(is_masked_BNL, source.num_tokens, x_BL[:, None])
    p = source.log_conditionals(z_BNL.view(-1, length)).exp()
    h_BNL = entropy(p).view(batch, length, length)
    if is_mdm:
        return (h_BNL * is_masked_BNL).sum(2) / is_masked_BNL.sum(2)
    return h_BNL.gather(2, order_BL[..., None]).squeeze(2)


def _mean_and_error(values_BN: Tensor) -> tuple[Tensor, Tensor]:
    return values_BN.mean(0), values_BN.std(0) / math.sqrt(len(values_BN))


def _mean_entropy(length: int, count: int, entropy_of: Callable[[Places], float]) -> float:
    """Over all sets of so many places."""
    sets = list(itertools.combinations(range(length), count))
    return sum(map(entropy_of, sets)) / len(sets)


def _entropy_at_distance(source: ToySource) -> Tensor:
    """h(d) = H(X^d | X^0) for d = 0 .. L - 1, then h(L) = H(X): a neighbour that is not there."""
    start_V, move_VV = _stationary_chain(source)
    power, found = torch.eye(len(start_V), dtype=torch.float64), []
    for _ in range(source.length):
        found.append(start_V @ entropy(power))
        power = power @ move_VV
    return torch.stack([*found, entropy(start_V)])


def _stationary_chain(source: ToySource) -> tuple[Tensor, Tensor]:
    """(distribution of a symbol, transitions) of a source that is a stationary order-1 chain."""
    if source.order != 1:
        kind = "hidden" if source.order is None else f"of order {source.order}"
        raise UserError(
            f"the closed form is for chains of order 1, and this source is {kind}; "
            "use sampled_entropy or enumerated_entropy"
        )
    state_VS = (source.emission_SV.T > 0).double()
    start_V = source.initial_S @ source.emission_SV
    move_VV = state_VS @ source.transition_SS @ source.emission_SV
    if not torch.allclose(start_V @ move_VV, start_V, rtol=0, atol=1e-9):
        raise UserError(
            "the closed form is for stationary chains, and this one's first symbol is distributed "
            "unlike its second; start it from its stationary distribution, or use sampled_entropy"
        )
    return start_V, move_VV


def _log_binomial(m: Tensor, k: Tensor) -> Tensor:
    """Log C(m, k), -inf where it is 0."""
    is_zero = (k < 0) | (k > m)
    m, k = m.double().clamp(min=0), k.double().clamp(min=0)
    log_c = torch.lgamma(m + 1) - torch.lgamma(k + 1) - torch.lgamma((m - k).clamp(min=0) + 1)
    return torch.where(is_zero, -math.inf, log_c)


def _checked(order_L: Tensor, length: int) -> list[int]:
    order = order_L.tolist()
    if sorted(order) != list(range(length)):
        raise UserError(f"an order is a permutation of the places 0 to {length - 1}, not {order}")
    return order
