"""Shared parts of HTML pages: style, escaping, and a policy that blocks all requests.

A page is a single file that works from disk, on desktops and phones, in light and dark mode.
"""

from __future__ import annotations

import html
from collections.abc import Sequence
from importlib.resources import files

from bellmask.utils.console import visible_lines

POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
"""Blocks all requests and scripts, whatever a text contains."""
SCRIPT_POLICY = f"{POLICY}; script-src 'unsafe-inline'"
"""The same for a page with an inline script."""

STYLE = files("bellmask.report").joinpath("page.css").read_text(encoding="utf-8")


def page_text(text: str) -> str:
    """Text for a page: no markup, quotes included, and no control characters but line ends."""
    return html.escape(visible_lines(text))


def html_page(title: str, body: str, *, style: str = "", script: str = "") -> str:
    """The whole page; ``style`` adds to the shared one, ``script`` runs behind the body."""
    title, policy = page_text(title), SCRIPT_POLICY if script else POLICY
    script = f"<script>{script}</script>" if script else ""
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        f'<title>{title}</title><link rel="icon" href="data:,"><style>{STYLE}{style}</style></head>'
        f"<body><h1>{title}</h1>{body}{script}</body></html>\n"
    )


def html_table(columns: Sequence[str], rows: Sequence[Sequence[str]], kind: str = "") -> str:
    """Cells of text; a table that is too wide scrolls."""
    head = "".join(f"<th>{page_text(name)}</th>" for name in columns)
    lines = ["".join(f"<td>{page_text(cell)}</td>" for cell in row) for row in rows]
    body = "".join(f"<tr>{line}</tr>" for line in lines)
    table = f'<table class="{kind}"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>'
    return f'<div class="scroll">{table}</div>'
