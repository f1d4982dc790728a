from __future__ import annotations

import dataclasses
import inspect
import itertools
import json
import math
import re
import typing
from pathlib import Path

import pytest
import torch

import bellmask
from bellmask.config.command_line import families
from bellmask.config.config import (
    RunConfig,
    is_free_option,
    load_config,
    override,
    override_with_file,
    run_options,
)
from bellmask.config.options import FrameworkOptions, Interval, RunProgress
from bellmask.config.presets import PRESETS, preset, tiny
from bellmask.data.corpora import CORPORA
from bellmask.data.tokenizers import ByteTokenizer
from bellmask.diffusion.objectives import ChainRule
from bellmask.model.transformer import Denoiser, count_parameters
from bellmask.storage.build import build_framework, build_objective, build_rules
from bellmask.train.memory import count_tokens


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_parses_round_trips_and_builds(name, tmp_path):
    config = preset(name).check()
    (tmp_path / "config.json").write_text(json.dumps(config.to_dict()))
    read = load_config(tmp_path / "config.json")
    assert (read, read.fingerprint()) == (config, config.fingerprint())
    assert build_objective(config).normalizer > 0
    if config.start == RunConfig().start:  # else its network is that of the start
        num_tokens = count_tokens(config)
        with torch.device("meta"):
            model = Denoiser(config.model, num_tokens)
        assert count_parameters(model) > 1e5


def test_listed_presets_are_described_and_stand_for_all_others():
    for name in families():
        assert inspect.isfunction(PRESETS[name])
        assert PRESETS[name].__doc__
    assert {name for name in PRESETS if not name.startswith(tuple(families()))} == {"fast"}


PAPER = {  # App. C.1
    "lm1b": "data.train=lm1b model.num_layers=12 model.width=768 model.num_heads=12 "
    "model.modulation=constant model.local_conv=0 model.dropout=0.1 optim.weight_decay=0.0 "
    "data.block_length=128 validation.blocks=0 "
    "data.tokenizer=bert-base-uncased data.packing=packed optim.name=adamw optim.lr=0.0003 "
    "optim.warmup_steps=2500 optim.curve=constant optim.ema=0.9999 optim.clip=1.0 "
    "train.batch_size=512 train.steps=1000000",
    "lm1b_unpacked": "data.packing=unpacked data.pads=noised",
    "owt": "data.train=openwebtext model.num_layers=12 model.width=768 model.num_heads=12 "
    "model.modulation=constant model.local_conv=0 model.dropout=0.1 "
    "data.tokenizer=gpt2 data.block_length=1024 data.packing=packed validation.blocks=8192 "
    "optim.name=adamw optim.lr=0.0003 optim.warmup_steps=2500 optim.curve=cosine "
    "optim.weight_decay=0.03 train.batch_size=512 train.steps=1000000",
    "cpt_gpt2_large": "start.model=openai-community/gpt2-large start.anneal_steps=10000 "
    "data.train=fineweb_edu data.block_length=1024 optim.lr=0.0003 optim.warmup_steps=2000 "
    "train.batch_size=256 train.steps=100000 start.mask_token=10541 optim.curve=cosine "
    "start.lora_rank=0 validation.blocks=8192 optim.ema=0.0",
    "sft_tasks": "start.model=runs/cpt_gpt2_large start.checkpoint=100000 sft.train=tasks "
    "sft.template=plain start.anneal_steps=1 start.lora_rank=0 optim.curve=cosine "
    "optim.warmup_steps=500 train.batch_size=128 train.steps=10000 validation.sample_steps=64 "
    "checkpoint.keep_steps=[2000]",
    "sft_sharegpt": "start.model=runs/sft_tasks start.checkpoint=2000 optim.lr=0.0001 "
    "train.steps=10000 train.batch_size=128 data.block_length=1024 sft.min_masks=0 "
    "sft.turns=first sft.template=vicuna start.anneal_steps=1 validation.sample_steps=64",
}


