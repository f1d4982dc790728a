"""One token from its logits, against probabilities worked out in plain Python."""

import itertools
import math

import numpy as np
import pytest
import torch
from sampling_tools import seeded
from scipy import stats

from bellmask.generate.sampler import TokenChoice

LOGITS = torch.tensor([1.5, 0.0, -1.0, 0.7, -0.3], dtype=torch.float64)
N = 20_000
PRECISIONS = pytest.mark.parametrize("dtype", [torch.float64, torch.float32])


def draw(choice, logits_V=LOGITS, key=5, count=N):
    return choice.draw(logits_V.expand(count, -1), torch.arange(count), key)


def wanted(logits, temperature=1.0, top_k=None, top_p=None):
    """Temperature, then the k likeliest and all that are as likely as the last of them, then the
    fewest of what is left that have p together.
    """
    weight = {v: math.exp(one / temperature) for v, one in enumerate(logits.tolist())}
    if top_k is not None:
        last = sorted(weight.values(), reverse=True)[min(top_k, len(weight)) - 1]
        weight = {v: w for v, w in weight.items() if w >= last}
    if top_p is not None:
        kept, total = {}, sum(weight.values())
        for v in sorted(weight, key=lambda v: (-weight[v], v)):
            kept[v] = weight[v]
            if sum(kept.values()) / total >= top_p:
                break
        weight = kept
    total = sum(weight.values())
    return [weight.get(v, 0.0) / total for v in range(len(logits))]


TIED = torch.tensor([0.0, 1.0, 1.0, 0.0, 1.0], dtype=torch.float64)
DRAWS = [  # what is asked for, the tokens that may be drawn
    ((0.5,), {0, 1, 2, 3, 4}),
    ((2.0,), {0, 1, 2, 3, 4}),
    ((1.3, 1), {0}),
    ((1.3, 2), {0, 3}),
    ((1.3, 4), {0, 1, 3, 4}),
    # 1.5 alone has 0.51, with 0.7 it is 0.73, with 0.0 it is 0.85
    ((1.0, None, 0.01), {0}),
    ((1.0, None, 0.5), {0}),
    ((1.0, None, 0.6), {0, 3}),
    ((1.0, None, 0.8), {0, 1, 3}),
    ((1.0, None, 0.9), {0, 1, 3, 4}),
    # temperature comes first, then k, then p: each other order keeps other tokens
    ((3.0, 3, 0.7), {0, 3}),  # 0.44, 0.33, 0.26: 0.77 after two; without top-k 0.55 after two
    ((3.0, None, 0.7), {0, 1, 3}),
    ((1.0, 3, 0.55), {0}),
    ((3.0, 3, 0.55), {0, 3}),
]


@PRECISIONS
@pytest.mark.parametrize(("asked", "kept"), DRAWS)
def test_tokens_follow_the_softmax_of_what_is_kept(asked, kept, dtype):
    assert_follows(TokenChoice(*asked, dtype=dtype), LOGITS, kept)


def assert_follows(choice, logits, kept):
    p = np.array(wanted(logits, choice.temperature, choice.top_k, choice.top_p))
    assert set(np.flatnonzero(p)) == kept
    counts = torch.bincount(draw(choice, logits), minlength=len(p)).numpy()
    assert counts[p == 0].sum() == 0
    if len(kept) > 1:
        assert stats.chisquare(counts[p > 0], N * p[p > 0]).pvalue > 1e-3


def test_ties():
    """All as likely as the k-th are kept; p takes the first of equals, and exactly p is enough."""
    assert_follows(TokenChoice(top_k=2), TIED, {1, 2, 4})
    assert_follows(TokenChoice(top_p=0.4), TIED, {1, 2})
    assert draw(TokenChoice(0.0), TIED).eq(1).all()
    logits = torch.tensor([0.25, 0.5, 0.125, 0.125], dtype=torch.float64).log()
    for top_p, kept in ((0.5, {1}), (0.75, {0, 1}), (0.875, {0, 1, 2})):
        # a hair less, since logs and sums round
        assert set(draw(TokenChoice(top_p=top_p - 1e-9), logits, count=500).tolist()) == kept
    assert set(draw(TokenChoice(top_p=0.5 + 1e-9), logits, count=500).tolist()) == {0, 1}


