"""Scores of continuations against plain loops over masks, orders and tokens, one row at a time."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from itertools import combinations, permutations
from typing import Any

import numpy as np
import pytest
import torch
from continuation_tools import EXACT, ids, log_p, random_run

from bellmask.config import RunConfig
from bellmask.downstream.asks import Ask, Score
from bellmask.downstream.continuations import ContinuationScorer
from bellmask.downstream.masks import Estimator, Kind, make_plan
from bellmask.errors import UserError
from bellmask.run import Run

Config = Callable[..., RunConfig]
RUNS = {
    "own trunk": ("dit", []),
    "wrapped rows": ("dit", ["--data.wrap", "True"]),
    "gpt2": ("gpt2", []),
    "llama": ("llama", []),
    "gpt2, wrapped rows": ("gpt2", ["--data.wrap", "True"]),
}
TIMED = ["--model.modulation", "time"]


@pytest.fixture(scope="module")
def make_run(small_config: Config) -> Callable[..., Run]:
    def make(kind: str = "dit", *args: str) -> Run:
        return random_run(small_config(*EXACT, *args, "--data.block-length", "48"), kind)

    return make


@pytest.fixture(scope="module", params=RUNS)
def run(request: pytest.FixtureRequest, make_run: Callable[..., Run]) -> Run:
    kind, args = RUNS[request.param]
    return make_run(kind, *args)


@pytest.fixture(scope="module")
def own(make_run: Callable[..., Run]) -> Run:
    return make_run()


def scorer(run: Run, kind: Kind = "auto", **more: Any) -> ContinuationScorer:
    return ContinuationScorer(run, Estimator(kind, **more))


def one(run: Run, kind: Kind, ask: Ask, **more: Any) -> Score:
    (found,) = scorer(run, kind, **more).score([ask])
    return found


def begin(run: Run) -> tuple[int, ...]:
    return (257,) if run.is_wrapped or run.model.first_maskable else ()


def bound(run: Run, ask: Ask) -> float:
    """- sum over n of the mean over masks of n tokens of the mean cross-entropy."""
    total = 0.0
    for count in range(1, len(ask.target) + 1):
        means = [
            sum(log_p(run, ask, hidden).values()) / count
            for hidden in combinations(range(len(ask.target)), count)
        ]
        total += sum(means) / len(means)
    return total


def test_exact_is_the_sum_over_all_masks(run: Run) -> None:
    for given, target, after in (("the cat ", "sat.", ""), ("a", "cat", " ran"), ("", "x", "yz")):
        ask = Ask(begin(run) + ids(given), ids(target), ids(after))
        found = one(run, "auto", ask)
        assert found.log_probability == pytest.approx(bound(run, ask), abs=2e-4)
        assert (found.error, found.is_exact) == (0.0, True)
        assert (found.num_tokens, found.num_passes) == (len(target), 2 ** len(target) - 1)
        assert one(run, "exact", ask) == found


@pytest.mark.parametrize("target", ["a", "at", "cat", "cats"])
def test_the_bound_is_the_mean_over_all_orders(own: Run, target: str) -> None:
    """Sec. 2.2: in any order, each token after those that came before it."""
    ask = Ask(ids("the "), ids(target), ids("!"))
    chains = []
    for order in permutations(range(len(target))):
        left, total = set(order), 0.0
        for place in order:
            total += log_p(own, ask, sorted(left))[place]
            left.remove(place)
        chains.append(total)
    assert one(own, "exact", ask).log_probability == pytest.approx(np.mean(chains), abs=2e-4)


def test_left_to_right_is_a_chain_that_hides_what_comes(run: Run) -> None:
    ask = Ask(begin(run) + ids("the "), ids("cat sat on it"), ids("!"))
    length = len(ask.target)
    chain = [log_p(run, ask, range(place, length))[place] for place in range(length)]
    found = one(run, "left_to_right", ask)
    assert found.log_probability == pytest.approx(sum(chain), abs=5e-4)
    assert (found.num_passes, found.is_exact, found.error) == (length, True, 0.0)


# --- drawn masks -----------------------------------------------------------------------------

TRIES = 200


def many(run: Run, kind: Kind, ask: Ask, draws: int) -> tuple[np.ndarray, np.ndarray]:
    """(estimates with fresh masks, the errors that they report)."""
    asks = [replace(ask, noise=number) for number in range(TRIES)]
    found = scorer(run, kind, draws=draws, longest_exact=0).score(asks)
    assert not any(score.is_exact for score in found)
    values, errors = [s.log_probability for s in found], [s.error for s in found]
    return np.array(values), np.array(errors)


@pytest.mark.parametrize(
    ("kind", "draws"), [("strata", 4), ("strata", 5), ("auto", 16), ("bernoulli", 4)]
)
def test_drawn_masks_are_unbiased_and_their_errors_honest(own: Run, kind: Kind, draws: int) -> None:
    ask = Ask(ids("the "), ids("cat.."), ids(" it"))
    values, errors = many(own, kind, ask, draws)
    exact = one(own, "exact", ask).log_probability
    spread = float(values.std(ddof=1))
    assert abs(values.mean() - exact) < 4 * spread / math.sqrt(TRIES)
    assert math.sqrt((errors**2).mean()) == pytest.approx(spread, rel=0.25)
    assert spread > 0.1


def test_diffullama_is_off_by_its_empty_masks(own: Run) -> None:
    """Its expectation, mask by mask; without empty ones it would be far from it."""
    ask, draws = Ask(ids("the "), ids("cat")), 4
    expected = 0.0
    for rate in (0.25, 0.5, 0.75, 1.0):
        for count in (1, 2, 3):
            for hidden in combinations(range(3), count):
                chance = rate**count * (1 - rate) ** (3 - count)
                expected += chance * 3 * sum(log_p(own, ask, hidden).values()) / count / draws
    values, _ = many(own, "diffullama", ask, draws)
    error = float(values.std(ddof=1)) / math.sqrt(TRIES)
    assert abs(values.mean() - expected) < 4 * error
    assert abs(expected - one(own, "exact", ask).log_probability) > 8 * error


def test_a_time_conditioned_run_is_told_a_time_of_its_mask(make_run: Callable[..., Run]) -> None:
    timed = make_run("dit", *TIMED)
    ask = Ask(ids("the "), ids("cats"), (), 3)
    plan = make_plan(ask, Estimator("strata", 6), seed=5, uses_time=True)
    total = 0.0
    for mask, weight, rate in zip(plan.is_masked_RL, plan.weight_R, plan.rate_R, strict=True):
        hidden = np.flatnonzero(mask).tolist()
        total += float(weight) * sum(log_p(timed, ask, hidden, t=float(rate)).values())
    (found,) = scorer(timed, "auto", draws=6).score([ask], seed=5)
    assert found.log_probability == pytest.approx(total, rel=1e-6)
    assert not found.is_exact
    assert log_p(timed, ask, [0], t=0.1) != log_p(timed, ask, [0], t=0.9)


def test_the_time_of_another_schedule(make_run: Callable[..., Run]) -> None:
    """Cosine: a mask rate r is reached at the time where alpha = 1 - r."""
    timed = make_run("dit", *TIMED, "--schedule", "cosine")
    ask = Ask(ids("the "), ids("cats"), (), 3)
    plan = make_plan(ask, Estimator("strata", 1), seed=5, uses_time=True)
    t = float(timed.framework.schedule.inverse(torch.tensor([1 - plan.rate_R[0]]))[0])  # type: ignore[attr-defined]
    hidden = np.flatnonzero(plan.is_masked_RL[0]).tolist()
    total = float(plan.weight_R[0]) * sum(log_p(timed, ask, hidden, t=t).values())
    (found,) = scorer(timed, "auto", draws=1).score([ask], seed=5)
    assert abs(t - plan.rate_R[0]) > 0.02
    assert found.log_probability == pytest.approx(total, abs=2e-4)
    assert math.isnan(found.error)


def test_seeds_and_numbers(own: Run) -> None:
    asks = [Ask(ids("the "), ids("cat sat on")), Ask(ids("the "), ids("dogs"))]
    ours = scorer(own, draws=8)
    first, other = ours.score(asks), ours.score(asks, seed=1)
    assert first == ours.score(asks)
    assert first[0] != other[0]
    assert first[1] == other[1], "the short one is exact"
    assert [ours.is_exact(ask) for ask in asks] == [False, True]
    assert [score.is_exact for score in first] == [False, True]
    apart = scorer(own, draws=8, is_common=False).score(asks)
    assert apart[0] != first[0]
    assert apart[1] == first[1]


def test_one_number_one_score(own: Run) -> None:
    pair = [Ask(ids("the cat "), ids("sat on the mat"), (), 4)] * 2
    same = scorer(own, draws=4).score(pair)
    assert same[0] == same[1]
    other = scorer(own, draws=4).score([pair[0], replace(pair[1], noise=5)])
    assert other[0] == same[0] != other[1]


# --- causal runs -----------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
@pytest.mark.parametrize("given", ["", "the cat "])
def test_an_arm_is_the_chain_rule(make_run: Callable[..., Run], kind: str, given: str) -> None:
    run = make_run(kind, "--framework", "arm")
    ask = Ask((257, *ids(given)), ids("sat on it"), noise=3)
    row = torch.tensor([[*ask.given, *ask.target]])
    with torch.no_grad():
        log_p_LV = run.model.language_model(row).logits[0].double().log_softmax(1)
    start = len(ask.given)
    terms = [log_p_LV[start + n - 1, token] for n, token in enumerate(ask.target)]
    found = one(run, "auto", ask)
    assert found.log_probability == pytest.approx(float(sum(terms)), abs=2e-4)
    assert found == Score(found.log_probability, 0.0, 9, 1, True)
    assert one(run, "strata", ask) == found
    assert scorer(run).is_exact(ask)


def in_order(run: Run, ask: Ask, order: tuple[int, ...]) -> float:
    """Own trunk: begin sign, what is shown, then the target's tokens in an order."""
    tokens = [*ask.given, *ask.target, *ask.after]
    start = len(ask.given)
    shown = [p for p in range(len(tokens)) if not start <= p < start + len(ask.target)]
    places = shown + [start + place for place in order]
    row = [run.tokenizer.mask_id, *(tokens[p] for p in places[:-1])]
    slots = torch.arange(len(shown), len(tokens))
    with torch.no_grad():
        logits = run.model(
            torch.tensor([row]),
            slots,
            positions=torch.tensor([0, *(p + 1 for p in places[:-1])]),
            target_positions=torch.tensor([p + 1 for p in places]),
        )
    log_p_NV = logits.double().log_softmax(1)
    return float(sum(log_p_NV[n, ask.target[place]] for n, place in enumerate(order)))


