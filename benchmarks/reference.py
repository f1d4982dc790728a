"""A plain training step that does the same work as mdlm's public code: the reference for ours.

Logits of every position, a normalized log-probability tensor [B, L, V] in which visible tokens are
carried over, AdaLN matrices fed with a constant (time conditioning is off, as in mdlm's language
models), layer norm and modulation as separate operations, unfused AdamW, a Python loop for the
moving average. Attention is SDPA, as here no flash-attention extension can run.

B batch, L length, V vocabulary with the mask as its last token, D width.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bellmask.config.options import ModelOptions

NEVER = -1e6
CONDITION_WIDTH = 128
NUM_SINUSOIDS = 256
EMA_DECAY = 0.9999


class PlainNorm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x.float(), self.weight.shape) * self.weight


def modulate(x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    return x * (1 + scale) + shift


def zero_linear(inputs: int, outputs: int) -> nn.Linear:
    layer = nn.Linear(inputs, outputs)
    nn.init.zeros_(layer.weight)
    nn.init.zeros_(layer.bias)
    return layer


def rotate_all(x_BLHE: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = x_BLHE.shape[-1] // 2
    turned = torch.cat([-x_BLHE[..., half:], x_BLHE[..., :half]], dim=-1)
    return x_BLHE * cos + turned * sin


class PlainBlock(nn.Module):
    def __init__(self, options: ModelOptions) -> None:
        super().__init__()
        width = options.width
        self.heads, self.dropout = options.num_heads, options.dropout
        self.norm_1, self.norm_2 = PlainNorm(width), PlainNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.mlp = nn.Sequential(
            nn.Linear(width, options.mlp_ratio * width),
            nn.GELU(approximate="tanh"),
            nn.Linear(options.mlp_ratio * width, width),
        )
        self.adaln = zero_linear(CONDITION_WIDTH, 6 * width)

    def forward(self, x: Tensor, rotary: tuple[Tensor, Tensor], condition: Tensor) -> Tensor:
        batch, length, width = x.shape
        parts = self.adaln(condition)[:, None].chunk(6, dim=2)
        shift_1, scale_1, gate_1, shift_2, scale_2, gate_2 = parts
        qkv = self.qkv(modulate(self.norm_1(x), shift_1, scale_1))
        q, k, v = qkv.view(batch, length, 3, self.heads, width // self.heads).unbind(2)
        q, k = (rotate_all(part, *rotary) for part in (q, k))
        q, k, v = (part.transpose(1, 2) for part in (q, k, v))
        seen = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(batch, length, width)
        x = x + gate_1 * F.dropout(self.out(seen), self.dropout, self.training)
        hidden = self.mlp(modulate(self.norm_2(x), shift_2, scale_2))
        return x + gate_2 * F.dropout(hidden, self.dropout, self.training)


class PlainDenoiser(nn.Module):
    """Tokens → logits of every position, the mask's included."""

    def __init__(self, options: ModelOptions, num_tokens: int) -> None:
        super().__init__()
        self.mask_id = num_tokens
        self.head_size = options.width // options.num_heads
        self.embedding = nn.Parameter(torch.empty(num_tokens + 1, options.width))
        nn.init.kaiming_uniform_(self.embedding, a=math.sqrt(5))
        self.time_in = nn.Linear(NUM_SINUSOIDS, CONDITION_WIDTH)
        self.time_out = nn.Linear(CONDITION_WIDTH, CONDITION_WIDTH)
        self.blocks = nn.ModuleList(PlainBlock(options) for _ in range(options.num_layers))
        self.norm = PlainNorm(options.width)
        self.adaln = zero_linear(CONDITION_WIDTH, 2 * options.width)
        self.head = zero_linear(options.width, num_tokens + 1)

    def forward(self, x_BL: Tensor) -> Tensor:
        condition = self._condition(len(x_BL))
        rotary = self._rotary(x_BL.shape[1])
        h = self.embedding[x_BL]
        for block in self.blocks:
            h = block(h, rotary, condition)
        shift, scale = self.adaln(condition)[:, None].chunk(2, dim=2)
        return self.head(modulate(self.norm(h), shift, scale))

    def _condition(self, batch: int) -> Tensor:
        """The embedding of time zero, for every row: the constant the AdaLN matrices see."""
        half = NUM_SINUSOIDS // 2
        angle = torch.zeros(batch, half) * torch.exp(-math.log(1e4) * torch.arange(half) / half)
        waves = torch.cat([angle.cos(), angle.sin()], dim=1)
        return F.silu(self.time_out(F.silu(self.time_in(waves))))

    def _rotary(self, length: int) -> tuple[Tensor, Tensor]:
        rate = 1e4 ** (-torch.arange(0, self.head_size, 2) / self.head_size)
        angle = torch.arange(length)[:, None] * rate
        angle = torch.cat([angle, angle], dim=-1)[None, :, None]
        return angle.cos(), angle.sin()


def log_probabilities(logits_BLV: Tensor, xt_BL: Tensor, mask_id: int) -> Tensor:
    """Normalized over tokens that are not the mask; a visible token predicts itself."""
    logits_BLV[:, :, mask_id] += NEVER
    log_p = logits_BLV - torch.logsumexp(logits_BLV, dim=-1, keepdim=True)
    is_visible = xt_BL != mask_id
    log_p[is_visible] = NEVER
    log_p[is_visible, xt_BL[is_visible]] = 0
    return log_p


class ReferenceStep:
    """Forward, backward, clipping, update, average: one step of the plain implementation."""

    def __init__(self, options: ModelOptions, num_tokens: int, ema: float = EMA_DECAY) -> None:
        self.model, self.ema, self.num_updates = PlainDenoiser(options, num_tokens), ema, 0
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=3e-4, weight_decay=0.0, foreach=False, fused=False
        )
        self.average = [p.detach().clone() for p in self.model.parameters()]

    def loss(self, x0_BL: Tensor, u_BL: Tensor, t_B: Tensor, weight_B: Tensor) -> Tensor:
        mask_id = self.model.mask_id
        xt_BL = torch.where(u_BL < t_B[:, None], mask_id, x0_BL)
        log_p = log_probabilities(self.model(xt_BL), xt_BL, mask_id)
        ce_BL = -log_p.gather(-1, x0_BL[:, :, None]).squeeze(-1)
        return (ce_BL * weight_B[:, None]).sum() / x0_BL.numel()

    def __call__(self, x0_BL: Tensor, u_BL: Tensor, t_B: Tensor, weight_B: Tensor) -> float:
        loss = self.loss(x0_BL, u_BL, t_B, weight_B)
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.num_updates += 1
        decay = min(self.ema, (1 + self.num_updates) / (10 + self.num_updates))
        with torch.no_grad():
            for kept, now in zip(self.average, self.model.parameters(), strict=True):
                kept.sub_((1 - decay) * (kept - now))
        return float(loss.detach())

    def set_rate(self, lr: float) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = lr

    @contextmanager
    def averaged(self) -> Iterator[PlainDenoiser]:
        """Within: the model has the averaged weights."""
        now = [p.detach().clone() for p in self.model.parameters()]
        self._set_weights(self.average)
        self.model.eval()
        try:
            yield self.model
        finally:
            self._set_weights(now)
            self.model.train()

    @torch.no_grad()
    def _set_weights(self, weights: list[Tensor]) -> None:
        for parameter, weight in zip(self.model.parameters(), weights, strict=True):
            parameter.copy_(weight)
