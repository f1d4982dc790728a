"""Sampling against distributions that are known: chains, softmaxes, schedules."""

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from bellmask.data.toy import ExactDenoiser, ToySource
from bellmask.diffusion.schedule import Cosine, Linear
from bellmask.generate.engine import choose, generate
from bellmask.generate.grids import uniform_grid
from bellmask.model.transformer import Denoiser
from bellmask.options import ModelOptions

CHAIN = ToySource.markov(
    torch.tensor([0.7, 0.3], dtype=torch.float64),
    torch.tensor([[0.85, 0.15], [0.35, 0.65]], dtype=torch.float64),
    length=4,
)
V, MASK = 6, 6


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def masked(count: int, length: int, mask_id: int = MASK) -> torch.Tensor:
    return torch.full((count, length), mask_id)


class Spy:
    """A model that notes each call; its logits depend on the whole row and the position."""

    def __init__(self, num_tokens: int = V):
        self.num_tokens = num_tokens
        self.calls = []

    def __call__(self, x_BL, rows_N, *, t_B, mask):
        self.calls.append((x_BL.clone(), rows_N.clone(), t_B.clone(), mask))
        place = torch.arange(1, x_BL.shape[1] + 1, dtype=torch.float64)
        seed_BL = (x_BL * place).sum(1, keepdim=True) + 3 * place
        token = torch.arange(1, self.num_tokens + 1, dtype=torch.float64)
        return 2 * torch.sin(seed_BL.flatten()[rows_N, None] * token)


# the right distribution


def joint() -> np.ndarray:
    """p of all 16 rows of CHAIN, by the chain rule."""
    start, move = CHAIN.initial_S.tolist(), CHAIN.transition_SS.tolist()
    return np.array(
        [
            start[row[0]] * math.prod(move[a][b] for a, b in itertools.pairwise(row))
            for row in itertools.product((0, 1), repeat=4)
        ]
    )


def product_of_marginals() -> np.ndarray:
    table = joint().reshape(2, 2, 2, 2)
    sides = [table.sum(tuple(j for j in range(4) if j != i)) for i in range(4)]
    return np.einsum("a,b,c,d->abcd", *sides).ravel()


def row_counts(ids_BL: torch.Tensor) -> np.ndarray:
    code = ids_BL @ torch.tensor([8, 4, 2, 1])
    return torch.bincount(code, minlength=16).numpy()


@pytest.mark.parametrize("schedule", [Linear(), Cosine()], ids=["linear", "cosine"])
def test_many_steps_sample_the_joint_distribution(schedule):
    made = generate(
        ExactDenoiser(CHAIN), masked(4000, 4, 2), uniform_grid(1024), mask_id=2, schedule=schedule
    )
    counts = row_counts(made.ids_BL)
    assert stats.chisquare(counts, 4000 * joint()).pvalue > 1e-3
    assert stats.chisquare(counts, 4000 * product_of_marginals()).pvalue < 1e-9


def test_one_step_samples_the_product_of_marginals():
    made = generate(ExactDenoiser(CHAIN), masked(4000, 4, 2), uniform_grid(1), mask_id=2)
    counts = row_counts(made.ids_BL)
    assert made.num_calls == 1
    assert stats.chisquare(counts, 4000 * product_of_marginals()).pvalue > 1e-3
    assert stats.chisquare(counts, 4000 * joint()).pvalue < 1e-9


def test_infilling_samples_the_conditional_distribution():
    """Symbols 1 and 3 given as 1 and 0: the others follow p(. | x^1 = 1, x^3 = 0)."""
    canvas = torch.tensor([[2, 1, 2, 0]]).repeat(3000, 1)
    made = generate(ExactDenoiser(CHAIN), canvas, uniform_grid(512), mask_id=2, seed=1)
    expected = joint().reshape(2, 2, 2, 2)[:, 1, :, 0].ravel()
    counts = row_counts(made.ids_BL).reshape(2, 2, 2, 2)[:, 1, :, 0].ravel()
    assert counts.sum() == 3000
    assert stats.chisquare(counts, 3000 * expected / expected.sum()).pvalue > 1e-3


