"""The toy sources against enumeration of all their rows."""

import dataclasses
import functools
import itertools
import math

import numpy as np
import pytest
import torch
from scipy import stats

from bellmask.data.toys import ExactDenoiser, ToySource, random_rows


def float64(values):
    return torch.tensor(values, dtype=torch.float64)


def seeded(seed):
    return torch.Generator().manual_seed(seed)


UNEVEN = ToySource.markov(
    float64([0.2, 0.5, 0.3]),
    float64([[0.6, 0.3, 0.1], [0.2, 0.2, 0.6], [0.15, 0.5, 0.35]]),
    length=4,
)
"""Not stationary, not symmetric, not reversible: no two entries can be exchanged unnoticed."""
REGISTER = ToySource.markov(
    float64([0.25] * 4),
    float64([[0.5, 0.5, 0, 0], [0, 0, 0.5, 0.5], [0.5, 0.5, 0, 0], [0, 0, 0.5, 0.5]]),
    length=4,
)
"""Half of all transitions are impossible."""
NOISY = ToySource(
    float64([0.3, 0.7]),
    float64([[0.9, 0.1], [0.25, 0.75]]),
    float64([[0.5, 0.3, 0.2], [0.05, 0.15, 0.8]]),
    length=4,
)
"""Fewer states than symbols, none of which tells its state; not stationary."""
PAIRS = ToySource.order_two(3, 4, sharpness=3.0)
LOCAL = ToySource.local(3, 4, locality=0.6, num_topics=2)
HIDDEN = ToySource.hidden(3, 4, num_states=3)
KINDS = {"uneven": UNEVEN, "noisy": NOISY, "pairs": PAIRS, "local": LOCAL, "hidden": HIDDEN}
every_kind = pytest.mark.parametrize("source", KINDS.values(), ids=KINDS)


def all_rows(source):
    return np.array(list(itertools.product(range(source.num_tokens), repeat=source.length)))


def path_sum(source, row):
    """p(row), by the chain rule over every path of states that can have emitted it."""
    start, move, emit = (
        table.tolist() for table in (source.initial_S, source.transition_SS, source.emission_SV)
    )
    states = [[s for s in range(len(start)) if emit[s][v] > 0] for v in row]
    return sum(
        start[path[0]]
        * math.prod(move[a][b] for a, b in itertools.pairwise(path))
        * math.prod(emit[s][v] for s, v in zip(path, row))
        for path in itertools.product(*states)
    )


@functools.lru_cache
def row_probabilities(source):
    return np.array([path_sum(source, row) for row in all_rows(source).tolist()])


def enumerated_conditionals(source, x):
    """p(x^i = v | symbols seen at other places), [L, V], from the table of all rows."""
    rows, p = all_rows(source), row_probabilities(source)
    table = np.zeros((source.length, source.num_tokens))
    for i in range(source.length):
        others = [j for j in range(source.length) if j != i and x[j] < source.num_tokens]
        agrees = np.all([rows[:, j] == x[j] for j in others], axis=0)
        np.add.at(table[i], rows[:, i], p * agrees)
    return table / table.sum(1, keepdims=True)


@every_kind
def test_conditionals_are_those_of_enumeration_for_every_row_under_every_mask(source):
    inputs = list(itertools.product(range(source.num_tokens + 1), repeat=source.length))
    expected = np.log([enumerated_conditionals(source, x) for x in inputs])
    np.testing.assert_allclose(
        source.log_conditionals(torch.tensor(inputs)).numpy(), expected, atol=1e-11
    )


@every_kind
def test_probabilities_of_rows_and_of_what_is_observed_are_those_of_enumeration(source):
    rows, truth = all_rows(source), row_probabilities(source)
    found = source.log_probability(torch.from_numpy(rows)).exp().numpy()
    np.testing.assert_allclose(found, truth, rtol=1e-12)
    assert found.sum() == pytest.approx(1, abs=1e-12)
    x = torch.tensor([[1, 3, 3, 2], [3, 3, 0, 3], [3, 3, 3, 3]])
    seen = [(rows[:, 0] == 1) & (rows[:, 3] == 2), rows[:, 2] == 0, rows[:, 0] >= 0]
    expected = [truth[one].sum() for one in seen]
    np.testing.assert_allclose(source.log_probability(x).exp().numpy(), expected, rtol=1e-12)


