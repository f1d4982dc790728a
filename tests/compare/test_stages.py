"""The suite cpt_sft: its rows, differences and tables against arithmetic written out by hand."""

import math
import re
from pathlib import Path

import numpy as np
import pytest

from bellmask import presets
from bellmask.commands.stages import is_meant
from bellmask.compare.records import RunRecord
from bellmask.compare.stage_results import Cell, Outcome, join_seeds, summarize
from bellmask.compare.stages import check_stages
from bellmask.config import override
from bellmask.errors import UserError
from bellmask.evaluate.exact_match import ExactMatch
from bellmask.evaluate.result import Likelihood
from bellmask.report.stage_plots import stage_figure
from bellmask.report.stage_tables import stage_markdown, stage_rows

CELLS = [("base", None), ("bell", None)]
CELLS += [("base", "base"), ("base", "bell"), ("bell", "base"), ("bell", "bell")]
ASKED = {
    "examples": 4,
    "gap": 8,
    "own_gaps": [8, 16],
    "seeds": [0, 1],
    "sampling": {"rule": "ancestral", "steps": 64, "temperature": 1.0},
}


def likelihood(ce, fingerprint="f"):
    count = len(ce)
    ones = np.ones((count, 1), dtype=np.int64)
    return Likelihood(
        np.full(count, 3),
        np.arange(count) / count,
        ones,
        np.array(ce, dtype=float)[:, None],
        np.arange(count),
        1.0,
        fingerprint,
    )


def outcome(cell, nll, answers, fingerprint="f"):
    """Four blocks around ``nll``; ``answers`` are one string of letters for each sampling seed."""
    last = likelihood([nll - 0.2, nll, nll, nll + 0.2], fingerprint)
    curve = [nll + 1, nll]
    record = RunRecord(
        Path(cell.name), presets.sft_tiny(), {}, [5, 10], curve, [0.1, 0.1], [1.0, 2.0],
        np.stack([last.block_nll] * 2), last, [],
    )  # fmt: skip
    told = tuple(tuple(one) for one in answers)
    return Outcome(cell, record, ExactMatch(("a", "b", "c", "d"), told, (0, 1, 2, 3), "e"))


ANSWERS = {
    ("base", None): ["axxx", "xxxx"],
    ("bell", None): ["abxx", "abxx"],
    ("base", "base"): ["abxx", "abcx"],
    ("base", "bell"): ["abxx", "abcx"],
    ("bell", "base"): ["abcd", "abcx"],
    ("bell", "bell"): ["abcd", "abcx"],
}
NLL = dict(zip(CELLS, [3.0, 2.5, 1.0, 0.9, 0.8, 0.7]))


def outcomes(seeds=(1,)):
    """In the order of the plan; every further seed is 0.1 worse in NLL where CPT is base."""
    return [
        outcome(
            Cell(seed, *place),
            NLL[place] + (0.1 * number if place[0] == "base" else 0),
            ANSWERS[place],
        )
        for number, seed in enumerate(seeds)
        for cpt in ("base", "bell")
        for place in CELLS
        if place[0] == cpt
    ]


def results(seeds=(1,)):
    stages = {"cpt": presets.cpt_tiny().to_dict(), "sft": presets.sft_tiny().to_dict()}
    return {**stages, "asked": ASKED, **summarize(outcomes(seeds))}


def row_of(found, place):
    return next(row for row in found["rows"] if (row["cpt"], row["sft"]) == place)


def test_rows_come_in_the_papers_order():
    found = results()
    assert [(row["cpt"], row["sft"]) for row in found["rows"]] == CELLS
    assert [row["section"] for row in found["rows"]] == ["cpt"] * 2 + ["sft"] * 4
    assert [cell.name for cell in (Cell(1, "base"), Cell(1, "bell", "base"))] == [
        "CPT base",
        "CPT bell + SFT base",
    ]


