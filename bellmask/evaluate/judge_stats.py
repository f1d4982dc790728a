"""Win rates of A against B, with errors over tasks, by category, by turn and over seeds.

Rates are plain or length-controlled, by a model of two terms or by AlpacaEval's own. Turns of one
task move together, so a task is a cluster. Rates lie between 0 and 1; a rate of nothing is nan.
"""

from __future__ import annotations

import csv
import hashlib
import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from bellmask.evaluate.judge_prompts import Judged
from bellmask.utils.errors import UserError
from bellmask.utils.stats import MIN_CLUSTERS, Floats, Labels, clustered_error

# Win rates without the part that answers win by being longer: model against model, two terms.
#
# The preference for A is a logistic function of a constant and tanh(length difference / its
# standard deviation); what is predicted at difference 0 is the length-controlled win rate. Two
# terms, because instruction difficulties and calibration rows of the published model belong to
# another baseline (see the section below). The fit has no penalty, so that the rate is not pulled
# to one half; where no finite fit exists, a small named ridge makes one and the result says so.
# Swapping A and B turns a rate r into exactly 1 - r.
#
# N judged answers.

RIDGE = 0.01
"""Weight of |b|²/2 beside the summed loss; used only where the answers separate perfectly."""
SURE = 1e-6
"""A preference this close to 0 or 1 counts as sure when separation is looked for."""
TOLERANCE = 1e-12
"""Newton steps end when no slope, per judged answer, is larger."""
MAX_STEPS = 100


@dataclass(frozen=True)
class LengthControlled:
    """A length-controlled win rate, between 0 and 1."""

    rate: float
    """nan where length and preference cannot be told apart."""
    error: float
    """Standard error over tasks; nan where there is none."""
    constant: float
    slope: float
    """Of tanh(length difference / scale): above 0, longer answers win more often."""
    scale: float
    """Standard deviation of the length differences, in characters."""
    note: str | None = None
    """What a reader must know about this number."""
    is_separated: bool = False
    """No finite fit exists: the rate rests on the ridge."""


def two_term(
    preference: Floats, length_a: Floats, length_b: Floats, cluster: Labels | None = None
) -> LengthControlled:
    """Fit on preferences for A in [0, 1] and lengths of the answers in characters.

    Answers with the same ``cluster`` (turns of one question) are not independent: the error, by the
    delta method on a sandwich variance, sums their scores first.
    """
    y_N, difference_N = check_inputs(preference, length_a, length_b)
    cluster_N = np.arange(len(y_N)) if cluster is None else np.asarray(cluster)
    if len(cluster_N) != len(y_N):
        raise UserError(f"{len(cluster_N)} clusters for {len(y_N)} preferences")
    scale = float(difference_N.std(ddof=1)) if len(y_N) > 1 else 0.0
    if scale == 0:
        return _without_slope(y_N, difference_N, cluster_N)
    x_N2 = np.stack([np.ones(len(y_N)), np.tanh(difference_N / scale)], axis=1)
    is_separated = separates(x_N2[:, 1], y_N)
    b_2 = fit(x_N2, y_N, ridge=RIDGE if is_separated else 0.0)
    rate, constant, slope = float(sigmoid(b_2[:1])[0]), float(b_2[0]), float(b_2[1])
    if is_separated:
        note = (
            f"wins and losses separate perfectly, so no finite fit exists: fitted with a ridge of "
            f"{RIDGE}, without a standard error"
        )
        return LengthControlled(rate, float("nan"), constant, slope, scale, note, True)
    error = rate * (1 - rate) * float(np.sqrt(sandwich(x_N2, y_N, b_2, cluster_N)[0, 0]))
    return LengthControlled(rate, error, constant, slope, scale)


