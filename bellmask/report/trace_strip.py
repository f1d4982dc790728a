"""A strip of frames of one sample, from the canvas to the finished text.

Frames stand under one another, each with the same places for the tokens: a position is as wide as
the longest token it ever had. Tokens have the colour of the step in which they were revealed.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

from bellmask.generate.trace_file import Sample, Trace
from bellmask.utils.console import colour_of, visible
from bellmask.utils.errors import UserError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FONT = "DejaVu Sans Mono"
"""Comes with matplotlib."""
FONT_SIZE = 9.0
CELL_WIDTH = 0.602 * FONT_SIZE / 72
"""Inches: what a character of the font takes."""
LINE_HEIGHT = 1.75 * FONT_SIZE / 72
LABEL_WIDTH = 1.4
COLUMNS = 88
LINES = 12
"""Lines of a frame; a longer text is cut, and the picture says so."""
MASK_COLOUR, AGAIN_COLOUR = "#d3d6db", "#d1242f"


@dataclass(frozen=True)
class Place:
    """Where a position is drawn: line and column, in characters."""

    position: int
    line: int
    column: int
    width: int


def chosen_steps(num_steps: int, frames: int) -> list[int]:
    """Steps to show, from the canvas to the last, as evenly as whole numbers allow."""
    if frames < 2:
        raise UserError(f"--frames must be at least 2 (canvas and finished text), got {frames}")
    frames = min(frames, num_steps + 1) if num_steps else 2
    return sorted({round(num_steps * n / (frames - 1)) for n in range(frames)})


def lay_out(sample: Sample, columns: int = COLUMNS, lines: int = LINES) -> list[Place]:
    """Places of the positions that fit into ``lines`` lines, the same in every frame."""
    widths = [len(_drawn(text or "")) for text in sample.tokens]
    for change in sample.steps:
        for position, text in change.set:
            widths[position] = max(widths[position], len(_drawn(text)))
    places, line, column = [], 0, 0
    for position, needed in enumerate(widths):
        width = min(max(1, needed), columns)
        if column + width > columns:
            line, column = line + 1, 0
        if line == lines:
            break
        places.append(Place(position, line, column, width))
        column += width
    return places


@cache
def _known_characters() -> frozenset[int]:
    from matplotlib.font_manager import findfont, get_font

    return frozenset(get_font(findfont(FONT)).get_charmap())


def _drawn(text: str) -> str:
    """A token's text in characters that the font has; a box for others."""
    return "".join(c if ord(c) in _known_characters() else "□" for c in visible(text))


def strip_figure(trace: Trace, number: int = 0, frames: int = 6) -> Figure:
    """The strip of sample ``number``."""
    from matplotlib.figure import Figure

    if not 0 <= number < len(trace.samples):
        raise UserError(f"--sample must be from 0 to {len(trace.samples) - 1}, got {number}")
    sample = trace.samples[number]
    steps, places = chosen_steps(sample.num_steps, frames), lay_out(sample)
    lines = places[-1].line + 1
    columns = max(max(place.column + place.width for place in places), 40)
    pitch = lines + 0.7
    width = LABEL_WIDTH + columns * CELL_WIDTH + 0.1
    top, bottom = 0.42, 0.8
    height = top + bottom + len(steps) * pitch * LINE_HEIGHT
    figure = Figure(figsize=(width, height), facecolor="white")
    axes = figure.add_axes(
        (LABEL_WIDTH / width, bottom / height, columns * CELL_WIDTH / width,
         len(steps) * pitch * LINE_HEIGHT / height)
    )  # fmt: skip
    axes.set(xlim=(0, columns), ylim=(len(steps) * pitch, 0))
    axes.axis("off")
    for row, step in enumerate(steps):
        _draw_label(axes, sample, step, row * pitch)
        _draw_frame(axes, sample, step, places, row * pitch)
    _draw_title(figure, trace, number, len(places))
    _draw_legend(figure, sample.num_steps)
    return figure


