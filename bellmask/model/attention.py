"""Attention masks, and the cache of keys and values.

B batch, H heads, L length, E head size.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor


def attention_mask(is_real_BL: Tensor | None = None) -> Tensor | None:
    """Which keys all queries see, True = visible: [B, 1, 1, L]; None sees all.

    A pad still sees the real tokens, so that no softmax is empty; nothing reads its output.
    """
    return None if is_real_BL is None else is_real_BL[:, None, None, :]


def document_ids(x_BL: Tensor, eos_id: int, is_real_BL: Tensor | None = None) -> Tensor:
    """The document of each token in its row; an EOS is the last token of its document.

    At the start of a row it is a BOS (GPT-2 has one id for both) and belongs to the next document.
    Each pad is a document of its own, with a negative number.
    """
    is_end = x_BL == eos_id
    is_end[:, 0] = False
    document_BL = is_end.cumsum(dim=1) - is_end.long()
    if is_real_BL is None:
        return document_BL
    return torch.where(is_real_BL, document_BL, -1 - torch.arange(x_BL.shape[1]))


@dataclass(frozen=True)
class AttentionRules:
    """Attention masks of a batch of rows, in training and evaluation."""

    sees_pads: bool = False
    """mdlm's rule for padded rows: pads are noised and attended like text (but never scored)."""
    document_eos: int | None = None
    """With an EOS id: attention stays inside documents."""

    def mask(self, x0_BL: Tensor, is_real_BL: Tensor | None) -> Tensor | None:
        """What a network takes as the mask of clean rows: who is seen, or document ids [B, L]."""
        real = None if self.sees_pads else is_real_BL
        if self.document_eos is None:
            return attention_mask(real)
        return document_ids(x0_BL, self.document_eos, real)


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
