"""Progress of long operations: one bar on stderr, with throughput and time left.

Long-running functions take a :class:`Progress` and report how much *more* is done:

    def score(blocks, progress=NO_PROGRESS):
        for block in blocks:
            ...
            progress.advance()

    with progress_bar("scoring", "blocks", 2 * len(blocks)) as progress:
        for model in models:
            score(blocks, progress)

Without a terminal, a line names the work after two seconds, and another one shows the progress
every half minute.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator

import rich.progress as bars
from rich.console import Console
from rich.text import Text

from bellmask.utils.console import announced, asked_quiet

LINE_SECONDS = 30.0


class Progress:
    """A silent progress; :func:`progress_bar` yields one that draws a bar."""

    def start(self, total: float) -> None:
        """Set the total, if it is known only now."""

    def advance(self, count: float = 1, note: str = "") -> None:
        """Add to what is done. ``note`` is shown after the bar."""

    def scaled(self, factor: float) -> Progress:
        """Progress of a part of the work, each unit of which is ``factor`` units of this one."""
        return _Scaled(self, factor)


NO_PROGRESS = Progress()


class _Scaled(Progress):
    def __init__(self, whole: Progress, factor: float) -> None:
        self.whole, self.factor = whole, factor

    def advance(self, count: float = 1, note: str = "") -> None:
        self.whole.advance(self.factor * count, note)


class _Bar(Progress):
    """On a terminal."""

    def __init__(self, bar: bars.Progress, what: str, total: float | None) -> None:
        self.bar = bar
        self.task = bar.add_task(what, total=total, note="")

    def start(self, total: float) -> None:
        self.bar.update(self.task, total=total)

    def advance(self, count: float = 1, note: str = "") -> None:
        self.bar.update(self.task, advance=count, note=note)


class _Lines(Progress):
    """Elsewhere."""

    def __init__(self, what: str, unit: str, total: float | None) -> None:
        self.what, self.unit, self.total, self.done = what, unit, total, 0.0
        self.begin = self.last = time.monotonic()

    def start(self, total: float) -> None:
        self.total = total

    def advance(self, count: float = 1, note: str = "") -> None:
        self.done += count
        now = time.monotonic()
        if now - self.last < LINE_SECONDS:
            return
        self.last = now
        line = f"{self.what}: {self.done:,.0f}"
        if self.total is not None:
            line += f" of {self.total:,.0f}"
        line += f" {self.unit}" + (f", {note}" if note else "")
        if self.total is not None and self.done:
            left = (self.total - self.done) / self.done * (now - self.begin)
            line += f", about {left / 60:.0f} min left"
        print(line, file=sys.stderr, flush=True)


class _Speed(bars.ProgressColumn):
    def __init__(self, unit: str) -> None:
        super().__init__()
        self.unit = unit

    def render(self, task: bars.Task) -> Text:
        return Text(f"{task.speed:,.1f} {self.unit}/s" if task.speed else "")


@contextlib.contextmanager
def progress_bar(
    what: str, unit: str, total: float | None = None, *, is_quiet: bool = False
) -> Iterator[Progress]:
    """Show the progress of the block inside; without a total the bar only counts."""
    console = Console(stderr=True)
    if is_quiet or asked_quiet():
        yield NO_PROGRESS
    elif not console.is_terminal:
        with announced(what):
            yield _Lines(what, unit, total)
    else:
        counts = (bars.BarColumn(), bars.MofNCompleteColumn(), _Speed(unit))
        note = bars.TextColumn("{task.fields[note]}", markup=False)
        remaining = bars.TimeRemainingColumn()
        columns = (bars.TextColumn(what), *counts, remaining, note)
        with bars.Progress(*columns, console=console, transient=True) as bar:
            yield _Bar(bar, what, total)
