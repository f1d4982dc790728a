"""Text → blocks: preparing, the cache, mixtures; the commands ``bellmask data`` and ``prepare``."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import tyro

from bellmask.config.command_line import parse_command, parse_data_command
from bellmask.config.config import RunConfig, override
from bellmask.config.options import DataOptions
from bellmask.config.presets import PRESETS
from bellmask.data.blocks import (
    Blocks,
    join,
    open_blocks,
    read_card,
    rows_per_shard,
    shard_path,
)
from bellmask.data.corpora import (
    CORPORA,
    InWheel,
    Policy,
    Split,
    find_policy,
    has_split,
    is_toy,
    open_corpus,
)
from bellmask.data.detokenize import detokenizer
from bellmask.data.packing import PACKER_VERSION, Packer, PackingRules, Row
from bellmask.data.readers import Piece, Source, cache_folder
from bellmask.data.tokenizers import Tokenizer, load_tokenizer
from bellmask.utils.console import visible_lines
from bellmask.utils.errors import UserError, look_up
from bellmask.utils.files import is_whole, read_json
from bellmask.utils.progress import NO_PROGRESS, Progress, progress_bar
from bellmask.utils.table import Table

# Text → shards: streamed once, in constant memory, resumed where it stopped.
#
# Progress is written after whole documents: how many were read, how many rows are on disk, and the
# packer's few tokens in hand. Going on skips the documents already read and cuts files back to the
# rows that were recorded, so the result is the same as without the interruption.

BATCH_CHARACTERS = 1 << 20
"""Text handed to the tokenizer at once."""
RECORD_SECONDS = 2.0
"""Progress is recorded about this often."""


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
        progress: Progress,
    ) -> None:
        self.folder, self.key, self.source, self.policy = folder, key, source, policy
        self.rules, self.tokenizer, self.progress = rules, tokenizer, progress
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
        megabytes = self.done["bytes"] / 1e6
        self.progress.advance(
            sum(piece.is_end for piece in batch), f"{megabytes:,.1f} MB, {self.done['rows']:,} rows"
        )
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


# Options → blocks: from the cache, or prepared now; validation, mixtures, fingerprints.


def make_tokenizer(options: DataOptions) -> Tokenizer:
    """The tokenizer the options name, learned from the training text if they say so."""
    cache = writable_cache(options)

    def training_text() -> tuple[str, Callable[[], Iterator[str]]]:
        source, policy = open_corpus(options, "train", cache)
        clean = detokenizer(policy.detokenizer)
        identity = f"{source.identity}/{policy.documents}/{policy.column}/{policy.detokenizer}"
        return identity, lambda: (clean(piece.text) for piece in source.pieces())

    return load_tokenizer(options.tokenizer, cache, training_text)


@dataclass(frozen=True)
class LoadedData:
    """Blocks to train and to validate on."""

    train: Blocks
    valid: Blocks
    sizes: tuple[int, ...] = ()
    """Of a mixture: blocks of each corpus, in the order they are joined."""
    weights: tuple[float, ...] = ()
    counts: Mapping[str, int] = field(default_factory=dict)
    """Of prompts with responses: what was taken and what was left out, and why."""


def load_data(
    options: DataOptions, tokenizer: Tokenizer, progress: Progress = NO_PROGRESS
) -> LoadedData:
    """Everything a run reads: the training mixture and the validation text of its first corpus."""
    if is_toy(options.train):
        from bellmask.data.toys import toy_blocks

        return LoadedData(*toy_blocks(options, tokenizer))
    train, valid = load_blocks(options, tokenizer, progress)
    others = parse_mixture(options.mixture)
    if not others:
        return LoadedData(train, valid)
    parts = [train]
    for name in others:
        wrap = find_policy(options, options.train).wrap
        other = replace(
            options,
            train=name,
            from_files=None,
            valid=None,
            mixture=(),
            documents="auto",
            column=None,
            detokenizer="auto",
            wrap=wrap,
        )
        parts.append(prepare(other, tokenizer, "train", progress))
    weights = (1 - sum(others.values()), *others.values())
    return LoadedData(join(parts), valid, tuple(len(part) for part in parts), weights)


def parse_mixture(mixture: Sequence[str]) -> dict[str, float]:
    """``("ptb=0.3",)`` as names and weights; UserError unless some of 1 is left."""
    weights: dict[str, float] = {}
    seen: set[str] = set()
    for item in mixture:
        name, _, weight = item.rpartition("=")
        try:
            weights[name] = float(weight)
        except ValueError:
            name = ""
        if item.rpartition("=")[0] in seen:
            raise UserError(f"data.mixture names {name} twice")
        seen.add(name)
        if not name or not 0.001 <= weights[name] < 1:
            raise UserError(
                f"data.mixture: write NAME=0.3 with a weight from 0.001 to 1, not {item!r}"
            )
    if sum(weights.values()) >= 1:
        raise UserError(f"data.mixture: the weights {mixture} leave nothing for --data.train")
    return weights


def load_blocks(
    options: DataOptions, tokenizer: Tokenizer, progress: Progress = NO_PROGRESS
) -> tuple[Blocks, Blocks]:
    """Training and validation blocks, prepared now or taken from the cache."""
    train = prepare(options, tokenizer, "train", progress)
    if options.valid is not None or has_split(options, "valid"):
        return train, prepare(options, tokenizer, "valid", progress)
    border = len(train) - max(1, round(len(train) * options.valid_fraction))
    if border < 1:
        raise UserError(
            f"data.train={options.train!r} has {len(train)} block(s) of {options.block_length} "
            "tokens: too few to hold some out; give more text or --data.valid"
        )
    return train.slice(0, border), train.slice(border, len(train))


def prepare(
    options: DataOptions, tokenizer: Tokenizer, split: str, progress: Progress = NO_PROGRESS
) -> Blocks:
    """Blocks of one split, from the cache if its fingerprint is there."""
    folder, key, work = locate(options, tokenizer, split)
    if not (folder / "card.json").exists():
        with one_at_a_time(folder):
            if not folder.exists():
                work(progress)
    return open_blocks(folder, key)


def locate(
    options: DataOptions, tokenizer: Tokenizer, split: str
) -> tuple[Path, str, Callable[[Progress], None]]:
    """(folder, fingerprint, what to call to fill the folder) of a split's blocks."""
    cache = writable_cache(options)
    source, policy = open_corpus(options, "valid" if split == "valid" else "train", cache)
    rules = _rules(options, policy, tokenizer)
    key = _fingerprint(source, policy, rules, tokenizer)
    folder = cache / "blocks" / key[:24]

    def work(progress: Progress) -> None:
        Preparation(folder, key, source, policy, rules, tokenizer, progress).run()

    return folder, key, work


