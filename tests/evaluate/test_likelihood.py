"""The NELBO and its error against exhaustive sums, closed forms and repeated experiments."""

from __future__ import annotations

import itertools
import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from counted_progress import Counted
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from bellmask.config.options import ModelOptions
from bellmask.data.blocks import Blocks
from bellmask.data.packing import Row
from bellmask.data.toys import ExactDenoiser, ToySource
from bellmask.diffusion.frameworks import Mdm
from bellmask.diffusion.schedules import Cosine, Linear
from bellmask.evaluate.likelihood import Likelihood, _parts, evaluate, mask_counts
from bellmask.model.transformer import Denoiser
from bellmask.utils.distributed import World
from bellmask.utils.errors import UserError
from bellmask.utils.stats import clustered_error, collapsed_strata_error

MASK, PAD = 50, 49


def seeded(seed):
    return torch.Generator().manual_seed(seed)


def measure(model, blocks, **options):
    return evaluate(model, blocks, mask_id=MASK, **options)


def register(num_tokens, length):
    """v → 2v or 2v + 1: without context ln V for sure, with neighbors next to nothing."""
    move = torch.zeros(num_tokens, num_tokens, dtype=torch.float64)
    for v in range(num_tokens):
        move[v, 2 * v % num_tokens] = move[v, (2 * v + 1) % num_tokens] = 0.5
    start = torch.full((num_tokens,), 1 / num_tokens, dtype=torch.float64)
    return ToySource.markov(start, move, length)


def constant_rows(lengths, block_length, documents=None):
    """Block b holds only the token b, then pads."""
    documents = range(len(lengths)) if documents is None else documents
    return Blocks.from_rows(
        Row(np.where(np.arange(block_length) < n, b, PAD), n, d)
        for b, (n, d) in enumerate(zip(lengths, documents, strict=True))
    )


def scored_by_target(table):
    """A model whose cross-entropy is a function of the target alone."""
    return lambda x, rows, targets, **_: torch.as_tensor(table, dtype=torch.float64)[targets]


def mask_code(x_BL, rows_N, targets_N, **_):
    """2^position: the sum over a block's masked rows names its mask."""
    return 2.0 ** (rows_N % x_BL.shape[1]).double()


def codes(blocks, **options):
    result = measure(mask_code, blocks, **options)
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


def shuffled_strata(count, rng):
    """One level per stratum of [0, 1), in random order."""
    return (rng.permutation(count) + rng.random(count)) / count


def coverage(nll, error, truth):
    return float(np.mean(np.abs(np.asarray(nll) - truth) < 1.96 * np.asarray(error)))


# standard errors: hand formulas, simulations of known variance


def test_strata_collapse_in_pairs_and_odd_counts_end_in_three():
    """SE^2 = sum (Y_2i - Y_2i-1)^2 / B^2 in order of level; three of variance s^2 add 3 s^2."""
    level = np.array([0.9, 0.1, 0.5, 0.3, 0.7, 0.8])
    value = np.array([6.0, 1.0, 3.0, 2.5, 4.0, 9.0])  # in order: 1, 2.5 | 3, 4 | 9, 6
    expected = np.sqrt(1.5**2 + 1.0**2 + 3.0**2) / 6
    assert collapsed_strata_error(value, level) == pytest.approx(expected, rel=1e-12)
    level = np.array([0.1, 0.3, 0.5, 0.7, 0.9])
    value = np.array([1.0, 2.5, 3.0, 4.0, 8.0])  # 1, 2.5 | 3, 4, 8: mean 5, squares 4 + 1 + 9
    expected = np.sqrt(1.5**2 + 3 * 14 / 2) / 5
    assert collapsed_strata_error(value, level) == pytest.approx(expected, rel=1e-12)
    assert collapsed_strata_error(value[2:], level[2:]) == pytest.approx(np.sqrt(21) / 3)


