"""Table 5's layout: win rates of A against B, on the screen and in Markdown."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.markup import escape

from bellmask.utils.console import in_markdown, markdown_table, print_lines, print_table

Numbers = Mapping[str, Any]
Table = tuple[list[str], list[list[str]]]
"""(columns, rows)."""
TITLES = {
    "win_rate": "win rate (a tie is half a win)",
    "non_tie": "non-tie win rate",
    "length_controlled": "length-controlled, two terms",
    "published_length_controlled": "length-controlled, AlpacaEval's full model",
}
COUNTS = ("wins", "losses", "ties", "unreadable")
PARTS = {"by_category": "category", "by_turn": "turn"}


def percent(value: float | None, spread: float | None = None) -> str:
    """``78.27 ± 1.37``; a dash for what is not known."""
    if value is None:
        return "-"
    return f"{100 * value:.2f}" + ("" if spread is None else f" ± {100 * spread:.2f}")


def title(numbers: Numbers) -> str:
    """Who against whom, by whom."""
    label = numbers["judge"]["label"]
    return f"{numbers['a']['name']} against {numbers['b']['name']}, by {label}"


def headlines(numbers: Numbers) -> Table:
    """Mean ± deviation over seeds; beside it the error over tasks, from all seeds together."""
    count = len(numbers["seeds"])
    over = "one seed" if count == 1 else f"mean ± deviation of {count} seeds"
    columns = ["%", over, "standard error over tasks"]
    rows = []
    for name in (name for name in TITLES if name in numbers["over_seeds"]):
        found = numbers["over_seeds"][name]
        # the full model's published error is the spread of its predictions: no error of the rate
        error = None if name == "published_length_controlled" else found["error"]
        if not found.get("is_usable", True):  # a number that rests on no data misleads
            rows.append([TITLES[name], "-", "-"])
            continue
        rows.append([TITLES[name], percent(found["mean"], found["deviation"]), percent(error)])
    return columns, rows


def outcomes(numbers: Numbers) -> Table:
    """Counts of each seed, and how long answers are."""
    columns = ["seed", *COUNTS, "characters of A", "of B"]
    rows = []
    for seed, found in zip(numbers["seeds"], numbers["results"], strict=True):
        lengths = [f"{found[f'mean_length_{side}']:.0f}" for side in "ab"]
        rows.append([str(seed), *(str(found["counts"][name]) for name in COUNTS), *lengths])
    return columns, rows


def part(numbers: Numbers, name: str) -> Table:
    """By category or turn: counts of all seeds together; no rows if there is only one."""
    columns = [PARTS[name], *COUNTS, "win rate, %", "non-tie, %"]
    found = numbers["over_seeds"][name]
    rows = [
        [
            label,
            *(str(one[count]) for count in COUNTS),
            *(percent(one[r]["mean"], one[r]["deviation"]) for r in ("win_rate", "non_tie")),
        ]
        for label, one in found.items()
    ]
    return columns, rows if len(rows) > 1 else []


def notes(numbers: Numbers) -> list[str]:
    """What a reader must know."""
    judge, count = numbers["judge"], len(numbers["seeds"])
    lines = [f"Benchmark: {numbers['benchmark']['name']}, {numbers['num_tasks']} tasks."]
    lines += [f"Judge: {judge['label']}."]
    if judge["is_local"]:
        lines += ["A likelihood is no opinion: fluent, common answers win, whatever they say."]
    if judge.get("first_share") is not None:
        share = percent(judge["first_share"])
        lines += [f"Of its choices {share} % were for the answer shown first (fair: 50)."]
    if "num_requests" in judge:
        lines += [
            f"It answered {judge['num_requests']:,} requests: {judge['tokens_in']:,} tokens in, "
            f"{judge['tokens_out']:,} out{_dollars(judge.get('usd'))}."
        ]
    unreadable = sum(result["counts"]["unreadable"] for result in numbers["results"])
    if unreadable:
        lines += [f"{unreadable} pairs without a readable verdict are in no rate."]
    if count == 1:
        lines += ["One seed: no deviation."]
    lines += _length_notes(numbers)
    return [*lines, *numbers["cautions"]]


def _dollars(usd: float | None) -> str:
    return "" if usd is None else f", ${usd:,.4f} in all"


def _length_notes(numbers: Numbers) -> list[str]:
    """Why a length-controlled rate is what it is, each reason once."""
    found: dict[str, None] = {}
    for name in ("length_controlled", "published_length_controlled"):
        for result in numbers["results"]:
            if (result.get(name) or {}).get("note"):
                label = TITLES[name][0].upper() + TITLES[name][1:]
                found[f"{label}: {result[name]['note']}."] = None
    return list(found)


def show(numbers: Numbers) -> None:
    """Tables and notes, on the screen."""
    print_table(escape(title(numbers)), *headlines(numbers))
    print_table("outcomes for A", *outcomes(numbers))
    for name, word in PARTS.items():
        columns, rows = part(numbers, name)
        if rows:
            rows = [[escape(label), *cells] for label, *cells in rows]
            print_table(f"by {word}, all seeds", columns, rows)
    print_lines(notes(numbers))


def markdown(numbers: Numbers) -> str:
    """The same as a page."""
    parts = [f"# {in_markdown(title(numbers))}", markdown_table(*headlines(numbers)).rstrip()]
    parts += ["\n".join(f"- {in_markdown(line)}" for line in notes(numbers))]
    parts += ["## Outcomes for A", markdown_table(*outcomes(numbers)).rstrip()]
    for name, word in PARTS.items():
        columns, rows = part(numbers, name)
        if rows:
            parts += [f"## By {word}, all seeds", markdown_table(columns, rows).rstrip()]
    return "\n\n".join(parts) + "\n"
