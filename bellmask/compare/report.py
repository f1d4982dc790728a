"""Report of a comparison: tables on the screen, figures, and the page report.html."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping, Sequence
from importlib.resources import files
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from bellmask.report import figures
from bellmask.report.page import html_page, html_table, page_text
from bellmask.utils.console import print_lines
from bellmask.utils.stats import plus_minus
from bellmask.utils.table import Table

Results = Mapping[str, Any]
"""The content of results.json."""

# Tables, and one plain sentence for each variant


def show_speed_up(comparison: Results, key: str = "speed_up") -> str:
    """``2.31x (1.95 to 2.74)``; the gap if the target was not reached."""
    found, seeds = comparison[key], comparison["num_seeds"]
    if found is not None:
        bound = "≥ " if comparison["is_bound"] else ""
        return f"{bound}{found['mean']:.2f}x{_interval(found)}"
    if key != "speed_up":
        return "-"
    missed = "" if seeds == 1 else f" in {seeds - comparison['num_reached']} of {seeds}"
    gap = f"gap {show_gap(comparison, 3)}"
    if comparison["num_reached"]:
        gap = f"gap there {comparison['missed_gap']:+.3f}"
    return f"not reached{missed} ({gap})"


def _interval(found: Results, name: str = "") -> str:
    return "" if found["low"] is None else f" ({name}{found['low']:.2f} to {found['high']:.2f})"


def show_gap(comparison: Results, digits: int = 4) -> str:
    """Difference of final NLLs ± standard error: over seeds, or over validation blocks for one."""
    error = comparison["gap_se_over_seeds"] or comparison["gap_se"]
    return plus_minus(comparison["gap"], error, digits, "+")


def _show_bootstrap(bootstrap: Results) -> str:
    """``1.9 to 2.1``, with the share of replicates that never reach the target."""
    if bootstrap["low"] is None:
        return "never reached"
    never = f", {bootstrap['never_share']:.1%} never" if bootstrap["never_share"] else ""
    return f"{bootstrap['low']:.2f} to {bootstrap['high']:.2f}{never}"


def _mean(runs: Sequence[Results], key: str) -> float | None:
    values = [run[key] for run in runs if run[key] is not None]
    return sum(values) / len(values) if values else None


def comparison_tables(results: Results) -> list[Table]:
    """The speed-ups; more statistics; weights and the grid, where there are any."""
    main, more, weights = [], [], []
    for name, variant in results["variants"].items():
        runs, compared = variant["runs"], variant.get("comparison")
        label = shown_name(results, name)
        label += f" [{variant['grid_point']}]" if variant.get("grid_point") else ""
        against, bootstrap = ["reference", "1", "1"], "-"
        if compared is not None:
            ratios = [show_speed_up(compared, key) for key in ("speed_up", "time_speed_up")]
            against = [show_gap(compared), *ratios]
            bootstrap = _show_bootstrap(compared["bootstrap_first_seed"])
        speed = f"{_mean(runs, 'tokens_per_second') or 0:,.0f}"
        main.append([label, f"{variant['nll']:.4f}", *against, speed])
        points = runs[0]["nll_by_context"]  # none where there are too few blocks for bins
        ends = [plus_minus(points[end]["nll"] if points else None, None, 3) for end in (0, -1)]
        spread = plus_minus(_mean(runs, "nll_spread"), None, 4)
        norms = plus_minus(_mean(runs, "log_gradient_norm_spread"), None, 3)
        more.append([label, bootstrap, *ends, spread, norms])
        largest = f"{max(run['largest_weight'] for run in runs):.3g}"
        share = f"{variant['law']['effective_sample_share']:.2f}"
        weights.append([name, share, largest, f"{_mean(runs, 'clipped_share') or 0:.0%}"])
    data = results["data"]
    title = f"{data['train']}, {data['tokenizer']}, {results['steps']} steps; NLL in nats per token"
    columns = ["variant", "final NLL", "difference", "speed-up (steps)", "speed-up (time)"]
    note = (
        "Bootstrap of the speed-up over validation blocks; NLL (nats) with the fewest and the most "
        "tokens seen; spreads about a smooth trend."
    )
    spreads = ["bootstrap, seed 1", "NLL few seen", "NLL many seen", "NLL spread"]
    tables = [
        Table(title, [*columns, "tokens/s"], main),
        Table("additional statistics", ["variant", *spreads, "log-norm spread"], more, [note]),
    ]
    if any("importance" in name for name in results["variants"]):
        columns = ["variant", "effective sample share", "largest weight", "clipped steps"]
        tables.append(Table("weights on masked rows", columns, weights))
    changing = {name: one["runs"][0].get("law") for name, one in results["variants"].items()}
    rows = [
        [name, *_law_cells(lines, results["steps"])] for name, lines in changing.items() if lines
    ]
    if rows:
        title = "time law while training, first seed: mean ± width at a share of the steps"
        tables.append(Table(title, ["variant", *(f"{share:.0%}" for share in LAW_SHARES)], rows))
    return [*tables, _grid_table(results)] if "grid" in results else tables


LAW_SHARES = (0.1, 0.25, 0.5, 0.75, 1.0)


def _law_cells(lines: Sequence[Results], steps: int) -> list[str]:
    """The newest law at some shares of the run; a dash before the first."""
    found = [[line for line in lines if line["step"] <= share * steps] for share in LAW_SHARES]
    return [plus_minus(some[-1]["mean"], some[-1]["width"]) if some else "-" for some in found]


def _grid_table(results: Results) -> Table:
    """Every grid point, all variants at the same one."""
    names = list(results["variants"])
    others = [name for name in names if name != results["reference"]]
    rows = []
    for line in results["grid"]:
        row = [line["point"], *(plus_minus(line["nll"].get(name), None, 4) for name in names)]
        for name in others:
            found = line["speed_up"].get(name)
            missing = "not reached" if name in line["nll"] else "failed"
            row.append(f"{found['mean']:.2f}x" if found else missing)
        rows.append(row)
    columns = ["grid point", *(f"{name}: NLL" for name in names)]
    columns += [f"{name}: speed-up" for name in others]
    return Table("the grid, all at the same point (above: best against best)", columns, rows)


def sentence(results: Results, name: str) -> str:
    """The result in one sentence."""
    compared, reference = results["variants"][name]["comparison"], results["reference"]
    steps, found, count = results["steps"], compared["speed_up"], compared["num_seeds"]
    if (results["progress"]["below_unigram"] or 0) < 0:
        return (
            f"{reference} has not learned the token frequencies in {steps} steps: "
            f"{name} cannot be compared yet. Train longer."
        )
    seeds = f"{count} paired seed" + ("s" if count > 1 else "")
    final = f"stay at or below {reference}'s final NLL within {steps} steps"
    if found is None:
        reached, shown = compared["num_reached"], show_speed_up(compared)
        if reached:
            return f"{name} does {final} with only {reached} of {count} seeds: {shown}."
        return f"{name} does not {final}: {shown}, {seeds}."
    interval = _interval(found, "95 % interval ")
    least = "at least " if compared["is_bound"] else ""
    return (
        f"{name} reaches {reference}'s NLL of step {steps} after {steps / found['mean']:.0f} "
        f"steps: a speed-up of {least}{found['mean']:.2f}x{interval}, {seeds}."
    )


def sentences(results: Results) -> list[str]:
    """One for each variant that is compared."""
    compared = [name for name, variant in results["variants"].items() if "comparison" in variant]
    return [sentence(results, name) for name in compared]


def cautions(results: Results) -> list[str]:
    """Cautions for reading the speed-up."""
    reference, unigram = results["reference"], results["unigram_nll"]
    below, share = (results["progress"][key] for key in ("below_unigram", "share_to_arm"))
    lines = []
    if unigram is not None:
        lines.append(
            f"unigram cross-entropy {unigram:.3f}; {reference} ends at "
            f"{results['variants'][reference]['nll']:.3f}, {abs(below):.3f} "
            f"{'below' if below >= 0 else 'above'} it"
        )
        if below < 0:
            lines.append(
                "the reference has not even learned token frequencies: speed-ups are meaningless"
            )
    if share is not None:
        lines.append(f"progress of the reference from unigram to ARM: {share:.0%}")
        if share < 0.3:
            lines.append("below 30 %: the ratio mostly measures leaving the unigram plateau")
    elif "arm" not in results["variants"]:
        lines.append("no ARM run: add the variant arm to measure the progress from unigram to ARM")
    lines += [f"failed, not included: {m.splitlines()[0]}" for m in results.get("failed", []) if m]
    if results["is_annealed"]:
        lines.append(
            "the learning rate is annealed: it was still higher when the variant reached the target"
        )
    return lines


def print_comparison(results: Results) -> None:
    """Tables, cautions, one sentence for each variant."""
    for table in comparison_tables(results):
        table.print()
    print_lines([*cautions(results), *sentences(results)])


# Figures: curves with the target, time laws, context weights, NLL by context


def variant_color(results: Results, name: str) -> str:
    """Red for the reference; the others in order."""
    reference = results["reference"]
    others = [other for other in results["variants"] if other != reference]
    return figures.COLORS[
        0 if name == reference else 1 + others.index(name) % (len(figures.COLORS) - 1)
    ]


def shown_name(results: Results, name: str) -> str:
    """The name, and that its NLL is exact where others' are bounds."""
    return f"{name} (exact)" if results["variants"][name].get("is_exact") else name


