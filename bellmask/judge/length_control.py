"""Win rates without the part that answers win by being longer: model against model, two terms.

The preference for A is a logistic function of a constant and tanh(length difference / its standard
deviation); what is predicted at difference 0 is the length-controlled win rate. Two terms, because
instruction difficulties and calibration rows of the published model belong to another baseline
(:mod:`bellmask.judge.published_length_control` is that one). The fit has no penalty, so that the
rate is not pulled to one half; where no finite fit exists, a small named ridge makes one and the
result says so. Swapping A and B turns a rate r into exactly 1 - r.

N judged answers.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bellmask.utils.errors import UserError

Floats = NDArray[np.float64]
Labels = NDArray[np.int64]

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
