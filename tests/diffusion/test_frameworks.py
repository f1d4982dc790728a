"""Masking, and contexts and targets of every framework; tests/evaluate sums over all of them."""

import itertools
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sampling_tools import seeded
from scipy import stats

from bellmask.config.options import FrameworkOptions
from bellmask.config.presets import tiny
from bellmask.diffusion.frameworks import Mdm, any_order, arm, mask_tokens, shifted_arm, sigma_arm
from bellmask.diffusion.schedules import Cosine, Linear
from bellmask.storage.build import build_framework
from bellmask.utils.rng import stream_key, uniform_rows

MASK = 3


def rand(*shape, seed=3):
    return torch.rand(*shape, generator=seeded(seed), dtype=torch.float64)


# masks


def test_positions_are_hidden_independently_each_row_at_its_own_rate():
    """All 2^3 patterns of three tokens at their product probabilities."""
    alphas = torch.tensor([0.3, 0.9]).repeat_interleave(8000)
    x0 = torch.zeros(16_000, 3).long()
    xt, is_masked = mask_tokens(x0, 1 - alphas, mask_id=MASK, generator=seeded(3))
    assert torch.equal(xt, torch.where(is_masked, MASK, 0))
    assert not x0.any()
    pattern = is_masked.long() @ torch.tensor([4, 2, 1])
    for alpha, found in ((0.3, pattern[:8000]), (0.9, pattern[8000:])):
        hidden = [sum(p) for p in itertools.product((0, 1), repeat=3)]
        expected = [8000 * (1 - alpha) ** n * alpha ** (3 - n) for n in hidden]
        counts = torch.bincount(found, minlength=8).numpy()
        assert stats.chisquare(counts, expected).pvalue > 1e-3


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_given_uniforms_decide_and_the_ends_are_exact(dtype):
    """alpha = 1 hides nothing, even at u = 0; alpha = 0 hides everything, even at the largest u."""
    u = torch.tensor([0.0, 0.29, 0.31, 1 - torch.finfo(dtype).eps / 2], dtype=dtype).expand(3, 4)
    alphas = torch.tensor([1.0, 0.0, 0.7])
    _, is_masked = mask_tokens(torch.zeros(3, 4).long(), 1 - alphas, mask_id=MASK, u_BL=u)
    assert is_masked.tolist() == [[False] * 4, [True] * 4, [True, True, False, False]]
    with pytest.raises(ValueError, match="each of 3 rows"):
        mask_tokens(torch.zeros(3, 4).long(), alphas[:1], mask_id=MASK, u_BL=u)


@settings(deadline=None, derandomize=True, max_examples=30)
@given(seed=st.integers(0, 10**6), data=st.data())
def test_only_maskable_tokens_are_hidden_by_chance_or_exactly(seed, data):
    x0, maskable, u = torch.zeros(4, 9).long(), rand(4, 9, seed=seed) < 0.5, rand(4, 9)
    alpha = data.draw(st.sampled_from([0.0, 0.3, 1.0]))
    options = {"mask_id": MASK, "is_maskable_BL": maskable, "u_BL": u}
    _, is_masked = mask_tokens(x0, torch.full((4,), 1 - alpha), **options)
    assert torch.equal(is_masked, maskable & (u < 1 - alpha))
    left = [data.draw(st.integers(0, int(m.sum()))) for m in maskable]
    found = Mdm().given(x0, torch.tensor(left), u, mask_id=MASK, is_real_BL=maskable).x_BL
    for row, count in enumerate(maskable.sum(1) - torch.tensor(left)):
        smallest = u[row][maskable[row]].sort().values[:count]
        assert torch.equal(found[row] == MASK, torch.isin(u[row], smallest) & maskable[row])


def test_ties_of_exact_masks_count_once():
    tied = torch.full((1, 10), 0.5)
    problem = Mdm().given(tied.long(), torch.tensor([8]), tied, mask_id=MASK)
    assert int((problem.x_BL == MASK).sum()) == 2


# orders


def sigma(order_seed, train_seed=1):
    start = tiny()
    options = FrameworkOptions("sigma_arm", order_seed=order_seed)
    train = replace(start.train, seed=train_seed)
    framework = build_framework(replace(start, framework=options, train=train))
    one, other = (framework.orders(rand(5, 64, seed=s)).expand(5, -1).tolist() for s in (1, 2))
    assert one == other == [one[0]] * 5, "the same for all rows"
    assert sorted(one[0]) == list(range(64))
    return tuple(one[0])


def test_sigma_depends_on_its_seed_alone_which_is_by_default_that_of_training():
    assert sigma(3, train_seed=1) == sigma(3, train_seed=2) == sigma(None, train_seed=3)
    assert sigma(0, train_seed=5) == sigma(None, train_seed=0)
    assert len({sigma(seed) for seed in range(30)} | {tuple(range(64))}) == 31


def test_random_orders_are_uniform_over_all_of_them():
    u = uniform_rows(stream_key(1, "masks", 0), torch.arange(9600), 4)
    problem = any_order().every_context(torch.zeros(9600, 4).long(), u, mask_id=MASK)
    counts = dict.fromkeys(itertools.permutations(range(4)), 0)
    for order in (problem.target_positions - 1).tolist():
        counts[tuple(order)] += 1
    assert stats.chisquare(list(counts.values())).pvalue > 1e-3


# padding


LENGTHS = torch.tensor([5, 1, 3, 4, 2])
IS_REAL = torch.arange(5) < LENGTHS[:, None]
PADDED = torch.where(IS_REAL, 10 * torch.arange(1, 6)[:, None] + torch.arange(5), -1)
"""Row b holds 10 (b + 1), 10 (b + 1) + 1, ...; pads are -1."""
FIVE = {"arm": arm(5), "sigma": sigma_arm(torch.tensor([3, 1, 4, 0, 2])), "any": any_order()}


