"""Blocks on disk and in memory, and the wheels that data comes in."""

from __future__ import annotations

import hashlib
import json
import shutil
import zipfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bellmask.data import blocks as blocks_module
from bellmask.data.blocks import Blocks, ShardedTokens, join, read_card
from bellmask.data.packing import Row
from bellmask.data.prepare import load_blocks, prepare
from bellmask.data.tokenizer import ByteTokenizer
from bellmask.data.wheels import Wheel
from bellmask.errors import UserError
from bellmask.options import DataOptions

BYTES = ByteTokenizer()


def options(tmp_path: Path, text: str | bytes, **changes: object) -> DataOptions:
    path = tmp_path / "text.txt"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    base = DataOptions(train=str(path), block_length=8, cache=str(tmp_path / "cache"))
    return replace(base, **changes)  # type: ignore[arg-type]


def only_folder(tmp_path: Path) -> Path:
    """The one folder of prepared blocks."""
    (folder,) = (p for p in (tmp_path / "cache" / "blocks").iterdir() if p.is_dir())
    return folder


def test_blocks_hold_the_text_and_know_their_documents(tmp_path: Path) -> None:
    blocks = prepare(options(tmp_path, "abc\ndefgh\n\nij" * 3, documents="line"), BYTES, "train")
    ids = blocks.rows(slice(None)).flatten().tolist()
    lines = [line for line in ("abc\ndefgh\n\nij" * 3).splitlines() if line.strip()]
    stream = [token for line in lines for token in [*line.encode(), BYTES.eos_id]]
    assert ids == stream[: len(ids)]
    assert len(stream) - len(ids) < 8
    assert blocks.documents[0] == 0
    assert not blocks.is_padded


def test_documents_are_files_lines_or_paragraphs(tmp_path: Path) -> None:
    counts = {}
    for rule in ("file", "line", "paragraph"):
        data = options(tmp_path, "a b\nc\n\nd e f g h\n", documents=rule, packing="unpacked")
        counts[rule] = len(prepare(data, BYTES, "train"))
    assert counts == {"file": 1, "line": 3, "paragraph": 2}


def test_a_cached_copy_is_used_and_a_change_is_noticed(tmp_path: Path) -> None:
    data = options(tmp_path, "hello world " * 9)
    first = prepare(data, BYTES, "train")
    folders = set((tmp_path / "cache" / "blocks").iterdir())
    assert prepare(data, BYTES, "train").fingerprint == first.fingerprint
    assert set((tmp_path / "cache" / "blocks").iterdir()) == folders
    changed = prepare(options(tmp_path, "hello World " * 9), BYTES, "train")
    assert changed.fingerprint != first.fingerprint


def test_validation_is_the_end_of_the_text_where_none_is_given(tmp_path: Path) -> None:
    text = "".join(chr(97 + i % 26) for i in range(800))
    train, valid = load_blocks(options(tmp_path, text, valid_fraction=0.25), BYTES)
    assert (len(train), len(valid)) == (75, 25)
    joined = torch.cat([train.rows(slice(None)), valid.rows(slice(None))]).flatten()
    assert BYTES.decode(joined.numpy()) == text
    assert train.fingerprint != valid.fingerprint
    own, other = load_blocks(options(tmp_path, text, valid=str(tmp_path / "text.txt")), BYTES)
    assert len(own) == len(other) == 100


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"", "shorter than one block"),
        (b"abc", "shorter than one block"),
        (b"abcdefghijk", "too few to hold some out"),
        (b"abc\xff\xfe" * 20, "is not UTF-8 text: it holds the byte 0xff"),
    ],
)
def test_unusable_text_is_refused_and_leaves_nothing(
    tmp_path: Path, text: bytes, message: str
) -> None:
    with pytest.raises(UserError, match=message):
        load_blocks(options(tmp_path, text), BYTES)
    left = [p for p in (tmp_path / "cache" / "blocks").iterdir() if p.is_dir()]
    assert len(left) == ("hold some out" in message), "blocks that are too few are still blocks"
    assert not list((tmp_path / "cache" / "blocks").glob(".preparing-*"))


def test_missing_text_is_named(tmp_path: Path) -> None:
    data = options(tmp_path, "x")
    for name, message in (
        (str(tmp_path / "none*.txt"), "no file"),
        (str(tmp_path), "is a folder"),
        ("wikitext3", "did you mean .*'wikitext2'"),
    ):
        with pytest.raises(UserError, match=message):
            prepare(replace(data, train=name), BYTES, "train")


def test_an_unwritable_cache_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    data = options(tmp_path, "hello" * 9, cache=str(tmp_path / "file" / "cache"))
    with pytest.raises(UserError, match="cannot write the data cache"):
        prepare(data, BYTES, "train")


