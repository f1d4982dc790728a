"""Text → blocks: preparing, the cache, mixtures; the commands ``bellmask data`` and ``prepare``."""

from __future__ import annotations

import contextlib
import inspect
import json
import logging
import os
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np
import tyro

from bellmask.config.command_line import parse_command, parse_data_command
from bellmask.config.config import RunConfig, override
from bellmask.config.options import DataOptions
from bellmask.config.presets import PRESETS
from bellmask.data import blocks as block_files
from bellmask.data import corpora
from bellmask.data.blocks import BlockFolder, Blocks, LoadedData, Packer, PackingRules, Row
from bellmask.data.detokenize import detokenizer
from bellmask.data.examples import IN_CONVERSATIONS, load_example_blocks
from bellmask.data.readers import Piece, parse_numbers, rule_identity
from bellmask.data.tokenizers import Tokenizer, load_tokenizer
from bellmask.data.toys import toy_blocks
from bellmask.utils.console import visible_lines
from bellmask.utils.errors import UserError, check_least, look_up
from bellmask.utils.files import is_whole, read_json, write_text
from bellmask.utils.progress import NO_PROGRESS, Progress, progress_bar
from bellmask.utils.table import Table

logger = logging.getLogger(__name__)

if TYPE_CHECKING:
    from bellmask.model.pretrained import Backbone

# Text → shards: streamed once, in constant memory, resumed where it stopped.
#
# Progress is written after whole documents: how many were read, how large each file was, and the
# packer's pending tokens. Resuming skips the documents already read and truncates files to
# their recorded size, so the result is the same as without the interruption.

BATCH_CHARACTERS = 1 << 20
"""Text handed to the tokenizer at once."""
RECORD_SECONDS = 2.0
"""Progress is recorded about this often."""


