"""Schedules against autograd, central differences and closed forms."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import integrate, stats

from bellmask.diffusion.schedule import Cosine, Linear, MiddleFlat, Polynomial
from bellmask.diffusion.times import Dirac, TruncatedGaussian, TruncatedLaplace, Uniform

SMOOTH = [Linear(), Cosine(), Polynomial(0.5), Polynomial(1.0), Polynomial(2.0), Polynomial(3.7)]
MIDDLE_FLAT = [
    MiddleFlat(),
    MiddleFlat(TruncatedGaussian(0.3, 0.1)),
    MiddleFlat(TruncatedLaplace(0.6, 0.2)),
]
TIMES = torch.linspace(0.02, 0.98, 97, dtype=torch.float64)
ENDS = torch.tensor([0.0, 1.0], dtype=torch.float64)


def scipy_gaussian(mu, sigma):
    return stats.truncnorm((0 - mu) / sigma, (1 - mu) / sigma, loc=mu, scale=sigma)


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


@pytest.mark.parametrize("schedule", MIDDLE_FLAT)
def test_derivative_of_middle_flat_is_a_central_difference(schedule):
    step = 1e-5
    difference = (schedule.alpha(TIMES + step) - schedule.alpha(TIMES - step)) / (2 * step)
    kink = (schedule.alpha(TIMES) - schedule.law.mu).abs() < 1e-3  # of the Laplace law
    torch.testing.assert_close(
        schedule.derivative(TIMES)[~kink], difference[~kink], rtol=1e-5, atol=0
    )


@pytest.mark.parametrize(("mu", "sigma"), [(0.5, 0.1), (0.3, 0.1), (0.9, 0.4)])
def test_derivative_of_middle_flat_is_minus_one_over_the_density(mu, sigma):
    reference = scipy_gaussian(mu, sigma)
    expected = -1 / reference.pdf(reference.isf(TIMES.numpy()))
    got = MiddleFlat(TruncatedGaussian(mu, sigma)).derivative(TIMES)
    np.testing.assert_allclose(got, expected, rtol=1e-9)


@pytest.mark.parametrize("schedule", [*SMOOTH, *MIDDLE_FLAT])
def test_everything_is_visible_at_zero_and_nothing_at_one(schedule):
    assert schedule.alpha(ENDS).tolist() == pytest.approx([1, 0], abs=1e-15)


@pytest.mark.parametrize("schedule", [*SMOOTH, *MIDDLE_FLAT])
def test_visible_share_falls(schedule):
    alpha = schedule.alpha(torch.linspace(0, 1, 301, dtype=torch.float64))
    assert bool((alpha.diff() < 0).all())
    assert bool((schedule.derivative(TIMES) < 0).all())


@settings(deadline=None, derandomize=True)
@given(schedule=st.sampled_from([*SMOOTH, *MIDDLE_FLAT]), alpha=st.floats(0.05, 0.8))
def test_inverse_gives_the_time_of_a_visible_share(schedule, alpha):
    alpha = torch.tensor([alpha], dtype=torch.float64)
    t = schedule.inverse(alpha)
    assert 0 <= float(t) <= 1
    torch.testing.assert_close(schedule.alpha(t), alpha, rtol=0, atol=1e-10)


@pytest.mark.parametrize("schedule", [*SMOOTH, *MIDDLE_FLAT])
def test_inverse_undoes_alpha(schedule):
    torch.testing.assert_close(schedule.inverse(schedule.alpha(TIMES)), TIMES, rtol=0, atol=1e-12)


@pytest.mark.parametrize("schedule", [*SMOOTH, *MIDDLE_FLAT])
def test_weight_is_minus_the_derivative_of_log_mask_rate(schedule):
    """-alpha' / (1 - alpha) = d log(1 - alpha) / dt, by central differences."""
    step = 1e-5
    log_rate = [torch.log(1 - schedule.alpha(TIMES + s)) for s in (-step, step)]
    difference = (log_rate[1] - log_rate[0]) / (2 * step)
    smooth = torch.ones_like(TIMES, dtype=torch.bool)
    if schedule == MIDDLE_FLAT[2]:
        smooth = (schedule.alpha(TIMES) - 0.6).abs() > 1e-3
    torch.testing.assert_close(
        schedule.weight(TIMES)[smooth], difference[smooth], rtol=1e-5, atol=0
    )


