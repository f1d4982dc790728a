"""Console output: lines to a possibly closed pipe, the library's messages, safe tokens."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import sys
import textwrap
import threading
from collections.abc import Iterator, Sequence
from functools import cache
from typing import TextIO

# Output to a pipe that may be closed, as after ``| head`` or Ctrl-C.


def tell(text: str, stream: TextIO) -> None:
    """Print a line; a closed pipe does not change the exit code."""
    with contextlib.suppress(OSError):
        print(fit_screen(text, stream), file=stream, flush=True)


SLOW_SECONDS = 2.0


@contextlib.contextmanager
def announced(what: str, *, is_quiet: bool = False) -> Iterator[None]:
    """Print on stderr what the block does, if it takes long; only on the main process."""
    if is_quiet or asked_quiet() or os.environ.get("RANK", "0") != "0":
        yield
        return
    timer = threading.Timer(SLOW_SECONDS, lambda: tell(f"{what} ...", sys.stderr))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def fit_screen(text: str, stream: TextIO | None) -> str:
    """Wrap lines between words on a terminal."""
    if stream is None or not stream.isatty():  # a closed one is None
        return text
    width = shutil.get_terminal_size().columns
    wrapper = textwrap.TextWrapper(width, break_long_words=False, break_on_hyphens=False)
    return "\n".join(wrapper.fill(line) for line in text.split("\n"))


def plural(count: int, noun: str) -> str:
    """``1 block``, ``1,024 blocks``."""
    return f"{count:,} {noun}{'s' * (count != 1)}"


def finish_telling() -> None:
    """Call at the end: otherwise Python reports unread output with an exit code of its own."""
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None:  # a closed one is None
                stream.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


class _MessageHandler(logging.Handler):
    """One line per message, on the current stderr, which a progress bar replaces."""

    def emit(self, record: logging.LogRecord) -> None:
        kind = "note" if record.levelno == logging.INFO else record.levelname.lower()
        tell(f"{kind}: {visible_lines(self.format(record))}", sys.stderr)


LOGGER = logging.getLogger("bellmask")


def asked_quiet() -> bool:
    """True with ``--quiet``: no notes and no progress."""
    return LOGGER.level >= logging.WARNING


@contextlib.contextmanager
def messages_on_stderr(level: int = logging.INFO) -> Iterator[None]:
    """Show what the library logs as ``note: ...`` and ``warning: ...``; for commands.

    A program that imports bellmask configures the logger "bellmask" itself.
    """
    handler, before = _MessageHandler(), (LOGGER.level, LOGGER.propagate)
    LOGGER.setLevel(level)
    LOGGER.propagate = False  # packages that add handlers to the root would show it twice
    LOGGER.addHandler(handler)
    try:
        yield
    finally:
        LOGGER.removeHandler(handler)
        LOGGER.setLevel(before[0])
        LOGGER.propagate = before[1]


def print_lines(lines: Sequence[str]) -> None:
    """Print sentences under a table, without control characters."""
    for line in lines:
        print(fit_screen(visible_lines(line), sys.stdout))


# Display of single tokens in views of a generation: on the screen, on a page, in a figure.

MASK = "░"
REMASKED = "▓"
LINE_END = "↵"
_SIGNS = {"\n": LINE_END, "\r": "␍", "\t": "⇥"}


def visible(text: str) -> str:
    """One line without control codes: line ends and tabs as symbols, others as dots.

    Text of a small byte model may contain terminal control codes.
    """
    return "".join(_SIGNS.get(c) or (c if c.isprintable() else "·") for c in text)


def visible_lines(text: str) -> str:
    """Keep line breaks; replace other control characters with visible symbols."""
    return "\n".join(visible(line) for line in text.split("\n"))


def plain_ascii(text: str) -> str:
    """For terminals limited to ASCII."""
    text = text.replace(MASK, "_").replace(REMASKED, "#").replace(LINE_END, "/")
    return text.encode("ascii", "backslashreplace").decode("ascii")


NUM_COLORS = 64


@cache
def reveal_colors() -> list[tuple[str, str]]:
    """(color, readable text color) from the first step to the last: matplotlib's viridis."""
    import matplotlib

    ramp = matplotlib.colormaps["viridis"]
    stops = (ramp(number / (NUM_COLORS - 1))[:3] for number in range(NUM_COLORS))
    return [(matplotlib.colors.to_hex(rgb), _text_on(rgb)) for rgb in stops]


def reveal_color(step: int, num_steps: int) -> tuple[str, str]:
    """The colors of a token revealed in a step (from 1)."""
    share = (step - 1) / (num_steps - 1) if num_steps > 1 else 0.0
    return reveal_colors()[round(share * (NUM_COLORS - 1))]


def _text_on(rgb: Sequence[float]) -> str:
    """Black or white, whichever has more contrast (WCAG's relative luminance)."""
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in rgb]
    luminance = 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
    return "#000000" if (luminance + 0.05) / 0.05 > 1.05 / (luminance + 0.05) else "#ffffff"
