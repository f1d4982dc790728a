"""Remasking (ReMDM): the share of visible tokens, the limit of sigma, what is never hidden."""

import itertools

import pytest
import torch
from scipy import stats

from bellmask.diffusion.schedule import Linear
from bellmask.generate.engine import generate
from bellmask.generate.grids import uniform_grid
from bellmask.generate.network import Network
from bellmask.generate.rules import Moment, Remasking

MASK = 2


def even(x_BL, rows_N, **_):
    return torch.zeros(len(rows_N), 2)


def history(canvas, steps, rule, **options) -> list[torch.Tensor]:
    seen = []
    options["on_step"] = lambda step: seen.append(step.ids_BL.clone())
    generate(Network(even, MASK), canvas, uniform_grid(steps), rule, **options)
    return seen


def masked(count: int, length: int) -> torch.Tensor:
    return torch.full((count, length), MASK)


def moment(alpha_t: float, alpha_s: float, num: int = 40_000) -> Moment:
    is_open = (torch.arange(2 * num) % 2 == 0)[None]
    noise = {
        n: torch.rand(1, 2 * num, generator=torch.Generator().manual_seed(k)).double()
        for k, n in enumerate(("reveal", "forget"))
    }
    nothing = torch.zeros(1)
    return Moment(
        is_open,
        ~is_open,
        alpha_t,
        alpha_s,
        nothing,
        nothing,
        nothing,
        True,
        nothing,
        noise.__getitem__,
        Linear(),
    )


STEPS = [(0.0, 0.1), (0.2, 0.3), (0.5, 0.6), (0.7, 0.9), (0.95, 0.96), (0.9, 1)]


@pytest.mark.parametrize("kind", ["cap", "rescale"])
@pytest.mark.parametrize("strength", [0.0, 0.02, 0.5, 1.0])
def test_remasking_keeps_the_share_of_visible_tokens(kind, strength):
    """sigma <= (1 - alpha_s) / alpha_t keeps both probabilities in [0, 1] (their Eq. 5 and 6)."""
    rule = Remasking(strength, kind)
    for alpha_t, alpha_s in [
        (0.0, 0.1),
        (0.2, 0.3),
        (0.5, 0.6),
        (0.7, 0.9),
        (0.95, 0.96),
        (0.9, 1),
    ]:
        at = moment(alpha_t, alpha_s)
        sigma, largest = rule.sigma(at), min(1.0, (1 - alpha_s) / max(alpha_t, 1e-9))
        expected = min(strength, largest) if kind == "cap" else strength * largest
        assert sigma == pytest.approx(expected)
        shown, hidden = int(rule.candidates(at).sum()), int(rule.forgotten(at).sum())
        assert not (rule.candidates(at) & ~at.is_open_BL).any()
        assert not (rule.forgotten(at) & ~at.is_made_BL).any()
        p = (alpha_s - (1 - sigma) * alpha_t) / (1 - alpha_t)
        assert -1e-12 <= p <= 1 + 1e-12
        assert stats.binomtest(shown, 40_000, min(1.0, max(0.0, p))).pvalue > 1e-4
        assert stats.binomtest(hidden, 40_000, sigma).pvalue > 1e-4
        assert alpha_t * (1 - sigma) + (1 - alpha_t) * p == pytest.approx(alpha_s)


def test_without_strength_nothing_is_masked_again():
    for strength, is_kept in ((0.0, True), (0.2, False)):
        seen = history(masked(50, 4), 12, Remasking(strength))
        stays = [bool((b[a != 2] == a[a != 2]).all()) for a, b in itertools.pairwise(seen)]
        assert all(stays) == is_kept
        assert (seen[-1] != MASK).all()


def test_a_place_is_never_shown_and_hidden_in_one_step():
    """What the network sees in a step is all that was visible before it."""
    seen, asked = [masked(60, 6)], []

    def model(x_BL, rows_N, **_):
        asked.append(x_BL)
        return torch.zeros(len(rows_N), 2)

    options = {"on_step": lambda step: seen.append(step.ids_BL.clone())}
    generate(Network(model, MASK), seen[0], uniform_grid(6), Remasking(0.9), **options)
    for x_BL, before in zip(asked, seen[1:], strict=False):
        rows = {tuple(row) for row in before.tolist()}
        assert {tuple(row) for row in x_BL.tolist()} <= rows


@pytest.mark.parametrize("block_length", [None, 3])
def test_given_tokens_and_finished_blocks_are_never_masked_again(block_length):
    canvas = masked(200, 8)
    canvas[:, [0, 5]] = 1
    seen = history(canvas, 16, Remasking(1.0, "rescale"), block_length=block_length)
    again = torch.stack([(a != 2) & (b == 2) for a, b in itertools.pairwise(seen)]).any(1)
    assert not again[:, [0, 5]].any()
    assert again[:, [1, 2, 3, 6, 7]].any(0).all()
    if block_length:  # 1 to 3, then 4 and 6, then 7; steps in proportion: 8, 5, 3
        assert not again[8:, 1:4].any()
        assert not again[:8, 4:].any()
        assert not again[13:, :7].any()
    assert (seen[-1] != MASK).all()
