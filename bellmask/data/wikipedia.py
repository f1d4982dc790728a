"""Articles of a Wikipedia dump (XML with wikitext) as clean text; docs/data.md states the rule.

Each step takes time linear in the page, whatever is in it: what nests (templates, tables, links)
is paired by a scanner, never by a regex. The 100 MB of enwik8 take half a minute on one core.
"""

from __future__ import annotations

import html
import re
from collections.abc import Callable, Iterable, Iterator

VERSION = 1
"""Version of the rule, part of the keys of cached tokens. Increase it with every change."""
LEAST_CHARACTERS = 100
"""Pages with less text than this under their title are left out."""

_NAMESPACES = "media special talk user wikipedia image mediawiki template help category portal"
_OTHER_PAGES = re.compile(rf"(?:{_NAMESPACES.replace(' ', '|')})(?: talk)?:", re.IGNORECASE)
_HIDDEN_LINK = re.compile(
    # interlanguage links begin with a code: "de:", "zh-min-nan:", "simple:"
    r"\s*(?:(?i:image|file|media|category)|[a-z]{2,3}(?:-[a-z]+)*|simple|tokipona)\s*:"
)
_REMOVED = "ref math gallery timeline hiero"


def _pairs(opening: str, closing: str) -> re.Pattern[str]:
    return re.compile(f"(?P<open>{opening})|{closing}", re.IGNORECASE | re.MULTILINE)


_COMMENT = re.compile(r"<!--.*?(?:-->|\Z)", re.DOTALL)
_CLOSED_TAG = re.compile(rf"<(?:{_REMOVED.replace(' ', '|')})\b[^<>]*/>", re.IGNORECASE)
_NESTED = (
    *(_pairs(rf"<{tag}\b[^<>]*>", rf"</{tag}\s*>") for tag in _REMOVED.split()),
    _pairs(r"\{\{", r"\}\}"),
    _pairs(r"^[ \t:*#]*\{\|", r"^[ \t:*#]*\|\}"),
)


def _remove_nested(text: str, pairs: re.Pattern[str]) -> str:
    """Remove text between an opening and its closing mark; unpaired marks stay."""
    openings: list[int] = []
    spans: list[tuple[int, int]] = []
    for mark in pairs.finditer(text):
        if mark.lastgroup == "open":
            openings.append(mark.start())
        elif openings:
            start = openings.pop()
            while spans and spans[-1][0] > start:
                spans.pop()  # inside this one
            spans.append((start, mark.end()))
    ends = [0, *(end for _, end in spans)]
    starts = [*(start for start, _ in spans), len(text)]
    return "".join(text[end:start] for end, start in zip(ends, starts))


_LINK_MARK = re.compile(r"\[\[|\]\]")
_MOST_LINKS_DEEP = 8
"""Links in a caption in a link ...; deeper ones are text, so that time stays linear."""


def _resolve_links(text: str) -> str:
    """``[[target|text]]`` and ``[[text]]`` as their text, inner links first."""
    levels: list[list[str]] = [[]]
    end = 0
    for mark in _LINK_MARK.finditer(text):
        levels[-1].append(text[end : mark.start()])
        end = mark.end()
        if mark[0] == "[[" and len(levels) <= _MOST_LINKS_DEEP:
            levels.append([])
        elif mark[0] == "]]" and len(levels) > 1:
            inside = "".join(levels.pop())
            levels[-1].append(_link_text(inside))
    return "".join("".join(level) for level in levels) + text[end:]


def _link_text(inside: str) -> str:
    target, bar, label = inside.partition("|")
    if _HIDDEN_LINK.match(target[:40]):
        return ""
    if bar and not label:  # the pipe trick: [[Mercury (planet)|]]
        return re.sub(r"^[^:]*:| ?\([^()]*\)$", "", target)
    return label if bar else target.removeprefix(":")


