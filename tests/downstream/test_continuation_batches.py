"""No score depends on its batch, its padding or the other asks; windows add up."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from continuation_tools import EXACT, ids, log_p, random_run

from bellmask.config import RunConfig
from bellmask.downstream.asks import Ask, Score, add_up
from bellmask.downstream.continuations import ContinuationScorer
from bellmask.downstream.masks import Estimator, Kind
from bellmask.run import Run

Config = Callable[..., RunConfig]
TEXTS = ["a", "cat", "sat on the", "ran under the tree and", "x" * 25]
BATCHED = ["dit", "gpt2", "llama", "dit aoarm", "dit arm", "gpt2 arm"]


@pytest.fixture(scope="module")
def make_run(small_config: Config) -> Callable[..., Run]:
    def make(kind: str = "dit", *args: str) -> Run:
        return random_run(small_config(*EXACT, *args, "--data.block-length", "48"), kind)

    return make


@pytest.fixture(scope="module")
def own(make_run: Callable[..., Run]) -> Run:
    return make_run()


def scorer(
    run: Run, kind: Kind = "auto", *, batch_tokens: int = 8192, **more: Any
) -> ContinuationScorer:
    return ContinuationScorer(run, Estimator(kind, **more), batch_tokens=batch_tokens)


@pytest.mark.parametrize("name", BATCHED)
def test_no_score_depends_on_its_batch(make_run: Callable[..., Run], name: str) -> None:
    """On widths of 32 and 48, padded and full: the last ask fills the block."""
    kind, *framework = name.split()
    run = make_run(kind, *(["--framework", *framework] if framework else []))
    asks = [Ask((257, *ids("the cat ")), ids(text), (), 2) for text in TEXTS]
    asks += [Ask((257, *ids("c" * 22)), ids("y" * 25)), Ask((257,), ids("short"))]
    alone = [scorer(run, draws=3, batch_tokens=1).score([ask])[0] for ask in asks]
    told: list[int] = []
    for tokens in (1, 64, 8192):
        found = scorer(run, draws=3, batch_tokens=tokens).score(asks, on_batch=told.append)
        assert_same(found, alone)
        assert told[-1] == len(asks)
        assert told == sorted(told)
        told.clear()
    backwards = scorer(run, draws=3, batch_tokens=200).score(asks[::-1])
    assert_same(backwards[::-1], alone)
    assert_same(scorer(run, draws=3).score(asks * 2), alone * 2)


def assert_same(found: list[Score], expected: list[Score]) -> None:
    for one, other in zip(found, expected, strict=True):
        assert one.log_probability == pytest.approx(other.log_probability, rel=1e-5, abs=1e-5)
        assert one.error == pytest.approx(other.error, rel=1e-4, abs=1e-4)
        assert replace(one, log_probability=0, error=0) == replace(
            other, log_probability=0, error=0
        )


@pytest.mark.parametrize("kind", ["dit", "gpt2", "llama"])
def test_padding_is_not_seen(make_run: Callable[..., Run], kind: str) -> None:
    """A padded row scores as the row alone does: one call without padding."""
    run = make_run(kind)
    ask = Ask((257, *ids("the")), ids("x"), ids("y"))
    assert scorer(run).width(ask) == 32
    alone = log_p(run, ask, [0])[0]
    assert scorer(run).score([ask])[0].log_probability == pytest.approx(alone, abs=1e-4)


def test_nothing_asked_nothing_answered(own: Run) -> None:
    assert scorer(own).score([]) == []
    assert scorer(own).is_greedy([]) == []


def test_passes_that_score_nothing_are_not_made(own: Run) -> None:
    """Bernoulli masks of one token are mostly empty; the network sees the others alone."""
    calls: list[int] = []
    hook = own.model.register_forward_pre_hook(lambda _, given: calls.append(len(given[0])))
    asks = [Ask(ids("the "), ids("x"), (), number) for number in range(20)]
    found = scorer(own, "bernoulli", draws=2, batch_tokens=64).score(asks)
    hook.remove()
    assert sum(calls) == sum(score.num_passes for score in found) < 40
    assert min(score.num_passes for score in found) < 2


def test_windows_add_up_to_windows_by_hand(own: Run, make_run: Callable[..., Run]) -> None:
    """A continuation of 60 tokens in a block of 48: pieces of 24, each after what precedes it."""
    for run in (own, make_run("gpt2")):
        first = (257,) if run.model.first_maskable else ()
        context, text = ids("some context "[:-1]), ids(" " + "abcdefghij" * 6)[:60]
        room = 48 - 24 - len(first)
        before = [context, (context + text[:24])[-room:], text[:48][-(48 - 12 - len(first)) :]]
        hand = [
            Ask(first + seen, text[24 * n : 24 * n + 24], (), 1) for n, seen in enumerate(before)
        ]
        ours = scorer(run, draws=4)
        made = ours.asks("some context ", bytes(text[1:]).decode(), noise=1)
        assert made == hand
        total = add_up(ours.score(made))
        apart = [ours.score([ask])[0].log_probability for ask in hand]
        assert total.log_probability == pytest.approx(sum(apart), rel=1e-5)
        assert total.num_tokens == 60
        assert ours.rolling("abc", noise=1) == [Ask(first, ids("abc"), (), 1)]
