"""Token-by-token sampling against joints that are known, in every order."""

import math
import random

import numpy as np
import pytest
import torch
from sampling_tools import BITS, awake, p_value
from scipy import stats

from bellmask.diffusion.frameworks import any_order, arm, sigma_arm
from bellmask.generate.sampler import generate_in_order
from bellmask.utils.errors import UserError

L, MASK = 4, 2
FRAMEWORKS = {"arm": arm(L), "sigma": sigma_arm(torch.tensor([2, 0, 3, 1])), "any": any_order()}
each = pytest.mark.parametrize("name", FRAMEWORKS)
WEIGHT = {row: random.Random(repr(row)).uniform(0.1, 1) ** 2 for row in BITS}
JOINT = {row: w / sum(WEIGHT.values()) for row, w in WEIGHT.items()}
"""Every row a probability of its own."""


class TableModel:
    """The conditionals of a table, by counting; called as a causal network is. Notes its calls."""

    def __init__(self):
        self.calls, self.known = [], {}

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
            fits = [r for r in BITS if all(r[i - 1] == v for i, v in seen)]
            self.known[seen, place] = [
                math.log(sum(JOINT[r] for r in fits if r[place - 1] == v)) for v in (0, 1)
            ]
        return self.known[seen, place]


def canvas(given, count, length=L):
    return torch.tensor([[given.get(i, MASK) for i in range(length)]]).repeat(count, 1)


def fill(rows, name, model=None, **options):
    """What is made, and the model's calls."""
    model = model or TableModel()
    made = generate_in_order(model, rows, FRAMEWORKS[name], mask_id=MASK, **options)
    return made, getattr(model, "calls", None)


GIVEN = {
    "arm": [{}, {0: 1}, {0: 1, 1: 0, 2: 1}],
    "sigma": [{}, {2: 1}, {2: 1, 0: 1, 3: 0}],
    "any": [{}, {3: 1}, {1: 1, 3: 0}, {1: 0, 2: 0, 3: 1}],
}


@pytest.mark.parametrize(
    ("name", "given"), [(n, g) for n, several in GIVEN.items() for g in several], ids=str
)
def test_samples_follow_the_joint_given_what_is_given(name, given):
    start = canvas(given, 2000)
    made, _ = fill(start, name, seed=1)
    assert start.equal(canvas(given, 2000))
    assert p_value(made.ids_BL, JOINT, given) > 1e-3
    assert p_value(made.ids_BL, dict.fromkeys(BITS, 1 / 16), given) < 1e-6
    assert (made.num_calls, made.num_rows) == (L - len(given), 2000 * (L - len(given)))


@each
def test_the_model_is_asked_as_in_training(name):
    """Prefixes of the row that training would show, with the same positions and targets."""
    made, calls = fill(canvas({}, 6), name, seed=3)
    x_BL, _, positions, targets = calls[-1]
    order = targets - 1
    assert order.sort(dim=1).values.tolist() == [list(range(L))] * 6
    rank = torch.linspace(0, 0.9, L, dtype=torch.float64).expand(6, -1).contiguous()
    u_BL = torch.empty(6, L, dtype=torch.float64).scatter_(1, order, rank)
    problem = FRAMEWORKS[name].every_context(made.ids_BL, u_BL, mask_id=MASK)
    assert torch.equal(problem.x_BL, x_BL)
    assert torch.equal(problem.positions.expand_as(x_BL), positions)
    assert torch.equal(problem.target_positions.expand_as(x_BL), targets)
    assert len(calls) == L
    for n, (x, rows, held, sought) in enumerate(calls, start=1):
        assert torch.equal(x, x_BL[:, :n])
        assert torch.equal(held, positions[:, :n])
        assert torch.equal(sought, targets[:, :n])
        assert rows.tolist() == [n * b + n - 1 for b in range(6)]


def test_random_orders_are_uniform_after_what_is_given_and_each_samples_own():
    def orders(count, **options):
        return fill(canvas({1: 1}, count), "any", **options)[1][-1][3] - 1

    whole = orders(1800, seed=2)
    assert whole[:, 0].tolist() == [1] * 1800
    counts = np.unique(whole @ torch.tensor([64, 16, 4, 1]), return_counts=True)[1]
    assert len(counts) == 6
    assert stats.chisquare(counts).pvalue > 1e-3
    assert torch.equal(orders(10, seed=2, first_sample=15), whole[15:25])
    assert not torch.equal(orders(30, seed=3), whole[:30])


@pytest.mark.parametrize("encoding", ["source", "crossed"])
@each
def test_a_sample_is_the_same_whatever_the_batch_and_each_token_is_told_as_a_step(name, encoding):
    model = awake(2, MASK, std=0.5, is_causal=True, encoding=encoding).double()
    given, told = GIVEN[name][1], []
    options = {"on_step": lambda step: told.append((step, step.ids_BL.clone()))}
    whole = fill(canvas(given, 9), name, model, seed=4)[0].ids_BL
    part = fill(canvas(given, 5), name, model, seed=4, first_sample=4, **options)[0].ids_BL
    assert torch.equal(part, whole[4:])
    assert len(whole.unique(dim=0)) > 2
    facts = [(s.number, s.num_calls, s.num_steps, s.first_sample) for s, _ in told]
    assert facts == [(n, n, 3, 4) for n in range(4)]
    assert [step.t for step, _ in told] == pytest.approx([1, 2 / 3, 1 / 3, 0])
    for number, (_, ids) in enumerate(told):
        assert (ids == MASK).sum(1).tolist() == [3 - number] * 5
        assert torch.equal(ids[ids != MASK], part[ids != MASK])


@pytest.mark.parametrize(
    ("name", "given", "length"),
    [("arm", {1: 0}, 4), ("arm", {0: 0, 2: 1}, 4), ("sigma", {0: 1}, 4), ("sigma", {}, 5)],
)
def test_what_does_not_fit_a_fixed_order_is_refused(name, given, length):
    with pytest.raises(UserError, match="order"):
        fill(canvas(given, 2, length), name)


def test_left_to_right_reaches_beyond_its_length_and_shorter_ones_keep_their_order():
    asked = []

    def model(x, rows, *, positions, target_positions, **_):
        asked.append(target_positions[:, -1].tolist())
        return torch.zeros(len(rows), 2)

    made, _ = fill(canvas({0: 1}, 2, length=6), "arm", model)
    assert asked == [[2, 2], [3, 3], [4, 4], [5, 5], [6, 6]]
    assert (made.ids_BL[:, 0] == 1).all()
    # 2 0 3 1 of three positions: 2 0 1
    for name, order in (("arm", [1, 2, 3]), ("sigma", [3, 1, 2])):
        assert fill(canvas({}, 2, length=3), name)[1][-1][3].tolist() == [order] * 2
