"""The paper's backbone: a DiT over tokens, bidirectional or causal, RoPE on any position map.

With ``modulation="constant"`` AdaLN is reduced to what mdlm's learns without time input: a shift,
scale and gate vector per branch, folded into the weights of the layer norm before the branch and of
the linear map at its end, so it costs nothing. Gates and head start at zero: at first each block is
the identity and every prediction uniform. Where predictions are wanted at some rows only, the last
block leaves the others out as soon as its attention has looked at them.

B batch, L length, D width, V vocabulary, N selected rows (flat indices into B * L).
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bellmask.config.options import ModelOptions
from bellmask.model.attention import KeyValues, attend, rotary_table, rotate
from bellmask.model.head import predict

# Shift, scale and gate of each branch: learned constants, or AdaLN fed with the time.

CONDITION_WIDTH = 128
NUM_SINUSOIDS = 256
TIME_SCALE = 1000.0
"""t in [0, 1] is stretched by this before the sinusoids, whose slowest period is 10 000."""
SIGMA_MARGIN = 1e-3
"""What mdlm's schedule leaves visible at t = 1, so that its total noise sigma stays finite."""

TIME_INPUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "stretched": lambda t: t * TIME_SCALE,
    "sigma": lambda t: -torch.log((1 - t) + SIGMA_MARGIN * t),
}
"""What the sinusoids are fed, by name: 1000 t, or the total noise of mdlm's schedule (in the form
that loses no digits of float32 near t = 1)."""


class TimeEmbedding(nn.Module):
    """t → 256 sinusoids → 128 → SiLU → 128 → SiLU."""

    def __init__(self, time_input: str = "stretched") -> None:
        super().__init__()
        self.time_input = TIME_INPUTS[time_input]
        self.into = nn.Linear(NUM_SINUSOIDS, CONDITION_WIDTH)
        self.out = nn.Linear(CONDITION_WIDTH, CONDITION_WIDTH)

    def forward(self, t_B: Tensor) -> Tensor:
        """[B, 128]."""
        half = NUM_SINUSOIDS // 2
        rate = torch.exp(-math.log(1e4) / half * torch.arange(half, device=t_B.device))
        angle = self.time_input(t_B.float())[:, None] * rate
        waves = torch.cat([angle.cos(), angle.sin()], dim=1)
        return F.silu(self.out(F.silu(self.into(waves))))


class ConstantModulation(nn.Module):
    """Learned vectors, the same for every input; zero at first."""

    def __init__(self, width: int, num_vectors: int) -> None:
        super().__init__()
        self.vectors = nn.Parameter(torch.zeros(num_vectors, width))

    def forward(self, condition: Tensor | None) -> tuple[Tensor, ...]:
        """Vectors of shape [D]."""
        return self.vectors.unbind(0)


class TimeModulation(nn.Module):
    """AdaLN: a linear map of the time's embedding; zero at first."""

    def __init__(self, width: int, num_vectors: int) -> None:
        super().__init__()
        self.linear = nn.Linear(CONDITION_WIDTH, num_vectors * width)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)
        self.num_vectors = num_vectors

    def forward(self, condition: Tensor | None) -> tuple[Tensor, ...]:
        """Vectors of shape [B, 1, D]."""
        assert condition is not None
        return self.linear(condition)[:, None].chunk(self.num_vectors, dim=-1)


def make_modulation(kind: str, width: int, num_vectors: int) -> nn.Module:
    """The modulation of a kind that the options allow."""
    table = {"constant": ConstantModulation, "time": TimeModulation}
    return table[kind](width, num_vectors)


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


# Dropout whose randomness is drawn outside the blocks, and costs little on CPUs too.
#
# ``F.dropout`` draws one number at a time from a serial generator there: an eighth of a training
# step at width 128. Here 16 bits decide an element, and a vectorised generator makes them.

LEVELS = 1 << 16
"""An element is dropped with a probability that is a multiple of 1 / LEVELS."""


