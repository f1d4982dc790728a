"""A step's batch, times and masks, its loss and its gradient, against formulas written out."""

from __future__ import annotations

import math
import threading
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from bellmask.config.config import RunConfig
from bellmask.config.options import ModelOptions, TrainOptions
from bellmask.data.blocks import Blocks, Row
from bellmask.diffusion.frameworks import Mdm, any_order, arm, sigma_arm
from bellmask.diffusion.laws import Dirac, TruncatedGaussian, TruncatedLaplace, Uniform
from bellmask.diffusion.objectives import Bell, ChainRule, Importance, Nelbo
from bellmask.diffusion.schedules import Cosine, MiddleFlat
from bellmask.model.transformer import Denoiser
from bellmask.train.planning import StepPlanner
from bellmask.train.step import Prefetch, TrainStep
from bellmask.utils.distributed import World
from bellmask.utils.errors import UserError
from bellmask.utils.rng import stream_key, uniform_rows

WIDE = TruncatedGaussian(0.5, 0.3)
OBJECTIVES = [
    Nelbo(), Nelbo(law=WIDE), Nelbo(schedule=MiddleFlat(WIDE)), Nelbo(time_floor=1e-3),
    Bell(), Bell(Uniform()), Bell(Dirac(0.3)), Bell(TruncatedLaplace(0.4, 0.2), Cosine()),
    Nelbo(schedule=Cosine(), time_floor=1e-2), Importance(), Importance(divide_by_t=True),
]  # fmt: skip
LENGTH = 12


def planner(world=None, is_padded=False, objective=None, **options):
    draw = np.random.default_rng(5)
    rows = Blocks.from_rows(
        Row(draw.integers(0, 9, LENGTH), int(draw.integers(3, LENGTH)) if is_padded else LENGTH, n)
        for n in range(40)
    )
    settings = replace(TrainOptions(batch_size=16, seed=4), **options)
    return StepPlanner(rows, objective or Bell(), RunConfig(train=settings), world or World())


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
    growing = [planner(World(r, 2), is_padded=True, batch_warmup=5) for r in range(2)]
    for step, size in enumerate((4, 4, 4, 8, 8, 16, 16)):
        x0, u, t, is_real = gather(growing, step)
        for a, e in zip((x0, u), gather(whole, step)):
            assert torch.equal(a, e[:size]), "the first rows of the full batch"
        levels = TruncatedGaussian().cdf(t) * size
        assert sorted(levels.floor().int().tolist()) == list(range(size)), "all strata"
        assert growing[0](step).num_maskable == int(is_real.sum())
    with pytest.raises(UserError, match="batch_warmup"):
        planner(World(0, 8), batch_warmup=5)(0)


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
    plan.config = plan.config.with_options({"objective.divide_by_c": False})
    mdlm = train_step(model, plan)(0).loss
    assert mdlm == pytest.approx(ours / 2, rel=1e-9)


def awake(**options):
    """A network whose every weight matters."""
    model = Denoiser(ModelOptions(num_layers=2, width=16, num_heads=2, dropout=0), 9, **options)
    torch.manual_seed(0)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    return model


def gradient(model):
    found = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    model.zero_grad()
    return found


def test_gradient_of_a_step_is_the_gradient_of_the_formula():
    """Accumulated microbatches against one autograd pass over all logits, written out plainly."""
    model, plan = awake(), planner(objective=Nelbo(), microbatch_size=4)
    result, found = train_step(model, plan)(2), gradient(model)
    total = torch.zeros(())
    for m in plan(2).microbatches:
        is_masked = m.u_BL < m.t_B[:, None]
        x = torch.where(is_masked, 9, m.x0_BL)
        log_p = (model.hidden(x) @ model.head.weight.T + model.head.bias).log_softmax(-1)
        ce = -log_p.gather(-1, m.x0_BL[..., None]).squeeze(-1)
        total = total + (ce * is_masked / m.t_B[:, None]).sum().float() / (16 * LENGTH)
    total.backward()
    assert result.loss == pytest.approx(float(total.detach()), rel=1e-5)
    torch.testing.assert_close(found, gradient(model), rtol=2e-4, atol=2e-5)
    norm = float(found.norm())
    assert result.gradient_norm == pytest.approx(norm, rel=1e-4)
    assert not result.is_clipped
    for clip in (norm / 2, norm * 2):
        assert train_step(model, plan, clip=clip)(2).is_clipped == (clip < norm)
        assert float(gradient(model).norm()) == pytest.approx(min(clip, norm), rel=1e-4)


