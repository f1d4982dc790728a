"""The NELBO, its error and its curve over context counts: closed forms and repeated experiments."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from counted_progress import Counted
from sampling_tools import awake, seeded
from scipy import stats
from toy_tools import blocks_of, toy_rows

from bellmask import load
from bellmask.data.toys import ExactDenoiser, ToySource
from bellmask.evaluate.likelihood import (
    REFERENCES,
    BlockScorer,
    Likelihood,
    _parts,
    binned_curve,
    evaluate,
    exact_curve,
    mask_counts,
    references,
    unigram_cross_entropy,
)
from bellmask.utils.distributed import World
from bellmask.utils.errors import UserError
from bellmask.utils.stats import clustered_error, collapsed_strata_error

MASK, PAD = 50, 49


def measure(model, blocks, **options):
    return evaluate(model, blocks, mask_id=MASK, **options)


def register(num_tokens, length):
    """v → 2v or 2v + 1: without context ln V for sure, with neighbors next to nothing."""
    move = torch.zeros(num_tokens, num_tokens, dtype=torch.float64)
    for v in range(num_tokens):
        move[v, 2 * v % num_tokens] = move[v, (2 * v + 1) % num_tokens] = 0.5
    start = torch.full((num_tokens,), 1 / num_tokens, dtype=torch.float64)
    return ToySource.markov(start, move, length)


def constant_rows(lengths, block_length):
    """Block b holds only the token b, then pads."""
    place = np.arange(block_length)
    return blocks_of([np.where(place < n, b, PAD) for b, n in enumerate(lengths)], lengths)


def scored_by_target(table):
    """A model whose cross-entropy is a function of the target alone."""
    return lambda x, rows, targets, **_: torch.as_tensor(table, dtype=torch.float64)[targets]


def scored_by_count(function):
    """A model whose cross-entropy is a function of how many tokens are masked."""

    def model(x_BL, rows_N, targets_N, **_):
        count_B = (x_BL == MASK).sum(1)
        return function(count_B.double())[rows_N // x_BL.shape[1]]

    return model


def codes(blocks, **options):
    """Of each block and draw a number that names its mask: the sum of 2^position."""
    result = measure(
        lambda x, rows, _, **__: 2.0 ** (rows % x.shape[1]).double(), blocks, **options
    )
    return np.rint(result.ce_BR * result.count_BR).astype(int)


def made_up(value_B, *, level_B=None, length_B=None, document_B=None, draws=1):
    """The result of an evaluation in which block b scored value_B[b]."""
    count = len(value_B)
    return Likelihood(
        np.ones(count, dtype=np.int64) if length_B is None else length_B,
        np.zeros(count) if level_B is None else level_B,
        np.ones((count, draws), dtype=np.int64),
        np.repeat(value_B[:, None], draws, axis=1),
        np.arange(count) if document_B is None else document_B,
        0,
    )


# standard errors: hand formulas, simulations of known variance


def test_errors_by_hand():
    """Strata: SE^2 = sum (Y_2i - Y_2i-1)^2 / B^2 in order of level; a last three adds 3 s^2.
    Clusters: residuals -3 -1 0 | 0 -1 5 sum to -4 and 4, G / (G - 1) = 2, n = 6.
    """
    level = np.array([0.9, 0.1, 0.5, 0.3, 0.7, 0.8])
    value = np.array([6.0, 1.0, 3.0, 2.5, 4.0, 9.0])  # in order: 1, 2.5 | 3, 4 | 9, 6
    expected = np.sqrt(1.5**2 + 1.0**2 + 3.0**2) / 6
    assert collapsed_strata_error(value, level) == pytest.approx(expected, rel=1e-12)
    value = np.array([1.0, 2.5, 3.0, 4.0, 8.0])  # 1, 2.5 | 3, 4, 8: mean 5, squares 4 + 1 + 9
    expected = np.sqrt(1.5**2 + 3 * 14 / 2) / 5
    assert collapsed_strata_error(value, np.arange(5.0)) == pytest.approx(expected, rel=1e-12)
    value, cluster = np.array([1.0, 4, 3, 3, 9, 4]), np.array([7, -2, 7, -2, -2, 7])
    assert clustered_error(value, cluster) == pytest.approx(np.sqrt(2 * 32) / 6, rel=1e-12)
    assert clustered_error(np.array([1.0, 2, 3, 6])) == pytest.approx(np.sqrt(14 / 3 / 4))
    assert math.isnan(clustered_error(value, np.zeros(6, dtype=int))), "one cluster alone"


def test_documents_are_clusters_when_they_span_blocks_and_are_enough():
    documents = ([*range(20)] * 2, [*range(19)] * 2, [*range(40)])
    results = [made_up(np.ones(len(some)), document_B=np.array(some)) for some in documents]
    assert [result.clusters is not None for result in results] == [True, False, False]


SOURCES = {"sticky": ToySource.sticky(3, 16, stay=0.9), "register": register(8, 16)}


@pytest.mark.parametrize(
    ("name", "num_blocks", "draws", "repetitions"),
    [
        ("register", 47, 1, 200),
        ("sticky", 48, 4, 100),
        pytest.param("sticky", 192, 1, 500, marks=pytest.mark.long),
        pytest.param("register", 40, 2, 400, marks=pytest.mark.long),
        pytest.param("register", 40, 4, 400, marks=pytest.mark.long),
    ],
)
def test_the_perfect_model_scores_the_entropy(name, num_blocks, draws, repetitions):
    """On fresh data and masks each time; the reported error is the spread of the estimates."""
    source, found = SOURCES[name], []
    model, truth = ExactDenoiser(source), source.entropy / 16
    how = {"mask_id": source.num_tokens, "draws": draws, "batch_size": num_blocks}
    for seed in range(repetitions):
        blocks = toy_rows(source, num_blocks, seeded(10_000 + seed))
        result = evaluate(model, blocks, seed=seed, **how)
        found.append((result.nll, result.standard_error))
    nll, error = np.array(found).T
    spread = nll.std(ddof=1)
    assert abs(nll.mean() - truth) < 4 * spread / math.sqrt(len(nll)) < 0.05 * truth
    assert error.mean() == pytest.approx(spread, rel=0.12)
    is_covered = np.abs(nll - truth) < 1.96 * error
    assert abs(np.mean(is_covered) - 0.95) < 3 * math.sqrt(0.95 * 0.05 / repetitions)


# mask counts and masks


def test_every_count_is_used_equally_often_and_each_draw_stays_in_its_stratum():
    _, counts = mask_counts(torch.full((30,), 7), 7, seed=3)
    assert counts.sort(dim=1).values.tolist() == [list(range(1, 8))] * 30
    _, counts = mask_counts(torch.full((600,), 12), 1, seed=4)  # one draw: over blocks
    assert torch.bincount(counts[:, 0]).tolist() == [0] + [50] * 12
    assert abs(stats.spearmanr(np.arange(600), counts[:, 0]).statistic) < 4 / math.sqrt(600)
    _, counts = mask_counts(torch.full((600,), 12), 3, seed=5)  # several: in blocks and over them
    for r in range(3):
        assert (
            torch.bincount(counts[:, r], minlength=13)[4 * r + 1 : 4 * r + 5].tolist() == [150] * 4
        )
    keys = torch.arange(6000)  # masks of a row alone: within a stratum, independent over rows
    _, counts = mask_counts(torch.full((6000,), 12), 3, seed=5, row_keys=keys)
    for r in range(3):
        used = torch.bincount(counts[:, r], minlength=13)[4 * r + 1 : 4 * r + 5]
        assert used.sum() == 6000
        assert stats.chisquare(used.numpy()).pvalue > 1e-3


@pytest.mark.parametrize(("draws", "num_documents"), [(1, 40), (2, 40), (4, 40), (2, 25)])
def test_errors_cover_the_truth_and_more_masks_make_less_noise(draws, num_documents):
    """A block's loss is its token's factor times the masked share, plus what the mask's place says.

    Over fresh blocks and masks the interval covers the truth as often as it claims; on the same
    blocks twice the masks have at most 0.7 times the variance of half as many.
    """
    length, repetitions = 16, 300

    def model(x_BL, rows_N, targets_N, **_):
        share_B = (x_BL == MASK).double().mean(1)
        place = torch.sin((rows_N % length).double())
        return (1 + targets_N / 50) * (4 * share_B[rows_N // length] + place)

    draw = np.random.default_rng(0)
    truth = (1 + 9.5 / 50) * (4 * (length + 1) / 2 / length + np.sin(np.arange(length)).mean())
    found = []
    for seed in range(repetitions):
        own = draw.integers(0, 20, num_documents).repeat(40 // num_documents + 1)[:40]
        label = np.arange(num_documents).repeat(40 // num_documents + 1)[:40]
        blocks = replace(blocks_of([[token] * length for token in own]), documents=label)
        result = measure(model, blocks, draws=draws, seed=seed)
        found.append((result.nll, result.standard_error))
    nll, error = np.array(found).T
    assert abs(nll.mean() - truth) < 4 * nll.std() / math.sqrt(repetitions)
    is_covered = np.abs(nll - truth) < 1.96 * error
    assert 0.9 < np.mean(is_covered) < 0.99
    noise = [
        np.var([measure(model, blocks, draws=number, seed=s).nll for s in range(200)])
        for number in (draws, 2 * draws)
    ]
    assert noise[1] < 0.7 * noise[0]


def test_masks_depend_on_seed_block_and_draw_but_not_on_batches():
    first, second = (codes(constant_rows([20] * 30, 20), draws=3, seed=seed) for seed in (1, 2))
    assert (first != second).mean() > 0.9
    assert len(np.unique(first)) > 0.9 * first.size
    keys = torch.arange(30)  # with keys of its own, a row's masks do not depend on other rows
    whole = codes(constant_rows([20] * 30, 20), draws=3, row_keys=keys)
    few = codes(constant_rows([20] * 10, 20), draws=3, row_keys=keys[:10])
    np.testing.assert_array_equal(few, whole[:10])
    blocks = constant_rows([10, 3, 10, 7, 1, 10, 10, 5], 10)
    for draws in (1, 3):
        whole, three = (codes(blocks, draws=draws, batch_size=size) for size in (64, 3))
        np.testing.assert_array_equal(whole, three)


def test_ranks_together_take_each_block_once():
    class Silent(World):
        def all_reduce_sum(self, tensor):
            return tensor

    for total, size, num_ranks in itertools.product((0, 1, 7, 24), (1, 3, 8), (1, 2, 5)):
        for in_step in (False, True):
            worlds = [World(rank, num_ranks) for rank in range(num_ranks)]
            parts = [list(_parts(total, size, world, in_step=in_step)) for world in worlds]
            own = [part for some in parts for part, is_extra in some if not is_extra]
            assert sorted(n for p in own for n in range(p.start, p.stop)) == list(range(total))
        assert len({len(part) for part in parts}) == 1  # a cut model is called as often by all
    blocks, progress = constant_rows([6] * 11, 6), Counted()
    shares = [codes(blocks, batch_size=2, draws=2, world=Silent(rank, 3)) for rank in range(3)]
    whole = codes(blocks, batch_size=4, draws=2, progress=progress)
    np.testing.assert_array_equal(sum(shares), whole)
    assert progress.seen == [4, 8, 11]


@pytest.mark.parametrize("draws", [1, 3])
def test_blocks_weigh_by_the_tokens_that_are_not_given(draws):
    """Values 1, 2, 4 on 2, 3, 8 tokens: (2 + 6 + 32) / 13, not 7 / 3."""
    model = scored_by_target([1.0, 2.0, 4.0, 9.0])
    result = measure(model, constant_rows([2, 3, 8], 8), draws=draws)
    np.testing.assert_allclose(result.block_nll, [1, 2, 4], rtol=1e-12)
    assert (result.nll, result.num_tokens) == (pytest.approx(40 / 13, rel=1e-12), 13)
    # position 0 given: values 1, 2, 4 on 1, 2, 7 tokens; the last row has none
    given_first = constant_rows([2, 3, 8, 1], 8).starting_at(1)
    result = measure(model, given_first, draws=draws, batch_size=1)
    assert result.length_B.tolist() == [1, 2, 7, 0]
    assert result.nll == pytest.approx((1 + 4 + 28) / 10, rel=1e-12)
    places = measure(lambda x, rows, *_, **__: (rows % x.shape[1]).double(), given_first, draws=7)
    assert places.ce_BR[0, 0] == 1, "the first place that can be masked"


def random_rows(lengths, block_length):
    """Block b's tokens depend on b alone, whatever the padding."""
    rows = []
    for b, n in enumerate(lengths):
        own = np.random.default_rng(b).integers(0, PAD, n)
        rows.append(np.pad(own, (0, block_length - n), constant_values=PAD))
    return blocks_of(rows, lengths)


