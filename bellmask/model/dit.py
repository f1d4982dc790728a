"""The parts of the DiT: RoPE, attention, local convolution, modulation, blocks.

Imports torch only: ``bellmask export`` puts a copy of this file beside an exported model, so that
the network is written once.

B batch, H heads, L length, E head size, D width, N selected rows (flat indices into B * L).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

ROPE_BASE = 10_000.0


def rotary_table(positions: Sequence[Tensor], head_size: int) -> tuple[Tensor, Tensor]:
    """Cos and sin of RoPE's angles, [..., L, 1 or 2, 1, E/2], float32.

    ``positions`` is one map [L] or [B, L] for queries and keys alike, or one for each.
    """
    place = torch.stack(torch.broadcast_tensors(*positions), dim=-1)
    exponent = torch.arange(0, head_size, 2, device=place.device, dtype=torch.float32)
    angle = place[..., None, None].float() * ROPE_BASE ** (-exponent / head_size)
    return angle.cos(), angle.sin()


# Paper: App. C.1: backbone
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


LEAST_FLEX_HEAD = 16
"""FlexAttention has no kernel for smaller heads on GPUs."""


def same_document(document_BL: Tensor) -> Tensor:
    """The mask [B, 1, L, L] that keeps attention inside documents."""
    return document_BL[:, None, :, None] == document_BL[:, None, None, :]


def block_mask(document_BL: Tensor) -> Any:
    """The same for FlexAttention, which skips what it hides and never makes it as a tensor."""

    def is_seen(b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return document_BL[b, query] == document_BL[b, key]

    batch, length = document_BL.shape
    return _block_mask_maker()(is_seen, batch, None, length, length, device=document_BL.device)


@functools.cache
def _block_mask_maker() -> Any:
    """Compiled: otherwise torch makes several [B, L, L] tensors on the way."""
    from torch.nn.attention.flex_attention import create_block_mask

    return torch.compile(create_block_mask)


def attend(q_BLHE: Tensor, k_BLHE: Tensor, v_BLHE: Tensor, mask: Any, is_causal: bool) -> Tensor:
    """Attention output, [B, L, H * E]; queries may be the last ones of more keys.

    ``mask``: a tensor, True where seen, or a :func:`block_mask`.
    """
    q, k, v = (part.transpose(1, 2) for part in (q_BLHE, k_BLHE, v_BLHE))
    if mask is not None and not isinstance(mask, Tensor):
        flex = torch.nn.attention.flex_attention.flex_attention
        return flex(q, k, v, block_mask=mask).transpose(1, 2).flatten(2)
    num_earlier = k.shape[-2] - q.shape[-2]
    if is_causal and (mask is not None or num_earlier):
        past = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool, device=q.device)
        past = past.tril(num_earlier)
        mask, is_causal = past if mask is None else mask & past, False
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=is_causal)
    return out.transpose(1, 2).flatten(2)


class LocalConv(nn.Module):
    """X + a depthwise convolution of x over a few neighbors, zero at first.

    Text is local, and attention takes a long time to find the neighbors; the convolution provides
    them from the start. A position uses a neighbor only if it may attend to it, so nothing leaks
    across documents, from pads or from later tokens.
    """

    def __init__(self, width: int, num_positions: int, *, is_causal: bool = False) -> None:
        """``num_positions`` around the token itself, or the last ones up to it if causal."""
        super().__init__()
        self.num_left = num_positions - 1 if is_causal else num_positions // 2
        self.num_right = num_positions - 1 - self.num_left
        self.weight = nn.Parameter(torch.zeros(width, 1, num_positions))

    def forward(
        self, x_BLD: Tensor, mask: Tensor | None = None, earlier: Tensor | None = None
    ) -> Tensor:
        """``mask`` is the attention's; ``earlier`` [B, num_left, D] are inputs of earlier calls."""
        length = x_BLD.shape[1]
        row = x_BLD if earlier is None else torch.cat([earlier, x_BLD], dim=1)
        missing = self.num_left + length - row.shape[1]
        row = F.pad(row, (0, 0, missing, self.num_right))
        weight = self.weight.to(row.dtype)
        if mask is None:  # as one image per row, the layout that is fast on CPUs
            image = row.transpose(1, 2)[:, :, None]
            with torch.autocast(row.device.type, enabled=False):  # as exact as with a mask
                added = F.conv2d(image, weight[:, :, None], groups=row.shape[2])
            return x_BLD + added[:, :, 0].transpose(1, 2)
        seen = F.pad(mask[:, 0], (self.num_left, self.num_right)).expand(-1, length, -1)
        first = mask.shape[-1] - length  # the key of the first query's own token
        for k, tap in enumerate(weight[:, 0].unbind(1)):
            is_seen = seen.diagonal(first + k, dim1=1, dim2=2)[..., None]
            x_BLD = x_BLD + tap * row[:, k : k + length] * is_seen
        return x_BLD


