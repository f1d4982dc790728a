"""mdlm's layout in and out, against its forward pass written a second time."""

from __future__ import annotations

import collections
import json
import math
import os
import typing
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from commands import refuses, succeeds
from safetensors.torch import load_file, save_file
from torch import nn

from bellmask.config import options as opt
from bellmask.exchange.huggingface import export_mdlm
from bellmask.exchange.mdlm import ImportOptions, read_import, write_import
from bellmask.run import load_run
from bellmask.storage.loading import map_ids
from bellmask.utils.errors import UserError

MASKS = {"bytes": 259, "bert-like": 3, "gpt2-like": 266}
SIZES = {"bytes": 260, "bert-like": 11, "gpt2-like": 267}
"""Written down by hand: BERT's mask is inside, GPT-2's comes after 266 tokens."""
WIDTH, HEADS = 16, 2
RATES = torch.tensor([1.0, 0.1, 0.01, 0.001])
"""Of RoPE with base 10000 and heads of size 8."""


def linear(name, rows, columns, *, has_bias=True):
    weight = {f"{name}.weight": torch.randn(rows, columns) / math.sqrt(columns)}
    return weight | ({f"{name}.bias": torch.randn(rows) * 0.3} if has_bias else {})


def norm(name):
    return {f"{name}.weight": 1 + torch.randn(WIDTH) * 0.3}


def published(kind="bytes", *, num_blocks=2):
    """mdlm's parameters by name and in its order, all random."""
    found = {"vocab_embed.embedding": torch.randn(SIZES[kind], WIDTH) / math.sqrt(WIDTH)}
    found |= linear("sigma_map.mlp.0", 128, 256) | linear("sigma_map.mlp.2", 128, 128)
    for number in range(num_blocks):
        block = f"blocks.{number}"
        found |= norm(f"{block}.norm1")
        found |= linear(f"{block}.attn_qkv", 3 * WIDTH, WIDTH, has_bias=False)
        found |= linear(f"{block}.attn_out", WIDTH, WIDTH, has_bias=False)
        found |= norm(f"{block}.norm2")
        found |= linear(f"{block}.mlp.0", 4 * WIDTH, WIDTH)
        found |= linear(f"{block}.mlp.2", WIDTH, 4 * WIDTH)
        found |= linear(f"{block}.adaLN_modulation", 6 * WIDTH, 128)
    found |= norm("output_layer.norm_final") | linear("output_layer.linear", SIZES[kind], WIDTH)
    return found | linear("output_layer.adaLN_modulation", 2 * WIDTH, 128)


