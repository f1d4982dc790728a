"""The NELBO and its error against exhaustive sums, closed forms and repeated experiments."""

import functools
import itertools
import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from bellmask.data.blocks import Blocks
from bellmask.data.packing import Row
from bellmask.data.toy import ExactDenoiser, ToySource
from bellmask.diffusion.orders import Mdm
from bellmask.diffusion.schedule import Cosine, Linear
from bellmask.evaluate.likelihood import Likelihood, _parts, evaluate, mask_counts
from bellmask.model.transformer import Denoiser
from bellmask.options import ModelOptions
from bellmask.train.distributed import World

MASK, PAD = 50, 49


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def register(num_tokens: int, length: int) -> ToySource:
    """v → 2v or 2v + 1: without context ln V for sure, with neighbours next to nothing."""
    move = torch.zeros(num_tokens, num_tokens, dtype=torch.float64)
    for v in range(num_tokens):
        move[v, 2 * v % num_tokens] = move[v, (2 * v + 1) % num_tokens] = 0.5
    start = torch.full((num_tokens,), 1 / num_tokens, dtype=torch.float64)
    return ToySource.markov(start, move, length)


def constant_rows(lengths, block_length: int, documents=None) -> Blocks:
    """Block b holds only the token b, then pads."""
    documents = range(len(lengths)) if documents is None else documents
    return Blocks.from_rows(
        Row(np.where(np.arange(block_length) < n, b, PAD), n, d)
        for b, (n, d) in enumerate(zip(lengths, documents, strict=True))
    )


def scored_by_target(table):
    """A model whose cross-entropy is a function of the target alone."""
    return lambda x, rows, targets, **_: torch.as_tensor(table, dtype=torch.float64)[targets]


