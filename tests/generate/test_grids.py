"""Time grids against closed forms, and how blocks share the steps of one."""

import itertools
import math

import pytest
import torch

from bellmask.diffusion.schedule import Cosine, Linear, MiddleFlat, Polynomial
from bellmask.generate.engine import generate
from bellmask.generate.grids import GRIDS, cosine_grid, count_grid, uniform_grid
from bellmask.generate.network import Network
from bellmask.generate.rules import RULES

MASK = 6
SCHEDULES = [Linear(), Cosine(), Polynomial(3.0), MiddleFlat()]


def test_the_uniform_grid_is_equal_steps_from_one_to_zero():
    assert uniform_grid(4).tolist() == [1.0, 0.75, 0.5, 0.25, 0.0]
    assert uniform_grid(1).tolist() == [1.0, 0.0]


def test_the_cosine_grid_takes_few_tokens_first():
    found = cosine_grid(6).tolist()
    expected = [math.cos(math.pi / 2 * k / 6) for k in range(7)]
    assert found == pytest.approx(expected, abs=1e-15)
    steps = [a - b for a, b in itertools.pairwise(found)]
    assert steps == sorted(steps)


@pytest.mark.parametrize("name", GRIDS)
@pytest.mark.parametrize("steps", [1, 2, 3, 10, 1000])
def test_grids_fall_from_exactly_one_to_exactly_zero(name, steps):
    grid = GRIDS[name](steps)
    assert grid.dtype == torch.float64
    assert (len(grid), float(grid[0]), float(grid[-1])) == (steps + 1, 1.0, 0.0)
    assert (grid.diff() < 0).all()


@pytest.mark.parametrize("name", GRIDS)
def test_a_grid_needs_a_step(name):
    with pytest.raises(ValueError, match="at least one step, got 0"):
        GRIDS[name](0)


