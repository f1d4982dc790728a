"""Rules of sampling against joints that are known and against a plain loop."""

import itertools
import math

import numpy as np
import pytest
import torch
from scipy import stats

from bellmask.data.toy import ExactDenoiser, ToySource
from bellmask.diffusion.schedule import Cosine, Linear
from bellmask.generate.choice import Choice
from bellmask.generate.engine import generate
from bellmask.generate.grids import cosine_grid, count_grid, uniform_grid
from bellmask.generate.network import Network
from bellmask.generate.rules import RULES, Remasking

CHAIN = ToySource.markov(
    torch.tensor([0.7, 0.3], dtype=torch.float64),
    torch.tensor([[0.85, 0.15], [0.35, 0.65]], dtype=torch.float64),
    length=4,
)
ROWS = list(itertools.product((0, 1), repeat=4))
schedules = pytest.mark.parametrize("schedule", [Linear(), Cosine()], ids=["linear", "cosine"])


def masked(count: int, length: int, mask_id: int = 2) -> torch.Tensor:
    return torch.full((count, length), mask_id)


def make(canvas, grid, rule, model=None, mask_id=2, **options):
    network = Network(model or ExactDenoiser(CHAIN), mask_id)
    return generate(network, canvas, grid, rule, **options)


# exact samplers have the joint distribution, others do not


def probability(row) -> float:
    """By the chain rule."""
    start, move = CHAIN.initial_S.tolist(), CHAIN.transition_SS.tolist()
    return start[row[0]] * math.prod(move[a][b] for a, b in itertools.pairwise(row))


def marginal(place: int, symbol: int) -> float:
    return sum(probability(row) for row in ROWS if row[place] == symbol)


def p_value(ids_BL: torch.Tensor, canvas_L=(2, 2, 2, 2), truth=probability) -> float:
    """Of the made rows against p(row | what the canvas gives)."""
    rows = [r for r in ROWS if all(c in (2, v) for c, v in zip(canvas_L, r, strict=True))]
    counts = dict.fromkeys(rows, 0)
    for row in ids_BL.tolist():
        counts[tuple(row)] += 1  # a KeyError is a given token that was changed
    p = np.array([truth(row) for row in rows])
    return stats.chisquare(list(counts.values()), len(ids_BL) * p / p.sum()).pvalue


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
GIVEN = {"ends": (2, 1, 2, 0), "middle": (1, 2, 2, 1)}


@pytest.mark.parametrize(
    ("name", "schedule"),
    [(name, Linear()) for name in EXACT]
    + [(name, Cosine()) for name in ("ancestral", "first hitting in blocks", "cap")],
    ids=str,
)
def test_exact_samplers_have_the_joint_distribution(name, schedule):
    rule, grid, block_length = EXACT[name]
    canvas = masked(2000, 4)
    made = make(canvas, grid, rule, schedule=schedule, block_length=block_length, seed=3)
    assert p_value(made.ids_BL) > 1e-3

    def independent(row):
        return math.prod(marginal(i, v) for i, v in enumerate(row))

    assert p_value(made.ids_BL, truth=independent) < 1e-9


@pytest.mark.parametrize(("name", "given"), [*zip(EXACT, itertools.cycle(GIVEN))])
def test_infilling_has_the_conditional_distribution(name, given):
    """Symbols 1 and 3 given as 1 and 0, or 0 and 3 as 1 and 1: the others follow p(. | those)."""
    rule, grid, block_length = EXACT[name]
    canvas = torch.tensor([GIVEN[given]]).repeat(2000, 1)
    made = make(canvas, grid, rule, block_length=block_length, seed=1)
    assert p_value(made.ids_BL, GIVEN[given]) > 1e-3


def test_two_at_a_time_is_not_the_joint_distribution():
    made = make(masked(4000, 4), count_grid(4, 2), RULES["random"], seed=3)
    assert made.num_calls == 2
    assert p_value(made.ids_BL) < 1e-6


def test_one_step_has_the_product_of_marginals():
    for rule in (RULES["ancestral"], RULES["random"], Remasking(0.3)):
        made = make(masked(4000, 4), uniform_grid(1), rule)
        assert (made.num_calls, made.num_rows) == (1, 4000)
        product = p_value(
            made.ids_BL, truth=lambda row: math.prod(marginal(i, v) for i, v in enumerate(row))
        )
        assert product > 1e-3
        assert p_value(made.ids_BL) < 1e-9


@schedules
def test_first_hitting_is_ancestral_sampling_on_a_very_fine_grid(schedule):
    """The same noise gives the very same rows; a coarse grid gives others."""
    source = ToySource.sticky(6, 5, 0.6)
    model, canvas = ExactDenoiser(source), masked(8, 5, 6)
    canvas[3, 2], canvas[4, :] = 0, 1
    exact = make(canvas, None, RULES["first_hitting"], model, 6, schedule=schedule, seed=2)
    fine, coarse = (
        make(canvas, uniform_grid(n), RULES["ancestral"], model, 6, schedule=schedule, seed=2)
        for n in (1500, 3)
    )
    assert fine.ids_BL.equal(exact.ids_BL)
    assert not coarse.ids_BL.equal(exact.ids_BL)
    assert (exact.num_calls, exact.num_rows) == (5, 6 * 5 + 4)


