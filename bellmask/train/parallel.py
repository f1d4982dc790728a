"""A network on its devices: replicated or sharded, recomputed, compiled.

Every process holds the whole model (DDP), or each a part of it (FSDP2). ``fully_shard`` cuts
weights, gradients, optimizer state and average over a group of processes. A block's weights are
gathered just before the block runs and freed after it. In a hybrid layout there are several
groups, each with a whole copy, and gradients are also averaged over the copies.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from bellmask.config.config import RunConfig
from bellmask.config.options import ScaleOptions
from bellmask.model.head import TAKE_WEIGHTS, pick_loss_kernel
from bellmask.storage.build import Network
from bellmask.storage.checkpoint import saves_in_background
from bellmask.train.planning import split_batch
from bellmask.utils.distributed import World, missing_compiler, pick_precision
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


def pick_layout(options: ScaleOptions, world: World, *, is_large: bool = False) -> Layout:
    """The layout that the options name, or the one that suits these processes.

    ``is_large``: a copy does not fit each device, or has too many parameters to be kept on each.
    """
    kind, reason, size = options.sharding, "as requested", world.size
    if size == 1:
        return Layout(1, 1, "one process")
    if kind == "auto" and options.shard_size is not None:
        kind = "hybrid"
    elif kind == "auto" and world.device.type == "cpu":
        kind, reason = "none", "processes on CPUs"
    elif kind == "auto" and not is_large:
        kind, reason = "none", "a copy fits each GPU"
    elif kind == "auto" and world.machine_size >= size:
        kind, reason = "full", "GPUs of one machine"
    elif kind == "auto":
        kind, reason = "hybrid", "GPUs of several machines, a copy on each"
    if kind == "none":
        return Layout(size, 1, reason)
    if kind == "full":
        return Layout(1, size, reason)
    share = options.shard_size or world.machine_size
    if size % share:
        raise UserError(f"scale.shard_size={share} does not divide {size} processes")
    return Layout(size // share, share, "hybrid with one group" if share == size else reason)


def is_sharded(model: object) -> bool:
    """True for a model that :func:`parallelize` has sharded: all ranks must call it together."""
    return isinstance(model, FSDPModule)


def replicate(model: nn.Module, world: World) -> nn.Module:
    """What a training step calls in the model's place: DDP, where each process holds all of it."""
    if world.size == 1 or is_sharded(model):
        return model
    return DistributedDataParallel(
        model,
        gradient_as_bucket_view=True,  # no second copy of the gradients
        forward_sync_buffers=False,
    )


def gradient_sync(model: nn.Module, is_last: bool) -> contextlib.AbstractContextManager[None]:
    """Around each pass of a step: gradients are averaged over processes in the last one only."""
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(is_last)
    if isinstance(model, DistributedDataParallel) and not is_last:
        return model.no_sync()
    return contextlib.nullcontext()


def reshard(model: nn.Module) -> None:
    """Forget gathered weights, so that the next call gathers them as they then are.

    After a call without gradient the root's stay gathered: a change of the parts (averaged weights
    put in or taken out) would not be seen.
    """
    for part in model.modules():
        if isinstance(part, FSDPModule):
            part.reshard()


def full_tensor(tensor: Tensor) -> Tensor:
    """The full tensor; a collective call if it is sharded."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def local_tensor(tensor: Tensor) -> Tensor:
    """What this process holds of a tensor, sharing its memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


# Activations computed again in the backward pass instead of kept: memory for time.

_ATTENTIONS = "flash_attention flash_attention_for_cpu efficient_attention cudnn_attention"
_NAMES = [f"_scaled_dot_product_{name}" for name in [*_ATTENTIONS.split(), "attention_math"]]
COSTLY: frozenset[Any] = frozenset(
    getattr(torch.ops.aten, name).default for name in ["mm", "addmm", "bmm", "baddbmm", *_NAMES]
) | {torch.ops.higher_order.flex_attention}
"""What "selective" keeps: matrix products and attention. The rest is cheap to repeat."""


