"""The sampling loop: what stays, when tokens appear, whose noise it is, grids, what is refused."""

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sampling_tools import MASK, Spy, V, each, make, masked
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


def even(x_BL, rows_N, **_):
    return torch.zeros(len(rows_N), V)


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
    canvas, seen = torch.tensor(rows), []
    is_given = canvas != MASK
    options = {"seed": seed, "block_length": block_length, "w": 0.5 * (seed % 2)}
    if not is_given.any():
        options["w"] = 0.0  # nothing to guide by
    options["on_step"] = lambda step: seen.append(step.ids_BL.clone())
    made = make(Spy(), canvas, num_steps, rule, **options)
    assert canvas.tolist() == rows
    assert seen[0].tolist() == rows
    for ids in (*seen, made.ids_BL):
        assert ids[is_given].equal(canvas[is_given])
    assert ((made.ids_BL >= 0) & (made.ids_BL < V)).all()


@pytest.mark.parametrize("rule", RULES)
def test_once_revealed_a_token_stays(rule):
    seen = []
    options = {"on_step": lambda step: seen.append((step, step.ids_BL.clone())), "first_sample": 3}
    make(Spy(), masked(30, 8), 8, rule, **options)
    assert [step.number for step, _ in seen] == list(range(9))
    assert {(step.num_steps, step.first_sample) for step, _ in seen} == {(8, 3)}
    for (_, before), (_, after) in itertools.pairwise(seen):
        assert after[before != MASK].equal(before[before != MASK])


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

    make(Spy(), masked(400, 25), 8, rule, schedule=schedule, seed=3, on_step=on_step)
    assert [t for t, _ in shown] == [1 - k / 8 for k in range(9)]
    for t, number in shown[1:-1]:
        assert stats.binomtest(number, 10_000, alpha(t)).pvalue > 1e-3
    assert (shown[0][1], shown[-1][1]) == (0, 10_000)


@pytest.mark.parametrize("rule", ["ancestral", "first_hitting", "random"])
def test_places_are_revealed_in_every_order_equally_often(rule):
    """All 3! orders in which three places can appear."""
    rank = torch.zeros(1500, 3, dtype=torch.long)
    steps = count_grid(3) if rule == "random" else 200
    on_step = {"on_step": lambda step: rank.add_(step.ids_BL == MASK)}
    make(Spy(), masked(1500, 3), steps, rule, **on_step)
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


SETTINGS = {
    "plain": {},
    "greedy": {"choice": TokenChoice(0.0)},
    "single": {"choice": TokenChoice(dtype=torch.float32)},
    "all": {"choice": TokenChoice(1.2, top_k=5, top_p=0.95), "w": 0.4, "block_length": 3},
}


@each
@pytest.mark.parametrize("name", SETTINGS)
def test_a_sample_does_not_depend_on_the_batch_it_is_in(rule, name):
    options = SETTINGS[name]
    whole = rows_made(0, 7, rule, **options)
    parts = [rows_made(i, n, rule, **options) for i, n in ((0, 1), (1, 1), (2, 4), (6, 1))]
    assert whole.equal(torch.cat(parts))


@pytest.mark.parametrize("rule", ["ancestral", "first_hitting", "cap", "rescale"])
def test_a_sample_does_not_depend_on_the_canvases_beside_it(rule):
    canvas = masked(3, 10)
    canvas[0, :9], canvas[2] = 2, 5
    made = make(Spy(), canvas, 6, rule).ids_BL
    assert made[1:2].equal(make(Spy(), canvas[1:2], 6, rule, first_sample=1).ids_BL)


@each
def test_samples_and_seeds_differ(rule):
    many = torch.cat([rows_made(0, 20, rule, seed=seed) for seed in (0, 1, 2)])
    assert len(many.unique(dim=0)) == 60


