"""The page docs/results/analyses.md on why MDMs learn slowly, and the verdicts on the Findings."""

from __future__ import annotations

from functools import partial
from typing import Any

from analyses import ANALYSES, TOYS
from findings import STATEMENTS, TOY_STATEMENTS, Statement
from pages import Judged, Verdict, picture, read_result, worst

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
SHOWN = {
    "decompose": ("sums over context",),
    "context-curve": ("no context",),
    "context-drop": (),
    "gradient-radius": (", step",),
    "gradient-additivity": (", step",),
    "estimators": ("all rows together",),
    "time-laws": (),
    "schedules": (),
}
"""Tables that stand on the page, by a part of their titles; default: all. The JSON has the rest."""
INTRODUCTION = """# Why masked diffusion models learn slowly (Sec. 3 and 4.2)

The verdicts are in [the results](../results.md#verdicts); the rules are in `evidence/findings.py`.

The paper's Findings:

- **Finding 1.** Locality, more than the number of orders, makes any-order generation hard.
- **Finding 2.** Low-context rows are learned early and then waste training budget.
- **Finding 3.** High-context rows waste training budget: rows with medium context can replace them.

Runs have 2000 steps (toys: 1000). Context and gradient analyses use preset `small` (300-token BPE,
blocks of 64). Orders use `tiny` with rows of 32 bytes, because in longer rows no causal any-order
model leaves the unigram plateau at this budget: one ARM, and for each encoding one AoARM and five
sigma-ARMs (five orders). Toys have 8 symbols and rows of 32, each row used once.

A difference is significant beyond 2.8 standard errors (Student's t for five runs). Between single
runs, training noise is estimated from the spread of the five sigma-ARMs. Context, gradient and toy
numbers come from one seed; their errors do not cover training noise.

Table 2 uses blocks of 64 here and of 128 in the paper, so the same number of masks is twice the
fraction of a row (the paper's 32 masks correspond to 16 here), and training is much shorter. Which
of the two explains the lower similarity was not measured.
"""


def _load(name: str) -> dict[str, Any] | None:
    return read_result(f"analysis-{name}")


def judge_findings() -> list[Judged]:
    """Every statement on WikiText-2; toys together."""
    rows = []
    for statement in STATEMENTS:
        if numbers := _load(f"wikitext2-{statement.analysis}"):
            rows.append(Judged(statement.text, statement.paper, statement.judge(numbers)))
    return rows + [row for statement in TOY_STATEMENTS for row in _on_toys(statement)]


def _on_toys(statement: Statement) -> list[Judged]:
    numbers = [_load(f"{toy.replace(':', '')}-{statement.analysis}") for toy in TOYS]
    verdicts = [statement.judge(found) for found in numbers if found]
    if not verdicts:
        return []
    word = worst(verdict.word for verdict in verdicts)
    said = "; ".join(verdict.measured for verdict in verdicts)
    return [Judged(statement.text, statement.paper, Verdict(word, said))]


def analyses_page() -> list[str]:
    """Every analysis with its figure and the tables that sum it up."""
    lines = [INTRODUCTION]
    for name, analysis in ANALYSES.items():
        if (numbers := _load(name)) is None:
            continue
        where = name.removesuffix(analysis.name).strip("-")
        where = "WikiText-2" if where == "wikitext2" else where
        title = TITLES[analysis.name] + (f" ({where})" if where else "")
        lines += [f"## {title}", ""]
        lines += picture(title, f"analysis-{name}", partial(analysis.figure, numbers))
        wanted = SHOWN.get(analysis.name)
        for table in analysis.tables(numbers):
            if wanted is None or any(part in table.title for part in wanted):
                lines += [f"{table.title}:", "", table.markdown()]
    return lines
