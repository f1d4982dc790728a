"""Rows of tokens: packed, in memory-mapped shards with a card of their origin, in batches by step.

A folder holds ``tokens-*.bin`` [ROWS_PER_SHARD, L] each, ``lengths.bin`` and ``documents.bin``
[num_blocks], ``starts.bin`` where rows begin with a prompt, and ``card.json``. It is complete or
absent: preparing writes to a temporary folder and renames it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from filelock import FileLock
from numpy.typing import NDArray
from torch import Tensor

from bellmask.config.options import DataOptions
from bellmask.data.readers import Source, cache_folder
from bellmask.data.tokenizers import Ids, Tokenizer
from bellmask.utils.errors import UserError
from bellmask.utils.files import is_whole, read_json, write_json
from bellmask.utils.rng import IndexPermutation, shuffle, stream_key

# Documents → fixed rows. Order-preserving, independent of CPU count; memory does not grow.
#
# packed: documents, each ended by EOS, are joined and cut every L tokens (every L - 2 when rows are
# wrapped in BOS ... EOS); the remainder at the end is dropped, or becomes a padded row. unpacked:
# one document per row, ended by EOS (and begun by BOS when wrapped), cut at L or padded to it.
#
# A packer's state is a few numbers and less than one row of tokens, so preparing can stop anywhere
# between documents and continue.

PACKER_VERSION = 4
"""Part of every cache key; increase it when the rows change."""


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
        """Tokens of the stream, or of a document, that fit in a row."""
        return self.block_length - (2 if self.wrap else 0 if self.is_packed else 1)


# Paper: App. C.1: LM1B
class Packer:
    """Turns documents, given in pieces, into rows."""

    def __init__(self, rules: PackingRules, state: Sequence[Any] = (0, (), 0)) -> None:
        """From the start, or from a state."""
        self.rules = rules
        num_documents, buffer, owner = state
        self.num_documents, self._owner = int(num_documents), int(owner)
        self._buffer = np.array(buffer, dtype=np.int64)

    def add(self, ids: Ids, is_end: bool) -> Iterator[Row]:
        """Take a piece of a document; ``is_end`` when it is the last one."""
        yield from (
            self._add_packed(ids, is_end) if self.rules.is_packed else self._add_padded(ids, is_end)
        )
        self.num_documents += is_end

    def finish(self) -> Iterator[Row]:
        """The remaining tokens, by the remainder rule."""
        if self.rules.is_packed and self.rules.keep_remainder and len(self._buffer):
            yield self._row(self._buffer, self._owner)
        self._buffer = self._buffer[:0]

    def _add_packed(self, ids: Ids, is_end: bool) -> Iterator[Row]:
        rules, content = self.rules, self.rules.content
        end = [rules.eos_id] if is_end and rules.insert_eos else []
        if not len(self._buffer):
            self._owner = self.num_documents
        self._buffer = np.concatenate([self._buffer, ids, np.array(end, dtype=np.int64)])
        while len(self._buffer) >= content:
            yield self._row(self._buffer[:content], self._owner)
            self._buffer, self._owner = self._buffer[content:], self.num_documents

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

    def state(self) -> tuple[int, list[int], int]:
        """The state between documents, to resume later."""
        return self.num_documents, self._buffer.tolist(), self._owner


# Rows on disk and in memory.

TOKENS_PER_SHARD = 1 << 26
"""Rows are spread over files of about this many tokens."""


class ShardedTokens:
    """Rows spread over arrays (files, mostly), indexed like one array [rows, L]."""

    def __init__(self, shards: Sequence[NDArray[Any]]) -> None:
        self.shards = shards
        self._starts = np.cumsum([0, *map(len, shards)])

    @property
    def shape(self) -> tuple[int, int]:
        return int(self._starts[-1]), self.shards[0].shape[1]

    def __getitem__(self, index: NDArray[np.int64] | slice) -> NDArray[Any] | ShardedTokens:
        """The given rows in memory; a slice of rows is not read yet."""
        if isinstance(index, slice):
            first, last, _ = index.indices(self.shape[0])
            shards = zip(self.shards, self._starts.tolist())
            cut = [shard[max(0, first - at) : max(0, last - at)] for shard, at in shards]
            return ShardedTokens([shard for shard in cut if len(shard)] or cut[:1])
        rows = np.empty((len(index), self.shape[1]), dtype=self.shards[0].dtype)
        shard = np.searchsorted(self._starts, index, side="right") - 1
        for number in np.unique(shard):
            inside = shard == number
            rows[inside] = self.shards[number][index[inside] - self._starts[number]]
        return rows

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        return np.concatenate(self.shards, dtype=dtype)


@dataclass(frozen=True)
class Blocks:
    """Rows of tokens; ``lengths`` counts the tokens before padding.

    Positions ``starts`` .. ``lengths`` - 1 of a row are maskable; what comes before is given.
    """

    tokens: NDArray[Any] | ShardedTokens
    lengths: NDArray[np.int64]
    documents: NDArray[np.int64]
    fingerprint: str
    num_bytes: float = 0.0
    """UTF-8 bytes of the text that maskable tokens represent; 0 if unknown."""
    starts: NDArray[np.int64] | None = None
    """First maskable position of each row; None: all begin at 0."""

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
        return _picked(self.tokens, index)

    def row_lengths(self, index: Tensor | slice) -> Tensor:
        """Tokens before padding in the given rows, int64."""
        return _picked(self.lengths, index)

    def row_starts(self, index: Tensor | slice) -> Tensor:
        """First maskable position of the given rows, int64."""
        if self.starts is None:
            return torch.zeros_like(self.row_lengths(index))
        return _picked(self.starts, index)

    def num_maskable(self, index: Tensor | slice) -> Tensor:
        """Maskable tokens of the given rows, int64."""
        return (self.row_lengths(index) - self.row_starts(index)).clamp(min=0)

    def _part(self, index: NDArray[np.int64] | slice, mark: str) -> Blocks:
        maskable = self.num_maskable(slice(None))
        return Blocks(
            self.tokens[index],
            self.lengths[index],
            self.documents[index],
            _sha256(f"{self.fingerprint}{mark}"),
            self.num_bytes * float(maskable[index].sum() / maskable.sum().clamp(1)),
            None if self.starts is None else self.starts[index],
        )

    def starting_at(self, first: int) -> Blocks:
        """The same rows with nothing before position ``first`` maskable."""
        if not first or (self.starts is not None and self.starts.min() >= first):
            return self
        starts = np.maximum(self.row_starts(slice(None)).numpy(), first)
        made = replace(self, starts=starts, fingerprint=_sha256(f"{self.fingerprint}/from {first}"))
        left, before = (int(blocks.num_maskable(slice(None)).sum()) for blocks in (made, self))
        return replace(made, num_bytes=self.num_bytes * left / max(1, before))

    def slice(self, start: int, stop: int) -> Blocks:
        """A slice of rows, with its own fingerprint. Bytes are divided in proportion to tokens."""
        return self._part(slice(start, stop), f"[{start}:{stop}]")

    def spread(self, count: int) -> Blocks:
        """``count`` evenly spread rows (0: all), which cover more documents than the first ones."""
        if not 0 < count < len(self):
            return self
        index = np.linspace(0, len(self) - 1, count).round().astype(np.int64)
        return self._part(index, f"/{count} spread")

    @staticmethod
    def from_rows(rows: Iterable[Row], num_bytes: float = 0.0) -> Blocks:
        kept = list(rows)
        tokens = np.stack([row.ids for row in kept])
        marks = np.array([(row.length, row.document, row.start) for row in kept], dtype=np.int64)
        lengths, documents, starts = np.ascontiguousarray(marks.T)
        held = [tokens, lengths, *([starts] if starts.any() else [])]
        content = hashlib.sha256(b"".join(array.tobytes() for array in held)).hexdigest()
        return Blocks(tokens, lengths, documents, content, num_bytes, *held[2:])


def _picked(values: NDArray[Any] | ShardedTokens, index: Tensor | slice) -> Tensor:
    picked = values[index.numpy() if isinstance(index, Tensor) else index]
    return torch.from_numpy(np.asarray(picked, dtype=np.int64))


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def join(parts: Sequence[Blocks]) -> Blocks:
    """Several sets of rows one after another, for mixtures."""
    arrays: list[NDArray[Any]] = []
    for part in parts:
        tokens = part.tokens
        arrays += tokens.shards if isinstance(tokens, ShardedTokens) else [tokens]
    has_starts = any(part.starts is not None for part in parts)
    starts = [part.row_starts(slice(None)).numpy() for part in parts] if has_starts else []
    return Blocks(
        ShardedTokens(arrays),
        np.concatenate([part.lengths for part in parts]),
        np.concatenate([part.documents for part in parts]),
        _sha256("/".join(part.fingerprint for part in parts)),
        sum(part.num_bytes for part in parts),
        np.concatenate(starts) if starts else None,
    )


def hold_out(
    blocks: Blocks, fraction: float, option: str, *, whole_documents: bool = False
) -> tuple[Blocks, Blocks]:
    """All but the last rows, and those; ``whole_documents``: none is in both."""
    border = len(blocks) - max(1, round(len(blocks) * fraction))
    number = blocks.documents
    while whole_documents and border > 0 and number[border] == number[border - 1]:
        border -= 1
    if border < 1:
        own = f"--{option.partition('.')[0]}.valid"
        raise UserError(f"{option} has {len(blocks)} row(s), too few to hold some out; add {own}")
    return blocks.slice(0, border), blocks.slice(border, len(blocks))


@dataclass(frozen=True)
class LoadedData:
    """Blocks to train and to validate on."""

    train: Blocks
    valid: Blocks
    sizes: tuple[int, ...] = ()
    """Of a mixture: blocks of each corpus, in the order they are joined."""
    weights: tuple[float, ...] = ()
    counts: Mapping[str, int] = field(default_factory=dict)
    """For prompts with responses: counts of used and dropped examples, with reasons."""


def shard_path(folder: Path, number: int) -> Path:
    """The file of a shard."""
    return folder / f"tokens-{number:05d}.bin"


def read_card(folder: Path) -> dict[str, Any]:
    """The data card of prepared blocks."""
    try:
        return dict(read_json(folder / "card.json"))
    except (OSError, ValueError, TypeError):
        raise _damaged(folder) from None


def open_blocks(folder: Path, key: str) -> Blocks:
    """Prepared blocks; UserError when any file is not as long as the card says."""
    card = read_card(folder)
    try:
        count, length, per_shard = sizes = [
            card[name] for name in ("num_blocks", "block_length", "rows_per_shard")
        ]
        is_right = all(is_whole(size, 1) for size in sizes) and card["fingerprint"] == key
        if not is_right or card["dtype"] not in ("uint16", "uint32"):
            raise ValueError("not a card of these blocks")
        shards = []
        for number in range(-(-count // per_shard)):
            rows = min(per_shard, count - number * per_shard)
            shard = np.memmap(shard_path(folder, number), dtype=card["dtype"], mode="r")
            shards.append(shard.reshape(rows, length))
        names = ["documents", "lengths", *(["starts"] if card.get("has_starts") else [])]
        columns = [np.fromfile(folder / f"{name}.bin", dtype=np.int64) for name in names]
        is_inside = all(bool(((c >= 0) & (c <= length)).all()) for c in columns[1:])
        if not is_inside or {len(column) for column in columns} != {count}:
            raise ValueError("not a value for each row")
        documents, lengths, *starts = columns
        num_bytes = float(card["num_bytes"])
        return Blocks(ShardedTokens(shards), lengths, documents, key, num_bytes, *starts)
    except (OSError, ValueError, KeyError, TypeError, OverflowError):
        raise _damaged(folder) from None


def _damaged(folder: Path) -> UserError:
    return UserError(f"the data cache {folder} is damaged; delete that folder and try again")


# The cache: folders of blocks by fingerprint.


def writable_cache(options: DataOptions) -> Path:
    """The cache folder, created if needed; UserError if it cannot be written."""
    cache = cache_folder(options.cache)
    try:
        (cache / "blocks").mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"cannot write the data cache {cache}: {error.strerror}") from None
    return cache


class BlockFolder:
    """The place of blocks in the cache, by a fingerprint of everything that determines them."""

    def __init__(
        self, cache: Path, parts: Any, source: Source[Any], tokenizer: Tokenizer, block_length: int
    ) -> None:
        self.key = _sha256(json.dumps(parts, sort_keys=True))
        self.path = cache / "blocks" / self.key[:24]
        self.source, self.block_length = source, block_length
        self.dtype = np.dtype(np.uint16 if tokenizer.num_tokens < 2**16 else np.uint32)
        self.per_shard = max(1, TOKENS_PER_SHARD // block_length)

    def blocks(self, make: Callable[[], None]) -> Blocks:
        """From the cache; if several processes need the same new blocks, the first prepares
        them.
        """
        if not (self.path / "card.json").exists():
            locks = self.path.parent.parent / "locks"
            locks.mkdir(exist_ok=True)
            with FileLock(locks / self.path.name):
                if not self.path.exists():
                    make()
        return open_blocks(self.path, self.key)

    def write_card(self, scratch: Path, **more: Any) -> None:
        """The data card; a folder with a card is complete."""
        card = {
            "fingerprint": self.key,
            "source": self.source.name,
            "origin": self.source.origin,
            "block_length": self.block_length,
            "rows_per_shard": self.per_shard,
            "dtype": self.dtype.name,
            **more,
        }
        write_json(scratch / "card.json", card, ensure_ascii=False)


# Step → global batch → this rank's slice: a function of (seed, step), without state.

MIXTURE_PERIOD = 1000
"""Mixture weights are exact in every window of this many samples."""


@dataclass(frozen=True)
class BatchPlan:
    """Sample i of step s is number g = s B + i of an endless run of shuffled epochs.

    With ``sizes`` and ``weights`` the blocks are several corpora one after another, drawn in
    proportion to the weights; each goes through its own epochs.
    """

    num_blocks: int
    batch_size: int
    seed: int
    sizes: tuple[int, ...] = ()
    weights: tuple[float, ...] = ()

    def rows(self, step: int) -> Tensor:
        """Block numbers of the global batch at a step, int64 [batch_size]."""
        g = step * self.batch_size + torch.arange(self.batch_size)
        if not self.sizes:
            return self._shuffled(g, self.num_blocks, "data")
        pattern, rank, counts = self._pattern()
        cycle, place = g // MIXTURE_PERIOD, g % MIXTURE_PERIOD
        rows, offset = torch.empty_like(g), 0
        for corpus, size in enumerate(self.sizes):
            inside = pattern[place] == corpus
            number = cycle[inside] * counts[corpus] + rank[place[inside]]
            rows[inside] = offset + self._shuffled(number, size, f"data {corpus}")
            offset += size
        return rows

    def _shuffled(self, number: Tensor, size: int, stream: str) -> Tensor:
        """Each number's block: its place in its epoch, through that epoch's permutation."""
        epoch, place = number // size, number % size
        rows = torch.empty_like(number)
        for e in torch.unique(epoch).tolist():
            inside = epoch == e
            permuted = IndexPermutation(size, stream_key(self.seed, stream, e))
            rows[inside] = permuted(place[inside])
        return rows

    def _pattern(self) -> tuple[Tensor, Tensor, list[int]]:
        """(corpus of each place in a period, rank among the places of that corpus, counts)."""
        counts = share_out(self.weights, MIXTURE_PERIOD)
        corpus = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
        pattern = corpus[shuffle(stream_key(self.seed, "mixture"), MIXTURE_PERIOD)]
        is_corpus = pattern[:, None] == torch.arange(len(counts))
        rank = (is_corpus.cumsum(0) - 1).gather(1, pattern[:, None]).squeeze(1)
        return pattern, rank, counts


def share_out(weights: Sequence[float], total: int) -> list[int]:
    """Whole numbers in proportion to weights that add up to ``total`` (largest remainders)."""
    exact = [w / sum(weights) * total for w in weights]
    counts = [int(e) for e in exact]
    by_remainder = sorted(range(len(exact)), key=lambda i: counts[i] - exact[i])
    for i in by_remainder[: total - sum(counts)]:
        counts[i] += 1
    return counts


def rank_share(batch_size: int, rank: int, world_size: int) -> range:
    """The global indices of this rank's samples: one contiguous run."""
    share = batch_size // world_size
    return range(rank * share, (rank + 1) * share)
