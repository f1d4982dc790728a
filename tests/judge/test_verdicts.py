"""Both orders → one outcome: every combination, by a table written out."""

from __future__ import annotations

import itertools
import math

import pytest

from bellmask.judge.benchmarks import Task
from bellmask.judge.verdicts import Outcome, Pair, Verdict, combine, first_share, pairs_of

CHOICES = ("first", "second", "tie", "unreadable")
EXPECTED = {
    ("first", "second"): Outcome("win", 1.0),
    ("second", "first"): Outcome("loss", 0.0),
    ("first", "first"): Outcome("tie", 0.5),
    ("second", "second"): Outcome("tie", 0.5),
    ("tie", "tie"): Outcome("tie", 0.5),
    ("first", "tie"): Outcome("tie", 0.5),
    ("tie", "first"): Outcome("tie", 0.5),
    ("second", "tie"): Outcome("tie", 0.5),
    ("tie", "second"): Outcome("tie", 0.5),
}
"""(A shown first, B shown first) → for A; all others hold something unreadable."""


@pytest.mark.parametrize(("one", "two"), [*itertools.product(CHOICES, CHOICES)])
def test_only_who_wins_in_both_orders_has_won(one: str, two: str) -> None:
    found = combine(Verdict(one), Verdict(two))  # type: ignore[arg-type]
    assert found == EXPECTED.get((one, two), Outcome("unreadable", None))


def test_a_soft_preference_is_the_mean_of_both_orders() -> None:
    """0.9 for A when first; 0.3 for B when first, that is 0.7 for A."""
    found = combine(Verdict("first", 0.9), Verdict("second", 0.3))
    assert found.result == "win"
    assert found.preference == pytest.approx(0.8)


def test_orders_that_disagree_are_a_tie_whose_soft_preference_stays() -> None:
    found = combine(Verdict("first", 0.9), Verdict("first", 0.6))
    assert found.result == "tie"
    assert found.preference == pytest.approx(0.65)


def test_swapping_the_models_mirrors_the_outcome() -> None:
    choices = [("first", 0.8), ("second", 0.1), ("tie", 0.5), ("unreadable", None)]
    mirrored = {"win": "loss", "loss": "win", "tie": "tie", "unreadable": "unreadable"}
    for one, two in itertools.product(choices, choices):
        a, b = Verdict(*one), Verdict(*two)  # type: ignore[arg-type]
        straight, swapped = combine(a, b), combine(b, a)
        assert swapped.result == mirrored[straight.result]
        if straight.preference is not None:
            assert swapped.preference == pytest.approx(1 - straight.preference)


def test_an_unreadable_verdict_has_no_preference_even_if_the_other_has() -> None:
    assert combine(Verdict("first", 1.0), Verdict("unreadable")) == Outcome("unreadable", None)


def test_each_turn_of_each_task_is_a_pair_that_holds_what_was_said_before() -> None:
    tasks = [Task("x", ("q",), "c", None, 0), Task("y", ("q1", "q2"), "c", None, 1)]
    pairs = pairs_of(tasks, [["a"], ["a1", "a2"]], [["b"], ["a1", "b2"]])
    assert pairs == [
        Pair(tasks[0], 0, ("a",), ("b",)),
        Pair(tasks[1], 0, ("a1",), ("a1",)),
        Pair(tasks[1], 1, ("a1", "a2"), ("a1", "b2")),
    ]
    assert [pair.is_same for pair in pairs] == [False, True, False]
    with pytest.raises(ValueError, match="zip"):
        pairs_of(tasks, [["a"]], [["b"], ["b1", "b2"]])


def test_the_share_of_the_first_place() -> None:
    first, second, tie, bad = (Verdict(choice) for choice in CHOICES)  # type: ignore[arg-type]
    assert first_share([(first, second), (first, first), (tie, bad)]) == 0.75
    assert math.isnan(first_share([(tie, bad)]))
