"""Tables of text: on the screen, as Markdown, as LaTeX.

Features build tables from their numbers; rendering escapes cells, so that a name can neither
control a terminal nor break a page.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table as RichTable

from bellmask.utils.console import print_lines, visible, visible_lines

PIPE_WIDTH = 160
"""Columns of a table that goes to a file or a pipe."""


class Bold(str):
    """A highlighted cell, such as the best of a column."""


@dataclass(frozen=True)
class Table:
    """Rows of text under columns; the first column names the row."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    notes: Sequence[str] = ()

    def print(self) -> None:
        """Print the table, with numbers right-aligned and notes below."""
        console = Console(highlight=False)
        if not console.is_terminal and "COLUMNS" not in os.environ:
            console = Console(highlight=False, width=PIPE_WIDTH)
        table = RichTable(title=_on_screen(self.title), title_justify="left")
        # keep words whole if the screen has room for the longest of each column
        columns = zip(self.columns, *self.rows)
        widths = [max(map(len, " ".join(c).split()), default=0) for c in columns]
        is_wide_enough = sum(widths) + 3 * len(widths) + 1 <= console.width
        for number, name in enumerate(self.columns):
            # never cut: names may differ in their last letters
            look: dict[str, Any] = {"justify": "right" if number else "left", "overflow": "fold"}
            least = widths[number] if is_wide_enough else None
            table.add_column(_on_screen(name), min_width=least, **look)
        for row in self.rows:
            table.add_row(*map(_on_screen, row))
        console.print(table)
        print_lines(self.notes)

    def markdown(self) -> str:
        """Columns and rows; the first column to the left, the others to the right."""
        rule = ["---", *["---:"] * (len(self.columns) - 1)]
        lines = [_cells(self.columns, in_markdown, "**{}**"), rule]
        lines += [_cells(row, in_markdown, "**{}**") for row in self.rows]
        return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"

    def latex(self) -> str:
        """A ``tabular`` that needs booktabs, the notes below it as comments."""
        lines = ["% needs \\usepackage{booktabs}"]
        lines += [f"\\begin{{tabular}}{{l{'c' * (len(self.columns) - 1)}}}", "\\toprule"]
        cells = [_cells(row, in_latex, "\\textbf{{{}}}") for row in [self.columns, *self.rows]]
        head, *body = [" & ".join(row) + r" \\" for row in cells]
        lines += [head, "\\midrule", *body, "\\bottomrule", "\\end{tabular}"]
        return "\n".join([*lines, *(f"% {visible(line)}" for line in self.notes)]) + "\n"


def markdown_page(title: str, *tables: Table, introduction: str = "") -> str:
    """A page: the tables, each under its title (the first may have none), with their notes."""
    parts = [f"# {in_markdown(title)}", *([introduction] if introduction else [])]
    for table in tables:
        parts += [f"## {in_markdown(table.title)}"] if table.title else []
        parts += [table.markdown().rstrip()]
        parts += ["\n".join(f"- {in_markdown(line)}" for line in table.notes)] * bool(table.notes)
    return "\n\n".join(parts) + "\n"


def in_markdown(text: str) -> str:
    """Escape text so that it neither ends a cell or row nor becomes a link or an element."""
    text = visible_lines(text).replace("\n", " ")
    text = re.sub(r"(\\*)\|", lambda found: 2 * found[1] + "\\|", text)
    text = re.sub(r"<(?=[A-Za-z/!?])", r"\\<", text)
    return text.replace("](", "]\\(")


_LATEX = {c: f"\\{c}" for c in "&%$#_{}"} | {
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "\\": r"\textbackslash{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
    "[": "{[}",  # at the start of a row it would be an option of the previous row
    "*": "{*}",
    "±": r"$\pm$",
    "†": r"$^\dagger$",
}


def in_latex(text: str) -> str:
    """Escape text for LaTeX."""
    return "".join(_LATEX.get(letter, letter) for letter in visible(text))


def _cells(row: Sequence[str], escaped: Callable[[str], str], bold: str) -> list[str]:
    return [bold.format(escaped(c)) if isinstance(c, Bold) else escaped(c) for c in row]


def _on_screen(text: str) -> str:
    """Escape rich's markup."""
    shown = escape(visible_lines(text))
    return f"[bold]{shown}[/bold]" if isinstance(text, Bold) else shown