def scored_by_count(function):
    """A model whose cross-entropy is a function of how many tokens are masked."""

    def model(x_BL, rows_N, targets_N, **_):
        count_B = (x_BL == MASK).sum(1)
        return function(count_B.double())[rows_N // x_BL.shape[1]]

    return model


def mask_code(x_BL, rows_N, targets_N, **_):
    """2^position: the sum over a block's masked rows names its mask."""
    return 2.0 ** (rows_N % x_BL.shape[1]).double()


def codes(result: Likelihood) -> np.ndarray:
    return np.rint(result.ce_BR * result.count_BR).astype(int)


def made_up(value_B, *, level_B=None, length_B=None, document_B=None, draws=1) -> Likelihood:
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


def coverage(nll, error, truth) -> float:
    return float(np.mean(np.abs(np.asarray(nll) - truth) < 1.96 * np.asarray(error)))


# unbiased, with an honest error


SOURCES = {
    "sticky": ToySource.sticky(3, 16, stay=0.9),
    "register": register(8, 16),
}
EXPERIMENTS = [
    # source, blocks, draws, repetitions
    ("sticky", 192, 1, 500),
    ("sticky", 64, 4, 400),
    ("register", 40, 1, 600),
    ("register", 47, 1, 500),
    ("register", 40, 4, 400),
]


@functools.cache
def repeated(name: str, num_blocks: int, draws: int, repetitions: int):
    """(estimates, reported errors, naive errors) on fresh data and masks each time."""
    source = SOURCES[name]
    model, found = ExactDenoiser(source), []
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
    return np.array(found).T


@pytest.mark.parametrize("experiment", EXPERIMENTS, ids=str)
def test_the_perfect_model_scores_the_entropy(experiment):
    nll, _, _ = repeated(*experiment)
    truth = SOURCES[experiment[0]].entropy / 16
    assert abs(nll.mean() - truth) < 4 * nll.std(ddof=1) / math.sqrt(len(nll))
    assert nll.std(ddof=1) / math.sqrt(len(nll)) < 0.01 * truth


@pytest.mark.parametrize("experiment", EXPERIMENTS, ids=str)
def test_reported_errors_are_the_spread_of_the_estimates(experiment):
    nll, error, _ = repeated(*experiment)
    assert error.mean() == pytest.approx(nll.std(ddof=1), rel=0.12)


@pytest.mark.parametrize("experiment", EXPERIMENTS, ids=str)
def test_intervals_cover_the_truth_nineteen_times_in_twenty(experiment):
    nll, error, _ = repeated(*experiment)
    assert 0.92 <= coverage(nll, error, SOURCES[experiment[0]].entropy / 16) <= 0.98


def test_the_naive_error_of_one_draw_is_far_too_wide():
    nll, _, naive = repeated("register", 40, 1, 600)
    assert naive.min() > 1.5 * nll.std(ddof=1)


# mask counts and masks


@given(st.integers(1, 40), st.integers(1, 12), st.integers(0, 10**6))
@settings(deadline=None, max_examples=60, derandomize=True, database=None)
def test_each_draw_stays_in_its_own_stratum_of_counts(length, draws, seed):
    _, counts = mask_counts(torch.full((9,), length), draws, seed)
    for r in range(draws):
        assert counts[:, r].min() >= 1 + length * r // draws
        assert counts[:, r].max() <= -(-length * (r + 1) // draws)


def test_as_many_draws_as_tokens_are_all_counts_once():
    _, counts = mask_counts(torch.full((30,), 7), 7, seed=3)
    assert counts.sort(dim=1).values.tolist() == [list(range(1, 8))] * 30


def test_one_draw_uses_each_count_equally_often_over_blocks_in_random_order():
    _, counts = mask_counts(torch.full((600,), 12), 1, seed=4)
    assert torch.bincount(counts[:, 0]).tolist() == [0] + [50] * 12
    assert abs(stats.spearmanr(np.arange(600), counts[:, 0]).statistic) < 4 / math.sqrt(600)


def test_several_draws_use_every_count_of_a_stratum_equally_often():
    _, counts = mask_counts(torch.full((6000,), 12), 3, seed=5)
    for r in range(3):
        used = torch.bincount(counts[:, r], minlength=13)[4 * r + 1 : 4 * r + 5]
        assert used.sum() == 6000
        assert stats.chisquare(used.numpy()).pvalue > 1e-3


def test_with_as_many_draws_as_tokens_a_loss_that_depends_on_the_count_is_exact():
    blocks = constant_rows([8] * 5, 8)
    model = scored_by_count(lambda n: n**2 + 1 / n)
    result = evaluate(model, blocks, mask_id=MASK, draws=8)
    exact = sum(n**2 + 1 / n for n in range(1, 9)) / 8
    np.testing.assert_allclose(result.block_nll, exact, rtol=1e-12)
    assert result.nll == pytest.approx(exact, rel=1e-12)
    assert result.standard_error == pytest.approx(0, abs=1e-12)


def exhaustive_nelbo(source: ToySource, rows: np.ndarray) -> float:
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
    """The data stay the same; only the masks change with the seed."""
    source = ToySource.markov(
        torch.tensor([0.2, 0.5, 0.3], dtype=torch.float64),
        torch.tensor([[0.7, 0.2, 0.1], [0.1, 0.1, 0.8], [0.3, 0.6, 0.1]], dtype=torch.float64),
        length=4,
    )
    blocks = source.blocks(10, seeded(7))
    found = [
        evaluate(ExactDenoiser(source), blocks, mask_id=3, draws=draws, seed=seed).nll
        for seed in range(400)
    ]
    truth = exhaustive_nelbo(source, np.asarray(blocks.tokens))
    standard_error = np.std(found, ddof=1) / math.sqrt(len(found))
    assert abs(np.mean(found) - truth) < 4 * standard_error
    assert standard_error < 0.01 * truth


def test_all_masks_of_one_count_are_equally_likely_and_independent_between_draws():
    result = evaluate(mask_code, constant_rows([4] * 4000, 4), mask_id=MASK, draws=4, seed=8)
    assert result.count_BR.tolist() == [[1, 2, 3, 4]] * 4000
    pairs = np.zeros((4, 6), dtype=int)
    ones = {1 << i: i for i in range(4)}
    twos = {(1 << i) + (1 << j): k for k, (i, j) in enumerate(itertools.combinations(range(4), 2))}
    for one, two, _, _ in codes(result).tolist():
        pairs[ones[one], twos[two]] += 1
    assert stats.chisquare(pairs.sum(1)).pvalue > 1e-3
    assert stats.chisquare(pairs.sum(0)).pvalue > 1e-3
    assert stats.chi2_contingency(pairs).pvalue > 1e-3


@pytest.mark.parametrize("draws", [1, 3])
def test_masks_do_not_depend_on_the_batch_size(draws):
    blocks = constant_rows([10, 3, 10, 7, 1, 10, 10, 5], 10)
    whole, one, three = (
        codes(evaluate(mask_code, blocks, mask_id=MASK, draws=draws, batch_size=size))
        for size in (64, 1, 3)
    )
    np.testing.assert_array_equal(whole, one)
    np.testing.assert_array_equal(whole, three)


def test_masks_depend_on_seed_block_and_draw():
    blocks = constant_rows([20] * 40, 20)
    first, second = (
        codes(evaluate(mask_code, blocks, mask_id=MASK, draws=3, seed=seed)) for seed in (1, 2)
    )
    assert (first != second).mean() > 0.9
    assert len(np.unique(first)) > 0.9 * first.size


def test_with_several_draws_the_first_blocks_keep_their_masks_when_blocks_are_added():
    few, many = (
        codes(evaluate(mask_code, constant_rows([20] * n, 20), mask_id=MASK, draws=3))
        for n in (10, 30)
    )
    np.testing.assert_array_equal(few, many[:10])


@given(st.integers(0, 60), st.integers(1, 9), st.integers(1, 5))
@settings(deadline=None, max_examples=60, derandomize=True, database=None)
def test_ranks_together_take_each_block_once(total, batch_size, num_ranks):
    for in_step in (False, True):
        parts = [
            list(_parts(total, batch_size, World(rank, num_ranks), in_step=in_step))
            for rank in range(num_ranks)
        ]
        taken = [
            number
            for part, is_extra in itertools.chain(*parts)
            if not is_extra
            for number in range(part.start, part.stop)
        ]
        assert sorted(taken) == list(range(total))
        assert all(part.stop > part.start for part, _ in itertools.chain(*parts))
        assert in_step or not any(is_extra for _, is_extra in itertools.chain(*parts))
    assert len({len(part) for part in parts}) == 1  # a cut model is called as often by every rank


def test_the_shares_of_ranks_add_up_to_the_whole():
    class Silent(World):
        def add_up(self, tensor):
            return tensor

    blocks = constant_rows([6] * 11, 6)
    share = [
        evaluate(mask_code, blocks, mask_id=MASK, batch_size=2, draws=2, world=Silent(rank, 3))
        for rank in range(3)
    ]
    whole = evaluate(mask_code, blocks, mask_id=MASK, batch_size=4, draws=2)
    np.testing.assert_array_equal(sum(codes(part) for part in share), codes(whole))


def test_on_batch_is_told_the_blocks_done_so_far():
    done = []
    evaluate(
        mask_code, constant_rows([3] * 10, 3), mask_id=MASK, batch_size=4, on_batch=done.append
    )
    assert done == [4, 8, 10]


# blocks of different lengths


@pytest.mark.parametrize("draws", [1, 3])
def test_the_corpus_value_weighs_blocks_by_their_tokens(draws):
    """Values 1, 2, 4 on 2, 3, 8 tokens: (2 + 6 + 32) / 13, not 7 / 3."""
    result = evaluate(
        scored_by_target([1.0, 2.0, 4.0]), constant_rows([2, 3, 8], 8), mask_id=MASK, draws=draws
    )
    np.testing.assert_allclose(result.block_nll, [1, 2, 4], rtol=1e-12)
    assert result.nll == pytest.approx(40 / 13, rel=1e-12)
    assert result.num_tokens == 13


@pytest.mark.parametrize("draws", [1, 3])
def test_given_tokens_are_not_scored_and_rows_of_nothing_else_do_not_count(draws):
    """Position 0 given: values 1, 2, 4 on 1, 2, 7 tokens; the last row has none."""
    blocks = constant_rows([2, 3, 8, 1], 8).starting_at(1)
    model = scored_by_target([1.0, 2.0, 4.0, 9.0])
    result = evaluate(model, blocks, mask_id=MASK, draws=draws)
    assert result.length_B.tolist() == [1, 2, 7, 0]
    assert result.nll == pytest.approx((1 + 4 + 28) / 10, rel=1e-12)
    seen = []
    evaluate(
        lambda x, rows, targets, **_: seen.append(rows % x.shape[1]) or model(x, rows, targets),
        blocks,
        mask_id=MASK,
        draws=draws,
        batch_size=1,
    )
    assert min(int(rows.min()) for rows in seen if len(rows)) == 1


@pytest.mark.parametrize("batch_size", [1, 2, 6])
@pytest.mark.parametrize("seed", [1, 2, 3])
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

    blocks = constant_rows(lengths.tolist(), 9)
    result = evaluate(model, blocks, mask_id=MASK, batch_size=batch_size, seed=seed)
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
        level = (rng.permutation(200) + rng.random(200)) / 200
        result = made_up(value, level_B=level, length_B=length, draws=draws)
        nll.append(result.nll)
        error.append(result.standard_error)
    every = np.arange(1, 33)
    truth = (every * (1 + 0.1 * every)).sum() / every.sum()
    assert np.mean(error) == pytest.approx(np.std(nll), rel=0.1)
    assert 0.92 <= coverage(nll, error, truth) <= 0.98


# documents that span blocks


def documents_with_effects(draws: int, are_known: bool):
    """(estimates, errors, true error) of 50 documents of 5 blocks; the mean over levels is 3."""
    rng, documents, per_document = np.random.default_rng(2), 50, 5
    document = np.repeat(np.arange(documents), per_document)
    count = len(document)
    nll, error = [], []
    for _ in range(800):
        level = (rng.permutation(count) + rng.random(count)) / count
        effect = 0.3 * rng.standard_normal(documents)[document]
        value = 3 + effect + 0.2 * rng.standard_normal(count)
        if draws == 1:
            value += 4 * (level - 0.5)
        labels = document if are_known else np.arange(count)
        result = made_up(value, level_B=level, document_B=labels, draws=draws)
        nll.append(result.nll)
        error.append(result.standard_error)
    return np.array(nll), np.array(error), math.sqrt(0.3**2 / documents + 0.2**2 / count)


@pytest.mark.parametrize("draws", [1, 4])
def test_errors_between_documents_are_honest(draws):
    nll, error, truth = documents_with_effects(draws, are_known=True)
    assert error.mean() == pytest.approx(truth, rel=0.1)
    assert 0.92 <= coverage(nll, error, 3.0) <= 0.98


@pytest.mark.parametrize("draws", [1, 4])
def test_errors_that_do_not_know_of_documents_are_too_small(draws):
    nll, error, truth = documents_with_effects(draws, are_known=False)
    assert error.mean() < 0.7 * truth
    assert coverage(nll, error, 3.0) < 0.8


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
    worse, better = (
        evaluate(scored_by_target(t), blocks, mask_id=MASK, draws=2) for t in (table + gap, table)
    )
    difference, error = worse.difference(better)
    weight = np.array(lengths) / sum(lengths)
    assert difference == pytest.approx(weight @ gap, rel=1e-9)
    by_hand = math.sqrt(((weight * (gap - weight @ gap)) ** 2).sum() * 40 / 39)
    assert error == pytest.approx(by_hand, rel=0.01)
    assert 20 * error < min(worse.standard_error, better.standard_error)


def test_a_paired_difference_of_one_draw_is_free_of_the_trend_over_counts():
    source = register(8, 16)
    blocks = source.blocks(64, seeded(9))
    exact = ExactDenoiser(source)

    def worse_model(x_BL, rows_N, targets_N, **_):
        wobble = 0.01 * torch.sin(targets_N.double())
        return exact(x_BL, rows_N, targets_N, reduce=False) + 0.05 + wobble

    worse, better = (evaluate(m, blocks, mask_id=8) for m in (worse_model, exact))
    difference, error = worse.difference(better)
    assert abs(difference - 0.05) < 0.01
    assert 20 * error < better.standard_error
    assert better.difference(worse) == (pytest.approx(-difference), pytest.approx(error))


@pytest.mark.parametrize(
    ("num_blocks", "changes"),
    [(12, {"seed": 2}), (12, {"draws": 2}), (11, {})],
    ids=["seed", "draws", "blocks"],
)
def test_other_masks_cannot_be_paired(num_blocks, changes):
    model = scored_by_target(torch.ones(12))
    result = evaluate(model, constant_rows([9] * 12, 9), mask_id=MASK, seed=1)
    other = evaluate(
        model, constant_rows([9] * num_blocks, 9), mask_id=MASK, **{"seed": 1, **changes}
    )
    with pytest.raises(ValueError, match="same blocks and masks"):
        result.difference(other)


def test_other_masks_with_the_same_counts_cannot_be_paired():
    blocks = constant_rows([3] * 12, 3)
    first, second = (
        evaluate(mask_code, blocks, mask_id=MASK, draws=3, seed=seed) for seed in (1, 2)
    )
    assert (codes(first) != codes(second)).any()
    with pytest.raises(ValueError, match="same blocks and masks"):
        first.difference(second)


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
    evaluate(model, blocks, mask_id=MASK, framework=schedule and Mdm(schedule), batch_size=1000)
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

    evaluate(model, constant_rows([8] * 5, 8), mask_id=MASK, draws=3)
    assert len(torch.cat(told).unique()) == 15


# views of the result


def test_perplexity_and_bits_per_byte():
    """ln 2 nats per token, 12 tokens, 6 bytes: perplexity 2, two bits per byte."""
    result = Likelihood(
        np.array([8, 4]), np.zeros(2), np.ones((2, 1), dtype=int), np.full((2, 1), math.log(2)),
        np.arange(2), 6,
    )  # fmt: skip
    assert result.perplexity == pytest.approx(2)
    assert result.bits_per_byte == pytest.approx(2)


def test_bytes_are_those_of_the_blocks_and_tokens_are_the_real_ones():
    """9 tokens that are not pads at 1 nat each, for 10 bytes of text."""
    blocks = replace(constant_rows([2, 4, 3], 4), num_bytes=10.0)
    result = evaluate(scored_by_target([1.0, 1.0, 1.0]), blocks, mask_id=MASK)
    assert result.num_bytes == 10
    assert result.bits_per_byte == pytest.approx(9 / 10 / math.log(2))
    assert result.summary()["bits_per_byte"] == result.bits_per_byte


def test_the_summary_is_what_json_can_say():
    blocks = constant_rows([2, 4, 3], 4)
    result = evaluate(scored_by_target([1.0, 2.0, 3.0]), blocks, mask_id=MASK, draws=2)
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


def test_saving_and_loading_gives_the_same_without_pickle(tmp_path):
    blocks = replace(constant_rows([2, 4, 3], 4, documents=[0, 0, 5]), num_bytes=12.5)
    result = evaluate(scored_by_target([1.0, 2.0, 3.0]), blocks, mask_id=MASK, draws=2)
    path = tmp_path / "valid.blocks.npz"
    result.save(path)
    assert [p.name for p in tmp_path.iterdir()] == [path.name]
    with np.load(path, allow_pickle=False) as stored:
        assert all(stored[name].dtype != object for name in stored.files)
    loaded = Likelihood.load(path)
    assert loaded.summary() == result.summary()
    for name, value in vars(result).items():
        found = getattr(loaded, name)
        assert type(found) is type(value)
        np.testing.assert_array_equal(found, value)
    assert loaded.difference(result) == (0, 0)


@pytest.mark.parametrize("draws", [1, 3])
def test_one_block_has_a_value_but_no_error(draws):
    result = evaluate(scored_by_target([2.0]), constant_rows([5], 5), mask_id=MASK, draws=draws)
    assert result.nll == pytest.approx(2)
    assert math.isnan(result.standard_error)
    assert math.isnan(result.difference(result)[1])


# the real model


def random_denoiser(modulation: str = "constant") -> Denoiser:
    """All weights random, so that attention, gates and head all matter."""
    options = ModelOptions(num_layers=2, width=32, num_heads=2, dropout=0.0, modulation=modulation)
    model, noise = Denoiser(options, MASK), seeded(11)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.3, generator=noise)
    return model.eval()


def random_rows(lengths, block_length: int) -> Blocks:
    """Block b's tokens depend on b alone, whatever the padding."""
    rows = []
    for b, n in enumerate(lengths):
        ids = np.full(block_length, PAD)
        ids[:n] = np.random.default_rng(b).integers(0, PAD, n)
        rows.append(Row(ids, n, b))
    return Blocks.from_rows(rows)


@pytest.mark.parametrize("modulation", ["constant", "time"])
def test_the_value_of_a_block_does_not_depend_on_its_batch(modulation):
    model, blocks = random_denoiser(modulation), random_rows([9, 4, 9, 1, 6, 9, 2], 9)
    whole, one, three = (
        evaluate(model, blocks, mask_id=MASK, draws=3, batch_size=size).ce_BR for size in (7, 1, 3)
    )
    assert whole.std() > 0.1
    np.testing.assert_allclose(one, whole, rtol=2e-5)
    np.testing.assert_allclose(three, whole, rtol=2e-5)


@pytest.mark.parametrize("length", [1, 5, 8])
def test_the_value_of_a_block_does_not_depend_on_its_padding(length):
    model = random_denoiser()
    bare, some, more = (
        evaluate(model, random_rows([length], width), mask_id=MASK, draws=4).ce_BR
        for width in (length, length + 3, 24)
    )
    np.testing.assert_allclose(some, bare, rtol=2e-5)
    np.testing.assert_allclose(more, bare, rtol=2e-5)
