"""``bellmask report trace``: a saved generation as an animated page and as a strip of frames.

In both, every token has the color of the step in which it was revealed. The page is one file that
fetches nothing and works from disk.
"""

from __future__ import annotations

import html
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from bellmask.config.command_line import parse_command
from bellmask.generate.trace import Trace, TracedSample, load_trace
from bellmask.report.page import SCRIPT_POLICY
from bellmask.utils.console import LINE_END, reveal_colour, reveal_colours, visible
from bellmask.utils.errors import UserError
from bellmask.utils.files import write_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class TraceOptions:
    """Show how a text was unmasked: an animated page (one HTML file, nothing fetched) and a strip
    of frames as PNG and SVG, from the file that 'bellmask generate RUN --trace FILE' saves.

    Examples:
    bellmask generate runs/bell --num 4 --trace runs/bell/four.json

    bellmask report trace runs/bell/four.json

    bellmask report trace runs/bell/four.json --sample 2 --frames 8 --out figures
    """

    file: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="FILE")]
    """Trace of a generation."""
    out: str | None = None
    """Folder for NAME.html, NAME.png and NAME.svg; default: beside FILE, whose name they have."""
    sample: int = 0
    """Sample of the strip, and the one the page opens with; the page has all of them."""
    frames: int = 6
    """Frames of the strip, from the canvas to the finished text."""


# The animated page.
#
# A masked position is as wide as the token that it ends with, so that nothing moves while the text
# appears.

SPEEDS = ("0.25", "0.5", "1", "2", "4", "8")


def render_trace_page(trace: Trace, first: int = 0) -> str:
    """The whole page; it opens at sample ``first``."""
    title = html.escape(visible(trace.title or "text being unmasked"))
    finished = "".join(
        f"<p><small>sample {number}</small></p><pre>{html.escape(_lines(sample.text))}</pre>"
        for number, sample in enumerate(trace.samples)
    )
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<meta http-equiv="Content-Security-Policy" content="{SCRIPT_POLICY}">'
        f'<title>{title}</title><link rel="icon" href="data:,"><style>{STYLE}</style></head>'
        f"<body><h1>{title}</h1><p>{_summary(trace)}</p>{_controls(trace)}"
        '<div class="text" id="text" role="region" aria-label="the text after this step"></div>'
        f"{_legend()}<h2>Finished</h2>{finished}{_settings(trace)}"
        f'<script type="application/json" id="trace">{_embedded(trace, first)}</script>'
        f"<script>{SCRIPT}</script></body></html>\n"
    )


def _summary(trace: Trace) -> str:
    count, length = len(trace.samples), max(len(sample.tokens) for sample in trace.samples)
    samples = "1 sample" if count == 1 else f"{count} samples"
    return f"{samples} of {length} tokens, {trace.num_calls} network calls in all."


def _controls(trace: Trace) -> str:
    samples = "".join(
        f'<option value="{number}">{number}: {html.escape(visible(sample.text)[:32])}</option>'
        for number, sample in enumerate(trace.samples)
    )
    speeds = "".join(
        f'<option value="{speed}"{" selected" if speed == "1" else ""}>{speed}x</option>'
        for speed in SPEEDS
    )
    return (
        '<div class="bar"><button id="play" type="button">Play</button>'
        '<input id="slider" type="range" min="0" max="1" value="0" step="1" aria-label="step">'
        f'<label>speed <select id="speed">{speeds}</select></label>'
        f'<label>sample <select id="sample">{samples}</select></label>'
        '<span id="now" class="soft"></span></div>'
        "<noscript><p>The animation needs JavaScript; the finished texts are below.</p></noscript>"
    )


def _legend() -> str:
    ramp = ", ".join(colour for colour, _ in reveal_colours())
    return (
        '<div class="legend"><span>revealed at step 1'
        f'<span class="ramp" style="background:linear-gradient(90deg, {ramp})"></span>'
        '<span id="lastlabel">the last</span></span>'
        '<span><span class="key masked">xxx</span> masked</span>'
        '<span><span class="key given">abc</span> given</span>'
        '<span><span class="key new">abc</span> in this step</span>'
        '<span><span class="key masked again">xxx</span> masked again in this step</span>'
        '<span><span class="key was">abc</span> was masked again before</span></div>'
    )


