"""AlpacaEval 2.0's length-controlled win rate against its own baseline, gpt4_1106_preview.

The published model (length_controlled_v1): the preference for a model is a logistic function,
without intercept, of tanh((baseline's length - model's length) / standard deviation), the
instruction's difficulty and a constant. Rows of two "gamed" baselines (the same model told to be
concise or verbose), of weight 0.1 each and with constant 0, keep the first two weights honest. Soft
labels, an L1 penalty |b|_1 / C, C by 5-fold cross-validation. What is predicted at difference 0,
averaged over the instructions, is the rate.

N rows, K = 3 features.
"""

from __future__ import annotations

import csv
import hashlib
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from bellmask.judge.length_control import Floats, check_inputs, sigmoid, soft_losses
from bellmask.utils.errors import UserError

GAMED_WEIGHT = 0.2 / 2
"""Of a calibration row: 0.2, shared by two such baselines."""
PENALTIES = tuple(np.logspace(-4, 4, 10).tolist())
"""Values of C that cross-validation tries."""
FOLDS = 5
SMALLEST_STEP = 1e-11
"""The fit ends when no coefficient moves by more."""
MAX_STEPS = 100
DIFFICULTY_SHA256 = "e28d875bb334f75e17acd1e4ed659b261860e3db379cf5de29060301bed0a18b"
GAMED_SHA256 = "97aeec3f1c7de6dee6fd31fe66f1702623f4614c3efe1c6fc5f4927cd5fd674d"


@dataclass(frozen=True)
class Calibration:
    """What the published model needs besides a model's preferences."""

    difficulty: dict[int, float]
    """By instruction number, 0 to 804."""
    x_NK: Floats
    """Features of the gamed rows; the constant's column is 0."""
    y_N: Floats
    """Their preferences, from 0 to 1."""
    labels: dict[str, str]
    """File → published, reconstructed, recovered or unknown."""

    @property
    def note(self) -> str | None:
        """What a reader must know when a file is not the published one."""
        other = [
            f"{name} is {label}" for name, label in self.labels.items() if label != "published"
        ]
        return f"not with the published files: {', '.join(other)}" if other else None


@dataclass(frozen=True)
class PublishedRate:
    """The rate of length_controlled_v1, between 0 and 1."""

    rate: float
    error: float
    """As published: the spread of predictions over instructions, not the error of the fit."""
    weights: tuple[float, float, float]
    """Of length, difficulty and constant."""
    penalty: float
    """C, as cross-validation chose it."""
    note: str | None


# --- files -----------------------------------------------------------------------------------


def read_calibration(difficulty: Path, gamed: Path) -> Calibration:
    """Read instruction_difficulty.csv and df_gamed.csv; stand-ins are labelled by their name."""
    by_number = {}
    for place, row in _rows(difficulty, {"instruction_difficulty"}):
        number = next(iter(row.values()))  # the first column, whatever its name
        by_number[_whole(number, place)] = _number(row, "instruction_difficulty", place)
    needed = {"index", "preference", "std_delta_len", "instruction_difficulty"}
    features, labels = [], []
    for place, row in _rows(gamed, needed):
        spread = _number(row, "std_delta_len", place)
        features.append((np.tanh(spread), _number(row, "instruction_difficulty", place), 0.0))
        labels.append(_number(row, "preference", place))
    if not 0 <= min(labels) <= max(labels) <= 1:
        raise UserError(f"{gamed}: column 'preference' must lie between 0 and 1")
    marks = {
        difficulty.name: _label(difficulty, DIFFICULTY_SHA256),
        gamed.name: _label(gamed, GAMED_SHA256),
    }
    return Calibration(by_number, np.array(features), np.array(labels), marks)


def _rows(path: Path, needed: set[str]) -> Iterable[tuple[str, dict[str, str]]]:
    try:
        with path.open(encoding="utf-8", newline="") as stream:
            rows = list(csv.DictReader(stream, strict=True))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise UserError(f"cannot read {path}: {error}") from None
    if not rows or not needed <= set(rows[0]):
        found = ", ".join(map(str, rows[0])) if rows else "no rows"
        raise UserError(f"{path} needs the columns {', '.join(sorted(needed))}; it has {found}")
    return [(f"{path}, row {number}", row) for number, row in enumerate(rows, start=1)]


def _number(row: dict[str, str], column: str, place: str) -> float:
    try:
        value = float(row[column])
    except (TypeError, ValueError):
        value = float("nan")
    if not np.isfinite(value):
        raise UserError(f"{place}: {column} is {row[column]!r}, not a number")
    return value


def _whole(text: str, place: str) -> int:
    try:
        return int(text)
    except (TypeError, ValueError):
        raise UserError(f"{place}: {text!r} is not the number of an instruction") from None


def _label(path: Path, sha256: str) -> str:
    """By content; what is not the published file is told apart by its name."""
    if hashlib.sha256(path.read_bytes()).hexdigest() == sha256:
        return "published"
    named = (word for word in ("reconstructed", "recovered") if word in path.name)
    return next(named, "another file than the published one")


# --- the model -------------------------------------------------------------------------------


