"""Files that mean harm: nothing in them runs, leads elsewhere, fills the memory or steers a screen.

Each test is a fault that was there, or one that must never come.
"""

from __future__ import annotations

import io
import json
import os
import pickle
import tracemalloc
import zipfile

import numpy as np
import pytest
import torch
from commands import refuses
from safetensors.torch import save_file

from bellmask.compare.compare import from_comparison
from bellmask.data.readers import DOCUMENT_RULES, read_file
from bellmask.exchange.mdlm import ImportOptions, read_checkpoint, read_import
from bellmask.generate.generate import write_out
from bellmask.utils.console import print_lines
from bellmask.utils.errors import UserError
from bellmask.utils.files import MOST_LEVELS, inside, load_json, read_arrays
from bellmask.utils.table import Table

ESCAPE = "\x1b]0;owned\x07\x1b[2J"


class Harm:
    """Unpickling it makes a folder."""

    def __init__(self, place):
        self.place = place

    def __reduce__(self):
        return os.mkdir, (str(self.place),)


# --- nothing runs ----------------------------------------------------------------------------


def test_pickled_code_is_never_run(tmp_path):
    mark, path = tmp_path / "mark", tmp_path / "w.ckpt"
    harm = np.empty(1, dtype=object)
    harm[0] = Harm(mark)
    torch.save({"x": harm[0]}, path)
    with pytest.raises(UserError):
        read_checkpoint(path)
    torch.save({"state_dict": {"a": torch.zeros(2)}, "x": harm[0]}, path)
    assert list(read_checkpoint(path).weights) == ["a"]
    path.write_bytes(pickle.dumps(harm[0]))
    with pytest.raises(UserError):
        read_checkpoint(path)
    np.savez(tmp_path / "step.npz", length_B=harm)
    with pytest.raises(ValueError, match=r"[Oo]bject|pickle"):
        read_arrays(tmp_path / "step.npz")
    assert not mark.exists()


@pytest.mark.parametrize("what", ["scorer", "start", "tokenizer"])
def test_code_of_a_model_folder_is_not_run(what, tmp_path, monkeypatch):
    """Nor is the user asked for a yes that a pipe could give."""
    pytest.importorskip("transformers")
    from bellmask.data.tokenizers import from_transformers
    from bellmask.evaluate.scorer import load_scorer
    from bellmask.model.causal_lm import read_causal_lm

    folder, mark = tmp_path / "model", tmp_path / "mark"
    folder.mkdir()
    names = {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"}
    maps = {"auto_map": {**names, "AutoTokenizer": ["evil.Tok", "evil.Tok"]}}
    (folder / "config.json").write_text(json.dumps({"model_type": "evil", **maps}))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "Tok", **maps}))
    (folder / "evil.py").write_text(f"import os\nos.mkdir({str(mark)!r})\n")
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("the user was asked"))
    load = {"scorer": load_scorer, "start": read_causal_lm, "tokenizer": from_transformers}[what]
    with pytest.raises(UserError):
        load(str(folder))
    assert not mark.exists()


# --- nothing leads elsewhere -----------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["../x", "/etc/passwd", "a/b", "..", ".", "", "a\0b", "a\nb", "..\\x", 3, None, ["a"]]
)
def test_names_stay_in_their_folder(name, tmp_path):
    with pytest.raises(UserError, match="index"):
        inside(tmp_path, name, "index")


def test_weights_name_blocks_that_are_there(tmp_path):
    names = ("vocab_embed.embedding", "sigma_map.mlp.0.weight", "blocks.0.mlp.0.weight")
    weights = {name: torch.zeros(2, 2) for name in names}
    save_file({**weights, "blocks.999999.x": torch.zeros(1)}, tmp_path / "w.safetensors")
    with pytest.raises(UserError, match="missing"):
        read_import(ImportOptions(str(tmp_path / "w.safetensors"), "mdlm", "", "bytes", heads=1))


def test_a_comparison_names_runs_of_its_root(tmp_path):
    run = {"variant": "base", "seed": 1, "point": "", "run": "../elsewhere"}
    plan = {"root": ".", "reference": "base", "title": "", "failed": [], "runs": [run]}
    for damaged in (plan, {**plan, "runs": [{**run, "run": "a", "seed": "x"}]}, {"root": "."}):
        (tmp_path / "comparison.json").write_text(json.dumps(damaged))
        with pytest.raises(UserError, match="comparison"):
            from_comparison(tmp_path)


