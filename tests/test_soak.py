"""The soak's own arithmetic against other ways to get it, and (long) a soak of half a minute."""

from __future__ import annotations

import json
import os
import random
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from bellmask.assemble import train_run
from bellmask.config import RunConfig
from bellmask.train.checkpoint import find_damage

sys.path.insert(0, str(Path(__file__).parents[1] / "evidence"))
import soak_compare
import soak_faults
import soak_report
import soak_watch

ROOT = Path(__file__).parents[1]
MIB = 2**20
Config = Callable[..., RunConfig]


def test_slope_is_numpys_fit() -> None:
    draw = np.random.default_rng(3)
    times = np.sort(draw.uniform(0, 900, 60))
    values = 400 + 0.02 * times + draw.normal(0, 3, 60)
    (rate, _), covariance = np.polyfit(times, values, 1, cov=True)
    found = soak_watch.slope(times.tolist(), values.tolist())
    assert found == pytest.approx((rate, np.sqrt(covariance[0, 0])))
    assert np.isnan(soak_watch.slope([1, 2], [1, 2])).all()
    assert np.isnan(soak_watch.slope([1, 1, 1], [1, 2, 3])).all()


def sample(time: float, **pids: tuple[int, float]) -> dict[str, Any]:
    """``rank_0=(pid, MiB)``."""
    processes = [
        {
            "role": role.replace("_", " "),
            "pid": pid,
            "rss": int(rss * MIB),
            "files": 9,
            "threads": 4,
        }
        for role, (pid, rss) in pids.items()
    ]
    return {"time": time, "step": int(time), "processes": processes, "folder": {"bytes": MIB}}


def test_memory_is_told_life_by_life() -> None:
    """Rank 0 dies at 100 s: the first life is level, the second grows by 1 MiB per 10 s."""
    samples = [sample(t, rank_0=(7, 300.0), agent=(5, 200.0)) for t in range(0, 110, 10)]
    samples += [
        sample(t, rank_0=(8, 300.0 + (t - 110) / 10), agent=(5, 200.0)) for t in range(110, 320, 10)
    ]
    told = soak_watch.memory(samples, warm_up=20, least=30)
    rank = told["rank 0"]
    assert (rank["lives"], told["agent"]["lives"]) == (2, 1)
    assert rank["longest"]["minutes"] == pytest.approx(190 / 60)  # the last sample is left out
    assert rank["longest"]["rate"] == pytest.approx(360)
    assert rank["longest"]["rate_error"] == pytest.approx(0, abs=1e-6)
    assert (rank["longest"]["rss_first"], rank["longest"]["rss_peak"]) == (302.0, 319.0)
    assert told["agent"]["longest"]["rate"] == 0
    assert "rank 1" not in told


def test_peaks_of_early_and_late_lives_are_compared() -> None:
    samples = []
    for n in range(6):  # six lives of 50 s, each 2 MiB more than the one before
        samples += [sample(t, rank_1=(n, 300.0 + 2 * n)) for t in range(60 * n, 60 * n + 60, 10)]
    samples += [sample(400, rank_1=(9, 900.0)), sample(401, rank_1=(9, 900.0))]  # too short
    told = soak_watch.memory(samples, warm_up=0, least=30)["rank 1"]
    assert told["lives"] == 7
    assert told["peaks"] == {
        "lives": 6, "first": {"mean": 301.0, "max": 302.0}, "last": {"mean": 309.0, "max": 310.0},
    }  # fmt: skip


def test_processes_are_read_from_the_system() -> None:
    code = "import os, sys; x = bytearray(80 * 2**20); print('ready', flush=True); sys.stdin.read()"
    child = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        env={**os.environ, "RANK": "3"},
    )  # fmt: skip
    with child:
        assert child.stdout is not None
        child.stdout.readline()
        assert child.pid in soak_watch.children(os.getpid())
        assert soak_watch.rank_of(child.pid) == 3
        found = soak_watch.read_process(child.pid)
        assert found is not None
        assert 80 * MIB < found["rss"] < 200 * MIB
        assert (found["threads"], found["files"]) == (1, 3)
        soak_faults.kill(child.pid)
        child.wait()
    assert soak_watch.read_process(child.pid) is None
    assert child.pid not in soak_watch.children(os.getpid())


def test_every_fault_comes_equally_often_at_seeded_moments() -> None:
    faults = len(soak_faults.FAULTS)
    plan = list(islice(soak_faults.plan_faults(1, 60), 4 * faults))
    assert plan == list(islice(soak_faults.plan_faults(1, 60), 4 * faults))
    assert plan != list(islice(soak_faults.plan_faults(2, 60), 4 * faults))
    assert set(Counter(name for _, name in plan).values()) == {4}
    assert all(30 <= wait <= 90 for wait, _ in plan)


