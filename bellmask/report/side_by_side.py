"""Texts of several runs on the same prompts, side by side, for qualitative comparison (App. E).

A table that fits the screen, a page that needs nothing else, a Markdown file.
"""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from bellmask.report.web import POLICY
from bellmask.utils.console import visible, visible_lines
from bellmask.utils.errors import UserError

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

NARROWEST = 28
"""Characters of a column; where there is no room for that, runs stand under one another."""

STYLE = """
:root { color-scheme: light dark; --paper: #fff; --ink: #1c1c1c; --soft: #666; --line: #d8d8d8;
  --panel: #f5f6f8; }
@media (prefers-color-scheme: dark) { :root { --paper: #14161a; --ink: #ececec; --soft: #9a9ea6;
  --line: #3a3d44; --panel: #1d2026; } }
* { box-sizing: border-box; }
body { font: 16px/1.5 system-ui, sans-serif; margin: 0 auto; max-width: 1400px; padding: 1rem;
  color: var(--ink); background: var(--paper); }
h1 { font-size: 1.3rem; overflow-wrap: anywhere; }
h2 { font-size: 1.05rem; margin: 2rem 0 .5rem; white-space: pre-wrap; overflow-wrap: anywhere; }
h2 small { color: var(--soft); font-weight: normal; }
h3 { font-size: .95rem; margin: 0 0 .3rem; overflow-wrap: anywhere; }
.runs { display: grid; gap: .8rem;
  grid-template-columns: repeat(auto-fit, minmax(min(100%, 320px), 1fr)); }
.run { border: 1px solid var(--line); border-radius: 8px; padding: .6rem .8rem; min-width: 0; }
pre { background: var(--panel); border-radius: 6px; padding: .5rem .6rem; margin: .3rem 0;
  font: .9rem/1.5 ui-monospace, "DejaVu Sans Mono", Consolas, monospace; white-space: pre-wrap;
  overflow-wrap: anywhere; }
.given { color: var(--soft); }
"""


