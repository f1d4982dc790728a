"""From verdicts to rates: by hand, by the leaderboard's own numbers, by other solvers; errors by
simulation."""

from __future__ import annotations

import itertools
import math
import statistics

import numpy as np
import pytest

from bellmask.evaluate.judge import (
    columns,
    count_results,
    fit,
    seed_numbers,
    separates,
    summarize,
    two_term,
    win_rates,
)
from bellmask.evaluate.judge_prompts import VALUES, Judged, JudgeTask, Pair, Verdict, combine


def logistic(z):
    return 1 / (1 + np.exp(-np.asarray(z)))


def one(task, result, *, turn=0, category="all", preference=None, a=1, b=1):
    """An outcome; ``a`` and ``b`` are characters of the answers."""
    asked = JudgeTask(str(task), ("q",) * (turn + 1), category, None, task)
    pair = Pair(asked, turn, ("x",) * turn + ("x" * a,), ("x",) * turn + ("y" * b,))
    return Judged(pair, result, VALUES[result] if preference is None else preference)


# --- both orders → one outcome ---------------------------------------------------------------


def test_only_who_wins_in_both_orders_has_won():
    """(A shown first, B shown first) → for A; a soft preference is the mean of both orders."""
    won = {("first", "second"): ("win", 1.0), ("second", "first"): ("loss", 0.0)}
    for pair in itertools.product(("first", "second", "tie", "unreadable"), repeat=2):
        no_winner = ("unreadable", None) if "unreadable" in pair else ("tie", 0.5)
        assert combine(*map(Verdict, pair)) == won.get(pair, no_winner), pair
    for second, expected in (
        (Verdict("second", 0.25), ("win", (0.875 + 0.75) / 2)),
        (Verdict("first", 0.75), ("tie", (0.875 + 0.25) / 2)),
        (Verdict("unreadable"), ("unreadable", None)),
    ):
        assert combine(Verdict("first", 0.875), second) == expected


# --- win rates -------------------------------------------------------------------------------


def test_ties_count_half_and_not_at_all():
    results = ["win"] * 6 + ["loss"] * 2 + ["tie"] * 4 + ["unreadable"] * 3
    judged = [one(n, result) for n, result in enumerate(results)]
    assert count_results(judged) == {"wins": 6, "losses": 2, "ties": 4, "unreadable": 3}
    values = [1.0] * 6 + [0.0] * 2 + [0.5] * 4
    for name, mine in (("win_rate", values), ("non_tie", values[:8])):
        found = win_rates(judged)[name]
        assert found.value == pytest.approx(statistics.mean(mine))
        assert found.se == pytest.approx(statistics.stdev(mine) / math.sqrt(len(mine)))
    soft = win_rates([one(0, "win", preference=0.9), one(1, "tie", preference=0.6)])
    assert (soft["win_rate"].value, soft["non_tie"].value) == (pytest.approx(0.75), 1.0)


# --- length control by two terms -------------------------------------------------------------


def made_up(draw, count, constant, slope, noise=0.0):
    """(preferences of coin tosses, lengths of A, lengths of B): A is longer, and length helps."""
    length_a, length_b = draw.integers(200, 3000, count), draw.integers(100, 2000, count)
    difference = (length_a - length_b).astype(np.float64)
    x = np.tanh(difference / difference.std(ddof=1))
    p = logistic(constant + slope * x + noise * draw.normal(size=count))
    y = p if noise else (draw.random(count) < p).astype(np.float64)
    return y, length_a.astype(np.float64), length_b.astype(np.float64)


def test_soft_labels_without_noise_give_the_effect_exactly():
    _, a, b = made_up(np.random.default_rng(2), 60, 0.0, 0.0)
    x = np.tanh((a - b) / (a - b).std(ddof=1))
    found = two_term(logistic(-1.2 + 0.7 * x), a, b, np.arange(60))
    assert (found.value, found.error) == pytest.approx((logistic(-1.2), 0), abs=1e-9)


@pytest.mark.parametrize(("constant", "slope"), [(0.0, 0.0), (-1.2, 2.0)])
def test_the_error_covers_the_truth_as_often_as_it_says(constant, slope):
    """±1.96 errors: 95 % of 500 sets of 200, within three errors of that share (1 % each)."""
    draw = np.random.default_rng(3)
    tasks = np.arange(200)
    found = [two_term(*made_up(draw, 200, constant, slope), tasks) for _ in range(500)]
    rates, errors = np.array([(one.value, one.error) for one in found]).T
    hits = np.abs(rates - logistic(constant)) < 1.96 * errors
    assert 0.92 <= hits.mean() <= 0.98
    assert errors.mean() == pytest.approx(rates.std(ddof=1), rel=0.1)


def test_repeated_turns_and_swapped_models():
    parts = made_up(np.random.default_rng(5), 100, 0.5, 1.0)
    twice, tasks = [np.repeat(part, 2) for part in parts], np.arange(100)
    single, naive = two_term(*parts, tasks), two_term(*twice, np.arange(200))
    double = two_term(*twice, np.repeat(tasks, 2))
    assert double.value == pytest.approx(single.value, rel=5e-3)  # the scale's n - 1
    assert double.error == pytest.approx(single.error, rel=1e-2)
    assert naive.error == pytest.approx(single.error / math.sqrt(2), rel=1e-2)
    y, a, b = parts
    swapped = two_term(1 - y, b, a, tasks)
    assert swapped.value == pytest.approx(1 - single.value, abs=1e-9)
    assert swapped.error == pytest.approx(single.error, rel=1e-6)


