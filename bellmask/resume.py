"""Which options may change between the start of a run and its continuation."""

from __future__ import annotations

from pathlib import Path

from bellmask.config import RunConfig, load_config
from bellmask.errors import UserError

_FREE = (
    "log.",
    "checkpoint.",
    "train.device",
    "data.cache",
    "validation.every",
    "validation.batch_size",
    "validation.samples_every",
    "validation.num_samples",
    "validation.sample_steps",
)
"""Options that change neither the weights of later steps nor what a metric means."""
_FREE_WITHOUT_DROPOUT = ("train.microbatch_size",)
_FREE_WITH_CONSTANT_RATE = ("train.steps",)


def _may_change(option: str, config: RunConfig) -> bool:
    free: tuple[str, ...] = _FREE
    if config.model.dropout == 0:
        free += _FREE_WITHOUT_DROPOUT
    if config.optim.curve == "constant":
        free += _FREE_WITH_CONSTANT_RATE
    return option.startswith(free)


def check_resumable(path: Path, config: RunConfig) -> None:
    """Refuse, naming them, options that differ from the run's and would change its course."""
    before, now = load_config(path).flat(), config.flat()
    changed = [o for o in now if now[o] != before[o] and not _may_change(o, config)]
    if changed:
        lines = [f"  {o}: was {before[o]}, now {now[o]}" for o in changed]
        raise UserError(
            "these options cannot change when a run is resumed:\n"
            + "\n".join(lines)
            + "\nresume without them, or start another run with another --out"
        )