class Preparation:
    """The blocks of one split: their place in the cache, and the pass over the text that fills it.

    It writes into ``.preparing-*`` next to the final folder.
    """

    def __init__(self, options: DataOptions, tokenizer: Tokenizer, split: corpora.Split) -> None:
        cache = block_files.writable_cache(options)
        self.source, self.policy = corpora.open_corpus(options, split, cache)
        self.tokenizer = tokenizer
        self.rules = _rules(options, self.policy, tokenizer)
        parts = {
            "content": self.source.identity,
            "tokenizer": tokenizer.fingerprint,
            "documents": rule_identity(self.policy.documents),
            "column": self.policy.column,
            "detokenizer": self.policy.detokenizer,
            "rules": vars(self.rules),
            "packer": block_files.PACKER_VERSION,
        }
        self.place = BlockFolder(cache, parts, self.source, tokenizer, self.rules.block_length)
        self.scratch = self.place.path.with_name(f".preparing-{self.place.path.name}")

    def blocks(self, progress: Progress = NO_PROGRESS) -> Blocks:
        """From the cache, or prepared now."""
        logger.debug("blocks of %s: %s", self.source.name, self.place.path)
        return self.place.blocks(lambda: self._run(progress))

    def _run(self, progress: Progress) -> None:
        """Read the rest of the text, then move the folder into place."""
        self._resume()
        recorded = time.monotonic()
        try:
            for batch in self._batches():
                self._take(batch)
                size = f"{self.done['bytes'] / 1e6:,.1f} MB, {self.done['rows']:,} rows"
                progress.advance(sum(piece.is_end for piece in batch), size)
                if batch[-1].is_end and time.monotonic() - recorded > RECORD_SECONDS:
                    self._record()
                    recorded = time.monotonic()
            self._write(list(self.packer.finish()))
            if not self.done["bytes"]:
                raise UserError(f"data {self.source.name!r} is empty: there is no text in it")
            if not self.done["rows"]:
                words = f"is shorter than --data.block-length {self.rules.block_length}: reduce it,"
                raise UserError(f"data {self.source.name!r} {words} or --data.remainder keep")
        except UserError:
            shutil.rmtree(self.scratch, ignore_errors=True)  # invalid input: nothing to keep
            raise
        (self.scratch / "progress.json").unlink(missing_ok=True)
        self._write_card()
        os.replace(self.scratch, self.place.path)

    def _batches(self) -> Iterator[list[Piece]]:
        """Pieces not yet read, about a megabyte at a time."""
        clean = detokenizer(self.policy.detokenizer)
        batch: list[Piece] = []
        size = 0
        for piece in corpora.documents_kept(self.source.read(), self.packer.num_documents):
            batch.append(Piece(clean(piece.text), piece.is_end))
            size += len(piece.text)
            if size >= BATCH_CHARACTERS:
                yield batch
                batch, size = [], 0
        if batch:
            yield batch

    def _take(self, batch: list[Piece]) -> None:
        adds_eos = self.rules.insert_eos if self.rules.is_packed else not self.rules.wrap
        encoded = self.tokenizer.encode_batch([piece.text for piece in batch])
        rows: list[Row] = []
        for piece, ids in zip(batch, encoded, strict=True):
            rows += self.packer.add(ids, piece.is_end)
            self.done["bytes"] += len(piece.text.encode("utf-8"))
            self.done["tokens"] += len(ids) + (piece.is_end and adds_eos)
        self._write(rows)

    def _write(self, rows: list[Row]) -> None:
        while rows:
            number, filled = divmod(self.done["rows"], self.place.per_shard)
            room = self.place.per_shard - filled
            part, rows = rows[:room], rows[room:]
            marks = np.array([(row.length, row.document) for row in part], dtype=np.int64)
            tokens = np.stack([row.ids for row in part]).astype(self.place.dtype)
            for path, values in (
                (block_files.shard_path(self.scratch, number), tokens),
                (self.scratch / "lengths.bin", marks[:, 0]),
                (self.scratch / "documents.bin", marks[:, 1]),
            ):
                with path.open("ab") as stream:
                    stream.write(values.tobytes())
            self.done["rows"] += len(part)
            self.done["real_tokens"] += int(marks[:, 0].sum())

    def _record(self) -> None:
        sizes = {path.name: path.stat().st_size for path in self.scratch.glob("*.bin")}
        state = {"done": self.done, "packer": self.packer.state(), "sizes": sizes}
        write_text(self.scratch / "progress.json", json.dumps(state))

    def _resume(self) -> None:
        """Resume recorded progress if it matches the files; otherwise start over."""
        try:
            state = read_json(self.scratch / "progress.json")
            sizes = {self.scratch / name: int(size) for name, size in state["sizes"].items()}
            if any(path.stat().st_size < size for path, size in sizes.items()):
                raise ValueError("lost in a power cut")
            for path in self.scratch.glob("*.bin"):
                os.truncate(path, sizes.get(path, 0))
            self.packer = Packer(self.rules, state["packer"])
            self.done = dict(state["done"])
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            shutil.rmtree(self.scratch, ignore_errors=True)
            self.scratch.mkdir()
            self.packer = Packer(self.rules)
            self.done = {"rows": 0, "bytes": 0, "tokens": 0, "real_tokens": 0}

    def _write_card(self) -> None:
        done, rules = self.done, self.rules
        content = done["real_tokens"] - (2 * done["rows"] if rules.wrap else 0)
        read_by = ("license", "documents", "column", "detokenizer")
        self.place.write_card(
            self.scratch,
            num_blocks=done["rows"],
            num_documents=self.packer.num_documents,
            num_tokens=done["real_tokens"],
            num_bytes=done["bytes"] * min(1.0, content / max(1, done["tokens"])),
            text_bytes=done["bytes"],
            text_tokens=done["tokens"],
            **{name: getattr(self.policy, name) for name in read_by},
            packing="packed" if rules.is_packed else "unpacked",
            wrap=rules.wrap,
            insert_eos=rules.insert_eos,
            remainder="keep" if rules.keep_remainder else "drop",
            num_token_kinds=self.tokenizer.num_tokens,
        )


