"""Contexts and targets of every framework against sums over all rows, orders and masks."""

import itertools
import math
import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from sampling_tools import awake, seeded
from scipy import integrate, stats

from bellmask.config.options import FrameworkOptions
from bellmask.config.presets import tiny
from bellmask.diffusion.frameworks import Mdm, any_order, arm, shifted_arm, sigma_arm
from bellmask.diffusion.objectives import Nelbo
from bellmask.diffusion.schedules import Cosine, Linear
from bellmask.storage.build import build_framework
from bellmask.train.planning import Microbatch
from bellmask.train.step import microbatch_loss
from bellmask.utils.rng import stream_key, uniform_rows

CPU = torch.device("cpu")
V, L = 3, 3
MASK, PAD = 3, 2
ROWS = list(itertools.product(range(V), repeat=L))
ORDERS = list(itertools.permutations(range(L)))
ALL_MASKS = [m for n in range(1, L + 1) for m in itertools.combinations(range(L), n)]


def rand(*shape, seed=3):
    return torch.rand(*shape, generator=seeded(seed), dtype=torch.float64)


# a joint table and models by their answers, in plain Python


def drawn(*name):
    """Positive numbers that add up to one, others for every name."""
    draw = random.Random(repr(name))
    weight = [draw.uniform(0.05, 1) for _ in range(V)]
    return [w / sum(weight) for w in weight]


JOINT = {row: drawn("joint", row)[0] for row in ROWS}
JOINT = {row: p / sum(JOINT.values()) for row, p in JOINT.items()}
"""No chain: every row has a probability of its own."""


def true(seen, place, t):
    """p(x at the place | what is seen), from the table of rows."""
    fits = [row for row in ROWS if all(row[i] == v for i, v in seen)]
    weight = [sum(JOINT[row] for row in fits if row[place] == v) for v in range(V)]
    return [w / sum(weight) for w in weight]


def wrong(seen, place, t):
    """Anything, but the same for the same set of observed tokens."""
    return drawn("wrong", sorted(seen), place)


def wrong_by_order(seen, place, t):
    """The truth from left to right, and something else for every other order."""
    in_order = list(seen) == sorted(seen)
    return true(seen, place, t) if in_order else drawn("by order", list(seen), place)


def wrong_by_time(seen, place, t):
    """Surer of itself the later it is."""
    weight = [p ** (0.2 + 2 * float(t)) for p in wrong(seen, place, t)]
    return [w / sum(weight) for w in weight]


each_answer = pytest.mark.parametrize("answer", [true, wrong, wrong_by_order])


class Asked:
    """A model called as the package's own, by ``answer(seen, place, t)``; places from 0.

    ``seen`` are (place, token) pairs in the order of the slots.
    """

    def __init__(self, answer):
        self.answer = answer

    def __call__(self, x_BL, rows_N, targets_N, *, weight_N=None, t_B=None, reduce=True, **more):
        length, found = x_BL.shape[1], []
        mask, positions = more.get("mask"), more.get("positions")
        for row, target in zip(rows_N.tolist(), targets_N.tolist()):
            b, slot = divmod(row, length)
            x = x_BL[b].tolist()
            if positions is None:
                visible = [True] * length if mask is None else mask[b, 0, 0].tolist()
                seen = [(i, v) for i, v in enumerate(x) if v != MASK and visible[i]]
                place, t = slot, None if t_B is None else t_B[b]
            else:
                assert mask is None
                held = positions.expand(x_BL.shape)[b].tolist()
                seen = [(held[s] - 1, x[s]) for s in range(1, slot + 1)]
                place, t = int(more["target_positions"].expand(x_BL.shape)[b, slot]) - 1, None
                assert (x[0], held[0]) == (MASK, 0)
            found.append(-math.log(self.answer(seen, place, t)[target]))
        ce_N = torch.tensor(found, dtype=torch.float64)
        if not reduce:
            return ce_N
        return (ce_N if weight_N is None else ce_N * weight_N).sum()


def surprise(answer, row, seen_places, place, t=None):
    """-log q of the row's own token at a place."""
    return -math.log(answer([(i, row[i]) for i in seen_places], place, t)[row[place]])


