"""``bellmask evaluate --suite zero-shot``; its numbers on two sets are in tests/frozen."""

from __future__ import annotations

import itertools
import json
import math
import os
from pathlib import Path

import numpy as np
import pytest
from commands import bellmask, refuses, succeeds

from bellmask import load
from bellmask.data.blocks import Blocks
from bellmask.data.packing import Row
from bellmask.evaluate import zero_shot
from bellmask.utils.errors import UserError

SHARED = Path(os.environ.get("BELLMASK_TEST_DATA", Path(__file__).parents[3] / "shared" / "data"))
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


@pytest.mark.parametrize("eos", ["mdlm", "duo"])
def test_the_numbers_are_those_of_the_text_cut_by_hand(zoo, eos):
    """PTB's rules and the run's bytes; the same masks as any evaluation of these blocks."""
    said = succeeds(
        "evaluate", zoo / "bell", *SUITE, *TWO, "--blocks", 0, "--eos", eos, "--out", "a"
    )
    text, run = read("a")["sets"][0]["results"]["bell"], load(zoo / "bell")
    lines = [f"item {n} : it earned $1 million ? 1 times" for n in range(60)]
    end = [run.tokenizer.eos_id] if eos == "mdlm" else []
    ids = [t for line in lines for t in [*line.encode(), *end]]
    cut = np.array(ids[: len(ids) // 16 * 16]).reshape(-1, 16)
    assert text["num_tokens"] == cut.size
    share = len(ids) / (len(ids) - len(end) * 60)
    assert text["bits_per_byte"] == pytest.approx(text["nll"] / math.log(2) * share)
    blocks = Blocks.from_rows(Row(row, 16, n) for n, row in enumerate(cut))
    nll = np.mean([run.evaluate(blocks, draws=2, seed=s).nll for s in (1234, 1235)])
    assert text["nll"] == pytest.approx(nll, rel=1e-5)
    assert f"{text['perplexity']:.2f} ± {text['perplexity_se']:.2f}" in said.text


def test_runs_of_one_name_and_missing_sets_are_in_the_table(copy_run, zoo):
    runs = [zoo / "bell", copy_run("bell"), zoo / "arm"]
    options = ["--corpora", "arxiv", *TWO[1:], "--blocks", 8, "--skip-missing", "--out", "out"]
    succeeds("evaluate", *runs, *SUITE, *options)
    gone, ptb, _ = read("out")["sets"]
    assert gone["missing"]
    first, again, exact = ptb["results"]
    assert ptb["differences"][again]["difference"] == 0
    assert ptb["results"][exact]["num_seeds"] == 1
    table = Path("out/zero_shot.md").read_text(encoding="utf-8")
    result = ptb["results"][first]
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


REAL = {
    "ptb": ("ptb/ptb.valid.txt", None),
    "lm1b": ("lm1b/lm1b.heldout-10-11.tokens", None),
    "lambada": ("lambada/lambada_test_openai.jsonl", None),
    "ag_news": ("ag_news/test.csv", None),
    "pubmed": ("pubmed_sample/pubmed_qa_labeled.jsonl", "context"),
    "arxiv": ("arxiv_sample/arxiv.jsonl", "text"),
}


def test_real_texts(zoo):
    """Their first 20 lines; the last two are stand-ins, with columns of other names."""
    args = []
    for name, (file, column) in REAL.items():
        if not (SHARED / file).exists():
            pytest.skip(f"needs the file {file} in the folder $BELLMASK_TEST_DATA")
        with (SHARED / file).open(encoding="utf-8") as stream:
            Path(Path(file).name).write_text("".join(itertools.islice(stream, 20)), "utf-8")
        args += ["--from", f"{name}={Path(file).name}"]
        args += ["--column", f"{name}={column}"] if column else []
    options = ["--corpora", *REAL, "--blocks", 6, "--out", "real"]
    said = succeeds("evaluate", zoo / "bell", *SUITE, *options, *args)
    for text in read("real")["sets"]:
        result = text["results"]["bell"]
        assert result["num_blocks"] == 6
        assert 10 < result["perplexity"] < 1000, "hardly trained"
        assert text["title"] in said.text
