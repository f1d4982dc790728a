"""Folders that somebody changed by hand: each is a fault that was there."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from bellmask.cli import run_command
from bellmask.compare.comparison import write_report
from bellmask.compare.records import read_run
from bellmask.compare.results import Entry
from bellmask.errors import UserError
from bellmask.train.manifest import MANIFEST, digest

NINES = "9" * 400


@pytest.fixture
def run(finished_run: Path, tmp_path: Path) -> Path:
    """A copy to be changed."""
    return Path(shutil.copytree(finished_run, tmp_path / "run"))


@pytest.fixture
def refused(capsys: pytest.CaptureFixture[str]) -> Callable[..., None]:
    """``refused(words, *args)``: the command ends with exit code 2 and one message."""

    def check(words: str, *args: object) -> None:
        capsys.readouterr()
        assert run_command([str(a) for a in args]) == 2
        said = capsys.readouterr().err
        assert said.startswith("error: ")
        assert words in said, said

    return check


def change(path: Path, **values: Any) -> None:
    """Replace keys of a JSON file; new ones come first."""
    content = json.loads(path.read_text())
    path.write_text(json.dumps({**values, **{k: content[k] for k in content if k not in values}}))


@pytest.mark.parametrize(
    "more",
    [
        {"tyro_write_completion": ["bash", "{target}"]},
        {"tyro-write-completion": ["bash", "{target}"]},
        {"tyro_print_completion": "nosh"},
        {"tyro_print_completion": "bash"},
        {"help": 1},
        {"h": 1},
        {"log": {"trackers": ["--help"]}},
        {"data": {"train": "--help"}},
        {"data": {"train": "-h"}},
    ],
    ids=str,
)
def test_a_config_has_options_of_a_run_and_no_others(
    more: dict[str, Any], run: Path, tmp_path: Path, refused: Callable[..., None]
) -> None:
    """The parser's own options write files and end the program."""
    target = tmp_path / "target"
    more = json.loads(json.dumps(more).replace("{target}", str(target)))
    change(run / "config.json", **more)
    (tmp_path / "some.json").write_text(json.dumps(more))
    for words in (
        ["config", "show", run / "config.json"],
        ["config", "show", "tiny", "--config", tmp_path / "some.json"],
        ["evaluate", run],
        ["generate", run],
    ):
        refused(".json", *words)
    assert not target.exists()


def test_links_beside_a_file_are_not_written_through(run: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.write_text("mine")
    (run / "evaluation").mkdir()
    for name in (".evaluation.json.writing", "context_curve.png", ".context_curve.svg.writing"):
        (run / "evaluation" / name).symlink_to(other)
    assert run_command(["evaluate", str(run)]) == 0
    assert other.read_text() == "mine"


def test_a_run_beyond_all_measure_is_said_to_be_so(run: Path, refused: Callable[..., None]) -> None:
    (folder,) = (run / "checkpoints").glob("step-*")
    (shard,) = folder.glob("*.safetensors")
    draw = torch.Generator().manual_seed(0)
    weights = load_file(shard)
    for name, value in weights.items():
        if name.startswith("model.head"):
            weights[name] = 1e7 * torch.randn(value.shape, generator=draw)
    save_file(weights, shard)
    change(folder / MANIFEST, **{shard.name: digest(shard)})
    refused("its training diverged", "evaluate", run)


def test_training_goes_on_where_the_perplexity_is_no_number(run: Path, tmp_path: Path) -> None:
    """A rate that is far too high: the NLL is beyond what exp takes."""
    options = "--optim.lr 30 --optim.warmup-steps 0 --train.steps 6 --optim.clip 0".split()
    out = tmp_path / "wild"
    line = ["train", str(run / "config.json"), *options, "--validation.every", "2 steps"]
    assert run_command([*line, "--out", str(out), "--quiet"]) in (0, 1)
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    checks = [line for line in lines if line["kind"] == "validation"]
    assert any(line["perplexity"] is None for line in checks)


def report_of(run: Path, out: Path, failed: tuple[str, ...] = ()) -> None:
    """A comparison of one run with itself."""
    write_report([Entry("base", 1, "", read_run(run))], "base", out, failed=failed)


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        *[("nll", value, "step 2 is not finite") for value in (np.nan, np.inf, -1e308, None)],
        *[("seconds", value, "seconds is no finite number") for value in (np.nan, 1e308, None)],
        ("nll", "x", "nll is no number"),
    ],
)
def test_lines_that_cannot_be_calculated_with_are_named(
    field: str, value: Any, words: str, run: Path, tmp_path: Path
) -> None:
    path = run / "metrics.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    lines = [{**one, field: value} if one["kind"] == "validation" else one for one in lines]
    path.write_text("\n".join(map(json.dumps, lines)))
    with pytest.raises(UserError, match=words):
        report_of(run, tmp_path / "report")
    assert not (tmp_path / "report").exists()


@pytest.mark.parametrize("value", [np.nan, np.inf, 1e308])
def test_evaluations_that_cannot_be_calculated_with_are_named(
    value: float, run: Path, tmp_path: Path
) -> None:
    (path,) = (run / "validation").glob("*.npz")
    with np.load(path) as stored:
        arrays = {name: stored[name] for name in stored.files}
    np.savez(path, **{**arrays, "ce_BR": np.full_like(arrays["ce_BR"], value)})
    with pytest.raises(UserError, match="step 2 is not finite"):
        report_of(run, tmp_path / "report")


def test_a_report_of_changed_folders_is_made(run: Path, tmp_path: Path) -> None:
    """Samples that are no text, an empty failure, a reference that is no number."""
    (run / "samples" / "step-000000002.txt").write_bytes(b"\xff\xfe")
    change(run / "run.json", unigram_nll="x")
    out = tmp_path / "report"
    report_of(run, out, ("", "two\nlines"))
    assert "no ARM run" in (out / "report.html").read_text()


@pytest.mark.parametrize("name", ["config.json", "run.json", "tokenizer.json"])
def test_a_pipe_in_the_place_of_a_file_is_not_waited_for(
    name: str, run: Path, refused: Callable[..., None]
) -> None:
    (run / name).unlink()
    os.mkfifo(run / name)
    refused("not a file", "generate", run)


def test_a_causal_lm_needs_its_description(run: Path, refused: Callable[..., None]) -> None:
    content = json.loads((run / "config.json").read_text())
    model, start = {**content["model"], "backbone": "causal_lm"}, {**content["start"], "model": "x"}
    change(run / "config.json", model=model, start=start)
    refused("no backbone.json", "generate", run)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("train.steps", NINES),
        ("train.batch_size", 10**15),
        ("model.width", 2**40),
        ("model.num_layers", 10**9),
        ("data.block_length", 10**12),
        ("validation.every", f"{NINES} steps"),
        ("validation.every", "9e999 steps"),
        ("data.cache", "a\0b"),
    ],
)
def test_options_have_limits(
    option: str, value: Any, run: Path, refused: Callable[..., None]
) -> None:
    section, name = option.split(".")
    content = json.loads((run / "config.json").read_text())
    value = int(value) if value == NINES else value
    change(run / "config.json", **{section: {**content[section], name: value}})
    refused(option, "config", "show", run / "config.json")
