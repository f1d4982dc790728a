"""Evaluation of every framework: exact sums, next-token cross-entropies by hand, honest errors."""

from __future__ import annotations

import itertools
import math
import random
from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from sampling_tools import awake, seeded
from scipy import integrate
from toy_tools import blocks_of, toy_rows

from bellmask.data.blocks import Blocks
from bellmask.data.toys import ExactDenoiser, ToySource
from bellmask.diffusion.frameworks import Mdm, any_order, arm, sigma_arm
from bellmask.diffusion.schedules import Cosine, Linear
from bellmask.evaluate.likelihood import BlockScorer, evaluate
from bellmask.utils.rng import stream_key, uniform_rows
from bellmask.utils.stats import collapsed_strata_error

V, L = 2, 4
MASK = 2
ORDERS = list(itertools.permutations(range(L)))


DATA = [(0, 1, 1, 0), (1, 1, 0, 1), (0, 0, 1, 1), (0, 1, 1, 0), (1, 0, 0, 0), (1, 1, 1, 0)]
"""Any six rows: the expectations below are over masks and orders alone."""


# models by their answers, and sums over all contexts in plain Python


def wrong(seen, place, t):
    """p of the token 1: anything, but the same for the same set of observed tokens."""
    return random.Random(repr((sorted(seen), place))).uniform(0.1, 0.9)


def wrong_by_order(seen, place, t):
    """Much surer of a 1 when tokens did not come from left to right."""
    return wrong(seen, place, t) if list(seen) == sorted(seen) else 0.99


def wrong_by_time(seen, place, t):
    return wrong(seen, place, t) ** (0.2 + 3 * float(t))


def cross_entropy(answer, row, seen_places, place, t=None):
    p = answer([(i, row[i]) for i in seen_places], place, t)
    return -math.log(p if row[place] else 1 - p)


class Asked:
    """Called as the network is, by ``answer(seen, place, t)`` = p(token 1)."""

    def __init__(self, answer):
        self.answer = answer

    def __call__(self, x_BL, rows_N, targets_N, *, t_B=None, reduce=True, **more):
        positions, target_positions = more.get("positions"), more.get("target_positions")
        assert not reduce
        assert (t_B is None) == (positions is not None)
        found = []
        for row, target in zip(rows_N.tolist(), targets_N.tolist()):
            b, slot = divmod(row, x_BL.shape[1])
            x = x_BL[b].tolist()
            if positions is None:
                seen = [(i, v) for i, v in enumerate(x) if v != MASK]
                p = self.answer(seen, slot, float(t_B[b]))
            else:
                held = positions.expand_as(x_BL)[b].tolist()
                seen = [(held[s] - 1, x[s]) for s in range(1, slot + 1)]
                p = self.answer(seen, int(target_positions.expand_as(x_BL)[b, slot]) - 1, None)
            found.append(-math.log(p if target else 1 - p))
        return torch.tensor(found, dtype=torch.float64)


def in_order(answer, order, row):
    return [cross_entropy(answer, row, order[:r], order[r]) for r in range(L)]


def over_orders(answer):
    return float(np.mean([in_order(answer, order, row) for order in ORDERS for row in DATA]))


def over_masks(answer):
    total = 0.0
    for row, n in itertools.product(DATA, range(1, L + 1)):
        masks = list(itertools.combinations(range(L), n))
        for mask in masks:
            seen = [i for i in range(L) if i not in mask]
            total += np.mean([cross_entropy(answer, row, seen, i) for i in mask]) / len(masks)
    return total / L / len(DATA)


def over_time(answer, alpha, slope):
    """Eq. loss_mdlm per token, by quadrature."""
    masks = [m for n in range(1, L + 1) for m in itertools.combinations(range(L), n)]

    def integrand(t: float):
        total = 0.0
        for row, mask in itertools.product(DATA, masks):
            seen = [i for i in range(L) if i not in mask]
            share = (1 - alpha(t)) ** len(mask) * alpha(t) ** (L - len(mask))
            total += share * sum(cross_entropy(answer, row, seen, i, t) for i in mask)
        return -slope(t) / (1 - alpha(t)) * total

    whole = integrate.quad(integrand, 0, 1, epsabs=1e-6, epsrel=1e-6, limit=10)[0]
    return whole / L / len(DATA)


def over_seeds(answer, framework, draws=2, seeds=50):
    """Mean NLL over evaluations with other masks or orders, and its standard error."""
    options = {"mask_id": MASK, "framework": framework, "draws": draws}
    found = [evaluate(Asked(answer), blocks_of(DATA), **options, seed=s).nll for s in range(seeds)]
    return float(np.mean(found)), float(np.std(found, ddof=1)) / math.sqrt(seeds)