@pytest.mark.parametrize("name", PAPER)
def test_the_papers_presets_say_what_the_paper_says(name):
    flat = preset(name).flat()
    told = dict(pair.split("=") for pair in PAPER[name].split())
    assert {option: str(flat[option]) for option in told} == told
    bell, base = preset(f"{name}_bell"), preset(f"{name}_base")
    assert (bell.objective.name, bell.law.name) == ("bell", "gaussian")
    assert (base.objective.name, base.law.name) == ("nelbo", "uniform")
    assert {(c.schedule.name, c.train.stratified) for c in (bell, base)} == {("linear", True)}
    law = bell.resolved().law
    assert (law.mu, law.scale, law.uniform_share) == (0.5, 0.1, None)
    same = {"objective": bell.objective, "law": bell.law}
    same |= {"start": bell.start} if name.startswith("sft") else {}
    assert dataclasses.replace(base, **same) == bell
    assert preset(name) == bell


def test_the_papers_corpora_have_the_splits_it_names():
    """App. C.1; LM1B is validated on its test split, as in the work that the paper follows."""
    found = {name: CORPORA[name] for name in ("lm1b", "openwebtext", "fineweb_edu")}
    assert [found[name].holdout for name in found] == [0, 100_000, 0]
    assert [set(found[name].splits) for name in found] == [{"train", "valid"}, {"train"}, {"train"}]
    assert found["lm1b"].splits["valid"].split == "test"
    assert found["fineweb_edu"].splits["train"].config == "sample-100BT"


def test_pads_of_unpacked_sentences_are_masked_and_attended_unless_told_otherwise():
    ignored = preset("lm1b_unpacked").with_options({"data.pads": "ignored"})
    configs = {preset("lm1b_unpacked"): True, ignored: False, preset("owt"): False}
    for config, is_noised in configs.items():
        assert build_framework(config).noises_pads == is_noised
        assert build_rules(config.data, ByteTokenizer()).sees_pads == is_noised


@pytest.mark.parametrize(("name", "before"), [("tasks", "cpt_gpt2_large"), ("tiny", "cpt_tiny")])
def test_the_rows_of_table_4_start_where_they_say(name, before):
    found = {
        (cpt, sft): preset(f"sft_{name}_{cpt}_{sft}")
        for cpt in ("base", "bell")
        for sft in ("base", "bell")
    }
    for (cpt, sft), config in found.items():
        assert preset(config.start.model.removeprefix("runs/")) == preset(f"{before}_{cpt}")
        assert config.objective.name == {"base": "nelbo", "bell": "bell"}[sft]
    assert found["bell", "bell"] == preset(f"sft_{name}")
    assert found["base", "base"] == preset(f"sft_{name}_base")


def test_every_later_stage_starts_from_a_preset_of_its_own_objective():
    for name in ("sft", "sft_7b", "sft_sharegpt"):
        for kind in ("base", "bell"):
            config = preset(f"{name}_{kind}")
            before = preset(config.start.model.removeprefix("runs/"))
            assert before.objective == config.objective


@pytest.mark.parametrize("stage", ["cpt", "sft"])
def test_presets_for_ones_own_model_are_gentler_than_the_tiny_ones(stage):
    tiny_one, small, large = (preset(f"{stage}{size}") for size in ("_tiny", "", "_7b"))
    assert tiny_one.optim.lr > 5 * small.optim.lr > 5 * large.optim.lr
    assert small.optim.warmup_steps <= large.optim.warmup_steps
    for config in (small, large):
        assert config.optim.ema == 0
        assert config.data.block_length >= 512
        assert 0 < config.optim.warmup_steps < config.train.steps / 4


