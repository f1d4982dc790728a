"""The sampling loop: a network, canvases with given tokens, a time grid and a rule.

Each position has numbers of its own, keyed by sample and position, so a sample does not depend on
the batch it is in. For blind rules the reveal times are known beforehand: the network is called
only when something is revealed, only on rows where it is, its head only on those positions. That is
exact for time-conditioned models too (they are told the time of the step in which they are called).

B canvases, L length, N predicted positions, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from bellmask.data.blocks import share_out
from bellmask.diffusion.schedules import Linear, Schedule
from bellmask.generate.canvas import check_rows
from bellmask.generate.choice import Choice
from bellmask.generate.grids import count_grid
from bellmask.generate.network import Network
from bellmask.generate.rules import RULES, Moment, Rule
from bellmask.generate.steps import OnStep, Step
from bellmask.utils.errors import UserError
from bellmask.utils.rng import stream_key, uniform_rows


@dataclass(frozen=True)
class Generation:
    """Finished rows and what they cost."""

    ids_BL: Tensor
    num_calls: int
    """Network calls, over all steps in which anything was revealed."""
    num_rows: int
    """Rows sent through the network in total (twice per call with guidance)."""

    @property
    def nfe(self) -> float:
        """Function evaluations per sample: how often its row went through the network."""
        return self.num_rows / len(self.ids_BL)


@dataclass(frozen=True)
class Noise:
    """Random numbers of numbered samples of a seed, by position and step."""

    seed: int
    samples_B: Tensor
    length: int

    @property
    def first(self) -> int:
        """The first sample's number."""
        return int(self.samples_B[0])

    @property
    def place_BL(self) -> Tensor:
        """A counter for each position of each sample."""
        return self.samples_B[:, None] * self.length + torch.arange(self.length)

    def numbers(self, *name: str | int) -> Tensor:
        """Uniform numbers of a named stream, [B, L]."""
        return uniform_rows(stream_key(self.seed, *name), self.samples_B, self.length)


@dataclass
class Progress:
    """Where a generation stands, over all blocks that take turns."""

    num_steps: int
    on_step: OnStep | None = None
    number: int = 0

    def tell(self, network: Network, noise: Noise, x_BL: Tensor, t: float) -> None:
        """Report the rows as they are now, the untouched canvas as step 0."""
        if self.on_step:
            self.on_step(Step(self.number, self.num_steps, network.num_calls, t, noise.first, x_BL))
        self.number += 1


@torch.no_grad()
def generate(
    network: Network,
    canvas_BL: Tensor,
    grid: Tensor | int | None,
    rule: Rule = RULES["ancestral"],
    *,
    choice: Choice | None = None,
    schedule: Schedule | None = None,
    seed: int = 0,
    first_sample: int | Tensor = 0,
    block_length: int | None = None,
    is_cached: bool = False,
    on_step: OnStep | None = None,
) -> Generation:
    """Fill every masked position of the canvases; given tokens never change.

    ``grid`` goes from t = 1 to 0, or is the number of tokens that each step reveals (ancestral
    rules: on average); None is 1. With ``block_length`` blocks of so many positions are finished
    one after the other from the first masked position on, each with its share of the grid's
    steps; ``is_cached`` keeps what comes before the block in a cache. ``first_sample`` is the first
    row's number, or those of all rows [B]: other numbers, other noise. Rows should be masked at the
    same positions: steps are counted for the row with most to fill.
    """
    schedule, choice = schedule or Linear(), choice or Choice()
    check_rows(canvas_BL, network.mask_id)
    _check(network, canvas_BL, grid, rule)
    if block_length is not None and block_length < 1:
        raise UserError(f"a block has at least one token, got {block_length}")
    if is_cached:
        network.check_cacheable()
    network.begin(canvas_BL)
    numbers_B = first_sample
    if isinstance(numbers_B, int):
        numbers_B = numbers_B + torch.arange(len(canvas_BL))
    noise = Noise(seed, numbers_B, canvas_BL.shape[1])
    x_BL, u_BL = canvas_BL.clone(), noise.numbers("reveal")
    turns = _turns(canvas_BL == network.mask_id, block_length)
    grids = _share_grid(grid, turns, schedule)
    progress = Progress(sum(len(one) - 1 for one in grids), on_step)
    progress.tell(network, noise, x_BL, 1.0)
    for is_turn_BL, part in zip(turns, grids, strict=True):
        if is_cached and (start := int(is_turn_BL.any(0).long().argmax())):
            network.cache_prefix(start)
        block = _Block(network, rule, choice, schedule, noise, is_turn_BL, len(turns) == 1, u_BL)
        for k in range(len(part) - 1):
            block.step(x_BL, part[k], part[k + 1], k)
            progress.tell(network, noise, x_BL, block.clock(x_BL, part[k + 1]))
    return Generation(x_BL, network.num_calls, network.num_rows)