@dataclass(frozen=True)
class SideBySide:
    """The texts of each run for each prompt."""

    runs: Sequence[str]
    """Names; the first one is the reference, at the left."""
    prompts: Sequence[str]
    """As they were asked, canvases with their gaps."""
    texts: Sequence[Sequence[Sequence[str]]]
    """[run][prompt][sample]."""
    title: str = "Side by side"
    settings: str = ""
    """How the texts were made, in one line."""

    def __post_init__(self) -> None:
        if len(set(self.runs)) != len(self.runs):
            raise UserError(f"two runs have the same name: {', '.join(self.runs)}")
        assert len(self.texts) == len(self.runs)
        assert all(len(of_run) == len(self.prompts) for of_run in self.texts)

    def show(self, console: Console | None = None) -> None:
        """Print it, folded to the width of the screen."""
        from rich.console import Console
        from rich.text import Text

        from bellmask.utils.console import PIPE_WIDTH

        console = console or Console(highlight=False)
        if not console.is_terminal and console.width < PIPE_WIDTH:
            console = Console(highlight=False, width=PIPE_WIDTH, file=console.file)
        for number in range(len(self.prompts)):
            console.print(self._heading(number))
            console.print(self._table(number, console.width))
        if self.settings:
            console.print(Text(visible(self.settings), style="dim"))

    def _asked(self, number: int) -> str:
        return visible_lines(self.prompts[number]) or "(nothing given)"

    def _heading(self, number: int) -> Text:
        from rich.text import Text

        return Text(f"{number + 1}. {self._asked(number)}", style="bold")

    def _table(self, number: int, width: int) -> Table:
        from rich.table import Table
        from rich.text import Text

        if len(self.runs) * (NARROWEST + 3) + 1 <= width:
            table = Table(show_lines=True, expand=True)
            for name in self.runs:
                table.add_column(Text(visible(name)), overflow="fold", ratio=1)
            for row in zip(*(of_run[number] for of_run in self.texts), strict=True):
                table.add_row(*(self._marked(number, text) for text in row))
            return table
        table = Table(show_lines=True, expand=True, show_header=False)
        table.add_column(overflow="fold")
        for name, of_run in zip(self.runs, self.texts, strict=True):
            for text in of_run[number]:
                table.add_row(
                    Text.assemble((f"{visible(name)}\n", "bold"), self._marked(number, text))
                )
        return table

    def _marked(self, number: int, text: str) -> Text:
        """A text with its given beginning dimmed."""
        from rich.text import Text

        given, made = self._split(number, text)
        return Text.assemble((visible_lines(given), "dim"), visible_lines(made))

    def _split(self, number: int, text: str) -> tuple[str, str]:
        """(given beginning, what was made); of a canvas, which has gaps, nothing is told apart."""
        prompt = self.prompts[number]
        return (prompt, text[len(prompt) :]) if text.startswith(prompt) else ("", text)

    def page(self) -> str:
        """A self-contained page."""
        sections = "".join(self._section(number) for number in range(len(self.prompts)))
        title, note = (html.escape(visible(text)) for text in (self.title, self.settings))
        return (
            '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
            '<meta name="viewport" content="width=device-width, initial-scale=1">'
            f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
            f'<title>{title}</title><link rel="icon" href="data:,"><style>{STYLE}</style></head>'
            f"<body><h1>{title}</h1><p>{note}</p>{sections}</body></html>\n"
        )

    def _section(self, number: int) -> str:
        prompt = html.escape(self._asked(number))
        runs = ""
        for name, of_run in zip(self.runs, self.texts, strict=True):
            boxes = ""
            for text in of_run[number]:
                given, made = (html.escape(visible_lines(p)) for p in self._split(number, text))
                # a line end right behind <pre> would be dropped; the element keeps it
                boxes += f'<pre><span class="given">{given}</span>{made}</pre>'
            runs += f'<div class="run"><h3>{html.escape(visible(name))}</h3>{boxes}</div>'
        heading = f"<h2><small>{number + 1}.</small> {prompt}</h2>"
        return f'<section>{heading}<div class="runs">{runs}</div></section>'

    def markdown(self) -> str:
        """The same as Markdown; texts are fenced, so that nothing in them is markup."""
        parts = [f"# {_one_line(self.title)}"]
        parts += [_one_line(self.settings)] if self.settings else []
        for number in range(len(self.prompts)):
            parts += [f"## Prompt {number + 1}", _fenced(self._asked(number))]
            for name, of_run in zip(self.runs, self.texts, strict=True):
                parts += [f"**{_one_line(name)}**"]
                parts += [_fenced(text) for text in of_run[number]]
        return "\n\n".join(parts) + "\n"

    def save(self, folder: Path) -> list[Path]:
        """Write comparison.html and comparison.md; returns their paths."""
        from bellmask.utils.files import write_text

        if folder.exists() and not folder.is_dir():
            raise UserError(f"{folder} is a file; give a folder for comparison.html and .md")
        folder.mkdir(parents=True, exist_ok=True)
        paths = [folder / "comparison.html", folder / "comparison.md"]
        for path, content in zip(paths, (self.page(), self.markdown()), strict=True):
            write_text(path, content)
        return paths


def show_side_by_side(
    prompts: Sequence[str],
    columns: Mapping[str, Sequence[Sequence[str]]],
    output: Path | None = None,
    settings: str = "",
) -> None:
    """Print each run's texts [prompt][sample]; page and Markdown go to the folder ``output``."""
    title = f"{' and '.join(columns)} side by side"
    table = SideBySide(list(columns), prompts, list(columns.values()), title, settings)
    paths = [] if output is None else table.save(output)
    table.show()
    for path in paths:
        print(path)


def _one_line(text: str) -> str:
    """A line of Markdown without markup."""
    signs = str.maketrans({c: f"\\{c}" for c in "\\`*_{}[]<>#|&"})
    return visible(" ".join(text.split())).translate(signs)


def _fenced(text: str) -> str:
    """A code block whose fence is longer than any run of backticks inside."""
    text, fence = visible_lines(text), "```"
    while fence in text:
        fence += "`"
    return f"{fence}text\n{text}\n{fence}"
