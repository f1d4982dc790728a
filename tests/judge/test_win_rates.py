"""Win rates: by hand, by the leaderboard's own numbers, and errors by simulation."""

from __future__ import annotations

import json
import math
import os
import statistics
from pathlib import Path

import numpy as np
import pytest

from bellmask.judge.benchmarks import Task
from bellmask.judge.length_control import two_term
from bellmask.judge.published_length_control import read_calibration
from bellmask.judge.verdicts import VALUES, Judged, Outcome, Pair, Result
from bellmask.judge.win_rates import (
    by_category,
    by_turn,
    length_controlled,
    over_seeds,
    published_length_controlled,
    win_rates,
)

SHARED = Path(os.environ.get("BELLMASK_TEST_DATA", Path(__file__).parents[3] / "shared" / "data"))
ALPACA = SHARED / "alpaca_eval"


def one(
    task: int,
    result: Result,
    *,
    turn: int = 0,
    category: str = "all",
    preference: float | None = None,
    a: int = 1,
    b: int = 1,
) -> Judged:
    """An outcome; ``a`` and ``b`` are characters of the answers."""
    asked = Task(str(task), ("q",) * (turn + 1), category, None, task)
    pair = Pair(asked, turn, ("x",) * turn + ("x" * a,), ("x",) * turn + ("y" * b,))
    return Judged(pair, Outcome(result, VALUES[result] if preference is None else preference))


def test_ties_count_half_and_not_at_all() -> None:
    results: list[Result] = ["win"] * 6 + ["loss"] * 2 + ["tie"] * 4 + ["unreadable"] * 3
    found = win_rates([one(n, result) for n, result in enumerate(results)])
    assert (found.wins, found.losses, found.ties, found.unreadable) == (6, 2, 4, 3)
    assert found.judged == 12
    assert found.win_rate.value == pytest.approx((6 + 4 / 2) / 12)
    assert found.non_tie.value == 6 / 8
    values = [1.0] * 6 + [0.0] * 2 + [0.5] * 4
    assert found.win_rate.error == pytest.approx(statistics.stdev(values) / math.sqrt(12))
    assert found.non_tie.error == pytest.approx(statistics.stdev(values[:8]) / math.sqrt(8))


def test_a_soft_preference_counts_as_it_is() -> None:
    found = win_rates([one(0, "win", preference=0.9), one(1, "tie", preference=0.6)])
    assert found.win_rate.value == pytest.approx(0.75)
    assert found.non_tie.value == 1.0


def test_nothing_judged_has_no_rate() -> None:
    for judged in ([], [one(0, "unreadable")]):
        found = win_rates(judged)
        assert found.judged == 0
        assert math.isnan(found.win_rate.value)
        assert math.isnan(found.non_tie.value)
        assert length_controlled(judged) is None
    only_ties = win_rates([one(0, "tie"), one(1, "tie")])
    assert only_ties.win_rate.value == 0.5
    assert math.isnan(only_ties.non_tie.value)
    assert math.isnan(win_rates([one(0, "win")]).win_rate.error)


def test_turns_of_one_task_are_one_observation() -> None:
    """Second turns that repeat the first say nothing new: the error must not shrink."""
    results: list[Result] = ["win", "loss", "win", "tie", "win", "loss", "loss", "win"]
    single = win_rates([one(n, result) for n, result in enumerate(results)])
    double = win_rates([one(n, r, turn=t) for n, r in enumerate(results) for t in (0, 1)])
    assert double.win_rate.error == pytest.approx(single.win_rate.error)
    assert double.non_tie.error == pytest.approx(single.non_tie.error)


