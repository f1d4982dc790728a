"""The next step's data and noise, prepared in a thread while the current step is computed.

Plans are functions of the step alone, so preparing early changes nothing but the time.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, TypeVar

T = TypeVar("T")


class Ahead(Generic[T]):
    """A function of the step, evaluated one step early where steps are asked for in order."""

    def __init__(self, make: Callable[[int], T]) -> None:
        self._make = make
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="ahead")
        self._step = -1
        self._next: Future[T] | None = None

    def __call__(self, step: int) -> T:
        """``make(step)``; begins with ``make(step + 1)`` before it returns."""
        is_ready = self._next is not None and self._step == step
        made = self._next.result() if is_ready and self._next else self._make(step)
        self._step, self._next = step + 1, self._thread.submit(self._make, step + 1)
        return made
