"""Text that is odd or damaged: read rightly, or refused with one message."""

from __future__ import annotations

import gzip
import io
import random
import sys
import tarfile
import types
from pathlib import Path

import pytest

from bellmask.data import formats, writing
from bellmask.data.corpora import find_policy
from bellmask.data.formats import read_file
from bellmask.data.prepare import parse_mixture, prepare
from bellmask.data.sources import file_source, hub_source, tar_source
from bellmask.data.tokenizer import ByteTokenizer
from bellmask.errors import UserError
from bellmask.options import DataOptions


def texts(path: Path, rule: str = "line", column: str = "text") -> list[str]:
    return [piece.text for piece in read_file(path, rule=rule, column=column)]


def test_files_of_one_name_in_several_folders_all_count(tmp_path: Path) -> None:
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "x.txt").write_text(f"text of {folder}")
    before = file_source(str(tmp_path / "*/x.txt"), rule="file", column="text")
    assert list(before.origin) == ["a/x.txt", "b/x.txt"]
    (tmp_path / "a" / "x.txt").write_text("another")
    after = file_source(str(tmp_path / "*/x.txt"), rule="file", column="text")
    assert before.identity != after.identity


@pytest.mark.parametrize("lost", [3, 5000, 20_000])
def test_a_cut_zst_file_is_noticed(tmp_path: Path, lost: int) -> None:
    zstandard = pytest.importorskip("zstandard")
    draw = random.Random(0)
    text = "".join(chr(draw.randint(32, 126)) for _ in range(60_000)) + "\n"
    whole = zstandard.ZstdCompressor().compress(text.encode())
    path = tmp_path / "x.txt.zst"
    path.write_bytes(whole)
    assert "".join(texts(path, "file")) == text
    path.write_bytes(whole + whole)  # two frames
    assert "".join(texts(path, "file")) == text * 2
    path.write_bytes(whole[:-lost])
    with pytest.raises(UserError, match="truncated or damaged"):
        texts(path, "file")


def test_a_damaged_gz_file_is_refused_or_read_but_never_a_traceback(tmp_path: Path) -> None:
    draw = random.Random(1)
    whole = gzip.compress("\n".join(str(draw.random()) for _ in range(500)).encode())
    path, refused = tmp_path / "x.txt.gz", 0
    for _ in range(150):
        content = bytearray(whole)
        content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
        path.write_bytes(content)
        try:
            texts(path)
        except UserError:
            refused += 1
    assert refused > 100


def test_long_documents_are_not_cut_at_blank_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(formats, "PIECE_CHARACTERS", 1)
    lines = ["a\n", "\n", "b\n", "c \n", "d\n", " e\n", "f\n", "g"]
    pieces = [piece.text for piece in formats.RULES["file"](lines)]
    assert pieces == ["a\n\nb\n", "c \nd\n e\n", "f\n", "g"]


def test_half_a_surrogate_pair_in_json_becomes_a_question_mark(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text('{"text": "x \\ud83d y"}\n')
    assert texts(path) == ["x ? y"]


def test_csv_files_as_people_have_them(tmp_path: Path) -> None:
    path = tmp_path / "x.csv"
    long = "w" * 200_000
    path.write_text(f"\ufefftext,label\nfirst,1\n\n{long},2\n", encoding="utf-8")
    assert texts(path) == ["first", long]


def test_a_tar_without_the_file_and_a_file_that_is_no_tar_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.tar.gz"
    with tarfile.open(path, "w:gz") as tar:
        info = tarfile.TarInfo("other.txt")
        info.size = 2
        tar.addfile(info, io.BytesIO(b"hi"))
    with pytest.raises(UserError, match="holds no file data/enwik8"):
        list(tar_source("enwik8", path, "data/enwik8", rule="file").pieces())
    path.write_bytes(b"not a tar")
    with pytest.raises(UserError, match="truncated or damaged"):
        list(tar_source("enwik8", path, "data/enwik8", rule="file").pieces())


def test_preparing_can_stop_before_the_first_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writing, "RECORD_SECONDS", -1.0)
    monkeypatch.setattr(writing, "BATCH_CHARACTERS", 1)
    (tmp_path / "x.txt").write_text("abc\n" * 30)
    options = DataOptions(
        train=str(tmp_path / "x.txt"), cache=str(tmp_path / "c"), block_length=16, documents="line"
    )

    def stop(documents: int, num_bytes: int, rows: int) -> None:
        if documents == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepare(options, ByteTokenizer(), "train", stop)
    assert len(prepare(options, ByteTokenizer(), "train")) == 30 * 4 // 16


