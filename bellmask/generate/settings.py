"""How to sample, in plain values: one description for the command line, Python and the engine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal

from bellmask.config.config import choices_of
from bellmask.generate.rules import RULES, RuleName
from bellmask.utils.errors import UserError, look_up

DEFAULT_STEPS = 128
MOST = 10**9
_RANGES = {
    "steps": (1, 1_000_000),  # beyond it a finer grid is first-hitting sampling, which has none
    "per_step": (1, MOST),
    "temperature": (0, MOST),
    "top_k": (1, MOST),
    "top_p": (1e-9, 1),
    "remask": (0, 1),
    "block_length": (1, MOST),
    "guidance": (0, MOST),
}


@dataclass(frozen=True)
class Sampling:
    """How a masked model fills a canvas. A causal model writes token by token in its own order; of
    all this only temperature, top_k, top_p and noise matter to it.
    """

    rule: RuleName = "ancestral"
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
    """prefix: keep keys and values of what precedes the block; needs --block-length and the
    built-in DiT. Exact for one layer without a local convolution, close otherwise."""
    guidance: float = 0.0
    """Classifier-free guidance: logits u + (1 + this)(c - u), where u is predicted with all given
    tokens masked; doubles the work."""

    @property
    def has_steps(self) -> bool:
        """True when a number of steps can be chosen."""
        return look_up("rule", self.rule, RULES).takes_grid and self.grid != "count"

    def for_causal(self) -> Sampling:
        """What of this matters to a causal model: how a token is chosen."""
        kept = ("temperature", "top_k", "top_p", "noise")
        return Sampling(**{name: getattr(self, name) for name in kept})

    def check(self) -> Sampling:
        """This, or one :class:`UserError` that says what to change."""
        for name, value, allowed in choices_of(self):
            look_up(name.replace("_", " "), value, dict.fromkeys(allowed))
        for name, (low, high) in _RANGES.items():
            value = getattr(self, name)
            if value is not None and not low <= value <= high:
                raise UserError(f"{_option(name)} must be from {low} to {high:,}, got {value}")
        has_grid, has_steps = RULES[self.rule].takes_grid, self.steps is not None
        if not has_grid and (has_steps or self.grid != "uniform"):
            raise UserError(f"--rule {self.rule} has one step per token: no --steps or --grid")
        if self.grid == "count" and has_steps:
            raise UserError("--grid count has as many steps as it needs: give --per-step instead")
        if self.per_step is not None and self.grid != "count":
            raise UserError("--per-step needs --grid count")
        if self.remask is not None and self.rule != "ancestral":
            raise UserError(f"--remask needs --rule ancestral, not {self.rule}")
        if self.remask is None and self.remask_kind != "cap":
            raise UserError("--remask-kind needs --remask")
        if self.cache == "prefix" and self.block_length is None:
            raise UserError("--cache prefix keeps what precedes a block: give --block-length too")
        return self

    def changed(self, since: Sampling | None = None) -> dict[str, Any]:
        """The settings that differ from ``since``, by default from the defaults."""
        plain = asdict(since or Sampling())
        return {name: value for name, value in asdict(self).items() if value != plain[name]}

    def refuse_for_causal(self) -> None:
        """A causal model has its own order: settings about order and blocks would be ignored."""
        if asked := self.changed(since=self.for_causal()):
            raise UserError(
                f"{', '.join(map(_option, asked))}: for masked models only; a causal model writes "
                "token by token in its own order"
            )


def _option(name: str) -> str:
    return "--" + name.replace("_", "-")


def sampling_of(settings: Mapping[str, Any]) -> Sampling:
    """Settings by name; a misspelled one is refused."""
    known = {field.name: field for field in fields(Sampling)}
    for name in settings:
        look_up("setting", name, known)
    return Sampling(**settings).check()