def test_one_flipped_bit_is_one_bit_and_is_noticed(small_config: Config, tmp_path: Path) -> None:
    train_run(small_config("--train.steps", "1"), tmp_path / "run", is_quiet=True)
    (folder,) = (tmp_path / "run" / "checkpoints").glob("step-*")
    draw = random.Random(5)
    for path in sorted(folder.iterdir()):
        before = path.read_bytes()
        for _ in range(20):
            soak_faults.flip_a_bit(path, draw)
            after = path.read_bytes()
            flipped = sum((a ^ b).bit_count() for a, b in zip(before, after, strict=True))
            assert flipped == 1
            assert find_damage(folder) is not None, path.name
            path.write_bytes(before)
    assert find_damage(folder) is None


def line(step: int, kind: str = "train", loss: float = 1.0) -> dict[str, Any]:
    return {"kind": kind, "step": step, "loss": loss, "tokens": step, "masked_share": 0.5, "lr": 1}


def test_lost_doubled_and_changed_lines_are_counted() -> None:
    whole = [line(1), line(2), line(2, "validation"), line(3)]
    counts = {"lines": 4, "lost": 0, "too_many": 0, "different": 0, "out_of_order": 0}
    assert soak_compare.compare_lines(whole, whole) == counts
    lost = soak_compare.compare_lines([line(1), line(2), line(3)], whole)
    assert lost == counts | {"lines": 3, "lost": 1}
    doubled = soak_compare.compare_lines([*whole[:2], *whole[1:]], whole)
    assert doubled == counts | {"lines": 5, "too_many": 1}
    changed = soak_compare.compare_lines([*whole[:3], line(3, loss=1.5)], whole)
    assert changed == counts | {"different": 1}
    again = soak_compare.compare_lines([line(2), line(1), *whole[2:]], whole)
    assert again == counts | {"out_of_order": 1}


def write_run(folder: Path, *, value: float = 1.0, losses: tuple[float, ...] = (3.0, 2.0)) -> Path:
    """A finished run as the comparison reads it."""
    checkpoint = folder / "checkpoints" / "step-000000002"
    for part in (checkpoint, folder / "validation", folder / "samples"):
        part.mkdir(parents=True)
    save_file({"model.w": torch.tensor([1.0, 2.0])}, checkpoint / "a.safetensors")
    save_file({"model.w": torch.tensor([3.0, value])}, checkpoint / "b.safetensors")
    np.savez(folder / "validation" / "step-000000002.npz", nll=[value], name=np.array("x"))
    (folder / "samples" / "step-000000002.txt").write_text("a sample")
    lines = [line(step, loss=loss) | {"seconds": value} for step, loss in enumerate(losses, 1)]
    text = "".join(json.dumps(x) + "\n" for x in lines)
    (folder / "metrics.jsonl").write_text(text)
    return folder


def test_runs_are_the_same_or_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(soak_compare, "find_damage", lambda folder: None)
    a, b = write_run(tmp_path / "a"), write_run(tmp_path / "b")
    assert soak_compare.is_same(soak_compare.compare_runs(a, b, 2))
    other = write_run(tmp_path / "c", value=1.0 + 2**-23)  # the last bit of one number
    compared = soak_compare.compare_runs(a, other, 2)
    assert compared["weights"] == {"tensors": 1, "different": 1}
    assert compared["validations"]["different"] == 1
    assert compared["metrics"]["different"] == 0  # only its clock differs
    assert not soak_compare.is_same(compared)
    (b / "samples" / "step-000000002.txt").unlink()
    assert not soak_compare.is_same(soak_compare.compare_runs(a, b, 2))
    assert not soak_compare.is_same(soak_compare.compare_runs(b, a, 2))
    monkeypatch.setattr(soak_compare, "find_damage", lambda folder: "a.safetensors is missing")
    assert not soak_compare.is_same(soak_compare.compare_runs(a, a, 2))


def test_one_process_is_compared_by_its_noise_and_nearly_by_its_losses(tmp_path: Path) -> None:
    a = write_run(tmp_path / "a", losses=(3.0, 2.0, 1.0))
    b = write_run(tmp_path / "b", losses=(3.003, 2.0, 9.0))
    told = soak_compare.compare_with_one_process(a, b)
    assert (told["lines"], told["noise_differs"]) == (2, 0)  # its last line covers fewer steps
    assert told["largest_gap_early"] == pytest.approx(0.003 / 3.003)


