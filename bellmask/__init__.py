"""bellmask: train masked diffusion language models, fast.

The names below are loaded on first use, so that ``import bellmask`` costs next to nothing,
has no side effects and needs no optional package.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_HOMES = {
    "UserError": "bellmask.utils.errors",
    "RunConfig": "bellmask.config.config",
    "load_config": "bellmask.config.config",
    "preset": "bellmask.config.presets",
    "train_run": "bellmask.assemble",
    "Run": "bellmask.run",
    "load_run": "bellmask.run",
    "load": "bellmask.exchange.loading",
    "Uniform": "bellmask.diffusion.times",
    "Dirac": "bellmask.diffusion.times",
    "TruncatedGaussian": "bellmask.diffusion.times",
    "TruncatedLaplace": "bellmask.diffusion.times",
    "DensityLaw": "bellmask.diffusion.times",
    "TimeLaw": "bellmask.diffusion.times",
    "Linear": "bellmask.diffusion.schedule",
    "Cosine": "bellmask.diffusion.schedule",
    "Polynomial": "bellmask.diffusion.schedule",
    "MiddleFlat": "bellmask.diffusion.schedule",
    "mask_tokens": "bellmask.diffusion.corruption",
    "Nelbo": "bellmask.diffusion.objectives",
    "Bell": "bellmask.diffusion.objectives",
    "Importance": "bellmask.diffusion.objectives",
    "context_weights": "bellmask.diffusion.context_weights",
    "bell_test": "bellmask.diffusion.bell_test",
}

__all__ = ["__version__", *sorted(_HOMES)]  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'bellmask' has no attribute {name!r}")
    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)


if TYPE_CHECKING:
    from bellmask.assemble import train_run as train_run
    from bellmask.config.config import RunConfig as RunConfig
    from bellmask.config.config import load_config as load_config
    from bellmask.config.presets import preset as preset
    from bellmask.diffusion.bell_test import bell_test as bell_test
    from bellmask.diffusion.context_weights import context_weights as context_weights
    from bellmask.diffusion.corruption import mask_tokens as mask_tokens
    from bellmask.diffusion.objectives import Bell as Bell
    from bellmask.diffusion.objectives import Importance as Importance
    from bellmask.diffusion.objectives import Nelbo as Nelbo
    from bellmask.diffusion.schedule import Cosine as Cosine
    from bellmask.diffusion.schedule import Linear as Linear
    from bellmask.diffusion.schedule import MiddleFlat as MiddleFlat
    from bellmask.diffusion.schedule import Polynomial as Polynomial
    from bellmask.diffusion.times import DensityLaw as DensityLaw
    from bellmask.diffusion.times import Dirac as Dirac
    from bellmask.diffusion.times import TimeLaw as TimeLaw
    from bellmask.diffusion.times import TruncatedGaussian as TruncatedGaussian
    from bellmask.diffusion.times import TruncatedLaplace as TruncatedLaplace
    from bellmask.diffusion.times import Uniform as Uniform
    from bellmask.exchange.loading import load as load
    from bellmask.run import Run as Run
    from bellmask.run import load_run as load_run
    from bellmask.utils.errors import UserError as UserError
