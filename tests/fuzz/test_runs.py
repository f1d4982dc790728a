"""Run folders, checkpoints and weights that anybody may have written: loaded, or one UserError."""

from __future__ import annotations

import io
import json
import os

import pytest
import torch
from commands import refuses, succeeds
from fault_tools import sign
from fuzz_tools import SIZES, as_json, changed, damaged, fuzz, json_files, values
from hypothesis import strategies as st
from safetensors.torch import save

from bellmask.compare.compare import write_report
from bellmask.compare.results import Entry, read_run
from bellmask.exchange.huggingface import export_hugging_face
from bellmask.exchange.mdlm import ImportOptions, Shape, read_import
from bellmask.run import load_run
from bellmask.storage.loading import load
from bellmask.utils.errors import UserError


@pytest.fixture
def run(copy_run):
    return copy_run("base")


def change(path, **new):
    """Replace keys of a JSON file, of sections too; new ones come first."""
    old = json.loads(path.read_text())
    for name, value in new.items():
        if isinstance(value, dict) and isinstance(old.get(name), dict):
            new[name] = {**old[name], **value}
    path.write_text(json.dumps({**new, **{k: old[k] for k in old if k not in new}}))


# --- fuzzed ----------------------------------------------------------------------------------


@pytest.mark.parametrize("size", SIZES)
def test_run_folders(size, run):
    """Also with a backbone.json, which only runs on a causal LM have."""
    names = ("config.json", "run.json", "tokenizer.json", "metrics.jsonl")
    files = {name: (run / name).read_bytes() for name in names}
    backbone = {"language_model": {"model_type": "gpt2", "n_layer": 1}, "chat_template": "x"}
    trees = {name: json.loads(files[name]) for name in names[:3]} | {"backbone.json": backbone}
    one = st.sampled_from(sorted(trees)).flatmap(
        lambda name: st.tuples(st.just(name), json_files(trees[name]))
    )
    lines = st.tuples(st.just("metrics.jsonl"), damaged(files["metrics.jsonl"]))

    def check(pair):
        (run / "backbone.json").unlink(missing_ok=True)
        for name, content in (files | dict([pair])).items():
            (run / name).write_bytes(content)
        load_run(run).canvas(prefix="a", length=4)
        read_run(run).summary()

    inputs = st.one_of(one, lines, st.just(("run.json", files["run.json"])))
    fuzz(8 * size, inputs, check)


@st.composite
def headers(draw, whole):
    """A safetensors file whose header says something else of the same numbers."""
    length = int.from_bytes(whole[:8], "little")
    text = as_json(draw(changed(json.loads(whole[8 : 8 + length])) | values))
    claimed = draw(st.sampled_from([len(text)] * 6 + [0, 10**18, 2**64 - 1, len(text) + 1]))
    return claimed.to_bytes(8, "little") + text + whole[8 + length :]


@pytest.mark.parametrize("size", SIZES)
def test_checkpoint_files(size, run):
    """Changed after they were written, or with a manifest that was made to fit."""
    (place,) = (run / "checkpoints").glob("step-*")
    files = {path.name: path.read_bytes() for path in place.iterdir()}
    (tensors,) = (name for name in files if name.endswith(".safetensors"))
    one = st.one_of(
        st.tuples(st.just("state.json"), json_files(json.loads(files["state.json"]))),
        st.tuples(st.just("manifest.json"), json_files(json.loads(files["manifest.json"]))),
        st.tuples(st.just(tensors), damaged(files[tensors][:4000]) | headers(files[tensors])),
        st.just(("state.json", files["state.json"])),
    )

    def check(case):
        (name, content), fits = case
        for other, held in {**files, name: content}.items():
            (place / other).write_bytes(held)
        if fits and name != "manifest.json":
            sign(place)
        assert type(load_run(run).step) is int

    fuzz(10 * size, st.tuples(one, st.booleans()), check)


def as_torch(content):
    stream = io.BytesIO()
    torch.save(content, stream)
    return stream.getvalue()