def _policy(_: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if op in COSTLY else CheckpointPolicy.PREFER_RECOMPUTE


def recompute_blocks(blocks: Sequence[nn.Module], mode: str) -> None:
    """Let blocks forget what is inside them (``block``), or all that is cheap (``selective``).

    Their inputs are kept, and the names of their weights stay. To be called before compiling and
    sharding, so that the repeated pass finds the gathered weights.
    """
    options: dict[str, Any] = {"use_reentrant": False}
    if mode == "selective":
        options["context_fn"] = functools.partial(create_selective_checkpoint_contexts, _policy)

    def repeated(forward: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(forward)
        def run(*args: Any, **kwargs: Any) -> Any:
            if not torch.is_grad_enabled():
                return forward(*args, **kwargs)
            return checkpoint(forward, *args, **options, **kwargs)

        return run

    for block in blocks if mode != "none" else ():
        block.forward = repeated(block.forward)  # type: ignore[method-assign]


# The choices for a run, and what they do to its network.


@dataclass(frozen=True)
class ParallelPlan:
    """The choices for these processes, automatic ones made."""

    layout: Layout
    precision: torch.dtype
    reduce_dtype: torch.dtype
    """In which cut gradients are added up."""
    recompute: str
    is_compiled: bool
    loss_kernel: str
    """Of the head's cross-entropy."""
    in_background: bool
    """Checkpoints are written in the background."""
    microbatch: int
    """Rows of a forward pass."""
    notes: tuple[str, ...] = ()
    """Options that were given and do not apply here."""

    def describe(self) -> dict[str, str | int]:
        """For run.json and the log."""
        return {
            "precision": str(self.precision).removeprefix("torch."),
            "sharding": str(self.layout),
            "recompute": self.recompute,
            "compile": "blocks" if self.is_compiled else "off",
            "loss_kernel": self.loss_kernel,
            "saving": "background" if self.in_background else "wait",
            "microbatch": self.microbatch,
        }


def plan_parallel(
    config: RunConfig, world: World, layout: Layout | None = None, microbatch: int | None = None
) -> ParallelPlan:
    """Resolve the options for these processes; reject what they cannot do.

    ``layout`` and ``microbatch``: those that the memory estimate has chosen.
    """
    scale, notes = config.scale, []
    is_compiled = config.train.compile
    if is_compiled is None:
        is_compiled = world.device.type == "cuda"
    if is_compiled and (missing := missing_compiler(world.device)):
        if config.train.compile:
            raise UserError(f"train.compile needs {missing}")
        is_compiled = False
        notes.append(f"blocks are not compiled: train.compile needs {missing}")
    precision = pick_precision(config.train.precision, world.device)
    kernel = pick_loss_kernel(scale.loss, world.device, precision, is_compiled=is_compiled)
    # rows that count differently are for our own kernel
    is_weighted = config.framework.name == "mdm" and config.objective.name != "bell"
    if (is_weighted or config.sft.train is not None) and kernel not in TAKE_WEIGHTS:
        kernel = "chunked"
    layout = layout or pick_layout(scale, world)
    wants_parts = scale.sharding in ("full", "hybrid") or scale.shard_size is not None
    if wants_parts and not layout.is_sharded:
        notes.append(f"weights are not sharded: {layout.reason} (scale.sharding, scale.shard_size)")
    if scale.reduce == "bfloat16" and not (precision == torch.bfloat16 and layout.is_sharded):
        notes.append("scale.reduce=bfloat16 applies only to sharded weights in bfloat16")
    return ParallelPlan(
        layout,
        precision,
        getattr(torch, scale.reduce),
        scale.recompute,
        is_compiled,
        kernel,
        saves_in_background(config.checkpoint.saving, world),
        microbatch or split_batch(config.train, world.size),
        tuple(notes),
    )


# Paper: App. C.1: hardware and hours
def parallelize(model: Network, plan: ParallelPlan, device: torch.device) -> Network:
    """The same network, ready to train on this process's device.

    Order matters: what is recomputed is inside what is compiled, and both inside what is sharded.
    It is sharded block by block; the rest belongs to the model itself. With bfloat16 products,
    weights are gathered as bfloat16 and gradients are added up in ``reduce_dtype``; the parts
    themselves, and all that the optimizer sees, stay float32.
    """
    blocks = model.block_modules()
    model.loss_kernel = plan.loss_kernel
    recompute_blocks(blocks, plan.recompute)
    if plan.is_compiled:
        settings = torch._dynamo.config
        settings.optimize_ddp = False  # type: ignore[attr-defined]  # blocks are small enough for DDP's buckets
        settings.recompile_limit = 64  # type: ignore[attr-defined]  # shapes of training, validation, samples
        # at once for any number of masked rows, not first for one: sooner, and a resumed run
        # multiplies by the same kernels as one that was not stopped
        rows, sources = "L['rows_N']", torch.compiler.config.dynamic_sources
        if rows not in sources.split(","):  # the user may have named others
            torch.compiler.config.dynamic_sources = ",".join(filter(None, (sources, rows)))
        for block in blocks:
            block.compile()
        model.uses_flex_attention = device.type == "cuda"
    if not plan.layout.is_sharded:
        return model.to(device)
    shape = {"copies": plan.layout.copies, "parts": plan.layout.processes_per_copy}
    if plan.layout.copies == 1:
        del shape["copies"]
    mesh = init_device_mesh(device.type, tuple(shape.values()), mesh_dim_names=tuple(shape))
    policy = MixedPrecisionPolicy()
    if plan.precision == torch.bfloat16:
        # inputs stay as they are: autocast decides what is multiplied in which type
        policy = MixedPrecisionPolicy(torch.bfloat16, plan.reduce_dtype, cast_forward_inputs=False)
    for part in [*blocks, model]:
        # moves each block to the device as it is cut: the whole model is never there at once
        fully_shard(part, mesh=mesh, mp_policy=policy)
    return model
