"""Drawn numbers of masks, against quadrature, closed forms and the objectives' definitions."""

import math

import numpy as np
import pytest
import torch
from law_tools import scipy_gaussian
from scipy import integrate

from bellmask.diffusion.laws import TruncatedGaussian, Uniform
from bellmask.diffusion.objectives import Bell, Importance, Nelbo
from bellmask.diffusion.schedules import Cosine
from bellmask.diffusion.theory import CountLaw

LAW = TruncatedGaussian(0.4, 0.2)
gaussian = scipy_gaussian(0.4, 0.2).pdf


def one(t):
    return 1.0


def linear(t):
    return t


OBJECTIVES = {
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


@pytest.mark.parametrize("name", OBJECTIVES)
@pytest.mark.parametrize("length", [1, 2, 5])
def test_counts_and_weights_are_those_of_the_definition(name, length):
    """q(n) = P(n masks | a mask) for t ~ pi, and q(n) w(n) = P(n masks) E[w(t) | n masks]."""
    objective, density, weight, rate = OBJECTIVES[name]
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
