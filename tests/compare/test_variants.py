"""Variant names against the objects that the paper's ablations describe; keys, grids and plans."""

from __future__ import annotations

import functools
import itertools
from dataclasses import replace
from pathlib import Path

import pytest

from bellmask.compare.execute import TrainingOptions, for_comparison, parse_grid, plan_runs, run_key
from bellmask.compare.variants import SUITES, check_shared, parse_variant, parse_variants
from bellmask.config import presets
from bellmask.config.config import RunConfig
from bellmask.config.options import FrameworkOptions, LawOptions, ObjectiveOptions, ScheduleOptions
from bellmask.diffusion.laws import (
    Band,
    Dirac,
    TruncatedGaussian,
    TruncatedLaplace,
    Uniform,
    WithUniform,
)
from bellmask.diffusion.objectives import Bell, ChainRule, Importance, Nelbo
from bellmask.diffusion.progress import ProgressLaw
from bellmask.diffusion.schedules import Linear, MiddleFlat
from bellmask.model.transformer import ENCODINGS
from bellmask.storage.build import build_model, build_objective
from bellmask.storage.runs import names_of

FLOOR = 1e-3
GAUSSIAN, OTHER_GAUSSIAN = TruncatedGaussian(0.5, 0.1), TruncatedGaussian(0.4, 0.2)
MEANT = {
    "base": Nelbo(Uniform(), Linear(), FLOOR),
    "bell": Bell(GAUSSIAN),
    "uniform": Bell(Uniform()),
    "dirac": Bell(Dirac(0.5)),
    "dirac:0.4": Bell(Dirac(0.4)),
    "gaussian": Bell(GAUSSIAN),
    "gaussian:0.4": Bell(TruncatedGaussian(0.4, 0.1)),
    "gaussian:0.4,0.2": Bell(OTHER_GAUSSIAN),
    "laplace": Bell(TruncatedLaplace(0.5, 0.1)),
    "laplace:0.45,0.2": Bell(TruncatedLaplace(0.45, 0.2)),
    "band": Bell(Band(0.3, 0.8)),
    "band:0.2,0.7": Bell(Band(0.2, 0.7)),
    "bell+uniform0.05": Bell(WithUniform(GAUSSIAN, 0.05)),
    "band:0.3+uniform0.1": Bell(WithUniform(Band(0.3, 0.8), 0.1)),
    "importance": Importance(GAUSSIAN, False),
    "importance:0.4,0.2": Importance(OTHER_GAUSSIAN, False),
    "importance_t": Importance(GAUSSIAN, True),
    "importance_t:0.4,0.2": Importance(OTHER_GAUSSIAN, True),
    "middle_flat": Nelbo(Uniform(), MiddleFlat(GAUSSIAN), FLOOR),
    "middle_flat:0.4,0.2": Nelbo(Uniform(), MiddleFlat(OTHER_GAUSSIAN), FLOOR),
    "arm": ChainRule(),
    "sigma_arm": ChainRule(),
    "aoarm": ChainRule(),
}
CAUSAL = ("arm", "sigma_arm", "aoarm")
SUFFIX_OPTIONS = {
    "muon": {"optim.name": "muon"},
    "adamw": {"optim.name": "adamw"},
    "unstratified": {"train.stratified": False},
    "muon+unstratified": {"optim.name": "muon", "train.stratified": False},
    "conv+lr1.5": {"model.local_conv": 5, "optim.lr": 1.5 * presets.tiny().optim.lr},
    "warmup0.2+growing": {"optim.warmup_steps": 20, "train.batch_warmup": 200},
}
LAPLACE = {"law": LawOptions("laplace", 0.3, 0.3)}
POLYNOMIAL = {"schedule": ScheduleOptions("polynomial", power=3.0)}
MIDDLE_FLAT = {"schedule": ScheduleOptions("middle_flat", mu=0.2, scale=0.3)}
IMPORTANCE_T = {"objective": ObjectiveOptions("importance", divide_by_t=True)}
HIGHER_FLOOR = {
    "law": LawOptions("uniform"),
    "objective": ObjectiveOptions("nelbo", time_floor=0.01),
}
ROOT = Path("runs")