def test_precedence_is_preset_then_file_then_command_line(tmp_path):
    for name, text in (
        ("o.json", '{"optim": {"lr": 0.25, "betas": [0.8, 0.9]}, "train": {"steps": 7}}'),
        ("o.toml", "[optim]\nlr = 0.25\nbetas = [0.8, 0.9]\n[train]\nsteps = 7\n"),
    ):
        (tmp_path / name).write_text(text)
        config = override_with_file(tiny(), tmp_path / name)
        config = override(config, ["--train.steps", "9"])
        assert config.optim.lr == 0.25
        assert config.optim.betas == (0.8, 0.9)
        assert config.train.steps == 9
        assert config.train.batch_size == tiny().train.batch_size


def test_a_new_law_does_not_inherit_the_old_ones_parameters():
    narrow = override(tiny(), ["--law.mu", "0.4", "--law.scale", "0.02"])
    assert narrow.law.scale == 0.02
    assert override(narrow, ["--law", "laplace"]).law.scale is None
    assert override(narrow, ["--law", "laplace", "--law.scale", "0.3"]).law.scale == 0.3
    assert override(narrow, ["--law", "gaussian"]).law.scale == 0.02
    assert override(narrow, ["--law", "uniform"]).check().law.mu is None


CAUSAL = ("arm", "sigma_arm", "aoarm")
PAPERS_RUNS = ("lm1b", "lm1b_unpacked", "owt")


@pytest.mark.parametrize("name", CAUSAL)
def test_causal_presets_are_the_base_with_another_framework(name):
    for family in ("tiny", "small", *PAPERS_RUNS):
        base, config = preset(f"{family}_base"), preset(f"{family}_{name}")
        assert config.data.pads == "ignored"
        assert dataclasses.replace(config, framework=base.framework, data=base.data) == base
        assert dataclasses.replace(config.data, pads=base.data.pads) == base.data
        seed = config.train.seed if name == "sigma_arm" else None
        expected = FrameworkOptions(name, "literal" if name == "aoarm" else "source", seed)
        assert config.resolved().framework == expected
        assert build_framework(config).is_causal
        assert isinstance(build_objective(config), ChainRule)


@pytest.mark.parametrize("name", CAUSAL)
def test_a_causal_framework_resets_what_belongs_to_times(name):
    odd = override(tiny(), "--law laplace --law.mu 0.3 --schedule cosine".split()).check()
    for start in (tiny(), odd, preset("tiny_base")):
        config = override(start, ["--framework", name]).check()
        assert config == preset(f"tiny_{name}")
    assert tiny().with_options({"framework.name": name}) == preset(f"tiny_{name}")
    assert override(tiny(), [f"--framework={name}"]) == preset(f"tiny_{name}")


def test_a_new_framework_does_not_inherit_the_old_ones_encoding_and_order():
    odd = "--framework sigma_arm --framework.encoding crossed --framework.order-seed 5"
    start = override(tiny(), odd.split()).check()
    assert start.framework == FrameworkOptions("sigma_arm", "crossed", 5)
    assert override(start, ["--framework", "aoarm"]).check() == preset("tiny_aoarm")
    assert override(start, ["--framework", "mdm"]).check() == preset("tiny_base")
    assert override(start, ["--framework", "sigma_arm"]) == start
    kept = override(start, "--framework arm --framework.encoding literal".split()).check()
    assert kept.framework == FrameworkOptions("arm", "literal", None)


def test_times_beside_a_causal_framework_are_not_dropped_in_silence():
    timeless = "--framework arm --law uniform --schedule linear --objective nelbo"
    assert override(tiny(), timeless.split()).check() == preset("tiny_arm")
    for args in ("--law gaussian", "--law.mu 0.4", "--schedule cosine", "--objective bell"):
        with pytest.raises(ValueError, match=r"framework arm.*--law"):
            override(preset("tiny_arm"), args.split()).check()


def test_runs_of_other_frameworks_and_orders_have_other_folders():
    start = preset("tiny_sigma_arm")
    configs = [preset("tiny_base"), *(preset(f"tiny_{name}") for name in CAUSAL)]
    configs += [start.with_options({"framework.order_seed": 2})]
    assert len({config.fingerprint() for config in configs}) == 5
    default = start.with_options({"framework.order_seed": start.train.seed})
    assert default.fingerprint() == start.fingerprint()


