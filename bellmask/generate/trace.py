"""How a text was unmasked: recorded (``generate --trace``), and shown by ``bellmask report trace``.

The parts: the trace and its file; reading it, with every value checked; recording; the animated
page; the strip of frames; the command. On page and strip every token has the color of the step in
which it was revealed.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import tyro

from bellmask.config.command_line import parse_command
from bellmask.data.tokenizers import Tokenizer
from bellmask.generate.sampler import Step, token_texts
from bellmask.report.page import html_page, html_table, page_text
from bellmask.utils.console import LINE_END, plural, reveal_color, reveal_colors, visible
from bellmask.utils.errors import UserError
from bellmask.utils.files import check_folder, has_kinds, is_number, is_whole, read_json, write_text

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class TraceOptions:
    """Show how a text was unmasked: an animated page (one self-contained HTML file) and a strip
    of frames as PNG and SVG, from the file that 'bellmask generate RUN --trace FILE' saves.

    Examples:
    bellmask generate runs/bell --num 4 --trace runs/bell/four.json

    bellmask report trace runs/bell/four.json

    bellmask report trace runs/bell/four.json --sample 2 --frames 8 --out figures
    """

    file: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="FILE")]
    """Trace file of a generation."""
    out: str | None = None
    """Folder for NAME.html, NAME.png and NAME.svg, named after FILE; default: FILE's folder."""
    sample: int = 0
    """Sample shown in the strip and first on the page; the page has all samples."""
    frames: int = 6
    """Number of frames in the strip, from the canvas to the finished text."""


# The file: the canvas, then the changes of each step.
#
# Tokens are stored as text, so that reports need no tokenizer; see ``token_texts`` for bytes that
# are not a character. The text of a finished sample is decoded as a whole. One JSON file:
#
#     {"version": 1, "title": ..., "settings": {...}, "num_calls": ..., "samples": [
#         {"tokens": ["The", null, ...], "num_steps": ..., "text": ...,
#          "steps": [{"number": 3, "t": 0.9, "calls": 2, "set": [[1, " cat"]], "unset": []}, ...]}]}
#
# ``tokens`` is step 0, null where masked; ``steps`` are those in which the sample changed.

VERSION = 1


@dataclass(frozen=True)
class Change:
    """Changes of one sample in one step."""

    number: int
    t: float
    calls: int
    """Network calls so far."""
    set: list[tuple[int, str]]
    """Positions that got a (new) token, and its text."""
    unset: list[int]
    """Positions that were masked again."""


class Position(NamedTuple):
    """One position after some step."""

    text: str | None
    """None while it is masked."""
    since: int
    """The step of its last change; 0 is the canvas."""
    num_remasked: int
    """How often it was masked again."""


@dataclass
class TracedSample:
    """One row from the canvas to the finished text."""

    tokens: list[str | None]
    """The canvas; None where masked."""
    steps: list[Change]
    """Steps that changed this row, in order."""
    text: str = ""
    """The finished text, decoded as a whole."""
    num_steps: int = 0
    """The last step's number; it may have changed nothing here."""

    def history(self) -> list[list[Position]]:
        """The history of each position, starting with the canvas."""
        found = [[Position(text, 0, 0)] for text in self.tokens]
        for change in self.steps:
            masked = [(place, None) for place in change.unset]
            for place, text in [*masked, *change.set]:
                num_remasked = found[place][-1].num_remasked + (text is None)
                found[place].append(Position(text, change.number, num_remasked))
        return found

    def at(self, number: int) -> list[Position]:
        """Every position after a step."""
        return [[one for one in past if one.since <= number][-1] for past in self.history()]


@dataclass(frozen=True)
class Trace:
    """All samples of one generation."""

    title: str
    settings: dict[str, Any]
    num_calls: int
    """Network calls, over all batches."""
    samples: list[TracedSample]

    def save(self, path: Path) -> None:
        """Write the file as a whole or not at all."""
        content = {"version": VERSION, **asdict(self)}
        write_text(path, json.dumps(content, ensure_ascii=False, allow_nan=False) + "\n")


