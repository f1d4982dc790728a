"""Variant names against the objects that the paper's ablations describe, written out by hand."""

import functools
from dataclasses import replace

import pytest

from bellmask import presets
from bellmask.build import build_model, build_objective
from bellmask.compare.laws import describe_law
from bellmask.compare.naming import names_of
from bellmask.compare.plan import content_key
from bellmask.compare.suites import SUITES
from bellmask.compare.variants import (
    NAMES,
    check_shared,
    parse_variant,
    parse_variants,
)
from bellmask.diffusion.objectives import Bell, ChainRule, Importance, Nelbo
from bellmask.diffusion.schedule import Linear, MiddleFlat
from bellmask.diffusion.times import Dirac, TruncatedGaussian, TruncatedLaplace, Uniform
from bellmask.errors import UserError
from bellmask.model.transformer import ENCODINGS
from bellmask.options import FrameworkOptions, LawOptions, ObjectiveOptions, ScheduleOptions

FLOOR = 1e-3
MEANT = {
    "base": Nelbo(Uniform(), Linear(), FLOOR),
    "bell": Bell(TruncatedGaussian(0.5, 0.1), Linear()),
    "uniform": Bell(Uniform(), Linear()),
    "dirac": Bell(Dirac(0.5), Linear()),
    "dirac:0.4": Bell(Dirac(0.4), Linear()),
    "gaussian": Bell(TruncatedGaussian(0.5, 0.1), Linear()),
    "gaussian:0.4": Bell(TruncatedGaussian(0.4, 0.1), Linear()),
    "gaussian:0.6,0.2": Bell(TruncatedGaussian(0.6, 0.2), Linear()),
    "laplace": Bell(TruncatedLaplace(0.5, 0.1), Linear()),
    "laplace:0.45,0.2": Bell(TruncatedLaplace(0.45, 0.2), Linear()),
    "importance": Importance(TruncatedGaussian(0.5, 0.1), False, Linear()),
    "importance:0.4,0.2": Importance(TruncatedGaussian(0.4, 0.2), False, Linear()),
    "importance_t": Importance(TruncatedGaussian(0.5, 0.1), True, Linear()),
    "importance_t:0.4,0.2": Importance(TruncatedGaussian(0.4, 0.2), True, Linear()),
    "middle_flat": Nelbo(Uniform(), MiddleFlat(TruncatedGaussian(0.5, 0.1)), FLOOR),
    "middle_flat:0.4,0.2": Nelbo(Uniform(), MiddleFlat(TruncatedGaussian(0.4, 0.2)), FLOOR),
    "arm": ChainRule(),
    "sigma_arm": ChainRule(),
    "aoarm": ChainRule(),
}
CAUSAL = ("arm", "sigma_arm", "aoarm")
SUFFIX_OPTIONS = {
    "muon": {"optim.name": "muon"},
    "adamw": {"optim.name": "adamw"},
    "unstratified": {"train.stratified": False},
}
LEFT_OVER = {
    "laplace": {"law": LawOptions("laplace", 0.3, 0.3)},
    "gaussian": {"law": LawOptions("gaussian", 0.3, 0.3)},
    "polynomial": {"schedule": ScheduleOptions("polynomial", power=3.0)},
    "middle_flat": {"schedule": ScheduleOptions("middle_flat", mu=0.2, scale=0.3)},
}
IMPORTANCE_T = {"objective": ObjectiveOptions("importance", divide_by_t=True)}
HIGHER_FLOOR = {
    "law": LawOptions("uniform"),
    "objective": ObjectiveOptions("nelbo", time_floor=0.01),
}


@functools.cache
def applied(text):
    return parse_variant(text).apply(presets.small())


def changed(before, after):
    """Options that differ, with their new values."""
    old, new = before.flat(), after.flat()
    return {name: new[name] for name in new if new[name] != old[name]}


def test_every_name_is_in_the_table_of_meanings():
    assert {text.partition(":")[0] for text in MEANT} == set(NAMES)


@pytest.mark.parametrize("text", MEANT)
def test_a_name_builds_what_it_says_and_changes_nothing_else(text):
    assert parse_variant(text).name == text
    assert build_objective(applied(text)) == MEANT[text]
    names = changed(presets.small(), applied(text))
    mine = ("law.", "schedule.", "objective.", "framework.name")
    assert all(name.startswith(mine) for name in names)
    assert applied(text).framework.name == (text if text in CAUSAL else "mdm")


@pytest.mark.parametrize(
    ("text", "left"),
    [
        ("base", "laplace"),
        ("dirac:0.4", "laplace"),
        ("gaussian:0.4", "gaussian"),
        ("middle_flat", "gaussian"),
        ("base", "polynomial"),
        ("importance", "middle_flat"),
        ("middle_flat", "middle_flat"),
    ],
)
def test_nothing_of_the_shared_law_or_schedule_is_left(text, left):
    config = replace(presets.tiny(), **LEFT_OVER[left]).check()
    assert build_objective(parse_variant(text).apply(config)) == MEANT[text]


