"""The sampling loop: what is kept, when tokens appear, whose noise it is, what is refused."""

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sampling_tools import MASK, Spy, V, each, make, masked
from scipy import stats

from bellmask.diffusion.schedule import Cosine
from bellmask.errors import UserError
from bellmask.generate.choice import Choice
from bellmask.generate.engine import generate
from bellmask.generate.grids import count_grid, uniform_grid
from bellmask.generate.network import Network
from bellmask.generate.rules import RULES

# what is given stays, everything else is filled


@each
@given(
    rows=st.integers(1, 8).flatmap(
        lambda length: st.lists(
            st.lists(st.integers(0, MASK), min_size=length, max_size=length),
            min_size=1,
            max_size=5,
        )
    ),
    num_steps=st.integers(1, 12),
    block_length=st.none() | st.integers(1, 9),
    seed=st.integers(0, 10**6),
)
@settings(deadline=None, max_examples=15, derandomize=True, database=None)
def test_given_tokens_never_change_and_all_gaps_are_filled(
    rule, rows, num_steps, block_length, seed
):
    canvas, seen = torch.tensor(rows), []
    is_given = canvas != MASK
    made = make(
        Spy(),
        canvas,
        num_steps,
        rule,
        seed=seed,
        block_length=block_length,
        w=0.5 * (seed % 2),
        on_step=lambda step: seen.append(step.ids_BL.clone()),
    )
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
    [
        (None, lambda t: 1 - t),
        (Cosine(), lambda t: 1 - math.sin(math.pi * t / 2)),
    ],
    ids=["default", "cosine"],
)
@pytest.mark.parametrize("rule", ["ancestral", "cap", "rescale"])
def test_by_time_t_a_share_alpha_is_revealed(rule, schedule, alpha):
    shown = []
    make(
        Spy(),
        masked(400, 25),
        8,
        rule,
        schedule=schedule,
        seed=3,
        on_step=lambda step: shown.append((step.t, int((step.ids_BL != MASK).sum()))),
    )
    assert [t for t, _ in shown] == [1 - k / 8 for k in range(9)]
    for t, number in shown[1:-1]:
        assert stats.binomtest(number, 10_000, alpha(t)).pvalue > 1e-3
    assert (shown[0][1], shown[-1][1]) == (0, 10_000)


@pytest.mark.parametrize("rule", ["ancestral", "first_hitting", "random"])
def test_places_are_revealed_in_every_order_equally_often(rule):
    """All 3! orders in which three places can appear."""
    rank = torch.zeros(3000, 3, dtype=torch.long)
    steps = count_grid(3) if rule == "random" else 256
    on_step = {"on_step": lambda step: rank.add_(step.ids_BL == MASK)}
    make(Spy(), masked(3000, 3), steps, rule, **on_step)
    rank = rank[(rank.sort(dim=1).values.diff(dim=1) > 0).all(1)].argsort(dim=1)
    assert len(rank) > 2900
    counts = torch.unique(rank, dim=0, return_counts=True)[1]
    assert len(counts) == 6
    assert stats.chisquare(counts.numpy()).pvalue > 1e-3


# each sample has its own noise


SETTINGS = {
    "plain": {},
    "greedy": {"choice": Choice(0.0)},
    "warm": {"choice": Choice(1.7)},
    "limited": {"choice": Choice(0.9, top_k=4, top_p=0.9)},
    "single": {"choice": Choice(dtype=torch.float32)},
    "guided": {"w": 1.3},
    "blocks": {"block_length": 4},
    "all": {"choice": Choice(1.2, top_k=5), "w": 0.4, "block_length": 3},
}


def rows_made(first: int, count: int, rule: str = "ancestral", seed: int = 0, **options):
    canvas = masked(count, 10)
    canvas[:, 4] = 1
    return make(Spy(), canvas, 6, rule, seed=seed, first_sample=first, **options).ids_BL


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
    canvas[0, :9] = 2
    canvas[2] = 5
    made = make(Spy(), canvas, 6, rule).ids_BL
    alone = make(Spy(), canvas[1:2], 6, rule, first_sample=1).ids_BL
    assert made[1:2].equal(alone)


@each
def test_samples_and_seeds_differ(rule):
    many = torch.cat([rows_made(0, 20, rule, seed=seed) for seed in (0, 1, 2)])
    assert len(many.unique(dim=0)) == 60
    assert rows_made(0, 20, rule, seed=1).equal(many[20:40])


@pytest.mark.parametrize("rule", ["ancestral", "first_hitting", "random", "cap"])
def test_a_seed_changes_both_the_order_and_the_tokens(rule):
    """Order shows in who is asked for when; tokens in a single step, which has no order."""
    asked = []
    for seed in (0, 1):
        spy = Spy()
        make(spy, masked(1, 12), 60, rule, seed=seed, choice=Choice(0.0))
        asked.append([rows_N.tolist() for _, rows_N, _, _ in spy.calls])
    assert asked[0] != asked[1]
    first, second = (make(Spy(), masked(1, 30), 1, rule, seed=seed).ids_BL for seed in (0, 1))
    assert (first != second).any()


@pytest.mark.parametrize("rule", ["cap", "most_confident"])
def test_a_token_that_is_predicted_again_has_new_noise(rule):
    """Even logits: with one noise for all steps a place would always get the same token."""
    drawn = {}

    def model(x, rows, **_):
        return torch.zeros(len(rows), V)

    def on_step(step):
        for place, token in enumerate(step.ids_BL[0].tolist()):
            drawn.setdefault(place, []).append(token)

    make(model, masked(1, 6), 60, "cap", on_step=on_step)
    assert max(len(set(tokens) - {MASK}) for tokens in drawn.values()) > 2
    if rule == "most_confident":
        one, other = (
            make(model, masked(40, 2), torch.tensor(grid).double(), rule).ids_BL
            for grid in ([1.0, 0.0], [1.0, 0.5, 0.0])
        )
        assert (one != other).any(0).tolist() == [False, True]


# canvases that cannot be filled


@pytest.mark.parametrize(
    ("canvas", "message"),
    [
        (torch.tensor([[0, MASK + 1]]), "holds id 7, the model knows 0 to 6 .the last is the mask"),
        (torch.tensor([[MASK, -1]]), "holds id -1"),
        (torch.full((0, 5), MASK), r"shape \[0, 5\]"),
        (torch.full((5, 0), MASK), r"shape \[5, 0\]"),
        (torch.full((5,), MASK), r"shape \[5\]"),
    ],
    ids=["large", "negative", "no rows", "no tokens", "flat"],
)
@pytest.mark.parametrize("rule", ["ancestral", "margin"])
def test_impossible_canvases_are_refused(canvas, message, rule):
    spy = Spy()
    with pytest.raises(UserError, match=message):
        make(spy, canvas, 3, rule)
    assert spy.calls == []


def test_masked_pads_are_refused():
    real = torch.tensor([[True, True, False]])
    with pytest.raises(UserError, match="pads cannot be generated"):
        make(Spy(), masked(1, 3), 3, real=real)
    make(Spy(), torch.tensor([[MASK, MASK, 0]]), 3, real=real)


def test_first_hitting_takes_no_grid():
    with pytest.raises(UserError, match="times of its own: it takes no grid"):
        generate(Network(Spy(), MASK), masked(1, 3), uniform_grid(3), RULES["first_hitting"])
