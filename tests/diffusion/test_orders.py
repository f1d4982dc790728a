"""Contexts and targets of every framework against sums over all rows, orders and masks."""

import itertools
import math
import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy import integrate, stats

from bellmask.build import build_framework
from bellmask.diffusion.objectives import Nelbo
from bellmask.diffusion.orders import Mdm, Ordered, any_order, arm, sigma_arm
from bellmask.diffusion.schedule import Cosine, Linear
from bellmask.model.attention import AttentionRules
from bellmask.model.transformer import Denoiser
from bellmask.options import FrameworkOptions, ModelOptions
from bellmask.presets import tiny
from bellmask.rng import stream_key, uniform_rows
from bellmask.train.step import Microbatch, microbatch_loss

CPU = torch.device("cpu")
V, L = 3, 3
MASK, PAD = 3, 2
ROWS = list(itertools.product(range(V), repeat=L))
ORDERS = list(itertools.permutations(range(L)))
each_order = pytest.mark.parametrize("order", ORDERS, ids=str)


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


# a joint table and models by their answers, in plain Python


def drawn(*name) -> list[float]:
    """Positive numbers that add up to one, others for every name."""
    draw = random.Random(repr(name))
    weight = [draw.uniform(0.05, 1) for _ in range(V)]
    return [w / sum(weight) for w in weight]


JOINT = {row: drawn("joint", row)[0] for row in ROWS}
JOINT = {row: p / sum(JOINT.values()) for row, p in JOINT.items()}
"""No chain: every row has a probability of its own."""


def true(seen, place, t) -> list[float]:
    """p(x at the place | what is seen), from the table of rows."""
    fits = [row for row in ROWS if all(row[i] == v for i, v in seen)]
    weight = [sum(JOINT[row] for row in fits if row[place] == v) for v in range(V)]
    return [w / sum(weight) for w in weight]


def wrong(seen, place, t) -> list[float]:
    """Anything, but the same for the same set of observed tokens."""
    return drawn("wrong", sorted(seen), place)


def wrong_by_order(seen, place, t) -> list[float]:
    """The truth from left to right, and something else for every other order."""
    if list(seen) == sorted(seen):
        return true(seen, place, t)
    return drawn("by order", list(seen), place)


def wrong_by_time(seen, place, t) -> list[float]:
    """Surer of itself the later it is."""
    weight = [p ** (0.2 + 2 * float(t)) for p in wrong(seen, place, t)]
    return [w / sum(weight) for w in weight]


class Asked:
    """A model called as the package's own, by ``answer(seen, place, t)``; places from 0.

    ``seen`` are (place, token) pairs in the order of the slots.
    """

    def __init__(self, answer, mask_id=MASK):
        self.answer, self.mask_id = answer, mask_id

    def __call__(
        self,
        x_BL,
        rows_N,
        targets_N,
        *,
        weight_N=None,
        t_B=None,
        positions=None,
        target_positions=None,
        mask=None,
        reduce=True,
    ):
        length = x_BL.shape[1]
        found = []
        for row, target in zip(rows_N.tolist(), targets_N.tolist()):
            b, slot = divmod(row, length)
            x = x_BL[b].tolist()
            if positions is None:
                visible = [True] * length if mask is None else mask[b, 0, 0].tolist()
                seen = [(i, v) for i, v in enumerate(x) if v != self.mask_id and visible[i]]
                place, t = slot, None if t_B is None else t_B[b]
            else:
                assert mask is None
                held = positions.expand(x_BL.shape)[b].tolist()
                seen = [(held[s] - 1, x[s]) for s in range(1, slot + 1)]
                place, t = int(target_positions.expand(x_BL.shape)[b, slot]) - 1, None
                assert (x[0], held[0]) == (self.mask_id, 0)
            found.append(-math.log(self.answer(seen, place, t)[target]))
        ce_N = torch.tensor(found, dtype=torch.float64)
        if not reduce:
            return ce_N
        return (ce_N if weight_N is None else ce_N * weight_N).sum()


def surprise(answer, row, seen_places, place, t=None) -> float:
    """-log q of the row's own token at a place."""
    return -math.log(answer([(i, row[i]) for i in seen_places], place, t)[row[place]])


def loss_in_order(answer, order) -> float:
    """Sum over rows and r of p(x) [-log q(x at s_r | x at s_<r)]: Eq. loss_ARM for (0, 1, 2)."""
    return sum(
        p * surprise(answer, row, order[:r], order[r]) for row, p in JOINT.items() for r in range(L)
    )


