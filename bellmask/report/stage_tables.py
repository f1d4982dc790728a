"""Table 4 (Sec. 5.3): continual pretraining and fine-tuning, on the screen and in Markdown."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bellmask.utils.console import in_markdown, markdown_table, print_lines, print_table

SECTIONS = {"cpt": "Continual pretraining", "sft": "Continual pretraining + fine-tuning"}
NONE = "—"


def stage_rows(
    results: Mapping[str, Any], *, bold: tuple[str, str], italic: tuple[str, str]
) -> tuple[list[str], list[list[str]]]:
    """(columns, rows); ``bold`` and ``italic`` go around the best values and the sections."""
    columns = ["CPT", "SFT", "NLL", "difference", "exact match (%)", "difference (points)"]
    rows = []
    for section, title in SECTIONS.items():
        found = [row for row in results["rows"] if row["section"] == section]
        rows.append([_wrap(title, italic), *[""] * 5])
        nll = [f"{row['nll']:.4f}" for row in found]
        match = [f"{100 * row['exact_match']:.2f}" for row in found]
        best_nll = min(nll, key=float)
        best_match = max(match, key=float)
        for row, loss, share in zip(found, nll, match, strict=True):
            deviation = row["sampling_deviation"]
            shown = _wrap(share, bold) if share == best_match else share
            difference = row["difference"] or {"nll": None, "exact_match": None}
            rows.append(
                [
                    row["cpt"],
                    row["sft"] or NONE,
                    _wrap(loss, bold) if loss == best_nll else loss,
                    show_difference(difference["nll"], 4),
                    shown if deviation is None else f"{shown} ± {100 * deviation:.2f}",
                    show_difference(difference["exact_match"], 2, 100),
                ]
            )
    return columns, rows


def _wrap(text: str, marks: tuple[str, str]) -> str:
    return f"{marks[0]}{text}{marks[1]}"


def show_difference(found: Mapping[str, Any] | None, digits: int, scale: float = 1) -> str:
    """``+8.10 ± 0.52 (+6.61 to +9.59)``; the interval where there are seeds enough."""
    if found is None:
        return ""
    text = f"{scale * found['value']:+.{digits}f}"
    if found["se"] is not None:
        text += f" ± {scale * found['se']:.{digits}f}"
    if found["low"] is not None:
        low, high = scale * found["low"], scale * found["high"]
        text += f" ({low:+.{digits}f} to {high:+.{digits}f})"
    return text


def _count(number: int, word: str) -> str:
    return f"{number} {word}" + ("" if number == 1 else "s")


def stage_notes(results: Mapping[str, Any]) -> list[str]:
    """What the numbers are, and what their errors mean."""
    asked, seeds = results["asked"], len(results["seeds"])
    gap, (low, high) = asked["gap"], asked["own_gaps"]
    length = (
        "each answer's own length, rounded up as in training, which tells a little about it"
        if gap == "own"
        else f"{_count(gap, 'token')} for every answer (in training {low} to {high}, by the "
        "response's length)"
    )
    over = "the paired training seeds"
    if seeds == 1:
        over = "validation blocks (NLL) or examples (exact match), for one training seed"
    elif seeds > 2:
        over += ", with a 95 % t-interval"
    lines = [
        "NLL: nats per token, of held-out text after continual pretraining, of held-out responses "
        "after fine-tuning; the sections measure different things.",
        f"Exact match: {_count(asked['examples'], 'held-out example')}, answers compared after "
        f"stripping white space, case counts; the gap to fill has {length}. Without fine-tuning "
        "the same prompts are asked.",
        f"± after exact match: one standard deviation over {_count(len(asked['seeds']), 'seed')} "
        f"of sampling ({_sampling(asked['sampling'])}).",
        f"Difference: to the base row of the section; ± is the standard error over {over}.",
    ]
    if seeds > 1:
        lines.append(f"Means over {seeds} training seeds.")
    return lines


def _sampling(settings: Mapping[str, Any]) -> str:
    steps = "" if settings["steps"] is None else f", {_count(settings['steps'], 'step')} at most"
    return f"{settings['rule']}{steps}, temperature {settings['temperature']:g}"


def _title(results: Mapping[str, Any]) -> str:
    cpt, sft = results["cpt"], results["sft"]
    return (
        f"{cpt['data']['train']}, {cpt['train']['steps']} steps; then {sft['sft']['train']}, "
        f"{sft['train']['steps']} steps"
    )


def stage_markdown(results: Mapping[str, Any]) -> str:
    """table.md."""
    columns, rows = stage_rows(results, bold=("**", "**"), italic=("*", "*"))
    parts = [
        "# Continual pretraining and fine-tuning, base and bell",
        f"The rows of the paper's Table 4, here {in_markdown(_title(results))}. "
        "Bold: best of the section.",
        markdown_table(columns, rows).rstrip(),
        "\n".join(f"- {line}" for line in stage_notes(results)),
    ]
    return "\n\n".join(parts) + "\n"


def print_stages(results: Mapping[str, Any]) -> None:
    """The same on the screen."""
    bold, italic = ("[bold]", "[/bold]"), ("[italic]", "[/italic]")
    columns, rows = stage_rows(results, bold=bold, italic=italic)
    print_table(_title(results).replace("[", "\\["), columns, rows)
    print_lines(stage_notes(results))
