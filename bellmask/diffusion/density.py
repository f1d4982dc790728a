"""A time law from any non-negative function on [0, 1]."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from bellmask.diffusion.law import TimeLaw, as_float64
from bellmask.diffusion.quadrature import composite_rule, gauss_legendre, panel_edges
from bellmask.diffusion.solve import solve_increasing


@dataclass(frozen=True)
class DensityLaw(TimeLaw):
    """A law of the user's own, from any non-negative function on [0, 1]; it is normalised here.

    ``kinks`` names points where the function is sharp or not smooth, so that integration is exact
    there. The function gets and returns float64 tensors.
    """

    density: Callable[[Tensor], Tensor]
    kinks: Sequence[float] = ()
    _edges: Tensor = field(init=False, repr=False, compare=False)
    _cumulative: Tensor = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        edges = panel_edges(self.kinks, max_width=1 / 256)
        nodes, weights = composite_rule(edges)
        values = self.density(nodes)
        if values.shape != nodes.shape or not bool(torch.isfinite(values).all()):
            raise ValueError("a density must return one finite number for each time in (0, 1)")
        if bool((values < 0).any()) or float(values.sum()) <= 0:
            raise ValueError("a density must be non-negative and not zero everywhere on (0, 1)")
        mass = (weights * values).reshape(len(edges) - 1, -1).sum(1)
        object.__setattr__(self, "_edges", edges)
        object.__setattr__(
            self, "_cumulative", torch.cat([torch.zeros(1), mass.cumsum(0)]).double()
        )

    def breaks(self) -> Sequence[float]:
        """The edges of the panels the law was normalised on."""
        return self._edges[1:-1].tolist()

    def log_pdf(self, t: Tensor | float) -> Tensor:
        """Log of the normalised density."""
        return torch.log(self.density(as_float64(t)) / self._cumulative[-1])

    def cdf(self, t: Tensor | float) -> Tensor:
        """Whole panels, plus one Gauss-Legendre panel up to t."""
        t = as_float64(t).clamp(0, 1)
        panel = (torch.searchsorted(self._edges, t, right=True) - 1).clamp(0, len(self._edges) - 2)
        nodes, weights = gauss_legendre()
        width = t - self._edges[panel]
        inside = self.density(self._edges[panel][..., None] + width[..., None] * nodes) @ weights
        return (self._cumulative[panel] + width * inside) / self._cumulative[-1]

    def icdf(self, u: Tensor | float) -> Tensor:
        """By safeguarded Newton's method on the cdf."""
        u = as_float64(u)
        share = self._cumulative / self._cumulative[-1]
        panel = (torch.searchsorted(share, u) - 1).clamp(0, len(self._edges) - 2)
        guess = (self._edges[panel] + self._edges[panel + 1]) / 2
        t = solve_increasing(self.cdf, self.pdf, u, guess)
        return torch.where(u <= 0, 0.0, torch.where(u >= 1, 1.0, t))
