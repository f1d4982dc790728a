"""The suite cpt_sft as a user runs it: what is trained, shared, asked, kept and refused."""

from __future__ import annotations

import json
import shlex
import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest
from commands import bellmask, refuses, succeeds
from train_here import train_here

from bellmask.compare import stages
from bellmask.compare.execute import TrainingOptions
from bellmask.config.config import load_config, override
from bellmask.config.presets import preset
from bellmask.evaluate.exact_match import Exam
from bellmask.run import load_run
from bellmask.storage.run_folder import read_metrics
from bellmask.train.trainer import Trainer

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
        stages = ["--cpt", f"{cpt} --start.model {self.zoo / 'gpt2'}", "--sft", sft]
        return ["compare", "--suite", "cpt_sft", *stages, *where, *asking, *more]

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
        return stages.plan_stages(
            *configs, TrainingOptions(seeds=seeds, runs=str(root), quiet=True)
        )


@pytest.fixture(scope="module")
def suite(zoo):
    with pytest.MonkeyPatch.context() as patch:
        made, ask = Suite(zoo, train_here(patch), []), Exam.ask

        def asking(exam, run, seed, progress):
            made.asked.append(seed)
            return ask(exam, run, seed, progress)

        patch.setattr(Exam, "ask", asking)
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


@pytest.mark.long
def test_keys_depend_on_content_not_on_where_it_lies(suite, undisturbed, tmp_path):
    root = tmp_path / "elsewhere"

    def keys(plan):
        """Names of (adaptations', fine-tunings') folders."""
        cells = {(run.cpt, run.sft): run.folder.name for run in plan.runs}
        adapted = {key for (_, sft), key in cells.items() if sft is None}
        return adapted, {*cells.values()} - adapted

    planned = suite.plan(root)
    found = {(run.cpt, run.sft): run.folder.name for run in planned.runs}
    assert found == {cell: folder.name for cell, folder in folders(undisturbed).items()}
    assert not root.exists()
    adapted, tuned = keys(planned)
    others = keys(suite.plan(root, cpt="--optim.lr 1e-3"))
    assert (others[0] & adapted, others[1] & tuned) == (set(), set())
    others = keys(suite.plan(root, cpt="--log.project x", sft="--sft.train toy:copy:3"))
    assert (others[0], others[1] & tuned) == (adapted, set())
    # more seeds are more runs and share the first
    two = suite.plan(root, seeds=2).runs
    assert [run.folder for run in two[:6]] == [run.folder for run in planned.runs]
    assert len({run.folder for run in two}) == 12
    assert [(run.seed, run.config.train.seed) for run in two] == [(1, 1)] * 6 + [(2, 2)] * 6
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


def test_results_are_what_files_say_wherever_they_lie(undisturbed, suite, tmp_path):
    """Nothing is done again; so short a training gets nothing right: let one run know answers."""
    assert suite.run(undisturbed, "--quiet")[:2] == ([], [])
    shutil.copytree(undisturbed, tmp_path, dirs_exist_ok=True)
    run = load_run(folders(tmp_path)["base", "base"])
    rows = run.blocks()[1].slice(0, 12)
    places = zip(rows.rows(slice(None)), rows.starts, strict=True)
    texts = [run.tokenizer.decode(row[at : at + 8].numpy()).strip() for row, at in places]
    assert all(len(text) == 3 and text[1] == " " for text in texts)
    file = folders(tmp_path)["base", "base"] / "exact_match.jsonl"
    records = [json.loads(line) for line in file.read_text().splitlines()]
    for record, known in zip(records, (12, 3), strict=True):
        record["answers"] = [*texts[:known], *["?"] * (12 - known)]
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    trained, asked, out = suite.run(tmp_path)
    assert (trained, asked) == ([], [])
    assert "replacing different results" in out
    found = results_of(tmp_path)
    assert (found["asked"]["examples"], found["asked"]["sampling"]["steps"]) == (12, 4)
    for row in found["rows"]:
        (one,) = row["runs"]
        is_known = (row["cpt"], row["sft"]) == ("base", "base")
        assert one["by_sampling_seed"] == ([1, 0.25] if is_known else [0, 0])
        lines = read_metrics(tmp_path / "runs" / one["run"] / "metrics.jsonl")
        assert one["nll"] == [line["nll"] for line in lines if line["kind"] == "validation"]
    assert (tmp_path / "out/table.md").read_text().count("\n| b") == 6
    assert (tmp_path / "out" / "curves.png").exists()


