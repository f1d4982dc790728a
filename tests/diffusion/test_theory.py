"""The bell test against brute force; context weights and numbers of masks against scipy."""

import math

import numpy as np
import pytest
import torch
from law_tools import scipy_gaussian, scipy_laplace
from scipy import integrate, special, stats

from bellmask.diffusion.laws import DensityLaw, Dirac, TruncatedGaussian, TruncatedLaplace, Uniform
from bellmask.diffusion.objectives import Bell, ChainRule, Importance, Nelbo, Objective
from bellmask.diffusion.schedules import Cosine, Linear, MiddleFlat, Polynomial
from bellmask.diffusion.theory import CountLaw, bell_test, context_weights

# Definition 4.1


GRID = np.linspace(0, 0.5, 20_001)[1:-1]


def gaussian_cdf(mu, scale):
    """By differences in the lower tail, where they keep their digits."""
    if mu < 0:
        return lambda x: 1 - gaussian_cdf(1 - mu, scale)(1 - x)
    low, high = (special.ndtr((y - mu) / scale) for y in (0, 1))
    return lambda x: (special.ndtr((x - mu) / scale) - low) / (high - low)


def laplace_cdf(mu, scale):
    return scipy_laplace(mu, scale).cdf


def assert_agrees_with_brute_force(result, mass, error=5e-6):
    """``mass``: P(a <= rate <= 1 - a) on the grid, which misses an extremum by at most
    (spacing)^2 times the density's slope, about 1e-6."""
    margins = mass - (1 - 2 * GRID)
    assert result.is_bell_shaped == bool(margins.min() > -1e-9 and margins.max() > 1e-9)
    assert result.min_margin == pytest.approx(min(0, margins.min()), abs=error)
    assert result.max_margin == pytest.approx(max(0, margins.max()), abs=error)
    if margins.max() > 1e-3:
        assert margins[np.searchsorted(GRID, result.argmax) - 1] > margins.max() - 1e-4


@pytest.mark.parametrize("scale", [0.02, 0.2, 3.0])
@pytest.mark.parametrize("mu", [-0.5, 0.0, 0.1, 0.25, 0.45, 0.5, 0.75, 1.2])
@pytest.mark.parametrize(
    ("law", "cdf"),
    [(TruncatedGaussian, gaussian_cdf), (TruncatedLaplace, laplace_cdf)],
    ids=["gaussian", "laplace"],
)
def test_verdict_and_margins_are_those_of_brute_force(law, cdf, mu, scale):
    cdf = cdf(mu, scale)
    assert_agrees_with_brute_force(bell_test(law(mu, scale)), cdf(1 - GRID) - cdf(GRID))


def test_flat_margins():
    """Uniform; uniform under a square root, whose rate has density 2m, so f(a) + f(1 - a) = 2; and
    a nearly flat peak, a bell by symmetry, though the margin (1e-14 for 1e6) drowns in rounding.
    """
    for result in (bell_test(Uniform()), bell_test(Uniform(), Polynomial(0.5))):
        assert not result.is_bell_shaped
        assert result.min_margin == pytest.approx(0, abs=1e-13)
        assert result.max_margin == 0
    for law in (TruncatedGaussian(0.5, 1e6), TruncatedLaplace(0.5, 1e4)):
        assert bell_test(law).is_bell_shaped
        assert 0 <= bell_test(law).max_margin < 1e-4


@pytest.mark.parametrize(
    ("mu", "schedule", "rate"),
    [(mu, None, mu) for mu in (0.0, 0.1, 0.4, 0.5, 0.7, 1.0)]
    # the cosine schedule hides half of the tokens at t = 1/3
    + [(1 / 3, Cosine(), 0.5), (0.5, Cosine(), 0.5**0.5), (0.5**0.5, Polynomial(2.0), 0.5)],
)
def test_a_point_mass_is_tested_on_its_mask_rate(mu, schedule, rate):
    result = bell_test(Dirac(mu), schedule)
    assert_agrees_with_brute_force(result, (rate >= GRID) & (rate <= 1 - GRID), 1e-4)
    assert result.argmax == pytest.approx(min(rate, 1 - rate), abs=1e-12)


def cosine_time(x):
    """P(sin(pi t / 2) <= x) = P(t <= 2 asin(x) / pi)."""
    return 2 * np.arcsin(x) / np.pi


THIRD = TruncatedGaussian(1 / 3, 0.05)


