"""Calls of the network: how many, on what, at which time, with guidance and with padding."""

import pytest
import torch
from sampling_tools import MASK, Spy, each, make, make_told, masked

from bellmask.diffusion.schedules import Cosine, Linear
from bellmask.generate.sampler import uniform_grid
from bellmask.utils.errors import UserError

# the network is called for what is revealed, and for nothing else


@pytest.mark.parametrize("rule", ["ancestral", "first_hitting", "random"])
def test_blind_rules_ask_for_each_gap_once_and_for_nothing_else(rule):
    canvas, spy = masked(20, 9), Spy()
    canvas[:, :2], canvas[7] = 3, 1
    made = make(spy, canvas, 5, rule)
    for x_BL, rows_N, _, _ in spy.calls:
        assert (x_BL.flatten()[rows_N] == MASK).all()
        assert rows_N.div(9, rounding_mode="floor").unique().equal(torch.arange(len(x_BL)))
    assert sum(len(rows_N) for _, rows_N, _, _ in spy.calls) == 19 * 7
    if rule == "first_hitting":
        assert (made.num_calls, made.num_rows) == (7, 19 * 7)
    else:
        assert made.num_calls <= 5
        assert made.num_rows <= 19 * 5


@pytest.mark.parametrize("rule", ["most_confident", "margin", "entropy"])
def test_scored_rules_ask_for_all_gaps_of_rows_that_reveal_something(rule):
    """8 and 2 masked: after half of the time 4 and 1 are, after 3/4 round(2) and round(0.5)."""
    canvas, spy = masked(2, 8), Spy()
    canvas[1, 2:] = 0
    made = make(spy, canvas, 4, rule)
    assert [x_BL.eq(MASK).sum(1).tolist() for x_BL, *_ in spy.calls] == [[8], [6, 2], [4, 1], [2]]
    for x_BL, rows_N, _, _ in spy.calls:
        assert rows_N.tolist() == x_BL.flatten().eq(MASK).nonzero().flatten().tolist()
    assert (made.num_calls, made.num_rows, made.nfe) == (4, 6, 3.0)


@each
@pytest.mark.parametrize(("w", "block_length"), [(0.0, None), (1.5, 4)])
def test_the_costs_that_are_told_are_those_that_the_network_saw(rule, w, block_length):
    spy, told, canvas = Spy(), [], masked(6, 11)
    canvas[:, 3], canvas[5] = 2, 1
    options = {"on_step": lambda step: told.append((step.num_calls, len(spy.calls)))}
    made = make(spy, canvas, 7, rule, w=w, block_length=block_length, **options)
    assert all(said == seen for said, seen in told)
    assert made.num_calls == len(spy.calls) > 0
    assert made.num_rows == sum(len(x_BL) for x_BL, *_ in spy.calls)
    assert made.nfe == made.num_rows / 6
    for x_BL, rows_N, t_B, _ in spy.calls:
        assert len(x_BL) == len(t_B) == len(rows_N.div(11, rounding_mode="floor").unique())
    # a full canvas costs nothing
    full, spy = torch.arange(5)[None].repeat(3, 1), Spy()
    made = make(spy, full, 50, rule, block_length=block_length)
    assert made.ids_BL.equal(full)
    assert (made.num_calls, made.num_rows, len(spy.calls)) == (0, 0, 0)


# at which time


def told_times(rule, grid=None, **options):
    """For each call: (the number of its step, its rows, the times it was told)."""
    spy, told, canvas = Spy(), [], masked(6, 8)
    canvas[:, 2] = 1

    def on_step(step):
        told.extend((step.number, x, rows, t) for x, rows, t, _ in spy.calls[len(told) :])

    make(spy, canvas, grid, rule, on_step=on_step, **options)
    assert len(told) == len(spy.calls)
    return told


GRID = torch.tensor([1.0, 0.9, 0.5, 0.45, 0.2, 0.0], dtype=torch.float64)


@pytest.mark.parametrize("rule", ["ancestral", "cap", "rescale"])
def test_the_model_is_told_the_time_at_which_its_step_begins(rule):
    told = told_times(rule, GRID)
    assert [number for number, *_ in told] == [1, 2, 3, 4, 5]
    for number, x_BL, _, t_B in told:
        torch.testing.assert_close(t_B, torch.full((len(x_BL),), float(GRID[number - 1])))


@pytest.mark.parametrize("schedule", [Linear(), Cosine()], ids=["linear", "cosine"])
def test_first_hitting_tells_when_each_token_appears(schedule):
    """Ancestral sampling with the same seed reveals it between the two grid times around it."""
    told = told_times("first_hitting", schedule=schedule)
    times = torch.stack([t_B for *_, t_B in told])
    assert times.shape == (7, 6)
    assert (times.diff(dim=0) < 0).all()
    found = told_times("ancestral", uniform_grid(1000), schedule=schedule)
    steps = sorted(number for number, _, rows_N, _ in found for _ in rows_N)
    for t, number in zip(sorted(times.flatten().tolist(), reverse=True), steps, strict=True):
        assert 1 - number / 1000 - 1e-6 <= t <= 1 - (number - 1) / 1000 + 1e-6


