from __future__ import annotations

import itertools
import math
import threading
from dataclasses import replace

import numpy as np
import pytest
import torch
from pretrained_tools import Recorder
from torch import nn

from bellmask.config.options import ModelOptions, TrainOptions
from bellmask.data.blocks import Blocks, Row
from bellmask.diffusion.frameworks import Mdm
from bellmask.diffusion.laws import Dirac, TruncatedGaussian, TruncatedLaplace, Uniform
from bellmask.diffusion.objectives import Bell, Importance, Nelbo
from bellmask.diffusion.schedules import Cosine, MiddleFlat
from bellmask.model.transformer import Denoiser
from bellmask.storage.build import build_model, build_objective
from bellmask.train.planning import Recipe, StepPlanner
from bellmask.train.step import Prefetch, TrainStep, microbatch_loss
from bellmask.utils.distributed import World

WIDE = TruncatedGaussian(0.5, 0.3)
OBJECTIVES = [Nelbo(), Nelbo(law=WIDE), Nelbo(schedule=MiddleFlat(WIDE)), Nelbo(time_floor=1e-3)]
OBJECTIVES += [
    Bell(),
    Bell(Uniform()),
    Bell(Dirac(0.3)),
    Bell(TruncatedLaplace(0.4, 0.2), Cosine()),
]
OBJECTIVES += [
    Nelbo(schedule=Cosine(), time_floor=1e-2),
    Importance(),
    Importance(divide_by_t=True),
]


def blocks(count=40, length=12, is_padded=False):
    draw = np.random.default_rng(5)
    return Blocks.from_rows(
        Row(draw.integers(0, 9, length), int(draw.integers(3, length)) if is_padded else length, n)
        for n in range(count)
    )


def planner(world=None, is_padded=False, objective=None, **options):
    settings = replace(TrainOptions(batch_size=16, seed=4), **options)
    rows = blocks(is_padded=is_padded)
    return StepPlanner(rows, objective or Bell(), settings, world or World())


def train_step(model, plan, mask_id=9, clip=0.0):
    return TrainStep(model, plan, Mdm(plan.objective.schedule), mask_id=mask_id, clip=clip)


def small_model():
    return Denoiser(ModelOptions(num_layers=1, width=4, num_heads=1), 9)


def gather(plans, step):
    """x0, u, t and is_real of the whole global batch, from all ranks and microbatches."""
    parts = [m for p in plans for m in p(step).microbatches]
    names = ["x0_BL", "u_BL", "t_B", "is_real_BL"]
    return [torch.cat([getattr(m, name) for m in parts]) for name in names]


def test_batches_times_and_masks_do_not_depend_on_ranks_and_accumulation():
    """Maskable tokens are those before padding."""
    whole = [planner(is_padded=True)]
    accumulated = [planner(is_padded=True, microbatch_size=4)]
    ranks = [planner(World(r, 2), is_padded=True, microbatch_size=2) for r in range(2)]
    for step in (0, 1, 7):
        expected = gather(whole, step)
        for other in (accumulated, ranks):
            for a, e in zip(gather(other, step), expected, strict=True):
                assert torch.equal(a, e)
            assert other[0](step).num_maskable == int(expected[3].sum()) < 16 * 12
    assert planner()(0).microbatches[0].is_real_BL is None


def test_every_step_covers_all_strata_and_an_epoch_every_block_once():
    p = planner()
    levels = TruncatedGaussian().cdf(p.times(3)) * 16
    assert sorted(levels.floor().int().tolist()) == list(range(16))
    assert p.times(3).tolist() != sorted(p.times(3).tolist())
    rows = torch.cat([p.batches.rows(step) for step in range(5)])
    assert sorted(rows[:40].tolist()) == sorted(rows[40:80].tolist()) == list(range(40))
    assert rows[:40].tolist() != rows[40:80].tolist()