@pytest.mark.parametrize(
    ("won", "difference", "expected"),
    [
        ([1, 1, 1, 1], [-1, 0, 2, 3], True),  # all won
        ([0, 0, 1, 1], [-2, -1, 1, 2], True),  # longer won
        ([1, 1, 0, 0], [-2, -1, 1, 2], True),  # shorter won
        ([0, 1, 0, 1], [-2, 1, 1, 2], True),  # both at the threshold
        ([0, 1, 0, 1], [-2, -1, 1, 2], False),
        ([0.5, 1, 1, 1], [-2, -1, 1, 2], True),
        ([1, 0.5, 1, 1], [-2, -1, 1, 2], False),
    ],
)
def test_separation_is_found_and_elsewhere_there_is_a_fit(won, difference, expected):
    """Where it is not, the likelihood has a maximum: the fit has no slope left."""
    y, x = np.array(won, dtype=np.float64), np.array(difference, dtype=np.float64)
    assert separates(x, y) is expected
    found = two_term(y, x + 100, np.full(4, 100.0), np.arange(4))
    assert math.isfinite(found.value) is not expected
    if not expected:
        design = np.stack([np.ones(4), np.tanh(x / x.std(ddof=1))], 1)
        p = logistic(design @ fit(design, y))
        assert found.value == pytest.approx(float(logistic(fit(design, y)[0])))
        scores = design * (p - y)[:, None]
        np.testing.assert_allclose(scores.sum(0), 0, atol=1e-8)
        spread = np.linalg.inv(design.T @ (design * (p * (1 - p))[:, None])) @ scores.T
        variance = 4 / 3 * (spread[0] ** 2).sum()
        assert found.error == pytest.approx(found.value * (1 - found.value) * math.sqrt(variance))


def test_columns_are_those_of_the_answers_judged():
    judged = [one(3, "tie", turn=1, a=20, b=7), one(40, "unreadable", a=10), one(4, "win", a=2)]
    assert [column.tolist() for column in columns(judged)] == [[0.5, 1], [20, 2], [7, 1], [3, 4]]
    assert two_term(*columns([one(0, "unreadable")])).note == "nothing was judged"


# --- numbers of judge.json -------------------------------------------------------------------


def judged_as(values):
    """``"wlt?"``: a win, a loss, a tie and something unreadable, in answers of other lengths."""
    names = {"w": "win", "l": "loss", "t": "tie", "?": "unreadable"}
    return [
        one(number, names[letter], a=number % 3 + 1, b=number % 2 + 1)
        for number, letter in enumerate(values)
    ]


def over(*seeds):
    judged = [judged_as(values) for values in seeds]
    return summarize([seed_numbers(one) for one in judged], [*itertools.chain(*judged)])


def test_numbers_of_a_seed():
    found = seed_numbers(judged_as("wwlt?w"))
    assert found["counts"] == {"wins": 3, "losses": 1, "ties": 1, "unreadable": 1}
    assert found["win_rate"]["value"] == pytest.approx(3.5 / 5)
    assert (found["mean_length_a"], found["mean_length_b"]) == (2, 1.5)
    nothing = seed_numbers(judged_as("??"))
    for name in ("length_controlled", "win_rate", "non_tie"):
        assert math.isnan(nothing[name]["value"])


def test_a_rate_at_equal_length_that_no_answer_is_near_says_so():
    usable, separated = (seed_numbers(judged_as(v)) for v in ("wlwlwl", "wwwwww"))
    assert usable["length_controlled"]["note"] is None
    for word, sides in (("shorter", "ab"), ("longer", "ba")):
        lengths = [dict(zip(sides, (n % 3 + 1, 5 + n), strict=True)) for n in range(4)]
        apart = [one(n, ("win", "loss")[n % 2], **lengths[n]) for n in range(4)]
        found = seed_numbers(apart)["length_controlled"]
        assert f"all {word}" in found["note"]
        assert math.isnan(found["value"])
    assert "separate" in separated["length_controlled"]["note"]
    # a mean without the seed that A won outright would be biased
    partial, full = (over("wlwlwl", v)["length_controlled"] for v in ("wwwwww", "lwlwww"))
    assert (partial["count"], full["count"]) == (1, 2)
    for name in ("mean", "deviation", "error"):
        assert math.isnan(partial[name])
        assert math.isfinite(full[name])


def test_numbers_over_seeds():
    found = over("wwl", "wll", "ttt")
    # errors are those of the tasks' means over seeds; two of these have winners
    for name, rates, means in (
        ("win_rate", [2 / 3, 1 / 3, 1 / 2], [2.5 / 3, 1.5 / 3, 0.5 / 3]),
        ("non_tie", [2 / 3, 1 / 3], [1, 0.5, 0]),
    ):
        expected = (statistics.mean(rates), statistics.stdev(rates), len(rates))
        got = [found[name][key] for key in ("mean", "deviation", "count", "error")]
        assert got == pytest.approx([*expected, statistics.stdev(means) / 3**0.5])
    assert math.isnan(over("wl")["win_rate"]["deviation"]), "one seed"


def test_outcomes_that_agree_are_no_certainty():
    """An error of 0 is shown from 20 tasks on only; seeds that disagree are not each certain."""
    for seeds in (("ww", "ll"), ("ww",), ("w" * 19,)):
        found = over(*seeds)
        assert math.isnan(found["non_tie"]["error"])
        assert math.isnan(found["win_rate"]["error"])
    assert over("w" * 20)["non_tie"]["error"] == 0
    assert math.isnan(over("w" * 19 + "t")["non_tie"]["error"]), "19 tasks have a winner"
    expected = statistics.stdev([1, 0.5, 0.5]) / 3**0.5
    assert over("www", "wll")["non_tie"]["error"] == pytest.approx(expected)