def load_trace(path: Path) -> Trace:
    """Read a trace; every value of it is checked."""
    if not path.is_file():
        raise UserError(f"there is no {path}; 'bellmask generate RUN --trace {path}' makes one")
    try:
        content = read_json(path)
        is_right = has_kinds(content, {"title": str, "settings": dict, "num_calls": int})
        if not is_right or content["version"] != VERSION or not content["samples"]:
            raise ValueError(f"this bellmask reads version {VERSION}")
        samples = list(map(_read_sample, content["samples"]))
    except (ValueError, TypeError, KeyError) as fault:
        raise UserError(f"{path} is not a trace, or a damaged one: {fault}") from None
    return Trace(content["title"], content["settings"], content["num_calls"], samples)


def _read_sample(found: dict[str, Any]) -> TracedSample:
    steps = [Change(**{**one, "set": list(map(tuple, one["set"]))}) for one in found["steps"]]
    sample = TracedSample(**{**found, "steps": steps})
    numbers = [0, *(one.number for one in sample.steps), sample.num_steps + 1]
    places = [p for one in sample.steps for p in (*one.unset, *(place for place, _ in one.set))]
    texts = [sample.text, *(text for one in sample.steps for _, text in one.set)]
    are_right = (
        all(isinstance(text, str) for text in texts),
        all(isinstance(token, str | None) for token in sample.tokens),
        all(is_whole(place) and place < len(sample.tokens) for place in places),
        all(map(is_whole, numbers)) and all(a < b for a, b in itertools.pairwise(numbers)),
        all(is_number(one.t) and 0 <= one.t <= 1 and is_whole(one.calls) for one in sample.steps),
    )
    if not isinstance(sample.tokens, list) or not sample.tokens or not all(are_right):
        raise ValueError("tokens, places, times or step numbers are impossible")
    return sample


# Recording: store the changes in the steps of batches.