def check_inputs(preference: Floats, length_a: Floats, length_b: Floats) -> tuple[Floats, Floats]:
    """(preferences, length differences A - B), if they can be fitted."""
    y_N = np.asarray(preference, dtype=np.float64)
    difference_N = np.asarray(length_a, np.float64) - np.asarray(length_b, np.float64)
    if not len(y_N) or y_N.shape != difference_N.shape:
        raise UserError(
            f"length control needs a preference and two lengths for each answer, got "
            f"{len(y_N)} preferences and {len(difference_N)} pairs of lengths"
        )
    if not (np.isfinite(difference_N).all() and ((y_N >= 0) & (y_N <= 1)).all()):
        raise UserError("length control needs preferences from 0 to 1 and finite lengths")
    return y_N, difference_N


def _without_slope(y_N: Floats, difference_N: Floats, cluster_N: Labels) -> LengthControlled:
    """All differences are one number: at 0 the plain win rate stands, elsewhere nothing can."""
    nan = float("nan")
    if difference_N[0] != 0:
        note = "every length difference is the same: what length does cannot be told"
        return LengthControlled(nan, nan, nan, nan, 0.0, note)
    rate = float(y_N.mean())
    sums = np.bincount(np.unique(cluster_N, return_inverse=True)[1], weights=y_N - rate)
    count = len(sums)
    error = float(np.sqrt((sums**2).sum() * count / (count - 1))) / len(y_N) if count > 1 else nan
    with np.errstate(divide="ignore"):
        constant = float(np.log(rate) - np.log1p(-rate))
    note = "all answers are as long as their rivals: the plain win rate"
    return LengthControlled(rate, error, constant, 0.0, 0.0, note)


def separates(x_N: Floats, y_N: Floats) -> bool:
    """True if some threshold on x has all wins on one side and all losses on the other.

    Both may lie on the threshold itself. Then, and only then, the likelihood has no maximum.
    """
    won, lost = x_N[y_N > SURE], x_N[y_N < 1 - SURE]
    if not len(won) or not len(lost):
        return True
    return bool(won.min() >= lost.max() or lost.min() >= won.max())


def sigmoid(x: Floats) -> Floats:
    """1 / (1 + exp(-x)), without overflow."""
    return np.exp(-np.logaddexp(0.0, -x))


def soft_losses(x_NK: Floats, y_N: Floats, b_K: Floats) -> Floats:
    """Cross-entropy of each soft label, in nats."""
    z_N = x_NK @ b_K
    return np.logaddexp(0.0, z_N) - y_N * z_N


def fit(x_NK: Floats, y_N: Floats, *, ridge: float = 0.0) -> Floats:
    """Coefficients of a logistic regression on soft labels: Newton steps, halved where needed."""

    def objective(b_K: Floats) -> float:
        return float(soft_losses(x_NK, y_N, b_K).sum() + ridge / 2 * b_K @ b_K)

    num, size = x_NK.shape
    b_K = np.zeros(size)
    for _ in range(MAX_STEPS):
        p_N = sigmoid(x_NK @ b_K)
        slope_K = x_NK.T @ (p_N - y_N) + ridge * b_K
        if np.abs(slope_K).max() <= TOLERANCE * num:
            break
        bend_KK = (x_NK * (p_N * (1 - p_N))[:, None]).T @ x_NK + ridge * np.eye(size)
        step_K = np.linalg.lstsq(bend_KK, slope_K, rcond=None)[0]
        now, share = objective(b_K), 1.0
        while objective(b_K - share * step_K) > now and share > 1e-9:
            share /= 2
        b_K = b_K - share * step_K
    return b_K


def sandwich(x_NK: Floats, y_N: Floats, b_K: Floats, cluster_N: Labels) -> Floats:
    """[K, K] variance of the coefficients; labels need not be coin tosses, nor rows independent."""
    p_N = sigmoid(x_NK @ b_K)
    bend_KK = (x_NK * (p_N * (1 - p_N))[:, None]).T @ x_NK
    _, place_N = np.unique(cluster_N, return_inverse=True)
    count = int(place_N.max()) + 1
    if count < 2:
        return np.full(bend_KK.shape, np.nan)
    score_GK = np.zeros((count, x_NK.shape[1]))
    np.add.at(score_GK, place_N, x_NK * (y_N - p_N)[:, None])
    inverse_KK = np.linalg.pinv(bend_KK, hermitian=True)
    return inverse_KK @ (score_GK.T @ score_GK) @ inverse_KK * (count / (count - 1))