@pytest.mark.parametrize(
    ("text", "left"),
    [
        ("base", IMPORTANCE_T),
        ("bell", IMPORTANCE_T),
        ("bell", HIGHER_FLOOR),
        ("importance", HIGHER_FLOOR),
    ],
)
def test_a_shared_objective_does_not_stand_in_the_way(text, left):
    """A run's config.json may be given in place of a preset, whatever it was trained on."""
    config = replace(presets.tiny(), **left).check()
    assert build_objective(parse_variant(text).apply(config)) == MEANT[text]


def test_base_and_bell_are_the_presets():
    shared = presets.tiny()
    for name in ("base", "bell"):
        config, meant = parse_variant(name).apply(shared), presets.preset(f"tiny_{name}")
        assert config.fingerprint() == meant.fingerprint()
        assert config.resolved() == meant.resolved()


@pytest.mark.parametrize("name", CAUSAL)
def test_causal_variants_are_the_presets(name):
    """Whatever the shared run was: also another causal one, or one with odd times."""
    odd = replace(presets.tiny(), **LEFT_OVER["laplace"], **IMPORTANCE_T).check()
    crossed = replace(
        presets.preset("tiny_sigma_arm"), framework=FrameworkOptions("sigma_arm", "crossed", 7)
    )
    for shared in (presets.tiny(), odd, crossed):
        assert parse_variant(name).apply(shared) == presets.preset(f"tiny_{name}")


@pytest.mark.parametrize("name", ["base", "bell"])
def test_masked_variants_of_a_causal_run_are_masked(name):
    crossed = parse_variant("sigma_arm+crossed").apply(presets.tiny())
    config = parse_variant(name).apply(crossed)
    assert config.resolved() == presets.preset(f"tiny_{name}").resolved()
    assert config.framework == FrameworkOptions()


@pytest.mark.parametrize("name", CAUSAL)
@pytest.mark.parametrize("encoding", ["crossed", "literal", "source"])
def test_an_encoding_is_a_suffix_of_causal_variants(name, encoding):
    variant = parse_variant(f"{name}+{encoding}+muon")
    found = changed(parse_variant(name).apply(presets.tiny()), variant.apply(presets.tiny()))
    assert found == {"framework.encoding": encoding, "optim.name": "muon"}
    assert build_model(variant.apply(presets.tiny()), 9).second_half == ENCODINGS[encoding]


def test_an_encoding_is_not_a_suffix_of_masked_variants():
    with pytest.raises(UserError, match="causal frameworks"):
        parse_variant("bell+crossed").apply(presets.tiny())


def test_runs_are_called_by_their_variants():
    texts = ["base", "bell", "arm", "sigma_arm", "aoarm", "aoarm+crossed", "sigma_arm+literal"]
    texts += ["laplace:0.5,0.2", "dirac:0.4", "uniform"]
    configs = [parse_variant(text).apply(presets.tiny()) for text in texts]
    assert names_of(configs) == texts
    # a default that is written out is still the default
    assert names_of([parse_variant("aoarm+literal").apply(presets.tiny())]) == ["aoarm"]
    seeds = [configs[3].with_options({"train.seed": seed}) for seed in (1, 2)]
    assert names_of(seeds) == ["sigma_arm", "sigma_arm"]
    muon = parse_variant("arm+muon").apply(presets.tiny())
    assert names_of([configs[0], muon]) == ["base", "arm optim.name=muon"]


@pytest.mark.parametrize("name", CAUSAL)
def test_what_a_causal_variant_trains_on_has_no_times(name):
    """Each context count of a row once: weights are equal, and every row counts the same."""
    config = parse_variant(name).apply(presets.tiny())
    found = describe_law(config)
    assert found["context_weights"] == pytest.approx([1 / 64] * 64)
    assert found["effective_sample_share"] == 1
    assert found["density"] is found["mask_rate_histogram"] is None
    encoding = "literal" if name == "aoarm" else "source"
    assert found["name"] == f"framework {name}, {encoding} positions"


@pytest.mark.parametrize("suffix", SUFFIX_OPTIONS)
def test_a_suffix_sets_its_option_and_no_other(suffix):
    optimizer = "muon" if suffix == "adamw" else "adamw"
    shared = replace(presets.tiny(), optim=replace(presets.tiny().optim, name=optimizer))
    name = "laplace:0.45,0.2"
    plain = parse_variant(name).apply(shared)
    variant = parse_variant(f"{name}+{suffix}")
    assert variant.name == f"{name}+{suffix}"
    assert changed(plain, variant.apply(shared)) == SUFFIX_OPTIONS[suffix]


def test_suffixes_add_up():
    shared = presets.tiny()
    found = changed(
        parse_variant("bell").apply(shared), parse_variant("bell+muon+unstratified").apply(shared)
    )
    assert found == {"optim.name": "muon", "train.stratified": False}


