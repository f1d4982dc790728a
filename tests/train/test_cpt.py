"""A causal LM becomes a masked model: whole runs, resumed, split and chained."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from pretrained_tools import eager_states, save_lm
from safetensors.torch import load_file
from torch import Tensor

from bellmask.assemble import train_run
from bellmask.build import Network, build_model
from bellmask.config import RunConfig
from bellmask.evaluate.likelihood import evaluate
from bellmask.generate.engine import Generation
from bellmask.generate.settings import Sampling
from bellmask.model.pretrained import PretrainedDenoiser
from bellmask.records import read_metrics
from bellmask.run import load_run
from bellmask.start import open_start

Config = Callable[..., RunConfig]
ANNEALED = "--start.anneal-steps 6 --log.every 1 --optim.ema 0.5 --model.dropout 0".split()


@pytest.fixture(scope="module")
def lm(tmp_path_factory: pytest.TempPathFactory, text_file: Path) -> Path:
    return save_lm(tmp_path_factory.mktemp("lm") / "gpt2", "gpt2", text_file.read_text())


def weights(folder: Path, step: int) -> dict[str, Tensor]:
    (shard,) = (folder / "checkpoints" / f"step-{step:09d}").glob("*.safetensors")
    return load_file(shard)


def recorded(folder: Path, kind: str = "train", field: str = "loss") -> list[float]:
    return [r[field] for r in read_metrics(folder / "metrics.jsonl") if r["kind"] == kind]


def first_network(config: RunConfig) -> Network:
    """The network as it is before the first step."""
    start = open_start(config)
    assert start.tokenizer is not None
    return build_model(start.config, start.tokenizer.num_tokens, start.backbone, start.fill).eval()


def test_resuming_in_the_middle_of_annealing_is_exact(
    small_config: Config, tmp_path: Path, text_file: Path
) -> None:
    """Also where the causal LM that the run began with is no longer there."""
    folder = save_lm(tmp_path / "lm", "llama", text_file.read_text())
    options = [*ANNEALED, "--start.model", str(folder)]
    whole = small_config(*options, "--train.steps", "8")
    train_run(whole, tmp_path / "whole", is_quiet=True)
    train_run(small_config(*options, "--train.steps", "3"), tmp_path / "parts", is_quiet=True)
    shutil.rmtree(folder)
    assert train_run(whole, tmp_path / "parts", resume="yes", is_quiet=True).step == 8
    a, b = weights(tmp_path / "whole", 8), weights(tmp_path / "parts", 8)
    assert a.keys() == b.keys()
    assert {name.split(".")[0] for name in a} == {"model", "ema", "optimizer"}
    assert not [name for name in a if not a[name].equal(b[name])]
    assert recorded(tmp_path / "whole") == recorded(tmp_path / "parts")


def test_the_matrix_of_a_step_changes_its_loss(
    small_config: Config, tmp_path: Path, lm: Path
) -> None:
    """What resuming and splitting are tested on does depend on the annealed edges."""
    losses = []
    for steps in ("6", "1"):
        options = [*ANNEALED, "--start.anneal-steps", steps, "--train.steps", "2"]
        config = small_config(*options, "--start.model", str(lm), "--optim.lr", "0")
        train_run(config, tmp_path / steps, is_quiet=True)
        losses.append(recorded(tmp_path / steps))
    assert all(abs(a - b) > 1e-3 for a, b in zip(*losses, strict=True))


def run_two_processes(config: RunConfig, folder: Path) -> None:
    path = folder.with_suffix(".json")
    path.write_text(json.dumps(config.to_dict()))
    done = subprocess.run(
        [
            sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
            "-m", "bellmask", "train", str(path), "--out", str(folder),
        ],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("how", ["four", pytest.param("two", marks=pytest.mark.long)])
def test_two_processes_and_accumulation_give_the_losses_of_one(
    small_config: Config, tmp_path: Path, lm: Path, how: str
) -> None:
    """With annealed attention, low-rank updates and decay: what is frozen stays as it is."""
    pytest.importorskip("peft", reason="low-rank updates need peft")
    options = [*ANNEALED, "--start.model", str(lm), "--train.steps", "4"]
    options += ["--start.lora-rank", "2", "--optim.weight-decay", "0.1"]
    config = small_config(*options)
    train_run(config, tmp_path / "one", is_quiet=True)
    if how == "two":
        run_two_processes(config, tmp_path / how)
    else:
        split = small_config(*options, "--train.microbatch-size", "2")
        train_run(split, tmp_path / how, is_quiet=True)
    assert recorded(tmp_path / how) == pytest.approx(recorded(tmp_path / "one"), rel=1e-5)
    shares = [recorded(tmp_path / name, field="masked_share") for name in ("one", how)]
    assert shares[0] == shares[1]
    theirs = dict(load_run(tmp_path / how).model.named_parameters())
    for name, parameter in load_run(tmp_path / "one").model.named_parameters():
        if parameter.requires_grad:
            torch.testing.assert_close(theirs[name], parameter, rtol=1e-3, atol=1e-4)
        else:
            assert torch.equal(theirs[name], parameter), name


def test_validation_has_full_attention_while_training_anneals(
    small_config: Config, tmp_path: Path, lm: Path
) -> None:
    """The recorded NLL again from the checkpoint, by our forward and by eager dense attention."""
    options = "--start.anneal-steps 1000 --train.steps 2 --validation.every 2 --model.dropout 0"
    config = small_config("--start.model", str(lm), *options.split())
    train_run(config, tmp_path / "run", is_quiet=True)
    (written,) = recorded(tmp_path / "run", "validation", "nll")
    run = load_run(tmp_path / "run")
    blocks = run.blocks()[1].slice(0, 32)
    assert run.evaluate(blocks).nll == pytest.approx(written, rel=1e-6)
    model = run.model
    assert isinstance(model, PretrainedDenoiser)
    head = model.language_model.get_output_embeddings()

    def dense(x: Tensor, rows: Tensor, targets: Tensor, **_: Any) -> Tensor:
        is_seen = torch.ones(1, 1, x.shape[1], x.shape[1], dtype=torch.bool)
        x = torch.where(x == run.tokenizer.mask_id, model.num_logits, x)
        log_p = head(eager_states(model, x, is_seen)).log_softmax(-1)
        return -log_p[:, :-1].flatten(0, 1)[rows - rows // x.shape[1] - 1, targets]

    found = evaluate(dense, blocks, mask_id=run.tokenizer.mask_id)
    assert found.nll == pytest.approx(written, rel=1e-5)
    assert found.length_B.tolist() == [15] * 32  # position 0 is given
    assert found.count_BR.max() == 15


def test_the_masks_row_is_the_mean_or_a_tokens_copy(
    small_config: Config, tmp_path: Path, lm: Path
) -> None:
    stored = load_file(lm / "model.safetensors")["transformer.wte.weight"]
    mean = first_network(small_config("--start.model", str(lm))).mask_row  # type: ignore[union-attr]
    torch.testing.assert_close(mean.detach(), stored.mean(0), rtol=0, atol=1e-6)
    config = small_config("--start.model", str(lm), "--start.mask-token", "41")
    assert torch.equal(first_network(config).mask_row.detach(), stored[41])  # type: ignore[union-attr]


@pytest.mark.parametrize("kind", ["gpt2", "qwen3", "gpt_neox"])
def test_a_tokenizer_with_its_own_mask_and_pad_keeps_each_tokens_rows(
    small_config: Config, tmp_path: Path, text_file: Path, kind: str
) -> None:
    """Ids are renumbered so that the mask is last; probabilities follow their tokens."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    specials = {"mask_token": "<mask>", "pad_token": "<pad>"}
    folder = save_lm(tmp_path / "lm", kind, text_file.read_text(), **specials)
    config = small_config("--start.model", str(folder), "--framework", "arm")
    tokenizer = open_start(config).tokenizer
    assert tokenizer is not None
    text = "the old dog sat on the moon."
    theirs = AutoTokenizer.from_pretrained(folder)(text, return_tensors="pt").input_ids
    ours = torch.from_numpy(tokenizer.encode(text))[None]
    assert ours.shape == theirs.shape
    own_mask = AutoTokenizer.from_pretrained(folder).mask_token_id
    with torch.no_grad():
        logits = AutoModelForCausalLM.from_pretrained(folder)(theirs).logits[0, :-1]
        found = first_network(config)(ours, torch.arange(1, ours.shape[1]))
    assert found.shape[1] == logits.shape[1] - 1 == tokenizer.mask_id
    kept = [i for i in range(logits.shape[1]) if i != own_mask]
    last = kept.pop()  # the mask's place is taken by what was the last token
    kept.insert(own_mask, last)
    torch.testing.assert_close(found, logits[:, kept], rtol=1e-5, atol=1e-4)