def test_greedy_sampling_takes_the_most_likely_row():
    """0 stays 0 with probability 0.85 and is the likelier start, whatever is revealed first."""
    made = generate(
        ExactDenoiser(CHAIN), masked(50, 4, 2), uniform_grid(64), mask_id=2, temperature=0
    )
    assert made.ids_BL.eq(0).all()


# one token


LOGITS = torch.tensor([1.5, 0.0, -1.0, 0.7, -0.3], dtype=torch.float64)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_tokens_follow_the_softmax_at_a_temperature(temperature, dtype):
    tokens = choose(LOGITS.expand(20_000, -1), torch.arange(20_000), 5, temperature, dtype)
    expected = torch.softmax(LOGITS / temperature, 0).numpy()
    counts = torch.bincount(tokens, minlength=5).numpy()
    assert stats.chisquare(counts, 20_000 * expected).pvalue > 1e-3


def test_neighbouring_places_choose_independently():
    tokens = choose(LOGITS.expand(20_000, -1), torch.arange(20_000), 6, 1.0, torch.float64)
    pairs = torch.bincount(5 * tokens[0::2] + tokens[1::2], minlength=25).view(5, 5)
    assert stats.chi2_contingency(pairs.numpy()).pvalue > 1e-3


def test_temperature_zero_is_the_largest_logit():
    logits = torch.randn(200, 9, generator=seeded(1))
    tokens = choose(logits, torch.arange(200), 7, 0.0, torch.float64)
    assert tokens.tolist() == [max(range(9), key=row.__getitem__) for row in logits.tolist()]


@pytest.mark.parametrize("temperature", [0.0, 0.01, 1.0, 100.0])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_an_impossible_token_is_never_chosen(temperature, dtype):
    logits = torch.randn(5000, 8, generator=seeded(2))
    is_possible = torch.rand(5000, 8, generator=seeded(3)) < 0.3
    is_possible[torch.arange(5000), torch.arange(5000) % 8] = True
    logits[~is_possible] = -math.inf
    tokens = choose(logits, torch.arange(5000), 8, temperature, dtype)
    assert is_possible[torch.arange(5000), tokens].all()


def test_the_choice_depends_on_the_places_counter_not_on_its_row():
    logits = torch.randn(300, 7, generator=seeded(4))
    order = torch.randperm(300, generator=seeded(5))
    straight = choose(logits, torch.arange(300), 9, 1.0, torch.float64)
    mixed = choose(logits[order], order, 9, 1.0, torch.float64)
    assert mixed.equal(straight[order])
    assert not choose(logits, torch.arange(300), 10, 1.0, torch.float64).equal(straight)


# what is given stays, everything else is filled


@given(
    rows=st.integers(1, 8).flatmap(
        lambda length: st.lists(
            st.lists(st.integers(0, MASK), min_size=length, max_size=length),
            min_size=1,
            max_size=5,
        )
    ),
    num_steps=st.integers(1, 12),
    seed=st.integers(0, 10**6),
)
@settings(deadline=None, max_examples=100, derandomize=True, database=None)
def test_given_tokens_never_change_and_all_gaps_are_filled(rows, num_steps, seed):
    canvas = torch.tensor(rows)
    is_given = canvas != MASK
    seen = []
    made = generate(
        Spy(),
        canvas,
        uniform_grid(num_steps),
        mask_id=MASK,
        seed=seed,
        on_step=lambda k, ids: seen.append(ids.clone()),
    )
    assert canvas.tolist() == rows
    for ids in (*seen, made.ids_BL):
        assert ids[is_given].equal(canvas[is_given])
    assert ((made.ids_BL >= 0) & (made.ids_BL < V)).all()


def test_once_revealed_a_token_stays():
    seen = []
    generate(
        Spy(),
        masked(30, 10),
        uniform_grid(8),
        mask_id=MASK,
        on_step=lambda k, ids: seen.append((k, ids.clone())),
    )
    assert [k for k, _ in seen] == list(range(8))
    for (_, before), (_, after) in itertools.pairwise(seen):
        assert after[before != MASK].equal(before[before != MASK])