def test_a_row_has_means_and_deviations_over_sampling_seeds():
    row = row_of(results(), ("bell", "base"))
    assert row["exact_match"] == pytest.approx(7 / 8)
    assert row["sampling_deviation"] == pytest.approx(math.sqrt(2) * 0.125)
    (run,) = row["runs"]
    assert run["by_sampling_seed"] == [1, 0.75]
    assert run["nll"] == [1.8, 0.8]
    assert row["training_deviation"] is None


def test_differences_are_to_the_base_row_of_the_section():
    found = results()
    assert row_of(found, ("base", None))["difference"] is None
    assert row_of(found, ("base", "base"))["difference"] is None
    first = row_of(found, ("bell", None))["difference"]
    assert first["nll"]["value"] == pytest.approx(-0.5)
    # per example: (1, 1, 0, 0) - (1/2, 0, 0, 0)
    each = [0.5, 1, 0, 0]
    assert first["exact_match"]["value"] == pytest.approx(np.mean(each))
    assert first["exact_match"]["se"] == pytest.approx(np.std(each, ddof=1) / 2)
    last = row_of(found, ("bell", "bell"))["difference"]
    assert last["nll"]["value"] == pytest.approx(-0.3)
    assert last["nll"]["se"] == pytest.approx(0)  # all blocks differ alike
    each = [0, 0, 0.5, 0.5]
    assert last["exact_match"]["value"] == pytest.approx(0.25)
    assert last["exact_match"]["se"] == pytest.approx(np.std(each, ddof=1) / 2)
    assert last["exact_match"]["low"] is None


def test_training_seeds_are_paired():
    found = results(seeds=(1, 2, 3))
    row = row_of(found, ("bell", "bell"))
    values = [-0.3, -0.4, -0.5]
    mean, error = -0.4, 0.1 / math.sqrt(3)
    nll = row["difference"]["nll"]
    assert nll["by_seed"] == pytest.approx(values)
    assert (nll["value"], nll["se"]) == pytest.approx((mean, error))
    # Student's t with two degrees of freedom, 0.975: 4.303
    assert (nll["low"], nll["high"]) == pytest.approx((mean - 4.303 * error, mean + 4.303 * error))
    assert row_of(found, ("base", "base"))["nll"] == pytest.approx(1.1)
    assert row["exact_match"] == pytest.approx(7 / 8)
    assert row["sampling_deviation"] == pytest.approx(math.sqrt(2) * 0.125)
    assert row["training_deviation"] == 0
    assert found["seeds"] == [1, 2, 3]


def test_two_seeds_have_an_error_but_no_interval_and_one_has_its_own():
    two = join_seeds([(1.0, 9.0), (2.0, 9.0)])
    assert (two["value"], two["se"]) == pytest.approx((1.5, 0.5))
    assert two["low"] is two["high"] is None
    assert join_seeds([(1.0, 9.0)])["se"] == 9


def test_runs_with_other_masks_are_refused():
    odd = outcomes()
    odd[-1] = outcome(Cell(1, "bell", "bell"), 0.7, ANSWERS["bell", "bell"], "other")
    with pytest.raises(UserError, match="different blocks or masks"):
        summarize(odd)