# AlpacaEval 2.0's length-controlled win rate against its own baseline, gpt4_1106_preview.
#
# The published model (length_controlled_v1): the preference for a model is a logistic function,
# without intercept, of tanh((baseline's length - model's length) / standard deviation), the
# instruction's difficulty and a constant. Rows of two "gamed" baselines (the same model told to be
# concise or verbose), of weight 0.1 each and with constant 0, keep the first two weights honest.
# Soft labels, an L1 penalty |b|_1 / C, C by 5-fold cross-validation. What is predicted at
# difference 0, averaged over the instructions, is the rate.
#
# N rows, K = 3 features.

GAMED_WEIGHT = 0.2 / 2
"""Of a calibration row: 0.2, shared by two such baselines."""
PENALTIES = tuple(np.logspace(-4, 4, 10).tolist())
"""Values of C that cross-validation tries."""
FOLDS = 5
SMALLEST_STEP = 1e-11
"""The fit ends when no coefficient moves by more."""
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


# AlpacaEval's files


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


# AlpacaEval's model


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


# Win rates of judged pairs, plain and length-controlled.


@dataclass(frozen=True)
class Rate:
    """A share, with its standard error over tasks (nan where one task is all there is)."""

    value: float
    error: float


@dataclass(frozen=True)
class WinRates:
    """How A did against B on some answers."""

    wins: int
    losses: int
    ties: int
    unreadable: int
    """Pairs without a readable verdict in both orders; they are in no rate."""
    win_rate: Rate
    """Mean preference for A: ties count half, a judge's probabilities as they are."""
    non_tie: Rate
    """wins / (wins + losses), the paper's MT-Bench number (Tab. 5)."""

    @property
    def judged(self) -> int:
        """Pairs with an outcome."""
        return self.wins + self.losses + self.ties


@dataclass(frozen=True)
class OverSeeds:
    """Mean ± deviation of a number over seeds (Tab. 5 has five)."""

    mean: float
    deviation: float
    """Sample standard deviation; nan for a single seed."""
    count: int
    """Seeds that have the number."""


def win_rates(judged: Sequence[Judged]) -> WinRates:
    """All outcomes together."""
    results = [one.outcome.result for one in judged]
    return WinRates(
        results.count("win"),
        results.count("loss"),
        results.count("tie"),
        results.count("unreadable"),
        win_rate=_rate(*_preferences(judged)),
        non_tie=_non_tie(judged),
    )


def by_category(judged: Sequence[Judged]) -> dict[str, list[Judged]]:
    """Outcomes of each category, in the benchmark's order."""
    return _by(judged, lambda one: one.pair.task.category)


def by_turn(judged: Sequence[Judged]) -> dict[str, list[Judged]]:
    """Outcomes of each turn, named "1", "2", ..."""
    return _by(judged, lambda one: str(one.pair.turn + 1))


def length_controlled(judged: Sequence[Judged]) -> LengthControlled | None:
    """The two-term length-controlled win rate; None where nothing was judged."""
    known = readable(judged)
    if not known:
        return None
    preference_N, cluster_N = _preferences(known)
    length_a, length_b = lengths(known)
    return two_term(preference_N, length_a, length_b, cluster_N)


def published_length_controlled(
    judged: Sequence[Judged], calibration: Calibration
) -> PublishedRate:
    """AlpacaEval's own length-controlled win rate of A; B must be its baseline's answers."""
    known = readable(judged)
    preference_N, index_N = _preferences(known)
    return published_rate(preference_N, *lengths(known), index_N.tolist(), calibration)


