"""Objectives against exhaustive sums: every x0, every mask, every order of a tiny language.

The language has three tokens and blocks of four. A random joint distribution plays the data and a
random table, with one row per corrupted block, plays the model; nothing is learned or fitted.
"""

import itertools
import math
from dataclasses import dataclass
from functools import cache, cached_property

import numpy as np
import pytest
from law_tools import float64, scipy_gaussian, scipy_laplace
from scipy import integrate, optimize, stats

from bellmask.diffusion.laws import DensityLaw, Dirac, TruncatedGaussian, TruncatedLaplace, Uniform
from bellmask.diffusion.objectives import Bell, ChainRule, Importance, Nelbo, Objective
from bellmask.diffusion.schedules import Cosine, MiddleFlat, Polynomial
from bellmask.diffusion.theory import context_weights

VOCABULARY, LENGTH, MASK = 3, 4, 3
BLOCKS = list(itertools.product(range(VOCABULARY), repeat=LENGTH))
PATTERNS = list(itertools.product((False, True), repeat=LENGTH))  # True: masked

_random = np.random.default_rng(20)
DATA = _random.dirichlet(np.full(len(BLOCKS), 0.3))
MODEL = _random.dirichlet(np.ones(VOCABULARY), size=(*(VOCABULARY + 1,) * LENGTH, LENGTH))


@cache
def cross_entropy(pattern, position):
    """E over the data of that of the true token at one position, seeing through a mask."""
    total = 0.0
    for p, block in zip(DATA, BLOCKS, strict=True):
        seen = tuple(MASK if hidden else token for token, hidden in zip(block, pattern))
        total -= p * math.log(MODEL[seen][position, block[position]])
    return total


def summed_cross_entropy(pattern):
    return sum(cross_entropy(pattern, i) for i in range(LENGTH) if pattern[i])


def loss_at_context(observed):
    """Mean cross-entropy over all contexts of so many observed tokens and all masked positions."""
    chosen = [p for p in PATTERNS if LENGTH - sum(p) == observed]
    return np.mean([summed_cross_entropy(p) / sum(p) for p in chosen])


@cache
def any_order_loss():
    """Chain rule along every order of the positions, averaged, per token."""
    losses = [
        cross_entropy(tuple(i not in order[:k] for i in range(LENGTH)), position)
        for order in itertools.permutations(range(LENGTH))
        for k, position in enumerate(order)
    ]
    return np.mean(losses)


@dataclass
class Case:
    """An objective, and the law its times are drawn from in terms of scipy (None: Dirac)."""

    objective: Objective
    drawn: object
    points: tuple[float, ...] = ()
    """Where scipy's quadrature is told to look."""

    @cached_property
    def first_time(self):
        """The time at which the mask rate is the floor, by bisection."""
        floor, alpha = getattr(self.objective, "time_floor", 0.0), self.objective.schedule.alpha
        if floor == 0:
            return 0.0
        return optimize.brentq(lambda t: 1 - float(alpha(float64(t))) - floor, 0, 1, xtol=1e-15)

    @cached_property
    def moments(self):
        """E of w alpha^n (1 - alpha)^(L - n) for n < L, then E of w (1 - alpha).

        The functions of the code, integrated by scipy over the drawing law of scipy.
        """

        def at(t):
            w = float(self.objective.weight(float64(t)))
            alpha = float(self.objective.schedule.alpha(float64(t)))
            powers = [alpha**n * (1 - alpha) ** (LENGTH - n) for n in range(LENGTH)]
            return w * np.array([*powers, 1 - alpha])

        if self.drawn is None:
            return at(self.objective.law.mu)
        first = self.first_time
        options = {"points": self.points, "epsabs": 1e-8, "epsrel": 1e-8, "norm": "max"}
        value, error = integrate.quad_vec(
            lambda s: self.drawn.pdf(s) * at(first + (1 - first) * s), 0, 1, **options
        )
        assert error < 1e-6
        return value

    @property
    def expected_loss(self):
        """Over data, times and masks, all masks enumerated; divided by L c."""
        total = sum(self.moments[LENGTH - sum(p)] * summed_cross_entropy(p) for p in PATTERNS[1:])
        return total / (LENGTH * self.objective.normalizer)


