"""``bellmask evaluate --suite paper``; its numbers on all tasks are in tests/frozen."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
from commands import refuses, succeeds

from bellmask.data.tasks import TABLE_4
from bellmask.storage.loading import Loaded
from bellmask.utils.errors import UserError

pytest.importorskip("lm_eval")

from bellmask.evaluate.lm_eval_model import BellmaskLM

SMALL = "--data-dir tasks --seeds 1 --draws 2 --longest-exact 2 --limit 1".split()


@pytest.fixture(autouse=True)
def _beside_the_tasks(zoo, tmp_path, monkeypatch):
    """Without a network."""

    def unreachable(*_, **__):
        raise UserError("cannot be reached")

    monkeypatch.chdir(tmp_path)
    shutil.copytree(zoo / "tasks", "tasks")
    monkeypatch.setattr("bellmask.data.tasks.validation_records", unreachable)
    monkeypatch.setattr("bellmask.data.tasks._on_hub", unreachable)


def read(folder):
    return json.loads(Path(folder, "paper.json").read_text(encoding="utf-8"))


def count_answers(monkeypatch):
    """Grows by the size of each batch that a run answers."""
    sizes = []
    for name in ("score", "fill"):
        whole = getattr(BellmaskLM, name)

        def counted(self, asked, progress, whole=whole):
            sizes.append(len(asked))
            return whole(self, asked, progress)

        monkeypatch.setattr(BellmaskLM, name, counted)
    return sizes


def test_a_second_time_nothing_is_asked_and_another_seed_asks_only_what_is_new(
    copy_run, monkeypatch
):
    sizes, run = count_answers(monkeypatch), copy_run("bell").rename("base_1")
    said = succeeds("evaluate", run, "--suite", "paper", *SMALL)
    folder, first = run / "paper", sum(sizes)
    found = read(folder)
    assert [m["name"] for m in found["models"]] == ["base_1", "random", "unigram"]
    assert [task["name"] for task in found["tasks"]] == list(TABLE_4)
    assert found["tasks"][3]["results"]["random"]["scores"]["raw"]["mean"] == 50
    for name in ("paper.md", "paper.tex"):
        assert re.search(r"base\\?_1", (folder / name).read_text(encoding="utf-8"))
    before = {path.name: path.read_bytes() for path in folder.glob("**/*") if path.is_file()}
    sizes.clear()
    assert succeeds("evaluate", run, "--suite", "paper", *SMALL) == said
    assert sizes == []
    after = {path.name: path.read_bytes() for path in folder.glob("**/*") if path.is_file()}
    assert after == before
    succeeds("evaluate", run, "--suite", "paper", *SMALL, "--seeds", 2)
    assert 0 < sum(sizes) <= first


def test_missing_tasks_are_left_out_if_asked_and_without_text_there_is_no_unigram(zoo, monkeypatch):
    def gone(self):
        raise UserError("the text is gone")

    monkeypatch.setattr(Loaded, "blocks", gone)
    Path("tasks/triviaqa.jsonl").unlink()
    command = ["evaluate", zoo / "bell", "--suite", "paper", *SMALL, "--tasks", "piqa", "triviaqa"]
    refuses(*command, "--out", "refused", names="--skip-missing")
    assert not Path("refused").exists()
    said = succeeds(*command, "--out", "out", "--skip-missing")
    assert "triviaqa" in said.err
    assert "the text is gone" in said.err
    found = read("out")
    assert list(found["missing"]) == ["triviaqa"]
    assert [task["name"] for task in found["tasks"]] == ["piqa"]
    assert [m["name"] for m in found["models"]] == ["bell", "random"]


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ("", "model"),
        ("{bell} --tasks pica", "pica"),
        ("{bell} --tasks piqa piqa", "--tasks"),
        ("{bell} --limit -1", "--limit"),
        ("{bell} --seeds 0", "--seeds"),
        ("{bell} --draws 0", "--draws"),
        ("{bell} --longest-exact 40", "--longest-exact"),
        ("{bell} --batch-tokens 0", "--batch-tokens"),
        ("{bell} --data-dir gone", "--data-dir"),
        ("{bell} --tasks piqa --data-dir {bell}", "piqa"),
        ("random", "--no-baselines"),
        ("{sigma_arm}", "sigma"),
        ("{bell} --out tasks/piqa.jsonl", "tasks/piqa.jsonl"),
    ],
)
def test_mistakes_are_told_before_anything_is_asked(zoo, options, names, monkeypatch):
    monkeypatch.setattr(BellmaskLM, "score", None)
    monkeypatch.setattr(BellmaskLM, "fill", None)
    shutil.copytree(zoo / "bell", "random")
    args = options.format(bell=zoo / "bell", sigma_arm=zoo / "sigma_arm").split()
    args = ["--data-dir", "tasks", "--out", "refused", *args]
    refuses("evaluate", *args, "--suite", "paper", names=names)
    assert not Path("refused").exists()