def test_random_lengths_cut_the_whole_step():
    p = planner(random_length_fraction=0.5)
    lengths = [p(s).microbatches[0].x0_BL.shape[1] for s in range(200)]
    assert 0.35 < np.mean([n < 12 for n in lengths]) < 0.6
    assert set(lengths) == set(range(1, 13))
    short = next(s for s in range(200) if lengths[s] < 12)
    assert p(short).num_maskable == 16 * lengths[short]
    full = planner()(short).microbatches[0]
    assert torch.equal(p(short).microbatches[0].u_BL, full.u_BL[:, : lengths[short]])


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_every_objective_has_the_same_scale(objective):
    """A model that predicts uniformly has cross-entropy log V at every context count, and the
    context weights of each objective sum to one: the expected loss is log V for all.
    """
    step = train_step(small_model(), planner(objective=objective, batch_size=256))
    losses = [step(s).loss for s in range(60)]
    error = np.std(losses, ddof=1) / math.sqrt(len(losses))
    assert abs(np.mean(losses) - math.log(9)) < max(4 * error, 1e-6)
    assert error < 0.05


def test_without_c_the_scale_is_mdlms():
    model, plan = small_model(), planner(batch_size=256)
    ours = train_step(model, plan)(0).loss
    plan.recipe = Recipe(divides_by_c=False)
    mdlm = train_step(model, plan)(0).loss
    assert mdlm == pytest.approx(ours / 2, rel=1e-9)


def test_gradient_of_a_step_is_the_gradient_of_the_formula(small_config):
    """Accumulated microbatches against one autograd pass over all logits, written out plainly."""
    config = small_config("--objective", "nelbo", "--law", "uniform")
    model = build_model(config, 9)
    torch.manual_seed(0)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    plan = planner(objective=build_objective(config), microbatch_size=4)
    result = train_step(model, plan)(2)
    found = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    total = torch.zeros(())
    for m in plan(2).microbatches:
        is_masked = m.u_BL < m.t_B[:, None]
        x = torch.where(is_masked, 9, m.x0_BL)
        log_p = (model.hidden(x) @ model.head.weight.T + model.head.bias).log_softmax(-1)
        ce = -log_p.gather(-1, m.x0_BL[..., None]).squeeze(-1)
        total = total + (ce * is_masked / m.t_B[:, None]).sum().float() / (16 * 12)
    total.backward()
    assert result.loss == pytest.approx(float(total.detach()), rel=1e-5)
    for a, p in zip(found, model.parameters(), strict=True):
        torch.testing.assert_close(a, p.grad, rtol=2e-4, atol=2e-5)
    norm = math.sqrt(sum(float(g.square().sum()) for g in found))
    assert result.gradient_norm == pytest.approx(norm, rel=1e-4)
    assert not result.is_clipped
    for clip in (norm / 2, norm * 2):
        model.zero_grad()
        assert train_step(model, plan, clip=clip)(2).is_clipped == (clip < norm)
        left = math.sqrt(sum(float(p.grad.square().sum()) for p in model.parameters()))
        assert left == pytest.approx(min(clip, norm), rel=1e-4)


def test_what_is_under_a_mask_changes_nothing_but_its_target():
    """Same times and masks, other tokens under the masks: the network's input is the same."""
    recorder = Recorder()
    batch = planner()(0).microbatches[0]
    is_masked = batch.u_BL < batch.t_B[:, None]
    other = replace(batch, x0_BL=torch.where(is_masked, (batch.x0_BL + 1) % 9, batch.x0_BL))
    for b in (batch, other):
        microbatch_loss(recorder, b, Mdm(), 9, torch.device("cpu"))
    (x, _, targets), (other_x, _, other_targets) = recorder.calls
    assert torch.equal(x, other_x)
    assert not torch.equal(targets, other_targets)


def test_a_non_finite_loss_is_seen_and_its_first_place_named():
    model = small_model()
    with torch.no_grad():
        model.blocks[0].mlp_out.bias[0] = torch.nan
        model.blocks[0].modulation.vectors += 1
        model.head.weight += 1
    step = train_step(model, planner(), clip=1)
    result = step(5)
    assert math.isnan(result.loss)
    assert not result.is_finite
    assert step.first_bad().endswith("weight that is not finite: blocks.0.mlp_out.bias")
    with torch.no_grad():
        model.blocks[0].mlp_out.bias[0] = 0
    assert "gradient that is not finite: " in step.first_bad()
    model.zero_grad()
    assert step(5).is_finite
    assert step.first_bad() == ""


