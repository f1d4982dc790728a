"""Zero-shot perplexities as tables: on the screen, and like the paper's Table 7 in Markdown."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bellmask.utils.console import in_markdown, markdown_table, print_lines, print_plain_table

NOT_HERE = "not here"
EOS = {
    "mdlm": "Each document ends with EOS (mdlm's policy)",
    "duo": "No EOS after documents (duo's policy)",
}


def plus_minus(value: float | None, error: float | None, digits: int = 2) -> str:
    """``31.42 ± 0.27``; a dash for what is not known."""
    if value is None:
        return "-"
    return f"{value:.{digits}f} ± " + ("-" if error is None else f"{error:.{digits}f}")


def over_seeds(result: Mapping[str, Any]) -> str:
    """Mean ± deviation over evaluation seeds; an exact value has none."""
    if result["is_exact"]:
        return f"{result['perplexity']:.2f} (exact)"
    return plus_minus(result["seed_mean"], result["seed_deviation"])


def _name(result: Mapping[str, Any], name: str) -> str:
    return f"{name} *" if result["is_own_text"] else name


def result_rows(numbers: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    """(columns, rows): a row for each set and run."""
    columns = ["set", "run", "perplexity ± error"]
    columns += [f"mean ± deviation, {len(numbers['seeds'])} seeds", "bits per byte"]
    columns += ["blocks", "tokens"]
    rows = []
    for text in numbers["sets"]:
        if text["missing"] is not None:
            rows.append([text["title"], "-", NOT_HERE, *["-"] * 4])
        for name, result in text["results"].items():
            bits = result["bits_per_byte"]
            row = [text["title"], _name(result, name)]
            row += [plus_minus(result["perplexity"], result["perplexity_se"]), over_seeds(result)]
            row += ["-" if bits is None else f"{bits:.4f}"]
            rows.append([*row, str(result["num_blocks"]), f"{result['num_tokens']:,}"])
    return columns, rows


def difference_rows(numbers: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    """(columns, rows): each later run against the first, paired."""
    columns = ["set", "run", "nats per token ± paired error", "perplexity ratio"]
    rows = []
    for text in numbers["sets"]:
        for name, found in text["differences"].items():
            if found is None:
                rows.append([text["title"], name, "other tokens: not comparable", "-"])
                continue
            value = f"{found['difference']:+.4f} ± " + (
                "-" if found["se"] is None else f"{found['se']:.4f}"
            )
            rows.append([text["title"], name, value, f"{found['perplexity_ratio']:.4f}"])
    return columns, rows


def notes(numbers: Mapping[str, Any]) -> list[str]:
    """What a reader must know to compare these numbers with others."""
    lines = [f"{EOS[numbers['eos']]}; {numbers['draws_reason']}."]
    lines += ["Error: another sample of documents (and what is left of the masks' noise)."]
    lines += ["Deviation: one seed's masks against another's, on the same blocks."]
    results = [r for text in numbers["sets"] for r in text["results"].values()]
    if any(result["is_own_text"] for result in results):
        lines += ["* trained on this corpus: held-out text, but not zero-shot."]
    if any(result["is_own_text"] is None for result in results):
        lines += ["Imported runs: what they were trained on is not known here."]
    lines += ["Bits per byte take the whole set's bytes per token, also of some of its blocks."]
    if any(not result["is_exact"] for result in results):
        lines += ["Perplexities of masked models and AoARMs are upper bounds; exact ones say so."]
    return lines


def show(numbers: Mapping[str, Any]) -> None:
    """Both tables and the notes, on the screen."""
    print_plain_table("zero-shot perplexity (Table 7)", *result_rows(numbers))
    columns, rows = difference_rows(numbers)
    if rows:
        print_plain_table(f"difference to {numbers['runs'][0]['name']}", columns, rows)
    print_lines(notes(numbers))


def markdown(numbers: Mapping[str, Any]) -> str:
    """The paper's Table 7 (runs by sets, mean ± deviation over seeds), then all the rest."""
    sets = numbers["sets"]
    paper = []
    for run in numbers["runs"]:
        found = [text["results"].get(run["name"]) for text in sets]
        cells = [
            over_seeds(r) + (" *" if r["is_own_text"] else "") if r else NOT_HERE for r in found
        ]
        paper.append([f"{run['name']}, step {run['step']}", *cells])
    seeds = len(numbers["seeds"])
    parts = [
        "# Zero-shot perplexity",
        f"Mean ± deviation over {seeds} evaluation seeds (the paper's Table 7).",
        markdown_table(["run", *(text["title"] for text in sets)], paper).rstrip(),
        "## In full",
        markdown_table(*result_rows(numbers)).rstrip(),
    ]
    columns, rows = difference_rows(numbers)
    if rows:
        parts += [
            f"## Difference to {numbers['runs'][0]['name']}",
            markdown_table(columns, rows).rstrip(),
        ]
    return (
        "\n\n".join([*parts, "\n".join(f"- {in_markdown(line)}" for line in notes(numbers))]) + "\n"
    )
