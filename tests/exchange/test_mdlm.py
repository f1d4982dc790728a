"""mdlm's layout in and out, against its forward pass written a second time."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from commands import refuses, succeeds
from safetensors.torch import load_file, save_file
from torch import nn

from bellmask.config.options import (
    DataOptions,
    FrameworkOptions,
    LawOptions,
    ModelOptions,
    ObjectiveOptions,
    ScheduleOptions,
)
from bellmask.exchange.huggingface import export_mdlm
from bellmask.exchange.mdlm import ImportOptions, read_import, write_import
from bellmask.run import load_run
from bellmask.storage.loading import map_ids
from bellmask.utils.errors import UserError

MASKS = {"bytes": 259, "bert-like": 3, "gpt2-like": 266}
SIZES = {"bytes": 260, "bert-like": 11, "gpt2-like": 267}
"""Written down by hand: BERT's mask is inside, GPT-2's comes after 266 tokens."""


def module_of(**children):
    """A module that is nothing but its children and parameters, in this order."""
    module = nn.Module()
    for name, child in children.items():
        setattr(module, name, child)
    return module


def matrix(*size):
    return nn.Parameter(torch.randn(*size) / math.sqrt(size[-1]))


def linear(rows, columns, bias=True):
    parts = {"weight": matrix(rows, columns)}
    return module_of(**parts, **({"bias": nn.Parameter(torch.randn(rows) * 0.3)} if bias else {}))


def norm(width):
    return module_of(weight=nn.Parameter(1 + torch.randn(width) * 0.3))


def mlp(first, last):
    return nn.Sequential(first, nn.Identity(), last)


def apply(linear, x):
    out = x @ linear.weight.T
    return out + linear.bias if hasattr(linear, "bias") else out


def silu(x):
    return x / (1 + (-x).exp())


class PublishedNetwork(nn.Module):
    """mdlm's parameters by name and in order, all random, and its forward pass in slow steps.

    One row, one head and one pair of coordinates at a time; rotations as complex numbers.
    """

    def __init__(self, kind="bytes", *, layers=2, width=16):
        super().__init__()
        self.mask, self.heads, self.width = MASKS[kind], 2, width
        self.vocab_embed = module_of(embedding=matrix(SIZES[kind], width))
        self.sigma_map = module_of(mlp=mlp(linear(128, 256), linear(128, 128)))
        self.rotary_emb = nn.Module()
        size = width // self.heads
        rate = 1e4 ** -(torch.arange(0, size, 2).float() / size)
        self.rotary_emb.register_buffer("inv_freq", rate)
        self.blocks = nn.ModuleList(
            module_of(
                norm1=norm(width),
                attn_qkv=linear(3 * width, width, bias=False),
                attn_out=linear(width, width, bias=False),
                norm2=norm(width),
                mlp=mlp(linear(4 * width, width), linear(width, 4 * width)),
                adaLN_modulation=linear(6 * width, 128),
            )
            for _ in range(layers)
        )
        self.output_layer = module_of(
            norm_final=norm(width),
            linear=linear(SIZES[kind], width),
            adaLN_modulation=linear(2 * width, 128),
        )

    @torch.no_grad()
    def log_probabilities(self, row, time):
        """[L, V] of one row of their ids; ``time`` None is a model without time input."""
        c = self.condition(0.0 if time is None else -math.log(1 - (1 - 1e-3) * time))
        x = self.vocab_embed.embedding[row]
        for block in self.blocks:
            parts = apply(block.adaLN_modulation, c).split(self.width)
            shift1, scale1, gate1, shift2, scale2, gate2 = parts
            inner = self.normed(x, block.norm1.weight) * (1 + scale1) + shift1
            x = x + gate1 * self.attention(block, inner)
            inner = self.normed(x, block.norm2.weight) * (1 + scale2) + shift2
            h = apply(block.mlp[0], inner)
            h = h / 2 * (1 + torch.tanh(math.sqrt(2 / math.pi) * (h + 0.044715 * h**3)))
            x = x + gate2 * apply(block.mlp[2], h)
        shift, scale = apply(self.output_layer.adaLN_modulation, c).split(self.width)
        x = self.normed(x, self.output_layer.norm_final.weight) * (1 + scale) + shift
        logits = apply(self.output_layer.linear, x)
        logits[:, self.mask] -= 1e6
        return logits - logits.exp().sum(1, keepdim=True).log()

    def condition(self, sigma):
        angles = [sigma * 1e4 ** (-i / 128) for i in range(128)]
        waves = torch.tensor([math.cos(a) for a in angles] + [math.sin(a) for a in angles])
        first, last = self.sigma_map.mlp[0], self.sigma_map.mlp[2]
        return silu(apply(last, silu(apply(first, waves))))

    def normed(self, x, weight):
        centered = x - x.mean(1, keepdim=True)
        return centered / (centered.pow(2).mean(1, keepdim=True) + 1e-5).sqrt() * weight

    def attention(self, block, x):
        packed = apply(block.attn_qkv, x)
        size, outputs = self.width // self.heads, []
        for head in range(self.heads):
            q, k, v = (
                packed[:, (part * self.heads + head) * size :][:, :size] for part in range(3)
            )
            score = torch.real(self.turn(q) @ self.turn(k).conj().T) / math.sqrt(size)
            share = score.exp() / score.exp().sum(1, keepdim=True)
            outputs.append(share @ v)
        return apply(block.attn_out, torch.cat(outputs, dim=1))

    def turn(self, x):
        """Coordinates i and i + E/2 as one complex number, turned by position * rate."""
        half = x.shape[1] // 2
        angle = torch.arange(len(x))[:, None] * self.rotary_emb.inv_freq
        return torch.complex(x[:, :half], x[:, half:]) * torch.polar(torch.ones(()), angle)


def save(network, path, prefix=""):
    save_file({prefix + n: t.clone() for n, t in network.state_dict().items()}, path)
    return path


def import_(source, out, **more):
    options = ImportOptions(str(source), "mdlm", str(out), "bytes", block_length=12)
    write_import(read_import(replace(options, **more)), out)
    return load_run(out)


def assert_same_predictions(run, network, time):
    """Log-probabilities of all tokens at the masked places of three rows."""
    ids = map_ids(run.tokenizer)
    draw = np.random.default_rng(0)
    x_BL = draw.choice(ids.ours, size=(3, 9))
    x_BL[draw.random(x_BL.shape) < 0.5] = run.tokenizer.mask_id
    rows_N = np.flatnonzero(x_BL == run.tokenizer.mask_id)
    t_B = None if time is None else torch.full((3,), time)
    with torch.no_grad():
        logits_NV = run.model(torch.from_numpy(x_BL), torch.from_numpy(rows_N), t_B=t_B)
    found_NV = logits_NV.log_softmax(1)
    order = np.append(ids.tokens_V, network.mask)
    expected = torch.cat([network.log_probabilities(order[row].tolist(), time) for row in x_BL])
    expected_N = expected[rows_N][:, ids.theirs]
    assert len(rows_N) > 5
    assert expected_N.std() > 0.3, "predictions of random weights differ from token to token"
    torch.testing.assert_close(found_NV[:, ids.ours], expected_N, atol=1e-5, rtol=0)
    others = np.setdiff1d(np.arange(run.tokenizer.num_tokens), ids.ours)
    assert (found_NV[:, others].exp() == 0).all(), "rows they have not are never predicted"


each_kind = pytest.mark.parametrize("kind", MASKS)


@each_kind
def test_an_imported_model_predicts_the_same_with_and_without_time_input(run_of, kind, tmp_path):
    network, tokenizer = PublishedNetwork(kind), str(run_of(kind))
    path = save(network, tmp_path / "w.safetensors")
    run = import_(path, tmp_path / "run", tokenizer=tokenizer)
    assert run.config.model.modulation == "constant"
    assert run.config.model.num_heads == 2, "known from the rotary buffer"
    assert_same_predictions(run, network, None)
    run = import_(path, tmp_path / "timed", tokenizer=tokenizer, time_input=True)
    for time in (0.0, 0.37, 1.0):
        assert_same_predictions(run, network, time)


@pytest.mark.parametrize("prefix", ["backbone.", "_orig_mod.", "backbone._orig_mod."])
def test_prefixes_are_taken_off_and_rows_follow_the_recipe(tmp_path, prefix):
    network = PublishedNetwork(layers=1)
    run = import_(save(network, tmp_path / "w.safetensors", prefix), tmp_path / "run")
    assert_same_predictions(run, network, None)
    assert (run.config.objective.name, run.config.law.name) == ("nelbo", "uniform")
    ends = run.canvas(length=12).ids_L[[0, -1]].tolist()
    assert ends == [run.tokenizer.bos_id, run.tokenizer.eos_id]


def test_lightnings_moving_average_is_taken_in_the_order_of_the_parameters(tmp_path):
    network, averaged = (PublishedNetwork() for _ in range(2))
    shadow = [p.detach() for p in averaged.parameters()]
    content = {
        "state_dict": {f"backbone.{n}": t for n, t in network.state_dict().items()},
        "ema": {"decay": 0.9999, "num_updates": 40, "shadow_params": shadow},
        "global_step": 40,
    }
    torch.save(content, tmp_path / "w.ckpt")
    run = import_(tmp_path / "w.ckpt", tmp_path / "run")
    assert (run.step, run.config.optim.ema) == (40, 0.9999)
    assert_same_predictions(run, averaged, None)
    assert_same_predictions(load_run(tmp_path / "run", weights="raw"), network, None)
    raw = import_(tmp_path / "w.ckpt", tmp_path / "raw", weights="raw")
    assert raw.config.optim.ema == 0
    assert_same_predictions(raw, network, None)
    shadow.pop()
    torch.save(content, tmp_path / "short.ckpt")
    with pytest.raises(UserError, match="--weights raw"):
        import_(tmp_path / "short.ckpt", tmp_path / "short")


def test_a_folder_tells_what_the_command_need_not(tmp_path):
    network = PublishedNetwork()
    weights = {f"backbone.{n}": p.detach().clone() for n, p in network.named_parameters()}
    folder = tmp_path / "theirs"
    folder.mkdir()
    about = {"model_type": "mdlm", "n_heads": 2, "model_length": 12, "time_conditioning": True}
    (folder / "config.json").write_text(json.dumps({**about, "dropout": 0.25}))
    names = sorted(weights)
    for part in range(2):
        save_file({n: weights[n] for n in names[part::2]}, folder / f"part{part}.safetensors")
    index = {n: f"part{i % 2}.safetensors" for i, n in enumerate(names)}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    run = import_(folder, tmp_path / "run", block_length=None)
    model = run.config.model
    assert (model.num_heads, model.dropout, model.time_input) == (2, 0.25, "sigma")
    assert run.config.data.block_length == 12
    assert_same_predictions(run, network, 0.6)
    (folder / "model.safetensors.index.json").unlink()
    torch.save(weights, folder / "pytorch_model.bin")
    assert_same_predictions(import_(folder, tmp_path / "bin"), network, 0.6)


def test_everything_that_does_not_fit_is_listed_and_nothing_written(tmp_path):
    weights = {n: p.detach().clone() for n, p in PublishedNetwork().named_parameters()}
    del weights["blocks.1.norm2.weight"], weights["output_layer.linear.bias"]
    weights["blocks.0.attn_qkv.bias"] = torch.zeros(48)
    weights["blocks.0.attn_out.weight"] = torch.zeros(16, 8)
    save_file(weights, tmp_path / "w.safetensors")
    with pytest.raises(UserError) as error:
        import_(tmp_path / "w.safetensors", tmp_path / "run")
    for name in (
        "blocks.1.norm2.weight [16]",
        "output_layer.linear.bias [260]",
        "blocks.0.attn_qkv.bias",
        "blocks.0.attn_out.weight is [16, 8], not [16, 16]",
    ):
        assert name in str(error.value)
    assert [path.name for path in tmp_path.iterdir()] == ["w.safetensors"]


class Pickled:
    """Stands for the objects that Lightning pickles beside the weights."""


def test_what_is_no_checkpoint_is_refused(tmp_path):
    torch.save({"state_dict": {}, "hyper_parameters": Pickled()}, tmp_path / "w.ckpt")
    with pytest.raises(UserError, match="weights_only=False"):
        import_(tmp_path / "w.ckpt", tmp_path / "run")
    for name in ("w.pt", "w.safetensors"):
        for content in (b"", b"no weights", b"PK\x03\x04broken", b"\x80\x02}q"):
            (tmp_path / name).write_bytes(content)
            with pytest.raises(UserError, match=name):
                import_(tmp_path / name, tmp_path / "run")
    other_kind = tmp_path / "duo"
    other_kind.mkdir()
    save(PublishedNetwork(), other_kind / "model.safetensors")
    (other_kind / "config.json").write_text('{"model_type": "DUO"}')
    causal = {
        name: tensor
        for name, tensor in PublishedNetwork().state_dict().items()
        if "adaLN" not in name and "sigma" not in name
    }
    save_file(causal, tmp_path / "ar.safetensors")
    for path, words in ((other_kind, "duo"), (tmp_path / "ar.safetensors", "sigma_map")):
        with pytest.raises(UserError, match=words):
            import_(path, tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("more", "names"),
    [
        ({"tokenizer": None}, "260 rows.*--tokenizer"),
        ({"tokenizer": "symbols:8"}, "symbols:8"),
        ({"heads": 4}, "--heads"),
        ({"block_length": None}, "--block-length"),
        ({"weights": "ema"}, "--weights"),
    ],
)
def test_what_the_user_must_say_is_asked_for(tmp_path, more, names):
    path = save(PublishedNetwork(), tmp_path / "w.safetensors")
    with pytest.raises(UserError, match=names):
        import_(path, tmp_path / "run", **more)
    assert not (tmp_path / "run").exists()


@each_kind
@pytest.mark.parametrize("modulation", ["constant", "time"])
def test_out_and_in_again_is_exact(run_of, kind, tmp_path, modulation):
    time_input = "sigma" if modulation == "time" else "stretched"
    options = ModelOptions(2, 16, 2, dropout=0.0, modulation=modulation, time_input=time_input)
    before = load_run(run_of(kind, model=options))
    export_mdlm(before, tmp_path / "w.safetensors")
    after = import_(
        tmp_path / "w.safetensors",
        tmp_path / "back",
        tokenizer=str(run_of(kind)),
        block_length=None,
    )
    assert after.step == 7
    assert after.config.model == options
    shared = map_ids(before.tokenizer).ours
    for name, p in before.model.named_parameters():
        found = dict(after.model.named_parameters())[name]
        if name.startswith(("head.", "embedding.")):
            p, found = p[shared], found[shared]
        assert torch.equal(p, found), name
    assert torch.equal(before.model.embedding.weight[-1], after.model.embedding.weight[-1])


@each_kind
def test_in_and_out_again_is_the_same_function(run_of, kind, tmp_path):
    network, mask = PublishedNetwork(kind), MASKS[kind]
    path = save(network, tmp_path / "in.safetensors")
    export_mdlm(import_(path, tmp_path / "run", tokenizer=str(run_of(kind))), tmp_path / "out")
    stored = {n.removeprefix("backbone."): t for n, t in load_file(tmp_path / "out").items()}
    before = network.log_probabilities([mask, 1, mask, 2], None)
    assert set(network.state_dict()) - set(stored) == {"rotary_emb.inv_freq"}
    network.load_state_dict(stored, strict=False)
    after = network.log_probabilities([mask, 1, mask, 2], None)
    others = [i for i in range(SIZES[kind]) if i != mask]
    torch.testing.assert_close(after[:, others], before[:, others], atol=1e-5, rtol=0)


NO_TIMES = {"law": LawOptions("uniform"), "objective": ObjectiveOptions("nelbo")}


@pytest.mark.parametrize(
    ("model", "sections", "names"),
    [
        ({}, {"framework": FrameworkOptions("arm"), **NO_TIMES}, "framework arm"),
        ({"modulation": "time"}, {}, "--model.time-input"),
        (
            {"modulation": "time", "time_input": "sigma"},
            {"schedule": ScheduleOptions("cosine")},
            "cosine",
        ),
        ({"mlp_ratio": 2}, {}, "MLP"),
        ({}, {"data": DataOptions(block_length=12, document_attention=True)}, "documents"),
    ],
)
def test_what_mdlm_cannot_say_is_refused(run_of, tmp_path, model, sections, names):
    options = replace(ModelOptions(2, 16, 2, dropout=0.0), **model)
    run = run_of("bytes", model=options, **sections)
    out = tmp_path / "out.safetensors"
    refuses("export", run, "--format", "mdlm", "--out", out, names=names)
    assert not list(tmp_path.iterdir())


def test_every_command_takes_an_imported_run_but_there_is_no_text_to_train_on(zoo, tmp_path):
    path = save(PublishedNetwork(), tmp_path / "w.safetensors")
    run = tmp_path / "run"
    command = ["import", path, "--format", "duo", "--out", run, "--tokenizer", "bytes"]
    succeeds(*command, "--block-length", 12)
    refuses(*command, "--block-length", 12, names=str(run))
    succeeds("generate", run, "--steps", 2, "--length", 8)
    refuses("export", run, "--format", "mdlm", "--out", tmp_path / "x", names=".safetensors")
    for text in (["train", run, "--out", tmp_path / "more"], ["evaluate", run]):
        refuses(*text, names="training text")
    assert not (tmp_path / "more" / "checkpoints").exists()
