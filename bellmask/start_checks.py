"""Combinations of --start and --sft options that cannot work; see :mod:`bellmask.checks`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from bellmask.options import DataOptions
from bellmask.stage_options import SftOptions, StartOptions

if TYPE_CHECKING:
    from bellmask.config import RunConfig

FROM_START = "start"
"""What ``data.tokenizer`` says where the tokenizer came with the weights."""


def check_start(config: RunConfig) -> Iterator[str]:
    """What is wrong with where the weights come from."""
    start, plain = config.start, StartOptions()
    if start.model is not None and start.architecture is not None:
        yield "start.model brings its own architecture: leave start.architecture out"
    if "" in (start.model, start.architecture):
        yield "start.model and start.architecture must not be empty; leave them out instead"
    if start.anneal_steps < 1:
        yield f"start.anneal_steps={start.anneal_steps} must be at least 1"
    if start.lora_rank < 0 or start.lora_alpha <= 0:
        yield "start.lora_rank must not be negative, start.lora_alpha must be above 0"
    if start.lora_alpha != plain.lora_alpha and not start.lora_rank:
        yield "start.lora_alpha belongs to start.lora_rank"
    if start.model is None:
        for name in ("checkpoint", "mask_token", "lora_rank", "fresh"):
            if getattr(start, name) != getattr(plain, name):
                yield f"start.{name} needs start.model"
        if config.data.tokenizer == FROM_START:
            yield "data.tokenizer=start needs start.model"
    elif start.fresh and start.mask_token is not None:
        yield "start.mask_token names a row of pretrained weights: it does not go with start.fresh"
    elif config.data.tokenizer not in (DataOptions.tokenizer, FROM_START):
        yield (
            f"data.tokenizer={config.data.tokenizer}: the tokenizer comes with start.model; leave "
            "it out"
        )
    is_own = start.model is None and start.architecture is None
    if is_own and start.anneal_steps != 1:
        yield "start.anneal_steps opens a causal LM: it needs start.model or start.architecture"
    if is_own and config.model.backbone != "dit":
        yield f"model.backbone={config.model.backbone} needs start.model or start.architecture"
    if config.model.backbone == "causal_lm" or start.architecture is not None:
        yield from _causal_lm(config)


def _causal_lm(config: RunConfig) -> Iterator[str]:
    """What a pretrained backbone cannot do."""
    name = config.framework.name
    if name not in ("mdm", "arm"):
        yield f"framework {name} needs our own trunk; a causal LM can be mdm or arm"
    if name == "arm" and config.start.anneal_steps != 1:
        yield "start.anneal_steps opens attention; framework arm keeps it causal"
    if config.model.modulation != "constant":
        yield "model.modulation=time needs our own trunk: a causal LM is not told times"
    if config.data.pads == "noised":
        yield "data.pads=noised is for our own trunk"
    if config.data.tokenizer.startswith("symbols:"):
        yield f"data.tokenizer={config.data.tokenizer} has no BOS, which a causal LM begins with"
    if config.data.block_length < 2:
        yield "a causal LM predicts from what is before: data.block_length must be at least 2"


def check_sft(config: RunConfig) -> Iterator[str]:
    """What is wrong with fine-tuning on prompts and responses."""
    sft = config.sft
    if sft.min_masks not in (0, 1):
        yield f"sft.min_masks={sft.min_masks} must be 0 or 1"
    if sft.round_to < 1:
        yield f"sft.round_to={sft.round_to} must be at least 1"
    if sft.train is None:
        if sft != replace(SftOptions(), min_masks=sft.min_masks, round_to=sft.round_to):
            yield "the other --sft options need --sft.train, the examples"
        elif (sft.min_masks, sft.round_to) != (0, SftOptions.round_to):
            yield "--sft.min-masks and --sft.round-to need --sft.train, the examples"
        return
    if sft.counts and "tasks" not in [str(name).split(":")[0] for name in (sft.train, sft.valid)]:
        yield "sft.counts are those of --sft.train tasks"
    is_own = config.start.model is None and config.start.architecture is None
    if is_own and config.framework.name != "mdm":
        yield f"prompts and responses are for framework mdm, not {config.framework.name}"
    if sft.min_masks and config.framework.name != "mdm":
        yield "sft.min_masks is about masks, and a causal framework has none"
    if sft.train is not None and config.data.valid is not None:
        yield "data.valid is text; held-out examples are --sft.valid"
    plain = DataOptions()
    for name in ("packing", "wrap", "insert_eos", "remainder"):
        if getattr(config.data, name) != getattr(plain, name):
            yield f"data.{name} is for text in blocks, not for prompts and responses"
    for name, is_given in (
        ("data.mixture", bool(config.data.mixture)),
        ("data.document_attention", config.data.document_attention),
        ("data.pads=noised", config.data.pads == "noised"),
        ("train.random_length_fraction", config.train.random_length_fraction > 0),
    ):
        if is_given:
            yield f"{name} is for text in blocks, not for prompts and responses"
