"""Files that mean harm: nothing in them runs, leads elsewhere, fills the memory or steers a screen.

Each test is a fault that was there, or one that must never come.
"""

from __future__ import annotations

import io
import json
import os
import pickle
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer as Inner
from tokenizers import models

from bellmask.arrays import read_arrays
from bellmask.cli import run_command
from bellmask.commands.generating import write_out
from bellmask.compare.comparison import from_comparison
from bellmask.compare.records import read_run
from bellmask.data.blocks import open_blocks, shard_path
from bellmask.data.formats import read_file
from bellmask.data.messages import Message
from bellmask.data.templates import Template
from bellmask.data.tokenizer import ByteTokenizer, FastTokenizer, from_description
from bellmask.data.vocabularies import load_tokenizer
from bellmask.errors import UserError
from bellmask.exchange.imported import ImportRequest, read_import
from bellmask.exchange.weights import read_checkpoint
from bellmask.files import write_text
from bellmask.generate.canvas import canvas_from_text
from bellmask.generate.prompts import read_prompts
from bellmask.generate.trace_file import load_trace
from bellmask.judge.chat import Request
from bellmask.judge.transcript import Transcript
from bellmask.kept import Kept
from bellmask.outside import MOST_LEVELS, inside, load_json
from bellmask.records import read_metrics
from bellmask.report.console import print_lines, print_plain_table

ESCAPE = "\x1b]0;owned\x07\x1b[2J"


class Harm:
    """Unpickling it makes a folder."""

    def __init__(self, place: Path) -> None:
        self.place = place

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.place),)


# --- nothing runs ----------------------------------------------------------------------------


@pytest.mark.parametrize("content", ["alone", "beside weights", "old format"])
def test_pickled_code_is_never_run(content: str, tmp_path: Path) -> None:
    mark, path = tmp_path / "mark", tmp_path / "w.ckpt"
    if content == "old format":
        path.write_bytes(pickle.dumps(Harm(mark)))
    else:
        weights = {} if content == "alone" else {"state_dict": {"a": torch.zeros(2)}}
        torch.save({**weights, "x": Harm(mark)}, path)
    with pytest.raises(UserError):
        read_checkpoint(path)
    assert not mark.exists()


