"""The suite cpt_sft as a user runs it: what is trained, shared, asked, kept and refused."""

from __future__ import annotations

import json
import random
import shlex
import shutil
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from commands import bellmask, refuses, succeeds
from train_here import train_here

from bellmask.compare import stages
from bellmask.config.config import load_config, override
from bellmask.config.presets import preset
from bellmask.evaluate import exact_match as exam
from bellmask.evaluate.exact_match import ask
from bellmask.run import load_run

SMALL = (
    "--data.block-length 32 --train.batch-size 8 --optim.warmup-steps 1 --optim.ema 0.5 "
    "--validation.blocks 16 --validation.num-samples 1 --validation.sample-steps 4 --log.every 2"
)
STEPS = "--train.steps 4 --validation.every 2 --checkpoint.every 2"
NAMES = ["CPT base", "CPT bell"]
NAMES += [f"{cpt} + SFT {sft}" for cpt in NAMES for sft in ("base", "bell")]


@dataclass
class Suite:
    """Where all suites here start, and what they trained and asked."""

    zoo: Path
    trained: list[str]
    asked: list[int]

    def stages(self, steps=STEPS):
        """--cpt and --sft."""
        shared = f"{SMALL} {steps} --data.cache {self.zoo / 'cache'}"
        cpt = f"cpt_tiny {shared} --data.train {self.zoo / 'text.txt'} --start.anneal-steps 2"
        return cpt, f"sft_tiny {shared} --sft.train toy:copy:2 --sft.round-to 8"

    def args(self, place, *more, steps=STEPS):
        cpt, sft = self.stages(steps)
        where = ["--out", place / "out", "--runs", place / "runs"]
        asking = ["--examples", "12", "--sampling-seeds", "2"]
        start = ["--start", self.zoo / "gpt2", "--cpt", cpt, "--sft", sft]
        return ["compare", "--suite", "cpt_sft", *start, *where, *asking, *more]

    def run(self, place, *more):
        """(names of what was trained, sampling seeds that were asked, what was said)."""
        self.trained.clear()
        self.asked.clear()
        said = succeeds(*self.args(place, *more))
        return list(self.trained), list(self.asked), said.out

    def plan(self, root, *, seeds=1, cpt="", sft="", start=None):
        """The plan, with options added to the stages."""
        start = start or f"--start.model {self.zoo / 'gpt2'}"
        more = (f"{cpt} {start}", sft)
        texts = [shlex.split(f"{text} {add}") for text, add in zip(self.stages(), more)]
        configs = [override(preset(name), options) for name, *options in texts]
        return stages.plan_stages(*configs, seeds=seeds, root=root, is_quiet=True)


@pytest.fixture(scope="module")
def suite(zoo):
    with pytest.MonkeyPatch.context() as patch:
        made = Suite(zoo, train_here(patch), [])

        def asking(*args, seed, **more):
            made.asked.append(seed)
            return ask(*args, seed=seed, **more)

        patch.setattr(exam, "ask", asking)
        yield made


@pytest.fixture(scope="module")
def undisturbed(suite, tmp_path_factory):
    place = tmp_path_factory.mktemp("undisturbed")
    assert suite.run(place)[:2] == (NAMES, [0, 1] * 6)
    return place


def results_of(place):
    return json.loads((place / "out" / "results.json").read_text(), parse_constant=pytest.fail)


def folders(place):
    return {
        (row["cpt"], row["sft"]): place / "runs" / row["runs"][0]["run"]
        for row in results_of(place)["rows"]
    }


# --- what is trained ---------------------------------------------------------------------------


def test_six_runs_with_shared_starts(undisturbed, zoo):
    place = folders(undisturbed)
    assert len(set(place.values())) == 6
    names = {"base": ("nelbo", "uniform"), "bell": ("bell", "gaussian")}
    for (cpt, sft), folder in place.items():
        config = load_config(folder / "config.json")
        assert (config.objective.name, config.law.name) == names[sft or cpt]
        start = zoo / "gpt2" if sft is None else place[cpt, None]
        assert config.start.model == str(start)
        assert config.start.checkpoint == ("latest" if sft is None else "4")
        assert config.start.anneal_steps == (2 if sft is None else 1)
        assert config.sft.train == (None if sft is None else "toy:copy:2")


def keys(plan, *, is_tuned):
    return [run.folder.name for run in plan.runs if (run.sft is not None) == is_tuned]


