"""Tables for Markdown files."""

from __future__ import annotations

from collections.abc import Sequence


def markdown_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """The first column to the left, the others to the right; bars inside cells are escaped."""
    head = [list(columns), ["---", *["---:"] * (len(columns) - 1)]]
    cells = [[cell.replace("|", "\\|") for cell in row] for row in rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in [*head, *cells]) + "\n"
