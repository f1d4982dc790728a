"""A masked diffusion language model exported from bellmask; needs torch and transformers only.

Given a row with masked tokens, it returns logits for the token at every mask. A DiT: layer
norms with weight only, shift, scale and gate vectors (constants, or AdaLN of the time t), RoPE over
the whole head, attention in both directions. The mask itself is never predicted.

B batch, L length, D width, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import MaskedLMOutput

# bellmask/model/dit.py, of which an export has a copy
from .dit import Block, LocalConv, ModulatedNorm, Modulation, TimeEmbedding, rotary_table


class BellmaskConfig(PretrainedConfig):
    """Sizes and conventions of the network; ids are those of the exported tokenizer."""

    model_type = "bellmask"

    def __init__(self, **kwargs: Any) -> None:
        sizes = {"vocab_size": 260, "hidden_size": 64, "intermediate_size": 256}
        sizes |= {"num_hidden_layers": 3, "num_attention_heads": 4, "max_position_embeddings": 64}
        sizes |= {"local_conv": 0}
        kind = {"modulation": "constant", "time_input": "stretched", "schedule": "linear"}
        ids = {"mask_token_id": 259, "tie_word_embeddings": False}
        super().__init__(**{**sizes, **kind, **ids, **kwargs})


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
        self.local_conv = LocalConv(width, config.local_conv) if config.local_conv else None
        self.time_embedding = TimeEmbedding(config.time_input) if has_time else None
        sizes = (width, config.num_attention_heads, config.intermediate_size)
        self.blocks = nn.ModuleList(
            Block(*sizes, has_time=has_time) for _ in range(config.num_hidden_layers)
        )
        self.final_modulation = Modulation(has_time, width, 2)
        self.final_norm = ModulatedNorm(width)
        self.head = nn.Linear(width, config.vocab_size)
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
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
        with time input only; it defaults to the fraction of masked tokens. ``labels`` [B, L]
        with -100 where nothing is scored give the mean cross-entropy.
        """
        x = self.embedding(input_ids)
        condition = None
        if self.time_embedding is not None:
            times = self._times(input_ids, attention_mask) if t is None else t
            condition = self.time_embedding(times)
        size = self.config.hidden_size // self.config.num_attention_heads
        rotary = rotary_table([torch.arange(input_ids.shape[1], device=x.device)], size)
        mask = self._mask(attention_mask)
        if self.local_conv is not None:
            x = self.local_conv(x, mask)
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
