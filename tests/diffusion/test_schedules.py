"""Schedules against autograd, central differences and closed forms."""

import math

import numpy as np
import pytest
import torch
from law_tools import float64, scipy_gaussian

from bellmask.diffusion.laws import Dirac, TruncatedGaussian, TruncatedLaplace, Uniform
from bellmask.diffusion.schedules import Cosine, Linear, MiddleFlat, Polynomial

SMOOTH = [Linear(), Cosine(), Polynomial(0.5), Polynomial(2.0), Polynomial(3.7)]
LAPLACE = MiddleFlat(TruncatedLaplace(0.6, 0.2))
TIMES = torch.linspace(0.02, 0.98, 97, dtype=torch.float64)


@pytest.mark.parametrize(
    ("schedule", "formula"),
    [
        (Linear(), lambda t: 1 - t),
        (Cosine(), lambda t: 1 - np.cos(np.pi / 2 * (1 - t))),
        (Polynomial(2.0), lambda t: 1 - t * t),
        (MiddleFlat(), lambda t: scipy_gaussian(0.5, 0.1).ppf(1 - t)),
        (MiddleFlat(TruncatedGaussian(0.3, 0.2)), lambda t: scipy_gaussian(0.3, 0.2).isf(t)),
        (MiddleFlat(Uniform()), lambda t: 1 - t),
    ],
)
def test_visible_share_is_the_formula(schedule, formula):
    np.testing.assert_allclose(schedule.alpha(TIMES), formula(TIMES.numpy()), atol=1e-12)


@pytest.mark.parametrize("schedule", [*SMOOTH, MiddleFlat(), LAPLACE])
def test_inverse_undoes_it_and_derivative_and_weight_are_central_differences(schedule):
    """-alpha' / (1 - alpha) = d log(1 - alpha) / dt."""
    ends = schedule.alpha(float64([0, 1]))
    assert ends.tolist() == pytest.approx([1, 0], abs=1e-15)
    torch.testing.assert_close(schedule.inverse(schedule.alpha(TIMES)), TIMES, rtol=0, atol=1e-12)
    step, is_smooth = 1e-5, torch.ones_like(TIMES, dtype=torch.bool)
    before, after = (schedule.alpha(TIMES + s) for s in (-step, step))
    if schedule == LAPLACE:  # a kink
        is_smooth = (schedule.alpha(TIMES) - 0.6).abs() > 1e-3
    for found, difference in (
        (schedule.weight, (torch.log(1 - after) - torch.log(1 - before)) / (2 * step)),
        (schedule.derivative, (after - before) / (2 * step)),
    ):
        closeness = {"rtol": 1e-5, "atol": 0}
        torch.testing.assert_close(found(TIMES)[is_smooth], difference[is_smooth], **closeness)
    for function in (schedule.alpha, schedule.derivative, schedule.weight, schedule.inverse):
        in_float32 = function(TIMES.float())
        assert in_float32.dtype == torch.float32
        expected = function(TIMES.float().double())
        torch.testing.assert_close(in_float32.double(), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("schedule", SMOOTH)
@pytest.mark.parametrize("t", [1e-3, 1e-8, 1e-14])
def test_weight_keeps_its_digits_near_zero(schedule, t):
    """power / t, and 1 / t (1 + O(t^2)) for the cosine: 1 - alpha itself would have lost them."""
    power = getattr(schedule, "power", 1.0)
    expected = power / t if not isinstance(schedule, Cosine) else 1 / t - math.pi**2 * t / 12
    assert float(schedule.weight(float64(t))) == pytest.approx(expected, rel=1e-12)


def test_impossible_schedules_are_refused():
    for power in (0.0, -1.0, math.inf, math.nan):
        with pytest.raises(ValueError, match="power"):
            Polynomial(power)
    with pytest.raises(ValueError, match="density"):
        MiddleFlat(Dirac(0.5))
