"""The head: logits of selected rows, or their cross-entropies, in chunks.

N selected rows, D width, V vocabulary. All logits of all rows never exist at once; the sum that is
trained on comes from one of the kernels below. Sums are float32 also where the products are
bfloat16.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from bellmask.utils.errors import UserError, look_up

# Kernels that sum the cross-entropy of selected rows without storing all logits.
#
# Each kernel computes gradients while a chunk's logits are in memory, so forward and backward
# together cost three matrix products of size N D V. Each returns a float32 sum also where products
# are bfloat16: a bfloat16 sum loses three digits.
#
# - chunked: built in; row weights, any precision. Gradients of the head are added up in float32
#   over the chunks, also for bfloat16 weights (FSDP2 gathers them so), and rounded once.
# - torch: ``F.linear_cross_entropy``, in float32 only (it returns a bfloat16 sum for bfloat16
#   rows).
# - compiled: ours, with what is elementwise in it compiled: on a GPU as few passes over the logits
#   as liger's, and for weighted rows too, so base and bell are compared on one kernel.
# - liger: liger-kernel's, on a GPU; without weights. It waits for the device once per microbatch.
#
# A run picks one (:func:`pick_loss_kernel`); it is the attribute ``loss_kernel`` of its model.

CHUNK_ROWS = 512
"""Rows whose logits exist at once; torch's automatic choice is 2.7x slower on CPUs."""


def _num_extra(num_tokens: int, device: torch.device) -> int:
    """Tokens that never occur, added for a GPU: its matrix units need sizes that are multiples."""
    return -num_tokens % 64 if device.type == "cuda" else 0


def _zero_sums(like: Tensor) -> Tensor:
    """Where a gradient is added up: float32 or better."""
    return torch.zeros_like(like, dtype=torch.promote_types(like.dtype, torch.float32))


