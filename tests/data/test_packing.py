"""Rows against a reference that packs whole lists, without pieces, buffers or state."""

from __future__ import annotations

import json
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bellmask.data.packing import Packer, PackingRules, Row

EOS, BOS, PAD = 90, 91, 92
documents_strategy = st.lists(st.lists(st.integers(0, 50), max_size=30), max_size=8)
rules_strategy = st.builds(
    PackingRules,
    block_length=st.integers(3, 9),
    eos_id=st.just(EOS),
    bos_id=st.just(BOS),
    pad_id=st.just(PAD),
    is_packed=st.booleans(),
    wrap=st.booleans(),
    insert_eos=st.booleans(),
    keep_remainder=st.booleans(),
)
PlainRow = tuple[list[int], int, int]


def plain(rows: list[Row]) -> list[PlainRow]:
    return [(row.ids.tolist(), row.length, row.document) for row in rows]


def expected_rows(documents: list[list[int]], rules: PackingRules) -> list[PlainRow]:
    """(ids, length, document) of every row, from the definition."""
    length, rows = rules.block_length, []

    def row(ids: list[int], document: int) -> None:
        rows.append((ids + [PAD] * (length - len(ids)), len(ids), document))

    if not rules.is_packed:
        for number, document in enumerate(documents):
            if rules.wrap:
                row([BOS, *document[: length - 2], EOS], number)
            else:
                row([*document[: length - 1], EOS], number)
        return rows
    end = [EOS] if rules.insert_eos else []
    stream = [(token, i) for i, d in enumerate(documents) for token in [*d, *end]]
    size = length - 2 if rules.wrap else length
    for start in range(0, len(stream), size):
        part = stream[start : start + size]
        if len(part) == size or rules.keep_remainder:
            ids = [token for token, _ in part]
            row([BOS, *ids, EOS] if rules.wrap else ids, part[0][1])
    return rows


def pack(documents: list[list[int]], rules: PackingRules) -> list[Row]:
    packer = Packer(rules)
    rows = [row for d in documents for row in packer.add(np.array(d, dtype=np.int64), True)]
    return [*rows, *packer.finish()]


@settings(deadline=None, derandomize=True, max_examples=300)
@given(documents_strategy, rules_strategy)
def test_rows_are_those_of_the_definition(documents: list[list[int]], rules: PackingRules) -> None:
    assert plain(pack(documents, rules)) == expected_rows(documents, rules)


@settings(deadline=None, derandomize=True)
@given(documents_strategy, st.integers(1, 9))
def test_packed_rows_are_the_stream_cut_evenly(documents: list[list[int]], length: int) -> None:
    rows = pack(documents, PackingRules(length, EOS, BOS, PAD))
    stream = [token for d in documents for token in [*d, EOS]]
    owner = [i for i, d in enumerate(documents) for _ in range(len(d) + 1)]
    whole = len(stream) // length * length
    assert [t for row in rows for t in row.ids.tolist()] == stream[:whole]
    assert [row.document for row in rows] == owner[:whole:length]
    assert all(row.length == length == len(row.ids) for row in rows)


@settings(deadline=None, derandomize=True)
@given(documents_strategy, st.integers(3, 9))
def test_wrapped_rows_hold_the_same_stream_between_bos_and_eos(
    documents: list[list[int]], length: int
) -> None:
    bare = pack(documents, PackingRules(length - 2, EOS, BOS, PAD))
    wrapped = pack(documents, PackingRules(length, EOS, BOS, PAD, wrap=True))
    assert [[BOS, *row.ids.tolist(), EOS] for row in bare] == [r.ids.tolist() for r in wrapped]


def test_unpacked_rows_hold_one_document_each() -> None:
    rules = PackingRules(5, EOS, BOS, PAD, is_packed=False)
    assert plain(pack([[0, 1, 2], list(range(9)), []], rules)) == [
        ([0, 1, 2, EOS, PAD], 4, 0),
        ([0, 1, 2, 3, EOS], 5, 1),
        ([EOS, PAD, PAD, PAD, PAD], 1, 2),
    ]


def test_the_remainder_is_dropped_or_kept_as_a_padded_row() -> None:
    documents = [[1, 2, 3], [4, 5]]
    assert len(pack(documents, PackingRules(5, EOS, BOS, PAD))) == 1
    kept = pack(documents, PackingRules(5, EOS, BOS, PAD, keep_remainder=True))
    assert plain(kept)[1] == ([5, EOS, PAD, PAD, PAD], 2, 1)


@st.composite
def cut_documents(draw: st.DrawFn) -> tuple[list[list[int]], list[list[list[int]]]]:
    """Documents, and the same ones in one or more pieces (some empty)."""
    documents = draw(documents_strategy)
    pieces = []
    for d in documents:
        cuts = sorted(draw(st.lists(st.integers(0, len(d)), max_size=4)))
        pieces.append([d[a:b] for a, b in zip([0, *cuts], [*cuts, len(d)])])
    return documents, pieces


@settings(deadline=None, derandomize=True, max_examples=200)
@given(cut_documents(), rules_strategy)
def test_documents_in_pieces_give_the_same_rows(
    cut: tuple[list[list[int]], list[list[list[int]]]], rules: PackingRules
) -> None:
    documents, pieces = cut
    packer = Packer(rules)
    rows: list[Row] = []
    for parts in pieces:
        for number, part in enumerate(parts):
            rows += packer.add(np.array(part, dtype=np.int64), number == len(parts) - 1)
    assert packer.num_documents == len(documents)
    assert plain([*rows, *packer.finish()]) == expected_rows(documents, rules)


@settings(deadline=None, derandomize=True, max_examples=200)
@given(documents_strategy, rules_strategy, st.integers(0, 8))
def test_a_packer_goes_on_from_its_state(
    documents: list[list[int]], rules: PackingRules, border: int
) -> None:
    first = Packer(rules)
    rows = [r for d in documents[:border] for r in first.add(np.array(d, dtype=np.int64), True)]
    state = json.loads(json.dumps(first.state()))
    assert len(state["buffer"]) < rules.block_length, "a state is less than one row"
    second = Packer(rules)
    second.restore(state)
    rows += [r for d in documents[border:] for r in second.add(np.array(d, dtype=np.int64), True)]
    assert plain([*rows, *second.finish()]) == expected_rows(documents, rules)


@pytest.mark.parametrize("size", [1, 7])
def test_rows_come_as_soon_as_they_are_full(size: int) -> None:
    """Nothing looks ahead and less than a row is held, so memory does not grow with the corpus."""
    packer, count = Packer(PackingRules(8, EOS, BOS, PAD)), 0
    for number in range(50):
        found: Iterator[Row] = packer.add(np.full(size, number), True)
        count += len(list(found))
        assert count == (number + 1) * (size + 1) // 8
        assert len(packer.state()["buffer"]) < 8
