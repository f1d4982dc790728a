"""is_greedy beside what the samplers write into a gap of the same length."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from continuation_tools import EXACT, ids, random_run

from bellmask.config import RunConfig
from bellmask.downstream.asks import Ask
from bellmask.downstream.continuations import ContinuationScorer
from bellmask.filling import fill_rows
from bellmask.generate.settings import Sampling
from bellmask.run import Run

Config = Callable[..., RunConfig]
SUREST = Sampling(rule="most_confident", grid="count", per_step=1, temperature=0)
GAPS = [("the cat ", 1, ""), ("a", 3, "b"), ("x", 6, " ran away"), ("the dog ", 9, "")]


@pytest.fixture(scope="module")
def make_run(small_config: Config) -> Callable[..., Run]:
    def make(kind: str = "dit", *args: str) -> Run:
        return random_run(small_config(*EXACT, *args, "--data.block-length", "32"), kind)

    return make


def written(run: Run, given: tuple[int, ...], length: int, after: tuple[int, ...]) -> list[int]:
    """What the run writes into a gap."""
    row = torch.tensor([*given, *([run.tokenizer.mask_id] * length), *after])
    (filled,) = fill_rows(run, [row], SUREST, longest=32)
    return filled.ids


def wrong_at(target: list[int], place: int) -> tuple[int, ...]:
    return tuple((token + 1) % 256 if n == place else token for n, token in enumerate(target))


@pytest.mark.parametrize("tokens", [1, 8192])
@pytest.mark.parametrize(
    ("kind", "args"),
    [
        ("dit", []),
        ("gpt2", []),
        ("llama", []),
        ("dit", ["--model.modulation", "time"]),
        ("dit", ["--model.modulation", "time", "--schedule", "cosine"]),
    ],
)
def test_a_masked_run_is_greedy_where_it_would_write_the_target(
    make_run: Callable[..., Run], kind: str, args: list[str], tokens: int
) -> None:
    run = make_run(kind, *args)
    scorer = ContinuationScorer(run, batch_tokens=tokens)
    asks, expected = [], []
    for before, length, behind in GAPS:
        given, after = (257, *ids(before)), ids(behind)
        target = written(run, given, length, after)
        asks.append(Ask(given, tuple(target), after))
        expected.append(True)
        for place in {0, length // 2, length - 1}:
            asks.append(Ask(given, wrong_at(target, place), after))
            expected.append(False)
    told: list[int] = []
    assert scorer.is_greedy(asks, told.append) == expected
    assert told[-1] == len(asks)
    assert scorer.is_greedy(asks[::-1]) == expected[::-1]


def test_a_row_hides_just_what_it_is_told(make_run: Callable[..., Run]) -> None:
    run, ask = make_run(), Ask(ids("the "), ids("cat"), ids(" ran"))
    row = ContinuationScorer(run).row_with(ask, np.array([True, False, True]))
    mask = run.tokenizer.mask_id
    assert row.tokens.tolist() == [*ids("the "), mask, ord("a"), mask, *ids(" ran")]
    assert row.is_scored.nonzero().squeeze(1).tolist() == [4, 6]
    assert row.rate == 2 / 11
    assert (ask.target, ask.length) == (ids("cat"), 11)


def test_a_causal_row_is_the_context_and_then_the_target_in_order(
    make_run: Callable[..., Run],
) -> None:
    run, ask = make_run("dit", "--framework", "aoarm"), Ask(ids("the "), ids("cat"), ids(" ran"))
    row = ContinuationScorer(run).left_to_right_row(ask)
    assert row.tokens.tolist() == list(ids("the cat ran"))
    assert row.numbers.argsort().tolist() == [0, 1, 2, 3, 7, 8, 9, 10, 4, 5, 6]


def test_the_order_matters(make_run: Callable[..., Run]) -> None:
    """Somewhere the surest token is not the first: left to right would write something else."""
    run = make_run()
    differing = 0
    for before, length, behind in GAPS[1:]:
        given, after = (257, *ids(before)), ids(behind)
        row = torch.tensor([[*given, *([run.tokenizer.mask_id] * length), *after]])
        for place in range(len(given), len(given) + length):
            with torch.no_grad():
                row[0, place] = run.model(row, torch.tensor([place])).argmax()
        made = row[0, len(given) : len(given) + length].tolist()
        differing += made != written(run, given, length, after)
    assert differing


def test_a_target_that_holds_the_sign_of_a_pad_is_no_special_case(
    make_run: Callable[..., Run],
) -> None:
    run = make_run()
    ask = Ask(ids("the "), (run.tokenizer.pad_id, run.tokenizer.eos_id))
    assert ContinuationScorer(run).is_greedy([ask]) == [
        written(run, ask.given, 2, ()) == list(ask.target)
    ]


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_an_arm_on_a_causal_lm_writes_left_to_right(
    make_run: Callable[..., Run], kind: str
) -> None:
    run = make_run(kind, "--framework", "arm")
    given = (257, *ids("the cat "))
    made = run.model.language_model.generate(
        torch.tensor([given]),
        attention_mask=torch.ones(1, len(given), dtype=torch.long),
        max_new_tokens=6,
        min_new_tokens=6,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    target = made[0, len(given) :].tolist()
    asks = [Ask(given, tuple(target)), Ask(given, tuple(target[:1]))]
    asks += [Ask(given, wrong_at(target, place)) for place in (0, 3, 5)]
    assert ContinuationScorer(run).is_greedy(asks) == [True, True, False, False, False]


@pytest.mark.parametrize("framework", ["arm", "aoarm"])
def test_our_own_causal_trunk_writes_left_to_right(
    make_run: Callable[..., Run], framework: str
) -> None:
    """By a loop: begin sign, what is shown, then one token after the other."""
    run = make_run("dit", "--framework", framework)
    given, target = ids("the cat "), []
    for count in range(5):
        row = torch.tensor([[run.tokenizer.mask_id, *given, *target]])
        length = row.shape[1]
        with torch.no_grad():
            logits = run.model(
                row,
                torch.tensor([length - 1]),
                positions=torch.arange(length),
                target_positions=torch.arange(1, length + 1),
            )
        target.append(int(logits.argmax()))
        assert len(target) == count + 1
    asks = [
        Ask(given, tuple(target)),
        Ask(given, wrong_at(target, 4)),
        Ask(given, tuple(target[:2])),
    ]
    assert ContinuationScorer(run).is_greedy(asks) == [True, False, True]
