"""Scaled dot-product attention on rotated queries and keys, who may look at whom, and the cache.

B batch, H heads, L length, E head size. SDPA everywhere: no compiled extension is needed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

ROPE_BASE = 10_000.0


def rotary_table(positions: Sequence[Tensor], head_size: int) -> tuple[Tensor, Tensor]:
    """Cos and sin of RoPE's angles, [..., L, 1 or 2, 1, E/2], float32.

    ``positions`` is one map [L] or [B, L] for queries and keys alike, or one for each.
    """
    place = torch.stack(torch.broadcast_tensors(*positions), dim=-1)
    exponent = torch.arange(0, head_size, 2, device=place.device, dtype=torch.float32)
    angle = place[..., None, None].float() * ROPE_BASE ** (-exponent / head_size)
    return angle.cos(), angle.sin()


def rotate(qk_BL2HE: Tensor, table: tuple[Tensor, Tensor]) -> Tensor:
    """Rotate the pairs (i, i + E/2) of each query and key head by its position's angles."""
    cos, sin = (part.to(qk_BL2HE.dtype) for part in table)
    if not torch.compiler.is_compiling():
        return _Rotation.apply(qk_BL2HE, cos, sin)
    left, right = qk_BL2HE.chunk(2, dim=-1)
    return torch.cat([left * cos - right * sin, right * cos + left * sin], dim=-1)


def _turn(x: Tensor, cos: Tensor, sin: Tensor, sign: float) -> Tensor:
    out = torch.empty_like(x)
    left, right = x.chunk(2, dim=-1)
    out_left, out_right = out.chunk(2, dim=-1)
    torch.mul(left, cos, out=out_left).addcmul_(right, sin, value=-sign)
    torch.mul(right, cos, out=out_right).addcmul_(left, sin, value=sign)
    return out


class _Rotation(torch.autograd.Function):
    """The rotation without intermediate tensors; its gradient is the rotation backwards."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _turn(x, cos, sin, 1.0)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        cos, sin = ctx.saved_tensors
        return _turn(grad, cos, sin, -1.0), None, None


def attention_mask(
    is_real_BL: Tensor | None = None, document_BL: Tensor | None = None
) -> Tensor | None:
    """Which keys each query sees, True = visible: [B, 1, 1, L] or [B, 1, L, L]; None sees all.

    ``is_real`` hides padding; ``document`` (an id per token) keeps attention inside documents. A
    pad still sees the real tokens, so that no softmax is empty; nothing reads its output.
    """
    if document_BL is None:
        return None if is_real_BL is None else is_real_BL[:, None, None, :]
    same = document_BL[:, None, :, None] == document_BL[:, None, None, :]
    if is_real_BL is None:
        return same
    itself = torch.eye(document_BL.shape[1], dtype=torch.bool, device=same.device)
    return (same & is_real_BL[:, None, None, :]) | itself


def document_ids(x_BL: Tensor, eos_id: int) -> Tensor:
    """Which document of its row each token belongs to: an EOS is the last token of its own.

    At the start of a row it is a BOS (GPT-2 has one id for both) and belongs to what follows.
    """
    is_end = x_BL == eos_id
    is_end[:, 0] = False
    return is_end.cumsum(dim=1) - is_end.long()


@dataclass(frozen=True)
class AttentionRules:
    """Who may look at whom in a batch of rows, in training and in evaluation alike."""

    sees_pads: bool = False
    """mdlm's rule for padded rows: pads are noised and attended like text (but never scored)."""
    document_eos: int | None = None
    """With an EOS id: attention stays inside documents."""

    def mask(self, x0_BL: Tensor, is_real_BL: Tensor | None) -> Tensor | None:
        """The attention mask of clean rows."""
        real = None if self.sees_pads else is_real_BL
        if self.document_eos is None:
            return attention_mask(real)
        return attention_mask(real, document_ids(x0_BL, self.document_eos))


def attend(
    q_BLHE: Tensor, k_BLHE: Tensor, v_BLHE: Tensor, mask: Tensor | None, is_causal: bool
) -> Tensor:
    """Attention output, [B, L, H * E]; queries may be the last ones of more keys."""
    q, k, v = (part.transpose(1, 2) for part in (q_BLHE, k_BLHE, v_BLHE))
    num_earlier = k.shape[-2] - q.shape[-2]
    if is_causal and (mask is not None or num_earlier):
        past = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool, device=q.device)
        past = past.tril(num_earlier)
        mask, is_causal = past if mask is None else mask & past, False
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=is_causal)
    return out.transpose(1, 2).flatten(2)


# Keys and values of positions that were seen before, so that later calls need not repeat them.
#
# Causal models keep every call's: exact. For a bidirectional one the keys and values of a prefix
# change a little whenever a later token does; keeping those of the prefix is exact in the first
# layer and an approximation above it.


@dataclass
class KeyValues:
    """Layer by layer, what the positions before a call's own have to offer."""

    keep: int | None = None
    """Positions of the first call to keep, and nothing later; None keeps all of every call."""
    layers: list[tuple[Tensor, Tensor]] = field(default_factory=list)

    def extend(self, layer: int, k_BLHE: Tensor, v_BLHE: Tensor) -> tuple[Tensor, Tensor]:
        """The kept keys and values followed by a call's own."""
        if layer == len(self.layers):
            self.layers.append((k_BLHE[:, : self.keep], v_BLHE[:, : self.keep]))
            return k_BLHE, v_BLHE
        past_k, past_v = self.layers[layer]
        whole = torch.cat([past_k, k_BLHE], dim=1), torch.cat([past_v, v_BLHE], dim=1)
        if self.keep is None:
            self.layers[layer] = whole
        return whole

    def select(self, rows: Tensor) -> KeyValues:
        """Those of some rows of the batch."""
        picked = [(k.index_select(0, rows), v.index_select(0, rows)) for k, v in self.layers]
        return KeyValues(self.keep, picked)