@pytest.mark.parametrize("name", ["tokens-00000.bin", "lengths.bin", "documents.bin", "card.json"])
def test_a_damaged_cache_is_noticed(tmp_path: Path, name: str) -> None:
    data = options(tmp_path, "hello world " * 9)
    prepare(data, BYTES, "train")
    folder = only_folder(tmp_path)
    content = (folder / name).read_bytes()
    (folder / name).write_bytes(content[: len(content) // 2])
    with pytest.raises(UserError, match="damaged; delete that folder"):
        prepare(data, BYTES, "train")
    shutil.rmtree(folder)
    assert len(prepare(data, BYTES, "train")) == 13


def test_bytes_of_text_are_counted_without_eos(tmp_path: Path) -> None:
    blocks = prepare(options(tmp_path, "äb\ncde\n" * 40, documents="line"), BYTES, "train")
    # a pair of lines has 6 bytes of text and 8 tokens
    assert blocks.num_bytes == pytest.approx(len(blocks) * 8 * 6 / 8)
    assert blocks.slice(0, 5).num_bytes == pytest.approx(5 * 6)


def test_tokens_are_stored_small_and_mapped(tmp_path: Path) -> None:
    blocks = prepare(options(tmp_path, "hello world " * 9), BYTES, "train")
    assert isinstance(blocks.tokens, ShardedTokens)
    assert all(isinstance(shard, np.memmap) for shard in blocks.tokens.arrays())
    assert blocks.tokens.dtype == np.uint16
    assert (only_folder(tmp_path) / "tokens-00000.bin").stat().st_size == len(blocks) * 8 * 2


def test_the_card_says_how_the_blocks_came_about(tmp_path: Path) -> None:
    data = options(tmp_path, "abc\ndefgh\nij\n", documents="line", wrap=True, remainder="keep")
    blocks = prepare(data, BYTES, "train")
    card = read_card(only_folder(tmp_path))
    stream = len("abcdefghij") + 3
    expected = {
        "fingerprint": blocks.fingerprint,
        "num_documents": 3,
        "num_blocks": 3,
        "block_length": 8,
        "num_tokens": stream + 3 * 2,
        "text_bytes": 10,
        "text_tokens": stream,
        "num_bytes": 10,
        "documents": "line",
        "packing": "packed",
        "wrap": True,
        "insert_eos": True,
        "remainder": "keep",
        "tokenizer_fingerprint": BYTES.fingerprint,
        "origin": {"text.txt": hashlib.sha256(b"abc\ndefgh\nij\n").hexdigest()},
    }
    assert {name: card[name] for name in expected} == expected


@pytest.mark.parametrize("damage", ["shard removed", "shard too long", "card of other blocks"])
def test_a_cache_that_does_not_fit_its_card_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: str
) -> None:
    monkeypatch.setattr(blocks_module, "TOKENS_PER_SHARD", 40)
    data = options(tmp_path, "hello world " * 9)
    prepare(data, BYTES, "train")
    folder = only_folder(tmp_path)
    if damage == "shard removed":
        (folder / "tokens-00001.bin").unlink()
    elif damage == "shard too long":
        with (folder / "tokens-00000.bin").open("ab") as stream:
            stream.write(bytes(16))
    else:
        card = json.loads((folder / "card.json").read_text())
        (folder / "card.json").write_text(json.dumps(card | {"fingerprint": "0" * 64}))
    with pytest.raises(UserError, match="damaged; delete that folder"):
        prepare(data, BYTES, "train")


# --- rows over several arrays ----------------------------------------------------------------

sizes_strategy = st.lists(st.integers(1, 6), min_size=1, max_size=5)


def sharded(sizes: list[int]) -> tuple[ShardedTokens, np.ndarray]:
    """Rows over several arrays, and the same rows in one."""
    whole = np.arange(sum(sizes) * 3, dtype=np.uint16).reshape(-1, 3)
    return ShardedTokens(np.split(whole, np.cumsum(sizes)[:-1])), whole


@settings(deadline=None, derandomize=True)
@given(sizes_strategy, st.data())
def test_sharded_rows_are_indexed_like_one_array(sizes: list[int], data: st.DataObject) -> None:
    tokens, whole = sharded(sizes)
    index = np.array(data.draw(st.lists(st.integers(0, len(whole) - 1), max_size=9)), dtype=int)
    assert tokens.shape == whole.shape
    np.testing.assert_array_equal(tokens[index], whole[index])
    start, stop = sorted(data.draw(st.tuples(*[st.integers(0, len(whole))] * 2)))
    np.testing.assert_array_equal(tokens[start:stop], whole[start:stop])
    part = tokens.part(start, stop)
    np.testing.assert_array_equal(np.asarray(part), whole[start:stop])
    np.testing.assert_array_equal(np.concatenate([whole[:0], *part.arrays()]), whole[start:stop])
    inner = part.part(0, len(part) // 2)
    np.testing.assert_array_equal(np.asarray(inner), whole[start:stop][: len(part) // 2])


def test_shards_read_the_same_as_one_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "".join(chr(97 + i % 26) for i in range(800))
    one = prepare(options(tmp_path, text), BYTES, "train")
    monkeypatch.setattr(blocks_module, "TOKENS_PER_SHARD", 100)
    many = prepare(options(tmp_path, text, cache=str(tmp_path / "other")), BYTES, "train")
    assert isinstance(many.tokens, ShardedTokens)
    assert len(many.tokens.arrays()) == 9, "12 rows of 8 in each file, 100 rows"
    assert one.fingerprint == many.fingerprint
    index = torch.tensor([99, 0, 50, 11, 12, 50])
    assert torch.equal(one.rows(slice(None)), many.rows(slice(None)))
    assert torch.equal(one.rows(index), many.rows(index))
    assert torch.equal(one.slice(7, 60).rows(index[2:5]), many.slice(7, 60).rows(index[2:5]))


def in_memory(first: int, count: int, length: int = 4) -> Blocks:
    rows = [Row(np.full(length, first + i), length - i % 2, i) for i in range(count)]
    return Blocks.from_rows(rows, num_bytes=float(count))


def test_joined_blocks_are_one_after_another(tmp_path: Path) -> None:
    a, b = in_memory(10, 3), in_memory(20, 5)
    text = "".join(chr(97 + i % 26) for i in range(80))
    c = prepare(options(tmp_path, text, block_length=4), BYTES, "train").slice(3, 9)
    joined = join([a, b, c])
    expected = [part.rows(slice(None)) for part in (a, b, c)]
    assert torch.equal(joined.rows(slice(None)), torch.cat(expected))
    assert joined.lengths.tolist() == [*a.lengths, *b.lengths, *c.lengths]
    assert joined.documents.tolist() == [*a.documents, *b.documents, *c.documents]
    assert joined.num_bytes == pytest.approx(a.num_bytes + b.num_bytes + c.num_bytes)
    assert torch.equal(joined.slice(2, 5).rows(slice(None)), torch.cat(expected)[2:5])
    assert joined.is_padded
    others = {join(parts).fingerprint for parts in ([a, b], [b, a], [a], [a, b, c])}
    assert len(others) == 4


def test_only_blocks_of_one_length_are_joined() -> None:
    with pytest.raises(ValueError, match="one length"):
        join([in_memory(0, 2), in_memory(0, 2, length=5)])


def test_slices_know_which_rows_they_are() -> None:
    blocks = in_memory(0, 6)
    assert blocks.slice(0, 3).fingerprint != blocks.slice(3, 6).fingerprint
    assert blocks.slice(0, 3).fingerprint == blocks.slice(0, 3).fingerprint
    halves = [blocks.slice(0, 3), blocks.slice(3, 6)]
    assert sum(half.num_bytes for half in halves) == pytest.approx(blocks.num_bytes)


# --- wheels ----------------------------------------------------------------------------------


def make_wheel(folder: Path) -> tuple[Path, str]:
    """A minimal wheel with one data file, and its hash."""
    path = folder / "bellmask_testdata-1.0-py3-none-any.whl"
    info = "bellmask_testdata-1.0.dist-info"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("data/text.txt", "hello")
        archive.writestr(f"{info}/METADATA", "Name: bellmask-testdata\nVersion: 1.0\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return path, hashlib.sha256(path.read_bytes()).hexdigest()


def test_a_wheel_is_fetched_once_with_the_users_pip_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, digest = make_wheel(tmp_path)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    wheel = Wheel("bellmask-testdata", "1.0", digest)
    assert wheel.read("data/text.txt", tmp_path / "cache") == b"hello"
    path.unlink()
    assert wheel.read("data/text.txt", tmp_path / "cache") == b"hello"
    with pytest.raises(UserError, match="is damaged"):
        wheel.read("data/none.txt", tmp_path / "cache")


def test_a_wheel_with_the_wrong_hash_is_refused_and_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_wheel(tmp_path)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    wheel = Wheel("bellmask-testdata", "1.0", "0" * 64)
    with pytest.raises(UserError, match="expected 0000"):
        wheel.fetch(tmp_path / "cache")
    assert not list((tmp_path / "cache" / "wheels").iterdir())


def test_no_network_gives_advice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    wheel = Wheel("bellmask-testdata", "1.0", "0" * 64)
    with pytest.raises(UserError, match=r"no network, or not on your package index.*save it as"):
        wheel.fetch(tmp_path / "cache")
