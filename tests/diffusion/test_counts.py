"""Drawn numbers of masks, against quadrature, closed forms and the objectives' definitions."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy import integrate, stats

from bellmask.diffusion.corruption import mask_exactly
from bellmask.diffusion.counts import CountLaw
from bellmask.diffusion.objectives import Bell, Importance, Nelbo, Objective
from bellmask.diffusion.schedule import Cosine
from bellmask.diffusion.times import Dirac, TruncatedGaussian, Uniform

Curve = Callable[[float], float]


def gaussian(t: float) -> float:
    z = (t - 0.4) / 0.2
    inside = (math.erf(3 / math.sqrt(2)) + math.erf(2 / math.sqrt(2))) / 2
    return math.exp(-z * z / 2) / (0.2 * math.sqrt(2 * math.pi) * inside)


def one(t: float) -> float:
    return 1.0


def plain(t: float) -> float:
    return t


LAW = TruncatedGaussian(0.4, 0.2)
OBJECTIVES: dict[str, tuple[Objective, Curve, Curve, Curve]] = {
    # the objective; the density that times are drawn from; w(t); the mask rate 1 - alpha(t)
    "bell gaussian": (Bell(LAW), gaussian, one, plain),
    "bell uniform": (Bell(Uniform()), one, one, plain),
    "bell cosine": (Bell(LAW, Cosine()), gaussian, one, lambda t: math.sin(math.pi * t / 2)),
    "nelbo": (Nelbo(time_floor=0.0), one, lambda t: 1 / t, plain),
    "nelbo gaussian": (
        Nelbo(LAW, time_floor=0.0),
        gaussian,
        lambda t: 1 / (t * gaussian(t)),
        plain,
    ),
    "importance": (Importance(LAW), one, gaussian, plain),
    "importance by t": (Importance(LAW, True), one, lambda t: gaussian(t) / t, plain),
}


def integral(function: Curve) -> float:
    return float(integrate.quad(function, 0, 1, epsabs=1e-12, epsrel=1e-10, limit=200)[0])


@pytest.mark.parametrize("name", OBJECTIVES)
@pytest.mark.parametrize("length", [1, 2, 7])
def test_counts_and_weights_are_those_of_the_definition(name: str, length: int) -> None:
    """q(n) = P(n masks | a mask) for t ~ pi, and q(n) w(n) = P(n masks) E[w(t) | n masks]."""
    objective, density, weight, rate = OBJECTIVES[name]
    q, w = (part.numpy() for part in CountLaw(objective).table(length))

    def chance(n: int, t: float) -> float:
        return math.comb(length, n) * rate(t) ** n * (1 - rate(t)) ** (length - n)

    counts = range(1, length + 1)
    p = np.array([integral(lambda t, n=n: chance(n, t) * density(t)) for n in counts])
    weighted = [integral(lambda t, n=n: chance(n, t) * density(t) * weight(t)) for n in counts]
    np.testing.assert_allclose(q, p / p.sum(), rtol=1e-6, atol=1e-9)
    np.testing.assert_allclose(q * w, weighted, rtol=1e-6, atol=1e-9)
    # so weights on any loss sum to c, as those of the objective itself do
    assert (q * w * np.arange(1, length + 1)).sum() == pytest.approx(length * objective.normaliser)


def test_uniform_times_give_every_count_alike() -> None:
    """The Beta integral: C(L, n) B(n + 1, L - n + 1) = 1 / (L + 1), so 1 / L given a mask."""
    for length in (1, 7, 300):
        q, w = CountLaw(Nelbo(time_floor=0.0)).table(length)
        np.testing.assert_allclose(q, 1 / length, rtol=1e-9)
        np.testing.assert_allclose(w, length / np.arange(1, length + 1), rtol=1e-9)


def test_one_time_gives_a_binomial_without_its_zero() -> None:
    for length in (1, 4, 40):
        q, w = CountLaw(Bell(Dirac(0.3))).table(length)
        some = 1 - 0.7**length
        expected = stats.binom(length, 0.3).pmf(np.arange(1, length + 1)) / some
        np.testing.assert_allclose(q, expected, rtol=1e-9)
        np.testing.assert_allclose(w, some, rtol=1e-9)


def test_a_floor_of_the_mask_rate_belongs_to_the_objective() -> None:
    """Rates are uniform on [f, 1] and weighted by 1 / rate, up to the density's constant."""
    floor, length = 0.05, 6
    objective = Nelbo(time_floor=floor)
    q, w = CountLaw(objective).table(length)

    def chance(n: int, t: float) -> float:
        return math.comb(length, n) * t ** (n - 1) * (1 - t) ** (length - n)

    found = (q * w / objective.normaliser).numpy()
    raw = [integrate.quad(lambda t, n=n: chance(n, t), floor, 1)[0] for n in range(1, length + 1)]
    share = np.array(raw) * np.arange(1, length + 1)
    np.testing.assert_allclose(found * np.arange(1, length + 1), length * share / share.sum(), 1e-6)


