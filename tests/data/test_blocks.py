"""Blocks on disk and in memory, packing, and which block is sample i of step s."""

from __future__ import annotations

import hashlib
import itertools
import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bellmask.config.options import DataOptions
from bellmask.data import blocks as module
from bellmask.data.prepare import load_data, parse_mixture, prepare
from bellmask.data.tokenizers import ByteTokenizer
from bellmask.utils.errors import UserError
from bellmask.utils.rng import IndexPermutation, stream_key

BYTES = ByteTokenizer()


def options(tmp_path, text, **changes):
    path = tmp_path / "text.txt"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    base = DataOptions(train=str(path), block_length=8, cache=str(tmp_path / "cache"))
    return replace(base, **changes)


def folders(tmp_path):
    """Of prepared blocks, finished or not."""
    return [p for p in (tmp_path / "cache" / "blocks").iterdir() if p.is_dir()]


def test_starts_of_a_few_rows_make_no_array_of_all():
    """Each step asks for them; the corpus may be large."""
    column = np.broadcast_to(np.int64(8), 10**15)
    blocks = module.Blocks(np.broadcast_to(np.uint8(1), (10**15, 8)), column, column, "")
    assert blocks.row_starts(torch.tensor([3, 10**14])).tolist() == [0, 0]


def test_the_card_says_what_the_blocks_are(tmp_path):
    data = options(tmp_path, "abc\ndefgh\n\nij\n", documents="line", wrap=True, remainder="keep")
    blocks = prepare(data, BYTES, "train")
    (folder,) = folders(tmp_path)
    expected = {
        "fingerprint": blocks.fingerprint,
        "num_documents": 3,
        "num_blocks": 3,
        "num_tokens": 13 + 3 * 2,
        "text_bytes": 10,
        "text_tokens": 13,
        "num_bytes": 10,
        "origin": {"text.txt": hashlib.sha256(b"abc\ndefgh\n\nij\n").hexdigest()},
    }
    assert module.read_card(folder).items() >= expected.items()
    assert (folder / "tokens-00000.bin").stat().st_size == 3 * 8 * 2, "two bytes for a token"


@pytest.mark.parametrize(
    ("text", "changes", "words"),
    [
        (b"abc", {}, "--data.block-length"),
        (b"abcdefghijk", {}, "--data.valid"),
        (b"abc\xff\xfe" * 20, {}, "0xff"),
        (b"abcd\n" * 9, {"train": "none*.txt"}, r"none\*.txt"),
        (b"abcd\n" * 9, {"train": "{folder}"}, "folder"),
        (b"abcd\n" * 9, {"cache": "{folder}/text.txt/cache"}, "text.txt/cache"),
        (b"abcd\n" * 9, {"wrap": True, "block_length": 2}, "at least 3"),
    ],
)
def test_unusable_text_is_refused_and_leaves_nothing(tmp_path, text, changes, words):
    changes = {
        name: value.format(folder=tmp_path) if isinstance(value, str) else value
        for name, value in changes.items()
    }
    with pytest.raises(UserError, match=words):
        load_data(options(tmp_path, text, **changes), BYTES)
    left = folders(tmp_path) if (tmp_path / "cache" / "blocks").exists() else []
    assert len(left) == (words == "--data.valid"), "blocks that are too few are still blocks"


CARDS = [{"fingerprint": "0" * 64}, {"dtype": "O"}, {"dtype": "float64"}]
CARDS += [{"rows_per_shard": 0}, {"num_blocks": 10**18}]


