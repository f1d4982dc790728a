"""Activations computed again in the backward pass instead of kept: memory for time."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

_OPS = torch.ops.aten
COSTLY: frozenset[Any] = frozenset(
    {
        _OPS.mm.default,
        _OPS.addmm.default,
        _OPS.bmm.default,
        _OPS.baddbmm.default,
        _OPS._scaled_dot_product_flash_attention.default,
        _OPS._scaled_dot_product_flash_attention_for_cpu.default,
        _OPS._scaled_dot_product_efficient_attention.default,
        _OPS._scaled_dot_product_cudnn_attention.default,
        _OPS._scaled_dot_product_attention_math.default,
    }
)
"""What "selective" keeps: matrix products and attention. The rest is cheap to repeat."""


def _policy(_: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if op in COSTLY else CheckpointPolicy.PREFER_RECOMPUTE


def _repeated(forward: Callable[..., Any], mode: str) -> Callable[..., Any]:
    options: dict[str, Any] = {"use_reentrant": False}
    if mode == "selective":
        options["context_fn"] = functools.partial(create_selective_checkpoint_contexts, _policy)

    @functools.wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        return checkpoint(forward, *args, **options, **kwargs)

    return run


def recompute_blocks(blocks: Sequence[nn.Module], mode: str) -> None:
    """Let blocks forget what is inside them (``block``), or all that is cheap (``selective``).

    Their inputs are kept, and the names of their weights stay. To be called before compiling and
    sharding, so that the repeated pass finds the gathered weights.
    """
    if mode == "none":
        return
    for block in blocks:
        block.forward = _repeated(block.forward, mode)  # type: ignore[method-assign]
