"""NLL by context count against enumeration, and reference cross-entropies by hand."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from scipy import stats

from bellmask import load
from bellmask.analyze.context import context_bins, losses_by_bin
from bellmask.data.blocks import Blocks
from bellmask.data.packing import Row
from bellmask.data.toys import ExactDenoiser, ToySource
from bellmask.evaluate.likelihood import (
    BlockScorer,
    Likelihood,
    binned_curve,
    evaluate,
    exact_curve,
    references,
    unigram_cross_entropy,
)

MASK, PAD = 50, 49


def seeded(seed):
    return torch.Generator().manual_seed(seed)


def rows_of(rows, lengths=None):
    lengths = [len(row) for row in rows] if lengths is None else lengths
    return Blocks.from_rows(
        Row(np.asarray(row), n, b) for b, (row, n) in enumerate(zip(rows, lengths, strict=True))
    )


def scored_by_count(function):
    """A model whose cross-entropy is a function of how many tokens are masked."""

    def model(x_BL, rows_N, targets_N, **_):
        count_B = (x_BL == MASK).sum(1)
        return function(count_B.double())[rows_N // x_BL.shape[1]]

    return model


@pytest.mark.parametrize("num_bins", [1, 5, 16])
def test_the_bins_average_to_the_nll_and_hold_each_context_once(num_bins):
    source = ToySource.sticky(3, 12, stay=0.8)
    result = evaluate(ExactDenoiser(source), source.blocks(40, seeded(1)), mask_id=3, draws=6)
    points = binned_curve(result, num_bins)
    held = [n for point in points for n in range(point.low, point.high + 1)]
    assert held == list(range(12))
    assert len(points) == min(num_bins, 12)
    assert sum(point.num_draws for point in points) == 240
    mean = sum(point.nll * point.num_draws for point in points) / 240
    assert mean == pytest.approx(result.nll, rel=1e-12)


def test_each_bin_is_the_mean_over_its_contexts():
    """A loss of n^2 for n masks, every n once per block; context c is n = 8 - c."""
    model = scored_by_count(torch.square)
    result = evaluate(model, rows_of([[0] * 8] * 3), mask_id=MASK, draws=8)
    single = binned_curve(result, num_bins=8)
    assert [p.nll for p in single] == pytest.approx([(8 - c) ** 2 for c in range(8)])
    assert [p.standard_error for p in single] == pytest.approx([0] * 8)
    pairs = binned_curve(result, num_bins=4)
    assert [(p.low, p.high) for p in pairs] == [(0, 1), (2, 3), (4, 5), (6, 7)]
    assert [p.nll for p in pairs] == pytest.approx([56.5, 30.5, 12.5, 2.5])
    alone = evaluate(model, rows_of([[0] * 8]), mask_id=MASK, draws=8)
    for point in binned_curve(alone, num_bins=4):
        assert math.isfinite(point.nll)
        assert math.isnan(point.standard_error), "one block has a value but no error"


def test_draws_of_one_block_in_one_bin_are_not_independent():
    """Blocks differ by 1, draws by 0.1: 400 draws of 100 blocks are worth 100."""
    rng, found = np.random.default_rng(1), []
    for _ in range(300):
        ce = rng.standard_normal((100, 1)) + 0.1 * rng.standard_normal((100, 8))
        counts = np.tile(np.arange(1, 9), (100, 1))
        result = Likelihood(np.full(100, 8), np.zeros(100), counts, ce, np.arange(100), 0)
        point = binned_curve(result, num_bins=2)[0]
        found.append((point.nll, point.standard_error))
    nll, error = np.array(found).T
    truth = math.sqrt((1 + 0.1**2 / 4) / 100)
    assert np.std(nll) == pytest.approx(truth, rel=0.12)
    assert np.mean(error) == pytest.approx(truth, rel=0.05)


def test_bins_without_draws_are_left_out_and_padded_blocks_weigh_by_tokens():
    counts = np.array([[8], [8], [8], [1]])
    result = Likelihood(np.full(4, 8), np.zeros(4), counts, np.ones((4, 1)), np.arange(4), 0)
    assert [(p.low, p.high, p.num_draws) for p in binned_curve(result, 8)] == [(0, 0, 3)]
    # half of the blocks have 2 tokens and score 1, half have 8 and score 2
    blocks = rows_of([[0, 0, *[PAD] * 6], [1] * 8] * 10, [2, 8] * 10)
    result = evaluate(lambda x, rows, y, **_: 1.0 + y.double(), blocks, mask_id=MASK, draws=8)
    assert binned_curve(result, num_bins=1)[0].nll == pytest.approx(1.8)


# at exact counts

CHAIN = ToySource.markov(
    torch.tensor([0.9, 0.1], dtype=torch.float64),
    torch.tensor([[0.8, 0.2], [0.3, 0.7]], dtype=torch.float64),
    length=4,
)


def enumerated_curve():
    """E[cross-entropy] of CHAIN at each context count, over all rows and all masks."""
    rows = np.array(list(itertools.product((0, 1), repeat=4)))
    start, move = CHAIN.initial_S.numpy(), CHAIN.transition_SS.numpy()
    p = start[rows[:, 0]] * np.prod([move[rows[:, i], rows[:, i + 1]] for i in range(3)], axis=0)
    curve = []
    for context in range(4):
        losses = []
        for i in range(4):
            for seen in itertools.combinations([j for j in range(4) if j != i], context):
                both = [p[(rows[:, [*seen, i]] == row[[*seen, i]]).all(1)].sum() for row in rows]
                known = [p[(rows[:, seen] == row[[*seen]]).all(1)].sum() for row in rows]
                losses.append(-p @ np.log(np.array(both) / known))
        curve.append(float(np.mean(losses)))
    return curve


def test_the_exact_curve_is_that_of_enumeration():
    blocks, curve = CHAIN.blocks(6000, seeded(2)), enumerated_curve()
    points = exact_curve(BlockScorer(ExactDenoiser(CHAIN), blocks, 2), range(4), batch_size=1000)
    assert [(p.low, p.high, p.num_draws) for p in points] == [(c, c, 6000) for c in range(4)]
    for point, truth in zip(points, curve, strict=True):
        assert abs(point.nll - truth) < 4 * point.standard_error < 0.12 * truth
    # the curve itself: it begins at the marginals and adds up to the entropy
    marginal, entropies = CHAIN.initial_S, []
    for _ in range(4):
        entropies.append(stats.entropy(marginal.numpy()))
        marginal = marginal @ CHAIN.transition_SS
    assert curve[0] == pytest.approx(np.mean(entropies), abs=1e-12)
    assert sum(curve) == pytest.approx(CHAIN.entropy, abs=1e-12)


def test_errors_of_the_exact_curve_are_the_spread_over_data():
    found = []
    for seed in range(150):
        scorer = BlockScorer(ExactDenoiser(CHAIN), CHAIN.blocks(100, seeded(1000 + seed)), 2)
        points = exact_curve(scorer, [0, 3], seed=seed, batch_size=100)
        found.append([(p.nll, p.standard_error) for p in points])
    nll, error = np.array(found).transpose(2, 1, 0)
    np.testing.assert_allclose(error.mean(1), nll.std(1), rtol=0.15)


def test_every_block_that_is_long_enough_shows_exactly_the_context_asked_for():
    """Lengths 2, 5, 8; each block's loss is its number of masks, L_b - N_c; tokens count alike."""
    lengths = [2, 5, 8]
    rows = [[0] * n + [PAD] * (8 - n) for n in lengths]
    scorer = BlockScorer(scored_by_count(lambda n: n), rows_of(rows, lengths), MASK)
    points = exact_curve(scorer, [0, 2, 4, 7])
    # 7 is left out: one block alone has no error
    assert [(p.low, p.num_draws) for p in points] == [(0, 3), (2, 2), (4, 2)]
    expected = [(2 * 2 + 5 * 5 + 8 * 8) / 15, (5 * 3 + 8 * 6) / 13, (5 * 1 + 8 * 4) / 13]
    assert [p.nll for p in points] == pytest.approx(expected)


