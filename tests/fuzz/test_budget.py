"""The fuzzed inputs are as many as promised, and every target of the table is fuzzed."""

from __future__ import annotations

import re
from pathlib import Path

from fuzz_tools import BUDGET


def test_the_sums_are_those_promised() -> None:
    assert sum(few for few, _ in BUDGET.values()) >= 500
    assert sum(many for _, many in BUDGET.values()) >= 10_000


def test_every_target_is_fuzzed_once() -> None:
    used = [
        name
        for path in Path(__file__).parent.glob("test_*.py")
        for name in re.findall(r'\bfuzz\(\s*"([^"]+)"', path.read_text(encoding="utf-8"))
    ]
    assert sorted(used) == sorted(BUDGET)