_SCHEME = r"(?:https?|ftp|gopher|irc|news|telnet)://|mailto:"
_BREAKS = "br p li ul ol tr td th table div center blockquote hr dt dd dl h[1-6] pre"


def _after_space(match: re.Match[str]) -> str:
    return match[1].partition(" ")[2]


# In this order. No rule can begin inside a run that it has tried: time stays linear.
_RULES: tuple[tuple[re.Pattern[str], str | Callable[[re.Match[str]], str]], ...] = (
    (re.compile(rf"\[(?:{_SCHEME})([^\[\]\n]*)\]", re.IGNORECASE), _after_space),
    (re.compile(rf"(?:{_SCHEME})[^\s<>\[\]|]*[^\s<>\[\]|.,;:!?)'\"]", re.IGNORECASE), ""),
    (re.compile(rf"</?(?:{_BREAKS.replace(' ', '|')})\b[^<>]*>", re.IGNORECASE), "\n"),
    (re.compile(r"</?[a-zA-Z][^<>]*>"), ""),
    (re.compile(r"'{2,}"), ""),
    (re.compile(r"__[A-Z]+__"), ""),
)
_TIDY = (
    (re.compile(r"[^\S\n]+"), " "),
    (re.compile(r"(?<!\S)[(\[<][ ,;:]*[)\]>]"), ""),
    (re.compile(r"(?<=\()[ ,;:]+"), ""),
    (re.compile(r"(?<![ ,;])[ ,;]+(?=\))"), ""),
    (re.compile(r" +(?=[,.;:!?](?:\s|\Z))"), ""),
    (re.compile(r"  +"), " "),
)


def clean_wikitext(text: str) -> str:
    """Plain text of a page's wikitext, a paragraph, heading or list item per line."""
    text = _CLOSED_TAG.sub("", _COMMENT.sub("", text))
    for pairs in _NESTED:
        text = _remove_nested(text, pairs)
    text = _resolve_links(text)
    for found, put in _RULES:
        text = found.sub(put, text)
    text = html.unescape("\n".join(_lines(text)))  # the rest was escaped twice
    for found, put in _TIDY:
        text = found.sub(put, text)
    lines = (line.strip() for line in text.split("\n"))
    return "\n".join(line for line in lines if any(map(str.isalnum, line)))


def _lines(text: str) -> Iterator[str]:
    """Without the marks that lines begin with, and without rows of broken tables."""
    for line in map(str.strip, text.split("\n")):
        if not line.startswith(("|", "{|", "!")):
            is_heading = (
                line.startswith("==") or line.endswith("==") or line[:1] == line[-1:] == "="
            )
            yield line.replace("=", "") if is_heading else line.lstrip("*#:; ")


def articles(lines: Iterable[str]) -> Iterator[str]:
    """Title and clean text of each article; other pages and a page cut off are left out."""
    page: list[str] = []
    for line in lines:
        page = [] if line.strip() == "<page>" else page
        page.append(line)
        if line.strip() != "</page>":
            continue
        content = "".join(page)
        title = html.unescape(content.partition("<title>")[2].partition("</title>")[0])
        source = content.partition("<text")[2].partition(">")[2].rpartition("</text>")[0]
        source = html.unescape(source)
        page = []
        # later dumps say both by elements of their own
        is_other = _OTHER_PAGES.match(title) or ("<ns>" in content and "<ns>0</ns>" not in content)
        if is_other or "<redirect " in content or source.lstrip()[:9].upper() == "#REDIRECT":
            continue
        text = clean_wikitext(source)
        if len(text) >= LEAST_CHARACTERS:
            yield f"{title}\n{text}"


def pages_between(lines: Iterable[str], start: int, stop: int) -> Iterator[str]:
    """Lines of the pages that begin at one of the bytes ``start`` to ``stop - 1`` of the text."""
    position = 0
    is_inside = False
    for line in lines:
        if line.strip() == "<page>":
            if position >= stop:
                return
            is_inside = position >= start
        if is_inside:
            yield line
        position += len(line.encode())