@pytest.mark.parametrize("wrap", ["True", "False"])
def test_an_arm_of_our_own_trunk(make_run: Callable[..., Run], wrap: str) -> None:
    run = make_run("dit", "--framework", "arm", "--data.wrap", wrap)
    (ask,) = scorer(run).asks("the cat", " sat on it")
    assert ask.given[:1] == ((257,) if wrap == "True" else ids("t"))
    found = one(run, "auto", ask)
    assert found.log_probability == pytest.approx(in_order(run, ask, tuple(range(10))), abs=2e-4)
    assert (found.num_passes, found.is_exact) == (1, True)


def test_an_aoarm_is_a_mean_over_orders(make_run: Callable[..., Run]) -> None:
    """What follows the gap is shown too; over all orders the mean is the bound."""
    run = make_run("dit", "--framework", "aoarm")
    ask = Ask(ids("the "), ids("cat"), ids(" sat"))
    chains = np.array([in_order(run, ask, order) for order in permutations(range(3))])
    asks = [replace(ask, noise=number) for number in range(200)]
    found = scorer(run, draws=8).score(asks)
    values = np.array([score.log_probability for score in found])
    error = chains.std() / math.sqrt(8)
    assert abs(values.mean() - chains.mean()) < 4 * error / math.sqrt(200)
    assert values.std() == pytest.approx(error, rel=0.25)
    assert math.sqrt(np.mean([s.error**2 for s in found])) == pytest.approx(error, rel=0.25)
    assert (found[0].num_passes, found[0].is_exact) == (8, False)
    singles = scorer(run, draws=1).score(asks[:30])
    for score in singles:
        assert np.abs(chains - score.log_probability).min() < 2e-4
        assert math.isnan(score.error)
    assert len({round(score.log_probability, 3) for score in singles}) == 6


