"""The head: logits of selected rows, or their cross-entropies, in chunks.

N selected rows, D width, V vocabulary. All logits of all rows never exist at once; the sum that is
trained on comes from one of :mod:`bellmask.model.loss_kernels`. Sums are float32 also where the
products are bfloat16.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from bellmask.model.loss_kernels import CHUNK_ROWS, current_kernel, weighted_sum


def compute_dtype(w_VD: Tensor) -> torch.dtype:
    """The type of matrix products here: autocast's where it is on, else the weights'."""
    kind = w_VD.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else w_VD.dtype


def cross_entropy_sum(
    h_ND: Tensor, w_VD: Tensor, b_V: Tensor, y_N: Tensor, weight_N: Tensor | None = None
) -> Tensor:
    """Sum over rows of weight * -log p(y), float32; zero, with a working backward, for no rows.

    Weighted rows are always summed by our own kernel, whatever was picked: the others have none.
    """
    dtype = compute_dtype(w_VD)
    if weight_N is not None:
        return weighted_sum(h_ND, w_VD, b_V, y_N, weight_N, dtype)
    return current_kernel()(h_ND, w_VD, b_V, y_N, dtype)


@torch.no_grad()
def cross_entropy_rows(h_ND: Tensor, w_VD: Tensor, b_V: Tensor, y_N: Tensor) -> Tensor:
    """-log p(y) of each row, float32 [N]; for evaluation."""
    dtype = compute_dtype(w_VD)
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
        dtype = compute_dtype(w_VD)
        return F.linear(h_ND.to(dtype), w_VD.to(dtype), b_V.to(dtype))
    if reduce:
        return cross_entropy_sum(h_ND, w_VD, b_V, y_N, weight_N)
    return cross_entropy_rows(h_ND, w_VD, b_V, y_N)
