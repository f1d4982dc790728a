"""Gauss-Legendre integration on [0, 1], fine where a law of times or a binomial is sharp."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache

import torch
from torch import Tensor

NODES_PER_PANEL = 32
_END_PANELS = 50
"""Panels halve this many times towards 0 and 1, so a boundary layer of width 2^-50 is resolved."""


@cache
def _legendre(count: int) -> tuple[Tensor, Tensor]:
    k = torch.arange(1, count, dtype=torch.float64)
    off_diagonal = k / torch.sqrt(4 * k * k - 1)
    values, vectors = torch.linalg.eigh(torch.diag(off_diagonal, 1) + torch.diag(off_diagonal, -1))
    return (values + 1) / 2, vectors[0] ** 2


def gauss_legendre(count: int = NODES_PER_PANEL) -> tuple[Tensor, Tensor]:
    """Nodes in (0, 1) and weights that sum to one (Golub and Welsch's eigenvalue method)."""
    return _legendre(count)


def panel_edges(breaks: Iterable[float] = (), max_width: float = 1 / 16) -> Tensor:
    """Sorted edges from 0 to 1: geometric towards both ends, uniform between, and ``breaks``."""
    geometric = [2.0**-k for k in range(1, _END_PANELS)]
    uniform = torch.linspace(0, 1, max(2, int(1 / max_width) + 1), dtype=torch.float64).tolist()
    inside = [b for b in breaks if 0 < b < 1]
    return torch.tensor(
        sorted({*uniform, *geometric, *(1 - g for g in geometric), *inside}), dtype=torch.float64
    )


def composite_rule(edges: Tensor) -> tuple[Tensor, Tensor]:
    """Nodes and weights of the rule that uses one Gauss-Legendre panel between any two edges."""
    nodes, weights = gauss_legendre()
    left, width = edges[:-1, None], (edges[1:] - edges[:-1])[:, None]
    return (left + width * nodes).reshape(-1), (width * weights).reshape(-1)