def test_pretrain_adapt_and_fine_tune(small_config: Config, tmp_path: Path) -> None:
    """An ARM of GPT-2's architecture, a masked model from its averaged weights, then SFT."""
    architecture = tmp_path / "gpt2.json"
    architecture.write_text(
        json.dumps({"model_type": "gpt2", "n_embd": 16, "n_layer": 2, "n_head": 2})
    )
    often = "--validation.every 3 --train.steps 3 --optim.ema 0.9 --validation.samples-every 3"
    arm = small_config(
        "--start.architecture", str(architecture), "--framework", "arm", *often.split()
    )
    train_run(arm, tmp_path / "arm", is_quiet=True)
    (nll,) = recorded(tmp_path / "arm", "validation", "nll")
    run = load_run(tmp_path / "arm")
    assert run.model.num_logits == run.tokenizer.num_tokens == 259  # type: ignore[union-attr]
    assert run.evaluate(run.blocks()[1].slice(0, 32)).nll == pytest.approx(nll, rel=1e-6)
    check_first_weights(small_config, tmp_path / "arm", 3)

    cpt = ["--start.model", str(tmp_path / "arm"), *often.split(), "--start.anneal-steps", "2"]
    train_run(small_config(*cpt), tmp_path / "cpt", is_quiet=True)
    shutil.rmtree(tmp_path / "arm")
    longer = small_config(*cpt, "--train.steps", "5")
    assert train_run(longer, tmp_path / "cpt", resume="yes", is_quiet=True).step == 5
    check_first_weights(small_config, tmp_path / "cpt", 5)

    sft = ["--start.model", str(tmp_path / "cpt"), "--sft.train", "toy:reverse", *often.split()]
    sft += ["--sft.round-to", "4", "--data.block-length", "48", "--sft.min-masks", "1"]
    result = train_run(small_config(*sft), tmp_path / "sft", is_quiet=True)
    assert result.step == 3
    tuned = load_run(tmp_path / "sft")
    blocks = tuned.blocks()[1]
    assert (blocks.row_starts(slice(None)) > 1).all()
    assert tuned.evaluate(blocks.slice(0, 32)).nll == pytest.approx(result.nll, rel=1e-6)
    for name in ("cpt", "sft"):
        assert (tmp_path / name / "samples" / "step-000000003.txt").read_text().strip()


