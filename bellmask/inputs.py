"""What a run reads: blocks of text, or prompts with responses, as its network can be asked them."""

from __future__ import annotations

from dataclasses import replace

from bellmask.config import RunConfig
from bellmask.data.example_blocks import load_example_blocks
from bellmask.data.prepare import LoadedData, load_data
from bellmask.data.tokenizer import Tokenizer
from bellmask.data.writing import OnProgress
from bellmask.runfolder import Backbone


def load_inputs(
    config: RunConfig,
    tokenizer: Tokenizer,
    backbone: Backbone | None = None,
    on_progress: OnProgress | None = None,
) -> LoadedData:
    """Training and validation blocks; where a causal LM predicts, position 0 is given."""
    first = 0 if config.model.backbone == "dit" else 1
    if config.sft.train is None:
        data = load_data(config.data, tokenizer, on_progress)
    else:
        template = None if backbone is None else backbone.chat_template
        data = LoadedData(
            *load_example_blocks(
                config.data, config.sft, tokenizer, template, on_progress, bos_first=first == 1
            )
        )
    return replace(data, train=data.train.starting_at(first), valid=data.valid.starting_at(first))