def _settings(trace: Trace) -> str:
    rows = "".join(
        f"<tr><td>{html.escape(visible(str(key)))}</td><td>{html.escape(visible(str(value)))}</td></tr>"
        for key, value in trace.settings.items()
    )
    return f"<h2>Settings</h2><table><tbody>{rows}</tbody></table>" if rows else ""


def _embedded(trace: Trace, first: int) -> str:
    """The trace as JSON that cannot end its element: only ASCII, no angle brackets."""
    content = {
        "first": first,
        "colours": reveal_colours(),
        "samples": [_sample(sample) for sample in trace.samples],
    }
    text = json.dumps(content, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _sample(sample: TracedSample) -> dict[str, Any]:
    return {
        "given": sample.given,
        "tokens": [None if text is None else _broken(text) for text in sample.tokens],
        "last": [_broken(text or "x") for text in sample.at(sample.num_steps)],
        "num_steps": sample.num_steps,
        "steps": [
            {
                "number": change.number,
                "t": change.t,
                "calls": change.calls,
                "set": [[position, _broken(text)] for position, text in change.set],
                "unset": change.unset,
            }
            for change in sample.steps
        ],
    }


def _broken(text: str) -> str:
    """A token's text without control codes; lines break behind their sign."""
    return visible(text).replace(LINE_END, LINE_END + "\n")


def _lines(text: str) -> str:
    """A finished text: its own lines, nothing else that a browser could act on."""
    return "\n".join(visible(line) for line in text.split("\n"))


# Style and script, both embedded in the page.

STYLE = """
:root { color-scheme: light dark; --paper: #fff; --ink: #1c1c1c; --soft: #5a5a5a; --line: #d8d8d8;
  --mask: #d3d6db; --again: #d1242f; --panel: #f5f6f8; --accent: #0a58ca; }
@media (prefers-color-scheme: dark) { :root { --paper: #14161a; --ink: #ececec; --soft: #a5a9b0;
  --line: #3a3d44; --mask: #3b3f48; --again: #ff6b6b; --panel: #1d2026; --accent: #6ea8fe; } }
* { box-sizing: border-box; }
body { font: 16px/1.5 system-ui, sans-serif; margin: 0 auto; max-width: 1000px; padding: 1rem;
  color: var(--ink); background: var(--paper); }
h1 { font-size: 1.3rem; margin: 0 0 .3rem; overflow-wrap: anywhere; }
h2 { font-size: 1.05rem; margin: 1.6rem 0 .4rem; }
p { margin: .3rem 0; } small, .soft { color: var(--soft); }
.bar { display: flex; flex-wrap: wrap; gap: .5rem .8rem; align-items: center;
  background: var(--panel); border: 1px solid var(--line); border-radius: 8px; padding: .6rem .8rem;
  margin: .8rem 0; }
.bar label { display: flex; gap: .4rem; align-items: center; min-width: 0; max-width: 100%; }
.bar select { min-width: 0; max-width: 100%; }
button, select { font: inherit; color: inherit; background: var(--paper); padding: .2rem .7rem;
  border: 1px solid var(--line); border-radius: 6px; }
button { min-width: 5.2rem; cursor: pointer; }
:focus-visible { outline: 2px solid var(--accent); outline-offset: 1px; }
input[type=range] { flex: 1 1 12rem; min-width: 8rem; accent-color: var(--accent); }
#now { font-variant-numeric: tabular-nums; width: 100%; }
.text { font: .95rem/1.9 ui-monospace, "DejaVu Sans Mono", Consolas, monospace;
  white-space: pre-wrap; overflow-wrap: anywhere; border: 1px solid var(--line);
  border-radius: 8px; padding: .8rem; min-height: 6rem; }
.text span { border-radius: 3px; padding: 2px 0; box-decoration-break: clone;
  -webkit-box-decoration-break: clone; }
.given { text-decoration: underline; text-decoration-color: var(--soft);
  text-underline-offset: 4px; }
.masked { color: transparent; background: var(--mask); user-select: none; }
.masked.again { background: repeating-linear-gradient(135deg, var(--mask) 0 3px,
  var(--again) 3px 5px); }
.was { box-shadow: inset 0 -2px 0 var(--again); }
.new { outline: 2px solid var(--ink); outline-offset: 0; }
.legend { display: flex; flex-wrap: wrap; gap: .3rem 1.1rem; align-items: center;
  font-size: .85rem; margin: .6rem 0; }
.legend span.key { font: .85rem ui-monospace, "DejaVu Sans Mono", monospace; padding: 1px 5px;
  border-radius: 3px; }
.ramp { display: inline-block; width: 9rem; height: .8rem; border-radius: 3px;
  vertical-align: middle; margin: 0 .3rem; }
pre { background: var(--panel); padding: .6rem; font-size: .85rem; white-space: pre-wrap;
  overflow-wrap: anywhere; border-radius: 6px; margin: .3rem 0 .8rem; }
table { border-collapse: collapse; font-size: .85rem; }
td { border-bottom: 1px solid var(--line); padding: .2rem .8rem .2rem 0; vertical-align: top;
  overflow-wrap: anywhere; }
"""

SCRIPT = """
"use strict";
const trace = JSON.parse(document.getElementById("trace").textContent);
const find = id => document.getElementById(id);
const SECONDS = 8;  // a whole sample at normal speed
let sample = 0, step = 0, timer = null, places = [];

// What each position shows after a step: text or null, since when, how often masked again.
function replay(row, until) {
  const now = row.tokens.map(text => ({text, since: 0, again: 0, isNew: false, isLost: false}));
  let calls = 0, t = until === 0 ? 1 : null;
  for (const change of row.steps) {
    if (change.number > until) break;
    const isLast = change.number === until;
    for (const i of change.unset) {
      now[i] = {text: null, since: 0, again: now[i].again + 1, isNew: false, isLost: isLast};
    }
    for (const [i, text] of change.set) {
      now[i] = {text, since: change.number, again: now[i].again, isNew: isLast, isLost: false};
    }
    calls = change.calls; t = isLast ? change.t : null;
  }
  return {now, calls, t};
}

function paint(span, place, given, placeholder, numSteps, position) {
  const isMasked = place.text === null;
  const names = [isMasked ? "masked" : given ? "given" : "shown"];
  if (place.isLost) names.push("again");
  if (!isMasked && place.again) names.push("was");
  if (place.isNew) names.push("new");
  span.className = names.join(" ");
  span.textContent = isMasked ? placeholder : place.text;
  if (isMasked) span.setAttribute("aria-hidden", "true");
  else span.removeAttribute("aria-hidden");
  const last = trace.colours.length - 1;
  const share = numSteps > 1 ? (place.since - 1) / (numSteps - 1) : 0;
  const colour = !isMasked && place.since ? trace.colours[Math.round(share * last)] : null;
  span.style.background = colour ? colour[0] : "";
  span.style.color = colour ? colour[1] : "";
  const times = place.again === 1 ? "once" : place.again + " times";
  span.title = "position " + position + (isMasked ? ": masked" : given ? ": given"
    : ": since step " + place.since) + (place.again ? ", masked again " + times : "");
}

function draw() {
  const row = trace.samples[sample];
  const {now, calls, t} = replay(row, step);
  now.forEach((place, i) => paint(
    places[i], place, row.given[i], row.last[i], row.num_steps, i));
  const gaps = row.given.filter(given => !given).length;
  const filled = now.filter((place, i) => !row.given[i] && place.text !== null).length;
  const again = now.reduce((sum, place) => sum + place.again, 0);
  const share = gaps ? Math.round(100 * filled / gaps) : 100;
  find("slider").value = step;
  find("now").textContent = "step " + step + " of " + row.num_steps + " \\u00b7 " + share +
    " % unmasked \\u00b7 " + calls + " calls" +
    (again ? " \\u00b7 " + again + " masked again" : "") +
    (t === null ? "" : " \\u00b7 t " + t.toFixed(3));
}

function choose(number) {
  sample = Math.min(Math.max(0, number), trace.samples.length - 1);
  const row = trace.samples[sample];
  find("sample").value = sample;
  find("slider").max = row.num_steps;
  find("lastlabel").textContent = row.num_steps;
  places = row.tokens.map(() => document.createElement("span"));
  find("text").replaceChildren(...places);
  step = Math.min(step, row.num_steps);
  draw();
}

function stop() {
  clearTimeout(timer); timer = null;
  find("play").textContent = "\\u25b6 Play";
}

function tick() {
  const numSteps = trace.samples[sample].num_steps;
  if (step >= numSteps) { stop(); return; }
  const wait = 1000 * SECONDS / Math.max(1, numSteps) / Number(find("speed").value);
  const stride = Math.max(1, Math.round(16 / wait));
  step = Math.min(numSteps, step + stride);
  draw();
  timer = setTimeout(tick, wait * stride);
}

function play() {
  if (step >= trace.samples[sample].num_steps) { step = 0; draw(); }
  find("play").textContent = "\\u23f8 Pause";
  timer = setTimeout(tick, 400);
}

function move(to) {
  stop();
  step = Math.min(Math.max(0, to), trace.samples[sample].num_steps);
  draw();
}

find("play").addEventListener("click", () => timer === null ? play() : stop());
find("slider").addEventListener("input", event => move(Number(event.target.value)));
find("sample").addEventListener("change", event => {
  stop(); step = 0; choose(Number(event.target.value)); play();
});
addEventListener("keydown", event => {
  if (["SELECT", "INPUT", "BUTTON"].includes(event.target.tagName)) return;
  if (event.key === " ") { event.preventDefault(); timer === null ? play() : stop(); }
  if (event.key === "ArrowRight") move(step + 1);
  if (event.key === "ArrowLeft") move(step - 1);
});

// page.html#sample=2&step=40 shows that moment; otherwise the page plays, unless motion is unwanted
const asked = new URLSearchParams(location.hash.slice(1));
const whole = (name, otherwise) =>
  /^[0-9]+$/.test(asked.get(name) || "") ? Number(asked.get(name)) : otherwise;
choose(whole("sample", trace.first));
document.body.classList.add("ready");
if (asked.has("step")) move(whole("step", 0));
else if (!matchMedia("(prefers-reduced-motion: reduce)").matches) play();
"""


# A strip of frames of one sample, from the canvas to the finished text.
#
# Frames stand under one another, each with the same places for the tokens: a position is as wide as
# the longest token it ever had.

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
class DrawnPosition:
    """Where a position is drawn: line and column, in characters."""

    position: int
    line: int
    column: int
    width: int


def strip_steps(num_steps: int, frames: int) -> list[int]:
    """Steps to show, from the canvas to the last, as evenly as whole numbers allow."""
    if frames < 2:
        raise UserError(f"--frames must be at least 2 (canvas and finished text), got {frames}")
    frames = min(frames, num_steps + 1) if num_steps else 2
    return sorted({round(num_steps * n / (frames - 1)) for n in range(frames)})


def lay_out(
    sample: TracedSample, columns: int = COLUMNS, lines: int = LINES
) -> list[DrawnPosition]:
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
        places.append(DrawnPosition(position, line, column, width))
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


def _draw_label(axes: Axes, sample: TracedSample, step: int, top: float) -> None:
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


def _draw_frame(
    axes: Axes, sample: TracedSample, step: int, places: list[DrawnPosition], top: float
) -> None:
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
    return ("white", "black") if since is None else reveal_colour(since, num_steps)


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


# The command.


def main(args: Sequence[str]) -> int:
    """Write the page and the strip."""
    options = parse_command(TraceOptions, args, command="report trace")
    source = Path(options.file)
    trace = load_trace(source)
    folder = Path(options.out) if options.out is not None else source.parent
    if folder.exists() and not folder.is_dir():
        raise UserError(f"--out {folder} is a file; give a folder")

    from bellmask.report.figures import save_figure

    figure = strip_figure(trace, options.sample, options.frames)
    folder.mkdir(parents=True, exist_ok=True)
    page = folder / f"{source.stem}.html"
    if page.resolve() == source.resolve():
        raise UserError(f"the page would replace {source}; give another folder with --out")
    write_text(page, render_trace_page(trace, options.sample))
    paths = save_figure(figure, folder / source.stem)
    print(f"page:  {page}")
    print(f"strip: {paths[0]}, {paths[1].name}")
    return 0
