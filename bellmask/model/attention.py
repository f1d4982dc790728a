"""Attention masks, and the cache of keys and values.

B batch, H heads, L length, E head size.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor


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
    """The document of each token in its row; an EOS is the last token of its document.

    At the start of a row it is a BOS (GPT-2 has one id for both) and belongs to the next document.
    """
    is_end = x_BL == eos_id
    is_end[:, 0] = False
    return is_end.cumsum(dim=1) - is_end.long()


@dataclass(frozen=True)
class AttentionRules:
    """Attention masks of a batch of rows, in training and evaluation."""

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


# A cache of keys and values, so that later calls need not recompute them.
#
# For causal models, caching every call is exact. For bidirectional ones, the keys and values of a
# prefix change slightly with later tokens; caching a prefix is exact in the first layer (except for
# the last positions with a local convolution) and approximate in later layers.


@dataclass
class KeyValues:
    """Keys and values of earlier positions, layer by layer."""

    keep: int | None = None
    """Positions of the first call to cache, and nothing later; None caches all calls."""
    layers: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    embeddings: Tensor | None = None
    """Of the last positions before a call's own, for a local convolution."""

    def extend(self, layer: int, k_BLHE: Tensor, v_BLHE: Tensor) -> tuple[Tensor, Tensor]:
        """Cached keys and values, followed by those of the current call."""
        if layer == len(self.layers):
            self.layers.append((k_BLHE[:, : self.keep], v_BLHE[:, : self.keep]))
            return k_BLHE, v_BLHE
        past_k, past_v = self.layers[layer]
        whole = torch.cat([past_k, k_BLHE], dim=1), torch.cat([past_v, v_BLHE], dim=1)
        if self.keep is None:
            self.layers[layer] = whole
        return whole

    def nearby(self, x_BLD: Tensor, count: int) -> Tensor | None:
        """Embeddings of up to ``count`` positions before a call's own; None in the first call."""
        before = self.embeddings
        if before is None or self.keep is None:
            row = x_BLD if before is None else torch.cat([before, x_BLD], dim=1)
            row = row[:, : self.keep]
            self.embeddings = row[:, max(0, row.shape[1] - count) :]
        return before

    def select(self, rows: Tensor) -> KeyValues:
        """Those of some rows of the batch."""
        picked = [(k.index_select(0, rows), v.index_select(0, rows)) for k, v in self.layers]
        near = None if self.embeddings is None else self.embeddings.index_select(0, rows)
        return KeyValues(self.keep, picked, near)