def test_what_is_impossible_has_probability_zero_and_nothing_is_nan():
    truth = row_probabilities(REGISTER)
    found = REGISTER.log_probability(torch.from_numpy(all_rows(REGISTER))).exp().numpy()
    assert (found == 0).any()
    np.testing.assert_allclose(found, truth, atol=1e-15)
    inputs = {
        tuple(np.where(hidden, 4, row).tolist())
        for row in all_rows(REGISTER)[truth > 0]
        for hidden in itertools.product((False, True), repeat=4)
    }
    expected = np.array([enumerated_conditionals(REGISTER, x) for x in sorted(inputs)])
    found = REGISTER.log_conditionals(torch.tensor(sorted(inputs))).exp().numpy()
    assert (expected == 0).any()
    np.testing.assert_allclose(found, expected, atol=1e-12)


def test_a_long_chain_does_not_underflow():
    """In the middle of 1000 symbols: p(v | a, b) is proportional to P[a, v] P[v, b]."""
    chain = ToySource.markov(UNEVEN.initial_S, UNEVEN.transition_SS, length=1000)
    x = chain.sample(1, seeded(1))
    a, b = int(x[0, 499]), int(x[0, 501])
    weight = chain.transition_SS[a] * chain.transition_SS[:, b]
    found = chain.log_conditionals(x)[0, 500].exp()
    torch.testing.assert_close(found, weight / weight.sum(), atol=1e-12, rtol=0)


def test_entropy_is_that_of_enumeration():
    """Also where a chain does not start stationary, and where symbols tell their state."""
    start = torch.softmax(torch.arange(9.0).double() % 4, 0)
    own = float64([[0.4, 0.6, 0], [0, 0, 1]])
    sources = [dataclasses.replace(kind, length=n) for kind in (UNEVEN, PAIRS) for n in range(1, 5)]
    sources += [
        dataclasses.replace(PAIRS, initial_S=start),
        dataclasses.replace(NOISY, emission_SV=own),
    ]
    assert sources[-1].order == 1
    for source in sources:
        assert source.entropy == pytest.approx(stats.entropy(row_probabilities(source)), abs=1e-12)
    # ln 4 for the first symbol, then one fair bit per symbol
    assert REGISTER.entropy == pytest.approx(math.log(4) + 3 * math.log(2), abs=1e-12)
    with pytest.raises(ValueError, match="hidden"):
        _ = NOISY.entropy


def test_order_is_how_many_symbols_tell_the_state():
    assert [s.order for s in KINDS.values()] == [1, None, 2, None, None]
    assert REGISTER.order == ToySource.local(3, 4, locality=1.0).order == 1


@every_kind
def test_samples_have_the_frequencies_of_the_source(source):
    rows = source.sample(30_000, seeded(2))
    code = rows @ torch.tensor([27, 9, 3, 1])
    counts = torch.bincount(code, minlength=81).numpy()
    expected = 30_000 * row_probabilities(source)
    is_rare = expected < 5
    tail = [[one[is_rare].sum()] if is_rare.any() else [] for one in (counts, expected)]
    counts, expected = (np.append(one[~is_rare], t) for one, t in zip((counts, expected), tail))
    assert stats.chisquare(counts, expected).pvalue > 1e-3


def test_impossible_rows_are_never_drawn_even_at_the_edges_of_the_unit_interval():
    u = float64(list(itertools.product([0.0, 2.0**-53, 0.5, 1 - 2.0**-53], repeat=4)))
    assert bool(REGISTER.log_probability(REGISTER.draw(u)).isfinite().all())


def test_a_uniform_number_picks_the_state_whose_share_it_falls_in():
    u = torch.linspace(0, 1 - 1e-9, 999, dtype=torch.float64)
    for size in (1, 2, 3, 5, 8, 13):
        p = torch.softmax(torch.arange(size).double().sin() * 2, 0)
        source = ToySource.markov(p, torch.eye(size).double(), 1)
        expected = np.searchsorted(np.cumsum(p.numpy())[:-1], u.numpy(), side="right")
        assert source.draw(u[:, None])[:, 0].tolist() == expected.tolist()


