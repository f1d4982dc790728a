"""Stop anywhere, resume, and nothing differs from the uninterrupted run: bit for bit."""

from __future__ import annotations

import json
import math
import os
import shutil
import signal

import pytest
import torch
from commands import refuses, succeeds
from fault_tools import (
    assert_same,
    checkpoints,
    command,
    fingerprint,
    last_step,
    lines_of,
    tensors_of,
)

from bellmask.config.presets import preset
from bellmask.diffusion.laws import DensityLaw
from bellmask.diffusion.objectives import Bell
from bellmask.diffusion.progress import ProgressLaw
from bellmask.train.step import TrainStep
from bellmask.train.train_run import train_run
from bellmask.utils.errors import UserError

OPTIONS = (
    "--model.dropout 0.2 --train.microbatch-size 4 --validation.draws 2 --log.every 4 "
    "--train.random-length-fraction 0.3 --checkpoint.keep-last 1"
).split()


def signal_at(monkeypatch, step):
    """SIGTERM while that step is made."""
    call = TrainStep.begin

    def then_signal(self, number):
        if number + 1 == step:
            os.kill(os.getpid(), signal.SIGTERM)
        return call(self, number)

    monkeypatch.setattr(TrainStep, "begin", then_signal)


@pytest.mark.parametrize(
    ("name", "options", "stops"),
    [
        ("tiny", "", (1, 7)),
        ("tiny_aoarm", "--optimizer muon", (4,)),
        ("tiny_fast", "", (4,)),
        ("tiny_arm", "", (5,)),
        pytest.param("tiny_sigma_arm", "", (2, 4, 8), marks=pytest.mark.long),
        pytest.param("tiny_base", "--optimizer muon", (1, 2, 4, 5, 7, 8), marks=pytest.mark.long),
    ],
)
def test_resuming_is_exact(name, options, stops, small_config, tmp_path, monkeypatch):
    """With dropout, accumulation, random lengths and averages over steps that span the stop."""
    rest = f"--train.steps 9 --validation.every 3 {options}".split()
    config = small_config(*OPTIONS, *rest, start=preset(name))
    train_run(config, tmp_path / "whole", is_quiet=True)
    for stop in stops:
        with monkeypatch.context() as patch:
            signal_at(patch, stop)
            stopped = train_run(config, tmp_path / "parts", resume="auto", is_quiet=True)
        assert (stopped.step, stopped.stopped_by) == (stop, signal.SIGTERM)
        state = json.loads((checkpoints(tmp_path / "parts")[-1] / "state.json").read_text())
        assert state["nll"] is None  # of a step that was not validated
    with (tmp_path / "parts" / "metrics.jsonl").open("a") as stream:  # of after the checkpoint
        stream.write(json.dumps({"kind": "train", "step": stop + 1, "loss": 99.0}) + "\n")
        stream.write('{"kind": "train", "st')  # torn by a kill
    result = train_run(config, tmp_path / "parts", resume="yes", is_quiet=True)
    assert (result.step, result.stopped_by) == (9, None)
    assert_same(tmp_path / "parts", tmp_path / "whole")


SFT = "--sft.train toy:reverse:3 --sft.min-masks 1 --sft.round-to 8 --data.block-length 48"


@pytest.mark.parametrize("options", ["", SFT])
def test_a_law_that_changes_resumes_exactly(options, small_config, tmp_path, monkeypatch):
    """Stopped where a probe was, where its law is planned but not in use yet, and between."""
    monkeypatch.setattr(ProgressLaw, "every", 2)
    rest = f"--law progress --train.steps 9 --validation.every 3 {options}".split()
    keep = "--train.microbatch-size 4 --log.every 4 --checkpoint.keep-last 1".split()
    config = small_config(*keep, *rest)
    train_run(config, tmp_path / "whole", is_quiet=True)
    for stop in (4, 5, 7):
        with monkeypatch.context() as patch:
            signal_at(patch, stop)
            train_run(config, tmp_path / "parts", resume="auto", is_quiet=True)
    train_run(config, tmp_path / "parts", resume="yes", is_quiet=True)
    assert_same(tmp_path / "parts", tmp_path / "whole")
    laws = [line for line in lines_of(tmp_path / "whole") if line["kind"] == "law"]
    assert [line["step"] for line in laws] == [2, 4, 6, 8]
    assert len({tuple(line["parameters"]) for line in laws}) > 1
    state = json.loads((checkpoints(tmp_path / "whole")[-1] / "state.json").read_text())
    assert state["law"]["laws"][-1] == [9, *laws[-1]["parameters"]]


def resume(run, *args, out=None, how="auto"):
    return ["train", run / "config.json", "--out", out or run, "--resume", how, "--quiet", *args]


def test_options_that_would_break_a_resume_are_refused_and_others_taken(copy_run):
    run, ordered = copy_run("steps"), copy_run("sigma_arm")
    before = fingerprint(run)
    for option, value in {
        "optim.lr": "0.5",
        "optim.curve": "cosine",
        "law.name": "laplace",
        "train.seed": "9",
        "train.batch_size": "32",
        "validation.seed": "5",
    }.items():
        flag = option.removesuffix(".name").replace("_", "-")
        refuses(*resume(run, f"--{flag}", value), names=f"{option}: was")
    assert fingerprint(run) == before
    changed = "--train.steps 62 --log.every 1 --train.microbatch-size 2 --validation.every 2"
    succeeds(*resume(run, *changed.split(), "--checkpoint.keep-last", "1"))
    assert last_step(run) == 62
    refuses(*resume(ordered, "--framework.order-seed", "77"), names="framework.order_seed: was")
    succeeds(*resume(ordered, "--framework.order-seed", "1"))  # the run's seed: as it was


