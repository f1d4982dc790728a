"""``bellmask report trace``: a saved generation as an animated page and a strip of frames."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from bellmask.config.presets import parse_command
from bellmask.utils.errors import UserError


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


def run(args: Sequence[str]) -> int:
    """Write the page and the strip."""
    options = parse_command(TraceOptions, args, command="report trace")

    from bellmask.generate.trace_file import load_trace

    source = Path(options.file)
    trace = load_trace(source)
    folder = Path(options.out) if options.out is not None else source.parent
    if folder.exists() and not folder.is_dir():
        raise UserError(f"--out {folder} is a file; give a folder")

    from bellmask.report.figures import save_figure
    from bellmask.report.trace_page import render_trace_page
    from bellmask.report.trace_strip import strip_figure
    from bellmask.utils.files import write_text

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
