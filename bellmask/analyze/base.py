"""What an analysis is: options → numbers → tables and a figure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from matplotlib.figure import Figure

OnProgress = Callable[[int, int], None]
"""Told (steps done, steps in all) now and then."""


@dataclass(frozen=True)
class Table:
    """A table of an analysis, as text; the first column names the row."""

    title: str
    columns: list[str]
    rows: list[list[str]]


@dataclass(frozen=True)
class Analysis:
    """One analysis: ``bellmask analyze NAME`` runs the functions in this order."""

    name: str
    options: type
    """A frozen dataclass; its docstring is the help text, and names the paper's figure."""
    measure: Callable[[Any, OnProgress], dict[str, Any]]
    """Options → numbers and their errors, ready for JSON. Everything shown is made from them."""
    tables: Callable[[dict[str, Any]], list[Table]]
    figure: Callable[[dict[str, Any]], Figure]
    unit: str = "steps"
    """What the progress bar counts."""