# Shift, scale and gate of each branch: learned constants, or AdaLN fed with the time.

CONDITION_WIDTH = 128
NUM_SINUSOIDS = 256
TIME_SCALE = 1000.0
"""t in [0, 1] is stretched by this before the sinusoids, whose slowest period is 10 000."""
SIGMA_MARGIN = 1e-3
"""Visible fraction of mdlm's schedule at t = 1, which keeps its total noise sigma finite."""

TIME_INPUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "stretched": lambda t: t * TIME_SCALE,
    "sigma": lambda t: -torch.log((1 - t) + SIGMA_MARGIN * t),
}
"""Inputs of the sinusoids, by name: 1000 t, or the total noise of mdlm's schedule (in the form
that loses no digits of float32 near t = 1)."""


class TimeEmbedding(nn.Module):
    """t → 256 sinusoids → 128 → SiLU → 128 → SiLU."""

    def __init__(self, time_input: str = "stretched") -> None:
        super().__init__()
        self.time_input = TIME_INPUTS[time_input]
        self.into = nn.Linear(NUM_SINUSOIDS, CONDITION_WIDTH)
        self.out = nn.Linear(CONDITION_WIDTH, CONDITION_WIDTH)

    def forward(self, t_B: Tensor) -> Tensor:
        half = NUM_SINUSOIDS // 2
        rate = torch.exp(-math.log(1e4) / half * torch.arange(half, device=t_B.device))
        angle = self.time_input(t_B.float())[:, None] * rate
        waves = torch.cat([angle.cos(), angle.sin()], dim=1).to(self.into.weight.dtype)
        return F.silu(self.out(F.silu(self.into(waves))))


# Paper: App. A.2: time-agnostic network
class Modulation(nn.Module):
    """Learned vectors, or AdaLN, a linear map of the time's embedding; all zero at first."""

    def __init__(self, has_time: bool, width: int, num_vectors: int) -> None:
        super().__init__()
        self.num_vectors = num_vectors
        if has_time:
            self.linear = nn.Linear(CONDITION_WIDTH, num_vectors * width)
            nn.init.zeros_(self.linear.weight)
            nn.init.zeros_(self.linear.bias)
        else:
            self.vectors = nn.Parameter(torch.zeros(num_vectors, width))

    def forward(self, condition: Tensor | None) -> tuple[Tensor, ...]:
        """Vectors of shape [D], or [B, 1, D] with the time's embedding."""
        if condition is None:
            return self.vectors.unbind(0)
        return self.linear(condition)[:, None].chunk(self.num_vectors, dim=-1)


