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
from bellmask.utils.errors import UserError, unknown

# Presets of Sec. 5.3: a causal LM adapted (CPT), fine-tuned on tasks, then on conversations.
#
# Each stage starts from the run folder ``runs/NAME`` of the stage before, so train that one with
# ``--out runs/NAME``. Plain names are bell at every stage, NAME_base is base at every stage, and
# ``sft_tasks_CPT_SFT`` with base or bell in both places are the four rows of Table 4.
# The paper's three are for GPUs; the ``tiny`` ones do the same on a laptop, from a causal LM that
# is pretrained there; ``cpt`` and ``sft`` are for your own model.


# Paper: Table 4
def cpt_gpt2_large() -> RunConfig:
    """Adapts GPT-2 Large to a masked model on FineWeb-Edu (App. C.1): about 50 hours on four B200.

    The paper gives neither the learning-rate curve nor the length; cosine and 1024 are from Gong
    et al.
    """
    return RunConfig(
        data=opt.DataOptions(train="fineweb_edu", block_length=1024, valid_fraction=0.001),
        start=opt.StartOptions(
            model="openai-community/gpt2-large", mask_token=10541, anneal_steps=10_000
        ),
        optim=opt.OptimOptions(lr=3e-4, warmup_steps=2000, curve="cosine", ema=0.0),
        train=opt.TrainOptions(steps=100_000, batch_size=256, compile=None),
        validation=opt.ValidationOptions(blocks=8192, batch_size=16),
    )


def sft_tasks(before: str = "cpt_gpt2_large") -> RunConfig:
    """Fine-tunes cpt_gpt2_large on the paper's mix of seven tasks, 210K examples (App. C.1).

    The paper gives neither learning rate nor length; 3e-4 and 256 are from Gong et al.
    """
    return RunConfig(
        data=opt.DataOptions(block_length=256),
        sft=opt.SftOptions(train="tasks", template="plain"),
        start=opt.StartOptions(model=f"runs/{before}", checkpoint="100000"),
        optim=opt.OptimOptions(lr=3e-4, warmup_steps=500, curve="cosine", ema=0.0),
        train=opt.TrainOptions(steps=10_000, batch_size=128, compile=None),
        validation=opt.ValidationOptions(every="1000 steps", batch_size=32, sample_steps=64),
        checkpoint=opt.CheckpointOptions(every="1000 steps", keep_steps=(2000,)),
    )


# Paper: Table 5
def sft_sharegpt(before: str = "sft_tasks") -> RunConfig:
    """Conversations, from step 2000 of sft_tasks (App. C.1), following Nie et al."""
    tasks = sft_tasks()
    conversations = "sharegpt:hub:shibing624/sharegpt_gpt4"
    return replace(
        tasks,
        data=opt.DataOptions(block_length=1024),
        sft=opt.SftOptions(train=conversations, turns="first", template="vicuna"),
        start=opt.StartOptions(model=f"runs/{before}", checkpoint="2000"),
        optim=replace(tasks.optim, lr=1e-4),
        validation=replace(tasks.validation, batch_size=16),
        checkpoint=opt.CheckpointOptions(every="1000 steps"),
    )


def cpt() -> RunConfig:
    """Adapts your causal LM of up to a billion parameters to a masked model, on one GPU."""
    sample = "hub:HuggingFaceFW/fineweb-edu:sample-10BT"  # this reads an eighth of it, cpt_7b half
    return RunConfig(
        data=opt.DataOptions(train=sample, block_length=512),
        start=opt.StartOptions(model="smollm2", anneal_steps=1000),
        optim=opt.OptimOptions(lr=3e-4, warmup_steps=500, curve="cosine", ema=0.0),
        train=opt.TrainOptions(steps=20_000, batch_size=128, compile=None),
        validation=opt.ValidationOptions(every="1000 steps", batch_size=32),
        checkpoint=opt.CheckpointOptions(every="1000 steps"),
    )


