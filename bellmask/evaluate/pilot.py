"""How many masks per block an evaluation needs: the smallest number whose noise is small enough.

Each trial evaluates a few blocks twice with fresh masks; half the mean square of the differences
is the variance that masks alone cause in a block's value, whatever its source: which tokens were
hidden, or where the mask counts fell. It shrinks faster than 1 / draws, so it is measured at each
number of draws and not extrapolated from one.

Y[b] is a block's NLL per token.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from bellmask.data.blocks import Blocks
from bellmask.evaluate.result import Likelihood
from bellmask.utils.rng import stream_key

LADDER = (2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
"""Draws that are tried. At least 2: then each block covers all context counts by itself."""
PILOT_BLOCKS = 32
"""Blocks of each set that a trial evaluates; the noise found is good to about an eighth."""

Evaluate = Callable[..., Likelihood]
"""Called as ``evaluate(blocks, draws=, seed=)``."""


@dataclass(frozen=True)
class Case:
    """One run on one set, with the blocks that will be used."""

    run: str
    set: str
    blocks: Blocks
    evaluate: Evaluate


@dataclass(frozen=True)
class Pilot:
    """The number of draws that was chosen, and why."""

    draws: int
    precision: float | None = None
    """The largest noise allowed, as a share of the perplexity; None where none was asked for."""
    noise: float | None = None
    """The largest one found at this number of draws."""
    where: str = ""
    """The set and run that have it."""
    tried: list[dict[str, Any]] = field(default_factory=list)

    @property
    def reason(self) -> str:
        """A sentence for the reader."""
        if self.precision is None or self.noise is None:
            return f"{self.draws} draws per block and seed, as given" if self.draws > 1 else "exact"
        found = f"{self.noise:.2%} of the perplexity ({self.where})"
        if self.noise > self.precision:
            return (
                f"{self.draws} draws per block and seed, the most that are tried: masks still move "
                f"{found}, more than the {self.precision:.2%} asked for; more --blocks help"
            )
        return (
            f"{self.draws} draws per block and seed: the fewest with which masks move no mean "
            f"over seeds by more than {self.precision:.2%}; most of all {found}"
        )


def mask_noise(case: Case, draws: int, seed: int, num_seeds: int = 1) -> float:
    """Standard deviation, over masks alone, of the set's NLL in the mean over evaluation seeds.

    d ppl / ppl = d nll, so nats are shares of the perplexity.
    """
    few = case.blocks.spread(PILOT_BLOCKS)
    one, two = (
        case.evaluate(few, draws=draws, seed=stream_key(seed, "pilot", draws, again)).block_nll
        for again in (1, 2)
    )
    return math.sqrt(float(((one - two) ** 2).mean()) / 2 / len(case.blocks) / num_seeds)


def choose_draws(
    cases: Sequence[Case],
    precision: float,
    *,
    seed: int,
    num_seeds: int = 1,
    ladder: Sequence[int] = LADDER,
    on_trial: Callable[[int, int], None] | None = None,
) -> Pilot:
    """The fewest draws, the same for all cases, with which every one has noise below precision.

    A case that is below it is not tried again with more. ``on_trial`` is told (done, in all).
    """
    left, tried, done = list(cases), list[dict[str, Any]](), 0
    for draws in ladder:
        noise: list[float] = []
        for case in left:
            if on_trial:
                on_trial(done, done + len(left) - len(noise))
            noise.append(mask_noise(case, draws, seed, num_seeds))
            done += 1
        worst = max(range(len(left)), key=noise.__getitem__)
        where = f"{left[worst].set}, {left[worst].run}"
        tried.append({"draws": draws, "noise": noise[worst], "where": where})
        left = [case for case, value in zip(left, noise) if value > precision]
        if not left:
            break
    last = tried[-1]
    return Pilot(last["draws"], precision, last["noise"], last["where"], tried)
