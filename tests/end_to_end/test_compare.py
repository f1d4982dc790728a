"""Comparisons as a user runs them: what is written, shared, reused, refused, and survives kills."""

from __future__ import annotations

import json
import os
import random
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from bellmask.assemble import train_run
from bellmask.cli import run_command
from bellmask.config import RunConfig
from bellmask.evaluate.result import Likelihood
from bellmask.records import TIME_FIELDS, read_metrics

SMALL = (
    "--data.block-length 16 --model.num-layers 1 --model.width 16 --model.num-heads 2 "
    "--train.batch-size 8 --optim.warmup-steps 2 --validation.blocks 32 --log.every 2"
).split()
SHORT = [
    "--train.steps", "12", "--validation.every", "3 steps", "--checkpoint.every", "4 steps",
]  # fmt: skip
VARIANTS = [
    "base",
    "bell",
    "same=--objective nelbo --law uniform",
    "ema=--objective nelbo --law uniform --optim.ema 0.5",
]
LAST = "step-000000012"
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "100"}


class Folders:
    """The text and the cache that all comparisons here share."""

    def __init__(self, text: Path, cache: Path) -> None:
        self.text, self.cache = text, cache

    def args(self, variants: Sequence[str], place: Path, *more: str) -> list[str]:
        """``compare`` with results in ``place/out`` and trainings in ``place/runs``."""
        data = ["--data.train", str(self.text), "--data.cache", str(self.cache)]
        where = ["--out", str(place / "out"), "--runs", str(place / "runs")]
        return ["compare", "tiny", *variants, *SMALL, *data, *where, *more]


@pytest.fixture(scope="module")
def folders(text_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Folders:
    return Folders(text_file, tmp_path_factory.mktemp("cache"))


def start(args: Sequence[str], cwd: Path | None = None) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "bellmask", *args],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=cwd,
        env=ENVIRONMENT,
        start_new_session=True,
    )


def bellmask(*args: str, cwd: Path | None = None, code: int = 0) -> tuple[str, str]:
    process = start(args, cwd)
    out, err = process.communicate(timeout=600)
    assert process.returncode == code, f"exit {process.returncode}\n{out}\n{err}"
    assert "Traceback" not in err
    return out, err


def results_of(place: Path) -> dict[str, Any]:
    return json.loads((place / "out" / "results.json").read_text())


def timeless(value: Any) -> Any:
    """Without what a clock decides."""
    if isinstance(value, dict):
        kept = {k: v for k, v in value.items() if k not in TIME_FIELDS and "time_" not in k}
        return {key: timeless(part) for key, part in kept.items()}
    return [timeless(part) for part in value] if isinstance(value, list) else value


def stamps(folder: Path) -> dict[str, int]:
    """When each file and folder was last changed."""
    return {str(p.relative_to(folder)): p.stat().st_mtime_ns for p in sorted(folder.rglob("*"))}


def run_folders(place: Path) -> list[Path]:
    return sorted(p for p in (place / "runs").iterdir() if p.name != ".locks")


def folder_of(place: Path, variant: str) -> Path:
    plan = json.loads((place / "out" / "comparison.json").read_text())
    (name,) = [run["run"] for run in plan["runs"] if run["variant"] == variant]
    return place / "runs" / name


