"""Fill canvases with any framework: by a rule for masked models, else token by token.

The parts: one batch of canvases (:func:`fill`); a run's canvas, any number of times; rows of any
length, in batches.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from bellmask.diffusion.frameworks import Framework, Mdm, Ordered, Shifted
from bellmask.generate.canvas import (
    Canvas,
    OnStep,
    begin_canvas,
    canvas_from_prefix,
    canvas_from_text,
    empty_canvas,
    frame_canvas,
)
from bellmask.generate.rules import RULES, Remasking, Rule
from bellmask.generate.sampler import (
    GRIDS,
    Generation,
    SamplingDenoiser,
    TokenChoice,
    generate,
    generate_in_order,
)
from bellmask.generate.settings import DEFAULT_STEPS, Sampling
from bellmask.storage.loading import Loaded
from bellmask.utils.errors import UserError
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
    noise: dict[str, Any] = {"choice": choice, "seed": seed, "first_sample": first_sample}
    noise["on_step"] = on_step
    if framework.is_causal:
        sampling.refuse_for_causal()
    if isinstance(framework, Ordered) and not isinstance(framework, Shifted):
        if is_real_BL is not None:
            raise UserError("a causal model of our own trunk takes rows of one length, unpadded")
        return generate_in_order(
            model, canvas_BL, framework, mask_id=mask_id, device=device, **noise
        )
    network = SamplingDenoiser(
        model, mask_id, is_real_BL=is_real_BL, guidance=sampling.guidance, device=device
    )
    if isinstance(framework, Shifted):
        return _left_to_right(network, canvas_BL, noise)
    assert isinstance(framework, Mdm)
    return generate(
        network,
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
    return RULES[sampling.rule]


def make_grid(sampling: Sampling) -> Tensor | int | None:
    """The grid that the settings name, or tokens per step; None for a rule without one."""
    if not RULES[sampling.rule].takes_grid:
        return None
    if sampling.grid == "count":
        return sampling.per_step or 1
    return GRIDS[sampling.grid](sampling.steps or DEFAULT_STEPS)


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
    if template is not None:
        canvas = canvas_from_text(run.tokenizer, template)
    elif prefix:
        canvas = canvas_from_prefix(run.tokenizer, prefix, inner)
    else:
        canvas = empty_canvas(run.tokenizer, inner)
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
    # of a wrapped row the first token is BOS, which may have the same id
    start = 1 if run.is_wrapped or run.model.first_maskable else 0
    texts = []
    for row in made.ids_BL.numpy():
        if run.config.data.packing == "unpacked":
            ends = (row[start:] == run.tokenizer.eos_id).nonzero()[0]
            row = row[: start + ends[0]] if len(ends) else row
        texts.append(run.tokenizer.decode(row))
    return texts


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
    samples: Sequence[int] | None = None,
    batch_size: int = 64,
    progress: Progress = NO_PROGRESS,
    on_step: OnStep | None = None,
) -> list[Filled]:
    """Fill the gap of each row; row i has the noise of sample i, or of ``samples[i]``.

    No row is padded beyond ``longest``. ``on_step`` is told of rows in order, a batch having rows
    of one length, and does not see padding.
    """
    tokenizer, numbers = run.tokenizer, range(len(rows)) if samples is None else samples
    # a causal model of our own trunk takes one row at a time, without padding
    is_alone = isinstance(run.framework, Ordered) and not isinstance(run.framework, Shifted)
    found: dict[int, Filled] = {}
    for batch, width in _batches(
        [(len(row), int((row == tokenizer.mask_id).sum())) for row in rows],
        1 if is_alone else batch_size,
        lambda length: length if is_alone else min(-(-length // WIDTH) * WIDTH, longest),
        # a cache holds what is before the first gap of the batch, so there all gaps begin together
        is_exact=on_step is not None or sampling.cache != "none",
        in_order=on_step is not None,
    ):
        x_BL, is_real_BL = pad_rows([rows[place] for place in batch], width, tokenizer.pad_id)
        made = fill(
            run.model,
            x_BL,
            run.framework,
            sampling,
            mask_id=tokenizer.mask_id,
            seed=seed,
            first_sample=torch.tensor([numbers[place] for place in batch]),
            is_real_BL=None if bool(is_real_BL.all()) else is_real_BL,
            device=run.device,
            on_step=on_step and _without_padding(on_step, len(rows[batch[0]])),
        )
        for place, ids_L, canvas_L in zip(batch, made.ids_BL, x_BL, strict=True):
            found[place] = Filled(ids_L[canvas_L == tokenizer.mask_id].tolist(), made.nfe)
        progress.advance(len(batch))
    return [found[place] for place in range(len(rows))]


def _batches(
    sizes: Sequence[tuple[int, int]],
    batch_size: int,
    width_of: Callable[[int], int],
    *,
    is_exact: bool,
    in_order: bool,
) -> list[tuple[list[int], int]]:
    """(places, width) of rows that may share a batch, from (length, gap) of each row.

    ``is_exact``: only rows of one length; ``in_order``: only neighbors.
    """
    batches: list[tuple[list[int], int]] = []
    latest: dict[Hashable, list[int]] = {}
    for place, (length, gap) in enumerate(sizes):
        width = width_of(length)
        group = width, gap, length if is_exact else length == width
        batch = latest.get(group, [])
        if not batch or len(batch) == batch_size or (in_order and batch is not batches[-1][0]):
            batch = latest[group] = []
            batches.append((batch, width))
        batch.append(place)
    return batches


def _without_padding(on_step: OnStep, length: int) -> OnStep:
    return lambda step: on_step(replace(step, ids_BL=step.ids_BL[:, :length]))


def pad_rows(rows: Sequence[Tensor], width: int, pad_id: int) -> tuple[Tensor, Tensor]:
    """(rows [B, width], True where not padding)."""
    x_BL = torch.full((len(rows), width), pad_id)
    is_real_BL = torch.zeros(len(rows), width, dtype=torch.bool)
    for number, row in enumerate(rows):
        x_BL[number, : len(row)] = row
        is_real_BL[number, : len(row)] = True
    return x_BL, is_real_BL