def test_greedy_sampling_takes_the_most_likely_row():
    """0 stays 0 with probability 0.85 and is the likelier start, whatever is revealed first."""
    for rule in (*RULES.values(), Remasking(0.1)):
        grid = None if rule is RULES["first_hitting"] else uniform_grid(16)
        assert make(masked(30, 4), grid, rule, choice=Choice(0.0)).ids_BL.eq(0).all()


# scored rules against a plain loop


SOURCE = ToySource.order_two(4, 9, sharpness=5.0)


def plain_loop(canvas: list[int], left: list[int], score) -> tuple[list[int], list[set[int]]]:
    """One row: predict all masked, keep the surest until ``left[k]`` are masked; greedy tokens."""
    row, history = list(canvas), []
    for number in left:
        p = SOURCE.log_conditionals(torch.tensor([row]))[0].exp().tolist()
        places = [i for i, token in enumerate(row) if token == 4]
        places.sort(key=lambda i: (-score(p[i]), i))
        chosen = places[: max(0, len(places) - number)]
        for i in chosen:
            row[i] = max(range(4), key=p[i].__getitem__)
        history.append(set(chosen))
    return row, history


SCORES = {
    "most_confident": max,
    "margin": lambda p: sorted(p)[-1] - sorted(p)[-2],
    "entropy": lambda p: sum(one * math.log(one) for one in p),
}


@pytest.mark.parametrize(
    "grid",
    [None, uniform_grid(3), cosine_grid(5), count_grid(8, 3), uniform_grid(20)],
    ids=["none", "uniform", "cosine", "count", "fine"],
)
@pytest.mark.parametrize("name", SCORES)
def test_the_surest_tokens_are_revealed_first(name, grid):
    canvas = masked(8, 9, 4)
    canvas[torch.arange(8), torch.arange(8)] = torch.arange(8) % 4
    canvas[::3, 5] = 1
    seen = []
    made = make(
        canvas,
        grid,
        RULES[name],
        ExactDenoiser(SOURCE),
        4,
        choice=Choice(0.0),
        on_step=lambda step: seen.append(step.ids_BL == 4),
    )
    times = [1 - k / 8 for k in range(9)] if grid is None else grid.tolist()
    for b, row in enumerate(canvas.tolist()):
        left = [round(row.count(4) * t) for t in times[1:]]
        expected, history = plain_loop(row, left, SCORES[name])
        assert made.ids_BL[b].tolist() == expected
        shown = [
            {i for i in range(9) if before[b, i] and not after[b, i]}
            for before, after in itertools.pairwise(seen)
        ]
        assert shown == history


def test_the_scores_differ_where_they_should():
    names = list(SCORES)
    orders = []
    for name in names:
        order = []
        make(
            masked(1, 9, 4),
            None,
            RULES[name],
            ExactDenoiser(SOURCE),
            4,
            choice=Choice(0.0),
            on_step=lambda step, order=order: order.append((step.ids_BL == 4).tolist()),
        )
        orders.append(order)
    assert orders[0] != orders[1] != orders[2] != orders[0]


def test_which_places_come_when_by_hand():
    """Place 0 has the likeliest token, 1 the largest lead, 2 the narrowest distribution."""
    table = torch.tensor(
        [
            [0.52, 0.24, 0.24, 1e-9, 1e-9, 1e-9, 1e-9, 1e-9],
            [0.50, *[0.5 / 7] * 7],
            [0.51, 0.49, 1e-9, 1e-9, 1e-9, 1e-9, 1e-9, 1e-9],
            [0.30, *[0.1] * 7],
        ]
    ).log()

    def model(x, rows, **_):
        return table[rows % 4]

    def order(name, temperature=0.0):
        seen = []
        make(
            masked(1, 4, 8),
            None,
            RULES[name],
            model,
            8,
            choice=Choice(temperature),
            on_step=lambda step: seen.append((step.ids_BL[0] == 8).tolist()),
        )
        return [
            next(i for i in range(4) if before[i] and not after[i])
            for before, after in itertools.pairwise(seen)
        ]

    assert order("most_confident") == [0, 2, 1, 3]
    assert order("margin") == [1, 0, 3, 2]
    assert order("entropy") == [2, 0, 1, 3]
    # how sure the model is does not depend on how tokens are drawn: at 1/4 place 3 leads place 0
    assert order("margin", 0.25) == [1, 0, 3, 2]


def test_confidence_is_that_of_the_token_drawn_not_of_the_likeliest():
    """Warm tokens; the place whose own token is likelier under the model comes first."""
    p = torch.tensor([0.6, 0.3, 0.1])
    seen = []
    make(
        masked(300, 2, 3),
        count_grid(2),
        RULES["most_confident"],
        lambda x, rows, **_: p.log().expand(len(rows), -1),
        3,
        choice=Choice(3.0),
        on_step=lambda step: seen.append(step.ids_BL.clone()),
    )
    first = seen[1][seen[1] != 3]
    warm = (p ** (1 / 3)) / (p ** (1 / 3)).sum()
    at_least = 1 - torch.cat([torch.zeros(1), warm.cumsum(0)[:-1]])  # P(a place has token >= v)
    best = at_least**2  # both places have
    expected = (best - torch.cat([best[1:], torch.zeros(1)])).numpy()
    counts = torch.bincount(first, minlength=3).numpy()
    assert stats.chisquare(counts, 300 * expected).pvalue > 1e-3
