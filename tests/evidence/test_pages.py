"""docs/results.md and its pages: as the generator writes them, short, larger runs first."""

from __future__ import annotations

import json
import math
import shutil
import sys
from pathlib import Path

import pages
import pytest
import run
import suites
import write

ROOT = Path(__file__).parents[2]
STEPS = range(200, 10_001, 200)


@pytest.fixture(autouse=True)
def undrawn(monkeypatch):
    """Figures are left out: they take most of the time."""
    monkeypatch.setattr(pages, "save", lambda draw, path: None)
    monkeypatch.chdir(ROOT)


def test_the_pages_are_what_the_generator_writes():
    for path, text in write.build_pages().items():
        assert path.read_text(encoding="utf-8") == text, f"{path}: run python evidence/write.py"
        assert not {"inf", "nan"} & set(text.split())


def test_the_first_page_is_short():
    assert len((ROOT / "docs/results.md").read_bytes()) < 11_000


@pytest.fixture
def larger(tmp_path, monkeypatch):
    """What was measured, and a run of `medium`: bell twice, fast twenty times as fast as base."""
    shutil.copytree(ROOT / "docs/results", tmp_path / "results")
    for path in (tmp_path / "results").glob("medium-*.json"):
        path.unlink()
    monkeypatch.setattr(pages, "DOCS", tmp_path)
    results = json.loads((ROOT / "docs/results/fast.json").read_text(encoding="utf-8"))
    results |= {"steps": STEPS[-1], "unigram_nll": 6.2}
    results["data"] |= {"train": "enwik8_text", "tokenizer": "bpe:2048", "block_length": 128}
    model = results.pop("model") | {"num_layers": 4, "width": 128}
    results["options"] = {"model": model, "train": {"batch_size": 32}}  # as compare writes it
    pace = {"base": 1, "bell": 2, "fast": 20}
    results["variants"] = {name: results["variants"][name] for name in pace}
    for name, variant in results["variants"].items():
        for number, one in enumerate(variant["runs"]):
            nll = [9 + number / 10 - 0.5 * math.log(pace[name] * step) for step in STEPS]
            one |= {"steps": list(STEPS), "nll": nll, "seconds": [step / 10 for step in STEPS]}
        variant["nll"] = sum(one["nll"][-1] for one in variant["runs"]) / 3
        if name != "base":
            ratio = {"mean": pace[name], "low": pace[name], "high": pace[name], "num_seeds": 3}
            variant["comparison"] |= {"speed_up": ratio, "is_bound": False}
    pages.write_result("medium-headline", results)
    return tmp_path


def test_a_larger_run_comes_first(larger):
    page = write.build_pages()[larger / "results.md"]
    first = next(line for line in page.splitlines() if " seeds | " in line)
    assert "enwik8" in first
    assert "4 layers of width 128, 2048-token BPE, 10,000 steps" in first
    assert "2.00x (2.00 to 2.00)" in first
    assert "figures/medium-headline.png" in page
    assert page.index("figures/medium-headline") < page.index("| base at | NLL | bell | fast |")


def test_speed_ups_at_several_targets(larger):
    """Curves are straight in log step, so all is exact; 2500 and 7500 are between evaluations."""
    rows = [line.split(" | ") for line in suites.targets_table()[-1].splitlines()[2:]]
    assert [row[0] for row in rows] == [
        "| 25% (step 2,500)",
        "| 50% (step 5,000)",
        "| 75% (step 7,500)",
        "| 100% (step 10,000)",
    ]
    steps = (2500, 5000, 7500, 10_000)
    assert [row[1] for row in rows] == [f"{9.1 - 0.5 * math.log(step):.3f}" for step in steps]
    assert [row[2] for row in rows] == ["2.00x (2.00 to 2.00)"] * 4
    # at 25 % fast was there by step 125, before its first evaluation
    assert [row[3] for row in rows] == ["≥ 12.50x |"] + ["20.00x (20.00 to 20.00) |"] * 3


def test_a_target_that_is_not_reached_has_no_number(larger):
    results = pages.read_comparisons("medium")["headline"]
    for one in results["variants"]["bell"]["runs"]:
        one["nll"] = [value + 1 for value in one["nll"]]
    assert suites.show_speed_up_at(results, "bell", 10_000) == "not reached in 3 of 3"


def test_answers_stand_side_by_side(larger):
    about = {"steps": 9, "rows": 6, "epochs": 3.0, "prompts": ["Who?\nWhy?"]}
    pages.write_result("adapting-answers", {**about, "answers": {"base": ["I."], "bell": ["We."]}})
    found = write.build_pages()
    shown = found[larger / "results/adapting.md"].partition("(App. E)")[2]
    assert "9 steps on 6 first\nanswers of conversations (3.0 epochs)" in shown
    assert "**Who?**\n\nbase:\n\n```text\nI.\n```\n\nbell:\n\n```text\nWe.\n```" in shown
    assert "App. E" not in found[larger / "results.md"]


def test_parts_are_announced_with_their_hours(monkeypatch, capsys):
    command = "run.py --dry-run --parts downstream suites"
    monkeypatch.setattr(sys, "argv", command.split())
    assert run.main() == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["suites:", "downstream:", "in"]
    assert all("h" in line for line in lines)


def test_what_is_stored_is_not_measured_again():
    """All variants and seeds must be there."""
    name, variants = "wikitext2-headline", ["base", "bell=--law gaussian"]
    assert suites.is_stored(name, variants, range(1, 4))
    assert not suites.is_stored(name, variants, range(1, 10))
    assert not suites.is_stored(name, [*variants, "fast"], range(1, 4))
    assert not suites.is_stored("wikitext2-nothing", variants, range(1, 4))
