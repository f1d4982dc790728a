"""Named whole runs, as functions that return a config; variants derive from one another.

``X_base`` is the conventional objective (NELBO, uniform times), ``X_bell`` the paper's (gaussian
times around 0.5, unweighted); plain ``X`` is ``X_bell``. ``X_fast`` goes beyond the paper: the
bell, Muon, a local convolution, a higher learning rate after a shorter warm-up; plain ``fast`` is
``tiny_fast``.
``X_arm``, ``X_sigma_arm`` and ``X_aoarm`` are the causal frameworks (AoARM with the paper's
encoding).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from bellmask.config import options as opt
from bellmask.config.config import RunConfig
from bellmask.utils.errors import look_up

# Presets of Sec. 5.3: a causal LM adapted (CPT), fine-tuned on tasks, then on conversations.
#
# Each stage names the checkpoint it starts from: a run folder ``runs/NAME``, so train the stage
# before with ``--out runs/NAME``. So NAME_base starts from where NAME does; for base at every
# stage give ``--start.model``, or use the suite cpt_sft. The paper's three are for GPUs; the
# ``tiny`` ones go the same road on a laptop, from a causal LM that is pretrained there.


def cpt_gpt2_large() -> RunConfig:
    """GPT-2 Large becomes a masked model on FineWeb-Edu (App. C.1): about 50 hours on four B200.

    The paper does not name the curve; cosine is that of Gong et al.
    """
    return RunConfig(
        data=opt.DataOptions(train="fineweb_edu", block_length=1024),
        start=opt.StartOptions(
            model="openai-community/gpt2-large", mask_token=10541, anneal_steps=10_000
        ),
        optim=opt.OptimOptions(lr=3e-4, warmup_steps=2000, curve="cosine", ema=0.0),
        train=opt.TrainOptions(steps=100_000, batch_size=256),
        validation=opt.ValidationOptions(batch_size=16),
    )


def sft_tasks() -> RunConfig:
    """The adapted model on the paper's mix of seven tasks, 210K examples (App. C.1).

    The paper names neither rate nor length; 3e-4 and 256 are those of Gong et al.
    """
    return RunConfig(
        data=opt.DataOptions(block_length=256),
        sft=opt.SftOptions(train="tasks", template="plain"),
        start=opt.StartOptions(model="runs/cpt_gpt2_large", checkpoint="100000"),
        optim=opt.OptimOptions(lr=3e-4, warmup_steps=500, curve="cosine", ema=0.0),
        train=opt.TrainOptions(steps=10_000, batch_size=128),
        validation=opt.ValidationOptions(every="1000 steps", batch_size=32, sample_steps=64),
        checkpoint=opt.CheckpointOptions(every="1000 steps", keep_steps=(2000,)),
    )


def sft_sharegpt() -> RunConfig:
    """Conversations, from the 2K-step checkpoint of the tasks (App. C.1)."""
    tasks = sft_tasks()
    return replace(
        tasks,
        data=opt.DataOptions(block_length=1024),
        sft=opt.SftOptions(train="sharegpt:hub:shibing624/sharegpt_gpt4", template="chat"),
        start=opt.StartOptions(model="runs/sft_tasks", checkpoint="2000"),
        optim=replace(tasks.optim, lr=1e-4),
        validation=replace(tasks.validation, batch_size=16),
        checkpoint=opt.CheckpointOptions(every="1000 steps"),
    )


def arm_tiny() -> RunConfig:
    """A causal LM to adapt, pretrained in minutes: GPT-2's architecture, small, WikiText-2."""
    return RunConfig(
        data=opt.DataOptions(train="wikitext2", tokenizer="bpe:512", block_length=64),
        start=opt.StartOptions(architecture="gpt2-tiny"),
        model=opt.ModelOptions(dropout=0.0),
        framework=opt.FrameworkOptions("arm"),
        law=opt.LawOptions("uniform"),
        objective=opt.ObjectiveOptions("nelbo"),
        optim=opt.OptimOptions(lr=3e-3, warmup_steps=100, ema=0.99),
        train=opt.TrainOptions(steps=1000, batch_size=32),
        validation=opt.ValidationOptions(every="100 steps", blocks=256, batch_size=128),
        checkpoint=opt.CheckpointOptions(every="500 steps", keep_last=1),
        log=opt.LogOptions(every=20),
    )


def cpt_tiny() -> RunConfig:
    """That causal LM becomes a masked model; attention opens over the first quarter."""
    before = arm_tiny()
    return replace(
        before,
        data=opt.DataOptions(train="wikitext2", block_length=64),
        start=opt.StartOptions(model="runs/arm_tiny", anneal_steps=250),
        framework=opt.FrameworkOptions(),
        law=opt.LawOptions(),
        objective=opt.ObjectiveOptions(),
    )


def sft_tiny() -> RunConfig:
    """The masked model learns to write words backwards."""
    before = cpt_tiny()
    return replace(
        before,
        data=opt.DataOptions(block_length=64),
        sft=opt.SftOptions(train="toy:reverse", round_to=16),
        start=opt.StartOptions(model="runs/cpt_tiny"),
        optim=opt.OptimOptions(lr=3e-3, warmup_steps=50, curve="cosine", ema=0.99),
    )


Preset = Callable[[], RunConfig]


def base_of(family: Preset) -> RunConfig:
    """The same run with the conventional objective: Eq. L_MDM under uniform times."""
    law, objective = opt.LawOptions("uniform"), opt.ObjectiveOptions("nelbo")
    return replace(family(), law=law, objective=objective)


