"""Combinations of options that cannot work, found before anything starts.

Each problem says what was given, what is allowed and what to change.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from bellmask.config.options import (
    DataOptions,
    Interval,
    LawOptions,
    ObjectiveOptions,
    OptimOptions,
    ScheduleOptions,
    SftOptions,
    StartOptions,
)

if TYPE_CHECKING:
    from bellmask.config.config import RunConfig

# Options of --start and --sft

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


# All other options

MOST = 2**53
"""Of whole numbers in general; what would only fill memory is limited further."""
_MOST = {
    "train.steps": 999_999_999,  # names of checkpoints have nine digits
    "train.batch_size": 2**31,
    "data.block_length": 2**24,
    "model.num_layers": 10_000,
    "model.width": 2**20,
    "model.num_heads": 2**20,
    "model.mlp_ratio": 1024,
    "validation.draws": 2**31,
    "validation.batch_size": 2**31,
}


def _shown(value: int) -> str:
    """A number, in full only where that has an end."""
    return str(value) if abs(value) < 10**30 else "a number of very many digits"


def find_problems(config: RunConfig) -> list[str]:
    """All that is wrong with a config, one sentence each; empty when nothing is."""
    parts = (_numbers, _data, _model, _framework, _times, _schedule, _objective, _train, _intervals)
    return [problem for find in (*parts, check_start, check_sft) for problem in find(config)]


def _numbers(config: RunConfig) -> Iterator[str]:
    at_least_one = (
        "data.block_length model.num_layers model.width model.num_heads model.mlp_ratio "
        "train.steps train.batch_size validation.draws validation.batch_size log.every "
        "checkpoint.keep_last validation.num_samples validation.sample_steps"
    )
    not_negative = (
        "optim.lr optim.warmup_steps optim.final_lr optim.eps optim.weight_decay optim.clip "
        "validation.blocks checkpoint.keep_every train.seed validation.seed train.skip_limit"
    )
    shares = "model.dropout optim.ema optim.momentum objective.time_floor"
    flat = config.flat()
    for name in at_least_one.split():
        if flat[name] < 1:
            yield f"{name}={flat[name]} must be at least 1"
    for name, value in flat.items():
        most = _MOST.get(name, MOST)
        if type(value) is int and abs(value) > most:
            yield f"{name}={_shown(value)} is more than {most:,}"
        if isinstance(value, str) and "\0" in value:
            yield f"{name}={value!r} holds a null character"
    for name in not_negative.split():
        if not (flat[name] >= 0 and math.isfinite(flat[name])):
            yield f"{name}={flat[name]} must be a finite number that is not negative"
    for name in shares.split():
        if not 0 <= flat[name] < 1:
            yield f"{name}={flat[name]} must be at least 0 and below 1"
    for beta in config.optim.betas:
        if not 0 <= beta < 1:
            yield f"optim.betas={config.optim.betas}: each must be at least 0 and below 1"


def _data(config: RunConfig) -> Iterator[str]:
    data = config.data
    if not 0 < data.valid_fraction < 1:
        yield f"data.valid_fraction={data.valid_fraction} must be between 0 and 1"
    if data.wrap and data.block_length < 3:
        yield f"data.wrap needs data.block_length of at least 3, got {data.block_length}"
    if data.document_attention and data.packing == "unpacked":
        yield "data.document_attention is for packed rows: an unpacked one holds a single document"
    if data.document_attention and data.insert_eos is False:
        yield "data.document_attention tells documents apart by EOS: it needs data.insert_eos"
    if data.packing == "unpacked" and data.remainder == "keep":
        yield "data.remainder belongs to data.packing=packed: unpacked rows leave no remainder"


def _model(config: RunConfig) -> Iterator[str]:
    width, heads = config.model.width, config.model.num_heads
    is_own = config.start.model is None and config.start.architecture is None
    if is_own and heads >= 1 and (width % heads or (width // heads) % 2):
        good = [h for h in range(1, min(width, 64) + 1) if width % (2 * h) == 0]
        yield (
            f"model.width={width} must be an even multiple of model.num_heads={heads}; "
            f"heads that fit this width: {', '.join(map(str, good)) or 'none'}"
        )
    if config.model.time_input != "stretched" and config.model.modulation != "time":
        yield f"model.time_input={config.model.time_input} needs --model.modulation time"


def _framework(config: RunConfig) -> Iterator[str]:
    options, name = config.framework, config.framework.name
    if name != "sigma_arm" and options.order_seed is not None:
        yield f"framework.order_seed belongs to framework sigma_arm, not {name}"
    if options.order_seed is not None and options.order_seed < 0:
        yield f"framework.order_seed={options.order_seed} must not be negative"
    if name == "mdm":
        if options.encoding is not None:
            yield "framework.encoding belongs to the causal frameworks: arm, sigma_arm, aoarm"
        return
    given = (config.law, config.schedule, config.objective)
    if given != (LawOptions("uniform"), ScheduleOptions(), ObjectiveOptions("nelbo")):
        yield (
            f"framework {name} has no times: leave --law, --schedule and --objective out, with all "
            "that belongs to them"
        )
    if not config.train.stratified:
        yield f"train.stratified is about times, and framework {name} has none"
    if config.model.modulation == "time":
        yield f"model.modulation=time needs times, and framework {name} has none"
    if config.data.document_attention:
        yield f"data.document_attention is for framework mdm, not {name}"
    if config.data.pads == "noised":
        yield f"data.pads=noised is for framework mdm: {name} never shows a pad to a prediction"


def _times(config: RunConfig) -> Iterator[str]:
    law = config.law
    if law.name == "uniform" and law.mu is not None:
        yield f"law uniform takes no mu (got {law.mu}); leave it out or choose another law"
    if law.name in ("uniform", "dirac") and law.scale is not None:
        yield f"law {law.name} takes no scale (got {law.scale}); leave it out or choose another law"
    yield from _location_and_scale("law", law.mu, law.scale)
    if law.name == "dirac" and law.mu is not None and not 0 < law.mu <= 1:
        yield f"law dirac needs 0 < law.mu <= 1 (at 0 nothing is ever masked), got {law.mu}"


def _schedule(config: RunConfig) -> Iterator[str]:
    schedule = config.schedule
    if schedule.name != "polynomial" and schedule.power is not None:
        yield f"schedule.power belongs to the polynomial schedule, not to {schedule.name}"
    if schedule.name != "middle_flat" and (schedule.mu, schedule.scale) != (None, None):
        yield f"schedule.mu and schedule.scale belong to middle_flat, not to {schedule.name}"
    yield from _location_and_scale("schedule", schedule.mu, schedule.scale)
    if schedule.power is not None and not 1e-3 <= schedule.power <= 1e3:
        yield f"schedule.power={schedule.power} must be from 0.001 to 1000"


def _location_and_scale(section: str, mu: float | None, scale: float | None) -> Iterator[str]:
    if mu is not None and not abs(mu) <= 1e3:
        yield f"{section}.mu={mu} must be from -1000 to 1000"
    if scale is not None and not 1e-5 <= scale <= 1e5:
        yield f"{section}.scale={scale} must be a positive number, from 0.00001 to 100000"


def _objective(config: RunConfig) -> Iterator[str]:
    name, law = config.objective.name, config.law.name
    if law == "dirac" and name in ("nelbo", "importance"):
        yield (
            f"objective {name} needs a law with a density, and dirac has none; "
            "choose gaussian, laplace or uniform, or objective bell"
        )
    if name == "importance" and config.schedule.name != "linear":
        yield f"objective importance is defined for the linear schedule, not {config.schedule.name}"
    if config.objective.time_floor != ObjectiveOptions.time_floor and name != "nelbo":
        yield f"objective.time_floor belongs to objective nelbo, not to {name}"
    if config.optim.final_lr and config.optim.curve == "constant":
        yield f"optim.final_lr={config.optim.final_lr} belongs to optim.curve=cosine"
    if config.optim.momentum != OptimOptions.momentum and config.optim.name != "muon":
        yield f"optim.momentum belongs to the optimizer muon; {config.optim.name} has optim.betas"
    if config.objective.divide_by_t and name != "importance":
        yield f"objective.divide_by_t belongs to objective importance, not to {name}"


def _train(config: RunConfig) -> Iterator[str]:
    train = config.train
    if train.microbatch_size is not None:
        if train.microbatch_size < 1:
            yield f"train.microbatch_size={train.microbatch_size} must be at least 1"
        elif train.batch_size % train.microbatch_size:
            yield (
                f"train.batch_size={train.batch_size} is not a multiple of "
                f"train.microbatch_size={train.microbatch_size}"
            )
    if not 0 <= train.random_length_fraction <= 1:
        yield f"train.random_length_fraction={train.random_length_fraction} must be from 0 to 1"
    if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", train.device):
        yield f"train.device={train.device!r} must be auto, cpu, cuda or cuda:N"
    size = config.scale.shard_size
    if size is not None and size < 1:
        yield f"scale.shard_size={size} must be at least 1"
    if size is not None and config.scale.sharding not in ("auto", "hybrid"):
        yield f"scale.shard_size belongs to scale.sharding=hybrid, not {config.scale.sharding}"
    if any(step < 1 for step in config.checkpoint.keep_steps):
        yield f"checkpoint.keep_steps={config.checkpoint.keep_steps}: steps start at 1"


def _intervals(config: RunConfig) -> Iterator[str]:
    for name, text in (
        ("validation.every", config.validation.every),
        ("validation.samples_every", config.validation.samples_every),
        ("checkpoint.every", config.checkpoint.every),
    ):
        try:
            Interval.parse(text)
        except ValueError as error:
            yield f"{name}: {error}"
