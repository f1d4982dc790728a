"""Statistics of repeated scores by hand, and beside experiments."""

from __future__ import annotations

import math
from itertools import combinations

import numpy as np
import pytest

from bellmask.analyze.choice_noise import (
    Curve,
    Line,
    Repeats,
    fit_line,
    mean,
    noise_at,
    passes_needed,
    spread,
    squared_bias,
    two_best,
)


def test_repeats_by_hand() -> None:
    """Three repetitions of two questions, the second with two choices only."""
    score = np.array(
        [
            [[-1.0, -2.0, -3.0], [-1.0, -4.0, -np.inf]],
            [[-2.0, -1.0, -3.0], [-1.0, -5.0, -np.inf]],
            [[-1.0, -3.0, -0.5], [-1.0, -6.0, -np.inf]],
        ]
    )
    found = Repeats(score, np.array([3.0, 2.0]))
    assert found.picks().tolist() == [[0, 0], [1, 0], [2, 0]]
    assert found.flips().tolist() == [1.0, 0.0]
    assert found.accuracies(np.array([1, 0])).tolist() == [50.0, 100.0, 50.0]
    pair = two_best(score.mean(axis=0))
    assert pair.tolist() == [[0, 1], [0, 1]]
    assert found.difference_noise(pair) == pytest.approx([np.std([1, -1, 2], ddof=1), 1.0])
    rounded = score[:1] + np.array([0.0, 1e-9, -1e-9])[:, None, None] * np.arange(3)
    assert Repeats(rounded, np.ones(2)).difference_noise(pair).tolist() == [0.0, 0.0]


def test_flips_are_the_share_of_pairs_that_differ() -> None:
    picks = [0, 0, 1, 1, 2]
    score = np.full((5, 1, 3), -1.0)
    score[np.arange(5), 0, picks] = 0.0
    pairs = list(combinations(picks, 2))
    truth = sum(a != b for a, b in pairs) / len(pairs)
    assert Repeats(score, np.ones(1)).flips() == pytest.approx([truth])


def test_spread_and_mean_by_hand() -> None:
    found = spread(np.array([0.0, 0.0, 0.0, 4.0]))
    assert found["value"] == pytest.approx(2.0)
    assert found["error"] == pytest.approx(math.sqrt((21 - 16) / 4) / 4)
    assert spread(np.full(5, 3.0)) == {"value": 0.0, "error": 0.0}
    assert mean(np.array([1.0, 3.0])) == {"value": 2.0, "error": pytest.approx(1.0)}
    assert math.isnan(mean(np.array([1.0]))["error"])


def test_bias_is_not_noise() -> None:
    """An offset of 0.5 in both questions, seen through noise; an unbiased way has none."""
    draw = np.random.default_rng(5)
    pair = np.array([[0, 1]] * 400)
    score = draw.normal(size=(3, 8, 400, 2))
    score[2, :, :, 0] += 0.5
    truth, same, off = (Repeats(one, np.ones(400)) for one in score)
    noise = 4 / 8 / math.sqrt(400)  # of a mean square of normal numbers with variance 1/2 or so
    assert abs(squared_bias(same, truth, pair).mean()) < 4 * noise
    assert squared_bias(off, truth, pair).mean() == pytest.approx(0.25, abs=6 * noise)


def falling(scale: float, power: float = -0.5, share: float = 1.0, count: int = 3) -> Curve:
    passes = share * np.array([2.0, 4.0, 8.0])[:, None] * np.ones(count)
    return Curve(passes, scale * (passes / share) ** power)


def test_passes_needed_by_hand() -> None:
    fitted = fit_line(*falling(3.0).points())
    assert fitted is not None
    assert (fitted.start, fitted.slope) == pytest.approx((math.log(3), -0.5))
    found = passes_needed(falling(1.0), falling(3.0))
    assert found == {"value": pytest.approx(9.0), "error": pytest.approx(0, abs=1e-6)}
    assert passes_needed(falling(1.0), falling(3.0, share=0.5))["value"] == pytest.approx(4.5)
    # ours falls faster: noise 1/2, 1/4, 1/8; the other needs 4, 16, 64 passes for it
    times = passes_needed(falling(1.0, -1.0), falling(1.0))["value"]
    assert times == pytest.approx((2 * 4 * 8) ** (1 / 3))


def test_a_line_goes_on_as_independent_masks_do() -> None:
    fitted = fit_line(*falling(1.0, -0.75).points())
    assert fitted is not None
    assert (fitted.low, fitted.high) == pytest.approx((math.log(2), math.log(8)))
    for passes, noise in ((4, 4**-0.75), (8, 8**-0.75), (32, 8**-0.75 / 2), (0.5, 2 * 2**-0.75)):
        assert fitted.log_noise(math.log(passes)) == pytest.approx(math.log(noise))
        assert fitted.log_passes(math.log(noise)) == pytest.approx(math.log(passes))


def test_a_line_is_not_steeper_than_noise_can_fall() -> None:
    fits = [fit_line(*falling(1.0, power).points()) for power in (-3.0, 0.5)]
    assert [fitted and fitted.slope for fitted in fits] == [-1.0, -0.25]
    single = fit_line(np.array([4.0]), np.array([1.0]))
    assert single == Line(math.log(2), -0.5, math.log(4), math.log(4))


def test_without_noise_there_is_nothing_to_reach() -> None:
    none = Curve(falling(1.0).passes_DN, np.zeros((3, 3)))
    assert passes_needed(none, falling(1.0))["value"] == math.inf
    assert math.isnan(passes_needed(none, none)["value"])
    assert noise_at(np.full(3, 32.0), none)["value"] == 0
    assert noise_at(np.full(3, 32.0), falling(2.0))["value"] == pytest.approx(2 / math.sqrt(32))


def test_the_error_is_the_deviation_over_experiments() -> None:
    """Questions whose noise differs, and is measured with noise: the jackknife sees both."""
    draw = np.random.default_rng(3)
    found = []
    for _ in range(200):
        size = draw.gamma(4.0, size=20)
        ours, other = (
            Curve(
                falling(1.0, count=20).passes_DN, c.noise_DN * size * draw.gamma(20, size=(3, 20))
            )
            for c in (falling(1.0, count=20), falling(2.0, count=20))
        )
        found.append(passes_needed(ours, other))
    truth = np.std([one["value"] for one in found])
    assert np.mean([one["error"] for one in found]) == pytest.approx(truth, rel=0.15)
    assert np.mean([one["value"] for one in found]) == pytest.approx(4, rel=0.05)
