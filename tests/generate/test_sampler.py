"""The sampling loop: what stays, when tokens appear, whose noise it is, grids, what is refused."""

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sampling_tools import MASK, Spy, V, each, even, history, make, masked
from scipy import stats

from bellmask.diffusion.schedules import Cosine, Linear, MiddleFlat, Polynomial
from bellmask.generate.rules import RULES
from bellmask.generate.sampler import (
    GRIDS,
    SamplingDenoiser,
    TokenChoice,
    cosine_grid,
    count_grid,
    generate,
    uniform_grid,
)
from bellmask.utils.errors import UserError

# what is given stays, everything else is filled

ROWS = st.integers(1, 8).flatmap(
    lambda length: st.lists(
        st.lists(st.integers(0, MASK), min_size=length, max_size=length), min_size=1, max_size=5
    )
)


@each
@given(
    rows=ROWS,
    num_steps=st.integers(1, 12),
    block_length=st.none() | st.integers(1, 9),
    seed=st.integers(0, 10**6),
)
@settings(deadline=None, max_examples=8, derandomize=True, database=None)
def test_given_tokens_never_change_and_all_gaps_are_filled(
    rule, rows, num_steps, block_length, seed
):
    canvas = torch.tensor(rows)
    is_given = canvas != MASK
    w = 0.5 * (seed % 2) if is_given.any() else 0.0  # else there is nothing to guide by
    options = {"seed": seed, "block_length": block_length, "w": w}
    seen = history(Spy(), canvas, num_steps, rule, **options)
    assert canvas.tolist() == seen[0].tolist() == rows
    for before, ids in itertools.pairwise(seen):
        assert ids[is_given].equal(canvas[is_given])
        if rule in RULES:  # once revealed a token stays; others remask
            assert ids[before != MASK].equal(before[before != MASK])
    assert ((seen[-1] >= 0) & (seen[-1] < V)).all()


# when


@pytest.mark.parametrize(
    ("schedule", "alpha"),
    [(None, lambda t: 1 - t), (Cosine(), lambda t: 1 - math.sin(math.pi * t / 2))],
    ids=["default", "cosine"],
)
@pytest.mark.parametrize("rule", ["ancestral", "cap", "rescale"])
def test_by_time_t_a_share_alpha_is_revealed(rule, schedule, alpha):
    shown = []

    def on_step(step):
        shown.append((step.t, int((step.ids_BL != MASK).sum())))
        assert (step.number, step.num_steps, step.first_sample) == (len(shown) - 1, 8, 3)

    options = {"schedule": schedule, "seed": 3, "first_sample": 3}
    make(Spy(), masked(400, 25), 8, rule, on_step=on_step, **options)
    assert [t for t, _ in shown] == [1 - k / 8 for k in range(9)]
    for t, number in shown[1:-1]:
        assert stats.binomtest(number, 10_000, alpha(t)).pvalue > 1e-3
    assert (shown[0][1], shown[-1][1]) == (0, 10_000)


@pytest.mark.parametrize("rule", ["ancestral", "first_hitting", "random"])
def test_places_are_revealed_in_every_order_equally_often(rule):
    """All 3! orders in which three places can appear."""
    steps = count_grid(3) if rule == "random" else 200
    rank = sum((ids == MASK).long() for ids in history(Spy(), masked(1500, 3), steps, rule))
    rank = rank[(rank.sort(dim=1).values.diff(dim=1) > 0).all(1)].argsort(dim=1)
    assert len(rank) > 1430
    counts = torch.unique(rank, dim=0, return_counts=True)[1]
    assert len(counts) == 6
    assert stats.chisquare(counts.numpy()).pvalue > 1e-3


# each sample has its own noise


def rows_made(first, count, rule="ancestral", seed=0, **options):
    canvas = masked(count, 10)
    canvas[:, 4] = 1
    return make(Spy(), canvas, 6, rule, seed=seed, first_sample=first, **options).ids_BL


