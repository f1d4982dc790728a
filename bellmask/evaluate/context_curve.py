"""NLL by context count, and the cross-entropies that the low end should come down to."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from bellmask.data.blocks import Blocks
from bellmask.evaluate.likelihood import Scorer
from bellmask.evaluate.result import Likelihood
from bellmask.utils.rng import stream_key
from bellmask.utils.stats import Floats, Labels, clustered_error, document_clusters

REFERENCE_BLOCKS = 100_000
"""Training blocks that the unigram and position-wise counts use at most (the first ones)."""
POSITION_PRIOR = 100.0
"""Weight of the unigram, in counts, in each position's own distribution."""


@dataclass(frozen=True)
class ContextPoint:
    """Mean cross-entropy of masked tokens that see ``low`` to ``high`` others."""

    low: int
    high: int
    nll: float
    standard_error: float
    num_draws: int


def binned_curve(result: Likelihood, num_bins: int = 16) -> list[ContextPoint]:
    """The draws of an evaluation, grouped by context count: free, and averages to its NLL."""
    draws = result.ce_BR.shape[1]
    context = np.where(result.count_BR > 0, result.length_B[:, None] - result.count_BR, -1).ravel()
    share_B = result.length_B / (result.count_BR > 0).sum(1)  # tokens that a draw stands for
    ce, weight = result.ce_BR.ravel(), np.repeat(share_B, draws)
    owner = result.clusters if result.clusters is not None else np.arange(len(result.ce_BR))
    cluster = np.repeat(owner, draws)
    longest = int(result.length_B.max())
    edges = np.unique(np.linspace(0, longest, min(num_bins, longest) + 1).astype(int))
    points = []
    for low, stop in itertools.pairwise(edges.tolist()):
        inside = (context >= low) & (context < stop)
        if inside.sum() >= 2:
            nll, error = weighted_mean(ce[inside], weight[inside], cluster[inside])
            points.append(ContextPoint(low, stop - 1, nll, error, int(inside.sum())))
    return points


def weighted_mean(value: Floats, weight: Floats, cluster: Labels | None) -> tuple[float, float]:
    """A token-weighted mean and its standard error (delta method, clustered)."""
    mean = float((weight * value).sum() / weight.sum())
    return mean, clustered_error(weight * (value - mean) / weight.mean(), cluster)


def exact_curve(
    scorer: Scorer, contexts: Sequence[int], *, seed: int = 1234, batch_size: int = 64
) -> list[ContextPoint]:
    """The loss at exactly these context counts, over the tokens of blocks that are long enough."""
    blocks = scorer.blocks
    length = blocks.num_maskable(slice(None))
    points = []
    for context in contexts:
        index = (length > context).nonzero().squeeze(1)
        if len(index) < 2:
            continue
        key = stream_key(seed, "context", context)
        values = [
            scorer.mean(part, torch.full_like(part, context), key)
            for part in index.split(batch_size)
        ]
        ce, weight = torch.cat(values).numpy(), length[index].double().numpy()
        cluster = document_clusters(np.asarray(blocks.documents)[index.numpy()])
        nll, error = weighted_mean(ce, weight, cluster)
        points.append(ContextPoint(context, context, nll, error, len(ce)))
    return points


@dataclass(frozen=True)
class References:
    """Cross-entropies from training counts to validation tokens, nats per token."""

    unigram: float
    """Add-one smoothed training frequencies: what a model without context comes down to."""
    position_wise: float
    """A training distribution per position: the optimum at N_c = 0 where rows have structure."""


def unigram_cross_entropy(train: Blocks, valid: Blocks, num_tokens: int) -> float:
    """The first of the two references alone: one count per token, whatever the block length."""
    counts = np.ones(num_tokens)
    for tokens, is_real in _columns(train.slice(0, min(len(train), REFERENCE_BLOCKS))):
        counts += np.bincount(tokens[is_real], minlength=num_tokens)
    log_share = np.log(counts / counts.sum())
    parts = [log_share[tokens[is_real]] for tokens, is_real in _columns(valid)]
    return -float(sum(part.sum() for part in parts)) / sum(len(part) for part in parts)


def references(train: Blocks, valid: Blocks, num_tokens: int) -> References:
    """Both references, from the first training blocks (at most ``REFERENCE_BLOCKS``)."""
    train = train.slice(0, min(len(train), REFERENCE_BLOCKS))
    counts = np.zeros((train.block_length, num_tokens), dtype=np.int64)
    for position, (tokens, is_real) in enumerate(_columns(train)):
        counts[position] = np.bincount(tokens[is_real], minlength=num_tokens)
    unigram = counts.sum(0) + 1.0
    unigram /= unigram.sum()
    own = counts + POSITION_PRIOR * unigram
    own /= own.sum(1, keepdims=True)
    total, by_position, scored = 0.0, 0.0, 0
    for position, (tokens, is_real) in enumerate(_columns(valid)):
        real = tokens[is_real]
        total -= float(np.log(unigram[real]).sum())
        by_position -= float(np.log(own[position][real]).sum())
        scored += len(real)
    return References(total / scored, by_position / scored)


def _columns(blocks: Blocks) -> list[tuple[NDArray[np.int64], NDArray[np.bool_]]]:
    """At each position the tokens of all rows, and whether each is maskable."""
    tokens, lengths = np.asarray(blocks.tokens), np.asarray(blocks.lengths)
    starts = blocks.row_starts(slice(None)).numpy()
    return [
        (tokens[:, position].astype(np.int64), (starts <= position) & (position < lengths))
        for position in range(blocks.block_length)
    ]
