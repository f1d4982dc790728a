"""Length control by two terms: known effects, coverage, a second solver, separation."""

from __future__ import annotations

import math

import numpy as np
import pytest
from numpy.typing import NDArray

from bellmask.errors import UserError
from bellmask.judge.length_control import RIDGE, LengthControlled, fit, separates, two_term

Floats = NDArray[np.float64]


def logistic(z: Floats) -> Floats:
    return 1 / (1 + np.exp(-z))


def made_up(
    draw: np.random.Generator, count: int, constant: float, slope: float, noise: float = 0.0
) -> tuple[Floats, Floats, Floats]:
    """(preferences of coin tosses, lengths of A, lengths of B): A is longer, and length helps."""
    length_a, length_b = draw.integers(200, 3000, count), draw.integers(100, 2000, count)
    difference = (length_a - length_b).astype(np.float64)
    x = np.tanh(difference / difference.std(ddof=1))
    p = logistic(constant + slope * x + noise * draw.normal(size=count))
    y = p if noise else (draw.random(count) < p).astype(np.float64)
    return y, length_a.astype(np.float64), length_b.astype(np.float64)


def test_a_known_effect_is_recovered_where_the_plain_rate_is_wrong() -> None:
    """60 % at equal length; the plain rate is carried up by length."""
    constant = math.log(0.6 / 0.4)
    y, a, b = made_up(np.random.default_rng(1), 4000, constant, 2.0)
    found = two_term(y, a, b)
    assert abs(found.rate - 0.6) < 3 * found.error
    assert found.error < 0.02
    assert y.mean() > 0.7
    assert found.slope == pytest.approx(2.0, abs=0.3)
    assert found.scale == pytest.approx(np.std(a - b, ddof=1))
    assert found.note is None


def test_soft_labels_without_noise_give_the_effect_exactly() -> None:
    _, a, b = made_up(np.random.default_rng(2), 60, 0.0, 0.0)
    x = np.tanh((a - b) / (a - b).std(ddof=1))
    found = two_term(logistic(-1.2 + 0.7 * x), a, b)
    assert found.constant == pytest.approx(-1.2, abs=1e-9)
    assert found.slope == pytest.approx(0.7, abs=1e-9)
    assert found.rate == pytest.approx(logistic(np.array(-1.2)), abs=1e-9)
    assert found.error == pytest.approx(0, abs=1e-9)


@pytest.mark.parametrize(("constant", "slope"), [(0.0, 0.0), (-1.2, 2.0)])
def test_the_error_covers_the_truth_as_often_as_it_says(constant: float, slope: float) -> None:
    """±1.96 errors: 95 % of 500 sets of 200, within three errors of that share (1 % each)."""
    draw = np.random.default_rng(3)
    truth, hits, found = float(logistic(np.array(constant))), 0, []
    for _ in range(500):
        one = two_term(*made_up(draw, 200, constant, slope))
        hits += abs(one.rate - truth) < 1.96 * one.error
        found.append((one.rate, one.error))
    rates, errors = np.array(found).T
    assert 0.92 <= hits / 500 <= 0.98
    assert errors.mean() == pytest.approx(rates.std(ddof=1), rel=0.1)


def test_soft_labels_need_the_sandwich() -> None:
    """Their spread is not that of coin tosses, which would give an error twice too large."""
    draw = np.random.default_rng(4)
    found = [two_term(*made_up(draw, 150, 0.3, 1.0, noise=1.0)) for _ in range(300)]
    spread = np.std([one.rate for one in found], ddof=1)
    assert np.mean([one.error for one in found]) == pytest.approx(spread, rel=0.12)


def test_turns_of_one_task_are_one_observation() -> None:
    y, a, b = made_up(np.random.default_rng(5), 100, 0.5, 1.0)
    single = two_term(y, a, b)
    double = two_term(*(np.repeat(part, 2) for part in (y, a, b)), np.repeat(np.arange(100), 2))
    naive = two_term(*(np.repeat(part, 2) for part in (y, a, b)))
    assert double.rate == pytest.approx(single.rate, rel=5e-3)  # the scale's n - 1
    assert double.error == pytest.approx(single.error, rel=1e-2)
    assert naive.error == pytest.approx(single.error / math.sqrt(2), rel=1e-2)


