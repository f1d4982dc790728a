"""Masking: the right number of the right tokens, by chance or exactly."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from bellmask.diffusion.corruption import mask_exactly, mask_tokens

MASK = 99


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def tokens(batch: int, length: int) -> torch.Tensor:
    return torch.arange(batch * length).reshape(batch, length) % 50


def uniforms(batch: int, length: int, seed: int = 0) -> torch.Tensor:
    return torch.rand(batch, length, dtype=torch.float64, generator=seeded(seed))


@pytest.mark.parametrize("alpha", [0.001, 0.1, 0.5, 0.9, 0.999])
def test_a_token_is_hidden_with_probability_one_minus_alpha(alpha):
    x0 = tokens(400, 100)
    _, is_masked = mask_tokens(x0, torch.full((400,), alpha), mask_id=MASK, generator=seeded(1))
    hidden = int(is_masked.sum())
    assert stats.binomtest(hidden, x0.numel(), 1 - alpha).pvalue > 1e-3


def test_each_row_has_its_own_rate():
    alpha = torch.tensor([0.9, 0.2, 0.5])
    _, is_masked = mask_tokens(tokens(3, 20_000), alpha, mask_id=MASK, generator=seeded(2))
    for hidden, visible_share in zip(is_masked.sum(1).tolist(), alpha.tolist(), strict=True):
        assert stats.binomtest(hidden, 20_000, 1 - visible_share).pvalue > 1e-3


def test_positions_are_hidden_independently_of_each_other():
    """All 2^3 patterns of three tokens at their product probabilities."""
    x0, alpha = tokens(16_000, 3), torch.full((16_000,), 0.3)
    _, is_masked = mask_tokens(x0, alpha, mask_id=MASK, generator=seeded(3))
    pattern = is_masked.long() @ torch.tensor([4, 2, 1])
    expected = [0.7 ** sum(p) * 0.3 ** (3 - sum(p)) for p in itertools.product((0, 1), repeat=3)]
    counts = torch.bincount(pattern, minlength=8).numpy()
    assert stats.chisquare(counts, [16_000 * e for e in expected]).pvalue > 1e-3


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_ends_are_exact(dtype):
    """alpha = 1 hides nothing, even at u = 0; alpha = 0 hides everything, even at the largest u."""
    x0 = tokens(2, 4)
    u = torch.tensor([0.0, 0.5, 0.999, 1 - torch.finfo(dtype).eps / 2], dtype=dtype).expand(2, 4)
    xt, is_masked = mask_tokens(x0, torch.tensor([1.0, 0.0]), mask_id=MASK, u_BL=u)
    assert is_masked.tolist() == [[False] * 4, [True] * 4]
    assert xt.tolist() == [x0[0].tolist(), [MASK] * 4]


@settings(deadline=None, derandomize=True)
@given(seed=st.integers(0, 10**6), alpha=st.floats(0, 1))
def test_only_hidden_tokens_change_and_only_maskable_ones_are_hidden(seed, alpha):
    x0, maskable = tokens(3, 8), torch.rand(3, 8, generator=seeded(seed)) < 0.5
    before = x0.clone()
    xt, is_masked = mask_tokens(
        x0,
        torch.full((3,), alpha, dtype=torch.float64),
        mask_id=MASK,
        is_maskable_BL=maskable,
        generator=seeded(seed + 1),
    )
    assert not bool((is_masked & ~maskable).any())
    assert bool((xt[is_masked] == MASK).all())
    assert torch.equal(xt[~is_masked], x0[~is_masked])
    assert torch.equal(x0, before)


def test_full_corruption_hides_exactly_the_maskable_tokens():
    maskable = torch.tensor([[True, False, True], [False, False, True]])
    _, is_masked = mask_tokens(
        tokens(2, 3), torch.zeros(2), mask_id=MASK, is_maskable_BL=maskable, generator=seeded(0)
    )
    assert torch.equal(is_masked, maskable)


def test_given_uniforms_decide():
    u = torch.tensor([[0.1, 0.29, 0.31, 0.9]], dtype=torch.float64)
    alpha = torch.tensor([0.7], dtype=torch.float64)
    _, is_masked = mask_tokens(tokens(1, 4), alpha, mask_id=MASK, u_BL=u)
    assert is_masked.tolist() == [[True, True, False, False]]


def test_masking_with_a_seed_is_reproducible():
    x0, alpha = tokens(4, 32), torch.full((4,), 0.5)
    first, second, other = (
        mask_tokens(x0, alpha, mask_id=MASK, generator=seeded(s))[0] for s in (5, 5, 6)
    )
    assert torch.equal(first, second)
    assert not torch.equal(first, other)


@settings(deadline=None, derandomize=True)
@given(seed=st.integers(0, 10**6), data=st.data())
def test_exactly_n_maskable_tokens_are_hidden(seed, data):
    x0, maskable = tokens(4, 9), torch.rand(4, 9, generator=seeded(seed)) < 0.6
    counts = [data.draw(st.integers(0, int(m.sum()))) for m in maskable]
    xt, is_masked = mask_exactly(
        x0,
        torch.tensor(counts),
        mask_id=MASK,
        u_BL=uniforms(4, 9, seed),
        is_maskable_BL=maskable,
    )
    assert is_masked.sum(1).tolist() == counts
    assert not bool((is_masked & ~maskable).any())
    assert bool((xt[is_masked] == MASK).all())
    assert torch.equal(xt[~is_masked], x0[~is_masked])


@pytest.mark.parametrize(("length", "count"), [(4, 2), (5, 1), (4, 3)])
def test_all_subsets_of_a_size_are_equally_likely(length, count):
    rows = 9000
    _, is_masked = mask_exactly(
        tokens(rows, length),
        torch.full((rows,), count),
        mask_id=MASK,
        u_BL=uniforms(rows, length, 7),
    )
    code = is_masked.long() @ (2 ** torch.arange(length))
    values, frequencies = code.unique(return_counts=True)
    subsets = {sum(2**i for i in s) for s in itertools.combinations(range(length), count)}
    assert set(values.tolist()) == subsets
    assert stats.chisquare(frequencies.numpy()).pvalue > 1e-3


def test_subsets_of_the_maskable_tokens_are_equally_likely():
    rows, maskable = 6000, torch.tensor([True, False, True, True, False])
    _, is_masked = mask_exactly(
        tokens(rows, 5),
        torch.full((rows,), 2),
        mask_id=MASK,
        u_BL=uniforms(rows, 5, 8),
        is_maskable_BL=maskable.expand(rows, 5),
    )
    values, frequencies = (is_masked.long() @ (2 ** torch.arange(5))).unique(return_counts=True)
    assert values.tolist() == [0b00101, 0b01001, 0b01100]
    assert stats.chisquare(frequencies.numpy()).pvalue > 1e-3


def test_exact_masking_is_nested():
    """The same uniforms with one more mask only add a token."""
    u = uniforms(1, 10)
    masks = [
        mask_exactly(tokens(1, 10), torch.tensor([n]), mask_id=MASK, u_BL=u)[1] for n in range(11)
    ]
    for smaller, larger in itertools.pairwise(masks):
        assert not bool((smaller & ~larger).any())
    assert torch.equal(masks[3], u <= u.sort().values[:, 2:3])


def test_exact_masking_counts_ties_once():
    _, is_masked = mask_exactly(
        tokens(1, 6), torch.tensor([2]), mask_id=MASK, u_BL=torch.full((1, 6), 0.5)
    )
    assert int(is_masked.sum()) == 2


def test_a_count_above_the_maskable_tokens_never_hides_others():
    maskable = torch.tensor([[True, False, False, True]])
    try:
        _, is_masked = mask_exactly(
            tokens(1, 4),
            torch.tensor([3]),
            mask_id=MASK,
            u_BL=uniforms(1, 4),
            is_maskable_BL=maskable,
        )
    except ValueError:  # refusing would be as good
        return
    assert not bool((is_masked & ~maskable).any())
