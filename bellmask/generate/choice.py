"""Which token, given the logits: temperature, top-k, top-p, and noise that belongs to the sample.

N rows, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from bellmask.model.head import CHUNK_ROWS
from bellmask.utils.rng import uniform


@dataclass(frozen=True)
class Choice:
    """How a token is drawn from its logits."""

    temperature: float = 1.0
    """Divides the logits; 0 takes the most likely token."""
    top_k: int | None = None
    """Only the k most likely tokens, and those as likely as the k-th."""
    top_p: float | None = None
    """Only the smallest set of most likely tokens that has this much probability."""
    dtype: torch.dtype = torch.float64
    """Of the noise. float32 noise cannot reach the tail and lowers the effective temperature."""

    def draw(self, logits_NV: Tensor, counters_N: Tensor, key: int) -> Tensor:
        """One token per row by the Gumbel trick, its noise keyed by the row's counter."""
        if self.temperature == 0:
            return logits_NV.argmax(dim=1)
        device, num_tokens = logits_NV.device, logits_NV.shape[1]
        column = torch.arange(num_tokens, device=device)
        smallest, largest = torch.finfo(self.dtype).tiny, 1 - torch.finfo(self.dtype).eps
        chosen = []
        for logits, counters in zip(
            logits_NV.split(CHUNK_ROWS), counters_N.to(device).split(CHUNK_ROWS), strict=True
        ):
            u = uniform(key, counters[:, None] * num_tokens + column).to(self.dtype)
            noise = -torch.log(-torch.log(u.clamp(smallest, largest)))
            chosen.append((self._scaled(logits) + noise).argmax(dim=1))
        return torch.cat(chosen)

    def _scaled(self, logits_NV: Tensor) -> Tensor:
        """Logits over temperature, -inf for what top-k and then top-p leave out."""
        scaled = logits_NV.to(self.dtype) / self.temperature
        if self.top_k is not None and self.top_k < scaled.shape[1]:
            last = scaled.topk(self.top_k, dim=1).values[:, -1:]
            scaled = scaled.masked_fill(scaled < last, -torch.inf)
        if self.top_p is not None and self.top_p < 1:
            ordered, place = scaled.sort(dim=1, descending=True, stable=True)
            p = ordered.softmax(dim=1)
            is_out = p.cumsum(dim=1) - p >= self.top_p  # what is likelier has enough already
            scaled = scaled.masked_fill(
                torch.zeros_like(is_out).scatter(1, place, is_out), -torch.inf
            )
        return scaled
