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


# context weights


OBJECTIVES = {
    "nelbo": Nelbo(),
    "nelbo-gaussian-cosine": Nelbo(TruncatedGaussian(0.4, 0.2), Cosine()),
    "nelbo-floor": Nelbo(time_floor=1e-3),
    "nelbo-floor-polynomial": Nelbo(schedule=Polynomial(2.0), time_floor=0.3),
    "bell": Bell(),
    "bell-narrow": Bell(TruncatedGaussian(0.2, 1e-4)),
    "bell-outside": Bell(TruncatedGaussian(-3.0, 0.05)),
    "bell-laplace": Bell(TruncatedLaplace(0.4, 0.01)),
    "bell-beta": Bell(DensityLaw(lambda t: t**2 * (1 - t))),
    "bell-dirac-one": Bell(Dirac(1.0)),
    "bell-cosine": Bell(schedule=Cosine()),
    "bell-polynomial": Bell(Uniform(), Polynomial(8.0)),
    "importance": Importance(TruncatedLaplace(0.6, 0.1)),
    "importance-over-t": Importance(TruncatedGaussian(0.1, 0.3), divide_by_t=True),
    "chain-rule": ChainRule(),
}


@pytest.mark.parametrize("objective", OBJECTIVES.values(), ids=OBJECTIVES.keys())
def test_weights_sum_to_length_times_normaliser(objective):
    for length in (1, 2, 37, 400):
        omega = context_weights(objective, length)
        assert omega.dtype == torch.float64
        assert omega.shape == (length,)
        assert bool((omega >= 0).all())
        assert float(omega.sum()) == pytest.approx(length * objective.normaliser, rel=1e-11)


def test_printed_numbers_of_the_default_bell():
    """Relative to base, omega / c, for blocks of 128; and how often no token is observed."""
    omega = context_weights(Bell(TruncatedGaussian(0.5, 0.1)), 128)
    relative = (omega / 0.5)[[0, 16, 32, 64, 96, 127]].tolist()
    assert [float(f"{x:.2g}") for x in relative[:3]] == [4.7e-5, 0.013, 0.40]
    assert [round(x, 2) for x in relative[3:5]] == [3.63, 0.13]
    assert float(f"{relative[5]:.1g}") == 6e-7
    # P(all masked) = omega(0) / L, the weight being one
    assert round(1e6 * float(omega[0]) / 128, 2) == 0.18


@pytest.mark.parametrize("length", [1, 5, 128, 1000])
@pytest.mark.parametrize(
    ("mu", "schedule", "alpha"),
    [(0.3, Linear(), 0.7), (1 / 3, Cosine(), 0.5), (0.5, Polynomial(2.0), 0.75), (1, Linear(), 0)],
    ids=["linear", "cosine", "polynomial", "one"],
)
def test_a_point_mass_weighs_by_the_binomial(mu, schedule, alpha, length):
    n = np.arange(length)
    expected = (length - n) * stats.binom(length, alpha).pmf(n)
    got = context_weights(Bell(Dirac(mu), schedule), length)
    np.testing.assert_allclose(got, expected, rtol=1e-9, atol=1e-300)


@pytest.mark.parametrize(
    "objective",
    [Nelbo(), Nelbo(TruncatedGaussian(0.4, 0.2), Cosine()), Nelbo(schedule=MiddleFlat())],
)
def test_nelbo_without_a_floor_weighs_all_counts_by_exactly_one(objective):
    assert context_weights(objective, 100).tolist() == [1.0] * 100


@pytest.mark.parametrize("length", [1, 800])
def test_uniform_bell_weighs_in_proportion_to_the_masked_tokens(length):
    """The integral of t^(L-n) (1-t)^n is 1 / ((L+1) C(L, n)), so omega = (L - n) / (L + 1).

    Count by count: the sum over counts is a smooth integral, blind to panels too wide for one.
    """
    n = torch.arange(length, dtype=torch.float64)
    got = context_weights(Bell(Uniform()), length)
    torch.testing.assert_close(got, (length - n) / (length + 1), rtol=1e-10, atol=0)


@pytest.mark.parametrize("floor", [1e-3, 0.1, 0.5])
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
        law, schedule, normaliser = Uniform(), Linear(), 1.0
        times = weight = None

    with pytest.raises(ValueError, match="block_length"):
        context_weights(Bell(), 0)
    with pytest.raises(TypeError, match="Other"):
        context_weights(Other(), 4)


# drawn numbers of masks


LAW = TruncatedGaussian(0.4, 0.2)
gaussian = scipy_gaussian(0.4, 0.2).pdf


def one(t):
    return 1.0


def linear(t):
    return t


DEFINITIONS = {
    # the objective; the density that times are drawn from; w(t); the mask rate 1 - alpha(t)
    "bell": (Bell(LAW), gaussian, one, linear),
    "bell uniform": (Bell(Uniform()), one, one, linear),
    "bell cosine": (Bell(LAW, Cosine()), gaussian, one, lambda t: math.sin(math.pi * t / 2)),
    "nelbo": (Nelbo(), one, lambda t: 1 / t, linear),
    "nelbo gaussian": (Nelbo(LAW), gaussian, lambda t: 1 / (t * gaussian(t)), linear),
    "importance": (Importance(LAW), one, gaussian, linear),
    "importance by t": (Importance(LAW, True), one, lambda t: gaussian(t) / t, linear),
}


def integral(function, low=0.0):
    return integrate.quad(function, low, 1, epsabs=1e-11, epsrel=1e-9, limit=200)[0]


@pytest.mark.parametrize("name", DEFINITIONS)
@pytest.mark.parametrize("length", [1, 2, 5])
def test_counts_and_weights_are_those_of_the_definition(name, length):
    """q(n) = P(n masks | a mask) for t ~ pi, and q(n) w(n) = P(n masks) E[w(t) | n masks]."""
    objective, density, weight, rate = DEFINITIONS[name]
    q, w = (part.numpy() for part in CountLaw(objective).table(length))

    def chance(n, t):
        return math.comb(length, n) * rate(t) ** n * (1 - rate(t)) ** (length - n) * density(t)

    counts = range(1, length + 1)
    p = np.array([integral(lambda t, n=n: chance(n, t)) for n in counts])
    weighted = [integral(lambda t, n=n: chance(n, t) * weight(t)) for n in counts]
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


def test_rows_of_any_length_and_the_last_level():
    """Nothing maskable: nothing drawn. One token: always masked. Level near 1: all that exist."""
    length_B = torch.tensor([0, 1, 1, 5, 5, 200])
    level_B = torch.tensor([0.5, 0.0, 1 - 2**-53, 0.0, 1 - 2**-53, 1 - 2**-53]).double()
    count_B, weight_B = CountLaw(Bell()).draw(level_B, length_B)
    assert count_B[:5].tolist() == [0, 1, 1, 1, 5]
    assert 1 <= count_B[5] <= 200
    assert weight_B[0] == 0
    assert weight_B[1] == pytest.approx(0.5)  # E[1 - alpha]: the bell's chance of a mask
    assert torch.isfinite(weight_B).all()


@pytest.mark.parametrize("objective", [Bell(TruncatedGaussian(0.5, 0.02)), Nelbo(), Importance()])
def test_long_rows_stay_finite_and_add_up(objective):
    q, w = CountLaw(objective).table(300)
    assert float(q.sum()) == pytest.approx(1)
    assert torch.isfinite(w).all()
    total = float((q * w * torch.arange(1, 301)).sum())
    assert total == pytest.approx(300 * objective.normaliser, rel=1e-6)
