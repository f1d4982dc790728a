"""Options of runs that outgrow one device: who holds what, and what is computed twice."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class ScaleOptions:
    """Several devices, and less memory on each. None of it changes what is learned."""

    sharding: Literal["auto", "none", "full", "hybrid"] = "auto"
    """none: every process holds the whole model. full: weights, gradients, optimizer and average
    are cut over all processes (FSDP2). hybrid: cut over a group of them, each group a copy.
    auto: none for one process and on CPUs, full on one machine's GPUs, hybrid on several
    machines."""
    shard_size: int | None = None
    """hybrid: processes per group; default: those of one machine."""
    recompute: Literal["none", "block", "selective"] = "none"
    """Activations that the backward pass computes again. block: all inside a block. selective: all
    but matrix products and attention."""
    loss: Literal["auto", "chunked", "torch", "liger"] = "auto"
    """Kernel of the head's cross-entropy. chunked: ours, any weights and precision. torch:
    linear_cross_entropy, float32 only. liger: liger-kernel, on GPUs. Rows that count differently
    (objectives other than bell, fine-tuning) always take ours. auto: liger on a GPU where it is
    installed, torch in float32, else chunked."""
    reduce: Literal["float32", "bfloat16"] = "float32"
    """Type in which sharded gradients are added up over processes, when products are bfloat16."""
