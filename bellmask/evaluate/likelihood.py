"""The NELBO per token on fixed masks, with an honest standard error.

A block of L_b tokens gets masks of exactly n tokens, n spread evenly over 1 .. L_b; the mean
cross-entropy of the masked rows, averaged over n, is the NELBO per token (paper Eq. L_MDM and the
shared form of Sec. 2.2 with N_c = L_b - n). There is no time floor and no weight that explodes.
Masks are a function of the seed and the set of blocks alone: two models that are compared see the
same ones.

B blocks, R draws per block, L block length.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bellmask.data.blocks import Blocks
from bellmask.diffusion.corruption import mask_exactly
from bellmask.diffusion.schedule import Linear, Schedule
from bellmask.evaluate.errors import (
    Floats,
    clustered_error,
    collapsed_strata_error,
    document_clusters,
)
from bellmask.model.attention import attention_mask
from bellmask.rng import shuffle, stream_key, uniform, uniform_rows
from bellmask.train.distributed import World, autocast

Model = Callable[..., Tensor]


@dataclass(frozen=True)
class Likelihood:
    """Per-block values of one evaluation; everything else is a view of them."""

    length_B: NDArray[np.int64]
    """Maskable tokens of each block."""
    level_B: Floats
    """Where in [0, 1) each block's mask counts start: what the strata are strata of."""
    count_BR: NDArray[np.int64]
    """Masked tokens of each draw."""
    ce_BR: Floats
    """Mean cross-entropy of the masked rows, nats."""
    document_B: NDArray[np.int64]
    num_bytes: float
    """Bytes of text that the tokens stand for."""
    fingerprint: str = ""
    """Of the blocks and the seed: what must agree for two evaluations to be paired."""

    @property
    def num_tokens(self) -> int:
        """Scored tokens."""
        return int(self.length_B.sum())

    @property
    def block_nll(self) -> Floats:
        """NELBO per token of each block, nats."""
        return self.ce_BR.mean(axis=1)

    @property
    def nll(self) -> float:
        """NELBO per token, nats: a token-weighted ratio, not a mean over blocks."""
        return float((self.length_B * self.block_nll).sum() / self.num_tokens)

    @property
    def perplexity(self) -> float:
        """exp(nll)."""
        return math.exp(self.nll)

    @property
    def bits_per_byte(self) -> float:
        """Bits per byte of text; nan where the bytes are not known."""
        if not self.num_bytes:
            return math.nan
        return self.nll * self.num_tokens / self.num_bytes / math.log(2)

    @property
    def clusters(self) -> NDArray[np.int64] | None:
        """Document of each block, when documents span blocks and there are enough of them."""
        return document_clusters(self.document_B)

    @property
    def standard_error(self) -> float:
        """Standard error of ``nll``: what another sample of documents and masks would change."""
        return self._error_of(self.block_nll)

    def difference(self, other: Likelihood) -> tuple[float, float]:
        """(this nll - the other's, its standard error), paired: same blocks and masks."""
        is_same = self.fingerprint == other.fingerprint
        if not is_same or not np.array_equal(self.count_BR, other.count_BR):
            raise ValueError("only evaluations on the same blocks and masks can be paired")
        values = self.block_nll - other.block_nll
        return self.nll - other.nll, self._error_of(values)

    def _error_of(self, value_B: Floats) -> float:
        """Delta method for the ratio, then strata (one draw) or blocks (several)."""
        if len(value_B) < 2:
            return math.nan
        mean = (self.length_B * value_B).sum() / self.num_tokens
        residual_B = self.length_B * (value_B - mean) / self.length_B.mean()
        if self.count_BR.shape[1] == 1:
            return collapsed_strata_error(residual_B, self.level_B, self.clusters)
        return clustered_error(residual_B, self.clusters)

    def summary(self) -> dict[str, Any]:
        """The numbers people ask for."""
        return {
            "nll": self.nll,
            "nll_se": self.standard_error,
            "perplexity": self.perplexity,
            "bits_per_byte": self.bits_per_byte if self.num_bytes else None,
            "num_blocks": len(self.length_B),
            "num_tokens": self.num_tokens,
            "num_draws": int(self.count_BR.shape[1]),
        }

    def save(self, path: Path) -> None:
        """Write all arrays as .npz, beside and renamed."""
        scratch = path.with_suffix(".tmp.npz")
        np.savez_compressed(scratch, **vars(self))
        scratch.replace(path)

    @staticmethod
    def load(path: Path) -> Likelihood:
        """Read what ``save`` wrote."""
        with np.load(path, allow_pickle=False) as stored:
            arrays = {name: stored[name] for name in stored.files}
        scalars = {
            "num_bytes": float(arrays["num_bytes"]),
            "fingerprint": str(arrays["fingerprint"]),
        }
        return Likelihood(**{**arrays, **scalars})


