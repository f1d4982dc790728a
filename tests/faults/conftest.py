"""A run to disturb, and the undisturbed ones it is compared with."""

from __future__ import annotations

import pytest
from fault_tools import Lab, command


@pytest.fixture(scope="session")
def undisturbed(warm, tmp_path_factory):
    """``undisturbed(config, size)``: a run folder, trained once for all tests."""
    made = {}

    def train(config, size):
        key = (str(config.to_dict()), size)
        if key not in made:
            made[key] = tmp_path_factory.mktemp("undisturbed") / "run"
            warm.run(command(config, made[key]), size)
        return made[key]

    return train


@pytest.fixture
def lab(small_config, warm, tmp_path, undisturbed):
    return Lab(small_config, warm, tmp_path, undisturbed)
