"""The suite cpt_sft: its rows, differences and tables against arithmetic written out by hand."""

import math
from pathlib import Path

import numpy as np
import pytest

from bellmask.compare.execute import TrainingOptions
from bellmask.compare.results import RunRecord
from bellmask.compare.stages import (
    StageOutcome,
    StageRun,
    plan_stages,
    stage_markdown,
    summarize_stages,
)
from bellmask.config import presets
from bellmask.evaluate.exact_match import ExactMatch
from bellmask.evaluate.likelihood import Likelihood

CELLS = [("base", None), ("bell", None)]
CELLS += [("base", "base"), ("base", "bell"), ("bell", "base"), ("bell", "bell")]
ASKED = {
    "examples": 4,
    "gap": 8,
    "own_gaps": [8, 16],
    "seeds": [0, 1],
    "sampling": {"rule": "ancestral", "steps": 64, "temperature": 1.0},
}


def outcome(seed, cpt, sft, nll, answers, fingerprint="f"):
    """Four blocks around ``nll``; ``answers`` are one string of letters for each sampling seed."""
    ce_B1 = nll + np.array([[-0.2], [0], [0], [0.2]])
    ones, four = np.ones((4, 1), dtype=np.int64), np.arange(4)
    last = Likelihood(np.full(4, 3), four / 4, ones, ce_B1, four, 1.0, fingerprint)
    config, folder = presets.sft_tiny(), Path(f"CPT {cpt} + SFT {sft}")
    record = RunRecord(
        folder, config, {}, [5, 10], [nll + 1, nll], [0.1, 0.1], [1.0, 2.0],
        np.stack([last.block_nll] * 2), last, [], [],
    )  # fmt: skip
    run = StageRun(str(folder), "", config, folder, seed, cpt, sft)
    told = tuple(tuple(one) for one in answers)
    return StageOutcome(run, record, ExactMatch(("a", "b", "c", "d"), told, (0, 1, 2, 3), "e"))


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
        outcome(seed, *place, NLL[place] + 0.1 * number * (cpt == "base"), ANSWERS[place])
        for number, seed in enumerate(seeds)
        for cpt in ("base", "bell")
        for place in CELLS
        if place[0] == cpt
    ]


def results(seeds=(1,)):
    stages = {"cpt": presets.cpt_tiny().to_dict(), "sft": presets.sft_tiny().to_dict()}
    return {**stages, "asked": ASKED, **summarize_stages(outcomes(seeds))}


def row_of(found, place):
    return next(row for row in found["rows"] if (row["cpt"], row["sft"]) == place)


def test_differences_are_to_the_base_row_of_the_section():
    """Also means and deviations over sampling seeds."""
    found = results()
    assert [(row["cpt"], row["sft"]) for row in found["rows"]] == CELLS
    has_none = [row["difference"] is None for row in found["rows"]]
    assert has_none == [True, False, True, False, False, False]
    # right answers less those of the base row, per example
    differences = {
        ("bell", None): (-0.5, [0.5, 1, 0, 0]),
        ("bell", "bell"): (-0.3, [0, 0, 0.5, 0.5]),
    }
    for place, (nll, each) in differences.items():
        difference = row_of(found, place)["difference"]
        assert difference["nll"]["value"] == pytest.approx(nll)
        assert difference["nll"]["se"] == pytest.approx(0)  # all blocks differ alike
        match = difference["exact_match"]
        assert (match["value"], match["low"]) == (pytest.approx(np.mean(each)), None)
        assert match["se"] == pytest.approx(np.std(each, ddof=1) / 2)
    row = row_of(found, ("bell", "base"))
    assert row["exact_match"] == pytest.approx(7 / 8)
    assert row["sampling_deviation"] == pytest.approx(math.sqrt(2) * 0.125)
    (run,) = row["runs"]
    assert (run["by_sampling_seed"], run["nll"]) == ([1, 0.75], [1.8, 0.8])
    assert row["training_deviation"] is None


def test_training_seeds_are_paired():
    found = results(seeds=(1, 2, 3))
    row = row_of(found, ("bell", "bell"))
    mean, error = -0.4, 0.1 / math.sqrt(3)
    nll = row["difference"]["nll"]
    assert nll["by_seed"] == pytest.approx([-0.3, -0.4, -0.5])
    assert (nll["value"], nll["se"]) == pytest.approx((mean, error))
    # Student's t with two degrees of freedom, 0.975: 4.303
    assert (nll["low"], nll["high"]) == pytest.approx((mean - 4.303 * error, mean + 4.303 * error))
    assert row_of(found, ("base", "base"))["nll"] == pytest.approx(1.1)
    assert row["sampling_deviation"] == pytest.approx(math.sqrt(2) * 0.125)
    assert (row["training_deviation"], found["seeds"]) == (0, [1, 2, 3])


def test_runs_with_other_masks_are_refused():
    odd = [*outcomes()[:-1], outcome(1, "bell", "bell", 0.7, ANSWERS["bell", "bell"], "other")]
    with pytest.raises(ValueError, match=r"CPT bell . SFT bell"):
        summarize_stages(odd)


def table(found):
    """Cells of table.md, row by row."""
    lines = [line for line in stage_markdown(found).splitlines() if line.startswith("| b")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_the_table_is_the_papers():
    found = table(results())
    assert [row[:2] for row in found] == [[cpt, sft or "—"] for cpt, sft in CELLS]
    assert found[0][2:] == ["3.0000", "", "12.50 ± 17.68", ""]
    assert found[1][2:] == ["**2.5000**", "-0.5000 ± 0.0000", "**50.00 ± 0.00**", "+37.50 ± 23.94"]
    assert found[5][2:4] == ["**0.7000**", "-0.3000 ± 0.0000"]
    # the best of each section is bold, ties all are
    assert [row[2].startswith("**") for row in found] == [False, True, False, False, False, True]
    assert [row[4].startswith("**") for row in found] == [False, True, False, False, True, True]
    assert "-0.4000 ± 0.0577 (-0.6484 to -0.1516)" in table(results(seeds=(1, 2, 3)))[5][3]
    assert table(results(seeds=(1, 2)))[5][3] == "-0.3500 ± 0.0500"  # an error, but no interval
    alone = results()
    for row in alone["rows"]:
        row["sampling_deviation"] = None
    assert table(alone)[0][4] == "12.50"


def test_stages_that_do_not_follow_one_another_are_refused():
    cpt, sft = presets.cpt_tiny(), presets.sft_tiny()
    no_cpt, no_sft = (one.with_options({"validation.every": "never"}) for one in (cpt, sft))
    refused = {"--cpt": [(sft, sft)], "--sft": [(cpt, cpt)]}
    refused[r"--validation\.every"] = [(cpt, no_sft), (no_cpt, sft)]
    for named, pairs in refused.items():
        for pair in pairs:
            with pytest.raises(ValueError, match=named):
                plan_stages(*pair, TrainingOptions())
