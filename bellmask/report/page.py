"""What HTML pages share: one style, text that stays text, a policy under which nothing is fetched.

A page is one file that works from disk, on a desktop and on a phone, in light and in dark.
"""

from __future__ import annotations

import html
from collections.abc import Sequence

from bellmask.utils.console import visible_lines

POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
"""Nothing is fetched, and nothing is run, whatever a text holds."""
SCRIPT_POLICY = f"{POLICY}; script-src 'unsafe-inline'"
"""The same for a page with a script of its own."""

STYLE = """
:root { color-scheme: light dark; --paper: #fff; --ink: #1c1c1c; --soft: #5a5a5a; --line: #d8d8d8;
  --panel: #f5f6f8; --accent: #0a58ca; --red: #d1242f; }
@media (prefers-color-scheme: dark) { :root { --paper: #14161a; --ink: #ececec; --soft: #a5a9b0;
  --line: #3a3d44; --panel: #1d2026; --accent: #6ea8fe; --red: #ff6b6b; } }
* { box-sizing: border-box; }
body { font: 16px/1.5 system-ui, sans-serif; margin: 0 auto; max-width: 1240px; padding: 1rem;
  color: var(--ink); background: var(--paper); }
h1 { font-size: 1.4rem; overflow-wrap: anywhere; }
h2 { font-size: 1.1rem; margin: 2rem 0 .5rem; overflow-wrap: anywhere; }
small, .soft { color: var(--soft); font-weight: normal; }
pre { background: var(--panel); border-radius: 6px; padding: .5rem .6rem; margin: .3rem 0;
  font: .85rem/1.5 ui-monospace, "DejaVu Sans Mono", Consolas, monospace; white-space: pre-wrap;
  overflow-wrap: anywhere; max-height: 24rem; overflow-y: auto; }
table { border-collapse: collapse; font-size: .85rem; }
th, td { border-bottom: 1px solid var(--line); padding: .3rem .6rem; text-align: left;
  vertical-align: top; overflow-wrap: anywhere; }
.scroll { overflow-x: auto; }
.columns { display: grid; gap: 1rem;
  grid-template-columns: repeat(auto-fit, minmax(min(100%, 380px), 1fr)); }
"""


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
    """Cells of text; where it is too wide, the table scrolls by itself."""
    head = "".join(f"<th>{page_text(name)}</th>" for name in columns)
    body = "".join(
        "<tr>" + "".join(f"<td>{page_text(cell)}</td>" for cell in row) + "</tr>" for row in rows
    )
    table = f'<table class="{kind}"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>'
    return f'<div class="scroll">{table}</div>'
