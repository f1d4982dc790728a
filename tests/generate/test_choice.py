"""One token from its logits, against probabilities worked out in plain Python."""

import math

import numpy as np
import pytest
import torch
from sampling_tools import awake, masked, seeded
from scipy import stats
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from bellmask.generate.rules import RULES
from bellmask.generate.sampler import SamplingDenoiser, TokenChoice, generate, uniform_grid
from bellmask.model.head import CHUNK_ROWS

LOGITS = torch.tensor([1.5, 0.0, -1.0, 0.7, -0.3], dtype=torch.float64)
TIED = torch.tensor([0.0, 1.0, 1.0, 0.0, 1.0], dtype=torch.float64)
HALVES = torch.tensor([0.25, 0.5, 0.125, 0.125], dtype=torch.float64).log()
N = 20_000


def draw(choice, logits_V=LOGITS, key=5, count=N):
    return choice.draw(logits_V.expand(count, -1), torch.arange(count), key)


def wanted(logits, temperature, kept):
    """The softmax of what is kept, over temperature."""
    weight = [math.exp(one / temperature) * (v in kept) for v, one in enumerate(logits.tolist())]
    return np.array(weight) / sum(weight)


@pytest.mark.parametrize(
    ("logits", "asked", "kept"),
    [
        (LOGITS, (2.0,), {0, 1, 2, 3, 4}),
        (LOGITS, (1.3, 4), {0, 1, 3, 4}),
        (LOGITS, (1.3, 50), {0, 1, 2, 3, 4}),
        # 1.5 alone has 0.51, with 0.7 it is 0.73, with 0.0 it is 0.85
        (LOGITS, (1.0, None, 0.01), {0}),
        (LOGITS, (1.0, None, 0.6), {0, 3}),
        (LOGITS, (1.0, None, 0.9), {0, 1, 3, 4}),
        # temperature comes first, then k, then p: each other order keeps other tokens
        (LOGITS, (3.0, 3, 0.7), {0, 3}),  # 0.44, 0.33, 0.26; without top-k 0.55 after two
        (LOGITS, (3.0, None, 0.7), {0, 1, 3}),
        (LOGITS, (3.0, 3, 0.55), {0, 3}),
        # all as likely as the k-th are kept; p takes the first of equals, and p is enough
        (TIED, (1.0, 2), {1, 2, 4}),
        (TIED, (1.0, None, 0.4), {1, 2}),
        (HALVES, (1.0, None, 0.75 - 1e-6), {0, 1}),  # a hair less, since logs and sums round
        (HALVES, (1.0, None, 0.75 + 1e-6), {0, 1, 2}),
    ],
)
def test_tokens_follow_the_softmax_of_what_is_kept(logits, asked, kept):
    p = wanted(logits, asked[0], kept)
    counts = torch.bincount(draw(TokenChoice(*asked), logits), minlength=len(p))
    assert counts.numpy()[p == 0].sum() == 0
    if len(kept) > 1:
        assert stats.chisquare(counts.numpy()[p > 0], N * p[p > 0]).pvalue > 1e-3


@pytest.mark.parametrize(("dtype", "token"), [(torch.float64, 1), (torch.float32, 0)])
def test_double_noise_reaches_further_into_the_tail(dtype, token, monkeypatch):
    """Token 1 has probability e^-20 and a number that wins once in 10^12 draws; float32 rounds it
    to one that wins once in 10^7. A number 0 means no noise of minus infinity.
    """
    u = torch.tensor([[0.5, 1 - 1e-12, 0.0]], dtype=torch.float64)
    monkeypatch.setattr("bellmask.generate.sampler.uniform", lambda key, counters: u)

    def drawn(*logits):
        return int(TokenChoice(dtype=dtype).draw(torch.tensor([logits]), torch.zeros(1).long(), 0))

    assert drawn(20.0, 0.0, -math.inf) == token
    u[0, 0], u[0, 1] = 0.5 + 1e-10, 0.5 + 2e-10  # one number in float32
    assert drawn(0.0, 0.0, -math.inf) == token
    assert drawn(-math.inf, -math.inf, 0.0) == 2


@pytest.mark.parametrize("choice", [TokenChoice(), TokenChoice(0.7, 4, 0.9)])
def test_noise_belongs_to_the_places_counter(choice):
    """Not to its row; more rows than are worked on at once; neighbors choose independently."""
    logits = torch.randn(1300, 7, generator=seeded(4))
    order = torch.randperm(1300, generator=seeded(5))
    straight = choice.draw(logits, torch.arange(1300), 9)
    assert choice.draw(logits[order], order, 9).equal(straight[order])
    assert not choice.draw(logits, torch.arange(1300), 10).equal(straight)
    assert not choice.draw(logits, torch.arange(1300) + 1, 9).equal(straight)
    greedy = TokenChoice(0.0, 3, 0.5).draw(logits, torch.arange(1300), 7)
    assert greedy.tolist() == [max(range(7), key=row.__getitem__) for row in logits.tolist()]
    tokens = draw(TokenChoice(), key=6)
    pairs = torch.bincount(5 * tokens[0::2] + tokens[1::2], minlength=25).view(5, 5)
    assert stats.chi2_contingency(pairs.numpy()).pvalue > 1e-3


class Largest(TorchDispatchMode):
    """Numbers of the largest tensor that any operation made."""

    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        sizes = [leaf.numel() for leaf in tree_leaves(found) if isinstance(leaf, torch.Tensor)]
        self.numel = max(self.numel, *sizes, 0)
        return found


@pytest.mark.parametrize(
    ("rule", "guidance"), [("ancestral", 0), ("margin", 0), ("entropy", 0), ("most_confident", 0.5)]
)
def test_logits_of_all_masked_tokens_never_exist_at_once(rule, guidance):
    """And the samples are those of all logits at once."""
    num_tokens = 4000
    model, canvas = awake(1, num_tokens), masked(5, 240, num_tokens)
    canvas[:, :3] = torch.arange(15).view(5, 3)
    made, sizes = [], []
    for network in (model, lambda *given, **more: model(*given, **more)):
        with Largest() as largest:
            told = SamplingDenoiser(network, num_tokens, guidance=guidance)
            made.append(generate(told, canvas, uniform_grid(2), RULES[rule], seed=3).ids_BL)
        sizes.append(largest.numel)
    assert sizes[0] == CHUNK_ROWS * num_tokens
    assert sizes[1] > sizes[0]
    assert made[0].equal(made[1])
    assert int(made[0].max()) < num_tokens