@pytest.fixture(scope="module")
def undisturbed(folders: Folders, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """base, bell, base under another name, and base with other averages; in one go."""
    place = tmp_path_factory.mktemp("undisturbed")
    out, err = bellmask(*folders.args(VARIANTS, place, *SHORT))
    assert "3 training(s) to do, 1 at a time" in err
    assert f"report: {place / 'out' / 'report.html'}" in out
    return place


def test_a_comparison_writes_what_it_promises(undisturbed: Path, text_file: Path) -> None:
    out = undisturbed / "out"
    files = {p.name for p in out.iterdir()}
    assert files == {"results.json", "comparison.json", "curves.png", "curves.svg", "report.html"}
    assert (out / "curves.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert "<svg" in (out / "curves.svg").read_text()
    results = results_of(undisturbed)
    assert list(results["variants"]) == ["base", "bell", "same", "ema"]
    assert (results["reference"], results["steps"], results["seeds"]) == ("base", 12, [1])
    assert results["data"]["train"] == str(text_file)
    assert results["data"]["block_length"] == 16
    assert "comparison" not in results["variants"]["base"]
    changed = {"law.name": "gaussian", "law.mu": 0.5, "law.scale": 0.1, "objective.name": "bell"}
    assert results["variants"]["bell"]["options"] == changed
    assert results["variants"]["same"]["options"] == {}
    assert results["variants"]["ema"]["options"] == {"optim.ema": 0.5}
    for name, variant in results["variants"].items():
        (run,) = variant["runs"]
        assert run["steps"] == [3, 6, 9, 12]
        assert run["run"] == folder_of(undisturbed, name).name
        lines = read_metrics(folder_of(undisturbed, name) / "metrics.jsonl")
        assert run["nll"] == [line["nll"] for line in lines if line["kind"] == "validation"]
        assert variant["nll"] == run["nll"][-1]
        assert len(variant["samples"]) == 2
    page = (out / "report.html").read_text()
    assert "bell" in page
    assert page.count("<svg") == 2 + len(VARIANTS)


def test_the_comparison_is_with_the_reference(undisturbed: Path) -> None:
    """Numbers that can be worked out by hand from the two curves."""
    variants = results_of(undisturbed)["variants"]
    target = variants["base"]["nll"]
    for name in ("bell", "same", "ema"):
        compared = variants[name]["comparison"]
        assert compared["gap"] == pytest.approx(variants[name]["nll"] - target, abs=1e-9)
        assert compared["num_seeds"] == 1
        is_reached = variants[name]["nll"] <= target
        assert (compared["speed_up"] is not None) == is_reached
    same = variants["same"]["comparison"]
    assert (same["gap"], same["gap_se"], same["speed_up"]["mean"]) == (0, 0, pytest.approx(1))
    # a shorter average is nearer to the weights now, and these improve at every step
    assert variants["ema"]["comparison"]["speed_up"]["mean"] > 1


def test_equal_options_share_a_run_and_others_share_the_start(undisturbed: Path) -> None:
    assert len(run_folders(undisturbed)) == 3
    assert folder_of(undisturbed, "same") == folder_of(undisturbed, "base")
    base, bell, ema = (folder_of(undisturbed, name) for name in ("base", "bell", "ema"))
    assert len({base, bell, ema}) == 3
    descriptions = [json.loads((run / "run.json").read_text()) for run in (base, bell, ema)]
    for key in ("tokenizer_fingerprint", "train_fingerprint", "valid_fingerprint", "parameters"):
        assert len({description[key] for description in descriptions}) == 1
    # averages do not act on training: same initial weights, data order and noise, or these differ
    lines = [
        timeless([r for r in read_metrics(run / "metrics.jsonl") if r["kind"] == "train"])
        for run in (base, bell, ema)
    ]
    assert len(lines[0]) == 6
    assert lines[0] == lines[2]
    assert lines[0] != lines[1]
    (mine,), (theirs,) = ((run / "checkpoints" / LAST).glob("*.safetensors") for run in (base, ema))
    mine, theirs = load_file(mine), load_file(theirs)
    assert mine.keys() == theirs.keys()
    is_same = {name: mine[name].equal(theirs[name]) for name in mine}
    assert all(same for name, same in is_same.items() if not name.startswith("ema."))
    assert not all(same for name, same in is_same.items() if name.startswith("ema."))


def test_repeating_trains_nothing(undisturbed: Path, folders: Folders) -> None:
    """In this process: nothing but the report is left to do. Harmless options may change."""
    before, results = stamps(undisturbed / "runs"), (undisturbed / "out/results.json").read_bytes()
    harmless = ["--jobs", "2", "--checkpoint.every", "never"]
    assert run_command(folders.args(VARIANTS, undisturbed, *SHORT, *harmless)) == 0
    assert stamps(undisturbed / "runs") == before
    assert (undisturbed / "out" / "results.json").read_bytes() == results


def test_report_rebuilds_the_same(
    undisturbed: Path, folders: Folders, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = undisturbed / "out"
    before = {p.name: p.read_bytes() for p in out.iterdir()}
    (out / "results.json").unlink()
    assert run_command(["report", str(out)]) == 0
    after = {p.name: p.read_bytes() for p in out.iterdir()}
    assert after.keys() == before.keys()
    assert after["results.json"] == before["results.json"]
    # the two runs alone: as a comparison of the two (nothing to train) says
    two = ["base", "bell"]
    args = [*folders.args(two, tmp_path, *SHORT), "--runs", str(undisturbed / "runs")]
    assert run_command(args) == 0
    plain = tmp_path / "plain"
    runs = [str(folder_of(undisturbed, name)) for name in two]
    capsys.readouterr()
    assert run_command(["report", *runs, "--out", str(plain)]) == 0
    assert "bell" in capsys.readouterr().out
    assert (plain / "results.json").read_bytes() == (tmp_path / "out/results.json").read_bytes()
    assert {p.name for p in plain.iterdir()} >= {"curves.png", "curves.svg", "report.html"}


@pytest.mark.long
def test_report_in_another_place_with_another_reference(undisturbed: Path, tmp_path: Path) -> None:
    before = stamps(undisturbed)
    args = ["report", str(undisturbed / "out"), "--out", str(tmp_path / "new" / "out")]
    assert run_command([*args, "--reference", "bell"]) == 0
    assert stamps(undisturbed) == before
    turned = results_of(tmp_path / "new")
    assert turned["reference"] == "bell"
    gap = results_of(undisturbed)["variants"]["bell"]["comparison"]["gap"]
    assert turned["variants"]["base"]["comparison"]["gap"] == pytest.approx(-gap)


@pytest.fixture(scope="module")
def first_run(
    small_config: Callable[..., RunConfig], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    folder = tmp_path_factory.mktemp("plain") / "base"
    config = small_config(*OTHER, "--objective", "nelbo", "--law", "uniform")
    train_run(config, folder, is_quiet=True)
    return folder


OTHER = "--train.steps 4 --validation.every 2 --model.num-layers 1".split()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (["--data.train", "{text}"], "their training texts differ"),
        (["--data.valid", "{text}"], "texts differ"),
        (["--data.block-length", "8"], "differ"),
        (["--validation.seed", "5"], "their validation blocks or masks differ"),
        (["--validation.blocks", "16"], "differ"),
        (["--train.steps", "6"], "train.steps is 4 and 6"),
        (["--train.batch-size", "16"], "train.batch_size is 8 and 16"),
        (["--validation.every", "1"], "they were validated at different steps"),
        (["--validation.every", "never"], "has no validation at its last step 4"),
    ],
)
def test_runs_that_cannot_be_compared_are_refused(
    change: list[str],
    message: str,
    first_run: Path,
    small_config: Callable[..., RunConfig],
    text_file: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    text = tmp_path / "text.txt"
    text.write_text(text_file.read_text()[1000:])
    change = [part.format(text=text) for part in change]
    train_run(small_config(*OTHER, *change), tmp_path / "other", is_quiet=True)
    capsys.readouterr()
    args = ["report", str(first_run), str(tmp_path / "other"), "--out", str(tmp_path / "out")]
    assert run_command(args) == 2
    assert_one_message(capsys.readouterr().err, message)
    assert not (tmp_path / "out").exists()


def assert_one_message(err: str, message: str) -> None:
    assert message in " ".join(err.split())
    assert err.count("error:") == 1
    assert err.count("\n") == 1, err
    assert "Traceback" not in err


def test_equal_mask_counts_of_other_masks_are_refused(
    first_run: Path,
    small_config: Callable[..., RunConfig],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    other = tmp_path / "other"
    train_run(small_config(*OTHER), other, is_quiet=True)
    values = other / "validation" / "step-000000004.npz"
    replace(Likelihood.load(values), fingerprint="another").save(values)
    capsys.readouterr()
    args = ["report", str(first_run), str(other), "--out", str(tmp_path / "out")]
    assert run_command(args) == 2
    message = "their validation blocks or masks differ"
    assert_one_message(capsys.readouterr().err, message)


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (lambda file: file.unlink(), "is missing"),
        (lambda file: file.write_bytes(file.read_bytes()[:-40]), "is damaged"),
        (lambda file: file.write_bytes(b""), "is damaged"),
    ],
    ids=["gone", "cut", "empty"],
)
def test_damaged_runs_are_refused(
    harm: Callable[[Path], object],
    message: str,
    first_run: Path,
    small_config: Callable[..., RunConfig],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    train_run(small_config(*OTHER), tmp_path / "other", is_quiet=True)
    harm(tmp_path / "other" / "validation" / "step-000000002.npz")
    capsys.readouterr()
    args = ["report", str(first_run), str(tmp_path / "other"), "--out", str(tmp_path / "out")]
    assert run_command(args) == 2
    assert_one_message(capsys.readouterr().err, f"step-000000002.npz {message}")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ("compare", "needs a preset first"),
        ("compare tinny base bell", "unknown preset 'tinny'; did you mean 'tiny'"),
        ("compare tiny base bel", "unknown variant 'bel'; did you mean 'bell'"),
        ("compare tiny base bell+muo", "unknown variant suffix 'muo'; did you mean 'muon'?"),
        ("compare tiny base dirac:x", "'x' must be numbers"),
        ("compare tiny base bell:0.5", "bell takes 0 number(s) at most"),
        ("compare tiny base base", "variants must have different names"),
        ("compare tiny base", "needs at least two variants"),
        ("compare tiny base x=y", "write a variant of your own as"),
        ("compare tiny base 'x=--optim.lrr 1' {text}", "optim.lrr"),
        ("compare tiny base gaussian:0.5,-1 {text}", "scale"),
        ("compare tiny --suite famlies", "unknown suite 'famlies'; did you mean 'families'"),
        ("compare tiny base bell --suite families", "give variants or --suite, not both"),
        ("compare tiny base bell --seeds 0", "--seeds must be a whole number of at least 1"),
        ("compare tiny base bell --seeds two", "--seeds must be a whole number of at least 1"),
        ("compare tiny base bell --jobs 0", "--jobs must be a whole number of at least 1"),
        ("compare tiny base bell --jobs", "--jobs needs a value"),
        ("compare tiny base bell --law dirac", "--law is decided by the variants"),
        ("compare tiny base bell --law.mu=0.4", "is decided by the variants"),
        ("compare tiny base bell --objective bell", "--objective is decided by the variants"),
        ("compare tiny base bell --validation.every never", "a comparison needs a curve"),
        ("compare tiny base bell --validation.every 5min", "at the same steps"),
        ("compare tiny base bell --reference bel", "the reference 'bel' is not among the variants"),
        ("compare tiny base bell --grid optim.lr", "write a grid as"),
        ("compare tiny base bell --grid optim.lrr=1,2 {text}", "optim.lrr"),
        ("compare tiny base bell --grid optim.lr=fast {text}", "fast"),
        ("compare tiny base bell --optim.lrr 1", "optim.lrr"),
        ("compare tiny base bell --data.train none.txt", "there is no file none.txt"),
        ("report", "report needs a comparison's folder or run folders"),
        ("report nowhere", "there is no folder nowhere"),
        ("report nowhere elsewhere", "there is no folder nowhere"),
        ("report {run} nowhere", "there is no folder nowhere"),
        ("report {run} {run}", "two runs are base with seed"),
        ("report {run} --referense base", "unknown option --referense"),
        ("report {out} --reference bel --out new", "the reference bel is not among base, bell"),
        ("demo --data none.txt", "there is no file none.txt"),
        ("demo --seeds 0 {file}", "--seeds must be a whole number of at least 1"),
        ("demo --steps 0 {file}", "--steps must be a whole number of at least 1"),
        ("demo --jobs x {file}", "--jobs must be a whole number of at least 1"),
        ("demo tiny", "unknown option tiny; demo takes"),
        ("demo --law dirac", "unknown option --law; demo takes"),
    ],
)
def test_bad_input_gets_one_message_and_exit_code_2(
    args: str,
    message: str,
    undisturbed: Path,
    folders: Folders,
    first_run: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    text = f"--data.train {folders.text}"
    words = args.format(
        run=first_run, out=undisturbed / "out", text=text, file=f"--data {folders.text}"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("BELLMASK_CACHE", str(folders.cache))
    before = stamps(undisturbed)
    assert run_command(shlex.split(words)) == 2
    err = capsys.readouterr().err
    assert message in " ".join(err.split())
    assert err.count("error:") == 1
    assert "Traceback" not in err
    assert not list(tmp_path.iterdir()), "nothing is left behind"
    assert stamps(undisturbed) == before


def workers_in(place: Path) -> list[int]:
    """Processes that train in the place's run folders, by their command lines."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = entry.read_bytes().split(b"\0")
        except OSError:
            continue  # gone meanwhile
        is_ours = any(word.startswith(str(place / "runs").encode()) for word in words)
        if is_ours and b"bellmask.compare.worker" in words:
            found.append(int(entry.parent.name))
    return found


def wait_until(is_true: Callable[[], object], seconds: float = 120) -> None:
    deadline = time.monotonic() + seconds
    while not is_true():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.05)


needs_proc = pytest.mark.skipif(
    not Path("/proc/self/cmdline").exists(), reason="needs /proc to find processes"
)


def steps_made(place: Path) -> int:
    lines = [read_metrics(file) for file in (place / "runs").glob("*/metrics.jsonl")]
    return sum(found[-1]["step"] for found in lines if found)


@needs_proc
@pytest.mark.parametrize(
    "whom",
    [
        pytest.param("everyone", id="Ctrl-C, which the workers get too"),
        pytest.param("parent", id="a signal to the parent", marks=pytest.mark.long),
    ],
)
def test_an_interrupt_saves_and_ends_with_130(whom: str, folders: Folders, tmp_path: Path) -> None:
    long = ["--train.steps", "100000", "--validation.every", "50000 steps"]
    process = start(folders.args(["base", "bell"], tmp_path, *long))
    wait_until(lambda: steps_made(tmp_path) or process.poll() is not None)
    send = os.killpg if whom == "everyone" else os.kill
    send(process.pid, signal.SIGINT)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 130, err
    assert "interrupted" in err
    assert "Traceback" not in err
    assert not workers_in(tmp_path), "no worker is left behind"
    (run,) = run_folders(tmp_path)
    latest = (run / "checkpoints" / "latest").read_text().strip()
    assert (run / "checkpoints" / latest / "manifest.json").exists()
    step = int(latest.split("-")[1])
    assert 0 < step < 100000
    assert not (tmp_path / "out" / "results.json").exists()
    resumed = ["train", str(run), "--out", str(run), "--resume", "yes", "--quiet"]
    assert run_command([*resumed, "--train.steps", str(step + 1)]) == 0


LONGER = [
    "--train.steps", "600", "--validation.every", "100 steps", "--checkpoint.every", "50 steps",
]  # fmt: skip


@pytest.mark.long
@needs_proc
@pytest.mark.parametrize("jobs", ["1", "2"])
def test_kills_change_nothing(jobs: str, folders: Folders, tmp_path: Path) -> None:
    """SIGKILL for the parent alone, at random moments; workers notice, save and end."""
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    variants = ["base", "bell"]
    bellmask(*folders.args(variants, whole, *LONGER))
    args = folders.args(variants, parts, *LONGER, "--jobs", jobs)
    draw, kills, checkpoints = random.Random(5), 0, []
    for attempt in range(5):
        process = start(args)
        if attempt == 0:
            time.sleep(2.5)  # while things are being set up
        else:
            made = steps_made(parts)
            wait_until(lambda p=process, m=made: steps_made(parts) > m or p.poll() is not None)
            time.sleep(draw.uniform(0, 0.5))
        is_running = process.poll() is None
        process.kill()
        process.wait()
        for stream in (process.stdout, process.stderr):
            stream.close()
        kills += is_running
        wait_until(lambda: not workers_in(parts))
        checkpoints.append(len(list((parts / "runs").glob("*/checkpoints/step-*"))))
    assert kills >= 2
    assert checkpoints[-1] > 0
    bellmask(*args)
    assert timeless(results_of(parts)) == timeless(results_of(whole))
    names = [folder.name for folder in run_folders(whole)]
    assert [folder.name for folder in run_folders(parts)] == names
    for name in names:
        mine, theirs = (read_metrics(p / "runs" / name / "metrics.jsonl") for p in (parts, whole))
        assert timeless(mine) == timeless(theirs)


@pytest.mark.long
def test_trainings_side_by_side_give_the_same(
    undisturbed: Path, folders: Folders, tmp_path: Path
) -> None:
    _, err = bellmask(*folders.args(VARIANTS, tmp_path, *SHORT, "--jobs", "2"))
    assert "3 training(s) to do, 2 at a time" in err
    assert timeless(results_of(tmp_path)) == timeless(results_of(undisturbed))


@pytest.mark.long
def test_two_comparisons_at_once_share_their_runs(folders: Folders, tmp_path: Path) -> None:
    """A lock keeps the second out of a folder until the first is done with it."""
    both = [
        start([*folders.args(["base", "bell"], tmp_path, *SHORT), "--out", str(tmp_path / name)])
        for name in ("a", "b")
    ]
    for process in both:
        _, err = process.communicate(timeout=600)
        assert process.returncode == 0, err
    a, b = ((tmp_path / name / "results.json").read_bytes() for name in ("a", "b"))
    assert timeless(json.loads(a)) == timeless(json.loads(b))
    assert len(run_folders(tmp_path)) == 2


@pytest.mark.long
def test_a_grid_point_that_breaks_down_breaks_nothing_else(
    folders: Folders, tmp_path: Path
) -> None:
    grid = ["--grid", "optim.lr=6e-3,1e30"]
    _, err = bellmask(*folders.args(["base", "bell"], tmp_path, *SHORT, *grid))
    assert "4 training(s) to do" in err
    assert "failed: base optim.lr=1e30 seed 1" in err
    results = results_of(tmp_path)
    for variant in results["variants"].values():
        assert variant["grid_point"] == "optim.lr=6e-3"
        assert 0 < variant["nll"] < 6
    json.loads((tmp_path / "out/results.json").read_text(), parse_constant=pytest.fail)
    assert "<svg" in (tmp_path / "out" / "report.html").read_text()
    before = (tmp_path / "out" / "results.json").read_bytes()
    assert run_command(["report", str(tmp_path / "out")]) == 0
    assert (tmp_path / "out" / "results.json").read_bytes() == before


@pytest.mark.long
def test_a_training_that_breaks_down_is_one_message(folders: Folders, tmp_path: Path) -> None:
    args = folders.args(["base", "bell"], tmp_path, *SHORT, "--optim.lr", "1e30")
    _, err = bellmask(*args, code=1)
    assert "base seed 1: step" in err
    assert err.count("error:") == 1


@pytest.mark.long
def test_the_demo_says_one_sentence(
    folders: Folders, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(ENVIRONMENT, "BELLMASK_CACHE", str(folders.cache))
    words = ["demo", "--data", str(folders.text), "--steps", "12", "--seeds", "3"]
    out, err = bellmask(*words, cwd=tmp_path)
    assert "6 training(s) to do" in err
    # twelve steps do not even teach the frequencies of tokens: no speed-up is claimed
    (sentence,) = [line for line in out.splitlines() if "said about bell" in line]
    assert sentence.startswith("base has not learned the frequencies of tokens in 12 steps")
    assert "times sooner" not in out
    assert out.splitlines()[-1] == "report: runs/demo/report.html"
    assert (tmp_path / "runs" / "demo" / "report.html").exists()
    assert {p.name for p in tmp_path.iterdir()} == {"runs"}
    before = stamps(tmp_path / "runs" / "demo" / "runs")
    again, _ = bellmask(*words, "--quiet", cwd=tmp_path)
    assert sentence in again
    assert stamps(tmp_path / "runs" / "demo" / "runs") == before
