from __future__ import annotations

import shutil
import zipfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from bellmask.data.batches import BatchPlan, rank_share
from bellmask.data.blocks import load_blocks, prepare
from bellmask.data.corpora import _wikitext_articles
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
    others = [
        options(tmp_path, "hello world " * 9, block_length=4),
        options(tmp_path, "hello world " * 9, wrap=True),
        options(tmp_path, "hello world " * 9, packing="unpacked"),
        options(tmp_path, "hello World " * 9),
    ]
    fingerprints = {first.fingerprint} | {
        prepare(o, BYTES, "train").fingerprint for o in others[:3]
    }
    Path(others[3].train).write_text("hello World " * 9)
    fingerprints.add(prepare(others[3], BYTES, "train").fingerprint)
    assert len(fingerprints) == 5


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
        (b"abc\xff\xfe" * 20, "is not UTF-8 text: byte 3 is 0xff"),
    ],
)
def test_unusable_text_is_refused_and_leaves_nothing(
    tmp_path: Path, text: bytes, message: str
) -> None:
    with pytest.raises(UserError, match=message):
        load_blocks(options(tmp_path, text), BYTES)
    left = list((tmp_path / "cache" / "blocks").glob(".writing-*"))
    assert not left


def test_missing_text_is_named(tmp_path: Path) -> None:
    data = options(tmp_path, "x")
    for name, message in (
        (str(tmp_path / "none*.txt"), "matches no file"),
        (str(tmp_path), "is a folder"),
        ("wikitext3", "did you mean 'wikitext2'"),
    ):
        with pytest.raises(UserError, match=message):
            prepare(replace(data, train=name), BYTES, "train")


def test_an_unwritable_cache_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    data = options(tmp_path, "hello" * 9, cache=str(tmp_path / "file" / "cache"))
    with pytest.raises(UserError, match="cannot write the data cache"):
        prepare(data, BYTES, "train")


@pytest.mark.parametrize("name", ["tokens.bin", "lengths.bin", "documents.bin", "card.json"])
def test_a_damaged_cache_is_noticed(tmp_path: Path, name: str) -> None:
    data = options(tmp_path, "hello world " * 9)
    prepare(data, BYTES, "train")
    (folder,) = (tmp_path / "cache" / "blocks").iterdir()
    content = (folder / name).read_bytes()
    (folder / name).write_bytes(content[: len(content) // 2])
    with pytest.raises(UserError, match="damaged; delete that folder"):
        prepare(data, BYTES, "train")
    shutil.rmtree(folder)
    assert len(prepare(data, BYTES, "train")) == 13


def test_an_epoch_is_a_permutation_and_batches_may_span_epochs() -> None:
    plan = BatchPlan(num_blocks=10, batch_size=25, seed=1)
    rows = torch.cat([plan.rows(s) for s in range(4)]).reshape(10, 10)
    assert all(sorted(epoch.tolist()) == list(range(10)) for epoch in rows)
    assert len({tuple(epoch.tolist()) for epoch in rows}) == 10
    assert torch.equal(plan.rows(2), plan.rows(2))
    other = BatchPlan(10, 25, seed=2).rows(0)
    assert not torch.equal(plan.rows(0), other)


def test_ranks_share_the_batch_without_overlap() -> None:
    shares = [rank_share(12, r, 3) for r in range(3)]
    assert [i for share in shares for i in share] == list(range(12))


def test_wikitext_articles_start_at_first_level_headings() -> None:
    text = " \n = One = \n \n a \n = = Part = = \n b \n \n = Two = \n c \n"
    articles = list(_wikitext_articles(text))
    assert "".join(articles) == text
    assert [a.split("=")[1].strip() for a in articles] == ["One", "Two"]


def make_wheel(folder: Path) -> tuple[Path, str]:
    """A minimal wheel with one data file, and its hash."""
    import hashlib

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


def test_bytes_of_text_are_counted_without_eos(tmp_path: Path) -> None:
    blocks = prepare(options(tmp_path, "äb\ncde\n" * 40, documents="line"), BYTES, "train")
    # a pair of lines has 6 bytes of text and 8 tokens
    assert blocks.num_bytes == pytest.approx(len(blocks) * 8 * 6 / 8)
    assert blocks.slice(0, 5).num_bytes == pytest.approx(5 * 6)


def test_tokens_are_stored_small(tmp_path: Path) -> None:
    blocks = prepare(options(tmp_path, "hello world " * 9), BYTES, "train")
    assert isinstance(blocks.tokens, np.memmap)
    assert blocks.tokens.dtype == np.uint16