@pytest.mark.parametrize("modulation", ["constant", "time"])
def test_the_value_of_a_block_depends_neither_on_its_batch_nor_on_its_padding(modulation):
    model = awake(num_tokens=MASK, modulation=modulation)
    blocks = random_rows([9, 4, 9, 1, 6, 9, 2], 9)
    whole, three = (measure(model, blocks, draws=3, batch_size=size).ce_BR for size in (7, 3))
    assert whole.std() > 0.1
    np.testing.assert_allclose(three, whole, rtol=2e-5)
    bare, more = (measure(model, random_rows([8], width), draws=4).ce_BR for width in (8, 24))
    np.testing.assert_allclose(more, bare, rtol=2e-5)


# paired differences, and other views of the result


def test_the_summary_is_what_json_can_say(tmp_path):
    """Values 1, 2, 3 on 2, 4, 3 tokens; with 10 bytes of text, bits per byte."""
    blocks, model = constant_rows([2, 4, 3], 4), scored_by_target([1.0, 2.0, 3.0])
    residual = np.array([2, 4, 3]) * (np.array([1, 2, 3]) - 19 / 9) / 3
    assert measure(model, blocks, draws=2).summary() == {
        "nll": pytest.approx(19 / 9),
        "nll_se": pytest.approx(math.sqrt((residual**2).sum() / 2 / 3)),
        "perplexity": pytest.approx(math.exp(19 / 9)),
        "bits_per_byte": None,
        "num_blocks": 3,
        "num_tokens": 9,
        "num_draws": 2,
        "is_exact": False,
    }
    known = measure(model, replace(blocks, num_bytes=10.0), draws=2)
    assert known.summary()["bits_per_byte"] == pytest.approx(19 / 10 / math.log(2))
    alone = measure(scored_by_target([2.0]), constant_rows([5], 5))
    assert alone.nll == pytest.approx(2)
    assert math.isnan(alone.standard_error), "one block has a value but no error"
    for result in (known, replace(known, is_causal=True, is_exact=True)):
        result.save(tmp_path / "blocks.npz")
        assert [p.name for p in tmp_path.iterdir()] == ["blocks.npz"]
        loaded = vars(Likelihood.load(tmp_path / "blocks.npz"))
        for name, value in vars(result).items():
            assert type(loaded[name]) is type(value)
            np.testing.assert_array_equal(loaded[name], value)


