"""Masked diffusion in a Hugging Face Trainer: the step's gradient, and the NELBO."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from transformers import BertConfig, BertForMaskedLM, TrainingArguments

import bellmask
from bellmask.diffusion.objectives import Bell, Nelbo
from bellmask.integrations.transformers import MaskedDiffusionCollator, MaskedDiffusionTrainer
from bellmask.utils.errors import UserError

VOCABULARY, MASK, PAD = 13, 12, 11


def small_model():
    torch.manual_seed(0)
    return BertForMaskedLM(
        BertConfig(
            vocab_size=VOCABULARY,
            hidden_size=8,
            num_hidden_layers=1,
            num_attention_heads=2,
            intermediate_size=16,
            hidden_dropout_prob=0,
            attention_probs_dropout_prob=0,
            max_position_embeddings=16,
        )
    )


def examples(*, with_labels=False):
    """Eight rows of different lengths; with labels the first token is a prompt."""
    generator = torch.Generator().manual_seed(1)
    rows = [torch.randint(0, 11, (4 + n,), generator=generator).tolist() for n in range(8)]
    if not with_labels:
        return [{"input_ids": row} for row in rows]
    return [{"input_ids": row, "labels": [-100, *row[1:]]} for row in rows]


def trainer(out, *, accumulate=1, rows=None, objective=None):
    rows = rows or examples()
    processes = int(os.environ.get("WORLD_SIZE", 1))
    args = TrainingArguments(
        output_dir=str(out),
        per_device_train_batch_size=8 // accumulate // processes,
        gradient_accumulation_steps=accumulate,
        max_steps=2,
        optim="sgd",
        learning_rate=0.5,
        lr_scheduler_type="constant",
        max_grad_norm=0,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        use_cpu=True,
        remove_unused_columns=False,
    )
    made = MaskedDiffusionTrainer(
        small_model(),
        args,
        train_dataset=rows,
        eval_dataset=rows,
        data_collator=MaskedDiffusionCollator(PAD),
        mask_id=MASK,
        objective=objective,
    )
    made._get_train_sampler = lambda *_: torch.utils.data.SequentialSampler(rows)
    return made


def weights_after(*args, **options):
    made = trainer(*args, **options)
    made.train()
    return torch.cat([p.detach().flatten() for p in made.model.parameters()])


@pytest.mark.parametrize("with_labels", [False, True])
@pytest.mark.parametrize("objective", [Bell(), Nelbo(time_floor=0.1)])
def test_accumulation_does_not_change_the_gradient(tmp_path, with_labels, objective):
    options = {"rows": examples(with_labels=with_labels), "objective": objective}
    whole = weights_after(tmp_path, **options)
    for accumulate in (2, 8):
        parts = weights_after(tmp_path, accumulate=accumulate, **options)
        assert torch.allclose(parts, whole, atol=2e-6)


def test_the_loss_is_the_objective_over_all_maskable_tokens(tmp_path):
    made = trainer(tmp_path, rows=examples(with_labels=True))
    seen = []
    made.model.register_forward_hook(
        lambda _, __, kwargs, out: seen.append((kwargs["input_ids"], out.logits)), with_kwargs=True
    )
    batch = made.data_collator(made.train_dataset)
    (batch,), _ = made.get_batch_samples(iter([batch]), 1, torch.device("cpu"))
    made.current_gradient_accumulation_steps = 1
    loss = made.compute_loss(made.model, batch)
    ((xt, logits),) = seen
    is_masked = xt == MASK
    assert is_masked.any()
    assert not is_masked[:, 0].any(), "prompts"
    assert not (is_masked & (batch["attention_mask"] == 0)).any(), "pads"
    ce = F.cross_entropy(logits[is_masked], batch["input_ids"][is_masked], reduction="sum")
    num_maskable = sum(len(row["input_ids"]) - 1 for row in made.train_dataset)
    assert loss.item() == pytest.approx(ce.item() / num_maskable / 0.5, rel=1e-5)
    with pytest.raises(UserError, match="evaluate"):
        made.compute_loss(made.model, batch)


@pytest.mark.long
def test_two_processes_are_one(tmp_path):
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    command += ["--standalone", __file__, str(tmp_path)]
    subprocess.run(command, check=True, capture_output=True, timeout=120)
    both = torch.load(tmp_path / "weights.pt")
    assert torch.allclose(both, weights_after(tmp_path), atol=2e-6)


def test_evaluate_reports_the_nelbo(tmp_path):
    made = trainer(tmp_path)
    metrics = made.evaluate()
    found = bellmask.nelbo(made.model, [e["input_ids"] for e in examples()], mask_id=MASK)
    assert metrics["eval_nelbo"] == metrics["eval_loss"] == found.nll
    assert metrics["eval_nelbo_se"] == found.standard_error
    assert made.state.log_history[-1]["eval_perplexity"] == pytest.approx(math.exp(found.nll))


def test_a_network_that_ignores_context_has_its_cross_entropy():
    """Every mask gives the same, so the NELBO is exact; the mask's own logit does not count."""
    logits = torch.tensor([1.0, 0.3, -2.0, 7.0])
    rows = torch.tensor([[0, 1, 1, 2, 0], [2, 2, 1, 0, 0]])
    found = bellmask.nelbo(lambda x: logits.expand(*x.shape, 4), rows, mask_id=3, draws=3)
    log_p = logits[:3].log_softmax(0)
    # each draw is a mean over the masked tokens: exact for rows of one kind of token
    same = torch.tensor([[1] * 5, [1] * 5])
    exact = bellmask.nelbo(lambda x: logits.expand(*x.shape, 4), same, mask_id=3)
    assert exact.nll == pytest.approx(-log_p[1].item(), rel=1e-6)
    assert abs(found.nll + log_p[rows].mean().item()) < 4 * found.standard_error + 0.3
    given = bellmask.nelbo(
        lambda x: logits.expand(*x.shape, 4), [[2, 2, 1, 1]], mask_id=3, starts=[2]
    )
    assert given.nll == pytest.approx(-log_p[1].item(), rel=1e-6)
    with pytest.raises(UserError, match="mask_id 2 occurs"):
        bellmask.nelbo(lambda x: logits.expand(*x.shape, 4), rows, mask_id=2)


if __name__ == "__main__":
    made = weights_after(Path(sys.argv[1]))
    if os.environ["RANK"] == "0":
        torch.save(made, Path(sys.argv[1]) / "weights.pt")
