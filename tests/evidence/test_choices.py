"""Noise of multiple choice: statistics by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
from choices import Curve, Repeats, fit_line, noise_at, passes_needed, two_best


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
    slopes = [fit_line(*falling(1.0, power).points()).slope for power in (-3.0, 0.5)]
    assert slopes == [-1.0, -0.25]
    none = Curve(falling(1.0).passes_DN, np.zeros((3, 3)))
    assert passes_needed(none, falling(1.0))["value"] == math.inf
    assert noise_at(np.full(3, 32.0), falling(2.0))["value"] == pytest.approx(2 / math.sqrt(32))