def mask_counts(length_B: Tensor, draws: int, seed: int) -> tuple[Tensor, Tensor]:
    """(levels [B], counts [B, R]): n = 1 + floor(L_b (r + u_b) / R).

    One draw: the u_b are one per stratum, in random order over blocks. Several: each block covers
    all of 1 .. L_b by itself.
    """
    num_blocks = len(length_B)
    level = uniform(stream_key(seed, "evaluation levels"), torch.arange(num_blocks))
    if draws == 1:
        level = (shuffle(stream_key(seed, "evaluation strata"), num_blocks) + level) / num_blocks
    share_BR = (torch.arange(draws) + level[:, None]) / draws
    counts = 1 + (length_B[:, None] * share_BR).floor().long()
    return level, torch.minimum(counts, length_B[:, None])


def evaluate(
    model: Model,
    blocks: Blocks,
    *,
    mask_id: int,
    draws: int = 1,
    seed: int = 1234,
    batch_size: int = 64,
    schedule: Schedule | None = None,
    world: World | None = None,
    precision: torch.dtype = torch.float32,
    on_batch: Callable[[int], None] | None = None,
) -> Likelihood:
    """Measure the NELBO of a denoiser on all the given blocks.

    ``model(x, rows, targets, t_B=, mask=, reduce=False)`` returns each row's cross-entropy. Ranks
    share the work; each gets the whole result. ``on_batch`` is told the blocks done so far.
    """
    world = world or World()
    length_B = blocks.row_lengths(slice(None))
    level_B, count_BR = mask_counts(length_B, draws, seed)
    ce_BR = torch.zeros(count_BR.shape, dtype=torch.float64)
    for part in _parts(len(blocks), batch_size, world):
        index = torch.arange(part.start, part.stop)
        for draw in range(draws):
            key = stream_key(seed, "evaluation masks", draw)
            ce_BR[part, draw] = masked_mean(
                model, blocks, index, count_BR[part, draw], key, mask_id, schedule, world, precision
            )
        if on_batch:
            on_batch(part.stop)
    ce_BR = world.add_up(ce_BR.to(world.device)).cpu()
    return Likelihood(
        length_B.numpy(),
        level_B.numpy(),
        count_BR.numpy(),
        ce_BR.numpy(),
        np.asarray(blocks.documents),
        blocks.num_bytes,
        f"{blocks.fingerprint}/{seed}",
    )


def _parts(total: int, size: int, world: World) -> Iterator[slice]:
    """This rank's batches of blocks: every world.size-th."""
    for number, start in enumerate(range(0, total, size)):
        if number % world.size == world.rank:
            yield slice(start, min(start + size, total))


@torch.no_grad()
def masked_mean(
    model: Model,
    blocks: Blocks,
    index_B: Tensor,
    count_B: Tensor,
    key: int,
    mask_id: int,
    schedule: Schedule | None,
    world: World,
    precision: torch.dtype,
) -> Tensor:
    """Mean cross-entropy of exactly ``count`` masked rows of each block, float64 [B]."""
    x0_BL, length_B = blocks.rows(index_B), blocks.row_lengths(index_B)
    block_length = x0_BL.shape[1]
    is_real = torch.arange(block_length) < length_B[:, None]
    u_BL = uniform_rows(key, index_B, block_length)
    xt_BL, is_masked_BL = mask_exactly(
        x0_BL, count_B, mask_id=mask_id, u_BL=u_BL, is_maskable_BL=is_real
    )
    rows_N = is_masked_BL.flatten().nonzero().squeeze(1)
    mask = attention_mask(is_real) if bool((length_B < block_length).any()) else None
    # given n masks, the mask rate follows Beta(n, L - n + 1): the law of the n-th smallest uniform
    rate_B = torch.where(is_masked_BL, u_BL, -1.0).amax(dim=1)
    device = world.device
    with autocast(device, precision):
        ce_N = model(
            xt_BL.to(device),
            rows_N.to(device),
            x0_BL.flatten()[rows_N].to(device),
            t_B=(schedule or Linear()).inverse(1 - rate_B).float().to(device),
            mask=None if mask is None else mask.to(device),
            reduce=False,
        )
    total_B = torch.zeros(len(index_B), dtype=torch.float64)
    total_B.index_add_(0, rows_N // block_length, ce_N.double().cpu())
    return total_B / count_B
