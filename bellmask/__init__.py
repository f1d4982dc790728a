"""bellmask: train masked diffusion language models, fast.

The names below are loaded on first use, so that ``import bellmask`` costs next to nothing,
has no side effects and needs no optional package.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.2.0"

_NAMES = {
    "config.config": "RunConfig load_config",
    "config.presets": "preset",
    "diffusion.frameworks": "mask_tokens",
    "diffusion.laws": "Band DensityLaw Dirac TimeLaw TruncatedGaussian TruncatedLaplace "
    "Uniform WithUniform",
    "diffusion.objectives": "Bell Importance Nelbo",
    "diffusion.progress": "ProgressLaw",
    "diffusion.schedules": "Cosine Linear MiddleFlat Polynomial",
    "diffusion.theory": "bell_test context_weights",
    "evaluate.likelihood": "nelbo probe",
    "run": "Run load load_run",
    "train.train_run": "train_run",
    "utils.errors": "UserError",
}
_HOMES = {name: f"bellmask.{home}" for home, names in _NAMES.items() for name in names.split()}

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
    from bellmask.config.config import RunConfig as RunConfig
    from bellmask.config.config import load_config as load_config
    from bellmask.config.presets import preset as preset
    from bellmask.diffusion.frameworks import mask_tokens as mask_tokens
    from bellmask.diffusion.laws import Band as Band
    from bellmask.diffusion.laws import DensityLaw as DensityLaw
    from bellmask.diffusion.laws import Dirac as Dirac
    from bellmask.diffusion.laws import TimeLaw as TimeLaw
    from bellmask.diffusion.laws import TruncatedGaussian as TruncatedGaussian
    from bellmask.diffusion.laws import TruncatedLaplace as TruncatedLaplace
    from bellmask.diffusion.laws import Uniform as Uniform
    from bellmask.diffusion.laws import WithUniform as WithUniform
    from bellmask.diffusion.objectives import Bell as Bell
    from bellmask.diffusion.objectives import Importance as Importance
    from bellmask.diffusion.objectives import Nelbo as Nelbo
    from bellmask.diffusion.progress import ProgressLaw as ProgressLaw
    from bellmask.diffusion.schedules import Cosine as Cosine
    from bellmask.diffusion.schedules import Linear as Linear
    from bellmask.diffusion.schedules import MiddleFlat as MiddleFlat
    from bellmask.diffusion.schedules import Polynomial as Polynomial
    from bellmask.diffusion.theory import bell_test as bell_test
    from bellmask.diffusion.theory import context_weights as context_weights
    from bellmask.evaluate.likelihood import nelbo as nelbo
    from bellmask.evaluate.likelihood import probe as probe
    from bellmask.run import Run as Run
    from bellmask.run import load as load
    from bellmask.run import load_run as load_run
    from bellmask.train.train_run import train_run as train_run
    from bellmask.utils.errors import UserError as UserError
