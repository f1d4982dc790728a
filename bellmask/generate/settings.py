"""How to sample, in plain values: one description for the command line, Python and the engine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal

from bellmask.config.config import choices_of
from bellmask.generate.rules import RULES, RuleName
from bellmask.utils.errors import UserError, look_up, refuse

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
    """How a masked model fills a canvas. A causal model generates token by token in its own order;
    only temperature, top_k, top_p and noise apply to it.
    """

    rule: RuleName = "ancestral"
    """Which masked tokens a step reveals. ancestral: each at random (the reverse process);
    first_hitting: the same without a grid, one per call; random: in random order; most_confident,
    margin, entropy: the most certain ones by probability, margin over the second, or low
    entropy."""
    grid: Literal["uniform", "cosine", "count"] = "uniform"
    """Time grid. uniform: equal steps; cosine: few tokens at first; count: a fixed number per
    step."""
    steps: int | None = None
    """Sampling steps; default: 128, or 64 for answers to prompts as in the paper. The network is
    called only in steps that reveal a token. Not with --rule first_hitting or --grid count."""
    per_step: int | None = None
    """Tokens per step with --grid count; default: 1."""
    temperature: float = 1.0
    """Sampling temperature; 0 takes the most likely token."""
    top_k: int | None = None
    """Sample from the k most likely tokens only."""
    top_p: float | None = None
    """Sample from the smallest set of tokens with this much probability."""
    noise: Literal["float64", "float32"] = "float64"
    """Precision of the Gumbel noise; float32 lowers the effective temperature."""
    remask: float | None = None
    """ReMDM: remask generated tokens with up to this probability per step, e.g. 0.02; only with
    --rule ancestral."""
    remask_kind: Literal["cap", "rescale"] = "cap"
    """cap: the probability is --remask, up to the largest possible; rescale: --remask is a fraction
    of the largest possible one."""
    block_length: int | None = None
    """Generate blocks of this many tokens one after another, left to right (semi-autoregressive).
    Default: the whole canvas at once."""
    cache: Literal["none", "prefix"] = "none"
    """prefix: cache keys and values of the tokens before the block; needs --block-length and the
    built-in DiT. Exact for one layer without a local convolution, otherwise approximate."""
    guidance: float = 0.0
    """Classifier-free guidance weight w: logits u + (1 + w)(c - u), where u is predicted with all
    given tokens masked; doubles the cost."""

    @property
    def has_steps(self) -> bool:
        """True when a number of steps can be chosen."""
        return look_up("rule", self.rule, RULES).takes_grid and self.grid != "count"

    def for_causal(self) -> Sampling:
        """The settings that apply to a causal model: those about drawing a token."""
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
        rule, has_steps, is_count = self.rule, self.steps is not None, self.grid == "count"
        is_bound = not RULES[rule].takes_grid and (has_steps or self.grid != "uniform")
        is_remasked, is_cached = self.remask is not None, self.cache == "prefix"
        problems = {
            f"--rule {rule} takes one step per token: omit --steps and --grid": is_bound,
            "--grid count cannot be combined with --steps: use --per-step": is_count and has_steps,
            "--per-step needs --grid count": self.per_step is not None and not is_count,
            f"--remask needs --rule ancestral, not {rule}": is_remasked and rule != "ancestral",
            "--remask-kind needs --remask": self.remask_kind != "cap" and not is_remasked,
            "--cache prefix needs --block-length": is_cached and self.block_length is None,
        }
        refuse(problems)
        return self

    def changed(self) -> dict[str, Any]:
        """The settings that differ from the defaults."""
        plain = asdict(Sampling())
        return {name: value for name, value in asdict(self).items() if value != plain[name]}

    def refuse_for_causal(self) -> None:
        """A causal model has its own order: settings about order and blocks would be ignored."""
        if asked := self.changed().keys() - self.for_causal().changed().keys():
            raise UserError(f"{', '.join(map(_option, sorted(asked)))}: for masked models only")


def _option(name: str) -> str:
    return "--" + name.replace("_", "-")


def sampling_of(settings: Mapping[str, Any]) -> Sampling:
    """Settings by name; an unknown name is an error."""
    known = {field.name: field for field in fields(Sampling)}
    for name in settings:
        look_up("setting", name, known)
    return Sampling(**settings).check()