SIGMA = [3, 1, 11, 5, 0, 7, 2, 10, 6, 4, 9, 8]
CAUSAL = {"arm": arm(LENGTH), "sigma_arm": sigma_arm(torch.tensor(SIGMA)), "aoarm": any_order()}


def by_hand(model, name, plan, step):
    """Mean next-token cross-entropy of the step's rows, one row after another, without pads."""
    length, losses = plan.length(step), []
    u = uniform_rows(stream_key(4, "masks", step), torch.arange(16), LENGTH)
    for sample, row in enumerate(plan.batches.rows(step).tolist()):
        n = min(int(plan.blocks.lengths[row]), length)
        tokens = torch.from_numpy(np.array(plan.blocks.tokens[row], dtype=np.int64))
        order = {
            "arm": torch.arange(n),
            "sigma_arm": torch.tensor([i for i in SIGMA if i < n]),
            "aoarm": u[sample, :n].argsort(),
        }[name]
        logits = model(
            torch.cat([torch.tensor([9]), tokens[order[:-1]]])[None],
            torch.arange(n),
            positions=torch.cat([torch.tensor([0]), order[:-1] + 1]),
            target_positions=order + 1,
        )
        losses.append(F.cross_entropy(logits, tokens[order], reduction="none"))
    return torch.cat(losses).mean()


@pytest.mark.parametrize("is_padded", [False, True])
@pytest.mark.parametrize("encoding", ["source", "crossed"])
@pytest.mark.parametrize("name", CAUSAL)
def test_a_causal_step_is_the_mean_next_token_cross_entropy(name, encoding, is_padded):
    """Accumulated or not; short rows and full ones."""
    model = awake(is_causal=True, encoding=encoding)
    whole, parts = (
        planner(is_padded=is_padded, objective=ChainRule(), random_length_fraction=0.5, **more)
        for more in ({}, {"microbatch_size": 4})
    )
    short = next(s for s in range(50) if 2 < parts.length(s) < LENGTH)
    full = next(s for s in range(50) if parts.length(s) == LENGTH)
    for step, plan in ((short, parts), (full, parts), (full, whole)):
        result = TrainStep(model, plan, CAUSAL[name], mask_id=9)(step)
        found, loss = gradient(model), by_hand(model, name, plan, step)
        loss.backward()
        assert result.loss == pytest.approx(float(loss.detach()), rel=1e-5)
        assert (result.num_masked, result.largest_weight) == (result.num_maskable, 1)
        torch.testing.assert_close(found, gradient(model), rtol=1e-3, atol=2e-5)


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
    assert step.first_bad(result).endswith("weight that is not finite: blocks.0.mlp_out.bias")
    with torch.no_grad():
        model.blocks[0].mlp_out.bias[0] = 0
    model.zero_grad()
    assert step.first_bad(result).endswith("gradient that is not finite: embedding.weight")
    good = step(5)
    assert good.is_finite
    assert step.first_bad(good) == ""


@pytest.mark.parametrize(("value", "named"), [(math.inf, "final_norm.weight"), (1.5e19, "")])
def test_a_gradient_is_named_also_when_it_is_gone(value, named):
    """As on a GPU, where a step is read when the next has begun; a sum can be too large itself."""
    model = small_model()
    step = train_step(model, planner(), clip=1)
    step.reads_late = True
    large = torch.tensor([value, 0])
    for parameter in (model.final_norm.weight, model.head.bias):
        parameter.register_hook(lambda gradient: F.pad(large, (0, len(gradient) - 2)))
    pending = step.begin(0)
    model.zero_grad()
    result = pending.read()
    assert (math.isinf(result.gradient_norm), result.bad_gradient) == (True, named)