def loss_of_all_orders(answer) -> float:
    """Eq. loss_aogpt."""
    return sum(loss_in_order(answer, order) for order in ORDERS) / len(ORDERS)


def loss_of_masks(answer, context: int) -> float:
    """L^{N_c} of MDM: all rows, all masks of L - N_c tokens, all masked targets, all alike."""
    total = 0.0
    masks = list(itertools.combinations(range(L), L - context))
    for (row, p), mask in itertools.product(JOINT.items(), masks):
        seen = [i for i in range(L) if i not in mask]
        ce = [surprise(answer, row, seen, i) for i in mask]
        total += p * sum(ce) / len(ce) / len(masks)
    return total


def loss_over_time(answer, alpha, slope) -> float:
    """Eq. loss_mdlm by quadrature over t, for a model that is told the time."""

    def integrand(t: float) -> float:
        total = 0.0
        for (row, p), mask in itertools.product(JOINT.items(), all_masks()):
            seen = [i for i in range(L) if i not in mask]
            share = (1 - alpha(t)) ** len(mask) * alpha(t) ** (L - len(mask))
            total += p * share * sum(surprise(answer, row, seen, i, t) for i in mask)
        return -slope(t) / (1 - alpha(t)) * total

    return integrate.quad(integrand, 0, 1, epsabs=1e-7, epsrel=1e-7, limit=20)[0]


def all_masks():
    return [m for n in range(1, L + 1) for m in itertools.combinations(range(L), n)]


SCHEDULES = {
    "linear": (Linear(), lambda t: 1 - t, lambda t: -1.0),
    "cosine": (
        Cosine(),
        lambda t: 1 - math.cos(math.pi / 2 * (1 - t)),
        lambda t: -math.pi / 2 * math.sin(math.pi / 2 * (1 - t)),
    ),
}


# each framework's loss is the exhaustive sum


X0 = torch.tensor(ROWS)
P = torch.tensor([JOINT[row] for row in ROWS], dtype=torch.float64)


