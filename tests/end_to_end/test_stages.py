"""The suite cpt_sft as a user runs it: what is trained, shared, asked, kept and refused.

Trainings run in this process, but for the long tests, which kill the real ones.
"""

from __future__ import annotations

import json
import os
import random
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bellmask.answers import Answerer
from bellmask.assemble import train_run
from bellmask.cli import run_command
from bellmask.commands.stages import _stage
from bellmask.compare import stages
from bellmask.compare.execute import is_finished
from bellmask.config import load_config, override
from bellmask.evaluate import exam
from bellmask.evaluate.exact_match import ask
from bellmask.generate.settings import Sampling
from bellmask.presets import arm_tiny
from bellmask.run import load_run

SMALL = (
    "--data.block-length 32 --train.batch-size 8 --optim.warmup-steps 1 --optim.ema 0.5 "
    "--validation.blocks 16 --validation.num-samples 1 --validation.sample-steps 4 --log.every 2"
)
STEPS = "--train.steps 4 --validation.every '2 steps' --checkpoint.every '2 steps'"
CELLS = [("base", None), ("bell", None)]
CELLS += [("base", "base"), ("base", "bell"), ("bell", "base"), ("bell", "bell")]


@dataclass
class Suite:
    """The start that all suites here share, and what they trained and asked."""

    arm: Path
    text: Path
    cache: Path
    trained: list[str]
    asked: list[int]

    def stages(self, steps: str = STEPS) -> tuple[str, str]:
        """--cpt and --sft."""
        cpt = f"cpt_tiny {SMALL} {steps} --data.train {self.text} --data.cache {self.cache}"
        sft = f"sft_tiny {SMALL} {steps} --data.cache {self.cache}"
        sft += " --sft.train toy:copy:2 --sft.round-to 8"
        return f"{cpt} --start.anneal-steps 2", sft

    def args(self, place: Path, *more: str, steps: str = STEPS) -> list[str]:
        cpt, sft = self.stages(steps)
        where = ["--out", str(place / "out"), "--runs", str(place / "runs")]
        asking = ["--examples", "12", "--sampling-seeds", "2"]
        start = ["--start", str(self.arm), "--cpt", cpt, "--sft", sft]
        return ["compare", "--suite", "cpt_sft", *start, *where, *asking, *more]

    def run(self, place: Path, *more: str) -> tuple[list[str], list[int]]:
        """(names of what was trained, sampling seeds that were asked)."""
        self.trained.clear()
        self.asked.clear()
        assert run_command(self.args(place, *more)) == 0
        return list(self.trained), list(self.asked)


@pytest.fixture(scope="module")
def suite(text_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Suite]:
    place, cache = tmp_path_factory.mktemp("arm"), tmp_path_factory.mktemp("cache")
    options = f"{SMALL} {STEPS} --data.tokenizer bpe:300 --data.train {text_file}"
    config = override(arm_tiny(), [*shlex.split(options), "--data.cache", str(cache)])
    train_run(config, place / "arm", is_quiet=True)
    made = Suite(place / "arm", text_file, cache, [], [])

    def execute(runs, *, jobs, is_quiet):
        for run in runs:
            if not is_finished(run):
                made.trained.append(run.variant)
                train_run(run.config, run.folder, resume="auto", is_quiet=True)

    def asking(*args, seed, **more):
        made.asked.append(seed)
        return ask(*args, seed=seed, **more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stages, "execute", execute)
        patch.setattr(exam, "ask", asking)
        yield made