@pytest.mark.long
def test_keys_depend_on_content_not_on_where_it_lies(suite, undisturbed, tmp_path):
    root = tmp_path / "elsewhere"
    planned = suite.plan(root)
    found = {(run.cpt, run.sft): run.folder.name for run in planned.runs}
    assert found == {cell: folder.name for cell, folder in folders(undisturbed).items()}
    assert not root.exists()
    adapted, tuned = (keys(planned, is_tuned=is_tuned) for is_tuned in (False, True))
    other = suite.plan(root, cpt="--optim.lr 1e-3")
    assert not set(keys(other, is_tuned=False)) & set(adapted)
    assert not set(keys(other, is_tuned=True)) & set(tuned)
    other = suite.plan(root, cpt="--log.project x", sft="--sft.train toy:copy:3")
    assert keys(other, is_tuned=False) == adapted
    assert not set(keys(other, is_tuned=True)) & set(tuned)
    # more seeds are more runs and share the first
    two = suite.plan(root, seeds=2).runs
    assert [run.folder for run in two[:6]] == [run.folder for run in planned.runs]
    assert len({run.folder for run in two}) == 12
    assert [run.seed for run in two] == [1] * 6 + [2] * 6
    assert [run.config.train.seed for run in two] == [1] * 6 + [2] * 6
    starts = {run.cpt: str(run.folder) for run in two[6:] if run.sft is None}
    for run in two[6:]:
        assert run.sft is None or run.config.start.model == starts[run.cpt]


def test_a_backbone_with_random_weights_is_a_start_too(suite, tmp_path):
    start = f"--start.architecture {suite.zoo / 'gpt2.json'} --data.tokenizer bytes"
    plan = suite.plan(tmp_path, start=f"{start} --start.model None")
    assert [run.config.framework.name for run in plan.runs] == ["mdm"] * 6
    assert plan.tokenizer.num_tokens == load_run(suite.zoo / "gpt2").tokenizer.num_tokens
    assert int(plan.valid.starts.min()) > 1  # BOS and a prompt


# --- what is measured --------------------------------------------------------------------------


def questions(place):
    """(prompt, response) of the twelve examples that are asked."""
    run = load_run(folders(place)["base", "base"])
    rows, decode = run.blocks()[1].slice(0, 12), run.tokenizer.decode
    return [
        (decode(row[1:start].numpy()), decode(row[start : start + 8].numpy()).strip())
        for row, start in zip(rows.rows(slice(None)), rows.starts, strict=True)
    ]


def test_results_are_what_files_say(undisturbed, suite, tmp_path):
    """In a copy that lies elsewhere, where nothing has to be done again either."""
    shutil.copytree(undisturbed, tmp_path, dirs_exist_ok=True)
    texts = [response for _, response in questions(undisturbed)]
    assert all(len(text) == 3 and text[1] == " " for text in texts)
    # so short a training gets nothing right: let every run have known some answers
    draw, right = random.Random(4), {}
    for file in sorted(tmp_path.glob("runs/*/exact_match/seed-*")):
        content = json.loads(file.read_text())
        said = [t if draw.random() < 0.5 else a for t, a in zip(texts, content["answers"])]
        file.write_text(json.dumps({**content, "answers": said}))
        is_right = [a == t for a, t in zip(said, texts, strict=True)]
        right.setdefault(file.parent.parent.name, []).append(np.mean(is_right))
    trained, asked, out = suite.run(tmp_path)
    assert (trained, asked) == ([], [])
    assert "held other results, which are replaced" in out
    found = results_of(tmp_path)
    assert (found["asked"]["examples"], found["asked"]["sampling"]["steps"]) == (12, 4)
    assert len({float(np.mean(shares)) for shares in right.values()}) > 3
    for row in found["rows"]:
        (run,) = row["runs"]
        assert run["by_sampling_seed"] == pytest.approx(right[run["run"]])
        assert row["exact_match"] == run["exact_match"] == pytest.approx(np.mean(right[run["run"]]))
        metrics = (tmp_path / "runs" / run["run"] / "metrics.jsonl").read_text().splitlines()
        lines = [json.loads(line) for line in metrics]
        assert run["nll"] == [one["nll"] for one in lines if one["kind"] == "validation"]
    assert (tmp_path / "out/table.md").read_text().count("\n| b") == 6
    assert (tmp_path / "out" / "curves.png").exists()


