"""Time laws against scipy, high-precision arithmetic and closed forms; stratified draws."""

import math
import weakref
from dataclasses import dataclass

import mpmath
import numpy as np
import pytest
import torch
from law_tools import float64, scipy_gaussian, scipy_laplace
from sampling_tools import seeded
from scipy import stats

from bellmask.diffusion.laws import (
    Band,
    DensityLaw,
    Dirac,
    TruncatedGaussian,
    TruncatedLaplace,
    Uniform,
    WithUniform,
    gauss_legendre,
    strata,
)
from bellmask.diffusion.theory import bell_test

DIGITS = 60
TIMES = [1e-3, 0.03, 0.2, 0.5, 0.77, 0.97, 0.999]
LEVELS = [1e-9, 1e-6, 1e-3, 0.03, 0.3, 0.5, 0.7, 0.97, 0.999, 1 - 1e-9]

# the ends of [0, 1] are up to 34 scales away from a location outside
NEAR = [
    *((mu, s) for mu in (0.0, 0.1, 0.5, 0.9, 1.0) for s in (1e-4, 1e-3, 0.02, 0.1, 0.3, 1, 1e3)),
    *((mu, s) for mu in (-3.0, -0.5, 1.7, 4.0) for s in (0.1, 0.3, 1, 10, 1e3)),
    *((mu, s) for mu in (-50.0, 50.0) for s in (10, 1e3)),
]
FAR = [
    *((-50.0, 1e-4), (-50.0, 0.05), (-3.0, 1e-3), (-0.5, 1e-4)),
    *((1.7, 1e-4), (4.0, 1e-3), (50.0, 0.01), (50.0, 1e-4)),
]


class ExactGaussian:
    """The truncated Gaussian in ``DIGITS`` digits, masses from the nearer tail."""

    def __init__(self, mu, sigma):
        self.mu, self.sigma = mpmath.mpf(mu), mpmath.mpf(sigma)
        self.total = self.mass(1)

    def mass(self, t):
        low, high = ((mpmath.mpf(x) - self.mu) / self.sigma / mpmath.sqrt(2) for x in (0, t))
        if low > 0:
            low, high = -high, -low
        return (mpmath.erfc(-high) - mpmath.erfc(-low)) / 2

    def kernel(self, t):
        return mpmath.npdf(mpmath.mpf(t), self.mu, self.sigma)

    def mean(self):
        return self.mu + self.sigma**2 * (self.kernel(0) - self.kernel(1)) / self.total


def level_error(law, t):
    """What is allowed: besides 2e-14, the time's own rounding, which is 1.1e-16 near 1."""
    return 2e-14 + math.ulp(t) * float(law.pdf(t))


@pytest.mark.parametrize(("mu", "sigma"), NEAR)
def test_gaussians_agree_with_high_precision_arithmetic(mu, sigma):
    """Density, cdf, inverse (by the level that it has) and mean."""
    with mpmath.workdps(DIGITS):
        law, exact = TruncatedGaussian(mu, sigma), ExactGaussian(mu, sigma)
        for t in TIMES:
            density, share = exact.kernel(t) / exact.total, exact.mass(t) / exact.total
            assert abs(float(law.pdf(t)) - density) <= 1e-11 * density + 1e-280, t
            assert abs(float(law.cdf(t)) - share) <= level_error(law, t), t
        for u, t in zip(LEVELS, law.icdf(float64(LEVELS)).tolist(), strict=True):
            assert abs(exact.mass(t) / exact.total - u) <= level_error(law, t), (u, t)
        assert law.mean == pytest.approx(float(exact.mean()), rel=1e-12, abs=0)


@pytest.mark.parametrize("mu", [-0.5, 0.0, 1e-3, 0.5, 1.0, 1.7])
@pytest.mark.parametrize("b", [1e-3, 0.02, 0.1, 1, 1e3])
def test_laplaces_are_scipys(mu, b):
    law, reference, u = TruncatedLaplace(mu, b), scipy_laplace(mu, b), float64(LEVELS)
    for name in ("pdf", "cdf"):
        expected = getattr(reference, name)(np.array(TIMES))
        np.testing.assert_allclose(getattr(law, name)(float64(TIMES)), expected, 1e-11, 1e-12)
    np.testing.assert_allclose(reference.cdf(law.icdf(u).numpy()), u, rtol=0, atol=1e-12)


