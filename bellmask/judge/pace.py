"""When to ask: a rate limit shared by all threads, and how long to wait after a failure."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Mapping
from datetime import UTC
from email.utils import parsedate_to_datetime

from bellmask.utils.store import content_key

FIRST_WAIT = 1.0
LONGEST_BACK_OFF = 60.0


TELL_SECONDS = 30.0


class Teller:
    """Says on stderr that an endpoint fails: the first time, then at most every half minute."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now, self._next = now, -float("inf")
        self._lock = threading.Lock()

    def tell(self, words: str) -> None:
        """A note, unless there was one just now."""
        with self._lock:
            if self._now() < self._next:
                return
            self._next = self._now() + TELL_SECONDS
        print(f"note: {words}", file=sys.stderr, flush=True)


class Pace:
    """Hands out turns: never more than ``per_minute`` in any minute, evenly spaced."""

    def __init__(self, per_minute: float | None, now: Callable[[], float]) -> None:
        self._gap = 60.0 / per_minute if per_minute else 0.0
        self._now = now
        self._next = now()
        self._lock = threading.Lock()

    def take_turn(self) -> float:
        """Seconds until the next free turn, which is now the caller's."""
        with self._lock:
            now = self._now()
            start = max(now, self._next)
            self._next = start + self._gap
            return start - now

    def hold(self, seconds: float) -> None:
        """No further turn for so long: the endpoint asked for it."""
        with self._lock:
            self._next = max(self._next, self._now() + seconds)


def back_off(key: str, attempt: int) -> float:
    """Seconds after the ``attempt``-th failure (from 1): doubling, times a keyed half to one."""
    whole = min(FIRST_WAIT * 2.0 ** (attempt - 1), LONGEST_BACK_OFF)
    share = int(content_key("jitter", key, attempt), 16) / 16**24
    return whole * (0.5 + 0.5 * share)


def retry_after(headers: Mapping[str, str], wall: float) -> float | None:
    """Seconds an endpoint asks to wait; None where it does not say so understandably.

    Seconds or a date. A date is compared with the endpoint's own clock where it tells it.
    """
    milliseconds = _number(headers.get("retry-after-ms"))
    if milliseconds is not None:
        return milliseconds / 1000.0
    value = headers.get("retry-after")
    seconds = _number(value)
    if seconds is not None:
        return seconds
    until = _date(value)
    if until is None:
        return None
    sent = _date(headers.get("date"))
    return max(0.0, until - (wall if sent is None else sent))


def _number(value: str | None) -> float | None:
    """A count that is not negative (nor infinite, nor NaN)."""
    try:
        number = float(value or "")
    except ValueError:
        return None
    return number if 0.0 <= number < float("inf") else None


def _date(value: str | None) -> float | None:
    try:
        date = parsedate_to_datetime(value or "")
    except (ValueError, TypeError):
        return None
    return (date if date.tzinfo else date.replace(tzinfo=UTC)).timestamp()
