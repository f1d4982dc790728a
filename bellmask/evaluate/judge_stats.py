"""Win rates of A against B, with errors over tasks, by category, by turn and over seeds.

Rates are plain or length-controlled, by a model of two terms or by AlpacaEval's own. Turns of one
task move together, so a task is a cluster. Rates lie between 0 and 1; a rate without data is nan.
"""

from __future__ import annotations

import csv
import hashlib
import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from bellmask.evaluate.judge_prompts import Judged
from bellmask.utils.errors import UserError
from bellmask.utils.stats import MIN_CLUSTERS, Estimate, Floats, Labels, clustered_error

Numbers = dict[str, Any]

# Length-controlled win rates between two models, with two terms.
#
# The preference for A is a logistic function of a constant and tanh(length difference / its
# standard deviation); its prediction at difference 0 is the length-controlled win rate. Two terms,
# because instruction difficulties and calibration rows of the published model are specific to
# another baseline (see below). The fit has no penalty, so that the rate is not pulled to one half;
# if no finite fit exists, a small ridge is used and the result says so. Swapping A and B
# turns a rate r into exactly 1 - r.
#
# N judged answers.

RIDGE = 0.01
"""Weight of |b|²/2 in the summed loss; used only if the answers separate perfectly."""
SURE = 1e-6
"""A preference this close to 0 or 1 counts as certain in the separation test."""
SMALLEST_STEP = 1e-11
"""Convergence tolerance of the coefficients."""
MAX_STEPS = 100
SAME_DIFFERENCE = "all length differences are equal: the effect of length cannot be estimated"


@dataclass(frozen=True)
class LengthControlled:
    """A length-controlled win rate, between 0 and 1, as stored in judge.json."""

    value: float = float("nan")
    """nan if the effect of length cannot be separated."""
    error: float = float("nan")
    """Standard error over tasks; nan where there is none."""
    constant: float = float("nan")
    slope: float = float("nan")
    """Of tanh(length difference / scale): above 0, longer answers win more often."""
    scale: float = 0.0
    """Standard deviation of the length differences, in characters."""
    note: str | None = None
    """A note on this number."""
    is_usable: bool = True
    """False if the rate depends on the ridge or is an extrapolation."""


# Paper: Table 5
def two_term(
    preference: Floats, length_a: Floats, length_b: Floats, cluster: Labels
) -> LengthControlled:
    """Fit on preferences for A in [0, 1] and lengths of the answers in characters.

    Answers with the same ``cluster`` (turns of one question) are not independent: the error, by the
    delta method on a sandwich variance, sums their scores first.
    """
    y_N, difference_N = preference, length_a - length_b
    if not len(y_N):
        return LengthControlled(note="nothing was judged", is_usable=False)
    scale = float(difference_N.std(ddof=1)) if len(y_N) > 1 else 0.0
    if scale:
        found = _with_slope(y_N, difference_N / scale, cluster)
    elif difference_N[0]:
        found = LengthControlled(note=SAME_DIFFERENCE)
    else:
        rate = float(y_N.mean())
        with np.errstate(divide="ignore"):
            constant = float(np.log(rate) - np.log1p(-rate))
        note = "all answers have the length of their rivals: the plain win rate"
        found = LengthControlled(rate, clustered_error(y_N, cluster), constant, 0.0, note=note)
    notes, is_usable = [found.note], found.is_usable
    for word, is_beyond in (("shorter", difference_N < 0), ("longer", difference_N > 0)):
        if is_beyond.all():
            reach = "so equal length is an extrapolation"
            notes.append(f"A's answers are all {word} than B's, {reach}")
            is_usable = False
    if not is_usable and np.isfinite(found.value):
        notes.append("the fitted rate is in judge.json only")
    joined = "; ".join(filter(None, notes)) or None
    return replace(found, scale=scale, note=joined, is_usable=is_usable)


def _with_slope(y_N: Floats, difference_N: Floats, cluster: Labels) -> LengthControlled:
    x_N2 = np.stack([np.ones(len(y_N)), np.tanh(difference_N)], axis=1)
    is_separated = separates(x_N2[:, 1], y_N)
    b_2 = fit(x_N2, y_N, ridge=RIDGE if is_separated else 0.0)
    rate, constant, slope = float(sigmoid(b_2[:1])[0]), float(b_2[0]), float(b_2[1])
    if is_separated:
        note = (
            f"wins and losses separate perfectly, so no finite fit exists: fitted with a ridge of "
            f"{RIDGE}, without a standard error"
        )
        return LengthControlled(rate, constant=constant, slope=slope, note=note, is_usable=False)
    error = rate * (1 - rate) * float(np.sqrt(sandwich(x_N2, y_N, b_2, cluster)[0, 0]))
    return LengthControlled(rate, error, constant, slope)


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