@pytest.mark.parametrize(("mu", "sigma"), FAR)
def test_gaussian_far_outside_stays_a_law_concentrated_at_the_nearer_end(mu, sigma):
    """The tail of a Gaussian is nearly exponential: mean distance sigma^2 / |distance to mu|."""
    law, is_low = TruncatedGaussian(mu, sigma), mu < 0
    distance, mean, end = (-mu, law.mean, 1e-9) if is_low else (mu - 1, 1 - law.mean, 1 - 1e-9)
    assert mean == pytest.approx(sigma**2 / distance, rel=1e-2, abs=0)
    with mpmath.workdps(DIGITS):
        exact = ExactGaussian(mu, sigma)
        for u, t in zip(LEVELS, law.icdf(float64(LEVELS)).tolist(), strict=True):
            assert abs(exact.mass(t) / exact.total - u) <= level_error(law, t), (u, t)
        allowed = 1e-11 + math.ulp(end) * distance / sigma**2  # the second from rounded nodes
        assert abs(float(law.pdf(end)) * exact.total / exact.kernel(end) - 1) < allowed
        assert law.mean == pytest.approx(float(exact.mean()), rel=1e-11, abs=0)


@pytest.mark.parametrize(
    "law",
    [
        Uniform(),
        TruncatedGaussian(),
        TruncatedLaplace(),
        DensityLaw(lambda t: t),
        Band(),
        WithUniform(Band()),
    ],
    ids=["uniform", "gaussian", "laplace", "density", "band", "band+uniform"],
)
def test_nothing_lies_outside_the_unit_interval(law):
    assert law.pdf(float64([-0.1, 1.1])).tolist() == [0, 0]
    torch.testing.assert_close(law.cdf(float64([-0.1, 0, 1, 1.1])), float64([0, 0, 1, 1]))


def test_a_band_is_scipys_uniform_law():
    law, reference = Band(0.3, 0.8), stats.uniform(0.3, 0.5)
    t, u = np.linspace(0, 1, 21), np.linspace(0, 1, 11)
    np.testing.assert_allclose(law.pdf(torch.from_numpy(t)), reference.pdf(t), rtol=1e-14)
    np.testing.assert_allclose(law.cdf(torch.from_numpy(t)), reference.cdf(t), atol=1e-15)
    np.testing.assert_allclose(law.icdf(torch.from_numpy(u)), reference.ppf(u), rtol=1e-14)
    assert law.mean == pytest.approx(0.55, rel=1e-13)
    assert law.deviation == pytest.approx(0.5 / 12**0.5, rel=1e-13)


@pytest.mark.parametrize("law", [TruncatedGaussian(0.3, 1e-3), TruncatedLaplace(), Band(0.4, 0.41)])
@pytest.mark.parametrize("share", [1e-3, 0.05, 0.9])
def test_a_uniform_share_is_a_mixture(law, share):
    """Means of densities, cdfs and moments; the inverse to the last digits; positive everywhere."""
    mixed = WithUniform(law, share)
    t = torch.linspace(0, 1, 101, dtype=torch.float64)
    for name in ("pdf", "cdf"):
        both = (1 - share) * getattr(law, name)(t) + share * getattr(Uniform(), name)(t)
        torch.testing.assert_close(getattr(mixed, name)(t), both, rtol=1e-13, atol=1e-15)
    assert float(mixed.pdf(t).min()) >= share * (1 - 1e-12)
    u = float64([0.0, 1e-9, *np.linspace(0.001, 0.999, 99), 1 - 1e-9, 1.0])
    torch.testing.assert_close(mixed.cdf(mixed.icdf(u)), u, rtol=0, atol=1e-13)
    for power in (1, 2):
        found = mixed.expectation(lambda t, power=power: t**power)
        own = law.expectation(lambda t, power=power: t**power)
        assert found == pytest.approx((1 - share) * own + share / (power + 1), rel=1e-12)
    assert mixed.mean == pytest.approx(mixed.expectation(lambda t: t), rel=1e-12)
    assert bell_test(mixed).max_margin == pytest.approx((1 - share) * bell_test(law).max_margin)


@pytest.mark.parametrize("law", [TruncatedGaussian(0.61, 0.15), WithUniform(TruncatedGaussian())])
def test_a_time_does_not_depend_on_those_it_is_drawn_with(law):
    """To the last bit: microbatches and processes draw parts of a batch."""
    u = torch.rand(256, dtype=torch.float64, generator=seeded(3))
    for size in (1, 7, 128):
        assert torch.equal(torch.cat([law.icdf(part) for part in u.split(size)]), law.icdf(u))


def test_a_law_works_first_in_inference_then_with_gradients_and_on_any_default_device():
    """Its panels are computed once; nothing global keeps or hashes the law."""

    @dataclass
    class Slope:  # compares by value, so it has no hash
        power: float

        def __call__(self, t):
            return t**self.power

    law = DensityLaw(Slope(2.0))
    gauss_legendre.cache_clear()
    with torch.inference_mode(), torch.device("meta"):
        assert float(law.cdf(0.5)) == pytest.approx(0.125)
        assert float(law.icdf(0.125)) == pytest.approx(0.5)
        assert law.mean == pytest.approx(0.75)
    t = float64([0.5]).requires_grad_()
    law.cdf(t).sum().backward()
    torch.testing.assert_close(t.grad, law.pdf(t.detach()))
    seen = weakref.ref(law)
    del law
    assert seen() is None