@dataclass(frozen=True)
class _Block:
    """Positions that are filled together, from t = 1 to t = 0."""

    network: Network
    rule: Rule
    choice: Choice
    schedule: Schedule
    noise: Noise
    is_turn_BL: Tensor
    """Positions that were masked at the start and are to be filled."""
    is_alone: bool
    """There is no other block, so the grid's times are those of the whole row."""
    u_BL: Tensor
    """When each position's turn comes, as a share of visible tokens."""

    def step(self, x_BL: Tensor, t: Tensor, s: Tensor, k: int) -> None:
        """From t to s, in place."""
        moment = self._moment(x_BL, t, s, k)
        is_forgotten_BL = self.rule.forgotten(moment)
        is_candidate_BL = self.rule.candidates(moment)
        if bool(is_candidate_BL.any()):
            logits_NV = self.network.logits(x_BL, is_candidate_BL, self.rule.times(moment))
            key = stream_key(self.noise.seed, "gumbel", *([k] if self.rule.is_repeated else []))
            tokens_N = self.choice.draw(logits_NV, self.noise.place_BL[is_candidate_BL], key)
            is_revealed_BL = self.rule.revealed(moment, is_candidate_BL, logits_NV, tokens_N)
            x_BL[is_revealed_BL] = tokens_N.cpu()[is_revealed_BL[is_candidate_BL]]
        if is_forgotten_BL is not None:
            x_BL[is_forgotten_BL] = self.network.mask_id

    def clock(self, x_BL: Tensor, t: Tensor) -> float:
        """The time of the whole rows when the block's own is t."""
        share = (x_BL == self.network.mask_id).double().mean()
        return float(t if self.is_alone else self.schedule.inverse(1 - share))

    def _moment(self, x_BL: Tensor, t: Tensor, s: Tensor, k: int) -> Moment:
        is_masked_BL = x_BL == self.network.mask_id
        is_open_BL = is_masked_BL & self.is_turn_BL
        alpha_t, alpha_s = self.schedule.alpha(t), self.schedule.alpha(s)
        remaining_B = (self.is_turn_BL.sum(1) * (1 - alpha_s)).round().long()
        real_BL = self.network.is_real_BL
        length_B = x_BL.shape[1] if real_BL is None else real_BL.sum(1)
        count_t_B = self.schedule.inverse(1 - is_masked_BL.sum(1).double() / length_B)
        return Moment(
            is_open_BL=is_open_BL,
            is_made_BL=self.is_turn_BL & ~is_masked_BL,
            alpha_t=float(alpha_t),
            alpha_s=float(alpha_s),
            budget_B=(is_open_BL.sum(1) - remaining_B).clamp(min=0),
            t_B=t.expand(len(x_BL)) if self.is_alone else count_t_B,
            count_t_B=count_t_B,
            is_alone=self.is_alone,
            u_BL=self.u_BL,
            fresh=lambda name: self.noise.numbers(name, k),
            schedule=self.schedule,
        )


def _check(network: Network, canvas_BL: Tensor, grid: Tensor | int | None, rule: Rule) -> None:
    """Refuse what would not fill every masked position, before anything is done."""
    real_BL = network.is_real_BL
    if real_BL is not None and bool(((canvas_BL == network.mask_id) & ~real_BL).any()):
        raise UserError("a padded position of the canvas is masked: pads cannot be generated")
    if not rule.takes_grid and grid is not None:
        raise UserError("first-hitting sampling has times of its own: it takes no grid")
    if isinstance(grid, int) and grid < 1:
        raise UserError(f"a step reveals at least one token, got {grid}")
    if isinstance(grid, Tensor):
        is_whole = grid.ndim == 1 and len(grid) > 1 and float(grid[0]) == 1 and float(grid[-1]) == 0
        if not is_whole or bool((grid.diff() >= 0).any()):
            raise UserError("a time grid falls from exactly 1 to exactly 0, step by step")


def _turns(is_masked_BL: Tensor, block_length: int | None) -> list[Tensor]:
    """The masked positions, or those of each block from a row's first masked position on."""
    if block_length is None:
        return [is_masked_BL]
    start_B = is_masked_BL.long().argmax(dim=1, keepdim=True)
    block_BL = (torch.arange(is_masked_BL.shape[1]) - start_B).div(
        block_length, rounding_mode="floor"
    )
    last = int(torch.where(is_masked_BL, block_BL, 0).max())
    turns = [is_masked_BL & (block_BL == number) for number in range(last + 1)]
    return [one for one in turns if bool(one.any())]


def _share_grid(grid: Tensor | int | None, turns: list[Tensor], schedule: Schedule) -> list[Tensor]:
    """For each turn a grid of the same shape, steps in proportion to its tokens, at least one."""
    sizes = [int(one.sum(1).max()) for one in turns]
    if not isinstance(grid, Tensor):
        each = 1 if grid is None else grid
        return [count_grid(size, each, schedule) if size else torch.ones(1) for size in sizes]
    if len(turns) < 2:
        return [grid] * len(turns)
    last = len(grid) - 1
    parts = []
    for steps in share_out(sizes, last):
        at = torch.linspace(0, last, max(1, steps) + 1, dtype=torch.float64)
        low = at.floor().long().clamp(max=last - 1)
        parts.append(torch.lerp(grid[low], grid[low + 1], at - low))
    return parts
