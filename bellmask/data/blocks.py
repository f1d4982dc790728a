"""Memory-mapped token blocks on disk, keyed by a fingerprint of everything that shaped them.

A cache folder holds ``tokens.bin`` [num_blocks, L], ``lengths.bin`` and ``documents.bin``
[num_blocks], and ``card.json``; it is written beside its place and renamed: whole or absent.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bellmask.data.corpora import Source, has_own_split, open_source
from bellmask.data.packing import PACKER_VERSION, Row, pack, pad
from bellmask.data.tokenizer import Ids, Tokenizer
from bellmask.data.wheels import cache_folder
from bellmask.errors import UserError
from bellmask.options import DataOptions


@dataclass(frozen=True)
class Blocks:
    """Rows of tokens; ``lengths`` counts the tokens before padding."""

    tokens: NDArray[Any]
    lengths: NDArray[np.int64]
    documents: NDArray[np.int64]
    fingerprint: str
    num_bytes: float = 0.0
    """UTF-8 bytes of the text that the tokens stand for; 0 where it is not known."""

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def block_length(self) -> int:
        """Tokens per row, padding included."""
        return int(self.tokens.shape[1])

    @property
    def is_padded(self) -> bool:
        """True when some row is shorter than the block."""
        return bool((self.lengths < self.block_length).any())

    def rows(self, index: Tensor | slice) -> Tensor:
        """Tokens of the given rows, int64."""
        picked = index.numpy() if isinstance(index, Tensor) else index
        return torch.from_numpy(np.asarray(self.tokens[picked], dtype=np.int64))

    def row_lengths(self, index: Tensor | slice) -> Tensor:
        """Tokens before padding in the given rows, int64."""
        picked = index.numpy() if isinstance(index, Tensor) else index
        return torch.from_numpy(np.asarray(self.lengths[picked], dtype=np.int64))

    def slice(self, start: int, stop: int) -> Blocks:
        """A run of rows; its fingerprint says which. Bytes are shared out by tokens."""
        mark = hashlib.sha256(f"{self.fingerprint}[{start}:{stop}]".encode()).hexdigest()
        part = slice(start, stop)
        return replace(
            self,
            tokens=self.tokens[part],
            lengths=self.lengths[part],
            documents=self.documents[part],
            fingerprint=mark,
            num_bytes=self.num_bytes * self.lengths[part].sum() / max(1, self.lengths.sum()),
        )

    @staticmethod
    def from_rows(
        rows: Iterable[Row], fingerprint: str = "in-memory", num_bytes: float = 0.0
    ) -> Blocks:
        """Blocks held in memory."""
        kept = list(rows)
        return Blocks(
            np.stack([row.ids for row in kept]),
            np.array([row.length for row in kept], dtype=np.int64),
            np.array([row.document for row in kept], dtype=np.int64),
            fingerprint,
            num_bytes,
        )


def load_blocks(options: DataOptions, tokenizer: Tokenizer) -> tuple[Blocks, Blocks]:
    """Training and validation blocks, prepared now or taken from the cache."""
    train = prepare(options, tokenizer, "train")
    if options.valid is not None or has_own_split(options.train):
        valid = prepare(options, tokenizer, "valid")
    else:
        border = len(train) - max(1, round(len(train) * options.valid_fraction))
        if border < 1:
            raise UserError(
                f"data.train={options.train!r} has {len(train)} block(s) of {options.block_length} "
                "tokens: too few to hold some out; give more text or --data.valid"
            )
        train, valid = train.slice(0, border), train.slice(border, len(train))
    return train, valid


def prepare(options: DataOptions, tokenizer: Tokenizer, split: str) -> Blocks:
    """Blocks of one split, from the cache if its fingerprint is there."""
    cache = cache_folder(options.cache)
    name = options.valid if split == "valid" and options.valid is not None else options.train
    try:
        cache.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"cannot write the data cache {cache}: {error.strerror}") from None
    source = open_source(name, "valid" if split == "valid" else "train", options.documents, cache)
    key = _fingerprint(options, tokenizer, source)
    folder = cache / "blocks" / key[:24]
    if not (folder / "card.json").exists():
        _write(folder, options, tokenizer, source, key)
    return _open(folder, key)


def _fingerprint(options: DataOptions, tokenizer: Tokenizer, source: Source) -> str:
    parts = {
        "content": source.content_hash,
        "tokenizer": tokenizer.fingerprint,
        "documents": options.documents if not has_own_split(source.name.split("/")[0]) else "own",
        "packing": options.packing,
        "wrap": options.wrap,
        "block_length": options.block_length,
        "packer": PACKER_VERSION,
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


class _Encoder:
    """Documents as ids, one after another, counting text and tokens on the way."""

    def __init__(self, source: Source, tokenizer: Tokenizer) -> None:
        self.source, self.tokenizer = source, tokenizer
        self.num_bytes = self.num_tokens = 0

    def __iter__(self) -> Iterator[Ids]:
        for text in self.source.documents():
            ids = self.tokenizer.encode(text)
            self.num_bytes += len(text.encode("utf-8"))
            self.num_tokens += len(ids) + 1  # its EOS
            yield ids


def _rows(options: DataOptions, tokenizer: Tokenizer, encoded: Iterable[Ids]) -> Iterable[Row]:
    length, eos = options.block_length, tokenizer.eos_id
    if options.packing == "unpacked":
        return pad(encoded, length, eos_id=eos, pad_id=tokenizer.pad_id)
    return pack(encoded, length, eos_id=eos, bos_id=tokenizer.bos_id, wrap=options.wrap)


def _write(
    folder: Path,
    options: DataOptions,
    tokenizer: Tokenizer,
    source: Source,
    key: str,
) -> None:
    folder.parent.mkdir(parents=True, exist_ok=True)
    dtype = np.uint16 if tokenizer.num_tokens < 2**16 else np.uint32
    scratch = Path(tempfile.mkdtemp(dir=folder.parent, prefix=".writing-"))
    try:
        encoder = _Encoder(source, tokenizer)
        lengths: list[int] = []
        documents: list[int] = []
        with (scratch / "tokens.bin").open("wb") as stream:
            for row in _rows(options, tokenizer, encoder):
                stream.write(row.ids.astype(dtype).tobytes())
                lengths.append(row.length)
                documents.append(row.document)
        if not lengths:
            raise UserError(
                f"data {source.name!r} is shorter than one block of {options.block_length} tokens; "
                "give more text or a smaller --data.block-length"
            )
        np.array(lengths, dtype=np.int64).tofile(scratch / "lengths.bin")
        np.array(documents, dtype=np.int64).tofile(scratch / "documents.bin")
        card = {
            "fingerprint": key,
            "source": source.name,
            "content_hash": source.content_hash,
            "num_blocks": len(lengths),
            "num_tokens": sum(lengths),
            "num_bytes": encoder.num_bytes * sum(lengths) / encoder.num_tokens,
            "num_documents": documents[-1] + 1,
            "block_length": options.block_length,
            "dtype": np.dtype(dtype).name,
            "packing": options.packing,
            "wrap": options.wrap,
        }
        (scratch / "card.json").write_text(json.dumps(card, indent=1) + "\n")
        if folder.exists():
            shutil.rmtree(folder)
        os.replace(scratch, folder)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _open(folder: Path, key: str) -> Blocks:
    damaged = UserError(f"the data cache {folder} is damaged; delete that folder and run again")
    try:
        card = json.loads((folder / "card.json").read_text())
        shape = (card["num_blocks"], card["block_length"])
        tokens = np.memmap(folder / "tokens.bin", dtype=card["dtype"], mode="r")
        lengths = np.fromfile(folder / "lengths.bin", dtype=np.int64)
        documents = np.fromfile(folder / "documents.bin", dtype=np.int64)
    except (OSError, ValueError, KeyError, TypeError):
        raise damaged from None
    whole = card["fingerprint"] == key and tokens.size == shape[0] * shape[1]
    if not whole or len(lengths) != shape[0] or len(documents) != shape[0]:
        raise damaged
    return Blocks(tokens.reshape(shape), lengths, documents, key, card["num_bytes"])
