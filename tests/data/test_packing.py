"""Rows against a reference that packs whole lists, without pieces, buffers or state."""

from __future__ import annotations

import itertools
import json

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from bellmask.data.packing import Packer, PackingRules

EOS, BOS, PAD = 90, 91, 92
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


def expected_rows(documents, rules):
    """(ids, length, document) of every row, from the definition."""
    length, rows = rules.block_length, []

    def row(ids, document):
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


def add(packer, pieces):
    """Rows of one document, given in pieces."""
    last = len(pieces) - 1
    parts = [packer.add(np.array(p, dtype=np.int64), i == last) for i, p in enumerate(pieces)]
    return [row for part in parts for row in list(part)]


@st.composite
def cut_documents(draw):
    """Documents in one or more pieces (some empty)."""
    documents = draw(st.lists(st.lists(st.integers(0, 50), max_size=30), max_size=8))
    cuts = [sorted(draw(st.lists(st.integers(0, len(d)), max_size=4))) for d in documents]
    return [[d[a:b] for a, b in zip([0, *c], [*c, len(d)])] for d, c in zip(documents, cuts)]


@settings(deadline=None, derandomize=True, max_examples=200)
@given(cut_documents(), rules_strategy, st.integers(0, 8))
def test_rows_are_those_of_the_definition_in_pieces_and_from_a_state(pieces, rules, border):
    first, second = Packer(rules), Packer(rules)
    rows = [row for parts in pieces[:border] for row in add(first, parts)]
    state = json.loads(json.dumps(first.state()))
    assert len(state["buffer"]) < rules.block_length, "a state is less than one row"
    second.restore(state)
    rows += [row for parts in pieces[border:] for row in add(second, parts)]
    assert second.num_documents == len(pieces)
    found = [(row.ids.tolist(), row.length, row.document) for row in [*rows, *second.finish()]]
    assert found == expected_rows([list(itertools.chain(*parts)) for parts in pieces], rules)
