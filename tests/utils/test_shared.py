"""Progress, tables and estimates: what every command is built on."""

from __future__ import annotations

import io
import time

import numpy as np
import pytest
from scipy import stats

from bellmask.utils import console as console_module
from bellmask.utils import progress as progress_module
from bellmask.utils.console import announced, fit_screen, plural
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
    assert screen.getvalue().endswith("\x1b[2K")  # its line is cleared at the end


def test_what_takes_long_says_what_it_does(monkeypatch, capsys):
    monkeypatch.setattr(console_module, "SLOW_SECONDS", 0.01)
    with announced("loading"):
        time.sleep(0.2)
    with announced("quiet", is_quiet=True), progress_bar("scoring", "blocks"):
        time.sleep(0.2)
    monkeypatch.setenv("RANK", "1")
    with announced("another process"):
        time.sleep(0.2)
    monkeypatch.delenv("RANK")
    monkeypatch.setattr(console_module, "SLOW_SECONDS", 60)
    with announced("fast"):
        pass
    assert capsys.readouterr().err.splitlines() == ["loading ...", "scoring ..."]


def test_lines_end_between_words_on_a_terminal(monkeypatch):
    monkeypatch.setenv("COLUMNS", "20")
    screen, text = io.StringIO(), "  some words: /a/path/that-is/longer/than/that x\n\nend"
    assert fit_screen(text, screen) == text
    monkeypatch.setattr(screen, "isatty", lambda: True)
    shown = fit_screen(text, screen).split("\n")
    assert shown == ["  some words:", "/a/path/that-is/longer/than/that", "x", "", "end"]


def test_one_of_a_thing_is_singular():
    assert [plural(count, "block") for count in (0, 1, 1024)] == [
        "0 blocks",
        "1 block",
        "1,024 blocks",
    ]


@pytest.mark.parametrize(("width", "is_whole"), [(40, True), (24, False)])
def test_words_of_a_table_stay_whole_where_there_is_room(width, is_whole, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", str(width))
    row = ["a long name of some run", "log-probabilities", "12 of 34"]
    Table("", ["run", "metric", "value"], [row]).print()
    out = capsys.readouterr().out
    assert ("log-probabilities" in out) == is_whole
    assert max(map(len, out.splitlines())) <= width


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
    assert plus_minus(1.25, float("nan"), 1) == "1.2"