def draw_runs(axes: Axes, runs: Sequence[Results], x: str, label: str, **look: Any) -> None:
    """NLL against steps or seconds. Thick: mean over seeds; thin: each of several."""
    for run in runs if len(runs) > 1 else ():
        axes.plot(run[x], run["nll"], linewidth=0.7, alpha=0.35, **look)
    mean = [np.mean([run[key] for run in runs], axis=0) for key in (x, "nll")]
    axes.plot(*mean, linewidth=1.8, label=label, **look)


def _draw_arrows(axes: Axes, results: Results) -> None:
    """Arrows from the reference's end back to where variants reached it; of many, the first.

    None if the reference has not learned the token frequencies: speed-ups are then meaningless.
    """
    if (results["progress"]["below_unigram"] or 0) < 0:
        return
    target, steps = results["variants"][results["reference"]]["nll"], results["steps"]
    compared = {n: v["comparison"] for n, v in results["variants"].items() if "comparison" in v}
    reached = {n: c["speed_up"]["mean"] for n, c in compared.items() if c["speed_up"] is not None}
    if len(reached) > 2:
        fastest = max(reached, key=reached.__getitem__)
        reached = {fastest: reached[fastest]}
    low, high = axes.get_ylim()
    for number, (name, ratio) in enumerate(reached.items()):
        height = target + (0.04 + 0.07 * number) * (high - low)
        color, tip = variant_color(results, name), (steps / ratio, height)
        arrow = {"arrowstyle": "->", "color": color, "linewidth": 1.5}
        axes.annotate("", xy=tip, xytext=(steps, height), arrowprops=arrow)
        text = "≥ " if compared[name]["is_bound"] else ""
        text += f"{ratio:.2f}x fewer steps" + (f" ({name})" if len(compared) > 1 else "")
        # below the line at the end, where the reference's curve never is
        label = target - (0.015 + 0.06 * number) * (high - low)
        look: dict[str, Any] = {"color": color, "ha": "right", "va": "top", "fontsize": 9}
        box = {"facecolor": "white", "edgecolor": "none", "alpha": 0.9, "pad": 0.5}
        axes.text(steps, label, text, bbox=box, **look)


