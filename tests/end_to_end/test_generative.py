"""``bellmask evaluate --suite generative``; its numbers under an ARM are in tests/frozen."""

from __future__ import annotations

import json

import pytest
from commands import refuses, succeeds

from bellmask.evaluate import generative
from bellmask.evaluate.generative import unigram_entropy

SUITE = "--suite generative --nfe 2 8 --num 4 --seeds 2".split()
FILES = {"generative.json", "generative.md", "quality_diversity.png", "quality_diversity.svg"}
FILES |= {"samples.jsonl", "scores.jsonl"}


def read(folder):
    return json.loads((folder / "generative.json").read_text())


def test_table_plot_and_samples_beside_a_single_run(zoo, copy_run, monkeypatch):
    run = copy_run("bell")
    more = "--rule first_hitting --noise float32 --top-p 0.9".split()
    said = succeeds("evaluate", run, *SUITE, "--scorer", zoo / "arm", *more)
    for words in ("first_hitting", "float32", "top-p 0.9", "real text"):
        assert words in said.text
    folder = run / "generative"
    assert {path.name for path in folder.iterdir()} == FILES
    assert (folder / "quality_diversity.png").stat().st_size > 10_000
    numbers = read(folder)
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
    succeeds("evaluate", run, *SUITE, "--scorer", zoo / "arm", *more)
    assert read(folder) == numbers


@pytest.mark.parametrize(
    ("args", "names"),
    [
        ("", "run folder"),
        ("{bell} --nfe 0", "--nfe"),
        ("{bell} --num 0", "--num"),
        ("{bell} --scorer-batch-size 0", "--scorer-batch-size"),
        ("{bell} --steps 5", "--steps"),
        ("{bell} --guidance 1", "--guidance"),
        ("{bell} --length 1", "--length"),
        ("{bell} --scorer {arm} --context 1", "--context"),
    ],
)
def test_bad_input_gets_one_message(args, names, zoo, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    given = args.format(bell=zoo / "bell", arm=zoo / "arm").split()
    refuses("evaluate", *given, "--suite", "generative", "--out", "out", names=names)
    assert not list(tmp_path.iterdir()), "nothing is left behind"