def lengths(judged: Sequence[Judged]) -> tuple[Floats, Floats]:
    """Characters of A's and B's answers to the turns judged."""
    a = np.array([len(one.pair.answers_a[-1]) for one in judged], dtype=np.float64)
    b = np.array([len(one.pair.answers_b[-1]) for one in judged], dtype=np.float64)
    return a, b


def readable(judged: Sequence[Judged]) -> list[Judged]:
    """Those with an outcome."""
    return [one for one in judged if one.outcome.preference is not None]


def over_seeds(values: Sequence[float]) -> OverSeeds:
    """Mean and sample standard deviation of what is a number."""
    known = np.array([value for value in values if np.isfinite(value)])
    nan = float("nan")
    mean = float(known.mean()) if len(known) else nan
    return OverSeeds(mean, float(known.std(ddof=1)) if len(known) > 1 else nan, len(known))


def _by(judged: Sequence[Judged], name: Callable[[Judged], str]) -> dict[str, list[Judged]]:
    groups: dict[str, list[Judged]] = {}
    for one in judged:
        groups.setdefault(name(one), []).append(one)
    return groups


def _preferences(judged: Sequence[Judged]) -> tuple[Floats, Labels]:
    """(preferences, tasks) of what has an outcome."""
    known = [
        (one.outcome.preference, one.pair.task.index)
        for one in judged
        if one.outcome.preference is not None
    ]
    preference_N = np.array([value for value, _ in known], dtype=np.float64)
    return preference_N, np.array([task for _, task in known], dtype=np.int64)


def _non_tie(judged: Sequence[Judged]) -> Rate:
    chosen = [one for one in judged if one.outcome.result in ("win", "loss")]
    won_N = np.array([one.outcome.result == "win" for one in chosen], dtype=np.float64)
    return _rate(won_N, np.array([one.pair.task.index for one in chosen], dtype=np.int64))


def _rate(value_N: Floats, cluster_N: Labels) -> Rate:
    if not len(value_N):
        return Rate(float("nan"), float("nan"))
    return Rate(float(value_N.mean()), clustered_error(value_N, cluster_N))


# Outcomes → the numbers of judge.json: rates of each seed, and over seeds (paper Table 5).

HEADLINES = ("win_rate", "non_tie", "length_controlled", "published_length_controlled")
"""Table 5 has the first three; the last one only with AlpacaEval's files."""
COUNTS = ("wins", "losses", "ties", "unreadable")
PARTS = {"by_category": by_category, "by_turn": by_turn}
ZERO = 1e-12
"""Errors below are 0 but for rounding."""
IN_FILE = "the fitted rate is in judge.json only"


def seed_numbers(judged: Sequence[Judged], calibration: Calibration | None) -> dict[str, Any]:
    """Rates of one seed; each headline has a value and its standard error over tasks."""
    rates = asdict(win_rates(judged))
    length_a, length_b = lengths(judged)
    numbers: dict[str, Any] = {
        "counts": {name: rates[name] for name in COUNTS},
        "win_rate": rates["win_rate"],
        "non_tie": rates["non_tie"],
        "length_controlled": _controlled(judged),
        "by_category": _rates(by_category(judged)),
        "by_turn": _rates(by_turn(judged)),
        "mean_length_a": float(length_a.mean()),
        "mean_length_b": float(length_b.mean()),
    }
    if calibration is not None:
        numbers["published_length_controlled"] = _published(judged, calibration)
    return numbers


def _rates(groups: dict[str, list[Judged]]) -> dict[str, Any]:
    return {name: asdict(win_rates(group)) for name, group in groups.items()}