@pytest.mark.parametrize("name", ["cpt", "gpt2"])
def test_no_curve_of_a_causal_lm_has_a_point_beyond_what_can_be_masked(zoo, name):
    rows = [Row(np.arange(8) % 5 + 3 + n % 2, 8, n, 3 * (n % 2)) for n in range(6)]
    scorer = load(zoo / name).scorer(Blocks.from_rows(rows))
    bins = context_bins(8, 7)
    assert [low for low, _ in bins] == list(range(8))
    is_there = ~np.isnan(losses_by_bin(scorer, bins, 1, 4))
    assert is_there[:, 0::2].sum(0).tolist() == [7, 7, 7], "position 0 is given"
    assert is_there[:, 1::2].sum(0).tolist() == [5, 5, 5], "so are prompts of 3"


# references


def test_the_unigram_is_add_one_smoothed_and_measured_on_validation():
    """Counts 4, 1, 0 (+1) of 8; validation 0 1 2 2."""
    train, valid = rows_of([[0, 0, 1], [0, 0, PAD]], [3, 2]), rows_of([[0, 1], [2, 2]])
    expected = -(math.log(5 / 8) + math.log(2 / 8) + 2 * math.log(1 / 8)) / 4
    assert references(train, valid, 3).unigram == pytest.approx(expected, rel=1e-12)
    assert unigram_cross_entropy(train, valid, 3) == pytest.approx(expected, rel=1e-12)


def test_the_position_wise_reference_mixes_own_counts_with_a_hundred_unigram_ones():
    """Unigram 1/2, 1/2; position 0 saw 300 times 0, position 1 saw 300 times 1."""
    known = references(rows_of([[0, 1]] * 300), rows_of([[0, 1], [1, 1]]), 2)
    likely, unlikely = math.log(350 / 400), math.log(50 / 400)
    assert known.unigram == pytest.approx(math.log(2), rel=1e-12)
    assert known.position_wise == pytest.approx(-(3 * likely + unlikely) / 4, rel=1e-12)


def test_padding_changes_no_reference():
    rng = np.random.default_rng(5)
    rows, lengths = rng.integers(0, 5, (60, 6)), rng.integers(1, 7, 60)
    padding = np.arange(6) >= lengths[:, None]
    with_zeros, with_fours = (rows_of(np.where(padding, v, rows), lengths) for v in (0, 4))
    assert references(with_zeros, with_zeros, 5) == references(with_fours, with_fours, 5)
