"""A causal LM becomes a masked model: whole runs, resumed, split and chained."""

from __future__ import annotations

import shutil

import pytest
import torch
from fault_tools import assert_same, checkpoints, tensors_of
from pretrained_tools import eager_states, save_lm
from safetensors.torch import load_file

from bellmask.config.config import load_config, override
from bellmask.evaluate.likelihood import evaluate
from bellmask.generate.settings import Sampling
from bellmask.run import load_run
from bellmask.storage.run_folder import read_metrics
from bellmask.train.setup import open_start
from bellmask.train.train_run import train_run

ANNEALED = "--start.anneal-steps 6 --log.every 1 --optim.ema 0.5 --model.dropout 0".split()


@pytest.fixture(scope="module")
def lm(tmp_path_factory, text_file):
    return save_lm(tmp_path_factory.mktemp("lm") / "gpt2", "gpt2", text_file.read_text())


def recorded(folder, kind="train", field="loss"):
    return [r[field] for r in read_metrics(folder / "metrics.jsonl") if r["kind"] == kind]


def first_network(config):
    """The network as it is before the first step."""
    start = open_start(config)
    return start.build_model(start.tokenizer).eval()


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
    (written,) = recorded(tmp_path / "run", "validation", "nll")
    run = load_run(tmp_path / "run")
    model, blocks = run.model, run.blocks()[1].slice(0, 32)
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
    stored = load_file(lm / "model.safetensors")["transformer.wte.weight"]
    mean = first_network(small_config("--start.model", str(lm))).mask_row
    torch.testing.assert_close(mean.detach(), stored.mean(0), rtol=0, atol=1e-6)
    config = small_config("--start.model", str(lm), "--start.mask-token", "41")
    assert torch.equal(first_network(config).mask_row.detach(), stored[41])


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
        found = first_network(config)(ours, torch.arange(1, ours.shape[1]))
    assert found.shape[1] == logits.shape[1] - 1 == tokenizer.mask_id
    kept = [i for i in range(logits.shape[1]) if i != their_tokenizer.mask_token_id]
    last = kept.pop()  # the mask's place is taken by what was the last token
    kept.insert(their_tokenizer.mask_token_id, last)
    torch.testing.assert_close(found, logits[:, kept], rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize(("name", "next_stage"), [("gpt2", "cpt"), ("cpt", "sft"), ("sft", None)])
def test_stages_begin_with_the_averaged_weights_of_the_one_before(name, next_stage, zoo):
    """And each run, loaded again, has the NLL that its last validation wrote down."""
    run = load_run(zoo / name)
    nll = run.evaluate(run.blocks()[1].slice(0, 32)).nll
    assert nll == pytest.approx(recorded(zoo / name, "validation", "nll")[-1], rel=1e-4)
    if next_stage is None:
        return
    stored = tensors_of(checkpoints(zoo / name)[-1])
    config = override(
        load_config(zoo / next_stage / "config.json"), ["--start.model", str(zoo / name)]
    )
    for key, parameter in first_network(config).named_parameters():
        assert torch.equal(parameter, stored[f"ema.{key}"]), key
    assert any(not stored[n].equal(stored[f"ema.{n[6:]}"]) for n in stored if n[:6] == "model.")


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