def asked_loss(problem, answer) -> float:
    """The expectation over the joint table of the summed cross-entropies of a problem on X0."""
    ce_N = problem.ask(Asked(answer), CPU, reduce=False)
    return float((ce_N * P[problem.rows_N // L]).sum())


def uniforms_for(order, count: int) -> torch.Tensor:
    """Uniform numbers that put the positions in this order."""
    u = torch.empty(count, L, dtype=torch.float64)
    u[:, list(order)] = (torch.arange(L, dtype=torch.float64) + 0.5) / L
    return u


@pytest.mark.parametrize("answer", [true, wrong, wrong_by_order])
@each_order
def test_a_fixed_order_is_the_chain_rule(order, answer):
    framework = sigma_arm(torch.tensor(order))
    noise = torch.rand(len(ROWS), L, generator=seeded(0), dtype=torch.float64)
    problem = framework.training(X0, torch.zeros(len(ROWS)), noise, mask_id=MASK)
    assert asked_loss(problem, answer) == pytest.approx(loss_in_order(answer, order), abs=1e-12)


@pytest.mark.parametrize("answer", [true, wrong, wrong_by_order])
def test_left_to_right_is_the_first_of_the_orders(answer):
    noise = torch.rand(len(ROWS), L, generator=seeded(0), dtype=torch.float64)
    problem = arm(L).training(X0, torch.zeros(len(ROWS)), noise, mask_id=MASK)
    found = asked_loss(problem, answer)
    assert found == pytest.approx(loss_in_order(answer, (0, 1, 2)), abs=1e-12)
    other = [loss_in_order(wrong, order) - loss_in_order(wrong, (0, 1, 2)) for order in ORDERS[1:]]
    assert min(map(abs, other)) > 1e-3


@pytest.mark.parametrize("answer", [true, wrong, wrong_by_order])
def test_any_order_is_the_mean_over_all_orders(answer):
    losses = [
        asked_loss(
            any_order().training(
                X0, torch.zeros(len(ROWS)), uniforms_for(order, len(ROWS)), mask_id=MASK
            ),
            answer,
        )
        for order in ORDERS
    ]
    expected = [loss_in_order(answer, order) for order in ORDERS]
    np.testing.assert_allclose(losses, expected, atol=1e-12)
    assert np.mean(losses) == pytest.approx(loss_of_all_orders(answer), abs=1e-12)


@pytest.mark.parametrize("answer", [true, wrong])
@pytest.mark.parametrize("context", range(L))
def test_masks_of_a_given_size_are_the_exhaustive_sum(context, answer):
    """Every order of the uniform numbers once: every mask equally often."""
    losses = []
    for order in ORDERS:
        u = uniforms_for(order, len(ROWS))
        problem = Mdm().given(X0, torch.full((len(ROWS),), context), u, mask_id=MASK)
        assert problem.context_N.tolist() == [context] * (L - context) * len(ROWS)
        losses.append(asked_loss(problem, answer) / (L - context))
    assert np.mean(losses) == pytest.approx(loss_of_masks(answer, context), abs=1e-12)


@pytest.mark.parametrize("answer", [true, wrong, wrong_by_order])
@pytest.mark.parametrize("context", range(L))
def test_ordered_contexts_of_a_given_size_are_those_of_the_sum(context, answer):
    """``given`` is the term N_c of ``training``."""
    count = torch.full((len(ROWS),), context)
    for order in ORDERS:
        expected = sum(
            p * surprise(answer, row, order[:context], order[context]) for row, p in JOINT.items()
        )
        for framework in (sigma_arm(torch.tensor(order)), any_order()):
            problem = framework.given(X0, count, uniforms_for(order, len(ROWS)), mask_id=MASK)
            assert problem.rows_N.tolist() == [L * b + context for b in range(len(ROWS))]
            assert asked_loss(problem, answer) == pytest.approx(expected, abs=1e-12)


def test_every_order_of_true_conditionals_adds_up_to_the_entropy():
    entropy = stats.entropy(list(JOINT.values()))
    for order in ORDERS:
        assert loss_in_order(true, order) == pytest.approx(entropy, abs=1e-12)
    assert sum(loss_of_masks(true, c) for c in range(L)) == pytest.approx(entropy, abs=1e-12)


def test_any_order_equals_masks_for_a_wrong_model_that_does_not_know_the_order():
    """Prop. 2.1 of Kim et al., and at every context count; a model that knows breaks it."""
    masks = sum(loss_of_masks(wrong, c) for c in range(L))
    assert loss_of_all_orders(wrong) == pytest.approx(masks, abs=1e-12)
    assert masks - stats.entropy(list(JOINT.values())) > 0.1
    in_order = sum(loss_of_masks(wrong_by_order, c) for c in range(L))
    assert abs(loss_of_all_orders(wrong_by_order) - in_order) > 0.01


# what training draws


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("answer", [wrong, wrong_by_time])
def test_masked_training_has_the_expectation_of_the_nelbo(schedule, answer):
    """Eq. loss_mdlm, also where the model is told t."""
    alphas, alpha, slope = SCHEDULES[schedule]
    truth = loss_over_time(answer, alpha, slope)
    if answer is wrong:
        masks = sum(loss_of_masks(wrong, c) for c in range(L))
        assert truth == pytest.approx(masks, abs=1e-5)
    objective, losses = Nelbo(schedule=alphas), []
    for step in range(60):
        strata = torch.randperm(len(ROWS) * 2, generator=seeded(step)).double()
        t_B = objective.times((strata + torch.rand(54, generator=seeded(99 + step))) / 54)
        u_BL = torch.rand(54, L, generator=seeded(999 + step), dtype=torch.float64)
        problem = Mdm(alphas).training(X0.repeat(2, 1), t_B, u_BL, mask_id=MASK)
        ce_N = problem.ask(Asked(answer), CPU, reduce=False)
        owner = problem.rows_N // L
        weight = objective.weight(t_B)[owner] * P.repeat(2)[owner] / 2 * len(ROWS)
        losses.append(float((weight * ce_N).sum()) / len(ROWS))
    error = np.std(losses, ddof=1) / math.sqrt(len(losses))
    assert abs(np.mean(losses) - truth) < 4 * error
    assert error < 0.05 * truth


def test_a_microbatch_is_the_sum_over_its_real_tokens():
    """The loss of training as the trainer asks for it, with pads, for both kinds of framework."""
    x0 = torch.tensor([[0, 1, 2], [1, 1, PAD], [2, PAD, PAD]])
    real = torch.arange(3) < torch.tensor([[3], [2], [1]])
    u = torch.tensor([[0.7, 0.1, 0.4], [0.9, 0.2, 0.0], [0.3, 0.1, 0.2]], dtype=torch.float64)
    t = torch.full((3,), 0.5, dtype=torch.float64)
    orders = {"arm": [(0, 1, 2), (0, 1), (0,)], "any": [(1, 2, 0), (1, 0), (0,)]}
    for name, framework in (("arm", arm(3)), ("any", any_order())):
        expected = sum(
            surprise(wrong, row, order[:r], order[r])
            for row, order in zip(x0.tolist(), orders[name])
            for r in range(len(order))
        )
        batch = Microbatch(0, x0, u, t, real)
        found = microbatch_loss(Asked(wrong), batch, framework, Nelbo(), MASK, CPU)
        # the weights of an objective with times would show: Nelbo has 1 / t = 2 here
        assert float(found[0]) == pytest.approx(2 * expected, rel=1e-12)
        assert found[1] == 6
    masked = [(0, (1, 2)), (1, (1,)), (2, (0,))]
    expected = sum(
        surprise(wrong, x0[b].tolist(), [j for j in range(3 - b) if j not in mask], i)
        for b, mask in masked
        for i in mask
    )
    batch = Microbatch(0, x0, u, t, real, AttentionRules())
    found = microbatch_loss(Asked(wrong), batch, Mdm(), Nelbo(), MASK, CPU)
    assert float(found[0]) == pytest.approx(2 * expected, rel=1e-12)
    assert found[1] == 4


# orders


def orders_asked(problem) -> list[list[int]]:
    """The order of each row, from where its targets stand."""
    return (problem.target_positions.expand_as(problem.x_BL) - 1).tolist()


@each_order
def test_sigma_is_given_as_the_positions_in_the_order_they_come(order):
    problem = sigma_arm(torch.tensor(order)).every_context(
        torch.tensor([[10, 11, 12]]), torch.zeros(1, 3).double(), mask_id=MASK
    )
    assert problem.x_BL.tolist() == [[MASK, 10 + order[0], 10 + order[1]]]
    assert problem.targets_N.tolist() == [10 + i for i in order]
    assert problem.context_N.tolist() == problem.rows_N.tolist() == [0, 1, 2]
    assert problem.positions.tolist() == [0, order[0] + 1, order[1] + 1]
    assert problem.target_positions.tolist() == [i + 1 for i in order]
    assert problem.t_B is None


@pytest.mark.parametrize("length", [1, 2, 16, 128])
def test_a_fixed_order_is_a_permutation_that_all_rows_share(length):
    config = replace(tiny(), framework=FrameworkOptions("sigma_arm"))
    framework = build_framework(replace(config, data=replace(config.data, block_length=length)))
    u = torch.rand(2, 5, length, generator=seeded(0), dtype=torch.float64)
    orders = [framework.orders(one).expand(5, -1).tolist() for one in u]
    assert orders[0] == orders[1] == [orders[0][0]] * 5
    assert sorted(orders[0][0]) == list(range(length))
    assert framework.is_exact
    assert framework.is_causal
    if length > 2:
        assert orders[0][0] != list(range(length))


def sigma(order_seed: int | None, train_seed: int = 1, width: int = 64) -> tuple[int, ...]:
    start = tiny()
    config = replace(
        start,
        framework=FrameworkOptions("sigma_arm", order_seed=order_seed),
        train=replace(start.train, seed=train_seed),
        model=replace(start.model, width=width),
    )
    return tuple(build_framework(config).orders(torch.zeros(1, 64).double()).tolist())


def test_sigma_depends_on_its_seed_alone_which_is_by_default_that_of_training():
    assert sigma(3, train_seed=1) == sigma(3, train_seed=2, width=32)
    assert sigma(None, train_seed=3) == sigma(3)
    assert sigma(0, train_seed=5) == sigma(None, train_seed=0)
    assert len({sigma(seed) for seed in range(30)}) == 30


@pytest.mark.parametrize("length", [3, 4])
def test_random_orders_are_uniform_over_all_of_them(length):
    everything = list(itertools.permutations(range(length)))
    rows = 400 * len(everything)
    u = uniform_rows(stream_key(1, "masks", 0), torch.arange(rows), length)
    problem = any_order().every_context(torch.zeros(rows, length).long(), u, mask_id=MASK)
    counts = dict.fromkeys(everything, 0)
    for order in orders_asked(problem):
        counts[tuple(order)] += 1
    assert stats.chisquare(list(counts.values())).pvalue > 1e-3
    assert not any_order().is_exact
    assert any_order().is_causal


def test_the_frameworks_say_what_they_are():
    assert not Mdm().is_causal
    assert not Mdm().is_exact
    assert arm(3).is_causal
    assert arm(3).is_exact


LENGTHS = torch.tensor([5, 1, 3, 4, 2])
PADDED = torch.where(torch.arange(5) < LENGTHS[:, None], 10 * torch.arange(1, 6)[:, None], -1)
PADDED = torch.where(PADDED < 0, PADDED, PADDED + torch.arange(5))
"""Row b holds 10 (b + 1), 10 (b + 1) + 1, ...; pads are -1."""


@pytest.mark.parametrize(
    "framework",
    [arm(5), sigma_arm(torch.tensor([3, 1, 4, 0, 2])), any_order()],
    ids=["arm", "sigma", "any"],
)
def test_pads_come_last_and_no_scored_slot_sees_one(framework):
    is_real = PADDED >= 0
    for seed in range(20):
        u = torch.rand(5, 5, generator=seeded(seed), dtype=torch.float64)
        problem = framework.every_context(PADDED, u, mask_id=MASK, is_real_BL=is_real)
        rows = [divmod(row, 5) for row in problem.rows_N.tolist()]
        assert rows == [(b, r) for b, n in enumerate(LENGTHS.tolist()) for r in range(n)]
        assert problem.context_N.tolist() == [r for _, r in rows]
        whole = framework.orders(u).expand(5, -1).tolist()
        for (b, r), target in zip(rows, problem.targets_N.tolist()):
            order = [i for i in whole[b] if i < LENGTHS[b]]
            assert target == PADDED[b, order[r]]
            assert problem.x_BL[b, : r + 1].tolist() == [MASK, *PADDED[b, order[:r]].tolist()]
            assert problem.positions[b, : r + 1].tolist() == [0, *(i + 1 for i in order[:r])]
            assert problem.target_positions[b, r] == order[r] + 1


@pytest.mark.parametrize(
    "framework", [Mdm(), arm(5), sigma_arm(torch.tensor([3, 1, 4, 0, 2])), any_order()], ids=str
)
def test_given_contexts_have_the_size_that_is_asked_for_row_by_row(framework):
    u = torch.rand(5, 5, generator=seeded(3), dtype=torch.float64)
    context = torch.tensor([2, 0, 2, 1, 0])
    problem = framework.given(PADDED, context, u, mask_id=MASK, is_real_BL=PADDED >= 0)
    owner = problem.rows_N // 5
    assert problem.context_N.tolist() == context[owner].tolist()
    asked = owner.bincount(minlength=5).tolist()
    if framework.is_causal:
        assert asked == [1] * 5
        assert (problem.rows_N % 5).tolist() == context.tolist()
    else:
        assert asked == (LENGTHS - context).tolist()
        visible = (problem.x_BL != MASK) & (PADDED >= 0)
        assert visible.sum(1).tolist() == context.tolist()
    whole = PADDED.flatten().tolist()
    assert all(target in whole and target >= 10 for target in problem.targets_N.tolist())


def test_a_context_as_large_as_the_row_asks_nothing():
    u = torch.rand(5, 5, generator=seeded(3), dtype=torch.float64)
    for framework in (Mdm(), arm(5), any_order()):
        problem = framework.given(PADDED, LENGTHS, u, mask_id=MASK, is_real_BL=PADDED >= 0)
        assert len(problem.rows_N) == 0


def test_shorter_rows_keep_the_order_of_their_positions():
    """sigma = 3 1 4 0 2 of five: of the first four positions 3 1 0 2, of the first two 1 0."""
    framework = sigma_arm(torch.tensor([3, 1, 4, 0, 2]))
    for length, expected in ((5, [3, 1, 4, 0, 2]), (4, [3, 1, 0, 2]), (2, [1, 0]), (1, [0])):
        x0 = torch.arange(length)[None] + 10
        problem = framework.every_context(x0, torch.zeros(1, length).double(), mask_id=MASK)
        assert problem.targets_N.tolist() == [10 + i for i in expected]
        left = arm(5).every_context(x0, torch.zeros(1, length).double(), mask_id=MASK)
        assert left.targets_N.tolist() == list(range(10, 10 + length))


def test_the_time_of_a_mask_is_one_at_which_exactly_these_tokens_are_masked():
    """u < 1 - alpha(t) decides in training: the largest masked u is that rate."""
    u = torch.rand(40, 6, generator=seeded(5), dtype=torch.float64)
    x0 = torch.zeros(40, 6).long()
    context = torch.arange(40) % 6
    for schedule, alpha, _ in SCHEDULES.values():
        problem = Mdm(schedule).given(x0, context, u, mask_id=MASK)
        for b in range(40):
            rate = 1 - alpha(float(problem.t_B[b]))
            is_masked = (problem.x_BL[b] == MASK).tolist()
            assert is_masked == (u[b] <= rate + 1e-9).tolist()
            assert rate == pytest.approx(float(u[b].sort().values[5 - context[b]]), abs=1e-9)


def test_noised_pads_are_masked_like_text_but_never_asked_for():
    """mdlm's rule; by default pads stay as they are."""
    is_real = PADDED >= 0
    u = torch.rand(5, 5, generator=seeded(3), dtype=torch.float64)
    t = torch.linspace(0.3, 0.9, 5, dtype=torch.float64)
    context = torch.tensor([2, 0, 1, 3, 1])
    for noises_pads in (False, True):
        framework = Mdm(noises_pads=noises_pads)
        trained = framework.training(PADDED, t, u, mask_id=MASK, is_real_BL=is_real)
        given = framework.given(PADDED, context, u, mask_id=MASK, is_real_BL=is_real)
        ends = zip(u, LENGTHS.tolist(), context.tolist())
        rate = torch.stack([one[:n].sort().values[n - c - 1] for one, n, c in ends])
        for problem, is_hidden in ((trained, u < t[:, None]), (given, u <= rate[:, None])):
            meant = torch.where(is_hidden & (is_real | noises_pads), MASK, PADDED)
            assert torch.equal(problem.x_BL, meant)
            asked = (is_hidden & is_real).flatten().nonzero()[:, 0]
            assert problem.rows_N.tolist() == asked.tolist()
            seen = (~is_hidden & is_real).sum(1)
            assert problem.context_N.tolist() == seen[problem.rows_N // 5].tolist()
        assert bool((trained.x_BL[~is_real] == MASK).any()) == noises_pads


# who sees whom: the real network


def awake(encoding="source", is_causal=True, num_layers=4, dtype=torch.float32) -> Denoiser:
    """Random weights everywhere: gates and head start at zero."""
    options = ModelOptions(num_layers=num_layers, width=16, num_heads=2, dropout=0.0)
    model = Denoiser(options, 9, is_causal=is_causal, encoding=encoding)
    draw = seeded(8)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=draw) * 0.7)
    return model.to(dtype).eval()


FRAMEWORKS: dict[str, Ordered] = {
    "arm": arm(6),
    "sigma": sigma_arm(torch.tensor([4, 2, 5, 0, 3, 1])),
    "any": any_order(),
}
ENCODINGS = ["source", "literal", "crossed"]
every_encoding = pytest.mark.parametrize("encoding", ENCODINGS)


@torch.no_grad()
def slot_logits(model, framework, x0, u, is_real=None) -> torch.Tensor:
    """[B, L, V] of all slots that are scored; nan elsewhere."""
    problem = framework.every_context(x0, u, mask_id=9, is_real_BL=is_real)
    out = torch.full((x0.numel(), 9), torch.nan)
    out[problem.rows_N] = problem.logits(model, CPU)
    return out.view(*x0.shape, 9)


@every_encoding
@pytest.mark.parametrize("name", FRAMEWORKS)
def test_a_future_token_never_changes_a_prediction_and_a_past_one_does(name, encoding):
    framework, model = FRAMEWORKS[name], awake(encoding)
    x0 = torch.randint(0, 9, (2, 6), generator=seeded(1))
    u = torch.rand(2, 6, generator=seeded(2), dtype=torch.float64)
    order = framework.orders(u).expand(2, -1)
    before = slot_logits(model, framework, x0, u)
    for r in range(6):
        other = x0.scatter(1, order[:, r : r + 1], (x0.gather(1, order[:, r : r + 1]) + 1) % 9)
        change = (slot_logits(model, framework, other, u) - before).abs().amax(-1)
        assert float(change[:, : r + 1].max()) < 1e-6
        assert r == 5 or float(change[:, r + 1 :].min()) > 1e-3


@every_encoding
def test_the_order_of_the_future_never_changes_a_prediction(encoding):
    model, framework = awake(encoding), any_order()
    x0 = torch.randint(0, 9, (1, 6), generator=seeded(1))
    u = torch.tensor([[0.3, 0.9, 0.1, 0.7, 0.2, 0.5]], dtype=torch.float64)
    other = u.clone()
    other[0, [1, 3]] = u[0, [3, 1]]  # the last two change places
    change = slot_logits(model, framework, x0, other) - slot_logits(model, framework, x0, u)
    assert float(change[:, :4].abs().max()) < 1e-6
    # the fifth slot is told another place to predict, unless it goes by source
    assert (float(change[:, 4].abs().max()) > 1e-3) == (encoding != "source")
    assert float(change[:, 5].abs().max()) > 1e-3


@every_encoding
@pytest.mark.parametrize("name", FRAMEWORKS)
def test_what_pads_hold_changes_nothing_and_a_padded_row_is_like_a_short_one(name, encoding):
    framework, model = FRAMEWORKS[name], awake(encoding)
    x0 = torch.randint(0, 9, (2, 6), generator=seeded(1))
    u = torch.rand(2, 6, generator=seeded(2), dtype=torch.float64)
    is_real = torch.arange(6) < torch.tensor([[4], [6]])
    before = slot_logits(model, framework, x0, u, is_real)
    other = torch.where(is_real, x0, 7)
    after = slot_logits(model, framework, other, u, is_real)
    assert torch.equal(before.nan_to_num(), after.nan_to_num())
    assert before[0].isnan().any(-1).tolist() == [False] * 4 + [True] * 2
    short = slot_logits(model, framework, x0[:1, :4], u[:1, :4])
    torch.testing.assert_close(before[:1, :4], short, rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_what_is_under_a_mask_changes_nothing_but_its_target():
    model = awake(is_causal=False)
    x0 = torch.randint(0, 9, (4, 6), generator=seeded(1))
    u = torch.rand(4, 6, generator=seeded(2), dtype=torch.float64)
    context = torch.tensor([0, 2, 3, 5])
    problem = Mdm().given(x0, context, u, mask_id=9)
    for row in problem.rows_N.tolist():
        other = x0.clone()
        other[row // 6, row % 6] = (other[row // 6, row % 6] + 1) % 9
        changed = Mdm().given(other, context, u, mask_id=9)
        assert torch.equal(changed.logits(model, CPU), problem.logits(model, CPU))
        same = changed.targets_N == problem.targets_N
        assert problem.rows_N[~same].tolist() == [row]
    visible = (problem.x_BL[1] != 9).nonzero()[0, 0]
    other = x0.clone()
    other[1, visible] = (other[1, visible] + 1) % 9
    change = Mdm().given(other, context, u, mask_id=9).logits(model, CPU)
    mine = problem.rows_N // 6 == 1
    assert float((change - problem.logits(model, CPU))[mine].abs().amax(-1).min()) > 1e-4


@torch.no_grad()
def test_a_mask_hides_in_addition_to_the_future():
    """Causal and told that slot 2 is hidden: nobody after it sees it, and nobody the future."""
    model = awake()
    x = torch.randint(0, 9, (1, 6), generator=seeded(1))
    mask = (torch.arange(6) != 2)[None, None, None]
    before = model(x, torch.arange(6), mask=mask)
    for slot in range(6):
        other = x.clone()
        other[0, slot] = (other[0, slot] + 1) % 9
        change = (model(other, torch.arange(6), mask=mask) - before).abs().amax(-1)
        assert float(change[:slot].sum()) < 1e-6
        assert (float(change[slot + 1 :].sum()) > 1e-3) == (slot not in (2, 5))


# positions: the real network against its plain formula


def turned(x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """RoPE by complex numbers; x [B, L, H, E], positions [B, L]."""
    half = x.shape[-1] // 2
    angle = positions[..., None, None].double() * 10000.0 ** (-torch.arange(half) / half)
    y = torch.complex(x[..., :half], x[..., half:]) * torch.polar(torch.ones_like(angle), angle)
    return torch.cat([y.real, y.imag], dim=-1)


def norm(x: torch.Tensor, weight: torch.Tensor, shift, scale) -> torch.Tensor:
    x = (x - x.mean(-1, keepdim=True)) / (x.var(-1, keepdim=True, correction=0) + 1e-5).sqrt()
    return x * weight * (1 + scale) + shift


def plain_logits(model: Denoiser, x_BL, source_BL, target_BL, encoding: str) -> torch.Tensor:
    """The causal backbone written out; layers after the first half go by the encoding."""
    h = model.embedding.weight[x_BL]
    batch, length = x_BL.shape
    past = torch.ones(length, length).tril().bool()
    first_half = len(model.blocks) // 2
    for number, block in enumerate(model.blocks):
        by = {"source": (source_BL, source_BL), "literal": (target_BL, target_BL)}
        by["crossed"] = (target_BL, source_BL)
        query_at, key_at = by["source" if number < first_half else encoding]
        shift_a, scale_a, gate_a, shift_m, scale_m, gate_m = block.modulation.vectors
        z = norm(h, block.attention_norm.weight, shift_a, scale_a) @ block.qkv.weight.T
        q, k, v = (part.view(batch, length, 2, 8) for part in z.chunk(3, dim=-1))
        score = torch.einsum("bqhe,bkhe->bhqk", turned(q, query_at), turned(k, key_at)) / 8**0.5
        weight = score.masked_fill(~past, -torch.inf).softmax(-1)
        seen = torch.einsum("bhqk,bkhe->bqhe", weight, v).flatten(2)
        h = h + gate_a * (seen @ block.attention_out.weight.T)
        z = norm(h, block.mlp_norm.weight, shift_m, scale_m)
        z = torch.nn.functional.gelu(
            z @ block.mlp_in.weight.T + block.mlp_in.bias, approximate="tanh"
        )
        h = h + gate_m * (z @ block.mlp_out.weight.T + block.mlp_out.bias)
    h = norm(h, model.final_norm.weight, *model.final_modulation.vectors)
    return h @ model.head.weight.T + model.head.bias


@torch.no_grad()
@pytest.mark.parametrize("num_layers", [1, 2, 3, 4, 5])
@every_encoding
def test_the_network_is_its_plain_formula_with_positions_of_source_and_target(encoding, num_layers):
    model = awake(encoding, num_layers=num_layers, dtype=torch.float64)
    x0 = torch.randint(0, 9, (3, 6), generator=seeded(1))
    u = torch.rand(3, 6, generator=seeded(2), dtype=torch.float64)
    problem = any_order().every_context(x0, u, mask_id=9)
    expected = plain_logits(
        model, problem.x_BL, problem.positions, problem.target_positions, encoding
    )
    found = problem.logits(model, CPU).view(3, 6, 9)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@torch.no_grad()
def encoded(encoding: str, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    x = torch.tensor([[9, 3, 1, 4, 1, 5]])
    model = awake(encoding, dtype=torch.float64)
    return model(x, torch.arange(6), positions=source, target_positions=target)


SOURCE, TARGET = torch.tensor([0, 5, 2, 6, 1, 4]), torch.tensor([5, 2, 6, 1, 4, 3])


def test_the_encodings_differ():
    found = [encoded(encoding, SOURCE, TARGET) for encoding in ENCODINGS]
    for a, b in itertools.combinations(found, 2):
        assert float((a - b)[1:].abs().amax(-1).min()) > 1e-3


@pytest.mark.parametrize(
    ("encoding", "targets_matter", "distance_matters"),
    [("source", False, False), ("literal", True, False), ("crossed", True, True)],
)
def test_which_positions_matter(encoding, targets_matter, distance_matters):
    """Moving everything never matters. Moving all targets against the sources does only where a
    score is of a target against a source.
    """
    before = encoded(encoding, SOURCE, TARGET)

    def change(source, target) -> float:
        return float((encoded(encoding, source, target) - before).abs().max())

    assert change(SOURCE + 7, TARGET + 7) < 1e-4
    assert (change(SOURCE, TARGET.flip(0)) > 1e-2) == targets_matter
    assert (change(SOURCE, TARGET + 7) > 1e-2) == distance_matters
    assert change(SOURCE.flip(0), TARGET) > 1e-2
    if not targets_matter:
        assert change(SOURCE, TARGET.flip(0)) == 0


def test_an_encoding_by_targets_needs_them():
    x = torch.tensor([[9, 3, 1]])
    for encoding in ("literal", "crossed"):
        with pytest.raises(ValueError, match="needs their positions"):
            awake(encoding)(x, torch.arange(3))
    assert awake("source")(x, torch.arange(3)).shape == (3, 9)
