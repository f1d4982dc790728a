"""The comparison of estimators: errors of errors, passes needed, and what a run's numbers say."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bellmask.analyze.estimators import (
    ESTIMATORS,
    KINDS,
    EstimatorOptions,
    overall,
    passes_needed,
    spread,
)
from bellmask.assemble import train_run
from bellmask.config import RunConfig
from bellmask.errors import UserError
from bellmask.evaluate.estimators import one_pass
from bellmask.rng import stream_key
from bellmask.run import load_run


def test_spread_by_hand() -> None:
    found = spread([0.0, 0.0, 0.0, 4.0])
    assert found["se"] == pytest.approx(2.0)
    fourth = (3 * 1 + 81) / 4
    assert found["error"] == pytest.approx(math.sqrt((fourth - 16) / 4) / (2 * 2))


@pytest.mark.parametrize("draw", ["normal", "laplace"])
def test_the_error_of_a_spread_is_its_deviation_over_experiments(draw: str) -> None:
    generator = np.random.default_rng(4)
    samples = getattr(generator, draw)(size=(2000, 64))
    found = [spread(sample) for sample in samples]
    truth = np.std([one["se"] for one in found])
    assert np.mean([one["error"] for one in found]) == pytest.approx(truth, rel=0.12)


def test_passes_needed_by_hand() -> None:
    one, ours = {"se": 0.4, "error": 0.04}, {"se": 0.1, "error": 0.01}
    found = passes_needed(one, 4, ours)
    assert found["value"] == pytest.approx((0.4 / 2 / 0.1) ** 2)
    assert found["error"] == pytest.approx(4 * 2 * math.hypot(0.1, 0.1))
    both = overall(one, {4: ours, 1: {"se": 0.4, "error": 0.04}})
    assert both["value"] == pytest.approx(2.0), "the geometric mean of 4 and 1"
    assert both["error"] == pytest.approx(2 * 2 * math.hypot(0.1, math.hypot(0.1, 0.1) / 2))


@pytest.fixture(scope="module")
def runs(small_config: Callable[..., RunConfig], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    train_run(small_config("--train.steps", "20"), folder / "bell", is_quiet=True)
    train_run(small_config("--framework", "arm"), folder / "arm", is_quiet=True)
    return folder


def options(runs: Path, **changes: Any) -> EstimatorOptions:
    base: dict[str, Any] = {"blocks": 32, "draws": (4, 1), "repeats": 12}
    return EstimatorOptions((str(runs / "bell"),), **{**base, **changes})


def ignore(done: int, total: int) -> None:
    pass


@pytest.fixture(scope="module")
def numbers(runs: Path) -> dict[str, Any]:
    return ESTIMATORS.measure(options(runs), ignore)


def test_noise_is_the_deviation_of_repeated_estimates(runs: Path, numbers: dict[str, Any]) -> None:
    (found,) = numbers["runs"]
    assert [row["passes"] for row in found["rows"]] == [32, 128]
    run = load_run(runs / "bell")
    blocks = run.blocks()[1].spread(32)
    keys = [stream_key(1234, "estimators", "stratified", n) for n in range(48)]
    singles = np.array([one_pass(run.scorer(blocks), key, kind="stratified") for key in keys])
    first, last = found["rows"]
    assert first["stratified"]["se"] == pytest.approx(singles.std(ddof=1), rel=1e-6)
    fours = singles.reshape(12, 4).mean(1)
    assert last["stratified"]["se"] == pytest.approx(fours.std(ddof=1), rel=1e-6)
    seeds = [stream_key(1234, "estimators", "exact", 4, n) for n in range(12)]
    exact = np.array([run.evaluate(blocks, draws=4, seed=seed).nll for seed in seeds])
    assert last["exact"]["se"] == pytest.approx(exact.std(ddof=1), rel=1e-6)
    ratio = (singles.std(ddof=1) / exact.std(ddof=1)) ** 2 / 4
    assert last["stratified_passes"]["value"] == pytest.approx(ratio, rel=1e-5)


def test_all_estimators_agree_and_ours_is_the_quietest(numbers: dict[str, Any]) -> None:
    (found,) = numbers["runs"]
    ours = found["means"]["exact"]
    for kind in KINDS:
        other = found["means"][kind]
        assert abs(other["value"] - ours["value"]) < 4 * math.hypot(other["error"], ours["error"])
        assert found["passes_needed"][kind]["value"] > 1.5
    assert abs(found["floor_bias"]["value"]) < 1e-3 * ours["value"]


def test_progress_ends_at_the_total(runs: Path) -> None:
    seen: list[tuple[int, int]] = []
    small = options(runs, blocks=4, draws=(1, 2), repeats=4)
    ESTIMATORS.measure(small, lambda done, total: seen.append((done, total)))
    assert seen[0][0] == 0
    assert seen[-1][0] == seen[-1][1] == 4 * (4 * (3 + 2 * 2) + 8)
    assert len({total for _, total in seen}) == 1


def test_the_tables_and_the_figure_show_every_number(numbers: dict[str, Any]) -> None:
    noise, needed, means = ESTIMATORS.tables(numbers)
    assert [row[0] for row in noise.rows] == ["32 (32 x 1)", "128 (32 x 4)"]
    last = numbers["runs"][0]["rows"][1]
    assert noise.rows[1][1] == f"{last['exact']['se']:.4f} ± {last['exact']['error']:.4f}"
    assert noise.rows[1][4].endswith("times")
    assert [row[0] for row in needed.rows] == list(KINDS)
    assert means.rows[-1][0] == "bias of the time floor 0.001"
    (axes,) = ESTIMATORS.figure(numbers).axes
    labels = [text.get_text() for text in axes.get_legend().get_texts()]
    assert labels[2:] == ["exact counts (ours)", "stratified rates (mdlm)", "independent rates"]
    drawn = axes.containers[0].lines[0].get_ydata()
    assert list(drawn) == [row["exact"]["se"] for row in numbers["runs"][0]["rows"]]
    slope = {line.get_linestyle(): np.asarray(line.get_ydata()) for line in axes.get_lines()}
    for style, power in (("--", -0.5), (":", -1.0)):
        first, last = slope[style].astype(float)
        assert math.log(last / first) == pytest.approx(power * math.log(4))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"blocks": 1}, "--blocks must be at least 2"),
        ({"repeats": 3}, "--repeats at least 4"),
        ({"draws": ()}, "--draws wants different positive numbers"),
        ({"draws": (2, 2)}, "--draws wants different positive numbers"),
        ({"draws": (0, 2)}, "--draws wants different positive numbers"),
        ({"time_floor": 0.0}, "variance of weighted estimates is infinite"),
    ],
)
def test_what_cannot_be_measured_is_refused(
    runs: Path, changes: dict[str, Any], words: str
) -> None:
    with pytest.raises(UserError, match=words):
        ESTIMATORS.measure(options(runs, **changes), ignore)


def test_a_causal_run_has_no_masks(runs: Path) -> None:
    with pytest.raises(UserError, match="arm is arm: it has no masks to compare"):
        ESTIMATORS.measure(EstimatorOptions((str(runs / "arm"),)), ignore)
