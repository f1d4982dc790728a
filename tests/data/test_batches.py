"""Which block is sample i of step s: exact shares, and every corpus through whole epochs."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bellmask.config.options import DataOptions
from bellmask.data.blocks import MIXTURE_PERIOD, BatchPlan, rank_share, share_out
from bellmask.data.prepare import load_blocks, load_data, parse_mixture, prepare
from bellmask.data.tokenizers import ByteTokenizer
from bellmask.utils.errors import UserError
from bellmask.utils.rng import IndexPermutation, stream_key

BYTES = ByteTokenizer()


def run_of(plan, steps):
    return torch.cat([plan.rows(step) for step in range(steps)])


def test_an_epoch_is_a_permutation_and_batches_may_span_epochs():
    plan = BatchPlan(num_blocks=10, batch_size=25, seed=1)
    epochs = run_of(plan, 4).reshape(10, 10).tolist()
    assert all(sorted(epoch) == list(range(10)) for epoch in epochs)
    assert len(set(map(tuple, epochs))) == 10
    assert not torch.equal(plan.rows(0), replace(plan, seed=2).rows(0))
    plan = BatchPlan(num_blocks=7, batch_size=4, seed=3)
    expected = [IndexPermutation(7, stream_key(3, "data", e))(torch.arange(7)) for e in range(4)]
    assert torch.equal(run_of(plan, 7), torch.cat(expected))


def test_ranks_share_the_batch_without_overlap():
    assert [i for r in range(3) for i in rank_share(12, r, 3)] == list(range(12))


# --- mixtures --------------------------------------------------------------------------------


def test_weights_hold_in_every_thousand_samples_and_each_corpus_has_its_own_epochs():
    sizes = (40, 7, 300)
    plan = BatchPlan(sum(sizes), 250, 5, sizes, (0.62, 0.3, 0.08))
    run = run_of(plan, 24)
    corpus = torch.bucketize(run, torch.tensor([40, 47]), right=True)
    for period in corpus.reshape(6, MIXTURE_PERIOD):
        assert torch.bincount(period, minlength=3).tolist() == [620, 300, 80]
    for number, size in enumerate(sizes):
        own = run[corpus == number] - sum(sizes[:number])
        epochs = own[: len(own) // size * size].reshape(-1, size).tolist()
        assert all(sorted(epoch) == list(range(size)) for epoch in epochs)
        assert len(set(map(tuple, epochs))) > 0.9 * len(epochs) > 0, "7! orders meet but rarely"
    assert torch.equal(run_of(replace(plan, batch_size=8), 125), run[:1000])
    assert not torch.equal(replace(plan, seed=6).rows(0), plan.rows(0))


def test_corpora_of_a_mixture_are_mixed_and_have_orders_of_their_own():
    """Of 0.5/0.5 each hundred samples hold both, near their share (five standard errors)."""
    plan = BatchPlan(100, 100, 5, (50, 50), (0.5, 0.5))
    for step in range(10):
        assert 25 < int((plan.rows(step) < 50).sum()) < 75
    run = plan.rows(0)
    first, second = run[run < 50].tolist(), (run[run >= 50] - 50).tolist()
    assert first[:20] != second[:20]


@settings(deadline=None, derandomize=True, max_examples=50)
@given(st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=6), st.integers(1, 2000))
def test_shares_add_up_and_are_rounded_to_a_neighbor(weights, total):
    counts = share_out(weights, total)
    assert sum(counts) == total
    for count, weight in zip(counts, weights):
        assert abs(count - weight / sum(weights) * total) < 1 + 1e-9


def test_a_mixture_is_written_as_names_and_weights():
    assert parse_mixture(()) == {}
    assert parse_mixture(("ptb=0.3", "a=b/c.txt=0.001")) == {"ptb": 0.3, "a=b/c.txt": 0.001}


@pytest.mark.parametrize(
    "items",
    ["ptb", "ptb=x", "=0.3", "ptb=0", "ptb=1", "ptb=nan", "ptb=0.5 b=0.5", "ptb=0.1 ptb=0.2"],
)
def test_a_mixture_written_otherwise_is_refused(items):
    with pytest.raises(UserError, match=r"data\.mixture.*(ptb|=0.3)"):
        parse_mixture(items.split())


def test_a_mixture_is_loaded_with_its_sizes_and_weights(tmp_path):
    for name, size in (("a", 400), ("b", 160), ("c", 160)):
        (tmp_path / f"{name}.txt").write_text(name * size)
    data = DataOptions(train=str(tmp_path / "a.txt"), block_length=8, cache=str(tmp_path / "cache"))
    alone, (train, valid) = load_data(data, BYTES), load_blocks(data, BYTES)
    assert (alone.sizes, alone.weights) == ((), ())
    mixture = (f"{tmp_path}/b.txt=0.3", f"{tmp_path}/c.txt=0.1")
    mixed = load_data(replace(data, mixture=mixture), BYTES)
    assert mixed.sizes == (len(train), 20, 20)
    assert mixed.weights == pytest.approx((0.6, 0.3, 0.1))
    others = [prepare(replace(data, train=f"{tmp_path}/{n}.txt"), BYTES, "train") for n in "bc"]
    expected = torch.cat([part.rows(slice(None)) for part in (train, *others)])
    assert torch.equal(mixed.train.rows(slice(None)), expected)
    assert mixed.valid.fingerprint == valid.fingerprint == alone.valid.fingerprint
    assert mixed.train.fingerprint != alone.train.fingerprint == train.fingerprint