def _controlled(judged: Sequence[Judged]) -> dict[str, Any]:
    """Two terms; nan where nothing was judged, not usable where the fit only reaches out."""
    found = length_controlled(judged)
    if found is None:
        nan = float("nan")
        return {"value": nan, "error": nan, "note": "nothing was judged", "is_usable": False}
    length_a, length_b = lengths(readable(judged))
    about = asdict(found)
    is_usable = not about.pop("is_separated")
    if (length_a < length_b).all() or (length_a > length_b).all():
        word = "shorter" if length_a[0] < length_b[0] else "longer"
        reach = f"A's answers are all {word} than B's, so equal length is out of the data's reach"
        about["note"] = "; ".join(filter(None, (about["note"], reach)))
        is_usable = False
    if not is_usable and np.isfinite(found.rate):
        about["note"] = f"{about['note']}; {IN_FILE}"
    return {"value": about.pop("rate"), **about, "is_usable": is_usable}


def _published(judged: Sequence[Judged], calibration: Calibration) -> dict[str, Any]:
    """AlpacaEval's own rate; where it cannot be had, the reason: the other rates stand."""
    try:
        about = asdict(published_length_controlled(judged, calibration))
    except UserError as error:
        return {"value": float("nan"), "error": float("nan"), "note": str(error)}
    return {"value": about.pop("rate"), **about, "weights": list(about["weights"])}


def summarize(
    results: Sequence[dict[str, Any]], judged: Sequence[Sequence[Judged]]
) -> dict[str, Any]:
    """Mean ± deviation over seeds of every headline that there is, and of categories and turns.

    ``judged`` holds the outcomes of each seed: errors over tasks come from all of them together,
    around the rate of all. A task is one cluster, whichever the seed.
    """
    everything = [one for seed in judged for one in seed]
    errors = _errors(everything, win_rates(everything))
    controlled = length_controlled(everything)
    errors["length_controlled"] = float("nan")
    if controlled is not None:
        errors["length_controlled"] = _known(controlled.error, readable(everything))
    found: dict[str, Any] = {}
    for name in (name for name in HEADLINES if name in results[0]):
        mine = [result[name] for result in results]
        # the full model's error is a spread of predictions, one for each seed
        spread = float(np.mean([one["error"] for one in mine]))
        found[name] = _over_seeds(mine, errors.get(name, spread))
    found["length_controlled"]["is_usable"] = all(
        result["length_controlled"]["is_usable"] for result in results
    )
    return found | {
        name: _part([result[name] for result in results], everything, split)
        for name, split in PARTS.items()
    }


def _errors(judged: Sequence[Judged], rates: WinRates) -> dict[str, float]:
    """Of the win rate over its tasks, of the non-tie rate over those that have a winner."""
    chosen = [one for one in judged if one.outcome.result in ("win", "loss")]
    return {
        "win_rate": _known(rates.win_rate.error, readable(judged)),
        "non_tie": _known(rates.non_tie.error, chosen),
    }


def _known(error: float, judged: Sequence[Judged]) -> float:
    """nan for an error of 0 over few tasks: that they agree says little of the next one."""
    num_tasks = len({one.pair.task.index for one in judged})
    return float("nan") if error < ZERO and num_tasks < MIN_CLUSTERS else error


def _over_seeds(values: Sequence[dict[str, Any]], error: float) -> dict[str, Any]:
    """Mean and deviation of the values, and the error over tasks."""
    return {**asdict(over_seeds([one["value"] for one in values])), "error": error}


def _part(
    seeds: Sequence[dict[str, Any]],
    judged: Sequence[Judged],
    split: Callable[[Sequence[Judged]], dict[str, list[Judged]]],
) -> dict[str, Any]:
    """Of each category or turn: counts of all seeds together, rates over seeds."""
    found = {}
    for name, group in split(judged).items():
        mine = [seed[name] for seed in seeds]
        together = win_rates(group)
        found[name] = {count: getattr(together, count) for count in COUNTS}
        found[name] |= {
            rate: _over_seeds([one[rate] for one in mine], error)
            for rate, error in _errors(group, together).items()
        }
    return found
