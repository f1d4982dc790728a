"""Contestants that know nothing: counted by hand."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pytest
import torch
from continuation_tools import ids

from bellmask.downstream.baselines import guesser_for, unigram_of
from bellmask.errors import UserError
from bellmask.run import Run


def test_scores_are_sums_of_log_frequencies(masked: Run) -> None:
    train, _ = masked.blocks()
    counts: Counter[int] = Counter()
    for row, length in zip(np.asarray(train.tokens), np.asarray(train.lengths), strict=True):
        counts.update(row[:length].tolist())
    size, total = masked.tokenizer.num_tokens, sum(counts.values())
    unigram = unigram_of(masked)
    (ask,) = unigram.asks("the red ", "moon", 0)
    assert (ask.given, ask.target) == (ids("the red"), ids(" moon"))
    (score,) = unigram.score([ask], 3)
    wanted = sum(math.log((counts[token] + 1) / (total + size)) for token in ids(" moon"))
    assert score.log_probability == pytest.approx(wanted, rel=1e-12)
    assert (score.num_tokens, score.error, score.num_passes, score.is_exact) == (5, 0.0, 0, True)
    assert unigram.is_exact(ask)
    assert (unigram.is_model, unigram.is_guess, unigram.sees_behind) == (False, False, True)


def test_of_a_long_text_a_sample_is_counted(masked: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bellmask.downstream.baselines.REFERENCE_BLOCKS", 3)
    train, _ = masked.blocks()
    rows = train.spread(3).rows(slice(0, 3)).flatten().tolist()
    wanted = [math.log((rows.count(token) + 1) / (len(rows) + 259)) for token in range(259)]
    assert unigram_of(masked).log_p_V.tolist() == pytest.approx(wanted)


def test_other_texts_have_no_unigram(masked: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    train, valid = masked.blocks()
    monkeypatch.setattr(Run, "blocks", lambda self: (valid, train))
    with pytest.raises(UserError, match="has changed"):
        unigram_of(masked)


def test_tokens_are_written_by_frequency(masked: Run) -> None:
    unigram = unigram_of(masked)
    row = torch.tensor([*ids("the"), *[masked.tokenizer.mask_id] * 4000])
    one, two = unigram.write([row, row], [1, 2], seed=0, temperature=1.0)
    assert len(one) == len(two) == 4000
    assert one != two, "a sample has its own noise"
    assert unigram.write([row], [2], seed=0, temperature=1.0) == [two]
    assert unigram.write([row], [2], seed=1, temperature=1.0) != [two]
    share = np.bincount(one, minlength=259) / 4000
    expected = np.exp(unigram.log_p_V)
    assert np.abs(share - expected).max() < 5 * math.sqrt(0.25 / 4000)
    assert share[ord(" ")] > 0.1 > share[ord("q")], "of the text, not of any"


def test_guessing_is_even(masked: Run) -> None:
    guesser = guesser_for(masked)
    assert guesser.is_guess
    row = torch.tensor([masked.tokenizer.mask_id] * 5180)
    (made,) = guesser.write([row], [0], seed=0, temperature=1.0)
    count = np.bincount(made, minlength=259)
    assert len(count) == 259
    assert ((count - 20) ** 2 / 20).sum() < 259 + 5 * math.sqrt(2 * 259), "chi-squared"
    assert guesser.fingerprint != unigram_of(masked).fingerprint
