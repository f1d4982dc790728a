"""A masked diffusion language model exported from bellmask; needs torch and transformers only.

Given a row with some tokens masked it returns logits of what stands behind every mask. A DiT: layer
norms with weight only, shift, scale and gate vectors (constants, or AdaLN of the time t), RoPE over
the whole head, attention in both directions. The mask itself is never predicted.

B batch, L length, D width, V vocabulary.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import MaskedLMOutput

ROPE_BASE = 10_000.0
NUM_SINUSOIDS, CONDITION_WIDTH = 256, 128


class BellmaskConfig(PretrainedConfig):
    """Sizes and conventions of the network; ids are those of the tokenizer beside it."""

    model_type = "bellmask"

    def __init__(self, **kwargs: Any) -> None:
        sizes = {"vocab_size": 260, "hidden_size": 64, "intermediate_size": 256}
        sizes |= {"num_hidden_layers": 3, "num_attention_heads": 4, "max_position_embeddings": 64}
        kind = {"modulation": "constant", "time_input": "stretched", "schedule": "linear"}
        ids = {"mask_token_id": 259, "tie_word_embeddings": False}
        super().__init__(**{**sizes, **kind, **ids, **kwargs})


class TimeEmbedding(nn.Module):
    """t → sinusoids of 1000 t or of mdlm's sigma → 128 → SiLU → 128 → SiLU."""

    def __init__(self, time_input: str) -> None:
        super().__init__()
        self.is_sigma = time_input == "sigma"
        self.into = nn.Linear(NUM_SINUSOIDS, CONDITION_WIDTH)
        self.out = nn.Linear(CONDITION_WIDTH, CONDITION_WIDTH)

    def forward(self, t_B: Tensor) -> Tensor:
        """[B, 128]."""
        half = NUM_SINUSOIDS // 2
        rate = torch.exp(-math.log(1e4) / half * torch.arange(half, device=t_B.device))
        t_B = t_B.float()
        fed = -torch.log((1 - t_B) + 1e-3 * t_B) if self.is_sigma else t_B * 1000.0
        angle = fed[:, None] * rate
        waves = torch.cat([angle.cos(), angle.sin()], dim=1).to(self.into.weight.dtype)
        return F.silu(self.out(F.silu(self.into(waves))))


class Modulation(nn.Module):
    """Shift, scale and gate vectors: learned constants, or a linear map of the time's embedding."""

    def __init__(self, kind: str, width: int, num_vectors: int) -> None:
        super().__init__()
        self.num_vectors = num_vectors
        if kind == "time":
            self.linear = nn.Linear(CONDITION_WIDTH, num_vectors * width)
        else:
            self.vectors = nn.Parameter(torch.zeros(num_vectors, width))

    def forward(self, condition: Tensor | None) -> tuple[Tensor, ...]:
        """Vectors of shape [D] or [B, 1, D]."""
        if condition is None:
            return self.vectors.unbind(0)
        return self.linear(condition)[:, None].chunk(self.num_vectors, dim=-1)


class ModulatedNorm(nn.Module):
    """Layer norm with weight only, then x * (1 + scale) + shift."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
        """Constants go into the layer norm's own weight and bias."""
        if shift.ndim == 1:
            return F.layer_norm(x, self.weight.shape, self.weight * (1 + scale), shift)
        return F.layer_norm(x, self.weight.shape, self.weight) * (1 + scale) + shift


