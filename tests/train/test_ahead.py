"""Preparing early: the same values, the same errors, only sooner."""

from __future__ import annotations

import threading
from collections import Counter

import pytest

from bellmask.train.step import Prefetch

WAIT = 60.0
"""Seconds until a test that hangs fails; nothing here takes them."""


def plain(step):
    if step in (3, 11):
        raise ValueError(f"step {step}")
    return step, step * step


def outcome(function, step):
    try:
        return function(step)
    except ValueError as error:
        return str(error)


@pytest.mark.parametrize(
    "steps",
    [
        pytest.param(range(20), id="in order"),
        pytest.param([5, 3, 9, 0, 1, 2, 8, 7, 6], id="out of order"),
        pytest.param([0, 0, 1, 1, 2, 1, 2, 3, 3, 4, 3], id="repeated"),
        pytest.param([1, 2, 7, 8, 9, 10, 7, 8], id="never asked for what fails"),
    ],
)
def test_values_and_errors_are_those_of_the_plain_function(steps):
    ahead = Prefetch(plain)
    assert [outcome(ahead, step) for step in steps] == [outcome(plain, step) for step in steps]


def test_the_next_step_begins_before_it_is_asked_for():
    """Once each, and nobody waits for it."""
    has_begun = {step: threading.Event() for step in range(11)}
    may_finish = threading.Event()
    threads, made = {}, Counter()

    def make(step):
        threads[step] = threading.current_thread().name
        made[step] += 1
        has_begun[step].set()
        assert step != 1 or may_finish.wait(WAIT)
        return step

    ahead = Prefetch(make)
    for step in range(9):
        assert ahead(step) == step
        may_finish.set()
        assert has_begun[step + 1].wait(WAIT)
    assert threads.pop(0) == threading.current_thread().name
    assert threading.current_thread().name not in threads.values()
    assert made == Counter(range(10))