def fit(
    x_NK: Floats, y_N: Floats, weight_N: Floats | float = 1, *, ridge: float = 0, l1: float = 0
) -> Floats:
    """Coefficients of a logistic regression on soft labels, which minimize sum(weight * loss) +
    ridge |b|^2 / 2 + l1 |b|_1.

    Newton steps: the loss is replaced by its parabola at b, the absolute values are kept as they
    are; a step that increases the objective is halved. Exact up to rounding, whereas a quasi-Newton
    method stops early: the losses that decide between two values of C below differ by 1e-7.
    """

    def objective(b_K: Floats) -> float:
        loss = (weight_N * soft_losses(x_NK, y_N, b_K)).sum()
        return float(loss + ridge / 2 * b_K @ b_K + l1 * np.abs(b_K).sum())

    b_K = np.zeros(x_NK.shape[1])
    for _ in range(MAX_STEPS):
        p_N = sigmoid(x_NK @ b_K)
        slope_K = x_NK.T @ (weight_N * (p_N - y_N)) + ridge * b_K
        bend_KK = _bend(x_NK, weight_N * p_N * (1 - p_N)) + ridge * np.eye(len(b_K))
        step_K = _lowest_point(slope_K - bend_KK @ b_K, bend_KK, l1) - b_K
        now, share = objective(b_K), 1.0
        while objective(b_K + share * step_K) > now and share > SMALLEST_STEP:
            share /= 2
        b_K = b_K + share * step_K
        if np.abs(step_K).max() < SMALLEST_STEP:
            break
    return b_K


def _bend(x_NK: Floats, weight_N: Floats) -> Floats:
    """[K, K] curvature of a weighted sum of squares."""
    return (x_NK * weight_N[:, None]).T @ x_NK


def _lowest_point(pull_K: Floats, bend_KK: Floats, l1: float) -> Floats:
    """Where a parabola + l1 * |.|_1 is lowest: the lowest of the points that each choice of signs
    (27 for three coefficients) would have, if they have those signs.
    """
    best_K, lowest = np.zeros(len(pull_K)), 0.0
    for signs in itertools.product((-1.0, 0.0, 1.0), repeat=len(pull_K)):
        sign_K = np.array(signs)
        part, tilt_K, u_K = sign_K != 0, pull_K + l1 * sign_K, np.zeros(len(pull_K))
        try:
            u_K[part] = np.linalg.solve(bend_KK[np.ix_(part, part)], -tilt_K[part])
        except np.linalg.LinAlgError:
            continue
        value = float(tilt_K @ u_K + u_K @ bend_KK @ u_K / 2)
        if (np.sign(u_K) == sign_K).all() and value < lowest:
            best_K, lowest = u_K, value
    return best_K


def sandwich(x_NK: Floats, y_N: Floats, b_K: Floats, cluster_N: Labels) -> Floats:
    """[K, K] variance of the coefficients; labels need not be coin tosses, nor rows independent."""
    p_N = sigmoid(x_NK @ b_K)
    bend_KK = _bend(x_NK, p_N * (1 - p_N))
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
"""Values of C for cross-validation."""
FOLDS = 5
DIFFICULTY_SHA256 = "e28d875bb334f75e17acd1e4ed659b261860e3db379cf5de29060301bed0a18b"
GAMED_SHA256 = "97aeec3f1c7de6dee6fd31fe66f1702623f4614c3efe1c6fc5f4927cd5fd674d"


@dataclass(frozen=True)
class Calibration:
    """Data of the published model besides the preferences."""

    difficulty: dict[int, float]
    """By instruction number, 0 to 804."""
    x_NK: Floats
    """Features of the gamed rows; the constant's column is 0."""
    y_N: Floats
    """Their preferences, from 0 to 1."""
    note: str | None
    """A note if a file is not the published one."""


def read_calibration(difficulty: Path, gamed: Path) -> Calibration:
    """Read instruction_difficulty.csv and df_gamed.csv; stand-ins are labeled by their name."""
    number_N, difficulty_N = _columns(difficulty, (FIRST, "instruction_difficulty"))
    by_number = dict(zip(number_N.astype(int).tolist(), difficulty_N.tolist(), strict=True))
    names = ("std_delta_len", "instruction_difficulty", "preference")
    spread_N, difficulty_N, y_N = _columns(gamed, names)
    if not 0 <= y_N.min() <= y_N.max() <= 1:
        raise UserError(f"{gamed}: column 'preference' must lie between 0 and 1")
    x_NK = np.stack([np.tanh(spread_N), difficulty_N, np.zeros(len(y_N))], axis=1)
    labels = [_label(difficulty, DIFFICULTY_SHA256), _label(gamed, GAMED_SHA256)]
    others = ", ".join(filter(None, labels))
    note = f"not with the published files: {others}" if others else None
    return Calibration(by_number, x_NK, y_N, note)


