"""Training of the causal frameworks: losses by hand, and what their runs can do."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from bellmask.config.options import ModelOptions, TrainOptions
from bellmask.data.blocks import Blocks, Row
from bellmask.diffusion.frameworks import any_order, arm, sigma_arm
from bellmask.diffusion.objectives import ChainRule
from bellmask.model.transformer import Denoiser
from bellmask.train.planning import StepPlanner
from bellmask.train.step import TrainStep
from bellmask.utils.distributed import World
from bellmask.utils.rng import stream_key, uniform_rows

SIGMA = [3, 1, 5, 0, 7, 2, 6, 4]
FRAMEWORKS = {"arm": arm(8), "sigma_arm": sigma_arm(torch.tensor(SIGMA)), "aoarm": any_order()}
each = pytest.mark.parametrize("name", FRAMEWORKS)


def awake(encoding):
    options = ModelOptions(num_layers=2, width=16, num_heads=2, dropout=0.0)
    model = Denoiser(options, 9, is_causal=True, encoding=encoding)
    torch.manual_seed(0)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    return model


def planner(is_padded, **options):
    draw = np.random.default_rng(5)
    blocks = Blocks.from_rows(
        Row(draw.integers(0, 9, 8), int(draw.integers(1, 9)) if is_padded else 8, n)
        for n in range(40)
    )
    settings = replace(TrainOptions(batch_size=16, seed=4), **options)
    return StepPlanner(blocks, ChainRule(), settings, World())


def by_hand(model, name, plan, step):
    """Mean next-token cross-entropy of the step's rows, one row after another, without pads."""
    length, losses = plan.length(step), []
    u = uniform_rows(stream_key(4, "masks", step), torch.arange(16), 8)
    for sample, row in enumerate(plan.batches.rows(step).tolist()):
        n = min(int(plan.blocks.lengths[row]), length)
        tokens = np.asarray(plan.blocks.tokens[row])[:n].tolist()
        order = {
            "arm": list(range(n)),
            "sigma_arm": [i for i in SIGMA if i < n],
            "aoarm": u[sample, :n].argsort().tolist(),
        }[name]
        ordered = [tokens[i] for i in order]
        logits = model(
            torch.tensor([[9, *ordered[:-1]]]),
            torch.arange(n),
            positions=torch.tensor([0, *(i + 1 for i in order[:-1])]),
            target_positions=torch.tensor([i + 1 for i in order]),
        )
        losses.append(F.cross_entropy(logits, torch.tensor(ordered), reduction="none"))
    return torch.cat(losses).mean()


@pytest.mark.parametrize("is_padded", [False, True])
@pytest.mark.parametrize("encoding", ["source", "crossed"])
@each
def test_a_step_is_the_mean_next_token_cross_entropy_and_its_gradient(name, encoding, is_padded):
    """Accumulated or not; short rows and full ones."""
    model = awake(encoding)
    plan = planner(is_padded, microbatch_size=4, random_length_fraction=0.5)
    whole = planner(is_padded, random_length_fraction=0.5)
    short = next(s for s in range(50) if 2 < plan.length(s) < 8)
    full = next(s for s in range(50) if plan.length(s) == 8)
    for step, how in ((short, plan), (full, plan), (full, whole)):
        model.zero_grad()
        result = TrainStep(model, how, FRAMEWORKS[name], mask_id=9)(step)
        found = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        model.zero_grad()
        loss = by_hand(model, name, how, step)
        loss.backward()
        assert result.loss == pytest.approx(float(loss.detach()), rel=1e-5)
        assert result.num_masked == result.num_maskable
        assert result.largest_weight == 1
        for a, p in zip(found, model.parameters(), strict=True):
            torch.testing.assert_close(a, p.grad, rtol=1e-3, atol=2e-5)
