"""The toy source against enumeration of all its rows."""

import itertools
import math

import numpy as np
import pytest
import torch
from scipy import stats

from bellmask.data.toy import ExactDenoiser, MarkovSource


def float64(values) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


UNEVEN = MarkovSource(
    float64([0.2, 0.5, 0.3]),
    float64([[0.6, 0.3, 0.1], [0.2, 0.2, 0.6], [0.15, 0.5, 0.35]]),
    length=4,
)
"""Not stationary, not symmetric, not reversible: no two entries can be exchanged unnoticed."""
REGISTER = MarkovSource(
    float64([0.25] * 4),
    float64([[0.5, 0.5, 0, 0], [0, 0, 0.5, 0.5], [0.5, 0.5, 0, 0], [0, 0, 0.5, 0.5]]),
    length=4,
)
"""Half of all transitions are impossible."""


def all_rows(source: MarkovSource) -> np.ndarray:
    return np.array(list(itertools.product(range(source.num_tokens), repeat=source.length)))


def row_probabilities(source: MarkovSource) -> np.ndarray:
    """p(row) of every row, by the chain rule."""
    start, move = source.initial_V.tolist(), source.transition_VV.tolist()
    return np.array(
        [
            start[row[0]] * math.prod(move[a][b] for a, b in itertools.pairwise(row))
            for row in all_rows(source).tolist()
        ]
    )


def enumerated_conditionals(source: MarkovSource, x: tuple[int, ...]) -> np.ndarray:
    """p(x^i = v | symbols seen at other places), [L, V], from the table of all rows."""
    rows, p = all_rows(source), row_probabilities(source)
    table = np.zeros((source.length, source.num_tokens))
    for i in range(source.length):
        others = [j for j in range(source.length) if j != i and x[j] < source.num_tokens]
        agrees = np.all([rows[:, j] == x[j] for j in others], axis=0)
        np.add.at(table[i], rows[:, i], p * agrees)
    return table / table.sum(1, keepdims=True)


def test_conditionals_are_those_of_enumeration_for_every_row_under_every_mask():
    inputs = list(itertools.product(range(UNEVEN.num_tokens + 1), repeat=UNEVEN.length))
    expected = np.log([enumerated_conditionals(UNEVEN, x) for x in inputs])
    np.testing.assert_allclose(
        UNEVEN.log_conditionals(torch.tensor(inputs)).numpy(), expected, atol=1e-12
    )


def test_impossible_symbols_have_probability_zero_and_nothing_is_nan():
    possible = all_rows(REGISTER)[row_probabilities(REGISTER) > 0]
    inputs = {
        tuple(np.where(hidden, 4, row).tolist())
        for row in possible
        for hidden in itertools.product((False, True), repeat=4)
    }
    expected = np.array([enumerated_conditionals(REGISTER, x) for x in sorted(inputs)])
    found = REGISTER.log_conditionals(torch.tensor(sorted(inputs))).exp().numpy()
    assert (expected == 0).any()
    np.testing.assert_allclose(found, expected, atol=1e-12)


def test_a_long_chain_does_not_underflow():
    """In the middle of 3000 symbols: p(v | a, b) is proportional to P[a, v] P[v, b]."""
    chain = MarkovSource(UNEVEN.initial_V, UNEVEN.transition_VV, length=3000)
    x = chain.sample(1, seeded(1))
    a, b = int(x[0, 1499]), int(x[0, 1501])
    weight = chain.transition_VV[a] * chain.transition_VV[:, b]
    found = chain.log_conditionals(x)[0, 1500].exp()
    torch.testing.assert_close(found, weight / weight.sum(), atol=1e-12, rtol=0)


@pytest.mark.parametrize("length", [1, 2, 4])
def test_entropy_is_that_of_enumeration(length):
    source = MarkovSource(UNEVEN.initial_V, UNEVEN.transition_VV, length)
    assert source.entropy == pytest.approx(stats.entropy(row_probabilities(source)), abs=1e-12)


def test_entropy_with_impossible_transitions():
    """ln 4 for the first symbol, then one fair bit per symbol."""
    assert REGISTER.entropy == pytest.approx(math.log(4) + 3 * math.log(2), abs=1e-12)


def test_samples_have_the_frequencies_of_the_chain():
    rows = UNEVEN.sample(30_000, seeded(2))
    code = rows @ torch.tensor([27, 9, 3, 1])
    counts = torch.bincount(code, minlength=81).numpy()
    assert stats.chisquare(counts, 30_000 * row_probabilities(UNEVEN)).pvalue > 1e-3


def test_sticky_stays_or_moves_anywhere():
    sticky = MarkovSource.sticky(4, length=3, stay=0.8)
    expected = np.full((4, 4), 0.05) + np.diag([0.8] * 4)
    np.testing.assert_allclose(sticky.transition_VV.numpy(), expected, atol=1e-15)
    np.testing.assert_allclose(sticky.initial_V.numpy(), [0.25] * 4)


def test_blocks_are_whole_rows_each_its_own_document():
    blocks = UNEVEN.blocks(7, seeded(3))
    assert blocks.rows(slice(None)).equal(UNEVEN.sample(7, seeded(3)))
    assert blocks.lengths.tolist() == [4] * 7
    assert blocks.documents.tolist() == list(range(7))


def test_exact_losses_add_up_to_the_entropy():
    """Prop 3.1: sum over n of E[mean cross-entropy of n masked symbols] = H(X)."""
    rows, p = torch.from_numpy(all_rows(UNEVEN)), row_probabilities(UNEVEN)
    model, total = ExactDenoiser(UNEVEN), 0.0
    for n in range(1, 5):
        masks = list(itertools.combinations(range(4), n))
        for masked in masks:
            x = rows.clone()
            x[:, masked] = 3
            is_masked = (x == 3).flatten()
            ce = model(x, is_masked.nonzero().squeeze(1), rows.flatten()[is_masked], reduce=False)
            total += float(p @ ce.view(81, n).mean(1).numpy()) / len(masks)
    assert total == pytest.approx(stats.entropy(p), abs=1e-12)


def test_the_denoiser_returns_log_probabilities_rows_a_sum_or_a_weighted_sum():
    x = torch.tensor([[0, 3, 3, 2], [3, 1, 3, 3]])
    rows, targets, weight = torch.tensor([1, 4, 7]), torch.tensor([2, 0, 1]), float64([1, 2, 4])
    tables = [enumerated_conditionals(UNEVEN, tuple(row)) for row in x.tolist()]
    expected = np.stack([tables[0][1], tables[1][0], tables[1][3]])
    ce = -np.log(expected[[0, 1, 2], targets])
    model = ExactDenoiser(UNEVEN)
    np.testing.assert_allclose(model(x, rows).exp().numpy(), expected, atol=1e-12)
    np.testing.assert_allclose(model(x, rows, targets, reduce=False).numpy(), ce, atol=1e-12)
    assert float(model(x, rows, targets)) == pytest.approx(ce.sum())
    assert float(model(x, rows, targets, weight_N=weight)) == pytest.approx(ce @ [1, 2, 4])
