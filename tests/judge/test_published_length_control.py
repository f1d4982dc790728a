"""The published length control: conditions of a minimum, scikit-learn, and the leaderboard."""

from __future__ import annotations

import hashlib
import json
import math
import os
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from bellmask.errors import UserError
from bellmask.judge import published_length_control as published
from bellmask.judge.published_length_control import (
    PENALTIES,
    Calibration,
    choose_penalty,
    fit_l1,
    published_rate,
    read_calibration,
)

SHARED = Path(os.environ.get("BELLMASK_TEST_DATA", Path(__file__).parents[3] / "shared" / "data"))
ALPACA = SHARED / "alpaca_eval"
Floats = NDArray[np.float64]
needs_alpaca = pytest.mark.skipif(
    not ALPACA.exists(), reason="needs alpaca_eval in $BELLMASK_TEST_DATA"
)


def logistic(z: Floats) -> Floats:
    return 1 / (1 + np.exp(-z))


def problem(seed: int, count: int = 120) -> tuple[Floats, Floats, Floats]:
    draw = np.random.default_rng(seed)
    x = np.stack([np.tanh(draw.normal(size=count)), draw.normal(size=count), np.ones(count)], 1)
    x[: count // 2, 2] = 0
    y = logistic(x @ [-1.0, 0.5, -1.5] + draw.normal(size=count))
    return x, y, np.repeat([0.1, 1.0], [count // 2, count - count // 2])


@pytest.mark.parametrize("penalty", [1e-4, 0.03, 1.0, 20.0, 1e4])
def test_the_l1_fit_meets_the_conditions_of_a_minimum(penalty: float) -> None:
    """Slope of the loss: -sign(b) / C where b is not 0, at most 1 / C where it is."""
    zeros = 0
    for seed in range(6):
        x, y, weight = problem(seed)
        b = fit_l1(x, y, weight, penalty)
        slope = penalty * x.T @ (weight * (logistic(x @ b) - y))
        is_zero = b == 0
        zeros += int(is_zero.sum())
        np.testing.assert_allclose(
            slope[~is_zero], -np.sign(b[~is_zero]), atol=1e-6 * (1 + penalty)
        )
        assert (np.abs(slope[is_zero]) <= 1 + 1e-9).all()
    assert zeros == (18 if penalty == 1e-4 else 0) or penalty == 0.03


def test_the_l1_fit_is_that_of_liblinear() -> None:
    """Soft labels as two rows, as the published code does; liblinear with a fine tolerance."""
    linear = pytest.importorskip("sklearn.linear_model")
    for seed, penalty in ((0, 0.05), (1, 1.0), (2, 21.5)):
        x, y, weight = problem(seed)
        rows, labels = np.concatenate([x, x]), np.repeat([1, 0], len(y))
        weights = np.concatenate([y * weight, (1 - y) * weight])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the option's name is about to change
            model = linear.LogisticRegression(
                C=penalty,
                penalty="l1",
                solver="liblinear",
                fit_intercept=False,
                tol=1e-9,
                max_iter=20_000,
            ).fit(rows, labels, sample_weight=weights)
        np.testing.assert_allclose(fit_l1(x, y, weight, penalty), model.coef_[0], atol=1e-5)


def test_the_penalty_is_the_one_with_the_smallest_loss_on_rows_left_out() -> None:
    """A second way: scikit-learn's own folds over soft labels written as two rows."""
    selection = pytest.importorskip("sklearn.model_selection")
    x, y, weight = problem(3, 60)
    groups = np.tile(np.arange(60), 2)
    rows = np.zeros((120, 1))
    losses = []
    for penalty in PENALTIES:
        total = 0.0
        for train, test in selection.GroupKFold(5).split(rows, groups=groups):
            kept, out = np.unique(groups[train]), np.unique(groups[test])
            p = logistic(x[out] @ fit_l1(x[kept], y[kept], weight[kept], penalty))
            loss = -(y[out] * np.log(p) + (1 - y[out]) * np.log(1 - p))
            total += float(np.mean(weight[out] * loss))
        losses.append(total)
    assert choose_penalty(x, y, weight) == PENALTIES[int(np.argmin(losses))]
    assert 0 < int(np.argmin(losses)) < 9


def alpaca_7b() -> tuple[Floats, Floats, Floats]:
    """(preferences for alpaca-7b, its lengths, the baseline's lengths), all published."""
    rows = json.loads((ALPACA / "alpaca-7b.preferences.json").read_text(encoding="utf-8"))
    columns = [[row[name] for row in rows] for name in ("preference", "len_2", "len_1")]
    preference, own, baseline = np.array(columns, dtype=np.float64)
    return preference - 1, own, baseline


@needs_alpaca
def test_alpaca_7b_has_the_length_controlled_rate_of_the_leaderboard() -> None:
    """5.8755 and the weights published beside it; with stand-ins, which the result must say."""
    calibration = read_calibration(
        ALPACA / "recovered_instruction_difficulty.csv", ALPACA / "df_gamed_reconstructed.csv"
    )
    found = published_rate(*alpaca_7b(), range(805), calibration)
    assert 100 * found.rate == pytest.approx(5.8755, abs=0.01)
    assert found.penalty == pytest.approx(21.544, abs=0.01)
    assert "recovered_instruction_difficulty.csv is recovered" in (found.note or "")
    assert "df_gamed_reconstructed.csv is reconstructed" in (found.note or "")
    file = ALPACA / "length_controlled_v1.baseline_gpt4_1106_preview.csv"
    lines = file.read_text(encoding="utf-8").splitlines()
    row = next(line for line in lines if line.startswith("alpaca-7b,"))
    expected = [float(value) for value in row.split(",")[1:]]
    np.testing.assert_allclose(found.weights, expected, atol=1e-3)


@needs_alpaca
def test_without_the_gamed_rows_the_rate_is_another() -> None:
    """6.50 instead of 5.88, with hardly a penalty: they matter, so they are asked for."""
    whole = read_calibration(
        ALPACA / "recovered_instruction_difficulty.csv", ALPACA / "df_gamed_reconstructed.csv"
    )
    y, own, baseline = alpaca_7b()
    spread = (baseline - own) / (baseline - own).std(ddof=1)
    difficulty = np.array([whole.difficulty[number] for number in range(805)])
    x = np.stack([np.tanh(spread), difficulty, np.ones(805)], 1)
    b = fit_l1(x, y, np.ones(805), 1000.0)
    assert 100 * logistic(x[:, 1:] @ b[1:]).mean() == pytest.approx(6.50, abs=0.01)


def write_files(folder: Path, difficulty: str, gamed: str) -> tuple[Path, Path]:
    paths = folder / "instruction_difficulty.csv", folder / "df_gamed.csv"
    for path, text in zip(paths, (difficulty, gamed), strict=True):
        path.write_text(text, encoding="utf-8")
    return paths


HEAD = "model,preference,index,std_delta_len,instruction_difficulty,not_gamed_baseline\n"
GAMED = HEAD + "a,0.2,0,1.5,0.1,False\nb,0.7,1,-1.5,0.2,False\n"
DIFFICULTY = ",instruction_difficulty\n0,0.1\n1,0.2\n"


def test_calibration_files_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = write_files(tmp_path, DIFFICULTY, GAMED)
    found = read_calibration(*paths)
    assert found.difficulty == {0: 0.1, 1: 0.2}
    np.testing.assert_allclose(
        found.x_NK, [[math.tanh(1.5), 0.1, 0.0], [math.tanh(-1.5), 0.2, 0.0]]
    )
    np.testing.assert_allclose(found.y_N, [0.2, 0.7])
    assert "another file than the published one" in (found.note or "")
    for name, path in zip(("DIFFICULTY_SHA256", "GAMED_SHA256"), paths, strict=True):
        mark = hashlib.sha256(path.read_bytes()).hexdigest()
        monkeypatch.setattr(published, name, mark)
    assert read_calibration(*paths).note is None


@pytest.mark.parametrize(
    ("difficulty", "gamed", "message"),
    [
        ("", GAMED, "it has no rows"),
        ("index,hardness\n0,1\n", GAMED, "needs the columns instruction_difficulty; it has index"),
        (
            "index,instruction_difficulty\n0,hard\n",
            GAMED,
            "row 1: instruction_difficulty is 'hard'",
        ),
        ("index,instruction_difficulty\nx,1\n", GAMED, "'x' is not the number of an instruction"),
        (DIFFICULTY, "index,preference\n0,1\n", "needs the columns index, instruction_difficulty"),
        (DIFFICULTY, HEAD + "a,1.2,0,1,0,False\n", "'preference' must lie between 0 and 1"),
        (DIFFICULTY, HEAD + "a,nan,0,1,0,False\n", "preference is 'nan', not a number"),
        (DIFFICULTY, HEAD + "a,0.5\n", "std_delta_len is None, not a number"),
    ],
)
def test_what_is_wrong_with_a_calibration_file_is_said(
    tmp_path: Path, difficulty: str, gamed: str, message: str
) -> None:
    with pytest.raises(UserError, match=message):
        read_calibration(*write_files(tmp_path, difficulty, gamed))
    with pytest.raises(UserError, match="cannot read"):
        read_calibration(tmp_path / "none.csv", tmp_path / "none.csv")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"index": [0, 1, 2, 3]}, "got 6 preferences and 4 numbers"),
        ({"index": [0, 1, 2, 3, 4, 99]}, "have no number 99"),
        ({"length_model": np.full(6, 5.0), "length_baseline": np.ones(6)}, "cannot be told"),
        ({"preference": np.full(6, 2.0)}, "preferences from 0 to 1"),
    ],
)
def test_impossible_inputs_of_the_published_model_are_refused(
    change: dict[str, Any], message: str
) -> None:
    difficulty = {number: 0.1 * number for number in range(6)}
    calibration = Calibration(difficulty, np.ones((2, 3)), np.ones(2), {})
    good: dict[str, Any] = {
        "preference": np.linspace(0.1, 0.9, 6),
        "length_model": np.arange(6.0),
        "length_baseline": np.ones(6),
        "index": range(6),
    }
    assert 0 < published_rate(**good, calibration=calibration).rate < 1
    with pytest.raises(UserError, match=message):
        published_rate(**{**good, **change}, calibration=calibration)