def test_a_variant_of_ones_own():
    variant = parse_variant("deep and wide=--model.num-layers 6 --model.width=128")
    assert variant.name == "deep and wide"
    found = changed(presets.tiny(), variant.apply(presets.tiny()))
    assert found == {"model.num_layers": 6, "model.width": 128}


def test_quotes_keep_a_value_together():
    variant = parse_variant("rare=--validation.every '250 steps'")
    assert variant.options == ("--validation.every", "250 steps")


@pytest.mark.parametrize("text", ["x=law gaussian", "=--law gaussian", "x=", "="])
def test_a_variant_of_ones_own_needs_a_label_and_options(text):
    with pytest.raises(UserError, match="LABEL=--option value"):
        parse_variant(text)


def test_an_open_quote_is_the_users_error():
    with pytest.raises(UserError, match="quot"):
        parse_variant("x=--validation.every '250 steps")


def test_an_option_that_does_not_exist_names_the_variant():
    with pytest.raises(UserError, match="variant deep"):
        parse_variant("deep=--model.layers 6").apply(presets.tiny())


@pytest.mark.parametrize(
    ("text", "nearest"),
    [
        ("gausian", "'gaussian'"),
        ("Bell", "'bell'"),
        ("importance-t", "'importance_t'"),
        ("bell+moun", "'muon'"),
        ("bell+muon+unstratifed", "'unstratified'"),
    ],
)
def test_unknown_names_get_the_nearest(text, nearest):
    with pytest.raises(UserError, match=f"did you mean .*{nearest}"):
        parse_variant(text)


@pytest.mark.parametrize(
    ("text", "most"),
    [
        ("base:0.5", 0),
        ("bell:0.5", 0),
        ("arm:0.5", 0),
        ("uniform:0.5", 0),
        ("dirac:0.5,0.1", 1),
        ("gaussian:0.5,0.1,2", 2),
        ("laplace:0.5,0.1,2", 2),
        ("importance:1,2,3", 2),
        ("importance_t:1,2,3", 2),
        ("middle_flat:1,2,3", 2),
    ],
)
def test_too_many_numbers_are_refused(text, most):
    with pytest.raises(UserError, match=rf"{text}.* takes {most} number"):
        parse_variant(text)


@pytest.mark.parametrize("text", ["gaussian:a", "dirac:0.5x", "laplace:0.5,", "laplace:,0.1"])
def test_what_is_not_a_number_is_refused(text):
    with pytest.raises(UserError, match="must be numbers"):
        parse_variant(text)


@pytest.mark.parametrize("text", ["dirac:nan", "dirac:0", "gaussian:0.5,-1", "laplace:inf"])
def test_numbers_that_no_law_takes_are_refused(text):
    with pytest.raises(UserError, match=r"law"):
        parse_variant(text).apply(presets.tiny())


@pytest.mark.parametrize("texts", [["base", "bell", "base"], ["x=--law dirac", "x=--law uniform"]])
def test_names_must_differ(texts):
    with pytest.raises(UserError, match="different names"):
        parse_variants(texts)


def test_variants_keep_their_order():
    texts = ["bell", "base", "dirac:0.4"]
    assert [variant.name for variant in parse_variants(texts)] == texts


@pytest.mark.parametrize(
    "arg",
    [
        "--law",
        "--law=gaussian",
        "--law.mu",
        "--law.scale=0.2",
        "--schedule",
        "--schedule.power",
        "--objective",
        "--objective.divide-by-t",
        "--objective.time-floor=0.1",
        "--framework",
        "--framework=arm",
        "--framework.encoding",
        "--framework.order-seed=3",
    ],
)
def test_what_variants_decide_cannot_be_shared(arg):
    with pytest.raises(UserError, match="decided by the variants"):
        check_shared(["--train.steps", "5", arg])


def test_other_options_can_be_shared():
    check_shared(
        ["--train.steps", "5", "--optimizer", "muon", "--data.train=law.txt", "--log.every=2"]
    )
    check_shared(["--optim.lr=1", "--objective.divide-by-c", "law", "--data.train", "objective"])


def test_the_losses_scale_can_be_shared():
    check_shared(["--objective.no-divide-by-c"])


@pytest.mark.parametrize("suite", SUITES)
def test_a_suite_parses_and_begins_with_its_reference(suite):
    variants = parse_variants(SUITES[suite]())
    assert variants[0].name.split("+")[0] == "base"
    assert build_objective(applied(variants[0].name)) == MEANT["base"]
    assert len(variants) >= 3
    assert SUITES[suite].__doc__


def test_the_suites_share_their_trainings():
    """By hand: base, uniform, 3 diracs, 6 gaussians, 2 laplaces, 3 others, 2 + 2 with suffixes, and
    five causal ones.
    """
    keys = [content_key(applied(text), "text") for suite in SUITES.values() for text in suite()]
    assert len(SUITES) == 10
    assert len(set(keys)) == 1 + 1 + 3 + 6 + 2 + 3 + 2 + 2 + 5
