"""From units to numbers: scores of a contestant on a task, with two kinds of error.

*Deviation* is over evaluation seeds (masks, sampling noise), as the paper's ±; *error* over
questions: what another sample of questions would change. Differences between contestants are
paired: the same questions and seeds.

S seeds, B questions; all scores are percentages.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from bellmask.downstream.asks import Score
from bellmask.downstream.gaps import VARIANTS, Variant, is_cut, is_shortened
from bellmask.downstream.grading import (
    How,
    begins_with_word,
    choose,
    contains,
    exact_match,
    is_word,
    rouge,
)
from bellmask.downstream.questions import (
    CHOICE_SCORES,
    STORY_SCORES,
    Choice,
    Completion,
    Infilling,
    Item,
)
from bellmask.downstream.work import TaskItems, Work
from bellmask.utils.stats import Floats

OWN = "_own"
"""Ends the name of a score whose gap does not have the gold answer's length."""
FEWEST_QUESTIONS = 20
"""With fewer, the spread over questions says too little about the error."""
SURE = 1.96
"""A difference of more standard errors is called larger than its error (95 %)."""


@dataclass(frozen=True)
class Measured:
    """One contestant on one task."""

    value_SB: dict[str, Floats]
    """Score by name, for each seed and question."""
    num_passes: int = 0
    """Rows through the network for the log-probabilities."""
    exact_share: float | None = None
    """Of log-probabilities without noise; None where there are none."""
    num_cut: int = 0
    """Questions whose gold answer is longer than any gap."""
    num_shortened: int = 0
    """Questions of which not all fits into a row: the oldest tokens go."""

    def mean(self, score: str) -> float:
        """The score."""
        return float(self.value_SB[score].mean())

    def deviation(self, score: str) -> float | None:
        """Standard deviation over seeds; None for one seed."""
        value_S = self.value_SB[score].mean(axis=1)
        return float(value_S.std(ddof=1)) if len(value_S) > 1 else None

    def error(self, score: str) -> float | None:
        """Standard error over questions."""
        return _error(self.value_SB[score].mean(axis=0))

    def difference(self, other: Measured, score: str) -> tuple[float, float | None]:
        """(this - the other, standard error over questions), paired."""
        apart_B = self.value_SB[score].mean(axis=0) - other.value_SB[score].mean(axis=0)
        return float(apart_B.mean()), _error(apart_B)


def _error(value_B: Floats) -> float | None:
    if len(value_B) < 2:
        return None
    return float(value_B.std(ddof=1) / math.sqrt(len(value_B)))


def is_sure(difference: float, error: float | None, num_questions: int) -> bool:
    """The difference is larger than its error, and there are enough questions to know that."""
    is_known = error is not None and num_questions >= FEWEST_QUESTIONS
    return is_known and abs(difference) > SURE * (error or 0.0)


# --- grading ---------------------------------------------------------------------------------


def grade(work: Work, task: TaskItems) -> Measured:
    """All scores of a task; its units must have been done."""
    if task.kind != "choice":
        return _grade_texts(work, task)
    return _guess(work, task) if work.contestant.is_guess else _grade_choices(work, task)


def _grade_choices(work: Work, task: TaskItems) -> Measured:
    items = [item for item in task.items if isinstance(item, Choice)]
    right: dict[str, list[list[float]]] = {how: [] for how in CHOICE_SCORES}
    is_exact: list[bool] = []
    for seed in work.seeds:
        found = [work.scores(task, item, seed) for item in items]
        for how in CHOICE_SCORES:
            pairs = zip(items, found, strict=True)
            right[how].append([100.0 * _is_right(item, scores, how) for item, scores in pairs])
        is_exact += [score.is_exact for scores in found for score in scores]
    return Measured(
        {how: np.array(values) for how, values in right.items()},
        work.num_passes(task),
        float(np.mean(is_exact)),
        num_shortened=_num_shortened(work, task),
    )


def _guess(work: Work, task: TaskItems) -> Measured:
    """Choices by chance, in expectation."""
    value = [100.0 / len(item.continuations) for item in task.items if isinstance(item, Choice)]
    return Measured({how: np.array([value] * len(work.seeds)) for how in CHOICE_SCORES})


def _is_right(item: Choice, scores: list[Score], how: str) -> float:
    """1 or 0; who finds all choices equally likely (a unigram on WinoGrande) guesses."""
    if len({(score.log_probability, score.num_tokens) for score in scores}) == 1:
        return 1 / len(scores)
    ways: dict[str, How] = {"raw": "raw", "per_token": "per_token", "per_byte": "per_byte"}
    picked = choose(
        [score.log_probability for score in scores],
        ways[how],
        num_tokens=[score.num_tokens for score in scores],
        continuations=item.continuations,
    )
    return picked == item.gold


def _grade_texts(work: Work, task: TaskItems) -> Measured:
    graded = [[_grade_text(work, task, item, seed) for item in task.items] for seed in work.seeds]
    return Measured(
        {name: np.array([[one[name] for one in row] for row in graded]) for name in graded[0][0]},
        num_cut=sum(is_cut(work.contestant, item) for item in task.items),
        num_shortened=_num_shortened(work, task),
    )


def _num_shortened(work: Work, task: TaskItems) -> int:
    return sum(is_shortened(work.contestant, item) for item in task.items)


def _grade_text(work: Work, task: TaskItems, item: Item, seed: int) -> dict[str, float]:
    found: dict[str, float] = {}
    for variant in VARIANTS:
        written = work.text(task, item, variant, seed)
        ending = OWN if variant == "own" else ""
        for name, value in _text_scores(task.kind, item, written, variant).items():
            found[name + ending] = value
    return found


def _text_scores(kind: str, item: Item, written: str, variant: Variant) -> dict[str, float]:
    if isinstance(item, Infilling):
        made = rouge(written, item.gold)
        return {name: getattr(made, name) for name in STORY_SCORES}
    assert isinstance(item, Completion)
    if kind == "word":
        is_right = is_word if variant == "gold" else begins_with_word
        return {"word": 100.0 * is_right(written, item.answer)}
    return {
        "contains": 100.0 * contains(written, item.accepted),
        "exact_match": 100.0 * exact_match(written, item.accepted),
    }


# --- files -----------------------------------------------------------------------------------


def summary(measured: Measured, reference: Measured | None) -> dict[str, Any]:
    """Numbers for JSON; with a reference also the differences to it."""
    scores: dict[str, Any] = {}
    for name in measured.value_SB:
        scores[name] = {
            "mean": measured.mean(name),
            "deviation": measured.deviation(name),
            "error": measured.error(name),
        }
        if reference is not None:
            gap, error = measured.difference(reference, name)
            scores[name]["difference"] = {
                "mean": gap,
                "error": error,
                "is_sure": is_sure(gap, error, measured.value_SB[name].shape[1]),
            }
    return {
        "scores": scores,
        "num_passes": measured.num_passes,
        "exact_share": measured.exact_share,
        "num_cut": measured.num_cut,
        "num_shortened": measured.num_shortened,
    }
