"""Token-by-token sampling against joints that are known, in every order."""

import itertools
import math
import random

import numpy as np
import pytest
import torch
from scipy import stats

from bellmask.data.toy import ExactDenoiser, ToySource
from bellmask.diffusion.orders import any_order, arm, sigma_arm
from bellmask.errors import UserError
from bellmask.generate.choice import Choice
from bellmask.generate.sequential import generate_in_order
from bellmask.model.transformer import Denoiser
from bellmask.options import ModelOptions

L, MASK = 4, 2
ROWS = list(itertools.product((0, 1), repeat=L))
SIGMA = [2, 0, 3, 1]
FRAMEWORKS = {"arm": arm(L), "sigma": sigma_arm(torch.tensor(SIGMA)), "any": any_order()}
each = pytest.mark.parametrize("name", FRAMEWORKS)

CHAIN = ToySource.markov(
    torch.tensor([0.7, 0.3], dtype=torch.float64),
    torch.tensor([[0.85, 0.15], [0.35, 0.65]], dtype=torch.float64),
    length=L,
)


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def chain_joint() -> dict[tuple[int, ...], float]:
    start, move = CHAIN.initial_S.tolist(), CHAIN.transition_SS.tolist()
    return {
        row: start[row[0]] * math.prod(move[a][b] for a, b in itertools.pairwise(row))
        for row in ROWS
    }


def table_joint() -> dict[tuple[int, ...], float]:
    """Every row a probability of its own."""
    draw = random.Random(3)
    weight = {row: draw.uniform(0.1, 1) ** 2 for row in ROWS}
    return {row: w / sum(weight.values()) for row, w in weight.items()}


class TableModel:
    """The conditionals of a table, by counting; called as a causal network is. Notes its calls."""

    def __init__(self, joint):
        self.joint, self.calls, self.known = joint, [], {}

    def __call__(self, x_BL, rows_N, *, positions, target_positions):
        assert x_BL.shape == positions.shape == target_positions.shape
        self.calls.append((x_BL.clone(), rows_N, positions, target_positions))
        found = []
        for row in rows_N.tolist():
            b, slot = divmod(row, x_BL.shape[1])
            assert (int(x_BL[b, 0]), int(positions[b, 0])) == (MASK, 0)
            held = zip(positions[b, 1 : slot + 1].tolist(), x_BL[b, 1 : slot + 1].tolist())
            found.append(self.logits(frozenset(held), int(target_positions[b, slot])))
        return torch.tensor(found, dtype=torch.float64)

    def logits(self, seen, place):
        if (seen, place) not in self.known:
            fits = [r for r in ROWS if all(r[i - 1] == v for i, v in seen)]
            self.known[seen, place] = [
                math.log(sum(self.joint[r] for r in fits if r[place - 1] == v)) for v in (0, 1)
            ]
        return self.known[seen, place]


def canvas(given: dict[int, int], count: int, length: int = L) -> torch.Tensor:
    row = [given.get(i, MASK) for i in range(length)]
    return torch.tensor([row]).repeat(count, 1)


def p_value(ids_BL: torch.Tensor, joint, given: dict[int, int]) -> float:
    """Of the made rows against p(row | what is given)."""
    rows = [r for r in ROWS if all(r[i] == v for i, v in given.items())]
    counts = dict.fromkeys(rows, 0)
    for row in ids_BL.tolist():
        counts[tuple(row)] += 1  # a KeyError is a given token that was changed
    p = np.array([joint[r] for r in rows])
    return stats.chisquare(list(counts.values()), len(ids_BL) * p / p.sum()).pvalue


GIVEN = {
    "arm": [{}, {0: 1}, {0: 0, 1: 1}, {0: 1, 1: 0, 2: 1}],
    "sigma": [{}, {2: 1}, {2: 0, 0: 1}, {2: 1, 0: 1, 3: 0}],
    "any": [{}, {3: 1}, {1: 1, 3: 0}, {1: 0, 2: 0, 3: 1}],
}


@pytest.mark.parametrize(
    ("name", "given"), [(n, g) for n, several in GIVEN.items() for g in several], ids=str
)
def test_samples_follow_the_joint_given_what_is_given(name, given):
    made = generate_in_order(
        TableModel(table_joint()), canvas(given, 2000), FRAMEWORKS[name], mask_id=MASK, seed=1
    )
    assert p_value(made.ids_BL, table_joint(), given) > 1e-3
    uniform = dict.fromkeys(ROWS, 1 / 16)
    assert p_value(made.ids_BL, uniform, given) < 1e-6
    assert made.num_calls == L - len(given)
    assert made.num_rows == 2000 * (L - len(given))