@pytest.mark.parametrize(
    ("args", "names"),
    [
        ("--schedule cosin", "did you mean 'cosine'?"),
        ("--optim.curve cosin", "did you mean 'cosine'?"),
        ("--log.trackers wandb tensorbord", "did you mean 'tensorboard'?"),
        ("--framework arm --framework.encoding both", "--framework.encoding 'both'"),
        ("--train.steps many", "--train.steps"),
        ("--train.steps 0 --model.dropout 2", "model.dropout=2.0"),  # all problems at once
        ("--train.steps 0 --model.dropout 2", "train.steps=0"),
        ("--optim.betas 0.9 1.5", "optim.betas"),
        ("--objective nelbo --law dirac", "dirac"),
        ("--objective nelbo --law progress", "law progress is for objective bell, not nelbo"),
        ("--objective importance --law progress", "objective bell, not importance"),
        ("--framework arm --law progress", "framework arm has no times"),
        ("--law band --law.low 0.9", "law.low=0.9 must be below law.high=0.8"),
        ("--law gaussian --law.low 0.1", "law.low"),
        ("--law progress --law.uniform-share 0.1", "law.uniform_share"),
        ("--objective importance --schedule cosine", "schedule"),
        ("--objective.divide-by-t", "divide_by_t"),
        ("--law dirac --law.mu 0", "law.mu"),
        ("--law uniform --law.mu 0.5", "mu"),
        ("--schedule.power 3", "schedule.power"),
        ("--model.width 65", "model.num_heads=4"),
        ("--train.microbatch-size 5", "train.microbatch_size=5"),
        ("--validation.every sometimes", "validation.every"),
        ("--train.device tpu", "train.device"),
        ("--data.document-attention --data.packing unpacked", "data.document_attention"),
        ("--data.remainder keep --data.packing unpacked", "data.remainder"),
        ("--framework.encoding crossed", "framework.encoding"),
        ("--framework.order-seed 3", "framework.order_seed"),
        ("--framework arm --model.modulation time", "model.modulation"),
        ("--framework aoarm --data.document-attention", "data.document_attention"),
        ("--framework aoarm --model.local-conv 5", "model.local_conv"),
        ("--model.local-conv 4", "model.local_conv"),
        ("--framework aoarm --data.packing unpacked --data.pads noised", "data.pads=noised"),
        ("--objective nelbo --law.scale 0.01", "objective bell"),  # too narrow for the NELBO
    ],
)
def test_bad_options_are_refused(args, names):
    with pytest.raises(ValueError, match=r"\w") as caught:
        build_objective(override(tiny(), args.split()).check())
    assert names in re.sub(r"\s+", " ", str(caught.value))


@pytest.mark.parametrize(
    ("content", "names"),
    [
        ("{", r"c\.json"),
        ("[1]", "sections"),
        ('{"optim": {"lrr": 1}}', "optim.lrr.*optim.lr"),
        ('{"law": {"name": "gauss"}}', "'gaussian'"),
        (None, r"c\.json"),
    ],
)
def test_bad_files_are_refused_like_bad_commands(tmp_path, content, names):
    if content is not None:
        (tmp_path / "c.json").write_text(content)
    with pytest.raises(ValueError, match=names):
        override_with_file(tiny(), tmp_path / "c.json")


OTHER_VALUES = {bool: True, int: 7, float: 0.25, str: "other"}


def test_every_option_survives_being_written_and_read(tmp_path):
    """Each option at values that are not its default, one of every section at a time."""
    start, path = RunConfig(), tmp_path / "config.json"
    sections = [field.name for field in dataclasses.fields(RunConfig)]
    for changes in itertools.zip_longest(*(other_parts(getattr(start, s)) for s in sections)):
        changed = {name: part for name, part in zip(sections, changes, strict=True) if part}
        config = dataclasses.replace(start, **changed)
        path.write_text(json.dumps(config.to_dict()))
        assert override_with_file(RunConfig(), path) == config


