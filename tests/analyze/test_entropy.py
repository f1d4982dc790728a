"""Irreducible entropies against plain sums over all rows, contexts and targets (Prop 3.1)."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from bellmask.analyze.decompose import (
    chain_entropy,
    enumerated_entropy,
    ordered_chain_entropy,
    row_entropy,
    sampled_entropy,
)
from bellmask.data.toys import ToySource


def float64(values):
    return torch.tensor(values, dtype=torch.float64)


def started(transition, length):
    """A chain that starts from its stationary distribution, found by walking on."""
    return ToySource.markov(torch.linalg.matrix_power(transition, 300)[0], transition, length)


SKEWED = float64([[0.6, 0.3, 0.1], [0.05, 0.15, 0.8], [0.5, 0.1, 0.4]])
"""Not reversible: left and right neighbours are not alike."""
REGISTER = float64([[0.5, 0.5, 0, 0], [0, 0, 0.5, 0.5], [0.5, 0.5, 0, 0], [0, 0, 0.5, 0.5]])
STATES = float64([[0.9, 0.1], [0.25, 0.75]])
CHAINS = {
    **{f"skewed {length}": started(SKEWED, length) for length in (1, 2, 5)},
    "register": started(REGISTER, 4),
    "sticky": ToySource.sticky(3, 4, stay=0.7),
    "local chain": ToySource.local(3, 4, locality=1.0),
    "shared symbols": ToySource(  # state 0 has two symbols of its own
        float64([5 / 7, 2 / 7]), STATES, float64([[0.4, 0.6, 0], [0, 0, 1]]), length=4
    ),
}
OTHERS = {
    "uneven": ToySource.markov(float64([0.2, 0.5, 0.3]), SKEWED, 4),
    "noisy": ToySource(
        float64([0.3, 0.7]), STATES, float64([[0.5, 0.3, 0.2], [0.05, 0.15, 0.8]]), length=4
    ),
    "pairs": ToySource.order_two(3, 4, sharpness=3.0),
    "local": ToySource.local(3, 4, locality=0.6, num_topics=2),
}
EVERY = CHAINS | OTHERS
every_source = pytest.mark.parametrize("name", EVERY)
every_other = pytest.mark.parametrize("name", OTHERS)


def table_of(source):
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


def conditional_entropy(table, target, context):
    """E[-log p(x^target | x^context)], each probability a sum over rows."""
    joint, given = {}, {}
    for row, p in table.items():
        z = tuple(row[j] for j in context)
        given[z] = given.get(z, 0) + p
        joint[(*z, row[target])] = joint.get((*z, row[target]), 0) + p
    return -sum(p * math.log(p / given[key[:-1]]) for key, p in joint.items() if p > 0)


def plain_entropy(source, order=None):
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


def some_orders(length, most=8):
    every = list(itertools.permutations(range(length)))
    return every[:: max(1, len(every) // most)]


@every_source
def test_closed_forms_and_enumeration_are_plain_sums(name):
    source = EVERY[name]
    for order in (None, *some_orders(source.length)):
        order_L = None if order is None else torch.tensor(order)
        truth = plain_entropy(source, order)
        found = [enumerated_entropy(source, order_L)]
        if name in CHAINS:
            found.append(
                chain_entropy(source) if order is None else ordered_chain_entropy(source, order_L)
            )
        for each in found:
            torch.testing.assert_close(each, truth, atol=1e-12, rtol=0)


@every_source
def test_in_every_framework_the_sum_is_the_entropy_of_a_row(name):
    source = EVERY[name]
    truth = -sum(p * math.log(p) for p in table_of(source).values() if p > 0)
    for order in (None, *map(torch.tensor, some_orders(source.length, 4))):
        assert float(enumerated_entropy(source, order).sum()) == pytest.approx(truth, abs=1e-12)
    if source.order is not None:
        assert row_entropy(source) == (pytest.approx(truth, abs=1e-12), 0.0)
    else:
        found, error = row_entropy(source)
        assert 0 < error < 0.02
        assert abs(found - truth) < 4 * error


@every_other
@pytest.mark.parametrize("order", [None, (2, 0, 3, 1)], ids=["mdm", "sigma"])
def test_sampled_entropies_are_within_their_errors(name, order):
    order_L = None if order is None else torch.tensor(order)
    mean, error = sampled_entropy(OTHERS[name], order_L, num_rows=3000, seed=1)
    truth = enumerated_entropy(OTHERS[name], order_L)
    assert bool(((mean - truth).abs() < 4 * error + 1e-12).all())
    assert float(error.max()) < 0.02


@pytest.mark.parametrize(
    ("function", "source", "order", "named"),
    [
        (chain_entropy, OTHERS["pairs"], (), "order 2"),
        (chain_entropy, OTHERS["noisy"], (), "hidden"),
        (chain_entropy, OTHERS["uneven"], (), "stationary"),
        (ordered_chain_entropy, CHAINS["sticky"], (0, 1, 2), "permutation"),
        (enumerated_entropy, OTHERS["noisy"], (0, 0, 1, 2), "permutation"),
        (enumerated_entropy, ToySource.sticky(8, 16, 0.5), (), "8 symbols at 16 places"),
    ],
)
def test_what_has_no_such_entropy_is_refused(function, source, order, named):
    with pytest.raises(ValueError, match=named):
        function(source, *([torch.tensor(order)] if order else []))
