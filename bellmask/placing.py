"""A network on its devices: what is recomputed, compiled, cut, and by which kernels."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from bellmask.config.config import RunConfig
from bellmask.config.options import ScaleOptions
from bellmask.model.head import pick_loss_kernel
from bellmask.storage.build import Network
from bellmask.storage.checkpoint import saves_in_background
from bellmask.train.recompute import recompute_blocks
from bellmask.train.sharding import Layout, pick_layout, shard_model
from bellmask.utils.distributed import World, check_compiler, pick_precision


@dataclass(frozen=True)
class Placing:
    """The choices for these processes, automatic ones made."""

    layout: Layout
    precision: torch.dtype
    recompute: str
    is_compiled: bool
    loss_kernel: str
    """Of the head's cross-entropy."""
    in_background: bool
    """Checkpoints are written beside training."""
    notes: tuple[str, ...] = ()
    """Options that were given and do not apply here."""

    def describe(self) -> dict[str, str]:
        """For run.json and the log."""
        return {
            "precision": str(self.precision).removeprefix("torch."),
            "sharding": str(self.layout),
            "recompute": self.recompute,
            "compile": "blocks" if self.is_compiled else "nothing",
            "loss_kernel": self.loss_kernel,
            "saving": "background" if self.in_background else "wait",
        }


def pick_placing(config: RunConfig, world: World) -> Placing:
    """What the options mean on these processes; refuses what they cannot do."""
    if config.train.compile:
        check_compiler(world.device)
    precision = pick_precision(config.train.precision, world.device)
    kernel = pick_loss_kernel(config.scale.loss, world.device, precision)
    layout = pick_layout(config.scale, world)
    return Placing(
        layout,
        precision,
        config.scale.recompute,
        config.train.compile,
        "chunked" if _weighs_rows(config) else kernel,
        saves_in_background(config.checkpoint.saving, world),
        tuple(_notes(config.scale, layout, precision)),
    )


def _notes(scale: ScaleOptions, layout: Layout, precision: torch.dtype) -> Iterator[str]:
    wants_parts = scale.sharding in ("full", "hybrid") or scale.shard_size is not None
    if wants_parts and not layout.is_sharded:
        yield f"weights are not cut: {layout.reason} (scale.sharding, scale.shard_size)"
    is_short = precision == torch.bfloat16 and layout.is_sharded
    if scale.reduce == "bfloat16" and not is_short:
        yield "scale.reduce=bfloat16 is for cut weights and bfloat16 products: it does not apply"


def _weighs_rows(config: RunConfig) -> bool:
    """True where the rows of a step count differently, which only our own kernel can do."""
    is_weighted = config.framework.name == "mdm" and config.objective.name != "bell"
    return is_weighted or config.sft.train is not None


def place(model: Network, placing: Placing, config: RunConfig, world: World) -> Network:
    """The same network, ready to train on this process's device.

    Order matters: what is recomputed is inside what is compiled, and both inside what is cut.
    """
    blocks = model.block_modules()
    recompute_blocks(blocks, placing.recompute)
    if placing.is_compiled:
        model.compile_blocks()
    if not placing.layout.is_sharded:
        return model.to(world.device)
    # moves each block to the device as it is cut: the whole model is never there at once
    shard_model(model, blocks, placing.layout, world.device, placing.precision, config.scale.reduce)
    return model