@pytest.mark.parametrize(
    "damage", ["tokens-00000.bin", "lengths.bin", "documents.bin", "long", "no card", *CARDS]
)
def test_a_damaged_cache_is_refused(tmp_path, damage):
    data = options(tmp_path, "hello world " * 9)
    prepare(data, BYTES, "train")
    (folder,) = folders(tmp_path)
    card = folder / "card.json"
    if damage == "long":
        with (folder / "tokens-00000.bin").open("ab") as stream:
            stream.write(bytes(16))
    elif damage == "no card":
        card.unlink()
    elif isinstance(damage, dict):
        card.write_text(json.dumps(json.loads(card.read_text()) | damage))
    else:
        content = (folder / damage).read_bytes()
        (folder / damage).write_bytes(content[: len(content) // 2])
    with pytest.raises(UserError, match=folder.name):
        prepare(data, BYTES, "train")


@settings(deadline=None, derandomize=True, max_examples=60)
@given(st.lists(st.integers(1, 6), min_size=1, max_size=5), st.data())
def test_sharded_rows_are_indexed_like_one_array(sizes, data):
    whole = np.arange(sum(sizes) * 3, dtype=np.uint16).reshape(-1, 3)
    tokens = module.ShardedTokens(np.split(whole, np.cumsum(sizes)[:-1]))
    index = np.array(data.draw(st.lists(st.integers(0, len(whole) - 1), max_size=9)), dtype=int)
    np.testing.assert_array_equal(tokens[index], whole[index])
    start, stop = sorted(data.draw(st.tuples(*[st.integers(0, len(whole))] * 2)))
    cut, part = whole[start:stop], tokens[start:stop]
    np.testing.assert_array_equal(np.asarray(part), cut)
    np.testing.assert_array_equal(np.asarray(part[: len(cut) // 2]), cut[: len(cut) // 2])
    inside = np.arange(len(cut))[::-2]
    np.testing.assert_array_equal(part[inside], cut[inside])


def test_joined_blocks_are_one_after_another():
    def in_memory(first, count, start=0):
        rows = [module.Row(np.full(4, first + i), 4 - i % 2, i, start) for i in range(count)]
        return module.Blocks.from_rows(rows, num_bytes=float(count))

    a, b, c = in_memory(10, 3), in_memory(20, 5, start=1), in_memory(30, 9).slice(3, 9)
    joined = module.join([a, b, module.join([c])])
    expected = torch.cat([part.rows(slice(None)) for part in (a, b, c)])
    assert torch.equal(joined.rows(slice(None)), expected)
    assert joined.starts.tolist() == [0] * 3 + [1] * 5 + [0] * 6
    assert torch.equal(joined.slice(2, 5).rows(slice(None)), expected[2:5])


# --- packing ---------------------------------------------------------------------------------

EOS, BOS, PAD = 90, 91, 92
rules_strategy = st.builds(
    module.PackingRules, st.integers(3, 9), *map(st.just, (EOS, BOS, PAD)), *[st.booleans()] * 4
)
pieces = st.lists(st.lists(st.integers(0, 50), max_size=12), min_size=1, max_size=4)
"""Of one document; some are empty."""


def expected_rows(documents, rules):
    """(ids, length, document) of every row, from the definition."""
    length, rows = rules.block_length, []

    def row(ids, document):
        rows.append((ids + [PAD] * (length - len(ids)), len(ids), document))

    if not rules.is_packed:
        for number, document in enumerate(documents):
            if rules.wrap:
                row([BOS, *document[: length - 2], EOS], number)
            else:
                row([*document[: length - 1], EOS], number)
        return rows
    end = [EOS] if rules.insert_eos else []
    stream = [(token, i) for i, d in enumerate(documents) for token in [*d, *end]]
    size = length - 2 if rules.wrap else length
    for start in range(0, len(stream), size):
        part = stream[start : start + size]
        if len(part) == size or rules.keep_remainder:
            ids = [token for token, _ in part]
            row([BOS, *ids, EOS] if rules.wrap else ids, part[0][1])
    return rows


def add(packer, pieces):
    """Rows of one document, given in pieces."""
    last = len(pieces) - 1
    parts = [packer.add(np.array(p, dtype=np.int64), i == last) for i, p in enumerate(pieces)]
    return [row for part in parts for row in list(part)]


@settings(deadline=None, derandomize=True, max_examples=200)
@given(st.lists(pieces, max_size=8), rules_strategy, st.integers(0, 8))
def test_rows_are_those_of_the_definition_in_pieces_and_from_a_state(pieces, rules, border):
    first = module.Packer(rules)
    rows = [row for parts in pieces[:border] for row in add(first, parts)]
    state = json.loads(json.dumps(first.state()))
    assert len(state[1]) < rules.block_length, "a state is less than one row"
    second = module.Packer(rules, state)
    rows += [row for parts in pieces[border:] for row in add(second, parts)]
    assert second.num_documents == len(pieces)
    found = [(row.ids.tolist(), row.length, row.document) for row in [*rows, *second.finish()]]
    assert found == expected_rows([list(itertools.chain(*parts)) for parts in pieces], rules)


# --- batches ---------------------------------------------------------------------------------


def run_of(plan, steps):
    return torch.cat([plan.rows(step) for step in range(steps)])


def test_an_epoch_is_a_permutation_and_batches_may_span_epochs():
    plan = module.BatchPlan(num_blocks=7, batch_size=4, seed=3)
    expected = [IndexPermutation(7, stream_key(3, "data", e))(torch.arange(7)) for e in range(4)]
    assert torch.equal(run_of(plan, 7), torch.cat(expected))
    assert [i for r in range(3) for i in module.rank_share(12, r, 3)] == list(range(12))


def test_weights_hold_in_every_thousand_samples_and_each_corpus_has_its_own_epochs():
    sizes = (40, 7, 300)
    plan = module.BatchPlan(sum(sizes), 250, 5, sizes, (0.62, 0.3, 0.08))
    run = run_of(plan, 24)
    corpus = torch.bucketize(run, torch.tensor([40, 47]), right=True)
    for period in corpus.reshape(6, module.MIXTURE_PERIOD):
        assert torch.bincount(period, minlength=3).tolist() == [620, 300, 80]
        assert 25 < int((period[:100] == 0).sum()) < 90, "mixed, not one after another"
    for number, size in enumerate(sizes):
        own = run[corpus == number] - sum(sizes[:number])
        epochs = own[: len(own) // size * size].reshape(-1, size).tolist()
        assert all(sorted(epoch) == list(range(size)) for epoch in epochs)
        assert len(set(map(tuple, epochs))) > 0.9 * len(epochs) > 0, "7! orders meet but rarely"
    assert torch.equal(run_of(replace(plan, batch_size=8), 125), run[:1000])
    assert not torch.equal(replace(plan, seed=6).rows(0), plan.rows(0))


@settings(deadline=None, derandomize=True, max_examples=50)
@given(st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=6), st.integers(1, 2000))
def test_shares_add_up_and_are_rounded_to_a_neighbor(weights, total):
    counts = module.share_out(weights, total)
    assert sum(counts) == total
    for count, weight in zip(counts, weights):
        assert abs(count - weight / sum(weights) * total) < 1 + 1e-9


def test_a_mixture_is_written_as_names_and_weights():
    assert parse_mixture(("ptb=0.3", "a=b/c.txt=0.001")) == {"ptb": 0.3, "a=b/c.txt": 0.001}
    for items in (
        "ptb", "ptb=x", "=0.3", "ptb=0", "ptb=1", "ptb=nan", "ptb=0.5 b=0.5", "ptb=0.1 ptb=0.2"
    ):  # fmt: skip
        with pytest.raises(UserError, match=r"data\.mixture.*(ptb|=0.3)"):
            parse_mixture(items.split())