def _row_errors(
    logits: Tensor, y_N: Tensor, weight_N: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """Cross-entropies, and the gradient of the logits: in ``dtype``, and its sum over rows."""
    logits, y = logits.float(), y_N[:, None]
    log_sum = torch.logsumexp(logits, dim=1, keepdim=True)
    ce_N = (log_sum - logits.gather(1, y)).squeeze(1)
    if torch.compiler.is_compiling():  # fused: no float32 copy of the logits
        is_target = torch.arange(logits.shape[1], device=logits.device) == y
        error = (logits - log_sum).exp() - is_target.float()
        error = error * weight_N[:, None]
    else:
        error = logits.sub_(log_sum).exp_()  # softmax, in place
        error.scatter_add_(1, y, torch.full_like(y, -1, dtype=error.dtype))
        error.mul_(weight_N[:, None])
    return ce_N, error.to(dtype), error.sum(0)


@functools.cache
def _compiled_errors() -> Callable[..., tuple[Tensor, Tensor, Tensor]]:
    return torch.compile(_row_errors)


class _WeightedRows(torch.autograd.Function):
    """sum of weight * cross-entropy, with gradients formed chunk by chunk in the forward pass."""

    @staticmethod
    def forward(
        ctx: Any,
        h_ND: Tensor,
        w_VD: Tensor,
        b_V: Tensor,
        y_N: Tensor,
        weight_N: Tensor,
        dtype: torch.dtype,
        errors: Callable[..., tuple[Tensor, Tensor, Tensor]],
    ) -> tuple[Tensor, Tensor]:
        h, w, b = h_ND.to(dtype), w_VD.to(dtype), b_V.to(dtype)
        if extra := _num_extra(len(w), w.device):
            w, b = F.pad(w, (0, 0, 0, extra)), F.pad(b, (0, extra), value=-torch.inf)
        grad_h, grad_w, grad_b = torch.empty_like(h_ND), _zero_sums(w), _zero_sums(b)
        ce_N = torch.empty(len(h), dtype=torch.float32, device=h.device)
        for start in range(0, len(h), CHUNK_ROWS):
            part = slice(start, start + CHUNK_ROWS)
            rows = y_N[part], weight_N[part], dtype
            ce_N[part], error, summed = errors(F.linear(h[part], w, b), *rows)
            grad_b += summed
            grad_h[part] = error @ w
            if dtype == grad_w.dtype:
                grad_w.addmm_(error.T, h[part])
            else:
                grad_w += error.T @ h[part]
        ctx.save_for_backward(grad_h, grad_w[: len(w_VD)], grad_b[: len(b_V)])
        ctx.mark_non_differentiable(ce_N)
        ctx.head_types = w_VD.dtype, b_V.dtype
        return (ce_N * weight_N).sum(), ce_N

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_sum: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        grad_h, grad_w, grad_b = ctx.saved_tensors
        w_type, b_type = ctx.head_types
        grad_w, grad_b = (grad_w * grad_sum).to(w_type), (grad_b * grad_sum).to(b_type)
        return grad_h * grad_sum, grad_w, grad_b, None, None, None, None


def chunked_sum(
    h_ND: Tensor,
    w_VD: Tensor,
    b_V: Tensor,
    y_N: Tensor,
    dtype: torch.dtype,
    weight_N: Tensor | None = None,
    *,
    is_compiled: bool = False,
) -> Tensor:
    """Sum over rows of weight (1 by default) * -log p(y), with matrix products in ``dtype``."""
    if weight_N is None:
        weight_N = torch.ones(len(h_ND), device=h_ND.device)
    errors = _compiled_errors() if is_compiled else _row_errors
    return _WeightedRows.apply(h_ND, w_VD, b_V, y_N, weight_N.float(), dtype, errors)[0]


compiled_sum = functools.partial(chunked_sum, is_compiled=True)


def torch_sum(h_ND: Tensor, w_VD: Tensor, b_V: Tensor, y_N: Tensor, dtype: torch.dtype) -> Tensor:
    """Without weights: torch's function in float32, the chunked kernel in any other type."""
    if dtype != torch.float32:
        return chunked_sum(h_ND, w_VD, b_V, y_N, dtype)
    options = torch.nn.LinearCrossEntropyOptions(batch_chunk_size=CHUNK_ROWS, chunking_method=None)
    h_ND, w_VD, b_V = h_ND.to(dtype), w_VD.to(dtype), b_V.to(dtype)
    return F.linear_cross_entropy(
        h_ND, w_VD, y_N, linear_bias=b_V, reduction="sum", options=options
    )


def liger_sum(h_ND: Tensor, w_VD: Tensor, b_V: Tensor, y_N: Tensor, dtype: torch.dtype) -> Tensor:
    """The same by liger-kernel.

    It divides by the number of rows, so empty batches use the chunked kernel; and it computes no
    gradient of the head if the rows need none, so rows of a frozen model do too. A bias of another
    type than the products would double its logits' memory. Float32 weights are given as they are:
    autocast makes their products bfloat16, and their gradient stays float32.
    """
    if len(h_ND) == 0 or not h_ND.requires_grad:
        return chunked_sum(h_ND, w_VD, b_V, y_N, dtype)
    options = {"bias": b_V.to(dtype), "reduction": "sum", "accum_dtype": torch.float32}
    return _import_liger()(h_ND.to(dtype), w_VD, y_N, **options)


KERNELS: dict[str, Callable[..., Tensor]] = {
    "chunked": chunked_sum,
    "compiled": compiled_sum,
    "torch": torch_sum,
    "liger": liger_sum,
}
TAKE_WEIGHTS = ("chunked", "compiled")


def pick_loss_kernel(
    option: str, device: torch.device, precision: torch.dtype, *, is_compiled: bool = False
) -> str:
    """The kernel that ``--scale.loss`` names, or for ``auto`` the one that suits the device.

    ``precision`` is the type of matrix products; ``is_compiled``: the blocks are compiled. An
    unsupported kernel is rejected now, not at the first step.
    """
    if option == "auto":
        if device.type == "cuda" and is_compiled:
            return "compiled"
        is_plain = precision == torch.float32 and device.type != "mps"
        return "torch" if is_plain else "chunked"
    look_up("scale.loss", option, {"auto": None, **KERNELS})
    if option == "torch" and precision != torch.float32:
        raise UserError(
            "scale.loss=torch sums in the data type of the matrix products, here "
            f"{str(precision).removeprefix('torch.')}: too imprecise for a loss. Use --scale.loss "
            "auto (or chunked), or --train.precision float32"
        )
    if option == "liger":
        if device.type != "cuda":
            raise UserError(
                f"scale.loss=liger needs a GPU, but the device is {device.type}; use --scale.loss "
                "auto (or chunked, torch)"
            )
        if reason := _why_no_liger():
            raise UserError(
                f"scale.loss=liger: {reason}; run pip install -U 'bellmask[cuda]', or use "
                "--scale.loss auto (or chunked, torch)"
            )
    return option


def _import_liger() -> Callable[..., Tensor]:
    from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy

    return liger_fused_linear_cross_entropy


def _why_no_liger() -> str | None:
    """Why liger-kernel cannot be used, if so."""
    try:
        known = inspect.signature(_import_liger()).parameters
    except ImportError as error:
        return f"liger-kernel cannot be imported ({error})"
    except Exception as error:  # triton asks the driver already when it is imported
        return f"liger-kernel does not start ({type(error).__name__}: {error})"
    missing = {"bias", "reduction", "accum_dtype"} - set(known)
    if missing:
        return f"this liger-kernel is too old: it has no {', '.join(sorted(missing))}"
    return None


# The head itself.


def compute_dtype(w_VD: Tensor) -> torch.dtype:
    """The type of matrix products here: autocast's where it is on, else the weights'."""
    kind = w_VD.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else w_VD.dtype


def _logits(h_ND: Tensor, w_VD: Tensor, b_V: Tensor) -> Iterator[Tensor]:
    """Logits of ``CHUNK_ROWS`` rows at a time, to measure and sample with.

    They are float32 under autocast, too: far from zero, as a tied head's often are, bfloat16 has
    steps of 0.5.
    """
    dtype = torch.promote_types(w_VD.dtype, torch.float32)
    w, b = w_VD.to(dtype), b_V.to(dtype)
    for h in h_ND.split(CHUNK_ROWS):
        with torch.autocast(w.device.type, enabled=False):
            logits = F.linear(h.to(dtype), w, b)
        yield logits


def predict(
    h_ND: Tensor,
    w_VD: Tensor,
    b_V: Tensor,
    y_N: Tensor | Callable[[Tensor], Tensor] | None = None,
    weight_N: Tensor | None = None,
    *,
    reduce: bool = True,
    kernel: str = "torch",
) -> Tensor:
    """Logits [N, V] (no targets); the sum of weight * cross-entropy (targets); each row's
    cross-entropy [N], without gradient (targets and ``reduce=False``); or what a function in the
    targets' place makes of the logits of each ``CHUNK_ROWS`` rows, joined.

    The sum is float32; zero, with a working backward, for no rows. ``kernel``: which of ``KERNELS``
    sums the rows; weighted ones are always summed by our own, as the others take no weights.
    """
    if y_N is None:
        return torch.cat([*_logits(h_ND, w_VD, b_V)])
    if not isinstance(y_N, Tensor):
        return torch.cat([y_N(logits) for logits in _logits(h_ND, w_VD, b_V)])
    if not reduce:
        parts = zip(_logits(*map(Tensor.detach, (h_ND, w_VD, b_V))), y_N.split(CHUNK_ROWS))
        return torch.cat([F.cross_entropy(z.float(), y, reduction="none") for z, y in parts])
    dtype = compute_dtype(w_VD)
    if weight_N is not None:
        kernel = kernel if kernel in TAKE_WEIGHTS else "chunked"
        return KERNELS[kernel](h_ND, w_VD, b_V, y_N, dtype, weight_N)
    return KERNELS[kernel](h_ND, w_VD, b_V, y_N, dtype)
