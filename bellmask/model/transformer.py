"""The paper's backbone: a DiT over tokens, bidirectional or causal, RoPE on any position map.

With ``modulation="constant"`` AdaLN is reduced to its function in mdlm without time input: a shift,
scale and gate vector per branch, folded into the weights of the layer norm before the branch and of
the linear map at its end, so it costs nothing. Gates and head start at zero: at first each block is
the identity and every prediction uniform. If only some rows are predicted, the last block drops the
others after its attention.

B batch, H heads, L length, D width, E head size, V vocabulary, N selected rows (flat indices into
B * L).
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from bellmask.config.options import ModelOptions
from bellmask.model import dit
from bellmask.model.head import predict

# Attention masks.


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


# Dropout with randomness drawn outside the blocks, which is cheap on CPUs.
#
# ``F.dropout`` draws one number at a time from a serial generator there: an eighth of a training
# step at width 128. Here 16 bits decide an element, and a vectorized generator makes them.


def draw_kept(shape: torch.Size | tuple[int, ...], rate: float) -> Tensor:
    """Which elements stay (bool), decided by torch's generator."""
    size = torch.Size(shape)
    seed = int(torch.randint(2**62, ()))
    bits = np.random.SFC64(seed).random_raw(-(-size.numel() // 4)).view(np.uint16)
    return torch.from_numpy(bits[: size.numel()] >= round(rate * dit.LEVELS)).view(size)


# The network.

_SOURCE, _TARGET = 0, 1

# Paper: App. C.1: AoARM
ENCODINGS: dict[str, tuple[int, ...]] = {
    "source": (_SOURCE,),
    "literal": (_TARGET,),
    "crossed": (_TARGET, _SOURCE),
}
"""Whose positions rotate queries and keys in the second half of the layers: those of the tokens the
slots hold (source) or of those they predict (target). The first half goes by source (App. C.1); the
middle layer of an odd number belongs to the second."""


# Paper: App. A.2: no probability on the mask, App. C.1: backbone
class Denoiser(nn.Module):
    """Tokens (V is the mask) → predictions at selected rows.

    Everything that touches parameters happens inside ``forward``, so that the module can be the
    root of a sharded model.
    """

    def __init__(
        self,
        options: ModelOptions,
        num_tokens: int,
        *,
        is_causal: bool = False,
        encoding: str = "source",
    ) -> None:
        super().__init__()
        self.num_tokens, self.mask_id, self.dropout = num_tokens, num_tokens, options.dropout
        self.second_half = ENCODINGS[encoding]
        self.head_size = options.width // options.num_heads
        self.embedding = nn.Embedding(num_tokens + 1, options.width)
        nn.init.kaiming_uniform_(self.embedding.weight, a=math.sqrt(5))
        self.local_conv = None
        if options.local_conv:
            self.local_conv = dit.LocalConv(options.width, options.local_conv, is_causal=is_causal)
        has_time = options.modulation == "time"
        self.time_embedding = dit.TimeEmbedding(options.time_input) if has_time else None
        sizes = (options.width, options.num_heads, options.mlp_ratio * options.width)
        make = partial(dit.Block, *sizes, has_time=has_time, is_causal=is_causal)
        self.blocks = nn.ModuleList(
            make(dropout=options.dropout) for _ in range(options.num_layers)
        )
        self.final_modulation = dit.Modulation(has_time, options.width, 2)
        self.final_norm = dit.ModulatedNorm(options.width)
        self.head = nn.Linear(options.width, num_tokens)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    first_maskable = 0
    """Every position can be predicted."""
    loss_kernel = "torch"
    """Sums unweighted cross-entropies (:data:`bellmask.model.head.KERNELS`)."""
    reads_chunks = True
    """``targets_N`` may be a function of logits."""
    uses_flex_attention = False
    """Attention inside documents skips the others. Its backward pass needs a GPU, and only compiled
    blocks make it fast."""

    @property
    def uses_time(self) -> bool:
        """True when predictions depend on t as well as on the row."""
        return self.time_embedding is not None

    def new_cache(self, keep: int | None = None) -> KeyValues:
        """An empty cache for ``cache=``; see :class:`KeyValues`."""
        return KeyValues(keep)

    def block_modules(self) -> list[nn.Module]:
        return list(self.blocks)

    def forward(
        self,
        x_BL: Tensor,
        rows_N: Tensor,
        targets_N: Tensor | Callable[[Tensor], Tensor] | None = None,
        *,
        weight_N: Tensor | None = None,
        reduce: bool = True,
        **inputs: Any,
    ) -> Tensor:
        """Logits or cross-entropies of the rows: see :func:`bellmask.model.head.predict`.

        ``inputs`` (times, positions, mask, cache) are those of :meth:`hidden`.
        """
        h_ND, head = self.hidden(x_BL, rows_N, **inputs), self.head
        given = (h_ND, head.weight, head.bias, targets_N, weight_N)
        return predict(*given, reduce=reduce, kernel=self.loss_kernel)

    # Paper: App. C.1: ARM, App. C.1: sigma-ARM
    def hidden(
        self,
        x_BL: Tensor,
        rows_N: Tensor | None = None,
        *,
        t_B: Tensor | None = None,
        positions: Tensor | None = None,
        target_positions: Tensor | None = None,
        mask: Tensor | None = None,
        cache: KeyValues | None = None,
    ) -> Tensor:
        """Final hidden states [N, D] of the rows, or [B, L, D] of all of them.

        ``positions`` [L] or [B, L] of what the slots hold defaults to 0 .. L-1;
        ``target_positions``, of what they predict, matters to encodings that use it. With a filled
        ``cache`` the row is what comes after the positions in it, and ``positions`` must say where.
        ``mask`` [B, 1, 1 or L, L] is True where seen; or it is [B, L], the documents of tokens that
        see only their own.
        """
        if positions is None:
            positions = torch.arange(x_BL.shape[1], device=x_BL.device)
        rotary = self._rotary(positions, target_positions)
        condition = None
        if self.time_embedding is not None:
            if t_B is None:
                raise ValueError("a model with modulation='time' needs the times t")
            condition = self.time_embedding(t_B)
        h_BLD = self.embedding(x_BL)
        if torch.is_autocast_enabled(h_BLD.device.type):
            h_BLD = h_BLD.float()  # the sum over blocks, also where weights were gathered shorter
        blocks: Any = None
        if mask is not None and mask.ndim == 2:  # the documents of the tokens
            if self.uses_flex_attention and self.head_size >= dit.LEAST_FLEX_HEAD:
                blocks = dit.block_mask(mask)
            is_needed = blocks is None or self.local_conv is not None
            mask = dit.same_document(mask) if is_needed else None
        if self.local_conv is not None:
            earlier = None if cache is None else cache.nearby(h_BLD, self.local_conv.num_left)
            h_BLD = self.local_conv(h_BLD, mask, earlier)
        seen = mask if blocks is None else blocks
        for number, block in enumerate(self.blocks, start=1):
            wanted = rows_N if number == len(self.blocks) else None
            shape = h_BLD.shape if wanted is None else (len(wanted), h_BLD.shape[-1])
            is_late = 2 * number > len(self.blocks)
            kept = self._draw_kept(shape, h_BLD.device)
            extend = None if cache is None else partial(cache.extend, number - 1)
            h_BLD = block(h_BLD, rotary[is_late], seen, condition, wanted, kept, extend)
        vectors = self.final_modulation(condition)
        if rows_N is not None:
            vectors = dit.pick_vectors(vectors, rows_N, x_BL.shape[1])
        return self.final_norm(h_BLD, *vectors)

    def _rotary(
        self, positions: Tensor, target_positions: Tensor | None
    ) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
        """RoPE's tables for the first and the second half of the layers."""
        early = dit.rotary_table([positions], self.head_size)
        if self.second_half == (_SOURCE,):
            return early, early
        if target_positions is None:
            raise ValueError("a model that encodes targets needs their positions")
        maps = (positions, target_positions)
        return early, dit.rotary_table([maps[which] for which in self.second_half], self.head_size)

    def _draw_kept(self, shape: Sequence[int], device: torch.device) -> list[Tensor | None]:
        """Dropout's choice for the two branches of a block; a GPU's blocks make it themselves."""
        if not (self.dropout and self.training) or device.type != "cpu":
            return [None, None]
        return [draw_kept(tuple(shape), self.dropout) for _ in range(2)]


def hash_weights(model: nn.Module) -> str:
    """SHA-256 of all parameters: part of the key of cached measurements."""
    found = hashlib.sha256()
    for name, parameter in sorted(model.named_parameters()):
        found.update(name.encode())
        found.update(parameter.detach().cpu().float().numpy().tobytes())
    return found.hexdigest()


def count_parameters(model: nn.Module) -> int:
    """Number of parameters, trained or frozen."""
    return sum(p.numel() for p in model.parameters())


def describe_size(model: nn.Module) -> str:
    """``260,096 parameters``, and how many of them are trained where some are frozen."""
    total = count_parameters(model)
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    return f"{total:,} parameters" + ("" if trained == total else f" ({trained:,} trained)")