def test_uniform_and_dirac():
    t = torch.linspace(0, 1, 11, dtype=torch.float64)
    assert torch.equal(Uniform().cdf(t), t)
    assert torch.equal(Uniform().pdf(t), torch.ones_like(t))
    Uniform().icdf(t).add_(1)
    assert float(t[0]) == 0, "a level is not changed with its time"
    assert Uniform().mean == pytest.approx(0.5, abs=1e-14)
    law = Dirac(0.3)
    assert not law.has_density
    assert law.cdf(float64([0.0, 0.2999, 0.3, 1.0])).tolist() == [0, 0, 1, 1]
    assert law.icdf(float64([0.0, 0.4, 0.99])).tolist() == [0.3, 0.3, 0.3]
    assert law.mean == 0.3
    assert law.expectation(lambda t: t**2) == pytest.approx(0.09)
    with pytest.raises(ValueError, match="density"):
        law.pdf(0.3)


@pytest.mark.parametrize(
    ("density", "kinks", "reference"),
    [
        (lambda t: 1e6 * t**2 * (1 - t), [], stats.beta(3, 2)),
        (lambda t: 1e-6 * t**2 * (1 - t), [], stats.beta(3, 2)),
        (lambda t: torch.where(t < 0.3, t / 0.3, (1 - t) / 0.7), [0.3], stats.triang(0.3)),
        (lambda t: (t >= 0.6).double(), [0.6], stats.uniform(0.6, 0.4)),
    ],
    ids=["beta", "beta-small", "triangle", "block"],
)
def test_a_law_of_the_users_own_is_that_of_scipy(density, kinks, reference):
    """Given up to a factor, with kinks and a jump."""
    law = DensityLaw(density, kinks=kinks)
    t, u = np.linspace(0, 1, 57), np.array([1e-9, 1e-6, *np.linspace(0.001, 0.999, 99)])
    np.testing.assert_allclose(law.pdf(torch.from_numpy(t)), reference.pdf(t), atol=1e-13)
    np.testing.assert_allclose(law.cdf(torch.from_numpy(t)), reference.cdf(t), atol=1e-14)
    np.testing.assert_allclose(law.icdf(torch.from_numpy(u)), reference.ppf(u), rtol=1e-12)
    for power in (1, 2):
        found = law.expectation(lambda t, power=power: t**power)
        assert found == pytest.approx(reference.moment(power), abs=1e-13)


@pytest.mark.parametrize(
    ("make", "given", "names"),
    [
        (DensityLaw, [lambda t: t - 0.5], "non-negative"),
        (Band, [0.8, 0.3], "low < high"),
        (WithUniform, [Dirac()], "density"),
        (WithUniform, [Uniform(), 1.0], "share"),
        (DensityLaw, [lambda t: 0 * t], "zero everywhere"),
        (DensityLaw, [lambda t: t / 0], "finite"),
        (DensityLaw, [lambda t: t[:1]], "each time"),
        (TruncatedGaussian, [0.5, 0.0], "sigma"),
        (TruncatedGaussian, [math.nan, 0.1], "mu"),
        (TruncatedLaplace, [0.5, math.inf], "b > 0"),
        (Dirac, [-0.01], "mu"),
        (Dirac, [1.01], "mu"),
    ],
)
def test_impossible_laws_are_refused(make, given, names):
    with pytest.raises(ValueError, match=names):
        make(*given)


# draws


def test_strata_are_order_plus_jitter_over_count():
    u = strata(torch.tensor([2, 0, 3, 1]), torch.tensor([0.0, 0.5, 0.25, 0.75]))
    assert u.dtype == torch.float64
    assert u.tolist() == [0.5, 0.125, 0.8125, 0.4375]


def test_samples_follow_the_law_and_each_stratum_gets_exactly_one_draw():
    law, cdf = TruncatedGaussian(0.5, 0.1), scipy_gaussian(0.5, 0.1).cdf
    t = law.sample(2000, generator=seeded(0), dtype=torch.float64)
    assert stats.kstest(t.numpy(), cdf).pvalue > 1e-3
    for count in (1, 2, 64, 513):
        t = law.stratified(count, generator=seeded(count), dtype=torch.float64)
        stratum = np.floor(cdf(t.numpy()) * count).astype(int)
        assert sorted(stratum) == list(range(count))


def test_strata_come_in_random_order():
    """Every sample sits in every stratum equally often, and neighbors are not sorted."""
    draw = seeded(4)
    batches = torch.stack([Uniform().stratified(8, generator=draw) for _ in range(2000)])
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