# the network is called for what is revealed, and for nothing else


def test_each_gap_is_asked_for_once_and_nothing_else_is():
    canvas = masked(20, 9)
    canvas[:, :2] = 3
    canvas[7] = 1
    spy = Spy()
    made = generate(spy, canvas, uniform_grid(5), mask_id=MASK)
    for x_BL, rows_N, _, _ in spy.calls:
        assert (x_BL.flatten()[rows_N] == MASK).all()
        assert rows_N.div(9, rounding_mode="floor").unique().equal(torch.arange(len(x_BL)))
    assert sum(len(rows_N) for _, rows_N, _, _ in spy.calls) == 19 * 7
    assert made.num_calls == len(spy.calls) <= 5
    assert made.num_rows == sum(len(x_BL) for x_BL, _, _, _ in spy.calls) <= 19 * 5


@pytest.mark.parametrize("num_steps", [1, 3, 7, 4096])
@pytest.mark.parametrize("seed", [0, 1])
def test_one_sample_costs_at_most_a_call_per_step_and_per_gap(num_steps, seed):
    canvas = masked(1, 12)
    canvas[0, 3:8] = 2
    spy = Spy()
    made = generate(spy, canvas, uniform_grid(num_steps), mask_id=MASK, seed=seed)
    assert 1 <= made.num_calls == made.num_rows == len(spy.calls) <= min(num_steps, 7)


def test_a_full_canvas_costs_nothing():
    spy = Spy()
    canvas = torch.arange(5)[None].repeat(3, 1)
    made = generate(spy, canvas, uniform_grid(50), mask_id=MASK)
    assert made.ids_BL.equal(canvas)
    assert (made.num_calls, made.num_rows, len(spy.calls)) == (0, 0, 0)


# when


@pytest.mark.parametrize(
    ("schedule", "alpha"),
    [
        (None, lambda t: 1 - t),
        (Cosine(), lambda t: 1 - math.sin(math.pi * t / 2)),
    ],
    ids=["default", "cosine"],
)
def test_by_time_t_a_share_alpha_is_revealed(schedule, alpha):
    shown = []
    generate(
        Spy(),
        masked(400, 25),
        uniform_grid(8),
        mask_id=MASK,
        schedule=schedule,
        on_step=lambda k, ids: shown.append(int((ids != MASK).sum())),
    )
    for k, number in enumerate(shown[:-1]):
        assert stats.binomtest(number, 10_000, alpha(1 - (k + 1) / 8)).pvalue > 1e-3
    assert shown[-1] == 10_000


def test_places_are_revealed_in_every_order_equally_often():
    """All 3! orders in which three places can appear."""
    rank = torch.zeros(3000, 3, dtype=torch.long)
    generate(
        Spy(),
        masked(3000, 3),
        uniform_grid(512),
        mask_id=MASK,
        on_step=lambda k, ids: rank.add_(ids == MASK),
    )
    rank = rank[(rank.sort(dim=1).values.diff(dim=1) > 0).all(1)].argsort(dim=1)
    counts = torch.unique(rank, dim=0, return_counts=True)[1]
    assert len(counts) == 6
    assert stats.chisquare(counts.numpy()).pvalue > 1e-3


def test_the_model_is_told_the_time_at_which_its_step_begins():
    spy, told = Spy(), []
    grid = torch.tensor([1.0, 0.9, 0.5, 0.45, 0.2, 0.0], dtype=torch.float64)

    def on_step(k, ids):
        told.extend((k, t_B) for _, _, t_B, _ in spy.calls[len(told) :])

    generate(spy, masked(6, 8), grid, mask_id=MASK, on_step=on_step)
    assert [k for k, _ in told] == list(range(5))
    for (k, t_B), (x_BL, _, _, _) in zip(told, spy.calls, strict=True):
        torch.testing.assert_close(t_B, torch.full((len(x_BL),), float(grid[k])))


