"""How varied generated text is: what a perplexity must be read beside.

A model that repeats itself is easy to predict, so a low generative perplexity alone proves nothing.
All functions take token ids as plain numbers; which tokens is for the caller to say.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

Tokens = Sequence[int]

REPETITION_LENGTH = 4
"""Tokens in a row that count as a repetition when they come a second time."""


@dataclass(frozen=True)
class Diversity:
    """Of a set of samples; None where no sample is long enough."""

    distinct_1: float | None
    distinct_2: float | None
    distinct_3: float | None
    repetition: float | None


def unigram_entropy(ids: Tokens) -> float:
    """Entropy of the token frequencies of one sample, in nats: at most the log of its length."""
    if not len(ids):
        return 0.0
    _, counts = np.unique(np.asarray(ids), return_counts=True)
    share = counts / counts.sum()
    return float(-(share * np.log(share)).sum()) + 0.0  # no minus zero


def ngrams(ids: Tokens, n: int) -> list[tuple[int, ...]]:
    """Every run of n tokens, in order; none where there are fewer tokens."""
    return list(zip(*(ids[start:] for start in range(n))))


def distinct(samples: Sequence[Tokens], n: int) -> float | None:
    """Different n-grams of all samples together, as a share of their n-grams.

    It falls with the amount of text: compare at the same number and length of samples.
    """
    found = [gram for ids in samples for gram in ngrams(ids, n)]
    return len(set(found)) / len(found) if found else None


def repetition(ids: Tokens, n: int = REPETITION_LENGTH) -> float | None:
    """Share of a sample's n-grams that were there before in the same sample."""
    found = ngrams(ids, n)
    return 1 - len(set(found)) / len(found) if found else None


def diversity(samples: Sequence[Tokens]) -> Diversity:
    """distinct-1, -2 and -3 of all samples together; repetition as the mean over samples."""
    repeated = [share for ids in samples if (share := repetition(ids)) is not None]
    return Diversity(
        distinct(samples, 1),
        distinct(samples, 2),
        distinct(samples, 3),
        float(np.mean(repeated)) if repeated else None,
    )
