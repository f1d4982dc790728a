"""Plans of masks: weights and laws by enumeration, common random numbers, limits."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest

from bellmask.evaluate.continuations import (
    MOST_EXACT,
    Ask,
    Estimator,
    MaskPlan,
    make_plan,
)
from bellmask.utils.errors import UserError


def plan(kind, length, noise=0, **more):
    ask = Ask((), tuple(range(length)), (), noise)
    return make_plan(ask, Estimator(kind, **more), seed=0)


def test_plans_without_noise():
    """exact: each count's masks share one unit, each mask's tokens share the mask's part."""
    found = plan("exact", 4)
    masks = [tuple(np.flatnonzero(row)) for row in found.is_masked_RL]
    expected = {
        places: 1 / n / math.comb(4, n)
        for n in (1, 2, 3, 4)
        for places in combinations(range(4), n)
    }
    assert dict(zip(masks, found.weight_R, strict=True)) == pytest.approx(expected)
    assert (found.is_scored_RL == found.is_masked_RL).all()
    found = plan("left_to_right", 3)
    assert found.is_masked_RL.tolist() == [[True] * 3, [False, True, True], [False, False, True]]
    assert found.is_scored_RL.tolist() == np.eye(3, dtype=bool).tolist()
    assert found.weight_R.tolist() == [1, 1, 1]
    for kind in ("exact", "left_to_right"):
        made = plan(kind, 3, draws=1)
        score = made.conclude(np.arange(len(made.weight_R), dtype=float))
        assert (score.error, score.is_exact, score.num_passes) == (0, True, len(made.weight_R))


@pytest.mark.parametrize(("length", "draws"), [(3, 7), (6, 4), (20, 8)])
def test_strata_draw_each_count_as_often(length, draws):
    """n = 1 + floor(L (r + u) / R): over u each count has probability 1 / L."""
    seen = Counter()
    for noise in range(400):
        found = plan("strata", length, noise, draws=draws)
        counts = found.is_masked_RL.sum(1)
        low, high = np.arange(draws) / draws, np.arange(1, draws + 1) / draws
        assert (counts >= 1 + np.floor(length * low)).all()
        assert (counts <= np.ceil(length * high)).all()
        assert found.weight_R == pytest.approx(length / (draws * counts))
        seen.update(counts.tolist())
    share = np.array([seen[n] for n in range(1, length + 1)]) / (400 * draws)
    assert sum(seen.values()) == 400 * draws
    assert share == pytest.approx(1 / length, rel=0.25)


def test_masks_of_a_count_are_uniform_and_their_time_fits():
    """Given n of L masked, the mask rate is Beta(n, L - n + 1)."""
    seen, rates = Counter(), {n: [] for n in (1, 2, 3, 4)}
    for noise in range(1200):
        found = plan("strata", 4, noise, draws=4)
        for row, rate in zip(found.is_masked_RL, found.rate_R, strict=True):
            seen[tuple(np.flatnonzero(row))] += 1
            rates[int(row.sum())].append(float(rate))
    pairs = [seen[places] for places in combinations(range(4), 2)]
    assert sum(pairs) == 1200, "one of four draws has two masks"
    assert np.abs(np.array(pairs) - 200).max() < 4 * math.sqrt(200 * 5 / 6)
    for n, found in rates.items():
        assert np.mean(found) == pytest.approx(n / 5, abs=0.025)
        assert np.var(found) == pytest.approx(n * (5 - n) / 25 / 6, rel=0.2)


def test_a_stratum_of_its_own_for_each_mask_rate():
    found = plan("bernoulli", 50, draws=8)
    shift = found.rate_R * 8 - np.arange(8)
    assert shift == pytest.approx(shift[0])
    assert 0 < shift[0] <= 1
    assert found.weight_R == pytest.approx(1 / (8 * found.rate_R))
    singles = [plan("bernoulli", 50, n, draws=1) for n in range(400)]
    rates = np.array([one.rate_R[0] for one in singles])
    assert np.sort(rates) == pytest.approx(np.linspace(0, 1, 400), abs=0.09), "uniform"
    apart = np.array([one.is_masked_RL.mean() for one in singles]) - rates
    assert apart.mean() == pytest.approx(0, abs=4 * math.sqrt(1 / 6 / 20000))


