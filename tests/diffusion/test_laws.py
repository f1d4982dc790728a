"""Time laws against scipy, high-precision arithmetic and closed forms; stratified draws."""

import math

import mpmath
import numpy as np
import pytest
import torch
from law_tools import float64, scipy_gaussian
from sampling_tools import seeded
from scipy import stats

from bellmask.diffusion.laws import (
    DensityLaw,
    Dirac,
    TruncatedGaussian,
    TruncatedLaplace,
    Uniform,
    strata,
)

DIGITS = 60
TIMES = [1e-3, 0.03, 0.2, 0.5, 0.77, 0.97, 0.999]
LEVELS = [1e-9, 1e-6, 1e-3, 0.03, 0.3, 0.5, 0.7, 0.97, 0.999, 1 - 1e-9]

# the ends of [0, 1] are up to 34 scales away from a location outside
NEAR = [
    *((mu, s) for mu in (0.0, 0.1, 0.5, 0.9, 1.0) for s in (1e-4, 1e-3, 0.02, 0.1, 0.3, 1, 1e3)),
    *((mu, s) for mu in (-3.0, -0.5, 1.7, 4.0) for s in (0.1, 0.3, 1, 10, 1e3)),
    *((mu, s) for mu in (-50.0, 50.0) for s in (10, 1e3)),
]
FAR = [(-50.0, 1e-4), (-50.0, 0.05), (-3.0, 1e-3), (-0.5, 1e-4), (4.0, 1e-3), (50.0, 0.01)]


class ExactGaussian:
    """The truncated Gaussian in ``DIGITS`` digits, masses from the nearer tail."""

    def __init__(self, mu, sigma):
        self.mu, self.sigma = mpmath.mpf(mu), mpmath.mpf(sigma)
        self.total = self.mass(mpmath.mpf(0), mpmath.mpf(1))

    def mass(self, low, high):
        low, high = ((x - self.mu) / self.sigma / mpmath.sqrt(2) for x in (low, high))
        if low > 0:
            low, high = -high, -low
        return (mpmath.erfc(-high) - mpmath.erfc(-low)) / 2

    def pdf(self, t):
        return mpmath.npdf(mpmath.mpf(t), self.mu, self.sigma) / self.total

    def cdf(self, t):
        return self.mass(mpmath.mpf(0), mpmath.mpf(t)) / self.total

    def mean(self):
        ends = (mpmath.npdf(x, self.mu, self.sigma) for x in (0, 1))
        return self.mu + self.sigma**2 * (next(ends) - next(ends)) / self.total


class ExactLaplace:
    """The truncated Laplace law in ``DIGITS`` digits, from the antiderivative of its kernel."""

    def __init__(self, mu, b):
        # exp(-|t - mu| / b) on [0, 1] is proportional to the same with mu moved to the nearer end
        self.mu, self.b = mpmath.mpf(min(max(mu, 0), 1)), mpmath.mpf(b)
        self.total = self.mass(1)

    def mass(self, t):
        def antiderivative(x):
            tail = self.b * mpmath.exp(-abs(x - self.mu) / self.b)
            return tail if x <= self.mu else 2 * self.b - tail

        return antiderivative(mpmath.mpf(t)) - antiderivative(mpmath.mpf(0))

    def pdf(self, t):
        return mpmath.exp(-abs(mpmath.mpf(t) - self.mu) / self.b) / self.total

    def cdf(self, t):
        return self.mass(t) / self.total

    def mean(self):
        """1 - the integral of the cdf over [0, 1], by parts."""
        b, mu = self.b, self.mu
        left, right = b * (1 - mpmath.exp(-mu / b)), b * (1 - mpmath.exp((mu - 1) / b))
        below = b * left - b * mpmath.exp(-mu / b) * mu
        above = (1 - mu) * (2 * b - b * mpmath.exp(-mu / b)) - b * right
        return 1 - (below + above) / self.total


def assert_agrees(law, exact, times, rtol, atol):
    """Density, cdf and mean; an error dt of the inverse shows as an error f(t) dt of the level."""
    for t in times:
        for got, expected in ((law.pdf(t), exact.pdf(t)), (law.cdf(t), exact.cdf(t))):
            if expected > 1e-290:
                assert abs(float(got) / expected - 1) < rtol, (t, float(got), float(expected))
            else:
                assert float(got) <= 1e-280
    assert_icdf_agrees(law, exact, LEVELS, 1e-13, atol)
    assert law.mean == pytest.approx(float(exact.mean()), rel=1e-12, abs=0)


def assert_icdf_agrees(law, exact, levels, rtol, atol):
    for u, t in zip(levels, law.icdf(float64(levels)).tolist(), strict=True):
        error = abs((exact.cdf(t) - mpmath.mpf(u)) / exact.pdf(t))
        assert error <= rtol * t + atol, (u, t, float(error))