@pytest.mark.parametrize(
    ("rule", "block_length"),
    [(r, b) for r in ("random", "most_confident", "margin", "entropy") for b in (None, 3)]
    # in blocks the grid's time is that of the block, not of the row
    + [(r, b) for r in ("ancestral", "cap", "rescale", "first_hitting") for b in (1, 3)],
)
def test_other_rules_and_blocks_tell_the_time_at_which_so_many_are_masked(rule, block_length):
    for schedule in (Linear(), Cosine()):
        for _, x_BL, _, t_B in told_times(rule, GRID, schedule=schedule, block_length=block_length):
            share = x_BL.eq(MASK).double().mean(1)  # 1 - alpha: t, or sin(pi t / 2)
            back = t_B.double() if schedule == Linear() else torch.sin(t_B.double() * torch.pi / 2)
            torch.testing.assert_close(back, share, rtol=0, atol=1e-6)


def test_pads_count_neither_as_masked_nor_as_visible():
    spy = Spy()
    canvas = torch.tensor([[MASK, MASK, 1, 0, 0, 0], [MASK, 1, 1, 1, 1, 0]])
    real = torch.tensor([[True] * 3 + [False] * 3, [True] * 5 + [False]])
    make(spy, canvas, 1, "random", real=real)
    torch.testing.assert_close(spy.calls[0][2], torch.tensor([2 / 3, 1 / 5]))


# guidance


@pytest.mark.parametrize("rule", ["ancestral", "most_confident", "cap"])
@pytest.mark.parametrize(("w", "first_maskable"), [(0.5, 0), (2.0, 1)])
def test_guided_logits_are_extrapolated_from_those_that_do_not_see_the_prompt(
    rule, w, first_maskable
):
    """Told apart by hand: the same rows, then those rows with given tokens masked, but for the
    one that a causal LM predicts the first from.
    """
    canvas, spy = masked(4, 6), Spy()
    canvas[:, :2], canvas[1, 4] = 2, 3
    spy.first_maskable = first_maskable
    given_BL = canvas != MASK
    given_BL[:, :first_maskable] = False
    _, network = make_told(spy, canvas, 4, rule, w=w)
    asked = network.asked
    assert len(asked) == len(spy.calls) == network.num_calls
    for (x_BL, is_wanted_BL, found), (called, _, t_B, _) in zip(asked, list(spy.calls)):
        rows_N, active = is_wanted_BL.flatten().nonzero().squeeze(1), is_wanted_BL.any(1)
        blind = x_BL.clone()
        blind[given_BL] = MASK
        assert called.equal(torch.cat([x_BL[active], blind[active]]))
        assert t_B[: len(t_B) // 2].equal(t_B[len(t_B) // 2 :])
        seeing, unseeing = (Spy()(x, rows_N, t_B=t_B, mask=None) for x in (x_BL, blind))
        torch.testing.assert_close(found, unseeing + (1 + w) * (seeing - unseeing))


def test_guidance_doubles_the_rows_and_none_of_it_costs_nothing():
    canvas = masked(5, 7)
    canvas[:, 0] = 1
    plain, guided, much = (make(Spy(), canvas, 4, w=w) for w in (0.0, 1e-9, 3.0))
    assert plain.ids_BL.equal(guided.ids_BL)
    assert not much.ids_BL.equal(plain.ids_BL)
    assert (guided.num_calls, guided.num_rows) == (plain.num_calls, 2 * plain.num_rows)
    with pytest.raises(UserError, match="guidance"):
        make(Spy(), masked(5, 7), 4, w=3.0)


# padding


@each
@pytest.mark.parametrize("w", [0.0, 1.0])
def test_pads_are_kept_and_hidden_from_the_network(rule, w):
    lengths, spy = torch.tensor([3, 8, 5, 8]), Spy()
    is_real = torch.arange(8) < lengths[:, None]
    canvas = torch.where(is_real, MASK, 0)
    canvas[torch.arange(4), lengths - 1] = torch.arange(1, 5)  # to tell rows apart
    made = make(spy, canvas, 10, rule, real=is_real, w=w)
    assert made.ids_BL[~is_real].eq(0).all()
    assert (made.ids_BL != MASK).all()
    assert any(len(x_BL) < (8 if w else 4) for x_BL, *_ in spy.calls)
    for x_BL, rows_N, _, mask in spy.calls:
        visible = mask.expand(len(x_BL), 1, 8, 8)[:, 0, 0]
        assert visible.flatten()[rows_N].all()
        for row, seen in zip(x_BL[: len(x_BL) // (2 if w else 1)].tolist(), visible.tolist()):
            which = [b for b in range(4) if row[int(lengths[b]) - 1] == b + 1]
            assert any(seen == is_real[b].tolist() for b in which)
