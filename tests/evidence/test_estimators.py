"""The comparison of estimators: errors of errors, passes needed, and what a run's numbers say."""

from __future__ import annotations

import math

import estimators
import numpy as np
import pytest
from counted_progress import Counted
from estimators import one_pass

from bellmask.run import load_run
from bellmask.utils.rng import stream_key


def test_passes_needed_by_hand():
    one, ours = {"se": 0.4, "error": 0.04}, {"se": 0.1, "error": 0.01}
    found = estimators.passes_needed(one, 4, ours)
    assert found["value"] == pytest.approx((0.4 / 2 / 0.1) ** 2)
    assert found["error"] == pytest.approx(4 * 2 * math.hypot(0.1, 0.1))
    both = estimators.overall(one, {4: ours, 1: {"se": 0.4, "error": 0.04}})
    assert both["value"] == pytest.approx(2.0), "the geometric mean of 4 and 1"
    assert both["error"] == pytest.approx(2 * 2 * math.hypot(0.1, math.hypot(0.1, 0.1) / 2))


def test_noise_is_the_deviation_of_repeated_estimates(zoo):
    """All estimators agree, and ours is the quietest."""
    progress = Counted()
    options = estimators.EstimatorOptions(
        runs=(str(zoo / "bell"),), blocks=32, draws=(4, 1), repeats=12
    )
    (found,) = estimators.ESTIMATORS.measure(options, progress)["runs"]
    assert progress.totals == [progress.done]
    assert [row["passes"] for row in found["rows"]] == [32, 128]
    run = load_run(zoo / "bell")
    blocks = run.blocks()[1].spread(32)
    keys = [stream_key(1234, "estimators", "stratified", n) for n in range(48)]
    singles = np.array([one_pass(run.scorer(blocks), key, kind="stratified") for key in keys])
    first, last = found["rows"]
    assert first["stratified"]["se"] == pytest.approx(singles.std(ddof=1), rel=1e-5)
    fours = singles.reshape(12, 4).mean(1)
    assert last["stratified"]["se"] == pytest.approx(fours.std(ddof=1), rel=1e-5)
    seeds = [stream_key(1234, "estimators", "exact", 4, n) for n in range(12)]
    exact = np.array([run.evaluate(blocks, draws=4, seed=seed).nll for seed in seeds])
    assert last["exact"]["se"] == pytest.approx(exact.std(ddof=1), rel=1e-5)
    ratio = (singles.std(ddof=1) / exact.std(ddof=1)) ** 2 / 4
    assert last["stratified_passes"]["value"] == pytest.approx(ratio, rel=1e-4)
    ours = found["means"]["exact"]
    for kind in estimators.KINDS:
        other = found["means"][kind]
        assert abs(other["value"] - ours["value"]) < 4 * math.hypot(other["error"], ours["error"])
        assert found["passes_needed"][kind]["value"] > 1.5
    assert abs(found["floor_bias"]["value"]) < 1e-3 * ours["value"]