@pytest.mark.parametrize(("mu", "sigma"), NEAR)
def test_gaussian_agrees_with_high_precision_arithmetic(mu, sigma):
    with mpmath.workdps(DIGITS):
        law, exact = TruncatedGaussian(mu, sigma), ExactGaussian(mu, sigma)
        assert_agrees(law, exact, TIMES, 1e-11, 1e-14)
        if (mu, sigma) in [(0.5, 0.1), (0.1, 1), (-0.5, 0.3)]:
            assert float(float(law.cdf(1e-9)) / exact.cdf(1e-9)) == pytest.approx(1, rel=1e-11)


@pytest.mark.parametrize(("mu", "sigma"), FAR)
def test_gaussian_far_outside_stays_a_law_concentrated_at_the_nearer_end(mu, sigma):
    """The tail of a Gaussian is nearly exponential: mean distance sigma^2 / |distance to mu|."""
    law = TruncatedGaussian(mu, sigma)
    distance = -mu if mu < 0 else mu - 1
    mean = law.mean if mu < 0 else 1 - law.mean
    assert mean == pytest.approx(sigma**2 / distance, rel=1e-2, abs=0)
    with mpmath.workdps(DIGITS):
        exact = ExactGaussian(mu, sigma)
        for u, t in zip(LEVELS, law.icdf(float64(LEVELS)).tolist(), strict=True):
            assert abs(exact.cdf(t) - u) < 2e-4
        end = 1e-9 if mu < 0 else 1 - 1e-9
        assert float(float(law.pdf(end)) / exact.pdf(end)) == pytest.approx(1, rel=1e-11)
        assert law.mean == pytest.approx(float(exact.mean()), rel=1e-11, abs=0)


@pytest.mark.parametrize("b", [1e-4, 1e-3, 0.02, 0.1, 1, 1e3])
@pytest.mark.parametrize("mu", [-50.0, -0.5, 0.0, 1e-3, 0.1, 0.5, 0.9, 1.0, 1.7])
def test_laplace_agrees_with_high_precision_arithmetic(mu, b):
    with mpmath.workdps(DIGITS):
        law, exact = TruncatedLaplace(mu, b), ExactLaplace(mu, b)
        assert_agrees(law, exact, [1e-12, 1e-6, *TIMES], 1e-12, 1e-15)


@pytest.mark.parametrize(
    "law",
    [Uniform(), TruncatedGaussian(), TruncatedLaplace(), DensityLaw(lambda t: t)],
    ids=["uniform", "gaussian", "laplace", "density"],
)
def test_nothing_lies_outside_the_unit_interval(law):
    assert law.pdf(float64([-0.1, 1.1])).tolist() == [0, 0]
    torch.testing.assert_close(law.cdf(float64([-0.1, 0, 1, 1.1])), float64([0, 0, 1, 1]))


def test_uniform_is_the_identity():
    t = torch.linspace(0, 1, 11, dtype=torch.float64)
    assert torch.equal(Uniform().cdf(t), t)
    assert torch.equal(Uniform().icdf(t), t)
    assert torch.equal(Uniform().pdf(t), torch.ones_like(t))
    Uniform().icdf(t).add_(1)
    assert float(t[0]) == 0, "a level is not changed with its time"
    for law in (Uniform, Dirac, TruncatedGaussian, TruncatedLaplace):
        assert law().mean == pytest.approx(0.5, abs=1e-14)


def test_dirac_is_a_step_without_a_density():
    law = Dirac(0.3)
    assert not law.has_density
    assert law.cdf(float64([0.0, 0.2999, 0.3, 1.0])).tolist() == [0, 0, 1, 1]
    assert law.icdf(float64([0.0, 0.4, 0.99])).tolist() == [0.3, 0.3, 0.3]
    assert law.mean == 0.3
    assert law.expectation(lambda t: t**2) == pytest.approx(0.09)
    assert law.sample(4).tolist() == pytest.approx([0.3] * 4)
    with pytest.raises(ValueError, match="density"):
        law.pdf(0.3)


# laws of the user's own


@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e6])
def test_density_law_agrees_with_the_beta_distribution(scale):
    """Beta(3, 2), given up to a factor."""
    law, reference = DensityLaw(lambda t: scale * t**2 * (1 - t)), stats.beta(3, 2)
    t, u = np.linspace(0, 1, 201), np.array([1e-9, 1e-6, *np.linspace(0.001, 0.999, 99)])
    np.testing.assert_allclose(law.pdf(torch.from_numpy(t)), reference.pdf(t), atol=1e-13)
    np.testing.assert_allclose(law.cdf(torch.from_numpy(t)), reference.cdf(t), atol=1e-14)
    np.testing.assert_allclose(law.icdf(torch.from_numpy(u)), reference.ppf(u), rtol=1e-12)
    assert law.mean == pytest.approx(0.6, abs=1e-13)
    assert law.expectation(lambda t: t**2) == pytest.approx(reference.moment(2), abs=1e-13)


