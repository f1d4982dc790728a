from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bellmask.data.packing import pack, pad

EOS, BOS, PAD = 90, 91, 92
documents_strategy = st.lists(st.lists(st.integers(0, 50), max_size=30), max_size=8)


@settings(deadline=None, derandomize=True)
@given(documents_strategy, st.integers(1, 9))
def test_packed_rows_are_the_stream_cut_evenly(documents: list[list[int]], length: int) -> None:
    arrays = [np.array(d, dtype=np.int64) for d in documents]
    rows = list(pack(arrays, length, eos_id=EOS, bos_id=BOS, wrap=False))
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
    arrays = [np.array(d, dtype=np.int64) for d in documents]
    plain = list(pack(arrays, length - 2, eos_id=EOS, bos_id=BOS, wrap=False))
    wrapped = list(pack(arrays, length, eos_id=EOS, bos_id=BOS, wrap=True))
    assert [[BOS, *row.ids.tolist(), EOS] for row in plain] == [r.ids.tolist() for r in wrapped]


def test_unpacked_rows_hold_one_document_each() -> None:
    rows = list(pad([np.arange(3), np.arange(9)], 5, eos_id=EOS, pad_id=PAD))
    assert [r.ids.tolist() for r in rows] == [[0, 1, 2, EOS, PAD], [0, 1, 2, 3, EOS]]
    assert [(r.length, r.document) for r in rows] == [(4, 0), (5, 1)]


@pytest.mark.parametrize("cuts", [1, 7])
def test_rows_do_not_depend_on_how_documents_arrive(cuts: int) -> None:
    """A generator is enough: nothing looks ahead, so memory does not grow with the corpus."""
    documents = (np.full(cuts, i) for i in range(50))
    rows = list(pack(documents, 8, eos_id=EOS, bos_id=BOS, wrap=False))
    assert len(rows) == 50 * (cuts + 1) // 8
