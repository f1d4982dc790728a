"""Progress, tables and estimates: what every command is built on."""

from __future__ import annotations

import io

import numpy as np
import pytest
from scipy import stats

from bellmask.utils import progress as progress_module
from bellmask.utils.progress import progress_bar
from bellmask.utils.stats import Estimate, plus_minus
from bellmask.utils.table import Bold, Table, markdown_page


def test_without_a_screen_a_line_now_and_then(monkeypatch, capsys):
    clock = iter([0.0, 10.0, 40.0, 45.0, 80.0])
    monkeypatch.setattr(progress_module.time, "monotonic", lambda: next(clock))
    with progress_bar("scoring", "blocks", 100) as progress:
        progress.advance(10)
        progress.scaled(0.5).advance(20)  # at 40 s: 20 of 100, so 160 s are left
        progress.advance(5)
        progress.advance(15, "a note")
    assert capsys.readouterr().err.splitlines() == [
        "scoring: 20 of 100 blocks, about 3 min left",
        "scoring: 40 of 100 blocks, a note, about 2 min left",
    ]


def test_on_a_terminal_there_is_a_bar(monkeypatch):
    screen = io.StringIO()
    console = progress_module.Console(file=screen, force_terminal=True, width=120)
    monkeypatch.setattr(progress_module, "Console", lambda stderr: console)
    with progress_bar("scoring", "blocks") as progress:
        progress.start(4)
        progress.advance(3, "[not markup]")
    assert "3/4" in screen.getvalue()
    assert "[not markup]" in screen.getvalue()


def test_one_table_in_three_views(capsys):
    table = Table("best of", ["model", "score"], [["a_b", Bold("2.0 ± 0.1")], ["c", "1.0"]], ["n."])
    table.print()
    shown = capsys.readouterr().out
    assert [word in shown for word in ("best of", "a_b", "2.0 ± 0.1", "n.")] == [True] * 4
    rows = ["| model | score |", "| --- | ---: |", "| a_b | **2.0 ± 0.1** |", "| c | 1.0 |"]
    assert table.markdown().splitlines() == rows
    page = markdown_page("page", table, introduction="Why.").splitlines()
    assert page == ["# page", "", "Why.", "", "## best of", "", *rows, "", "- n."]
    latex = table.latex().splitlines()
    assert latex[3] == r"model & score \\"
    assert latex[5] == r"a\_b & \textbf{2.0 $\pm$ 0.1} \\"
    assert latex[-1] == "% n."


def test_estimates_over_seeds_against_scipy():
    values, others = np.random.default_rng(0).normal(size=(2, 7))
    found = Estimate.over_seeds(values)
    assert (found.value, found.n) == (pytest.approx(values.mean()), 7)
    assert found.se == pytest.approx(stats.sem(values))
    assert found.deviation == pytest.approx(values.std(ddof=1))
    truth = stats.ttest_1samp(values - others, 0).confidence_interval(0.95)
    assert Estimate.paired(values, others).interval == pytest.approx(tuple(truth), rel=1e-3)
    many = Estimate(0.0, 1.0, 51).interval
    assert many[1] == pytest.approx(stats.t.ppf(0.975, 50), rel=1e-3)
    assert Estimate.over_seeds([1.0]).interval == Estimate.over_seeds([1, 2]).interval
    assert Estimate.over_seeds([1.0, 2.0]).interval == (None, None)


def test_plus_minus():
    assert plus_minus(None, 1.0) == "-"
    assert plus_minus(-0.001, None) == "0.00"
    assert plus_minus(1.25, 0.5, 1, "+") == "+1.2 ± 0.5"
