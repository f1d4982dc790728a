"""Objectives against exhaustive sums: every x0, every mask, every order of a tiny language.

The language has three tokens and blocks of four. A random joint distribution plays the data and a
random table, with one row per corrupted block, plays the model; nothing is learnt or fitted.
"""

import itertools
import math
from dataclasses import dataclass
from functools import cache, cached_property

import numpy as np
import pytest
from law_tools import float64, scipy_gaussian, scipy_laplace
from scipy import integrate, optimize

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


def cross_entropy(block, pattern, position):
    """Of the true token at one position, seeing the block through a mask."""
    seen = tuple(MASK if hidden else token for token, hidden in zip(block, pattern, strict=True))
    return -math.log(MODEL[seen][position, block[position]])


@cache
def summed_cross_entropy(pattern):
    """E over the data of the sum over masked positions."""
    return sum(
        p * sum(cross_entropy(block, pattern, i) for i in range(LENGTH) if pattern[i])
        for p, block in zip(DATA, BLOCKS, strict=True)
    )


def loss_at_context(observed):
    """Mean cross-entropy over all contexts of so many observed tokens and all masked positions."""
    chosen = [p for p in PATTERNS if LENGTH - sum(p) == observed]
    return np.mean([summed_cross_entropy(p) / sum(p) for p in chosen])


@cache
def any_order_loss():
    """Chain rule along every order of the positions, averaged, per token."""
    orders = list(itertools.permutations(range(LENGTH)))
    total = 0.0
    for order in orders:
        for k, position in enumerate(order):
            pattern = tuple(i not in order[:k] for i in range(LENGTH))
            total += sum(
                p * cross_entropy(b, pattern, position) for p, b in zip(DATA, BLOCKS, strict=True)
            )
    return total / len(orders) / LENGTH


def gaussian_pdf(mu, sigma):
    return scipy_gaussian(mu, sigma).pdf


def laplace_pdf(mu, b):
    return scipy_laplace(mu, b).pdf


def uniform_pdf(t):
    return 1.0


def first_time(objective):
    """The time at which the mask rate is the floor, by bisection."""
    floor = getattr(objective, "time_floor", 0.0)
    if floor == 0:
        return 0.0

    def above(t):
        return 1 - float(objective.schedule.alpha(float64(t))) - floor

    return optimize.brentq(above, 0, 1, xtol=1e-15)


@dataclass
class Case:
    """An objective, and the density of its drawing law in terms of scipy."""

    objective: Objective
    density: object
    points: tuple[float, ...] = ()
    """Where scipy's quadrature is told to look."""

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

        if isinstance(self.objective.law, Dirac):
            return at(self.objective.law.mu)
        first = first_time(self.objective)
        options = {"points": self.points, "epsabs": 1e-8, "epsrel": 1e-8, "norm": "max"}
        value, error = integrate.quad_vec(
            lambda s: self.density(s) * at(first + (1 - first) * s), 0, 1, **options
        )
        assert error < 1e-6
        return value

    @cached_property
    def c(self):
        return self.objective.normaliser

    @property
    def expected_loss(self):
        """Over data, times and masks, all masks enumerated; divided by L c."""
        total = sum(self.moments[LENGTH - sum(p)] * summed_cross_entropy(p) for p in PATTERNS[1:])
        return total / (LENGTH * self.c)