def _rules(options: DataOptions, policy: corpora.Corpus, tokenizer: Tokenizer) -> PackingRules:
    if policy.wrap and options.block_length < 3:
        raise UserError("rows wrapped in BOS ... EOS need a block length of at least 3")
    has_eos = tokenizer.eos_id >= 0
    needs_eos = policy.wrap or options.packing == "unpacked" or options.document_attention
    if needs_eos and not has_eos:
        omit = "omit --data.wrap, --data.packing unpacked and --data.document-attention"
        raise UserError(f"data.tokenizer={options.tokenizer} has no EOS: {omit}, or use another")
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


def prepare(
    options: DataOptions,
    tokenizer: Tokenizer,
    split: corpora.Split,
    progress: Progress = NO_PROGRESS,
) -> Blocks:
    """Blocks of one split, from the cache if its fingerprint is there."""
    return Preparation(options, tokenizer, split).blocks(progress)


# What a run reads: blocks of text, or prompts with responses.

RESPONSES_LOOKED_AT = 10_000


def make_tokenizer(options: DataOptions) -> Tokenizer:
    """The tokenizer of the options, learned from the training text if necessary."""
    cache = block_files.writable_cache(options)

    def training_text() -> tuple[str, Callable[[], Iterator[str]]]:
        source, policy = corpora.open_corpus(options, "train", cache)
        clean = detokenizer(policy.detokenizer)
        rule = rule_identity(policy.documents)
        identity = f"{source.identity}/{rule}/{policy.column}/{policy.detokenizer}"
        return identity, lambda: (clean(piece.text) for piece in source.read())

    return load_tokenizer(options.tokenizer, cache, training_text)


def load_inputs(
    config: RunConfig,
    tokenizer: Tokenizer,
    backbone: Backbone | None = None,
    progress: Progress = NO_PROGRESS,
) -> LoadedData:
    """Training and validation blocks; for a causal LM, position 0 is given."""
    first = 0 if config.model.backbone == "dit" else 1
    if config.sft.train is None:
        data = load_data(config.data, tokenizer, progress)
    else:
        template = None if backbone is None else backbone.chat_template
        data = load_example_blocks(
            config.data, config.sft, tokenizer, template, progress, bos_first=first == 1
        )
    return replace(data, train=data.train.starting_at(first), valid=data.valid.starting_at(first))


def load_data(
    options: DataOptions, tokenizer: Tokenizer, progress: Progress = NO_PROGRESS
) -> LoadedData:
    """The training mixture, and the validation text of its first corpus."""
    corpora.check_split(options, options.valid_split)
    if corpora.is_toy(options.train):
        return LoadedData(*toy_blocks(options, tokenizer))
    train = prepare(options, tokenizer, "train", progress)
    if corpora.has_split(options, options.valid_split):
        valid = prepare(options, tokenizer, options.valid_split, progress)
    else:
        name = f"data.train={options.train!r}"
        train, valid = block_files.hold_out(train, options.valid_fraction, name)
    others = parse_mixture(options.mixture)
    if not others:
        return LoadedData(train, valid)
    # a corpus of a mixture is read by its own rules, but all rows are wrapped alike
    own: dict[str, Any] = {"from_files": None, "valid": None, "mixture": ()}
    own |= {"documents": "auto", "column": None, "detokenizer": "auto"}
    own |= {"wrap": corpora.find_policy(options, options.train).wrap}
    parts = [train]
    for name in others:
        parts.append(prepare(replace(options, train=name, **own), tokenizer, "train", progress))
    weights = (1 - sum(others.values()), *others.values())
    return LoadedData(block_files.join(parts), valid, tuple(len(part) for part in parts), weights)


