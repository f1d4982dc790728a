"""Training curves of orders: groups, means, spreads and gaps by hand from the runs' own records."""

import json
import math

import numpy as np
import pytest

from bellmask.analyze.orders import ORDERS, OrdersOptions
from bellmask.assemble import train_run
from bellmask.errors import UserError
from bellmask.evaluate.result import Likelihood
from bellmask.records import read_metrics

RUNS = {
    "arm": "--framework arm",
    "sigma-1": "--framework sigma_arm --train.seed 1",
    "sigma-2": "--framework sigma_arm --train.seed 2",
    "aoarm": "--framework aoarm",
    "aoarm-crossed": "--framework aoarm --framework.encoding crossed",
    "sigma-crossed": "--framework sigma_arm --framework.encoding crossed",
    "bell": "",
}


def ignore(done, total):
    pass


@pytest.fixture(scope="module")
def runs(small_config, tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    for name, options in RUNS.items():
        common = "--train.steps 4 --validation.every 2".split()
        train_run(small_config(*common, *options.split()), folder / name, is_quiet=True)
    return folder


def measured(runs, *names):
    return ORDERS.measure(OrdersOptions(tuple(str(runs / name) for name in names)), ignore)


def curve(folder, key="nll"):
    """A run's validations, as it wrote them."""
    lines = read_metrics(folder / "metrics.jsonl")
    return [line[key] for line in lines if line["kind"] == "validation"]


@pytest.fixture(scope="module")
def numbers(runs):
    return measured(runs, *RUNS)


def test_runs_that_differ_in_their_seed_are_one_group(numbers):
    groups = numbers["groups"]
    assert {name: group["runs"] for name, group in groups.items()} == {
        "arm": ["arm"],
        "sigma_arm": ["sigma-1", "sigma-2"],
        "aoarm": ["aoarm"],
        "aoarm+crossed": ["aoarm-crossed"],
        "sigma_arm+crossed": ["sigma-crossed"],
        "bell": ["bell"],
    }
    assert groups["sigma_arm"]["seeds"] == [1, 2]
    assert all(group["steps"] == [2, 4] for group in groups.values())


def test_fixed_orders_are_exact_and_others_bounds(numbers):
    exact = {name for name, group in numbers["groups"].items() if group["is_exact"]}
    assert exact == {"arm", "sigma_arm", "sigma_arm+crossed"}


def test_a_group_has_the_mean_and_spread_of_its_runs(runs, numbers):
    group = numbers["groups"]["sigma_arm"]
    curves = np.array([curve(runs / name) for name in group["runs"]])
    assert curves.shape == (2, 2)
    assert len(set(curves[:, 1])) == 2
    assert group["nll"] == pytest.approx(curves.mean(0).tolist(), rel=1e-12)
    assert group["sd_over_runs"] == pytest.approx(curves.std(0, ddof=1).tolist(), rel=1e-9)
    assert group["final"] == curves[:, 1].tolist()
    assert group["final_se"] == [curve(runs / name, "nll_se")[-1] for name in group["runs"]]
    alone = numbers["groups"]["aoarm"]
    assert alone["nll"] == curve(runs / "aoarm")
    assert alone["sd_over_runs"] == [None, None]


def last_blocks(folder) -> np.ndarray:
    """NLL of each block at the last evaluation."""
    return Likelihood.load(sorted((folder / "validation").glob("*.npz"))[-1]).block_nll


def test_gaps_have_the_errors_of_runs_or_of_validation(runs, numbers):
    found = {gap["name"]: (gap["gap"], gap["se"]) for gap in numbers["gaps"]}
    sigma = np.array([curve(runs / f"sigma-{seed}")[-1] for seed in (1, 2)])
    value = {name: curve(runs / name)[-1] for name in RUNS} | {"sigma": sigma.mean()}
    error = {name: curve(runs / name, "nll_se")[-1] for name in RUNS}
    error["sigma"] = sigma.std(ddof=1) / math.sqrt(2)
    expected = {
        "locality: sigma_arm minus arm": ("sigma", "arm"),
        "locality, crossed: sigma_arm+crossed minus arm": ("sigma-crossed", "arm"),
        "number of orders: aoarm+crossed minus sigma_arm+crossed": (
            "aoarm-crossed",
            "sigma-crossed",
        ),
        "number of orders and encoding: aoarm minus sigma_arm": ("aoarm", "sigma"),
        "encoding: aoarm+crossed minus aoarm": ("aoarm-crossed", "aoarm"),
        "encoding: sigma_arm+crossed minus sigma_arm": ("sigma-crossed", "sigma"),
    }
    assert list(found) == list(expected)
    over = {gap["name"]: gap["over"] for gap in numbers["gaps"]}
    for name, (left, right) in expected.items():
        assert found[name][0] == pytest.approx(value[left] - value[right], abs=1e-12)
        if "sigma" in (left, right):
            wanted = math.hypot(error[left], error[right])
            assert over[name] == "runs"
        else:  # the same blocks: what they share cancels
            values = [last_blocks(runs / run) for run in (left, right)]
            wanted = np.std(values[0] - values[1], ddof=1) / math.sqrt(len(values[0]))
            assert over[name] == "blocks, paired"
        assert found[name][1] == pytest.approx(wanted, rel=1e-6)
        assert abs(found[name][0]) > 1e-7  # so that its sign is seen
        assert found[name][1] > 0


def test_a_gap_needs_both_groups(runs):
    assert [gap["name"] for gap in measured(runs, "arm", "sigma-2", "bell")["gaps"]] == [
        "locality: sigma_arm minus arm"
    ]
    (table,) = ORDERS.tables(measured(runs, "arm", "bell"))
    assert [row[0] for row in table.rows] == ["arm", "bell"]


def test_a_comparison_gives_what_its_runs_give(runs, tmp_path):
    """A run that is given twice counts once."""
    names = ("arm", "sigma-1", "sigma-2")
    plan = {
        "root": str(runs),
        "runs": [{"variant": name, "seed": 1, "point": "", "run": name} for name in names],
        "reference": "arm",
        "title": "",
        "failed": [],
    }
    (tmp_path / "comparison.json").write_text(json.dumps(plan))
    expected = measured(runs, *names)
    assert measured(tmp_path, ".") == expected
    assert measured(tmp_path, ".", runs / "sigma-1", runs / "bell" / ".." / "arm") == expected


def test_the_table_and_the_figure_label_what_is_exact(numbers):
    table, gaps = ORDERS.tables(numbers)
    rows = {row[0]: row[1:] for row in table.rows}
    sigma = numbers["groups"]["sigma_arm"]
    mean, spread = f"{sigma['nll'][-1]:.4f}", f"{sigma['sd_over_runs'][-1]:.4f}"
    assert rows["sigma_arm"] == ["exact", "2", mean, spread]
    assert rows["aoarm"] == ["bound", "1", f"{numbers['groups']['aoarm']['nll'][-1]:.4f}", "-"]
    assert rows["bell"][0] == "bound"
    assert "step 4" in table.title
    assert "(Fig. 2)" in table.title
    first = numbers["gaps"][0]
    assert gaps.rows[0][:3] == [first["name"], f"{first['gap']:+.4f}", f"{first['se']:.4f}"]
    axes = ORDERS.figure(numbers).axes[0]
    labels = axes.get_legend_handles_labels()[1]
    assert "arm (exact)" in labels
    assert "sigma_arm (exact, 2 runs)" in labels
    assert "aoarm (bound)" in labels
    (band,) = axes.collections
    (outline,) = band.get_paths()
    low, high = outline.vertices[:, 1].min(), outline.vertices[:, 1].max()
    middle, spread = np.array(sigma["nll"]), np.array(sigma["sd_over_runs"])
    assert (low, high) == pytest.approx(((middle - spread).min(), (middle + spread).max()))
    unigram = [line for line in axes.lines if line.get_label() == "unigram"]
    assert unigram[0].get_ydata()[0] == numbers["unigram_nll"]


def test_the_unigram_is_the_runs_own_and_the_numbers_are_json(runs, numbers):
    description = json.loads((runs / "arm" / "run.json").read_text())
    assert numbers["unigram_nll"] == description["unigram_nll"]
    assert json.loads(json.dumps(numbers, allow_nan=False)) == numbers


def test_what_cannot_be_compared_is_refused(runs, small_config, tmp_path):
    common = "--framework arm --model.num-layers 1 --validation.every 2".split()
    train_run(small_config(*common, "--train.steps", "2"), tmp_path / "short", is_quiet=True)
    other = ["--train.steps", "4", "--data.block-length", "12"]
    train_run(small_config(*common, *other), tmp_path / "other", is_quiet=True)
    with pytest.raises(UserError, match=r"train.steps is 4 and 2"):
        measured(runs, "arm", tmp_path / "short")
    with pytest.raises(UserError, match="cannot be compared: their training texts differ"):
        measured(runs, "arm", tmp_path / "other")
    with pytest.raises(UserError, match="needs run folders"):
        measured(runs)
    with pytest.raises(UserError, match="there is no folder"):
        measured(runs, "nowhere")
    with pytest.raises(UserError, match=r"it has no config\.json"):
        measured(runs, ".")
