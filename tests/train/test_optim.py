from __future__ import annotations

import copy
import math
from dataclasses import replace

import pytest
import torch
from torch import nn

from bellmask.config.options import ModelOptions, OptimOptions
from bellmask.model.transformer import Denoiser
from bellmask.train.optim import Ema, Muon, Optimizer, is_hidden_matrix, learning_rate


def test_warm_up_then_the_curve():
    options = OptimOptions(lr=1.0, final_lr=0.1, warmup_steps=10)
    rates = [learning_rate(options, step, 111) for step in (0, 4, 9, 99)]
    assert rates == pytest.approx([0.1, 0.5, 1, 1])
    cosine = replace(options, curve="cosine")
    rates = [learning_rate(cosine, step, 111) for step in (9, 10, 60, 110)]
    assert rates == pytest.approx([1, 1, 0.55, 0.1])
    assert learning_rate(replace(cosine, warmup_steps=500), 5, 6) == pytest.approx(0.012)


def test_muon_takes_the_steps_of_torchs_muon():
    """torch's own iterates in bfloat16, so equal to two or three digits."""
    torch.manual_seed(0)
    start = torch.randn(12, 6)
    ours, theirs = nn.Parameter(start.clone()), nn.Parameter(start.clone())
    options = {"lr": 0.02, "momentum": 0.95, "weight_decay": 0.1}
    a = Muon([ours], **options)
    b = torch.optim.Muon([theirs], **options, adjust_lr_fn="match_rms_adamw")
    for _ in range(5):
        gradient = torch.randn(12, 6)
        ours.grad, theirs.grad = gradient.clone(), gradient.clone()
        a.step()
        b.step()
    moved, expected = ours.detach() - start, theirs.detach() - start
    assert (moved - expected).norm() / expected.norm() < 0.02


def test_moving_average_follows_its_formula():
    model = nn.Linear(1, 1, bias=False)
    ema = Ema(model, 0.99)
    expected = float(model.weight.detach())
    for n in range(1, 200):
        nn.init.constant_(model.weight, math.sin(n))
        ema.update(n)
        decay = min(0.99, (1 + n) / (10 + n))
        expected = decay * expected + (1 - decay) * math.sin(n)
    assert float(ema.shadow["weight"]) == pytest.approx(expected, abs=1e-5)
    with ema.applied():
        assert float(model.weight.detach()) == pytest.approx(expected, abs=1e-5)
    assert float(model.weight.detach()) == pytest.approx(math.sin(199), abs=1e-6)
    assert not ema.shadow["weight"].requires_grad


def test_muon_takes_hidden_matrices_and_adamw_the_rest():
    model = Denoiser(ModelOptions(num_layers=1, width=8, num_heads=2, modulation="time"), 5)
    taken = {n for n, p in model.named_parameters() if is_hidden_matrix(n, p)}
    assert taken == {f"blocks.0.{n}.weight" for n in ("qkv", "attention_out", "mlp_in", "mlp_out")}
    adamw, muon = Optimizer(model, OptimOptions(name="muon", weight_decay=0.1)).parts
    assert sum(len(g["params"]) for g in muon.param_groups) == 4
    assert {g["weight_decay"] for g in muon.param_groups} == {0.1}
    owned = [p for g in adamw.param_groups + muon.param_groups for p in g["params"]]
    assert len(owned) == len(set(owned)) == len(list(model.parameters()))
    decayed = {id(p) for g in adamw.param_groups if g["weight_decay"] for p in g["params"]}
    names = {n for n, p in model.named_parameters() if id(p) in decayed}
    assert names == {"head.weight", "time_embedding.into.weight", "time_embedding.out.weight"}


def test_adamw_takes_the_steps_of_plain_adamw():
    torch.manual_seed(0)
    model, twin = nn.Linear(3, 4), nn.Linear(3, 4)
    twin.load_state_dict(model.state_dict())
    ours = Optimizer(model, OptimOptions(betas=(0.8, 0.9), eps=1e-3))
    plain = torch.optim.AdamW(
        twin.parameters(), lr=0.1, betas=(0.8, 0.9), eps=1e-3, weight_decay=0, fused=False
    )
    for _ in range(4):
        x = torch.randn(5, 3)
        for m in (model, twin):
            m.zero_grad()
            m(x).pow(2).sum().backward()
        ours.step(0.1)
        plain.step()
    torch.testing.assert_close(model.weight, twin.weight, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_a_skip_decided_on_the_device_is_one_decided_on_the_host(name):
    """Steps whose gradient is not finite change no weight, no state and no average."""
    torch.manual_seed(0)
    model = Denoiser(ModelOptions(num_layers=1, width=8, num_heads=2), 5)
    twin = copy.deepcopy(model)
    options = OptimOptions(name=name, weight_decay=0.1)
    (ours, average), (plain, expected) = (
        (Optimizer(network, options), Ema(network, 0.9)) for network in (model, twin)
    )
    for step, is_bad in enumerate([True, False, False, True, False]):
        for a, b in zip(model.parameters(), twin.parameters(), strict=True):
            a.grad = torch.randn_like(a) * (torch.nan if is_bad else 1)
            b.grad = a.grad.clone()
        ours.step(0.01, torch.tensor(is_bad))
        average.update(step + 1, torch.tensor(is_bad))
        if not is_bad:
            plain.step(0.01)
            expected.update(step + 1)
    found, other = ours.tensors() | model.state_dict(), plain.tensors() | twin.state_dict()
    assert all(torch.equal(found[key], other[key]) for key in other)
    for key, value in expected.shadow.items():
        torch.testing.assert_close(average.shadow[key], value, rtol=1e-5, atol=1e-7)