@functools.cache
def applied(text):
    return parse_variant(text).apply(presets.small())


def changed(before, after):
    """Options that differ, with their new values."""
    old, new = before.flat(), after.flat()
    return {name: new[name] for name in new if new[name] != old[name]}


def test_progress_is_a_law_without_numbers():
    objective = build_objective(applied("progress"))
    assert isinstance(objective, Bell)
    assert isinstance(objective.law, ProgressLaw)


@pytest.mark.parametrize("text", MEANT)
def test_a_name_builds_what_it_says_and_changes_nothing_else(text):
    assert parse_variant(text).name == text
    assert build_objective(applied(text)) == MEANT[text]
    names = changed(presets.small(), applied(text))
    mine = ("law.", "schedule.", "objective.", "framework.name")
    assert all(name.startswith(mine) for name in names)
    assert applied(text).framework.name == (text if text in CAUSAL else "mdm")


def test_variants_are_the_presets_whatever_the_shared_run_was():
    """A run's config.json may be given in place of a preset, whatever it was trained on."""
    for left in (LAPLACE, POLYNOMIAL, MIDDLE_FLAT, IMPORTANCE_T, HIGHER_FLOOR):
        config = replace(presets.tiny(), **left).check()
        for text in ("bell", "dirac:0.4", *(["base"] if left is not HIGHER_FLOOR else [])):
            assert build_objective(parse_variant(text).apply(config)) == MEANT[text]
    odd = replace(presets.tiny(), **LAPLACE, **IMPORTANCE_T).check()
    crossed = FrameworkOptions("sigma_arm", "crossed", 7)
    crossed = replace(presets.preset("tiny_sigma_arm"), framework=crossed)
    for name, shared in itertools.product(CAUSAL, (presets.tiny(), odd, crossed)):
        assert parse_variant(name).apply(shared) == presets.preset(f"tiny_{name}")
        config = parse_variant(f"{name}+literal+muon").apply(shared)
        assert build_model(config, 9).second_half == ENCODINGS["literal"]
    for name, shared in itertools.product(("base", "bell", "fast"), (presets.tiny(), crossed)):
        config, meant = parse_variant(name).apply(shared), presets.preset(f"tiny_{name}")
        assert config.resolved() == meant.resolved()
        assert config.fingerprint() == meant.fingerprint()


def test_a_suffix_sets_its_option_and_no_other():
    for suffix, options in SUFFIX_OPTIONS.items():
        shared = presets.tiny().with_options(
            {"optim.name": "muon" if suffix == "adamw" else "adamw"}
        )
        variant = parse_variant(f"laplace:0.45,0.2+{suffix}")
        assert variant.name == f"laplace:0.45,0.2+{suffix}"
        plain = parse_variant("laplace:0.45,0.2").apply(shared)
        assert changed(plain, variant.apply(shared)) == options
    own = parse_variant("deep and wide=--model.num-layers 6 --validation.every '25 steps'")
    assert own.name == "deep and wide"
    found = changed(presets.tiny(), own.apply(presets.tiny()))
    assert found == {"model.num_layers": 6, "validation.every": "25 steps"}


def test_runs_are_called_by_their_variants():
    texts = ["base", "bell", "arm", "sigma_arm", "aoarm", "aoarm+crossed", "sigma_arm+literal"]
    texts += ["laplace:0.5,0.2", "dirac:0.4", "uniform", "band:0.2,0.7", "progress"]
    texts += ["gaussian:0.5,0.1+uniform0.05"]
    configs = [parse_variant(text).apply(presets.tiny()) for text in texts]
    assert names_of(configs) == texts
    # a default that is written out is still the default
    assert names_of([parse_variant("aoarm+literal").apply(presets.tiny())]) == ["aoarm"]
    seeds = [configs[3].with_options({"train.seed": seed}) for seed in (1, 2)]
    assert names_of(seeds) == ["sigma_arm", "sigma_arm"]
    muon = parse_variant("arm+muon").apply(presets.tiny())
    assert names_of([configs[0], muon]) == ["base", "arm optim.name=muon"]