def log_probabilities(weights, row, time, mask):
    """[L, V] of one row of their ids; ``time`` None is a model without time input."""

    def apply(name, x):
        return F.linear(x, weights[f"{name}.weight"], weights.get(f"{name}.bias"))

    def normed(name, x, shift, scale):
        return F.layer_norm(x, (WIDTH,), weights[f"{name}.weight"]) * (1 + scale) + shift

    def turn(x_LHE):
        """Coordinates i and i + E/2 as one complex number, turned by position * rate."""
        half = x_LHE.shape[-1] // 2
        angle = torch.arange(len(row))[:, None, None] * 1e4 ** -(torch.arange(half) / half)
        turned = torch.polar(torch.ones(()), angle)
        return torch.complex(x_LHE[..., :half], x_LHE[..., half:]) * turned

    sigma = 0.0 if time is None else -math.log(1 - (1 - 1e-3) * time)
    angle = sigma * 1e4 ** (-torch.arange(128) / 128)
    waves = torch.cat([angle.cos(), angle.sin()])
    condition = F.silu(apply("sigma_map.mlp.2", F.silu(apply("sigma_map.mlp.0", waves))))
    x = weights["vocab_embed.embedding"][row]
    for name in [n.removesuffix(".norm1.weight") for n in weights if n.endswith("norm1.weight")]:
        vectors = apply(f"{name}.adaLN_modulation", condition).chunk(6)
        shift1, scale1, gate1, shift2, scale2, gate2 = vectors
        inner = apply(f"{name}.attn_qkv", normed(f"{name}.norm1", x, shift1, scale1))
        q, k, v = inner.view(len(row), 3, HEADS, -1).unbind(1)
        score = torch.einsum("qhe,khe->hqk", turn(q), turn(k).conj()).real
        share = (score / math.sqrt(WIDTH // HEADS)).softmax(-1)
        seen = torch.einsum("hqk,khe->qhe", share, v).flatten(1)
        x = x + gate1 * apply(f"{name}.attn_out", seen)
        inner = apply(f"{name}.mlp.0", normed(f"{name}.norm2", x, shift2, scale2))
        x = x + gate2 * apply(f"{name}.mlp.2", F.gelu(inner, approximate="tanh"))
    vectors = apply("output_layer.adaLN_modulation", condition).chunk(2)
    logits = apply("output_layer.linear", normed("output_layer.norm_final", x, *vectors))
    logits[:, mask] -= 1e6
    return logits.log_softmax(1)


def save(weights, path, prefix=""):
    """With RoPE's buffer, which tells the size of a head."""
    stored = weights | {"rotary_emb.inv_freq": RATES}
    save_file({prefix + name: tensor for name, tensor in stored.items()}, path)
    return path


def import_(source, out, **more):
    options = ImportOptions(str(source), "mdlm", str(out), "bytes", block_length=12)
    write_import(read_import(replace(options, **more)), out)
    return load_run(out)


def assert_same_predictions(run, weights, time=None, mask=MASKS["bytes"]):
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
    order = np.append(ids.tokens_V, mask)
    theirs = torch.cat([log_probabilities(weights, order[row], time, mask) for row in x_BL])
    expected_N = theirs[rows_N][:, ids.theirs]
    assert len(rows_N) > 5
    assert expected_N.std() > 0.3, "predictions of random weights differ from token to token"
    torch.testing.assert_close(found_NV[:, ids.ours], expected_N, atol=1e-5, rtol=0)
    others = np.setdiff1d(np.arange(run.tokenizer.num_tokens), ids.ours)
    assert (found_NV[:, others].exp() == 0).all(), "rows they have not are never predicted"


each_kind = pytest.mark.parametrize("kind", MASKS)


@each_kind
def test_an_imported_model_predicts_the_same_with_and_without_time_input(run_of, kind, tmp_path):
    weights, options = published(kind), {"tokenizer": str(run_of(kind))}
    path = save(weights, tmp_path / "w.safetensors")
    run = import_(path, tmp_path / "run", **options)
    assert run.config.model.modulation == "constant"
    assert run.config.model.num_heads == 2, "known from the rotary buffer"
    assert_same_predictions(run, weights, mask=MASKS[kind])
    run = import_(path, tmp_path / "timed", **options, time_input=True)
    for time in (0.0, 0.37, 1.0):
        assert_same_predictions(run, weights, time, MASKS[kind])


def test_prefixes_are_taken_off_and_rows_follow_the_recipe(tmp_path):
    weights = published(num_blocks=1)
    path = save(weights, tmp_path / "w.safetensors", "backbone._orig_mod.")
    run = import_(path, tmp_path / "run")
    assert_same_predictions(run, weights)
    assert (run.config.objective.name, run.config.law.name) == ("nelbo", "uniform")
    ends = run.canvas(length=12)[[0, -1]].tolist()
    assert ends == [run.tokenizer.bos_id, run.tokenizer.eos_id]


def test_lightnings_moving_average_is_taken_in_the_order_of_the_parameters(tmp_path):
    weights, averaged = published(), published()
    shadow, heads = list(averaged.values()), {"heads": 2}
    content = {
        "state_dict": {f"backbone.{name}": tensor for name, tensor in weights.items()},
        "ema": {"decay": 0.9999, "num_updates": 40, "shadow_params": shadow},
        "global_step": 40,
    }
    torch.save(content, tmp_path / "w.ckpt")
    run = import_(tmp_path / "w.ckpt", tmp_path / "run", **heads)
    assert (run.step, run.config.optim.ema) == (40, 0.9999)
    assert_same_predictions(run, averaged)
    assert_same_predictions(load_run(tmp_path / "run", weights="raw"), weights)
    raw = import_(tmp_path / "w.ckpt", tmp_path / "raw", weights="raw", **heads)
    assert raw.config.optim.ema == 0
    assert_same_predictions(raw, weights)
    shadow.pop()
    torch.save(content, tmp_path / "short.ckpt")
    with pytest.raises(UserError, match="--weights raw"):
        import_(tmp_path / "short.ckpt", tmp_path / "short", **heads)


@pytest.mark.parametrize(
    ("rates", "is_theirs"),
    [
        (RATES.bfloat16(), True),
        (500_000 ** -(torch.arange(4) / 4), False),
        (torch.ones(4), False),
        (RATES.flip(0), False),
        (torch.full((2, 2), torch.nan), False),
    ],
)
def test_only_rotary_rates_of_base_10000_are_taken(tmp_path, rates, is_theirs):
    path = tmp_path / "w.safetensors"
    save_file({**published(), "rotary_emb.inv_freq": rates}, path)
    if is_theirs:
        assert import_(path, tmp_path / "run").config.model.num_heads == HEADS
        return
    with pytest.raises(UserError, match=r"rotary_emb.inv_freq.* base 10000"):
        import_(path, tmp_path / "run")


class Pickled:
    """Stands for the options and tokenizers that Lightning pickles beside the weights."""

    def __init__(self):
        self.held, self.kind = {"n": [1, 2], "all": {3}}, typing.Any


class Words(dict):
    """Of a class of its own, with items."""


class Runs:
    """What reading would run."""

    def __init__(self, call, *given):
        self.reduced = call, given

    def __reduce__(self):
        return self.reduced


def test_objects_beside_the_weights_are_left_out_and_never_run(tmp_path):
    weights, averaged, path = published(), published(), tmp_path / "w.ckpt"
    mark = tmp_path / "mark"
    harm = [Runs(os.system, f"mkdir {mark}"), Runs(eval, f"open({str(mark)!r}, 'w')")]
    stored = collections.OrderedDict((f"backbone.{n}", nn.Parameter(t)) for n, t in weights.items())
    stored._metadata = {"": {"version": 1}}
    content = {
        "hyper_parameters": {"config": Pickled(), "words": Words(a=Pickled()), Pickled: Pickled},
        "harm": [*harm, Runs(setattr, Pickled, "owned", 1)],
        "callbacks": collections.defaultdict(list, a=[np.float64(1), b"bytes", {1, 2}]),
        "optimizer_states": [{"state": {0: {"exp_avg": torch.ones(3, dtype=torch.complex64)}}}],
        "state_dict": stored,
        "ema": {"decay": 0.9999, "shadow_params": list(averaged.values())},
        "global_step": 40,
    }
    for protocol in (2, 4):
        torch.save(content, path, pickle_protocol=protocol)
        run = import_(path, tmp_path / f"run{protocol}", heads=2)
        assert (run.step, run.config.optim.ema) == (40, 0.9999)
        assert_same_predictions(run, averaged)
        assert_same_predictions(load_run(run.folder, weights="raw"), weights)
    stored["backbone.blocks.0.norm1.weight"] = harm[0]
    refused = {"missing: blocks.0.norm1.weight": content, "no tensors": harm[0]}
    for words, content in refused.items():
        torch.save(content, path)
        with pytest.raises(UserError, match=words):
            import_(path, tmp_path / "none", heads=2)
    assert not mark.exists()
    assert not hasattr(Pickled, "owned")


def test_a_folder_of_save_pretrained_tells_how_long_its_rows_are(tmp_path):
    """So does its file of weights alone."""
    transformers = pytest.importorskip("transformers")
    folder, weights = tmp_path / "theirs", published()
    about = {"model_length": 24, "n_heads": 2, "n_blocks": 2, "hidden_dim": WIDTH}
    config = transformers.PretrainedConfig(**about, time_conditioning=False)
    config.model_type = "mdlm"
    config.save_pretrained(folder)
    save(weights, folder / "model.safetensors", "backbone.")
    for number, source in enumerate((folder, folder / "model.safetensors")):
        run = import_(source, tmp_path / str(number), block_length=None)
        assert run.config.data.block_length == 24
        assert_same_predictions(run, weights)
    assert import_(folder, tmp_path / "given", block_length=12).config.data.block_length == 12
    del config.model_length
    config.save_pretrained(folder)
    with pytest.raises(UserError, match="--block-length"):
        import_(folder, tmp_path / "none", block_length=None)


def test_a_folder_tells_what_the_command_need_not(tmp_path):
    weights, folder = published(), tmp_path / "theirs"
    folder.mkdir()
    about = {"model_type": "mdlm", "n_heads": 2, "model_length": 12, "time_conditioning": True}
    (folder / "config.json").write_text(json.dumps({**about, "dropout": 0.25}))
    save_file(weights, folder / "model.safetensors")
    run = import_(folder, tmp_path / "run", block_length=None)
    model = run.config.model
    assert (model.num_heads, model.dropout, model.time_input) == (2, 0.25, "sigma")
    assert run.config.data.block_length == 12
    assert_same_predictions(run, weights, 0.6)
    (folder / "model.safetensors").unlink()
    torch.save(weights, folder / "pytorch_model.bin")
    assert_same_predictions(import_(folder, tmp_path / "bin"), weights, 0.6)


def test_everything_that_does_not_fit_is_listed_and_nothing_written(tmp_path):
    weights = published()
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


def test_what_is_no_checkpoint_is_refused(tmp_path):
    torch.save({"state_dict": Pickled()}, tmp_path / "pickled.ckpt")
    (tmp_path / "duo").mkdir()
    save(published(), tmp_path / "duo" / "model.safetensors")
    (tmp_path / "duo" / "config.json").write_text('{"model_type": "DUO"}')
    is_ar = [name for name in published() if "adaLN" not in name and "sigma" not in name]
    save_file({name: torch.ones(2, 2) for name in is_ar}, tmp_path / "ar.safetensors")
    refused = {"pickled.ckpt": "no tensors", "duo": "duo", "ar.safetensors": "sigma_map"}
    for number, content in enumerate((b"", b"no weights", b"PK\x03\x04broken", b"\x80\x02}q")):
        for name in (f"{number}.pt", f"{number}.safetensors"):
            (tmp_path / name).write_bytes(content)
            refused[name] = name
    for name, words in refused.items():
        with pytest.raises(UserError, match=words):
            import_(tmp_path / name, tmp_path / "run")
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
    path = save(published(), tmp_path / "w.safetensors")
    with pytest.raises(UserError, match=names):
        import_(path, tmp_path / "run", **more)
    assert not (tmp_path / "run").exists()


@each_kind
@pytest.mark.parametrize(
    ("modulation", "time_input"), [("constant", "stretched"), ("time", "sigma")]
)
def test_out_and_in_again_is_exact(run_of, kind, tmp_path, modulation, time_input):
    options = opt.ModelOptions(2, 16, 2, dropout=0.0, modulation=modulation, time_input=time_input)
    before, path = load_run(run_of(kind, model=options)), tmp_path / "w.safetensors"
    export_mdlm(before, path)
    after = import_(path, tmp_path / "back", tokenizer=str(run_of(kind)), block_length=None)
    assert (after.step, after.config.model) == (7, options)
    shared, found = map_ids(before.tokenizer).ours, dict(after.model.named_parameters())
    for name, p in before.model.named_parameters():
        rows = shared if name.startswith(("head.", "embedding.")) else slice(None)
        assert torch.equal(p[rows], found[name][rows]), name
    assert torch.equal(before.model.embedding.weight[-1], found["embedding.weight"][-1])


class Norm(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))


class TheirBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = Norm(), Norm()
        self.attn_qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.attn_out = nn.Linear(WIDTH, WIDTH, bias=False)
        hidden = 4 * WIDTH
        self.mlp = nn.Sequential(nn.Linear(WIDTH, hidden), nn.GELU(), nn.Linear(hidden, WIDTH))
        self.adaLN_modulation = nn.Linear(128, 6 * WIDTH)


class TheirModule(nn.Module):
    """The parameters and buffers of mdlm's Lightning module, by name."""

    def __init__(self, vocabulary):
        super().__init__()
        modules = "backbone vocab_embed sigma_map rotary_emb output_layer".split()
        backbone, embed, sigma, rotary, last = (nn.Module() for _ in modules)
        embed.embedding = nn.Parameter(torch.zeros(vocabulary, WIDTH))
        sigma.mlp = nn.Sequential(nn.Linear(256, 128), nn.SiLU(), nn.Linear(128, 128))
        rotary.register_buffer("inv_freq", torch.zeros(WIDTH // HEADS // 2))
        last.norm_final, last.linear = Norm(), nn.Linear(WIDTH, vocabulary)
        last.adaLN_modulation = nn.Linear(128, 2 * WIDTH)
        backbone.vocab_embed, backbone.sigma_map, backbone.rotary_emb = embed, sigma, rotary
        backbone.blocks = nn.ModuleList(TheirBlock() for _ in range(2))
        backbone.output_layer = last
        self.backbone = backbone


@each_kind
def test_mdlms_strict_loading_takes_an_export(run_of, kind, tmp_path):
    export_mdlm(load_run(run_of(kind)), tmp_path / "w.safetensors")
    module = TheirModule(SIZES[kind])
    module.load_state_dict(load_file(tmp_path / "w.safetensors"), strict=True)
    rates = module.backbone.rotary_emb.inv_freq
    torch.testing.assert_close(rates, RATES, rtol=1e-6, atol=0)


NO_TIMES = {"law": opt.LawOptions("uniform"), "objective": opt.ObjectiveOptions("nelbo")}
SIGMA = {"modulation": "time", "time_input": "sigma"}


@pytest.mark.parametrize(
    ("model", "sections", "names"),
    [
        ({}, {"framework": opt.FrameworkOptions("arm"), **NO_TIMES}, "framework arm"),
        ({"modulation": "time"}, {}, "--model.time-input"),
        (SIGMA, {"schedule": opt.ScheduleOptions("cosine")}, "cosine"),
        ({"mlp_ratio": 2}, {}, "MLP"),
        ({}, {"data": opt.DataOptions(block_length=12, document_attention=True)}, "documents"),
    ],
)
def test_what_mdlm_cannot_say_is_refused(run_of, tmp_path, model, sections, names):
    options = replace(opt.ModelOptions(2, 16, 2, dropout=0.0), **model)
    run = run_of("bytes", model=options, **sections)
    out = tmp_path / "out.safetensors"
    refuses("export", run, "--format", "mdlm", "--out", out, names=names)
    assert not list(tmp_path.iterdir())


def test_every_command_takes_an_imported_run_but_there_is_no_text_to_train_on(tmp_path):
    path, run = save(published(), tmp_path / "w.safetensors"), tmp_path / "run"
    command = ["import", path, "--format", "duo", "--out", run, "--tokenizer", "bytes"]
    succeeds(*command, "--block-length", 12)
    refuses(*command, "--block-length", 12, names=str(run))
    succeeds("generate", run, "--steps", 2, "--length", 8)
    refuses("export", run, "--format", "mdlm", "--out", tmp_path / "x", names=".safetensors")
    for text in (["train", run, "--out", tmp_path / "more"], ["evaluate", run]):
        refuses(*text, names="training text")
    assert not (tmp_path / "more" / "checkpoints").exists()
