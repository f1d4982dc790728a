"""What steps are made of when a causal LM is adapted or fine-tuned, against slow loops."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from pretrained_tools import (
    BATCH,
    PAD,
    PROMPT,
    SFT,
    L,
    Recorder,
    V,
    eager_states,
    examples,
    make_denoiser,
    make_planner,
    make_step,
)

from bellmask.config.options import StartOptions
from bellmask.diffusion.frameworks import Mdm, shifted_arm
from bellmask.diffusion.laws import Dirac
from bellmask.diffusion.objectives import Bell, Importance, Nelbo
from bellmask.diffusion.theory import CountLaw
from bellmask.train.step import Pass
from bellmask.utils.distributed import World
from bellmask.utils.rng import stream_key, uniform_rows

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def model():
    return make_denoiser("llama")


# --- annealed attention


def annealed(steps):
    return {"start": StartOptions(anneal_steps=steps)}


def test_edges_open_at_random_with_the_steps_probability():
    planner = make_planner(annealed(10), blocks=examples(is_sft=False))
    past = torch.ones(L, L, dtype=torch.bool).tril()
    for step in range(9):
        edges = planner.open_edges(step, L)
        assert edges[past].all()
        assert not edges.all()
    one, other = (make_planner(annealed(10), seed=seed).open_edges(2, L) for seed in (5, 6))
    assert not torch.equal(one, other)
    assert (one & ~planner.open_edges(3, L)).any(), "edges are drawn anew in each step"
    assert all(planner.open_edges(step, L) is None for step in (9, 10, 500))
    for step, share in ((0, 0.1), (4, 0.5), (7, 0.8)):
        drawn = []
        for seed in range(400):
            planner.options = replace(planner.options, seed=seed)
            drawn.append(planner.open_edges(step, L))
        often = torch.stack(drawn).double().mean(0)[~past]
        error = math.sqrt(share * (1 - share) / 400)
        assert abs(float(often.mean()) - share) < 4 * error / math.sqrt(len(often))
        assert (often - share).abs().max() < 5 * error


@pytest.mark.parametrize("step", [0, 3, 7])
def test_an_annealed_step_has_the_loss_of_a_dense_reference(model, step):
    """Its mask on eager attention, every row scored by hand; padding and prompts included."""
    planner = make_planner(annealed(8), Nelbo(time_floor=0.0))
    parts = make_planner(annealed(8), planner.objective, microbatch=2)
    whole, found = (make_step(model, plan)(step).loss for plan in (planner, parts))
    assert whole == pytest.approx(found, rel=1e-5)
    model.zero_grad()
    (batch,) = planner(step).microbatches
    place = torch.arange(L)
    is_real, is_given = batch.x0_BL != PAD, batch.x0_BL >= PROMPT
    is_masked = (batch.u_BL < batch.t_B[:, None]) & is_real & ~is_given
    edges = torch.ones(L, L, dtype=torch.bool)
    if step < 7:
        u_LL = uniform_rows(stream_key(5, "attention", step), place, L)
        edges = (place[:, None] >= place) | (u_LL < (step + 1) / 8)
    is_seen = edges[None, None] & is_real[:, None, None]
    with torch.no_grad():
        h = eager_states(model, torch.where(is_masked, V, batch.x0_BL), is_seen)
        log_p = model.language_model.get_output_embeddings()(h).log_softmax(-1)
    total = 0.0
    for b, i in is_masked.nonzero().tolist():
        total -= float(log_p[b, i - 1, batch.x0_BL[b, i]]) / float(batch.t_B[b])
    assert found == pytest.approx(total / int((is_real & ~is_given).sum()), rel=1e-4)


# --- the shift


@pytest.mark.parametrize(("is_arm", "min_masks"), [(False, 0), (False, 1), (True, 0)])
def test_no_target_is_a_prompt_a_pad_or_a_first_token(is_arm, min_masks):
    recorder, recipe = Recorder(), {"sft": replace(SFT["sft"], min_masks=min_masks)}
    planner = make_planner(recipe, Bell(Dirac(0.9)), microbatch=4)
    framework = shifted_arm(L) if is_arm else Mdm()
    scored = 0
    for step in range(20):
        for batch in planner(step).microbatches:
            Pass.of(batch, framework, V).loss(recorder, CPU)
            x, rows, targets = recorder.calls[-1]
            length = x.shape[1]
            assert (rows % length > 0).all()
            assert (targets < PROMPT).all()
            assert torch.equal(targets, batch.x0_BL.flatten()[rows])
            kept = torch.ones(x.numel(), dtype=torch.bool)
            kept[rows if not is_arm else []] = False
            assert torch.equal(x.flatten()[kept], batch.x0_BL.flatten()[kept])
            assert (x.flatten()[~kept] == V).all(), "nothing under a mask is seen"
            scored += len(rows)
        assert planner(step).num_maskable == sum(
            int((m.x0_BL < PROMPT).sum()) for m in planner(step).microbatches
        )
    assert scored > 500


# --- per-example means


def slow_loss(model, planner, step):
    """(1 / B) sum_b (1 / (L_b c)) sum over masked rows of w ce, one unpadded row at a time."""
    objective, total = planner.objective, 0.0
    rows = planner.batches.rows(step)
    levels = planner.levels(step)
    counts = CountLaw(objective)
    u_BL = uniform_rows(stream_key(5, "masks", step), torch.arange(BATCH), L)
    for b in range(BATCH):
        ids = torch.from_numpy(np.array(planner.blocks.tokens[rows[b : b + 1].numpy()]))[0]
        ids = ids[ids != PAD]
        response = (ids < PROMPT).nonzero().flatten().tolist()
        t = objective.times(levels[b : b + 1])
        if planner.config.sft.min_masks:
            number, weight = counts.draw(levels[b : b + 1], torch.tensor([len(response)]))
            order = sorted(response, key=lambda i: float(u_BL[b, i]))
            masked, w = order[: int(number)], float(weight)
        else:
            masked = [i for i in response if u_BL[b, i] < t]
            w = float(objective.weight(t))
        x = ids.clone()
        x[masked] = V
        ce = model(x[None], torch.tensor(masked).long(), ids[masked], reduce=False)
        total += w * float(ce.sum()) / len(response) / objective.normalizer
    return total / BATCH


@pytest.mark.parametrize("objective", [Bell(), Nelbo(time_floor=0.0), Importance()])
@pytest.mark.parametrize("min_masks", [0, 1])
def test_the_loss_is_a_mean_over_examples_however_batched(model, objective, min_masks):
    recipe = {"sft": replace(SFT["sft"], min_masks=min_masks)}
    for step in (0, 3):
        expected = slow_loss(model, make_planner(recipe, objective), step)
        gradients = []
        for size in (None, 1, 2, 4):
            planner = make_planner(recipe, objective, microbatch=size)
            assert make_step(model, planner)(step).loss == pytest.approx(expected, rel=1e-4)
            gradients.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
            model.zero_grad()
        unsorted = make_planner(recipe, objective, microbatch=4)
        unsorted.sorts_by_length = False
        assert make_step(model, unsorted)(step).loss == pytest.approx(expected, rel=1e-4)
        model.zero_grad()
        for gradient in gradients[1:]:
            torch.testing.assert_close(gradient, gradients[0], rtol=1e-3, atol=1e-5)


def test_ranks_share_all_examples_and_like_lengths_meet():
    blocks = examples()
    whole = make_planner(SFT, microbatch=2, blocks=blocks)(4)
    ranks = [make_planner(SFT, world=World(r, 2), microbatch=2)(4).microbatches for r in (0, 1)]
    alternating = [m for pair in zip(*ranks, strict=True) for m in pair]
    for a, b in zip(whole.microbatches, alternating, strict=True):
        assert (a.first, a.x0_BL.tolist()) == (b.first, b.x0_BL.tolist())
        assert torch.equal(a.u_BL, b.u_BL)
    widths = [m.x0_BL.shape[1] for m in whole.microbatches]
    assert widths == sorted(widths)
    assert widths[0] < L
    for m in whole.microbatches:
        assert (m.x0_BL[:, -1] != PAD).any(), "cut to its longest row"
