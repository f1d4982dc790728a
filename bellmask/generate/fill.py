"""Fill canvases with any framework: by a rule for masked models, else token by token.

The parts: one batch of canvases (:func:`fill`); a run's canvas, any number of times; rows of any
length, in batches.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import groupby
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bellmask.diffusion.frameworks import Framework, Mdm, Ordered, Shifted
from bellmask.generate.canvas import Canvas, OnStep, Step, begin_canvas, frame_canvas, make_canvas
from bellmask.generate.causal import generate_in_order
from bellmask.generate.rules import RULES, Remasking, Rule
from bellmask.generate.sampler import (
    GRIDS,
    Generation,
    SamplingDenoiser,
    TokenChoice,
    generate,
)
from bellmask.generate.settings import DEFAULT_STEPS, Sampling
from bellmask.storage.loading import Loaded
from bellmask.utils.errors import UserError, look_up
from bellmask.utils.progress import NO_PROGRESS, Progress


def fill(
    model: Callable[..., Tensor],
    canvas_BL: Tensor,
    framework: Framework,
    sampling: Sampling,
    *,
    mask_id: int,
    seed: int = 0,
    first_sample: int | Tensor = 0,
    is_real_BL: Tensor | None = None,
    device: torch.device | None = None,
    on_step: OnStep | None = None,
) -> Generation:
    """Fill all masked positions the way ``sampling`` says.

    ``is_real_BL`` is False at padding behind a canvas; ``first_sample`` is the first row's number,
    or those of all rows.
    """
    sampling.check()
    if getattr(model, "first_maskable", 0) and bool((canvas_BL[:, 0] == mask_id).any()):
        raise UserError(
            "this model predicts a token from what is before it: the first one must be given (BOS)"
        )
    choice = TokenChoice(
        sampling.temperature, sampling.top_k, sampling.top_p, getattr(torch, sampling.noise)
    )
    noise: dict[str, Any] = {
        "choice": choice,
        "seed": seed,
        "first_sample": first_sample,
        "on_step": on_step,
    }
    if isinstance(framework, Shifted):
        _refuse_for_causal(sampling)
        network = SamplingDenoiser(model, mask_id, is_real_BL=is_real_BL, device=device)
        return _left_to_right(network, canvas_BL, noise)
    if isinstance(framework, Ordered):
        _refuse_for_causal(sampling)
        if is_real_BL is not None or not isinstance(first_sample, int):
            raise UserError("a causal model of our own trunk takes one canvas at a time")
        return generate_in_order(
            model, canvas_BL, framework, mask_id=mask_id, device=device, **noise
        )
    assert isinstance(framework, Mdm)
    return generate(
        SamplingDenoiser(
            model, mask_id, is_real_BL=is_real_BL, guidance=sampling.guidance, device=device
        ),
        canvas_BL,
        make_grid(sampling),
        make_rule(sampling),
        schedule=framework.schedule,
        block_length=sampling.block_length,
        is_cached=sampling.cache == "prefix",
        **noise,
    )


def _left_to_right(
    network: SamplingDenoiser, canvas_BL: Tensor, noise: dict[str, Any]
) -> Generation:
    """Token by token with a causal LM: blocks of one token; what is masked later it cannot see."""
    is_masked_BL = canvas_BL == network.mask_id
    if network.is_real_BL is not None:
        is_masked_BL = is_masked_BL | ~network.is_real_BL  # padding comes behind all
    if bool(is_masked_BL.long().diff(dim=1).lt(0).any()):
        raise UserError("this model writes left to right: it takes a prefix, not gaps")
    return generate(network, canvas_BL, 1, RULES["random"], block_length=1, **noise)


def make_rule(sampling: Sampling) -> Rule:
    """The rule that the settings name."""
    if sampling.remask is not None:
        return Remasking(sampling.remask, sampling.remask_kind)
    return look_up("rule", sampling.rule, RULES)


def make_grid(sampling: Sampling) -> Tensor | int | None:
    """The grid that the settings name, or tokens per step; None for a rule without one."""
    if sampling.rule == "first_hitting":
        return None
    if sampling.grid == "count":
        return sampling.per_step or 1
    return look_up("grid", sampling.grid, GRIDS)(sampling.steps or DEFAULT_STEPS)


def _refuse_for_causal(sampling: Sampling) -> None:
    """A causal model has its own order: settings about order and blocks would be ignored."""
    kept = asdict(sampling.for_causal())
    asked = [name for name, value in asdict(sampling).items() if value != kept[name]]
    if asked:
        given = ", ".join("--" + name.replace("_", "-") for name in asked)
        raise UserError(
            f"{given}: for masked models only; a causal model writes token by token in its own "
            "order"
        )


# One canvas of a run, any number of times.


def run_canvas(
    run: Loaded, *, prefix: str = "", template: str | None = None, length: int | None = None
) -> Canvas:
    """A row to fill: empty, after a prefix, or with the gaps of a template.

    Where the run's rows are wrapped, BOS and EOS count towards the length; so does the BOS that
    a causal LM predicts the first token from.
    """
    first = run.model.first_maskable
    frame = 2 if run.is_wrapped else first
    inner = (length or run.config.data.block_length) - frame
    if inner < 1:
        raise UserError(f"a length of {length} leaves no room between BOS and EOS")
    canvas = make_canvas(run.tokenizer, inner, prefix=prefix, template=template)
    if run.is_wrapped:
        return frame_canvas(canvas, run.tokenizer, run.framework)
    return begin_canvas(canvas, run.tokenizer) if first else canvas


def fill_canvas(
    run: Loaded,
    canvas: Canvas,
    count: int = 1,
    sampling: Sampling | None = None,
    *,
    seed: int = 0,
    first_sample: int = 0,
    batch_size: int = 64,
    progress: Progress = NO_PROGRESS,
    on_step: OnStep | None = None,
) -> Generation:
    """Fill a canvas ``count`` times; sample i is the same whatever the batch size.

    ``first_sample`` is the number of the first one: other numbers, other noise.
    """
    if count < 1:
        raise UserError(f"at least one sample must be asked for, got {count}")
    parts = []
    for first in range(0, count, batch_size):
        part = fill(
            run.model,
            canvas.repeat(min(batch_size, count - first)),
            run.framework,
            sampling or Sampling(),
            mask_id=canvas.mask_id,
            seed=seed,
            first_sample=first_sample + first,
            device=run.device,
            on_step=on_step,
        )
        parts.append(part)
        progress.advance(len(part.ids_BL))
    return Generation(
        torch.cat([p.ids_BL for p in parts]),
        sum(p.num_calls for p in parts),
        sum(p.num_rows for p in parts),
    )


def decode_samples(run: Loaded, made: Generation) -> list[str]:
    """Generated ids as text; of a run on single documents, up to the first EOS."""
    rows = [row.numpy() for row in made.ids_BL]
    if run.config.data.packing == "unpacked":
        # a given BOS may have the same id
        start = 1 if run.is_wrapped or run.model.first_maskable else 0
        rows = [row[: start + _first(row[start:] == run.tokenizer.eos_id)] for row in rows]
    return [run.tokenizer.decode(row) for row in rows]


def _first(is_here: NDArray[np.bool_]) -> int:
    """Where the first True is; the length if there is none."""
    return int(is_here.argmax()) if is_here.any() else len(is_here)


# Rows of any length filled in batches, so that none depends on the batch it is in.
#
# A row is padded to a multiple of :data:`WIDTH` tokens. Rows share a batch that agree in width and
# in the number of tokens to fill (sampling counts its steps for the row with most), all padded or
# none. All that is known from the row alone.
#
# B rows of a batch, L their width.

WIDTH = 32
"""Rows are padded to a multiple of so many tokens."""


@dataclass(frozen=True)
class Filled:
    """What was written into one row's gap."""

    ids: list[int]
    nfe: float
    """Network calls in which the row took part; mean over its batch."""


def fill_rows(
    run: Loaded,
    rows: Sequence[Tensor],
    sampling: Sampling,
    *,
    longest: int,
    seed: int = 0,
    first_sample: int = 0,
    samples: Sequence[int] | None = None,
    batch_size: int = 64,
    progress: Progress = NO_PROGRESS,
    on_step: OnStep | None = None,
) -> list[Filled]:
    """Fill the gap of each row; row i has the noise of sample ``first_sample + i``, or of
    ``samples[i]``.

    No row is padded beyond ``longest``. ``on_step`` is
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
        progress.advance(len(made))
    return [found[number] for number in range(len(rows))]


@dataclass(frozen=True)
class _Work:
    """What all batches have in common."""

    run: Loaded
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
        """Rows that may share a batch have the same one; see above.

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