# --- nothing fills the memory or the stack ---------------------------------------------------


def test_nesting_is_limited_and_never_a_recursion_error():
    assert load_json("[" * MOST_LEVELS + "]" * MOST_LEVELS)
    for depth in (MOST_LEVELS + 1, 900, 100_000):
        for begin, end in (("[", "]"), ('{"a":', "}")):
            with pytest.raises(ValueError, match="nested too deeply"):
                load_json(begin * depth + "1" + end * depth)
    with pytest.raises(ValueError, match="digits"):
        load_json("9" * 5000)


def test_arrays_that_are_larger_than_their_file_are_not_made_room_for(tmp_path, monkeypatch):
    path = tmp_path / "a.npz"
    for shape in ((10**18,), (10**6, 10**6)):
        header = f"{{'descr': '<f8', 'fortran_order': False, 'shape': {shape}, }}".encode()
        stream = b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("x.npy", stream)
        with pytest.raises(ValueError, match="shorter than its header says"):
            read_arrays(path)
    np.savez_compressed(path, x=np.zeros(1 << 20))
    assert path.stat().st_size < 20_000
    assert read_arrays(path)["x"].shape == (1 << 20,)
    monkeypatch.setattr("bellmask.utils.files.MOST_BYTES", 1 << 20)
    with pytest.raises(ValueError, match="more than 1 MB"):
        read_arrays(path)


def test_torch_files_that_grow_are_refused(tmp_path):
    """A packed archive, and a tensor that reads one number a billion times."""
    stored, packed = tmp_path / "a.pt", tmp_path / "b.pt"
    torch.save({"a": torch.zeros(100_000)}, stored)
    with zipfile.ZipFile(stored) as old, zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as new:
        for info in old.infolist():
            new.writestr(info.filename, old.read(info))
    with pytest.raises(UserError, match="compressed"):
        read_checkpoint(packed)
    grown, meta = torch.zeros(1).expand(1 << 40), torch.empty(2, device="meta")
    for odd in (grown, torch.zeros(2).to_sparse(), meta):
        torch.save({"a": odd}, stored)
        with pytest.raises(UserError, match=r"damaged|no tensors"):
            read_checkpoint(stored)


def test_a_packed_text_is_unpacked_piece_by_piece(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    path = tmp_path / "a.txt.zst"
    path.write_bytes(pyarrow.compress(b"a line\n" * (1 << 25), "zstd", asbytes=True))
    tracemalloc.start()
    assert next(iter(read_file(path, rule=DOCUMENT_RULES["line"], column="")))
    assert tracemalloc.get_traced_memory()[1] < 128 << 20
    tracemalloc.stop()


# --- text stays text -------------------------------------------------------------------------


def test_messages_tables_and_samples_do_not_steer_the_terminal(capsys, monkeypatch):
    """Nor do brackets in names vanish, or end what nobody began."""
    for args in (["config", "show", f"x{ESCAPE}"], [f"train{ESCAPE}"]):
        assert "\x1b" not in refuses(*args, names="")
    Table(f"t{ESCAPE}", ["a[b]", f"c{ESCAPE}"], [[f"d{ESCAPE}", "[/red]"]]).print()
    print_lines([f"note{ESCAPE}"])
    shown = capsys.readouterr().out
    assert "\x1b" not in shown
    assert "a[b]" in shown
    assert "[/red]" in shown
    screen = io.StringIO()
    screen.isatty = lambda: True
    monkeypatch.setattr("sys.stdout", screen)
    write_out(f"one{ESCAPE}\ntwo\n", None)
    assert "\x1b" not in screen.getvalue()


def test_dollars_in_names_are_drawn(tmp_path):
    """A formula that is none failed the whole report."""
    from matplotlib.figure import Figure

    from bellmask.report.figures import save_figure

    figure = Figure(layout="constrained")
    axes = figure.subplots()
    axes.plot([0, 1], label="a $\\frac{ b$ \x1b")
    axes.set_title("$N_c$ and $\\nope$")
    axes.legend()
    assert all(path.stat().st_size for path in save_figure(figure, tmp_path / "plot"))
