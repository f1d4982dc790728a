"""Blocks on disk and in memory, and the wheels that data comes in."""

from __future__ import annotations

import hashlib
import json
import zipfile
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bellmask.config.options import DataOptions
from bellmask.data import blocks as blocks_module
from bellmask.data.blocks import Blocks, ShardedTokens, join, read_card
from bellmask.data.packing import Row
from bellmask.data.prepare import load_blocks, prepare
from bellmask.data.readers import Wheel
from bellmask.data.tokenizers import ByteTokenizer
from bellmask.utils.errors import UserError

BYTES = ByteTokenizer()
ALPHABET = "".join(chr(97 + i % 26) for i in range(800))


def options(tmp_path, text, **changes):
    path = tmp_path / "text.txt"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    base = DataOptions(train=str(path), block_length=8, cache=str(tmp_path / "cache"))
    return replace(base, **changes)


def folders(tmp_path):
    """Of prepared blocks, finished or not."""
    return [p for p in (tmp_path / "cache" / "blocks").iterdir() if p.is_dir()]


def test_blocks_hold_the_text_and_the_card_says_how(tmp_path):
    lines = ["abc", "defgh", "ij"]
    data = options(tmp_path, "abc\ndefgh\n\nij\n", documents="line", wrap=True, remainder="keep")
    blocks = prepare(data, BYTES, "train")
    stream = [token for line in lines for token in [*line.encode(), BYTES.eos_id]]
    rows = [[BYTES.bos_id, *stream[i : i + 6], BYTES.eos_id] for i in (0, 6, 12)]
    rows[2] += [BYTES.pad_id] * 5
    assert blocks.rows(slice(None)).tolist() == rows
    assert (blocks.documents.tolist(), blocks.lengths.tolist()) == ([0, 1, 2], [8, 8, 3])
    (folder,) = folders(tmp_path)
    expected = {
        "fingerprint": blocks.fingerprint,
        "num_documents": 3,
        "num_blocks": 3,
        "block_length": 8,
        "num_tokens": 13 + 3 * 2,
        "text_bytes": 10,
        "text_tokens": 13,
        "num_bytes": 10,
        "tokenizer_fingerprint": BYTES.fingerprint,
        "origin": {"text.txt": hashlib.sha256(b"abc\ndefgh\n\nij\n").hexdigest()},
    }
    assert read_card(folder).items() >= expected.items()
    assert isinstance(blocks.tokens, ShardedTokens)
    assert all(isinstance(shard, np.memmap) for shard in blocks.tokens.arrays())
    assert (folder / "tokens-00000.bin").stat().st_size == 3 * 8 * 2, "two bytes for a token"


def test_a_cached_copy_is_used_and_a_change_is_noticed(tmp_path):
    data = options(tmp_path, "hello world " * 9)
    first = prepare(data, BYTES, "train").fingerprint
    (card,) = (tmp_path / "cache").glob("blocks/*/card.json")
    written = card.stat().st_mtime_ns
    assert prepare(data, BYTES, "train").fingerprint == first
    assert (len(folders(tmp_path)), card.stat().st_mtime_ns) == (1, written)
    assert prepare(options(tmp_path, "hello World " * 9), BYTES, "train").fingerprint != first


def test_validation_is_the_end_of_the_text_where_none_is_given(tmp_path):
    train, valid = load_blocks(options(tmp_path, ALPHABET, valid_fraction=0.25), BYTES)
    assert (len(train), len(valid)) == (75, 25)
    joined = torch.cat([train.rows(slice(None)), valid.rows(slice(None))]).flatten()
    assert BYTES.decode(joined.numpy()) == ALPHABET
    assert train.fingerprint != valid.fingerprint
    own = load_blocks(options(tmp_path, ALPHABET, valid=str(tmp_path / "text.txt")), BYTES)
    assert [len(part) for part in own] == [100, 100]


