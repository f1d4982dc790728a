"""Content keys option by option, grids and plans against lists written out by hand."""

import dataclasses
import itertools
import json
from dataclasses import replace
from pathlib import Path

import pytest

from bellmask import presets
from bellmask.compare.plan import (
    PlannedRun,
    content_key,
    describe_plan,
    distinct,
    for_comparison,
    name_point,
    parse_grid,
    plan_runs,
)
from bellmask.compare.variants import parse_variants
from bellmask.config import RunConfig
from bellmask.errors import UserError
from bellmask.options import LawOptions

FREE = {"train.device", "data.cache", "validation.batch_size"}
FREE |= {"log.trackers", "log.project"}
for part in ("checkpoint", "scale"):
    FREE |= {f"{part}.{field.name}" for field in dataclasses.fields(getattr(RunConfig(), part))}
OPTIONS = [
    f"{section.name}.{option.name}"
    for section in dataclasses.fields(RunConfig)
    for option in dataclasses.fields(getattr(RunConfig(), section.name))
]
ROOT = Path("runs")


def another(value):
    """A value that differs, of the same kind."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return value + 1
    if isinstance(value, str):
        return value + "x"
    return (*value, 1) if isinstance(value, tuple) else 0.75


def with_another(config, option):
    section, name = option.split(".")
    old = getattr(config, section)
    return replace(config, **{section: replace(old, **{name: another(getattr(old, name))})})


def plan(names, *, shared=None, seeds=1, grid=({},), text="text"):
    variants = parse_variants(names)
    shared = shared or presets.tiny()
    return plan_runs(shared, variants, seeds=seeds, grid=grid, root=ROOT, text=text)


def run_in(folder, variant="v"):
    return PlannedRun(variant, 1, "", presets.tiny(), ROOT / folder)


def test_there_are_options_of_both_kinds():
    assert set(OPTIONS) == set(RunConfig().flat())
    assert len(FREE) == 17
    assert set(OPTIONS) > FREE


@pytest.mark.parametrize("option", OPTIONS)
def test_the_key_depends_on_every_option_that_matters(option):
    config = presets.tiny()
    is_same = content_key(with_another(config, option), "text") == content_key(config, "text")
    assert is_same == (option in FREE)


def test_the_key_depends_on_the_text():
    config = presets.tiny()
    assert content_key(config, "one/train/valid") != content_key(config, "one/train/other")
    assert content_key(config, "one/train/valid") == content_key(config, "one/train/valid")


def test_defaults_written_out_have_the_same_key():
    config = presets.tiny()
    explicit = replace(config, law=LawOptions("gaussian", 0.5, 0.1))
    assert content_key(explicit, "text") == content_key(config, "text")


def test_a_grid_is_all_combinations():
    found = parse_grid(["optim.lr=1e-3,3e-3", "model.width=32,64,96"])
    pairs = [("1e-3", "32"), ("1e-3", "64"), ("1e-3", "96")]
    pairs += [("3e-3", "32"), ("3e-3", "64"), ("3e-3", "96")]
    assert found == [{"optim.lr": lr, "model.width": width} for lr, width in pairs]
    assert name_point(found[1]) == "optim.lr=1e-3 model.width=64"


def test_no_grid_is_one_empty_point():
    assert parse_grid([]) == [{}]
    assert name_point({}) == ""


@pytest.mark.parametrize("text", ["optim.lr", "optim.lr=", "=1e-3", "--optim.lr=1e-3", ""])
def test_what_is_not_a_grid_is_refused(text):
    with pytest.raises(UserError, match=r"optim\.lr=1e-3,3e-3"):
        parse_grid([text])


def test_an_option_given_twice_loses_no_value():
    try:
        found = parse_grid(["optim.lr=1e-3", "optim.lr=3e-3"])
    except UserError:
        return
    assert [point["optim.lr"] for point in found] == ["1e-3", "3e-3"]


def test_seeds_are_outermost_then_variants_then_points():
    shared = replace(presets.tiny(), train=replace(presets.tiny().train, seed=5))
    grid = parse_grid(["optim.lr=1e-3,3e-3"])
    runs = plan(["base", "bell"], shared=shared, seeds=2, grid=grid)
    points = ["optim.lr=1e-3", "optim.lr=3e-3"]
    expected = list(itertools.product([5, 6], ["base", "bell"], points))
    assert [(run.seed, run.variant, run.point) for run in runs] == expected
    assert [run.config.train.seed for run in runs] == [5] * 4 + [6] * 4
    assert [run.config.optim.lr for run in runs] == [1e-3, 3e-3] * 4
    assert [run.config.objective.name for run in runs] == ["nelbo", "nelbo", "bell", "bell"] * 2
    assert len({run.folder for run in runs}) == 8


def test_a_folder_is_the_key_of_the_runs_own_config():
    (run,) = plan(["laplace:0.5,0.2"], text="one/two/three")
    assert run.folder == ROOT / content_key(run.config, "one/two/three")
    assert run.label == "laplace:0.5,0.2 seed 1"
    assert replace(run, point="optim.lr=1").label == "laplace:0.5,0.2 optim.lr=1 seed 1"


def test_the_same_training_under_two_names_is_one_folder():
    bell, base, gaussian = plan(["bell", "base", "gaussian:0.5,0.1"])
    assert bell.folder == gaussian.folder != base.folder


def test_a_grid_is_checked_before_anything_runs():
    with pytest.raises(UserError, match=r"--grid"):
        plan(["base"], grid=[{"optim.learning": "1"}])
    with pytest.raises(UserError, match=r"optim\.lr=-1"):
        plan(["base"], grid=[{"optim.lr": "-1"}])


def test_one_run_per_folder_remains_and_it_is_the_first():
    runs = [run_in("a", "1"), run_in("b", "2"), run_in("b", "3"), run_in("c", "4")]
    assert distinct(runs) == [runs[0], runs[1], runs[3]]
    assert distinct([]) == []


def test_a_folder_keeps_its_first_place():
    runs = [run_in("a", "1"), run_in("b", "2"), run_in("a", "3"), run_in("c", "4")]
    assert distinct(runs) == [runs[0], runs[1], runs[3]]


def every(text, steps=1000):
    config = presets.tiny()
    validation = replace(config.validation, every=text)
    return replace(config, validation=validation, train=replace(config.train, steps=steps)).check()


def test_a_comparison_samples_at_the_end_and_changes_nothing_else():
    shared = every("50 steps", steps=777)
    found = for_comparison(shared)
    assert found.validation.samples_every == "777 steps"
    assert replace(found, validation=shared.validation) == shared
    assert replace(found.validation, samples_every="never") == shared.validation


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("never", "needs a curve"),
        ("10 minutes", "same steps"),
        ("20k tokens", "same steps"),
        ("600 steps", "needs a curve"),
        pytest.param(
            " never",
            "needs a curve",
        ),
    ],
)
def test_runs_without_a_common_curve_are_refused(text, message):
    with pytest.raises(UserError, match=message) as caught:
        for_comparison(every(text))
    assert "--validation.every" in str(caught.value)


def test_a_described_plan_leads_back_to_the_folders():
    runs = plan(["bell"], seeds=2, grid=parse_grid(["optim.lr=1e-3,3e-3"]))
    read = json.loads(json.dumps(describe_plan(runs)))
    assert [set(run) for run in read] == [{"variant", "seed", "point", "run"}] * len(runs)
    found = [(run["variant"], run["seed"], run["point"], ROOT / run["run"]) for run in read]
    assert found == [(run.variant, run.seed, run.point, run.folder) for run in runs]