def writable_cache(options: DataOptions) -> Path:
    """The cache's folder, made if need be; UserError where that cannot be."""
    cache = cache_folder(options.cache)
    try:
        (cache / "blocks").mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"cannot write the data cache {cache}: {error.strerror}") from None
    return cache


@contextlib.contextmanager
def one_at_a_time(folder: Path) -> Iterator[None]:
    """Processes that want the same blocks wait for the first one."""
    locks = folder.parent.parent / "locks"
    locks.mkdir(exist_ok=True)
    with (locks / folder.name).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _rules(options: DataOptions, policy: Policy, tokenizer: Tokenizer) -> PackingRules:
    if policy.wrap and options.block_length < 3:
        raise UserError("rows wrapped in BOS ... EOS need a block length of at least 3")
    has_eos = tokenizer.eos_id >= 0
    needs_eos = policy.wrap or options.packing == "unpacked" or options.document_attention
    if needs_eos and not has_eos:
        raise UserError(
            f"data.tokenizer={options.tokenizer} has no EOS: leave out --data.wrap, "
            "--data.packing unpacked and --data.document-attention, or choose another tokenizer"
        )
    return PackingRules(
        options.block_length,
        tokenizer.eos_id,
        tokenizer.bos_id,
        tokenizer.pad_id,
        is_packed=options.packing == "packed",
        wrap=policy.wrap,
        insert_eos=policy.insert_eos and has_eos,
        keep_remainder=options.remainder == "keep",
    )