def test_swapping_the_models_gives_one_minus_the_rate() -> None:
    y, a, b = made_up(np.random.default_rng(6), 80, 0.5, 1.0)
    one, two = two_term(y, a, b), two_term(1 - y, b, a)
    assert two.rate == pytest.approx(1 - one.rate, abs=1e-9)
    assert two.error == pytest.approx(one.error, rel=1e-6)


def test_newton_finds_the_maximum_that_scipy_finds() -> None:
    optimize = pytest.importorskip("scipy.optimize")
    draw = np.random.default_rng(7)
    for ridge in (0.0, 0.3):
        x = np.stack([np.ones(50), draw.normal(size=50)], 1)
        y = draw.random(50)

        def objective(b: Floats, x: Floats = x, y: Floats = y, ridge: float = ridge) -> float:
            p = logistic(x @ b)
            return float(-(y * np.log(p) + (1 - y) * np.log(1 - p)).sum() + ridge / 2 * b @ b)

        slow = optimize.minimize(objective, np.zeros(2), method="Nelder-Mead", tol=1e-12)
        np.testing.assert_allclose(fit(x, y, ridge=ridge), slow.x, atol=1e-5)


@pytest.mark.parametrize(
    ("won", "difference", "expected"),
    [
        ([1, 1, 1, 1], [-1, 0, 2, 3], True),  # all won
        ([0, 0, 1, 1], [-2, -1, 1, 2], True),  # longer won
        ([1, 1, 0, 0], [-2, -1, 1, 2], True),  # shorter won
        ([0, 1, 0, 1], [-2, 1, 1, 2], True),  # both at the threshold
        ([0, 1, 0, 1], [-2, -1, 1, 2], False),
        ([0.5, 1, 1, 1], [-2, -1, 1, 2], True),
        ([1, 0.5, 1, 1], [-2, -1, 1, 2], False),
    ],
)
def test_separation_is_found_and_only_there_a_ridge_is_used(
    won: list[float], difference: list[float], expected: bool
) -> None:
    """Where it is not, the likelihood has a maximum: a fit without ridge has no slope left."""
    y, x = np.array(won, dtype=np.float64), np.array(difference, dtype=np.float64)
    assert separates(x, y) is expected
    found = two_term(y, x + 100, np.full(4, 100.0))
    assert math.isfinite(found.rate)
    assert (found.note is not None) is expected
    assert math.isnan(found.error) is expected
    if not expected:
        design = np.stack([np.ones(4), np.tanh(x / x.std(ddof=1))], 1)
        left = design.T @ (logistic(design @ [found.constant, found.slope]) - y)
        np.testing.assert_allclose(left, 0, atol=1e-8)


def test_a_model_that_always_wins_has_a_rate_near_one_that_says_how_it_was_made() -> None:
    y, a, b = made_up(np.random.default_rng(8), 80, 9.0, 0.0)
    found = two_term(np.ones_like(y), a, b)
    assert 0.99 < found.rate < 1
    assert f"ridge of {RIDGE}" in (found.note or "")


def test_lengths_that_do_not_differ() -> None:
    y = np.array([1.0, 0.0, 1.0, 1.0])
    same = two_term(y, np.full(4, 7.0), np.full(4, 7.0))
    assert same.rate == 0.75
    assert same.error == pytest.approx(y.std(ddof=1) / 2)
    assert "plain win rate" in (same.note or "")
    shifted = two_term(y, np.full(4, 9.0), np.full(4, 7.0))
    assert math.isnan(shifted.rate)
    assert "cannot be told" in (shifted.note or "")
    assert isinstance(two_term(np.ones(1), np.ones(1), np.ones(1)), LengthControlled)


@pytest.mark.parametrize(
    ("y", "a", "message"),
    [
        ([], [], "got 0 preferences and 0 pairs"),
        ([0.5, 0.5], [1.0], "got 2 preferences and 1 pairs"),
        ([1.5, 0.5], [1.0, 2.0], "preferences from 0 to 1"),
        ([math.nan, 0.5], [1.0, 2.0], "preferences from 0 to 1"),
        ([0.5, 0.5], [math.inf, 2.0], "finite lengths"),
    ],
)
def test_impossible_inputs_are_refused(y: list[float], a: list[float], message: str) -> None:
    with pytest.raises(UserError, match=message):
        two_term(np.array(y), np.array(a), np.zeros(len(a)))
