"""Preparing early: the same values, the same errors, only sooner."""

from __future__ import annotations

import threading
from collections import Counter

import pytest

from bellmask.train.ahead import Ahead

WAIT = 60.0
"""Seconds until a test that hangs fails; nothing here takes them."""


def square(step: int) -> tuple[int, int]:
    return step, step * step


@pytest.mark.parametrize(
    "steps",
    [
        pytest.param(range(20), id="in order"),
        pytest.param(range(7, 20), id="from the middle"),
        pytest.param([5, 3, 9, 0, 1, 2, 8, 7, 6], id="out of order"),
        pytest.param([0, 0, 1, 1, 1, 2, 1, 2, 3, 3], id="repeated"),
        pytest.param([4, 5, 6, 4, 5, 6], id="resumed from before"),
    ],
)
def test_values_are_those_of_the_plain_function(steps: list[int]) -> None:
    ahead = Ahead(square)
    assert [ahead(step) for step in steps] == [square(step) for step in steps]


def test_the_next_step_begins_before_it_is_asked_for() -> None:
    has_begun = {step: threading.Event() for step in range(10)}
    threads: dict[int, str] = {}

    def make(step: int) -> int:
        threads[step] = threading.current_thread().name
        has_begun[step].set()
        return step

    ahead = Ahead(make)
    for step in range(9):
        assert ahead(step) == step
        assert has_begun[step + 1].wait(WAIT)
    assert threads[0] == threading.current_thread().name
    assert all(threads[step] != threads[0] for step in range(1, 10))


def test_the_current_step_does_not_wait_for_the_next() -> None:
    may_finish = threading.Event()

    def make(step: int) -> int:
        if step == 1:
            assert may_finish.wait(WAIT)
        return step

    ahead = Ahead(make)
    assert ahead(0) == 0
    may_finish.set()
    assert ahead(1) == 1


def test_in_order_nothing_is_made_twice() -> None:
    made: Counter[int] = Counter()
    ahead = Ahead(lambda step: made.update([step]))
    for step in range(10):
        ahead(step)
    assert set(made.values()) == {1}
    assert set(made) >= set(range(10))


def test_errors_come_at_the_step_they_belong_to() -> None:
    def make(step: int) -> int:
        if step in (0, 3):
            raise ValueError(f"step {step}")
        return step

    ahead = Ahead(make)
    with pytest.raises(ValueError, match="step 0"):
        ahead(0)
    assert [ahead(step) for step in (1, 2)] == [1, 2]
    for _ in range(2):
        with pytest.raises(ValueError, match="step 3"):
            ahead(3)
    assert [ahead(step) for step in (4, 5, 2)] == [4, 5, 2]
    with pytest.raises(ValueError, match="step 3"):
        ahead(3)


def test_an_error_of_a_step_that_is_never_asked_for_is_never_seen() -> None:
    def make(step: int) -> int:
        if step == 3:
            raise ValueError("step 3")
        return step

    ahead = Ahead(make)
    assert [ahead(step) for step in (1, 2, 7, 8)] == [1, 2, 7, 8]
