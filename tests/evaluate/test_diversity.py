"""Against counts done by hand and bounds that hold for any text."""

from __future__ import annotations

import math
import random
from collections import Counter

import pytest

from bellmask.evaluate.diversity import distinct, diversity, ngrams, repetition, unigram_entropy


def test_the_entropy_of_known_frequencies() -> None:
    assert unigram_entropy([7] * 9) == 0
    assert unigram_entropy(range(16)) == pytest.approx(math.log(16))
    # halves and quarters: 1/2 ln 2 + 2 * 1/4 ln 4
    assert unigram_entropy([1, 1, 5, 9]) == pytest.approx(1.5 * math.log(2))
    assert unigram_entropy([]) == 0


def test_the_entropy_is_the_mean_surprise_of_its_own_tokens() -> None:
    """Another way to compute it: the surprise of each token, one by one."""
    draw = random.Random(1)
    ids = [min(draw.randrange(12), draw.randrange(12)) for _ in range(200)]
    count = Counter(ids)
    surprise = [math.log(len(ids) / count[token]) for token in ids]
    assert unigram_entropy(ids) == pytest.approx(math.fsum(surprise) / len(ids))
    assert unigram_entropy(ids) == pytest.approx(unigram_entropy(sorted(ids)))


def test_ngrams_are_all_runs_of_tokens() -> None:
    assert ngrams([1, 2, 3, 4], 3) == [(1, 2, 3), (2, 3, 4)]
    assert ngrams([1, 2], 3) == []
    assert ngrams([], 1) == []


def test_distinct_is_over_all_samples_together() -> None:
    # pairs: (1 2) (2 1) | (1 2): two different ones of three
    assert distinct([[1, 2, 1], [1, 2]], 2) == pytest.approx(2 / 3)
    assert distinct([[1, 2, 1], [1, 2]], 1) == pytest.approx(2 / 5)
    assert distinct([[1, 2, 3]] * 4, 1) == pytest.approx(1 / 4), "the same sample four times"
    assert distinct([[1], []], 2) is None
    # no pair spans two samples
    assert distinct([[1, 2], [3, 4]], 2) == 1


def test_repetition_counts_four_tokens_in_a_row_that_came_before() -> None:
    assert repetition(list(range(50))) == 0
    assert repetition([1, 2, 3, 4, 5, 1, 2, 3, 4]) == pytest.approx(1 / 6)
    assert repetition([1, 2, 3, 9, 1, 2, 3, 8]) == 0, "three in a row are not enough"
    assert repetition([5] * 13) == pytest.approx(9 / 10)
    assert repetition([1, 2, 3]) is None


def test_repetition_is_averaged_over_the_samples_that_have_any_fours() -> None:
    found = diversity([[5] * 13, list(range(20)), [1, 2]])
    assert found.repetition == pytest.approx((0.9 + 0) / 2)
    assert found.distinct_1 == pytest.approx(20 / 35)
    assert found.distinct_2 == pytest.approx(20 / 32), "(1 2) is in two samples"
    assert found.distinct_3 == pytest.approx(19 / 29)


def test_nothing_to_count_is_no_number() -> None:
    found = diversity([])
    assert (found.distinct_1, found.distinct_2, found.distinct_3, found.repetition) == (None,) * 4
