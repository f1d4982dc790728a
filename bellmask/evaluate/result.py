"""What an evaluation measured, block by block, and the views of it; needs no model and no torch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bellmask.utils.errors import UserError
from bellmask.utils.files import read_arrays
from bellmask.utils.stats import (
    Floats,
    clustered_error,
    collapsed_strata_error,
    document_clusters,
)

MOST_NATS = 1e30
"""No cross-entropy of float32 logits comes near; larger ones have no finite variance."""


def perplexity_of(nll: float) -> float:
    """exp(nll); infinite for a model that is beyond all measure."""
    return math.exp(nll) if nll < 700 else math.inf if nll >= 700 else math.nan


@dataclass(frozen=True)
class Likelihood:
    """Per-block values of one evaluation; everything else is a view of them."""

    length_B: NDArray[np.int64]
    """Maskable tokens of each block."""
    level_B: Floats
    """Where in [0, 1) each block's mask counts start: what the strata are strata of."""
    count_BR: NDArray[np.int64]
    """Tokens that each draw does not show: L_b - N_c; 0 where a short block has no such draw."""
    ce_BR: Floats
    """Mean cross-entropy of the draw's targets, nats."""
    document_B: NDArray[np.int64]
    num_bytes: float
    """Bytes of text that the tokens stand for."""
    fingerprint: str = ""
    """Of the blocks and the seed: what must agree for two evaluations to be paired."""
    is_causal: bool = False
    """Every context count of a block was scored, once per order."""
    is_exact: bool = False
    """The NLL is exact; otherwise an upper bound."""

    @property
    def num_draws(self) -> int:
        """Masks per block; for causal ones orders, each of which starts with nothing shown."""
        if self.is_causal:
            longest = int(self.length_B.argmax())  # a row may have nothing to score
            return int((self.count_BR[longest] == self.length_B[longest]).sum())
        return self.count_BR.shape[1]

    @property
    def num_tokens(self) -> int:
        """Scored tokens."""
        return int(self.length_B.sum())

    @property
    def block_nll(self) -> Floats:
        """NLL (bound) per token of each block, nats: the mean over its draws."""
        is_drawn = self.count_BR > 0
        return (self.ce_BR * is_drawn).sum(axis=1) / is_drawn.sum(axis=1).clip(min=1)

    @property
    def nll(self) -> float:
        """NLL (bound) per token, nats: a token-weighted ratio, not a mean over blocks."""
        return float((self.length_B * self.block_nll).sum() / self.num_tokens)

    @property
    def is_finite(self) -> bool:
        """False for a model that diverged: nothing can be calculated with its values."""
        return bool((np.abs(self.ce_BR) < MOST_NATS).all())

    @property
    def perplexity(self) -> float:
        """exp(nll)."""
        return perplexity_of(self.nll)

    def checked(self, whose: Path) -> Likelihood:
        """Itself, or a UserError where nobody could use it."""
        if not math.isfinite(self.perplexity):
            raise UserError(
                f"the NLL of {whose} is {self.nll:.4g} nats per token: its training diverged, or "
                "its weights are damaged; take another checkpoint"
            )
        return self

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

    @property
    def draw_errors(self) -> Floats:
        """What other masks or orders would change in each block's value; nan for a single draw."""
        num_blocks, draws = len(self.ce_BR), self.num_draws
        if self.is_exact or draws == 1:
            return np.full(num_blocks, 0.0 if self.is_exact else np.nan)
        if self.is_causal:  # an order is a draw, its value the mean over slots
            value_BR = self.ce_BR.reshape(num_blocks, draws, -1).sum(2)
            value_BR = value_BR / self.length_B[:, None].clip(min=1)
            return value_BR.std(axis=1, ddof=1) / math.sqrt(draws)
        order = np.arange(draws, dtype=np.float64)
        return np.array([collapsed_strata_error(ce_R, order) for ce_R in self.ce_BR])

    def difference(self, other: Likelihood) -> tuple[float, float]:
        """(this nll - the other's, its standard error), paired: same blocks and masks."""
        if not self.is_paired_with(other):
            raise ValueError("only evaluations on the same blocks and masks can be paired")
        stratified = other if self.is_causal else self
        error = stratified._error_of(self.block_nll - other.block_nll)
        return self.nll - other.nll, error

    def is_paired_with(self, other: Likelihood) -> bool:
        """The same blocks, and for two that were masked the same masks."""
        if self.fingerprint != other.fingerprint:
            return False
        return self.is_causal or other.is_causal or np.array_equal(self.count_BR, other.count_BR)

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
        """The numbers people ask for; None for what is not finite, which JSON does not know."""
        return {
            "nll": self.nll if math.isfinite(self.nll) else None,
            "nll_se": self.standard_error if math.isfinite(self.standard_error) else None,
            "perplexity": self.perplexity if math.isfinite(self.perplexity) else None,
            "bits_per_byte": self.bits_per_byte if self.num_bytes else None,
            "num_blocks": len(self.length_B),
            "num_tokens": self.num_tokens,
            "num_draws": self.num_draws,
            "is_exact": self.is_exact,
        }

    def save(self, path: Path) -> None:
        """Write all arrays as .npz, beside and renamed."""
        scratch = path.with_name(f".{path.name}")
        np.savez_compressed(scratch, **vars(self))
        scratch.replace(path)

    @staticmethod
    def load(path: Path) -> Likelihood:
        """Read what ``save`` wrote; OSError or ValueError where that cannot be."""
        arrays = read_arrays(path)
        names = ("num_bytes", "fingerprint", "is_causal", "is_exact")
        if any(arrays[name].shape for name in names if name in arrays):
            raise ValueError("not an evaluation: a single value is a list")
        try:
            scalars: dict[str, Any] = {
                "num_bytes": float(arrays["num_bytes"]),
                "fingerprint": str(arrays["fingerprint"]),
                "is_causal": bool(arrays.get("is_causal", False)),
                "is_exact": bool(arrays.get("is_exact", False)),
            }
            found = Likelihood(**{**arrays, **scalars})
        except (KeyError, TypeError) as error:
            raise ValueError(f"not an evaluation: {error}") from None
        _check_shapes(found)
        return found


def _check_shapes(found: Likelihood) -> None:
    """Arrays of numbers that belong to one another."""
    counts = (found.length_B, found.count_BR, found.document_B)
    numbers = (found.level_B, found.ce_BR)
    is_right = all(one.dtype.kind in "iu" for one in counts)
    is_right &= all(one.dtype.kind == "f" for one in numbers)
    is_right &= found.count_BR.ndim == 2 and found.count_BR.size > 0
    is_right &= found.ce_BR.shape == found.count_BR.shape
    blocks = found.count_BR.shape[:1]
    is_right &= found.length_B.shape == found.level_B.shape == found.document_B.shape == blocks
    if not is_right or found.length_B.min() < 0 or found.length_B.sum() < 1:
        raise ValueError("its arrays do not fit together")
