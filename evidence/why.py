"""The part of docs/results.md on why MDMs learn slowly: the Findings, then every analysis."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from analyses import ANALYSES, RESULTS, TOYS
from findings import STATEMENTS, TOY_STATEMENTS, Statement

from bellmask.report.figures import save_figure
from bellmask.utils.table import Table

TEXTS = {"wikitext2": "WikiText-2", "lm1b": "LM1B, packed"}
TITLES = {
    "orders": "Fig. 2: orders of generation",
    "context-curve": "Fig. 3, left: NLL by observed tokens",
    "context-drop": "Fig. 3, right: what each stage of training learned",
    "gradient-radius": "Table 1: gradients and distance",
    "gradient-additivity": "Table 2: do gradients add up?",
    "inefficient-masks": "Fig. 4: masks outside E_k, exactly",
    "time-laws": "Table 3: time laws",
    "schedules": "Fig. 11: the middle-flat schedule",
    "estimators": "App. C.3: how many passes an estimate of the NELBO takes",
    "decompose": "Prop. 3.1: irreducible and reducible loss, exactly",
}
SHOWN = {"decompose": ("sums over context", "reducible nats"), "time-laws": (), "schedules": ()}
"""Which tables stand in the document, by how their titles begin or contain; default: all."""
NOTES = {
    3: "Blocks are of 64 here and of 128 in the paper: the same number of masks is twice the share "
    "of a row (the paper's 32 masks are 16 here), and a model this young leans on its neighbors.",
}
FINDINGS = {
    1: "Locality, more than the number of orders, is what makes any-order generation hard.",
    2: "Low-context rows are learned early and then waste training.",
    3: "High-context rows waste training: middle ones can replace them.",
}
INTRODUCTION = """## Why MDMs learn slowly (Sec. 3 and 4.2)

Runs of 2000 steps (toys: 1000). Context and gradient analyses: preset `small` (300 BPE tokens,
blocks of 64).
Orders: `tiny` with rows of 32 bytes, because in longer ones no causal any-order model leaves the
unigram plateau at this budget; one ARM, one AoARM of each encoding, five sigma-ARMs of each (five
orders). Toys: 8 symbols, rows of 32, every row new. A difference counts beyond 2.8 of its errors
(Student's t for five runs). Between single runs the spread of the five sigma-ARMs stands
for training noise; context, gradient and toy numbers are of one seed, and their errors do not say
what another one would change.
"""


def load() -> dict[str, dict[str, Any]]:
    """All analyses that have been measured, by name."""
    found = {}
    for name in ANALYSES:
        path = RESULTS / f"analysis-{name}.json"
        if path.exists():
            found[name] = json.loads(path.read_text(encoding="utf-8"))
    return found


def findings_section() -> list[str]:
    """The three Findings beside measurements."""
    found = load()
    lines = [INTRODUCTION]
    for number, sentence in FINDINGS.items():
        lines += [f"**Finding {number}.** {sentence}", ""]
        lines += _text_table([s for s in STATEMENTS if s.finding == number], found)
        toys = [s for s in TOY_STATEMENTS if s.finding == number]
        lines += _toy_table(toys, found) if toys else []
        lines += [NOTES[number], ""] if number in NOTES else []
    return lines


def analysis_sections(figures: Path) -> list[str]:
    """Every analysis with its figure and tables."""
    lines = ["## The analyses", ""]
    for name, numbers in load().items():
        lines += _analysis(name, numbers, figures)
    return lines


def _text_table(statements: list[Statement], found: Mapping[str, Any]) -> list[str]:
    lines = [f"| statement | {' | '.join(TEXTS.values())} |", "|---" * (len(TEXTS) + 1) + "|"]
    for statement in statements:
        cells = []
        for text in TEXTS:
            numbers = found.get(f"{text}-{statement.analysis}")
            cells.append("not run yet" if numbers is None else _cell(statement, numbers))
        lines.append(f"| {statement.text} | {' | '.join(cells)} |")
    return [*lines, ""]


def _toy_table(statements: list[Statement], found: Mapping[str, Any]) -> list[str]:
    lines = ["| statement, on toys | measured |", "|---|---|"]
    for statement in statements:
        for toy in TOYS:
            numbers = found.get(f"{toy.replace(':', '')}-{statement.analysis}")
            cell = "not run yet" if numbers is None else _cell(statement, numbers)
            lines.append(f"| {statement.text} | {cell} |")
    return [*lines, ""]


def _cell(statement: Statement, numbers: Mapping[str, Any]) -> str:
    verdict = statement.judge(numbers)
    return f"**{verdict.word}**: {verdict.measured}"


def _analysis(name: str, numbers: dict[str, Any], figures: Path) -> list[str]:
    analysis = ANALYSES[name]
    where = name.removesuffix(analysis.name).strip("-")
    title = TITLES[analysis.name] + (f" ({TEXTS.get(where, where)})" if where else "")
    file = f"analysis-{name}"
    save_figure(analysis.figure(numbers), figures / file)
    lines = [f"### {title}", "", f"![{title}](figures/{file}.png)", ""]
    wanted = SHOWN.get(analysis.name)
    for table in analysis.tables(numbers):
        if wanted is None or any(part in table.title for part in wanted):
            lines += [*_markdown(table), ""]
    return lines


def _markdown(table: Table) -> list[str]:
    cells = [[cell.replace("|", "\\|") for cell in row] for row in table.rows]
    return [
        f"{table.title}:",
        "",
        f"| {' | '.join(table.columns)} |",
        "|---" * len(table.columns) + "|",
        *(f"| {' | '.join(row)} |" for row in cells),
    ]