def test_orders_of_an_aoarm_are_common_too(make_run: Callable[..., Run]) -> None:
    run = make_run("dit", "--framework", "aoarm")
    pair = [Ask(ids("the "), ids("cat sat")), Ask(ids("the "), ids("dog ran"))]

    def orders(**more: Any) -> list[list[float]]:
        ours = scorer(run, draws=2, **more)
        return [ours._job(ask, 0).row(1).numbers.tolist() for ask in pair]

    same = orders()
    assert same[0] == same[1]
    apart = orders(is_common=False)
    assert apart[0] != apart[1]


def test_what_cannot_be_asked_is_refused(make_run: Callable[..., Run]) -> None:
    with pytest.raises(UserError, match="is a sigma-ARM: it reads tokens in one fixed order"):
        scorer(make_run("dit", "--framework", "sigma_arm"))
    arm = scorer(make_run("dit", "--framework", "arm"))
    for ask in (arm.score, arm.is_greedy):
        with pytest.raises(UserError, match="an ARM cannot see what follows a gap"):
            ask([Ask(ids("a"), ids("b"), ids("c"))])
    with pytest.raises(UserError, match="--batch-tokens must be at least 1"):
        ContinuationScorer(make_run(), batch_tokens=0)
    with pytest.raises(UserError, match="has no exact estimator"):
        one(make_run("dit", *TIMED), "exact", Ask((), (1,)))
    with pytest.raises(ValueError, match="an ask needs a target"):
        scorer(make_run("gpt2")).score([Ask((), (1,))])
    with pytest.raises(ValueError, match="an ask needs a target"):
        scorer(make_run()).score([Ask((1,), ())])
