"""Named corpora: their rules, what overrides them, and which documents are held out."""

from __future__ import annotations

import gzip
import io
import sys
import tarfile
import types
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bellmask.data import corpora
from bellmask.data.corpora import CORPORA, Corpus, OnHub, find_policy, has_split, open_corpus
from bellmask.data.detokenize import DETOKENIZERS
from bellmask.data.formats import RULES
from bellmask.data.prepare import load_blocks, prepare
from bellmask.data.tokenizer import ByteTokenizer
from bellmask.errors import UserError
from bellmask.options import DataOptions

BYTES = ByteTokenizer()


def texts(options: DataOptions, split: Any, cache: Path) -> list[str]:
    source, _ = open_corpus(options, split, cache)
    return [piece.text for piece in source.pieces()]


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> dict[tuple[str, str | None, str], list[str]]:
    """A hub that holds what is put here by (repository, config, split), as rows of all columns."""
    held: dict[tuple[str, str | None, str], list[str]] = {}

    def load(
        repository: str, config: str | None, *, split: str, **_: Any
    ) -> Iterator[dict[str, str]]:
        for text in held[repository, config, split]:
            yield dict.fromkeys(("text", "sentence", "article"), text)

    api = types.SimpleNamespace(dataset_info=lambda *_, **__: types.SimpleNamespace(sha="abc"))
    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load))
    fake = types.SimpleNamespace(HfApi=lambda: api)
    monkeypatch.setitem(sys.modules, "huggingface_hub", fake)
    return held


# --- the table -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CORPORA)
def test_every_corpus_names_rules_that_exist(name: str) -> None:
    corpus = CORPORA[name]
    assert corpus.documents in RULES
    assert corpus.detokenizer in DETOKENIZERS
    assert set(corpus.splits) <= {"train", "valid"}
    assert corpus.splits or corpus.note, "a corpus that cannot be fetched says what to do"
    assert corpus.title
    assert corpus.licence


def test_the_recipes_of_the_paper_are_those_published() -> None:
    lm1b, owt = CORPORA["lm1b"], CORPORA["openwebtext"]
    assert (lm1b.detokenizer, lm1b.wrap, lm1b.insert_eos) == ("lm1b", True, True)
    assert isinstance(lm1b.splits["valid"], OnHub)
    assert lm1b.splits["valid"].split == "test"
    assert (owt.detokenizer, owt.wrap, owt.holdout) == ("none", True, 100_000)
    assert [n for n, c in CORPORA.items() if not c.insert_eos] == ["text8", "enwik8"]


def test_every_split_on_the_hub_can_be_asked_for(
    hub: dict[tuple[str, str | None, str], list[str]], tmp_path: Path
) -> None:
    for name, corpus in CORPORA.items():
        for split, part in corpus.splits.items():
            if isinstance(part, OnHub) and not corpus.holdout:
                hub[part.repository, part.config, part.split] = [f"{name} {split}\n"]
                found = texts(DataOptions(train=name), split, tmp_path)
                assert found == [f"{name} {split}\n"]


# --- rules and options -----------------------------------------------------------------------


def test_options_override_a_corpus_and_auto_does_not() -> None:
    data = DataOptions(train="lm1b")
    policy = find_policy(data, "lm1b")
    assert (policy.documents, policy.column, policy.detokenizer) == ("line", "text", "lm1b")
    assert (policy.wrap, policy.insert_eos) == (True, True)
    changed = replace(
        data,
        documents="paragraph",
        column="body",
        detokenizer="none",
        wrap=False,
        insert_eos=False,
    )
    policy = find_policy(changed, "lm1b")
    assert (policy.documents, policy.column, policy.detokenizer) == ("paragraph", "body", "none")
    assert (policy.wrap, policy.insert_eos) == (False, False)


def test_files_are_read_plainly_unless_they_stand_for_a_corpus(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("it 's one\ntwo\n")
    own = DataOptions(train=str(path))
    _, policy = open_corpus(own, "train", tmp_path)
    assert (policy.documents, policy.detokenizer, policy.wrap) == ("file", "none", False)
    assert texts(own, "train", tmp_path) == ["it 's one\ntwo\n"]
    stands_for = DataOptions(train="lm1b", from_files=str(path))
    _, policy = open_corpus(stands_for, "train", tmp_path)
    assert (policy.documents, policy.detokenizer, policy.wrap) == ("line", "lm1b", True)
    assert texts(stands_for, "train", tmp_path) == ["it 's one", "two"]


def test_any_data_set_on_the_hub_can_be_named(
    hub: dict[tuple[str, str | None, str], list[str]], tmp_path: Path
) -> None:
    hub["me/set", None, "train"] = ["a"]
    hub["me/set", "conf", "train"] = ["b"]
    hub["me/set", "conf", "test"] = ["c"]
    names = ("hub:me/set", "hub:me/set:conf", "hub:me/set:conf:test")
    found = [texts(DataOptions(train=name), "train", tmp_path) for name in names]
    assert found == [["a"], ["b"], ["c"]]


def test_names_that_are_nothing_are_refused_with_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="unknown corpus 'tinystory'; did you mean 'tinystories'"):
        open_corpus(DataOptions(train="tinystory"), "train", tmp_path)
    with pytest.raises(UserError, match="no file"):
        open_corpus(DataOptions(train="none/a.txt"), "train", tmp_path)
    with pytest.raises(UserError, match=r"'lambada' has valid, but no train text.*--data.from"):
        open_corpus(DataOptions(train="lambada"), "train", tmp_path)
    with pytest.raises(UserError, match=r"'enwik8' has no split.*mingru_pytorch.*--data.from"):
        open_corpus(DataOptions(train="enwik8"), "train", tmp_path)