# the value


@pytest.mark.parametrize("answer", [wrong, wrong_by_order])
@pytest.mark.parametrize("order", [(0, 1, 2, 3), *ORDERS[5::9]])
def test_a_fixed_order_is_scored_exactly_whatever_draws_and_seed(order, answer):
    truth = [in_order(answer, order, row) for row in DATA]
    framework = sigma_arm(torch.tensor(order)) if order != (0, 1, 2, 3) else arm(L)
    for draws, seed in ((1, 0), (3, 7)):
        options = {"framework": framework, "draws": draws, "seed": seed, "batch_size": 4}
        result = evaluate(Asked(answer), blocks_of(DATA), mask_id=MASK, **options)
        np.testing.assert_allclose(result.ce_BR, truth, atol=1e-12)
        assert result.nll == pytest.approx(np.mean(truth), abs=1e-12)
        assert (result.is_causal, result.is_exact, result.num_draws) == (True, True, 1)
        assert result.count_BR.tolist() == [[4, 3, 2, 1]] * len(DATA)


def test_random_orders_and_masks_have_one_expectation_for_a_model_blind_to_order():
    truth = over_orders(wrong)
    assert truth == pytest.approx(over_masks(wrong), abs=1e-12)
    for framework in (any_order(), Mdm()):
        for draws in (1, 3):
            mean, error = over_seeds(wrong, framework, draws)
            assert abs(mean - truth) < 4 * error
            assert error < 0.03 * truth


@pytest.mark.parametrize(
    ("schedule", "alpha", "slope"),
    [
        (Linear(), lambda t: 1 - t, lambda t: -1.0),
        (
            Cosine(),
            lambda t: 1 - math.cos(math.pi / 2 * (1 - t)),
            lambda t: -math.pi / 2 * math.sin(math.pi / 2 * (1 - t)),
        ),
    ],
    ids=["linear", "cosine"],
)
def test_a_model_that_is_told_the_time_is_scored_by_the_integral(schedule, alpha, slope):
    """Lemma 1 (Zheng et al.): exact counts with a time drawn for each are the NELBO over t."""
    truth = over_time(wrong_by_time, alpha, slope)
    mean, error = over_seeds(wrong_by_time, Mdm(schedule), draws=4)
    assert abs(mean - truth) < 4 * error
    assert error < 0.02 * truth
    other_schedule = Cosine() if schedule == Linear() else Linear()
    other = over_seeds(wrong_by_time, Mdm(other_schedule), draws=4, seeds=30)
    assert abs(other[0] - truth) > 4 * other[1]


# the real network


network = partial(awake, num_tokens=9, is_causal=True)
LENGTHS = [7, 3, 1, 7, 5, 2, 6, 4]
TEXT = torch.randint(0, 9, (8, 7), generator=seeded(4)).tolist()


@torch.no_grad()
def next_token_losses(model, row, order):
    """Ordinary language modeling: start token first, shift by one, one row at a time."""
    tokens = [row[i] for i in order]
    logits = model(
        torch.tensor([[9, *tokens[:-1]]]),
        torch.arange(len(order)),
        positions=torch.tensor([0, *(i + 1 for i in order[:-1])]),
        target_positions=torch.tensor([i + 1 for i in order]),
    )
    return F.cross_entropy(logits, torch.tensor(tokens), reduction="none").tolist()


@pytest.mark.parametrize(
    ("framework", "encoding"),
    [("arm", "source"), ("any", "source"), ("any", "literal"), ("any", "crossed")],
)
def test_next_token_cross_entropy_in_the_order_of_the_framework(framework, encoding):
    """Row by row, without pads: left to right, or in the order of the row's uniform numbers."""
    model, is_arm = network(encoding=encoding), framework == "arm"
    result = evaluate(
        model,
        blocks_of(TEXT, LENGTHS),
        mask_id=9,
        framework=arm(7) if is_arm else any_order(),
        draws=2,
        seed=5,
        batch_size=3,
    )
    draws, totals = 1 if is_arm else 2, np.zeros(8)
    for draw in range(draws):
        u = uniform_rows(stream_key(5, "evaluation masks", draw), torch.arange(8), 7)
        for b, n in enumerate(LENGTHS):
            order = list(range(n)) if is_arm else u[b, :n].argsort().tolist()
            truth = next_token_losses(model, TEXT[b], order)
            totals[b] += sum(truth) / draws
            np.testing.assert_allclose(result.ce_BR[b, 7 * draw :][:n], truth, atol=1e-5)
    counts = [[max(0, n - context) for context in range(7)] * draws for n in LENGTHS]
    assert result.count_BR.tolist() == counts
    assert (result.num_draws, result.is_exact) == (draws, is_arm)
    assert result.nll == pytest.approx(totals.sum() / sum(LENGTHS), abs=1e-6)
    np.testing.assert_allclose(result.block_nll, totals / LENGTHS, atol=1e-6)