@each
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"choice": TokenChoice(0.0)},
        {"choice": TokenChoice(1.2, 5, 0.95, torch.float32), "w": 0.4, "block_length": 3},
    ],
    ids=["plain", "greedy", "all"],
)
def test_a_sample_does_not_depend_on_the_batch_it_is_in(rule, options):
    whole = rows_made(0, 7, rule, **options)
    parts = [rows_made(i, n, rule, **options) for i, n in ((0, 1), (1, 1), (2, 4), (6, 1))]
    assert whole.equal(torch.cat(parts))
    numbered = rows_made(torch.tensor([5, 2]), 2, rule, **options)
    assert numbered.equal(whole[[5, 2]])


@pytest.mark.parametrize("rule", ["ancestral", "first_hitting", "cap", "rescale"])
def test_a_sample_does_not_depend_on_the_canvases_beside_it(rule):
    canvas = masked(3, 10)
    canvas[0, :9], canvas[2] = 2, 5
    made = make(Spy(), canvas, 6, rule).ids_BL
    assert made[1:2].equal(make(Spy(), canvas[1:2], 6, rule, first_sample=1).ids_BL)


@each
def test_samples_and_seeds_differ(rule):
    """In tokens, and where the order is by chance also in the order: who is asked for when."""
    many = torch.cat([rows_made(0, 20, rule, seed=seed) for seed in (0, 1, 2)])
    assert len(many.unique(dim=0)) == 60
    asked = []
    for seed in (0, 1):
        spy = Spy()
        make(spy, masked(1, 12), 60, rule, seed=seed, choice=TokenChoice(0.0))
        asked.append([rows_N.tolist() for _, rows_N, _, _ in spy.calls])
    assert (asked[0] != asked[1]) == (rule not in ("most_confident", "margin", "entropy"))


def test_a_token_that_is_predicted_again_has_new_noise():
    """Even logits: with one noise for all steps a place would always get the same token."""
    drawn = torch.stack(history(even, masked(1, 6), 60, "cap"))[:, 0].T
    assert max(len(set(tokens) - {MASK}) for tokens in drawn.tolist()) > 2
    one, other = (
        make(even, masked(40, 2), torch.tensor(grid).double(), "most_confident").ids_BL
        for grid in ([1.0, 0.0], [1.0, 0.5, 0.0])
    )
    assert (one != other).any(0).tolist() == [False, True]


# time grids, and how blocks share the steps of one


def test_grids_are_their_formulas():
    assert uniform_grid(4).tolist() == [1.0, 0.75, 0.5, 0.25, 0.0]
    expected = [math.cos(math.pi / 2 * k / 6) for k in range(7)]
    assert cosine_grid(6).tolist() == pytest.approx(expected, abs=1e-15)
    for steps, grid_of in itertools.product((1, 2, 1000), GRIDS.values()):
        grid = grid_of(steps)
        assert (grid.dtype, len(grid), *grid[[0, -1]]) == (torch.float64, steps + 1, 1.0, 0.0)
        assert (grid.diff() < 0).all()


