"""Where a time law spends its rows, when the reducible loss at each context count is known exactly.

A row with N_c tokens shown has L - N_c targets, each with ``blue`` nats left to learn (Prop. 3.1):
it holds (L - N_c) blue(N_c). The base draws all context counts alike, the bell those in the middle.
The oracle, which knows blue, draws rows in proportion to what they hold.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from bellmask.diffusion.laws import TruncatedGaussian
from bellmask.diffusion.objectives import Bell, Nelbo
from bellmask.diffusion.theory import context_weights

SPENT_BELOW = 0.05
"""Weight counts as spent on nothing where less than this share of the loss can still be learned."""


def _num_targets(length: int) -> Tensor:
    """L - N_c for N_c = 0 .. L-1."""
    return length - torch.arange(length, dtype=torch.float64)


def law_weights(length: int) -> dict[str, Tensor]:
    """Weights on N_c = 0 .. L-1 in the loss of base and default bell, each summing to one."""
    objectives = {"base": Nelbo(time_floor=0.0), "bell": Bell(TruncatedGaussian())}
    found = {name: context_weights(o, length) for name, o in objectives.items()}
    return {name: omega / omega.sum() for name, omega in found.items()}


def law_draws(length: int) -> dict[str, Tensor]:
    """Shares of rows that base and default bell draw at N_c = 0 .. L-1 (what is missing: N_c = L).

    A uniform time makes all L + 1 counts alike; an unweighted objective's weight is rows times
    targets.
    """
    bell = context_weights(Bell(TruncatedGaussian()), length) / _num_targets(length)
    return {"base": torch.full((length,), 1 / (length + 1), dtype=torch.float64), "bell": bell}


def oracle_draws(blue_L: Tensor) -> Tensor:
    """Rows in proportion to the reducible nats they hold."""
    held = blue_L.clamp(min=0) * _num_targets(len(blue_L))
    return held / held.sum()


def spend(red_L: Tensor, blue_L: Tensor) -> dict[str, Any]:
    """What base and bell meet per unit of weight, and what all three meet per row drawn."""
    length = len(red_L)
    is_spent_L = blue_L < SPENT_BELOW * (red_L + blue_L)
    found: dict[str, Any] = {}
    for name, weight_L in law_weights(length).items():
        red, blue = float((weight_L * red_L).sum()), float((weight_L * blue_L).sum())
        found[name] = {
            "irreducible": red,
            "reducible": blue,
            "reducible_share": blue / (red + blue),
            "spent_on_nothing": float((weight_L * is_spent_L).sum()),
            "weights": weight_L.tolist(),
        }
    found["most_per_row"] = float((_num_targets(length) * blue_L).max())
    rate_L = _num_targets(length) / length
    for name, draw_L in {**law_draws(length), "oracle": oracle_draws(blue_L)}.items():
        total = float(draw_L.sum())
        mean = float((draw_L * rate_L).sum()) / total
        found.setdefault(name, {}).update(
            reducible_per_row=float((draw_L * _num_targets(length) * blue_L).sum()),
            mask_rate_mean=mean,
            mask_rate_sd=(float((draw_L * (rate_L - mean) ** 2).sum()) / total) ** 0.5,
            draws=draw_L.tolist(),
        )
    return found
