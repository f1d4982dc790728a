"""A corpus's documents: found by name, path or hub address, with the rules to read them by."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from bellmask.config.options import DataOptions
from bellmask.data.catalogue import CORPORA, Corpus, InWheel, OnHub
from bellmask.data.formats import kind_of
from bellmask.data.sources import (
    Source,
    count_documents,
    documents_kept,
    file_source,
    find_files,
    is_hub_name,
    tar_source,
)
from bellmask.utils.errors import UserError, unknown

__all__ = [
    "CORPORA",
    "Corpus",
    "InWheel",
    "OnHub",
    "Policy",
    "Split",
    "find_policy",
    "has_split",
    "is_toy",
    "open_corpus",
]

Split = Literal["train", "valid"]
TOY_PREFIX = "toy:"
IMPORTED = "imported"
"""What stands for the training text of a run that was trained elsewhere."""


_ARCHIVED = {"enwik8": "mingru_pytorch-0.2.1/data/enwik8.gz"}


@dataclass(frozen=True)
class Policy:
    """The rules a corpus is read by, after the options had their say."""

    documents: str
    column: str
    detokenizer: str
    wrap: bool
    insert_eos: bool
    licence: str = "yours to know"
    title: str = ""


def is_toy(name: str) -> bool:
    """True for ``toy:NAME[:NUMBER]``, whose rows :mod:`bellmask.data.toy_corpora` draws."""
    return name.startswith(TOY_PREFIX)


def find_policy(options: DataOptions, name: str) -> Policy:
    """The corpus's rules (plain ones for files), overridden by the options.

    Options about reading speak of the training corpus and of files; another named corpus keeps its
    own. Whether rows are wrapped is the training corpus's rule for all of a run's rows.
    """
    plain = Corpus(title=name, licence="yours to know", splits={}, documents="file")
    corpus, first = CORPORA.get(name, plain), CORPORA.get(options.train, plain)
    given = options if name == options.train or name not in CORPORA else DataOptions()
    return Policy(
        documents=corpus.documents if given.documents == "auto" else given.documents,
        column=given.column or _column(corpus, given.from_files),
        detokenizer=corpus.detokenizer if given.detokenizer == "auto" else given.detokenizer,
        wrap=first.wrap if options.wrap is None else options.wrap,
        insert_eos=corpus.insert_eos if options.insert_eos is None else options.insert_eos,
        licence="see the repository" if name.startswith("hub:") else corpus.licence,
        title=corpus.title,
    )


def _column(corpus: Corpus, files: str | None) -> str:
    """The corpus's text column: its CSV files may have no header and go by number."""
    is_csv = files is not None and kind_of(files) == "csv"
    return corpus.csv_column if is_csv and corpus.csv_column else corpus.column


def has_split(options: DataOptions, split: Split) -> bool:
    """True when the training corpus itself brings this split."""
    if is_toy(options.train):
        return True
    if options.from_files is not None:
        corpus = CORPORA.get(options.train)
        return split == "train" or (corpus is not None and corpus.holdout > 0)
    corpus = CORPORA.get(options.train)
    if corpus is None:
        return split == "train"
    return split in corpus.splits or (split == "valid" and corpus.holdout > 0)


def open_corpus(options: DataOptions, split: Split, cache: Path) -> tuple[Source, Policy]:
    """The documents of one split, with the rules to read them by."""
    name, files = options.train, options.from_files
    if name == IMPORTED and not (split == "valid" and options.valid is not None):
        raise UserError("the run was imported: its training text is not here; give --data TEXT")
    if split == "valid" and options.valid is not None:
        name, files = options.valid, None
    policy = find_policy(options, name)
    corpus = CORPORA.get(name)
    if corpus is None or files is not None:
        source = _open_files(name, files or name, policy, cache)
    else:
        source = _open_named(name, corpus, split, policy, cache)
    is_cut = split == "valid" or options.valid in (None, name)
    if corpus is not None and corpus.holdout and is_cut:
        source = _hold_out(source, corpus, split, is_local=files is not None)
    return source, policy


def _open_named(name: str, corpus: Corpus, split: Split, policy: Policy, cache: Path) -> Source:
    part = corpus.splits.get(split) or (corpus.splits.get("train") if corpus.holdout else None)
    if part is None:
        have = ", ".join(corpus.splits) or "no split that can be fetched"
        raise UserError(
            f"corpus {name!r} has {have}, but no {split} text"
            + (f" ({corpus.note})" if corpus.note else "")
            + "; give files with --data.from PATH"
        )
    return part.open(f"{name}/{split}", policy.documents, policy.column, cache)


def _open_files(name: str, pattern: str, policy: Policy, cache: Path) -> Source:
    if is_toy(pattern):
        raise UserError(
            f"{pattern} has no text to read, prepare or show: training draws its rows in memory; "
            "use it as --data.train of a run, with --data.tokenizer symbols:8"
        )
    if is_hub_name(pattern):
        repository, _, rest = pattern[4:].partition(":")
        config, _, split = rest.partition(":")
        part = OnHub(repository, split or "train", config or None)
        return part.open(pattern, policy.documents, policy.column, cache)
    is_a_word = not any(sign in pattern for sign in "/.*?[") and not Path(pattern).exists()
    if is_a_word:
        error = unknown("corpus", pattern, CORPORA)
        raise UserError(f"{error}, and there is no file of that name") from None
    if pattern.endswith(".tar.gz"):
        member = _ARCHIVED.get(name)
        if member is None:
            raise UserError(f"{pattern} is an archive; unpack it and give its files")
        return tar_source(name, find_files(pattern)[0], member, rule=policy.documents)
    corpus = CORPORA.get(name)
    parts = corpus.splits.values() if corpus is not None else []
    has_lines = any(isinstance(part, OnHub) and part.rows_are_lines for part in parts)
    row_rule = policy.documents if has_lines else None
    return file_source(pattern, rule=policy.documents, column=policy.column, row_rule=row_rule)


def _hold_out(source: Source, corpus: Corpus, split: Split, is_local: bool) -> Source:
    """Train without the last documents, or those alone."""
    known = None if is_local else corpus.num_documents
    count = known if known is not None else count_documents(source)
    if count <= corpus.holdout:
        raise UserError(
            f"{source.name} has {count} documents, and the last {corpus.holdout} are validation: "
            "give --data.valid PATH to use it all for training"
        )
    border = count - corpus.holdout
    start, stop = (0, border) if split == "train" else (border, None)
    return Source(
        source.name,
        f"{source.identity}[{start}:{stop}]",
        lambda: documents_kept(source.pieces(), start, stop),
        source.origin,
    )
