"""Table 4's layout: models by benchmarks, on the screen, in Markdown and in LaTeX."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich.markup import escape as escape_markup

from bellmask.report.downstream_notes import MARK, Numbers, notes
from bellmask.utils.console import in_markdown, markdown_table, print_lines, print_table, visible

NAMES = {
    "per_token": "accuracy, per token",
    "raw": "accuracy, sum",
    "per_byte": "accuracy, per byte",
    "word": "word",
    "contains": "contains an answer",
    "exact_match": "exact match",
    "rouge_mean": "ROUGE, mean",
    "rouge_1": "ROUGE-1",
    "rouge_2": "ROUGE-2",
    "rouge_l": "ROUGE-L",
}
OWN = "_own"
"""Ends the name of a score whose gap does not have the gold answer's length."""
"""Behind columns whose score tells the model that length."""


def score_name(score: str) -> str:
    """A score in words."""
    if score.endswith(OWN):
        return f"{NAMES[score.removesuffix(OWN)]}, length not given"
    return NAMES[score]


def value(found: Mapping[str, Any]) -> str:
    """``12.34 ± 0.56``: mean and deviation over seeds."""
    deviation = found["deviation"]
    return f"{found['mean']:.2f}" + ("" if deviation is None else f" ± {deviation:.2f}")


def best_models(numbers: Numbers, task: Mapping[str, Any], score: str) -> set[str]:
    """The models (no baselines) that are best as printed; none where nobody scored, nor of one."""
    means = {
        model["name"]: round(task["results"][model["name"]]["scores"][score]["mean"], 2)
        for model in numbers["models"]
        if model["is_model"]
    }
    top = max(means.values())
    return {name for name, mean in means.items() if mean == top and top > 0 and len(means) > 1}


def _title(task: Mapping[str, Any]) -> str:
    unit = "" if task["name"] == "infilling" else " (%)"
    return task["title"] + unit + (MARK if task["gives_length"] else "")


def main_rows(
    numbers: Numbers, bold: Callable[[str], str], change: Callable[[float, bool], str]
) -> tuple[list[str], list[list[str]]]:
    """(columns, rows) of Table 4: the main score of each task, and its change to the first row."""
    tasks = numbers["tasks"]
    columns = ["model", *map(_title, tasks)]
    rows = []
    for model in numbers["models"]:
        cells = [_label(model)]
        for task in tasks:
            found = task["results"][model["name"]]["scores"][task["main"]]
            text = value(found)
            if model["name"] in best_models(numbers, task, task["main"]):
                text = bold(text)
            gap = found.get("difference")
            if gap is not None and model["is_model"]:
                text += f" ({change(gap['mean'], gap['is_sure'])})"
            cells.append(text)
        rows.append(cells)
    return columns, rows


def _label(model: Mapping[str, Any]) -> str:
    return model["name"] if model["step"] is None else f"{model['name']}, step {model['step']}"


def signed(gap: float, is_sure: bool) -> str:
    """A change, with a star where it is larger than its error."""
    return f"{_as_printed(gap):+.2f}" + ("*" if is_sure else "")


def _as_printed(number: float) -> float:
    return round(number, 2) + 0.0  # never -0.00


def full_rows(numbers: Numbers) -> tuple[list[str], list[list[str]]]:
    """(columns, rows): every score of every model, with both errors and the paired difference."""
    columns = ["task", "score", "model", "mean", "deviation", "error", "difference ± error"]
    rows = []
    for task in numbers["tasks"]:
        for score in task["results"][numbers["models"][0]["name"]]["scores"]:
            for model in numbers["models"]:
                found = task["results"][model["name"]]["scores"][score]
                row = [task["title"], score_name(score), model["name"], f"{found['mean']:.2f}"]
                row += [_or_dash(found["deviation"]), _or_dash(found["error"])]
                rows.append([*row, _difference(found.get("difference"))])
    return columns, rows