def check_first_weights(small_config: Config, folder: Path, step: int) -> None:
    """A run that starts from a folder has the average of its last checkpoint."""
    stored = weights(folder, step)
    for name, parameter in first_network(
        small_config("--start.model", str(folder))
    ).named_parameters():
        assert torch.equal(parameter, stored[f"ema.{name}"]), name
    assert any(not stored[n].equal(stored[f"ema.{n[6:]}"]) for n in stored if n[:6] == "model.")


def test_a_greedy_arm_writes_what_transformers_writes(
    small_config: Config, tmp_path: Path, lm: Path
) -> None:
    from transformers import AutoModelForCausalLM

    options = ["--start.model", str(lm), "--framework", "arm", "--optim.lr", "0"]
    train_run(small_config(*options, "--train.steps", "1"), tmp_path / "run", is_quiet=True)
    run = load_run(tmp_path / "run")
    for prefix in ("the cat sat", "on the moon and", ""):
        given = torch.tensor([[run.tokenizer.bos_id, *run.tokenizer.encode(prefix)]])
        theirs = AutoModelForCausalLM.from_pretrained(lm)
        theirs.generation_config.eos_token_id = None
        expected = theirs.generate(
            given, attention_mask=torch.ones_like(given), max_length=16, do_sample=False,
            pad_token_id=0,
        )  # fmt: skip
        canvas = run.canvas(prefix=prefix)
        assert len(canvas) == 16
        made = run.generate(canvas, 2, Sampling(temperature=0.0))
        assert made.ids_BL.tolist() == expected.tolist() * 2


def test_a_given_bos_that_is_also_eos_does_not_end_the_text(
    small_config: Config, tmp_path: Path, lm: Path
) -> None:
    (tmp_path / "lines.txt").write_text("the cat sat\n" * 40)
    options = ["--start.model", str(lm), "--train.steps", "1", "--data.packing", "unpacked"]
    options += ["--data.train", str(tmp_path / "lines.txt"), "--data.documents", "line"]
    config = small_config(*options)
    train_run(config, tmp_path / "run", is_quiet=True)
    run = load_run(tmp_path / "run")
    eos = run.tokenizer.eos_id
    assert run.tokenizer.bos_id == eos
    word = run.tokenizer.encode("the").tolist()
    made = Generation(torch.tensor([[eos, *word, eos, *word]]), 1, 1)
    assert run.texts(made) == ["the"]
