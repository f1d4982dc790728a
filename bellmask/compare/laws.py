"""What a variant trains on, from its options alone: density, drawn times, context weights."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from bellmask.config.config import RunConfig
from bellmask.data.packing import Row
from bellmask.diffusion.objectives import ChainRule
from bellmask.diffusion.theory import context_weights
from bellmask.storage.build import (
    build_law,
    build_objective,
    build_schedule,
    describe_learning,
)
from bellmask.train.planning import StepPlanner
from bellmask.utils.distributed import World

DRAWN_STEPS = 100
"""Steps whose times make the histogram."""
POINTS = 101
BINS = 25


def drawn_times(config: RunConfig) -> torch.Tensor:
    """The times a run drew in its first steps, as its own planner gives them."""
    from bellmask.data.blocks import Blocks

    one = Blocks.from_rows(iter([Row(np.zeros(1, dtype=np.int64), 1, 0)]))
    planner = StepPlanner(one, build_objective(config), config.train, World())
    return torch.cat([planner.times(step) for step in range(DRAWN_STEPS)])


def describe_law(config: RunConfig) -> dict[str, Any]:
    """Density on a grid, histogram of mask rates drawn, context weights, effective sample size.

    The histogram is of the mask rate 1 - alpha(t), which is t for the linear schedule, so that the
    middle-flat schedule can be set beside time laws. The effective sample share is that of
    sequences: E[s]^2 / E[s^2] of s = w(t) (1 - alpha), what a sequence adds to the loss.
    """
    objective, law = build_objective(config), build_law(config.law)
    if isinstance(objective, ChainRule):
        return _describe_order(config, objective)
    schedule = build_schedule(config.schedule)
    t = torch.linspace(0, 1, POINTS, dtype=torch.float64)
    times = drawn_times(config)
    rate = 1 - schedule.alpha(times)
    weight = objective.weight(times)
    signal = weight * rate  # what a sequence adds to the loss, per unit of cross-entropy
    effective = float(signal.mean() ** 2 / (signal**2).mean())
    histogram, _ = np.histogram(rate.numpy(), bins=BINS, range=(0, 1), density=True)
    omega = context_weights(objective, config.data.block_length)
    return {
        "name": f"{law}, {config.objective.name}, {schedule}",
        "t": t.tolist(),
        "density": law.pdf(t).tolist() if law.has_density else None,
        "mask_rate_histogram": histogram.tolist(),
        "context_weights": (omega / omega.sum()).tolist(),
        "effective_sample_share": effective,
    }


def _describe_order(config: RunConfig, objective: ChainRule) -> dict[str, Any]:
    """A causal framework has no times: each row is asked at every context count, once."""
    omega = context_weights(objective, config.data.block_length)
    return {
        "name": describe_learning(config),
        "t": [],
        "density": None,
        "mask_rate_histogram": None,
        "context_weights": (omega / omega.sum()).tolist(),
        "effective_sample_share": 1.0,
    }
