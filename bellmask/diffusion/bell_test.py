"""Is a law bell-shaped? Definition 4.1, decided on the law of the *mask rate* m = 1 - alpha_t.

The margin is m(a) = P(a <= rate <= 1 - a) - (1 - 2a). A law is bell-shaped when the margin is never
negative on [0, 1/2) and somewhere positive. For a density its extrema are roots of
f(a) + f(1 - a) = 2, which are found on a fine grid and bisected to full precision.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from bellmask.diffusion.quadrature import panel_edges
from bellmask.diffusion.schedule import Linear, Schedule
from bellmask.diffusion.times import Dirac, TimeLaw, TruncatedGaussian, TruncatedLaplace, as_float64

TOLERANCE = 1e-12
_POINTS_PER_PANEL = 64
_BISECTIONS = 60


@dataclass(frozen=True)
class BellTest:
    """The verdict, with the numbers behind it."""

    is_bell_shaped: bool
    min_margin: float
    """Smallest margin on the interior; 0 when it is nowhere negative."""
    max_margin: float
    argmax: float
    """The a at which the margin is largest."""


def bell_test(law: TimeLaw, schedule: Schedule | None = None) -> BellTest:
    """Test Definition 4.1 for the mask rates that a law of times gives under a schedule."""
    schedule = schedule or Linear()
    if isinstance(law, Dirac):
        return _test_atom(float(1 - schedule.alpha(as_float64(law.mu))))
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
        isinstance(law, TruncatedGaussian | TruncatedLaplace)
        and law.mu == 0.5
        and isinstance(schedule, Linear)
    )
    lowest, highest = min(0.0, float(values.min())), float(values[top])
    is_bell = is_symmetric_peak or (lowest >= -TOLERANCE and highest > TOLERANCE)
    return BellTest(is_bell, lowest, highest if highest > TOLERANCE else 0.0, float(a[top]))


def _extrema(fall: Callable[[Tensor], Tensor], law: TimeLaw, schedule: Schedule) -> Tensor:
    """Points of (0, 1/2) that contain every local extremum of the margin."""
    sharp = (1 - schedule.alpha(torch.tensor(list(law.breaks()), dtype=torch.float64))).tolist()
    edges = panel_edges([*sharp, *(1 - s for s in sharp)])
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
    is_centred = abs(rate - 0.5) <= 1e-15
    lowest = 0.0 if is_centred else 2 * distance - 1
    return BellTest(is_centred, lowest, 2 * distance, distance)