# its error


def test_what_other_orders_would_change_is_the_spread_over_orders():
    blocks, options = blocks_of(TEXT, LENGTHS), {"mask_id": 9, "framework": any_order()}
    result = evaluate(network(), blocks, **options, draws=4)
    for b, n in enumerate(LENGTHS):
        value = [result.ce_BR[b, 7 * d : 7 * d + n].mean() for d in range(4)]
        assert result.draw_errors[b] == pytest.approx(np.std(value, ddof=1) / 2, abs=1e-12)
    assert np.isnan(evaluate(network(), blocks, **options, draws=1).draw_errors).all()
    exact = evaluate(network(), blocks, mask_id=9, framework=arm(7), draws=4)
    assert exact.draw_errors.tolist() == [0.0] * 8


CHAIN = ToySource.sticky(3, 8, stay=0.8)


def scored(blocks: Blocks, framework, draws: int, seed: int):
    model = ExactDenoiser(CHAIN, is_causal=framework.is_causal)
    return evaluate(model, blocks, mask_id=3, framework=framework, draws=draws, seed=seed)


@pytest.mark.parametrize("draws", [1, 4])
def test_the_error_of_a_paired_difference_is_its_spread(draws):
    """Perfect models of the same chain: the true difference is zero, of fresh data every time."""
    found = []
    for seed in range(100):
        blocks = toy_rows(CHAIN, 48, seeded(5000 + seed))
        ordered = scored(blocks, arm(8), draws, seed)
        masked = scored(blocks, Mdm(), draws, seed)
        gap, error = ordered.difference(masked)
        assert masked.difference(ordered) == pytest.approx((-gap, error), abs=1e-12)
        found.append((gap, error, ordered.standard_error, masked.standard_error, ordered.nll))
    gap, error, ordered_error, masked_error, nll = np.array(found).T
    spread = gap.std(ddof=1)
    assert abs(gap.mean()) < 4 * spread / math.sqrt(len(gap))
    assert error.mean() == pytest.approx(spread, rel=0.15)
    assert 0.9 < np.mean(np.abs(gap) < 1.96 * error) < 0.99
    assert ordered_error.mean() == pytest.approx(nll.std(ddof=1), rel=0.15)
    assert abs(nll.mean() - CHAIN.entropy / 8) < 4 * nll.std(ddof=1) / math.sqrt(len(nll))
    if draws > 1:  # as if unpaired it would be too wide
        assert np.hypot(ordered_error, masked_error).mean() > 1.2 * spread


def test_what_can_be_paired():
    blocks, others = toy_rows(CHAIN, 40, seeded(1)), toy_rows(CHAIN, 40, seeded(2))
    ordered, masked = scored(blocks, arm(8), 1, 0), scored(blocks, Mdm(), 1, 0)
    random_order = scored(blocks, any_order(), 3, 0)
    for other in (masked, random_order, scored(blocks, Mdm(), 4, 0)):
        assert ordered.is_paired_with(other)
    strata = collapsed_strata_error(ordered.block_nll - masked.block_nll, masked.level_B)
    assert ordered.difference(masked)[1] == pytest.approx(strata)
    for other in (scored(others, arm(8), 1, 0), scored(blocks, arm(8), 1, 1)):
        assert not ordered.is_paired_with(other)
        with pytest.raises(ValueError, match="same blocks"):
            ordered.difference(other)
    assert not masked.is_paired_with(scored(blocks, Mdm(), 4, 0))


# by context count


def test_the_scorer_gives_the_same_at_a_context_count_as_at_all_of_them():
    blocks, index = blocks_of(TEXT, LENGTHS), torch.arange(8)
    for framework in (arm(7), sigma_arm(torch.tensor([6, 2, 0, 5, 1, 3, 4])), any_order()):
        scorer = BlockScorer(network(), blocks, 9, framework)
        whole = scorer.by_context(index, key=77)
        is_real = torch.arange(7) < torch.tensor(LENGTHS)[:, None]
        assert bool((whole[~is_real] == 0).all())
        for context in range(7):
            long = (torch.tensor(LENGTHS) > context).nonzero().squeeze(1)
            one = scorer.mean(long, torch.full_like(long, context), key=77)
            torch.testing.assert_close(one, whole[long, context], rtol=1e-5, atol=1e-6)
