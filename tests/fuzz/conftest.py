"""A limit on memory instead of a dead machine."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest

ROOM = 8 << 30
"""Address space that a test may take beyond what is taken: what asks for more gets an error."""


@pytest.fixture(autouse=True)
def limited_memory():
    taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (taken + ROOM, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, before)
