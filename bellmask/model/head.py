"""Cross-entropy of selected rows, in chunks: all logits of all rows never exist at once.

N selected rows, D width, V vocabulary. Forward and backward together cost three matrix products of
size N D V, whatever the weights, because the gradients are formed while a chunk's logits are there.
Sums are float32 also where the products are bfloat16 (``F.linear_cross_entropy`` would return a
bfloat16 sum, which loses three digits).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

CHUNK_ROWS = 512
"""Rows whose logits exist at once; torch's automatic choice is 2.7x slower on CPUs."""


def compute_dtype(h: Tensor) -> torch.dtype:
    """The type of matrix products here: autocast's where it is on."""
    kind = h.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else h.dtype


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
    ) -> tuple[Tensor, Tensor]:
        h, w = h_ND.to(dtype), w_VD.to(dtype)
        grad_h = torch.empty_like(h_ND)
        grad_w = torch.zeros_like(w_VD)
        grad_b = torch.zeros_like(b_V)
        ce_N = torch.empty(len(h), dtype=torch.float32, device=h.device)
        for start in range(0, len(h), CHUNK_ROWS):
            part = slice(start, start + CHUNK_ROWS)
            logits = F.linear(h[part], w, b_V.to(dtype)).float()
            log_sum = torch.logsumexp(logits, dim=1, keepdim=True)
            y = y_N[part, None]
            ce_N[part] = (log_sum - logits.gather(1, y)).squeeze(1)
            error = logits.sub_(log_sum).exp_()  # softmax, in place
            error.scatter_add_(1, y, torch.full_like(y, -1, dtype=error.dtype))
            error.mul_(weight_N[part, None])
            grad_b += error.sum(0)
            error = error.to(dtype)
            grad_h[part] = error @ w
            if dtype == grad_w.dtype:
                grad_w.addmm_(error.T, h[part])
            else:
                grad_w += error.T @ h[part]
        ctx.save_for_backward(grad_h, grad_w, grad_b)
        ctx.mark_non_differentiable(ce_N)
        return (ce_N * weight_N).sum(), ce_N

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_sum: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        grad_h, grad_w, grad_b = ctx.saved_tensors
        return grad_h * grad_sum, grad_w * grad_sum, grad_b * grad_sum, None, None, None


def cross_entropy_sum(
    h_ND: Tensor, w_VD: Tensor, b_V: Tensor, y_N: Tensor, weight_N: Tensor | None = None
) -> Tensor:
    """Sum over rows of weight * -log p(y), float32; zero, with a working backward, for no rows."""
    dtype = compute_dtype(h_ND)
    if weight_N is None and dtype == torch.float32:
        options = torch.nn.LinearCrossEntropyOptions(
            batch_chunk_size=CHUNK_ROWS, chunking_method=None
        )
        return F.linear_cross_entropy(
            h_ND, w_VD, y_N, linear_bias=b_V, reduction="sum", options=options
        )
    if weight_N is None:
        weight_N = torch.ones(len(h_ND), device=h_ND.device)
    return _WeightedRows.apply(h_ND, w_VD, b_V, y_N, weight_N.float(), dtype)[0]


@torch.no_grad()
def cross_entropy_rows(h_ND: Tensor, w_VD: Tensor, b_V: Tensor, y_N: Tensor) -> Tensor:
    """-log p(y) of each row, float32 [N]; for evaluation."""
    dtype = compute_dtype(h_ND)
    w, b = w_VD.to(dtype), b_V.to(dtype)
    parts = [
        F.cross_entropy(F.linear(h.to(dtype), w, b).float(), y, reduction="none")
        for h, y in zip(h_ND.split(CHUNK_ROWS), y_N.split(CHUNK_ROWS), strict=True)
    ]
    return torch.cat(parts) if parts else h_ND.new_zeros(0, dtype=torch.float32)


def predict(
    h_ND: Tensor,
    w_VD: Tensor,
    b_V: Tensor,
    y_N: Tensor | None = None,
    weight_N: Tensor | None = None,
    *,
    reduce: bool = True,
) -> Tensor:
    """Logits [N, V] (no targets); the sum of weight * cross-entropy (targets); or each row's
    cross-entropy [N], without gradient (targets and ``reduce=False``).
    """
    if y_N is None:
        dtype = compute_dtype(h_ND)
        return F.linear(h_ND.to(dtype), w_VD.to(dtype), b_V.to(dtype))
    if reduce:
        return cross_entropy_sum(h_ND, w_VD, b_V, y_N, weight_N)
    return cross_entropy_rows(h_ND, w_VD, b_V, y_N)
