"""Fill canvases with any framework: by a rule for masked models, else token by token.

The parts: one batch of canvases (:func:`fill`); a run's canvas, any number of times; rows of any
length, in batches.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bellmask.data.tokenizers import Tokenizer
from bellmask.diffusion.frameworks import Framework, Mdm, Ordered, Shifted
from bellmask.generate import sampler
from bellmask.generate.rules import RULES, Remasking, Rule
from bellmask.generate.sampler import OnStep, Step, canvas_from_pieces, read_gaps
from bellmask.generate.settings import DEFAULT_STEPS, Sampling
from bellmask.storage.loading import Loaded
from bellmask.utils.distributed import autocast
from bellmask.utils.errors import UserError
from bellmask.utils.progress import NO_PROGRESS, Progress


def fill(
    model: Callable[..., Tensor],
    canvas_BL: Tensor,
    framework: Framework,
    sampling: Sampling,
    *,
    mask_id: int,
    is_real_BL: Tensor | None = None,
    device: torch.device | None = None,
    **noise: Any,
) -> sampler.Generation:
    """Fill all masked positions with the settings ``sampling``.

    ``is_real_BL`` is False at padding behind a canvas; ``noise`` as for :func:`generate`: seed,
    first_sample, the first row's number or those of all rows, and on_step.
    """
    sampling.check()
    if framework.is_causal:
        sampling.refuse_for_causal()
    if getattr(model, "first_maskable", 0) and bool((canvas_BL[:, 0] == mask_id).any()):
        raise UserError("this model predicts from earlier tokens: the first must be given (BOS)")
    noise["choice"] = sampler.TokenChoice(
        sampling.temperature, sampling.top_k, sampling.top_p, getattr(torch, sampling.noise)
    )
    if isinstance(framework, Ordered) and not isinstance(framework, Shifted):
        if is_real_BL is not None:
            raise UserError("a causal built-in DiT takes rows of one length, unpadded")
        return sampler.generate_in_order(
            model, canvas_BL, framework, mask_id=mask_id, device=device, **noise
        )
    network = sampler.SamplingDenoiser(
        model, mask_id, is_real_BL=is_real_BL, guidance=sampling.guidance, device=device
    )
    if isinstance(framework, Shifted):
        is_late_BL = canvas_BL == mask_id
        if is_real_BL is not None:
            is_late_BL = is_late_BL | ~is_real_BL  # padding comes behind all
        if bool(is_late_BL.long().diff(dim=1).lt(0).any()):
            raise UserError("this model generates left to right: it takes a prefix, not gaps")
        # blocks of one token; a causal LM cannot see the masks after them
        return sampler.generate(network, canvas_BL, 1, RULES["random"], block_length=1, **noise)
    assert isinstance(framework, Mdm)
    rule: Rule = RULES[sampling.rule]
    if sampling.remask is not None:
        rule = Remasking(sampling.remask, sampling.remask_kind)
    grid: sampler.Grid = None
    if sampling.grid == "count":
        grid = sampling.per_step or 1
    elif rule.takes_grid:
        grid = sampler.GRIDS[sampling.grid](sampling.steps or DEFAULT_STEPS)
    noise |= {"schedule": framework.schedule, "block_length": sampling.block_length}
    is_cached = sampling.cache == "prefix"
    return sampler.generate(network, canvas_BL, grid, rule, is_cached=is_cached, **noise)


def _fill_run(
    run: Loaded, canvas_BL: Tensor, sampling: Sampling, **options: Any
) -> sampler.Generation:
    """:func:`fill` with a run's model, in its precision."""
    options |= {"mask_id": run.tokenizer.mask_id, "device": run.device}
    with autocast(run.device, run.precision):
        return fill(run.model, canvas_BL, run.framework, sampling, **options)