def test_enwik8_is_read_from_the_archive_that_holds_it(tmp_path: Path) -> None:
    content = gzip.compress("<page>\n  Ünder\n</page>\n".encode())
    path = tmp_path / "mingru_pytorch-0.2.1.tar.gz"
    with tarfile.open(path, "w:gz") as archive:
        info = tarfile.TarInfo("mingru_pytorch-0.2.1/data/enwik8.gz")
        info.size = len(content)
        archive.addfile(info, io.BytesIO(content))
    data = DataOptions(train="enwik8", from_files=str(path))
    assert texts(data, "train", tmp_path) == ["<page>\n  Ünder\n</page>\n"]
    with pytest.raises(UserError, match="is an archive; unpack it"):
        open_corpus(DataOptions(train=str(path)), "train", tmp_path)


# --- validation ------------------------------------------------------------------------------


@pytest.fixture
def held_out(monkeypatch: pytest.MonkeyPatch) -> Corpus:
    """A small corpus without a validation split: its last three documents are held out."""
    corpus = Corpus(
        "Small", "none", {"train": OnHub("me/small", "train")}, holdout=3, num_documents=10
    )
    monkeypatch.setitem(corpora.CORPORA, "small", corpus)
    return corpus


DOCUMENTS = [f"document number {i}" for i in range(10)]


@pytest.mark.usefixtures("held_out")
def test_the_last_documents_are_validation(
    hub: dict[tuple[str, str | None, str], list[str]], tmp_path: Path
) -> None:
    hub["me/small", None, "train"] = DOCUMENTS
    data = DataOptions(train="small")
    assert has_split(data, "valid")
    assert texts(data, "train", tmp_path) == DOCUMENTS[:7]
    assert texts(data, "valid", tmp_path) == DOCUMENTS[7:]
    identities = {open_corpus(data, split, tmp_path)[0].identity for split in ("train", "valid")}
    assert len(identities) == 2


@pytest.mark.usefixtures("held_out")
@pytest.mark.parametrize("count", [4, 10, 25])
def test_the_last_documents_of_local_files_are_counted(tmp_path: Path, count: int) -> None:
    documents = [f"document number {i:04d}" for i in range(count)]
    (tmp_path / "a.txt").write_text("\n".join(documents[: count // 2]))
    (tmp_path / "b.txt").write_text("\n".join(documents[count // 2 :]))
    data = DataOptions(
        train="small",
        from_files=str(tmp_path / "*.txt"),
        block_length=24,
        packing="unpacked",
        cache=str(tmp_path / "cache"),
    )
    assert texts(data, "train", tmp_path) == documents[:-3]
    assert texts(data, "valid", tmp_path) == documents[-3:]
    train, valid = load_blocks(data, BYTES)
    rows = [BYTES.decode(row) for part in (train, valid) for row in part.rows(slice(None)).numpy()]
    assert rows == documents
    assert len(valid) == 3
    assert train.fingerprint != valid.fingerprint


@pytest.mark.usefixtures("held_out")
def test_a_corpus_smaller_than_its_holdout_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a\nb\nc\n")
    data = DataOptions(train="small", from_files=str(tmp_path / "a.txt"))
    with pytest.raises(UserError, match="has 3 documents, and the last 3 are validation"):
        open_corpus(data, "train", tmp_path)


def test_has_split_is_what_a_corpus_brings(tmp_path: Path) -> None:
    def brings(**options: str) -> tuple[bool, bool]:
        data = DataOptions(**options)  # type: ignore[arg-type]
        return has_split(data, "train"), has_split(data, "valid")

    assert brings(train="wikitext2") == (True, True)
    assert brings(train="openwebtext") == (True, True)
    assert brings(train="fineweb_edu") == (True, False)
    assert brings(train="lambada") == (False, True)
    assert brings(train="enwik8") == (False, False)
    assert brings(train="a.txt") == (True, False)
    assert brings(train="lm1b", from_files="a.txt") == (True, False)


def test_validation_text_of_its_own_is_read_by_its_own_rules(
    hub: dict[tuple[str, str | None, str], list[str]], tmp_path: Path
) -> None:
    (tmp_path / "a.txt").write_text("one\ntwo\n" * 20)
    hub["ptb-text-only/ptb_text_only", None, "validation"] = ["it 's N", "<unk>"]
    data = DataOptions(
        train=str(tmp_path / "a.txt"),
        valid="ptb",
        block_length=8,
        packing="unpacked",
        cache=str(tmp_path / "cache"),
    )
    assert texts(data, "valid", tmp_path) == ["it 's N", "<unk>"]
    rows = prepare(data, BYTES, "valid").rows(slice(None)).numpy()
    assert [BYTES.decode(row) for row in rows] == ["it's N", "?"]
    assert texts(data, "train", tmp_path) == ["one\ntwo\n" * 20]
