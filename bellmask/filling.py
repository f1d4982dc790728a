"""Rows of any length filled in batches, so that none depends on the batch it is in.

A row is padded to a multiple of :data:`WIDTH` tokens. Rows share a batch that agree in width and in
the number of tokens to fill (sampling counts its steps for the row with most), all padded or none.
All that is known from the row alone.

B rows of a batch, L their width.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

import torch
from torch import Tensor

from bellmask.diffusion.frameworks import Ordered, Shifted
from bellmask.generate.fill import fill
from bellmask.generate.settings import Sampling
from bellmask.generate.steps import OnStep, Step
from bellmask.run import Run

WIDTH = 32
"""Rows are padded to a multiple of so many tokens."""


@dataclass(frozen=True)
class Filled:
    """What was written into one row's gap."""

    ids: list[int]
    nfe: float
    """Network calls in which the row took part; mean over its batch."""


def fill_rows(
    run: Run,
    rows: Sequence[Tensor],
    sampling: Sampling,
    *,
    longest: int,
    seed: int = 0,
    first_sample: int = 0,
    samples: Sequence[int] | None = None,
    batch_size: int = 64,
    on_batch: Callable[[int], None] | None = None,
    on_step: OnStep | None = None,
) -> list[Filled]:
    """Fill the gap of each row; row i has the noise of sample ``first_sample + i``, or of
    ``samples[i]``.

    No row is padded beyond ``longest``. ``on_batch`` is told the rows done so far. ``on_step`` is
    told of rows in order, a batch having rows of one length, and does not see padding.
    """
    work = _Work(run, sampling, longest, seed, on_step)
    groups = [work.group(row) for row in rows]
    size = 1 if work.is_one_by_one else batch_size
    found: dict[int, Filled] = {}
    for numbers in _batches(groups, size, in_order=on_step is not None):
        samples_B = torch.tensor(
            [first_sample + n if samples is None else samples[n] for n in numbers]
        )
        made = work.fill([rows[n] for n in numbers], samples_B)
        found.update(zip(numbers, made, strict=True))
        if on_batch:
            on_batch(len(found))
    return [found[number] for number in range(len(rows))]


@dataclass(frozen=True)
class _Work:
    """What all batches have in common."""

    run: Run
    sampling: Sampling
    longest: int
    seed: int
    on_step: OnStep | None

    @property
    def is_one_by_one(self) -> bool:
        """A causal model of our own trunk takes one row at a time, without padding."""
        framework = self.run.framework
        return isinstance(framework, Ordered) and not isinstance(framework, Shifted)

    def width(self, length: int) -> int:
        """Tokens of a padded row."""
        return length if self.is_one_by_one else min(-(-length // WIDTH) * WIDTH, self.longest)

    def group(self, row: Tensor) -> Hashable:
        """Rows that may share a batch have the same one; see the top of this file.

        A cache holds what is before the first gap of the batch, so there all gaps begin together.
        """
        length, width = len(row), self.width(len(row))
        gap = int((row == self.run.tokenizer.mask_id).sum())
        is_exact = self.on_step is not None or self.sampling.cache != "none"
        return width, gap, length if is_exact else length == width

    def fill(self, rows: Sequence[Tensor], samples_B: Tensor) -> list[Filled]:
        """Fill rows of one group."""
        run, on_step = self.run, self.on_step
        x_BL, is_real_BL = pad_rows(rows, self.width(len(rows[0])), run.tokenizer.pad_id)
        made = fill(
            run.model,
            x_BL,
            run.framework,
            self.sampling,
            mask_id=run.tokenizer.mask_id,
            seed=self.seed,
            first_sample=int(samples_B[0]) if self.is_one_by_one else samples_B,
            is_real_BL=None if bool(is_real_BL.all()) else is_real_BL,
            device=run.device,
            on_step=on_step and _without_padding(on_step, len(rows[0])),
        )
        is_gap_BL = x_BL == run.tokenizer.mask_id
        pairs = zip(made.ids_BL, is_gap_BL, strict=True)
        return [Filled(ids_L[is_gap_L].tolist(), made.nfe) for ids_L, is_gap_L in pairs]


def _without_padding(on_step: OnStep, length: int) -> OnStep:
    def show(step: Step) -> None:
        on_step(replace(step, ids_BL=step.ids_BL[:, :length]))

    return show


def _batches(groups: Sequence[Hashable], size: int, in_order: bool) -> Iterator[list[int]]:
    """Numbers of rows of one group, neighbours if ``in_order``, ``size`` at a time."""
    places: dict[Hashable, int] = {}
    for group in groups:
        places.setdefault(group, len(places))
    numbers = list(range(len(groups)))
    if not in_order:
        numbers.sort(key=lambda number: places[groups[number]])
    for _, same in groupby(numbers, key=lambda number: groups[number]):
        together = list(same)
        for start in range(0, len(together), size):
            yield together[start : start + size]


def pad_rows(rows: Sequence[Tensor], width: int, pad_id: int) -> tuple[Tensor, Tensor]:
    """(rows [B, width], True where not padding)."""
    x_BL = torch.full((len(rows), width), pad_id)
    is_real_BL = torch.zeros(len(rows), width, dtype=torch.bool)
    for number, row in enumerate(rows):
        x_BL[number, : len(row)] = row
        is_real_BL[number, : len(row)] = True
    return x_BL, is_real_BL