def loss_in_order(answer, order):
    """Sum over rows and r of p(x) [-log q(x at s_r | x at s_<r)]: Eq. loss_ARM for (0, 1, 2)."""
    return sum(
        p * surprise(answer, row, order[:r], order[r]) for row, p in JOINT.items() for r in range(L)
    )


def loss_of_all_orders(answer):
    """Eq. loss_aogpt."""
    return sum(loss_in_order(answer, order) for order in ORDERS) / len(ORDERS)


def loss_of_masks(answer, context):
    """L^{N_c} of MDM: all rows, all masks of L - N_c tokens, all masked targets, all alike."""
    total, masks = 0.0, [m for m in ALL_MASKS if len(m) == L - context]
    for (row, p), mask in itertools.product(JOINT.items(), masks):
        seen = [i for i in range(L) if i not in mask]
        ce = [surprise(answer, row, seen, i) for i in mask]
        total += p * sum(ce) / len(ce) / len(masks)
    return total


def loss_over_time(answer, alpha, slope):
    """Eq. loss_mdlm by quadrature over t, for a model that is told the time."""

    def integrand(t):
        total = 0.0
        for (row, p), mask in itertools.product(JOINT.items(), ALL_MASKS):
            seen = [i for i in range(L) if i not in mask]
            share = (1 - alpha(t)) ** len(mask) * alpha(t) ** (L - len(mask))
            total += p * share * sum(surprise(answer, row, seen, i, t) for i in mask)
        return -slope(t) / (1 - alpha(t)) * total

    return integrate.quad(integrand, 0, 1, epsabs=1e-6, epsrel=1e-6, limit=20)[0]


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
NOW = torch.zeros(len(ROWS))


