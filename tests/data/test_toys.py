"""The toy sources against enumeration of all their rows."""

import dataclasses
import functools
import itertools
import math

import numpy as np
import pytest
import torch
from scipy import stats
from toy_tools import sample

from bellmask.config.options import DataOptions
from bellmask.data.prepare import load_data, make_tokenizer
from bellmask.data.toys import ExactDenoiser, ToySource
from bellmask.utils.errors import UserError


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


def test_a_long_chain_does_not_underflow():
    """In the middle of 1000 symbols: p(v | a, b) is proportional to P[a, v] P[v, b]."""
    chain = ToySource.markov(UNEVEN.initial_S, UNEVEN.transition_SS, length=1000)
    x = sample(chain, 1, seeded(1))
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


@every_kind
def test_samples_have_the_frequencies_of_the_source(source):
    rows = sample(source, 30_000, seeded(2))
    code = rows @ torch.tensor([27, 9, 3, 1])
    counts = torch.bincount(code, minlength=81).numpy()
    expected = 30_000 * row_probabilities(source)
    common = expected >= 5
    score = ((counts - expected)[common] ** 2 / expected[common]).sum()
    assert stats.chi2.sf(score, common.sum() - 1) > 1e-3


def test_impossible_rows_are_never_drawn_even_at_the_edges_of_the_unit_interval():
    u = float64(list(itertools.product([0.0, 2.0**-53, 0.5, 1 - 2.0**-53], repeat=4)))
    assert bool(REGISTER.log_probability(REGISTER.draw(u)).isfinite().all())


def test_the_denoiser_returns_log_probabilities_rows_a_sum_or_a_weighted_sum():
    x, rows = torch.tensor([[0, 3, 3, 2], [3, 1, 3, 3]]), torch.tensor([1, 4, 7])
    targets, weight = torch.tensor([2, 0, 1]), float64([1, 2, 4])
    expected = np.concatenate([enumerated_conditionals(UNEVEN, row) for row in x.tolist()])[rows]
    ce = -np.log(expected[[0, 1, 2], targets])
    model = ExactDenoiser(UNEVEN)
    np.testing.assert_allclose(model(x, rows).exp().numpy(), expected, atol=1e-12)
    np.testing.assert_allclose(model(x, rows, targets, reduce=False).numpy(), ce, atol=1e-12)
    assert float(model(x, rows, targets)) == pytest.approx(ce.sum())
    assert float(model(x, rows, targets, weight_N=weight)) == pytest.approx(ce @ [1, 2, 4])


def causal_truth(source, row, order, slot):
    """p(x at order[slot] | x at order[:slot]) from the table of all rows."""
    seen = [v if i in order[:slot] else source.num_tokens for i, v in enumerate(row)]
    return enumerated_conditionals(source, seen)[order[slot]]


@pytest.mark.parametrize("source", [UNEVEN, NOISY], ids=["uneven", "noisy"])
def test_a_causal_denoiser_sees_the_slots_up_to_its_own_in_every_order(source, monkeypatch):
    monkeypatch.setattr("bellmask.data.toys.CAUSAL_ROWS", 7)
    orders = [list(order) for order in itertools.permutations(range(4))]
    row = [2, 0, 1, 2]
    x = torch.tensor([[3, *(row[place] for place in order[:-1])] for order in orders])
    held = torch.tensor([[0, *(place + 1 for place in order[:-1])] for order in orders])
    sought = torch.tensor(orders) + 1
    rows = torch.arange(x.numel()).flip(0)
    model = ExactDenoiser(source, is_causal=True)
    found = model(x, rows, positions=held, target_positions=sought).exp().numpy()
    expected = [causal_truth(source, row, order, s) for order in orders for s in range(4)]
    np.testing.assert_allclose(found, np.array(expected)[::-1], atol=1e-12)
    assert model(x[:1], rows[-4:]).equal(torch.from_numpy(found[-4:]).log()), "left to right"


# --- toy corpora -----------------------------------------------------------------------------


def toy(train, **more):
    return DataOptions(train=train, **{"tokenizer": "symbols:8", "block_length": 4, **more})


@pytest.mark.parametrize(
    ("name", "more", "words"),
    [
        ("toy:stick", {}, "'sticky'"),
        ("toy:sticky:1", {}, "toy:sticky:1: the stay"),
        ("toy:local:", {}, "locality"),
        ("toy:order2:1", {}, "toy:order2"),
        ("toy:sticky", {"from_files": "x"}, "--data.from$"),
        ("toy:sticky", {"packing": "unpacked", "wrap": False}, "--data.packing, --data.wrap$"),
        ("toy:sticky", {"tokenizer": "symbols:7"}, "symbols:8"),
        ("toy:sticky", {"tokenizer": "bpe:300"}, "toy:sticky has no text"),
        ("{text}", {"tokenizer": "bytes", "mixture": ("toy:sticky=0.3",)}, "toy:sticky has no"),
    ],
)
def test_what_makes_no_sense_is_refused(tmp_path, name, more, words):
    (tmp_path / "text.txt").write_text("abc " * 100)
    options = toy(name.format(text=tmp_path / "text.txt"), **{"cache": str(tmp_path), **more})
    with pytest.raises(UserError, match=words):
        load_data(options, make_tokenizer(options))


def test_text_in_symbols_has_no_ends_of_documents(tmp_path):
    (tmp_path / "a.txt").write_text("abcabc\nabc")
    rules = {"documents": "line", "valid_fraction": 0.3, "cache": str(tmp_path)}
    options = toy(str(tmp_path / "a.txt"), tokenizer="symbols:3", block_length=3, **rules)
    data = load_data(options, make_tokenizer(options))
    assert data.train.rows(slice(None)).tolist() == [[0, 1, 2]] * 2
    for bad in ({"wrap": True}, {"packing": "unpacked"}, {"document_attention": True}):
        with pytest.raises(UserError, match="symbols:3"):
            load_data(dataclasses.replace(options, **bad), make_tokenizer(options))