@pytest.mark.parametrize("size", SIZES)
def test_weights_to_import(size, tmp_path):
    """Zeros in mdlm's layout: 1 block, 259 bytes and the mask."""
    shape = Shape(num_layers=1, width=8, mlp_width=32, condition=4, vocabulary=260)
    weights = {f"backbone.{name}": torch.zeros(size) for name, size in shape.layout().items()}
    about = {"n_heads": 2, "model_length": 16, "dropout": 0.1, "step": 3, "packing": "packed"}
    whole = save(weights, metadata={"bellmask": json.dumps(about)})
    own = changed(about).map(lambda tree: save(weights, metadata={"bellmask": json.dumps(tree)}))
    lightning = {"state_dict": weights, "global_step": 3, "ema": {"decay": 0.9}}
    other = {**lightning, "ema": {"shadow_params": list(weights.values()), "decay": 0.5}}
    odd = {**lightning, "state_dict": [1], "global_step": "x"}
    pickled = st.sampled_from([as_torch(tree) for tree in (lightning, other, odd, weights)])
    shards = {"weight_map": dict.fromkeys(weights, "model.safetensors")}
    inputs = st.one_of(
        st.tuples(st.just("w.safetensors"), st.one_of(st.just(whole), own, headers(whole))),
        st.tuples(st.just("w.safetensors"), damaged(whole[:3000]) | st.binary()),
        st.tuples(st.just("w.pt"), st.one_of(pickled, pickled.flatmap(damaged), st.binary())),
        st.tuples(st.just("folder/config.json"), json_files({"model_type": "mdlm", **about})),
        st.tuples(st.just("folder/model.safetensors.index.json"), json_files(shards)),
    )
    folder = tmp_path / "folder"
    folder.mkdir()

    def check(pair):
        for path in folder.iterdir():
            path.unlink()
        (folder / "model.safetensors").write_bytes(whole)
        path = tmp_path / pair[0]
        path.write_bytes(pair[1])
        source = folder if path.parent == folder else path
        options = ImportOptions(str(source), "mdlm", "", "bytes", heads=2, block_length=16)
        assert read_import(options).num_parameters > 0

    fuzz(20 * size, inputs, check)


# --- changed by hand -------------------------------------------------------------------------


@pytest.mark.parametrize(
    "more",
    [
        {"tyro_write_completion": ["bash", "target"]},
        {"tyro-print-completion": "bash"},
        {"help": 1},
        {"log": {"trackers": ["--help"]}},
        {"data": {"train": "-h"}},
    ],
)
def test_a_config_has_options_of_a_run_and_no_others(more, run, tmp_path, monkeypatch):
    """The parser's own options write files and end the program."""
    monkeypatch.chdir(tmp_path)
    change(run / "config.json", **more)
    (tmp_path / "some.json").write_text(json.dumps(more))
    refuses("config", "show", "tiny", "--config", "some.json", names="some.json")
    refuses("generate", run, names="config.json")
    assert not (tmp_path / "target").exists()


@pytest.mark.parametrize(
    ("section", "value"),
    [
        ("model", {"width": 2**40}),
        ("validation", {"every": f"{'9' * 400} steps"}),
        ("data", {"cache": "a\0b"}),
    ],
    ids=lambda value: str(value)[:20],
)
def test_options_have_limits(section, value, run):
    change(run / "config.json", **{section: value})
    refuses("config", "show", run / "config.json", names=f"{section}.{next(iter(value))}")
    with pytest.raises(UserError):
        load_run(run)  # not built


def test_a_config_larger_than_the_weights_is_refused_unbuilt(run):
    change(run / "config.json", model={"width": 1 << 20})
    refuses("generate", run, names="larger model")


def test_files_that_are_links_or_pipes(run, tmp_path):
    """Nothing is written through a link, and a pipe is not waited for."""
    other = tmp_path / "other"
    other.write_text("mine")
    (run / "evaluation").mkdir()
    for name in (".evaluation.json.writing", "context_curve.png", ".context_curve.svg.writing"):
        (run / "evaluation" / name).symlink_to(other)
    succeeds("evaluate", run)
    assert other.read_text() == "mine"
    for name in ("config.json", "run.json", "tokenizer.json"):
        held = (run / name).read_bytes()
        (run / name).unlink()
        os.mkfifo(run / name)
        refuses("generate", run, names=name)
        (run / name).unlink()
        (run / name).write_bytes(held)
    change(run / "config.json", model={"backbone": "causal_lm"}, start={"model": "x"})
    refuses("generate", run, names="backbone.json")


def test_a_pickled_index_beside_a_checkpoint_is_not_opened(run, tmp_path):
    """torch's other checkpoint format keeps its index as a pickle, named .metadata."""
    (place,) = (run / "checkpoints").glob("step-*")
    (place / ".metadata").write_bytes(f"cos\nmkdir\n(S'{tmp_path}/mark'\ntR.".encode())
    assert load_run(run).step == 60
    assert not (tmp_path / "mark").exists()


# --- reports ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [("nll", -1e308, "step 30"), ("nll", "x", "nll"), ("seconds", None, "seconds")],
)
def test_numbers_that_cannot_be_calculated_with_are_named(field, value, words, run, tmp_path):
    path = run / "metrics.jsonl"
    lines = map(json.loads, path.read_text().splitlines())
    lines = [{**one, field: value} if one["kind"] == "validation" else one for one in lines]
    path.write_text("\n".join(map(json.dumps, lines)))
    with pytest.raises(UserError, match=words):
        write_report(tmp_path / "report", [Entry("base", "", read_run(run))], "base", "", [])
    assert not (tmp_path / "report").exists()


def test_an_export_does_not_say_where_caches_go(run, tmp_path):
    export_hugging_face(load_run(run), tmp_path / "export", weights="raw")
    change(tmp_path / "export" / "bellmask" / "config.json", data={"cache": str(tmp_path)})
    assert load(tmp_path / "export").config.data.cache is None
