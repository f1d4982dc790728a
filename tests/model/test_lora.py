"""Low-rank updates: nothing at first, the right gradients, merged without a change."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from pretrained_tools import V, each_kind, make_denoiser, save_lm, token_rows
from safetensors.torch import load_file
from torch import nn

from bellmask.assemble import train_run
from bellmask.config import RunConfig
from bellmask.model.lora import add_lora, merge_lora
from bellmask.model.pretrained import PretrainedDenoiser
from bellmask.options import OptimOptions
from bellmask.records import read_metrics
from bellmask.run import load_run
from bellmask.start import open_start
from bellmask.train.optim import Optimizer

pytest.importorskip("peft", reason="low-rank updates need peft")
L = 10


def with_lora(kind: str, rank: int = 3) -> PretrainedDenoiser:
    model = make_denoiser(kind)
    torch.manual_seed(4)
    add_lora(model, rank, 6.0)
    return model


def stir(model: nn.Module) -> None:
    """As training would: B leaves zero."""
    draw = torch.Generator().manual_seed(8)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=draw))


@each_kind
def test_at_first_nothing_changes_and_only_updates_and_the_masks_row_learn(kind: str) -> None:
    model, plain = with_lora(kind), make_denoiser(kind)
    x_BL, rows = token_rows(2, L), torch.arange(1, L)
    x_BL[:, ::3] = V
    with torch.no_grad():
        torch.testing.assert_close(model(x_BL, rows), plain(x_BL, rows), rtol=1e-5, atol=1e-5)
    stir(model)
    model(x_BL, rows, torch.zeros_like(rows)).backward()
    learning = {n for n, p in model.named_parameters() if p.grad is not None}
    assert learning == {n for n, p in model.named_parameters() if p.requires_grad}
    assert learning == {n for n, _ in model.named_parameters() if "lora_" in n} | {"mask_row"}
    # an A and a B beside every linear map of both blocks, none beside the head
    per_block = {"gpt2": 4, "gpt_neox": 4}.get(kind, 7)
    assert len(learning) == 2 * 2 * per_block + 1
    for name, parameter in model.named_parameters():
        if name in learning:
            assert parameter.grad.abs().max() > 0, name


@each_kind
def test_merged_weights_are_the_base_plus_scaled_products(kind: str) -> None:
    model, plain = with_lora(kind), make_denoiser(kind)
    stir(model)
    updates = {n: p.detach().clone() for n, p in model.named_parameters() if "lora_" in n}
    x_BL, rows = token_rows(2, L), torch.arange(1, L)
    with torch.no_grad():
        before = model(x_BL, rows)
        merge_lora(model)
        size = before.abs().max()
        assert (model(x_BL, rows) - before).abs().max() < 1e-5 * size
        assert (before - plain(x_BL, rows)).abs().max() > 0.1
    merged, base = dict(model.named_parameters()), dict(plain.named_parameters())
    assert merged.keys() == base.keys()
    assert all(p.requires_grad for p in merged.values())
    changed = 0
    for name, parameter in merged.items():
        stem = name.removesuffix(".weight")
        expected = base[name].detach()
        if f"{stem}.lora_A.default.weight" in updates:
            a, b = (updates[f"{stem}.lora_{which}.default.weight"] for which in "AB")
            product = 6.0 / 3 * (b @ a)
            expected = expected + (product.T if kind == "gpt2" else product)
            changed += 1
        torch.testing.assert_close(parameter.detach(), expected, rtol=1e-5, atol=1e-5)
    assert changed == len(updates) // 2


def test_models_without_updates_need_no_peft(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_denoiser("llama")
    for name in [n for n in sys.modules if n.split(".")[0] == "peft"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "peft", None)
    merge_lora(model)
    with pytest.raises(ValueError, match=r"--start.lora-rank needs peft: pip install"):
        add_lora(model, 2, 1.0)


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_frozen_weights_have_no_optimiser_state_and_do_not_move(name: str) -> None:
    model = with_lora("gpt2")
    optimizer = Optimizer(model, OptimOptions(name=name, weight_decay=0.5))  # type: ignore[arg-type]
    learning = {n for n, p in model.named_parameters() if p.requires_grad}
    assert {key.rsplit(".", 1)[0] for key in optimizer.tensors()} == learning
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step(0.1)
    moved = {n for n, p in model.named_parameters() if not p.equal(before[n])}
    assert moved == learning


@each_kind
def test_muon_takes_the_matrices_of_blocks_and_decay_spares_look_up_tables(kind: str) -> None:
    model = make_denoiser(kind)
    blocks = {id(p) for block in model.block_modules() for p in block.parameters() if p.ndim == 2}
    tables = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    matrices = {id(p) for p in model.parameters() if p.ndim == 2}
    adamw, muon = Optimizer(model, OptimOptions(name="muon", weight_decay=0.1)).parts
    assert {id(p) for g in muon.param_groups for p in g["params"]} == blocks
    decayed = {id(p) for g in adamw.param_groups if g["weight_decay"] for p in g["params"]}
    assert decayed == matrices - blocks - tables


@pytest.fixture(scope="module")
def lm_folder(tmp_path_factory: pytest.TempPathFactory, text_file: Path) -> Path:
    return save_lm(tmp_path_factory.mktemp("lm") / "gpt2", "gpt2", text_file.read_text())


def nll(folder: Path) -> float:
    lines = read_metrics(folder / "metrics.jsonl")
    return [line["nll"] for line in lines if line["kind"] == "validation"][-1]


def test_a_run_with_updates_is_resumed_loaded_and_started_from(
    small_config: Callable[..., RunConfig], tmp_path: Path, lm_folder: Path
) -> None:
    options = ["--start.model", str(lm_folder), "--start.lora-rank", "2", "--optim.ema", "0.5"]
    options += ["--validation.every", "4", "--optim.weight-decay", "0.1"]
    whole = small_config(*options, "--train.steps", "4")
    train_run(whole, tmp_path / "whole", is_quiet=True)
    train_run(small_config(*options, "--train.steps", "2"), tmp_path / "parts", is_quiet=True)
    train_run(whole, tmp_path / "parts", resume="yes", is_quiet=True)
    a, b = (load_run(tmp_path / name) for name in ("whole", "parts"))
    for (name, p), q in zip(a.model.named_parameters(), b.model.parameters(), strict=True):
        assert torch.equal(p, q), name
    found = a.evaluate(a.blocks()[1].slice(0, 32)).nll
    assert found == pytest.approx(nll(tmp_path / "whole"), rel=1e-6)
    # frozen weights are those of the file, and the optimiser keeps nothing for them
    stored = load_file(lm_folder / "model.safetensors")
    inner = a.model.language_model.transformer.h[0].mlp.c_fc
    assert torch.equal(inner.base_layer.weight, stored["transformer.h.0.mlp.c_fc.weight"])
    (shard,) = (tmp_path / "whole" / "checkpoints" / "step-000000004").glob("*.safetensors")
    states = [n for n in load_file(shard) if n.startswith("optimizer.")]
    assert states
    assert all("lora_" in n or "mask_row" in n for n in states)
    check_start_from(small_config, tmp_path, a.model)


def check_start_from(
    small_config: Callable[..., RunConfig], tmp_path: Path, source: nn.Module
) -> None:
    """A run that starts from one with updates begins with them merged."""
    from bellmask.build import build_model

    config = small_config("--start.model", str(tmp_path / "whole"))
    start = open_start(config)
    assert start.tokenizer is not None
    network = build_model(start.config, start.tokenizer.num_tokens, start.backbone, start.fill)
    x_BL, rows = token_rows(2, L), torch.arange(1, L)
    with torch.no_grad():
        expected = source(x_BL, rows)
        torch.testing.assert_close(network.eval()(x_BL, rows), expected, rtol=1e-5, atol=1e-4)
    assert not any("lora_" in n for n, _ in network.named_parameters())
    assert train_run(config, tmp_path / "next", is_quiet=True).step == 6