def test_prefetching_gives_the_same_plans_and_errors_and_begins_early():
    has_begun = {step: threading.Event() for step in range(13)}

    def make(step):
        has_begun[step].set()
        if step in (3, 11):
            raise ValueError(f"step {step}")
        return step, threading.current_thread() is threading.main_thread()

    def outcome(step):
        try:
            return prefetch(step)[0]
        except ValueError as error:
            return str(error)

    prefetch = Prefetch(make)
    steps = [0, 1, 2, 3, 4, 9, 10, 11, 3, 0, 0, 1]
    expected = [f"step {step}" if step in (3, 11) else step for step in steps]
    assert [outcome(step) for step in steps] == expected
    assert prefetch(5) == (5, True)
    assert has_begun[6].wait(60)
    assert prefetch(6) == (6, False), "made in a thread"


class Tabular(nn.Module):
    """Its own free logits for every masked context and position: infinite capacity (Prop 4.2)."""

    def __init__(self, num_tokens, length):
        super().__init__()
        self.num_tokens, self.length = num_tokens, length
        self.table = nn.Parameter(torch.zeros((num_tokens + 1) ** length, length, num_tokens))

    def context(self, x):
        return (x * (self.num_tokens + 1) ** torch.arange(self.length)).sum(-1)

    def forward(self, x, rows, targets, weight_N=None, **_):
        log_p = self.table[self.context(x)].flatten(0, 1)[rows].log_softmax(-1)
        ce = -log_p.gather(1, targets[:, None]).squeeze(1)
        return (ce if weight_N is None else ce * weight_N).sum()


JOINT = np.array([8, 2, 3, 4, 2, 5, 4, 8])
"""Rows of {0,1}^3 in lexicographic order, each that many times in the data."""


def true_conditionals():
    """p(x^i = 1 | context) by counting, for every context of 0, 1 and mask (2) with x^i masked."""
    cube = list(itertools.product([0, 1], repeat=3))
    table = torch.full((27, 3), torch.nan)
    for context in itertools.product([0, 1, 2], repeat=3):
        number = sum(v * 3**i for i, v in enumerate(context))
        fits = [all(c in (2, v) for c, v in zip(context, row, strict=True)) for row in cube]
        for i in range(3):
            if context[i] == 2:
                weight = JOINT * np.array(fits)
                table[number, i] = float(weight @ [row[i] for row in cube]) / weight.sum()
    return table


@pytest.mark.parametrize(
    "objective",
    [
        pytest.param(Nelbo(time_floor=1e-3), id="nelbo"),
        pytest.param(Bell(), id="gaussian"),
        pytest.param(Bell(Dirac(0.5)), id="dirac", marks=pytest.mark.long),
    ],
)
def test_every_objective_has_the_same_minimiser(objective):
    """Prop 4.2: a tabular model learns the true conditionals under any law with mass in (0, 1)."""
    cube = np.array(list(itertools.product([0, 1], repeat=3)))
    rows = np.repeat(cube, JOINT * 80, axis=0)
    data = Blocks.from_rows(Row(ids, 3, n) for n, ids in enumerate(rows))
    model = Tabular(2, 3)
    plan = StepPlanner(data, objective, TrainOptions(batch_size=len(rows), seed=2), World())
    step = train_step(model, plan, mask_id=2)
    average = torch.zeros_like(model.table)
    for s in range(500):
        step(s)
        with torch.no_grad():
            model.table -= 25 * model.table.grad
        model.zero_grad()
        if s >= 250:
            average += model.table.detach() / 250
    learned = average.softmax(-1)[..., 1]
    truth = true_conditionals()
    known = ~truth.isnan()
    assert (learned[known] - truth[known]).abs().max() < 0.035
    assert (truth[known] - 0.5).abs().max() > 0.2, "the truth must not be trivial"