def other_rows(numbers: Numbers) -> tuple[list[str], list[list[str]]]:
    """(columns, rows): the scores that are not in Table 4, models side by side."""
    names = [model["name"] for model in numbers["models"]]
    rows = []
    for task in numbers["tasks"]:
        results = [task["results"][name]["scores"] for name in names]
        for score in results[0]:
            if score != task["main"]:
                label = f"{task['title']}: {score_name(score)}"
                rows.append([label, *(value(found[score]) for found in results)])
    return ["score", *names], rows


def _or_dash(number: float | None) -> str:
    return "-" if number is None else f"{number:.2f}"


def _difference(gap: Mapping[str, Any] | None) -> str:
    if gap is None:
        return "-"
    return f"{_as_printed(gap['mean']):+.2f} ± {_or_dash(gap['error'])}" + (
        " *" if gap["is_sure"] else ""
    )


# --- notes -----------------------------------------------------------------------------------


# --- screen and Markdown ---------------------------------------------------------------------


def show(numbers: Numbers) -> None:
    """Table 4, the other scores and the notes, on the screen."""
    columns, rows = main_rows(numbers, lambda text: f"[bold]{text}[/bold]", signed)
    rows = [[escape_markup(name), *cells] for name, *cells in rows]
    print_table("downstream benchmarks (Table 4)", columns, rows)
    columns, rows = other_rows(numbers)
    print_table("other scores", [escape_markup(column) for column in columns], rows)
    print_lines(notes(numbers))


def markdown(numbers: Numbers) -> str:
    """Table 4 and the notes as a page, then every score with its errors."""
    columns, rows = main_rows(numbers, lambda text: f"**{text}**", signed)
    parts = ["# Downstream benchmarks", markdown_table(columns, rows).rstrip()]
    parts.append("\n".join(f"- {in_markdown(line)}" for line in notes(numbers)))
    parts += ["## Every score", markdown_table(*full_rows(numbers)).rstrip()]
    return "\n\n".join(parts) + "\n"


# --- LaTeX -----------------------------------------------------------------------------------

_SPECIAL = {c: f"\\{c}" for c in "&%$#_{}"} | {
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "\\": r"\textbackslash{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
    "[": "{[}",  # at the start of a row it would be an option of the row before
    "*": "{*}",
    "±": r"$\pm$",
    MARK: r"$^\dagger$",
}


def escape(text: str) -> str:
    """Text as LaTeX shows it."""
    return "".join(_SPECIAL.get(letter, letter) for letter in visible(text))


def latex(numbers: Numbers) -> str:
    """A table for a paper; needs booktabs and xcolor."""
    columns, rows = main_rows(numbers, lambda text: f"\\textbf{{{text}}}", _coloured)
    lines = ["% needs \\usepackage{booktabs} and \\usepackage[dvipsnames]{xcolor}"]
    lines += [f"\\begin{{tabular}}{{l{'c' * (len(columns) - 1)}}}", "\\toprule"]
    lines += [_line([escape(column) for column in columns]), "\\midrule"]
    is_model = [model["is_model"] for model in numbers["models"]]
    for number, (name, *cells) in enumerate(rows):
        if number and is_model[number - 1] and not is_model[number]:
            lines.append("\\midrule")
        lines.append(_line([escape(name), *(cell.replace("±", r"$\pm$") for cell in cells)]))
    lines += ["\\bottomrule", "\\end{tabular}"]
    return "\n".join([*lines, *(f"% {visible(line)}" for line in notes(numbers))]) + "\n"


def _coloured(gap: float, is_sure: bool) -> str:
    shown, star = _as_printed(gap), "^*" if is_sure else ""
    number = f"${shown:+.2f}{star}$"
    if not shown:
        return number
    return f"\\textcolor{{{'ForestGreen' if shown > 0 else 'BrickRed'}}}{{{number}}}"


def _line(cells: Sequence[str]) -> str:
    return " & ".join(cells) + r" \\"