def a_result() -> dict[str, Any]:
    part = {"number": 3, "lost": 0, "too_many": 0, "different": 0}
    one = {"steps": 100, "lines": 9, "noise_differs": 0, "largest_gap_early": 1e-7}
    compared = {"weights": {"tensors": 3, "different": 0}, "metrics": part, "damaged": 0}
    samples = [sample(t, rank_0=(1, 300.0), rank_1=(2, 310.0), agent=(3, 200.0)) for t in range(90)]
    faults = {name: {"count": 0} for name in soak_faults.FAULTS}
    return {
        "minutes": 1.5, "steps": 1200, "half_written": 1, "flips": 1, "flips_noticed": 1,
        "faults": faults | {"kill rank 0": {"count": 2, "median": 9.0, "longest": 11.0}},
        "marks": [], "marks_wrong": 0, "leftovers": 0, "visits": {"evaluate": {"done": 2}},
        "memory": soak_watch.memory(samples, warm_up=10, least=10),
        "reference": {"minutes": 1.0, "compared": compared, "one": one, "is_same": True},
        "events": [[0.5, "kill rank 0"]], "series": soak_watch.series(samples, 20),
    }  # fmt: skip


@pytest.mark.parametrize(
    "broken",
    [
        {"visits": {"evaluate": {"failed": 1}}},
        {"leftovers": 1},
        {"marks": ["RESUME_ME"]},
        {"marks_wrong": 1},
        {"flips_noticed": 0},
        {"reference": {"is_same": False, "one": {"noise_differs": 0}}},
        {"reference": {"is_same": True, "one": {"noise_differs": 1}}},
    ],
)
def test_a_broken_promise_is_not_overlooked(broken: dict[str, Any]) -> None:
    assert soak_report.is_kept(a_result())
    assert not soak_report.is_kept(a_result() | broken)


def test_the_page_gets_its_section_and_keeps_the_rest(tmp_path: Path) -> None:
    page = tmp_path / "reliability.md"
    begin, end = soak_report.BEGIN, soak_report.END
    page.write_text(f"before\n{begin}\nof last year\n{end}\nafter\n")
    soak_report.write_section(a_result(), tmp_path)
    once = page.read_text()
    assert once.startswith("before\n")
    assert once.endswith("\nafter\n")
    assert "of last year" not in once
    assert "| kill rank 0 | 2 | 9 s | 11 s |" in once
    assert "| rank 1 | 1 | 1.5 min | 310.0 / 310.0 | +0.0 ± 0.0 |" in once
    soak_report.write_section(a_result(), tmp_path)
    assert page.read_text() == once
    assert json.loads((tmp_path / "results" / "soak.json").read_text())["steps"] == 1200
    assert (tmp_path / "figures" / "soak.png").stat().st_size > 10_000
    with pytest.raises(ValueError, match="needs the two lines"):
        soak_report.put_between("no place", "text")


def test_the_page_names_tests_that_exist() -> None:
    page = (ROOT / "docs" / "reliability.md").read_text(encoding="utf-8")
    named = re.findall(r"`(tests/[\w/]+\.py)?(?:::(\w+))?`", page)
    named = [pair for pair in named if any(pair)]
    assert len(named) > 40
    last = ""
    for path, name in named:
        last = path or last  # `::name` is of the file named before
        source = (ROOT / last).read_text(encoding="utf-8")
        assert not name or f"def {name}(" in source, f"{path}::{name}"


@pytest.mark.long
def test_a_soak_of_half_a_minute(tmp_path: Path, text_file: Path) -> None:
    """Faults every few seconds, and still the undisturbed run bit for bit."""
    out, docs = tmp_path / "out", tmp_path / "docs"
    done = subprocess.run(
        [
            sys.executable, str(ROOT / "evidence" / "soak.py"),
            "--out", str(out), "--docs", str(docs), "--data", str(text_file),
            "--minutes", "0.5", "--period", "3",
        ],
        capture_output=True,
        text=True,
        timeout=900,
        env={**os.environ, "OMP_NUM_THREADS": "1", "BELLMASK_CACHE": str(tmp_path / "cache")},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    told = json.loads((docs / "results" / "soak.json").read_text())
    assert told["is_kept"]
    assert told["reference"]["is_same"]
    assert sum(fault["count"] for fault in told["faults"].values()) >= 1
    assert told["memory"].keys() == {"rank 0", "rank 1", "agent"}
