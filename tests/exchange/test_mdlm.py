"""mdlm's layout in and out, against its forward pass written a second time."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import bellmask
from bellmask.cli import run_command
from bellmask.config import RunConfig
from bellmask.errors import UserError
from bellmask.exchange.hugging_face import export_mdlm
from bellmask.exchange.imported import ImportRequest, import_checkpoint
from bellmask.exchange.vocabulary import map_ids
from bellmask.options import (
    DataOptions,
    FrameworkOptions,
    LawOptions,
    ModelOptions,
    ObjectiveOptions,
    ScheduleOptions,
)
from bellmask.run import load_run

KINDS = ["bytes", "bert-like", "gpt2-like"]
MASKS = {"bytes": 259, "bert-like": 3, "gpt2-like": 266}
SIZES = {"bytes": 260, "bert-like": 11, "gpt2-like": 267}
"""Written down by hand: BERT's mask is inside, GPT-2's comes after 266 tokens."""


@pytest.fixture(scope="module", params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def published(tools: SimpleNamespace, kind: str):
    return tools.PublishedNetwork(SIZES[kind], MASKS[kind])


@pytest.fixture
def tokenizer_run(tools: SimpleNamespace, kind: str, tmp_path: Path) -> str:
    """A run folder that holds the tokenizer, to be given as --tokenizer."""
    return str(tools.write_run(tmp_path / "words", tools.TOKENIZERS[kind]()))


def save(network, path: Path, prefix: str = "") -> Path:
    save_file({prefix + n: t.clone() for n, t in network.state_dict().items()}, path)
    return path


def import_(source: Path, out: Path, tokenizer: str, **more) -> bellmask.Run:
    request = ImportRequest(tokenizer=tokenizer, block_length=12, **more)
    import_checkpoint(str(source), out, request)
    return load_run(out)


def assert_same_predictions(run: bellmask.Run, network, time: float | None) -> None:
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


def test_a_model_without_time_input_predicts_the_same(
    published, tokenizer_run: str, tmp_path: Path
) -> None:
    run = import_(save(published, tmp_path / "w.safetensors"), tmp_path / "run", tokenizer_run)
    assert run.config.model.modulation == "constant"
    assert run.config.model.num_heads == 2, "known from the rotary buffer"
    assert_same_predictions(run, published, None)


@pytest.mark.parametrize("time", [0.0, 0.37, 1.0])
def test_a_model_with_time_input_keeps_it(
    published, tokenizer_run: str, tmp_path: Path, time: float
) -> None:
    path = save(published, tmp_path / "w.safetensors", "backbone.")
    run = import_(path, tmp_path / "run", tokenizer_run, has_time=True)
    assert_same_predictions(run, published, time)
    row = [published.mask, 1, 2]
    now, later = (published.log_probabilities(row, t) for t in (time, 0.5 * time + 0.1))
    assert (now - later).abs().max() > 0.01, "the time matters"


def test_only_a_pad_of_our_own_has_no_row(tools: SimpleNamespace) -> None:
    assert len(map_ids(tools.TOKENIZERS["bert-like"]()).ours) == 10
    gpt2 = tools.TOKENIZERS["gpt2-like"]()
    assert set(range(gpt2.num_tokens)) - set(map_ids(gpt2).ours.tolist()) == {gpt2.pad_id}
    assert sorted(map_ids(gpt2).completed()) == list(range(gpt2.num_tokens + 1))


@pytest.mark.parametrize("prefix", ["", "backbone.", "_orig_mod.", "backbone._orig_mod."])
def test_prefixes_are_taken_off(tools: SimpleNamespace, tmp_path: Path, prefix: str) -> None:
    network = tools.PublishedNetwork(260, 259, layers=1)
    run = import_(save(network, tmp_path / "w.safetensors", prefix), tmp_path / "run", "bytes")
    assert_same_predictions(run, network, None)


def test_lightnings_moving_average_is_taken_in_the_order_of_the_parameters(
    tools: SimpleNamespace, tmp_path: Path
) -> None:
    network, averaged = (tools.PublishedNetwork(260, 259) for _ in range(2))
    content = {
        "state_dict": {f"backbone.{n}": t for n, t in network.state_dict().items()},
        "ema": {
            "decay": 0.9999,
            "num_updates": 40,
            "shadow_params": [p.detach() for p in averaged.parameters()],
        },
        "global_step": 40,
    }
    torch.save(content, tmp_path / "w.ckpt")
    run = import_(tmp_path / "w.ckpt", tmp_path / "run", "bytes")
    assert (run.step, run.config.optim.ema) == (40, 0.9999)
    assert_same_predictions(run, averaged, None)
    assert_same_predictions(load_run(tmp_path / "run", weights="raw"), network, None)
    raw = import_(tmp_path / "w.ckpt", tmp_path / "raw", "bytes", weights="raw")
    assert raw.config.optim.ema == 0
    assert_same_predictions(raw, network, None)
    content["ema"]["shadow_params"].pop()
    torch.save(content, tmp_path / "short.ckpt")
    with pytest.raises(UserError, match=r"29 tensors, the model 30.*--weights raw"):
        import_(tmp_path / "short.ckpt", tmp_path / "short", "bytes")


def test_a_folder_tells_what_the_command_need_not(tools: SimpleNamespace, tmp_path: Path) -> None:
    network = tools.PublishedNetwork(260, 259)
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
    import_checkpoint(str(folder), tmp_path / "run", ImportRequest(tokenizer="bytes"))
    run = load_run(tmp_path / "run")
    model = run.config.model
    assert (model.num_heads, model.dropout, model.time_input) == (2, 0.25, "sigma")
    assert run.config.data.block_length == 12
    assert_same_predictions(run, network, 0.6)
    (folder / "model.safetensors.index.json").unlink()
    torch.save(weights, folder / "pytorch_model.bin")
    import_checkpoint(str(folder), tmp_path / "bin", ImportRequest(tokenizer="bytes"))
    assert_same_predictions(load_run(tmp_path / "bin"), network, 0.6)


def test_an_imported_run_has_no_text_to_train_on(
    tools: SimpleNamespace, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    path = save(tools.PublishedNetwork(260, 259), tmp_path / "w.safetensors")
    import_(path, tmp_path / "run", "bytes", heads=2)
    out = str(tmp_path / "more")
    for args in (
        ["train", str(tmp_path / "run"), "--out", out],
        ["evaluate", str(tmp_path / "run")],
    ):
        assert run_command(args) == 2
        assert "its training text is not here" in capsys.readouterr().err
    assert not (tmp_path / "more" / "checkpoints").exists()


def test_everything_that_does_not_fit_is_listed_and_nothing_written(
    tools: SimpleNamespace, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    weights = {
        n: p.detach().clone() for n, p in tools.PublishedNetwork(260, 259).named_parameters()
    }
    del weights["blocks.1.norm2.weight"], weights["output_layer.linear.bias"]
    weights["blocks.0.attn_qkv.bias"] = torch.zeros(48)
    weights["blocks.0.attn_out.weight"] = torch.zeros(16, 8)
    save_file(weights, tmp_path / "w.safetensors")
    before = sorted(tmp_path.iterdir())
    args = [str(tmp_path / "w.safetensors"), "--format", "mdlm", "--out", str(tmp_path / "run")]
    assert run_command(["import", *args]) == 2
    error = capsys.readouterr().err
    assert "4 tensors do not fit" in error
    for line in (
        "missing: blocks.1.norm2.weight [16]",
        "missing: output_layer.linear.bias [260]",
        "not known: blocks.0.attn_qkv.bias",
        "blocks.0.attn_out.weight is [16, 8], not [16, 16]",
    ):
        assert line in error
    assert sorted(tmp_path.iterdir()) == before


class Tokenizerish:
    """Stands for the objects that Lightning pickles beside the weights."""


def test_pickled_objects_are_refused_with_a_way_out(tmp_path: Path) -> None:
    torch.save({"state_dict": {}, "hyper_parameters": Tokenizerish()}, tmp_path / "w.ckpt")
    with pytest.raises(UserError, match=r"weights_only=False(.|\n)*import weights\.pt"):
        import_(tmp_path / "w.ckpt", tmp_path / "run", "bytes")


@pytest.mark.parametrize("content", [b"", b"no weights", b"PK\x03\x04broken", b"\x80\x02}q"])
@pytest.mark.parametrize(
    ("name", "message"),
    [("w.pt", r"w\.pt is not a torch file"), ("w.safetensors", r"cannot read .*w\.safetensors")],
)
def test_what_is_no_checkpoint_is_refused(
    tmp_path: Path, name: str, message: str, content: bytes
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=message):
        import_(tmp_path / name, tmp_path / "run", "bytes")


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"tokenizer": None}, "260 rows, neither GPT-2's 50258 nor BERT's 30522"),
        ({"tokenizer": "symbols:8"}, "needs an embedding of 9 rows"),
        ({"heads": 4}, "4 by --heads, 2 by the file's rotary buffer"),
        ({"block_length": None}, "--block-length"),
        ({"weights": "ema"}, "no moving average"),
    ],
)
def test_what_the_user_must_say_is_asked_for(
    tools: SimpleNamespace, tmp_path: Path, more: dict, message: str
) -> None:
    path = save(tools.PublishedNetwork(260, 259), tmp_path / "w.safetensors")
    request = replace(ImportRequest(tokenizer="bytes", block_length=12), **more)
    with pytest.raises(UserError, match=message):
        import_checkpoint(str(path), tmp_path / "run", request)
    assert not (tmp_path / "run").exists()


def test_other_kinds_of_models_are_refused(tools: SimpleNamespace, tmp_path: Path) -> None:
    network = tools.PublishedNetwork(260, 259)
    causal = {
        n: t for n, t in network.state_dict().items() if "adaLN" not in n and "sigma" not in n
    }
    save_file(causal, tmp_path / "ar.safetensors")
    with pytest.raises(UserError, match="autoregressive models have no sigma_map"):
        import_(tmp_path / "ar.safetensors", tmp_path / "run", "bytes")
    save(network, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text('{"model_type": "DUO"}')
    with pytest.raises(UserError, match=r"duo model by its config\.json"):
        import_(tmp_path, tmp_path / "run", "bytes")


def test_their_recipes_decide_how_rows_look(tools: SimpleNamespace, tmp_path: Path) -> None:
    run = import_(save(tools.PublishedNetwork(260, 259), tmp_path / "w.safetensors"),
                  tmp_path / "run", "bytes")  # fmt: skip
    assert run.is_wrapped
    assert (run.config.objective.name, run.config.law.name) == ("nelbo", "uniform")
    ends = run.canvas(length=12).ids_L[[0, -1]].tolist()
    assert ends == [run.tokenizer.bos_id, run.tokenizer.eos_id]


@pytest.mark.parametrize("modulation", ["constant", "time"])
def test_out_and_in_again_is_exact(
    tools: SimpleNamespace, kind: str, tokenizer_run: str, tmp_path: Path, modulation: str
) -> None:
    time_input = "sigma" if modulation == "time" else "stretched"
    options = ModelOptions(2, 16, 2, dropout=0.0, modulation=modulation, time_input=time_input)
    tokenizer = tools.TOKENIZERS[kind]()
    before = load_run(tools.write_run(tmp_path / "run", tokenizer, options))
    export_mdlm(before, tmp_path / "w.safetensors")
    request = ImportRequest(tokenizer=tokenizer_run)
    import_checkpoint(str(tmp_path / "w.safetensors"), tmp_path / "back", request)
    after = load_run(tmp_path / "back")
    assert after.step == 7
    assert after.config.model == options
    kept = map_ids(tokenizer).ours
    for name, p in before.model.named_parameters():
        found = dict(after.model.named_parameters())[name]
        if name.startswith(("head.", "embedding.")):
            p, found = p[kept], found[kept]
        assert torch.equal(p, found), name
    assert torch.equal(before.model.embedding.weight[-1], after.model.embedding.weight[-1])


def test_in_and_out_again_is_the_same_function(
    published, kind: str, tokenizer_run: str, tmp_path: Path
) -> None:
    run = import_(save(published, tmp_path / "in.safetensors"), tmp_path / "run", tokenizer_run)
    export_mdlm(run, tmp_path / "out.safetensors")
    stored = load_file(tmp_path / "out.safetensors")
    theirs = dict(published.named_parameters())
    assert set(stored) == {f"backbone.{name}" for name in theirs}
    for name, p in theirs.items():
        found = stored[f"backbone.{name}"]
        assert found.shape == p.shape
        if "adaLN" in name or "sigma_map" in name:
            continue  # the fold cannot be undone
        if "output_layer.linear" in name:  # nobody reads the mask's logit
            assert not torch.equal(found[MASKS[kind]], p[MASKS[kind]])
            found, p = (torch.cat([t[: MASKS[kind]], t[MASKS[kind] + 1 :]]) for t in (found, p))
        assert torch.equal(found, p), name
    weights = {n.removeprefix("backbone."): t for n, t in stored.items()}
    row = [MASKS[kind], 1, MASKS[kind], 2]
    before = published.log_probabilities(row, None)
    published.load_state_dict(weights, strict=False)
    after = published.log_probabilities(row, None)
    others = [i for i in range(SIZES[kind]) if i != MASKS[kind]]
    torch.testing.assert_close(after[:, others], before[:, others], atol=1e-5, rtol=0)


NO_TIMES = {"law": LawOptions("uniform"), "objective": ObjectiveOptions("nelbo")}


@pytest.mark.parametrize(
    ("model", "sections", "message"),
    [
        ({}, {"framework": FrameworkOptions("arm"), **NO_TIMES}, "causal model .framework arm"),
        ({}, {"framework": FrameworkOptions("aoarm"), **NO_TIMES}, "causal"),
        ({"modulation": "time"}, {}, "1000 t"),
        (
            {"modulation": "time", "time_input": "sigma"},
            {"schedule": ScheduleOptions("cosine")},
            "cosine schedule",
        ),
        ({"mlp_ratio": 2}, {}, "4 widths"),
        ({}, {"data": DataOptions(block_length=12, document_attention=True)}, "inside documents"),
    ],
)
def test_what_mdlm_cannot_say_is_refused(
    tools: SimpleNamespace, tmp_path: Path, model: dict, sections: dict, message: str
) -> None:
    options = replace(ModelOptions(2, 16, 2, dropout=0.0), **model)
    folder = tools.write_run(tmp_path / "run", tools.TOKENIZERS["bytes"](), options, **sections)
    with pytest.raises(UserError, match=message):
        export_mdlm(load_run(folder), tmp_path / "out.safetensors")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["run"]


def test_old_runs_keep_their_keys_and_new_time_inputs_have_others() -> None:
    plain = RunConfig()
    assert "model.time_input" not in plain.key_options()
    sigma = replace(plain, model=replace(plain.model, time_input="sigma"))
    assert sigma.key_options()["model.time_input"] == "sigma"
    assert sigma.fingerprint() != plain.fingerprint()


def test_the_time_is_fed_as_each_option_says() -> None:
    from bellmask.model.modulation import TimeEmbedding

    t = torch.tensor([0.25])
    for name, fed in (("stretched", 250.0), ("sigma", -math.log(1 - 0.999 * 0.25))):
        embedding = TimeEmbedding(name)
        embedding.into = torch.nn.Identity()
        embedding.out = torch.nn.Identity()
        waves = [math.cos(fed * 1e4 ** (-i / 128)) for i in range(128)]
        waves += [math.sin(fed * 1e4 ** (-i / 128)) for i in range(128)]
        expected = torch.nn.functional.silu(torch.nn.functional.silu(torch.tensor(waves)))
        torch.testing.assert_close(embedding(t)[0], expected, atol=5e-5, rtol=0)


def test_the_commands_say_what_they_read(
    tools: SimpleNamespace, tmp_path: Path, capsys: pytest.CaptureFixture, text_file: Path
) -> None:
    path = save(tools.PublishedNetwork(260, 259), tmp_path / "w.safetensors")
    run, out = str(tmp_path / "run"), str(tmp_path / "back.safetensors")
    more = ["--tokenizer", "bytes", "--block-length", "12"]
    assert run_command(["import", str(path), "--format", "duo", "--out", run, *more]) == 0
    shown = capsys.readouterr()
    assert "31 (" in shown.out
    assert "2, 16, 2" in shown.out
    assert "reading" in shown.err
    assert run_command(["import", str(path), "--format", "duo", "--out", run, *more]) == 2
    assert "exists" in capsys.readouterr().err
    measure = ["--data", str(text_file), "--blocks", "4", "--draws", "1"]
    assert run_command(["evaluate", run, *measure]) == 0
    assert run_command(["generate", run, "--steps", "2", "--length", "8"]) == 0
    assert run_command(["export", run, "--format", "mdlm", "--out", out]) == 0
    assert run_command(["export", run, "--format", "mdlm", "--out", str(tmp_path / "x")]) == 2
    assert "NAME.safetensors" in capsys.readouterr().err
