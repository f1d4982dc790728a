"""The results of a comparison shown: tables on the screen, figures, and the page report.html."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from bellmask.report.figures import COLOURS, save_figure, write_svg
from bellmask.report.page import html_page, html_table, page_text
from bellmask.utils.console import print_lines
from bellmask.utils.table import Table

# On the screen: tables, and one plain sentence for each variant


def show_speed_up(comparison: Mapping[str, Any], key: str = "speed_up") -> str:
    """``2.31x (1.95 to 2.74)``; with the gap where it was not reached, never a number then."""
    found = comparison[key]
    if found is None:
        if key != "speed_up":
            return "-"
        missed = comparison["num_seeds"] - comparison["num_reached"]
        seeds = "" if comparison["num_seeds"] == 1 else f" in {missed} of {comparison['num_seeds']}"
        if comparison["num_reached"]:
            return f"not reached{seeds} (gap there {comparison['missed_gap']:+.3f})"
        return f"not reached{seeds} (gap {show_gap(comparison, 3)})"
    bound = "≥ " if comparison["is_bound"] else ""
    interval = "" if found["low"] is None else f" ({found['low']:.2f} to {found['high']:.2f})"
    return f"{bound}{found['mean']:.2f}x{interval}"


def show_gap(comparison: Mapping[str, Any], digits: int = 4) -> str:
    """Difference of final NLLs ± standard error: over seeds, or over validation blocks for one."""
    error = comparison["gap_se_over_seeds"] or comparison["gap_se"]
    return f"{comparison['gap']:+.{digits}f} ± {error:.{digits}f}"


def _number(value: float | None, digits: int = 3) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _mean(runs: list[dict[str, Any]], key: str) -> float | None:
    values = [run[key] for run in runs if run[key] is not None]
    return sum(values) / len(values) if values else None


def comparison_rows(results: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    """(columns, rows) of the main table."""
    columns = ["variant", "final NLL", "difference", "speed-up (steps)", "speed-up (time)"]
    columns += ["bootstrap, seed 1", "NLL few seen", "NLL many seen", "NLL spread"]
    columns += ["log-norm spread", "tokens/s"]
    rows = []
    for name, variant in results["variants"].items():
        runs, compared = variant["runs"], variant.get("comparison")
        label = name + (" (exact)" if variant.get("is_exact") else "")
        label += f" [{variant['grid_point']}]" if variant.get("grid_point") else ""
        points = runs[0]["nll_by_context"]  # none where there are too few blocks for bins
        ends = [points[end]["nll"] if points else None for end in (0, -1)]
        row = [label, f"{variant['nll']:.4f}"]
        if compared is None:
            row += ["reference", "1", "1", "-"]
        else:
            row += [show_gap(compared)]
            row += [show_speed_up(compared), show_speed_up(compared, "time_speed_up")]
            row += [show_bootstrap(compared["bootstrap_first_seed"])]
        row += [_number(end) for end in ends]
        row += [_number(_mean(runs, "nll_spread"), 4)]
        row += [_number(_mean(runs, "log_gradient_norm_spread"))]
        row += [f"{_mean(runs, 'tokens_per_second') or 0:,.0f}"]
        rows.append(row)
    return columns, rows


def show_bootstrap(bootstrap: Mapping[str, Any]) -> str:
    """``1.9 to 2.1``, with the share of replicates that never arrive."""
    if bootstrap["low"] is None:
        return "never arrives"
    share = bootstrap["never_share"]
    never = f", {share:.1%} never" if share else ""
    return f"{bootstrap['low']:.2f} to {bootstrap['high']:.2f}{never}"


def weight_rows(results: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    """(columns, rows) on weights: what importance weighting costs."""
    columns = ["variant", "effective sample share", "largest weight", "clipped steps"]
    rows = []
    for name, variant in results["variants"].items():
        runs = variant["runs"]
        rows.append(
            [
                name,
                f"{variant['law']['effective_sample_share']:.2f}",
                f"{max(run['largest_weight'] for run in runs):.3g}",
                f"{_mean(runs, 'clipped_share') or 0:.0%}",
            ]
        )
    return columns, rows


def grid_rows(results: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    """(columns, rows): every grid point, all variants at the same one."""
    names, reference = list(results["variants"]), results["reference"]
    columns = ["grid point", *(f"{name}: NLL" for name in names)]
    columns += [f"{name}: speed-up" for name in names if name != reference]
    rows = []
    for line in results.get("grid", []):
        row = [line["point"], *(_number(line["nll"].get(name), 4) for name in names)]
        for name in names:
            if name != reference:
                found = line["speed_up"].get(name)
                missing = "not reached" if name in line["nll"] else "failed"
                row.append(f"{found['mean']:.2f}x" if found else missing)
        rows.append(row)
    return columns, rows


def sentence(results: Mapping[str, Any], name: str) -> str:
    """The result in plain words."""
    compared, reference = results["variants"][name]["comparison"], results["reference"]
    if (results["progress"]["below_unigram"] or 0) < 0:
        return (
            f"{reference} has not learned the frequencies of tokens in {results['steps']} steps: "
            f"nothing can be said about {name} yet; train longer."
        )
    steps, found = results["steps"], compared["speed_up"]
    seeds = f"{compared['num_seeds']} paired seed" + ("s" if compared["num_seeds"] > 1 else "")
    if found is None and compared["num_reached"]:
        reached, count = compared["num_reached"], compared["num_seeds"]
        return (
            f"{name} stays at or below {reference}'s final NLL within {steps} steps with {reached} "
            f"of {count} seeds only: {show_speed_up(compared)}."
        )
    if found is None:
        return (
            f"{name} does not stay at or below {reference}'s final NLL within {steps} steps: "
            f"{show_speed_up(compared)}, {seeds}."
        )
    interval = ""
    if found["low"] is not None:
        interval = f" (95 % interval {found['low']:.2f} to {found['high']:.2f})"
    least = "at least " if compared["is_bound"] else ""
    after = f"{steps / found['mean']:.0f} steps"
    return (
        f"{name} reaches {reference}'s NLL of step {steps} after {after}: "
        f"a speed-up of {least}{found['mean']:.2f}x{interval}, {seeds}."
    )


def cautions(results: Mapping[str, Any]) -> list[str]:
    """What the speed-up must be read beside."""
    progress, unigram = results["progress"], results["unigram_nll"]
    target = results["variants"][results["reference"]]["nll"]
    lines, below = [], progress["below_unigram"]
    if unigram is not None:
        lines.append(
            f"unigram cross-entropy {unigram:.3f}; {results['reference']} ends at {target:.3f}, "
            f"{abs(below):.3f} {'below' if below >= 0 else 'above'} it"
        )
        if below < 0:
            lines.append("the reference has not even learned token frequencies: no speed-up counts")
    if progress["share_to_arm"] is None and "arm" not in results["variants"]:
        lines.append("no ARM run: add the variant arm to know the share of the way to it")
    elif progress["share_to_arm"] is not None:
        share = progress["share_to_arm"]
        lines.append(f"the reference has closed {share:.0%} of the way from unigram to ARM")
        if share < 0.3:
            lines.append("below 30 %: the ratio mostly measures leaving the unigram plateau")
    lines += [
        f"failed and left out: {message.partition(chr(10))[0]}"
        for message in results.get("failed", [])
    ]
    if results["is_annealed"]:
        lines.append("the learning rate is annealed: at its arrival the variant's was still higher")
    return lines


def print_comparison(results: Mapping[str, Any], title: str) -> None:
    """Table, cautions, one sentence for each variant."""
    columns, rows = comparison_rows(results)
    kept = [0, 1, 2, 3, 4, 10]
    Table(title, [columns[i] for i in kept], [[row[i] for i in kept] for row in rows]).print()
    kept = [0, 5, 6, 7, 8, 9]
    Table(
        "beside it: bootstrap over validation blocks, NLL (nats) with the fewest and the most "
        "tokens seen, detrended spreads",
        [columns[i] for i in kept],
        [[row[i] for i in kept] for row in rows],
    ).print()
    if any("importance" in name for name in results["variants"]):
        Table("weights on masked rows", *weight_rows(results)).print()
    if "grid" in results:
        Table(
            "the grid, everything at the same point (above: best against best)", *grid_rows(results)
        ).print()
    print_lines(cautions(results))
    compared = [name for name, variant in results["variants"].items() if "comparison" in variant]
    print_lines([sentence(results, name) for name in compared])


# Figures: curves with the target, time laws, context weights, NLL by context

SHORT_ARROW = 1.4
"""Speed-ups below it have arrows too short to centre a label on."""


def variant_colour(results: Mapping[str, Any], name: str) -> str:
    """Red for the reference; the others in order."""
    names = [n for n in results["variants"] if n != results["reference"]]
    return (
        "tab:red"
        if name == results["reference"]
        else COLOURS[1:][names.index(name) % len(COLOURS[1:])]
    )


def shown_name(results: Mapping[str, Any], name: str) -> str:
    """The name, and that its NLL is exact where others' are bounds."""
    return f"{name} (exact)" if results["variants"][name].get("is_exact") else name


