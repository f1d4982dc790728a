"""Run folders, checkpoints and weights that anybody may have written: loaded, or one UserError."""

from __future__ import annotations

import hashlib
import io
import json
import shutil
from pathlib import Path

import pytest
import torch
from fuzz_tools import REFUSED, SIZES, TAKEN, as_json, changed, damaged, fuzz, json_files, values
from hypothesis import strategies as st
from safetensors.torch import save

from bellmask.compare.records import read_run
from bellmask.errors import UserError
from bellmask.exchange.hugging_face import export_hugging_face
from bellmask.exchange.imported import ImportRequest, read_import
from bellmask.exchange.loading import load
from bellmask.exchange.mdlm import Shape
from bellmask.run import load_run


def files_of(folder: Path) -> dict[str, bytes]:
    """The files that are read, by name."""
    names = ["config.json", "run.json", "tokenizer.json", "metrics.jsonl"]
    return {name: (folder / name).read_bytes() for name in names}


@pytest.mark.parametrize("size", SIZES)
def test_run_folders(size: int, finished_run: Path, tmp_path: Path) -> None:
    """Also with a backbone.json, which only runs on a causal LM have."""
    files = files_of(finished_run)
    backbone = {"language_model": {"model_type": "gpt2", "n_layer": 1}, "chat_template": "x"}
    wholes = {name: files[name] for name in ("config.json", "run.json", "tokenizer.json")}
    wholes["backbone.json"] = as_json(backbone)
    one = st.sampled_from(sorted(wholes)).flatmap(
        lambda name: st.tuples(st.just(name), json_files(json.loads(wholes[name])))
    )
    lines = st.tuples(st.just("metrics.jsonl"), damaged(files["metrics.jsonl"]))
    whole = st.just(("run.json", files["run.json"]))
    shutil.copytree(finished_run, tmp_path / "run")
    folder = tmp_path / "run"

    def check(pair: tuple[str, bytes]) -> None:
        (folder / "backbone.json").unlink(missing_ok=True)
        for name, content in (files | dict([pair])).items():
            (folder / name).write_bytes(content)
        run = load_run(folder)
        run.canvas(prefix="a", length=4)
        read_run(folder).summary()

    assert fuzz("run folders", size, st.one_of(one, lines, whole), check) == {TAKEN, REFUSED}


@pytest.mark.parametrize("size", SIZES)
def test_checkpoint_files(size: int, finished_run: Path, tmp_path: Path) -> None:
    """Changed after they were written, or with a manifest that was made to fit."""
    folder = tmp_path / "run"
    shutil.copytree(finished_run, folder)
    place = next((folder / "checkpoints").glob("step-*"))
    files = {path.name: path.read_bytes() for path in place.iterdir()}
    tensors = next(name for name in files if name.endswith(".safetensors"))
    one = st.one_of(
        st.tuples(st.just("state.json"), json_files(json.loads(files["state.json"]))),
        st.tuples(st.just("manifest.json"), json_files(json.loads(files["manifest.json"]))),
        st.tuples(st.just(tensors), damaged(files[tensors][:4000])),
        st.tuples(st.just(tensors), headers(files[tensors])),
        st.just(("state.json", files["state.json"])),
    )

    def check(case: tuple[tuple[str, bytes], bool]) -> None:
        (name, content), fits = case
        for other in place.iterdir():
            other.unlink()
        now = {**files, name: content}
        if fits and name != "manifest.json":
            now["manifest.json"] = manifest(now)
        for other, held in now.items():
            (place / other).write_bytes(held)
        assert type(load_run(folder).step) is int

    outcomes = fuzz("checkpoint files", size, st.tuples(one, st.booleans()), check)
    assert outcomes == {TAKEN, REFUSED}


def manifest(files: dict[str, bytes]) -> bytes:
    return as_json(
        {
            name: {"bytes": len(held), "sha256": hashlib.sha256(held).hexdigest()}
            for name, held in files.items()
            if name != "manifest.json"
        }
    )


@st.composite
def headers(draw: st.DrawFn, whole: bytes) -> bytes:
    """A safetensors file whose header says something else of the same numbers."""
    length = int.from_bytes(whole[:8], "little")
    header = json.loads(whole[8 : 8 + length])
    text = as_json(draw(changed(header) | values))
    claimed = draw(st.sampled_from([len(text)] * 6 + [0, 10**18, 2**64 - 1, len(text) + 1]))
    return claimed.to_bytes(8, "little") + text + whole[8 + length :]


