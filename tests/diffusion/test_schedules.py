"""Schedules against autograd, central differences and closed forms."""

import math

import numpy as np
import pytest
import torch
from law_tools import float64, scipy_gaussian

from bellmask.diffusion.laws import Dirac, TruncatedGaussian, TruncatedLaplace, Uniform
from bellmask.diffusion.schedules import Cosine, Linear, MiddleFlat, Polynomial

SMOOTH = [Linear(), Cosine(), Polynomial(0.5), Polynomial(2.0), Polynomial(3.7)]
MIDDLE_FLAT = [
    MiddleFlat(),
    MiddleFlat(TruncatedGaussian(0.3, 0.1)),
    MiddleFlat(TruncatedLaplace(0.6, 0.2)),
]
TIMES = torch.linspace(0.02, 0.98, 97, dtype=torch.float64)
every_schedule = pytest.mark.parametrize("schedule", [*SMOOTH, *MIDDLE_FLAT])


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


@pytest.mark.parametrize("schedule", SMOOTH)
def test_derivative_is_that_of_autograd(schedule):
    t = TIMES.clone().requires_grad_()
    (expected,) = torch.autograd.grad(schedule.alpha(t).sum(), t)
    torch.testing.assert_close(schedule.derivative(TIMES), expected, rtol=1e-13, atol=1e-13)


@every_schedule
def test_visible_share_falls_from_one_to_zero_and_inverse_undoes_it(schedule):
    alpha = schedule.alpha(torch.linspace(0, 1, 301, dtype=torch.float64))
    assert alpha[[0, -1]].tolist() == pytest.approx([1, 0], abs=1e-15)
    assert bool((alpha.diff() < 0).all())
    assert bool((schedule.derivative(TIMES) < 0).all())
    torch.testing.assert_close(schedule.inverse(schedule.alpha(TIMES)), TIMES, rtol=0, atol=1e-12)
    shares = torch.linspace(0.05, 0.8, 40, dtype=torch.float64)
    torch.testing.assert_close(schedule.alpha(schedule.inverse(shares)), shares, rtol=0, atol=1e-10)
    t = TIMES.float()
    for function in (schedule.alpha, schedule.derivative, schedule.weight):
        assert function(t).dtype == torch.float32
        torch.testing.assert_close(function(t).double(), function(t.double()), rtol=1e-5, atol=1e-6)
    assert schedule.inverse(t).dtype == torch.float32


@every_schedule
def test_weight_is_minus_the_derivative_of_log_mask_rate(schedule):
    """-alpha' / (1 - alpha) = d log(1 - alpha) / dt, by central differences; so alpha' itself."""
    step = 1e-5
    before, after = (schedule.alpha(TIMES + s) for s in (-step, step))
    smooth = torch.ones_like(TIMES, dtype=torch.bool)
    if schedule == MIDDLE_FLAT[2]:  # the kink of the Laplace law
        smooth = (schedule.alpha(TIMES) - 0.6).abs() > 1e-3
    for found, difference in (
        (schedule.weight, (torch.log(1 - after) - torch.log(1 - before)) / (2 * step)),
        (schedule.derivative, (after - before) / (2 * step)),
    ):
        torch.testing.assert_close(found(TIMES)[smooth], difference[smooth], rtol=1e-5, atol=0)


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