def test_only_what_is_new_or_damaged_is_asked(undisturbed, suite, tmp_path):
    cut = folders(undisturbed)["bell", None] / "exact_match.jsonl"
    before = cut.read_text()
    cut.write_text(before[:-30])
    found = suite.run(undisturbed, "--out", tmp_path / "out", "--sampling-seeds", "3")
    asked = [[2], [2], [2], [1, 2], [2], [2]]  # each adaptation, then what starts from it
    assert found[:2] == ([], [seed for seeds in asked for seed in seeds])
    assert cut.read_text().startswith(before)


@pytest.mark.long
def test_interrupted_and_repeated_it_gives_the_same(undisturbed, suite, tmp_path, monkeypatch):
    """Stopped inside the fourth training, then among the answers."""
    record, asking, calls = Trainer.record, Exam.ask, []

    def recording(self, kind, values):
        calls.append(kind)
        if calls.count("validation") == 8:  # the second one of the fourth training
            raise KeyboardInterrupt
        return record(self, kind, values)

    def failing(*args, **more):
        if len(suite.asked) == 5:
            raise KeyboardInterrupt
        return asking(*args, **more)

    for place, name, stopping, trained in (
        (Trainer, "record", recording, NAMES[:4]),
        (Exam, "ask", failing, NAMES[3:]),
    ):
        suite.trained.clear()
        suite.asked.clear()
        with monkeypatch.context() as patch:
            patch.setattr(place, name, stopping)
            said = bellmask(*suite.args(tmp_path))
        assert (said.code, suite.trained) == (130, trained)
        assert "interrupted" in said.err
        assert not (tmp_path / "out" / "results.json").exists()
    assert suite.run(tmp_path)[:2] == ([], [1, *[0, 1] * 3])
    whole = (undisturbed / "out/results.json").read_bytes()
    assert (tmp_path / "out/results.json").read_bytes() == whole


@pytest.mark.parametrize(
    ("args", "names"),
    [
        ("", "runs/arm_tiny"),
        ("--cpt ''", "--cpt"),
        ("--cpt 'cpt_tiny \"x'", "quotation"),
        ("--cpt 'cpt_tiny --law dirac'", "--cpt: --law"),
        ("--sft 'sft_tiny --start.fresh'", "--sft: --start.fresh"),
        ("--seeds 0", "--seeds"),
        ("--sampling-seeds 0", "--sampling-seeds"),
        ("{stages} --length 32", "--length 32"),
        ("{long}", "data.block_length=512"),
    ],
)
def test_bad_input_is_refused_and_leaves_nothing_behind(args, names, suite, tmp_path, monkeypatch):
    cpt, sft = suite.stages()
    cpt, sft = map(shlex.quote, (f"{cpt} --start.model {suite.zoo / 'gpt2'}", sft))
    long = f"--cpt {cpt} --sft {sft[:-1]} --data.block-length 512'"
    given = {"stages": f"--cpt {cpt} --sft {sft}", "long": long}
    words = args.format(**given)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("BELLMASK_CACHE", str(suite.zoo / "cache"))
    refuses("compare", "--suite", "cpt_sft", *shlex.split(words), names=names)
    assert not list(tmp_path.iterdir())
    refuses("compare", "tiny", "--suite=cpt_sft", names="--cpt")
