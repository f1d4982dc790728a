"""Documents → fixed rows. Pure and order-preserving; memory does not grow with the corpus.

packed: each document gets an EOS, the stream is cut every L tokens (every L - 2 when rows are
wrapped in BOS ... EOS), and what is left at the end is dropped. unpacked: one document and its EOS
per row, cut at L or padded to it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from bellmask.data.tokenizer import Ids

PACKER_VERSION = 2
"""Part of every cache key; raise it when rows would come out differently."""


@dataclass(frozen=True)
class Row:
    """One row: its ids, how many of them are not padding, and the document it starts in."""

    ids: Ids
    length: int
    document: int


def pack(
    documents: Iterable[Ids], block_length: int, *, eos_id: int, bos_id: int, wrap: bool
) -> Iterator[Row]:
    """Rows that cross document borders."""
    content = block_length - 2 if wrap else block_length
    buffer = np.empty(0, dtype=np.int64)
    owner = np.empty(0, dtype=np.int64)
    for index, ids in enumerate(documents):
        buffer = np.concatenate([buffer, ids, [eos_id]])
        owner = np.concatenate([owner, np.full(len(ids) + 1, index)])
        whole = len(buffer) // content * content
        for start in range(0, whole, content):
            piece = buffer[start : start + content]
            row = np.concatenate([[bos_id], piece, [eos_id]]) if wrap else piece
            yield Row(row, block_length, int(owner[start]))
        buffer, owner = buffer[whole:], owner[whole:]


def pad(documents: Iterable[Ids], block_length: int, *, eos_id: int, pad_id: int) -> Iterator[Row]:
    """One document per row."""
    for index, ids in enumerate(documents):
        ids = np.concatenate([ids[: block_length - 1], [eos_id]])
        padding = np.full(block_length - len(ids), pad_id)
        yield Row(np.concatenate([ids, padding]), len(ids), index)
