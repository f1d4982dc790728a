"""Where weights come from: every refusal names what to change, and nothing is left on disk."""

from __future__ import annotations

import json

import pytest
import torch
from commands import refuses
from pretrained_tools import make_tokenizer, save_lm
from safetensors.torch import load_file, save_file

from bellmask.config.config import override
from bellmask.config.presets import tiny
from bellmask.train.setup import open_start
from bellmask.train.train_run import train_run
from bellmask.utils.errors import UserError
from bellmask.utils.libraries import quiet


@pytest.fixture(scope="module")
def lm(tmp_path_factory, text_file):
    return save_lm(tmp_path_factory.mktemp("lm") / "llama", "llama", text_file.read_text())


MODEL, ARCHITECTURE, SFT = "--start.model a", "--start.architecture a", "--sft.train toy:copy"
UNPACKED = "--data.pads noised --data.packing unpacked"
REFUSED = [
    (f"{MODEL} --start.architecture b", "start.architecture"),
    (f"{MODEL} --start.anneal-steps 0", "anneal_steps=0"),
    (f"{MODEL} --start.lora-rank -1", "start.lora_rank=-1"),
    (f"{MODEL} --start.lora-rank 2 --start.lora-alpha 0", "start.lora_alpha=0.0"),
    (f"{MODEL} --start.lora-alpha 8", "start.lora_alpha=8.0 needs"),
    ("--start.checkpoint best", "start.checkpoint=best needs"),
    ("--start.mask-token 5", "start.mask_token=5 needs"),
    ("--start.lora-rank 4", "start.lora_rank=4 needs"),
    ("--start.fresh", "start.fresh=True needs"),
    (f"{MODEL} --start.fresh --start.mask-token 1", "start.fresh"),
    ("--data.tokenizer start", "data.tokenizer=start"),
    (f"{MODEL} --data.tokenizer gpt2", "comes with start.model"),
    ("--start.anneal-steps 5", "needs start.model or start.architecture"),
    ("--model.backbone causal_lm", "needs start.model or start.architecture"),
    (f"{ARCHITECTURE} --framework aoarm", "mdm or arm"),
    (f"{ARCHITECTURE} --framework arm --start.anneal-steps 3", "framework.name=mdm"),
    (f"{ARCHITECTURE} --model.modulation time", "times"),
    (f"{ARCHITECTURE} {UNPACKED}", "data.pads=noised"),
    (f"{ARCHITECTURE} --data.tokenizer symbols:4", "symbols:4"),
    (f"{ARCHITECTURE} --data.block-length 1", "block_length must be at least 2"),
    (f"{SFT} --sft.min-masks 2", "sft.min_masks=2"),
    (f"{SFT} --sft.round-to 0", "sft.round_to=0"),
    ("--sft.min-masks 1", "sft.train"),
    (f"{SFT} --sft.counts piqa=3", "--sft.train tasks"),
    (f"{SFT} --framework arm", "framework mdm, not arm"),
    (f"{SFT} {MODEL} --sft.min-masks 1 --framework arm", "sft.min_masks=1"),
    (f"{SFT} --data.mixture wikitext2=0.5", "data.mixture"),
    (f"{SFT} --data.document-attention", "data.document_attention"),
    (f"{SFT} {UNPACKED}", "data.pads=noised"),
    (f"{SFT} --train.random-length-fraction 0.1", "train.random_length_fraction"),
]


def test_options_that_do_not_go_together():
    for options, named in REFUSED:
        with pytest.raises(UserError) as error:
            override(tiny(), options.split()).check()
        assert named in str(error.value), options


def refuses_config(config, folder, names):
    """``bellmask train`` refuses it and writes nothing."""
    path = folder / "given.json"
    path.write_text(json.dumps(config.to_dict()))
    refuses("train", path, "--out", folder / "run", names=names)
    assert not (folder / "run").exists()


OPT = {"hidden_size": 16, "ffn_dim": 32, "word_embed_proj_dim": 16, "num_hidden_layers": 1}


@pytest.mark.parametrize("option", ["--start.model", "--start.architecture"])
@pytest.mark.parametrize(("kind", "sizes"), [("opt", OPT), ("no such thing", {})])
def test_architectures_that_cannot_be_opened(
    kind, sizes, option, small_config, tmp_path, text_file
):
    values = {"model_type": kind, "num_attention_heads": 2, "vocab_size": 259, **sizes}
    (tmp_path / "config.json").write_text(json.dumps(values))
    with quiet():
        make_tokenizer(text_file.read_text()).save_pretrained(tmp_path)
    refuses_config(small_config(option, str(tmp_path)), tmp_path, kind)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ("--data.block-length 65", "block_length=65"),
        ("--start.mask-token 99999", "start.mask_token=99999"),
        ("--start.mask-token -1", "start.mask_token=-1"),
        ("--start.checkpoint best", "start.checkpoint"),
    ],
)
def test_what_a_causal_lm_cannot_do(options, named, small_config, tmp_path, lm):
    refuses_config(small_config("--start.model", str(lm), *options.split()), tmp_path, named)


def drop_one_weight(folder):
    stored = load_file(folder / "model.safetensors")
    del stored["model.layers.1.mlp.up_proj.weight"]
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("break_it", "named"),
    [
        (lambda f: (f / "config.json").unlink(), "run folder"),
        (lambda f: (f / "model.safetensors").write_bytes(b"0" * 99), "weights"),
        (drop_one_weight, "up_proj"),
        (lambda f: (f / "tokenizer.json").unlink(), "tokenizer"),
    ],
)
def test_folders_that_are_not_whole_causal_lms(break_it, named, small_config, tmp_path, text_file):
    folder = save_lm(tmp_path / "lm", "llama", text_file.read_text())
    break_it(folder)
    with pytest.raises(UserError, match=named):
        train_run(small_config("--start.model", str(folder)), tmp_path / "run", is_quiet=True)
    assert not (tmp_path / "run").exists()
    with pytest.raises(UserError, match="missing"):
        open_start(small_config("--start.architecture", str(tmp_path / "missing")))


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ("--framework arm", "framework"),
        ("--model.width 32", "--model"),
        ("--start.lora-rank 2", "causal LMs"),
        ("--start.anneal-steps 9", "causal LMs"),
        ("--start.mask-token 3", "mask"),
        ("--start.checkpoint 77", "'77'"),
    ],
)
def test_what_a_run_on_our_trunk_cannot_be_used_for(options, named, small_config, zoo):
    sizes = "--model.width 8 --model.num-layers 2 --model.num-heads 2"
    config = f"--start.model {zoo / 'base'} {sizes} {options}"
    with pytest.raises(UserError, match=named):
        open_start(small_config(*config.split()))


def test_fresh_weights_are_those_of_the_seed_with_the_starts_tokenizer(small_config, lm):
    def build(*options):
        start = open_start(small_config("--start.model", str(lm), *options))
        model = start.build_model(start.tokenizer)
        return start.tokenizer, torch.cat([p.detach().flatten() for p in model.parameters()])

    tokenizer, loaded = build()
    same, fresh = build("--start.fresh")
    assert same.fingerprint == tokenizer.fingerprint
    assert loaded.shape == fresh.shape
    assert not torch.equal(loaded, fresh)
    assert torch.equal(build("--start.fresh")[1], fresh)
    assert not torch.equal(build("--start.fresh", "--train.seed", "2")[1], fresh)