@pytest.mark.parametrize("value", [math.nan, 800.0, 1e31])
def test_a_model_that_diverged_has_no_numbers(value, zoo, monkeypatch):
    result, run = made_up(np.array([value, value]), draws=2), load(zoo / "bell")
    assert result.is_finite == (value == 800)
    assert result.perplexity == math.inf or value != value
    assert result.summary()["perplexity"] is None
    monkeypatch.setattr("bellmask.evaluate.likelihood.evaluate", lambda *_, **__: result)
    with pytest.raises(UserError, match="diverged"):
        run.evaluate(constant_rows([2], 16))


# NLL by context count


def test_each_bin_is_the_mean_over_its_contexts():
    """A loss of n^2 for n masks, every n once per block; context c is n = 8 - c."""
    model = scored_by_count(torch.square)
    result = measure(model, blocks_of([[0] * 8] * 3), draws=8)
    single = binned_curve(result, num_bins=8)
    assert [p.nll for p in single] == pytest.approx([(8 - c) ** 2 for c in range(8)])
    assert [p.standard_error for p in single] == pytest.approx([0] * 8)
    pairs = binned_curve(result, num_bins=4)
    assert [(p.low, p.high, p.num_draws) for p in pairs] == [(c, c + 1, 6) for c in (0, 2, 4, 6)]
    assert [p.nll for p in pairs] == pytest.approx([56.5, 30.5, 12.5, 2.5])
    # half of the blocks have 2 tokens and score 1, half have 8 and score 2
    blocks = blocks_of([[0, 0, *[PAD] * 6], [1] * 8] * 10, [2, 8] * 10)
    result = measure(lambda x, rows, y, **_: 1.0 + y.double(), blocks, draws=8)
    assert binned_curve(result, num_bins=1)[0].nll == pytest.approx(1.8)
    few = made_up(np.ones(4), length_B=np.full(4, 8))
    few.count_BR[:] = [[8], [8], [8], [1]]
    assert [(p.low, p.high, p.num_draws) for p in binned_curve(few, 8)] == [(0, 0, 3)]


