"""Sources know what they are before they are read; named corpora, their rules and splits."""

from __future__ import annotations

import gzip
import io
import sys
import tarfile
from dataclasses import replace

import pytest

from bellmask.config.options import DataOptions
from bellmask.data.corpora import (
    CORPORA,
    Corpus,
    find_policy,
    has_split,
    open_corpus,
)
from bellmask.data.prepare import load_blocks
from bellmask.data.readers import HubSplit, file_source, hub_address, hub_source
from bellmask.data.tokenizers import ByteTokenizer
from bellmask.utils.errors import UserError

BYTES = ByteTokenizer()


def texts(source):
    return [piece.text for piece in source.read()]


def lines_of(pattern):
    return file_source(str(pattern), rule="line", column="text")


def write(folder, **files):
    """``write(folder, a="text of a.txt")``."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / f"{name}.txt").write_text(text)


def test_files_are_read_in_name_order_and_known_by_content_order_and_kind(tmp_path, monkeypatch):
    write(tmp_path / "deep" / "x", b="b one\nb two\n", a="a one\n", c10="c10\n", c9="c9\n")
    write(tmp_path / "deep" / "y", a="b one\nb two\n", b="a one\n")
    source = lines_of(tmp_path / "deep" / "x" / "*")
    assert texts(source) == texts(source) == ["a one", "b one", "b two", "c10", "c9"]
    assert list(source.origin) == ["a.txt", "b.txt", "c10.txt", "c9.txt"]
    assert list(lines_of(tmp_path / "**" / "a.txt").origin) == ["x/a.txt", "y/a.txt"]
    (tmp_path / "a.jsonl").write_text("a one\n")
    names = ("deep/x/a.txt", "deep/y/b.txt", "deep/x/[ab]*", "deep/y/*", "a.jsonl")
    a, same, *others = (lines_of(tmp_path / name).identity for name in names)
    assert a == same
    assert len({a, *others}) == 4
    (tmp_path / "x[1].txt").write_text("b")
    assert texts(lines_of(tmp_path / "x[1].txt")) == ["b"], "brackets may be a name"
    assert hub_address("owner/name") is None
    (tmp_path / "hub:owner" / "name").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert hub_address("hub:owner/name") is None, "a path"


def test_enwik8_is_read_from_the_archive_that_holds_it(tmp_path):
    path = tmp_path / "mingru_pytorch-0.2.1.tar.gz"
    data, text = DataOptions(train="enwik8", from_files=str(path)), "<page>\n  Ünder\n</page>\n"
    for name, words in (("enwik8.gz", None), ("other.gz", "holds no file.*enwik8")):
        content = gzip.compress(text.encode())
        with tarfile.open(path, "w:gz") as archive:
            info = tarfile.TarInfo(f"mingru_pytorch-0.2.1/data/{name}")
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
        source, _ = open_corpus(data, "train", tmp_path)
        if words is None:
            assert texts(source) == [text]
        else:
            with pytest.raises(UserError, match=words):
                texts(source)
    path.write_bytes(path.read_bytes()[:50])
    with pytest.raises(UserError, match=r"mingru.*\.tar\.gz is truncated or damaged"):
        texts(open_corpus(data, "train", tmp_path)[0])


# --- the hub ---------------------------------------------------------------------------------


def open_hub(config="conf", split="train", column="text", lines=False):
    part = HubSplit("owner/set", split, config, "branch", lines)
    return hub_source("name", part, rule="article", column=column)


def test_hub_rows_are_documents_at_the_commit_that_is_the_identity(hub):
    hub.rows = [{"text": "one"}, {"text": ""}, {"text": "two\nlines"}]
    source = open_hub()
    assert hub.asked == [], "known before any row is read"
    assert texts(source) == texts(source) == ["one", "", "two\nlines"]
    assert hub.asked == [("owner/set", "conf", "train", "c0ffee")] * 2
    hub.commit = "decade"
    assert open_hub().identity != source.identity


def test_a_hub_that_fails_gives_advice_in_one_line(hub, monkeypatch):
    hub.rows = [{"body": "a", "n": 3}]
    for column in ("text", "n"):
        with pytest.raises(UserError, match=f"column '{column}'"):
            texts(open_hub(column=column))
    errors = {"not known": ConnectionError("not known\nmore"), "RuntimeError": RuntimeError()}
    for word, hub.error in errors.items():
        with pytest.raises(UserError, match=rf"owner/set.*{word}.*--from PATH") as caught:
            open_hub()
        assert "\n" not in str(caught.value)
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(UserError, match=r"bellmask\[text\]"):
        open_hub()


# --- named corpora ---------------------------------------------------------------------------


def test_options_override_a_corpus_and_auto_does_not():
    def rules(data, name):
        found = find_policy(data, name)
        return (found.documents, found.column, found.detokenizer, found.wrap, found.insert_eos)

    lm1b, own = DataOptions(train="lm1b"), ("paragraph", "body", "none", False, False)
    assert rules(lm1b, "lm1b") == ("line", "text", "lm1b", True, True)
    names = ("documents", "column", "detokenizer", "wrap", "insert_eos")
    assert rules(replace(lm1b, **dict(zip(names, own))), "lm1b") == own
    # rows of a run have one shape; another corpus is read by its own rules
    assert rules(DataOptions(train="openwebtext"), "ptb")[3]
    assert not rules(DataOptions(train="wikitext2"), "lm1b")[3]
    given = DataOptions(train="x.csv", column="body", detokenizer="wikitext")
    assert rules(given, "ptb")[1:3] == ("sentence", "ptb")
    assert rules(DataOptions(train="a.txt"), "a.txt") == ("file", "text", "none", False, True)
    for name, more, splits in (
        ("wikitext2", {}, [True, True]),
        ("openwebtext", {"from_files": "a.txt"}, [True, True]),
        ("fineweb_edu", {}, [True, False]),
        ("lambada", {}, [False, True]),
        ("lm1b", {"from_files": "a.txt"}, [True, False]),
        ("a.txt", {}, [True, False]),
    ):
        data = DataOptions(train=name, **more)
        assert [has_split(data, split) for split in ("train", "valid")] == splits, name


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("tinystory", "'tinystory'.*'tinystories'"),
        ("none/a.txt", "none/a.txt"),
        ("lambada", "'lambada'.*--data.from"),
        ("enwik8", r"'enwik8'.*mingru_pytorch.*--data.from"),
        ("x.tar.gz", r"x\.tar\.gz.*unpack"),
        ("toy:sticky", "toy:sticky has no text"),
        ("imported", "--data TEXT"),
    ],
)
def test_names_that_lead_nowhere_are_refused(tmp_path, name, words):
    with pytest.raises(UserError, match=words):
        open_corpus(DataOptions(train=name), "train", tmp_path)


@pytest.mark.parametrize("count", [4, 25])
def test_the_last_documents_of_local_files_are_held_out(monkeypatch, tmp_path, count):
    small = Corpus("Small", "none", {"train": HubSplit("me/small", "train")}, holdout=3)
    monkeypatch.setitem(CORPORA, "small", small)
    documents = [f"document number {i:04d}" for i in range(count)]
    write(tmp_path, a="\n".join(documents[:2]), b="\n".join(documents[2:]))
    options = {"block_length": 24, "packing": "unpacked", "cache": str(tmp_path / "cache")}
    data = DataOptions(train="small", from_files=str(tmp_path / "*.txt"), **options)
    parts = load_blocks(data, BYTES)
    rows = [[BYTES.decode(row) for row in part.rows(slice(None)).numpy()] for part in parts]
    assert rows == [documents[:-3], documents[-3:]]
    write(tmp_path, a="a\nb\n", b="c\n")
    with pytest.raises(UserError, match=r"3 documents.*--data\.valid"):
        open_corpus(data, "train", tmp_path)
