"""Rules of sampling against joints that are known and against a plain loop."""

import itertools
import math

import pytest
import torch
from sampling_tools import BITS, CHAIN, EVERY_RULE, chain_joint, masked, p_value
from sampling_tools import history as history_of
from sampling_tools import make as make_rows
from scipy import stats

from bellmask.data.toys import ExactDenoiser, ToySource
from bellmask.diffusion.schedules import Cosine, Linear
from bellmask.generate.rules import RULES, Moment, Remasking
from bellmask.generate.sampler import TokenChoice, cosine_grid, count_grid, uniform_grid

JOINT = chain_joint()


def make(canvas, grid, rule, model=None, mask_id=2, **options):
    return make_rows(model or ExactDenoiser(CHAIN), canvas, grid, rule, mask_id=mask_id, **options)


def history(canvas, grid, rule, model=None, mask_id=2, **options):
    return history_of(model or ExactDenoiser(CHAIN), canvas, grid, rule, mask_id=mask_id, **options)


# exact samplers have the joint distribution, others do not


def product_of_marginals():
    place = range(4)
    one = [[sum(p for r, p in JOINT.items() if r[i] == v) for v in (0, 1)] for i in place]
    return {r: math.prod(one[i][r[i]] for i in place) for r in BITS}


EXACT = {
    "ancestral": (RULES["ancestral"], uniform_grid(128), None),
    "ancestral, cosine grid": (RULES["ancestral"], cosine_grid(160), None),
    "first hitting": (RULES["first_hitting"], None, None),
    "first hitting in blocks": (RULES["first_hitting"], None, 2),
    "one by one": (RULES["random"], None, None),
    "one by one in blocks": (RULES["random"], None, 3),
    "ancestral in blocks": (RULES["ancestral"], uniform_grid(160), 3),
    "cap": (Remasking(0.02), uniform_grid(100), None),
    "rescale": (Remasking(0.02, "rescale"), uniform_grid(100), None),
    "no remasking": (Remasking(0.0), uniform_grid(100), None),
}
COSINE = ("ancestral", "first hitting in blocks", "cap")


@pytest.mark.parametrize("given", [{}, {1: 1, 3: 0}], ids=str)
@pytest.mark.parametrize(
    ("name", "schedule"),
    [(name, Linear()) for name in EXACT] + [(name, Cosine()) for name in COSINE],
)
def test_exact_samplers_have_the_joint_distribution(name, schedule, given):
    """Of all rows, or of what is missing given the rest."""
    rule, grid, block_length = EXACT[name]
    canvas = torch.tensor([[given.get(i, 2) for i in range(4)]]).repeat(2000, 1)
    made = make(canvas, grid, rule, schedule=schedule, block_length=block_length)
    assert p_value(made.ids_BL, JOINT, given) > 1e-4, "26 cases: 1e-3 would often be chance"
    assert given or p_value(made.ids_BL, product_of_marginals(), {}) < 1e-9


def test_two_at_a_time_is_not_the_joint_distribution():
    made = make(masked(4000, 4, 2), count_grid(4, 2), RULES["random"], seed=3)
    assert made.num_calls == 2
    assert p_value(made.ids_BL, JOINT, {}) < 1e-6
    for rule in (RULES["ancestral"], RULES["random"], Remasking(0.3)):
        made = make(masked(4000, 4, 2), uniform_grid(1), rule)
        assert (made.num_calls, made.num_rows) == (1, 4000)
        assert p_value(made.ids_BL, product_of_marginals(), {}) > 1e-3
        assert p_value(made.ids_BL, JOINT, {}) < 1e-9


@pytest.mark.parametrize("schedule", [Linear(), Cosine()], ids=["linear", "cosine"])
def test_first_hitting_is_ancestral_sampling_on_a_very_fine_grid(schedule):
    """The same noise gives the very same rows; a coarse grid gives others."""
    model, canvas = ExactDenoiser(ToySource.sticky(6, 5, 0.6)), masked(8, 5, 6)
    canvas[3, 2], canvas[4, :] = 0, 1
    exact, fine, coarse = (
        make(canvas, grid, RULES[rule], model, 6, schedule=schedule, seed=2)
        for rule, grid in (
            ("first_hitting", None),
            ("ancestral", uniform_grid(1500)),
            ("ancestral", uniform_grid(3)),
        )
    )
    assert fine.ids_BL.equal(exact.ids_BL)
    assert not coarse.ids_BL.equal(exact.ids_BL)
    assert (exact.num_calls, exact.num_rows) == (5, 6 * 5 + 4)


def test_greedy_sampling_takes_the_most_likely_row():
    """0 stays 0 with probability 0.85 and is the likelier start, whatever is revealed first."""
    for rule in EVERY_RULE:
        made = make(masked(30, 4, 2), uniform_grid(16), rule, choice=TokenChoice(0.0))
        assert made.ids_BL.eq(0).all()


# scored rules against a plain loop


SOURCE = ToySource.order_two(4, 9, sharpness=5.0)
SCORES = {
    "most_confident": max,
    "margin": lambda p: sorted(p)[-1] - sorted(p)[-2],
    "entropy": lambda p: sum(one * math.log(one) for one in p),
}


def plain_loop(canvas, left, score):
    """One row: predict all masked, keep the surest until ``left[k]`` are masked; greedy tokens."""
    row, chosen = list(canvas), []
    for number in left:
        p = SOURCE.log_conditionals(torch.tensor([row]))[0].exp().tolist()
        places = [i for i, token in enumerate(row) if token == 4]
        places.sort(key=lambda i: (-score(p[i]), i))
        chosen.append(set(places[: max(0, len(places) - number)]))
        for i in chosen[-1]:
            row[i] = max(range(4), key=p[i].__getitem__)
    return row, chosen


