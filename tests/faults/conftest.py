"""Fixtures of the fault tests: a run to disturb, and one to damage."""

from __future__ import annotations

import pytest
from fault_tools import Damaged, Lab


@pytest.fixture(scope="session")
def truths(tmp_path_factory):
    """Undisturbed runs by config and number of processes, and where they are."""
    return {}, tmp_path_factory.mktemp("truths")


@pytest.fixture
def lab(small_config, warm, tmp_path, truths):
    return Lab(small_config, warm, tmp_path, *truths)


@pytest.fixture
def damaged(small_config, warm, tmp_path, truths):
    return Damaged(small_config, warm, tmp_path, *truths)