def test_sticky_stays_or_moves_anywhere():
    sticky = ToySource.sticky(4, length=3, stay=0.8)
    expected = np.full((4, 4), 0.05) + np.diag([0.8] * 4)
    np.testing.assert_allclose(sticky.transition_SS.numpy(), expected, atol=1e-15)
    np.testing.assert_allclose(sticky.initial_S.numpy(), [0.25] * 4)


def test_in_a_chain_of_order_two_the_pair_decides():
    """L = 3: p(x3 | a, b) is row 8 a + b of the drawn table, and b alone says much less."""
    source = ToySource.order_two(8, 3)
    pairs = torch.tensor(list(itertools.product(range(8), repeat=2)))
    x = torch.cat([pairs, torch.full((64, 1), 8)], dim=1)
    table = random_rows("order_two", 64, 8)
    torch.testing.assert_close(source.log_conditionals(x)[:, 2].exp(), table)
    p = source.log_probability(torch.from_numpy(all_rows(source))).exp().numpy().reshape(8, 8, 8)
    by_pair = stats.entropy(p.reshape(64, 8), axis=1) @ p.sum(2).flatten()
    by_last = stats.entropy(p.sum(0), axis=1) @ p.sum((0, 2))
    assert by_last - by_pair > 0.8


def test_drawn_sources_are_stationary_and_hidden_states_follow_in_a_cycle():
    for source in (PAIRS, LOCAL, HIDDEN, *(ToySource.local(3, 4, one) for one in (0.0, 1.0))):
        p = row_probabilities(source).reshape(3, 3, 3, 3)
        np.testing.assert_allclose(p.sum(3), p.sum(0), atol=1e-14)
    assert bool((torch.linalg.matrix_power(PAIRS.transition_SS, 2) > 0).all())
    expected = [[0.9, 0.1, 0], [0, 0.9, 0.1], [0.1, 0, 0.9]]
    np.testing.assert_allclose(HIDDEN.transition_SS.numpy(), expected, atol=1e-15)
    assert bool((HIDDEN.emission_SV > 0).all())


def test_local_rows_mix_a_chain_and_a_topic():
    """The formula of the docstring, with the start of each topic left to its own chain."""
    chain, topics = random_rows("local/chain", 3, 3), random_rows("local/topics", 2, 3)
    rows, expected = torch.from_numpy(all_rows(LOCAL)), 0.0
    for topic in topics:
        move = 0.6 * chain + 0.4 * topic
        p = torch.linalg.matrix_power(move, 200)[0, rows[:, 0]]
        for i in range(3):
            p = p * move[rows[:, i], rows[:, i + 1]]
        expected = expected + p / 2
    torch.testing.assert_close(LOCAL.log_probability(rows).exp(), expected)


def test_at_locality_zero_places_can_be_exchanged_and_above_it_not():
    rows = torch.from_numpy(all_rows(LOCAL))
    mixed = rows[:, [2, 0, 3, 1]]
    loose = ToySource.local(3, 4, locality=0.0, num_topics=2)
    torch.testing.assert_close(loose.log_probability(rows), loose.log_probability(mixed))
    gap = LOCAL.log_probability(rows) - LOCAL.log_probability(mixed)
    assert float(gap.abs().max()) > 0.5


def far_symbol_matters(locality):
    """How much p(x4 | x1, x3) depends on x1."""
    x = torch.tensor([[first, 3, 1, 3] for first in range(3)])
    source = ToySource.local(3, 4, locality, num_topics=2)
    p = source.log_conditionals(x)[:, 3].exp()
    return float((p - p.mean(0)).abs().max())


