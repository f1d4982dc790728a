"""Configuration of a masked diffusion language model exported from bellmask."""

from __future__ import annotations

from typing import Any

from transformers import PretrainedConfig


class BellmaskConfig(PretrainedConfig):
    """Sizes and conventions of the network; ids are those of the tokenizer beside it."""

    model_type = "bellmask"

    def __init__(
        self,
        vocab_size: int = 260,
        hidden_size: int = 64,
        num_hidden_layers: int = 3,
        num_attention_heads: int = 4,
        intermediate_size: int = 256,
        max_position_embeddings: int = 64,
        modulation: str = "constant",
        time_input: str = "stretched",
        schedule: str = "linear",
        mask_token_id: int = 259,
        **kwargs: Any,
    ) -> None:
        self.vocab_size = vocab_size
        self.hidden_size = hidden_size
        self.num_hidden_layers = num_hidden_layers
        self.num_attention_heads = num_attention_heads
        self.intermediate_size = intermediate_size
        self.max_position_embeddings = max_position_embeddings
        self.modulation = modulation
        self.time_input = time_input
        self.schedule = schedule
        self.mask_token_id = mask_token_id
        kwargs.setdefault("tie_word_embeddings", False)
        super().__init__(**kwargs)