def test_the_non_tie_error_is_the_spread_over_repeated_draws_of_tasks() -> None:
    """300 benchmarks of 80 tasks with two turns that move together and tie now and then."""
    draw = np.random.default_rng(5)
    found = []
    for _ in range(300):
        judged = []
        for task, level in enumerate(draw.normal(0.4, 1.0, 80)):
            for turn in (0, 1):
                z = level + draw.normal(0, 0.5)
                result: Result = "tie" if abs(z) < 0.3 else "win" if z > 0 else "loss"
                judged.append(one(task, result, turn=turn))
        found.append(win_rates(judged))
    for name in ("win_rate", "non_tie"):
        rates = [getattr(one_found, name) for one_found in found]
        spread = np.std([rate.value for rate in rates], ddof=1)
        assert np.mean([rate.error for rate in rates]) == pytest.approx(spread, rel=0.1)


def test_categories_and_turns_keep_their_order_and_add_up() -> None:
    judged = [
        one(0, "win", category="writing"),
        one(0, "loss", turn=1, category="writing"),
        one(1, "win", category="math"),
        one(1, "unreadable", turn=1, category="math"),
    ]
    kinds, turns = (
        {name: win_rates(group) for name, group in groups.items()}
        for groups in (by_category(judged), by_turn(judged))
    )
    assert list(kinds) == ["writing", "math"]
    assert kinds["writing"].win_rate.value == 0.5
    assert kinds["math"].unreadable == 1
    assert list(turns) == ["1", "2"]
    assert turns["1"].wins == 2
    assert turns["2"].losses == 1


def test_mean_and_deviation_over_seeds() -> None:
    """The paper's five seeds: a sample standard deviation (n - 1)."""
    values = [0.77, 0.79, 0.80, 0.76, 0.79]
    found = over_seeds(values)
    assert found.mean == pytest.approx(statistics.mean(values))
    assert found.deviation == pytest.approx(statistics.stdev(values))
    assert found.count == 5
    assert over_seeds([0.5, math.nan]).count == 1
    assert math.isnan(over_seeds([0.5]).deviation)
    assert math.isnan(over_seeds([]).mean)


def test_lengths_are_those_of_the_answers_judged() -> None:
    draw = np.random.default_rng(0)
    judged, preference, lengths = [], [], []
    for task in range(40):
        for turn in (0, 1):
            a, b, p = int(draw.integers(0, 90)), int(draw.integers(0, 90)), float(draw.random())
            judged.append(one(task, "tie", turn=turn, preference=p, a=a, b=b))
            preference.append(p)
            lengths.append((a, b))
    judged.append(one(40, "unreadable", a=10_000))
    a_N, b_N = np.array(lengths, dtype=np.float64).T
    expected = two_term(np.array(preference), a_N, b_N, np.repeat(np.arange(40), 2))
    assert length_controlled(judged) == expected


@pytest.mark.skipif(not ALPACA.exists(), reason="needs alpaca_eval in $BELLMASK_TEST_DATA")
def test_the_published_preferences_give_the_leaderboards_numbers() -> None:
    """alpaca-7b on AlpacaEval 2.0: 2.5915 ± 0.4871, 17 wins, 785 losses, 3 draws of 805; 5.8755 %
    when length is controlled for, whatever the order and with an unreadable one among them.
    """
    rows = json.loads((ALPACA / "alpaca-7b.preferences.json").read_text(encoding="utf-8"))
    judged = []
    for index, row in enumerate(rows):
        value = row["preference"] - 1
        result: Result = "tie" if value == 0.5 else "win" if value > 0.5 else "loss"
        judged.append(one(index, result, preference=value, a=row["len_2"], b=row["len_1"]))
    found = win_rates(judged)
    assert (found.wins, found.losses, found.ties) == (17, 785, 3)
    assert round(100 * found.win_rate.value, 4) == 2.5915
    assert 100 * found.win_rate.error == pytest.approx(0.4870855382635108, abs=1e-6)
    calibration = read_calibration(
        ALPACA / "recovered_instruction_difficulty.csv", ALPACA / "df_gamed_reconstructed.csv"
    )
    mixed = [*judged[::-1], one(805, "unreadable")]
    controlled = published_length_controlled(mixed, calibration)
    assert 100 * controlled.rate == pytest.approx(5.8755, abs=0.01)
