"""Speed-ups of curves with a closed form, against bisection, scipy and binomial sums."""

import math

import numpy as np
import pytest
import scipy.stats

from bellmask.compare.results import arrival, detrended_spread, paired_bootstrap, speed_up

STEPS = [100.0, 200.0, 300.0, 500.0, 700.0, 1000.0]
A, B = 6.0, 0.4
"""NLL = A - B log(step): a straight line in the coordinates of the interpolation."""


def by_bisection(steps, nll, target):
    """(step, is_bound) or None, from the text: first index whose whole tail is at the target."""
    starts = [i for i in range(len(nll)) if all(value <= target for value in nll[i:])]
    if not starts:
        return None
    if starts[0] == 0:
        return steps[0], True
    low, high = math.log(steps[starts[0] - 1]), math.log(steps[starts[0]])
    for _ in range(100):
        middle = (low + high) / 2
        is_there = np.interp(middle, np.log(steps), nll) <= target
        low, high = (low, middle) if is_there else (middle, high)
    return math.exp(high), False


@pytest.mark.parametrize(
    ("nll", "found"),
    [
        ([5.0, math.nan, 2.0], (pytest.approx(100.0), False)),
        ([5.0, math.inf, 2.0], (pytest.approx(100.0), False)),
        ([math.nan, 2.0, 2.0], (pytest.approx(10.0), False)),
        ([math.inf, 4.0, 2.0], (pytest.approx(math.sqrt(1000)), False)),
        ([5.0, 2.0, math.nan], None),
    ],
)
def test_broken_values_are_above_and_nothing_is_interpolated_from_them(nll, found):
    assert arrival([1, 10, 100], nll, 3.0) == found


def test_random_curves_arrive_where_bisection_says():
    """Whole numbers make ties, returns and curves that never arrive common."""
    rng, seen = np.random.default_rng(1), {"never": 0, "bound": 0, "inside": 0}
    for _ in range(2000):
        count = int(rng.integers(1, 9))
        steps = np.cumsum(rng.integers(1, 50, count)).astype(float).tolist()
        nll = rng.integers(0, 5, count).astype(float)
        nll -= rng.choice([0.0, 0.4]) * np.arange(count)
        target = float(rng.integers(0, 4))
        found, truth = arrival(steps, nll.tolist(), target), by_bisection(steps, nll, target)
        if truth is None:
            assert found is None
            seen["never"] += 1
            continue
        assert found == (pytest.approx(truth[0], rel=1e-9), truth[1])
        seen["bound" if truth[1] else "inside"] += 1
    assert min(seen.values()) > 100


def test_the_target_is_the_references_last_value_and_time_is_read_off_at_the_arrival():
    """It ends at 4, after 3; the variant goes from 5 at step 2 (40 s) to 3.5 at step 4 (100 s)."""
    found = speed_up(
        ([1, 2, 4, 8], [6.0, 3.0, 3.5, 4.0], [1, 2, 4, 210]),
        ([1, 2, 4, 8], [6.0, 5.0, 3.5, 3.5], [10, 40, 100, 500]),
    )
    assert (found["target"], found["gap"]) == (4.0, -0.5)
    step = 2 ** (1 + 2 / 3)
    assert found["ratio"] == pytest.approx(8 / step)
    assert found["time_ratio"] == pytest.approx(210 / (40 + 60 * (step - 2) / 2))


def block_curves(shift_B):
    """NLL [E, B] of log curves whose blocks are shifted down."""
    return np.array([[A - B * math.log(step)] for step in STEPS]) - shift_B


def ends_in_log(shift_B, cluster_B):
    curves = [block_curves(shift) for shift in (np.zeros_like(shift_B), shift_B)]
    found = paired_bootstrap(STEPS, *curves, np.ones_like(shift_B), cluster_B, replicates=4000)
    return math.log(found["low"]), math.log(found["high"])


def test_documents_are_drawn_whole():
    """Blocks of a document are alike: sd / sqrt(documents), four times what blocks would give."""
    rng, documents, each = np.random.default_rng(5), 60, 16
    effect = 0.1 * rng.standard_normal(documents)
    shift, label = B * (0.7 + np.repeat(effect, each)), np.repeat(np.arange(documents), each)
    order = rng.permutation(len(label))
    low, high = ends_in_log(shift[order], (1000 - 7 * label)[order])
    alone_low, alone_high = ends_in_log(shift[order], None)
    center, error = 0.7 + effect.mean(), effect.std() / math.sqrt(documents)
    assert low == pytest.approx(center - 1.96 * error, abs=0.25 * error)
    assert high == pytest.approx(center + 1.96 * error, abs=0.25 * error)
    assert (high - low) / (alone_high - alone_low) == pytest.approx(math.sqrt(each), rel=0.1)


def one_sided(num_blocks, num_worse):
    """Curves whose last gap is +1 in some blocks and -1 in the others."""
    gap = np.where(np.arange(num_blocks) < num_worse, 1.0, -1.0)
    base = np.full((2, num_blocks), 5.0)
    return [1.0, 2.0], base, np.stack([base[0] + 4, base[1] + gap]), np.ones(num_blocks)


def test_the_share_that_never_arrives_is_a_binomial_tail():
    num_blocks, num_worse, replicates = 21, 8, 5000
    found = paired_bootstrap(*one_sided(num_blocks, num_worse), replicates=replicates)
    truth = scipy.stats.binom(num_blocks, num_worse / num_blocks).sf(num_blocks // 2)
    error = math.sqrt(truth * (1 - truth) / replicates)
    assert 0.05 < truth < 0.3
    assert abs(found["never_share"] - truth) < 4 * error
    assert 1 <= found["low"] <= found["high"] < 2
    never = paired_bootstrap(*one_sided(5, 5), replicates=20)
    assert never == {"low": None, "high": None, "never_share": 1.0}


def test_spread_by_hand():
    """0 1 0 1: second differences -2 and 2, mean square 4, over 6; of long curves the last half."""
    late = [0.0, 1.0, 0.0, 1.0]
    assert detrended_spread(late) == pytest.approx(math.sqrt(4 / 6))
    assert detrended_spread([900.0, 5.0, 80.0, -3.0, *late]) == pytest.approx(math.sqrt(4 / 6))
    assert detrended_spread([900.0, 5.0, 80.0, *late]) > 10
    assert detrended_spread(np.linspace(9, 2, 30).tolist()) == pytest.approx(0, abs=1e-13)
    for values in ([], [1.0, 2.0, 4.0], [1.0, 2.0, math.nan, 3.0, 1.0]):
        assert detrended_spread(values) is None