def test_a_folder_without_its_card_is_called_damaged(tmp_path: Path) -> None:
    (tmp_path / "x.txt").write_text("abc\n" * 30)
    options = DataOptions(train=str(tmp_path / "x.txt"), cache=str(tmp_path / "c"), block_length=16)
    prepare(options, ByteTokenizer(), "train")
    (folder,) = (tmp_path / "c" / "blocks").iterdir()
    (folder / "card.json").unlink()
    with pytest.raises(UserError, match="damaged; delete that folder"):
        prepare(options, ByteTokenizer(), "train")


def test_a_mixture_names_each_corpus_once() -> None:
    with pytest.raises(UserError, match="names a twice"):
        parse_mixture(("a=0.3", "a=0.4"))


def test_wrapped_rows_need_room(tmp_path: Path) -> None:
    (tmp_path / "x.txt").write_text("abc\n" * 30)
    options = DataOptions(train="lm1b", from_files=str(tmp_path / "x.txt"), block_length=2)
    with pytest.raises(UserError, match="at least 3"):
        prepare(options, ByteTokenizer(), "train")


def test_the_same_bytes_read_another_way_are_another_source(tmp_path: Path) -> None:
    for name in ("x.txt", "x.jsonl"):
        (tmp_path / name).write_text('{"text": "hello"}\n')
    a, b = (
        file_source(str(tmp_path / n), rule="line", column="text") for n in ("x.txt", "x.jsonl")
    )
    assert a.identity != b.identity


def test_splits_of_one_hub_repository_are_different_sources(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One commit holds both: the split must be part of the identity."""
    info = types.SimpleNamespace(sha="c0ffee")
    api = types.SimpleNamespace(dataset_info=lambda *_, **__: info)
    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace())
    monkeypatch.setitem(sys.modules, "huggingface_hub", types.SimpleNamespace(HfApi=lambda: api))
    places = [("train", None), ("test", None), ("train", "other")]
    found = {
        hub_source("lm1b", "a/b", config, split, column="text", revision=None).identity
        for split, config in places
    }
    assert len(found) == 3


def test_progress_that_the_files_do_not_bear_out_is_forgotten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writing, "RECORD_SECONDS", -1.0)
    monkeypatch.setattr(writing, "BATCH_CHARACTERS", 1)
    (tmp_path / "x.txt").write_text("abcdefgh\n" * 30)
    options = DataOptions(
        train=str(tmp_path / "x.txt"), cache=str(tmp_path / "c"), block_length=16, documents="line"
    )

    def stop(documents: int, num_bytes: int, rows: int) -> None:
        if documents == 20:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepare(options, ByteTokenizer(), "train", stop)
    (scratch,) = (tmp_path / "c" / "blocks").glob(".preparing-*")
    (scratch / "lengths.bin").write_bytes(b"")  # lost in a power cut
    blocks = prepare(options, ByteTokenizer(), "train")
    assert len(blocks) == 30 * 9 // 16
    assert (blocks.lengths == 16).all()
    assert blocks.rows(slice(0, 1))[0, :8].tolist() == list(b"abcdefgh")


def test_a_runs_rows_have_one_shape_whatever_is_measured(tmp_path: Path) -> None:
    owt, plain = DataOptions(train="openwebtext"), DataOptions(train="wikitext2")
    assert find_policy(owt, "ptb").wrap
    assert not find_policy(plain, "lm1b").wrap
    given = DataOptions(train="x.csv", column="body", detokenizer="wikitext")
    assert (find_policy(given, "ptb").column, find_policy(given, "ptb").detokenizer) == (
        "sentence",
        "ptb",
    )