def parse_mixture(mixture: Sequence[str]) -> dict[str, float]:
    """``("ptb=0.3",)`` as names and weights; UserError unless some of 1 is left."""

    def parse(text: str) -> float | None:
        with contextlib.suppress(ValueError):
            return weight if 0.001 <= (weight := float(text)) < 1 else None
        return None

    form = "NAME=0.3 with a weight from 0.001 to 1"
    weights = parse_numbers("data.mixture", mixture, parse, form)
    if sum(weights.values()) >= 1:
        raise UserError(f"data.mixture: the weights {mixture} must sum to less than 1")
    return weights


def describe_blocks(config: RunConfig, data: LoadedData) -> dict[str, Any]:
    """The data section of run.json; for responses, the default gap length for generation."""
    about: dict[str, Any] = {
        "train_fingerprint": data.train.fingerprint,
        "valid_fingerprint": data.valid.fingerprint,
        "train_blocks": len(data.train),
        "valid_blocks": len(data.valid),
    }
    if config.sft.train is not None:
        # roles were marked: by the template in all rows, or in at least half of them
        is_mostly_chat = 2 * data.counts.get(IN_CONVERSATIONS, 0) >= data.counts["rows"]
        template = {"auto": is_mostly_chat, "plain": False}
        sizes = data.train.num_maskable(slice(0, RESPONSES_LOOKED_AT)).float()
        about["has_turns"] = template.get(config.sft.template, True)
        about["response_tokens"] = int(sizes.quantile(0.9, interpolation="higher"))
    return about


# ``bellmask data``: the named corpora, and the data card of prepared blocks.


@dataclass(frozen=True, kw_only=True)
class CorpusOptions:
    """Options of commands that read one corpus."""

    corpus: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="CORPUS")]
    """A corpus from 'bellmask data list', a preset, a file or quoted glob of text, JSONL, CSV or
    Parquet (also .gz, .xz, .zst), or hub:owner/name[:config[:split]]."""
    from_files: Annotated[str | None, tyro.conf.arg(name="from", metavar="PATH")] = None
    """Local files of a named corpus, read by its rules instead of downloaded."""


@dataclass(frozen=True, kw_only=True)
class DataShowOptions(CorpusOptions):
    """Show a prepared corpus: the data card and a few decoded blocks.

    The card has counts, tokens per byte, hashes of the sources, the license, every rule that was
    applied and the fingerprint. Blocks are prepared if needed. Any --data
    option of 'bellmask train' can follow.

    Examples:
    bellmask data show wikitext2

    bellmask data show wikitext2 --split valid

    bellmask data show lm1b --from 'lm1b/*.txt' --data.tokenizer bert-base-uncased
    """

    split: corpora.Split = "train"
    """Split to show."""


@dataclass(frozen=True)
class DataListOptions:
    """List the named corpora.

    Examples:
    bellmask data list
    """


def _data_options(options: CorpusOptions, args: Sequence[str], where: str) -> DataOptions:
    name = options.corpus
    start = PRESETS[name]() if name in PRESETS else RunConfig(data=DataOptions(train=name))
    if options.from_files is not None:
        start = replace(start, data=replace(start.data, from_files=options.from_files))
    data = override(start, args, where).check().data
    corpora.check_split(data, data.valid_split)
    return data


def _prepare_and_print(
    options: DataOptions, tokenizer: Tokenizer, split: corpora.Split
) -> tuple[Blocks, Path]:
    """Prepare blocks and print their data card; return the blocks and their folder."""
    if not corpora.has_split(options, split) and split == "valid":
        raise UserError(f"{options.train} has no validation split; set one with --data.valid PATH")
    part = Preparation(options, tokenizer, split)
    with progress_bar("preparing", "documents") as progress:
        blocks = part.blocks(progress)
    title = f"{options.train}, {split}"
    Table(title, ["data card", ""], _card_rows(block_files.read_card(part.place.path))).print()
    return blocks, part.place.path