def _mean_curve(variant: Mapping[str, Any], axis: str) -> tuple[Any, Any]:
    x = np.mean([run[axis] for run in variant["runs"]], axis=0)
    y = np.mean([run["nll"] for run in variant["runs"]], axis=0)
    return x, y


def _draw_curves(axes: Axes, results: Mapping[str, Any], axis: str) -> None:
    for name, variant in results["variants"].items():
        colour = variant_colour(results, name)
        if len(variant["runs"]) > 1:
            for run in variant["runs"]:
                axes.plot(run[axis], run["nll"], color=colour, linewidth=0.7, alpha=0.35)
        x, y = _mean_curve(variant, axis)
        axes.plot(x, y, color=colour, linewidth=1.8, label=shown_name(results, name))
    target = results["variants"][results["reference"]]["nll"]
    axes.axhline(target, color="0.4", linestyle="--", linewidth=1)
    axes.grid(alpha=0.3)
    _trim(axes, results)


def _trim(axes: Axes, results: Mapping[str, Any]) -> None:
    """Leave out the first fall from the uniform prediction, which would flatten the rest."""
    lasts = [min(min(run["nll"]) for run in v["runs"]) for v in results["variants"].values()]
    starts = [run["nll"] for v in results["variants"].values() for run in v["runs"]]
    early = max(max(nll[len(nll) // 10 :]) for nll in starts)
    low, top = min(lasts), max(early, results["variants"][results["reference"]]["nll"])
    room = 0.05 * (top - low or 1)
    axes.set_ylim(low - room, top + room)


def _draw_arrow(axes: Axes, results: Mapping[str, Any]) -> None:
    """From the reference's end back to where variants arrived; of many, the first to arrive.

    None where the reference has not even learned token frequencies: no speed-up counts then.
    """
    if (results["progress"]["below_unigram"] or 0) < 0:
        return
    target = results["variants"][results["reference"]]["nll"]
    compared = {n: v["comparison"] for n, v in results["variants"].items() if "comparison" in v}
    reached = {n: c for n, c in compared.items() if c["speed_up"] is not None}
    low, high = axes.get_ylim()
    if len(reached) > 2:
        fastest = max(reached, key=lambda name: reached[name]["speed_up"]["mean"])
        reached = {fastest: reached[fastest]}
    for number, (name, comparison) in enumerate(reached.items()):
        ratio, steps = comparison["speed_up"]["mean"], results["steps"]
        height = target + (0.04 + 0.07 * number) * (high - low)
        colour = variant_colour(results, name)
        axes.annotate(
            "",
            xy=(steps / ratio, height),
            xytext=(steps, height),
            arrowprops={"arrowstyle": "->", "color": colour, "linewidth": 1.5},
        )
        at_least = "≥ " if comparison["is_bound"] else ""
        is_short = ratio < SHORT_ARROW  # its label would reach beyond the last step
        axes.text(
            steps if is_short else (steps + steps / ratio) / 2,
            height + 0.012 * (high - low),
            f"{at_least}{ratio:.2f}x fewer steps" + (f" ({name})" if len(compared) > 1 else ""),
            color=colour,
            ha="right" if is_short else "center",
            va="bottom",
            fontsize=9,
            bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.7, "pad": 0.5},
        )


def curves_figure(results: Mapping[str, Any], *, with_time: bool = True) -> Figure:
    """NLL against step, and against training time where times can be compared."""
    figure = Figure(figsize=(11 if with_time else 6.6, 4.4), layout="constrained")
    panels = figure.subplots(1, 2 if with_time else 1, sharey=True, squeeze=False)[0]
    left, last = panels[0], panels[-1]
    _draw_curves(left, results, "steps")
    _draw_arrow(left, results)
    if with_time:
        _draw_curves(last, results, "seconds")
        last.set_xlabel("training time (seconds, evaluation excluded)")
    left.set_xlabel("training step")
    is_mixed = any(variant.get("is_exact") for variant in results["variants"].values())
    bound = "NLL, a bound unless exact" if is_mixed else "NLL bound"
    left.set_ylabel(f"validation {bound} (nats per token)")
    last.legend(*left.get_legend_handles_labels(), fontsize=8)
    left.text(
        0.01,
        results["variants"][results["reference"]]["nll"],
        f"{results['reference']} at its last step",
        transform=left.get_yaxis_transform(),
        fontsize=8,
        va="top",
        color="0.3",
    )
    return figure


def law_figure(results: Mapping[str, Any], name: str) -> Figure:
    """A variant's mask rates, drawn and as a density, and its weight on each context count."""
    law = results["variants"][name]["law"]
    figure = Figure(figsize=(7, 2.6), layout="constrained")
    left, right = figure.subplots(1, 2)
    if law["mask_rate_histogram"] is None:
        left.text(0.5, 0.5, "no times: every context\ncount of a row, once", ha="center")
        left.set_axis_off()
    else:
        _draw_law(left, law, variant_colour(results, name))
    weights = law["context_weights"]
    right.plot(range(len(weights)), weights, color=variant_colour(results, name))
    right.set_ylim(0, 1.15 * max(weights))
    right.set_xlabel("observed tokens $N_c$")
    right.set_ylabel("weight in the objective")
    for axes in (left, right):
        axes.grid(alpha=0.3)
        axes.tick_params(labelsize=8)
    return figure


def _draw_law(axes: Axes, law: Mapping[str, Any], colour: str) -> None:
    histogram = law["mask_rate_histogram"]
    width = 1 / len(histogram)
    centres = [(i + 0.5) * width for i in range(len(histogram))]
    axes.bar(centres, histogram, width, color="0.8", label="drawn mask rates")
    if law["density"] is not None:
        axes.plot(law["t"], law["density"], color=colour, label="density of the law")
    axes.set_xlabel("time t, mask rate")
    axes.set_ylabel("density")
    axes.set_ylim(0, 1.4 * max([*histogram, *(law["density"] or [])]))  # room for the legend
    axes.legend(fontsize=8)


def context_figure(results: Mapping[str, Any]) -> Figure:
    """Final NLL by context count, first seed of each variant."""
    figure = Figure(figsize=(7, 3.8), layout="constrained")
    axes = figure.subplots()
    for name, variant in results["variants"].items():
        points = variant["runs"][0]["nll_by_context"]
        axes.errorbar(
            [(p["low"] + p["high"]) / 2 for p in points],
            [p["nll"] for p in points],
            yerr=[1.96 * (p["se"] or 0) for p in points],
            fmt="o-",
            markersize=3,
            capsize=2,
            color=variant_colour(results, name),
            label=shown_name(results, name),
        )
    axes.set_xlabel("observed tokens $N_c$ in the block")
    axes.set_ylabel("cross-entropy of a target token (nats)")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    return figure


def write_curves(results: Mapping[str, Any], folder: Path) -> list[Path]:
    """curves.png and curves.svg."""
    return save_figure(curves_figure(results), folder / "curves")


def as_svg(figure: Figure) -> str:
    """The figure as an <svg> element that can stand inside a page."""
    stream = io.StringIO()
    write_svg(figure, stream)
    text = stream.getvalue()
    return text[text.index("<svg") :]


# The page: one file, nothing fetched, readable on a desktop and on a phone

STYLE = """
.lead { font-size: 1.1rem; border-left: 4px solid var(--red); padding: .3rem .8rem;
  background: var(--panel); }
th, td { text-align: right; white-space: nowrap; overflow-wrap: normal; }
th { white-space: normal; vertical-align: bottom; }
th:first-child, td:first-child { text-align: left; }
.facts td, .facts th { text-align: left; white-space: normal; overflow-wrap: anywhere; }
figure { margin: 1rem 0; }
figure svg { width: 100%; min-width: 480px; max-width: 760px; height: auto; }
figure.wide svg { min-width: 640px; max-width: none; }
"""


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
    return f'<div class="columns">{"".join(figures)}</div>'


def _samples(results: Mapping[str, Any]) -> str:
    parts = []
    for name, variant in results["variants"].items():
        texts = "".join(f"<pre>{page_text(text)}</pre>" for text in variant["samples"])
        parts.append(f"<div><b>{page_text(name)}</b>{texts or '<p>none written</p>'}</div>")
    return f'<div class="columns">{"".join(parts)}</div>'


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
        weights = _section("Weights on masked rows", html_table(*weight_rows(results)))
    grid = ""
    if "grid" in results:
        note = "<p>Above: best against best. Here: everything at the same point.</p>"
        grid = _section("The grid", note, html_table(*grid_rows(results)))
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
        _section("Table", html_table(*comparison_rows(results)), f"<ul>{notes}</ul>"),
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
        _section("Data, versions, machine", html_table(["what", "value"], _facts(facts), "facts")),
    ]
    return html_page(title, lead + "".join(sections), style=STYLE)


def _facts(facts: Mapping[str, Any]) -> list[list[str]]:
    return [
        [key.replace("_", " "), str(value)] for key, value in facts.items() if value is not None
    ]