@pytest.mark.parametrize(
    ("law", "schedule", "cdf"),
    [
        (Uniform(), Cosine(), cosine_time),
        (Uniform(), Polynomial(0.7), lambda x: x ** (1 / 0.7)),
        # a bell of times that is none of rates, and the other way round
        (TruncatedGaussian(), Cosine(), lambda x: gaussian_cdf(0.5, 0.1)(cosine_time(x))),
        (THIRD, Cosine(), lambda x: gaussian_cdf(1 / 3, 0.05)(cosine_time(x))),
        # under uniform times the rate of middle-flat follows the mirrored law
        (Uniform(), MiddleFlat(TruncatedGaussian(0.3, 0.1)), gaussian_cdf(0.7, 0.1)),
        (DensityLaw(lambda t: t**2 * (1 - t) ** 2), None, stats.beta(3, 3).cdf),
        (DensityLaw(lambda t: t**2 * (1 - t)), None, stats.beta(3, 2).cdf),
    ],
)
def test_under_a_schedule_the_mask_rate_is_tested(law, schedule, cdf):
    assert_agrees_with_brute_force(bell_test(law, schedule), cdf(1 - GRID) - cdf(GRID))


# context weights; tests/diffusion/test_objectives.py has those of four tokens for all objectives


@pytest.mark.parametrize(
    "objective",
    [
        Nelbo(schedule=Polynomial(2.0), time_floor=0.3),
        Bell(TruncatedGaussian(0.2, 1e-4)),
        Bell(TruncatedGaussian(-3.0, 0.05)),
        Bell(DensityLaw(lambda t: t**2 * (1 - t))),
        Bell(Uniform(), Polynomial(8.0)),
        Importance(TruncatedLaplace(0.6, 0.1)),
        Importance(TruncatedGaussian(0.1, 0.3), divide_by_t=True),
        ChainRule(),
    ],
)
def test_weights_sum_to_length_times_normalizer(objective):
    for length in (1, 37, 400):
        omega = context_weights(objective, length)
        assert (omega.dtype, omega.shape) == (torch.float64, (length,))
        assert bool((omega >= 0).all())
        assert float(omega.sum()) == pytest.approx(length * objective.normalizer, rel=1e-11)


def test_printed_numbers_of_the_default_bell():
    """Relative to base, omega / c, for blocks of 128; and how often no token is observed."""
    omega = context_weights(Bell(TruncatedGaussian(0.5, 0.1)), 128)
    relative = [f"{x:.2g}" for x in (omega / 0.5)[[0, 16, 32, 64, 96]].tolist()]
    assert relative == ["4.7e-05", "0.013", "0.4", "3.6", "0.13"]
    # P(all masked) = omega(0) / L, the weight being one
    assert round(1e6 * float(omega[0]) / 128, 2) == 0.18


@pytest.mark.parametrize("length", [1, 5, 1000])
def test_weights_that_are_known_in_closed_form(length):
    """A point mass: the binomial. The uniform bell: the integral of t^(L-n) (1-t)^n is
    1 / ((L+1) C(L, n)), so omega = (L - n) / (L + 1). NELBO without a floor: exactly one.
    """
    n = np.arange(length)
    for mu, schedule, alpha in (
        (0.3, Linear(), 0.7),
        (1 / 3, Cosine(), 0.5),
        (1, Linear(), 0),
    ):
        expected = (length - n) * stats.binom(length, alpha).pmf(n)
        got = context_weights(Bell(Dirac(mu), schedule), length)
        np.testing.assert_allclose(got, expected, rtol=1e-9, atol=1e-300)
    # count by count: the sum over counts is a smooth integral, blind to panels too wide for one
    got = context_weights(Bell(Uniform()), length)
    np.testing.assert_allclose(got, (length - n) / (length + 1), rtol=1e-10)
    for objective in (Nelbo(), Nelbo(TruncatedGaussian(0.4, 0.2), Cosine())):
        assert context_weights(objective, length).tolist() == [1.0] * length


