"""Definition 4.1 against brute force: margins on a fine grid, with distributions of scipy."""

import math
from functools import partial

import numpy as np
import pytest
from scipy import optimize, special, stats

from bellmask.diffusion.bell_test import bell_test
from bellmask.diffusion.schedule import Cosine, Linear, MiddleFlat, Polynomial
from bellmask.diffusion.times import (
    DensityLaw,
    Dirac,
    TruncatedGaussian,
    TruncatedLaplace,
    Uniform,
)

GRID = np.linspace(0, 0.5, 20_001)[1:-1]
LOCATIONS = [-0.5, 0.0, 0.1, 0.2, 0.3, 0.35, 0.4, 0.45, 0.5, 0.6, 0.7, 0.9, 1.2]
SCALES = [0.02, 0.1, 0.2, 0.5, 3.0]


def gaussian_cdf(x, mu, scale):
    if mu < 0:  # work in the lower tail, where differences keep their digits
        return 1 - gaussian_cdf(1 - x, 1 - mu, scale)
    low, at, high = (special.ndtr((y - mu) / scale) for y in (0, x, 1))
    return (at - low) / (high - low)


def laplace_cdf(x, mu, scale):
    cdf = stats.laplace(np.clip(mu, 0, 1), scale).cdf
    return (cdf(x) - cdf(0)) / (cdf(1) - cdf(0))


KINDS = [(TruncatedGaussian, gaussian_cdf), (TruncatedLaplace, laplace_cdf)]


def brute_margins(cdf_of_rate):
    return cdf_of_rate(1 - GRID) - cdf_of_rate(GRID) - (1 - 2 * GRID)


def assert_agrees_with_brute_force(result, margins):
    """The grid misses an extremum by at most (spacing)^2 times the density's slope, about 1e-6."""
    assert result.is_bell_shaped == bool(margins.min() > -1e-9 and margins.max() > 1e-9)
    assert result.min_margin == pytest.approx(min(0, margins.min()), abs=5e-6)
    assert result.max_margin == pytest.approx(max(0, margins.max()), abs=5e-6)


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize(("law", "cdf"), KINDS, ids=["gaussian", "laplace"])
def test_verdict_and_margins_are_those_of_brute_force(law, cdf, scale):
    for mu in LOCATIONS:
        margins = brute_margins(partial(cdf, mu=mu, scale=scale))
        assert_agrees_with_brute_force(bell_test(law(mu, scale)), margins)


@pytest.mark.parametrize(
    ("law", "expected"),
    [
        (TruncatedGaussian(0.5, 0.1), True),
        (TruncatedGaussian(0.4, 0.1), True),
        (TruncatedGaussian(0.6, 0.1), True),
        (TruncatedGaussian(0.4, 0.2), True),
        (TruncatedLaplace(0.4, 0.1), True),
        (TruncatedLaplace(0.4, 0.2), True),
        (TruncatedGaussian(0.3, 0.1), False),
        (Dirac(0.5), True),
        (Dirac(0.4), False),
        (Uniform(), False),
    ],
)
def test_known_answers(law, expected):
    assert bell_test(law).is_bell_shaped is expected
    assert law.is_bell_shaped is expected


def test_gaussian_03_01_fails_by_0047():
    assert bell_test(TruncatedGaussian(0.3, 0.1)).min_margin == pytest.approx(-0.047, abs=5e-4)


@pytest.mark.parametrize(("mu", "sigma"), [(0.5, 0.1), (0.4, 0.1), (0.3, 0.1), (0.45, 0.3)])
def test_largest_margin_is_at_a_root_of_the_densities(mu, sigma):
    """f(a) + f(1 - a) = 2 at the argmax, found independently by scipy."""
    pdf = stats.truncnorm((0 - mu) / sigma, (1 - mu) / sigma, loc=mu, scale=sigma).pdf
    result = bell_test(TruncatedGaussian(mu, sigma))
    assert pdf(result.argmax) + pdf(1 - result.argmax) == pytest.approx(2, abs=1e-9)
    best = optimize.minimize_scalar(
        lambda a: -(gaussian_cdf(1 - a, mu, sigma) - gaussian_cdf(a, mu, sigma) - 1 + 2 * a),
        bounds=(result.argmax - 0.02, result.argmax + 0.02),
        method="bounded",
        options={"xatol": 1e-10},
    )
    assert result.max_margin == pytest.approx(-best.fun, abs=1e-13)


@pytest.mark.parametrize("law", [TruncatedGaussian, TruncatedLaplace])
@pytest.mark.parametrize("mu", [-0.3, 0.1, 0.25, 0.4])
@pytest.mark.parametrize("scale", [0.05, 0.2])
def test_mirrored_laws_agree(law, mu, scale):
    a, b = bell_test(law(mu, scale)), bell_test(law(1 - mu, scale))
    assert a.is_bell_shaped == b.is_bell_shaped
    assert a.min_margin == pytest.approx(b.min_margin, abs=1e-12)
    assert a.max_margin == pytest.approx(b.max_margin, abs=1e-12)
    assert a.argmax == pytest.approx(b.argmax, abs=1e-9)


def test_uniform_has_no_margin_at_all():
    result = bell_test(Uniform())
    assert not result.is_bell_shaped
    assert result.min_margin == pytest.approx(0, abs=1e-14)
    assert result.max_margin == pytest.approx(0, abs=1e-14)


