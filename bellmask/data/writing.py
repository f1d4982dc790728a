"""Text → shards: streamed once, in constant memory, resumed where it stopped.

Progress is written after whole documents: how many were read, how many rows are on disk, and the
packer's few tokens in hand. Going on skips the documents already read and cuts files back to the
rows that were recorded, so the result is the same as without the interruption.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from bellmask.data.blocks import rows_per_shard, shard_path
from bellmask.data.corpora import Policy
from bellmask.data.detokenize import detokenizer
from bellmask.data.formats import Piece
from bellmask.data.packing import PACKER_VERSION, Packer, PackingRules, Row
from bellmask.data.sources import Source
from bellmask.data.tokenizer import Tokenizer
from bellmask.utils.errors import UserError
from bellmask.utils.files import is_whole, read_json

BATCH_CHARACTERS = 1 << 20
"""Text handed to the tokenizer at once."""
RECORD_SECONDS = 2.0
"""Progress is recorded about this often."""

OnProgress = Callable[[int, int, int], None]
"""Told (documents, bytes of text, rows) so far."""


class Preparation:
    """One pass over a source, into ``.preparing-*`` beside its final folder."""

    def __init__(
        self,
        folder: Path,
        key: str,
        source: Source,
        policy: Policy,
        rules: PackingRules,
        tokenizer: Tokenizer,
        on_progress: OnProgress | None,
    ) -> None:
        self.folder, self.key, self.source, self.policy = folder, key, source, policy
        self.rules, self.tokenizer, self.on_progress = rules, tokenizer, on_progress
        self.scratch = folder.with_name(f".preparing-{folder.name}")
        self.dtype = np.dtype(np.uint16 if tokenizer.num_tokens < 2**16 else np.uint32)
        self.per_shard = rows_per_shard(rules.block_length)
        self.packer = Packer(rules)
        self.done = {"rows": 0, "bytes": 0, "tokens": 0, "real_tokens": 0, "content_tokens": 0}
        self._recorded = time.monotonic()

    @property
    def _adds_eos(self) -> bool:
        """True when each document has an EOS of its own among the tokens of rows."""
        return self.rules.insert_eos if self.rules.is_packed else not self.rules.wrap

    def run(self) -> None:
        """Read everything that is left, then put the folder in its place."""
        self.scratch.mkdir(parents=True, exist_ok=True)
        try:
            self._resume()
            for batch in self._batches():
                self._take(batch)
            self._write(list(self.packer.finish()))
            if not self.done["rows"]:
                raise UserError(
                    f"data {self.source.name!r} is shorter than one block of "
                    f"{self.rules.block_length} tokens; give more text, a smaller "
                    "--data.block-length or --data.remainder keep"
                )
        except UserError:
            shutil.rmtree(self.scratch, ignore_errors=True)  # bad input: nothing worth keeping
            raise
        (self.scratch / "progress.json").unlink(missing_ok=True)
        self._write_card()
        os.replace(self.scratch, self.folder)

    def _batches(self) -> Iterator[list[Piece]]:
        """Pieces not yet read, about a megabyte at a time."""
        clean = detokenizer(self.policy.detokenizer)
        skip, number = self.packer.num_documents, 0
        batch: list[Piece] = []
        size = 0
        for piece in self.source.pieces():
            if number >= skip:
                batch.append(Piece(clean(piece.text), piece.is_end))
                size += len(piece.text)
            number += piece.is_end
            if size >= BATCH_CHARACTERS:
                yield batch
                batch, size = [], 0
        if batch:
            yield batch

    def _take(self, batch: list[Piece]) -> None:
        encoded = self.tokenizer.encode_batch([piece.text for piece in batch])
        rows: list[Row] = []
        for piece, ids in zip(batch, encoded, strict=True):
            rows += self.packer.add(ids, piece.is_end)
            self.done["bytes"] += len(piece.text.encode("utf-8"))
            self.done["tokens"] += len(ids) + (piece.is_end and self._adds_eos)
        self._write(rows)
        if self.on_progress:
            self.on_progress(self.packer.num_documents, self.done["bytes"], self.done["rows"])
        if batch[-1].is_end and time.monotonic() - self._recorded > RECORD_SECONDS:
            self._record()

    def _write(self, rows: list[Row]) -> None:
        start = 0
        while start < len(rows):
            number, filled = divmod(self.done["rows"], self.per_shard)
            part = rows[start : start + self.per_shard - filled]
            _append(shard_path(self.scratch, number), np.stack([r.ids for r in part]), self.dtype)
            _append(self.scratch / "lengths.bin", np.array([r.length for r in part]), np.int64)
            _append(self.scratch / "documents.bin", np.array([r.document for r in part]), np.int64)
            self.done["rows"] += len(part)
            real = sum(r.length for r in part)
            self.done["real_tokens"] += real
            self.done["content_tokens"] += real - (2 * len(part) if self.rules.wrap else 0)
            start += len(part)

    def _record(self) -> None:
        state = {"done": self.done, "packer": self.packer.state()}
        scratch = self.scratch / ".progress.writing"
        scratch.write_text(json.dumps(state))
        os.replace(scratch, self.scratch / "progress.json")
        self._recorded = time.monotonic()

    def _resume(self) -> None:
        """Take up recorded progress; without any that the files bear out, begin anew."""
        sizes = self._recorded_sizes()
        if sizes is None:
            shutil.rmtree(self.scratch)
            self.scratch.mkdir()
            self.packer = Packer(self.rules)
            self.done = dict.fromkeys(self.done, 0)
            return
        for path in self.scratch.glob("*.bin"):
            if path.name in sizes:
                os.truncate(path, sizes[path.name])
            else:
                path.unlink()

    def _recorded_sizes(self) -> dict[str, int] | None:
        """Bytes of each file at the recorded moment; None if any is shorter or nothing is known."""
        try:
            state = read_json(self.scratch / "progress.json")
            self.done = {name: state["done"][name] for name in self.done}
            self.packer.restore(state["packer"])
        except (OSError, ValueError, KeyError, TypeError, OverflowError):
            return None
        if not all(map(is_whole, [*self.done.values(), self.packer.num_documents])):
            return None
        rows, row_bytes = self.done["rows"], self.rules.block_length * self.dtype.itemsize
        sizes = {"lengths.bin": rows * 8, "documents.bin": rows * 8} if rows else {}
        for number in range(-(-rows // self.per_shard)):
            filled = min(self.per_shard, rows - number * self.per_shard)
            sizes[shard_path(self.scratch, number).name] = filled * row_bytes
        for name, size in sizes.items():
            path = self.scratch / name
            if not path.exists() or path.stat().st_size < size:
                return None
        return sizes

    def _write_card(self) -> None:
        share = self.done["content_tokens"] / max(1, self.done["tokens"])
        card: dict[str, Any] = {
            "fingerprint": self.key,
            "source": self.source.name,
            "title": self.policy.title,
            "licence": self.policy.licence,
            "origin": self.source.origin,
            "identity": self.source.identity,
            "num_blocks": self.done["rows"],
            "block_length": self.rules.block_length,
            "num_documents": self.packer.num_documents,
            "num_tokens": self.done["real_tokens"],
            "num_bytes": self.done["bytes"] * min(1.0, share),
            "text_bytes": self.done["bytes"],
            "text_tokens": self.done["tokens"],
            "documents": self.policy.documents,
            "column": self.policy.column,
            "detokenizer": self.policy.detokenizer,
            "packing": "packed" if self.rules.is_packed else "unpacked",
            "wrap": self.rules.wrap,
            "insert_eos": self.rules.insert_eos,
            "remainder": "keep" if self.rules.keep_remainder else "drop",
            "tokenizer_fingerprint": self.tokenizer.fingerprint,
            "num_token_kinds": self.tokenizer.num_tokens,
            "dtype": self.dtype.name,
            "rows_per_shard": self.per_shard,
            "packer_version": PACKER_VERSION,
        }
        (self.scratch / "card.json").write_text(
            json.dumps(card, indent=1, ensure_ascii=False) + "\n", encoding="utf-8"
        )


def _append(path: Path, values: np.ndarray[Any, Any], dtype: Any) -> None:
    with path.open("ab") as stream:
        stream.write(np.ascontiguousarray(values, dtype=dtype).tobytes())
