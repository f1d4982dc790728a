"""Options → objects: the law, schedule, objective and backbone that a config names."""

from __future__ import annotations

from collections.abc import Callable

import torch

from bellmask.config import RunConfig
from bellmask.diffusion.objectives import Bell, Importance, Nelbo, Objective
from bellmask.diffusion.schedule import Cosine, Linear, MiddleFlat, Polynomial, Schedule
from bellmask.diffusion.times import Dirac, TimeLaw, TruncatedGaussian, TruncatedLaplace, Uniform
from bellmask.errors import UserError, look_up
from bellmask.model.transformer import Denoiser
from bellmask.options import LawOptions, ScheduleOptions
from bellmask.rng import stream_key, torch_seed

DEFAULT_MU, DEFAULT_SCALE, DEFAULT_POWER = 0.5, 0.1, 2.0


def build_law(options: LawOptions) -> TimeLaw:
    """The time law that the options name."""
    mu = DEFAULT_MU if options.mu is None else options.mu
    scale = DEFAULT_SCALE if options.scale is None else options.scale
    table: dict[str, Callable[[], TimeLaw]] = {
        "uniform": Uniform,
        "dirac": lambda: Dirac(mu),
        "gaussian": lambda: TruncatedGaussian(mu, scale),
        "laplace": lambda: TruncatedLaplace(mu, scale),
    }
    return look_up("time law", options.name, table)()


def build_schedule(options: ScheduleOptions) -> Schedule:
    """The schedule that the options name."""
    mu = DEFAULT_MU if options.mu is None else options.mu
    scale = DEFAULT_SCALE if options.scale is None else options.scale
    power = DEFAULT_POWER if options.power is None else options.power
    table: dict[str, Callable[[], Schedule]] = {
        "linear": Linear,
        "cosine": Cosine,
        "polynomial": lambda: Polynomial(power),
        "middle_flat": lambda: MiddleFlat(TruncatedGaussian(mu, scale)),
    }
    return look_up("schedule", options.name, table)()


def build_objective(config: RunConfig) -> Objective:
    """The objective that the options name, with its law and schedule."""
    law, schedule, options = (
        build_law(config.law),
        build_schedule(config.schedule),
        config.objective,
    )
    table: dict[str, Callable[[], Objective]] = {
        "nelbo": lambda: Nelbo(law, schedule, options.time_floor),
        "bell": lambda: Bell(law, schedule),
        "importance": lambda: Importance(law, options.divide_by_t, schedule),
    }
    try:
        return look_up("objective", options.name, table)()
    except ValueError as error:
        raise UserError(str(error)) from None


def build_model(config: RunConfig, num_tokens: int) -> Denoiser:
    """The backbone with initial weights that depend on the seed alone."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(torch_seed(stream_key(config.train.seed, "weights")))
        return Denoiser(config.model, num_tokens)