@pytest.mark.parametrize("rule", ["ancestral", "first_hitting", "random", "cap"])
def test_a_seed_changes_both_the_order_and_the_tokens(rule):
    """Order shows in who is asked for when; tokens in a single step, which has no order."""
    asked = []
    for seed in (0, 1):
        spy = Spy()
        make(spy, masked(1, 12), 60, rule, seed=seed, choice=TokenChoice(0.0))
        asked.append([rows_N.tolist() for _, rows_N, _, _ in spy.calls])
    assert asked[0] != asked[1]
    first, second = (make(Spy(), masked(1, 30), 1, rule, seed=seed).ids_BL for seed in (0, 1))
    assert (first != second).any()


def test_a_token_that_is_predicted_again_has_new_noise():
    """Even logits: with one noise for all steps a place would always get the same token."""
    drawn = [set() for _ in range(6)]

    def on_step(step):
        for tokens, token in zip(drawn, step.ids_BL[0].tolist()):
            tokens.add(token)

    make(even, masked(1, 6), 60, "cap", on_step=on_step)
    assert max(len(tokens - {MASK}) for tokens in drawn) > 2
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
    assert count_grid(5).tolist() == pytest.approx([1.0, 0.8, 0.6, 0.4, 0.2, 0.0])
    for steps, (name, grid_of) in itertools.product((1, 2, 3, 1000), GRIDS.items()):
        grid = grid_of(steps)
        assert grid.dtype == torch.float64, name
        assert (len(grid), float(grid[0]), float(grid[-1])) == (steps + 1, 1.0, 0.0)
        assert (grid.diff() < 0).all()


