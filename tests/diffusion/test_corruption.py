"""Masking: the right number of the right tokens, by chance or exactly."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sampling_tools import seeded
from scipy import stats

from bellmask.diffusion.frameworks import mask_exactly, mask_tokens

MASK = 99


def tokens(batch, length):
    return torch.arange(batch * length).reshape(batch, length) % 50


def uniforms(batch, length, seed=0):
    return torch.rand(batch, length, dtype=torch.float64, generator=seeded(seed))


def masked(x0, alpha, **options):
    """Both results, after a look at what they have in common."""
    before = x0.clone()
    xt, is_masked = mask_tokens(x0, alpha, mask_id=MASK, **options)
    assert torch.equal(xt, torch.where(is_masked, MASK, before))
    assert torch.equal(x0, before)
    return is_masked


@pytest.mark.parametrize("alpha", [0.001, 0.1, 0.5, 0.9, 0.999])
def test_a_token_is_hidden_with_probability_one_minus_alpha(alpha):
    """Each row at its own rate."""
    alphas = torch.tensor([alpha, 0.2]).repeat_interleave(200)
    is_masked = masked(tokens(400, 100), alphas, generator=seeded(1))
    for hidden, rate in ((is_masked[:200], 1 - alpha), (is_masked[200:], 0.8)):
        assert stats.binomtest(int(hidden.sum()), 20_000, rate).pvalue > 1e-3


def test_positions_are_hidden_independently_of_each_other():
    """All 2^3 patterns of three tokens at their product probabilities."""
    is_masked = masked(tokens(16_000, 3), torch.full((16_000,), 0.3), generator=seeded(3))
    pattern = is_masked.long() @ torch.tensor([4, 2, 1])
    expected = [0.7 ** sum(p) * 0.3 ** (3 - sum(p)) for p in itertools.product((0, 1), repeat=3)]
    counts = torch.bincount(pattern, minlength=8).numpy()
    assert stats.chisquare(counts, [16_000 * e for e in expected]).pvalue > 1e-3


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_given_uniforms_decide_and_the_ends_are_exact(dtype):
    """alpha = 1 hides nothing, even at u = 0; alpha = 0 hides everything, even at the largest u."""
    u = torch.tensor([0.0, 0.29, 0.31, 1 - torch.finfo(dtype).eps / 2], dtype=dtype).expand(3, 4)
    is_masked = masked(tokens(3, 4), torch.tensor([1.0, 0.0, 0.7]), u_BL=u)
    assert is_masked.tolist() == [[False] * 4, [True] * 4, [True, True, False, False]]


@settings(deadline=None, derandomize=True, max_examples=30)
@given(seed=st.integers(0, 10**6), alpha=st.sampled_from([0.0, 0.3, 1.0]), data=st.data())
def test_only_maskable_tokens_are_hidden_by_chance_or_exactly(seed, alpha, data):
    x0, maskable = tokens(4, 9), torch.rand(4, 9, generator=seeded(seed)) < 0.5
    alphas, options = torch.full((4,), alpha).double(), {"is_maskable_BL": maskable}
    is_masked = masked(x0, alphas, generator=seeded(seed + 1), **options)
    assert not bool((is_masked & ~maskable).any())
    if alpha == 0:
        assert torch.equal(is_masked, maskable)
    counts = [data.draw(st.integers(0, int(m.sum()) + 1)) for m in maskable]
    options |= {"mask_id": MASK, "u_BL": uniforms(4, 9, seed)}
    xt, is_masked = mask_exactly(x0, torch.tensor(counts), **options)
    assert is_masked.sum(1).tolist() == [min(c, int(m.sum())) for c, m in zip(counts, maskable)]
    assert not bool((is_masked & ~maskable).any())
    assert torch.equal(xt, torch.where(is_masked, MASK, x0))


@pytest.mark.parametrize(
    ("maskable", "count"), [("1111", 2), ("11111", 1), ("1111", 3), ("10110", 2)]
)
def test_all_subsets_of_a_size_are_equally_likely(maskable, count):
    rows, length = 6000, len(maskable)
    is_maskable = torch.tensor([sign == "1" for sign in maskable])
    options = {"is_maskable_BL": is_maskable.expand(rows, length)} if "0" in maskable else {}
    options |= {"mask_id": MASK, "u_BL": uniforms(rows, length, 7)}
    _, is_masked = mask_exactly(tokens(rows, length), torch.full((rows,), count), **options)
    values, frequencies = (is_masked.long() @ (2 ** torch.arange(length))).unique(
        return_counts=True
    )
    places = is_maskable.nonzero().flatten().tolist()
    assert set(values.tolist()) == {
        sum(2**i for i in s) for s in itertools.combinations(places, count)
    }
    assert stats.chisquare(frequencies.numpy()).pvalue > 1e-3


def test_exact_masking_is_nested_and_counts_ties_once():
    """The same uniforms with one more mask only add a token."""
    u, x0 = uniforms(1, 10), tokens(1, 10)
    masks = [mask_exactly(x0, torch.tensor([n]), mask_id=MASK, u_BL=u)[1] for n in range(11)]
    for smaller, larger in itertools.pairwise(masks):
        assert not bool((smaller & ~larger).any())
    assert torch.equal(masks[3], u <= u.sort().values[:, 2:3])
    tied = torch.full((1, 10), 0.5)
    assert int(mask_exactly(x0, torch.tensor([2]), mask_id=MASK, u_BL=tied)[1].sum()) == 2
