"""Plans of masks: weights and laws by enumeration, common random numbers, limits."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest

from bellmask.downstream.asks import Ask
from bellmask.downstream.masks import MOST_EXACT, Estimator, Kind, Plan, make_plan
from bellmask.errors import UserError

DRAWN: tuple[Kind, ...] = ("strata", "bernoulli", "diffullama")
each_drawn = pytest.mark.parametrize("kind", DRAWN)


def ask(length: int, noise: int = 0) -> Ask:
    return Ask((), tuple(range(length)), (), noise)


def plan(kind: Kind, length: int, seed: int = 0, noise: int = 0, **more: int) -> Plan:
    return make_plan(ask(length, noise), Estimator(kind, **more), seed=seed)


def test_exact_weights_every_mask_once() -> None:
    """Each count's masks share one unit, each mask's tokens share the mask's part."""
    found = plan("exact", 4)
    masks = [tuple(np.flatnonzero(row)) for row in found.is_masked_RL]
    expected = {
        places: 1 / n / len(list(combinations(range(4), n)))
        for n in (1, 2, 3, 4)
        for places in combinations(range(4), n)
    }
    assert dict(zip(masks, found.weight_R, strict=True)) == pytest.approx(expected)
    assert len(masks) == len(expected) == 15
    assert (found.is_scored_RL == found.is_masked_RL).all()


def test_left_to_right_scores_each_token_after_those_before_it() -> None:
    found = plan("left_to_right", 3)
    assert found.is_masked_RL.tolist() == [[True] * 3, [False, True, True], [False, False, True]]
    assert found.is_scored_RL.tolist() == np.eye(3, dtype=bool).tolist()
    assert found.weight_R.tolist() == [1, 1, 1]


@pytest.mark.parametrize(("length", "draws"), [(3, 7), (5, 5), (6, 4), (20, 8)])
def test_strata_draw_each_count_as_often(length: int, draws: int) -> None:
    """n = 1 + floor(L (r + u) / R): over u each count has probability 1 / L, masks are uniform."""
    seen: Counter[int] = Counter()
    for noise in range(400):
        found = plan("strata", length, noise=noise, draws=draws)
        counts = found.is_masked_RL.sum(1)
        assert (np.diff(counts) >= 0).all()
        low, high = np.arange(draws) / draws, np.arange(1, draws + 1) / draws
        assert (counts >= 1 + np.floor(length * low)).all()
        assert (counts <= np.ceil(length * high)).all()
        assert found.weight_R == pytest.approx(length / (draws * counts))
        seen.update(counts.tolist())
    share = np.array([seen[n] for n in range(1, length + 1)]) / (400 * draws)
    assert sum(seen.values()) == 400 * draws
    assert share == pytest.approx(1 / length, rel=0.25)


def test_given_its_count_a_mask_is_uniform() -> None:
    seen: Counter[tuple[int, ...]] = Counter()
    for noise in range(1200):
        for row in plan("strata", 4, noise=noise, draws=4).is_masked_RL:
            seen[tuple(np.flatnonzero(row))] += 1
    pairs = [seen[places] for places in combinations(range(4), 2)]
    assert sum(pairs) == 1200, "one of four draws has two masks"
    assert np.abs(np.array(pairs) - 200).max() < 4 * math.sqrt(200 * 5 / 6)


def test_a_stratum_of_its_own_for_each_mask_rate() -> None:
    found = plan("bernoulli", 50, draws=8)
    shift = found.rate_R * 8 - np.arange(8)
    assert shift == pytest.approx(shift[0])
    assert 0 < shift[0] <= 1
    assert found.weight_R == pytest.approx(1 / (8 * found.rate_R))
    rates = [plan("bernoulli", 50, noise=n, draws=1).rate_R[0] for n in range(400)]
    masked = [plan("bernoulli", 50, noise=n, draws=1).is_masked_RL.mean() for n in range(400)]
    assert np.sort(rates) == pytest.approx(np.linspace(0, 1, 400), abs=0.09), "uniform"
    assert np.mean(np.array(masked) - rates) == pytest.approx(0, abs=4 * math.sqrt(1 / 6 / 20000))


def test_diffullama_takes_fixed_rates_and_counts_an_empty_mask_as_nothing() -> None:
    found = plan("diffullama", 3, draws=4, noise=1)
    assert found.rate_R.tolist() == [0.25, 0.5, 0.75, 1.0]
    assert found.is_masked_RL[-1].all()
    plans = [plan("diffullama", 3, draws=4, noise=noise) for noise in range(40)]
    assert any(not one.is_masked_RL[0].any() for one in plans)
    for one in plans:
        count = one.is_masked_RL.sum(1)
        full = one.weight_R * count  # each masked token has cross-entropy 1: L / R for each pass
        assert full == pytest.approx(np.where(count > 0, 3 / 4, 0))