def draw_kept(shape: torch.Size | tuple[int, ...], rate: float, device: torch.device) -> Tensor:
    """Which elements stay (bool), decided by torch's generator of the device."""
    if device.type != "cpu":
        return torch.rand(shape, device=device) >= round(rate * LEVELS) / LEVELS
    size = torch.Size(shape)
    seed = int(torch.randint(2**62, ()))
    bits = np.random.SFC64(seed).random_raw(-(-size.numel() // 4)).view(np.uint16)
    return torch.from_numpy(bits[: size.numel()] >= round(rate * LEVELS)).view(size)


def dropout_scale(rate: float) -> float:
    """What is kept is multiplied by this, so that the mean stays."""
    return LEVELS / (LEVELS - round(rate * LEVELS))


# The network.

Extend = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


class Block(nn.Module):
    """Attention and MLP, each normed, modulated, gated and added."""

    def __init__(self, options: ModelOptions, is_causal: bool) -> None:
        super().__init__()
        width, hidden = options.width, options.mlp_ratio * options.width
        self.num_heads, self.is_causal, self.dropout = options.num_heads, is_causal, options.dropout
        self.modulation = make_modulation(options.modulation, width, 6)
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

        ``is_kept`` is dropout's choice on each of the two branches; ``extend`` puts the keys and
        values of earlier calls before this one's.
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
        self,
        x: Tensor,
        rotary: tuple[Tensor, Tensor],
        mask: Tensor | None,
        extend: Extend | None,
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
        return x + (branch if is_kept is None else branch * is_kept)


def gelu(x: Tensor) -> Tensor:
    """GELU by tanh; compiled, the same by a sigmoid, which vectorises better."""
    if torch.compiler.is_compiling():
        slope = 2 * math.sqrt(2 / math.pi)
        return x * torch.sigmoid(x * (slope + slope * 0.044715 * x * x))
    return F.gelu(x, approximate="tanh")


def pick_rows(x_BLD: Tensor, rows_N: Tensor) -> Tensor:
    """Rows [N, D] by flat index."""
    return x_BLD.flatten(0, 1).index_select(0, rows_N)


_SOURCE, _TARGET = 0, 1

ENCODINGS: dict[str, tuple[int, ...]] = {
    "source": (_SOURCE,),
    "literal": (_TARGET,),
    "crossed": (_TARGET, _SOURCE),
}
"""Whose positions rotate queries and keys in the second half of the layers: those of the tokens the
slots hold (source) or of those they predict (target). The first half goes by source (App. C.1); the
middle layer of an odd number belongs to the second."""


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
        self.num_tokens, self.dropout = num_tokens, options.dropout
        self.second_half = ENCODINGS[encoding]
        self.head_size = options.width // options.num_heads
        self.embedding = nn.Embedding(num_tokens + 1, options.width)
        nn.init.kaiming_uniform_(self.embedding.weight, a=math.sqrt(5))
        has_time = options.modulation == "time"
        self.time_embedding = TimeEmbedding(options.time_input) if has_time else None
        self.blocks = nn.ModuleList(Block(options, is_causal) for _ in range(options.num_layers))
        self.final_modulation = make_modulation(options.modulation, options.width, 2)
        self.final_norm = ModulatedNorm(options.width)
        self.head = nn.Linear(options.width, num_tokens)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    first_maskable = 0
    """Every position can be predicted."""
    loss_kernel = "torch"
    """Sums unweighted cross-entropies (:data:`bellmask.model.head.KERNELS`)."""

    @property
    def mask_id(self) -> int:
        """The last row of the embedding."""
        return self.num_tokens

    @property
    def uses_time(self) -> bool:
        """True when predictions depend on t, not on the row alone."""
        return self.time_embedding is not None

    def new_cache(self, keep: int | None = None) -> KeyValues:
        """An empty cache for ``cache=``; see :class:`bellmask.model.attention.KeyValues`."""
        return KeyValues(keep)

    def block_modules(self) -> list[nn.Module]:
        """The transformer blocks."""
        return list(self.blocks)

    def compile_blocks(self) -> None:
        """Fuse the operations of each block (``torch.compile``), from the next call on."""
        for block in self.block_modules():
            block.compile()

    def forward(
        self,
        x_BL: Tensor,
        rows_N: Tensor,
        targets_N: Tensor | None = None,
        *,
        weight_N: Tensor | None = None,
        t_B: Tensor | None = None,
        positions: Tensor | None = None,
        target_positions: Tensor | None = None,
        mask: Tensor | None = None,
        cache: KeyValues | None = None,
        reduce: bool = True,
    ) -> Tensor:
        """Logits or cross-entropies of the rows: see :func:`bellmask.model.head.predict`."""
        h_ND = self.hidden(
            x_BL,
            rows_N,
            t_B=t_B,
            positions=positions,
            target_positions=target_positions,
            mask=mask,
            cache=cache,
        )
        head, kernel = self.head, self.loss_kernel
        return predict(
            h_ND, head.weight, head.bias, targets_N, weight_N, reduce=reduce, kernel=kernel
        )

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
        for number, block in enumerate(self.blocks, start=1):
            wanted = rows_N if number == len(self.blocks) else None
            shape = h_BLD.shape if wanted is None else (len(wanted), h_BLD.shape[-1])
            is_late = 2 * number > len(self.blocks)
            kept = self._draw_kept(shape, h_BLD)
            extend = None if cache is None else partial(cache.extend, number - 1)
            h_BLD = block(h_BLD, rotary[is_late], mask, condition, wanted, kept, extend)
        vectors = self.final_modulation(condition)
        if rows_N is not None:
            vectors = pick_vectors(vectors, rows_N, x_BL.shape[1])
        return self.final_norm(h_BLD, *vectors)

    def _rotary(
        self, positions: Tensor, target_positions: Tensor | None
    ) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
        """RoPE's tables for the first and the second half of the layers."""
        early = rotary_table([positions], self.head_size)
        if self.second_half == (_SOURCE,):
            return early, early
        if target_positions is None:
            raise ValueError("a model that encodes targets needs their positions")
        maps = (positions, target_positions)
        return early, rotary_table([maps[which] for which in self.second_half], self.head_size)

    def _draw_kept(self, shape: Sequence[int], like: Tensor) -> list[Tensor | None]:
        """Dropout's choice for the two branches of a block."""
        if not (self.dropout and self.training):
            return [None, None]
        return [draw_kept(tuple(shape), self.dropout, like.device) for _ in range(2)]


def hash_weights(model: nn.Module) -> str:
    """SHA-256 of all parameters: what a measurement of the model is kept under."""
    found = hashlib.sha256()
    for name, parameter in sorted(model.named_parameters()):
        found.update(name.encode())
        found.update(parameter.detach().cpu().float().numpy().tobytes())
    return found.hexdigest()


def count_parameters(model: nn.Module) -> int:
    """Numbers in all weights, trained or frozen."""
    return sum(p.numel() for p in model.parameters())


def describe_size(model: nn.Module) -> str:
    """``260,096 parameters``, and how many of them are trained where some are frozen."""
    total = count_parameters(model)
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    return f"{total:,} parameters" + ("" if trained == total else f" ({trained:,} trained)")
