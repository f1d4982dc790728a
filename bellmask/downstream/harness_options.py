"""How lm-eval's requests are answered: one description for ``--model_args`` and our own command."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal

from bellmask.config.config import parse_options
from bellmask.utils.errors import UserError, look_up

WHERE = "--model_args of the model bellmask"


@dataclass(frozen=True)
class RequestOptions:
    """Names and meaning are those of ``--model_args NAME=VALUE,...`` of lm-eval."""

    checkpoint: str = "latest"
    """latest, best, or a step."""
    weights: Literal["auto", "ema", "raw"] = "auto"
    """auto: the moving average where there is one."""
    estimator: Literal["auto", "exact", "strata", "bernoulli", "diffullama", "left_to_right"] = (
        "auto"
    )
    """How a masked model's log-probability of a continuation is found. auto: all masks of short
    ones, evenly spread mask counts (strata) for longer ones. An ARM is always exact."""
    draws: int = 16
    """Masks per continuation where they are drawn; orders of an AoARM."""
    longest_exact: int = 6
    """Tokens up to which auto takes all masks (2^n - 1 of them)."""
    common: bool = True
    """Choices of a question draw the same masks (common random numbers)."""
    seed: int = 0
    """Of masks and samples; lm-eval's own seeds have no say in them."""
    batch_tokens: int = 8192
    """Tokens per forward pass; changes no result. lm-eval's batch_size is not used."""
    gap: int = 32
    """Tokens to write where the task says no max_gen_toks."""
    rule: Literal["ancestral", "first_hitting", "random", "most_confident", "margin", "entropy"] = (
        "most_confident"
    )
    """Which masked tokens a step of writing reveals, see bellmask generate."""
    steps: int | None = None
    """Steps of writing; default: one token per step."""
    temperature: float | None = None
    """Of writing; default: what the task says, 0 where it does not sample."""

    def check(self) -> RequestOptions:
        """This, or one :class:`UserError`; draws and masks are checked by the estimator."""
        if self.gap < 1:
            raise UserError(f"gap must be at least 1, got {self.gap}")
        if self.steps is not None and self.rule == "first_hitting":
            raise UserError("rule first_hitting has one step per token: no steps")
        return self


def parse_arguments(given: Mapping[str, Any]) -> RequestOptions:
    """Values as lm-eval parsed them (numbers, True, None or text); unknown names are refused."""
    known = {field.name: field for field in fields(RequestOptions)}
    args = []
    for name, value in given.items():
        look_up("argument of the model bellmask", name, {**known, "run": None})
        option = name.replace("_", "-")
        if isinstance(value, bool):
            args.append(f"--{option}" if value else f"--no-{option}")
        elif value is not None:
            args.append(f"--{option}={value}")
    return parse_options(RequestOptions, None, args, WHERE).check()
