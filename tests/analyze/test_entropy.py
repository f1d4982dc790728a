"""Irreducible entropies against plain sums over all rows, contexts and targets (Prop 3.1)."""

import itertools
import math

import pytest
import torch

from bellmask.analyze.entropy import (
    chain_entropy,
    enumerated_entropy,
    ordered_chain_entropy,
    row_entropy,
    sampled_entropy,
)
from bellmask.data.toy import ToySource
from bellmask.errors import UserError


def float64(values) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def started(transition: torch.Tensor, length: int) -> ToySource:
    """A chain that starts from its stationary distribution, found by walking on."""
    return ToySource.markov(torch.linalg.matrix_power(transition, 300)[0], transition, length)


SKEWED = float64([[0.6, 0.3, 0.1], [0.05, 0.15, 0.8], [0.5, 0.1, 0.4]])
"""Not reversible: left and right neighbours are not alike."""
REGISTER = float64([[0.5, 0.5, 0, 0], [0, 0, 0.5, 0.5], [0.5, 0.5, 0, 0], [0, 0, 0.5, 0.5]])
COIN = float64([[0.9, 0.1], [0.3, 0.7]])
CHAINS = {
    **{f"skewed {length}": started(SKEWED, length) for length in (1, 2, 3, 5)},
    "coin 7": started(COIN, 7),
    "register 4": started(REGISTER, 4),
    "sticky 5": ToySource.sticky(3, 5, stay=0.7),
    "local 4": ToySource.local(3, 4, locality=1.0),
    "shared symbols 4": ToySource(  # state 0 has two symbols of its own
        float64([5 / 7, 2 / 7]),
        float64([[0.9, 0.1], [0.25, 0.75]]),
        float64([[0.4, 0.6, 0], [0, 0, 1]]),
        length=4,
    ),
}
OTHERS = {
    "uneven": ToySource.markov(float64([0.2, 0.5, 0.3]), SKEWED, 4),
    "noisy": ToySource(
        float64([0.3, 0.7]),
        float64([[0.9, 0.1], [0.25, 0.75]]),
        float64([[0.5, 0.3, 0.2], [0.05, 0.15, 0.8]]),
        length=4,
    ),
    "pairs": ToySource.order_two(3, 4, sharpness=3.0),
    "local": ToySource.local(3, 4, locality=0.6, num_topics=2),
}
every_chain = pytest.mark.parametrize("source", CHAINS.values(), ids=CHAINS)
every_other = pytest.mark.parametrize("source", OTHERS.values(), ids=OTHERS)


def table_of(source: ToySource) -> dict[tuple[int, ...], float]:
    """p(row) of every row, by plain sums over the paths of states."""
    start, move, emit = (
        table.tolist() for table in (source.initial_S, source.transition_SS, source.emission_SV)
    )
    table = {}
    for row in itertools.product(range(source.num_tokens), repeat=source.length):
        states = [[s for s in range(len(start)) if emit[s][v] > 0] for v in row]
        table[row] = sum(
            start[path[0]]
            * math.prod(move[a][b] for a, b in itertools.pairwise(path))
            * math.prod(emit[s][v] for s, v in zip(path, row))
            for path in itertools.product(*states)
        )
    return table


def conditional_entropy(table, target: int, context: tuple[int, ...]) -> float:
    """E[-log p(x^target | x^context)], each probability a sum over rows."""
    joint: dict[tuple[int, ...], float] = {}
    given: dict[tuple[int, ...], float] = {}
    for row, p in table.items():
        z = tuple(row[j] for j in context)
        given[z] = given.get(z, 0) + p
        joint[(*z, row[target])] = joint.get((*z, row[target]), 0) + p
    return -sum(p * math.log(p / given[key[:-1]]) for key, p in joint.items() if p > 0)


def plain_entropy(source: ToySource, order=None) -> torch.Tensor:
    """Of MDM: the mean over all targets and contexts of each size; else of an order."""
    table, length = table_of(source), source.length
    if order is not None:
        return float64([conditional_entropy(table, order[n], order[:n]) for n in range(length)])
    found = []
    for n in range(length):
        values = [
            conditional_entropy(table, i, context)
            for i in range(length)
            for context in itertools.combinations([j for j in range(length) if j != i], n)
        ]
        found.append(sum(values) / len(values))
    return float64(found)