@PRECISIONS
def test_limits_that_leave_nothing_out_change_nothing(dtype):
    logits, counters = torch.randn(2000, 9, generator=seeded(1)), torch.arange(2000)
    plain = TokenChoice(0.8, dtype=dtype).draw(logits, counters, 3)
    for top_k, top_p in ((9, None), (50, None), (None, 1.0), (9, 1.0)):
        assert TokenChoice(0.8, top_k, top_p, dtype).draw(logits, counters, 3).equal(plain)
    assert not TokenChoice(0.8, 8, None, dtype).draw(logits, counters, 3).equal(plain)
    assert not TokenChoice(0.8, None, 0.99, dtype).draw(logits, counters, 3).equal(plain)
    double = TokenChoice(0.8).draw(logits, counters, 3)  # the same numbers, rounded
    assert (plain == double).float().mean() > 0.999


@pytest.mark.parametrize(("dtype", "token"), [(torch.float64, 1), (torch.float32, 0)])
def test_double_noise_reaches_further_into_the_tail(dtype, token, monkeypatch):
    """Token 1 has probability e^-20 and a number that wins once in 10^12 draws; float32 rounds it
    to one that wins once in 10^7. A number 0 means no noise of minus infinity.
    """
    u = torch.tensor([[0.5, 1 - 1e-12, 0.0]], dtype=torch.float64)
    monkeypatch.setattr("bellmask.generate.sampler.uniform", lambda key, counters: u)

    def drawn(*logits):
        return (
            TokenChoice(dtype=dtype).draw(torch.tensor([logits]), torch.zeros(1).long(), 0).item()
        )

    assert drawn(20.0, 0.0, -math.inf) == token
    u[0, 0], u[0, 1] = 0.5 + 1e-10, 0.5 + 2e-10  # one number in float32
    assert drawn(0.0, 0.0, -math.inf) == token
    assert drawn(-math.inf, -math.inf, 0.0) == 2


def test_neighboring_places_choose_independently():
    tokens = draw(TokenChoice(), key=6)
    pairs = torch.bincount(5 * tokens[0::2] + tokens[1::2], minlength=25).view(5, 5)
    assert stats.chi2_contingency(pairs.numpy()).pvalue > 1e-3


def test_temperature_zero_is_the_largest_logit_whatever_else_is_asked():
    logits = torch.randn(200, 9, generator=seeded(1))
    largest = [max(range(9), key=row.__getitem__) for row in logits.tolist()]
    for top_k, top_p in itertools.product((None, 3), (None, 0.5)):
        assert TokenChoice(0.0, top_k, top_p).draw(logits, torch.arange(200), 7).tolist() == largest


@pytest.mark.parametrize("temperature", [0.0, 0.01, 1.0, 100.0])
@pytest.mark.parametrize(("top_k", "top_p"), [(None, None), (5, 0.95)])
def test_an_impossible_token_is_never_chosen(temperature, top_k, top_p):
    logits = torch.randn(5000, 8, generator=seeded(2))
    is_possible = torch.rand(5000, 8, generator=seeded(3)) < 0.3
    is_possible[torch.arange(5000), torch.arange(5000) % 8] = True
    logits[~is_possible] = -math.inf
    tokens = TokenChoice(temperature, top_k, top_p).draw(logits, torch.arange(5000), 8)
    assert is_possible[torch.arange(5000), tokens].all()


@pytest.mark.parametrize(
    "choice", [TokenChoice(), TokenChoice(0.7, 4, 0.9)], ids=["plain", "limited"]
)
def test_the_choice_depends_on_the_places_counter_not_on_its_row(choice):
    """More rows than are worked on at once."""
    logits = torch.randn(1300, 7, generator=seeded(4))
    order = torch.randperm(1300, generator=seeded(5))
    straight = choice.draw(logits, torch.arange(1300), 9)
    assert choice.draw(logits[order], order, 9).equal(straight[order])
    assert not choice.draw(logits, torch.arange(1300), 10).equal(straight)
    assert not choice.draw(logits, torch.arange(1300) + 1, 9).equal(straight)
