"""What commands print: lines for a reader who may be gone, messages of the library, tokens that
steer no terminal.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from collections.abc import Iterator, Sequence
from functools import cache
from typing import TextIO

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


class _MessageHandler(logging.Handler):
    """One line for each message, on what is stderr at that moment: a progress bar replaces it."""

    def emit(self, record: logging.LogRecord) -> None:
        kind = "note" if record.levelno == logging.INFO else record.levelname.lower()
        tell(f"{kind}: {visible_lines(self.format(record))}", sys.stderr)


@contextlib.contextmanager
def messages_on_stderr() -> Iterator[None]:
    """Show what the library logs as ``note: ...`` and ``warning: ...``; for commands.

    A program that imports bellmask decides itself what becomes of the logger "bellmask".
    """
    logger, handler = logging.getLogger("bellmask"), _MessageHandler()
    before = logger.level, logger.propagate
    logger.setLevel(logging.INFO)
    logger.propagate = False  # packages that add handlers to the root would show it twice
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before[0])
        logger.propagate = before[1]


def print_lines(lines: Sequence[str]) -> None:
    """Sentences under a table; names in them cannot steer the terminal."""
    for line in lines:
        print(visible_lines(line))


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
    return [(matplotlib.colors.to_hex(rgb), _text_on(rgb)) for rgb in stops]


def reveal_colour(step: int, num_steps: int) -> tuple[str, str]:
    """The colours of a token revealed in a step (from 1)."""
    share = (step - 1) / (num_steps - 1) if num_steps > 1 else 0.0
    return reveal_colours()[round(share * (NUM_COLOURS - 1))]


def _text_on(rgb: Sequence[float]) -> str:
    """Black or white, whichever has more contrast (WCAG's relative luminance)."""
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in rgb]
    luminance = 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
    return "#000000" if (luminance + 0.05) / 0.05 > 1.05 / (luminance + 0.05) else "#ffffff"