@pytest.mark.parametrize(
    ("text", "changes", "words"),
    [
        (b"abc", {}, "--data.block-length"),
        (b"abcdefghijk", {}, "--data.valid"),
        (b"abc\xff\xfe" * 20, {}, "0xff"),
        (b"abcd\n" * 9, {"train": "none*.txt"}, r"none\*.txt"),
        (b"abcd\n" * 9, {"train": "{folder}"}, "folder"),
        (b"abcd\n" * 9, {"train": "wikitext3"}, "wikitext2"),
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
        load_blocks(options(tmp_path, text, **changes), BYTES)
    left = folders(tmp_path) if (tmp_path / "cache" / "blocks").exists() else []
    assert len(left) == (words == "--data.valid"), "blocks that are too few are still blocks"


@pytest.mark.parametrize(
    "damage",
    ["tokens-00000.bin", "lengths.bin", "documents.bin", "card.json", "no shard", "long shard",
     "no card", "another card"],
)  # fmt: skip
def test_a_damaged_cache_is_refused(tmp_path, monkeypatch, damage):
    monkeypatch.setattr(blocks_module, "TOKENS_PER_SHARD", 40)
    data = options(tmp_path, "hello world " * 9)
    prepare(data, BYTES, "train")
    (folder,) = folders(tmp_path)
    card = folder / "card.json"
    if damage == "no shard":
        (folder / "tokens-00001.bin").unlink()
    elif damage == "long shard":
        with (folder / "tokens-00000.bin").open("ab") as stream:
            stream.write(bytes(16))
    elif damage == "no card":
        card.unlink()
    elif damage == "another card":
        card.write_text(json.dumps(json.loads(card.read_text()) | {"fingerprint": "0" * 64}))
    else:
        content = (folder / damage).read_bytes()
        (folder / damage).write_bytes(content[: len(content) // 2])
    with pytest.raises(UserError, match=folder.name):
        prepare(data, BYTES, "train")


def test_bytes_of_text_are_counted_without_eos(tmp_path):
    blocks = prepare(options(tmp_path, "äb\ncde\n" * 40, documents="line"), BYTES, "train")
    # a pair of lines has 6 bytes of text and 8 tokens
    assert blocks.num_bytes == pytest.approx(len(blocks) * 8 * 6 / 8)
    assert blocks.slice(0, 5).num_bytes == pytest.approx(5 * 6)


# --- rows over several arrays ----------------------------------------------------------------


@settings(deadline=None, derandomize=True, max_examples=60)
@given(st.lists(st.integers(1, 6), min_size=1, max_size=5), st.data())
def test_sharded_rows_are_indexed_like_one_array(sizes, data):
    whole = np.arange(sum(sizes) * 3, dtype=np.uint16).reshape(-1, 3)
    tokens = ShardedTokens(np.split(whole, np.cumsum(sizes)[:-1]))
    index = np.array(data.draw(st.lists(st.integers(0, len(whole) - 1), max_size=9)), dtype=int)
    assert tokens.shape == whole.shape
    np.testing.assert_array_equal(tokens[index], whole[index])
    start, stop = sorted(data.draw(st.tuples(*[st.integers(0, len(whole))] * 2)))
    cut, part = whole[start:stop], tokens[start:stop]
    inner = part[: len(part) // 2]
    for found in (part, np.concatenate([whole[:0], *part.arrays()])):
        np.testing.assert_array_equal(np.asarray(found), cut)
    np.testing.assert_array_equal(np.asarray(inner), cut[: len(part) // 2])


def test_shards_read_the_same_as_one_file(tmp_path, monkeypatch):
    one = prepare(options(tmp_path, ALPHABET), BYTES, "train")
    monkeypatch.setattr(blocks_module, "TOKENS_PER_SHARD", 100)
    many = prepare(options(tmp_path, ALPHABET, cache=str(tmp_path / "other")), BYTES, "train")
    assert len(many.tokens.arrays()) == 9, "12 rows of 8 in each file, 100 rows"
    assert one.fingerprint == many.fingerprint
    index = torch.tensor([99, 0, 50, 11, 12, 50])
    for rows in (slice(None), index):
        assert torch.equal(one.rows(rows), many.rows(rows))
    assert torch.equal(one.slice(7, 60).rows(index[2:5]), many.slice(7, 60).rows(index[2:5]))


def in_memory(first, count, length=4):
    rows = [Row(np.full(length, first + i), length - i % 2, i) for i in range(count)]
    return Blocks.from_rows(rows, num_bytes=float(count))


def test_joined_blocks_are_one_after_another(tmp_path):
    a, b = in_memory(10, 3), in_memory(20, 5)
    c = prepare(options(tmp_path, ALPHABET[:80], block_length=4), BYTES, "train").slice(3, 9)
    joined = join([a, b, c])
    expected = torch.cat([part.rows(slice(None)) for part in (a, b, c)])
    assert torch.equal(joined.rows(slice(None)), expected)
    assert joined.lengths.tolist() == [*a.lengths, *b.lengths, *c.lengths]
    assert joined.documents.tolist() == [*a.documents, *b.documents, *c.documents]
    assert joined.num_bytes == pytest.approx(a.num_bytes + b.num_bytes + c.num_bytes)
    assert torch.equal(joined.slice(2, 5).rows(slice(None)), expected[2:5])
    assert joined.is_padded
    assert not c.is_padded
    assert len({join(parts).fingerprint for parts in ([a, b], [b, a], [a], [a, b, c])}) == 4


def test_slices_know_which_rows_they_are():
    blocks = in_memory(0, 6)
    first, again, last = (blocks.slice(*ends) for ends in ((0, 3), (0, 3), (3, 6)))
    assert first.fingerprint == again.fingerprint != last.fingerprint
    assert first.num_bytes + last.num_bytes == pytest.approx(blocks.num_bytes)


# --- wheels ----------------------------------------------------------------------------------


@pytest.fixture
def wheel_file(tmp_path, monkeypatch):
    """A minimal wheel with one data file, which pip finds by the user's settings."""
    path = tmp_path / "bellmask_testdata-1.0-py3-none-any.whl"
    info = "bellmask_testdata-1.0.dist-info"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("data/text.txt", "hello")
        archive.writestr(f"{info}/METADATA", "Name: bellmask-testdata\nVersion: 1.0\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    return path


def test_a_wheel_is_fetched_once_with_the_users_pip_settings(wheel_file, tmp_path):
    digest = hashlib.sha256(wheel_file.read_bytes()).hexdigest()
    wheel = Wheel("bellmask-testdata", "1.0", digest)
    assert wheel.read("data/text.txt", tmp_path / "cache") == b"hello"
    wheel_file.unlink()
    assert wheel.read("data/text.txt", tmp_path / "cache") == b"hello"
    with pytest.raises(UserError, match="bellmask-testdata"):
        wheel.read("data/none.txt", tmp_path / "cache")


@pytest.mark.parametrize("is_there", [True, pytest.param(False, marks=pytest.mark.long)])
def test_a_wheel_with_the_wrong_hash_or_none_is_refused(wheel_file, tmp_path, is_there):
    if not is_there:
        wheel_file.unlink()
    with pytest.raises(UserError, match="expected 0000" if is_there else "no network"):
        Wheel("bellmask-testdata", "1.0", "0" * 64).fetch(tmp_path / "cache")
    assert not list((tmp_path / "cache" / "wheels").iterdir())