@pytest.mark.parametrize("schedule", [Linear(), Cosine(), Polynomial(3.0), MiddleFlat()])
@pytest.mark.parametrize(("tokens", "per_step"), [(1, 1), (7, 2), (7, 7), (3, 50), (64, 5)])
def test_by_count_the_same_number_is_visible_more_after_each_step(schedule, tokens, per_step):
    grid = count_grid(tokens, per_step, schedule)
    assert (len(grid), *grid[[0, -1]]) == (-(-tokens // per_step) + 1, 1.0, 0.0)
    assert (grid.diff() < 0).all()
    visible = [min(tokens, per_step * k) for k in range(len(grid))]
    assert (tokens * schedule.alpha(grid)).tolist() == pytest.approx(visible, abs=1e-6)


def masks_left(given, grid, rule="random", schedule=None, **options):
    """How many tokens are masked, at the start and after each step, of a row for each text of
    ``given``, which has a dot where a token is given.
    """
    canvas = torch.tensor([[1 if sign == "." else MASK for sign in row] for row in given])
    seen, steps = [], []

    def on_step(step):
        seen.append((step.ids_BL == MASK).sum(1).tolist())
        steps.append((step.number, step.num_steps, step.t))

    network = SamplingDenoiser(even, MASK)
    generate(network, canvas, grid, RULES[rule], schedule=schedule, on_step=on_step, **options)
    assert [one[:2] for one in steps] == [(n, len(steps) - 1) for n in range(len(steps))]
    assert (steps[0][2], steps[-1][2]) == (1.0, 0.0)
    return seen if len(given) > 1 else [left for (left,) in seen]


@pytest.mark.parametrize("name", GRIDS)
def test_as_many_are_masked_after_each_step_as_the_grid_says(name):
    grid = GRIDS[name](5)
    assert masks_left([" " * 23], grid) == [round(23 * t) for t in grid.tolist()]
    rates = [math.sin(math.pi / 2 * t) for t in grid.tolist()]
    assert masks_left([" " * 23], grid, schedule=Cosine()) == [round(23 * r) for r in rates]


def test_blocks_have_steps_in_proportion_to_their_tokens():
    """12 tokens in blocks of 4, 4, 4 and 6 steps: 2 each. In blocks of 8 and 4: 4 and 2."""
    for block_length in (4, 8):
        left = masks_left([" " * 12], uniform_grid(6), block_length=block_length)
        assert left == [12, 10, 8, 6, 4, 2, 0]
    # by tokens to fill, not by length: M...MMMM has 1 and 4, so 2 and 6 of 8 steps
    left = masks_left([" ...    "], uniform_grid(8), block_length=4)
    assert left[2:] == [4, 3, 3, 2, 1, 1, 0]
    # each block has a step even if the grid has fewer
    assert masks_left([" " * 9], uniform_grid(2), block_length=3) == [9, 6, 3, 0]
    # and a grid of the whole one's shape: cos(pi/2 k/8) every second time is cos(pi/2 k/4)
    left = masks_left([" " * 40], cosine_grid(8), block_length=20)
    one = [round(20 * math.cos(math.pi / 2 * k / 4)) for k in range(5)]
    assert left == [20 + n for n in one] + one[1:]
    left = masks_left([" " * 6], 2, block_length=3)
    assert max(a - b for a, b in itertools.pairwise(left)) == 2


@pytest.mark.parametrize("rule", ["random", "first_hitting", "margin"])
def test_without_a_grid_any_rule_goes_token_by_token(rule):
    """In blocks of any length, with any schedule; rows with other gaps need no more steps."""
    for length, schedule in itertools.product((1, 4, 100), (Linear(), Cosine(), MiddleFlat())):
        left = masks_left([" " * 11], None, rule, schedule, block_length=length)
        assert left == list(range(11, -1, -1))
    rows = [" ..   ", "..  . ", " ....."]
    found = masks_left(rows, None, rule)
    assert (found[0], found[-1]) == ([4, 3, 1], [0, 0, 0])
    assert [one[0] for one in found] == [4, 3, 2, 1, 0]
    assert len(masks_left(rows, None, rule, block_length=2)) == 1 + 2 + 1 + 2


@pytest.mark.parametrize(
    ("canvas", "grid", "names"),
    [
        (torch.tensor([[0, MASK + 1]]), 3, "id 7"),
        (torch.tensor([[MASK, -1]]), 3, "id -1"),
        (masked(0, 5), 3, r"shape \[0, 5\]"),
        (masked(5, 1)[:, 0], 3, r"shape \[5\]"),
        (masked(2, 6), torch.linspace(1, 0.3, 5), "grid"),
        (masked(2, 6), torch.linspace(0, 1, 5), "grid"),
        (masked(2, 6), torch.tensor([1.0, 0.5, 0.5, 0.0]), "grid"),
        (masked(2, 6), uniform_grid(0), "grid"),
    ],
)
def test_what_would_leave_masks_is_refused(canvas, grid, names):
    with pytest.raises(UserError, match=names):
        generate(SamplingDenoiser(None, MASK), canvas, grid)
    with pytest.raises(UserError, match="grid"):
        generate(SamplingDenoiser(None, MASK), masked(2, 6), 3, RULES["first_hitting"])
