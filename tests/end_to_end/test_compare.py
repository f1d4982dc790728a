"""Comparisons as a user runs them: what is written, shared, reused, refused, and survives kills."""

from __future__ import annotations

import json
import os
import random
import shlex
import shutil
import signal
import time
from pathlib import Path

import pytest
from commands import bellmask, refuses, succeeds
from train_here import train_here

from bellmask.compare.execute import PlannedRun, is_finished
from bellmask.config.config import load_config
from bellmask.storage.run_folder import TIME_FIELDS, read_metrics

SMALL = (
    "--data.block-length 16 --model.num-layers 1 --model.width 16 --model.num-heads 2 "
    "--train.batch-size 8 --optim.warmup-steps 2 --validation.blocks 32 --log.every 2"
).split()
SHORT = "--train.steps=12 --validation.every=3 --checkpoint.every=4".split()
OTHER_AVERAGES = "ema=--objective nelbo --law uniform --optim.ema 0.5"
VARIANTS = ["base", "bell", "same=--objective nelbo --law uniform", OTHER_AVERAGES]


@pytest.fixture(scope="module")
def compare_args(text_file, tmp_path_factory):
    """``compare_args(variants, place, ...)``: results in place/out, trainings in place/runs."""
    data = ["--data.train", str(text_file), "--data.cache", str(tmp_path_factory.mktemp("cache"))]

    def build(variants, place, *more):
        where = ["--out", str(place / "out"), "--runs", str(place / "runs")]
        return ["compare", "tiny", *variants, *SMALL, *data, *where, *more]

    return build


def results_of(place):
    return json.loads((place / "out" / "results.json").read_text(), parse_constant=pytest.fail)


def timeless(value):
    """Without what a clock decides."""
    if isinstance(value, dict):
        kept = {k: v for k, v in value.items() if k not in TIME_FIELDS and "time_" not in k}
        return {key: timeless(part) for key, part in kept.items()}
    return [timeless(part) for part in value] if isinstance(value, list) else value


def run_folders(place):
    return sorted(p for p in (place / "runs").iterdir() if p.name != ".locks")


def folder_of(place, variant):
    (run,) = results_of(place)["variants"][variant]["runs"]
    return place / "runs" / run["run"]


@pytest.fixture(scope="module")
def undisturbed(compare_args, tmp_path_factory):
    """base, bell, base under another name, and base with other averages."""
    place = tmp_path_factory.mktemp("undisturbed")
    with pytest.MonkeyPatch.context() as patch:
        trained = train_here(patch)
        said = succeeds(*compare_args(VARIANTS, place, *SHORT))
    assert trained == ["base", "bell", "ema"]
    assert str(place / "out" / "report.html") in said.text
    return place


def test_a_comparison_writes_what_it_promises(undisturbed):
    """Its numbers are pinned in tests/frozen."""
    out = undisturbed / "out"
    assert {p.suffix for p in out.iterdir()} == {".json", ".png", ".svg", ".html"}
    assert (out / "report.html").read_text().count("<svg") == 2 + len(VARIANTS)
    variants = results_of(undisturbed)["variants"]
    bell = {"law.name": "gaussian", "law.mu": 0.5, "law.scale": 0.1, "objective.name": "bell"}
    changed = {"base": {}, "bell": bell, "same": {}, "ema": {"optim.ema": 0.5}}
    assert {name: variant["options"] for name, variant in variants.items()} == changed
    same = variants["same"]["comparison"]
    assert (same["gap"], same["gap_se"], same["speed_up"]["mean"]) == (0, 0, pytest.approx(1))
    # a shorter average is nearer to the weights now, and these improve at every step
    assert variants["ema"]["comparison"]["speed_up"]["mean"] > 1
    lines = {}
    for name, variant in variants.items():
        (run,) = variant["runs"]
        made = timeless(read_metrics(folder_of(undisturbed, name) / "metrics.jsonl"))
        lines[name] = [line for line in made if line["kind"] == "train"]
        assert run["nll"] == [line["nll"] for line in made if line["kind"] == "validation"]
        assert (variant["nll"], len(variant["samples"])) == (run["nll"][-1], 2)
    assert len(run_folders(undisturbed)) == 3
    assert folder_of(undisturbed, "same") == folder_of(undisturbed, "base")
    # averages do not act on training: same initial weights, data order and noise, or these differ
    assert lines["base"] == lines["ema"] != lines["bell"]
    assert len(lines["base"]) == 6


