"""Which block is sample i of step s: exact shares, and every corpus through whole epochs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bellmask.data.batches import MIXTURE_PERIOD, BatchPlan, rank_share, share_out
from bellmask.data.prepare import load_blocks, load_data, parse_mixture, prepare
from bellmask.data.tokenizer import ByteTokenizer
from bellmask.errors import UserError
from bellmask.options import DataOptions
from bellmask.rng import IndexPermutation, stream_key

BYTES = ByteTokenizer()


def test_an_epoch_is_a_permutation_and_batches_may_span_epochs() -> None:
    plan = BatchPlan(num_blocks=10, batch_size=25, seed=1)
    rows = torch.cat([plan.rows(s) for s in range(4)]).reshape(10, 10)
    assert all(sorted(epoch.tolist()) == list(range(10)) for epoch in rows)
    assert len({tuple(epoch.tolist()) for epoch in rows}) == 10
    assert torch.equal(plan.rows(2), plan.rows(2))
    other = BatchPlan(10, 25, seed=2).rows(0)
    assert not torch.equal(plan.rows(0), other)


def test_without_a_mixture_rows_are_the_epochs_permutation() -> None:
    plan = BatchPlan(num_blocks=7, batch_size=4, seed=3)
    run = torch.cat([plan.rows(s) for s in range(7)])
    epochs = [IndexPermutation(7, stream_key(3, "data", e))(torch.arange(7)) for e in range(4)]
    assert torch.equal(run, torch.cat(epochs))


def test_ranks_share_the_batch_without_overlap() -> None:
    shares = [rank_share(12, r, 3) for r in range(3)]
    assert [i for share in shares for i in share] == list(range(12))


# --- mixtures --------------------------------------------------------------------------------


@pytest.mark.parametrize("batch_size", [8, 250, 1000])
def test_mixture_weights_hold_exactly_in_every_thousand_samples(batch_size: int) -> None:
    sizes, weights = (40, 7, 300), (0.62, 0.3, 0.08)
    plan = BatchPlan(sum(sizes), batch_size, 5, sizes, weights)
    run = torch.cat([plan.rows(s) for s in range(3 * MIXTURE_PERIOD // batch_size)])
    corpus = torch.bucketize(run, torch.tensor([40, 47]), right=True)
    for period in corpus.reshape(3, MIXTURE_PERIOD):
        assert torch.bincount(period, minlength=3).tolist() == [620, 300, 80]


def test_each_corpus_of_a_mixture_goes_through_its_own_epochs() -> None:
    sizes = (40, 7, 300)
    plan = BatchPlan(sum(sizes), 100, 5, sizes, (0.62, 0.3, 0.08))
    run = torch.cat([plan.rows(s) for s in range(60)])
    first = 0
    for size in sizes:
        own = run[(run >= first) & (run < first + size)] - first
        epochs = own[: len(own) // size * size].reshape(-1, size)
        assert len(epochs) >= 1
        for epoch in epochs.tolist():
            assert sorted(epoch) == list(range(size))
        orders = set(map(tuple, epochs.tolist()))
        assert len(orders) > 0.9 * len(epochs), "7! orders meet again, but rarely"
        first += size


def test_a_mixture_is_a_function_of_seed_and_step() -> None:
    plan = BatchPlan(30, 16, 5, (20, 10), (0.5, 0.5))
    small = BatchPlan(30, 4, 5, (20, 10), (0.5, 0.5))
    run = torch.cat([plan.rows(s) for s in range(8)])
    assert torch.equal(run, torch.cat([small.rows(s) for s in range(32)]))
    assert torch.equal(plan.rows(6), run[96:112])
    assert not torch.equal(replace(plan, seed=6).rows(0), plan.rows(0))


def test_corpora_of_a_mixture_have_orders_of_their_own() -> None:
    run = BatchPlan(100, 100, 5, (50, 50), (0.5, 0.5)).rows(0)
    first, second = run[run < 50].tolist(), (run[run >= 50] - 50).tolist()
    both = min(len(first), len(second))
    assert first[:both] != second[:both]


def test_corpora_of_a_mixture_are_mixed_not_in_turn() -> None:
    """Of 0.5/0.5 each hundred samples hold both, near their share (five standard errors)."""
    plan = BatchPlan(30, 100, 5, (20, 10), (0.5, 0.5))
    for step in range(10):
        assert 25 < int((plan.rows(step) < 20).sum()) < 75


@settings(deadline=None, derandomize=True)
@given(st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=6), st.integers(1, 2000))
def test_shares_add_up_and_are_rounded_to_a_neighbour(weights: list[float], total: int) -> None:
    counts = share_out(weights, total)
    assert sum(counts) == total
    for count, weight in zip(counts, weights):
        assert abs(count - weight / sum(weights) * total) < 1 + 1e-9


def test_a_mixture_is_written_as_names_and_weights() -> None:
    assert parse_mixture(()) == {}
    assert parse_mixture(("ptb=0.3", "a=b/c.txt=0.25")) == {"ptb": 0.3, "a=b/c.txt": 0.25}


@pytest.mark.parametrize(
    "item", ["ptb", "ptb=", "ptb=x", "=0.3", "ptb=0", "ptb=1", "ptb=-0.1", "ptb=nan", "ptb=inf"]
)
def test_a_mixture_written_otherwise_is_refused(item: str) -> None:
    with pytest.raises(UserError, match=r"write NAME=0.3 with a weight from 0.001 to 1, not '"):
        parse_mixture(("lm1b=0.1", item))


def test_a_mixture_that_leaves_nothing_is_refused() -> None:
    with pytest.raises(UserError, match="leave nothing for"):
        parse_mixture(("a=0.5", "b=0.5"))


def test_a_mixture_is_loaded_with_its_sizes_and_weights(tmp_path: Path) -> None:
    for name, letter in (("a", "a"), ("b", "b"), ("c", "c")):
        (tmp_path / f"{name}.txt").write_text(letter * (400 if name == "a" else 160))
    data = DataOptions(train=str(tmp_path / "a.txt"), block_length=8, cache=str(tmp_path / "cache"))
    alone = load_data(data, BYTES)
    assert (alone.sizes, alone.weights) == ((), ())
    mixture = (f"{tmp_path}/b.txt=0.3", f"{tmp_path}/c.txt=0.1")
    mixed = load_data(replace(data, mixture=mixture), BYTES)
    train, valid = load_blocks(data, BYTES)
    assert mixed.sizes == (len(train), 20, 20)
    assert mixed.weights == pytest.approx((0.6, 0.3, 0.1))
    parts = [
        train,
        *(prepare(replace(data, train=f"{tmp_path}/{n}.txt"), BYTES, "train") for n in "bc"),
    ]
    expected = torch.cat([part.rows(slice(None)) for part in parts])
    assert torch.equal(mixed.train.rows(slice(None)), expected)
    assert mixed.valid.fingerprint == valid.fingerprint == alone.valid.fingerprint
    assert mixed.train.fingerprint != alone.train.fingerprint == train.fingerprint