def some_orders(length: int) -> list[tuple[int, ...]]:
    every = list(itertools.permutations(range(length)))
    return every[:: max(1, len(every) // 24)]


@every_chain
def test_the_closed_form_is_the_plain_sum(source):
    torch.testing.assert_close(chain_entropy(source), plain_entropy(source), atol=1e-12, rtol=0)


@every_chain
def test_fixed_orders_of_a_chain_are_the_plain_sum(source):
    for order in some_orders(source.length)[:: 1 if source.length < 5 else 5]:
        found = ordered_chain_entropy(source, torch.tensor(order))
        torch.testing.assert_close(found, plain_entropy(source, order), atol=1e-12, rtol=0)


@every_other
def test_enumeration_is_the_plain_sum(source):
    torch.testing.assert_close(enumerated_entropy(source), plain_entropy(source))
    for order in some_orders(source.length):
        found = enumerated_entropy(source, torch.tensor(order))
        torch.testing.assert_close(found, plain_entropy(source, order))


@pytest.mark.parametrize("source", [*CHAINS.values(), *OTHERS.values()], ids=[*CHAINS, *OTHERS])
def test_in_every_framework_the_sum_is_the_entropy_of_a_row(source):
    truth = -sum(p * math.log(p) for p in table_of(source).values() if p > 0)
    orders = [None, *map(torch.tensor, some_orders(source.length)[::6])]
    for order in orders:
        assert float(enumerated_entropy(source, order).sum()) == pytest.approx(truth, abs=1e-12)
    if source in CHAINS.values():
        assert float(chain_entropy(source).sum()) == pytest.approx(truth, abs=1e-12)
        for order in orders[1:]:
            found = ordered_chain_entropy(source, order)
            assert float(found.sum()) == pytest.approx(truth, abs=1e-12)
    if source.order is not None:
        assert row_entropy(source) == (pytest.approx(truth, abs=1e-12), 0.0)


@pytest.mark.parametrize("length", [128, 700])
def test_long_chains_add_up_too(length):
    source = started(SKEWED, length)
    order = torch.randperm(length, generator=torch.Generator().manual_seed(1))
    truth, _ = row_entropy(source)
    for found in (chain_entropy(source), ordered_chain_entropy(source, order)):
        assert bool((found > 0).all())
        assert float(found.sum()) == pytest.approx(truth, rel=1e-10)


@pytest.mark.parametrize("source", [CHAINS["skewed 5"], *OTHERS.values()], ids=["chain", *OTHERS])
def test_aoarm_averaged_over_all_orders_is_mdm(source):
    orders = map(torch.tensor, itertools.permutations(range(source.length)))
    entropies = torch.stack([enumerated_entropy(source, order) for order in orders])
    torch.testing.assert_close(entropies.mean(0), enumerated_entropy(source))
    if source.order == 1 and source is not OTHERS["uneven"]:
        orders = map(torch.tensor, itertools.permutations(range(source.length)))
        exact = torch.stack([ordered_chain_entropy(source, order) for order in orders])
        torch.testing.assert_close(exact.mean(0), chain_entropy(source))


def test_the_ends_of_the_curve():
    """Nothing observed: a symbol's own entropy. Left to right: h(1). All observed: two sides."""
    source = started(SKEWED, 40)
    p = source.initial_S
    own = -float((p * p.log()).sum())
    step = -float((p[:, None] * SKEWED * SKEWED.log()).sum())
    two = SKEWED @ SKEWED
    double = -float((p[:, None] * two * two.log()).sum())
    curve = chain_entropy(source)
    arm = ordered_chain_entropy(source, torch.arange(40))
    assert arm.tolist() == pytest.approx([own] + [step] * 39, abs=1e-12)
    assert float(curve[0]) == pytest.approx(own, abs=1e-12)
    inner = 2 * step - double
    assert float(curve[-1]) == pytest.approx((38 * inner + 2 * step) / 40, abs=1e-12)
    assert bool((curve.diff() < 0).all())


@every_other
@pytest.mark.parametrize("order", [None, (2, 0, 3, 1)], ids=["mdm", "sigma"])
def test_sampled_entropies_are_within_their_errors(source, order):
    order_L = None if order is None else torch.tensor(order)
    mean, error = sampled_entropy(source, order_L, num_rows=3000, seed=1)
    truth = enumerated_entropy(source, order_L)
    assert bool(((mean - truth).abs() < 4 * error + 1e-12).all())
    assert float(error.max()) < 0.02


def test_errors_are_the_spread_of_repeated_estimates():
    source = OTHERS["noisy"]
    found = [sampled_entropy(source, num_rows=100, seed=seed) for seed in range(200)]
    spread = torch.stack([mean for mean, _ in found]).std(0)
    claimed = torch.stack([error for _, error in found]).mean(0)
    torch.testing.assert_close(claimed, spread, rtol=0.2, atol=1e-9)


def test_nothing_is_drawn_where_nothing_is_left_to_chance():
    """Without context a stationary symbol's entropy is its own, whatever the row."""
    source = ToySource.local(3, 6, locality=0.5)
    mean, error = sampled_entropy(source, num_rows=5)
    p = source.initial_S @ source.emission_SV
    assert float(mean[0]) == pytest.approx(-float((p * p.log()).sum()), abs=1e-12)
    assert float(error[0]) == pytest.approx(0, abs=1e-12)


def test_a_batch_is_only_a_batch(monkeypatch):
    source, told = OTHERS["pairs"], []
    whole = sampled_entropy(source, num_rows=20, seed=3)
    monkeypatch.setattr("bellmask.analyze.entropy.NUMBERS_AT_ONCE", 4 * 4 * 9 * 7)
    parts = sampled_entropy(source, num_rows=20, seed=3, on_progress=lambda *n: told.append(n))
    torch.testing.assert_close(parts, whole)
    assert told == [(7, 20), (14, 20), (20, 20)]
    assert not torch.allclose(sampled_entropy(source, num_rows=20, seed=4)[0], whole[0])


@pytest.mark.parametrize("name", ["noisy", "local"])
def test_the_row_entropy_of_a_hidden_source_is_within_its_error(name):
    found, error = row_entropy(OTHERS[name])
    assert 0 < error < 0.02
    assert abs(found - float(enumerated_entropy(OTHERS[name]).sum())) < 4 * error


def test_the_less_local_the_earlier_the_context_helps():
    """At locality 0 a few symbols tell the topic; in a chain they are too far away."""
    chain, loose = (ToySource.local(8, 64, locality) for locality in (1.0, 0.0))
    gain = []
    for curve in (chain_entropy(chain), sampled_entropy(loose, num_rows=64)[0]):
        gain.append(float((curve[0] - curve[8]) / (curve[0] - curve[-1])))
    assert gain[0] < 0.3
    assert gain[1] > 0.8


def test_what_has_no_closed_form_is_refused():
    for function in (chain_entropy, lambda s: ordered_chain_entropy(s, torch.arange(4))):
        with pytest.raises(UserError, match=r"order 1, and this source is of order 2"):
            function(OTHERS["pairs"])
        with pytest.raises(UserError, match=r"order 1, and this source is hidden"):
            function(OTHERS["noisy"])
        with pytest.raises(UserError, match="stationary"):
            function(OTHERS["uneven"])


def test_what_is_no_order_or_too_large_is_refused():
    source = OTHERS["noisy"]
    for order in ([1, 2, 3, 4], [0, 0, 1, 2], [0, 1, 2]):
        for function in (enumerated_entropy, sampled_entropy):
            with pytest.raises(UserError, match="permutation of the places 0 to 3"):
                function(source, torch.tensor(order))
        with pytest.raises(UserError, match="permutation"):
            ordered_chain_entropy(CHAINS["local 4"], torch.tensor(order))
    with pytest.raises(UserError, match="too many to enumerate"):
        enumerated_entropy(ToySource.sticky(8, 16, 0.5))