@pytest.mark.parametrize("framework", FIVE.values(), ids=FIVE)
def test_pads_come_last_and_no_scored_slot_sees_one(framework):
    for seed in range(20):
        u = rand(5, 5, seed=seed)
        problem = framework.every_context(PADDED, u, mask_id=MASK, is_real_BL=IS_REAL)
        rows = [divmod(row, 5) for row in problem.rows_N.tolist()]
        assert rows == [(b, r) for b, n in enumerate(LENGTHS.tolist()) for r in range(n)]
        assert problem.context_N.tolist() == [r for _, r in rows]
        whole = framework.orders(u).expand(5, -1).tolist()
        for (b, r), target in zip(rows, problem.targets_N.tolist()):
            order = [i for i in whole[b] if i < LENGTHS[b]]
            assert target == PADDED[b, order[r]]
            assert problem.x_BL[b, : r + 1].tolist() == [MASK, *PADDED[b, order[:r]].tolist()]
            assert problem.positions[b, : r + 1].tolist() == [0, *(i + 1 for i in order[:r])]
            assert problem.target_positions[b, r] == order[r] + 1


@pytest.mark.parametrize("framework", [Mdm(), *FIVE.values()], ids=["mdm", *FIVE])
def test_given_contexts_have_the_size_that_is_asked_for_row_by_row(framework):
    context, given = torch.tensor([2, 0, 2, 1, 0]), {"mask_id": MASK, "is_real_BL": IS_REAL}
    problem = framework.given(PADDED, context, rand(5, 5), **given)
    owner = problem.rows_N // 5
    assert problem.context_N.tolist() == context[owner].tolist()
    expected = torch.ones(5) if framework.is_causal else LENGTHS - context
    assert owner.bincount(minlength=5).tolist() == expected.tolist()
    if framework.is_causal:
        assert (problem.rows_N % 5).tolist() == context.tolist()
    assert set(problem.targets_N.tolist()) <= set(PADDED[IS_REAL].tolist())
    # a context as large as the row asks nothing
    assert len(framework.given(PADDED, LENGTHS, rand(5, 5), **given).rows_N) == 0


def test_shorter_rows_keep_the_order_of_their_positions():
    """sigma = 3 1 4 0 2 of five: of the first four positions 3 1 0 2, of the first two 1 0."""
    for length, expected in ((5, [3, 1, 4, 0, 2]), (4, [3, 1, 0, 2]), (2, [1, 0]), (1, [0])):
        x0, u = torch.arange(length)[None], torch.zeros(1, length).double()
        assert FIVE["sigma"].every_context(x0, u, mask_id=MASK).targets_N.tolist() == expected


@pytest.mark.parametrize("is_real", [IS_REAL, None], ids=["padded", "full"])
def test_a_shifted_model_is_asked_for_all_but_the_first_token_as_it_stands(is_real):
    problem = shifted_arm(5).every_context(PADDED, rand(5, 5), mask_id=MASK, is_real_BL=is_real)
    rows = [(b, i) for b in range(5) for i in range(1, 5) if is_real is None or is_real[b, i]]
    assert [divmod(row, 5) for row in problem.rows_N.tolist()] == rows
    assert problem.targets_N.tolist() == [int(PADDED[b, i]) for b, i in rows]
    assert problem.context_N.tolist() == [i - 1 for _, i in rows]
    assert torch.equal(problem.x_BL, PADDED)
    assert problem.positions is None


def test_the_time_of_a_mask_is_one_at_which_exactly_these_tokens_are_masked():
    """u < 1 - alpha(t) decides in training: the largest masked u is that rate."""
    u, x0, context = rand(40, 6), torch.zeros(40, 6).long(), torch.arange(40) % 6
    rates = {Linear(): lambda t: t, Cosine(): lambda t: torch.cos(torch.pi / 2 * (1 - t))}
    for schedule, rate in rates.items():
        problem = Mdm(schedule).given(x0, context, u, mask_id=MASK)
        largest = u.sort(1).values.gather(1, 5 - context[:, None])
        torch.testing.assert_close(rate(problem.t_B)[:, None], largest, rtol=0, atol=1e-9)
        assert torch.equal(problem.x_BL == MASK, u <= largest)


@pytest.mark.parametrize("noises_pads", [False, True])
def test_noised_pads_are_masked_like_text_but_never_asked_for(noises_pads):
    """mdlm's rule; by default pads stay as they are."""
    u, t = rand(5, 5), torch.linspace(0.3, 0.9, 5, dtype=torch.float64)
    context, options = torch.tensor([2, 0, 1, 3, 1]), {"mask_id": MASK, "is_real_BL": IS_REAL}
    framework = Mdm(noises_pads=noises_pads)
    trained = framework.training(PADDED, t, u, **options)
    given = framework.given(PADDED, context, u, **options)
    ends = zip(u, LENGTHS.tolist(), context.tolist())
    rate = torch.stack([one[:n].sort().values[n - c - 1] for one, n, c in ends])
    for problem, is_hidden in ((trained, u < t[:, None]), (given, u <= rate[:, None])):
        meant = torch.where(is_hidden & (IS_REAL | noises_pads), MASK, PADDED)
        assert torch.equal(problem.x_BL, meant)
        asked = (is_hidden & IS_REAL).flatten().nonzero()[:, 0]
        assert problem.rows_N.tolist() == asked.tolist()
        seen = (~is_hidden & IS_REAL).sum(1)
        assert problem.context_N.tolist() == seen[problem.rows_N // 5].tolist()
    assert bool((trained.x_BL[~IS_REAL] == MASK).any()) == noises_pads