def test_the_trend_over_strata_is_not_noise_also_within_clusters():
    """trend + effect of a document + noise: Var(mean) = sd_document^2 / D + sd_noise^2 / B."""
    rng, documents, per_document = np.random.default_rng(3), 50, 6
    cluster = np.repeat(np.arange(documents), per_document)
    count, found = len(cluster), []
    for _ in range(500):
        level = shuffled_strata(count, rng)
        effect = 0.4 * rng.standard_normal(documents)[cluster]
        noise = 4 * level + 0.3 * rng.standard_normal(count)
        clustered = collapsed_strata_error(noise + effect, level, cluster)
        pairs, naive = collapsed_strata_error(noise, level), clustered_error(noise)
        found.append((clustered, pairs, naive, (noise + effect).mean()))
    clustered, pairs, naive, means = np.array(found).T
    truth = np.sqrt(0.4**2 / documents + 0.3**2 / count)
    assert np.std(means) == pytest.approx(truth, rel=0.1)
    assert np.sqrt(np.mean(clustered**2)) == pytest.approx(truth, rel=0.05)
    truth = np.hypot(0.3, 4 / count / np.sqrt(12)) / np.sqrt(count)
    assert np.sqrt(np.mean(pairs**2)) == pytest.approx(truth, rel=0.05)
    assert min(naive) > 3 * truth
    own = [
        collapsed_strata_error(rng.standard_normal(60), rng.random(60), np.arange(60))
        for _ in range(1000)
    ]
    assert np.sqrt(np.mean(np.square(own))) == pytest.approx(1 / np.sqrt(60), rel=0.03)


def test_the_clustered_error_is_the_hand_formula():
    """Residuals -3 -1 0 | 0 -1 5 sum to -4 and 4 within clusters, G / (G - 1) = 2, n = 6."""
    value, cluster = np.array([1.0, 4, 3, 3, 9, 4]), np.array([7, -2, 7, -2, -2, 7])
    assert clustered_error(value, cluster) == pytest.approx(np.sqrt(2 * 32) / 6, rel=1e-12)
    assert clustered_error(np.array([1.0, 2, 3, 6])) == pytest.approx(np.sqrt(14 / 3 / 4))
    value = np.random.default_rng(7).standard_normal(30)
    repeated = clustered_error(np.repeat(value, 5), np.repeat(np.arange(30), 5))
    assert repeated == pytest.approx(value.std(ddof=1) / np.sqrt(30), rel=1e-12)
    assert clustered_error(value, np.arange(30) * 7) == pytest.approx(repeated, rel=1e-12)
    assert math.isnan(clustered_error(value, np.zeros(30, dtype=int))), "one cluster alone"


# unbiased, with an honest error


SOURCES = {"sticky": ToySource.sticky(3, 16, stay=0.9), "register": register(8, 16)}


@pytest.mark.parametrize(
    ("name", "num_blocks", "draws", "repetitions"),
    [
        ("register", 47, 1, 200),
        ("sticky", 48, 4, 100),
        *(
            pytest.param(*experiment, marks=pytest.mark.long)
            for experiment in [
                ("sticky", 192, 1, 500),
                ("sticky", 64, 4, 400),
                ("register", 40, 1, 600),
                ("register", 40, 4, 400),
            ]
        ),
    ],
)
def test_the_perfect_model_scores_the_entropy(name, num_blocks, draws, repetitions):
    """On fresh data and masks each time; the reported error is the spread of the estimates."""
    source, found = SOURCES[name], []
    model, truth = ExactDenoiser(source), source.entropy / 16
    for seed in range(repetitions):
        result = evaluate(
            model,
            source.blocks(num_blocks, seeded(10_000 + seed)),
            mask_id=source.num_tokens,
            draws=draws,
            seed=seed,
            batch_size=num_blocks,
        )
        naive = result.block_nll.std(ddof=1) / math.sqrt(num_blocks)
        found.append((result.nll, result.standard_error, naive))
    nll, error, naive = np.array(found).T
    spread = nll.std(ddof=1)
    assert abs(nll.mean() - truth) < 4 * spread / math.sqrt(len(nll)) < 0.05 * truth
    assert error.mean() == pytest.approx(spread, rel=0.12)
    assert 0.92 <= coverage(nll, error, truth) <= 0.98
    if name == "register" and draws == 1:
        assert naive.min() > 1.5 * spread