def other_parts(part):
    """A section with one option changed, for every option and choice."""
    hints, found = typing.get_type_hints(type(part)), []
    for option in dataclasses.fields(part):
        value = getattr(part, option.name)
        kinds = typing.get_args(hints[option.name]) or (hints[option.name],)
        if typing.get_origin(hints[option.name]) is typing.Literal:
            choices = [k for k in kinds if k != value]
        elif typing.get_origin(hints[option.name]) is tuple:
            choices = [(0.5, 0.25)] if option.name == "betas" else []
        elif typing.get_origin(kinds[0]) is typing.Literal:  # a choice that may be None
            choices = list(typing.get_args(kinds[0]))
        else:
            choices = [True, False] if bool in kinds else [OTHER_VALUES[kinds[0]]]
        found += [dataclasses.replace(part, **{option.name: choice}) for choice in choices]
    return found


def test_every_option_is_read_somewhere():
    """An option nobody reads is a lie to the user."""
    package = Path(bellmask.__file__).parent
    paths = [
        p for p in package.rglob("*.py") if not re.search("options|checks|preset|resume", p.stem)
    ]
    code = "\n".join(path.read_text() for path in paths)
    unread = [
        name for name in RunConfig().flat() if not re.search(rf"\.{name.split('.')[1]}\b", code)
    ]
    assert not unread


def test_intervals_know_short_forms_and_when_they_are_due():
    for text, amount, unit in (
        ("500", 500, "steps"),
        ("37 step", 37, "steps"),
        ("20M tokens", 20_000_000, "tokens"),
        ("5 tok", 5, "tokens"),
        ("1.5k", 1500, "steps"),
        ("2.5min", 2.5, "minutes"),
        ("1 minute", 1, "minutes"),
        ("never", 0, "steps"),
    ):
        assert Interval.parse(text) == Interval(amount, unit)
    for text in ("", "0", "-5", "1.5 steps", "5 bananas", "often", "5 5"):
        with pytest.raises(ValueError, match="interval"):
            Interval.parse(text)
    steps = [RunProgress(step, 40 * step + 10, 0.7 * step) for step in range(6)]
    for text, due in {"2": [2, 4], "100 tokens": [3, 5], "2 min": [3], "never": []}.items():
        every = Interval.parse(text)
        found = [
            now.steps for before, now in itertools.pairwise(steps) if every.is_due(before, now)
        ]
        assert found == due, text


def test_options_say_what_they_affect():
    """Keys of run folders depend on the result alone, keys of comparisons on records too."""
    plain = RunConfig()
    for options, affects in {
        "optim.lr=0.002": "result",
        "log.every=7": "records",
        "validation.every=70 steps": "records",
        "train.device=cpu": "speed",
        "scale.recompute=block": "speed",
        "checkpoint.every=70 steps": "nothing",
        "data.cache=elsewhere": "nothing",
    }.items():
        name, value = options.split("=")
        changed = plain.with_options({name: value})
        assert (changed.fingerprint() != plain.fingerprint()) == (affects == "result"), name
        assert is_free_option(name) == (affects != "result"), name
        own = [c.key_options("result", "records") for c in (plain, changed)]
        assert (own[0] != own[1]) == (affects in ("result", "records")), name


def test_every_range_is_kept_to():
    """Beside each end of the range that an option's marks allow."""
    for path, option in run_options().items():
        marks, step = option.marks, 1 if isinstance(option.default, int) else 0.001
        wrong = [marks.at_least - step, marks.at_most + step, marks.above, marks.below, math.nan]
        for value in wrong if isinstance(option.default, float) else wrong[:2]:
            if value != -math.inf and value != math.inf:
                config = RunConfig()
                section, name = path.split(".")
                part = dataclasses.replace(getattr(config, section), **{name: value})
                with pytest.raises(ValueError, match=f"{path}={value}"):
                    dataclasses.replace(config, **{section: part}).check()