class Recorder:
    """Receives the steps of all batches and stores changes.

    ``recorder = Recorder(tokenizer)``, give it as ``on_step``, then ``recorder.trace(...)``.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer, self._texts = tokenizer, token_texts(tokenizer)
        self._samples: list[TracedSample] = []
        self._rows: list[list[int]] = []  # of the latest batch, after its latest step
        self._num_calls = self._calls_before = 0

    def __call__(self, step: Step) -> None:
        """Add one step; number 0 begins a batch."""
        rows = step.ids_BL.tolist()
        if step.number == 0:
            self._samples += [TracedSample([*map(self._text, row)], []) for row in rows]
            self._rows, self._calls_before = rows, self._num_calls
        samples = self._samples[-len(rows) :]
        for sample, before, after in zip(samples, self._rows, rows, strict=True):
            sample.num_steps = step.number
            if after != before:
                texts = [(i, self._text(new)) for i, new in enumerate(after) if new != before[i]]
                given = [(i, text) for i, text in texts if text is not None]
                masked = [i for i, text in texts if text is None]
                t = min(max(float(step.t), 0.0), 1.0)
                sample.steps.append(Change(step.number, t, step.num_calls, given, masked))
        self._rows, self._num_calls = rows, self._calls_before + step.num_calls

    def _text(self, token: int) -> str | None:
        return None if token == self.tokenizer.mask_id else self._texts(token)

    def trace(self, title: str, settings: Mapping[str, Any], texts: Sequence[str]) -> Trace:
        """The trace, with the finished texts, which may be truncated (at EOS, for example)."""
        for sample, text in zip(self._samples, texts, strict=True):
            sample.text = text
        return Trace(title, dict(settings), self._num_calls, self._samples)


# The animated page.
#
# A masked position is as wide as its final token, so that the text does not move.


def render_trace_page(trace: Trace, first: int = 0) -> str:
    """The whole page; it opens at sample ``first``."""
    count, length = len(trace.samples), max(len(sample.tokens) for sample in trace.samples)
    options, finished = "", ""
    for number, sample in enumerate(trace.samples):
        start = page_text(visible(sample.text)[:32])
        options += f'<option value="{number}">{number}: {start}</option>'
        finished += f"<p><small>sample {number}</small></p><pre>{page_text(sample.text)}</pre>"
    settings = [[visible(name), visible(str(value))] for name, value in trace.settings.items()]
    body = BODY.format(
        summary=f"{plural(count, 'sample')} of {length} tokens, {trace.num_calls} network calls.",
        samples=options,
        ramp=", ".join(color for color, _ in reveal_colors()),
        finished=finished,
        settings=html_table(["setting", "value"], settings),
        trace=_embedded(trace, first),
    )
    title = visible(trace.title) or "text being unmasked"
    return html_page(title, body, style=STYLE, script=SCRIPT)


def _embedded(trace: Trace, first: int) -> str:
    """Data for the script, as JSON that cannot close its element: ASCII, no angle brackets."""
    samples = []
    for sample in trace.samples:
        steps = [[0, 1, 0], *([one.number, one.t, one.calls] for one in sample.steps)]
        positions = [
            [(c and visible(c).replace(LINE_END, f"{LINE_END}\n"), *more) for c, *more in past]
            for past in sample.history()  # lines break after their symbol
        ]
        samples.append({"num_steps": sample.num_steps, "steps": steps, "positions": positions})
    content = {"first": first, "colors": reveal_colors(), "samples": samples}
    text = json.dumps(content, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


_FILES = files("bellmask.generate")
BODY, STYLE, SCRIPT = (
    _FILES.joinpath(f"trace.{kind}").read_text(encoding="utf-8") for kind in ("html", "css", "js")
)


# A strip of frames of one sample, from the canvas to the finished text.
#
# Frames are stacked, with tokens at the same places: a position is as wide as its longest token.
# Everything is measured in characters and lines.

FONT = "DejaVu Sans Mono"
"""Comes with matplotlib."""
FONT_SIZE = 9.0
CELL_WIDTH = 0.602 * FONT_SIZE / 72
"""Size of a character of the font, in inches."""
LINE_HEIGHT = 1.75 * FONT_SIZE / 72
COLUMNS = 88
LINES = 12
"""Lines of a frame; a longer text is cut, and the picture says so."""
MASK_COLOR, REMASKED_COLOR = "#d3d6db", "#d1242f"


def strip_steps(num_steps: int, frames: int) -> list[int]:
    """Steps to show, evenly spaced from the canvas to the last."""
    if frames < 2:
        raise UserError(f"--frames must be at least 2 (canvas and finished text), got {frames}")
    frames = max(2, min(frames, num_steps + 1))
    return sorted({round(num_steps * n / (frames - 1)) for n in range(frames)})


def lay_out(
    sample: TracedSample, columns: int = COLUMNS, lines: int = LINES
) -> list[tuple[int, int, int]]:
    """(line, column, width) of the positions that fit into ``lines``, the same in every frame."""
    places, line, column = [], 0, 0
    for past in sample.history():
        width = max(len(_drawn(one.text or "")) for one in past)
        width = min(max(1, width), columns)
        if column + width > columns:
            line, column = line + 1, 0
        if line == lines:
            break
        places.append((line, column, width))
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
    steps, places = strip_steps(sample.num_steps, frames), lay_out(sample)
    pitch = places[-1][0] + 1.7
    columns, lines = max(40, *(column + width for _, column, width in places)), len(steps) * pitch
    figure = Figure(figsize=(columns * CELL_WIDTH, lines * LINE_HEIGHT), facecolor="white")
    # text outside of the frames is outside of the axes; saving adds space for it
    axes = figure.add_axes((0, 0, 1, 1), xlim=(0, columns), ylim=(lines, 0))
    axes.axis("off")
    for row, step in enumerate(steps):
        _draw_frame(axes, sample, step, places, row * pitch)
    title = _drawn(trace.title)
    title = title if len(title) <= 80 else title[:77] + "..."
    title += f", sample {number}" if len(trace.samples) > 1 else ""
    if len(places) < len(sample.tokens):
        title += f" (the first {len(places)} of {len(sample.tokens)} tokens)"
    axes.text(0, -1, title, fontsize=9.5, parse_math=False)
    _draw_legend(axes, sample.num_steps)
    return figure


def _draw_frame(
    axes: Axes, sample: TracedSample, step: int, places: list[tuple[int, int, int]], top: float
) -> None:
    """A box for each position, colored by when it was revealed, its text over it."""
    from matplotlib.collections import PatchCollection
    from matplotlib.patches import Rectangle

    positions = sample.at(step)
    gaps = [p for p, token in zip(positions, sample.tokens, strict=True) if token is None]
    share = sum(gap.text is not None for gap in gaps) / len(gaps) if gaps else 1.0
    axes.text(-1.5, top + 0.5, f"step {step}: {share:.0%}", ha="right", va="center", fontsize=8.5)
    boxes, colors = [], []
    for (text, since, num_remasked), (line, x, width) in zip(positions, places):
        y, color, ink = top + line, MASK_COLOR, "black"
        if text is not None:
            color, ink = reveal_color(since, sample.num_steps) if since else ("white", "black")
        boxes.append(Rectangle((x + 0.04, y + 0.08), width - 0.08, 0.84))
        colors.append(color)
        if num_remasked:
            axes.hlines(y + 0.92, x + 0.08, x + width - 0.08, REMASKED_COLOR, linewidth=1.3)
        if text is not None and text.strip(" "):
            token = axes.text(x, y + 0.5, _drawn(text)[:width], color=ink, parse_math=False)
            token.set(family=FONT, fontsize=FONT_SIZE, va="center_baseline")
            token.set_in_layout(False)  # it is inside the axes; measuring thousands takes seconds
    axes.add_collection(PatchCollection(boxes, facecolors=colors, linewidths=0, zorder=1))


def _draw_legend(axes: Axes, num_steps: int) -> None:
    """Legend of the colors, below the frames."""
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    steps = sorted({1, (num_steps + 1) // 2, num_steps} - {0})
    colors = {f"step {step}": reveal_color(step, num_steps)[0] for step in steps}
    colors |= {"masked": MASK_COLOR, "given": "white"}
    handles: list[Artist] = [
        Patch(facecolor=color, edgecolor="0.6", linewidth=0.8, label=label)
        for label, color in colors.items()
    ]
    handles += [Line2D([], [], color=REMASKED_COLOR, linewidth=1.3, label="was masked again")]
    look: dict[str, Any] = {"ncols": len(handles), "fontsize": 7.5, "frameon": False}
    axes.legend(handles=handles, loc="upper left", bbox_to_anchor=(0, 0), **look)


# The command.


def main(args: Sequence[str]) -> int:
    """Write the page and the strip."""
    from bellmask.report.figures import save_figure  # loads matplotlib

    options = parse_command(TraceOptions, args, command="report trace")
    source = Path(options.file)
    trace = load_trace(source)
    check_folder(options.out)
    folder = source.parent if options.out is None else Path(options.out)
    page = folder / f"{source.stem}.html"
    figure = strip_figure(trace, options.sample, options.frames)
    folder.mkdir(parents=True, exist_ok=True)
    write_text(page, render_trace_page(trace, options.sample))
    paths = save_figure(figure, folder / source.stem)
    print(f"page:  {page}")
    print(f"strip: {paths[0]}, {paths[1].name}")
    return 0