# mask counts and masks


@given(st.integers(1, 40), st.integers(1, 12), st.integers(0, 10**6))
@settings(deadline=None, max_examples=30, derandomize=True, database=None)
def test_each_draw_stays_in_its_own_stratum_of_counts(length, draws, seed):
    _, counts = mask_counts(torch.full((9,), length), draws, seed)
    for r in range(draws):
        assert counts[:, r].min() >= 1 + length * r // draws
        assert counts[:, r].max() <= -(-length * (r + 1) // draws)


def test_every_count_is_used_equally_often():
    _, counts = mask_counts(torch.full((30,), 7), 7, seed=3)
    assert counts.sort(dim=1).values.tolist() == [list(range(1, 8))] * 30
    _, counts = mask_counts(torch.full((600,), 12), 1, seed=4)  # one draw: over blocks
    assert torch.bincount(counts[:, 0]).tolist() == [0] + [50] * 12
    assert abs(stats.spearmanr(np.arange(600), counts[:, 0]).statistic) < 4 / math.sqrt(600)
    _, counts = mask_counts(torch.full((6000,), 12), 3, seed=5)  # several: within a stratum
    for r in range(3):
        used = torch.bincount(counts[:, r], minlength=13)[4 * r + 1 : 4 * r + 5]
        assert used.sum() == 6000
        assert stats.chisquare(used.numpy()).pvalue > 1e-3


def exhaustive_nelbo(source, rows):
    """(1/L) sum over n of the mean over all masks of n tokens of the mean cross-entropy."""
    length = source.length
    everything = np.array(list(itertools.product(range(source.num_tokens), repeat=length)))
    p = source.initial_S.numpy()[everything[:, 0]].copy()
    for i in range(length - 1):
        p *= source.transition_SS.numpy()[everything[:, i], everything[:, i + 1]]
    total = 0.0
    for row, n in itertools.product(rows, range(1, length + 1)):
        masks = list(itertools.combinations(range(length), n))
        for masked in masks:
            seen = [j for j in range(length) if j not in masked]
            agrees = (everything[:, seen] == row[seen]).all(1)
            for i in masked:
                hit = p[agrees & (everything[:, i] == row[i])].sum() / p[agrees].sum()
                total -= math.log(hit) / n / len(masks)
    return total / length / len(rows)


@pytest.mark.parametrize("draws", [1, 2, 3, 4])
def test_over_masks_the_mean_is_the_exhaustive_sum(draws):
    """The same ten rows over and over; only the masks differ."""
    source = ToySource.markov(
        torch.tensor([0.2, 0.5, 0.3], dtype=torch.float64),
        torch.tensor([[0.7, 0.2, 0.1], [0.1, 0.1, 0.8], [0.3, 0.6, 0.1]], dtype=torch.float64),
        length=4,
    )
    rows = np.asarray(source.blocks(10, seeded(7)).tokens)
    blocks = Blocks.from_rows(Row(row, 4, b) for b, row in enumerate(np.tile(rows, (40, 1))))
    model = ExactDenoiser(source)
    options = {"mask_id": 3, "draws": draws, "batch_size": 400}
    found = [evaluate(model, blocks, **options, seed=seed).nll for seed in range(64)]
    truth = exhaustive_nelbo(source, rows)
    standard_error = np.std(found, ddof=1) / math.sqrt(len(found))
    assert abs(np.mean(found) - truth) < 4 * standard_error < 0.02 * truth


def test_all_masks_of_one_count_are_equally_likely_and_independent_between_draws():
    found = codes(constant_rows([4] * 4000, 4), draws=4, seed=8)
    pairs = np.zeros((4, 6), dtype=int)
    ones = {1 << i: i for i in range(4)}
    twos = {(1 << i) + (1 << j): k for k, (i, j) in enumerate(itertools.combinations(range(4), 2))}
    for one, two, _, all_four in found.tolist():
        pairs[ones[one], twos[two]] += 1
        assert all_four == 15
    assert stats.chisquare(pairs.sum(1)).pvalue > 1e-3
    assert stats.chisquare(pairs.sum(0)).pvalue > 1e-3
    assert stats.chi2_contingency(pairs).pvalue > 1e-3


def test_masks_depend_on_seed_block_and_draw_but_not_on_batches_or_later_blocks():
    blocks = constant_rows([20] * 30, 20)
    first, second = (codes(blocks, draws=3, seed=seed) for seed in (1, 2))
    assert (first != second).mean() > 0.9
    assert len(np.unique(first)) > 0.9 * first.size
    few = codes(constant_rows([20] * 10, 20), draws=3, seed=1)
    np.testing.assert_array_equal(few, first[:10])
    blocks = constant_rows([10, 3, 10, 7, 1, 10, 10, 5], 10)
    for draws in (1, 3):
        whole, one, three = (codes(blocks, draws=draws, batch_size=size) for size in (64, 1, 3))
        np.testing.assert_array_equal(whole, one)
        np.testing.assert_array_equal(whole, three)


@given(st.integers(0, 60), st.integers(1, 9), st.integers(1, 5))
@settings(deadline=None, max_examples=40, derandomize=True, database=None)
def test_ranks_together_take_each_block_once(total, batch_size, num_ranks):
    for in_step in (False, True):
        parts = [
            list(_parts(total, batch_size, World(rank, num_ranks), in_step=in_step))
            for rank in range(num_ranks)
        ]
        each = list(itertools.chain(*parts))
        taken = [n for part, is_extra in each if not is_extra for n in range(part.start, part.stop)]
        assert sorted(taken) == list(range(total))
        assert all(part.stop > part.start for part, _ in each)
        assert in_step or not any(is_extra for _, is_extra in each)
    assert len({len(part) for part in parts}) == 1  # a cut model is called as often by every rank


def test_the_shares_of_ranks_add_up_and_progress_is_told():
    class Silent(World):
        def all_reduce_sum(self, tensor):
            return tensor

    blocks, progress = constant_rows([6] * 11, 6), Counted()
    shares = [codes(blocks, batch_size=2, draws=2, world=Silent(rank, 3)) for rank in range(3)]
    whole = codes(blocks, batch_size=4, draws=2, progress=progress)
    np.testing.assert_array_equal(sum(shares), whole)
    assert progress.seen == [4, 8, 11]


# blocks of different lengths


@pytest.mark.parametrize("draws", [1, 3])
def test_the_corpus_value_weighs_blocks_by_the_tokens_that_are_not_given(draws):
    """Values 1, 2, 4 on 2, 3, 8 tokens: (2 + 6 + 32) / 13, not 7 / 3."""
    rows, model = constant_rows([2, 3, 8], 8), scored_by_target([1.0, 2.0, 4.0, 9.0])
    result = measure(model, rows, draws=draws)
    np.testing.assert_allclose(result.block_nll, [1, 2, 4], rtol=1e-12)
    assert result.nll == pytest.approx(40 / 13, rel=1e-12)
    assert result.num_tokens == 13
    seen = []

    def noting(x_BL, rows_N, targets_N, **_):
        seen.extend((rows_N % x_BL.shape[1]).tolist())
        return model(x_BL, rows_N, targets_N)

    # position 0 given: values 1, 2, 4 on 1, 2, 7 tokens; the last row has none
    given_first = constant_rows([2, 3, 8, 1], 8).starting_at(1)
    result = measure(noting, given_first, draws=draws, batch_size=1)
    assert result.length_B.tolist() == [1, 2, 7, 0]
    assert result.nll == pytest.approx((1 + 4 + 28) / 10, rel=1e-12)
    assert min(seen) == 1


def test_bytes_go_with_maskable_tokens():
    rows = [Row(np.zeros(10, dtype=np.int64), 10, n, start) for n, start in enumerate((8, 0, 3))]
    blocks = Blocks.from_rows(rows, num_bytes=19.0)  # 2, 10 and 7 maskable tokens
    assert blocks.slice(0, 1).num_bytes == pytest.approx(2)
    assert blocks.slice(1, 3).num_bytes == pytest.approx(17)
    assert blocks.spread(2).num_bytes == pytest.approx(2 + 7)
    assert blocks.starting_at(5).num_bytes == pytest.approx(2 + 5 + 5)


@pytest.mark.parametrize(("batch_size", "seed"), [(1, 1), (2, 2), (6, 3)])
def test_pads_are_never_masked_scored_or_seen(batch_size, seed):
    lengths = torch.tensor([5, 9, 9, 9, 1, 8])
    batches = []

    def model(x_BL, rows_N, targets_N, *, mask, **_):
        start = batch_size * len(batches)
        is_real = torch.arange(9) < lengths[start : start + batch_size, None]
        assert (x_BL[~is_real] == PAD).all()
        assert is_real.flatten()[rows_N].all()
        assert (x_BL.flatten()[rows_N] == MASK).all()
        assert (targets_N != PAD).all()
        everything = torch.ones(1, 1, 1, 9, dtype=torch.bool)
        visible = (everything if mask is None else mask).expand(batch_size, 1, 9, 9)
        assert visible.equal(is_real[:, None, None].expand(batch_size, 1, 9, 9))
        batches.append(len(x_BL))
        return torch.ones(len(rows_N))

    result = measure(model, constant_rows(lengths.tolist(), 9), batch_size=batch_size, seed=seed)
    assert sum(batches) == 6
    assert (result.count_BR[:, 0] <= lengths.numpy()).all()
    assert result.ce_BR.tolist() == [[1.0]] * 6


@pytest.mark.parametrize("draws", [1, 2])
def test_the_error_is_that_of_a_ratio(draws):
    """Long blocks score higher: the token-weighted ratio moves less than the mean of blocks."""
    rng, nll, error = np.random.default_rng(1), [], []
    for _ in range(600):
        length = rng.integers(1, 33, 200)
        value = 1 + 0.1 * length + 0.5 * rng.standard_normal(200)
        level = shuffled_strata(200, rng)
        result = made_up(value, level_B=level, length_B=length, draws=draws)
        nll.append(result.nll)
        error.append(result.standard_error)
    every = np.arange(1, 33)
    truth = (every * (1 + 0.1 * every)).sum() / every.sum()
    assert np.mean(error) == pytest.approx(np.std(nll), rel=0.1)
    assert 0.92 <= coverage(nll, error, truth) <= 0.98


# documents that span blocks


@pytest.mark.parametrize("draws", [1, 4])
def test_errors_between_documents_are_honest(draws):
    """50 documents of 5 blocks; errors that do not know of them are too small."""
    rng, document = np.random.default_rng(2), np.repeat(np.arange(50), 5)
    count, found = len(document), []
    for _ in range(500):
        level = shuffled_strata(count, rng)
        effect = 0.3 * rng.standard_normal(50)[document]
        value = 3 + effect + 0.2 * rng.standard_normal(count)
        if draws == 1:
            value += 4 * (level - 0.5)
        known, unknown = (
            made_up(value, level_B=level, document_B=labels, draws=draws)
            for labels in (document, np.arange(count))
        )
        found.append((known.nll, known.standard_error, unknown.standard_error))
    nll, error, blind = np.array(found).T
    truth = math.sqrt(0.3**2 / 50 + 0.2**2 / count)
    assert error.mean() == pytest.approx(truth, rel=0.1)
    assert 0.92 <= coverage(nll, error, 3.0) <= 0.98
    assert blind.mean() < 0.7 * truth
    assert coverage(nll, blind, 3.0) < 0.8


@pytest.mark.parametrize(
    ("documents", "is_clustered"),
    [([*range(20)] * 2, True), ([*range(19)] * 2, False), ([*range(40)], False)],
)
def test_documents_are_clusters_when_they_span_blocks_and_are_enough(documents, is_clustered):
    result = made_up(np.ones(len(documents)), document_B=np.array(documents))
    assert (result.clusters is not None) == is_clustered


# paired differences


def test_a_paired_difference_has_the_error_of_the_differences():
    """Blocks differ by 1, the models by 0.1 give or take 0.01."""
    rng, lengths = np.random.default_rng(3), [6, 6, 4, 6, 5, 6, 6, 3, 6, 6] * 4
    table = 3 + rng.standard_normal(40)
    gap = 0.1 + 0.01 * rng.standard_normal(40)
    blocks = constant_rows(lengths, 6)
    worse, better = (measure(scored_by_target(t), blocks, draws=2) for t in (table + gap, table))
    difference, error = worse.difference(better)
    weight = np.array(lengths) / sum(lengths)
    assert difference == pytest.approx(weight @ gap, rel=1e-9)
    by_hand = math.sqrt(((weight * (gap - weight @ gap)) ** 2).sum() * 40 / 39)
    assert error == pytest.approx(by_hand, rel=0.01)
    assert 20 * error < min(worse.standard_error, better.standard_error)


def test_a_paired_difference_of_one_draw_is_free_of_the_trend_over_counts():
    source = register(8, 16)
    blocks, exact = source.blocks(64, seeded(9)), ExactDenoiser(source)

    def worse_model(x_BL, rows_N, targets_N, **_):
        wobble = 0.01 * torch.sin(targets_N.double())
        return exact(x_BL, rows_N, targets_N, reduce=False) + 0.05 + wobble

    worse, better = (evaluate(m, blocks, mask_id=8) for m in (worse_model, exact))
    difference, error = worse.difference(better)
    assert abs(difference - 0.05) < 0.01
    assert 20 * error < better.standard_error
    assert better.difference(worse) == (pytest.approx(-difference), pytest.approx(error))


def test_other_masks_cannot_be_paired():
    model = scored_by_target(torch.ones(12))
    result = measure(model, constant_rows([3] * 12, 3), seed=1, draws=3)
    for num_blocks, seed, draws in ((12, 2, 3), (12, 1, 2), (11, 1, 3)):
        other = measure(model, constant_rows([3] * num_blocks, 3), seed=seed, draws=draws)
        with pytest.raises(ValueError, match="paired"):
            result.difference(other)


# time-conditioned models


@pytest.mark.parametrize(
    ("schedule", "alpha"),
    [
        (None, lambda t: 1 - t),
        (Linear(), lambda t: 1 - t),
        (Cosine(), lambda t: 1 - np.sin(np.pi * t / 2)),
    ],
    ids=["default", "linear", "cosine"],
)
def test_the_visible_share_given_the_context_count_is_beta(schedule, alpha):
    """alpha(t) ~ Beta(N_c + 1, L - N_c): its distribution function makes it uniform."""
    lengths = np.array([12, 12, 7, 3] * 1000)
    told = []

    def model(x_BL, rows_N, targets_N, *, t_B, **_):
        told.append((t_B.double().numpy(), (x_BL == MASK).sum(1).numpy()))
        return torch.ones(len(rows_N))

    blocks = Blocks(
        np.where(np.arange(12) < lengths[:, None], 0, PAD), lengths, np.arange(4000), "times"
    )
    measure(model, blocks, framework=schedule and Mdm(schedule), batch_size=1000)
    t, masked = (np.concatenate(part) for part in zip(*told, strict=True))
    context = lengths - masked
    level = stats.beta(context + 1, lengths - context).cdf(alpha(t))
    assert stats.kstest(level, "uniform").pvalue > 1e-3
    for length, low in ((12, True), (12, False), (7, True), (3, False)):
        part = (lengths == length) & ((masked <= length / 2) == low)
        assert stats.kstest(level[part], "uniform").pvalue > 1e-3


def test_each_draw_has_its_own_time():
    told = []

    def model(x_BL, rows_N, targets_N, *, t_B, **_):
        told.append(t_B)
        return torch.ones(len(rows_N))

    measure(model, constant_rows([8] * 5, 8), draws=3)
    assert len(torch.cat(told).unique()) == 15


# views of the result


def test_the_summary_is_what_json_can_say():
    """Values 1, 2, 3 on 2, 4, 3 tokens; with 10 bytes of text, bits per byte."""
    blocks = constant_rows([2, 4, 3], 4)
    model = scored_by_target([1.0, 2.0, 3.0])
    result = measure(model, blocks, draws=2)
    said = json.loads(json.dumps(result.summary()))
    residual = np.array([2, 4, 3]) * (np.array([1, 2, 3]) - 19 / 9) / 3
    assert said == {
        "nll": pytest.approx(19 / 9),
        "nll_se": pytest.approx(math.sqrt((residual**2).sum() / 2 / 3)),
        "perplexity": pytest.approx(math.exp(19 / 9)),
        "bits_per_byte": None,
        "num_blocks": 3,
        "num_tokens": 9,
        "num_draws": 2,
        "is_exact": False,
    }
    assert math.isnan(result.bits_per_byte)
    known = measure(model, replace(blocks, num_bytes=10.0), draws=2)
    assert known.summary()["bits_per_byte"] == pytest.approx(19 / 10 / math.log(2))


@pytest.mark.parametrize("value", [math.nan, 800.0, 1e31])
def test_a_model_that_diverged_has_no_numbers(value, tmp_path):
    result = made_up(np.array([value, value]), draws=2)
    assert result.is_finite == (value == 800)
    assert result.perplexity == math.inf or value != value
    assert result.summary()["perplexity"] is None
    with pytest.raises(UserError, match=str(tmp_path)):
        result.checked(tmp_path)


def test_saving_and_loading_gives_the_same_without_pickle(tmp_path):
    blocks = replace(constant_rows([2, 4, 3], 4, documents=[0, 0, 5]), num_bytes=12.5)
    result = measure(scored_by_target([1.0, 2.0, 3.0]), blocks, draws=2)
    path = tmp_path / "valid.blocks.npz"
    result.save(path)
    assert [p.name for p in tmp_path.iterdir()] == [path.name]
    loaded = Likelihood.load(path)
    for name, value in vars(result).items():
        found = getattr(loaded, name)
        assert type(found) is type(value)
        np.testing.assert_array_equal(found, value)
    assert loaded.difference(result) == (0, 0)
    causal = replace(result, is_causal=True, is_exact=True)
    causal.save(path)
    assert (Likelihood.load(path).is_causal, Likelihood.load(path).is_exact) == (True, True)


@pytest.mark.parametrize("draws", [1, 3])
def test_one_block_has_a_value_but_no_error(draws):
    result = measure(scored_by_target([2.0]), constant_rows([5], 5), draws=draws)
    assert result.nll == pytest.approx(2)
    assert math.isnan(result.standard_error)
    assert math.isnan(result.difference(result)[1])


# the real model


def random_denoiser(modulation):
    """All weights random, so that attention, gates and head all matter."""
    options = ModelOptions(num_layers=2, width=32, num_heads=2, dropout=0.0, modulation=modulation)
    model, noise = Denoiser(options, MASK), seeded(11)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.3, generator=noise)
    return model.eval()


def random_rows(lengths, block_length):
    """Block b's tokens depend on b alone, whatever the padding."""
    rows = []
    for b, n in enumerate(lengths):
        ids = np.full(block_length, PAD)
        ids[:n] = np.random.default_rng(b).integers(0, PAD, n)
        rows.append(Row(ids, n, b))
    return Blocks.from_rows(rows)


@pytest.mark.parametrize("modulation", ["constant", "time"])
def test_the_value_of_a_block_depends_neither_on_its_batch_nor_on_its_padding(modulation):
    model, blocks = random_denoiser(modulation), random_rows([9, 4, 9, 1, 6, 9, 2], 9)
    whole, one, three = (
        measure(model, blocks, draws=3, batch_size=size).ce_BR for size in (7, 1, 3)
    )
    assert whole.std() > 0.1
    np.testing.assert_allclose(one, whole, rtol=2e-5)
    np.testing.assert_allclose(three, whole, rtol=2e-5)
    for length in (1, 8):
        bare, some, more = (
            measure(model, random_rows([length], width), draws=4).ce_BR
            for width in (length, length + 3, 24)
        )
        np.testing.assert_allclose(some, bare, rtol=2e-5)
        np.testing.assert_allclose(more, bare, rtol=2e-5)