def _counted(progress: Progress, num_rows: int, on_step: OnStep | None) -> OnStep:
    """Reports progress of each step of a batch, as the corresponding fraction of its rows."""

    def tell(step: Step) -> None:
        total = max(1, step.num_steps)
        done, before = (num_rows * n // total for n in (step.number, max(0, step.number - 1)))
        if not step.num_steps:  # nothing to fill
            done = num_rows
        if step.number or done:
            progress.advance(done - before, f"step {step.number} of {step.num_steps}")
        if on_step is not None:
            on_step(step)

    return tell


# One canvas of a run, any number of times.


def run_canvas(
    run: Loaded, *, prefix: str = "", template: str | None = None, length: int | None = None
) -> Tensor:
    """A row to fill: empty, after a prefix, or with the gaps of a template.

    Where the run's rows are wrapped, BOS and EOS count toward the length; so does the BOS that
    a causal LM predicts the first token from.
    """
    before, behind = _frame(run)
    length = run.config.data.block_length if length is None else length
    room = length - len(before) - len(behind)
    if room < 1:
        raise UserError(f"--length {length} leaves no room for tokens to generate")
    if template is not None:
        return canvas_from_pieces(run.tokenizer, read_gaps(template), before, behind)
    num_given = len(run.tokenizer.encode(prefix)) if prefix else 0
    if num_given >= room:
        raise UserError(f"the prefix has {num_given} tokens of {room}: none are left to generate")
    given = [prefix] if prefix else []
    return canvas_from_pieces(run.tokenizer, [*given, room - num_given], before, behind)


def _frame(run: Loaded) -> tuple[list[int], list[int]]:
    """Tokens before and after a canvas: BOS and EOS if rows are wrapped, else the BOS that a causal
    LM needs. A model with a fixed order takes only its first tokens, BOS at most; it generates EOS
    itself.
    """
    bos, eos, mask_id = run.tokenizer.bos_id, run.tokenizer.eos_id, run.tokenizer.mask_id
    if not run.is_wrapped:
        return [bos] * run.model.first_maskable, []
    rank_L = run.framework.rank_L if isinstance(run.framework, Ordered) else None
    if rank_L is None:
        return [bos], [eos]
    return [bos if int(rank_L[0]) == 0 else mask_id], [mask_id]


def fill_canvas(
    run: Loaded,
    canvas: Tensor,
    count: int = 1,
    sampling: Sampling | None = None,
    *,
    seed: int = 0,
    first_sample: int = 0,
    batch_size: int = 64,
    progress: Progress = NO_PROGRESS,
    on_step: OnStep | None = None,
) -> sampler.Generation:
    """Fill a canvas ``count`` times; sample i is the same whatever the batch size.

    ``first_sample`` is the number of the first one: other numbers, other noise.
    """
    if count < 1:
        raise UserError(f"the number of samples must be at least 1, got {count}")
    parts = []
    for done in range(0, count, batch_size):
        canvas_BL = canvas.repeat(min(batch_size, count - done), 1)
        options: dict[str, Any] = {"seed": seed, "first_sample": first_sample + done}
        options["on_step"] = _counted(progress, len(canvas_BL), on_step)
        parts.append(_fill_run(run, canvas_BL, sampling or Sampling(), **options))
    return sampler.Generation(
        torch.cat([part.ids_BL for part in parts]),
        sum(part.num_calls for part in parts),
        sum(part.num_rows for part in parts),
    )


def decode_samples(run: Loaded, made: sampler.Generation) -> list[str]:
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


# Rows of any length filled in batches, so that no result depends on the batch.
#
# A row is padded to a multiple of :data:`WIDTH` tokens. Rows share a batch that agree in width and
# in the number of tokens to fill (sampling counts its steps for the row with most), all padded or
# none. All of this is known from the row alone.
#
# B rows of a batch, L their width.

WIDTH = 32
"""Rows are padded to a multiple of this number of tokens."""


@dataclass(frozen=True)
class Filled:
    """The result for one row's gap."""

    ids: list[int]
    nfe: float
    """Network calls; the mean over its batch."""


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

    No row is padded beyond ``longest``. ``on_step`` gets rows in order, in batches of rows of one
    length, without padding.
    """
    mask_id, numbers = run.tokenizer.mask_id, samples or range(len(rows))
    # a causal built-in DiT takes one row at a time, without padding
    is_alone = isinstance(run.framework, Ordered) and not isinstance(run.framework, Shifted)
    # a cache holds the tokens before the first gap of the batch, so all gaps must begin together
    is_exact = on_step is not None or sampling.cache != "none"
    groups = []
    for row in rows:
        width = len(row) if is_alone else min(-(-len(row) // WIDTH) * WIDTH, longest)
        num_gaps = int((row == mask_id).sum())
        groups.append((width, num_gaps, len(row) if is_exact else len(row) == width))
    places = range(len(rows))
    # observers see rows in order, so only neighbors share a batch
    order = places if on_step else sorted(places, key=groups.__getitem__)
    found: dict[int, Filled] = {}
    for (width, *_), group in itertools.groupby(order, key=groups.__getitem__):
        while batch := list(itertools.islice(group, 1 if is_alone else batch_size)):
            chosen = [rows[place] for place in batch]
            x_BL, is_real_BL = pad_rows(chosen, width, run.tokenizer.pad_id)
            seen = on_step and _without_padding(on_step, len(chosen[0]))
            how: dict[str, Any] = {"seed": seed, "on_step": _counted(progress, len(batch), seen)}
            how["first_sample"] = torch.tensor([numbers[place] for place in batch])
            how["is_real_BL"] = None if bool(is_real_BL.all()) else is_real_BL
            made = _fill_run(run, x_BL, sampling, **how)
            for place, ids_L, canvas_L in zip(batch, made.ids_BL, x_BL, strict=True):
                found[place] = Filled(ids_L[canvas_L == mask_id].tolist(), made.nfe)
    return [found[place] for place in places]


def _without_padding(on_step: OnStep, length: int) -> OnStep:
    return lambda step: on_step(replace(step, ids_BL=step.ids_BL[:, :length]))


def text_before_eos(ids: Sequence[int], tokenizer: Tokenizer) -> tuple[str, int]:
    """(the text of what was written before the first EOS, its number of tokens)."""
    end = ids.index(tokenizer.eos_id) if tokenizer.eos_id in ids else len(ids)
    return tokenizer.decode(np.array(ids[:end], dtype=np.int64)), end


def pad_rows(rows: Sequence[Tensor], width: int, pad_id: int) -> tuple[Tensor, Tensor]:
    """(rows [B, width], True where not padding)."""
    is_real_BL = torch.arange(width) < torch.tensor([len(row) for row in rows])[:, None]
    x_BL = torch.full((len(rows), width), pad_id)
    x_BL[is_real_BL] = torch.cat(list(rows))
    return x_BL, is_real_BL
