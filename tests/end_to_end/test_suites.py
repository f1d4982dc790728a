"""``bellmask evaluate --suite zero-shot``, ``generative`` and ``paper``; their numbers are in
tests/frozen.
"""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
from commands import refuses, succeeds

from bellmask.data.tasks import TABLE_4
from bellmask.evaluate import generative, zero_shot
from bellmask.evaluate.generative import unigram_entropy
from bellmask.storage.loading import Loaded
from bellmask.utils.errors import UserError

pytest.importorskip("lm_eval")

from bellmask.evaluate.lm_eval_model import BellmaskLM

TWO = "--corpora ptb lambada --from ptb=ptb.txt --from lambada=lambada.jsonl".split()
SMALL = "--suite paper --data-dir tasks --seeds 1 --draws 2 --longest-exact 2 --limit 1".split()


@pytest.fixture(autouse=True)
def _texts_and_tasks_and_no_network(zoo, tmp_path, monkeypatch):
    def unreachable(*_, **__):
        raise UserError("cannot be reached")

    for place in ("readers.hub_source", "tasks.validation_records", "tasks._on_hub"):
        monkeypatch.setattr(f"bellmask.data.{place}", unreachable)
    monkeypatch.chdir(tmp_path)
    shutil.copytree(zoo / "tasks", "tasks")
    lines = "".join(f"item {n} : it earned $ N million <unk> N times\n" for n in range(60))
    Path("ptb.txt").write_text(lines, encoding="utf-8")
    rows = [json.dumps({"text": f"“Number {n},” she said."}) for n in range(60)]
    Path("lambada.jsonl").write_text("\n".join(rows), encoding="utf-8")


def read(*path):
    return json.loads(Path(*path).read_text(encoding="utf-8"))


def test_zero_shot_tells_runs_of_one_name_apart_and_names_missing_sets(copy_run, zoo):
    runs = [zoo / "bell", copy_run("bell"), zoo / "arm"]
    more = ["--corpora", "arxiv", *TWO[1:], "--blocks", 8, "--skip-missing", "--out", "out"]
    succeeds("evaluate", *runs, *"--suite zero-shot --draws 2 --seeds 2".split(), *more)
    gone, ptb, _ = read("out/zero_shot.json")["sets"]
    assert gone["missing"]
    first, again, exact = ptb["results"]
    assert ptb["differences"][again]["difference"] == 0
    assert ptb["results"][exact]["num_seeds"] == 1
    result, table = ptb["results"][first], Path("out/zero_shot.md").read_text(encoding="utf-8")
    assert f"| not here | {result['seed_mean']:.2f} ± {result['seed_deviation']:.2f} |" in table


def test_generative_writes_table_plot_and_samples_beside_a_single_run(zoo, copy_run, monkeypatch):
    run = copy_run("bell")
    suite = "--suite generative --nfe 2 8 --num 4 --seeds 2 --rule first_hitting --noise float32"
    command = ["evaluate", run, *suite.split(), "--top-p", 0.9, "--scorer", zoo / "arm"]
    said = succeeds(*command)
    for words in ("first_hitting", "float32", "top-p 0.9", "real text"):
        assert words in said.text
    folder = run / "generative"
    assert {path.name for path in folder.iterdir()} == {
        "generative.json", "generative.md", "quality_diversity.png", "quality_diversity.svg",
        "samples.jsonl", "scores.jsonl",
    }  # fmt: skip
    assert (folder / "quality_diversity.png").stat().st_size > 10_000
    numbers = read(folder, "generative.json")
    (setting,) = numbers["runs"][0]["settings"]
    assert (setting["nfe"], setting["mean"]["calls"]) == (None, 16)
    mean, sd = setting["mean"]["perplexity"], setting["sd"]["perplexity"]
    table = (folder / "generative.md").read_text()
    assert f"{mean:.2f} ± {sd:.2f} ({setting['mean']['entropy']:.2f})" in table, "never alone"
    samples = [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]
    mine = [one["ids"] for one in samples if (one["of"], one["seed"]) == ("bell", 1)]
    entropy = sum(map(unigram_entropy, mine)) / 4
    assert setting["cells"][1]["entropy"] == pytest.approx(entropy)
    monkeypatch.setattr(generative, "draw_samples", lambda *_: 1 / 0)  # nothing is drawn again
    succeeds(*command)
    assert read(folder, "generative.json") == numbers


def test_paper_asks_nothing_a_second_time_and_for_another_seed_only_what_is_new(
    copy_run, monkeypatch
):
    sizes, run = [], copy_run("bell").rename("base_1")
    for name in ("score", "fill"):
        whole = getattr(BellmaskLM, name)

        def counted(self, asked, progress, whole=whole):
            sizes.append(len(asked))
            return whole(self, asked, progress)

        monkeypatch.setattr(BellmaskLM, name, counted)
    said = succeeds("evaluate", run, *SMALL)
    folder, first = run / "paper", sum(sizes)
    found = read(folder, "paper.json")
    assert [m["name"] for m in found["models"]] == ["base_1", "random", "unigram"]
    assert [task["name"] for task in found["tasks"]] == list(TABLE_4)
    assert found["tasks"][3]["results"]["random"]["scores"]["raw"]["mean"] == 50
    for name in ("paper.md", "paper.tex"):
        assert re.search(r"base\\?_1", (folder / name).read_text(encoding="utf-8"))
    before = {path.name: path.read_bytes() for path in folder.glob("**/*") if path.is_file()}
    sizes.clear()
    assert succeeds("evaluate", run, *SMALL).out == said.out
    after = {path.name: path.read_bytes() for path in folder.glob("**/*") if path.is_file()}
    assert (sizes, after) == ([], before)
    succeeds("evaluate", run, *SMALL, "--seeds", 2)
    assert 0 < sum(sizes) <= first


