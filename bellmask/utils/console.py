"""What commands show: lines, tables, progress bars and tokens on the screen; tables as Markdown."""

from __future__ import annotations

import contextlib
import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import TextIO

from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    SpinnerColumn,
    Task,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table
from rich.text import Text

# What a command says to a reader who may be gone, as after ``| head`` or a Ctrl-C for both.


def tell(text: str, stream: TextIO) -> None:
    """Say something that changes no exit code when nobody reads it."""
    with contextlib.suppress(OSError):
        print(text, file=stream, flush=True)


def finish_telling() -> None:
    """To be called at the end: else Python complains of what nobody read, with its own code."""
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None:  # a closed one is None
                stream.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


# Tables and progress.

PIPE_WIDTH = 160
"""Columns of a table that goes to a file or a pipe."""


def print_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """A table; numbers to the right. Text may have rich markup, but no codes for the terminal."""
    title, columns = visible_lines(title), [*map(visible_lines, columns)]
    table = Table(title=title, title_justify="left")
    for number, name in enumerate(columns):
        if number == 0:  # never cut: names may differ in their last letters
            table.add_column(name, justify="left", overflow="fold")
        else:
            table.add_column(name, justify="right", overflow="fold")
    for row in rows:
        table.add_row(*map(visible_lines, row))
    console = Console(highlight=False)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console = Console(highlight=False, width=PIPE_WIDTH)
    console.print(table)


def print_plain_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """The same where brackets are letters, as in names that people give: no rich markup."""
    print_table(escape(title), [*map(escape, columns)], [[*map(escape, row)] for row in rows])


def print_lines(lines: Sequence[str]) -> None:
    """Sentences under a table; names in them cannot steer the terminal."""
    for line in lines:
        print(visible_lines(line))


class _Speed(ProgressColumn):
    """Items per second."""

    def __init__(self, unit: str) -> None:
        super().__init__()
        self.unit = unit

    def render(self, task: Task) -> Text:
        return Text(f"{task.speed:,.1f} {self.unit}/s" if task.speed else "")


@contextlib.contextmanager
def staged_bar(what: str, unit: str) -> Iterator[Callable[[int, int], None]]:
    """A bar on stderr with throughput and time left; yields what takes (done, total)."""
    console = Console(stderr=True)
    columns = (TextColumn(what), BarColumn(), MofNCompleteColumn(), _Speed(unit))
    bar = Progress(
        *columns, TimeRemainingColumn(), console=console, disable=not console.is_terminal
    )
    spoken = _Spoken(what, unit)
    with bar:
        task = bar.add_task(what, total=None)

        def show(done: int, total: int) -> None:
            bar.update(task, completed=done, total=total)
            if not console.is_terminal:
                spoken(done, total)

        yield show


class _Spoken:
    """A line on stderr every half minute, where there is no screen to draw a bar on."""

    EVERY_SECONDS = 30.0

    def __init__(self, what: str, unit: str) -> None:
        self.what, self.unit = what, unit
        self.start = self.last = time.monotonic()
        self.first_done: int | None = None

    def __call__(self, done: int, total: int) -> None:
        """Say how far it is, when it is time to."""
        now = time.monotonic()
        if self.first_done is None:
            self.first_done = done
        if now - self.last < self.EVERY_SECONDS:
            return
        self.last = now
        speed = (done - self.first_done) / (now - self.start)
        left = f", about {(total - done) / speed / 60:.0f} min left" if speed > 0 else ""
        print(f"{self.what}: {done:,} of {total:,} {self.unit}{left}", file=sys.stderr, flush=True)


@contextlib.contextmanager
def progress_bar(what: str, unit: str, total: int) -> Iterator[Callable[[int], None]]:
    """The same where the total is known; yields the function that moves it to n."""
    with staged_bar(what, unit) as on_progress:
        on_progress(0, total)
        yield lambda done: on_progress(done, total)


@contextlib.contextmanager
def preparing_bar(*, is_quiet: bool = False) -> Iterator[Callable[[int, int, int], None]]:
    """Documents, text and rows while data is prepared; yields the function that takes them."""
    console = Console(stderr=True)
    bar = Progress(
        SpinnerColumn(),
        TextColumn("preparing"),
        TextColumn("{task.fields[note]}"),
        TimeElapsedColumn(),
        console=console,
        disable=is_quiet or not console.is_terminal,
    )
    with bar:
        task = bar.add_task("preparing", total=None, note="")

        def show(documents: int, num_bytes: int, rows: int) -> None:
            seconds = max(bar.tasks[0].elapsed or 0.0, 1e-9)
            size = f"{num_bytes / 1e6:,.1f} MB, {num_bytes / 1e6 / seconds:.1f} MB/s"
            bar.update(task, note=f"{documents:,} documents, {size}, {rows:,} rows")

        yield show


# How single tokens look in views of a generation: on the screen, on a page, in a picture.

MASK = "░"
REMASKED = "▓"
LINE_END = "↵"
_SIGNS = {"\n": LINE_END, "\r": "␍", "\t": "⇥"}


def visible(text: str) -> str:
    """One line without control codes: line ends and tabs as signs, other such characters as dots.

    What a small byte model writes would otherwise steer the terminal.
    """
    return "".join(_SIGNS.get(c) or (c if c.isprintable() else "·") for c in text)


def visible_lines(text: str) -> str:
    """Lines stay; other control characters, which would steer the terminal, become signs."""
    return "\n".join(visible(line) for line in text.split("\n"))


def plain_ascii(text: str) -> str:
    """For screens that know ASCII only."""
    text = text.replace(MASK, "_").replace(REMASKED, "#").replace(LINE_END, "/")
    return text.encode("ascii", "backslashreplace").decode("ascii")


NUM_COLOURS = 64


@cache
def reveal_colours() -> list[tuple[str, str]]:
    """(colour, readable text colour) from the first step to the last: matplotlib's viridis."""
    import matplotlib

    ramp = matplotlib.colormaps["viridis"]
    stops = (ramp(number / (NUM_COLOURS - 1))[:3] for number in range(NUM_COLOURS))
    return [(_hex(rgb), _text_on(rgb)) for rgb in stops]


def reveal_colour(step: int, num_steps: int) -> tuple[str, str]:
    """The colours of a token revealed in a step (from 1)."""
    share = (step - 1) / (num_steps - 1) if num_steps > 1 else 0.0
    return reveal_colours()[round(share * (NUM_COLOURS - 1))]


def _hex(rgb: Sequence[float]) -> str:
    return "#" + "".join(f"{round(255 * part):02x}" for part in rgb)


def _text_on(rgb: Sequence[float]) -> str:
    """Black or white, whichever has more contrast (WCAG's relative luminance)."""
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in rgb]
    luminance = 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
    return "#000000" if (luminance + 0.05) / 0.05 > 1.05 / (luminance + 0.05) else "#ffffff"


# Tables for Markdown files.


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