def test_the_grid_is_equal_steps_from_one_to_zero():
    assert uniform_grid(4).tolist() == [1.0, 0.75, 0.5, 0.25, 0.0]
    assert uniform_grid(1).tolist() == [1.0, 0.0]
    assert uniform_grid(1000).dtype == torch.float64
    with pytest.raises(ValueError, match="at least one step, got 0"):
        uniform_grid(0)


# each sample has its own noise


def rows_made(first: int, count: int, seed: int = 0, **options) -> torch.Tensor:
    canvas = masked(count, 10)
    canvas[:, 4] = 1
    return generate(
        Spy(), canvas, uniform_grid(6), mask_id=MASK, seed=seed, first_sample=first, **options
    ).ids_BL


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
def test_a_sample_does_not_depend_on_the_batch_it_is_in(temperature):
    whole = rows_made(0, 12, temperature=temperature)
    assert whole.equal(torch.cat([rows_made(i, 1, temperature=temperature) for i in range(12)]))
    assert whole[5:9].equal(rows_made(5, 4, temperature=temperature))


def test_a_sample_does_not_depend_on_the_canvases_beside_it():
    canvas = masked(3, 10)
    canvas[0, :9] = 2
    canvas[2] = 5
    made = generate(Spy(), canvas, uniform_grid(6), mask_id=MASK).ids_BL
    alone = generate(Spy(), canvas[1:2], uniform_grid(6), mask_id=MASK, first_sample=1).ids_BL
    assert made[1:2].equal(alone)


def test_samples_and_seeds_differ():
    many = torch.cat([rows_made(0, 20, seed=seed) for seed in (0, 1, 2)])
    assert len(many.unique(dim=0)) == 60
    assert rows_made(0, 20, seed=1).equal(many[20:40])


def test_a_seed_changes_both_the_order_and_the_tokens():
    """Order shows in who is asked for when; tokens in a single step, which has no order."""
    asked = []
    for seed in (0, 1):
        spy = Spy()
        generate(spy, masked(1, 12), uniform_grid(400), mask_id=MASK, seed=seed, temperature=0)
        asked.append([rows_N.tolist() for _, rows_N, _, _ in spy.calls])
    assert asked[0] != asked[1]
    first, second = (
        generate(Spy(), masked(1, 30), uniform_grid(1), mask_id=MASK, seed=seed).ids_BL
        for seed in (0, 1)
    )
    assert (first != second).any()


# padding


def test_pads_are_kept_and_hidden_from_the_network():
    lengths = torch.tensor([3, 8, 5, 8])
    is_real = torch.arange(8) < lengths[:, None]
    canvas = torch.where(is_real, MASK, 0)
    spy = Spy()
    made = generate(spy, canvas, uniform_grid(10), mask_id=MASK, is_real_BL=is_real)
    assert made.ids_BL[~is_real].eq(0).all()
    assert (made.ids_BL != MASK).all()
    assert any(len(x_BL) < 4 for x_BL, _, _, _ in spy.calls)
    patterns = set(map(tuple, is_real.tolist()))
    for x_BL, rows_N, _, mask in spy.calls:
        visible = mask.expand(len(x_BL), 1, 8, 8)[:, 0, 0]
        assert {tuple(row) for row in visible.tolist()} <= patterns
        assert visible.flatten()[rows_N].all()
        assert (x_BL[~visible] == 0).all()


def test_padding_does_not_change_what_the_real_model_generates():
    """Sample 0, whose noise is the same for all lengths; attention alone moves its logits."""
    options = ModelOptions(num_layers=2, width=32, num_heads=2, dropout=0.0)
    model, noise = Denoiser(options, 40).eval(), seeded(3)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(0, 0.0 if "mlp_out" in name else 0.5, generator=noise)
    canvas = masked(1, 40, mask_id=40)
    canvas[:, 24:] = 4
    is_real = (torch.arange(40) < 24)[None]
    bare, hidden, seen = (
        generate(model, rows, uniform_grid(50), mask_id=40, is_real_BL=which).ids_BL[:, :24]
        for rows, which in ((canvas[:, :24], None), (canvas, is_real), (canvas, None))
    )
    assert hidden.equal(bare)
    assert (seen != bare).sum() > 4
