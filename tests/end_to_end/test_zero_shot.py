"""``bellmask evaluate --suite zero-shot``; its numbers on two sets are in tests/frozen."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from commands import bellmask, refuses, succeeds

from bellmask.evaluate import zero_shot
from bellmask.utils.errors import UserError

SUITE = "--suite zero-shot --draws 2 --seeds 2".split()
TWO = "--corpora ptb lambada --from ptb=ptb.txt --from lambada=lambada.jsonl".split()


@pytest.fixture(autouse=True)
def _two_texts_and_no_network(tmp_path, monkeypatch):
    def unreachable(name, *_, **__):
        raise UserError(f"cannot reach {name} on the hub")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("bellmask.data.corpora.hub_source", unreachable)
    lines = "".join(f"item {n} : it earned $ N million <unk> N times\n" for n in range(60))
    Path("ptb.txt").write_text(lines, encoding="utf-8")
    rows = [json.dumps({"text": f"“Number {n},” she said."}) for n in range(60)]
    Path("lambada.jsonl").write_text("\n".join(rows), encoding="utf-8")


def read(folder):
    return json.loads((Path(folder) / "zero_shot.json").read_text(encoding="utf-8"))


def test_runs_of_one_name_and_missing_sets_are_in_the_table(copy_run, zoo):
    runs = [zoo / "bell", copy_run("bell"), zoo / "arm"]
    options = ["--corpora", "arxiv", *TWO[1:], "--blocks", 8, "--skip-missing", "--out", "out"]
    succeeds("evaluate", *runs, *SUITE, *options)
    gone, ptb, _ = read("out")["sets"]
    assert gone["missing"]
    first, again, exact = ptb["results"]
    assert ptb["differences"][again]["difference"] == 0
    assert ptb["results"][exact]["num_seeds"] == 1
    result, table = ptb["results"][first], Path("out/zero_shot.md").read_text(encoding="utf-8")
    assert f"| not here | {result['seed_mean']:.2f} ± {result['seed_deviation']:.2f} |" in table


def test_going_on_measures_only_what_is_left(zoo, monkeypatch):
    calls, whole = [], zero_shot.evaluate_run

    def stop_after(limit):
        def evaluate(*args, **more):
            if len(calls) == limit:
                raise KeyboardInterrupt
            calls.append(more["seed"])
            return whole(*args, **more)

        monkeypatch.setattr(zero_shot, "evaluate_run", evaluate)

    command = ["evaluate", zoo / "bell", *SUITE, *TWO, "--blocks", 8, "--out"]
    stop_after(3)
    assert bellmask(*command, "stopped").code == 130
    assert not Path("stopped/zero_shot.json").exists()
    calls.clear()
    stop_after(1)
    succeeds(*command, "stopped")
    assert calls == [1235]
    monkeypatch.setattr(zero_shot, "evaluate_run", whole)
    succeeds(*command, "whole", "--batch-size", 3)
    for one, other in zip(read("stopped")["sets"], read("whole")["sets"]):
        mine, yours = (text["results"]["bell"]["seed_perplexities"] for text in (one, other))
        assert mine == pytest.approx(yours, rel=1e-6)


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ("{bell} --corpora ptb arxiv", "--from ptb=PATH --from arxiv=PATH"),
        ("{bell} --corpora ptb --skip-missing", "ptb"),
        ("{bell} --corpora ptb --from ptb=gone.txt --skip-missing", "gone.txt"),
        ("{bell} --corpora ptbb", "ptbb"),
        ("{bell} --corpora ptb ptb", "--corpora"),
        ("{bell} --from lm1=a.txt", "lm1"),
        ("{bell} --from text8=a.txt --corpora ptb", "text8"),
        ("{bell} --from ptb.txt", "--from"),
        ("{bell} --from ptb=a --from ptb=b", "ptb twice"),
        ("{bell} --column ptb=x", "--column"),
        ("{bell} --draws 1", "--draws"),
        ("{bell} --precision 1", "--precision"),
        ("{bell} --seeds 0", "--seeds"),
        ("nowhere", "nowhere"),
        ("{bell} {bell}", "twice"),
        ("", "run folder"),
    ],
)
def test_mistakes_are_told_before_anything_is_measured(zoo, options, names, monkeypatch):
    monkeypatch.setattr(zero_shot, "evaluate_run", None)
    args = options.format(bell=zoo / "bell").split()
    args += [] if "ptb" in options or "lm1" in options else TWO
    refuses("evaluate", *args, "--suite", "zero-shot", "--out", "refused", names=names)
    assert not Path("refused").exists()
