"""Time laws and schedules against scipy, 40-digit integrals and the printed numbers."""

from __future__ import annotations

import json
import math

import mpmath
import numpy as np
import pytest
from law_tools import scipy_gaussian

from bellmask.analyze.time_laws import (
    SchedulesOptions,
    TimeLawsOptions,
    describe_law,
    measure_schedules,
    measure_time_laws,
    second_moment,
)
from bellmask.diffusion.laws import TruncatedGaussian
from bellmask.diffusion.schedules import Cosine, Linear, MiddleFlat, Polynomial
from bellmask.utils.progress import NO_PROGRESS


def test_the_tables_contexts_reach_from_end_to_end():
    for length, expected in ((128, [0, 16, 32, 64, 96, 127]), (1, [0]), (3, [0, 1, 2])):
        options = TimeLawsOptions(laws=("uniform",), length=length)
        assert measure_time_laws(options, NO_PROGRESS)["contexts"] == expected


@pytest.mark.parametrize(("mu", "sigma"), [(0.4, 0.1), (0.6, 0.2)])
def test_moments_are_those_of_scipy(mu, sigma):
    law, known = describe_law(TruncatedGaussian(mu, sigma), 8), scipy_gaussian(mu, sigma)
    assert np.mean(law["relative_weights"]) == pytest.approx(1)
    assert law["normalizer"] == pytest.approx(known.mean(), abs=1e-12)
    assert law["mean"] == pytest.approx(known.mean(), abs=1e-12)
    assert law["sd"] == pytest.approx(known.std(), abs=1e-10)
    t = np.linspace(0, 1, len(law["density"]))
    assert law["density"] == pytest.approx(known.pdf(t), rel=1e-10)


def test_bell_verdicts_of_the_shipped_laws():
    laws = measure_time_laws(TimeLawsOptions(length=8), NO_PROGRESS)["laws"]
    bells = {text for text, law in laws.items() if law["bell_test"]["is_bell_shaped"]}
    assert set(laws) - bells == {"uniform", "dirac:0.4", "dirac:0.6"}
    assert len(bells) == 13
    uniform, atom = laws["uniform"], laws["dirac:0.4"]
    assert uniform["sd"] == pytest.approx(math.sqrt(1 / 12), abs=1e-14)
    assert uniform["relative_weights"] == pytest.approx([2 * (8 - n) / 9 for n in range(8)])
    assert (atom["mean"], atom["sd"], atom["density"]) == (0.4, 0.0, None)
    assert atom["all_masked"] == pytest.approx(0.4**8)


def test_second_moments_are_those_of_integrals():
    """E[(w (1 - alpha))^2] = integral of alpha'^2: 2815 for the middle-flat schedule."""
    scale = mpmath.mpf(0.1)
    f = lambda a: mpmath.exp(-((a - 0.5) ** 2) / 2 / scale**2)  # noqa: E731
    edges = [mpmath.mpf(i) / 10 for i in range(11)]
    flat = mpmath.quad(f, edges) * mpmath.quad(lambda a: 1 / f(a), edges)
    assert round(float(flat)) == 2815
    assert second_moment(MiddleFlat()) == pytest.approx(float(flat), rel=1e-11)
    assert second_moment(Linear()) == pytest.approx(1, abs=1e-14)
    assert second_moment(Cosine()) == pytest.approx(math.pi**2 / 8, rel=1e-12)
    for power in (0.75, 1.0, 3.0):
        exact = mpmath.quad(lambda t, p=power: (p * t ** (p - 1)) ** 2, [0, 1])
        assert second_moment(Polynomial(power)) == pytest.approx(float(exact), rel=1e-6)


@pytest.fixture(scope="module")
def schedules():
    found = measure_schedules(SchedulesOptions(), NO_PROGRESS)
    return json.loads(json.dumps(found, allow_nan=False))


def test_schedules_are_the_known_ones(schedules):
    share, t = np.array(schedules["share"]), np.array(schedules["t"])
    flat = scipy_gaussian(0.5, 0.1)
    density = {
        "linear": np.ones_like(share),
        "cosine": 2 / (np.pi * np.sqrt(1 - (1 - share) ** 2)),
        "polynomial": 0.5 / np.sqrt(1 - share),
        "middle_flat": flat.pdf(share),
    }
    alpha = {"linear": 1 - t, "polynomial": 1 - t**2, "middle_flat": flat.ppf(1 - t)}
    rate = {"linear": 1 / 2, "cosine": 2 / math.pi, "polynomial": 1 / 3, "middle_flat": 1 / 2}
    for name, found in schedules["schedules"].items():
        assert found["density"] == pytest.approx(density[name], rel=1e-6)
        assert found["weight"] == pytest.approx(1 / density[name], rel=1e-9)
        assert found["alpha"] == pytest.approx(alpha.get(name, found["alpha"]), abs=1e-9)
        assert found["mean_mask_rate"] == pytest.approx(rate[name], abs=1e-9)
        assert found["bell_test"]["is_bell_shaped"] == (name == "middle_flat")
        assert np.mean(found["histogram"]) == pytest.approx(1)
    expected = np.diff(flat.cdf(np.linspace(0, 1, 41))) * 40
    assert schedules["schedules"]["middle_flat"]["histogram"] == pytest.approx(expected, abs=0.1)
    assert schedules["target_density"] == pytest.approx(density["middle_flat"], rel=1e-9)
