"""mdlm's estimators against exhaustive sums over masks, quadrature and closed forms."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from estimators import mask_rates, one_pass
from scipy import integrate, stats

from bellmask.data.blocks import Blocks, Row
from bellmask.data.toys import ExactDenoiser, ToySource
from bellmask.evaluate.likelihood import BlockScorer

LENGTH, SYMBOLS = 5, 3
SOURCE = ToySource.order_two(SYMBOLS, LENGTH, sharpness=4.0)
ROWS = ([0, 1, 2, 0, 0], [2, 2, 1, 0, 1])


def copies(count):
    """The two rows over and over."""
    return Blocks.from_rows(Row(np.array(ROWS[n % 2]), LENGTH, n) for n in range(count))


def toy_scorer(count):
    return BlockScorer(ExactDenoiser(SOURCE), copies(count), SYMBOLS)


def mean_loss(count):
    """The mean cross-entropy of ``count`` hidden tokens, over all masks of that size and rows."""
    values = []
    for row in ROWS:
        for hidden in itertools.combinations(range(LENGTH), count):
            x = torch.tensor([[SYMBOLS if i in hidden else s for i, s in enumerate(row)]])
            log_p = SOURCE.log_conditionals(x)[0]
            values.append(-np.mean([float(log_p[i, row[i]]) for i in hidden]))
    return float(np.mean(values))


LOSSES = [mean_loss(n) for n in range(1, LENGTH + 1)]


def loss_at(rate):
    """g(m): given that one token is hidden, the others are so with probability m."""
    return float(stats.binom.pmf(range(LENGTH), LENGTH - 1, rate) @ LOSSES)


def expected(floor):
    return integrate.quad(loss_at, floor, 1)[0] / (1 - floor)


@pytest.mark.parametrize("kind", ["stratified", "independent"])
@pytest.mark.parametrize("floor", [1e-3, 0.3])
def test_an_estimate_is_unbiased_but_for_the_floor(kind, floor):
    scorer = toy_scorer(2000)
    values = [
        one_pass(scorer, seed, kind=kind, time_floor=floor, batch_size=2000) for seed in range(24)
    ]
    error = np.std(values, ddof=1) / math.sqrt(len(values))
    assert error < 0.02
    assert abs(np.mean(values) - expected(floor)) < 4 * error
    if floor == 0.3:
        assert abs(expected(floor) - expected(0)) > 10 * error, "the floor's bias would be seen"
    # the truth itself: without a floor, the integral over rates is the mean over counts
    assert expected(0.0) == pytest.approx(np.mean(LOSSES), abs=1e-12)


def test_each_group_has_one_rate_in_each_stratum():
    rate = mask_rates(22, 3, kind="stratified", group=5, time_floor=0.1)
    orders = [((part - 0.1) / 0.9 * len(part)).long().tolist() for part in rate.split(5)]
    assert [sorted(order) for order in orders] == [[0, 1, 2, 3, 4]] * 4 + [[0, 1]]
    assert len({tuple(order) for order in orders[:4]}) > 1, "each group has its own order"


@pytest.mark.parametrize("kind", ["stratified", "independent"])
def test_the_noise_of_weights_is_the_closed_form(kind):
    """Loss 1 everywhere: Var(n / (m L)) = E[(1 - m) / m] / L, which a floor of 0 makes infinite.

    Exact counts would have no noise at all here.
    """
    length, count, floor = 20, 64, 0.01
    rows = [Row(np.zeros(length, dtype=np.int64), length, n) for n in range(count)]

    def constant_loss(x_BL, rows_N, targets_N, **_):
        return torch.ones(len(rows_N), dtype=torch.float64)

    scorer = BlockScorer(constant_loss, Blocks.from_rows(rows), SYMBOLS)
    values = [one_pass(scorer, seed, kind=kind, time_floor=floor) for seed in range(300)]
    variance = (math.log(1 / floor) / (1 - floor) - 1) / length / count
    assert np.var(values, ddof=1) == pytest.approx(variance, rel=0.2)
    assert abs(np.mean(values) - 1) < 4 * math.sqrt(variance / 300)