def test_pickled_arrays_are_refused(tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    array = np.empty(1, dtype=object)
    array[0] = Harm(mark)
    np.savez(tmp_path / "step.npz", length_B=array)
    with pytest.raises(ValueError, match=r"[Oo]bject|pickle"):
        read_arrays(tmp_path / "step.npz")
    assert not mark.exists()


@pytest.mark.parametrize("what", ["scorer", "start", "tokenizer"])
def test_code_of_a_model_folder_is_not_run(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor is the user asked for a yes that a pipe could give."""
    pytest.importorskip("transformers")
    from bellmask.causal_lm import read_causal_lm
    from bellmask.data.tokenizer import from_transformers
    from bellmask.evaluate.load_scorer import load_scorer

    folder, mark = tmp_path / "model", tmp_path / "mark"
    folder.mkdir()
    names = {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"}
    maps = {"auto_map": {**names, "AutoTokenizer": ["evil.Tok", "evil.Tok"]}}
    (folder / "config.json").write_text(json.dumps({"model_type": "evil", **maps}))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "Tok", **maps}))
    (folder / "evil.py").write_text(f"import os\nos.mkdir({str(mark)!r})\n")
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("the user was asked"))
    load = {
        "scorer": load_scorer,
        "start": read_causal_lm,
        "tokenizer": from_transformers,
    }[what]
    with pytest.raises(UserError):
        load(str(folder))  # type: ignore[operator]
    assert not mark.exists()


# --- nothing leads elsewhere -----------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["../x", "/etc/passwd", "a/b", "..", ".", "", "a\0b", "a\nb", "..\\x", 3, None, ["a"]]
)
def test_names_stay_in_their_folder(name: Any, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="only names in its own folder"):
        inside(tmp_path, name, "index")


def test_an_index_of_weights_names_files_of_its_folder(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(2)}, tmp_path / "secret.safetensors")
    folder = tmp_path / "model"
    folder.mkdir()
    index = folder / "model.safetensors.index.json"
    for name in ("../secret.safetensors", str(tmp_path / "secret.safetensors")):
        index.write_text(json.dumps({"weight_map": {"a": name}}))
        with pytest.raises(UserError, match="own folder"):
            read_checkpoint(folder)
    index.write_text(json.dumps({"weight_map": ["a"]}))
    with pytest.raises(UserError, match="does not say"):
        read_checkpoint(folder)


def test_a_comparison_names_runs_of_its_root(tmp_path: Path) -> None:
    run = {"variant": "base", "seed": 1, "point": "", "run": "../elsewhere"}
    plan = {"root": ".", "reference": "base", "title": "", "failed": [], "runs": [run]}
    (tmp_path / "comparison.json").write_text(json.dumps(plan))
    with pytest.raises(UserError, match="own folder"):
        from_comparison(tmp_path)
    (tmp_path / "comparison.json").write_text(json.dumps({**plan, "runs": [{**run, "seed": "x"}]}))
    with pytest.raises(UserError, match="damaged"):
        from_comparison(tmp_path)


# --- nothing fills the memory or the stack ---------------------------------------------------


def nested(depth: int) -> str:
    return "[" * depth + "]" * depth


def test_nesting_is_limited_and_never_a_recursion_error() -> None:
    assert load_json(nested(MOST_LEVELS))
    for depth in (MOST_LEVELS + 1, 900, 100_000):
        with pytest.raises(ValueError, match="nested too deeply"):
            load_json(nested(depth))
        with pytest.raises(ValueError, match="nested too deeply"):
            load_json(b'{"a":' * depth + b"1" + b"}" * depth)
    with pytest.raises(ValueError, match="digits"):
        load_json("9" * 5000)


def test_files_of_nested_lists_are_refused_or_skipped(tmp_path: Path) -> None:
    path = tmp_path / "file.json"
    path.write_text(nested(5000) + "\n")
    for read in (load_trace, Kept, Transcript):
        with pytest.raises(UserError):
            read(path)
    assert read_metrics(path) == []


@pytest.mark.parametrize("shape", ["(10**18,)", "(10**6, 10**6)"])
def test_an_array_shorter_than_it_says_is_not_made_room_for(shape: str, tmp_path: Path) -> None:
    shape = str(eval(shape))
    header = f"{{'descr': '<f8', 'fortran_order': False, 'shape': {shape}, }}".encode()
    stream = b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header
    with zipfile.ZipFile(tmp_path / "a.npz", "w") as archive:
        archive.writestr("x.npy", stream)
    with pytest.raises(ValueError, match="shorter than it says"):
        read_arrays(tmp_path / "a.npz")


def test_an_archive_that_unpacks_to_gigabytes_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    np.savez_compressed(tmp_path / "a.npz", x=np.zeros(1 << 20))
    assert (tmp_path / "a.npz").stat().st_size < 20_000
    assert read_arrays(tmp_path / "a.npz")["x"].shape == (1 << 20,)
    monkeypatch.setattr("bellmask.arrays.MOST_BYTES", 1 << 20)
    with pytest.raises(ValueError, match="more than 1 MB"):
        read_arrays(tmp_path / "a.npz")


def test_torch_files_that_grow_are_refused(tmp_path: Path) -> None:
    """A packed archive, and a tensor that reads one number a billion times."""
    stored, packed = tmp_path / "a.pt", tmp_path / "b.pt"
    torch.save({"a": torch.zeros(100_000)}, stored)
    with zipfile.ZipFile(stored) as old, zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as new:
        for info in old.infolist():
            new.writestr(info.filename, old.read(info))
    with pytest.raises(UserError, match="packed"):
        read_checkpoint(packed)
    for odd in (
        torch.zeros(1).expand(1 << 40),
        torch.zeros(2).to_sparse(),
        torch.empty(2, device="meta"),
    ):
        torch.save({"a": odd}, stored)
        with pytest.raises(UserError, match="damaged"):
            read_checkpoint(stored)


def test_a_block_number_is_no_number_of_blocks(tmp_path: Path) -> None:
    names = ("vocab_embed.embedding", "sigma_map.mlp.0.weight", "blocks.0.mlp.0.weight")
    weights = {name: torch.zeros(2, 2) for name in names}
    save_file({**weights, "blocks.999999.x": torch.zeros(1)}, tmp_path / "w.safetensors")
    with pytest.raises(UserError, match="missing"):
        read_import(str(tmp_path / "w.safetensors"), ImportRequest(tokenizer="bytes", heads=1))


@pytest.mark.parametrize("gap", ["[MASK*99999999999999]", f"[MASK*{'9' * 5000}]", "[MASK*1048577]"])
def test_gaps_are_limited(gap: str) -> None:
    with pytest.raises(UserError, match="1,048,576 tokens at most"):
        canvas_from_text(ByteTokenizer(), f"a {gap}")


def test_a_packed_text_is_unpacked_piece_by_piece(tmp_path: Path) -> None:
    zstandard = pytest.importorskip("zstandard")
    from bellmask.data.formats import _ZstdReader

    content = zstandard.ZstdCompressor().compress(b"a line\n" * (1 << 25))
    assert len(content) > 2 * _ZstdReader.CHUNK
    reader = _ZstdReader(io.BytesIO(content), zstandard.ZstdDecompressor())
    reader.readinto(bytearray(10))
    assert len(reader._ready) < 128 << 20
    (tmp_path / "a.txt.zst").write_bytes(zstandard.ZstdCompressor().compress(b"a\nb\n" * 9999))
    assert len(list(read_file(tmp_path / "a.txt.zst", rule="line", column=""))) == 2 * 9999


# --- no bytes crash a reader -----------------------------------------------------------------


@pytest.mark.parametrize("name", ["bpe:²", f"bpe:{'9' * 5000}", "bpe:99999999999", "symbols:²"])
def test_numbers_in_names(name: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="write"):
        load_tokenizer(name, tmp_path, lambda: ("", lambda: iter(["a"])))


def test_halves_of_characters_are_question_marks(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "a \\ud800 b"}')
    (prompt,) = read_prompts(path)
    assert prompt.text == "a ? b"
    inner = Inner(models.WordLevel({"a": 0, "?": 1}, unk_token="?"))
    for tokenizer in (ByteTokenizer(), FastTokenizer(inner, eos=0)):
        assert (tokenizer.encode("\udcff") == tokenizer.encode("?")).all()
        assert (tokenizer.encode_batch(["\udcff"])[0] == tokenizer.encode("?")).all()
    write_text(tmp_path / "out.txt", "x\udcff")
    assert (tmp_path / "out.txt").read_bytes() == b"x?"


@pytest.mark.parametrize(
    "change",
    [
        {"inner": "{}"},
        {"inner": 3},
        {"specials": {"eos": 7}},
        {"specials": {"eos": -1}},
        {"specials": {"eos": 0, "other": 1}},
        {"specials": None},
        {"kind": "symbols", "num_tokens": "8"},
        {"kind": "symbols", "num_tokens": 10**30},
        {"kind": ["fast"]},
    ],
)
def test_damaged_tokenizers_are_refused(change: dict[str, Any]) -> None:
    inner = Inner(models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    whole = FastTokenizer(inner, eos=0).description()
    assert from_description(whole).num_tokens == 3
    with pytest.raises(UserError):
        from_description({**whole, **change})
    sparse = whole["inner"].replace('"b":1', '"b":1000000000')
    assert sparse != whole["inner"]
    with pytest.raises(UserError, match="ids without tokens"):
        from_description({**whole, "inner": sparse})


@pytest.mark.parametrize(
    "change",
    [{"dtype": "O"}, {"dtype": "float64"}, {"rows_per_shard": 0}, {"num_blocks": 10**18}, {"x": 1}],
)
def test_damaged_data_caches_are_refused(change: dict[str, Any], tmp_path: Path) -> None:
    card = {"fingerprint": "k", "num_blocks": 2, "block_length": 4, "rows_per_shard": 2}
    card |= {"dtype": "uint16", "num_bytes": 8}
    shard_path(tmp_path, 0).write_bytes(bytes(16))
    lengths = np.array([4, 4 if change != {"x": 1} else 5])
    (tmp_path / "lengths.bin").write_bytes(lengths.tobytes())
    (tmp_path / "documents.bin").write_bytes(np.arange(2).tobytes())
    (tmp_path / "card.json").write_text(json.dumps({**card, **change}))
    with pytest.raises(UserError, match="damaged"):
        open_blocks(tmp_path, "k")


@pytest.mark.parametrize(
    "source",
    [
        "{% for i in range(9) %}" * 30 + "{% endfor %}" * 30,
        "{{ '\ud800' }}{% if",
        "{{ " + "(" * 900,
    ],
)
def test_templates_that_do_not_compile(source: str) -> None:
    with pytest.raises(UserError, match="not valid"):
        Template("chat", source).parts((Message("user", "a"),), is_conversation=True)


@pytest.mark.parametrize(
    "reply", [{"text": 3}, {"text": "m", "top_logprobs": {"m": "x"}}, "m", {"other": 1}, None]
)
def test_a_transcript_with_other_things_is_damaged(reply: Any, tmp_path: Path) -> None:
    request = Request("judge", (("user", "a"),))
    (tmp_path / "t.jsonl").write_text(json.dumps({"key": request.key, "reply": reply}) + "\n")
    with pytest.raises(UserError, match="line 1 is damaged"):
        Transcript(tmp_path / "t.jsonl")


def test_metrics_that_are_no_numbers_are_named(tmp_path: Path) -> None:
    from bellmask.presets import tiny

    line = {"kind": "validation", "step": tiny().train.steps, "nll": "low", "seconds": 1.0}
    (tmp_path / "config.json").write_text(json.dumps(tiny().to_dict()))
    (tmp_path / "metrics.jsonl").write_text(json.dumps(line) + "\n")
    with pytest.raises(UserError, match="nll is no number"):
        read_run(tmp_path)


# --- text stays text -------------------------------------------------------------------------


def test_error_messages_do_not_steer_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["config", "show", f"x{ESCAPE}"]) == 2
    assert run_command([f"train{ESCAPE}"]) == 2
    assert "\x1b" not in capsys.readouterr().err


def test_tables_and_notes_do_not_steer_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    """Nor do brackets in names vanish, or end what nobody began."""
    print_plain_table(f"t{ESCAPE}", ["a[b]", f"c{ESCAPE}"], [[f"d{ESCAPE}", "[/red]"]])
    print_lines([f"note{ESCAPE}"])
    shown = capsys.readouterr().out
    assert "\x1b" not in shown
    assert "a[b]" in shown
    assert "[/red]" in shown


def test_samples_on_a_screen_are_harmless_and_in_a_pipe_as_they_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for is_screen in (True, False):
        stream = io.StringIO()
        monkeypatch.setattr(stream, "isatty", lambda is_screen=is_screen: is_screen)
        monkeypatch.setattr("sys.stdout", stream)
        write_out(f"one{ESCAPE}\ntwo\n", None)
        assert ("\x1b" in stream.getvalue()) != is_screen
        assert stream.getvalue().count("\n") == 2


def test_dollars_in_names_are_drawn(tmp_path: Path) -> None:
    """A formula that is none failed the whole report."""
    from matplotlib.figure import Figure

    from bellmask.report.plots import save_figure

    figure = Figure(layout="constrained")
    axes = figure.subplots()
    axes.plot([0, 1], label="a $\\frac{ b$ \x1b")
    axes.set_xticks([0, 1], ["$_^$", "x"])
    axes.set_title("$N_c$ and $\\nope$")
    axes.legend()
    assert all(path.stat().st_size for path in save_figure(figure, tmp_path / "plot"))