PEAK = (0.3, 0.5, 0.7)
STEEP = (0.001, 0.01, 0.1, 0.9, 0.99, 0.999)
FLAT = MiddleFlat(TruncatedGaussian(0.4, 0.25))
WIDE, LEFT, TWO_SIDED = TruncatedGaussian(0.5, 0.2), TruncatedGaussian(0.2, 0.3), TruncatedLaplace()
TILTED, FALLING = TruncatedGaussian(1.2, 0.5), DensityLaw(lambda t: (-t).exp())
EVEN, NARROW = stats.uniform(), scipy_gaussian(0.5, 0.1)
EXACT_NELBO = {
    "nelbo": Case(Nelbo(), EVEN),
    "nelbo-tilted": Case(Nelbo(TILTED), scipy_gaussian(1.2, 0.5)),
    "nelbo-density": Case(Nelbo(FALLING), stats.truncexpon(1)),
    "nelbo-polynomial": Case(Nelbo(schedule=Polynomial(2.0)), EVEN),
    "nelbo-cosine-gaussian": Case(Nelbo(WIDE, Cosine()), scipy_gaussian(0.5, 0.2), PEAK),
    "nelbo-middle-flat": Case(Nelbo(schedule=FLAT), EVEN, STEEP),
}
OTHERS = {
    "nelbo-floor-mdlm": Case(Nelbo(time_floor=1e-3), EVEN),
    "nelbo-floor-gaussian": Case(Nelbo(WIDE, time_floor=0.05), scipy_gaussian(0.5, 0.2), PEAK),
    "nelbo-floor-cosine": Case(Nelbo(schedule=Cosine(), time_floor=0.2), EVEN),
    "bell": Case(Bell(), NARROW, PEAK),
    "bell-laplace": Case(Bell(TWO_SIDED), scipy_laplace(0.5, 0.1), (0.5,)),
    "bell-dirac-one": Case(Bell(Dirac(1.0)), None),
    "bell-cosine": Case(Bell(schedule=Cosine()), NARROW, PEAK),
    "bell-dirac-polynomial": Case(Bell(Dirac(0.3), Polynomial(2.0)), None),
    "bell-middle-flat": Case(Bell(Uniform(), FLAT), EVEN, STEEP),
    "importance": Case(Importance(LEFT), EVEN, PEAK),
    "importance-over-t": Case(Importance(LEFT, divide_by_t=True), EVEN, PEAK),
}
ALL = {**EXACT_NELBO, **OTHERS}
every_case = pytest.mark.parametrize("case", ALL.values(), ids=ALL)


@every_case
def test_expected_loss_is_the_weighted_sum_over_context_counts(case):
    """sum over N_c of omega(N_c) / (L c) * L^{N_c}, all parts enumerated; c = E[w (1 - alpha)]."""
    c = case.objective.normalizer
    assert c == pytest.approx(case.moments[-1], rel=1e-7)
    share = context_weights(case.objective, LENGTH) / (LENGTH * c)
    shared_form = sum(float(share[n]) * loss_at_context(n) for n in range(LENGTH))
    assert case.expected_loss == pytest.approx(shared_form, rel=1e-7)


@pytest.mark.parametrize("case", EXACT_NELBO.values(), ids=EXACT_NELBO)
def test_expected_nelbo_is_the_any_order_loss(case):
    """Whatever the law and the schedule."""
    assert case.expected_loss == pytest.approx(any_order_loss(), rel=1e-7)
    assert case.objective.normalizer == 1


def test_objectives_differ_on_a_model_that_is_not_optimal():
    """Guards the sums above: they would prove nothing if all losses were the same."""
    for name in ("bell", "bell-dirac-one", "importance-over-t", "nelbo-floor-cosine"):
        assert abs(ALL[name].expected_loss / any_order_loss() - 1) > 1e-3


@every_case
def test_times_are_the_quantiles_of_the_drawing_law(case):
    levels = float64([0.05, 0.3, 0.5, 0.9])
    times = case.objective.times(levels).numpy()
    if case.drawn is None:
        assert times.tolist() == [case.objective.law.mu] * 4
    else:
        stretched = (times - case.first_time) / (1 - case.first_time)
        np.testing.assert_allclose(case.drawn.cdf(stretched), levels, atol=1e-9)


def test_unweighted_objectives_say_so():
    for objective in (Bell(), ChainRule()):
        assert objective.is_unweighted
        assert objective.weight(float64([0.01, 0.5, 1.0])).tolist() == [1, 1, 1]
    assert not Nelbo().is_unweighted
    assert not Importance().is_unweighted
    assert ChainRule().times(float64([0.2, 0.7])).tolist() == [0.2, 0.7]
    assert ChainRule().normalizer == 1


@pytest.mark.parametrize(
    ("build", "names"),
    [
        (lambda: Nelbo(Dirac(0.5)), "density"),
        (lambda: Nelbo(TruncatedGaussian(0.5, 0.01)), "widen it"),
        (lambda: Nelbo(DensityLaw(lambda t: (t > 0.5).double(), kinks=[0.5])), "zero"),
        (lambda: Nelbo(time_floor=-0.1), "time_floor"),
        (lambda: Nelbo(time_floor=1.0), "time_floor"),
        (lambda: Importance(Dirac(0.5)), "density"),
        (lambda: Importance(schedule=Cosine()), "linear schedule"),
        (lambda: Bell(Dirac(0.0), Cosine()), "masked"),
    ],
)
def test_combinations_without_a_meaning_are_refused(build, names):
    with pytest.raises(ValueError, match=names):
        build()


def test_narrow_laws_that_can_still_be_divided_by_are_accepted():
    """Density at the ends 1e-135: a huge weight, yet a number."""
    objective = Nelbo(TruncatedGaussian(0.5, 0.02))
    assert math.isfinite(float(objective.weight(float64(1e-9))))