def cpt_7b() -> RunConfig:
    """The same for several billion parameters, on one machine with eight GPUs."""
    smaller = cpt()
    return replace(
        smaller,
        data=replace(smaller.data, block_length=1024),
        start=opt.StartOptions(model="meta-llama/Llama-2-7b-hf", anneal_steps=1000),
        optim=replace(smaller.optim, lr=2e-5, warmup_steps=2000),
        train=replace(smaller.train, batch_size=256),
        scale=opt.ScaleOptions(recompute="block"),
    )


def sft(before: str = "cpt") -> RunConfig:
    """Fine-tune the model of ``cpt`` on prompts and responses; give your own as --sft.train."""
    return RunConfig(
        data=opt.DataOptions(block_length=512),
        sft=opt.SftOptions(train="sharegpt:hub:shibing624/sharegpt_gpt4"),
        start=opt.StartOptions(model=f"runs/{before}"),
        optim=opt.OptimOptions(lr=1e-4, warmup_steps=200, curve="cosine", ema=0.0),
        train=opt.TrainOptions(steps=5000, batch_size=64, compile=None),
        validation=opt.ValidationOptions(every="500 steps", batch_size=32, sample_steps=64),
        checkpoint=opt.CheckpointOptions(every="500 steps"),
    )


def sft_7b(before: str = "cpt_7b") -> RunConfig:
    """The same for several billion parameters."""
    smaller = sft(before)
    return replace(
        smaller,
        data=replace(smaller.data, block_length=1024),
        optim=replace(smaller.optim, lr=2e-5),
        scale=opt.ScaleOptions(recompute="block"),
    )


def arm_tiny() -> RunConfig:
    """A small causal LM to adapt, pretrained in minutes: GPT-2's architecture on WikiText-2."""
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
    """Adapts arm_tiny to a masked model; attention is annealed over the first quarter."""
    before = arm_tiny()
    return replace(
        before,
        data=opt.DataOptions(train="wikitext2", block_length=64),
        start=opt.StartOptions(model="runs/arm_tiny", anneal_steps=250),
        framework=opt.FrameworkOptions(),
        law=opt.LawOptions(),
        objective=opt.ObjectiveOptions(),
    )


def sft_tiny(before: str = "cpt_tiny") -> RunConfig:
    """Fine-tunes cpt_tiny to write words backwards."""
    return replace(
        cpt_tiny(),
        data=opt.DataOptions(block_length=64),
        sft=opt.SftOptions(train="toy:reverse", round_to=16),
        start=opt.StartOptions(model=f"runs/{before}"),
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
    """The optimizer with learning rate and warm-up steps multiplied by these factors."""
    steps = round(warmup * options.warmup_steps)
    return replace(options, lr=rate * options.lr, warmup_steps=steps)


def fast_of(family: Preset) -> RunConfig:
    """The same run with the recipe that is fastest at small sizes (docs/performance.md)."""
    config = family()
    optim = replace(scaled(config.optim, FAST_RATE, FAST_WARMUP), name="muon")
    return replace(config, optim=optim, model=replace(config.model, local_conv=5))


def causal_of(family: Preset, framework: opt.FrameworkName) -> RunConfig:
    """The same run as an ARM, sigma-ARM or AoARM (Sec. 2.1): same backbone, data and optimizer."""
    config = base_of(family)
    data = replace(config.data, pads="ignored")
    return replace(config, data=data, framework=opt.FrameworkOptions(framework))


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
    """For ablations: tiny with a 300-token BPE vocabulary, validated more often."""
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
        optim=opt.OptimOptions(lr=1.5e-3, warmup_steps=200, ema=0.999),
        train=opt.TrainOptions(steps=10_000, batch_size=32),
        validation=opt.ValidationOptions(every="200 steps", blocks=512, batch_size=128),
        checkpoint=opt.CheckpointOptions(
            every="1000 steps", keep_last=1, keep_best=False, keep_steps=(1000, 2000, 5000)
        ),
        log=opt.LogOptions(every=50),
    )


