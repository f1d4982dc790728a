"""How to sample, in plain values: one description for the command line, Python and the engine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal

from bellmask.config.config import choices_of
from bellmask.utils.errors import UserError, look_up

DEFAULT_STEPS = 128
MOST_STEPS = 1_000_000
"""Beyond it a finer grid is first-hitting sampling, which has none."""


@dataclass(frozen=True)
class Sampling:
    """How a masked model fills a canvas. A causal model writes token by token in its own order; of
    all this only temperature, top_k, top_p and noise matter to it.
    """

    rule: Literal["ancestral", "first_hitting", "random", "most_confident", "margin", "entropy"] = (
        "ancestral"
    )
    """Which masked tokens a step reveals. ancestral: each by chance (the reverse process);
    first_hitting: the same without a grid, one per call; random: in random order; most_confident,
    margin, entropy: the surest ones by probability, lead over the second, narrowness."""
    grid: Literal["uniform", "cosine", "count"] = "uniform"
    """Time grid: equal steps; cosine (few tokens at first); count (the same number in each)."""
    steps: int | None = None
    """Sampling steps, by default 128, for answers to prompts 64 as in the paper; the network is
    called only in those in which a token appears. Not with --rule first_hitting or --grid count."""
    per_step: int | None = None
    """Tokens per step with --grid count; 1 by default."""
    temperature: float = 1.0
    """Divides the logits; 0 takes the most likely token."""
    top_k: int | None = None
    """Draw from the k most likely tokens only."""
    top_p: float | None = None
    """Draw from the smallest set of tokens with this much probability."""
    noise: Literal["float64", "float32"] = "float64"
    """Precision of the Gumbel noise; float32 lowers the effective temperature."""
    remask: float | None = None
    """ReMDM: mask generated tokens again with up to this probability per step, 0.02 say; only with
    --rule ancestral."""
    remask_kind: Literal["cap", "rescale"] = "cap"
    """cap: the probability is --remask where that is possible; rescale: --remask is a share of
    the largest possible one."""
    block_length: int | None = None
    """Finish blocks of so many tokens one after the other, left to right (semi-autoregressive).
    Default: the whole canvas at once."""
    cache: Literal["none", "prefix"] = "none"
    """prefix: keep keys and values of what precedes the block; needs --block-length. Exact for one
    layer, close for more."""
    guidance: float = 0.0
    """Classifier-free guidance: logits u + (1 + this)(c - u), where u is predicted with all given
    tokens masked; doubles the work."""

    @property
    def has_steps(self) -> bool:
        """True when a number of steps can be chosen."""
        return self.rule != "first_hitting" and self.grid != "count"

    def for_causal(self) -> Sampling:
        """What of this matters to a causal model: how a token is chosen."""
        kept = ("temperature", "top_k", "top_p", "noise")
        return Sampling(**{name: getattr(self, name) for name in kept})

    def check(self) -> Sampling:
        """This, or one :class:`UserError` that says what to change."""
        for name, value, allowed in choices_of(self):
            look_up(name.replace("_", " "), value, dict.fromkeys(allowed))
        if self.steps is not None and not 1 <= self.steps <= MOST_STEPS:
            raise UserError(f"--steps must be from 1 to {MOST_STEPS:,}, got {self.steps}")
        if not 0 <= self.temperature < float("inf"):
            raise UserError(f"--temperature must not be negative, got {self.temperature}")
        for name, value in (
            ("--top-k", self.top_k),
            ("--per-step", self.per_step),
            ("--block-length", self.block_length),
        ):
            if value is not None and value < 1:
                raise UserError(f"{name} must be at least 1, got {value}")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise UserError(f"--top-p must be above 0 and at most 1, got {self.top_p}")
        if not 0 <= self.guidance < float("inf"):
            raise UserError(f"--guidance must not be negative, got {self.guidance}")
        self._check_together()
        return self

    def _check_together(self) -> None:
        """Options that need or exclude one another."""
        if self.rule == "first_hitting" and (self.steps is not None or self.grid != "uniform"):
            raise UserError("--rule first_hitting has one step per token: no --steps or --grid")
        if self.grid == "count" and self.steps is not None:
            raise UserError("--grid count has as many steps as it needs: give --per-step instead")
        if self.per_step is not None and self.grid != "count":
            raise UserError("--per-step goes with --grid count")
        if self.remask is not None:
            if not 0 <= self.remask <= 1:
                raise UserError(f"--remask is a probability, got {self.remask}")
            if self.rule != "ancestral":
                raise UserError(f"--remask goes with --rule ancestral, not {self.rule}")
        if self.remask is None and self.remask_kind != "cap":
            raise UserError("--remask-kind needs --remask")
        if self.cache == "prefix" and self.block_length is None:
            raise UserError("--cache prefix keeps what precedes a block: give --block-length too")


def sampling_of(settings: Mapping[str, Any]) -> Sampling:
    """Settings by name; a misspelt one is refused."""
    known = {field.name: field for field in fields(Sampling)}
    for name in settings:
        look_up("setting", name, known)
    return Sampling(**settings).check()
