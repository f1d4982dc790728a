"""report.html: one file, nothing fetched, readable on a desktop and on a phone."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.figure import Figure

from bellmask.report.comparison_plots import as_svg, context_figure, curves_figure, law_figure
from bellmask.report.tables import (
    cautions,
    comparison_rows,
    grid_rows,
    sentence,
    weight_rows,
)
from bellmask.report.web import POLICY, page_text

STYLE = """
:root { color-scheme: light; }
* { box-sizing: border-box; }
body { font: 16px/1.5 system-ui, sans-serif; margin: 0 auto; max-width: 1240px; padding: 1rem;
  color: #1c1c1c; background: #fff; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.15rem; margin-top: 2rem; }
.lead { font-size: 1.1rem; border-left: 4px solid #c33; padding: .3rem .8rem; background: #faf6f5; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: .85rem; }
th, td { border-bottom: 1px solid #ddd; padding: .3rem .6rem; text-align: right;
  white-space: nowrap; }
th { white-space: normal; vertical-align: bottom; }
th:first-child, td:first-child { text-align: left; }
figure { margin: 1rem 0; } figure svg { width: 100%; min-width: 480px; max-width: 760px;
  height: auto; }
figure.wide svg { min-width: 640px; max-width: none; }
.pair { display: grid; gap: 1rem;
  grid-template-columns: repeat(auto-fit, minmax(min(100%, 420px), 1fr)); }
pre { background: #f6f6f6; padding: .6rem; font-size: .8rem; white-space: pre-wrap;
  overflow-wrap: anywhere; max-height: 24rem; overflow-y: auto; }
table.facts td, table.facts th { white-space: normal; overflow-wrap: anywhere; text-align: left; }
small { color: #555; }
"""


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]], kind: str = "") -> str:
    head = "".join(f"<th>{page_text(name)}</th>" for name in columns)
    body = "".join(
        "<tr>" + "".join(f"<td>{page_text(cell)}</td>" for cell in row) + "</tr>" for row in rows
    )
    table = f'<table class="{kind}"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>'
    return f'<div class="scroll">{table}</div>'


def _figure(figure: Figure, caption: str, prefix: str, kind: str = "") -> str:
    """An inline figure; element ids get a prefix, as those of several figures would clash."""
    svg = as_svg(figure)
    for reference in ('id="', 'xlink:href="#', "url(#"):
        svg = svg.replace(reference, f"{reference}{prefix}-")
    label = page_text(caption)
    svg = svg.replace("<svg", f'<svg role="img" aria-label="{label}"', 1)
    note = f"<figcaption><small>{label}</small></figcaption>"
    return f'<figure class="{kind}"><div class="scroll">{svg}</div>{note}</figure>'


def _section(title: str, *parts: str) -> str:
    return f"<section><h2>{page_text(title)}</h2>{''.join(parts)}</section>"


def _laws(results: Mapping[str, Any]) -> str:
    figures = [
        _figure(
            law_figure(results, name),
            f"{name}: {variant['law']['name']}",
            f"law{number}",
        )
        for number, (name, variant) in enumerate(results["variants"].items())
    ]
    return f'<div class="pair">{"".join(figures)}</div>'


def _samples(results: Mapping[str, Any]) -> str:
    parts = []
    for name, variant in results["variants"].items():
        texts = "".join(f"<pre>{page_text(text)}</pre>" for text in variant["samples"])
        parts.append(f"<div><b>{page_text(name)}</b>{texts or '<p>none written</p>'}</div>")
    return f'<div class="pair">{"".join(parts)}</div>'


def _options(results: Mapping[str, Any]) -> str:
    differing = {name: v["options"] for name, v in results["variants"].items() if v["options"]}
    return (
        "<p>Of the reference; below, what each variant changes.</p>"
        f"<pre>{page_text(json.dumps(results['options'], indent=1))}</pre>"
        f"<pre>{page_text(json.dumps(differing, indent=1))}</pre>"
    )


def render_page(results: Mapping[str, Any], title: str) -> str:
    """The whole page."""
    compared = [name for name, v in results["variants"].items() if "comparison" in v]
    lead = "".join(f'<p class="lead">{page_text(sentence(results, n))}</p>' for n in compared)
    notes = "".join(f"<li>{page_text(line)}</li>" for line in cautions(results))
    data, machine = results["data"], results["machine"]
    facts = {**data, **machine, "bellmask": results["bellmask"], "seeds": results["seeds"]}
    weights = ""
    if any("importance" in name for name in results["variants"]):
        weights = _section("Weights on masked rows", _table(*weight_rows(results)))
    grid = ""
    if "grid" in results:
        note = "<p>Above: best against best. Here: everything at the same point.</p>"
        grid = _section("The grid", note, _table(*grid_rows(results)))
    sections = [
        _section(
            "Curves",
            _figure(
                curves_figure(results),
                "Validation NLL bound on the same blocks and masks. Thick: mean over seeds; thin: "
                "each seed. Dashed: the reference's NLL at its last step.",
                "curves",
                "wide",
            ),
        ),
        _section("Table", _table(*comparison_rows(results)), f"<ul>{notes}</ul>"),
        weights,
        grid,
        _section("What each variant trains on", _laws(results)),
        _section(
            "NLL by context count",
            _figure(
                context_figure(results),
                "After the last step, first seed; bars are 95 % intervals.",
                "context",
            ),
        ),
        _section("Samples after the last step", _samples(results)),
        _section("Options", _options(results)),
        _section("Data, versions, machine", _table(["what", "value"], _facts(facts), "facts")),
    ]
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
        f'<title>{page_text(title)}</title><link rel="icon" href="data:,">'
        f"<style>{STYLE}</style></head><body><h1>{page_text(title)}</h1>"
        f"{lead}{''.join(sections)}</body></html>\n"
    )


def _facts(facts: Mapping[str, Any]) -> list[list[str]]:
    return [
        [key.replace("_", " "), str(value)] for key, value in facts.items() if value is not None
    ]
