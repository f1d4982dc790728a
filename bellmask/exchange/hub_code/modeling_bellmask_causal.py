"""A masked diffusion model adapted from a causal language model, exported from bellmask; needs
torch and transformers only.

Given a row with masked tokens, it returns logits for the token at every mask. It wraps a causal LM
with bidirectional attention. The output at position i - 1 predicts token i, as in causal training;
``forward`` shifts, so that the logits at i predict token i. Position 0 is never predicted: keep it
visible (BOS); its logits are all 0. The mask is never predicted.

B batch, L length, D width, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import MaskedLMOutput

# bellmask/model/dit.py, of which an export has a copy
from .dit import LocalConv  # type: ignore[import-not-found]


class BellmaskCausalConfig(PretrainedConfig):
    """The causal LM's own config, and which ids are special; ids are those of the tokenizer."""

    model_type = "bellmask_causal"
    sub_configs = {"text_config": AutoConfig}  # noqa: RUF012

    def __init__(self, text_config: Any = None, **kwargs: Any) -> None:
        """``silent_token_ids`` are never predicted: the mask, and a pad that the causal LM lacks.

        ``has_windows``: some of its layers look at near tokens only, until a mask opens them.
        """
        if not isinstance(text_config, PretrainedConfig):
            text_config = AutoConfig.for_model(**(text_config or {"model_type": "gpt2"}))
        self.text_config = text_config
        special = {"mask_token_id": 0, "silent_token_ids": [], "has_windows": False}
        special |= {"local_conv": 0}
        # the causal LM inside ties its own rows, where it does
        super().__init__(**{**special, "tie_word_embeddings": False, **kwargs})

    @property
    def vocab_size(self) -> int:
        """Rows of the embedding, the mask's included."""
        return self.text_config.vocab_size


class BellmaskCausalForMaskedLM(PreTrainedModel):
    """Masked rows → logits at every position."""

    config_class = BellmaskCausalConfig
    base_model_prefix = ""
    supports_gradient_checkpointing = True
    _supports_sdpa = True

    def __init__(self, config: BellmaskCausalConfig) -> None:
        super().__init__(config)
        self.language_model = AutoModelForCausalLM.from_config(config.text_config)
        width = self.language_model.get_input_embeddings().weight.shape[1]
        self.mask_row = nn.Parameter(torch.zeros(width))
        self.local_conv = LocalConv(width, config.local_conv) if config.local_conv else None
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        """The token embedding; the mask's row of it is not read."""
        return self.language_model.get_input_embeddings()

    def set_input_embeddings(self, value: nn.Module) -> None:
        """Put another one in its place."""
        self.language_model.set_input_embeddings(value)

    def get_output_embeddings(self) -> nn.Module:
        return self.language_model.get_output_embeddings()

    def set_output_embeddings(self, value: nn.Module) -> None:
        """Put another one in its place."""
        self.language_model.set_output_embeddings(value)

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        return_dict: bool | None = None,
        **_: Any,
    ) -> MaskedLMOutput | tuple[Tensor, ...]:
        """Logits [B, L, V], at position i for token i; minus infinity for tokens that are never
        predicted.

        ``attention_mask`` [B, L] hides keys (padding, on the right), [B, L, L] pairs. ``labels``
        [B, L] with -100 where nothing is scored give the mean cross-entropy; position 0, which is
        never predicted, is not scored.
        """
        h = self._hidden(input_ids, attention_mask)
        later = self.get_output_embeddings()(h[:, :-1])
        first = later.new_zeros(len(later), 1, later.shape[-1])
        logits = torch.cat([first, later], dim=1)
        is_silent = torch.zeros(logits.shape[-1], dtype=torch.bool, device=logits.device)
        is_silent[self.config.silent_token_ids] = True
        logits = logits.masked_fill(is_silent, float("-inf"))
        loss = None
        if labels is not None:
            scores, wanted = logits[:, 1:].flatten(0, 1).float(), labels[:, 1:].flatten()
            loss = F.cross_entropy(scores, wanted)
        if return_dict is False:
            return (logits,) if loss is None else (loss, logits)
        return MaskedLMOutput(loss=loss, logits=logits)  # type: ignore[arg-type]

    def _hidden(self, input_ids: Tensor, attention_mask: Tensor | None) -> Tensor:
        x = self.get_input_embeddings()(input_ids)
        is_mask = (input_ids == self.config.mask_token_id)[..., None]
        x = torch.where(is_mask, self.mask_row.to(x.dtype), x)
        if self.local_conv is not None:
            seen = None if attention_mask is None else _four_axes(attention_mask)
            x = self.local_conv(x, seen)
        how = self._attention(input_ids, attention_mask, x.dtype)
        return self.language_model.base_model(
            inputs_embeds=x, use_cache=False, **how
        ).last_hidden_state

    def _attention(
        self, input_ids: Tensor, attention_mask: Tensor | None, dtype: torch.dtype
    ) -> dict[str, Any]:
        """Arguments for bidirectional attention: a switch, or a mask if a switch is not enough."""
        is_sdpa = self.language_model.config._attn_implementation == "sdpa"
        is_plain = attention_mask is None or bool(attention_mask.all())
        if is_plain and is_sdpa and not self.config.has_windows:
            return {"is_causal": False}
        seen = _four_axes(torch.ones_like(input_ids) if attention_mask is None else attention_mask)
        if is_sdpa:
            return {"attention_mask": seen}
        hidden = torch.zeros(seen.shape, dtype=dtype, device=seen.device)
        return {"attention_mask": hidden.masked_fill(~seen, torch.finfo(dtype).min)}


def _four_axes(attention_mask: Tensor) -> Tensor:
    """[B, 1, 1 or L, L], True where seen."""
    seen = attention_mask.bool()
    return seen[:, None, None, :] if seen.ndim == 2 else seen[:, None]