@pytest.mark.parametrize("name", ["bell gaussian", "nelbo", "importance"])
def test_the_expected_loss_is_the_objectives_own(name: str) -> None:
    """Every mask of three tokens listed: each one's total weight against its integral over t."""
    objective, density, weight, rate = OBJECTIVES[name]
    length = 3
    law = CountLaw(objective)
    levels = (torch.arange(3000, dtype=torch.float64) + 0.5) / 3000
    count_B, weight_B = law.draw(levels, torch.full((3000,), length))
    found: dict[tuple[bool, ...], float] = {}
    draw = torch.Generator().manual_seed(0)
    u_BL = torch.rand(3000, length, generator=draw, dtype=torch.float64)
    _, is_masked_BL = mask_exactly(torch.zeros(3000, length).long(), count_B, mask_id=1, u_BL=u_BL)
    for mask, w in zip(is_masked_BL.tolist(), weight_B.tolist(), strict=True):
        found[tuple(mask)] = found.get(tuple(mask), 0.0) + w / 3000
    assert len(found) == 7  # never the empty one
    for mask, value in found.items():
        n = sum(mask)
        expected = integral(
            lambda t, n=n: rate(t) ** n * (1 - rate(t)) ** (length - n) * density(t) * weight(t)
        )
        assert value == pytest.approx(expected, rel=0.15)


def test_draws_follow_their_law_by_strata() -> None:
    """Evenly spread levels give each count its share to within one draw, in rising order."""
    law, total = CountLaw(Bell(LAW)), 1000
    levels = (torch.arange(total, dtype=torch.float64) + 0.5) / total
    count_B, weight_B = law.draw(levels, torch.full((total,), 8))
    q, w = law.table(8)
    seen = torch.bincount(count_B, minlength=9)[1:]
    assert ((seen - total * q).abs() <= 1).all()
    assert torch.equal(weight_B, w[count_B - 1])
    assert torch.equal(count_B, count_B.sort().values)


def test_rows_of_any_length_and_the_last_level() -> None:
    """Nothing maskable: nothing drawn. One token: always masked. Level near 1: all that exist."""
    law = CountLaw(Bell())
    length_B = torch.tensor([0, 1, 1, 5, 5, 200])
    level_B = torch.tensor([0.5, 0.0, 1 - 2**-53, 0.0, 1 - 2**-53, 1 - 2**-53]).double()
    count_B, weight_B = law.draw(level_B, length_B)
    assert count_B[:5].tolist() == [0, 1, 1, 1, 5]
    assert 1 <= count_B[5] <= 200
    assert weight_B[0] == 0
    assert weight_B[1] == pytest.approx(0.5)  # E[1 - alpha]: the bell's chance of a mask
    assert torch.isfinite(weight_B).all()


@pytest.mark.parametrize("scale", [0.1, 0.02])
def test_long_rows_stay_finite_and_add_up(scale: float) -> None:
    for objective in (Bell(TruncatedGaussian(0.5, scale)), Nelbo(), Importance()):
        q, w = CountLaw(objective).table(512)
        n = torch.arange(1, 513)
        assert float(q.sum()) == pytest.approx(1)
        assert torch.isfinite(w).all()
        assert float((q * w * n).sum()) == pytest.approx(512 * objective.normaliser, rel=1e-6)
    assert replace(Nelbo(), time_floor=0.0).normaliser == 1
