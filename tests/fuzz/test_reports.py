"""Any text in pages and tables arrives as text: no element, attribute, cell or row of its own."""

from __future__ import annotations

import re
from html.parser import HTMLParser

import pytest
from fuzz_tools import SIZES, TAKEN, fuzz, texts
from hypothesis import strategies as st

from bellmask.generate.trace_file import Change, Sample, Trace
from bellmask.outside import load_json
from bellmask.report.downstream_tables import escape
from bellmask.report.markdown import markdown_table
from bellmask.report.side_by_side import SideBySide
from bellmask.report.tokens import visible, visible_lines
from bellmask.report.trace_page import render_trace_page


class Reader(HTMLParser):
    """Elements with their attributes, and the text between them."""

    def __init__(self, page: str) -> None:
        super().__init__(convert_charrefs=True)
        self.elements: list[tuple[str, tuple[tuple[str, str | None], ...]]] = []
        self.texts: dict[str, list[str]] = {}
        self._open: list[str] = []
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, tuple(attrs)))
        self.texts.setdefault(tag, []).append("")
        if tag not in ("meta", "link", "input", "br"):
            self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag, f"</{tag}> closes something else"

    def handle_data(self, data: str) -> None:
        for tag in set(self._open):
            self.texts[tag][-1] += data

    def handle_comment(self, data: str) -> None:
        raise AssertionError(f"a comment: {data}")


def trace_of(title: str, key: str, token: str, text: str) -> Trace:
    steps = [Change(1, 0.5, 1, [(1, token)], [])]
    return Trace(title, {key: text}, 1, [Sample([True, False], [token, None], steps, text, 2)])


def side_by_side(title: str, name: str, prompt: str, text: str) -> SideBySide:
    return SideBySide([name, f"{name}2"], [prompt], [[[text]], [[prompt + text]]], title, text)


PLAIN = ("title", "key", "token", "text")


@pytest.mark.parametrize("size", SIZES)
def test_pages(size: int) -> None:
    """The same elements and attributes as with harmless text, and every text found again."""
    trace_elements = Reader(render_trace_page(trace_of(*PLAIN))).elements
    pair_elements = Reader(side_by_side(*PLAIN).page()).elements

    def check(four: tuple[str, str, str, str]) -> None:
        title, key, token, text = four
        page = Reader(render_trace_page(trace_of(*four)))
        assert page.elements == trace_elements
        assert page.texts["h1"] == [visible(title or "text being unmasked")]
        assert page.texts["pre"] == [visible_lines(text)]
        assert page.texts["td"] == [visible(key), visible(text)]
        stored = load_json(page.texts["script"][0])["samples"][0]
        assert stored["tokens"] == [visible(token).replace("↵", "↵\n"), None]
        page = Reader(side_by_side(*four).page())
        assert page.elements == pair_elements
        assert page.texts["h1"] == [visible(title)]
        assert page.texts["h3"] == [visible(key), visible(f"{key}2")]
        assert page.texts["pre"][0] == visible_lines(text)

    assert fuzz("pages", size, st.tuples(texts, texts, texts, texts), check) == {TAKEN}


def cells_of(line: str) -> list[str]:
    """A row of a Markdown table as GitHub reads it: bars not behind a backslash end cells."""
    found = re.findall(r"((?:\\.|[^|\\])*)\|", line)
    return [re.sub(r"\\([\\|<(])", r"\1", cell).strip() for cell in found[1:]]


@pytest.mark.parametrize("size", SIZES)
def test_tables(size: int) -> None:
    inputs = st.lists(st.tuples(texts, texts), min_size=1, max_size=3)

    def check(rows: list[tuple[str, str]]) -> None:
        lines = markdown_table(["a|b", "c\nd"], rows).split("\n")
        assert len(lines) == len(rows) + 3
        assert cells_of(lines[0]) == ["a|b", "c d"]
        for line, row in zip(lines[2:], rows):
            assert len(cells_of(line)) == 2
            assert not re.search(r"(?<!\\)<[A-Za-z/!?]|\]\(", line)
            for cell, text in zip(cells_of(line), row, strict=True):
                whole = visible_lines(text).replace("\n", " ").strip()
                assert cell.replace("\\", "") == whole.replace("\\", "")
        for text in (text for row in rows for text in row):
            made = escape(text)
            assert "\n" not in made
            bare = re.sub(
                r"\\(text[a-z]+\{\}|[&%$#_{}])|\$\\pm\$|\$\^\\dagger\$|\{[\[*]\}", "", made
            )
            assert not set(bare) & set("&%$#_{}~^\\<>|[*")

    assert fuzz("tables", size, inputs, check) == {TAKEN}
