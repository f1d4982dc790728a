"""Where weights come from: refusals, and whole runs that begin with a causal LM or a run."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from commands import refuses
from fault_tools import assert_same, checkpoints, tensors_of
from pretrained_tools import eager_states, make_tokenizer, save_lm
from safetensors.torch import load_file, save_file

from bellmask.config.config import load_config, override
from bellmask.config.presets import tiny
from bellmask.evaluate.likelihood import evaluate
from bellmask.generate.settings import Sampling
from bellmask.run import load_run
from bellmask.storage.run_folder import read_metrics
from bellmask.train.setup import open_start
from bellmask.train.train_run import train_run
from bellmask.utils.errors import UserError
from bellmask.utils.libraries import quiet

ANNEALED = "--start.anneal-steps 6 --log.every 1 --optim.ema 0.5 --model.dropout 0".split()


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
    (f"{MODEL} --data.tokenizer gpt2", "start.model provides"),
    ("--start.anneal-steps 5", "needs start.model or start.architecture"),
    ("--model.backbone causal_lm", "needs start.model or start.architecture"),
    (f"{ARCHITECTURE} --framework aoarm", "mdm or arm"),
    (f"{ARCHITECTURE} --framework arm --start.anneal-steps 3", "framework.name=mdm"),
    (f"{ARCHITECTURE} --model.modulation time", "times"),
    (f"{ARCHITECTURE} {UNPACKED}", "data.pads=noised"),
    (f"{ARCHITECTURE} --data.tokenizer symbols:4", "symbols:4"),
    (f"{ARCHITECTURE} --data.block-length 1", "block_length of at least 2"),
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


OPT = {"hidden_size": 16, "ffn_dim": 32, "word_embed_proj_dim": 16, "num_hidden_layers": 1}


@pytest.mark.parametrize("option", ["--start.model", "--start.architecture"])
@pytest.mark.parametrize(("kind", "sizes"), [("opt", OPT), ("no such thing", {})])
def test_architectures_that_cannot_be_opened(
    kind, sizes, option, small_config, tmp_path, text_file
):
    """``bellmask train`` refuses them and writes nothing."""
    values = {"model_type": kind, "num_attention_heads": 2, "vocab_size": 259, **sizes}
    (tmp_path / "config.json").write_text(json.dumps(values))
    with quiet():
        make_tokenizer(text_file.read_text()).save_pretrained(tmp_path)
    path = tmp_path / "given.json"
    path.write_text(json.dumps(small_config(option, str(tmp_path)).to_dict()))
    refuses("train", path, "--out", tmp_path / "run", names=kind)
    assert not (tmp_path / "run").exists()


def build(config):
    """The tokenizer, and the network as it is before the first step."""
    start = open_start(config)
    return start.tokenizer, start.build_model(start.tokenizer).eval()


OURS = "--model.width 8 --model.num-layers 2 --model.num-heads 2"


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ("--start.model LM --data.block-length 65", "block_length=65"),
        ("--start.model LM --start.mask-token 99999", "start.mask_token=99999"),
        ("--start.model LM --start.mask-token -1", "start.mask_token=-1"),
        ("--start.model LM --start.checkpoint best", "start.checkpoint"),
        ("--start.architecture missing", "missing"),
        (f"--start.model BASE {OURS} --framework arm", "pretrain with --start.architecture"),
        ("--start.model BASE --model.width 32", "--model"),
        (f"--start.model BASE {OURS} --start.lora-rank 2", "causal LMs"),
        ("--start.model LM --framework arm --model.local-conv 3", "model.local_conv"),
        (f"--start.model BASE {OURS} --start.anneal-steps 9", "causal LMs"),
        (f"--start.model BASE {OURS} --start.mask-token 3", "mask"),
        (f"--start.model BASE {OURS} --start.checkpoint 77", "'77'"),
    ],
)
def test_what_a_start_cannot_be_used_for(options, named, small_config, lm, zoo):
    options = options.replace("LM", str(lm)).replace("BASE", str(zoo / "base"))
    config = small_config(*options.split())
    with pytest.raises(UserError, match=named):
        build(config)


def test_a_causal_lm_in_place_of_a_run_is_told_which_preset_adapts_it(lm):
    with pytest.raises(UserError, match=f"cpt --start.model {lm}, or bellmask import {lm} "):
        load_run(lm)


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
def test_folders_that_are_not_whole_causal_lms(break_it, named, small_config, tmp_path, lm):
    folder = shutil.copytree(lm, tmp_path / "lm")
    break_it(folder)
    with pytest.raises(UserError, match=named):
        train_run(small_config("--start.model", str(folder)), tmp_path / "run", is_quiet=True)
    assert not (tmp_path / "run").exists()


def test_fresh_weights_are_those_of_the_seed_with_the_starts_tokenizer(small_config, lm):
    def flat(*options):
        tokenizer, model = build(small_config("--start.model", str(lm), *options))
        return tokenizer, torch.cat([p.detach().flatten() for p in model.parameters()])

    tokenizer, loaded = flat()
    same, fresh = flat("--start.fresh")
    assert same.fingerprint == tokenizer.fingerprint
    assert loaded.shape == fresh.shape
    assert not torch.equal(loaded, fresh)
    assert torch.equal(flat("--start.fresh")[1], fresh)
    assert not torch.equal(flat("--start.fresh", "--train.seed", "2")[1], fresh)


# --- whole runs


def last_nll(folder):
    lines = read_metrics(folder / "metrics.jsonl")
    return [line["nll"] for line in lines if line["kind"] == "validation"][-1]


def test_resuming_in_the_middle_of_annealing_is_exact(small_config, tmp_path, text_file):
    """Also where the causal LM that the run began with is no longer there."""
    folder = save_lm(tmp_path / "lm", "llama", text_file.read_text())
    options = [*ANNEALED, "--start.model", str(folder), "--checkpoint.keep-last", "1"]
    whole = small_config(*options, "--train.steps", "8")
    train_run(whole, tmp_path / "whole", is_quiet=True)
    train_run(small_config(*options, "--train.steps", "3"), tmp_path / "parts", is_quiet=True)
    shutil.rmtree(folder)
    assert train_run(whole, tmp_path / "parts", resume="yes", is_quiet=True).step == 8
    assert_same(tmp_path / "parts", tmp_path / "whole")


def test_validation_has_full_attention_while_training_anneals(small_config, tmp_path, lm):
    """The recorded NLL again from the checkpoint, by our forward and by eager dense attention."""
    options = "--start.anneal-steps 1000 --train.steps 2 --validation.every 2 --model.dropout 0"
    config = small_config("--start.model", str(lm), *options.split())
    train_run(config, tmp_path / "run", is_quiet=True)
    run, written = load_run(tmp_path / "run"), last_nll(tmp_path / "run")
    model, blocks = run.model, run.blocks()[1].spread(32)
    assert run.evaluate(blocks).nll == pytest.approx(written, rel=1e-6)
    head = model.language_model.get_output_embeddings()

    def dense(x, rows, targets, **_):
        is_seen = torch.ones(1, 1, x.shape[1], x.shape[1], dtype=torch.bool)
        x = torch.where(x == run.tokenizer.mask_id, model.num_logits, x)
        log_p = head(eager_states(model, x, is_seen)).log_softmax(-1)
        return -log_p[:, :-1].flatten(0, 1)[rows - rows // x.shape[1] - 1, targets]

    found = evaluate(dense, blocks, mask_id=run.tokenizer.mask_id)
    assert found.nll == pytest.approx(written, rel=1e-5)
    assert found.length_B.tolist() == [15] * 32  # position 0 is given
    assert found.count_BR.max() == 15


def test_the_masks_row_is_the_mean_or_a_tokens_copy(small_config, lm):
    stored = load_file(lm / "model.safetensors")["model.embed_tokens.weight"]
    mean = build(small_config("--start.model", str(lm)))[1].mask_row
    torch.testing.assert_close(mean.detach(), stored.mean(0), rtol=0, atol=1e-6)
    config = small_config("--start.model", str(lm), "--start.mask-token", "41")
    assert torch.equal(build(config)[1].mask_row.detach(), stored[41])


@pytest.mark.parametrize("kind", ["gpt2", "qwen3", "gpt_neox"])
def test_a_tokenizer_with_its_own_mask_and_pad_keeps_each_tokens_rows(
    small_config, tmp_path, text_file, kind
):
    """Ids are renumbered so that the mask is last; probabilities follow their tokens."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    specials = {"mask_token": "<mask>", "pad_token": "<pad>"}
    folder = save_lm(tmp_path / "lm", kind, text_file.read_text(), **specials)
    config = small_config("--start.model", str(folder), "--framework", "arm")
    tokenizer, their_tokenizer = open_start(config).tokenizer, AutoTokenizer.from_pretrained(folder)
    text = "the old dog sat on the moon."
    theirs = their_tokenizer(text, return_tensors="pt").input_ids
    ours = torch.from_numpy(tokenizer.encode(text))[None]
    assert ours.shape == theirs.shape
    with torch.no_grad():
        logits = AutoModelForCausalLM.from_pretrained(folder)(theirs).logits[0, :-1]
        found = build(config)[1](ours, torch.arange(1, ours.shape[1]))
    assert found.shape[1] == logits.shape[1] - 1 == tokenizer.mask_id
    kept = [i for i in range(logits.shape[1]) if i != their_tokenizer.mask_token_id]
    last = kept.pop()  # the mask's place is taken by what was the last token
    kept.insert(their_tokenizer.mask_token_id, last)
    torch.testing.assert_close(found, logits[:, kept], rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize(("name", "next_stage"), [("gpt2", "cpt"), ("cpt", "sft"), ("sft", None)])
def test_stages_begin_with_the_averaged_weights_of_the_one_before(name, next_stage, zoo):
    """And each run, loaded again, has the NLL that its last validation wrote down."""
    run = load_run(zoo / name)
    nll = run.evaluate(run.blocks()[1].slice(0, 32)).nll  # the zoo validated on its first blocks
    assert nll == pytest.approx(last_nll(zoo / name), rel=1e-4)
    if next_stage is None:
        return
    stored = tensors_of(checkpoints(zoo / name)[-1])
    config = load_config(zoo / next_stage / "config.json")
    config = config.with_options({"start.model": str(zoo / name)})
    for key, parameter in build(config)[1].named_parameters():
        assert torch.equal(parameter, stored[f"ema.{key}"]), key
    assert any(not stored[n].equal(stored[f"ema.{n[6:]}"]) for n in stored if n[:6] == "model.")


@pytest.mark.parametrize("name", ["base", "cpt"])
@torch.no_grad()
def test_a_local_convolution_can_be_added_and_is_inherited(name, zoo, tmp_path, small_config):
    """It is zero, so nothing changes at first; a run that has one keeps it."""
    more = f"--start.model {zoo / name} {OURS} --model.local-conv 3 --optim.warmup-steps 0".split()
    config, before = small_config(*more, "--train.steps", "1"), load_run(zoo / name)
    tokenizer, model = build(config)
    x, rows = torch.arange(2, 18)[None] % tokenizer.num_tokens, torch.arange(3, 16)
    assert torch.equal(model(x, rows), before.model(x, rows))
    assert not bool(model.local_conv.weight.any())
    with torch.enable_grad():
        train_run(config, tmp_path / "run", is_quiet=True)
    after = small_config("--start.model", str(tmp_path / "run"), *OURS.split())
    near = build(after)[1].local_conv.weight
    assert torch.equal(near, load_run(tmp_path / "run").model.local_conv.weight)
    assert bool(near.any())
    with pytest.raises(UserError, match=r"model\.local_conv"):
        build(after.with_options({"model.local_conv": 5}))


def test_a_greedy_arm_writes_what_transformers_writes(small_config, tmp_path, lm):
    from transformers import AutoModelForCausalLM

    options = ["--start.model", str(lm), "--framework", "arm", "--optim.lr", "0"]
    train_run(small_config(*options, "--train.steps", "1"), tmp_path / "run", is_quiet=True)
    run = load_run(tmp_path / "run")
    theirs = AutoModelForCausalLM.from_pretrained(lm)
    theirs.generation_config.eos_token_id = None
    for prefix in ("the cat sat", "on the moon and", ""):
        given = torch.tensor([[run.tokenizer.bos_id, *run.tokenizer.encode(prefix)]])
        expected = theirs.generate(
            given, attention_mask=torch.ones_like(given), max_length=16, do_sample=False,
            pad_token_id=0,
        )  # fmt: skip
        canvas = run.canvas(prefix=prefix)
        assert len(canvas) == 16
        made = run.generate(canvas, 2, Sampling(temperature=0.0))
        assert made.ids_BL.tolist() == expected.tolist() * 2
