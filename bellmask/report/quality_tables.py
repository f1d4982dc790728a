"""Tables of generative perplexity: the paper's Table 8, never without diversity beside it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from bellmask.utils.console import in_markdown, markdown_table

_COLUMNS = (
    ("gen. perplexity", "perplexity", 2),
    ("entropy", "entropy", 3),
    ("distinct-1", "distinct_1", 3),
    ("distinct-2", "distinct_2", 3),
    ("distinct-3", "distinct_3", 3),
    ("repetition", "repetition", 3),
    ("length", "length", 1),
    ("calls", "calls", 1),
)
_WITH_DEVIATION = {"perplexity", "entropy"}
_NO_STEPS = "no NFE to choose"


def _value(setting: Mapping[str, Any], name: str, digits: int, *, with_deviation: bool) -> str:
    mean, deviation = setting["mean"][name], setting["sd"][name]
    if mean is None:
        return "-"
    error = f" ± {deviation:.{digits}f}" if with_deviation and deviation is not None else ""
    return f"{mean:.{digits}f}{error}"


def title(numbers: Mapping[str, Any]) -> str:
    """What was measured, in a line."""
    scorer, asked = numbers["scorer"]["name"], f"{numbers['num']} samples, {numbers['over']}"
    return f"generative perplexity under {scorer}: {asked}; {numbers['how']}"


def nats_per_sample(setting: Mapping[str, Any]) -> float | None:
    """What a whole sample costs under the scorer, mean over seeds.

    A perplexity is per token of the scorer: text of long words has fewer and dearer ones. Between
    runs with the same tokenizer and length this does not depend on how the scorer cuts the text.
    """
    found = [
        cell["length"] * math.log(cell["perplexity"])
        for cell in setting["cells"]
        if cell["perplexity"] is not None
    ]
    return sum(found) / len(found) if found else None


def rows(numbers: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    """(columns, rows) of the whole table: a row for each run and NFE, real text last."""
    columns = ["run", "NFE", *(name for name, _, _ in _COLUMNS), "nats per sample"]
    found = []
    for record in [*numbers["runs"], *numbers["real_text"]]:
        for setting in record["settings"]:
            nfe = "-" if setting["nfe"] is None else str(setting["nfe"])
            values = [
                _value(setting, name, digits, with_deviation=name in _WITH_DEVIATION)
                for _, name, digits in _COLUMNS
            ]
            whole = nats_per_sample(setting)
            values.append("-" if whole is None else f"{whole:.1f}")
            found.append([record["name"], nfe, *values])
    return columns, found


def paper_rows(numbers: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    """(columns, rows) as in Table 8: a column for each NFE, the entropy in brackets."""
    records = [*numbers["runs"], *numbers["real_text"]]
    asked = sorted({s["nfe"] for r in records for s in r["settings"] if s["nfe"] is not None})
    columns = ["NFE", *map(str, asked)]
    if any(s["nfe"] is None for r in records for s in r["settings"]):
        columns.append(_NO_STEPS)
    found = []
    for record in records:
        by_nfe = {str(s["nfe"] or _NO_STEPS): s for s in record["settings"]}
        found.append([record["name"], *(_cell(by_nfe.get(c)) for c in columns[1:])])
    return columns, found


def _cell(setting: Mapping[str, Any] | None) -> str:
    if setting is None:
        return ""
    perplexity = _value(setting, "perplexity", 2, with_deviation=True)
    return f"{perplexity} ({_value(setting, 'entropy', 2, with_deviation=False)})"


def notes(numbers: Mapping[str, Any]) -> list[str]:
    """How it was counted, and what to be careful about."""
    scorer = numbers["scorer"]
    lines = [f"{numbers['counting']}", f"scorer: {scorer['rule']}"]
    causal = [run["name"] for run in numbers["runs"] if run["is_causal"]]
    if causal:
        lines.append(f"{', '.join(causal)}: one network call per token, whatever the NFE")
    for record in [*numbers["runs"], *numbers["real_text"]]:
        cells = [cell for setting in record["settings"] for cell in setting["cells"]]
        count = sum(cell["samples"] for cell in cells)
        for key, what in (("left_out", "too short to count"), ("cut", "cut by the scorer")):
            if found := sum(cell[key] for cell in cells):
                lines.append(f"{record['name']}: {found} of {count} samples {what}")
    for record in numbers["real_text"]:
        groups = len(record["settings"][0]["cells"])
        lines.append(f"{record['name']}: {groups} group{'s' * (groups > 1)} of blocks, not seeds")
    if numbers["sampling"]["noise"] == "float32":
        lines.append("float32 noise lowers the effective temperature: these values flatter")
    return lines


def markdown(numbers: Mapping[str, Any]) -> str:
    """Both tables and the notes."""
    parts = [f"# Generative perplexity\n\n{title(numbers)[0].upper()}{title(numbers)[1:]}.\n"]
    parts.append("As in Table 8 of the paper, unigram entropy in brackets:\n")
    parts.append(markdown_table(*paper_rows(numbers)))
    parts.append("Mean over seeds, ± standard deviation:\n")
    parts.append(markdown_table(*rows(numbers)))
    parts.append("\n".join(f"- {in_markdown(line)}" for line in notes(numbers)) + "\n")
    return "\n".join(parts)