@pytest.mark.parametrize(
    "schedule", [Linear(), Cosine(), Polynomial(3.0), MiddleFlat()], ids=lambda s: type(s).__name__
)
@pytest.mark.parametrize(("tokens", "per_step"), [(1, 1), (7, 2), (7, 7), (3, 50), (64, 5)])
def test_by_count_the_same_number_is_visible_more_after_each_step(schedule, tokens, per_step):
    grid = count_grid(tokens, per_step, schedule)
    assert len(grid) == -(-tokens // per_step) + 1
    assert (float(grid[0]), float(grid[-1])) == (1.0, 0.0)
    assert (grid.diff() < 0).all()
    visible = [min(tokens, per_step * k) for k in range(len(grid))]
    assert (tokens * schedule.alpha(grid)).tolist() == pytest.approx(visible, abs=1e-6)


def masks_left(canvas_BL, grid, rule="random", schedule=None, **options):
    """How many tokens of each row are masked, at the start and after each step."""
    seen, steps = [], []

    def on_step(step):
        seen.append((step.ids_BL == MASK).sum(1).tolist())
        steps.append((step.number, step.num_steps, step.t))

    network = SamplingDenoiser(even, MASK)
    generate(network, canvas_BL, grid, RULES[rule], schedule=schedule, on_step=on_step, **options)
    assert [number for number, _, _ in steps] == list(range(len(steps)))
    assert {num_steps for _, num_steps, _ in steps} == {len(steps) - 1}
    assert (steps[0][2], steps[-1][2]) == (1.0, 0.0 if len(steps) > 1 else 1.0)
    return seen


def row(length, given=""):
    """One row; ``given`` has a dot where a token is given."""
    canvas = masked(1, length)
    canvas[0, [i for i, sign in enumerate(given) if sign == "."]] = 1
    return canvas


@pytest.mark.parametrize("name", GRIDS)
def test_as_many_are_masked_after_each_step_as_the_grid_says(name):
    grid = GRIDS[name](5)
    assert masks_left(row(23), grid) == [[round(23 * t)] for t in grid.tolist()]
    rates = [math.sin(math.pi / 2 * t) for t in grid.tolist()]
    assert masks_left(row(23), grid, schedule=Cosine()) == [[round(23 * r)] for r in rates]


def test_blocks_have_steps_in_proportion_to_their_tokens():
    """12 tokens in blocks of 4, 4, 4 and 6 steps: 2 each. In blocks of 8 and 4: 4 and 2."""
    for block_length in (4, 8):
        left = masks_left(row(12), uniform_grid(6), block_length=block_length)
        assert left == [[n] for n in (12, 10, 8, 6, 4, 2, 0)]
    # by tokens to fill, not by length: M...MMMM has 1 and 4, so 2 and 6 of 8 steps
    left = masks_left(row(8, " ... "), uniform_grid(8), block_length=4)
    assert left[2:] == [[n] for n in (4, 3, 3, 2, 1, 1, 0)]
    # each block has a step even if the grid has fewer
    assert masks_left(row(9), uniform_grid(2), block_length=3) == [[9], [6], [3], [0]]
    # and a grid of the whole one's shape: cos(pi/2 k/8) every second time is cos(pi/2 k/4)
    left = masks_left(row(40), cosine_grid(8), block_length=20)
    one = [round(20 * math.cos(math.pi / 2 * k / 4)) for k in range(5)]
    assert left == [[20 + n] for n in one] + [[n] for n in one[1:]]
    left = [n for (n,) in masks_left(row(6), 2, block_length=3)]
    assert max(a - b for a, b in itertools.pairwise(left)) == 2


@pytest.mark.parametrize(
    ("schedule", "block_length"),
    [(Linear(), n) for n in (1, 3, 11, 100)] + [(Cosine(), 4), (MiddleFlat(), 4)],
    ids=lambda one: str(one) if isinstance(one, int) else type(one).__name__,
)
def test_without_a_grid_blocks_of_any_length_go_token_by_token(schedule, block_length):
    for rule in ("random", "first_hitting", "most_confident"):
        left = masks_left(row(11), None, rule, schedule, block_length=block_length)
        assert left == [[n] for n in range(11, -1, -1)]


@pytest.mark.parametrize("rule", ["random", "first_hitting", "margin"])
def test_rows_with_other_gaps_need_no_more_steps_than_the_longest(rule):
    rows = torch.cat([row(6, given) for given in (" .. ", "..  .", " .....")])
    found = masks_left(rows, None, rule)
    assert (found[0], found[-1]) == ([4, 3, 1], [0, 0, 0])
    assert [one[0] for one in found] == [4, 3, 2, 1, 0]
    assert len(masks_left(rows, None, rule, block_length=2)) == 1 + 2 + 1 + 2
    assert len(masks_left(rows, uniform_grid(9), "random", block_length=2)) == 1 + 9


# what cannot be filled


@pytest.mark.parametrize(
    ("canvas", "grid", "options", "names"),
    [
        (torch.tensor([[0, MASK + 1]]), 3, {}, "id 7"),
        (torch.tensor([[MASK, -1]]), 3, {}, "id -1"),
        (masked(0, 5), 3, {}, r"shape \[0, 5\]"),
        (masked(5, 1)[:, 0], 3, {}, r"shape \[5\]"),
        (masked(2, 6), torch.linspace(1, 0.3, 5), {}, "grid"),
        (masked(2, 6), torch.linspace(0, 1, 5), {}, "grid"),
        (masked(2, 6), torch.tensor([1.0, 0.5, 0.5, 0.0]), {}, "grid"),
        (masked(2, 6), torch.tensor([1.0]), {}, "grid"),
        (masked(2, 6), 0, {}, "got 0"),
        (masked(2, 6), 4, {"block_length": 0}, "got 0"),
        (masked(2, 6), 3, {"rule": RULES["first_hitting"]}, "grid"),
    ],
)
def test_what_would_leave_masks_is_refused(canvas, grid, options, names):
    spy = Spy()
    with pytest.raises(UserError, match=names):
        generate(SamplingDenoiser(spy, MASK), canvas, grid, **options)
    assert spy.calls == []


def test_masked_pads_and_grids_without_steps_are_refused():
    real = torch.tensor([[True, True, False]])
    with pytest.raises(UserError, match="padded"):
        make(Spy(), masked(1, 3), 3, real=real)
    make(Spy(), torch.tensor([[MASK, MASK, 0]]), 3, real=real)
    for make_grid, size in ((uniform_grid, [0]), (cosine_grid, [0]), (count_grid, [5, 0])):
        with pytest.raises(ValueError, match="0"):
            make_grid(*size)
