"""Context weights against printed numbers, binomials of scipy and high-precision integrals."""

import math

import numpy as np
import pytest
import torch
from scipy import special, stats

from bellmask.diffusion.laws import DensityLaw, Dirac, TruncatedGaussian, TruncatedLaplace, Uniform
from bellmask.diffusion.objectives import Bell, ChainRule, Importance, Nelbo, Objective
from bellmask.diffusion.schedules import Cosine, Linear, MiddleFlat, Polynomial
from bellmask.diffusion.theory import context_weights

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