def published() -> dict[str, torch.Tensor]:
    """Weights of zeros in mdlm's layout: 1 block, 259 bytes and the mask."""
    shape = Shape(num_layers=1, width=8, mlp_width=32, condition=4, vocabulary=260)
    return {f"backbone.{name}": torch.zeros(size) for name, size in shape.layout().items()}


def as_torch(content: object) -> bytes:
    stream = io.BytesIO()
    torch.save(content, stream)
    return stream.getvalue()


@pytest.mark.parametrize("size", SIZES)
def test_weights_to_import(size: int, tmp_path: Path) -> None:
    weights = published()
    about = {"n_heads": 2, "model_length": 16, "dropout": 0.1, "step": 3, "packing": "packed"}
    whole = save(weights, metadata={"bellmask": json.dumps(about)})
    own = changed(about).map(lambda tree: save(weights, metadata={"bellmask": json.dumps(tree)}))
    lightning = {"state_dict": weights, "global_step": 3, "ema": {"decay": 0.9}}
    other = {**lightning, "ema": {"shadow_params": list(weights.values()), "decay": 0.5}}
    odd = {**lightning, "state_dict": [1], "global_step": "x"}
    pickled = st.sampled_from([as_torch(tree) for tree in (lightning, other, odd, weights)])
    config = {"model_type": "mdlm", **about}
    shards = {"weight_map": dict.fromkeys(weights, "model.safetensors")}
    folder = tmp_path / "folder"
    folder.mkdir()
    inputs = st.one_of(
        st.tuples(st.just("w.safetensors"), st.one_of(st.just(whole), own, headers(whole))),
        st.tuples(st.just("w.safetensors"), damaged(whole[:3000]) | st.binary()),
        st.tuples(st.just("w.pt"), st.one_of(pickled, pickled.flatmap(damaged), st.binary())),
        st.tuples(st.just("folder/config.json"), json_files(config)),
        st.tuples(st.just("folder/model.safetensors.index.json"), json_files(shards)),
    )

    def check(pair: tuple[str, bytes]) -> None:
        for path in folder.iterdir():
            path.unlink()
        (folder / "model.safetensors").write_bytes(whole)
        (tmp_path / pair[0]).write_bytes(pair[1])
        is_folder = pair[0].startswith("folder")
        source = folder if is_folder else tmp_path / pair[0]
        request = ImportRequest(tokenizer="bytes", heads=2, block_length=16)
        assert read_import(str(source), request).num_parameters > 0

    assert fuzz("weights to import", size, inputs, check) == {TAKEN, REFUSED}


def test_a_pickled_index_beside_a_checkpoint_is_not_opened(
    finished_run: Path, tmp_path: Path
) -> None:
    """torch's other checkpoint format keeps its index as a pickle, named .metadata."""
    folder, mark = tmp_path / "run", tmp_path / "mark"
    shutil.copytree(finished_run, folder)
    harm = f"cos\nmkdir\n(S{str(mark)!r}\ntR.".encode()
    for place in (folder / "checkpoints").glob("step-*"):
        (place / ".metadata").write_bytes(harm)
    assert load_run(folder).step == 2
    assert not mark.exists()


def test_a_config_larger_than_the_weights_is_refused_unbuilt(
    finished_run: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    shutil.copytree(finished_run, folder)
    config = json.loads((folder / "config.json").read_text())
    for option, value in (("num_layers", 10**9), ("width", 1 << 30), ("mlp_ratio", 1 << 40)):
        changed_one = {**config, "model": {**config["model"], option: value}}
        (folder / "config.json").write_text(json.dumps(changed_one))
        with pytest.raises(UserError):
            load_run(folder)


def test_an_export_does_not_say_where_caches_go(finished_run: Path, tmp_path: Path) -> None:
    export_hugging_face(load_run(finished_run), tmp_path / "export", weights="raw")
    path = tmp_path / "export" / "bellmask" / "config.json"
    config = json.loads(path.read_text())
    config["data"]["cache"] = str(tmp_path / "elsewhere")
    path.write_text(json.dumps(config))
    assert load(tmp_path / "export").config.data.cache is None
