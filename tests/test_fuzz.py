"""Whatever is given, the answer is a config or one UserError: never another exception."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from bellmask.build import build_objective
from bellmask.config import RunConfig, load_config, override
from bellmask.errors import UserError
from bellmask.presets import PRESETS, preset, tiny

VALUES = [
    "", "0", "-1", "1", "3", "0.5", "1e9", "1e-9", "nan", "inf", "-inf", "None", "true", "x", "ü",
    "gaussian", "dirac", "uniform", "bell", "nelbo", "cosine", "middle_flat", "never", "5 min",
    "10M tokens", "[1, 2]", "{}", "--", "-", "a b", "=", "auto", "cuda", "muon", "1 2 3",
]  # fmt: skip
OPTIONS = [f"--{name.replace('_', '-')}" for name in RunConfig().flat()]
OPTIONS += ["--law", "--schedule", "--objective", "--optimizer", "--lw", "--", "-x", "--law.nu"]
SIZES = [
    pytest.param(250, id="few"),
    pytest.param(5000, id="many", marks=pytest.mark.long),
]


def settle(config: RunConfig) -> str:
    config.check()
    build_objective(config)
    return "built"


@pytest.mark.parametrize("count", SIZES)
def test_any_command_line_is_a_config_or_an_error(count: int) -> None:
    draw = random.Random(count)
    outcomes = set()
    for _ in range(count):
        args = []
        for _ in range(draw.randint(1, 4)):
            args.append(draw.choice(OPTIONS))
            args += draw.choice(VALUES).split(" ") if draw.random() < 0.9 else []
        try:
            outcomes.add(settle(override(preset(draw.choice(list(PRESETS))), args)))
        except UserError as error:
            outcomes.add("refused" if str(error) else f"silent: {args}")
    assert outcomes == {"built", "refused"}


def damage(draw: random.Random, text: str) -> str:
    """Delete, double or replace a piece."""
    start = draw.randrange(len(text))
    stop = min(len(text), start + draw.randint(1, 30))
    piece = draw.choice(["", text[start:stop] * 2, "null", "[]", "{", '"', "1e999", "\x00", "7"])
    return text[:start] + piece + text[stop:]


@pytest.mark.parametrize("count", SIZES)
def test_any_config_file_is_a_config_or_an_error(count: int, tmp_path: Path) -> None:
    draw = random.Random(count)
    whole = json.dumps(tiny().to_dict(), indent=1)
    path = tmp_path / "config.json"
    outcomes = set()
    for _ in range(count):
        path.write_text(damage(draw, whole))
        try:
            outcomes.add(settle(load_config(path)))
        except UserError as error:
            outcomes.add("refused" if str(error) else "silent")
    assert outcomes == {"built", "refused"}
