"""The animated page of a trace: one file, nothing fetched, works from disk.

Every token has the colour of the step in which it was revealed. A masked position is as wide as the
token that it ends with, so that nothing moves while the text appears.
"""

from __future__ import annotations

import html
import json
from typing import Any

from bellmask.generate.trace_file import Sample, Trace
from bellmask.report.trace_script import SCRIPT, STYLE
from bellmask.report.web import SCRIPT_POLICY
from bellmask.utils.console import LINE_END, reveal_colours, visible

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


def _sample(sample: Sample) -> dict[str, Any]:
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