def published_rate(
    preference: Floats,
    length_model: Floats,
    length_baseline: Floats,
    index: Sequence[int],
    calibration: Calibration,
) -> PublishedRate:
    """The rate from preferences for the model (0 to 1), lengths in characters, instruction numbers.

    Needs answers to at least :data:`FOLDS` instructions, all of them in the difficulties.
    """
    y_N, difference_N = check_inputs(preference, length_baseline, length_model)
    if len(index) != len(y_N) or len(y_N) < FOLDS:
        raise UserError(
            f"the published length control needs an instruction number for each of at least "
            f"{FOLDS} preferences, got {len(y_N)} preferences and {len(index)} numbers"
        )
    if missing := sorted(set(index) - set(calibration.difficulty)):
        raise UserError(f"the instruction difficulties have no number {missing[0]}")
    scale = difference_N.std(ddof=1)
    if scale == 0:
        raise UserError("every length difference is the same: what length does cannot be told")
    difficulty_N = np.array([calibration.difficulty[number] for number in index])
    x_NK = np.stack([np.tanh(difference_N / scale), difficulty_N, np.ones(len(y_N))], axis=1)
    all_x = np.concatenate([calibration.x_NK, x_NK])
    all_y = np.concatenate([calibration.y_N, y_N])
    weight_N = np.repeat([GAMED_WEIGHT, 1.0], [len(calibration.y_N), len(y_N)])
    penalty = choose_penalty(all_x, all_y, weight_N)
    b_K = fit_l1(all_x, all_y, weight_N, penalty)
    predicted_N = sigmoid(x_NK[:, 1:] @ b_K[1:])
    error = float(predicted_N.std(ddof=1) / np.sqrt(len(predicted_N)))
    weights = (float(b_K[0]), float(b_K[1]), float(b_K[2]))
    return PublishedRate(float(predicted_N.mean()), error, weights, penalty, calibration.note)


def choose_penalty(x_NK: Floats, y_N: Floats, weight_N: Floats) -> float:
    """The C with the smallest weighted loss on rows left out; of equal ones the smallest.

    As published: folds are dealt from the last row to the first, one row at a time (both copies of
    a soft label are in one fold), and a fold's loss is a mean over its rows.
    """
    fold_N = np.arange(len(y_N))[::-1] % FOLDS
    total = np.zeros(len(PENALTIES))
    for fold in range(FOLDS):
        is_out = fold_N == fold
        for number, penalty in enumerate(PENALTIES):
            b_K = fit_l1(x_NK[~is_out], y_N[~is_out], weight_N[~is_out], penalty)
            loss_N = soft_losses(x_NK[is_out], y_N[is_out], b_K)
            total[number] += np.mean(loss_N * weight_N[is_out])
    return PENALTIES[int(np.argmin(total))]


def fit_l1(x_NK: Floats, y_N: Floats, weight_N: Floats, penalty: float) -> Floats:
    """Coefficients that make ``penalty`` * sum(weight * loss) + |b|_1 smallest.

    Newton steps: the loss is replaced by its parabola at b, the penalty kept as it is. Exact to
    rounding, where a quasi-Newton method stops early: the losses that decide between two values of
    C differ by 1e-7.
    """
    share_N = weight_N / weight_N.sum()
    price = 1 / (penalty * weight_N.sum())

    def objective(b_K: Floats) -> float:
        return float(share_N @ soft_losses(x_NK, y_N, b_K) + price * np.abs(b_K).sum())

    b_K = np.zeros(x_NK.shape[1])
    for _ in range(MAX_STEPS):
        p_N = sigmoid(x_NK @ b_K)
        slope_K = x_NK.T @ (share_N * (p_N - y_N))
        bend_KK = (x_NK * (share_N * p_N * (1 - p_N))[:, None]).T @ x_NK
        step_K = _lowest_point(slope_K, bend_KK, b_K, price) - b_K
        now, part = objective(b_K), 1.0
        while objective(b_K + part * step_K) > now and part > SMALLEST_STEP:
            part /= 2
        b_K = b_K + part * step_K
        if np.abs(step_K).max() < SMALLEST_STEP:
            break
    return b_K


def _lowest_point(slope_K: Floats, bend_KK: Floats, b_K: Floats, price: float) -> Floats:
    """Where parabola + price * |.|_1 is lowest: the lowest of the points that each choice of signs
    (27 for three coefficients) would have, if they have those signs.
    """
    pull_K = slope_K - bend_KK @ b_K
    best_K, lowest = np.zeros(len(b_K)), 0.0
    for signs in itertools.product((-1.0, 0.0, 1.0), repeat=len(b_K)):
        sign_K = np.array(signs)
        part, tilt_K, u_K = sign_K != 0, pull_K + price * sign_K, np.zeros(len(b_K))
        try:
            u_K[part] = np.linalg.solve(bend_KK[np.ix_(part, part)], -tilt_K[part])
        except np.linalg.LinAlgError:
            continue
        value = float(tilt_K @ u_K + u_K @ bend_KK @ u_K / 2)
        if (np.sign(u_K) == sign_K).all() and value < lowest:
            best_K, lowest = u_K, value
    return best_K