@pytest.fixture(scope="module")
def undisturbed(suite: Suite, tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("undisturbed")
    trained, asked = suite.run(place)
    names = ["CPT base", "CPT bell"]
    pairs = [f"{cpt} + SFT {sft}" for cpt in names for sft in ("base", "bell")]
    assert trained == [*names, *pairs]
    assert asked == [0, 1] * 6
    return place


def results_of(place: Path) -> dict[str, Any]:
    return json.loads((place / "out" / "results.json").read_text(), parse_constant=pytest.fail)


def stamps(folder: Path) -> dict[str, int]:
    return {str(p.relative_to(folder)): p.stat().st_mtime_ns for p in sorted(folder.rglob("*"))}


def folders(place: Path) -> dict[tuple[str, str | None], Path]:
    return {
        (row["cpt"], row["sft"]): place / "runs" / row["runs"][0]["run"]
        for row in results_of(place)["rows"]
    }


def plan_of(suite: Suite, root: Path, *, seeds: int = 1, cpt: str = "", sft: str = "") -> list[Any]:
    """(cell, run) of the plan, with options added to the stages."""
    first, second = suite.stages()
    _, one = _stage("--cpt", f"{first} {cpt}")
    _, two = _stage("--sft", f"{second} {sft}")
    one = replace(one, start=replace(one.start, model=str(suite.arm)))
    return stages.plan_stages(one, two, seeds=seeds, root=root, is_quiet=True).cells


def keys(cells: list[Any], *, is_tuned: bool) -> list[str]:
    return [run.folder.name for cell, run in cells if (cell.sft is not None) == is_tuned]


# --- what is trained -------------------------------------------------------------------------


def test_six_runs_with_shared_starts(undisturbed: Path, suite: Suite) -> None:
    place = folders(undisturbed)
    assert list(place) == CELLS
    assert len(set(place.values())) == 6
    names = {"base": ("nelbo", "uniform"), "bell": ("bell", "gaussian")}
    for (cpt, sft), folder in place.items():
        config = load_config(folder / "config.json")
        assert (config.objective.name, config.law.name) == names[sft or cpt]
        start = suite.arm if sft is None else place[cpt, None]
        assert config.start.model == str(start)
        assert config.start.checkpoint == ("latest" if sft is None else "4")
        assert config.start.anneal_steps == (2 if sft is None else 1)
        assert config.sft.train == (None if sft is None else "toy:copy:2")


def largest_difference(one: Any, other: Any) -> float:
    pairs = zip(one.model.parameters(), other.model.parameters(), strict=True)
    return max(float((a - b).abs().max().detach()) for a, b in pairs)


def test_starts_are_really_used(undisturbed: Path, tmp_path: Path) -> None:
    """A fine-tuning that hardly moves ends at the moving average of its own adaptation."""
    place = folders(undisturbed)
    config = load_config(place["bell", "base"] / "config.json")
    still = replace(config.optim, lr=1e-9, ema=0.0)
    train_run(replace(config, optim=still), tmp_path / "still", is_quiet=True)
    found = load_run(tmp_path / "still")
    assert largest_difference(found, load_run(place["bell", None])) < 1e-6
    assert largest_difference(found, load_run(place["bell", None], weights="raw")) > 1e-4
    assert largest_difference(found, load_run(place["base", None])) > 1e-4
    moved = load_run(place["bell", "base"])
    assert largest_difference(moved, load_run(place["bell", None])) > 1e-4


@pytest.fixture(scope="module")
def planned(suite: Suite, tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    return plan_of(suite, tmp_path_factory.mktemp("plan") / "elsewhere")


def test_keys_depend_on_content_not_on_where_it_lies(
    suite: Suite, undisturbed: Path, planned: list[Any]
) -> None:
    found = {(cell.cpt, cell.sft): run.folder.name for cell, run in planned}
    assert found == {cell: folder.name for cell, folder in folders(undisturbed).items()}
    root = planned[0][1].folder.parent
    assert not root.exists()
    adapted, tuned = (keys(planned, is_tuned=is_tuned) for is_tuned in (False, True))
    other = plan_of(suite, root, cpt="--optim.lr 1e-3")
    assert not set(keys(other, is_tuned=False)) & set(adapted)
    assert not set(keys(other, is_tuned=True)) & set(tuned)
    other = plan_of(suite, root, cpt="--log.project x", sft="--sft.train toy:copy:3")
    assert keys(other, is_tuned=False) == adapted
    assert not set(keys(other, is_tuned=True)) & set(tuned)


def test_more_seeds_are_more_runs_and_share_the_first(suite: Suite, planned: list[Any]) -> None:
    two = plan_of(suite, planned[0][1].folder.parent, seeds=2)
    assert len(two) == 12
    assert len({run.folder for _, run in two}) == 12
    assert [run.folder for _, run in two[:6]] == [run.folder for _, run in planned]
    assert [cell.seed for cell, _ in two] == [1] * 6 + [2] * 6
    assert [run.config.train.seed for _, run in two] == [1] * 6 + [2] * 6
    starts = {cell.cpt: str(run.folder) for cell, run in two[6:] if cell.sft is None}
    for cell, run in two[6:]:
        if cell.sft is not None:
            assert run.config.start.model == starts[cell.cpt]


def test_a_backbone_with_random_weights_is_a_start_too(suite: Suite, tmp_path: Path) -> None:
    cpt, sft = suite.stages()
    options = cpt.removeprefix("cpt_tiny ").replace("--start.anneal-steps 2", "")
    _, one = _stage("--cpt", f"arm_tiny {options} --data.tokenizer bpe:300")
    _, two = _stage("--sft", sft)
    plan = stages.plan_stages(one, two, seeds=1, root=tmp_path, is_quiet=True)
    assert [run.config.framework.name for _, run in plan.cells] == ["mdm"] * 6
    assert plan.tokenizer.num_tokens == load_run(suite.arm).tokenizer.num_tokens
    assert int(plan.valid.starts.min()) > 1  # BOS and a prompt
    assert len(plan.runs(is_tuned=False)) == 2
    assert len(plan.runs(is_tuned=True)) == 4


# --- what is measured ------------------------------------------------------------------------


def plant_right_answers(place: Path, texts: list[str]) -> None:
    """So short a training gets nothing right: let every run have known some answers."""
    draw = random.Random(4)
    for file in sorted(place.glob("runs/*/exact_match/seed-*")):
        content = json.loads(file.read_text())
        said = [t if draw.random() < 0.5 else a for t, a in zip(texts, content["answers"])]
        file.write_text(json.dumps({**content, "answers": said}))


def test_results_are_what_files_say(
    undisturbed: Path, suite: Suite, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In a copy that lies elsewhere, where nothing has to be done again either."""
    shutil.copytree(undisturbed, tmp_path, dirs_exist_ok=True)
    run = load_run(folders(tmp_path)["base", "base"])
    rows, tokenizer = run.blocks()[1].slice(0, 12), run.tokenizer
    texts = [
        tokenizer.decode(row[start : start + 8].numpy()).strip()
        for row, start in zip(rows.rows(slice(None)), rows.starts, strict=True)
    ]
    assert all(len(text) == 3 and text[1] == " " for text in texts)
    plant_right_answers(tmp_path, texts)
    assert suite.run(tmp_path) == ([], [])
    assert "held other results, which are replaced" in capsys.readouterr().out
    check_results(tmp_path, texts)


def check_results(place: Path, texts: list[str]) -> None:
    """results.json and table.md against the runs' own files."""
    out, found, folder_of = place / "out", results_of(place), folders(place)
    assert {p.name for p in out.iterdir()} == {
        "results.json", "table.md", "curves.png", "curves.svg",
    }  # fmt: skip
    assert found["asked"]["examples"] == 12
    assert found["asked"]["sampling"]["steps"] == 4
    shares = {}
    for cell, folder in folder_of.items():
        kept = [json.loads(p.read_text()) for p in sorted((folder / "exact_match").iterdir())]
        assert [one["seed"] for one in kept] == [0, 1]
        assert {len(one["answers"]) for one in kept} == {12}
        right = [[a == t for a, t in zip(one["answers"], texts)] for one in kept]
        shares[cell] = np.array(right, dtype=float)
        (run,) = next(r["runs"] for r in found["rows"] if (r["cpt"], r["sft"]) == cell)
        assert run["exact_match"] == pytest.approx(shares[cell].mean())
        assert run["by_sampling_seed"] == pytest.approx(shares[cell].mean(1).tolist())
        lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        assert run["nll"] == [one["nll"] for one in lines if one["kind"] == "validation"]
    assert len({float(share.mean()) for share in shares.values()}) > 3
    lines = [line for line in (out / "table.md").read_text().splitlines() if line[:3] == "| b"]
    assert len(lines) == 6
    for line, row in zip(lines, found["rows"], strict=True):
        cells = [cell.strip().replace("**", "") for cell in line.strip("|").split("|")]
        assert cells[:2] == [row["cpt"], row["sft"] or "—"]
        mine, base = (shares[row["cpt"], row["sft"]], shares["base", row["sft"] and "base"])
        assert cells[2] == f"{row['runs'][0]['nll'][-1]:.4f}"
        deviation = abs(mine.mean(1)[0] - mine.mean(1)[1]) / 2**0.5
        assert cells[4] == f"{100 * mine.mean():.2f} ± {100 * deviation:.2f}"
        if row["difference"] is not None:
            each = mine.mean(0) - base.mean(0)
            error = each.std(ddof=1) / 12**0.5
            assert cells[5] == f"{100 * each.mean():+.2f} ± {100 * error:.2f}"


@pytest.mark.parametrize("cell", [("bell", "bell"), ("base", None)])
def test_answers_are_those_of_the_chat(
    cell: tuple[str, str | None], undisturbed: Path, suite: Suite
) -> None:
    """The same prompts as texts, through the run's template, give the same words."""
    place = folders(undisturbed)
    run = load_run(place[cell])
    rows = load_run(place["base", "base"]).blocks()[1].slice(0, 12)
    prompts = [
        run.tokenizer.decode(row[1:start].numpy())
        for row, start in zip(rows.rows(slice(None)), rows.starts, strict=True)
    ]
    assert all(prompt.startswith("Copy: ") for prompt in prompts)
    answerer, length = Answerer(run), results_of(undisturbed)["asked"]["gap"]
    questions = [answerer.question(prompt) for prompt in prompts]
    said = answerer.answer(questions, length=length, sampling=Sampling(steps=4), seed=1)
    kept = next((place[cell] / "exact_match").glob("seed-1-*"))
    assert json.loads(kept.read_text())["answers"] == [one.text for one in said]
    assert len({one.text for one in said}) > 6


def test_repeating_it_trains_and_asks_nothing(
    undisturbed: Path, suite: Suite, capsys: pytest.CaptureFixture[str]
) -> None:
    before, runs = (undisturbed / "out/results.json").read_bytes(), stamps(undisturbed / "runs")
    pictures = [(undisturbed / "out" / name).read_bytes() for name in ("curves.svg", "table.md")]
    assert suite.run(undisturbed, "--quiet") == ([], [])
    out, err = capsys.readouterr()
    assert "fine-tuning" in out
    assert "held other results" not in out
    assert not err
    assert (undisturbed / "out/results.json").read_bytes() == before
    assert stamps(undisturbed / "runs") == runs
    assert pictures == [
        (undisturbed / "out" / name).read_bytes() for name in ("curves.svg", "table.md")
    ]


def test_only_what_is_new_or_damaged_is_asked(
    undisturbed: Path, suite: Suite, tmp_path: Path
) -> None:
    cut, shorter = (
        next((folders(undisturbed)[cell] / "exact_match").glob("seed-1-*"))
        for cell in (("bell", None), ("base", "base"))
    )
    before = [json.loads(file.read_text()) for file in (cut, shorter)]
    cut.write_text(cut.read_text()[:-30])
    shorter.write_text(json.dumps({**before[1], "answers": before[1]["answers"][:-1]}))
    found = suite.run(undisturbed, "--out", str(tmp_path / "out"), "--sampling-seeds", "3")
    asked = [[2], [1, 2], [2], [1, 2], [2], [2]]  # each adaptation, then what starts from it
    assert found == ([], [seed for seeds in asked for seed in seeds])
    assert [json.loads(file.read_text()) for file in (cut, shorter)] == before
    more, old = results_of(tmp_path), results_of(undisturbed)
    for mine, theirs in zip(more["rows"], old["rows"], strict=True):
        (one,), (two,) = mine["runs"], theirs["runs"]
        assert one["by_sampling_seed"][:2] == two["by_sampling_seed"]
        assert one["nll"] == two["nll"]


def test_interrupted_and_repeated_it_gives_the_same(
    undisturbed: Path,
    suite: Suite,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Stopped inside the fourth training, then among the answers."""
    import bellmask.train.trainer as trainer

    calls, record = [], trainer.Trainer.record

    def recording(self, kind, values):
        calls.append(kind)
        if calls.count("validation") == 8:  # the second one of the fourth training
            raise KeyboardInterrupt
        return record(self, kind, values)

    with monkeypatch.context() as patch:
        patch.setattr(trainer.Trainer, "record", recording)
        assert run_command(suite.args(tmp_path)) == 130
    assert "the same command goes on with them" in capsys.readouterr().err
    assert not (tmp_path / "out" / "results.json").exists()
    done = list(suite.trained)

    def failing(*args, seed, **more):
        if len(suite.asked) == 5:
            raise KeyboardInterrupt
        suite.asked.append(seed)
        return ask(*args, seed=seed, **more)

    with monkeypatch.context() as patch:
        patch.setattr(exam, "ask", failing)
        suite.trained.clear()
        suite.asked.clear()
        assert run_command(suite.args(tmp_path)) == 130
    assert suite.trained[0] == done[-1] == "CPT base + SFT bell"
    assert len(suite.trained) == 3
    assert suite.run(tmp_path) == ([], [1, *[0, 1] * 3])
    whole = (undisturbed / "out/results.json").read_bytes()
    assert (tmp_path / "out/results.json").read_bytes() == whole


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ("", "runs/arm_tiny, where both adaptations start, is missing: make it with bellmask train "
         "arm_tiny --out runs/arm_tiny"),
        ("--cpt cpt_tin", "unknown preset 'cpt_tin'; did you mean 'cpt_tiny'"),
        ("--cpt '' --start {arm}", "--cpt begins with a preset"),
        ("--cpt 'cpt_tiny \"x'", "No closing quotation"),
        ("--cpt 'cpt_tiny --law dirac'", "--cpt: --law is what base and bell differ in"),
        ("--sft 'sft_tiny --objective=nelbo'", "--sft: --objective is what base and bell differ"),
        ("--sft 'sft_tiny --start.model x'", "--sft: --start.model is decided"),
        ("--sft 'sft_tiny --start.fresh'", "--sft: --start.fresh is decided"),
        ("--sft 'sft_tiny --optim.lrr 1'", "optim.lrr"),
        ("--sft cpt_tiny --start {arm}", "--sft needs prompts and responses"),
        ("--cpt sft_tiny --start {arm}", "--cpt is continual pretraining on text"),
        ("--seeds 0 --start {arm}", "--seeds and --jobs must be at least 1"),
        ("--sampling-seeds 0 --start {arm}", "--sampling-seeds and --batch-size must be at least"),
        ("--gap own --length 4 --start {arm}", "--length is of a fixed gap"),
        ("--sampling.steps 0 --start {arm}", "--steps must be from 1"),
        ("--start {arm} --out {file}", "is a file; give a folder"),
        ("--start {arm} --runs {file}", "is a file; give a folder"),
        ("--start {arm} {stages} --length 32", "--length 32: rows have 32 tokens"),
        ("--start {arm} --cpt 'cpt_tiny --validation.every never'", "a comparison needs a curve"),
        ("--start {arm} {long}", "data.block_length=512 is longer than"),
        ("--referense base", "unrecognized"),
    ],
)  # fmt: skip
def test_bad_input_gets_one_message_and_exit_code_2(
    args: str,
    message: str,
    suite: Suite,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    cpt, sft = suite.stages()
    given = f"--cpt {shlex.quote(cpt)} --sft {shlex.quote(sft)}"
    long = f"--cpt {shlex.quote(cpt)} --sft {shlex.quote(sft + ' --data.block-length 512')}"
    words = args.format(arm=suite.arm, file=suite.text, stages=given, long=long)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("BELLMASK_CACHE", str(suite.cache))
    assert run_command(["compare", "--suite", "cpt_sft", *shlex.split(words)]) == 2
    err = capsys.readouterr().err
    assert message.lower() in " ".join(err.split()).lower()
    assert err.count("error:") == 1
    assert "Traceback" not in err
    assert not list(tmp_path.iterdir()), "nothing is left behind"


def test_a_preset_of_other_comparisons_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["compare", "tiny", "--suite", "cpt_sft"]) == 2
    assert "give them as --cpt and --sft, not 'tiny'" in capsys.readouterr().err


def test_help_has_examples(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        run_command(["compare", "--suite", "cpt_sft", "--help"])
    assert caught.value.code == 0
    assert "bellmask compare --suite cpt_sft --seeds 3 --jobs 2" in capsys.readouterr().out
    assert run_command(["compare", "--help"]) == 0
    assert "bellmask compare --suite cpt_sft --help" in capsys.readouterr().out


# --- in processes of their own ---------------------------------------------------------------


def start(args: list[str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "bellmask", *args],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "120"},
        start_new_session=True,
    )


def wait_until(is_true: Callable[[], object], seconds: float = 300) -> None:
    deadline = time.monotonic() + seconds
    while not is_true():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.05)


LONGER = "--train.steps 60 --validation.every '20 steps' --checkpoint.every '10 steps'"


@pytest.mark.long
def test_kills_change_nothing(suite: Suite, tmp_path: Path) -> None:
    """The whole command is killed as each training begins to move, then as answers appear."""
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    process = start(suite.args(whole, "--jobs", "2", steps=LONGER))
    _, err = process.communicate(timeout=900)
    assert process.returncode == 0, err
    assert err.count("2 at a time") == 2
    args, draw, kills = suite.args(parts, "--jobs", "2", steps=LONGER), random.Random(3), 0
    for pattern, count in [("*/metrics.jsonl", 1), ("*/metrics.jsonl", 3), ("*/exact_match/s*", 3)]:
        process = start(args)
        wait_until(
            lambda p=process, g=pattern, n=count: (
                len(list((parts / "runs").glob(g))) >= n or p.poll() is not None
            )
        )
        time.sleep(draw.uniform(0, 0.5))
        kills += process.poll() is None
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        assert not (parts / "out" / "results.json").exists()
    assert kills == 3
    process = start(args)
    _, err = process.communicate(timeout=900)
    assert process.returncode == 0, err
    assert results_of(parts) == results_of(whole)