class Block(nn.Module):
    """Attention and MLP, each normed, modulated, gated and added."""

    def __init__(self, config: BellmaskConfig) -> None:
        super().__init__()
        width, hidden = config.hidden_size, config.intermediate_size
        self.num_heads = config.num_attention_heads
        self.modulation = Modulation(config.modulation, width, 6)
        self.attention_norm = ModulatedNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.attention_out = nn.Linear(width, width, bias=False)
        self.mlp_norm = ModulatedNorm(width)
        self.mlp_in = nn.Linear(width, hidden)
        self.mlp_out = nn.Linear(hidden, width)

    def forward(
        self,
        x: Tensor,
        rotary: tuple[Tensor, Tensor],
        mask: Tensor | None,
        condition: Tensor | None,
    ) -> Tensor:
        """[B, L, D]."""
        shift_a, scale_a, gate_a, shift_m, scale_m, gate_m = self.modulation(condition)
        seen = self._attention(self.attention_norm(x, shift_a, scale_a), rotary, mask)
        x = x + gated(self.attention_out, seen, gate_a)
        hidden = F.gelu(self.mlp_in(self.mlp_norm(x, shift_m, scale_m)), approximate="tanh")
        return x + gated(self.mlp_out, hidden, gate_m)

    def _attention(self, x: Tensor, rotary: tuple[Tensor, Tensor], mask: Tensor | None) -> Tensor:
        batch, length, width = x.shape
        qkv = self.qkv(x).view(batch, length, 3, self.num_heads, width // self.num_heads)
        q, k, v = (part.transpose(1, 2) for part in qkv.unbind(2))
        out = F.scaled_dot_product_attention(turned(q, rotary), turned(k, rotary), v, mask)
        return out.transpose(1, 2).flatten(2)


def gated(layer: nn.Linear, inner: Tensor, gate: Tensor) -> Tensor:
    """Gate * layer(inner); a constant gate goes into the weight."""
    if gate.ndim > 1:
        return gate * layer(inner)
    bias = None if layer.bias is None else gate * layer.bias
    return F.linear(inner, gate[:, None] * layer.weight, bias)


def rotary_table(length: int, head_size: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """Cos and sin of RoPE's angles, [L, E/2]."""
    exponent = torch.arange(0, head_size, 2, device=like.device, dtype=torch.float32)
    place = torch.arange(length, device=like.device, dtype=torch.float32)
    angle = place[:, None] * ROPE_BASE ** (-exponent / head_size)
    return angle.cos().to(like.dtype), angle.sin().to(like.dtype)


def turned(x_BHLE: Tensor, table: tuple[Tensor, Tensor]) -> Tensor:
    """The pairs (i, i + E/2) turned by their position's angles."""
    cos, sin = table
    left, right = x_BHLE.chunk(2, dim=-1)
    return torch.cat([left * cos - right * sin, right * cos + left * sin], dim=-1)


class BellmaskForMaskedLM(PreTrainedModel):
    """Masked rows → logits at every position."""

    config_class = BellmaskConfig
    base_model_prefix = ""
    _supports_sdpa = True
    _no_split_modules = ["Block"]  # noqa: RUF012

    def __init__(self, config: BellmaskConfig) -> None:
        super().__init__(config)
        width = config.hidden_size
        has_time = config.modulation == "time"
        self.embedding = nn.Embedding(config.vocab_size, width)
        self.time_embedding = TimeEmbedding(config.time_input) if has_time else None
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.num_hidden_layers))
        self.final_modulation = Modulation(config.modulation, width, 2)
        self.final_norm = ModulatedNorm(width)
        self.head = nn.Linear(width, config.vocab_size)
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        """The token embedding."""
        return self.embedding

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        t: Tensor | None = None,
        labels: Tensor | None = None,
        return_dict: bool | None = None,
        **_: Any,
    ) -> MaskedLMOutput | tuple[Tensor, ...]:
        """Logits [B, L, V]; the mask's is minus infinity.

        ``attention_mask`` [B, L] hides keys (padding), [B, L, L] pairs. ``t`` [B] is read by models
        with time input only; without it the share of masked tokens is taken. ``labels`` [B, L]
        with -100 where nothing is scored give the mean cross-entropy.
        """
        x = self.embedding(input_ids)
        condition = None
        if self.time_embedding is not None:
            times = self._times(input_ids, attention_mask) if t is None else t
            condition = self.time_embedding(times)
        size = self.config.hidden_size // self.config.num_attention_heads
        rotary = rotary_table(input_ids.shape[1], size, x)
        mask = self._mask(attention_mask)
        for block in self.blocks:
            x = block(x, rotary, mask, condition)
        logits = self.head(self.final_norm(x, *self.final_modulation(condition)))
        is_mask = torch.arange(logits.shape[-1], device=logits.device) == self.config.mask_token_id
        logits = logits.masked_fill(is_mask, float("-inf"))
        loss = None
        if labels is not None:
            loss = F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())
        if return_dict is False:
            return (logits,) if loss is None else (loss, logits)
        return MaskedLMOutput(loss=loss, logits=logits)  # type: ignore[arg-type]

    def _mask(self, attention_mask: Tensor | None) -> Tensor | None:
        if attention_mask is None or bool(attention_mask.all()):
            return None
        seen = attention_mask.bool()
        return seen[:, None, None, :] if seen.ndim == 2 else seen[:, None]

    def _times(self, input_ids: Tensor, attention_mask: Tensor | None) -> Tensor:
        """The time at which the linear schedule masks as many tokens as are masked."""
        if self.config.schedule != "linear":
            raise ValueError(f"give t [B]: the {self.config.schedule} schedule's is not known here")
        is_masked = (input_ids == self.config.mask_token_id).float()
        if attention_mask is None or attention_mask.ndim != 2:
            return is_masked.mean(1)
        real = attention_mask.float()
        return (is_masked * real).sum(1) / real.sum(1).clamp(min=1)
