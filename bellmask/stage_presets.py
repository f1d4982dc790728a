"""Presets of Sec. 5.3: a causal LM adapted (CPT), fine-tuned on tasks, then on conversations.

Each stage names the checkpoint it starts from: a run folder ``runs/NAME``, so train the stage
before with ``--out runs/NAME``. So NAME_base starts from where NAME does; for base at every
stage give ``--start.model``, or use the suite cpt_sft. The paper's three are for GPUs; the ``tiny``
ones go the same road on a laptop, from a causal LM that is pretrained there.
"""

from __future__ import annotations

from dataclasses import replace

from bellmask.config import RunConfig
from bellmask.options import (
    CheckpointOptions,
    DataOptions,
    FrameworkOptions,
    LawOptions,
    LogOptions,
    ModelOptions,
    ObjectiveOptions,
    OptimOptions,
    TrainOptions,
    ValidationOptions,
)
from bellmask.stage_options import SftOptions, StartOptions


def cpt_gpt2_large() -> RunConfig:
    """GPT-2 Large becomes a masked model on FineWeb-Edu (App. C.1): about 50 hours on four B200.

    The paper does not name the curve; cosine is that of Gong et al.
    """
    return RunConfig(
        data=DataOptions(train="fineweb_edu", block_length=1024),
        start=StartOptions(
            model="openai-community/gpt2-large", mask_token=10541, anneal_steps=10_000
        ),
        optim=OptimOptions(lr=3e-4, warmup_steps=2000, curve="cosine", ema=0.0),
        train=TrainOptions(steps=100_000, batch_size=256),
        validation=ValidationOptions(batch_size=16),
    )


def sft_tasks() -> RunConfig:
    """The adapted model on the paper's mix of seven tasks, 210K examples (App. C.1).

    The paper names neither rate nor length; 3e-4 and 256 are those of Gong et al.
    """
    return RunConfig(
        data=DataOptions(block_length=256),
        sft=SftOptions(train="tasks", template="plain"),
        start=StartOptions(model="runs/cpt_gpt2_large", checkpoint="100000"),
        optim=OptimOptions(lr=3e-4, warmup_steps=500, curve="cosine", ema=0.0),
        train=TrainOptions(steps=10_000, batch_size=128),
        validation=ValidationOptions(every="1000 steps", batch_size=32, sample_steps=64),
        checkpoint=CheckpointOptions(every="1000 steps", keep_steps=(2000,)),
    )


def sft_sharegpt() -> RunConfig:
    """Conversations, from the 2K-step checkpoint of the tasks (App. C.1)."""
    tasks = sft_tasks()
    return replace(
        tasks,
        data=DataOptions(block_length=1024),
        sft=SftOptions(train="sharegpt:hub:shibing624/sharegpt_gpt4", template="chat"),
        start=StartOptions(model="runs/sft_tasks", checkpoint="2000"),
        optim=replace(tasks.optim, lr=1e-4),
        validation=replace(tasks.validation, batch_size=16),
        checkpoint=CheckpointOptions(every="1000 steps"),
    )


def arm_tiny() -> RunConfig:
    """A causal LM to adapt, pretrained in minutes: GPT-2's architecture, small, WikiText-2."""
    return RunConfig(
        data=DataOptions(train="wikitext2", tokenizer="bpe:512", block_length=64),
        start=StartOptions(architecture="gpt2-tiny"),
        model=ModelOptions(dropout=0.0),
        framework=FrameworkOptions("arm"),
        law=LawOptions("uniform"),
        objective=ObjectiveOptions("nelbo"),
        optim=OptimOptions(lr=3e-3, warmup_steps=100, ema=0.99),
        train=TrainOptions(steps=1000, batch_size=32),
        validation=ValidationOptions(every="100 steps", blocks=256, batch_size=128),
        checkpoint=CheckpointOptions(every="500 steps", keep_last=1),
        log=LogOptions(every=20),
    )


def cpt_tiny() -> RunConfig:
    """That causal LM becomes a masked model; attention opens over the first quarter."""
    before = arm_tiny()
    return replace(
        before,
        data=DataOptions(train="wikitext2", block_length=64),
        start=StartOptions(model="runs/arm_tiny", anneal_steps=250),
        model=ModelOptions(dropout=0.0),
        framework=FrameworkOptions(),
        law=LawOptions(),
        objective=ObjectiveOptions(),
    )


def sft_tiny() -> RunConfig:
    """The masked model learns to write words backwards."""
    before = cpt_tiny()
    return replace(
        before,
        data=DataOptions(block_length=64),
        sft=SftOptions(train="toy:reverse", round_to=16),
        start=StartOptions(model="runs/cpt_tiny"),
        optim=OptimOptions(lr=3e-3, warmup_steps=50, curve="cosine", ema=0.99),
    )
