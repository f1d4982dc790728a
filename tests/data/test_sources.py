"""Sources know what they are before they are read; named corpora, their rules and splits."""

from __future__ import annotations

import gzip
import io
import sys
import tarfile
import types
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bellmask.config.options import DataOptions
from bellmask.data import corpora
from bellmask.data import readers as sources
from bellmask.data.corpora import (
    CORPORA,
    Corpus,
    HubSplit,
    find_policy,
    has_split,
    open_corpus,
)
from bellmask.data.detokenize import DETOKENIZERS
from bellmask.data.prepare import load_blocks, prepare
from bellmask.data.readers import DOCUMENT_RULES, Piece
from bellmask.data.tokenizers import ByteTokenizer
from bellmask.utils.errors import UserError

BYTES = ByteTokenizer()


def texts(source):
    return [piece.text for piece in source.read()]


def lines_of(pattern):
    return sources.file_source(str(pattern), rule="line", column="text")


def write(folder, **files):
    """``write(folder, a="text of a.txt")``."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / f"{name}.txt").write_text(text)


# --- local files -----------------------------------------------------------------------------


def test_files_of_all_formats_are_read_in_name_order_any_number_of_times(tmp_path):
    write(tmp_path, b="b one\nb two\n", a="a one\n", c10="c10\n", c9="c9\n")
    (tmp_path / "d.jsonl").write_text('{"text": "d"}\n')
    (tmp_path / "e.txt.gz").write_bytes(gzip.compress(b"e\n"))
    source = lines_of(tmp_path / "*")
    assert texts(source) == texts(source) == ["a one", "b one", "b two", "c10", "c9", "d", "e"]
    assert len(texts(source)) == 7
    assert list(source.origin)[2:4] == ["c10.txt", "c9.txt"]


def test_identity_is_content_order_and_kind_not_the_path(tmp_path):
    write(tmp_path, a="same", b="same", c="other", d="same\n")
    ids = {name: lines_of(tmp_path / f"{name}.txt").identity for name in "abcd"}
    assert ids["a"] == ids["b"]
    assert len(set(ids.values())) == 3
    both = lines_of(tmp_path / "[ac].txt").identity
    assert both == lines_of(tmp_path / "[bc].txt").identity not in ids.values()
    write(tmp_path / "x", a="other", b="same")
    write(tmp_path / "y", a="same", b="other")
    assert lines_of(tmp_path / "x/*").identity != lines_of(tmp_path / "y/*").identity == both
    (tmp_path / "a.jsonl").write_text("same")
    assert lines_of(tmp_path / "a.jsonl").identity != ids["a"], "read in another way"
    before = lines_of(tmp_path / "?" / "a.txt")
    assert list(before.origin) == ["x/a.txt", "y/a.txt"]
    write(tmp_path / "x", a="another")
    assert lines_of(tmp_path / "?" / "a.txt").identity != before.identity


def test_globs_go_into_folders_and_brackets_may_be_a_name(tmp_path, monkeypatch):
    write(tmp_path / "deep" / "er", a="a")
    (tmp_path / "x[1].txt").write_text("b")
    assert [p.name for p in sources.find_files(str(tmp_path / "**" / "a.txt"))] == ["a.txt"]
    assert [p.name for p in sources.find_files(str(tmp_path / "x[1].txt"))] == ["x[1].txt"]
    assert sources.hub_address("hub:owner/name") == ("owner/name", None, "train")
    assert sources.hub_address("owner/name") is None
    (tmp_path / "hub:owner" / "name").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert sources.hub_address("hub:owner/name") is None, "a path"


@settings(deadline=None, derandomize=True, max_examples=60)
@given(
    st.lists(st.lists(st.text(max_size=2), min_size=1, max_size=3), max_size=8),
    st.integers(0, 9),
    st.none() | st.integers(0, 9),
)
def test_documents_are_kept_whole_by_number(documents, start, stop):
    def pieces_of(some):
        return [Piece(part, i == len(d) - 1) for d in some for i, part in enumerate(d)]

    kept = list(corpora.documents_kept(iter(pieces_of(documents)), start, stop))
    assert kept == pieces_of(documents[start:stop])


def test_nothing_is_read_after_the_last_document_kept():
    def endless():
        yield from (Piece("a"), Piece("b"), Piece("c"))
        raise AssertionError("read too far")

    assert [p.text for p in corpora.documents_kept(endless(), 0, 2)] == ["a", "b"]


def make_archive(path, members):
    with tarfile.open(path, "w:gz") as archive:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return path


def test_one_file_of_an_archive_is_read_unzipped_too(tmp_path):
    members = {"pkg/a.txt": b"one\ntwo\n", "pkg/b.gz": gzip.compress(b"three\n")}
    archive = make_archive(tmp_path / "pkg.tar.gz", members)

    def opened(member, path=archive):
        return sources.tar_source("pkg", path, member, rule="line")

    assert texts(opened("pkg/a.txt")) == ["one", "two"]
    assert texts(opened("pkg/b.gz")) == ["three"]
    other = make_archive(tmp_path / "other.tar.gz", {"pkg/a.txt": b"one\n"})
    assert opened("pkg/a.txt", other).identity != opened("pkg/a.txt").identity
    with pytest.raises(UserError, match="pkg/none"):
        texts(opened("pkg/none"))
    for damaged in (archive.read_bytes()[:50], b"not a tar"):
        archive.write_bytes(damaged)
        with pytest.raises(UserError, match=r"pkg\.tar\.gz is truncated or damaged"):
            texts(opened("pkg/a.txt"))


# --- the hub ---------------------------------------------------------------------------------


def open_hub(config="conf", split="train", column="text", line_rule=None):
    more = {"column": column, "revision": "branch", "line_rule": line_rule}
    return sources.hub_source("name", "owner/set", config, split, **more)


def test_hub_rows_are_documents_at_the_commit_that_is_the_identity(hub, monkeypatch):
    asked = []

    def info(repository, revision):
        asked.append((repository, revision))
        return types.SimpleNamespace(sha=hub.commit)

    monkeypatch.setattr(hub, "dataset_info", info)
    hub.rows = [{"text": "one"}, {"text": ""}, {"text": "two\nlines"}]
    source = open_hub()
    assert (asked, hub.asked) == ([("owner/set", "branch")], []), "known before any row is read"
    assert texts(source) == texts(source) == ["one", "", "two\nlines"]
    assert hub.asked == [("owner/set", "conf", "train", "c0ffee")] * 2
    assert source.origin == {"owner/set/conf/train": "c0ffee"}
    assert open_hub().identity == source.identity
    others = [open_hub(split="test"), open_hub("other"), open_hub(line_rule="article")]
    hub.commit = "decade"
    assert len({one.identity for one in (source, *others, open_hub())}) == 5
    rows = ["", " = One = \n", "", " a \n", " = = Part = = \n", " = Two = \n", " b \n"]
    hub.rows = [{"text": row} for row in rows]
    articles = [" = One = \n a \n = = Part = = \n", " = Two = \n b \n"]
    assert texts(open_hub(line_rule="article")) == articles


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


def corpus_texts(data, split, cache):
    return texts(open_corpus(data, split, cache)[0])


def test_every_corpus_names_rules_that_exist_and_the_papers_are_those_published():
    for corpus in CORPORA.values():
        assert corpus.documents in DOCUMENT_RULES
        assert corpus.detokenizer in DETOKENIZERS
        assert set(corpus.splits) <= {"train", "valid"}
        assert corpus.splits or corpus.note, "a corpus that cannot be fetched says what to do"
        assert corpus.title
        assert corpus.licence
    lm1b, owt = CORPORA["lm1b"], CORPORA["openwebtext"]
    assert (lm1b.detokenizer, lm1b.wrap, lm1b.insert_eos) == ("lm1b", True, True)
    assert lm1b.splits["valid"].split == "test"
    assert (owt.detokenizer, owt.wrap, owt.holdout) == ("none", True, 100_000)
    assert [n for n, c in CORPORA.items() if not c.insert_eos] == ["text8", "enwik8"]


def test_every_split_on_the_hub_can_be_asked_for(hub, tmp_path):
    columns = ("text", "sentence", "article")
    for name, corpus in CORPORA.items():
        for split, part in corpus.splits.items():
            if isinstance(part, HubSplit) and not corpus.holdout:
                hub.rows = [dict.fromkeys(columns, f"{name} {split}\n")]
                assert corpus_texts(DataOptions(train=name), split, tmp_path) == [
                    f"{name} {split}\n"
                ]
                assert hub.asked[-1][:3] == (part.repository, part.config, part.split)
    hub.rows = [{"text": "a"}]
    for name, place in {
        "hub:me/set": ("me/set", None, "train"),
        "hub:me/set:conf": ("me/set", "conf", "train"),
        "hub:me/set:conf:test": ("me/set", "conf", "test"),
    }.items():
        assert corpus_texts(DataOptions(train=name), "train", tmp_path) == ["a"]
        assert hub.asked[-1][:3] == place


def test_options_override_a_corpus_and_auto_does_not(tmp_path):
    def rules(data, name):
        found = find_policy(data, name)
        return (found.documents, found.column, found.detokenizer, found.wrap, found.insert_eos)

    lm1b, own = DataOptions(train="lm1b"), ("paragraph", "body", "none", False, False)
    assert rules(lm1b, "lm1b") == ("line", "text", "lm1b", True, True)
    names = ("documents", "column", "detokenizer", "wrap", "insert_eos")
    assert rules(replace(lm1b, **dict(zip(names, own))), "lm1b") == own
    # rows of a run have one shape whatever is measured; another corpus is read by its own rules
    assert rules(DataOptions(train="openwebtext"), "ptb")[3]
    assert not rules(DataOptions(train="wikitext2"), "lm1b")[3]
    given = DataOptions(train="x.csv", column="body", detokenizer="wikitext")
    assert rules(given, "ptb")[1:3] == ("sentence", "ptb")
    write(tmp_path, a="it 's one\ntwo\n")
    path = str(tmp_path / "a.txt")
    assert rules(DataOptions(train=path), path) == ("file", "text", "none", False, True)
    assert corpus_texts(DataOptions(train=path), "train", tmp_path) == ["it 's one\ntwo\n"]
    stands_for = replace(lm1b, from_files=path)
    assert corpus_texts(stands_for, "train", tmp_path) == ["it 's one", "two"]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("tinystory", "'tinystory'.*'tinystories'"),
        ("none/a.txt", "none/a.txt"),
        ("lambada", "'lambada'.*--data.from"),
        ("enwik8", r"'enwik8'.*mingru_pytorch.*--data.from"),
        ("x.tar.gz", r"x\.tar\.gz.*unpack"),
    ],
)
def test_names_that_lead_nowhere_are_refused(tmp_path, name, words):
    with pytest.raises(UserError, match=words):
        open_corpus(DataOptions(train=name), "train", tmp_path)


def test_enwik8_is_read_from_the_archive_that_holds_it(tmp_path):
    text = "<page>\n  Ünder\n</page>\n"
    members = {"mingru_pytorch-0.2.1/data/enwik8.gz": gzip.compress(text.encode())}
    path = make_archive(tmp_path / "mingru_pytorch-0.2.1.tar.gz", members)
    data = DataOptions(train="enwik8", from_files=str(path))
    assert corpus_texts(data, "train", tmp_path) == [text]


# --- validation ------------------------------------------------------------------------------


@pytest.fixture
def held_out(monkeypatch):
    """A small corpus without a validation split: its last three documents are held out."""
    splits = {"train": HubSplit("me/small", "train")}
    small = Corpus("Small", "none", splits, holdout=3, num_documents=10)
    monkeypatch.setitem(corpora.CORPORA, "small", small)
    return DataOptions(train="small", block_length=24, packing="unpacked")


def test_the_last_documents_are_validation(held_out, hub, tmp_path):
    documents = [f"document number {i}" for i in range(10)]
    hub.rows = [{"text": text} for text in documents]
    assert has_split(held_out, "valid")
    assert corpus_texts(held_out, "train", tmp_path) == documents[:7]
    assert corpus_texts(held_out, "valid", tmp_path) == documents[7:]


@pytest.mark.parametrize("count", [4, 10, 25])
def test_the_last_documents_of_local_files_are_counted(held_out, tmp_path, count):
    documents = [f"document number {i:04d}" for i in range(count)]
    half = count // 2
    write(tmp_path, a="\n".join(documents[:half]), b="\n".join(documents[half:]))
    data = replace(held_out, from_files=str(tmp_path / "*.txt"), cache=str(tmp_path / "cache"))
    parts = load_blocks(data, BYTES)
    rows = [[BYTES.decode(row) for row in part.rows(slice(None)).numpy()] for part in parts]
    assert rows == [documents[:-3], documents[-3:]]
    assert parts[0].fingerprint != parts[1].fingerprint
    write(tmp_path, a="a\nb\n", b="c\n")
    with pytest.raises(UserError, match=r"3 documents.*--data\.valid"):
        open_corpus(data, "train", tmp_path)


def test_has_split_is_what_a_corpus_brings():
    def brings(**options):
        return [has_split(DataOptions(**options), split) for split in ("train", "valid")]

    assert brings(train="wikitext2") == brings(train="openwebtext") == [True, True]
    assert brings(train="fineweb_edu") == brings(train="a.txt") == [True, False]
    assert brings(train="lambada") == [False, True]
    assert brings(train="enwik8") == [False, False]
    assert brings(train="lm1b", from_files="a.txt") == [True, False]


def test_validation_text_of_its_own_is_read_by_its_own_rules(hub, tmp_path):
    write(tmp_path, a="one\ntwo\n" * 20)
    hub.rows = [{"sentence": "it 's N"}, {"sentence": "<unk>"}]
    rules = {"block_length": 8, "packing": "unpacked", "cache": str(tmp_path / "cache")}
    data = DataOptions(train=str(tmp_path / "a.txt"), valid="ptb", **rules)
    rows = prepare(data, BYTES, "valid").rows(slice(None)).numpy()
    assert [BYTES.decode(row) for row in rows] == ["it's N", "?"]
    assert corpus_texts(data, "train", tmp_path) == ["one\ntwo\n" * 20]
