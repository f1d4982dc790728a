"""Masks without long runs, against all 2^L strings, exact fractions and 40-digit integrals."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction

import mpmath
import pytest

from bellmask.analyze.time_laws import (
    ACCURACY,
    Efficiency,
    InefficientMasksOptions,
    check_counts,
    efficient_counts,
    mask_count_law,
    rises_in_time,
    run_lengths,
    time_weights,
)
from bellmask.diffusion.laws import Dirac, TruncatedGaussian, TruncatedLaplace, Uniform
from bellmask.diffusion.theory import bell_test

KINDS = (TruncatedGaussian, TruncatedLaplace)
BELLS = [kind(mu, s) for kind in KINDS for mu in (0.4, 0.5, 0.6) for s in (0.1, 0.2)]


def brute_counts(length, k):
    """Strings without a run of k, by number of masks."""
    found = [0] * (length + 1)
    for bits in itertools.product((0, 1), repeat=length):
        longest = max(len(list(group)) for _, group in itertools.groupby(bits))
        found[sum(bits)] += longest < k
    return found


def run_by_run(length, k):
    """N(a, L - a) by the last run: A(a, b) = sum over j < k of B(a - j, b), B(a, b) = A(b, a)."""
    ends = {}
    for size in range(1, length + 1):
        for a in range(size + 1):
            b = size - a
            whole = int(b == 0 and 1 <= a < k)
            ends[a, b] = whole + sum(ends.get((b, a - j), 0) for j in range(1, min(k - 1, a) + 1))
    return [ends[a, length - a] + ends[length - a, a] for a in range(length + 1)]


def test_counts_are_those_of_all_strings():
    for length in (2, 3, 7, 10):
        for k in range(2, length + 2):
            assert efficient_counts(length, k) == brute_counts(length, k) == run_by_run(length, k)
    for k in (2, 3, 8, 31, 63, 64):
        assert efficient_counts(64, k) == run_by_run(64, k)


@pytest.mark.parametrize("length", [3, 128, pytest.param(1024, marks=pytest.mark.long)])
@pytest.mark.parametrize("law", [TruncatedGaussian(0.4, 0.1), TruncatedLaplace(0.6, 0.2)])
def test_the_law_of_mask_counts_is_that_of_40_digits(law, length):
    got = mask_count_law(law, length)
    assert float(got.sum()) == pytest.approx(1, abs=ACCURACY)

    def density(t):
        distance = abs(t - mpmath.mpf(law.mu))
        if isinstance(law, TruncatedGaussian):
            return mpmath.exp(-(distance**2) / 2 / mpmath.mpf(law.sigma) ** 2)
        return mpmath.exp(-distance / mpmath.mpf(law.b))

    with mpmath.workdps(40):
        edges = {*(mpmath.mpf(i) / 16 for i in range(17)), mpmath.mpf(law.mu)}
        total = mpmath.quad(density, sorted(edges))
        for n in {0, 1, length // 3, length // 2, length}:
            near = {mpmath.mpf(n) / length + d / mpmath.mpf(100) for d in range(-9, 10, 3)}
            near = sorted(edge for edge in edges | near if 0 <= edge <= 1)
            ways = mpmath.binomial(length, n)  # inside the integral, whose error is absolute
            exact = mpmath.quad(
                lambda t, n=n, ways=ways: ways * t**n * (1 - t) ** (length - n) * density(t), near
            )
            assert abs(float(got[n]) * total / exact - 1) < ACCURACY / 4


def exact_q(length, k):
    return [Fraction(c, math.comb(length, n)) for n, c in enumerate(run_by_run(length, k))]


@pytest.mark.parametrize("length", [2, 3, 9, 12])
def test_probabilities_and_lemmas_hold_in_fractions(length):
    weights = time_weights(length)
    for k in range(2, length + 1):
        q, counts = exact_q(length, k), efficient_counts(length, k)
        half = Fraction(sum(counts), 2**length)
        truth = {Uniform(): sum(q, Fraction(0)) / (length + 1), Dirac(0.5): half}
        for law, expected in truth.items():
            got = Efficiency(counts).probability(mask_count_law(law, length))
            assert got["efficient"] == pytest.approx(float(expected), rel=1e-13)
            assert got["inefficient"] == pytest.approx(float(1 - expected), rel=1e-13)
            assert got["log10_efficient"] == pytest.approx(math.log10(expected), abs=1e-12)
        up = [(q[n], q[n + 1]) for n in range(length) if 2 * n < length]
        assert check_counts(counts) == {
            "is_symmetric": q == q[::-1],
            "rises_to_the_middle": all(a <= b for a, b in up),
            "level_steps": sum(a == b and a > 0 for a, b in up),
        }
        assert rises_in_time(counts, weights)


def test_checks_can_fail():
    good = efficient_counts(8, 4)
    assert not check_counts([*good[:2], good[2] + 1, *good[3:]])["is_symmetric"]
    dip = [*good[:4], 0, *good[5:]]
    assert check_counts(dip)["is_symmetric"]
    assert not check_counts(dip)["rises_to_the_middle"]
    # q(n) falls though N(n) rises: C(8, n) grows faster
    slow = [0, 8, 9, 10, 11, 10, 9, 8, 0]
    assert not check_counts(slow)["rises_to_the_middle"]
    everything = [math.comb(8, n) for n in range(9)]  # k > L: R(t) = 1, which does not rise
    assert check_counts(everything)["level_steps"] == 4
    assert not rises_in_time(everything, time_weights(8))
    assert not rises_in_time([1, 0, 0, 0, 0, 0, 0, 0, 1], time_weights(8))


def margin(length, k, law):
    efficiency = Efficiency(efficient_counts(length, k))
    return efficiency.margin(mask_count_law(law, length), mask_count_law(Uniform(), length))


@pytest.mark.parametrize("length", [2, 7, 65])
def test_prop_44_holds_for_every_bell(length):
    for law in [Dirac(0.5), *BELLS]:
        for k in {2, 3, 8, length // 2, length} & set(range(2, length + 1)):
            assert margin(length, k, law)["verdict"] == "holds", (k, law)


def test_margins_near_one_and_near_zero_keep_their_digits():
    high = margin(128, 128, Dirac(0.5))  # only the two constant strings are inefficient
    assert high["margin"] == pytest.approx(2 / 129 - 2.0**-127, rel=1e-14)
    assert high["relative"] == pytest.approx(1, abs=1e-14)
    low = margin(1024, 2, Dirac(0.5))  # only the two alternating strings are efficient
    ratio = Fraction(1025 * math.comb(1024, 512), 2**1024)
    assert low["relative"] == pytest.approx(float(ratio - 1), rel=1e-10)
    exact = Fraction(2, 2**1024) - Fraction(2, 1025 * math.comb(1024, 512))
    assert low["margin"] == pytest.approx(float(exact), rel=1e-10, abs=0)
    # too small for a float, and still compared
    assert margin(1200, 2, Dirac(0.5))["verdict"] == "holds"
    weights = mask_count_law(Dirac(0.5), 1200)
    got = Efficiency(efficient_counts(1200, 2)).probability(weights)
    assert got["log10_efficient"] == pytest.approx(-1199 * math.log10(2), rel=1e-13)


def test_a_margin_below_double_precision_is_not_called_a_pass():
    nearly_flat = TruncatedGaussian(0.5, 1e5)
    assert bell_test(nearly_flat).is_bell_shaped
    assert margin(16, 4, nearly_flat)["verdict"] == "undecided"
    assert margin(16, 4, TruncatedGaussian(0.5, 100.0))["verdict"] == "holds"
    assert margin(16, 4, Uniform())["verdict"] == "undecided"
    assert margin(128, 2, Dirac(0.4))["verdict"] == "fails"  # no bell


def test_defaults_fit_short_blocks():
    assert run_lengths(InefficientMasksOptions(length=3)) == ([3], [2, 3], 3)
    assert run_lengths(InefficientMasksOptions(length=8)) == ([4, 6, 8], [*range(2, 9)], 8)
    found = run_lengths(InefficientMasksOptions(ks=(40, 4)))
    assert found == ([4, 40], [*range(2, 33), 40], 32)
