"""What pages share: text that stays text, and a policy that keeps the browser from fetching."""

from __future__ import annotations

import html

from bellmask.utils.console import visible_lines

POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
"""Nothing is fetched, and nothing is run, whatever a text holds."""
SCRIPT_POLICY = f"{POLICY}; script-src 'unsafe-inline'"
"""The same for a page with a script of its own."""


def page_text(text: str) -> str:
    """Text for a page: no markup, quotes included, and no control characters but line ends."""
    return html.escape(visible_lines(text))