def test_changed_text_is_refused(copy_run, zoo, tmp_path):
    run, text = copy_run("bell"), tmp_path / "text.txt"
    text.write_text((zoo / "text.txt").read_text())
    config = json.loads((run / "config.json").read_text())
    config["data"]["train"] = str(text)
    (run / "config.json").write_text(json.dumps(config))
    succeeds(*resume(run))
    text.write_text((zoo / "text.txt").read_text()[5:])
    refuses(*resume(run), names=f"training text has changed since {run} was started; restore it")


def test_folders_in_use_are_refused(copy_run, zoo, tmp_path):
    run, photos = copy_run("bell"), tmp_path / "photos"
    photos.mkdir()
    (photos / "me.png").write_bytes(b"0")
    before = fingerprint(run)
    refuses(*resume(run, out=tmp_path / "new", how="yes"), names="new has no run")
    refuses(*resume(run, how="no"), names="already has a run")
    refuses(*resume(run, out=photos), names="photos")
    refuses(*resume(run, how="ato"), names="'auto'")
    assert fingerprint(run) == before
    assert (photos / "me.png").exists()


@pytest.mark.parametrize(
    "countdowns",
    [
        pytest.param((0, 4, 13, 9, 17), id="phases"),
        pytest.param(tuple(range(50)), id="every place", marks=pytest.mark.long),
    ],
)
def test_a_kill_in_the_middle_of_a_save_loses_nothing(countdowns, small_config, tmp_path, warm):
    config = small_config("--train.steps", "5", "--checkpoint.every", "1", *OPTIONS)
    train_run(config, tmp_path / "whole", is_quiet=True)
    kills, args = 0, command(config, tmp_path / "run", "--quiet")
    for countdown in countdowns:
        process = warm.start(args, prepare=["fault_hooks.kill_at_touch", countdown])
        assert process.wait() in (0, -signal.SIGKILL), process.text()
        kills += process.code != 0
    assert kills >= 3
    train_run(config, tmp_path / "run", resume="auto", is_quiet=True)
    for older in checkpoints(tmp_path / "run")[:-1]:  # a kill before the last save removed it
        shutil.rmtree(older)
    assert_same(tmp_path / "run", tmp_path / "whole")


def test_a_law_given_in_python_is_trained_with_named_and_insisted_on(small_config, tmp_path):
    law = DensityLaw(lambda t: t * (1 - t))
    config = small_config("--train.steps", "4", "--checkpoint.every", "2")
    train_run(config, tmp_path / "own", law=law, is_quiet=True)
    train_run(config, tmp_path / "objective", objective=Bell(law), is_quiet=True)
    assert_same(tmp_path / "own", tmp_path / "objective")
    train_run(config, tmp_path / "named", is_quiet=True)
    losses = [lines_of(tmp_path / name)[0]["loss"] for name in ("own", "named")]
    assert losses[0] != losses[1]
    about = json.loads((tmp_path / "own" / "run.json").read_text())
    assert "DensityLaw" in about["objective"]
    longer = config.with_options({"train.steps": 6})
    for other in ({}, {"law": DensityLaw(lambda t: t)}):
        with pytest.raises(UserError, match="law or objective"):
            train_run(longer, tmp_path / "own", resume="auto", is_quiet=True, **other)
    same = DensityLaw(lambda t: 3 * t * (1 - t))  # the same law: densities are normalized
    assert train_run(longer, tmp_path / "own", resume="auto", law=same, is_quiet=True).step == 6
    with pytest.raises(UserError, match="its own law"):
        train_run(config, tmp_path / "both", law=law, objective=Bell(law))
    with pytest.raises(UserError, match="no times"):
        train_run(small_config(start=preset("tiny_arm")), tmp_path / "arm", law=law)


def test_a_run_folder_in_place_of_a_preset_goes_on(small_config, tmp_path, monkeypatch):
    config = small_config("--train.steps", "4")
    train_run(config, tmp_path / "run", is_quiet=True)
    monkeypatch.chdir(tmp_path)
    succeeds("resume", "run", "--train.steps", "6", "--quiet")
    assert last_step(tmp_path / "run") == 6
    succeeds("train", "run", "--resume", "auto", "--train.steps", "8", "--quiet")
    assert last_step(tmp_path / "run") == 8
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == ["run"]


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_numbers_that_are_read_a_step_later_are_the_same(
    optimizer, small_config, tmp_path, monkeypatch
):
    """As on a GPU, with steps that the device skips; no average, which is rounded otherwise."""
    forward, init = TrainStep._forward, TrainStep.__init__
    spoil = {3: math.nan, 7: math.inf}

    def late(self, *args, **more):
        init(self, *args, **more)
        self.reads_late = True

    monkeypatch.setattr(
        TrainStep, "_forward", lambda self, n, each: forward(self, n, each) * spoil.get(n, 1.0)
    )
    rest = f"--train.steps 11 --validation.every 5 --optim.ema 0 --optimizer {optimizer}".split()
    config = small_config(*OPTIONS, *rest, start=preset("tiny"))
    train_run(config, tmp_path / "at_once", is_quiet=True)
    monkeypatch.setattr(TrainStep, "__init__", late)
    train_run(config, tmp_path / "late", is_quiet=True)
    runs = [tmp_path / "late", tmp_path / "at_once"]
    ours, theirs = (tensors_of(checkpoints(run)[-1]) for run in runs)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert lines_of(runs[0]) == lines_of(runs[1])
    skipped = [(run / "skipped.jsonl").read_text() for run in runs]
    assert skipped[0] == skipped[1]
    assert [json.loads(line)["step"] for line in skipped[0].splitlines()] == [4, 8]