def test_paper_leaves_out_missing_tasks_if_asked_and_without_text_the_unigram(zoo, monkeypatch):
    def gone(self):
        raise UserError("the text is gone")

    monkeypatch.setattr(Loaded, "blocks", gone)
    Path("tasks/triviaqa.jsonl").unlink()
    command = ["evaluate", zoo / "bell", *SMALL, "--tasks", "piqa", "triviaqa"]
    refuses(*command, "--out", "refused", names="--skip-missing")
    said = succeeds(*command, "--out", "out", "--skip-missing")
    assert "triviaqa" in said.err
    assert "the text is gone" in said.err
    found = read("out/paper.json")
    assert list(found["missing"]) == ["triviaqa"]
    assert [task["name"] for task in found["tasks"]] == ["piqa"]
    assert [m["name"] for m in found["models"]] == ["bell", "random"]


SHARED = {
    "evaluate": "--draws 2 --blocks 9 --batch-size 2",
    "zero-shot": "{zoo}/arm --suite zero-shot --draws 2 --seeds 1 --blocks 10 --corpora ptb "
    "--from ptb={here}/ptb.txt",
    "generative": "--suite generative --nfe 4 --seeds 1 --scorer {zoo}/arm --num 5",
    "paper": "--suite paper --data-dir {here}/tasks --seeds 1 --draws 2 --longest-exact 2 "
    "--limit 3",
    "lm-eval": "--tasks piqa triviaqa lambada --data-dir {here}/tasks --limit 3 --draws 2",
}


@pytest.mark.parametrize("name", SHARED)
def test_two_processes_share_the_work_and_find_the_same(zoo, name, tmp_path, warm):
    """An odd number of questions, so that shares differ."""
    command = ["lm-eval" if name == "lm-eval" else "evaluate", f"{zoo}/bell"]
    command += SHARED[name].format(zoo=zoo, here=tmp_path).split()
    for size in (1, 2):
        said = warm.run([*command, "--out", f"{tmp_path}/{size}"], size)
        assert said.count("written: ") == 1, said
    one, two = (dict(leaves(read(path))) for path in sorted(tmp_path.glob("[12]/*.json")))
    assert len(one) > 10
    assert one == pytest.approx(two, rel=1e-4, abs=1e-6)


def leaves(value, at=""):
    """Numbers of a JSON value, by place."""
    if isinstance(value, dict | list):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from leaves(item, f"{at}/{key}")
    elif isinstance(value, int | float):
        yield at, value


REFUSALS = {
    "zero-shot": [
        ("bell --corpora ptb arxiv", "--from ptb=PATH --from arxiv=PATH"),
        ("bell --corpora ptb --skip-missing", "ptb"),
        ("bell --corpora ptb --from ptb=gone.txt --skip-missing", "gone.txt"),
        ("bell --corpora ptbb", "ptbb"),
        ("bell --corpora ptb ptb", "--corpora"),
        ("bell --from text8=a.txt --corpora ptb", "text8"),
        ("bell --from ptb.txt", "--from"),
        ("bell --from ptb=a --from ptb=b", "ptb twice"),
        ("bell --column ptb=x", "--column"),
        ("bell --draws 1", "--draws"),
        ("bell --precision 1", "--precision"),
        ("bell --blocks -1", "--blocks"),
        ("bell --seeds 0", "--seeds"),
        ("nowhere", "nowhere"),
        ("bell bell", "twice"),
        ("", "run folder"),
    ],
    "generative": [
        ("bell --nfe 0", "--nfe"),
        ("bell --num 0", "--num"),
        ("bell --scorer-batch-size 0", "--scorer-batch-size"),
        ("bell --steps 5", "--steps"),
        ("bell --guidance 1", "--guidance"),
        ("bell --length 1", "--length"),
        ("bell --scorer arm --context 1", "--context"),
    ],
    "paper": [
        ("bell --tasks pica", "pica"),
        ("bell --tasks piqa piqa", "--tasks"),
        ("bell --limit -1", "--limit"),
        ("bell --draws 0", "--draws"),
        ("bell --longest-exact 40", "--longest-exact"),
        ("bell --batch-tokens 0", "--batch-tokens"),
        ("bell --data-dir gone", "--data-dir"),
        ("bell --tasks piqa --data-dir bell", "piqa"),
        ("random", "--no-baselines"),
        ("sigma_arm", "sigma"),
        ("bell --out tasks/piqa.jsonl", "tasks/piqa.jsonl"),
    ],
}


@pytest.mark.parametrize(
    ("suite", "options", "names"),
    [(suite, *row) for suite, rows in REFUSALS.items() for row in rows],
)
def test_mistakes_are_told_before_anything_is_measured(zoo, suite, options, names, monkeypatch):
    monkeypatch.setattr(zero_shot, "evaluate_run", None)
    monkeypatch.setattr(BellmaskLM, "score", None)
    for name, run in (("bell", "bell"), ("random", "bell"), ("arm", "arm"), ("sigma_arm",) * 2):
        Path(name).symlink_to(zoo / run)
    args = ["--suite", suite, "--out", "refused", *options.split()]
    args += ["--data-dir", "tasks"] * (suite == "paper" and "--data-dir" not in options)
    refuses("evaluate", *args, names=names)
    assert not Path("refused").exists()