PEAK = (0.3, 0.5, 0.7)
STEEP = (0.001, 0.01, 0.1, 0.9, 0.99, 0.999)
FLAT = MiddleFlat(TruncatedGaussian(0.4, 0.25))
NARROW = TruncatedGaussian(0.5, 0.2)
EXACT_NELBO = {
    "nelbo": Case(Nelbo(), uniform_pdf),
    "nelbo-gaussian": Case(Nelbo(NARROW), gaussian_pdf(0.5, 0.2), PEAK),
    "nelbo-tilted": Case(Nelbo(TruncatedGaussian(1.2, 0.5)), gaussian_pdf(1.2, 0.5)),
    "nelbo-laplace": Case(Nelbo(TruncatedLaplace(0.4, 0.2)), laplace_pdf(0.4, 0.2), (0.4,)),
    "nelbo-density": Case(Nelbo(DensityLaw(lambda t: 1 + t)), lambda t: (1 + t) / 1.5),
    "nelbo-polynomial": Case(Nelbo(schedule=Polynomial(2.0)), uniform_pdf),
    "nelbo-cosine-gaussian": Case(Nelbo(NARROW, Cosine()), gaussian_pdf(0.5, 0.2), PEAK),
    "nelbo-middle-flat": Case(Nelbo(schedule=FLAT), uniform_pdf, STEEP),
}
LEFT, TWO_SIDED = TruncatedGaussian(0.2, 0.3), TruncatedLaplace(0.4, 0.1)
OTHERS = {
    "nelbo-floor": Case(Nelbo(time_floor=0.1), uniform_pdf),
    "nelbo-floor-mdlm": Case(Nelbo(time_floor=1e-3), uniform_pdf),
    "nelbo-floor-gaussian": Case(Nelbo(NARROW, time_floor=0.05), gaussian_pdf(0.5, 0.2), PEAK),
    "nelbo-floor-cosine": Case(Nelbo(schedule=Cosine(), time_floor=0.2), uniform_pdf),
    "bell": Case(Bell(), gaussian_pdf(0.5, 0.1), PEAK),
    "bell-tilted": Case(Bell(LEFT), gaussian_pdf(0.2, 0.3), PEAK),
    "bell-laplace": Case(Bell(TWO_SIDED), laplace_pdf(0.4, 0.1), (0.4,)),
    "bell-dirac": Case(Bell(Dirac(0.3)), None),
    "bell-dirac-one": Case(Bell(Dirac(1.0)), None),
    "bell-cosine": Case(Bell(schedule=Cosine()), gaussian_pdf(0.5, 0.1), PEAK),
    "bell-dirac-polynomial": Case(Bell(Dirac(0.3), Polynomial(2.0)), None),
    "bell-middle-flat": Case(Bell(Uniform(), FLAT), uniform_pdf, STEEP),
    "importance": Case(Importance(), uniform_pdf, PEAK),
    "importance-laplace": Case(Importance(TWO_SIDED), uniform_pdf, (0.4,)),
    "importance-over-t": Case(Importance(divide_by_t=True), uniform_pdf, PEAK),
    "importance-over-t-tilted": Case(Importance(LEFT, divide_by_t=True), uniform_pdf, PEAK),
}
ALL = {**EXACT_NELBO, **OTHERS}
every_case = pytest.mark.parametrize("case", ALL.values(), ids=ALL.keys())


@every_case
def test_expected_loss_is_the_weighted_sum_over_context_counts(case):
    """sum over N_c of omega(N_c) / (L c) * L^{N_c}, all parts enumerated."""
    share = context_weights(case.objective, LENGTH) / (LENGTH * case.c)
    shared_form = sum(float(share[n]) * loss_at_context(n) for n in range(LENGTH))
    assert case.expected_loss == pytest.approx(shared_form, rel=1e-7)


@pytest.mark.parametrize("case", EXACT_NELBO.values(), ids=EXACT_NELBO.keys())
def test_expected_nelbo_is_the_any_order_loss(case):
    """Whatever the law and the schedule."""
    assert case.expected_loss == pytest.approx(any_order_loss(), rel=1e-7)
    assert case.c == 1


def test_objectives_differ_on_a_model_that_is_not_optimal():
    """Guards the sums above: they would prove nothing if all losses were the same."""
    losses = [loss_at_context(n) for n in range(LENGTH)]
    assert np.ptp(losses) > 0.05
    for name in ("bell", "bell-dirac", "importance-over-t", "nelbo-floor"):
        assert abs(ALL[name].expected_loss / any_order_loss() - 1) > 1e-3


@every_case
def test_normaliser_is_the_mean_of_weight_times_mask_rate(case):
    assert case.c == pytest.approx(case.moments[-1], rel=1e-7)


@every_case
def test_times_are_the_quantiles_of_the_drawing_law(case):
    """The level of each time under scipy's density is the level it was drawn at."""
    levels = [0.05, 0.3, 0.5, 0.9]
    times = case.objective.times(float64(levels)).tolist()
    if isinstance(case.objective.law, Dirac):
        assert times == [case.objective.law.mu] * 4
        return
    first = first_time(case.objective)
    for u, t in zip(levels, times, strict=True):
        s = (t - first) / (1 - first)
        edges = [0.0, *(p for p in case.points if p < s), s]
        pieces = [integrate.quad(case.density, a, b)[0] for a, b in itertools.pairwise(edges)]
        assert sum(pieces) == pytest.approx(u, abs=1e-9)


def test_bell_leaves_rows_unweighted_and_says_so():
    for objective in (Bell(), ChainRule()):
        assert objective.is_unweighted
        assert objective.weight(float64([0.01, 0.5, 1.0])).tolist() == [1, 1, 1]
    assert not Nelbo().is_unweighted
    assert not Importance().is_unweighted
    assert ChainRule().times(float64([0.2, 0.7])).tolist() == [0.2, 0.7]
    assert ChainRule().normaliser == 1


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
