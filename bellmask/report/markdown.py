"""Tables for Markdown files."""

from __future__ import annotations

import re
from collections.abc import Sequence

from bellmask.report.tokens import visible_lines


def in_markdown(text: str) -> str:
    """Text that neither ends a cell or a row nor becomes a link or an element."""
    text = visible_lines(text).replace("\n", " ")
    text = re.sub(r"(\\*)\|", lambda found: 2 * found[1] + "\\|", text)
    text = re.sub(r"<(?=[A-Za-z/!?])", r"\\<", text)
    return text.replace("](", "]\\(")


def markdown_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """The first column to the left, the others to the right; texts :func:`in_markdown`."""
    head = [[in_markdown(name) for name in columns], ["---", *["---:"] * (len(columns) - 1)]]
    cells = [[in_markdown(text) for text in row] for row in rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in [*head, *cells]) + "\n"