FIRST = "the first column"
"""With any name."""


def _columns(path: Path, names: Sequence[str]) -> Floats:
    """[column, row] numbers of a table."""
    try:
        with path.open(encoding="utf-8", newline="") as stream:
            rows = [{FIRST: next(iter(row.values())), **row} for row in csv.DictReader(stream)]
        found = np.array([[float(row[name]) for row in rows] for name in names])
    except (OSError, ValueError, KeyError, TypeError, csv.Error) as error:
        raise UserError(f"{path} needs numbers in {', '.join(names)}: {error}") from None
    if not found.size or not np.isfinite(found).all():
        raise UserError(f"{path} needs rows with a finite number in each of {', '.join(names)}")
    return found


def _label(path: Path, sha256: str) -> str | None:
    """None for the published file, by content; others are identified by name."""
    if hashlib.sha256(path.read_bytes()).hexdigest() == sha256:
        return None
    named = (word for word in ("reconstructed", "recovered") if word in path.name)
    return f"{path.name} is {next(named, 'another file than the published one')}"


def published_length_controlled(judged: Sequence[Judged], calibration: Calibration) -> Numbers:
    """AlpacaEval's own length-controlled win rate of A; B must be its baseline's answers.

    The error is as published: the spread of predictions over instructions, not that of the fit.
    If there is no rate, the note gives the reason; other rates are unaffected.
    """
    y_N, length_a, length_b, index_N = columns(judged)
    difference_N = length_b - length_a
    if len(y_N) < FOLDS or difference_N.std(ddof=1) == 0:
        few = f"it needs at least {FOLDS} readable verdicts, got {len(y_N)}"
        note = few if len(y_N) < FOLDS else SAME_DIFFERENCE
        return {"value": float("nan"), "error": float("nan"), "note": note}
    length_N = np.tanh(difference_N / difference_N.std(ddof=1))
    difficulty_N = np.array([calibration.difficulty[number] for number in index_N.tolist()])
    x_NK = np.stack([length_N, difficulty_N, np.ones(len(y_N))], axis=1)
    all_x = np.concatenate([calibration.x_NK, x_NK])
    all_y = np.concatenate([calibration.y_N, y_N])
    weight_N = np.repeat([GAMED_WEIGHT, 1.0], [len(calibration.y_N), len(y_N)])
    penalty = choose_penalty(all_x, all_y, weight_N)
    b_K = fit_l1(all_x, all_y, weight_N, penalty)
    predicted_N = sigmoid(x_NK[:, 1:] @ b_K[1:])
    return {
        "value": float(predicted_N.mean()),
        "error": float(predicted_N.std(ddof=1) / np.sqrt(len(predicted_N))),
        "weights": b_K.tolist(),
        "penalty": penalty,
        "note": calibration.note,
    }


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
    """Coefficients that make ``penalty`` * sum(weight * loss) + |b|_1 smallest."""
    total = weight_N.sum()
    return fit(x_NK, y_N, weight_N / total, l1=1 / (penalty * total))


# Win rates of judged pairs → the numbers of judge.json: of each seed, and over seeds (Table 5).

COUNTS = {"wins": "win", "losses": "loss", "ties": "tie", "unreadable": "unreadable"}
PARTS: dict[str, Callable[[Judged], str]] = {
    "by_category": lambda one: one.pair.task.category,
    "by_turn": lambda one: str(one.pair.turn + 1),
}
ZERO = 1e-12
"""Smaller errors are 0 up to rounding."""


def columns(judged: Sequence[Judged]) -> tuple[Floats, Floats, Floats, Labels]:
    """Of what is readable: preferences for A, characters of A's and B's answers to the turn that
    was judged, and tasks, the clusters of all errors.
    """
    known = [one for one in judged if one.preference is not None]
    y_N = np.array([one.preference for one in known], dtype=np.float64)
    length_a = np.array([len(one.pair.answers_a[-1]) for one in known], dtype=np.float64)
    length_b = np.array([len(one.pair.answers_b[-1]) for one in known], dtype=np.float64)
    return y_N, length_a, length_b, np.array([one.pair.task.index for one in known], dtype=np.int64)