def test_repeating_trains_nothing_and_report_says_the_same(undisturbed, compare_args, tmp_path):
    """Nothing but the report is left to do. Harmless options may change."""
    out, files = undisturbed / "out", sorted((undisturbed / "runs").rglob("*"))
    stamps = [path.stat().st_mtime_ns for path in files]
    before = {p.name: p.read_bytes() for p in out.iterdir()}
    harmless = ["--jobs", "2", "--checkpoint.every", "never"]
    succeeds(*compare_args(VARIANTS, undisturbed, *SHORT, *harmless))
    assert [path.stat().st_mtime_ns for path in files] == stamps
    assert sorted((undisturbed / "runs").rglob("*")) == files
    assert (out / "results.json").read_bytes() == before["results.json"]
    # from the run folders, also after all was moved together
    moved = shutil.copytree(undisturbed, tmp_path / "moved") / "out"
    for path in moved.glob("[!c]*"):
        path.unlink()
    succeeds("report", moved)
    assert (moved / "results.json").read_bytes() == before["results.json"]
    assert {p.name for p in moved.iterdir()} == before.keys()
    folder = folder_of(tmp_path / "moved", "bell")
    run = PlannedRun("bell", "", load_config(folder / "config.json"), folder)
    shutil.rmtree(folder / "checkpoints" / "step-000000012")
    assert not is_finished(run), "validated, but not saved"
    # the two runs alone, the other way round
    pair = [folder_of(undisturbed, name) for name in ("base", "bell")]
    succeeds("report", *pair, "--reference", "bell", "--out", tmp_path / "out")
    turned, whole = results_of(tmp_path)["variants"], results_of(undisturbed)["variants"]
    gap = whole["bell"]["comparison"]["gap"]
    assert turned["base"]["comparison"]["gap"] == pytest.approx(-gap)
    assert turned["bell"]["runs"] == whole["bell"]["runs"]


def test_a_training_that_breaks_down(undisturbed, compare_args, tmp_path):
    """In a grid it breaks nothing else. With real workers."""
    shutil.copytree(undisturbed / "runs", tmp_path / "runs")
    pair, rate = ["base", "bell"], json.loads(succeeds("config", "show", "tiny").out)["optim"]["lr"]
    args = compare_args(pair, tmp_path, *SHORT, "--grid", f"optim.lr={rate},1e30", "--jobs", "2")
    said = succeeds(*args)
    assert "2 run(s) to train; 2 already finished, 2 at a time" in said.text
    assert "failed: base optim.lr=1e30 seed 1" in said.text
    results = results_of(tmp_path)
    for name, variant in results["variants"].items():
        assert variant["grid_point"] == f"optim.lr={rate}"
        assert variant["nll"] == results_of(undisturbed)["variants"][name]["nll"]
    assert len(results["failed"]) == 2


@pytest.mark.parametrize(("code", "told"), [(3, 1), (1, 1), (2, 2), (130, 130), (143, 130)])
def test_a_training_that_fails_alone_is_one_message(
    code, told, compare_args, tmp_path, monkeypatch
):
    """Whatever its process dies of; here it is a script."""
    script = tmp_path / "python"
    script.write_text(f"#!/bin/sh\necho 'step 3 went wrong' >&2\nexit {code}\n")
    script.chmod(0o755)
    monkeypatch.setattr("sys.executable", str(script))
    said = bellmask(*compare_args(["base", "bell"], tmp_path, *SHORT))
    assert said.code == told
    if told != 130:
        assert "error: base seed 1: step 3 went wrong" in said.text
    assert not (tmp_path / "out" / "results.json").exists()


