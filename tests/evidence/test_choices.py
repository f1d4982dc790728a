"""Noise of multiple choice: a model whose noise is known, statistics by hand, experiments."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from choices import (
    OURS,
    ChoiceItem,
    ChoiceOptions,
    Curve,
    Repeats,
    fit_line,
    measure_questions,
    noise_at,
    passes_needed,
    two_best,
)
from continuation_tools import EXACT, random_run

from bellmask.utils.progress import NO_PROGRESS


class Table(torch.nn.Module):
    """A cross-entropy for each token, whatever is visible."""

    first_maskable, uses_time = 0, False

    def forward(self, x, rows, targets, **_):
        return targets.float() / 64


def known(small_config, *questions, **changes):
    """What is measured of questions whose choices are these texts."""
    run = replace(random_run(small_config(*EXACT, "--data.block-length", "32")), model=Table())
    items = [ChoiceItem(n, ("q",) * len(texts), texts, 0) for n, texts in enumerate(questions)]
    options = ChoiceOptions(runs=("x",), **{"draws": (1,), "longest_exact": 4, **changes})
    return measure_questions(run, "piqa", items, options, NO_PROGRESS)


def row_of(numbers, way, draws=1):
    (row,) = [r for r in numbers["rows"] if (r["way"], r["draws"]) == (way, draws)]
    return row


def test_short_choices_are_exact_and_their_passes_counted(small_config):
    """Three and four tokens: 7 + 15 masks, no noise; a question with a longer one is long."""
    questions = ("abc", "abcz"), ("abc", "zbca"), ("abc", "abcdef", "x")
    numbers = known(small_config, *questions, repeats=12, draws=(4, 2))
    assert numbers["questions"] == {"short": 2, "long": 1, "all": 3}
    ours = row_of(numbers, OURS, 4)
    assert ours["noise"]["short"] == {"value": 0.0, "error": 0.0}
    assert ours["passes"] == {"short": 22, "long": 7 + 4 + 1, "all": pytest.approx(56 / 3)}
    assert numbers["needed"]["strata"]["short"]["value"] == math.inf
    assert numbers["exact"]["passes"] == 22
    left = numbers["exact"]["noise"]["strata_apart"]["value"]
    assert 0 < left < row_of(numbers, "strata_apart", 4)["noise"]["short"]["value"]


def test_repeats_by_hand():
    """Three repetitions of two questions, the second with two choices only."""
    first = [[-1.0, -2.0, -3.0], [-2.0, -1.0, -3.0], [-1.0, -3.0, -0.5]]
    score = np.array([[row, [-1.0, -4.0 - n, -np.inf]] for n, row in enumerate(first)])
    found = Repeats(score, np.array([3.0, 2.0]))
    assert found.picks().tolist() == [[0, 0], [1, 0], [2, 0]]
    assert found.flips().tolist() == [1.0, 0.0]
    assert found.accuracies(np.array([1, 0])).tolist() == [50.0, 100.0, 50.0]
    pair = two_best(score.mean(axis=0))
    assert found.difference_noise(pair) == pytest.approx([np.std([1, -1, 2], ddof=1), 1.0])


def falling(scale, power=-0.5, share=1.0, count=3):
    passes = share * np.array([2.0, 4.0, 8.0])[:, None] * np.ones(count)
    return Curve(passes, scale * (passes / share) ** power)


def test_passes_needed_by_hand():
    """Lines go on as independent masks do, and are not steeper than noise can fall."""
    found = passes_needed(falling(1.0), falling(3.0))
    assert found == {"value": pytest.approx(9.0), "error": pytest.approx(0, abs=1e-6)}
    assert passes_needed(falling(1.0), falling(3.0, share=0.5))["value"] == pytest.approx(4.5)
    # ours falls faster: noise 1/2, 1/4, 1/8; the other needs 4, 16, 64 passes for it
    times = passes_needed(falling(1.0, -1.0), falling(1.0))["value"]
    assert times == pytest.approx((2 * 4 * 8) ** (1 / 3))
    line = fit_line(*falling(1.0, -0.75).points())
    for passes, noise in ((4, 4**-0.75), (32, 8**-0.75 / 2), (0.5, 2 * 2**-0.75)):
        assert line.log_noise(math.log(passes)) == pytest.approx(math.log(noise))
        assert line.log_passes(math.log(noise)) == pytest.approx(math.log(passes))
    slopes = [fit_line(*falling(1.0, power).points()).slope for power in (-3.0, 0.5)]
    assert slopes == [-1.0, -0.25]
    none = Curve(falling(1.0).passes_DN, np.zeros((3, 3)))
    assert passes_needed(none, falling(1.0))["value"] == math.inf
    assert noise_at(np.full(3, 32.0), falling(2.0))["value"] == pytest.approx(2 / math.sqrt(32))
