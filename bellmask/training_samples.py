"""Samples written while a run trains: free text, or answers to the first validation prompts."""

from __future__ import annotations

import torch

from bellmask.config.config import RunConfig
from bellmask.data.blocks import Blocks
from bellmask.data.tokenizers import Tokenizer
from bellmask.diffusion.frameworks import Framework
from bellmask.generate.canvas import begin_canvas, empty_canvas
from bellmask.generate.fill import fill
from bellmask.generate.settings import Sampling
from bellmask.storage.build import Network

SEPARATOR = "\n\n--------\n\n"


def training_samples(
    model: Network,
    config: RunConfig,
    tokenizer: Tokenizer,
    framework: Framework,
    valid: Blocks,
    device: torch.device,
) -> str:
    """``validation.num_samples`` texts, from the same noise each time."""
    options = config.validation
    is_real_BL = None
    if config.sft.train is None:
        length = config.data.block_length - model.first_maskable
        canvas = empty_canvas(tokenizer, length)
        canvas = begin_canvas(canvas, tokenizer) if model.first_maskable else canvas
        x_BL = canvas.repeat(options.num_samples)
    else:
        rows = slice(0, options.num_samples)
        place = torch.arange(valid.block_length)
        is_real_BL = place < valid.row_lengths(rows)[:, None]
        is_given_BL = place < valid.row_starts(rows)[:, None]
        x_BL = torch.where(is_real_BL & ~is_given_BL, tokenizer.mask_id, valid.rows(rows))
    made = fill(
        model,
        x_BL,
        framework,
        Sampling(steps=None if framework.is_causal else options.sample_steps),
        mask_id=tokenizer.mask_id,
        is_real_BL=is_real_BL,
        seed=options.seed,
        device=device,
    )
    return SEPARATOR.join(tokenizer.decode(row.numpy()) for row in made.ids_BL) + "\n"