def test_diffullama_takes_fixed_rates_and_counts_an_empty_mask_as_nothing():
    plans = [plan("diffullama", 3, noise, draws=4) for noise in range(40)]
    assert any(not one.is_masked_RL[0].any() for one in plans)
    for one in plans:
        assert one.rate_R.tolist() == [0.25, 0.5, 0.75, 1.0]
        count = one.is_masked_RL.sum(1)
        assert count[-1] == 3
        full = one.weight_R * count  # each masked token has cross-entropy 1: L / R for each pass
        assert full == pytest.approx(np.where(count > 0, 3 / 4, 0))


@pytest.mark.parametrize("kind", ["strata", "bernoulli", "diffullama"])
def test_common_random_numbers(kind):
    """The same masks whatever the tokens, unless each choice draws its own."""
    common = Estimator(kind, draws=6)
    alone = replace(common, is_common=False)

    def masks(estimator, target=(1, 2, 3, 4), given=(), noise=9, seed=3):
        made = make_plan(Ask(given, target, (), noise), estimator, seed=seed)
        return [*made.is_masked_RL.tolist(), *made.rate_R.tolist()]

    here, mine = masks(common), masks(alone)
    assert here == masks(common, target=(8, 8, 8, 8), given=(5,))
    assert mine == masks(alone)
    others = [masks(common, noise=10), masks(common, seed=4), mine]
    others += [masks(alone, target=(8, 8, 8, 8))]
    others += [masks(alone, given=(7,))]  # WinoGrande's choices differ in what is before them
    assert all(one != other for one, other in combinations([here, *others], 2))
    # of other lengths: the start of the mask, or of the order in which tokens are masked
    short, long = plan(kind, 5, draws=6).is_masked_RL, plan(kind, 9, draws=6).is_masked_RL[:, :5]
    for row, other in zip(short, long, strict=True):
        if kind == "strata":
            assert (row <= other).all() or (row >= other).all()
        else:
            assert (row == other).all()


def test_conclude_by_hand():
    masks = np.array([[True, False], [False, True], [True, True], [False, False]])
    made = MaskPlan("strata", masks, masks, np.array([0.5, 0.5, 0.25, 0.5]), np.zeros(4))
    score = made.conclude(np.array([2.0, 4.0, 8.0, 0.0]))
    assert score.log_probability == -5.0
    # values 1, 2, 2, 0 times 4; pairs (4, 8) and (8, 0)
    assert score.error == pytest.approx(math.sqrt(4**2 + 8**2) / 4)
    assert (score.num_tokens, score.num_passes, score.is_exact) == (2, 3, False)
    for kind in ("strata", "bernoulli", "diffullama"):
        score = plan(kind, 4, draws=1).conclude(np.ones(1))
        assert (math.isnan(score.error), score.is_exact) == (True, False)


def test_what_a_length_gets():
    assert [Estimator().kind_for(n) for n in (1, 6, 7)] == ["exact", "exact", "strata"]
    assert Estimator(longest_exact=0).kind_for(1) == "strata"
    assert Estimator(longest_exact=12).kind_for(12) == "exact"
    assert Estimator().kind_for(1, uses_time=True) == "strata"
    assert len(plan("exact", MOST_EXACT).weight_R) == 4095
    for refused, words in (
        (lambda: Estimator("exact").kind_for(2, uses_time=True), "exact"),
        (lambda: Estimator("left_to_right").kind_for(2, uses_time=True), "left_to_right"),
        (lambda: Estimator("exact").kind_for(13), "13 tokens"),
        (Estimator("strat").check, "'strata'"),
        (Estimator(draws=0).check, "--draws"),
        (Estimator(longest_exact=13).check, "--longest-exact"),
        (Estimator(longest_exact=-1).check, "--longest-exact"),
    ):
        with pytest.raises(UserError, match=words):
            refused()