def test_only_what_is_new_or_damaged_is_asked(undisturbed, suite, tmp_path):
    whole = (undisturbed / "out/results.json").read_bytes()
    assert suite.run(undisturbed, "--quiet")[:2] == ([], [])
    assert (undisturbed / "out/results.json").read_bytes() == whole
    cut, shorter = (
        next((folders(undisturbed)[cell] / "exact_match").glob("seed-1-*"))
        for cell in (("bell", None), ("base", "base"))
    )
    before = [json.loads(file.read_text()) for file in (cut, shorter)]
    cut.write_text(cut.read_text()[:-30])
    shorter.write_text(json.dumps({**before[1], "answers": before[1]["answers"][:-1]}))
    found = suite.run(undisturbed, "--out", tmp_path / "out", "--sampling-seeds", "3")
    asked = [[2], [1, 2], [2], [1, 2], [2], [2]]  # each adaptation, then what starts from it
    assert found[:2] == ([], [seed for seeds in asked for seed in seeds])
    assert [json.loads(file.read_text()) for file in (cut, shorter)] == before
    for mine, theirs in zip(results_of(tmp_path)["rows"], json.loads(whole)["rows"], strict=True):
        (one,), (two,) = mine["runs"], theirs["runs"]
        assert one["by_sampling_seed"][:2] == two["by_sampling_seed"]
        assert one["nll"] == two["nll"]


@pytest.mark.long
def test_interrupted_and_repeated_it_gives_the_same(undisturbed, suite, tmp_path, monkeypatch):
    """Stopped inside the fourth training, then among the answers."""
    import bellmask.train.trainer as trainer

    calls, record = [], trainer.Trainer.record

    def recording(self, kind, values):
        calls.append(kind)
        if calls.count("validation") == 8:  # the second one of the fourth training
            raise KeyboardInterrupt
        return record(self, kind, values)

    suite.trained.clear()
    with monkeypatch.context() as patch:
        patch.setattr(trainer.Trainer, "record", recording)
        said = bellmask(*suite.args(tmp_path))
    assert said.code == 130
    assert "interrupted" in said.err
    assert not (tmp_path / "out" / "results.json").exists()
    assert suite.trained == ["CPT base", "CPT bell", *NAMES[2:4]]
    suite.trained.clear()
    suite.asked.clear()

    def failing(*args, seed, **more):
        if len(suite.asked) == 5:
            raise KeyboardInterrupt
        suite.asked.append(seed)
        return ask(*args, seed=seed, **more)

    with monkeypatch.context() as patch:
        patch.setattr(exam, "ask", failing)
        assert bellmask(*suite.args(tmp_path)).code == 130
    assert suite.trained == NAMES[3:]
    assert suite.run(tmp_path)[:2] == ([], [1, *[0, 1] * 3])
    whole = (undisturbed / "out/results.json").read_bytes()
    assert (tmp_path / "out/results.json").read_bytes() == whole


@pytest.mark.parametrize(
    ("args", "names"),
    [
        ("", "runs/arm_tiny"),
        ("--cpt '' --start {arm}", "--cpt"),
        ("--cpt 'cpt_tiny \"x'", "quotation"),
        ("--cpt 'cpt_tiny --law dirac'", "--cpt: --law"),
        ("--sft 'sft_tiny --start.fresh'", "--sft: --start.fresh"),
        ("--seeds 0 --start {arm}", "--seeds"),
        ("--sampling-seeds 0 --start {arm}", "--sampling-seeds"),
        ("--gap own --length 4 --start {arm}", "--length"),
        ("--sampling.steps 0 --start {arm}", "--steps"),
        ("--start {arm} {stages} --length 32", "--length 32"),
        ("--start {arm} {long}", "data.block_length=512"),
    ],
)
def test_bad_input_is_refused_and_leaves_nothing_behind(args, names, suite, tmp_path, monkeypatch):
    cpt, sft = map(shlex.quote, suite.stages())
    long = f"--cpt {cpt} --sft {sft[:-1]} --data.block-length 512'"
    given = {"stages": f"--cpt {cpt} --sft {sft}", "long": long}
    words = args.format(arm=suite.zoo / "gpt2", file=suite.zoo / "text.txt", **given)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("BELLMASK_CACHE", str(suite.zoo / "cache"))
    refuses("compare", "--suite", "cpt_sft", *shlex.split(words), names=names)
    assert not list(tmp_path.iterdir())


def test_a_preset_of_other_comparisons_is_refused():
    refuses("compare", "tiny", "--suite", "cpt_sft", names="--cpt")
    assert "--sampling-seeds" in succeeds("compare", "--suite=cpt_sft", "--help").out
