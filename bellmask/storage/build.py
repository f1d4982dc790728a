"""Options → objects: the law, schedule, objective and backbone that a config names."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from bellmask.config import options as opt
from bellmask.config.config import RunConfig
from bellmask.data.tokenizers import Tokenizer
from bellmask.diffusion import laws
from bellmask.diffusion.frameworks import Framework, Mdm, any_order, arm, shifted_arm, sigma_arm
from bellmask.diffusion.objectives import Bell, ChainRule, Importance, Nelbo, Objective
from bellmask.diffusion.progress import ProgressLaw
from bellmask.diffusion.schedules import Cosine, Linear, MiddleFlat, Polynomial, Schedule
from bellmask.diffusion.theory import bell_test
from bellmask.model.pretrained import Backbone, PretrainedDenoiser, add_lora, make_language_model
from bellmask.model.transformer import AttentionRules, Denoiser
from bellmask.utils.errors import UserError, look_up
from bellmask.utils.rng import shuffle, stream_key, torch_seed

Network = Denoiser | PretrainedDenoiser
"""The network of a run; all kinds share one call signature."""


def _place_of(options: opt.LawOptions | opt.ScheduleOptions) -> tuple[float, float]:
    """(mu, scale), the defaults filled in."""
    mu = opt.DEFAULT_MU if options.mu is None else options.mu
    return mu, opt.DEFAULT_SCALE if options.scale is None else options.scale


def build_law(options: opt.LawOptions) -> laws.TimeLaw:
    """The time law that the options name."""
    mu, scale = _place_of(options)
    table: dict[str, Callable[[], laws.TimeLaw]] = {
        "uniform": laws.Uniform,
        "dirac": lambda: laws.Dirac(mu),
        "gaussian": lambda: laws.TruncatedGaussian(mu, scale),
        "laplace": lambda: laws.TruncatedLaplace(mu, scale),
        "band": lambda: laws.Band(*opt.band_ends(options)),
        "progress": ProgressLaw,
    }
    law, share = look_up("time law", options.name, table)(), options.uniform_share
    return law if share is None else laws.WithUniform(law, share)


def build_schedule(options: opt.ScheduleOptions) -> Schedule:
    """The schedule that the options name."""
    mu, scale = _place_of(options)
    power = opt.DEFAULT_POWER if options.power is None else options.power
    table: dict[str, Callable[[], Schedule]] = {
        "linear": Linear,
        "cosine": Cosine,
        "polynomial": lambda: Polynomial(power),
        "middle_flat": lambda: MiddleFlat(laws.TruncatedGaussian(mu, scale)),
    }
    return look_up("schedule", options.name, table)()


def build_objective(config: RunConfig) -> Objective:
    """The objective that the options name, with its law and schedule."""
    if config.framework.name != "mdm":
        return ChainRule()
    options = config.objective
    table: dict[str, Callable[[laws.TimeLaw, Schedule], Objective]] = {
        "nelbo": lambda law, schedule: Nelbo(law, schedule, options.time_floor),
        "bell": Bell,
        "importance": lambda law, schedule: Importance(law, options.divide_by_t, schedule),
    }
    try:
        build = look_up("objective", options.name, table)
        return build(build_law(config.law), build_schedule(config.schedule))
    except ValueError as error:
        raise UserError(str(error)) from None


# Paper: Sec. 2.1: sigma-ARM
def build_framework(config: RunConfig) -> Framework:
    """How the run draws contexts and targets."""
    length = config.data.block_length
    order_seed = config.resolved().framework.order_seed
    table: dict[str, Callable[[], Framework]] = {
        "mdm": lambda: Mdm(build_schedule(config.schedule), config.data.pads == "noised"),
        "arm": lambda: (arm if config.model.backbone == "dit" else shifted_arm)(length),
        "sigma_arm": lambda: sigma_arm(shuffle(stream_key(order_seed or 0, "sigma"), length)),
        "aoarm": any_order,
    }
    return look_up("framework", config.framework.name, table)()


def describe_learning(config: RunConfig) -> str:
    """What a run minimizes, in a few words."""
    framework, steps = config.resolved().framework, config.start.anneal_steps
    if framework.name == "mdm":
        opening = f", attention open from step {steps} on" if steps > 1 else ""
        return f"objective {config.objective.name}, law {build_law(config.law)}{opening}"
    return f"framework {framework.name}, {framework.encoding} positions"


def learning_cautions(config: RunConfig) -> list[str]:
    """Notes for the user before training."""
    found = []
    law, schedule = build_law(config.law), build_schedule(config.schedule)
    if config.objective.name == "bell" and not bell_test(law, schedule).is_bell_shaped:
        found.append(f"{law} is not bell-shaped (Def. 4.1) under {schedule}")
    opening, steps = config.start.anneal_steps, config.train.steps
    if opening > steps:
        found.append(f"attention is annealed: at the end {steps / opening:.0%} of it is open")
    return found


def build_rules(options: opt.DataOptions, tokenizer: Tokenizer) -> AttentionRules:
    """Attention masks in training and evaluation."""
    eos_id = tokenizer.eos_id if options.document_attention else None
    return AttentionRules(sees_pads=options.pads == "noised", document_eos=eos_id)


def build_stored(
    folder: Path, config: RunConfig, num_tokens: int, backbone: Backbone | None = None
) -> Network:
    """The backbone for the weights in a folder; sizes larger than the files are rejected."""
    size = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    model = config.model
    block = model.width**2 * (4 + 2 * model.mlp_ratio)  # parameters of its matrices
    if model.backbone == "dit" and model.num_layers * block + num_tokens * model.width > size:
        raise UserError(f"the config.json of {folder} belongs to another, larger model")
    return build_model(config, num_tokens, backbone)


def build_model(
    config: RunConfig,
    num_tokens: int,
    backbone: Backbone | None = None,
    fill: Callable[[Network], None] | None = None,
) -> Network:
    """The backbone with initial weights that depend on the seed alone, or those that ``fill`` sets.

    ``backbone`` describes the causal LM, for ``model.backbone=causal_lm``.
    """
    is_causal = config.framework.name != "mdm"
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(torch_seed(stream_key(config.train.seed, "weights")))
        if config.model.backbone == "causal_lm":
            assert backbone is not None
            inner = make_language_model(backbone.language_model, config.model.dropout)
            how: dict[str, Any] = {"is_causal": is_causal, "local_conv": config.model.local_conv}
            model: Network = PretrainedDenoiser(inner, num_tokens, **how)
        else:
            encoding = config.resolved().framework.encoding or "source"
            model = Denoiser(config.model, num_tokens, is_causal=is_causal, encoding=encoding)
        if fill is not None:
            fill(model)
        if config.start.lora_rank:
            assert isinstance(model, PretrainedDenoiser)
            add_lora(model, config.start.lora_rank, config.start.lora_alpha)
    return model