# Paper: Fig. 5
def curves_figure(results: Results, *, with_time: bool = True) -> Figure:
    """NLL against step, and against training time where times can be compared."""
    labels = {"steps": "training step"}
    if with_time:
        labels["seconds"] = "training time (seconds, evaluation excluded)"
    figure, panels = figures.new_figure(11 if with_time else 6.6, 4.4, len(labels), sharey=True)
    variants, reference = results["variants"], results["reference"]
    for axes, (x, label) in zip(panels, labels.items()):
        for name, variant in variants.items():
            look = {"color": variant_color(results, name), "label": shown_name(results, name)}
            draw_runs(axes, variant["runs"], x, **look)
        axes.axhline(variants[reference]["nll"], color="0.4", linestyle="--", linewidth=1)
        figures.finish_axes(axes, label)
    figures.trim_start(panels[0], [run["nll"] for v in variants.values() for run in v["runs"]])
    _draw_arrows(panels[0], results)
    is_mixed = any(variant.get("is_exact") for variant in variants.values())
    bound = "NLL, a bound unless exact" if is_mixed else "NLL bound"
    panels[0].set_ylabel(f"validation {bound} (nats per token)")
    panels[-1].legend(fontsize=8)
    place = panels[0].get_yaxis_transform()
    target, text = variants[reference]["nll"], f"{reference} at its last step"
    below: dict[str, Any] = {"xytext": (0, -3), "textcoords": "offset points", "va": "top"}
    panels[0].annotate(text, (0.01, target), xycoords=place, fontsize=8, color="0.3", **below)
    return figure