@pytest.mark.parametrize("floor", [1e-3, 0.5])
@pytest.mark.parametrize(
    ("schedule", "first_time"),
    [(Linear(), lambda rate: rate), (Cosine(), lambda rate: math.asin(rate) * 2 / math.pi)],
    ids=["linear", "cosine"],
)
def test_a_floor_of_the_mask_rate_cuts_off_the_largest_counts(floor, schedule, first_time):
    """The integral over visible shares below 1 - floor is a regularized incomplete beta, whatever
    the law; and the far tail keeps its digits: P(Binomial(128, 1/2) > 127) / (1/2) = 2^-127.
    """
    n = np.arange(64)
    expected = special.betainc(n + 1, 64 - n, 1 - floor) / (1 - first_time(floor))
    for law in (Uniform(), TruncatedGaussian(0.5, 0.2)):
        got = context_weights(Nelbo(law, schedule, time_floor=floor), 64)
        np.testing.assert_allclose(got, expected, rtol=1e-11, atol=1e-13)
    tail = context_weights(Nelbo(time_floor=0.5), 128)[127]
    assert float(tail) == pytest.approx(2.0**-127, rel=1e-9, abs=0)


def test_an_empty_block_and_an_unknown_objective_are_refused():
    class Other(Objective):
        law, schedule, normalizer = Uniform(), Linear(), 1.0
        times = weight = None

    with pytest.raises(ValueError, match="block_length"):
        context_weights(Bell(), 0)
    with pytest.raises(TypeError, match="Other"):
        context_weights(Other(), 4)


# drawn numbers of masks


LAW = TruncatedGaussian(0.4, 0.2)
gaussian = scipy_gaussian(0.4, 0.2).pdf


@pytest.mark.parametrize("length", [1, 5])
@pytest.mark.parametrize(
    # the density that times are drawn from, w(t), and the mask rate 1 - alpha(t)
    ("objective", "density", "weight", "rate"),
    [
        (Bell(LAW, Cosine()), gaussian, lambda t: 1, lambda t: math.sin(math.pi * t / 2)),
        (Nelbo(LAW), gaussian, lambda t: 1 / (t * gaussian(t)), lambda t: t),
        (Importance(LAW), lambda t: 1, gaussian, lambda t: t),
    ],
    ids=["bell", "nelbo", "importance"],
)
def test_counts_and_weights_are_those_of_the_definition(objective, density, weight, rate, length):
    """q(n) = P(n masks | a mask) for t ~ pi, and q(n) w(n) = P(n masks) E[w(t) | n masks]."""

    def integral(n, factor):
        def integrand(t):
            share = rate(t) ** n * (1 - rate(t)) ** (length - n)
            return math.comb(length, n) * share * density(t) * factor(t)

        return integrate.quad(integrand, 0, 1, epsabs=1e-11, epsrel=1e-9, limit=200)[0]

    q, w = (part.numpy() for part in CountLaw(objective).table(length))
    p = np.array([integral(n, lambda t: 1) for n in range(1, length + 1)])
    weighted = [integral(n, weight) for n in range(1, length + 1)]
    np.testing.assert_allclose(q, p / p.sum(), rtol=1e-6, atol=1e-9)
    np.testing.assert_allclose(q * w, weighted, rtol=1e-6, atol=1e-9)


def test_draws_follow_their_law_by_strata():
    """Evenly spread levels give each count its share to within one draw, in rising order."""
    law, total = CountLaw(Bell(LAW)), 1000
    levels = (torch.arange(total, dtype=torch.float64) + 0.5) / total
    count_B, weight_B = law.draw(levels, torch.full((total,), 8))
    q, w = law.table(8)
    seen = torch.bincount(count_B, minlength=9)[1:]
    assert ((seen - total * q).abs() <= 1).all()
    assert torch.equal(weight_B, w[count_B - 1])
    assert torch.equal(count_B, count_B.sort().values)
    # nothing maskable: nothing drawn; one token: always masked; level near 1: all that exist
    last = 1 - 2**-53
    level_B = torch.tensor([0.5, 0.0, last, 0.0, last], dtype=torch.float64)
    count_B, weight_B = CountLaw(Bell()).draw(level_B, torch.tensor([0, 1, 1, 5, 5]))
    assert count_B.tolist() == [0, 1, 1, 1, 5]
    assert weight_B[:2].tolist() == pytest.approx([0, 0.5])  # E[1 - alpha]: the chance of a mask


@pytest.mark.parametrize("objective", [Bell(TruncatedGaussian(0.5, 0.02)), Nelbo(), Importance()])
def test_long_rows_stay_finite_and_add_up(objective):
    q, w = CountLaw(objective).table(300)
    assert float(q.sum()) == pytest.approx(1)
    assert torch.isfinite(w).all()
    total = float((q * w * torch.arange(1, 301)).sum())
    assert total == pytest.approx(300 * objective.normalizer, rel=1e-6)