def table(found):
    """Cells of table.md, row by row."""
    lines = [line for line in stage_markdown(found).splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_the_table_is_the_papers():
    found = table(results())
    assert found[0] == [
        "CPT", "SFT", "NLL", "difference", "exact match (%)", "difference (points)",
    ]  # fmt: skip
    assert found[2] == ["*Continual pretraining*", *[""] * 5]
    assert found[3] == ["base", "—", "3.0000", "", "12.50 ± 17.68", ""]
    assert found[4][:3] == ["bell", "—", "**2.5000**"]
    assert found[4][4] == "**50.00** ± 0.00"
    assert found[4][5] == "+37.50 ± 23.94"
    assert found[5][0] == "*Continual pretraining + fine-tuning*"
    assert [row[:2] for row in found[6:]] == [list(place) for place in CELLS[2:]]
    assert found[9][2:4] == ["**0.7000**", "-0.3000 ± 0.0000"]
    assert found[6][3] == found[6][5] == ""


def test_the_best_of_each_section_is_bold_and_ties_all_are():
    found = table(results())
    bold = [[cell.startswith("**") for cell in row] for row in found]
    assert [row[2] for row in bold[3:5] + bold[6:]] == [False, True, False, False, False, True]
    assert [row[4] for row in bold[3:5] + bold[6:]] == [False, True, False, False, True, True]


def test_an_interval_is_shown_where_seeds_allow_it():
    text = stage_markdown(results(seeds=(1, 2, 3)))
    assert "-0.4000 ± 0.0577 (-0.6484 to -0.1516)" in text
    assert "95 % t-interval" in text
    assert "Means over 3 training seeds" in text
    assert "95 %" not in stage_markdown(results(seeds=(1, 2)))
    assert "for one training seed" in stage_markdown(results())


def test_the_notes_say_what_the_gap_tells():
    found = results()
    assert "the gap to fill has 8 tokens for every answer (in training 8 to 16" in stage_markdown(
        found
    )
    found["asked"] = {**ASKED, "gap": "own"}
    assert "each answer's own length, rounded up as in training" in stage_markdown(found)
    found["asked"] = {**ASKED, "seeds": [0], "examples": 1}
    text = stage_markdown(found)
    assert "1 held-out example," in text
    assert "over 1 seed of sampling" in text


def test_a_single_sampling_seed_has_no_deviation():
    found = results()
    for row in found["rows"]:
        row["sampling_deviation"] = None
    assert "±" not in table(found)[3][4]
    columns, rows = stage_rows(found, bold=("<", ">"), italic=("(", ")"))
    assert len(columns) == 6
    assert rows[1][4] == "12.50"


def test_the_figure_has_four_curves_that_can_be_told_apart():
    axes = stage_figure(results(seeds=(1, 2))).axes[0]
    labels = [text.get_text() for text in axes.get_legend().get_texts()]
    assert labels == [
        "CPT base, SFT base (62.5 % exact)",
        "CPT base, SFT bell (62.5 % exact)",
        "CPT bell, SFT base (87.5 % exact)",
        "CPT bell, SFT bell (87.5 % exact)",
    ]
    named = [line for line in axes.lines if not line.get_label().startswith("_")]
    assert len({(line.get_color(), line.get_linestyle()) for line in named}) == 4
    assert len(axes.lines) == 4 + 8  # and each seed
    assert list(named[0].get_xdata()) == [5, 10]
    assert named[0].get_ydata() == pytest.approx([2.05, 1.05])


@pytest.mark.parametrize(
    ("cpt", "sft", "message"),
    [
        ("sft_tiny", "sft_tiny", "--cpt is continual pretraining on text"),
        ("cpt_tiny", "cpt_tiny", "--sft needs prompts and responses"),
    ],
)
def test_stages_that_do_not_follow_one_another_are_refused(cpt, sft, message):
    with pytest.raises(UserError, match=re.escape(message)):
        check_stages(presets.preset(cpt), presets.preset(sft))


def test_both_stages_need_a_curve():
    never = override(presets.sft_tiny(), ["--validation.every", "never"])
    with pytest.raises(UserError, match="needs a curve"):
        check_stages(presets.cpt_tiny(), never)
    check_stages(presets.cpt_tiny(), presets.sft_tiny())


def test_the_suite_is_known_by_its_name():
    assert is_meant(["--suite", "cpt_sft", "--help"])
    assert is_meant(["--seeds", "2", "--suite=cpt_sft"])
    assert not is_meant(["tiny", "--suite", "families", "--out", "cpt_sft"])
    assert not is_meant(["--suite"])