def law_figure(results: Results, name: str) -> Figure:
    """A variant's mask rates, drawn and as a density, and its weight on each context count."""
    law, color = results["variants"][name]["law"], variant_color(results, name)
    figure, (left, right) = figures.new_figure(7, 2.6, 2)
    histogram, density, weights = law["mask_rate_histogram"], law["density"], law["context_weights"]
    if histogram is None:
        left.text(0.5, 0.5, "no times: every context\ncount of a row once", ha="center")
        left.set_axis_off()
    else:
        figures.draw_histogram(left, histogram, "drawn mask rates")
        if density is not None:
            left.plot(law["t"], density, color=color, label="density of the law")
        left.set_ylim(0, 1.4 * max([*histogram, *(density or [])]))  # room for the legend
        figures.finish_axes(left, "time t, mask rate", "density", legend=0)
    right.plot(weights, color=color)
    right.set_ylim(0, 1.15 * max(weights))
    figures.finish_axes(right, "observed tokens $N_c$", "weight in the objective")
    for axes in (left, right):
        axes.tick_params(labelsize=8)
    return figure


def context_figure(results: Results) -> Figure:
    """Final NLL by context count, first seed of each variant."""
    figure, (axes,) = figures.new_figure(7, 3.8)
    for name, variant in results["variants"].items():
        look = {"color": variant_color(results, name), "label": shown_name(results, name)}
        figures.draw_bins(axes, variant["runs"][0]["nll_by_context"], "nll", **look)
    x, y = "observed tokens $N_c$ in the block", "cross-entropy of a target token (nats)"
    figures.finish_axes(axes, x, y, legend=0)
    return figure


# The page: one self-contained file, readable on a desktop and on a phone

STYLE = files("bellmask.compare").joinpath("report.css").read_text(encoding="utf-8")


def _figure(figure: Figure, caption: str, prefix: str, kind: str = "") -> str:
    """An inline figure; element ids get a prefix, because ids of several figures would clash."""
    stream = io.StringIO()
    figures.write_svg(figure, stream)
    svg = stream.getvalue().partition("<svg")[2]
    for reference in ('id="', 'xlink:href="#', "url(#"):
        svg = svg.replace(reference, f"{reference}{prefix}-")
    label = page_text(caption)
    return (
        f'<figure class="{kind}"><div class="scroll"><svg role="img" aria-label="{label}"{svg}'
        f"</div><figcaption><small>{label}</small></figcaption></figure>"
    )


def _columns(parts: Sequence[str]) -> str:
    return f'<div class="columns">{"".join(parts)}</div>'


def _lines(lines: Sequence[str], kind: str = "") -> str:
    return "".join(f'<p class="{kind}">{page_text(line)}</p>' for line in lines)


def _pre(texts: Sequence[str]) -> str:
    return "".join(f"<pre>{page_text(text)}</pre>" for text in texts)


def render_page(results: Results, title: str) -> str:
    variants, tables = results["variants"], comparison_tables(results)
    curves = (
        "Validation NLL bound on the same blocks and masks. Thick: mean over seeds; thin: each "
        "seed. Dashed: the reference's NLL at its last step."
    )
    laws = [
        _figure(law_figure(results, name), f"{name}: {variant['law']['name']}", f"law{number}")
        for number, (name, variant) in enumerate(variants.items())
    ]
    context = "After the last step, first seed; bars are 95 % intervals."
    samples = [
        f"<div><b>{page_text(name)}</b>{_pre(variant['samples']) or '<p>none written</p>'}</div>"
        for name, variant in variants.items()
    ]
    differing = {name: v["options"] for name, v in variants.items() if v["options"]}
    options = [json.dumps(part, indent=1) for part in (results["options"], differing)]
    facts = {**results["data"], **results["machine"]}
    facts |= {"bellmask": results["bellmask"], "seeds": results["seeds"]}
    rows = [[key.replace("_", " "), str(v)] for key, v in facts.items() if v is not None]
    sections = {
        "curves": _figure(curves_figure(results), curves, "curves", "wide"),
        **{t.title: html_table(t.columns, t.rows) + _lines(t.notes) for t in tables},
        "cautions": _lines(cautions(results)),
        "what each variant trains on": _columns(laws),
        "NLL by context count": _figure(context_figure(results), context, "context"),
        "samples after the last step": _columns(samples),
        "options of the reference, and what each variant changes": _pre(options),
        "data, versions, machine": html_table(["what", "value"], rows, "facts"),
    }
    lead = _lines(sentences(results), "lead")
    body = "".join(
        f"<section><h2>{page_text(name)}</h2>{part}</section>" for name, part in sections.items()
    )
    return html_page(title, lead + body, style=STYLE)