@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda s: type(s).__name__)
@pytest.mark.parametrize(("tokens", "per_step"), [(1, 1), (7, 1), (7, 2), (7, 7), (3, 50), (64, 5)])
def test_by_count_the_same_number_is_visible_more_after_each_step(schedule, tokens, per_step):
    grid = count_grid(tokens, per_step, schedule)
    assert len(grid) == -(-tokens // per_step) + 1
    assert (float(grid[0]), float(grid[-1])) == (1.0, 0.0)
    assert (grid.diff() < 0).all()
    visible = [min(tokens, per_step * k) for k in range(len(grid))]
    assert (tokens * schedule.alpha(grid)).tolist() == pytest.approx(visible, abs=1e-6)


def test_by_count_one_by_one_and_linear_unless_said_otherwise():
    assert count_grid(5).tolist() == pytest.approx([1.0, 0.8, 0.6, 0.4, 0.2, 0.0])
    for tokens, per_step in ((0, 1), (5, 0), (-1, 1)):
        with pytest.raises(ValueError, match=f"cannot reveal {per_step} of {tokens} tokens"):
            count_grid(tokens, per_step)


# shared out over blocks


def masks_left(canvas_BL, grid, rule="random", schedule=None, **options) -> list[list[int]]:
    """How many tokens of each row are masked, at the start and after each step."""
    seen, steps = [], []

    def model(x, rows, **_):
        return torch.zeros(len(rows), MASK)

    def on_step(step):
        seen.append((step.ids_BL == MASK).sum(1).tolist())
        steps.append((step.number, step.num_steps, step.t))

    network = Network(model, MASK)
    generate(network, canvas_BL, grid, RULES[rule], schedule=schedule, on_step=on_step, **options)
    assert [number for number, _, _ in steps] == list(range(len(steps)))
    assert {num_steps for _, num_steps, _ in steps} == {len(steps) - 1}
    assert (steps[0][2], steps[-1][2]) == (1.0, 0.0 if len(steps) > 1 else 1.0)
    return seen


def masked(length: int, given: str = "") -> torch.Tensor:
    """One row; ``given`` has a dot where a token is given."""
    row = torch.full((1, length), MASK)
    row[0, [i for i, sign in enumerate(given) if sign == "."]] = 1
    return row


@pytest.mark.parametrize("name", GRIDS)
def test_as_many_are_masked_after_each_step_as_the_grid_says(name):
    grid = GRIDS[name](5)
    for schedule in (Linear(), Cosine()):
        left = masks_left(masked(23), grid, schedule=schedule)
        alpha = [
            1 - t if schedule == Linear() else 1 - math.sin(math.pi / 2 * t) for t in grid.tolist()
        ]
        assert left == [[round(23 * (1 - one))] for one in alpha]


def test_blocks_have_steps_in_proportion_to_their_tokens():
    """12 tokens in blocks of 4, 4, 4 and 6 steps: 2 each. In blocks of 8 and 4: 4 and 2."""
    left = masks_left(masked(12), uniform_grid(6), block_length=4)
    assert left == [[n] for n in (12, 10, 8, 6, 4, 2, 0)]
    left = masks_left(masked(12), uniform_grid(6), block_length=8)
    assert left == [[n] for n in (12, 10, 8, 6, 4, 2, 0)]
    # by tokens to fill, not by length: M...MMMM has 1 and 4, so 2 and 6 of 8 steps
    left = masks_left(masked(8, " ... "), uniform_grid(8), block_length=4)
    assert left[2:] == [[n] for n in (4, 3, 3, 2, 1, 1, 0)]


def test_each_block_has_a_step_even_if_the_grid_has_fewer():
    assert masks_left(masked(9), uniform_grid(2), block_length=3) == [[9], [6], [3], [0]]
    assert masks_left(masked(5), uniform_grid(1), block_length=1) == [[n] for n in range(5, -1, -1)]


def test_each_block_has_a_grid_of_the_whole_ones_shape():
    """cos(pi/2 k/8) every second time: cos(pi/2 k/4)."""
    left = masks_left(masked(40), cosine_grid(8), block_length=20)
    one = [round(20 * math.cos(math.pi / 2 * k / 4)) for k in range(5)]
    assert left == [[20 + n] for n in one] + [[n] for n in one[1:]]


@pytest.mark.parametrize(
    ("schedule", "block_length"),
    [(Linear(), n) for n in (1, 3, 4, 11, 12, 100)] + [(Cosine(), 4), (MiddleFlat(), 4)],
    ids=lambda one: str(one) if isinstance(one, int) else type(one).__name__,
)
def test_without_a_grid_blocks_of_any_length_go_token_by_token(schedule, block_length):
    for rule in ("random", "first_hitting", "most_confident"):
        left = masks_left(masked(11), None, rule, schedule, block_length=block_length)
        assert left == [[n] for n in range(11, -1, -1)]


def test_by_count_no_step_of_a_block_reveals_more_than_asked():
    left = [n for (n,) in masks_left(masked(6), 2, block_length=3)]
    assert max(a - b for a, b in itertools.pairwise(left)) == 2


def test_a_block_as_long_as_the_canvas_is_the_whole_canvas():
    for block_length in (11, 50):
        assert masks_left(masked(11), cosine_grid(4), block_length=block_length) == masks_left(
            masked(11), cosine_grid(4)
        )


@pytest.mark.parametrize("rule", ["random", "first_hitting", "margin"])
def test_rows_with_other_gaps_need_no_more_steps_than_the_longest(rule):
    rows = torch.cat([masked(6, given) for given in (" .. ", "..  .", " .....")])
    found = masks_left(rows, None, rule)
    assert (found[0], found[-1]) == ([4, 3, 1], [0, 0, 0])
    assert [row[0] for row in found] == [4, 3, 2, 1, 0]
    assert len(masks_left(rows, None, rule, block_length=2)) == 1 + 2 + 1 + 2
    assert len(masks_left(rows, uniform_grid(9), "random", block_length=2)) == 1 + 9


def test_nothing_to_fill_is_no_block():
    full = torch.zeros(2, 5, dtype=torch.long)
    assert masks_left(full, uniform_grid(4), block_length=2) == [[0, 0]]
    assert masks_left(full, None) == [[0, 0]]