@pytest.mark.parametrize(
    "grid",
    [None, uniform_grid(3), cosine_grid(5), count_grid(8, 3)],
    ids=["none", "uniform", "cosine", "count"],
)
@pytest.mark.parametrize("name", SCORES)
def test_the_surest_tokens_are_revealed_first(name, grid):
    canvas = masked(8, 9, 4)
    canvas[torch.arange(8), torch.arange(8)] = torch.arange(8) % 4
    canvas[::3, 5] = 1
    seen = history(canvas, grid, RULES[name], ExactDenoiser(SOURCE), 4, choice=TokenChoice(0.0))
    times = [1 - k / 8 for k in range(9)] if grid is None else grid.tolist()
    for b, row in enumerate(canvas.tolist()):
        left = [round(row.count(4) * t) for t in times[1:]]
        expected, chosen = plain_loop(row, left, SCORES[name])
        assert seen[-1][b].tolist() == expected
        shown = [
            {i for i in range(9) if before[b, i] == 4 and after[b, i] != 4}
            for before, after in itertools.pairwise(seen)
        ]
        assert shown == chosen


def test_confidence_is_that_of_the_token_drawn_not_of_the_likeliest():
    """Warm tokens; of two places the one whose own token is likelier comes first."""
    p = torch.tensor([0.6, 0.3, 0.1])

    def model(x, rows, **_):
        return p.log().expand(len(rows), -1)

    warm = {"choice": TokenChoice(3.0)}
    both = make(masked(300, 2, 3), uniform_grid(1), "most_confident", model, 3, **warm).ids_BL
    first = history(masked(300, 2, 3), count_grid(2), "most_confident", model, 3, **warm)[1]
    assert first.amin(1).equal(both.amin(1)), "tokens are numbered from the likeliest on"
    assert (both[:, 0] != both[:, 1]).any()


# remasking (ReMDM)


def moment(alpha_t, alpha_s, num=40_000):
    is_open = (torch.arange(2 * num) % 2 == 0)[None]
    seed = {"reveal": 0, "forget": 1}
    none = torch.zeros(1)

    def fresh(name):
        return torch.rand(1, 2 * num, generator=torch.Generator().manual_seed(seed[name])).double()

    return Moment(
        is_open, ~is_open, alpha_t, alpha_s, none, none, none, True, none, fresh, Linear()
    )


@pytest.mark.parametrize("kind", ["cap", "rescale"])
@pytest.mark.parametrize("strength", [0.0, 0.02, 0.5, 1.0])
def test_remasking_keeps_the_share_of_visible_tokens(kind, strength):
    """sigma <= (1 - alpha_s) / alpha_t keeps both probabilities in [0, 1] (their Eq. 5 and 6)."""
    rule = Remasking(strength, kind)
    for alpha_t, alpha_s in [(0.0, 0.1), (0.2, 0.3), (0.5, 0.6), (0.7, 0.9), (0.9, 1)]:
        at = moment(alpha_t, alpha_s)
        sigma, largest = rule.sigma(at), min(1.0, (1 - alpha_s) / max(alpha_t, 1e-9))
        assert sigma == pytest.approx(
            min(strength, largest) if kind == "cap" else strength * largest
        )
        is_shown, is_hidden = rule.candidates(at), rule.forgotten(at)
        assert not (is_shown & ~at.is_open_BL).any()
        assert not (is_hidden & ~at.is_made_BL).any()
        p = (alpha_s - (1 - sigma) * alpha_t) / (1 - alpha_t)
        assert -1e-12 <= p <= 1 + 1e-12
        p = min(1.0, max(0.0, p))
        assert stats.binomtest(int(is_shown.sum()), 40_000, p).pvalue > 1e-4
        assert stats.binomtest(int(is_hidden.sum()), 40_000, sigma).pvalue > 1e-4
        assert alpha_t * (1 - sigma) + (1 - alpha_t) * p == pytest.approx(alpha_s)


def test_without_strength_nothing_is_masked_again():
    for strength, is_kept in ((0.0, True), (0.2, False)):
        seen = history(masked(50, 4, 2), uniform_grid(12), Remasking(strength))
        stays = [bool((b[a != 2] == a[a != 2]).all()) for a, b in itertools.pairwise(seen)]
        assert all(stays) == is_kept
        assert (seen[-1] != 2).all()


def test_nothing_is_masked_again_before_the_network_has_seen_it():
    asked = []

    def model(x_BL, rows_N, **_):
        asked.append(x_BL)
        return torch.zeros(len(rows_N), 2)

    seen = history(masked(60, 6, 2), uniform_grid(6), Remasking(0.9), model)
    for x_BL, before in zip(asked, seen, strict=False):
        assert {tuple(row) for row in x_BL.tolist()} <= {tuple(row) for row in before.tolist()}


@pytest.mark.parametrize("block_length", [None, 3])
def test_given_tokens_and_finished_blocks_are_never_masked_again(block_length):
    canvas = masked(200, 8, 2)
    canvas[:, [0, 5]] = 1
    rule, grid = Remasking(1.0, "rescale"), uniform_grid(16)
    source = ExactDenoiser(ToySource.sticky(2, 8, 0.5))
    seen = history(canvas, grid, rule, source, block_length=block_length)
    again = torch.stack([(a != 2) & (b == 2) for a, b in itertools.pairwise(seen)]).any(1)
    assert not again[:, [0, 5]].any()
    assert again[:, [1, 2, 3, 6, 7]].any(0).all()
    if block_length:  # 1 to 3, then 4 and 6, then 7; steps in proportion: 8, 5, 3
        assert not again[8:, 1:4].any()
        assert not again[:8, 4:].any()
        assert not again[13:, :7].any()
    assert (seen[-1] != 2).all()