@pytest.mark.parametrize("schedule", SMOOTH)
@pytest.mark.parametrize("t", [1e-3, 1e-8, 1e-14])
def test_weight_keeps_its_digits_near_zero(schedule, t):
    """power / t, and 1 / t (1 + O(t^2)) for the cosine: 1 - alpha itself would have lost them."""
    power = getattr(schedule, "power", 1.0)
    expected = power / t if not isinstance(schedule, Cosine) else 1 / t - math.pi**2 * t / 12
    assert float(schedule.weight(torch.tensor(t, dtype=torch.float64))) == pytest.approx(
        expected, rel=1e-12
    )


@pytest.mark.parametrize("power", [0.0, -1.0, math.inf, math.nan])
def test_a_power_that_is_not_positive_is_refused(power):
    with pytest.raises(ValueError, match="power > 0"):
        Polynomial(power)


def test_middle_flat_of_a_point_mass_is_refused():
    with pytest.raises(ValueError, match="density"):
        MiddleFlat(Dirac(0.5))


@pytest.mark.parametrize(("mu", "sigma"), [(0.5, 0.1), (0.3, 0.1), (0.8, 0.2)])
def test_under_uniform_times_the_visible_share_follows_the_law(mu, sigma):
    """And so the mask rate follows the mirrored one."""
    t = torch.rand(5000, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    alpha = MiddleFlat(TruncatedGaussian(mu, sigma)).alpha(t).numpy()
    assert stats.kstest(alpha, scipy_gaussian(mu, sigma).cdf).pvalue > 1e-3
    assert stats.kstest(1 - alpha, scipy_gaussian(1 - mu, sigma).cdf).pvalue > 1e-3
    if mu != 0.5:
        assert stats.kstest(1 - alpha, scipy_gaussian(mu, sigma).cdf).pvalue < 1e-6


@pytest.mark.parametrize("mu", [0.3, 0.5, 0.65])
def test_mean_mask_rate_of_middle_flat_is_one_minus_mu(mu):
    """Up to the truncation, which is below 1e-3 for three sigma."""
    schedule = MiddleFlat(TruncatedGaussian(mu, 0.1))
    levels = (torch.arange(20_000, dtype=torch.float64) + 0.5) / 20_000
    mean = float((1 - schedule.alpha(levels)).mean())
    assert mean == pytest.approx(1 - scipy_gaussian(mu, 0.1).mean(), abs=1e-5)
    assert mean == pytest.approx(1 - mu, abs=1e-3)


def test_two_of_512_stratified_samples_carry_42_percent_of_the_visible_shares():
    """The first and the last stratum of times under middle-flat."""
    edges = MiddleFlat().alpha(torch.tensor([1 / 512, 511 / 512], dtype=torch.float64))
    assert float(1 - edges[0] + edges[1]) == pytest.approx(0.42, abs=5e-3)


def test_second_moment_of_the_middle_flat_weights_is_2815():
    """E over uniform t of (w (1 - alpha))^2 = the integral of 1/f; 1 if linear."""
    reference, schedule = scipy_gaussian(0.5, 0.1), MiddleFlat()

    def from_the_code(a):
        """The integrand at t = 1 - F(a), where dt = f(a) da."""
        t = torch.tensor(reference.sf(a), dtype=torch.float64)
        return reference.pdf(a) * float(schedule.weight(t) * (1 - schedule.alpha(t))) ** 2

    moment = integrate.quad(from_the_code, 0, 1, points=[0.1, 0.9], epsrel=1e-8)[0]
    exact = integrate.quad(lambda a: 1 / reference.pdf(a), 0, 1, points=[0.1, 0.9])[0]
    assert moment == pytest.approx(exact, rel=1e-6)
    assert round(moment) == 2815
    torch.testing.assert_close(Linear().weight(TIMES) * (1 - Linear().alpha(TIMES)), TIMES**0)


@pytest.mark.parametrize("schedule", [*SMOOTH, *MIDDLE_FLAT])
def test_float32_times_give_float32_results_close_to_float64(schedule):
    t = TIMES.float()
    for function in (schedule.alpha, schedule.derivative, schedule.weight):
        assert function(t).dtype == torch.float32
        torch.testing.assert_close(function(t).double(), function(t.double()), rtol=1e-5, atol=1e-6)
    assert schedule.inverse(t).dtype == torch.float32