def asked_loss(problem, answer):
    """The expectation over the joint table of the summed cross-entropies of a problem on X0."""
    ce_N = problem.ask(Asked(answer), CPU, reduce=False)
    return float((ce_N * P[problem.rows_N // L]).sum())


def uniforms_for(order):
    """Uniform numbers that put the positions in this order."""
    u = torch.empty(len(ROWS), L, dtype=torch.float64)
    u[:, list(order)] = (torch.arange(L, dtype=torch.float64) + 0.5) / L
    return u


@each_answer
def test_a_fixed_order_is_the_chain_rule(answer):
    for order in ORDERS:
        problem = sigma_arm(torch.tensor(order)).training(X0, NOW, rand(len(ROWS), L), mask_id=MASK)
        expected = loss_in_order(answer, order)
        assert asked_loss(problem, answer) == pytest.approx(expected, abs=1e-12)


@each_answer
def test_left_to_right_is_the_first_of_the_orders(answer):
    problem = arm(L).training(X0, NOW, rand(len(ROWS), L), mask_id=MASK)
    expected = loss_in_order(answer, (0, 1, 2))
    assert asked_loss(problem, answer) == pytest.approx(expected, abs=1e-12)
    other = [loss_in_order(wrong, order) - loss_in_order(wrong, (0, 1, 2)) for order in ORDERS[1:]]
    assert min(map(abs, other)) > 1e-3


@each_answer
def test_any_order_is_the_mean_over_all_orders(answer):
    problems = [any_order().training(X0, NOW, uniforms_for(o), mask_id=MASK) for o in ORDERS]
    losses = [asked_loss(problem, answer) for problem in problems]
    np.testing.assert_allclose(losses, [loss_in_order(answer, o) for o in ORDERS], atol=1e-12)
    assert np.mean(losses) == pytest.approx(loss_of_all_orders(answer), abs=1e-12)


@pytest.mark.parametrize("answer", [true, wrong])
@pytest.mark.parametrize("context", range(L))
def test_masks_of_a_given_size_are_the_exhaustive_sum(context, answer):
    """Every order of the uniform numbers once: every mask equally often."""
    losses, count = [], torch.full((len(ROWS),), context)
    for order in ORDERS:
        problem = Mdm().given(X0, count, uniforms_for(order), mask_id=MASK)
        assert problem.context_N.tolist() == [context] * (L - context) * len(ROWS)
        losses.append(asked_loss(problem, answer) / (L - context))
    assert np.mean(losses) == pytest.approx(loss_of_masks(answer, context), abs=1e-12)


@each_answer
@pytest.mark.parametrize("context", range(L))
def test_ordered_contexts_of_a_given_size_are_those_of_the_sum(context, answer):
    """``given`` is the term N_c of ``training``."""
    count = torch.full((len(ROWS),), context)
    for order in ORDERS:
        expected = sum(
            p * surprise(answer, row, order[:context], order[context]) for row, p in JOINT.items()
        )
        for framework in (sigma_arm(torch.tensor(order)), any_order()):
            problem = framework.given(X0, count, uniforms_for(order), mask_id=MASK)
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
        assert truth == pytest.approx(masks, abs=1e-4)
    objective, losses = Nelbo(schedule=alphas), []
    for step in range(60):
        strata = torch.randperm(54, generator=seeded(step)).double()
        t_B = objective.times((strata + rand(54, seed=99 + step)) / 54)
        u_BL = rand(54, L, seed=999 + step)
        problem = Mdm(alphas).training(X0.repeat(2, 1), t_B, u_BL, mask_id=MASK)
        ce_N, owner = problem.ask(Asked(answer), CPU, reduce=False), problem.rows_N // L
        losses.append(float((objective.weight(t_B)[owner] * P.repeat(2)[owner] * ce_N).sum()) / 2)
    error = np.std(losses, ddof=1) / math.sqrt(len(losses))
    assert abs(np.mean(losses) - truth) < 4 * error
    assert error < 0.05 * truth


def test_a_microbatch_is_the_sum_over_its_real_tokens():
    """The loss of training as the trainer asks for it, with pads, for both kinds of framework."""
    x0 = torch.tensor([[0, 1, 2], [1, 1, PAD], [2, PAD, PAD]])
    real = torch.arange(3) < torch.tensor([[3], [2], [1]])
    u = torch.tensor([[0.7, 0.1, 0.4], [0.9, 0.2, 0.0], [0.3, 0.1, 0.2]], dtype=torch.float64)
    t = torch.full((3,), 0.5, dtype=torch.float64)
    ordered = [(arm(3), [(0, 1, 2), (0, 1), (0,)]), (any_order(), [(1, 2, 0), (1, 0), (0,)])]
    for framework, orders in ordered:
        expected = sum(
            surprise(wrong, row, order[:r], order[r])
            for row, order in zip(x0.tolist(), orders)
            for r in range(len(order))
        )
        batch = Microbatch(0, x0, u, t, real, weight_B=torch.full((3,), 2.0))
        found = microbatch_loss(Asked(wrong), batch, framework, MASK, CPU)
        assert float(found[0]) == pytest.approx(2 * expected, rel=1e-12)
        assert found[1] == 6
    expected = sum(
        surprise(wrong, x0[b].tolist(), [j for j in range(3 - b) if j not in mask], i)
        for b, mask in [(0, (1, 2)), (1, (1,)), (2, (0,))]
        for i in mask
    )
    batch = Microbatch(0, x0, u, t, real, weight_B=torch.full((3,), 2.0))
    found = microbatch_loss(Asked(wrong), batch, Mdm(), MASK, CPU)
    assert float(found[0]) == pytest.approx(2 * expected, rel=1e-12)
    assert found[1] == 4


# orders


def sigma(order_seed, train_seed=1, length=64, width=64):
    start = tiny()
    config = replace(
        start,
        framework=FrameworkOptions("sigma_arm", order_seed=order_seed),
        train=replace(start.train, seed=train_seed),
        model=replace(start.model, width=width),
        data=replace(start.data, block_length=length),
    )
    framework = build_framework(config)
    one, other = (framework.orders(rand(5, length, seed=s)).expand(5, -1).tolist() for s in (1, 2))
    assert one == other == [one[0]] * 5, "the same for all rows"
    assert sorted(one[0]) == list(range(length))
    assert framework.is_exact
    assert framework.is_causal
    return tuple(one[0])


def test_sigma_depends_on_its_seed_alone_which_is_by_default_that_of_training():
    assert sigma(3, train_seed=1) == sigma(3, train_seed=2, width=32)
    assert sigma(None, train_seed=3) == sigma(3)
    assert sigma(0, train_seed=5) == sigma(None, train_seed=0)
    assert len({sigma(seed) for seed in range(30)} | {tuple(range(64))}) == 31
    assert sigma(3, length=1) == (0,)


@pytest.mark.parametrize("length", [3, 4])
def test_random_orders_are_uniform_over_all_of_them(length):
    everything = list(itertools.permutations(range(length)))
    rows = 400 * len(everything)
    u = uniform_rows(stream_key(1, "masks", 0), torch.arange(rows), length)
    problem = any_order().every_context(torch.zeros(rows, length).long(), u, mask_id=MASK)
    counts = dict.fromkeys(everything, 0)
    for order in (problem.target_positions.expand_as(problem.x_BL) - 1).tolist():
        counts[tuple(order)] += 1
    assert stats.chisquare(list(counts.values())).pvalue > 1e-3


def test_the_frameworks_say_what_they_are():
    kinds = [(f.is_causal, f.is_exact) for f in (Mdm(), arm(3), any_order(), shifted_arm(3))]
    assert kinds == [(False, False), (True, True), (True, False), (True, True)]


# padding


LENGTHS = torch.tensor([5, 1, 3, 4, 2])
IS_REAL = torch.arange(5) < LENGTHS[:, None]
PADDED = torch.where(IS_REAL, 10 * torch.arange(1, 6)[:, None] + torch.arange(5), -1)
"""Row b holds 10 (b + 1), 10 (b + 1) + 1, ...; pads are -1."""
FIVE = {"arm": arm(5), "sigma": sigma_arm(torch.tensor([3, 1, 4, 0, 2])), "any": any_order()}


@pytest.mark.parametrize("framework", FIVE.values(), ids=FIVE)
def test_pads_come_last_and_no_scored_slot_sees_one(framework):
    for seed in range(20):
        u = rand(5, 5, seed=seed)
        problem = framework.every_context(PADDED, u, mask_id=MASK, is_real_BL=IS_REAL)
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


@pytest.mark.parametrize("framework", [Mdm(), *FIVE.values()], ids=["mdm", *FIVE])
def test_given_contexts_have_the_size_that_is_asked_for_row_by_row(framework):
    context, given = torch.tensor([2, 0, 2, 1, 0]), {"mask_id": MASK, "is_real_BL": IS_REAL}
    problem = framework.given(PADDED, context, rand(5, 5), **given)
    owner = problem.rows_N // 5
    assert problem.context_N.tolist() == context[owner].tolist()
    asked = owner.bincount(minlength=5).tolist()
    if framework.is_causal:
        assert asked == [1] * 5
        assert (problem.rows_N % 5).tolist() == context.tolist()
    else:
        assert asked == (LENGTHS - context).tolist()
        visible = (problem.x_BL != MASK) & IS_REAL
        assert visible.sum(1).tolist() == context.tolist()
    assert set(problem.targets_N.tolist()) <= set(PADDED[IS_REAL].tolist())
    # a context as large as the row asks nothing
    assert len(framework.given(PADDED, LENGTHS, rand(5, 5), **given).rows_N) == 0


def test_shorter_rows_keep_the_order_of_their_positions():
    """sigma = 3 1 4 0 2 of five: of the first four positions 3 1 0 2, of the first two 1 0."""
    for length, expected in ((5, [3, 1, 4, 0, 2]), (4, [3, 1, 0, 2]), (2, [1, 0]), (1, [0])):
        x0, u = torch.arange(length)[None] + 10, torch.zeros(1, length).double()
        found = FIVE["sigma"].every_context(x0, u, mask_id=MASK)
        assert found.targets_N.tolist() == [10 + i for i in expected]
        left = FIVE["arm"].every_context(x0, u, mask_id=MASK)
        assert left.targets_N.tolist() == list(range(10, 10 + length))


def test_a_shifted_model_is_asked_for_all_but_the_first_token_as_it_stands():
    for is_real in (IS_REAL, None):
        u = rand(5, 5)
        problem = shifted_arm(5).every_context(PADDED, u, mask_id=MASK, is_real_BL=is_real)
        rows = [(b, i) for b in range(5) for i in range(1, 5) if is_real is None or is_real[b, i]]
        assert [divmod(row, 5) for row in problem.rows_N.tolist()] == rows
        assert problem.targets_N.tolist() == [int(PADDED[b, i]) for b, i in rows]
        assert problem.context_N.tolist() == [i - 1 for _, i in rows]
        assert torch.equal(problem.x_BL, PADDED)
        assert problem.positions is None


def test_the_time_of_a_mask_is_one_at_which_exactly_these_tokens_are_masked():
    """u < 1 - alpha(t) decides in training: the largest masked u is that rate."""
    u, x0, context = rand(40, 6), torch.zeros(40, 6).long(), torch.arange(40) % 6
    for schedule, alpha, _ in SCHEDULES.values():
        problem = Mdm(schedule).given(x0, context, u, mask_id=MASK)
        for b in range(40):
            rate = 1 - alpha(float(problem.t_B[b]))
            is_masked = (problem.x_BL[b] == MASK).tolist()
            assert is_masked == (u[b] <= rate + 1e-9).tolist()
            assert rate == pytest.approx(float(u[b].sort().values[5 - context[b]]), abs=1e-9)


def test_noised_pads_are_masked_like_text_but_never_asked_for():
    """mdlm's rule; by default pads stay as they are."""
    u, t = rand(5, 5), torch.linspace(0.3, 0.9, 5, dtype=torch.float64)
    context, options = torch.tensor([2, 0, 1, 3, 1]), {"mask_id": MASK, "is_real_BL": IS_REAL}
    for noises_pads in (False, True):
        framework = Mdm(noises_pads=noises_pads)
        trained = framework.training(PADDED, t, u, **options)
        given = framework.given(PADDED, context, u, **options)
        ends = zip(u, LENGTHS.tolist(), context.tolist())
        rate = torch.stack([one[:n].sort().values[n - c - 1] for one, n, c in ends])
        for problem, is_hidden in ((trained, u < t[:, None]), (given, u <= rate[:, None])):
            meant = torch.where(is_hidden & (IS_REAL | noises_pads), MASK, PADDED)
            assert torch.equal(problem.x_BL, meant)
            asked = (is_hidden & IS_REAL).flatten().nonzero()[:, 0]
            assert problem.rows_N.tolist() == asked.tolist()
            seen = (~is_hidden & IS_REAL).sum(1)
            assert problem.context_N.tolist() == seen[problem.rows_N // 5].tolist()
        assert bool((trained.x_BL[~IS_REAL] == MASK).any()) == noises_pads


# who sees whom: the real network


SIX = {"arm": arm(6), "sigma": sigma_arm(torch.tensor([4, 2, 5, 0, 3, 1])), "any": any_order()}
ENCODINGS = ["source", "literal", "crossed"]


@torch.no_grad()
def slot_logits(model, framework, x0, u, is_real=None):
    """[B, L, V] of all slots that are scored; nan elsewhere."""
    problem = framework.every_context(x0, u, mask_id=9, is_real_BL=is_real)
    out = torch.full((x0.numel(), 9), torch.nan, dtype=torch.float64)
    out[problem.rows_N] = problem.logits(model, CPU)
    return out.view(*x0.shape, 9)


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("name", SIX)
def test_a_future_token_never_changes_a_prediction_and_a_past_one_does(name, encoding):
    framework = SIX[name]
    model = awake(4, 9, std=0.7, is_causal=True, encoding=encoding).double()
    x0, u = torch.randint(0, 9, (2, 6), generator=seeded(1)), rand(2, 6)
    order = framework.orders(u).expand(2, -1)
    before = slot_logits(model, framework, x0, u)
    for r in range(6):
        other = x0.scatter(1, order[:, r : r + 1], (x0.gather(1, order[:, r : r + 1]) + 1) % 9)
        change = (slot_logits(model, framework, other, u) - before).abs().amax(-1)
        assert float(change[:, : r + 1].max()) < 1e-9
        assert r == 5 or float(change[:, r + 1 :].min()) > 1e-3
    # what pads hold changes nothing, and a padded row is like a short one
    is_real = torch.arange(6) < torch.tensor([[4], [6]])
    padded = slot_logits(model, framework, x0, u, is_real)
    other = slot_logits(model, framework, torch.where(is_real, x0, 7), u, is_real)
    torch.testing.assert_close(padded, other, equal_nan=True)
    assert padded[0].isnan().any(-1).tolist() == [False] * 4 + [True] * 2
    torch.testing.assert_close(padded[:1, :4], slot_logits(model, framework, x0[:1, :4], u[:1, :4]))