def test_at_locality_one_only_neighbours_matter():
    assert far_symbol_matters(1.0) < 1e-14
    assert far_symbol_matters(0.6) > 0.01
    chain = ToySource.local(3, 4, locality=1.0)
    assert len(chain.initial_S) == 3
    torch.testing.assert_close(chain.transition_SS, random_rows("local/chain", 3, 3))
    rows, almost = torch.from_numpy(all_rows(chain)), ToySource.local(3, 4, 1 - 1e-9)
    gap = almost.log_probability(rows) - chain.log_probability(rows)
    assert float(gap.abs().max()) < 1e-4


def test_blocks_are_whole_rows_each_its_own_document():
    blocks = UNEVEN.blocks(7, seeded(3))
    assert blocks.rows(slice(None)).equal(UNEVEN.sample(7, seeded(3)))
    assert (blocks.lengths.tolist(), blocks.documents.tolist()) == ([4] * 7, list(range(7)))


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


def causal_truth(source, row, order, slot):
    """p(x at order[slot] | x at order[:slot]) from the table of all rows."""
    rows, p = all_rows(source), row_probabilities(source)
    agrees = (rows[:, order[:slot]] == np.array(row)[order[:slot]]).all(1)
    weight = np.bincount(rows[:, order[slot]], p * agrees, minlength=source.num_tokens)
    return weight / weight.sum()


def slots_of(row, order, mask_id):
    return [mask_id, *(row[place] for place in order[:-1])]


@pytest.mark.parametrize("source", [UNEVEN, NOISY], ids=["uneven", "noisy"])
def test_a_causal_denoiser_sees_the_slots_up_to_its_own_in_every_order(source, monkeypatch):
    monkeypatch.setattr("bellmask.data.toys.CAUSAL_ROWS", 7)
    orders = [list(order) for order in itertools.permutations(range(4))]
    row = [2, 0, 1, 2]
    x = torch.tensor([slots_of(row, order, 3) for order in orders])
    held = torch.tensor([[0, *(place + 1 for place in order[:-1])] for order in orders])
    sought = torch.tensor(orders) + 1
    rows = torch.arange(x.numel()).flip(0)
    model = ExactDenoiser(source, is_causal=True)
    found = model(x, rows, positions=held, target_positions=sought).exp().numpy()
    expected = [causal_truth(source, row, order, s) for order in orders for s in range(4)]
    np.testing.assert_allclose(found, np.array(expected)[::-1], atol=1e-12)


def test_one_order_serves_a_whole_batch_and_left_to_right_is_the_default():
    rows = [[2, 0, 1, 2], [1, 1, 0, 0]]
    model, everything = ExactDenoiser(UNEVEN, is_causal=True), torch.arange(8)
    for order in ([0, 1, 2, 3], [2, 3, 0, 1]):
        x = torch.tensor([slots_of(row, order, 3) for row in rows])
        where = {
            "positions": torch.tensor([0, *(place + 1 for place in order[:-1])]),
            "target_positions": torch.tensor(order) + 1,
        }
        expected = [causal_truth(UNEVEN, row, order, slot) for row in rows for slot in range(4)]
        found = model(x, everything, **where).exp().numpy()
        np.testing.assert_allclose(found, expected, atol=1e-12)
        if order == [0, 1, 2, 3]:
            assert model(x, everything).equal(model(x, everything, **where))


def test_causal_losses_of_a_row_add_up_to_its_log_probability():
    order = [3, 1, 0, 2]
    rows = NOISY.sample(5, seeded(4))
    x = torch.cat([torch.full((5, 1), 3), rows[:, order[:-1]]], dim=1)
    loss = ExactDenoiser(NOISY, is_causal=True)(
        x,
        torch.arange(20),
        rows[:, order].flatten(),
        positions=torch.tensor([0, 4, 2, 1]),
        target_positions=torch.tensor([4, 2, 1, 3]),
        reduce=False,
    )
    torch.testing.assert_close(-loss.view(5, 4).sum(1), NOISY.log_probability(rows))
    # what comes later, and the begin sign, change nothing
    model, seen = ExactDenoiser(UNEVEN, is_causal=True), torch.tensor([0, 1, 2])
    x, changed = torch.tensor([[[3, 0, 1, 2]], [[0, 0, 1, 0]]])
    assert model(x, seen).equal(model(changed, seen))
