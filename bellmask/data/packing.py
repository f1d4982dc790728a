"""Documents → fixed rows. Order-preserving, independent of CPU count; memory does not grow.

packed: documents, each ended by EOS, are joined and cut every L tokens (every L - 2 when rows are
wrapped in BOS ... EOS); what is left at the end is dropped, or kept as a padded row. unpacked: one
document per row, ended by EOS (and begun by BOS when wrapped), cut at L or padded to it.

A packer's state is a few numbers and less than one row of tokens, so preparing can stop anywhere
between documents and go on.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from bellmask.data.tokenizers import Ids

PACKER_VERSION = 4
"""Part of every cache key; raise it when rows would come out differently."""


@dataclass(frozen=True)
class Row:
    """One row: its ids, how many of them are not padding, and the document it starts in."""

    ids: Ids
    length: int
    document: int
    start: int = 0
    """Positions before it are given (a prompt): seen, but never masked nor scored."""


@dataclass(frozen=True)
class PackingRules:
    """Everything that decides how documents become rows."""

    block_length: int
    eos_id: int
    bos_id: int
    pad_id: int
    is_packed: bool = True
    wrap: bool = False
    insert_eos: bool = True
    """End each document with EOS (packed; an unpacked row always ends so)."""
    keep_remainder: bool = False

    @property
    def content(self) -> int:
        """Tokens of the stream, or of a document, that a row can take."""
        return self.block_length - (2 if self.wrap else 0 if self.is_packed else 1)


class Packer:
    """Takes documents piece by piece, gives rows."""

    def __init__(self, rules: PackingRules) -> None:
        self.rules = rules
        self.num_documents = 0
        self._buffer = np.empty(0, dtype=np.int64)
        self._owner = np.empty(0, dtype=np.int64)

    def add(self, ids: Ids, is_end: bool) -> Iterator[Row]:
        """Take a piece of a document; ``is_end`` when it is the last one."""
        yield from (
            self._add_packed(ids, is_end) if self.rules.is_packed else self._add_padded(ids, is_end)
        )
        self.num_documents += is_end

    def finish(self) -> Iterator[Row]:
        """What is left, by the remainder rule."""
        if self.rules.is_packed and self.rules.keep_remainder and len(self._buffer):
            yield self._row(self._buffer, int(self._owner[0]))
        self._buffer, self._owner = self._buffer[:0], self._owner[:0]

    def _add_packed(self, ids: Ids, is_end: bool) -> Iterator[Row]:
        rules, content = self.rules, self.rules.content
        end = [rules.eos_id] if is_end and rules.insert_eos else []
        new = np.concatenate([ids, np.array(end, dtype=np.int64)])
        self._buffer = np.concatenate([self._buffer, new])
        self._owner = np.concatenate([self._owner, np.full(len(new), self.num_documents)])
        whole = len(self._buffer) // content * content
        for start in range(0, whole, content):
            yield self._row(self._buffer[start : start + content], int(self._owner[start]))
        self._buffer, self._owner = self._buffer[whole:], self._owner[whole:]

    def _add_padded(self, ids: Ids, is_end: bool) -> Iterator[Row]:
        self._buffer = np.concatenate([self._buffer, ids])[: self.rules.content]
        if is_end:
            document, self._buffer = self._buffer, self._buffer[:0]
            if not self.rules.wrap:
                document = np.append(document, self.rules.eos_id)
            yield self._row(document, self.num_documents)

    def _row(self, ids: Ids, document: int) -> Row:
        rules = self.rules
        if rules.wrap:
            ids = np.concatenate([[rules.bos_id], ids, [rules.eos_id]])
        padding = np.full(rules.block_length - len(ids), rules.pad_id)
        return Row(np.concatenate([ids, padding]), len(ids), document)

    def state(self) -> dict[str, Any]:
        """Between documents: what is needed to go on later."""
        return {
            "num_documents": self.num_documents,
            "buffer": self._buffer.tolist(),
            "owner": self._owner.tolist(),
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from a state."""
        self.num_documents = state["num_documents"]
        self._buffer = np.array(state["buffer"], dtype=np.int64)
        self._owner = np.array(state["owner"], dtype=np.int64)