@each
def test_the_perfect_model_of_a_chain_makes_that_chain(name):
    model = ExactDenoiser(CHAIN, is_causal=True)
    for given in GIVEN[name][:2]:
        made = generate_in_order(model, canvas(given, 2000), FRAMEWORKS[name], mask_id=MASK)
        assert p_value(made.ids_BL, chain_joint(), given) > 1e-3


@each
def test_the_model_is_asked_as_in_training(name):
    """Prefixes of the row that training would show, with the same positions and targets."""
    framework, model = FRAMEWORKS[name], TableModel(table_joint())
    made = generate_in_order(model, canvas({}, 6), framework, mask_id=MASK, seed=3)
    x_BL, _, positions, targets = model.calls[-1]
    assert [call[0].shape for call in model.calls] == [(6, n) for n in range(1, L + 1)]
    order = targets - 1
    assert order.sort(dim=1).values.tolist() == [list(range(L))] * 6
    u_BL = torch.empty(6, L, dtype=torch.float64).scatter_(
        1, order, torch.linspace(0, 0.9, L, dtype=torch.float64).expand(6, -1).contiguous()
    )
    problem = framework.every_context(made.ids_BL, u_BL, mask_id=MASK)
    assert torch.equal(problem.x_BL, x_BL)
    assert torch.equal(problem.positions.expand_as(x_BL), positions)
    assert torch.equal(problem.target_positions.expand_as(x_BL), targets)
    for n, (x, rows, held, sought) in enumerate(model.calls, start=1):
        assert torch.equal(x, x_BL[:, :n])
        assert torch.equal(held, positions[:, :n])
        assert torch.equal(sought, targets[:, :n])
        assert rows.tolist() == [n * b + n - 1 for b in range(6)]


def test_random_orders_are_uniform_after_what_is_given():
    model = TableModel(table_joint())
    generate_in_order(model, canvas({1: 1}, 1800), any_order(), mask_id=MASK, seed=2)
    orders = model.calls[-1][3] - 1
    assert orders[:, 0].tolist() == [1] * 1800
    counts = np.unique(orders @ torch.tensor([64, 16, 4, 1]), return_counts=True)[1]
    assert len(counts) == 6
    assert stats.chisquare(counts).pvalue > 1e-3


def test_the_order_of_a_sample_is_its_own_whatever_the_batch():
    whole, part = TableModel(table_joint()), TableModel(table_joint())
    options = {"framework": any_order(), "mask_id": MASK, "seed": 2}
    generate_in_order(whole, canvas({1: 1}, 30), **options)
    generate_in_order(part, canvas({1: 1}, 10), **options, first_sample=15)
    assert torch.equal(part.calls[-1][3], whole.calls[-1][3][15:25])
    other = TableModel(table_joint())
    generate_in_order(other, canvas({1: 1}, 30), any_order(), mask_id=MASK, seed=3)
    assert not torch.equal(other.calls[-1][3], whole.calls[-1][3])


def awake(encoding: str) -> Denoiser:
    options = ModelOptions(num_layers=2, width=16, num_heads=2, dropout=0.0)
    model = Denoiser(options, 9, is_causal=True, encoding=encoding)
    draw = seeded(8)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=draw) * 0.5)
    return model.eval()


@pytest.mark.parametrize("encoding", ["source", "crossed"])
@each
def test_a_sample_is_the_same_whatever_the_batch(name, encoding):
    model, framework = awake(encoding), FRAMEWORKS[name]
    options = {"mask_id": 9, "seed": 4}
    given = torch.tensor([[9, 9, 5, 9]] if name != "arm" else [[5, 9, 9, 9]])
    whole = generate_in_order(model, given.repeat(7, 1), framework, **options).ids_BL
    parts = [
        generate_in_order(model, given.repeat(n, 1), framework, **options, first_sample=first)
        for first, n in ((0, 3), (3, 1), (4, 3))
    ]
    assert torch.equal(torch.cat([part.ids_BL for part in parts]), whole)
    assert len({tuple(row) for row in whole.tolist()}) > 4
    other = generate_in_order(model, given.repeat(7, 1), framework, mask_id=9, seed=5).ids_BL
    assert not torch.equal(other, whole)
    assert (whole == 9).sum() == 0


