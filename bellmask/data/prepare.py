"""Options → blocks: from the cache, or prepared now; validation, mixtures, fingerprints."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from bellmask.config.options import DataOptions
from bellmask.data.blocks import Blocks, join, open_blocks
from bellmask.data.corpora import Policy, find_policy, has_split, is_toy, open_corpus
from bellmask.data.detokenize import detokenizer
from bellmask.data.packing import PACKER_VERSION, PackingRules
from bellmask.data.sources import Source
from bellmask.data.tokenizer import Tokenizer
from bellmask.data.toy_corpora import toy_blocks
from bellmask.data.vocabularies import load_tokenizer
from bellmask.data.wheels import cache_folder
from bellmask.data.writing import OnProgress, Preparation
from bellmask.utils.errors import UserError


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
    options: DataOptions, tokenizer: Tokenizer, on_progress: OnProgress | None = None
) -> LoadedData:
    """Everything a run reads: the training mixture and the validation text of its first corpus."""
    if is_toy(options.train):
        return LoadedData(*toy_blocks(options, tokenizer))
    train, valid = load_blocks(options, tokenizer, on_progress)
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
        parts.append(prepare(other, tokenizer, "train", on_progress))
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
    options: DataOptions, tokenizer: Tokenizer, on_progress: OnProgress | None = None
) -> tuple[Blocks, Blocks]:
    """Training and validation blocks, prepared now or taken from the cache."""
    train = prepare(options, tokenizer, "train", on_progress)
    if options.valid is not None or has_split(options, "valid"):
        return train, prepare(options, tokenizer, "valid", on_progress)
    border = len(train) - max(1, round(len(train) * options.valid_fraction))
    if border < 1:
        raise UserError(
            f"data.train={options.train!r} has {len(train)} block(s) of {options.block_length} "
            "tokens: too few to hold some out; give more text or --data.valid"
        )
    return train.slice(0, border), train.slice(border, len(train))


def prepare(
    options: DataOptions, tokenizer: Tokenizer, split: str, on_progress: OnProgress | None = None
) -> Blocks:
    """Blocks of one split, from the cache if its fingerprint is there."""
    folder, key, work = locate(options, tokenizer, split)
    if not (folder / "card.json").exists():
        with one_at_a_time(folder):
            if not folder.exists():
                work(on_progress)
    return open_blocks(folder, key)


def locate(
    options: DataOptions, tokenizer: Tokenizer, split: str
) -> tuple[Path, str, Callable[[OnProgress | None], None]]:
    """(folder, fingerprint, what to call to fill the folder) of a split's blocks."""
    cache = writable_cache(options)
    source, policy = open_corpus(options, "valid" if split == "valid" else "train", cache)
    rules = _rules(options, policy, tokenizer)
    key = _fingerprint(source, policy, rules, tokenizer)
    folder = cache / "blocks" / key[:24]

    def work(on_progress: OnProgress | None) -> None:
        Preparation(folder, key, source, policy, rules, tokenizer, on_progress).run()

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
