"""Low-rank updates: nothing at first, the right gradients, merged without a change."""

import sys

import pytest
import torch
from pretrained_tools import V, each_kind, make_denoiser, token_rows
from safetensors.torch import load_file

from bellmask.model.pretrained import add_lora, merge_lora
from bellmask.run import load_run
from bellmask.storage.build import build_model
from bellmask.train.setup import open_start
from bellmask.train.train_run import train_run

pytest.importorskip("peft", reason="low-rank updates need peft")
L = 10
ROWS = torch.arange(1, L)


@each_kind
def test_updates_begin_at_nothing_learn_alone_and_merge_into_scaled_products(kind):
    model, plain, x_BL = make_denoiser(kind), make_denoiser(kind), token_rows(2, L)
    torch.manual_seed(4)
    add_lora(model, 3, 6.0)
    x_BL[:, ::3] = V
    with torch.no_grad():
        bare = plain(x_BL, ROWS)
        torch.testing.assert_close(model(x_BL, ROWS), bare, rtol=1e-5, atol=1e-5)
        for name, parameter in model.named_parameters():
            if "lora_B" in name:  # leaves zero, as it would in training
                parameter.normal_(generator=torch.Generator().manual_seed(8))
    model(x_BL, ROWS, torch.zeros_like(ROWS)).backward()
    parameters = dict(model.named_parameters())
    learning = {n for n, p in parameters.items() if p.grad is not None}
    assert learning == {n for n, p in parameters.items() if p.requires_grad}
    assert learning == {n for n in parameters if "lora_" in n} | {"mask_row"}
    # an A and a B beside every linear map of both blocks, none beside the head
    assert len(learning) == 2 * 2 * {"gpt2": 4, "gpt_neox": 4}.get(kind, 7) + 1
    assert all(parameters[name].grad.abs().max() > 0 for name in learning)
    updates = {n: p.detach().clone() for n, p in parameters.items() if "lora_" in n}
    with torch.no_grad():
        before = model(x_BL, ROWS)
        merge_lora(model)
        assert (model(x_BL, ROWS) - before).abs().max() < 1e-5 * before.abs().max()
        assert (before - bare).abs().max() > 0.1
    merged, base = dict(model.named_parameters()), dict(plain.named_parameters())
    assert merged.keys() == base.keys()
    assert all(p.requires_grad for p in merged.values())
    for name, parameter in merged.items():
        expected, stem = base[name].detach(), name.removesuffix(".weight")
        if f"{stem}.lora_A.default.weight" in updates:
            a, b = (updates.pop(f"{stem}.lora_{which}.default.weight") for which in "AB")
            product = 6.0 / 3 * (b @ a)
            expected = expected + (product.T if kind == "gpt2" else product)
        torch.testing.assert_close(parameter.detach(), expected, rtol=1e-5, atol=1e-5)
    assert not updates


def test_models_without_updates_need_no_peft(monkeypatch):
    model = make_denoiser("llama")
    for name in [n for n in sys.modules if n.split(".")[0] == "peft"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "peft", None)
    merge_lora(model)
    with pytest.raises(ValueError, match="lora-rank needs peft"):
        add_lora(model, 2, 1.0)


def test_a_run_with_updates_is_resumed_loaded_and_started_from(small_config, tmp_path, zoo):
    options = ["--start.model", str(zoo / "gpt2"), "--start.lora-rank", "2"]
    options += ["--optim.ema", "0.5", "--optim.weight-decay", "0.1"]
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    config = small_config(*options, "--train.steps", "4")
    train_run(config, whole, is_quiet=True)
    train_run(small_config(*options, "--train.steps", "2"), parts, is_quiet=True)
    train_run(config, parts, resume="yes", is_quiet=True)
    run, resumed = load_run(whole), load_run(parts)
    for (name, p), q in zip(run.model.named_parameters(), resumed.model.parameters(), strict=True):
        assert torch.equal(p, q), name
    # frozen weights are those of the start, and the optimizer keeps nothing for them
    source = load_run(zoo / "gpt2").model.language_model.transformer.h[0].mlp.c_fc
    inner = run.model.language_model.transformer.h[0].mlp.c_fc
    assert torch.equal(inner.base_layer.weight, source.weight)
    (shard,) = (whole / "checkpoints" / "step-000000004").glob("*.safetensors")
    states = [n for n in load_file(shard) if n.startswith("optimizer.")]
    assert all("lora_" in n or "mask_row" in n for n in states)
    # a run that starts from one with updates begins with them merged
    start = open_start(small_config("--start.model", str(whole)))
    network = build_model(start.config, start.tokenizer.num_tokens, start.backbone, start.fill)
    x_BL = token_rows(2, L)
    with torch.no_grad():
        expected = run.model(x_BL, ROWS)
        torch.testing.assert_close(network.eval()(x_BL, ROWS), expected, rtol=1e-5, atol=1e-4)
    assert not any("lora_" in n for n, _ in network.named_parameters())