def test_no_temperature_takes_the_most_likely_token_each_time():
    """0 is the likelier start and stays with probability 0.85."""
    model = ExactDenoiser(CHAIN, is_causal=True)
    made = generate_in_order(model, canvas({}, 5), arm(L), mask_id=MASK, choice=Choice(0.0))
    assert made.ids_BL.eq(0).all()
    after = generate_in_order(model, canvas({0: 1}, 5), arm(L), mask_id=MASK, choice=Choice(0.0))
    assert after.ids_BL.eq(1).all()


def test_the_canvas_that_was_given_is_left_alone():
    start = canvas({0: 1}, 3)
    made = generate_in_order(TableModel(table_joint()), start, arm(L), mask_id=MASK)
    assert start.tolist() == [[1, MASK, MASK, MASK]] * 3
    assert made.ids_BL[:, 0].tolist() == [1, 1, 1]


def test_a_full_canvas_needs_no_call():
    model = TableModel(table_joint())
    full = canvas({0: 1, 1: 0, 2: 0, 3: 1}, 2)
    for framework in FRAMEWORKS.values():
        made = generate_in_order(model, full, framework, mask_id=MASK)
        assert torch.equal(made.ids_BL, full)
        assert (made.num_calls, made.num_rows, model.calls) == (0, 0, [])


@pytest.mark.parametrize(
    ("name", "given"),
    [("arm", {1: 0}), ("arm", {0: 0, 2: 1}), ("arm", {3: 1}), ("sigma", {0: 1}), ("sigma", {1: 1})],
    ids=str,
)
def test_given_tokens_that_do_not_come_first_are_refused(name, given):
    with pytest.raises(UserError, match=r"fixed order.*not the first in it.*AoARM"):
        generate_in_order(
            TableModel(table_joint()), canvas(given, 2), FRAMEWORKS[name], mask_id=MASK
        )


@each
def test_canvases_that_differ_in_what_is_given_are_refused(name):
    """The positions of the first one would silently be those of all."""
    mixed = torch.cat([canvas({0: 1}, 1), canvas({}, 1)])
    for one in (mixed, mixed.flip(0)):
        with pytest.raises(AssertionError, match="differ"):
            generate_in_order(TableModel(table_joint()), one, FRAMEWORKS[name], mask_id=MASK)


def test_a_fixed_order_does_not_reach_beyond_its_length_but_left_to_right_does():
    with pytest.raises(UserError, match="an order for 4 tokens, the canvas 5"):
        generate_in_order(
            TableModel(table_joint()), canvas({}, 2, length=5), FRAMEWORKS["sigma"], mask_id=MASK
        )
    asked = []

    def model(x, rows, *, positions, target_positions, **_):
        asked.append(target_positions[:, -1].tolist())
        return torch.zeros(len(rows), 2)

    made = generate_in_order(model, canvas({0: 1}, 2, length=6), FRAMEWORKS["arm"], mask_id=MASK)
    assert asked == [[2, 2], [3, 3], [4, 4], [5, 5], [6, 6]]
    assert made.ids_BL.shape == (2, 6)
    assert (made.ids_BL[:, 0] == 1).all()


def test_a_shorter_canvas_goes_in_the_order_of_its_positions():
    """2 0 3 1 of three positions: 2 0 1."""
    for name, order in (("arm", [1, 2, 3]), ("sigma", [3, 1, 2])):
        model = TableModel(table_joint())
        generate_in_order(model, canvas({}, 2, length=3), FRAMEWORKS[name], mask_id=MASK)
        assert model.calls[-1][3].tolist() == [order] * 2


@each
def test_each_token_is_told_as_a_step(name):
    told = []
    given = GIVEN[name][1]
    made = generate_in_order(
        TableModel(table_joint()),
        canvas(given, 6),
        FRAMEWORKS[name],
        mask_id=MASK,
        first_sample=7,
        on_step=lambda step: told.append((step, step.ids_BL.clone())),
    )
    assert [step.number for step, _ in told] == [step.num_calls for step, _ in told] == [0, 1, 2, 3]
    assert {(step.num_steps, step.first_sample) for step, _ in told} == {(3, 7)}
    assert [step.t for step, _ in told] == pytest.approx([1, 2 / 3, 1 / 3, 0])
    assert torch.equal(told[0][1], canvas(given, 6))
    assert torch.equal(told[-1][1], made.ids_BL)
    for number, (_, ids) in enumerate(told):
        assert (ids == MASK).sum(1).tolist() == [3 - number] * 6
        assert torch.equal(ids[ids != MASK], made.ids_BL[ids != MASK])