@pytest.mark.parametrize(
    "law", [TruncatedGaussian(0.5, 1e4), TruncatedGaussian(0.5, 1e6), TruncatedLaplace(0.5, 1e4)]
)
def test_a_nearly_flat_symmetric_peak_is_still_a_bell(law):
    """By symmetry and unimodality, though the margin (1e-14 for 1e6) drowns in rounding."""
    assert bell_test(law).is_bell_shaped
    assert 0 <= bell_test(law).max_margin < 1e-4


@pytest.mark.parametrize("mu", [0.0, 0.1, 0.4, 0.5, 0.7, 1.0])
def test_dirac_margins_are_those_of_the_indicator(mu):
    margins = ((mu >= GRID) & (mu <= 1 - GRID)) - (1 - 2 * GRID)
    result = bell_test(Dirac(mu))
    assert result.is_bell_shaped is (mu == 0.5)
    assert result.min_margin == pytest.approx(min(0, margins.min()), abs=1e-4)
    assert result.max_margin == pytest.approx(max(0, margins.max()), abs=1e-4)
    assert result.argmax == pytest.approx(min(mu, 1 - mu), abs=1e-12)


def test_dirac_is_tested_on_the_mask_rate():
    """The cosine schedule hides half of the tokens at t = 1/3."""
    assert bell_test(Dirac(1 / 3), Cosine()).is_bell_shaped
    assert not bell_test(Dirac(0.5), Cosine()).is_bell_shaped
    assert bell_test(Dirac(math.sqrt(0.5)), Polynomial(2.0)).is_bell_shaped


def test_no_schedule_means_the_linear_one():
    law = TruncatedGaussian(0.3, 0.1)
    assert bell_test(law) == bell_test(law, Linear())


def rate_cdf_cosine(x):
    """P(sin(pi t / 2) <= x) = P(t <= 2 asin(x) / pi)."""
    return 2 * np.arcsin(x) / np.pi


@pytest.mark.parametrize(
    ("law", "schedule", "cdf_of_rate"),
    [
        (Uniform(), Cosine(), rate_cdf_cosine),
        (Uniform(), Polynomial(2.0), np.sqrt),
        (Uniform(), Polynomial(0.7), lambda x: x ** (1 / 0.7)),
        (TruncatedGaussian(), Cosine(), lambda x: gaussian_cdf(rate_cdf_cosine(x), 0.5, 0.1)),
        (
            TruncatedGaussian(1 / 3, 0.05),
            Cosine(),
            lambda x: gaussian_cdf(rate_cdf_cosine(x), 1 / 3, 0.05),
        ),
        (TruncatedGaussian(0.7, 0.1), Polynomial(2.0), lambda x: gaussian_cdf(x**0.5, 0.7, 0.1)),
        (
            TruncatedLaplace(0.3, 0.1),
            Polynomial(3.0),
            lambda x: laplace_cdf(x ** (1 / 3), 0.3, 0.1),
        ),
    ],
)
def test_under_a_schedule_the_mask_rate_is_tested(law, schedule, cdf_of_rate):
    assert_agrees_with_brute_force(bell_test(law, schedule), brute_margins(cdf_of_rate))


def test_a_schedule_turns_a_bell_of_times_into_no_bell_of_rates():
    assert TruncatedGaussian(0.5, 0.1).is_bell_shaped
    assert not bell_test(TruncatedGaussian(0.5, 0.1), Cosine()).is_bell_shaped
    assert not TruncatedGaussian(1 / 3, 0.05).is_bell_shaped
    assert bell_test(TruncatedGaussian(1 / 3, 0.05), Cosine()).is_bell_shaped


def test_uniform_under_the_square_root_has_margin_zero_everywhere():
    """Its rate has density 2m, so f(a) + f(1 - a) = 2 identically: never positive, not a bell."""
    result = bell_test(Uniform(), Polynomial(0.5))
    assert not result.is_bell_shaped
    assert result.max_margin == pytest.approx(0, abs=1e-13)


@pytest.mark.parametrize(("mu", "sigma"), [(0.5, 0.1), (0.4, 0.1), (0.3, 0.1)])
def test_middle_flat_under_uniform_times_is_as_bell_shaped_as_its_law(mu, sigma):
    """The mask rate then follows the mirrored law."""
    margins = brute_margins(partial(gaussian_cdf, mu=1 - mu, scale=sigma))
    result = bell_test(Uniform(), MiddleFlat(TruncatedGaussian(mu, sigma)))
    assert_agrees_with_brute_force(result, margins)


def test_a_density_law_is_tested_too():
    """Beta(3, 3) is a bell; Beta(3, 2), tilted, is not; a U shape is the opposite of one."""
    for power, cdf in ((2, stats.beta(3, 3).cdf), (1, stats.beta(3, 2).cdf)):
        law = DensityLaw(lambda t, power=power: t**2 * (1 - t) ** power)
        assert_agrees_with_brute_force(bell_test(law), brute_margins(cdf))
    valley = bell_test(DensityLaw(lambda t: (t - 0.5) ** 2))
    assert not valley.is_bell_shaped
    assert valley.max_margin == 0
    # F(x) = 1/2 + 4 (x - 1/2)^3, so the margin is 8 s^3 - 2 s with s = 1/2 - a, least at s^2 = 1/12
    assert valley.min_margin == pytest.approx(8 / 12**1.5 - 2 / 12**0.5, abs=1e-13)