def _card_rows(card: dict[str, Any]) -> list[list[str]]:
    """All of the card, the hashes of the sources one by one."""
    ratio = card["text_tokens"] / max(1, card["text_bytes"])
    shown = {**card, "tokens per byte": f"{ratio:.4f}"}
    shown |= {f"from {name}": mark for name, mark in list(shown.pop("origin").items())[:8]}
    return [[k.replace("_", " "), f"{v:,}" if is_whole(v) else str(v)] for k, v in shown.items()]


def _list(args: Sequence[str]) -> int:
    parse_command(DataListOptions, args, command="data list")
    rows = []
    for name, corpus in corpora.CORPORA.items():
        in_wheel = any(isinstance(split, corpora.InWheel) for split in corpus.splits.values())
        where = "package index" if in_wheel else "hub" if corpus.splits else "--from"
        rows.append([name, where, corpus.detokenizer, corpus.license])
    notes = [f"{name}: {corpus.note}" for name, corpus in corpora.CORPORA.items() if corpus.note]
    Table("named corpora", ["name", "comes from", "detokenizer", "license"], rows, notes).print()
    return 0


def _show(args: Sequence[str]) -> int:
    command, rest = parse_data_command(DataShowOptions, args, command="data show")
    options = _data_options(command, rest, "bellmask data show")
    tokenizer = make_tokenizer(options)
    blocks, _ = _prepare_and_print(options, tokenizer, command.split)
    for number in (0, len(blocks) // 2, len(blocks) - 1):
        text = tokenizer.decode(blocks.rows(slice(number, number + 1))[0].numpy())
        print(f"\nblock {number}:\n{visible_lines(text)}")
    return 0


def data_main(args: Sequence[str]) -> int:
    """List named corpora, or show a corpus's data card.

    usage: bellmask data list
           bellmask data show CORPUS [options]    (see bellmask data show --help)

    Examples:
      bellmask data list
      bellmask data show wikitext2
    """
    if not args or args[0] in ("-h", "--help"):
        print(inspect.getdoc(data_main))
        return 0
    action, *rest = args
    return look_up("data action", action, {"list": _list, "show": _show})(rest)


# ``bellmask prepare``: text to shards, before training needs them.


@dataclass(frozen=True, kw_only=True)
class PrepareOptions(CorpusOptions):
    """Turn a corpus into training blocks and cache them for training.

    Any --data option of 'bellmask train' can follow: tokenizer, block-length, packing, wrap, ...
    If interrupted, the same command continues where it stopped.

    Examples:
    bellmask prepare wikitext2

    bellmask prepare lm1b --from 'lm1b/*.txt' --data.tokenizer bert-base-uncased

    bellmask prepare 'pages/*.jsonl.zst' --data.tokenizer bpe:8192 --data.block-length 512
    """

    split: Literal["train", "valid", "test", "all"] = "all"
    """Split to prepare; all: every split that training reads."""
    num_workers: int | None = None
    """Threads that tokenize; default: one per core."""


def prepare_main(args: Sequence[str]) -> int:
    """Prepare blocks and print where they are."""
    command, rest = parse_data_command(PrepareOptions, args, command="prepare")
    if command.num_workers is not None:
        check_least(command, num_workers=1)
        os.environ["RAYON_NUM_THREADS"] = str(command.num_workers)  # tokenizers reads it once
    options = _data_options(command, rest, "bellmask prepare")
    tokenizer = make_tokenizer(options)
    read: list[corpora.Split] = ["train", options.valid_split]
    splits = read if command.split == "all" else [command.split]
    if command.split == "all":  # a corpus without any text says so
        splits = [split for split in splits if corpora.has_split(options, split)] or ["train"]
    for split in splits:
        _, folder = _prepare_and_print(options, tokenizer, split)
        print(f"blocks: {folder}")
    return 0
