"""The comparison on the screen: one table, one plain sentence."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bellmask.utils.console import print_lines, print_plain_table


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
    columns = ["variant", "final NLL", "difference", "sooner by (steps)", "sooner by (time)"]
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
    columns += [f"{name}: sooner by" for name in names if name != reference]
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
        f"{least}{found['mean']:.2f} times sooner{interval}, {seeds}."
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
    print_plain_table(title, [columns[i] for i in kept], [[row[i] for i in kept] for row in rows])
    kept = [0, 5, 6, 7, 8, 9]
    print_plain_table(
        "beside it: bootstrap over validation blocks, NLL (nats) with the fewest and the most "
        "tokens seen, detrended spreads",
        [columns[i] for i in kept],
        [[row[i] for i in kept] for row in rows],
    )
    if any("importance" in name for name in results["variants"]):
        print_plain_table("weights on masked rows", *weight_rows(results))
    if "grid" in results:
        print_plain_table(
            "the grid, everything at the same point (above: best against best)", *grid_rows(results)
        )
    print_lines(cautions(results))
    compared = [name for name, variant in results["variants"].items() if "comparison" in variant]
    print_lines([sentence(results, name) for name in compared])