def test_density_law_with_a_kink_and_a_jump_is_exact():
    """A triangle with its top at 0.3, and a block on [0.6, 1]."""
    triangle = DensityLaw(lambda t: torch.where(t < 0.3, t / 0.3, (1 - t) / 0.7), kinks=[0.3])
    reference, t = stats.triang(0.3), np.linspace(0, 1, 57)
    np.testing.assert_allclose(triangle.cdf(torch.from_numpy(t)), reference.cdf(t), atol=1e-14)
    np.testing.assert_allclose(triangle.icdf(torch.from_numpy(t[1:-1])), reference.ppf(t[1:-1]))
    block = DensityLaw(lambda t: (t >= 0.6).double(), kinks=[0.6])
    assert block.cdf(float64([0.3, 0.6, 0.7, 0.9])).tolist() == pytest.approx([0, 0, 0.25, 0.75])
    assert block.icdf(float64([0.25, 0.75])).tolist() == pytest.approx([0.7, 0.9])
    assert block.mean == pytest.approx(0.8, abs=1e-13)


@pytest.mark.parametrize(
    ("make", "given", "names"),
    [
        (DensityLaw, [lambda t: t - 0.5], "non-negative"),
        (DensityLaw, [lambda t: 0 * t], "zero everywhere"),
        (DensityLaw, [lambda t: t / 0], "finite"),
        (DensityLaw, [lambda t: t[:1]], "each time"),
        (TruncatedGaussian, [0.5, 0.0], "sigma"),
        (TruncatedGaussian, [0.5, math.inf], "sigma"),
        (TruncatedLaplace, [0.5, -0.1], "b > 0"),
        (TruncatedLaplace, [0.5, math.nan], "b > 0"),
        (TruncatedGaussian, [math.nan, 0.1], "mu"),
        (TruncatedLaplace, [-math.inf, 0.1], "mu"),
        (Dirac, [-0.01], "mu"),
        (Dirac, [1.01], "mu"),
    ],
)
def test_impossible_laws_are_refused(make, given, names):
    with pytest.raises(ValueError, match=names):
        make(*given)


# draws


DRAWN = {
    "gaussian": (TruncatedGaussian(0.5, 0.1), scipy_gaussian(0.5, 0.1).cdf),
    "laplace": (
        TruncatedLaplace(0.3, 0.2),
        np.vectorize(lambda t: float(ExactLaplace(0.3, 0.2).cdf(t))),
    ),
    "density": (DensityLaw(lambda t: t**2 * (1 - t)), stats.beta(3, 2).cdf),
    "uniform": (Uniform(), stats.uniform().cdf),
}
every_drawn = pytest.mark.parametrize("name", DRAWN)


def stratified(law, count, times, seed):
    """[times, count] by one generator."""
    options = {"generator": seeded(seed), "dtype": torch.float64}
    return torch.stack([law.stratified(count, **options) for _ in range(times)])


def test_strata_are_order_plus_jitter_over_count():
    u = strata(torch.tensor([2, 0, 3, 1]), torch.tensor([0.0, 0.5, 0.25, 0.75]))
    assert u.dtype == torch.float64
    assert u.tolist() == [0.5, 0.125, 0.8125, 0.4375]


@every_drawn
def test_independent_samples_follow_the_law(name):
    law, cdf = DRAWN[name]
    t = law.sample(2000, generator=seeded(0), dtype=torch.float64)
    assert stats.kstest(t.numpy(), cdf).pvalue > 1e-3


@every_drawn
def test_each_stratum_gets_exactly_one_draw(name):
    law, cdf = DRAWN[name]
    for count in (1, 2, 64, 513):
        (t,) = stratified(law, count, 1, seed=count)
        stratum = np.floor(cdf(t.numpy()) * count).astype(int)
        assert sorted(stratum) == list(range(count))


def test_strata_come_in_random_order():
    """Every sample sits in every stratum equally often, and neighbors are not sorted."""
    batches = stratified(Uniform(), 8, 2000, seed=4)
    for sample in (batches * 8).long().T:
        assert stats.chisquare(torch.bincount(sample, minlength=8).numpy()).pvalue > 1e-3
    rises = int((batches.diff(dim=1) > 0).sum())
    # each of 7 neighboring pairs rises with probability 1/2
    assert abs(rises - 7000) < 4 * math.sqrt(2000 * 7 / 4)


@pytest.mark.parametrize("draw", [TruncatedGaussian().sample, TruncatedGaussian().stratified])
def test_draws_are_reproducible_and_have_the_dtype_asked_for(draw):
    a, b, other = (draw(5, generator=seeded(seed)) for seed in (9, 9, 10))
    assert torch.equal(a, b)
    assert not torch.equal(a, other)
    assert a.dtype == torch.get_default_dtype()
    assert draw(5, dtype=torch.bfloat16).dtype == torch.bfloat16
