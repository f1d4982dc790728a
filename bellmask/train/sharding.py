"""Who holds what: every process the whole model, or each a part of it (FSDP2).

``fully_shard`` cuts weights, gradients, optimizer state and average over a group of processes. A
block's weights are gathered just before the block runs and let go after it. In a hybrid layout
there are several groups, each with a whole copy, and gradients are also added up over the copies.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from bellmask.config.options import ScaleOptions
from bellmask.utils.distributed import World
from bellmask.utils.errors import UserError


@dataclass(frozen=True)
class Layout:
    """How many copies of the weights there are, and how many processes share each."""

    copies: int
    processes_per_copy: int
    reason: str
    """Why, in a few words, for the log."""

    @property
    def is_sharded(self) -> bool:
        """True where no process holds all weights."""
        return self.processes_per_copy > 1

    def __str__(self) -> str:
        if not self.is_sharded:
            return f"none ({self.reason})"
        kind = "full" if self.copies == 1 else "hybrid"
        shape = f"{self.copies} x {self.processes_per_copy}"
        return f"{kind}, copies x processes per copy {shape} ({self.reason})"


def pick_layout(options: ScaleOptions, world: World) -> Layout:
    """The layout that the options name, or the one that suits these processes."""
    kind, reason, size = options.sharding, "as asked for", world.size
    if size == 1:
        return Layout(1, 1, "one process")
    if kind == "auto" and options.shard_size is not None:
        kind = "hybrid"
    if kind == "auto":
        is_one_machine = world.machine_size >= size
        if world.device.type == "cpu":
            kind, reason = "none", "processes on CPUs"
        elif is_one_machine:
            kind, reason = "full", "GPUs of one machine"
        else:
            kind, reason = "hybrid", "GPUs of several machines, a copy on each"
    if kind == "none":
        return Layout(size, 1, reason)
    if kind == "full":
        return Layout(1, size, reason)
    share = options.shard_size or world.machine_size
    if size % share:
        raise UserError(
            f"scale.shard_size={share} does not divide {size} processes; choose one that does"
        )
    return Layout(size // share, share, "hybrid with one group" if share == size else reason)


def shard_model(
    model: nn.Module,
    blocks: list[nn.Module],
    layout: Layout,
    device: torch.device,
    precision: torch.dtype,
    reduce: str = "float32",
) -> None:
    """Cut a model in place, block by block; the rest of it belongs to the model itself.

    With bfloat16 products, weights are gathered as bfloat16 and gradients are added up in
    ``reduce``; the parts themselves, and all that the optimizer sees, stay float32.
    """
    if layout.copies == 1:
        mesh = init_device_mesh(device.type, (layout.processes_per_copy,))
    else:
        shape = (layout.copies, layout.processes_per_copy)
        mesh = init_device_mesh(device.type, shape, mesh_dim_names=("copies", "parts"))
    policy = MixedPrecisionPolicy()
    if precision == torch.bfloat16:
        # inputs stay as they are: autocast decides what is multiplied in which type
        policy = MixedPrecisionPolicy(
            param_dtype=torch.bfloat16,
            reduce_dtype={"float32": torch.float32, "bfloat16": torch.bfloat16}[reduce],
            cast_forward_inputs=False,
        )
    for part in [*blocks, model]:
        fully_shard(part, mesh=mesh, mp_policy=policy)


def is_sharded(model: object) -> bool:
    """True for a model that :func:`shard_model` has cut: all ranks must call it together."""
    return isinstance(model, FSDPModule)


def add_up_next_gradient(model: nn.Module, is_last: bool) -> None:
    """Of a model that is cut: add gradients up over processes only in a step's last backward."""
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(is_last)


def let_go(model: nn.Module) -> None:
    """Forget gathered weights, so that the next call gathers them as they then are.

    After a call without gradient the root's stay gathered: a change of the parts (averaged weights
    put in or taken out) would not be seen.
    """
    if isinstance(model, FSDPModule):
        for part in model.modules():
            if isinstance(part, FSDPModule):
                part.reshard()


def whole(tensor: Tensor) -> Tensor:
    """All of a tensor that may be cut; a collective call if it is."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def own_part(tensor: Tensor) -> Tensor:
    """What this process holds of a tensor, sharing its memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