# Paper: Table 5
def win_rates(judged: Sequence[Judged]) -> dict[str, Estimate]:
    """Rates with their errors over tasks, of which there are ``n``.

    The win rate is the mean preference for A: ties count half, a judge's probabilities as they are.
    The non-tie rate is wins / (wins + losses), the paper's MT-Bench number (Tab. 5). Unreadable
    verdicts are excluded.
    """
    y_N, _, _, task_N = columns(judged)
    decided = [one for one in judged if one.result in ("win", "loss")]
    won_N = np.array([one.result == "win" for one in decided], dtype=np.float64)
    return {"win_rate": _mean(y_N, task_N), "non_tie": _mean(won_N, columns(decided)[-1])}


def _mean(value_N: Floats, task_N: Labels) -> Estimate:
    if not len(value_N):
        return Estimate(float("nan"), float("nan"), 0)
    error = clustered_error(value_N, task_N)
    return Estimate(float(value_N.mean()), error, len(np.unique(task_N)))


def count_results(judged: Sequence[Judged]) -> dict[str, int]:
    """Numbers of wins, losses, ties and unreadable verdicts."""
    results = Counter(str(one.result) for one in judged)
    return {name: results[result] for name, result in COUNTS.items()}


def split(judged: Sequence[Judged], part: str) -> dict[str, list[Judged]]:
    """By category or turn, in the benchmark's order."""
    groups: dict[str, list[Judged]] = {}
    for one in judged:
        groups.setdefault(PARTS[part](one), []).append(one)
    return groups


def seed_numbers(judged: Sequence[Judged], calibration: Calibration | None) -> Numbers:
    """Rates of one seed; each headline has a value and its standard error over tasks."""

    def rates(judged: Sequence[Judged]) -> Numbers:
        found = win_rates(judged).items()
        return {name: {"value": rate.value, "error": rate.se} for name, rate in found}

    numbers: Numbers = {
        "counts": count_results(judged),
        **rates(judged),
        "length_controlled": asdict(two_term(*columns(judged))),
        "mean_length_a": float(np.mean([len(one.pair.answers_a[-1]) for one in judged])),
        "mean_length_b": float(np.mean([len(one.pair.answers_b[-1]) for one in judged])),
    }
    for part in PARTS:
        groups = split(judged, part).items()
        numbers[part] = {name: count_results(group) | rates(group) for name, group in groups}
    if calibration is not None:
        numbers["published_length_controlled"] = published_length_controlled(judged, calibration)
    return numbers


def summarize(results: Sequence[Numbers], judged: Sequence[Sequence[Judged]]) -> Numbers:
    """Mean ± deviation over seeds of every headline that there is, and of categories and turns.

    ``judged`` holds the outcomes of each seed: errors over tasks come from all of them together,
    around the rate of all. A task is one cluster, whichever the seed.
    """
    everything = [one for seed in judged for one in seed]
    rates, pooled = win_rates(everything), two_term(*columns(everything))
    rates["length_controlled"] = Estimate(pooled.value, pooled.error, rates["win_rate"].n)
    found = {
        name: _over_seeds([result[name] for result in results], _known_error(rate))
        for name, rate in rates.items()
    }
    is_usable = all(result["length_controlled"]["is_usable"] for result in results)
    found["length_controlled"]["is_usable"] = is_usable
    name = "published_length_controlled"
    if full := [result[name] for result in results if name in result]:
        # the full model's error is a spread of predictions, one for each seed
        found[name] = _over_seeds(full, float(np.mean([one["error"] for one in full])))
    for part in PARTS:
        found[part] = {}
        for name, group in split(everything, part).items():
            found[part][name] = count_results(group) | {
                rate: _over_seeds([one[part][name][rate] for one in results], _known_error(value))
                for rate, value in win_rates(group).items()
            }
    return found


def _known_error(rate: Estimate) -> float | None:
    """nan for an error of 0 over few tasks, which is not informative."""
    is_certain = rate.se is not None and rate.se < ZERO
    return float("nan") if is_certain and rate.n < MIN_CLUSTERS else rate.se


def _over_seeds(values: Sequence[Numbers], error: float | None) -> Numbers:
    """Mean ± sample deviation of what is a number (Tab. 5 has five seeds); error over tasks."""
    known = np.array([one["value"] for one in values if np.isfinite(one["value"])])
    return {
        "mean": float(known.mean()) if len(known) else float("nan"),
        "deviation": float(known.std(ddof=1)) if len(known) > 1 else float("nan"),
        "count": len(known),
        "error": error,
    }