def _fingerprint(source: Source, policy: Policy, rules: PackingRules, tokenizer: Tokenizer) -> str:
    parts = {
        "content": source.identity,
        "tokenizer": tokenizer.fingerprint,
        "documents": policy.documents,
        "column": policy.column,
        "detokenizer": policy.detokenizer,
        "rules": vars(rules),
        "packer": PACKER_VERSION,
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


# ``bellmask data``: the named corpora, and the data card of prepared blocks.


@dataclass(frozen=True, kw_only=True)
class CorpusOptions:
    """What commands share that read one corpus."""

    corpus: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="CORPUS")]
    """A corpus from 'bellmask data list', a preset, a file or quoted glob of text, JSONL, CSV or
    Parquet (also .gz, .xz, .zst), or hub:owner/name[:config[:split]]."""
    from_files: Annotated[str | None, tyro.conf.arg(name="from", metavar="PATH")] = None
    """Local files to read a named corpus from, by its rules, instead of fetching it."""


@dataclass(frozen=True, kw_only=True)
class DataShowOptions(CorpusOptions):
    """Show what a corpus became: the data card and a few decoded blocks.

    The card has counts, tokens per byte, hashes of the sources, license, every rule that was
    applied and the fingerprint. Blocks that are not prepared yet are prepared first. Any --data
    option of 'bellmask train' can follow.

    Examples:
    bellmask data show wikitext2

    bellmask data show wikitext2 --split valid

    bellmask data show lm1b --from 'lm1b/*.txt' --data.tokenizer bert-base-uncased
    """

    split: Literal["train", "valid"] = "train"
    """Which part."""


@dataclass(frozen=True)
class DataListOptions:
    """List the named corpora.

    Examples:
    bellmask data list
    """


DATA_HELP = """List named corpora, or show what a corpus became.

usage: bellmask data list
       bellmask data show CORPUS [options]    (bellmask data show --help says more)

examples:
  bellmask data list
  bellmask data show wikitext2
"""


def _data_options(options: CorpusOptions, args: Sequence[str], where: str) -> DataOptions:
    name = options.corpus
    start = PRESETS[name]() if name in PRESETS else RunConfig()
    data = start.data if name in PRESETS else replace(start.data, train=name)
    if options.from_files is not None:
        data = replace(data, from_files=options.from_files)
    return override(replace(start, data=data), args, where).check().data


def require_text(options: DataOptions, split: str) -> None:
    """Refuse a validation split where there is no text for it."""
    if split == "valid" and options.valid is None and not has_split(options, "valid"):
        raise UserError(
            f"{options.train} has no validation text of its own: training holds out the last "
            f"{options.valid_fraction:.0%} of its blocks; give some with --data.valid PATH"
        )


def print_card(card: dict[str, Any], title: str) -> None:
    """The data card as a table."""
    try:
        rows = _card_rows(card)
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError):
        raise UserError(f"the data card of {title} is damaged; delete the data cache") from None
    Table(title, ["data card", ""], rows).print()