class ModulatedNorm(nn.Module):
    """Layer norm with weight only, then x * (1 + scale) + shift."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
        """One fused kernel where shift and scale are vectors."""
        shape, weight = self.weight.shape, self.weight.to(x.dtype)
        if shift.ndim == 1:
            return F.layer_norm(x, shape, weight * (1 + scale.to(x.dtype)), shift.to(x.dtype))
        return F.layer_norm(x, shape, weight) * (1 + scale) + shift


def pick_vectors(vectors: Sequence[Tensor], rows_N: Tensor, length: int) -> list[Tensor]:
    """The modulation of each row: the same [D] for all, or its sample's [1, D]."""
    return [v if v.ndim == 1 else v.squeeze(1).index_select(0, rows_N // length) for v in vectors]


LEVELS = 1 << 16
"""An element is dropped with a probability that is a multiple of 1 / LEVELS."""


def dropout_scale(rate: float) -> float:
    """Kept elements are scaled by this, so that the mean is unchanged."""
    return LEVELS / (LEVELS - round(rate * LEVELS))


Extend = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


class Block(nn.Module):
    """Attention and MLP, each normed, modulated, gated and added."""

    def __init__(
        self,
        width: int,
        num_heads: int,
        hidden: int,
        *,
        has_time: bool,
        is_causal: bool = False,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.num_heads, self.is_causal, self.dropout = num_heads, is_causal, dropout
        self.modulation = Modulation(has_time, width, 6)
        self.attention_norm = ModulatedNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.attention_out = nn.Linear(width, width, bias=False)
        self.mlp_norm = ModulatedNorm(width)
        self.mlp_in = nn.Linear(width, hidden)
        self.mlp_out = nn.Linear(hidden, width)

    def forward(
        self,
        x_BLD: Tensor,
        rotary: tuple[Tensor, Tensor],
        mask: Tensor | None,
        condition: Tensor | None,
        rows_N: Tensor | None = None,
        is_kept: Sequence[Tensor | None] = (None, None),
        extend: Extend | None = None,
    ) -> Tensor:
        """X + gate * attention(norm(x)), then the same with the MLP; [N, D] with ``rows_N``.

        ``is_kept`` is dropout's choice on each of the two branches (None: it is made here);
        ``extend`` puts the keys and values of earlier calls before this one's.
        """
        shift_a, scale_a, gate_a, *for_mlp = self.modulation(condition)
        normed = self.attention_norm(x_BLD, shift_a, scale_a)
        seen = self._attention(normed, rotary, mask, extend)
        x = x_BLD
        if rows_N is not None:
            x, seen = pick_rows(x, rows_N), pick_rows(seen, rows_N)
            gate_a, *for_mlp = pick_vectors([gate_a, *for_mlp], rows_N, x_BLD.shape[1])
        x = self._add(x, gate_a, self.attention_out, seen, is_kept[0])
        shift_m, scale_m, gate_m = for_mlp
        hidden = self.mlp_in(self.mlp_norm(x, shift_m, scale_m))
        return self._add(x, gate_m, self.mlp_out, gelu(hidden), is_kept[1])

    def _attention(
        self, x: Tensor, rotary: tuple[Tensor, Tensor], mask: Tensor | None, extend: Extend | None
    ) -> Tensor:
        batch, length, width = x.shape
        qkv = self.qkv(x).view(batch, length, 3, self.num_heads, width // self.num_heads)
        qk, v = qkv.split([2, 1], dim=2)
        q, k = rotate(qk, rotary).unbind(2)
        v = v.squeeze(2)
        if extend is not None:
            k, v = extend(k, v)
        return attend(q, k, v, mask, self.is_causal)

    def _add(
        self, x: Tensor, gate: Tensor, layer: nn.Linear, inner: Tensor, is_kept: Tensor | None
    ) -> Tensor:
        """X + gate * layer(inner); a constant gate is multiplied into the small weight instead."""
        if is_kept is not None:
            gate = gate * dropout_scale(self.dropout)
        if gate.ndim == 1:
            bias = None if layer.bias is None else gate * layer.bias
            branch = F.linear(inner, gate[:, None] * layer.weight, bias)
        else:
            branch = gate * layer(inner)
        if is_kept is not None:
            branch = branch * is_kept
        elif self.dropout and self.training:  # on a GPU: inside what is compiled
            branch = torch.native_dropout(branch, self.dropout, True)[0]
        return x + branch


def gelu(x: Tensor) -> Tensor:
    """GELU by tanh; compiled, the same by a sigmoid, which vectorizes better."""
    if torch.compiler.is_compiling():
        slope = 2 * math.sqrt(2 / math.pi)
        return x * torch.sigmoid(x * (slope + slope * 0.044715 * x * x))
    return F.gelu(x, approximate="tanh")


def pick_rows(x_BLD: Tensor, rows_N: Tensor) -> Tensor:
    """Rows [N, D] by flat index."""
    return x_BLD.flatten(0, 1).index_select(0, rows_N)