def _draw_label(axes: Axes, sample: Sample, step: int, top: float) -> None:
    texts = sample.at(step)
    gaps = [text for text, given in zip(texts, sample.given, strict=True) if not given]
    share = sum(text is not None for text in gaps) / len(gaps) if gaps else 1.0
    axes.annotate(
        f"step {step}: {share:.0%}",
        (0, top + 0.5),
        xytext=(-8, 0),
        textcoords="offset points",
        ha="right",
        va="center",
        fontsize=8.5,
        annotation_clip=False,
    )


def _draw_frame(axes: Axes, sample: Sample, step: int, places: list[Place], top: float) -> None:
    """One frame: a box for each position, coloured by when it was revealed, its text over it."""
    from matplotlib.collections import LineCollection, PatchCollection
    from matplotlib.patches import Rectangle

    texts, since, again = sample.at(step), sample.since(step), sample.remasked(step)
    boxes, colours, lines = [], [], []
    for place in places:
        i, x, y = place.position, place.column, top + place.line
        colour, ink = _colours(texts[i], since[i], sample.num_steps)
        boxes.append(Rectangle((x + 0.04, y + 0.08), place.width - 0.08, 0.84))
        colours.append(colour)
        if again[i]:
            lines.append([(x + 0.08, y + 0.92), (x + place.width - 0.08, y + 0.92)])
        if (texts[i] or "").strip(" "):
            _draw_token(axes, _drawn(texts[i] or "")[: place.width], x, y + 0.5, ink)
    axes.add_collection(PatchCollection(boxes, facecolors=colours, linewidths=0, zorder=1))
    axes.add_collection(LineCollection(lines, colors=AGAIN_COLOUR, linewidths=1.3, zorder=2))


def _colours(text: str | None, since: int | None, num_steps: int) -> tuple[str, str]:
    """(box, text) of a position."""
    if text is None:
        return MASK_COLOUR, "black"
    return ("white", "black") if since is None else colour_of(since, num_steps)


def _draw_token(axes: Axes, text: str, x: float, y: float, ink: str) -> None:
    drawn = axes.text(
        x,
        y,
        text,
        color=ink,
        family=FONT,
        fontsize=FONT_SIZE,
        va="center_baseline",
        parse_math=False,
    )
    drawn.set_in_layout(False)  # it is inside the axes; measuring thousands takes seconds


def _draw_title(figure: Figure, trace: Trace, number: int, shown: int) -> None:
    sample = trace.samples[number]
    title = _drawn(trace.title)
    title = title if len(title) <= 80 else title[:77] + "..."
    if len(trace.samples) > 1:
        title += f", sample {number}"
    if shown < len(sample.tokens):
        title += f" (the first {shown} of {len(sample.tokens)} tokens)"
    y = 1 - 0.2 / figure.get_figheight()
    figure.text(
        LABEL_WIDTH / figure.get_figwidth(),
        y,
        title,
        fontsize=9.5,
        va="center",
        parse_math=False,
    )


def _draw_legend(figure: Figure, num_steps: int) -> None:
    """The colour bar, and what grey, white and red mean."""
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import Normalize
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    width, height = figure.get_figwidth(), figure.get_figheight()
    axes = figure.add_axes((LABEL_WIDTH / width, 0.45 / height, 2.2 / width, 0.12 / height))
    scale = ScalarMappable(Normalize(1, max(2, num_steps)), "viridis")
    bar = figure.colorbar(scale, cax=axes, orientation="horizontal")
    bar.set_ticks([1, max(2, num_steps)])
    bar.ax.tick_params(labelsize=7.5)
    bar.set_label("revealed at step", fontsize=8, labelpad=-7)
    figure.legend(
        handles=[
            Patch(facecolor=MASK_COLOUR, label="masked"),
            Patch(facecolor="white", edgecolor="0.6", linewidth=0.8, label="given"),
            Line2D([], [], color=AGAIN_COLOUR, linewidth=1.3, label="was masked again"),
        ],
        loc="center left",
        bbox_to_anchor=((LABEL_WIDTH + 2.3) / width, 0.45 / height),
        ncols=3,
        fontsize=7.5,
        frameon=False,
        handlelength=1.4,
        columnspacing=1.2,
    )
