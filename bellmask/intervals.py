"""'500 steps', '20M tokens', '10 minutes', 'never': when a periodic action is due."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

_UNITS: dict[str, Literal["steps", "tokens", "minutes"]] = {
    "": "steps",
    "step": "steps",
    "steps": "steps",
    "tok": "tokens",
    "token": "tokens",
    "tokens": "tokens",
    "m": "minutes",
    "min": "minutes",
    "minute": "minutes",
    "minutes": "minutes",
}
_FACTORS = {"": 1, "k": 10**3, "K": 10**3, "M": 10**6, "G": 10**9, "B": 10**9}
MOST = 1e18
_PATTERN = re.compile(r"^\s*([0-9][0-9_]*(?:\.[0-9]+)?)\s*([kKMGB]?)\s*([a-z]*)\s*$")


@dataclass(frozen=True)
class Interval:
    """An amount of steps, tokens or minutes; amount 0 means never."""

    amount: float
    unit: Literal["steps", "tokens", "minutes"]

    @staticmethod
    def parse(text: str) -> Interval:
        """Read an interval; ValueError names what is allowed."""
        if text.strip() == "never":
            return Interval(0, "steps")
        match = _PATTERN.match(text)
        if match is None or match[3] not in _UNITS:
            raise ValueError(
                f"{text!r} is not an interval; write '500 steps', '20M tokens', "
                "'10 minutes' or 'never'"
            )
        amount = float(match[1].replace("_", "")) * _FACTORS[match[2]]
        unit = _UNITS[match[3]]
        if not 0 < amount < MOST or (unit != "minutes" and amount != int(amount)):
            raise ValueError(
                f"{text!r} is not an interval: the amount must be a positive whole number "
                f"below {MOST:.0e}"
            )
        return Interval(amount, unit)

    def is_due(self, before: Progress, now: Progress) -> bool:
        """True when a multiple of the amount was passed between two moments."""
        if self.amount == 0:
            return False
        old, new = getattr(before, self.unit), getattr(now, self.unit)
        return int(new // self.amount) > int(old // self.amount)


@dataclass(frozen=True)
class Progress:
    """How far a run is."""

    steps: int
    tokens: int
    minutes: float