@pytest.mark.parametrize(
    ("text", "names"),
    [
        *[(text, "LABEL=") for text in ("x=law gaussian", "=--law gaussian", "x=", "arm=--law x")],
        ("x=--validation.every '250 steps", "quot"),
        ("deep=--model.layers 6", "variant deep"),
        *[("gausian", "gaussian"), ("bell+moun", "muon"), ("bell+crossed", "framework.encoding")],
        *[("bell:0.5", "bell takes 0"), ("dirac:0.5,0.1", "dirac takes 1")],
        *[("fasst", "fast"), ("fast:0.4", "fast takes 0"), ("bell+lrx", "lrFACTOR")],
        *[("bell+lr2+lr3", "twice"), ("fast+lr2", "twice")],
        *[(f"{name}:0.5,0.1,2", f"{name} takes 2") for name in ("gaussian", "middle_flat")],
        *[("gaussian:a", "'a'"), ("laplace:0.5,", "0.5,"), ("laplace:,0.1", ",0.1")],
        ("progress:0.5", "takes 0 number"),
        *[
            (text, "law")
            for text in (
                "band:0.8,0.3",
                "bell+uniform1.5",
                "dirac:nan",
                "dirac:0",
                "gaussian:0.5,-1",
                "laplace:inf",
            )
        ],
    ],
)
def test_bad_variants_are_refused(text, names):
    with pytest.raises(ValueError, match=names):
        parse_variant(text).apply(presets.tiny())


def test_what_variants_decide_cannot_be_shared():
    with pytest.raises(ValueError, match="different names"):
        parse_variants(["base", "x=--law dirac", "x=--law uniform"])
    args = "--law=gaussian --law.mu --schedule.power --objective.divide-by-t --framework=arm"
    for arg in args.split():
        with pytest.raises(ValueError, match=arg.partition("=")[0]):
            check_shared(["--train.steps", "5", arg])
    check_shared("--optimizer muon --data.train=law.txt law --optim.lr=1".split())
    check_shared(["--objective.no-divide-by-c", "--objective.divide-by-c"])


def test_the_suites_begin_with_their_reference_and_share_their_trainings():
    """By hand: base, uniform, 3 diracs, 6 gaussians, 2 laplaces, 3 others, 2 + 2 with suffixes,
    six of the fast recipe, and five causal ones.
    """
    for suite in SUITES.values():
        texts = [variant.name for variant in parse_variants(suite)]
        assert texts == suite
        assert build_objective(applied(texts[0])) == MEANT["base"]
        assert len(texts) >= 3
    keys = [run_key(applied(text), "text") for suite in SUITES.values() for text in suite]
    assert len(set(keys)) == 1 + 1 + 3 + 6 + 2 + 3 + 2 + 2 + 6 + 5
    assert run_key(applied("bell"), "text") == run_key(applied("gaussian:0.5,0.1"), "text")


# --- keys, grids, plans ------------------------------------------------------------------------

FREE = (
    "train.device",
    "train.deterministic",
    "data.cache",
    "validation.batch_size",
    "log.trackers",
    "log.project",
)
FREE += ("log.profile", "checkpoint.", "scale.")