FAST_RATE, FAST_WARMUP = 2.0, 0.2
"""The fast recipe's learning rate and warm-up, over the base's."""


def scaled(options: opt.OptimOptions, rate: float = 1.0, warmup: float = 1.0) -> opt.OptimOptions:
    """The optimizer with so many times the learning rate and the steps of warm-up."""
    steps = round(warmup * options.warmup_steps)
    return replace(options, lr=rate * options.lr, warmup_steps=steps)


def fast_of(family: Preset) -> RunConfig:
    """The same run by the recipe that was fastest at small sizes (docs/performance.md)."""
    config = family()
    optim = replace(scaled(config.optim, FAST_RATE, FAST_WARMUP), name="muon")
    return replace(config, optim=optim, model=replace(config.model, local_conv=5))


def causal_of(family: Preset, framework: opt.FrameworkName) -> RunConfig:
    """The same run as an ARM, sigma-ARM or AoARM (Sec. 2.1): same trunk, data and optimiser."""
    return replace(base_of(family), framework=opt.FrameworkOptions(framework))


def tiny() -> RunConfig:
    """Minutes on two CPU cores: WikiText-2 bytes, 3 layers of width 64, blocks of 64."""
    return RunConfig(
        data=opt.DataOptions(train="wikitext2", tokenizer="bytes", block_length=64),
        model=opt.ModelOptions(num_layers=3, width=64, num_heads=4, dropout=0.0),
        optim=opt.OptimOptions(lr=6e-3, warmup_steps=100, ema=0.99),
        train=opt.TrainOptions(steps=1000, batch_size=32),
        validation=opt.ValidationOptions(every="100 steps", blocks=512, batch_size=128),
        checkpoint=opt.CheckpointOptions(every="500 steps"),
        log=opt.LogOptions(every=20),
    )


def small() -> RunConfig:
    """The ablations' run: tiny in 300 BPE tokens, validated more often."""
    return replace(
        tiny(),
        data=opt.DataOptions(train="wikitext2", tokenizer="bpe:300", block_length=64),
        validation=opt.ValidationOptions(every="50 steps", blocks=256, batch_size=128),
        checkpoint=opt.CheckpointOptions(every="500 steps", keep_last=1, keep_best=False),
    )


def medium() -> RunConfig:
    """About an hour on one CPU core: clean enwik8, 4 layers of width 128, blocks of 128."""
    return RunConfig(
        data=opt.DataOptions(train="enwik8_text", tokenizer="bpe:2048", block_length=128),
        model=opt.ModelOptions(num_layers=4, width=128, num_heads=4, dropout=0.0),
        optim=opt.OptimOptions(lr=3e-3, warmup_steps=200, ema=0.999),
        train=opt.TrainOptions(steps=10_000, batch_size=32),
        validation=opt.ValidationOptions(every="250 steps", blocks=512, batch_size=128),
        checkpoint=opt.CheckpointOptions(every="1000 steps", keep_last=1, keep_best=False),
        log=opt.LogOptions(every=50),
    )


def lm1b() -> RunConfig:
    """LM1B, sentences packed to 128 tokens (App. C.1): about 100 hours on two H200."""
    return RunConfig(
        data=opt.DataOptions(train="lm1b", tokenizer="bert-base-uncased", block_length=128),
        model=opt.ModelOptions(),
        optim=opt.OptimOptions(lr=3e-4, warmup_steps=2500),
        train=opt.TrainOptions(steps=1_000_000, batch_size=512),
    )


def lm1b_unpacked() -> RunConfig:
    """LM1B, one sentence per row of 128 tokens (App. C.1)."""
    packed = lm1b()
    return replace(packed, data=replace(packed.data, packing="unpacked"))


def owt() -> RunConfig:
    """OpenWebText, blocks of 1024 GPT-2 tokens, cosine annealing with weight decay (App. C.1)."""
    return RunConfig(
        data=opt.DataOptions(train="openwebtext", tokenizer="gpt2", block_length=1024),
        model=opt.ModelOptions(),
        optim=opt.OptimOptions(lr=3e-4, warmup_steps=2500, curve="cosine", weight_decay=0.03),
        train=opt.TrainOptions(steps=1_000_000, batch_size=512),
        validation=opt.ValidationOptions(batch_size=16),
    )


PRESETS: dict[str, Preset] = {}
_CAUSAL: tuple[opt.FrameworkName, ...] = ("arm", "sigma_arm", "aoarm")
_STAGES = (arm_tiny, cpt_gpt2_large, sft_tasks, sft_sharegpt, cpt_tiny, sft_tiny)
"""Sec. 5.3; these have a start, so no causal variants."""
for _family in (tiny, small, medium, lm1b, lm1b_unpacked, owt, *_STAGES):
    _name = _family.__name__
    PRESETS[_name] = _family
    if _family is not arm_tiny:
        PRESETS[f"{_name}_base"] = partial(base_of, _family)
        PRESETS[f"{_name}_bell"] = _family
    if _family not in _STAGES:
        PRESETS[f"{_name}_fast"] = partial(fast_of, _family)
    for _kind in () if _family in _STAGES else _CAUSAL:
        PRESETS[f"{_name}_{_kind}"] = partial(causal_of, _family, _kind)
PRESETS["fast"] = PRESETS["tiny_fast"]


def preset(name: str) -> RunConfig:
    """The config of a named preset; an unknown name gets the nearest ones and the list."""
    return look_up("preset", name, PRESETS)()
