"""Training curves of orders: groups, means, spreads and gaps by hand from the runs' own records."""

from __future__ import annotations

import json
import math
import shutil

import numpy as np
import pytest
from changed_runs import change_run

from bellmask.analyze.orders import ORDERS, OrdersOptions
from bellmask.evaluate.likelihood import Likelihood
from bellmask.storage.run_folder import read_metrics
from bellmask.utils.progress import NO_PROGRESS

CROSSED = {"framework.encoding": "crossed"}
GROUPS = {
    "arm": ["arm"],
    "sigma_arm": ["sigma-1", "sigma-2"],
    "aoarm": ["aoarm"],
    "aoarm+crossed": ["aoarm-crossed"],
    "sigma_arm+crossed": ["sigma-crossed"],
    "bell": ["bell"],
}


@pytest.fixture(scope="module")
def runs(zoo, tmp_path_factory):
    """Runs of the zoo, some under other options and with the records of another one."""
    folder = tmp_path_factory.mktemp("runs")
    for name, (source, options, records) in {
        "arm": ("arm", {}, "arm"),
        "sigma-1": ("sigma_arm", {}, "sigma_arm"),
        "sigma-2": ("sigma_arm", {"train.seed": 2}, "arm"),
        "aoarm": ("aoarm", {}, "aoarm"),
        "aoarm-crossed": ("aoarm", CROSSED, "arm"),
        "sigma-crossed": ("sigma_arm", CROSSED, "sigma_arm"),
        "bell": ("bell", {}, "bell"),
    }.items():
        run = change_run(zoo / source, folder / name, options)
        shutil.copy(zoo / records / "metrics.jsonl", run)
        shutil.copytree(zoo / records / "validation", run / "validation", dirs_exist_ok=True)
    return folder


def measured(runs, *names):
    options = OrdersOptions(runs=tuple(str(runs / name) for name in names))
    return ORDERS.measure(options, NO_PROGRESS)


def curve(folder, key="nll"):
    """A run's validations, as it wrote them."""
    lines = read_metrics(folder / "metrics.jsonl")
    return [line[key] for line in lines if line["kind"] == "validation"]


@pytest.fixture(scope="module")
def numbers(runs):
    found = measured(runs, *(name for group in GROUPS.values() for name in group))
    assert json.loads(json.dumps(found, allow_nan=False)) == found
    return found


def test_a_group_has_the_mean_and_spread_of_its_runs(runs, numbers):
    """Runs that differ in their seed are one; fixed orders are exact, others bounds."""
    groups = numbers["groups"]
    assert {name: group["runs"] for name, group in groups.items()} == GROUPS
    is_exact = {"arm": True, "sigma_arm": True, "aoarm": False, "bell": False}
    assert {name: groups[name]["is_exact"] for name in is_exact} == is_exact
    group = groups["sigma_arm"]
    assert (group["seeds"], group["steps"]) == ([1, 2], [30, 60])
    curves = np.array([curve(runs / name) for name in group["runs"]])
    assert len(set(curves[:, 1])) == 2
    assert group["nll"] == pytest.approx(curves.mean(0).tolist(), rel=1e-12)
    assert group["sd_over_runs"] == pytest.approx(curves.std(0, ddof=1).tolist(), rel=1e-9)
    assert group["final"] == curves[:, 1].tolist()
    assert group["final_se"] == [curve(runs / name, "nll_se")[-1] for name in group["runs"]]
    alone = groups["aoarm"]
    assert (alone["nll"], alone["sd_over_runs"]) == (curve(runs / "aoarm"), [None, None])


def last_blocks(folder):
    """NLL of each block at the last evaluation."""
    return Likelihood.load(sorted((folder / "validation").glob("*.npz"))[-1]).block_nll


def test_gaps_have_the_errors_of_runs_or_of_validation(runs, numbers):
    final = {name: [curve(runs / run)[-1] for run in group] for name, group in GROUPS.items()}
    gaps = "sigma_arm arm, sigma_arm+crossed arm, aoarm+crossed sigma_arm+crossed, aoarm sigma_arm"
    gaps += ", aoarm+crossed aoarm, sigma_arm+crossed sigma_arm"
    pairs = [tuple(pair.split()) for pair in gaps.split(", ")]
    found = [gap["name"].split(": ")[1] for gap in numbers["gaps"]]
    assert found == [f"{left} minus {right}" for left, right in pairs]
    for gap, (left, right) in zip(numbers["gaps"], pairs):
        assert gap["gap"] == pytest.approx(np.mean(final[left]) - np.mean(final[right]), abs=1e-6)
        assert abs(gap["gap"]) > 1e-4  # so that its sign is seen
        if "sigma_arm" in (left, right):
            other = GROUPS[right if left == "sigma_arm" else left][0]
            over_seeds = np.std(final["sigma_arm"], ddof=1) / math.sqrt(2)
            wanted = math.hypot(over_seeds, curve(runs / other, "nll_se")[-1])
        else:  # the same blocks: what they share cancels
            blocks = [last_blocks(runs / GROUPS[name][0]) for name in (left, right)]
            wanted = np.std(blocks[0] - blocks[1], ddof=1) / math.sqrt(len(blocks[0]))
        is_paired = "sigma_arm" not in (left, right)
        assert gap["over"] == ("blocks, paired" if is_paired else "runs")
        assert gap["se"] == pytest.approx(wanted, rel=1e-6)


def test_a_comparison_gives_what_its_runs_give(runs, tmp_path):
    """A run that is given twice counts once; a gap needs both groups."""
    names = ("arm", "sigma-1", "sigma-2")
    members = [{"variant": name, "seed": 1, "point": "", "run": name} for name in names]
    plan = {"root": str(runs), "runs": members, "reference": "arm", "title": "", "failed": []}
    (tmp_path / "comparison.json").write_text(json.dumps(plan))
    expected = measured(runs, *names)
    assert [gap["name"] for gap in expected["gaps"]] == ["locality: sigma_arm minus arm"]
    assert measured(tmp_path, ".") == expected
    assert measured(tmp_path, ".", runs / "sigma-1", runs / "bell" / ".." / "arm") == expected