@each_drawn
def test_one_number_one_mask(kind: Kind) -> None:
    """Common random numbers: the same whatever the tokens, and for other lengths their start."""
    estimator = Estimator(kind, draws=6)
    here = make_plan(Ask((), (1, 2, 3, 4), (), 9), estimator, seed=3)
    other = make_plan(Ask((5,), (8, 8, 8, 8), (7,), 9), estimator, seed=3)
    assert here.is_masked_RL.tolist() == other.is_masked_RL.tolist()
    assert here.rate_R.tolist() == other.rate_R.tolist()
    for changed in (
        make_plan(Ask((), (1, 2, 3, 4), (), 10), estimator, seed=3),
        make_plan(Ask((), (1, 2, 3, 4), (), 9), estimator, seed=4),
        make_plan(Ask((), (1, 2, 3, 4), (), 9), replace(estimator, is_common=False), seed=3),
    ):
        assert changed.is_masked_RL.tolist() != here.is_masked_RL.tolist()
    alone = replace(estimator, is_common=False)
    first, second, again = (
        make_plan(Ask((), target, (), 9), alone, seed=3)
        for target in ((1, 2, 3, 4), (8, 8, 8, 8), (1, 2, 3, 4))
    )
    assert first.is_masked_RL.tolist() == again.is_masked_RL.tolist()
    assert first.is_masked_RL.tolist() != second.is_masked_RL.tolist()
    # WinoGrande's choices differ in what is before them
    other = make_plan(Ask((7,), (1, 2, 3, 4), (), 9), alone, seed=3)
    assert first.is_masked_RL.tolist() != other.is_masked_RL.tolist()


@pytest.mark.parametrize("kind", ["bernoulli", "diffullama"])
def test_a_longer_continuation_begins_with_the_masks_of_a_shorter(kind: Kind) -> None:
    short, long = plan(kind, 5, draws=6), plan(kind, 9, draws=6)
    assert long.is_masked_RL[:, :5].tolist() == short.is_masked_RL.tolist()


def test_strata_of_other_lengths_share_their_order() -> None:
    """Counts differ, but of the tokens that both have the same come first."""
    short, long = plan("strata", 5, draws=6), plan("strata", 9, draws=6)
    for row, other in zip(short.is_masked_RL, long.is_masked_RL[:, :5], strict=True):
        assert (row <= other).all() or (row >= other).all()


def test_the_time_of_a_mask_is_one_it_may_have_come_from() -> None:
    """Given n of L masked, the mask rate is Beta(n, L - n + 1)."""
    rates: dict[int, list[float]] = {n: [] for n in (1, 2, 3)}
    for noise in range(800):
        found = plan("strata", 3, noise=noise, draws=3)
        for row, rate in zip(found.is_masked_RL, found.rate_R, strict=True):
            rates[int(row.sum())].append(float(rate))
    for n, seen in rates.items():
        assert np.mean(seen) == pytest.approx(n / 4, abs=0.035)
        assert np.var(seen) == pytest.approx(n * (4 - n) / 16 / 5, rel=0.2)


# --- conclusions -----------------------------------------------------------------------------


def test_conclude_by_hand() -> None:
    masks = np.array([[True, False], [False, True], [True, True], [False, False]])
    made = Plan("strata", masks, masks, np.array([0.5, 0.5, 0.25, 0.5]), np.zeros(4))
    score = made.conclude(np.array([2.0, 4.0, 8.0, 0.0]))
    assert score.log_probability == -5.0
    # values 1, 2, 2, 0 times 4; pairs (4, 8) and (8, 0)
    assert score.error == pytest.approx(math.sqrt(4**2 + 8**2) / 4)
    assert (score.num_tokens, score.num_passes, score.is_exact) == (2, 3, False)


@each_drawn
def test_a_single_draw_has_an_error_nobody_knows(kind: Kind) -> None:
    score = plan(kind, 4, draws=1).conclude(np.ones(1))
    assert math.isnan(score.error)
    assert not score.is_exact


def test_exact_kinds_have_no_error() -> None:
    for kind in ("exact", "left_to_right"):
        made = plan(kind, 3, draws=1)
        score = made.conclude(np.arange(len(made.weight_R), dtype=float))
        assert (score.error, score.is_exact, score.num_passes) == (0, True, len(made.weight_R))


# --- what a length gets ----------------------------------------------------------------------


def test_auto_is_exact_for_short_ones() -> None:
    assert [Estimator().kind_for(n) for n in (1, 6, 7)] == ["exact", "exact", "strata"]
    assert Estimator(longest_exact=0).kind_for(1) == "strata"
    assert Estimator(longest_exact=12).kind_for(12) == "exact"
    assert Estimator().kind_for(1, uses_time=True) == "strata"
    assert len(plan("exact", MOST_EXACT).weight_R) == 4095


@pytest.mark.parametrize("kind", ["exact", "left_to_right"])
def test_a_time_needs_a_draw(kind: Kind) -> None:
    with pytest.raises(UserError, match=f"a time-conditioned run has no {kind} estimator"):
        Estimator(kind).kind_for(2, uses_time=True)


def test_too_many_masks_are_refused() -> None:
    with pytest.raises(UserError, match="a continuation of 13 tokens has too many masks"):
        Estimator("exact").kind_for(13)


@pytest.mark.parametrize(
    ("estimator", "words"),
    [
        (Estimator("strat"), "did you mean 'strata'"),  # type: ignore[arg-type]
        (Estimator(draws=0), "--draws must be at least 1, got 0"),
        (Estimator(longest_exact=13), "--longest-exact must be from 0 to 12"),
        (Estimator(longest_exact=-1), "--longest-exact must be from 0 to 12"),
    ],
)
def test_impossible_estimators_are_refused(estimator: Estimator, words: str) -> None:
    with pytest.raises(UserError, match=words):
        estimator.check()