@pytest.mark.parametrize(
    ("args", "names"),
    [
        ("compare", "preset"),
        ("compare tiny base", "variants"),
        ("compare tiny --suite famlies", "'famlies'; did you mean 'families'"),
        ("compare tiny base bell --suite families", "--suite"),
        ("compare tiny base bell --seeds 0", "--seeds"),
        ("compare tiny base bell --law dirac", "--law"),
        ("compare tiny base bell --reference bel", "'bel'"),
        ("compare tiny base bell --grid optim.lrr=1,2 --data.train {text}", "optim.lrr"),
        ("compare tiny base bell --data.train none.txt", "none.txt"),
        ("report", "folder"),
        ("report {zoo}/base", "base"),
        ("report {zoo}/base {zoo}/base", "base with seed"),
        ("report {zoo}/bell {zoo}/toy", "cannot be compared: their tokenizers differ"),
        ("report {zoo}/base {zoo}/bell --reference bel --out new", "'bel'"),
        ("demo --steps 0 --data {text}", "--steps"),
    ],
)
def test_bad_input_is_refused_and_leaves_nothing_behind(args, names, zoo, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("BELLMASK_CACHE", str(zoo / "cache"))
    refuses(*shlex.split(args.format(zoo=zoo, text=zoo / "text.txt")), names=names)
    assert not list(tmp_path.iterdir())


def test_the_demo_claims_no_speed_up_where_nothing_was_learned(tmp_path, text_file, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("BELLMASK_CACHE", str(tmp_path / "cache"))
    train_here(monkeypatch)
    said = succeeds("demo", "--data", text_file, "--steps", "4", "--seeds", "1", "--jobs", "1")
    assert "base has not learned the token frequencies in 4 steps" in said.text
    assert "speed-up of" not in said.text
    assert (tmp_path / "runs" / "demo" / "report.html").exists()


@pytest.mark.long
def test_several_processes_share_a_training(compare_args, tmp_path):
    """Also one that breaks down, as it may in a grid: torchrun only says that it failed."""
    more = "--processes-per-job=2 --grid optim.lr=1e-3,1e30 --train.skip-limit=0".split()
    succeeds(*compare_args(["base", "bell"], tmp_path, *SHORT, *more))
    runs = run_folders(tmp_path)
    assert [json.loads((run / "run.json").read_text())["processes"] for run in runs] == [2] * 4
    assert len(results_of(tmp_path)["failed"]) == 2


# --- signals and kills, with real processes ------------------------------------------------------


def workers_in(place: Path) -> list[int]:
    """Processes that train in the place's run folders, by their command lines."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = entry.read_bytes().split(b"\0")
        except OSError:
            continue  # gone meanwhile
        is_ours = any(word.startswith(str(place / "runs").encode()) for word in words)
        if is_ours and b"bellmask.compare.execute" in words:
            found.append(int(entry.parent.name))
    return found


def wait_until(is_true):
    deadline = time.monotonic() + 600
    while not is_true():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.05)


needs_proc = pytest.mark.skipif(
    not Path("/proc/self/cmdline").exists(), reason="needs /proc to find processes"
)


def steps_made(place):
    lines = [read_metrics(file) for file in (place / "runs").glob("*/metrics.jsonl")]
    return sum(found[-1]["step"] for found in lines if found)


@needs_proc
@pytest.mark.parametrize(
    "whom", ["everyone, as Ctrl-C does", pytest.param("the parent", marks=pytest.mark.long)]
)
def test_an_interrupt_saves_and_ends_with_130(whom, compare_args, tmp_path, warm):
    endless = ["--train.steps=100000", "--validation.every=50000"]
    process = warm.start(compare_args(["base", "bell"], tmp_path, *endless))
    wait_until(lambda: steps_made(tmp_path) or not process.is_alive())
    for pid in [process.pid, *(workers_in(tmp_path) if "Ctrl-C" in whom else [])]:
        os.kill(pid, signal.SIGINT)
    assert process.wait(600) == 130, process.text()
    assert "interrupted" in process.text()
    assert "Traceback" not in process.text()
    assert not workers_in(tmp_path), "no worker is left behind"
    (run,) = run_folders(tmp_path)
    step = int((run / "checkpoints" / "latest").read_text().split("-")[1])
    assert 0 < step < 100000
    assert not (tmp_path / "out" / "results.json").exists()
    resumed = ["train", run, "--out", run, "--resume", "yes", "--quiet"]
    succeeds(*resumed, "--train.steps", step + 1)


LONGER = "--train.steps=600 --validation.every=100 --checkpoint.every=50".split()


@pytest.mark.long
@needs_proc
@pytest.mark.parametrize("jobs", ["1", "2"])
def test_kills_change_nothing(jobs, compare_args, tmp_path, warm):
    """SIGKILL for the parent alone, at random moments; workers notice, save and end."""
    whole, parts, variants = tmp_path / "whole", tmp_path / "parts", ["base", "bell"]
    assert warm.start(compare_args(variants, whole, *LONGER)).wait(1200) == 0
    args = compare_args(variants, parts, *LONGER, "--jobs", jobs)
    draw, kills = random.Random(5), 0
    for attempt in range(5):
        process = warm.start(args)
        if attempt == 0:
            time.sleep(1)  # while things are being set up
        else:
            made = steps_made(parts)
            wait_until(lambda p=process, m=made: steps_made(parts) > m or not p.is_alive())
            time.sleep(draw.uniform(0, 0.5))
        if process.is_alive():
            kills += 1
            process.signal(signal.SIGKILL)
        process.wait()
        wait_until(lambda: not workers_in(parts))
    assert kills >= 2
    assert list((parts / "runs").glob("*/checkpoints/step-*"))
    assert warm.start(args).wait(1200) == 0
    assert timeless(results_of(parts)) == timeless(results_of(whole))
    names = [folder.name for folder in run_folders(whole)]
    assert [folder.name for folder in run_folders(parts)] == names


@pytest.mark.long
def test_two_comparisons_at_once_share_their_runs(compare_args, undisturbed, tmp_path, warm):
    """A lock keeps the second out of a folder until the first is done with it."""
    args = compare_args(VARIANTS, tmp_path, *SHORT, "--jobs", "2")
    both = [warm.start([*args, "--out", tmp_path / name / "out"]) for name in ("a", "b")]
    assert [process.wait(1200) for process in both] == [0, 0]
    for name in ("a", "b"):
        assert timeless(results_of(tmp_path / name)) == timeless(results_of(undisturbed))
    assert len(run_folders(tmp_path)) == 3