def _card_rows(card: dict[str, Any]) -> list[list[str]]:
    ratio = card["text_tokens"] / max(1, card["text_bytes"])
    rows = [
        ["source", card["source"]],
        ["licence", card["licence"]],
        *[["  " + name, mark] for name, mark in list(card["origin"].items())[:8]],
        ["documents", f"{card['num_documents']:,}"],
        ["text", f"{card['text_bytes']:,} bytes, {card['text_tokens']:,} tokens"],
        ["tokens per byte", f"{ratio:.4f}"],
        ["blocks", f"{card['num_blocks']:,} of {card['block_length']} tokens"],
        ["a document is", f"{card['documents']}, column {card['column']}"],
        ["detokeniser", card["detokenizer"]],
        ["packing", f"{card['packing']}, remainder {card['remainder']}"],
        ["EOS after documents", "yes" if card["insert_eos"] else "no"],
        ["rows wrapped in BOS ... EOS", "yes" if card["wrap"] else "no"],
        ["vocabulary", f"{card['num_token_kinds']:,} tokens and the mask"],
        ["fingerprint", card["fingerprint"]],
    ]
    return [[str(cell) for cell in row] for row in rows]


def _list(args: Sequence[str]) -> int:
    parse_command(DataListOptions, args, command="data list")
    rows = []
    for name, corpus in CORPORA.items():
        in_wheel = any(isinstance(split, InWheel) for split in corpus.splits.values())
        where = "package index" if in_wheel else "hub" if corpus.splits else "--from"
        rows.append([name, where, corpus.detokenizer, corpus.licence])
    Table("named corpora", ["name", "comes from", "detokeniser", "licence"], rows).print()
    for name, corpus in CORPORA.items():
        if corpus.note:
            print(f"{name}: {corpus.note}")
    return 0


def _show(args: Sequence[str]) -> int:
    where = "bellmask data show"
    command, rest = parse_data_command(DataShowOptions, args, command="data show")
    options, split = _data_options(command, rest, where), command.split
    require_text(options, split)
    tokenizer = make_tokenizer(options)
    with progress_bar("preparing", "documents") as progress:
        blocks = prepare(options, tokenizer, split, progress)
    folder, _, _ = locate(options, tokenizer, split)
    print_card(read_card(folder), f"{options.train}, {split}")
    for number in (0, len(blocks) // 2, len(blocks) - 1):
        text = tokenizer.decode(blocks.rows(slice(number, number + 1))[0].numpy())
        print(f"\nblock {number}:\n{visible_lines(text)}")
    return 0


def data_main(args: Sequence[str]) -> int:
    """List or show."""
    if not args or args[0] in ("-h", "--help"):
        print(DATA_HELP)
        return 0
    action, *rest = args
    return look_up("data action", action, {"list": _list, "show": _show})(rest)


# ``bellmask prepare``: text to shards, before training needs them.


@dataclass(frozen=True, kw_only=True)
class PrepareOptions(CorpusOptions):
    """Turn a corpus into training blocks, once; training finds them in the cache.

    Any --data option of 'bellmask train' can follow: tokenizer, block-length, packing, wrap, ...
    Stopped with Ctrl-C or killed, the same command continues where it stopped.

    Examples:
    bellmask prepare wikitext2

    bellmask prepare lm1b --from 'lm1b/*.txt' --data.tokenizer bert-base-uncased

    bellmask prepare 'pages/*.jsonl.zst' --data.tokenizer bpe:8192 --data.block-length 512
    """

    split: Literal["train", "valid", "all"] = "all"
    """Which part."""


def prepare_main(args: Sequence[str]) -> int:
    """Prepare and say where the blocks are."""
    command, rest = parse_data_command(PrepareOptions, args, command="prepare")
    options, split = _data_options(command, rest, "bellmask prepare"), command.split
    parts: list[Split] = ["train", "valid"]
    parts = [part for part in parts if split in (part, "all")]
    tokenizer = make_tokenizer(options)
    for part in parts:
        has_text = has_split(options, part) or (part == "valid" and options.valid is not None)
        if split == "all" and not has_text:
            continue
        require_text(options, part)
        try:
            with progress_bar("preparing", "documents") as progress:
                prepare(options, tokenizer, part, progress)
        except KeyboardInterrupt:
            print("stopped; the same command goes on where it stopped", file=sys.stderr)
            return 130
        folder, _, _ = locate(options, tokenizer, part)
        print_card(read_card(folder), f"{options.train}, {part}")
        print(f"blocks: {folder}")
    return 0
