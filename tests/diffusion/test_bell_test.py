"""Definition 4.1 against brute force: margins on a fine grid, with distributions of scipy."""

import math

import numpy as np
import pytest
from law_tools import scipy_laplace
from scipy import special, stats

from bellmask.diffusion.laws import DensityLaw, Dirac, TruncatedGaussian, TruncatedLaplace, Uniform
from bellmask.diffusion.schedules import Cosine, Linear, MiddleFlat, Polynomial
from bellmask.diffusion.theory import bell_test

GRID = np.linspace(0, 0.5, 20_001)[1:-1]


def gaussian_cdf(mu, scale):
    """By differences in the lower tail, where they keep their digits."""
    if mu < 0:
        return lambda x: 1 - gaussian_cdf(1 - mu, scale)(1 - x)
    low, high = (special.ndtr((y - mu) / scale) for y in (0, 1))
    return lambda x: (special.ndtr((x - mu) / scale) - low) / (high - low)


def laplace_cdf(mu, scale):
    return scipy_laplace(mu, scale).cdf


KINDS = [(TruncatedGaussian, gaussian_cdf), (TruncatedLaplace, laplace_cdf)]


def assert_agrees_with_brute_force(result, cdf_of_rate):
    """The grid misses an extremum by at most (spacing)^2 times the density's slope, about 1e-6."""
    margins = cdf_of_rate(1 - GRID) - cdf_of_rate(GRID) - (1 - 2 * GRID)
    assert result.is_bell_shaped == bool(margins.min() > -1e-9 and margins.max() > 1e-9)
    assert result.min_margin == pytest.approx(min(0, margins.min()), abs=5e-6)
    assert result.max_margin == pytest.approx(max(0, margins.max()), abs=5e-6)


@pytest.mark.parametrize("scale", [0.02, 0.1, 0.2, 0.5, 3.0])
@pytest.mark.parametrize(("law", "cdf"), KINDS, ids=["gaussian", "laplace"])
def test_verdict_and_margins_are_those_of_brute_force(law, cdf, scale):
    locations = [-0.5, 0.0, 0.1, 0.25, 0.35, 0.45, 0.5, 0.75, 0.9, 1.2]
    found = {mu: bell_test(law(mu, scale)) for mu in locations}
    for mu, result in found.items():
        assert_agrees_with_brute_force(result, cdf(mu, scale))
    for mu in (0.1, 0.25):
        assert found[mu].argmax == pytest.approx(found[1 - mu].argmax, abs=1e-9)
    assert found[0.25] == bell_test(law(0.25, scale), Linear())


def test_flat_margins():
    """Uniform; uniform under a square root, whose rate has density 2m, so f(a) + f(1 - a) = 2; and
    a nearly flat peak, a bell by symmetry, though the margin (1e-14 for 1e6) drowns in rounding.
    """
    for result in (bell_test(Uniform()), bell_test(Uniform(), Polynomial(0.5))):
        assert not result.is_bell_shaped
        assert result.min_margin == pytest.approx(0, abs=1e-13)
        assert result.max_margin == 0
    for law in (
        TruncatedGaussian(0.5, 1e4),
        TruncatedGaussian(0.5, 1e6),
        TruncatedLaplace(0.5, 1e4),
    ):
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


def cosine_time(x):
    """P(sin(pi t / 2) <= x) = P(t <= 2 asin(x) / pi)."""
    return 2 * np.arcsin(x) / np.pi


@pytest.mark.parametrize(
    ("law", "schedule", "cdf"),
    [
        (Uniform(), Cosine(), cosine_time),
        (Uniform(), Polynomial(2.0), np.sqrt),
        (Uniform(), Polynomial(0.7), lambda x: x ** (1 / 0.7)),
        # a bell of times that is none of rates, and the other way round
        (TruncatedGaussian(), Cosine(), lambda x: gaussian_cdf(0.5, 0.1)(cosine_time(x))),
        (
            TruncatedGaussian(1 / 3, 0.05),
            Cosine(),
            lambda x: gaussian_cdf(1 / 3, 0.05)(cosine_time(x)),
        ),
        (
            TruncatedLaplace(0.3, 0.1),
            Polynomial(3.0),
            lambda x: laplace_cdf(0.3, 0.1)(x ** (1 / 3)),
        ),
        # under uniform times the rate of middle-flat follows the mirrored law
        (Uniform(), MiddleFlat(TruncatedGaussian(0.3, 0.1)), gaussian_cdf(0.7, 0.1)),
        (DensityLaw(lambda t: t**2 * (1 - t) ** 2), None, stats.beta(3, 3).cdf),
        (DensityLaw(lambda t: t**2 * (1 - t)), None, stats.beta(3, 2).cdf),
    ],
)
def test_under_a_schedule_the_mask_rate_is_tested(law, schedule, cdf):
    assert_agrees_with_brute_force(bell_test(law, schedule), cdf)


def test_dirac_is_tested_on_the_mask_rate():
    """The cosine schedule hides half of the tokens at t = 1/3."""
    assert bell_test(Dirac(1 / 3), Cosine()).is_bell_shaped
    assert not bell_test(Dirac(0.5), Cosine()).is_bell_shaped
    assert bell_test(Dirac(math.sqrt(0.5)), Polynomial(2.0)).is_bell_shaped
