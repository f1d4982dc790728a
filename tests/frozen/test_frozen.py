"""The stored results still come out; see ``cases.py``.

After a change that is meant to change them: ``python tests/frozen/cases.py freeze --only NAME``.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cases import CASES, RESULTS, results_of, stored_part, working_folder

STORED = json.loads(RESULTS.read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def in_zoo() -> Iterator[Path]:
    with working_folder() as folder:
        yield folder


def is_close(found: Any, stored: Any) -> bool:
    """Numbers to 1e-4, which another CPU's rounding does not reach; all else exactly."""
    if isinstance(stored, list):
        is_as_long = isinstance(found, list) and len(found) == len(stored)
        return is_as_long and all(map(is_close, found, stored))
    if isinstance(stored, float) and isinstance(found, int | float):
        if math.isnan(stored):
            return math.isnan(found)
        return math.isclose(found, stored, rel_tol=1e-4, abs_tol=1e-6)
    return bool(found == stored)


def test_comparison_can_fail():
    assert is_close([1.0, math.nan, "a"], [1.00001, math.nan, "a"])
    assert not is_close(math.nan, 1.0)
    assert not is_close(1.0, math.nan)
    assert not is_close([1.0], [1.0, 1.0])
    assert not is_close(1.001, 1.0)
    assert not is_close(None, 0.0)


SHARED = ("zero-shot", "generative")
"""Also measured by two processes, with the same results."""


@pytest.mark.parametrize(
    ("name", "num_processes"),
    [(name, case.num_processes) for name, case in CASES.items() if case.is_stored]
    + [(name, 2) for name in SHARED],
)
def test_results_are_those_stored(name: str, num_processes: int, in_zoo: Path) -> None:
    case = replace(CASES[name], num_processes=num_processes)
    found, stored = stored_part(results_of(case)), STORED[name]
    lines = [f"only stored: {place}" for place in stored.keys() - found.keys()]
    lines += [f"not stored: {place}" for place in found.keys() - stored.keys()]
    lines += [
        f"{place}: stored {stored[place]!r:.60}, found {found[place]!r:.60}"
        for place in stored.keys() & found.keys()
        if not is_close(found[place], stored[place])
    ]
    if lines:
        told = "\n".join([f"bellmask {command}" for command in CASES[name].commands] + lines[:20])
        hint = f"if it is meant: python tests/frozen/cases.py freeze --only {name}"
        pytest.fail(f"{len(lines)} differences\n{told}\n{hint}", pytrace=False)
