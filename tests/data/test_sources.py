"""Sources know what they are before they are read, and read the same each time."""

from __future__ import annotations

import gzip
import io
import sys
import tarfile
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bellmask.data.formats import Piece
from bellmask.data.sources import (
    Source,
    count_documents,
    documents_kept,
    file_source,
    find_files,
    hub_source,
    is_hub_name,
    tar_source,
)
from bellmask.errors import UserError


def texts(source: Source) -> list[str]:
    return [piece.text for piece in source.pieces()]


def lines_of(pattern: Path | str) -> Source:
    return file_source(str(pattern), rule="line", column="text")


# --- local files -----------------------------------------------------------------------------


def test_files_are_read_in_name_order_any_number_of_times(tmp_path: Path) -> None:
    for name in ("b", "a", "c10", "c9"):
        (tmp_path / f"{name}.txt").write_text(f"{name} one\n{name} two\n")
    source = lines_of(tmp_path / "*.txt")
    expected = [f"{name} {n}" for name in ("a", "b", "c10", "c9") for n in ("one", "two")]
    assert texts(source) == texts(source) == expected
    assert count_documents(source) == 8
    assert list(source.origin) == ["a.txt", "b.txt", "c10.txt", "c9.txt"]


def test_formats_may_be_mixed(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one\n")
    (tmp_path / "b.jsonl").write_text('{"text": "two"}\n')
    (tmp_path / "c.txt.gz").write_bytes(gzip.compress(b"three\n"))
    assert texts(lines_of(tmp_path / "*")) == ["one", "two", "three"]


def test_identity_is_the_content_not_the_path(tmp_path: Path) -> None:
    for name, content in (("a", "same"), ("b", "same"), ("c", "other"), ("d", "same\n")):
        (tmp_path / f"{name}.txt").write_text(content)
    ids = {name: lines_of(tmp_path / f"{name}.txt").identity for name in "abcd"}
    assert ids["a"] == ids["b"]
    assert len(set(ids.values())) == 3
    assert lines_of(tmp_path / "[ac].txt").identity not in ids.values()
    assert lines_of(tmp_path / "[ac].txt").identity == lines_of(tmp_path / "[bc].txt").identity


def test_identity_is_known_to_change_with_the_order_of_files(tmp_path: Path) -> None:
    for folder, one, two in (("x", "first", "second"), ("y", "second", "first")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "1.txt").write_text(one)
        (tmp_path / folder / "2.txt").write_text(two)
    assert lines_of(tmp_path / "x/*").identity != lines_of(tmp_path / "y/*").identity


def test_globs_go_into_folders_and_brackets_may_be_a_name(tmp_path: Path) -> None:
    (tmp_path / "deep" / "er").mkdir(parents=True)
    (tmp_path / "deep" / "er" / "a.txt").write_text("a")
    (tmp_path / "x[1].txt").write_text("b")
    assert [p.name for p in find_files(str(tmp_path / "**" / "a.txt"))] == ["a.txt"]
    assert [p.name for p in find_files(str(tmp_path / "x[1].txt"))] == ["x[1].txt"]


def test_files_that_are_not_there_are_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no file"):
        find_files(str(tmp_path / "*.txt"))
    with pytest.raises(UserError, match=r"is a folder.*glob such as"):
        find_files(str(tmp_path))


# --- some documents of a source --------------------------------------------------------------

cut = st.lists(st.lists(st.text(max_size=2), min_size=1, max_size=3), max_size=8)
"""Documents in pieces."""


def pieces_of(documents: list[list[str]]) -> Iterator[Piece]:
    for parts in documents:
        for number, part in enumerate(parts):
            yield Piece(part, number == len(parts) - 1)


@settings(deadline=None, derandomize=True)
@given(cut, st.integers(0, 9), st.none() | st.integers(0, 9))
def test_documents_are_kept_whole_by_number(
    documents: list[list[str]], start: int, stop: int | None
) -> None:
    kept = list(documents_kept(pieces_of(documents), start, stop))
    assert kept == list(pieces_of(documents[start:stop]))


def test_nothing_is_read_after_the_last_document_kept() -> None:
    def endless() -> Iterator[Piece]:
        yield Piece("a")
        yield Piece("b")
        yield Piece("c")
        raise AssertionError("read too far")

    assert [p.text for p in documents_kept(endless(), 0, 2)] == ["a", "b"]


# --- archives --------------------------------------------------------------------------------


def make_archive(path: Path, members: dict[str, bytes]) -> Path:
    with tarfile.open(path, "w:gz") as archive:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return path


def test_one_file_of_an_archive_is_read_unzipped_too(tmp_path: Path) -> None:
    members = {
        "pkg/setup.py": b"raise SystemExit\n",
        "pkg/data/a.txt": b"one\ntwo\n",
        "pkg/data/b.gz": gzip.compress(b"three\n"),
    }
    archive = make_archive(tmp_path / "pkg.tar.gz", members)
    plain = tar_source("pkg", archive, "pkg/data/a.txt", rule="line")
    zipped = tar_source("pkg", archive, "pkg/data/b.gz", rule="line")
    assert texts(plain) == texts(plain) == ["one", "two"]
    assert texts(zipped) == ["three"]
    other = make_archive(tmp_path / "other.tar.gz", {"pkg/data/a.txt": b"one\n"})
    assert tar_source("pkg", other, "pkg/data/a.txt", rule="line").identity != plain.identity


def test_a_truncated_archive_is_refused(tmp_path: Path) -> None:
    archive = make_archive(tmp_path / "a.tar.gz", {"a.txt": b"one\n" * 99})
    archive.write_bytes(archive.read_bytes()[:50])
    with pytest.raises(UserError, match="truncated or damaged"):
        texts(tar_source("a", archive, "a.txt", rule="line"))


# --- the hub ---------------------------------------------------------------------------------


class FakeHub:
    """Stands for ``datasets`` and ``huggingface_hub``: one data set, and what was asked of it."""

    def __init__(self, rows: list[dict[str, Any]], commit: str = "c0ffee") -> None:
        self.rows, self.commit = rows, commit
        self.error: Exception | None = None
        self.asked: list[tuple[Any, ...]] = []

    def dataset_info(self, repository: str, revision: str | None) -> Any:
        if self.error:
            raise self.error
        self.asked.append(("info", repository, revision))
        return types.SimpleNamespace(sha=self.commit)

    def load_dataset(
        self, repository: str, config: str | None, *, split: str, revision: str, streaming: bool
    ) -> Iterator[dict[str, Any]]:
        self.asked.append(("load", repository, config, split, revision, streaming))
        return iter(self.rows)


def install(monkeypatch: pytest.MonkeyPatch, hub: FakeHub) -> FakeHub:
    data = types.SimpleNamespace(load_dataset=hub.load_dataset)
    monkeypatch.setitem(sys.modules, "datasets", data)
    api = types.SimpleNamespace(HfApi=lambda: hub)
    monkeypatch.setitem(sys.modules, "huggingface_hub", api)
    return hub


def open_hub(column: str = "text", line_rule: str | None = None, revision: str | None = None):
    return hub_source(
        "name", "owner/set", "conf", "train", column=column, revision=revision, line_rule=line_rule
    )


def test_hub_rows_are_documents_streamed_at_the_commit_that_is_the_identity(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hub = install(monkeypatch, FakeHub([{"text": "one"}, {"text": ""}, {"text": "two\nlines"}]))
    source = open_hub(revision="branch")
    assert hub.asked == [("info", "owner/set", "branch")], "known before any row is read"
    assert texts(source) == texts(source) == ["one", "", "two\nlines"]
    assert hub.asked[1:] == [("load", "owner/set", "conf", "train", "c0ffee", True)] * 2
    assert source.origin == {"owner/set/conf/train": "c0ffee"}
    hub.rows = []
    assert open_hub().identity == source.identity
    hub.commit = "decade"
    assert open_hub().identity != source.identity


def test_hub_rows_may_be_lines_of_articles(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = ["", " = One = \n", "", " a \n", " = = Part = = \n", " = Two = \n", " b \n"]
    install(monkeypatch, FakeHub([{"text": row} for row in rows]))
    assert texts(open_hub(line_rule="article")) == [
        " = One = \n a \n = = Part = = \n",
        " = Two = \n b \n",
    ]


def test_a_hub_out_of_reach_gives_advice(monkeypatch: pytest.MonkeyPatch) -> None:
    hub = install(monkeypatch, FakeHub([]))
    hub.error = ConnectionError("Name or service not known\nmore lines")
    with pytest.raises(
        UserError, match=r"owner/set.*not known\).*Offline\?.*--from PATH"
    ) as caught:
        open_hub()
    assert "\n" not in str(caught.value)
    hub.error = RuntimeError()
    with pytest.raises(UserError, match=r"\(RuntimeError\).*--from PATH"):
        open_hub()


def test_a_hub_column_that_is_not_text_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, FakeHub([{"body": "a", "n": 3}]))
    for column in ("text", "n"):
        with pytest.raises(UserError, match=f"no text column '{column}': body, n"):
            texts(open_hub(column))


def test_a_machine_without_datasets_is_told_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(UserError, match=r"pip install 'bellmask\[text\]'"):
        open_hub()


def test_hub_names_are_told_from_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert is_hub_name("hub:owner/name")
    assert not is_hub_name("owner/name")
    (tmp_path / "hub:owner").mkdir()
    (tmp_path / "hub:owner" / "name").write_text("")
    monkeypatch.chdir(tmp_path)
    assert not is_hub_name("hub:owner/name")