def another(value):
    """A value that differs, of the same kind."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return value + 1
    if isinstance(value, str):
        return value + "x"
    return (*value, 1) if isinstance(value, tuple) else 0.75


def plan(names, shared=None, seeds=1, **more):
    with pytest.MonkeyPatch.context() as patch:  # no text is prepared
        patch.setattr("bellmask.compare.execute.text_identity", lambda *_, **__: "text")
        options = TrainingOptions(seeds=seeds, runs=str(ROOT))
        return plan_runs(shared or presets.tiny(), parse_variants(names), options, **more)


def test_the_key_depends_on_every_option_that_matters_and_on_the_text():
    config = presets.tiny()
    key = run_key(config, "one/train/valid")
    assert key == run_key(config, "one/train/valid") != run_key(config, "one/train/other")
    for option in RunConfig().flat():
        section, name = option.split(".")
        old = getattr(config, section)
        part = replace(old, **{name: another(getattr(old, name))})
        other = run_key(replace(config, **{section: part}), "one/train/valid")
        assert (other == key) == option.startswith(FREE), option
    explicit = replace(config, law=LawOptions("gaussian", 0.5, 0.1))  # the default written out
    assert run_key(explicit, "one/train/valid") == key


def test_a_grid_is_all_combinations():
    found = parse_grid(["optim.lr=1e-3,3e-3", "model.width=32,64,96"])
    pairs = itertools.product(["1e-3", "3e-3"], ["32", "64", "96"])
    assert found == [{"optim.lr": lr, "model.width": width} for lr, width in pairs]
    assert parse_grid(["optim.lr=1e-3", "optim.lr=3e-3"]) == parse_grid(["optim.lr=1e-3,3e-3"])
    assert parse_grid([]) == [{}]
    for name, lr in (("fast", 0.2), ("bell", 0.1)):  # a factor is over the grid's rate
        assert parse_variant(name).apply(presets.tiny(), ["--optim.lr", "0.1"]).optim.lr == lr
    for text in ("optim.lr", "optim.lr=", "=1", "--optim.lr=1", "", "a=1,1"):
        with pytest.raises(ValueError, match="grid"):
            parse_grid([text])


def test_seeds_are_outermost_then_variants_then_points():
    shared = presets.tiny().with_options({"train.seed": 5})
    grid = parse_grid(["optim.lr=1e-3,3e-3"])
    runs = plan(["base", "bell"], shared=shared, seeds=2, grid=grid)
    points = ["optim.lr=1e-3", "optim.lr=3e-3"]
    expected = list(itertools.product([5, 6], ["base", "bell"], points))
    assert [(run.config.train.seed, run.variant, run.point) for run in runs] == expected
    assert [run.config.optim.lr for run in runs] == [1e-3, 3e-3] * 4
    assert [run.config.objective.name for run in runs] == ["nelbo", "nelbo", "bell", "bell"] * 2
    assert runs[1].label == "base optim.lr=3e-3 seed 5"
    assert [run.folder for run in runs] == [ROOT / run_key(r.config, "text") for r in runs]
    assert len({run.folder for run in runs}) == 8
    (run,) = plan(["base"], grid=parse_grid(["optim.lr=1", "model.num-layers=1"]))
    assert run.point == "optim.lr=1 model.num-layers=1"


@pytest.mark.parametrize(
    ("name", "point", "names"),
    [
        ("base", {"optim.learning": "1"}, "--grid"),
        ("base", {"optim.lr": "-1"}, "optim.lr=-1"),
        ("base", {"validation.blocks": "8"}, "validation.blocks"),
        ("x=--train.seed 8", {}, "train.seed"),
        *[
            (f"x=--{option.replace('_', '-')} 8", {}, option)
            for option in ("data.block_length", "train.batch_size", "train.steps")
        ],
    ],
)
def test_an_unfair_or_impossible_plan_is_refused(name, point, names):
    with pytest.raises(ValueError, match=names):
        plan([name], grid=[point])


def test_a_comparison_samples_at_the_end_and_changes_nothing_else():
    shared = presets.tiny().with_options({"train.steps": 777, "validation.every": "388 steps"})
    found = for_comparison(shared)
    assert changed(shared, found) == {"validation.samples_every": "777 steps"}
    for text in ("never", "10 minutes", "20k tokens", "389 steps"):
        with pytest.raises(ValueError, match=r"--validation\.every"):
            for_comparison(shared.with_options({"validation.every": text}))