def test_every_block_that_is_long_enough_shows_exactly_the_context_asked_for():
    """Lengths 2, 5, 8; each block's loss is its number of masks, L_b - N_c; tokens count alike."""
    scorer = BlockScorer(scored_by_count(lambda n: n), constant_rows([2, 5, 8], 8), MASK)
    points = exact_curve(scorer, [0, 2, 4, 7])
    # 7 is left out: one block alone has no error
    assert [(p.low, p.num_draws) for p in points] == [(0, 3), (2, 2), (4, 2)]
    expected = [(2 * 2 + 5 * 5 + 8 * 8) / 15, (5 * 3 + 8 * 6) / 13, (5 * 1 + 8 * 4) / 13]
    assert [p.nll for p in points] == pytest.approx(expected)


def test_references_by_hand():
    """Counts 4, 1, 0 (+1) of 8; validation 0 1 2 2. Position 0 saw 300 times 0, position 1 1."""
    train, valid = blocks_of([[0, 0, 1], [0, 0, PAD]], [3, 2]), blocks_of([[0, 1], [2, 2]])
    expected = -(math.log(5 / 8) + math.log(2 / 8) + 2 * math.log(1 / 8)) / 4
    unigram, position_wise = REFERENCES.values()
    assert references(train, valid, 3)[unigram] == pytest.approx(expected, rel=1e-12)
    assert unigram_cross_entropy(train, valid, 3) == pytest.approx(expected, rel=1e-12)
    known = references(blocks_of([[0, 1]] * 300), blocks_of([[0, 1], [1, 1]]), 2)
    likely, unlikely = math.log(350 / 400), math.log(50 / 400)  # a hundred unigram counts
    assert known[unigram] == pytest.approx(math.log(2), rel=1e-12)
    assert known[position_wise] == pytest.approx(-(3 * likely + unlikely) / 4, rel=1e-12)