# Paper: App. C.1: LM1B
def lm1b() -> RunConfig:
    """LM1B, sentences packed to 128 tokens (App. C.1): about 100 hours on two H200."""
    return RunConfig(
        data=opt.DataOptions(train="lm1b", tokenizer="bert-base-uncased", block_length=128),
        optim=opt.OptimOptions(lr=3e-4, warmup_steps=2500),
        train=opt.TrainOptions(steps=1_000_000, batch_size=512, compile=None),
        validation=opt.ValidationOptions(blocks=0, batch_size=256),
    )


# Paper: App. C.1: LM1B
def lm1b_unpacked() -> RunConfig:
    """LM1B, one sentence per row of 128 tokens (App. C.1); pads as in the public recipe."""
    packed = lm1b()
    return replace(packed, data=replace(packed.data, packing="unpacked", pads="noised"))


# Paper: App. C.1: OpenWebText
def owt() -> RunConfig:
    """OpenWebText, blocks of 1024 GPT-2 tokens, cosine annealing with weight decay (App. C.1)."""
    return RunConfig(
        data=opt.DataOptions(train="openwebtext", tokenizer="gpt2", block_length=1024),
        optim=opt.OptimOptions(lr=3e-4, warmup_steps=2500, curve="cosine", weight_decay=0.03),
        train=opt.TrainOptions(steps=1_000_000, batch_size=512, compile=None),
        validation=opt.ValidationOptions(blocks=8192, batch_size=32),
    )


PRESETS: dict[str, Preset] = {}
_CAUSAL: tuple[opt.FrameworkName, ...] = ("arm", "sigma_arm", "aoarm")
for _family in (tiny, small, medium, lm1b, lm1b_unpacked, owt):
    _name = _family.__name__
    PRESETS[_name] = PRESETS[f"{_name}_bell"] = _family
    PRESETS[f"{_name}_base"] = partial(base_of, _family)
    PRESETS[f"{_name}_fast"] = partial(fast_of, _family)
    for _kind in _CAUSAL:
        PRESETS[f"{_name}_{_kind}"] = partial(causal_of, _family, _kind)
PRESETS["arm_tiny"] = arm_tiny
for _family in (cpt_tiny, cpt, cpt_7b, cpt_gpt2_large):
    _name = _family.__name__
    PRESETS[_name] = PRESETS[f"{_name}_bell"] = _family
    PRESETS[f"{_name}_base"] = partial(base_of, _family)
for _tuning, _before in (
    (sft_tiny, "cpt_tiny"),
    (sft, "cpt"),
    (sft_7b, "cpt_7b"),
    (sft_tasks, "cpt_gpt2_large"),
    (sft_sharegpt, "sft_tasks"),
):
    _name, _after_base = _tuning.__name__, partial(_tuning, f"{_before}_base")
    PRESETS[_name] = PRESETS[f"{_name}_bell"] = _tuning
    PRESETS[f"{_name}_base"] = partial(base_of, _after_base)
    if _tuning in (sft_tiny, sft_tasks):  # the rows of Table 4: CPT, then SFT
        PRESETS[f"{_name}_bell_bell"] = _tuning
        PRESETS[f"{_name}_bell_base"] = partial(base_of, _tuning)
        PRESETS[f"{_name}_base_bell"] = _after_base
        PRESETS[f"{_name}_base_base"] = partial(base_of, _after_base)
PRESETS["fast"] = PRESETS["tiny_fast"]


def preset(name: str) -> RunConfig:
    """The config of a named preset; an error for an unknown name lists the nearest ones."""
    if name not in PRESETS:
        raise UserError(f"{unknown('preset', name, PRESETS)} ('bellmask presets' lists all)")
    return PRESETS[name]()
