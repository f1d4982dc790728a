"""Where weights come from: every refusal says what to change, and nothing is left on disk."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from pretrained_tools import make_config, make_tokenizer, save_lm
from safetensors.torch import load_file, save_file

from bellmask.assemble import train_run
from bellmask.build import build_model
from bellmask.cli import run_command
from bellmask.config import RunConfig, load_config, override
from bellmask.errors import UserError
from bellmask.generate.fill import fill
from bellmask.generate.settings import Sampling
from bellmask.presets import tiny
from bellmask.run import load_run
from bellmask.runfolder import read_backbone
from bellmask.stage_options import StartOptions
from bellmask.start import open_start
from bellmask.transformers_library import quiet

Config = Callable[..., RunConfig]


@pytest.fixture(scope="module")
def lm(tmp_path_factory: pytest.TempPathFactory, text_file: Path) -> Path:
    return save_lm(tmp_path_factory.mktemp("lm") / "llama", "llama", text_file.read_text())


@pytest.fixture(scope="module")
def own_run(small_config: Config, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """On our own trunk."""
    folder = tmp_path_factory.mktemp("own") / "run"
    train_run(small_config("--train.steps", "1"), folder, is_quiet=True)
    return folder


@pytest.fixture(scope="module")
def cpt_run(small_config: Config, lm: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cpt") / "run"
    train_run(small_config("--start.model", str(lm), "--train.steps", "1"), folder, is_quiet=True)
    return folder


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("--start.model a --start.architecture b", "leave start.architecture out"),
        ("--start.model a --start.anneal-steps 0", r"anneal_steps=0 must be at least 1"),
        ("--start.model a --start.lora-rank -1", r"start\.lora_rank must not be negative"),
        ("--start.model a --start.lora-rank 2 --start.lora-alpha 0", "lora_alpha must be above 0"),
        ("--start.model a --start.lora-alpha 8", r"start\.lora_alpha belongs to start\.lora_rank"),
        ("--start.checkpoint best", r"start\.checkpoint needs start\.model"),
        ("--start.mask-token 5", r"start\.mask_token needs start\.model"),
        ("--start.lora-rank 4", r"start\.lora_rank needs start\.model"),
        ("--start.fresh", r"start\.fresh needs start\.model"),
        ("--start.model a --start.fresh --start.mask-token 1", r"does not go with start\.fresh"),
        ("--data.tokenizer start", r"data\.tokenizer=start needs start\.model"),
        ("--start.model a --data.tokenizer gpt2", r"comes with start\.model; leave it out"),
        ("--start.anneal-steps 5", r"it needs start\.model or start\.architecture"),
        ("--model.backbone causal_lm", r"needs start\.model or start\.architecture"),
        ("--start.architecture a --framework aoarm", "a causal LM can be mdm or arm"),
        ("--start.architecture a --framework sigma_arm", "a causal LM can be mdm or arm"),
        (
            "--start.architecture a --framework arm --start.anneal-steps 3",
            "framework arm keeps it causal",
        ),
        ("--start.architecture a --model.modulation time", "a causal LM is not told times"),
        (
            "--start.architecture a --data.pads noised --data.packing unpacked",
            r"data\.pads=noised is for our own trunk",
        ),
        ("--start.architecture a --data.tokenizer symbols:4", "symbols:4 has no BOS"),
        ("--start.architecture a --data.block-length 1", "block_length must be at least 2"),
        ("--sft.min-masks 2 --sft.train toy:copy", r"sft\.min_masks=2 must be 0 or 1"),
        ("--sft.round-to 0 --sft.train toy:copy", r"sft\.round_to=0 must be at least 1"),
        ("--sft.min-masks 1", r"need --sft\.train"),
        ("--sft.template chat", r"need --sft\.train"),
        ("--sft.train toy:copy --sft.counts piqa=3", r"those of --sft\.train tasks"),
        ("--sft.train toy:copy --framework arm", "for framework mdm, not arm"),
        (
            "--start.model a --sft.train toy:copy --sft.min-masks 1 --framework arm",
            "a causal framework has none",
        ),
        ("--sft.train toy:copy --data.mixture wikitext2=0.5", r"data\.mixture is for text"),
        ("--sft.train toy:copy --data.document-attention", r"data\.document_attention is for"),
        (
            "--sft.train toy:copy --data.pads noised --data.packing unpacked",
            r"data\.pads=noised is for text",
        ),
        (
            "--sft.train toy:copy --train.random-length-fraction 0.1",
            r"train\.random_length_fraction is for text",
        ),
    ],
)
def test_options_that_do_not_go_together(options: str, said: str) -> None:
    with pytest.raises(UserError, match=said):
        override(tiny(), options.split()).check()


def test_an_arm_can_be_fine_tuned_on_a_causal_lm(small_config: Config, lm: Path) -> None:
    options = ["--start.model", str(lm), "--sft.train", "toy:copy", "--framework", "arm"]
    assert open_start(small_config(*options)).config.model.backbone == "causal_lm"


def command(config: RunConfig, folder: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """What ``bellmask train`` says as it refuses: exit code 2, one message, nothing on disk."""
    path = folder / "given.json"
    path.write_text(json.dumps(config.to_dict()))
    code = run_command(["train", str(path), "--out", str(folder / "run")])
    said = capsys.readouterr().err
    assert code == 2, said
    assert said.startswith("error: ")
    assert len(said.strip().splitlines()) == 1
    assert not (folder / "run").exists()
    return said


ODD = {
    "opt": {"hidden_size": 16, "ffn_dim": 32, "word_embed_proj_dim": 16, "num_hidden_layers": 1},
    "bloom": {"hidden_size": 16, "n_layer": 1, "n_head": 2},
    "no such thing": {},
}


@pytest.mark.parametrize("kind", ODD)
@pytest.mark.parametrize("has_weights", [False, True])
def test_architectures_that_cannot_be_opened_are_refused_once(
    kind: str,
    has_weights: bool,
    small_config: Config,
    tmp_path: Path,
    text_file: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = tmp_path / "lm"
    folder.mkdir()
    values = {"model_type": kind, "num_attention_heads": 2, "vocab_size": 259, **ODD[kind]}
    (folder / "config.json").write_text(json.dumps(values))
    with quiet():
        make_tokenizer(text_file.read_text()).save_pretrained(folder)
    option = "--start.model" if has_weights else "--start.architecture"
    said = command(small_config(option, str(folder)), tmp_path, capsys)
    assert kind in said
    if kind != "no such thing":
        assert "cannot become a masked model" in said


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--data.block-length", "65"], r"block_length=65 is longer than .* can read: 64 at most"),
        (["--start.mask-token", "99999"], r"start.mask_token=99999: the model has ids below \d+"),
        (["--start.mask-token", "-1"], r"start.mask_token=-1: the model has ids below"),
        (["--start.checkpoint", "best"], "start.checkpoint is of run folders"),
        (["--framework", "aoarm"], "a causal LM can be mdm or arm"),
        (["--framework", "arm", "--start.anneal-steps", "4"], "framework arm keeps it causal"),
    ],
)
def test_what_a_causal_lm_cannot_do(
    options: list[str], said: str, small_config: Config, tmp_path: Path, lm: Path
) -> None:
    config = small_config("--start.model", str(lm), *options)
    with pytest.raises(UserError, match=said):
        train_run(config, tmp_path / "run", is_quiet=True)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("kind", ["gpt2", "gpt_neox"])
def test_positions_that_a_model_does_not_have(
    kind: str, small_config: Config, tmp_path: Path
) -> None:
    """GPT-2 names their number differently."""
    (tmp_path / "config.json").write_text(json.dumps(make_config(kind).to_dict()))
    for length in ("64", "65"):
        config = small_config("--start.architecture", str(tmp_path), "--data.block-length", length)
        if length == "64":
            assert open_start(config).backbone is not None
            continue
        with pytest.raises(UserError, match=r"block_length=65 is longer than .*: 64 at most"):
            open_start(config)


def test_folders_that_are_not_whole_causal_lms(
    small_config: Config, tmp_path: Path, text_file: Path
) -> None:
    for number, (break_, said) in enumerate(
        [
            (lambda f: (f / "config.json").unlink(), r"cannot load it .*; give a run folder"),
            (lambda f: (f / "model.safetensors").unlink(), "cannot load its weights"),
            (lambda f: (f / "model.safetensors").write_bytes(b"0" * 99), "cannot load its weights"),
            (drop_one_weight, "not a whole causal LM, it has no weights .*up_proj"),
            (lambda f: (f / "tokenizer.json").unlink(), "tokenizer"),
        ]
    ):
        folder = save_lm(tmp_path / str(number), "llama", text_file.read_text())
        break_(folder)  # type: ignore[no-untyped-call]
        with pytest.raises(UserError, match=said):
            train_run(small_config("--start.model", str(folder)), tmp_path / "run", is_quiet=True)
        assert not (tmp_path / "run").exists()
    for odd in ("missing", "missing/config.json"):
        with pytest.raises(UserError, match=r"is not a Hugging Face config.json .*gpt2-tiny"):
            open_start(small_config("--start.architecture", str(tmp_path / odd)))


def drop_one_weight(folder: Path) -> None:
    stored = load_file(folder / "model.safetensors")
    del stored["model.layers.1.mlp.up_proj.weight"]
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--framework", "arm"], "on our own trunk weights go only to the same framework"),
        (["--model.width", "32"], "has other --model options; leave them out"),
        (["--start.lora-rank", "2"], "are for causal LMs"),
        (["--start.anneal-steps", "9"], "are for causal LMs"),
        (["--start.mask-token", "3"], "is a run, whose mask has its row already"),
        (["--start.checkpoint", "77"], "no checkpoint '77'"),
    ],
)
def test_what_a_run_on_our_trunk_cannot_be_used_for(
    options: list[str], said: str, small_config: Config, tmp_path: Path, own_run: Path
) -> None:
    with pytest.raises(UserError, match=said):
        open_start(small_config("--start.model", str(own_run), *options))


def test_dropout_alone_may_differ_from_the_run_that_is_started_from(own_run: Path) -> None:
    config = override(RunConfig(), ["--start.model", str(own_run), "--model.dropout", "0.3"])
    found = open_start(config).config.model
    assert (found.width, found.dropout) == (16, 0.3)


def test_the_config_of_a_run_on_a_causal_lm_round_trips(cpt_run: Path, lm: Path) -> None:
    config = load_config(cpt_run / "config.json")
    assert (config.model.backbone, config.data.tokenizer) == ("causal_lm", "start")
    assert config.start.model == str(lm)
    assert json.loads((cpt_run / "config.json").read_text()) == config.to_dict()
    assert open_start(config).config == config  # nothing is left to fill in
    backbone = read_backbone(cpt_run)
    assert backbone == open_start(config).backbone
    assert backbone is not None
    assert backbone.language_model["model_type"] == "llama"
    assert str(lm) not in (cpt_run / "backbone.json").read_text()
    assert backbone.language_model["pad_token_id"] is None


def test_keys_of_runs_without_a_start_are_what_they_were() -> None:
    """As the version before these options named its run folders."""
    assert RunConfig().fingerprint() == "d202a769"
    arm = override(RunConfig(), "--framework arm --optim.lr 0.002".split())
    assert arm.fingerprint() == "f6bd944a"
    used = replace(RunConfig(), start=StartOptions(model="a"))
    fresh = replace(RunConfig(), start=StartOptions(model="a", fresh=True))
    assert len({RunConfig().fingerprint(), used.fingerprint(), fresh.fingerprint()}) == 3


def test_fresh_weights_are_those_of_the_seed_with_the_starts_tokenizer(
    small_config: Config, lm: Path
) -> None:
    def build(*options: str) -> tuple[Any, Any]:
        start = open_start(small_config("--start.model", str(lm), *options))
        assert start.tokenizer is not None
        model = build_model(start.config, start.tokenizer.num_tokens, start.backbone, start.fill)
        return start.tokenizer, torch.cat([p.detach().flatten() for p in model.parameters()])

    tokenizer, loaded = build()
    same, fresh = build("--start.fresh")
    assert same.fingerprint == tokenizer.fingerprint
    assert loaded.shape == fresh.shape
    assert not torch.equal(loaded, fresh)
    assert torch.equal(build("--start.fresh")[1], fresh)
    assert not torch.equal(build("--start.fresh", "--train.seed", "2")[1], fresh)


def test_a_canvas_whose_first_token_is_not_given_is_refused(cpt_run: Path) -> None:
    run = load_run(cpt_run)
    canvas = torch.full((2, 8), run.tokenizer.mask_id)
    with pytest.raises(UserError, match=r"the first one must be given \(BOS\)"):
        fill(run.model, canvas, run.framework, Sampling(), mask_id=run.tokenizer.mask_id)
    (text,) = run.sample(length=8, steps=4)
    assert isinstance(text, str)
