"""Two requests, one in each order, → one outcome for A against B.

A judge prefers what it reads first (or last), so each pair is shown both ways. Only an answer
preferred both times has won; where the two verdicts disagree, it is a tie (as MT-Bench counts). A
verdict that cannot be read is neither: it is counted apart, and its pair is left out of all rates.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from bellmask.judge.benchmarks import Task

Choice = Literal["first", "second", "tie", "unreadable"]
Result = Literal["win", "loss", "tie", "unreadable"]

VALUES: dict[Result, float | None] = {"win": 1.0, "loss": 0.0, "tie": 0.5, "unreadable": None}


@dataclass(frozen=True)
class Verdict:
    """What a judge said of two answers in the order it was shown them."""

    choice: Choice
    preference: float | None = None
    """Probability that the first one shown is better; None: the judge only chose."""


@dataclass(frozen=True)
class Outcome:
    """A against B, from both orders."""

    result: Result
    preference: float | None
    """For A, 0 to 1: the mean of both orders where the judge gave probabilities, else 1 for a win,
    1/2 for a tie and 0 for a loss; None where a verdict was unreadable."""


@dataclass(frozen=True)
class Pair:
    """Two answers to a turn of a task, and what was said before them."""

    task: Task
    turn: int
    """From 0."""
    answers_a: tuple[str, ...]
    """A's answers up to this turn's."""
    answers_b: tuple[str, ...]

    def __post_init__(self) -> None:
        assert len(self.answers_a) == len(self.answers_b) == self.turn + 1 <= len(self.task.turns)

    @property
    def is_same(self) -> bool:
        """Nothing to be judged: whoever sees two equal conversations can only toss a coin."""
        return self.answers_a == self.answers_b


@dataclass(frozen=True)
class Judged:
    """A pair with its outcome."""

    pair: Pair
    outcome: Outcome


SAME = Outcome("tie", 0.5)
"""Of two equal answers; no judge need be asked."""


def combine(a_first: Verdict, b_first: Verdict) -> Outcome:
    """The outcome for A of the verdict with A shown first and the one with B shown first."""
    if "unreadable" in (a_first.choice, b_first.choice):
        return Outcome("unreadable", None)
    result: Result = "tie"
    if (a_first.choice, b_first.choice) == ("first", "second"):
        result = "win"
    elif (a_first.choice, b_first.choice) == ("second", "first"):
        result = "loss"
    if a_first.preference is None or b_first.preference is None:
        return Outcome(result, VALUES[result])
    return Outcome(result, (a_first.preference + 1 - b_first.preference) / 2)


def pairs_of(
    tasks: Sequence[Task], answers_a: Sequence[Sequence[str]], answers_b: Sequence[Sequence[str]]
) -> list[Pair]:
    """A pair for each turn of each task, in order."""
    return [
        Pair(task, turn, tuple(said_a[: turn + 1]), tuple(said_b[: turn + 1]))
        for task, said_a, said_b in zip(tasks, answers_a, answers_b, strict=True)
        for turn in range(len(task.turns))
    ]


def first_share(verdicts: Sequence[tuple[Verdict, Verdict]]) -> float:
    """Share of readable verdicts, among those that chose, for the answer shown first.

    One half for a judge without a liking for a place; nan where none chose.
    """
    choices = [verdict.choice for both in verdicts for verdict in both]
    first, second = choices.count("first"), choices.count("second")
    return first / (first + second) if first + second else float("nan")
