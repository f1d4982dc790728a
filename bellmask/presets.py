"""Named whole runs, as functions that return a config; variants derive from one another.

``X_base`` is the conventional objective (NELBO, uniform times), ``X_bell`` the paper's (gaussian
times around 0.5, unweighted); plain ``X`` is ``X_bell``. ``X_arm``, ``X_sigma_arm`` and ``X_aoarm``
are the causal frameworks (AoARM with the paper's encoding).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from bellmask.config import RunConfig
from bellmask.errors import look_up
from bellmask.options import (
    CheckpointOptions,
    DataOptions,
    FrameworkName,
    FrameworkOptions,
    LawOptions,
    LogOptions,
    ModelOptions,
    ObjectiveOptions,
    OptimOptions,
    TrainOptions,
    ValidationOptions,
)
from bellmask.stage_presets import (
    arm_tiny,
    cpt_gpt2_large,
    cpt_tiny,
    sft_sharegpt,
    sft_tasks,
    sft_tiny,
)


def base_of(config: RunConfig) -> RunConfig:
    """The same run with the conventional objective: Eq. L_MDM under uniform times."""
    return replace(config, law=LawOptions("uniform"), objective=ObjectiveOptions("nelbo"))


def causal_of(config: RunConfig, framework: FrameworkName) -> RunConfig:
    """The same run as an ARM, sigma-ARM or AoARM (Sec. 2.1): same trunk, data and optimiser."""
    return replace(base_of(config), framework=FrameworkOptions(framework))


def tiny() -> RunConfig:
    """Minutes on two CPU cores: WikiText-2 bytes, 3 layers of width 64, blocks of 64."""
    return RunConfig(
        data=DataOptions(train="wikitext2", tokenizer="bytes", block_length=64),
        model=ModelOptions(num_layers=3, width=64, num_heads=4, dropout=0.0),
        optim=OptimOptions(lr=6e-3, warmup_steps=100, ema=0.99),
        train=TrainOptions(steps=1000, batch_size=32),
        validation=ValidationOptions(every="100 steps", blocks=512, batch_size=128),
        checkpoint=CheckpointOptions(every="500 steps"),
        log=LogOptions(every=20),
    )


def small() -> RunConfig:
    """The ablations' run: tiny in 300 BPE tokens, validated more often."""
    return replace(
        tiny(),
        data=DataOptions(train="wikitext2", tokenizer="bpe:300", block_length=64),
        validation=ValidationOptions(every="50 steps", blocks=256, batch_size=128),
        checkpoint=CheckpointOptions(every="500 steps", keep_last=1, keep_best=False),
    )


def lm1b() -> RunConfig:
    """LM1B, sentences packed to 128 tokens (App. C.1): about 100 hours on two H200."""
    return RunConfig(
        data=DataOptions(train="lm1b", tokenizer="bert-base-uncased", block_length=128),
        model=ModelOptions(),
        optim=OptimOptions(lr=3e-4, warmup_steps=2500),
        train=TrainOptions(steps=1_000_000, batch_size=512),
    )


def lm1b_unpacked() -> RunConfig:
    """LM1B, one sentence per row of 128 tokens (App. C.1)."""
    packed = lm1b()
    return replace(packed, data=replace(packed.data, packing="unpacked"))


def owt() -> RunConfig:
    """OpenWebText, blocks of 1024 GPT-2 tokens, cosine annealing with weight decay (App. C.1)."""
    return RunConfig(
        data=DataOptions(train="openwebtext", tokenizer="gpt2", block_length=1024),
        model=ModelOptions(),
        optim=OptimOptions(lr=3e-4, warmup_steps=2500, curve="cosine", weight_decay=0.03),
        train=TrainOptions(steps=1_000_000, batch_size=512),
        validation=ValidationOptions(batch_size=16),
    )


_FAMILIES: tuple[Callable[[], RunConfig], ...] = (tiny, small, lm1b, lm1b_unpacked, owt)


_STAGES: tuple[Callable[[], RunConfig], ...] = (
    cpt_gpt2_large,
    sft_tasks,
    sft_sharegpt,
    cpt_tiny,
    sft_tiny,
)
"""Sec. 5.3; these have a start, so no causal variants."""


def _base(family: Callable[[], RunConfig]) -> Callable[[], RunConfig]:
    def build() -> RunConfig:
        return base_of(family())

    build.__doc__ = f"{family.__name__} with the conventional objective: NELBO, uniform times."
    return build


def _causal(family: Callable[[], RunConfig], name: FrameworkName) -> Callable[[], RunConfig]:
    def build() -> RunConfig:
        return causal_of(family(), name)

    build.__doc__ = f"{family.__name__} as framework {name}."
    return build


_CAUSAL: tuple[FrameworkName, ...] = ("arm", "sigma_arm", "aoarm")

PRESETS: dict[str, Callable[[], RunConfig]] = {
    name: build
    for family in _FAMILIES
    for name, build in (
        (family.__name__, family),
        (f"{family.__name__}_base", _base(family)),
        (f"{family.__name__}_bell", family),
        *((f"{family.__name__}_{name}", _causal(family, name)) for name in _CAUSAL),
    )
}
PRESETS |= {"arm_tiny": arm_tiny}
PRESETS |= {
    name: build
    for stage in _STAGES
    for name, build in (
        (stage.__name__, stage),
        (f"{stage.__name__}_base", _base(stage)),
        (f"{stage.__name__}_bell", stage),
    )
}


def preset(name: str) -> RunConfig:
    """The config of a named preset; an unknown name gets the nearest ones and the list."""
    return look_up("preset", name, PRESETS)()