@pytest.mark.parametrize(("device", "is_late"), [("cpu", False), ("mps", False), ("cuda", True)])
def test_a_device_skips_updates_only_where_its_fused_adamw_can(device, is_late):
    """A Mac's ignores found_inf, so there the host must see the loss before it updates."""
    step = train_step(small_model(), planner(World(device=torch.device(device))))
    assert step.reads_late == is_late


def test_prefetching_gives_the_same_plans_and_errors_and_begins_early():
    has_begun = {step: threading.Event() for step in range(13)}

    def make(step):
        has_begun[step].set()
        if step == 3:
            raise ValueError("three")
        return step, threading.current_thread() is threading.main_thread()

    prefetch = Prefetch(make)
    assert [prefetch(step)[0] for step in (0, 1, 2)] == [0, 1, 2]
    with pytest.raises(ValueError, match="three"):
        prefetch(3)
    assert [prefetch(step)[0] for step in (4, 9, 10, 0, 0, 1)] == [4, 9, 10, 0, 0, 1]
    assert prefetch(5) == (5, True)
    assert has_begun[6].wait(60)
    assert prefetch(6) == (6, False), "made in a thread"


JOINT = torch.tensor([8, 2, 3, 4, 2, 5, 4, 8])
"""Rows of {0,1}^3 in lexicographic order, each that many times in the data."""
CUBE, CONTEXTS = (torch.cartesian_prod(*[torch.arange(n)] * 3) for n in (2, 3))


class Tabular(nn.Module):
    """Its own free logits for every context of 0, 1 and mask (2): infinite capacity."""

    def __init__(self):
        super().__init__()
        self.table = nn.Parameter(torch.zeros(27, 3, 2))

    def forward(self, x, rows, targets, weight_N=None, **_):
        logits = self.table[(x * torch.tensor([9, 3, 1])).sum(-1)].flatten(0, 1)[rows]
        ce = F.cross_entropy(logits, targets, reduction="none")
        return (ce if weight_N is None else ce * weight_N).sum()


@pytest.mark.parametrize(
    "objective",
    [
        pytest.param(Nelbo(time_floor=1e-3), id="nelbo"),
        pytest.param(Bell(), id="gaussian"),
        pytest.param(Bell(Dirac(0.5)), id="dirac", marks=pytest.mark.long),
    ],
)
def test_every_objective_has_the_same_minimizer(objective):
    """Prop 4.2: a tabular model learns the true conditionals under any law with mass in (0, 1)."""
    rows = CUBE.repeat_interleave(JOINT * 80, dim=0).numpy()
    data = Blocks.from_rows(Row(ids, 3, n) for n, ids in enumerate(rows))
    config = RunConfig(train=TrainOptions(batch_size=len(rows), seed=2))
    plan = StepPlanner(data, objective, config, World())
    model = Tabular()
    step, average = train_step(model, plan, mask_id=2), torch.zeros(27, 3, 2)
    for s in range(500):
        step(s)
        with torch.no_grad():
            model.table -= 25 * model.table.grad
        model.zero_grad()
        if s >= 250:
            average += model.table.detach() / 250
    # p(x^i = 1 | context) by counting the rows of the cube that fit
    fits = ((CONTEXTS[:, None] == CUBE) | (CONTEXTS[:, None] == 2)).all(-1) * JOINT
    truth = (fits @ CUBE / fits.sum(1, keepdim=True))[CONTEXTS == 2]
    learned = average.softmax(-1)[..., 1][CONTEXTS == 2]
    assert (learned - truth).abs().max() < 0.035
    assert (truth - 0.5).abs().max() > 0.2, "the truth must not be trivial"
