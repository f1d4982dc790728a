"""Masked diffusion in a Hugging Face Trainer.

    trainer = MaskedDiffusionTrainer(model, args, train_dataset=rows, eval_dataset=held_out,
                                     mask_id=tokenizer.mask_token_id)

The model's logits at a position predict the token there (``AutoModelForMaskedLM``). The gradient
is that of one batch over all processes and accumulation steps: times come from strata of all its
rows, noise depends on a row's number in it, and the loss is divided by all its maskable tokens.
``evaluate()`` reports the NELBO per token.

B batch, L length.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import Trainer

from bellmask.diffusion.laws import strata
from bellmask.diffusion.objectives import Bell, Objective
from bellmask.evaluate.likelihood import nelbo
from bellmask.utils.distributed import World
from bellmask.utils.errors import UserError
from bellmask.utils.rng import shuffle, stream_key, uniform

IGNORED = -100
"""The label of tokens that are never masked: prompts."""


MOST_TOKENS = 2**32
"""Noise positions per row, so that noise does not depend on the padding of the batch."""


class MaskedDiffusionCollator:
    """Rows of ``input_ids`` (and ``labels``, -100 for prompts) to one padded batch."""

    def __init__(self, pad_id: int) -> None:
        self.pad_id = pad_id

    def __call__(self, examples: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
        def padded(name: str, fill: int) -> Tensor:
            rows = [torch.as_tensor(example[name]) for example in examples]
            return pad_sequence(rows, batch_first=True, padding_value=fill)

        batch = {"input_ids": padded("input_ids", self.pad_id)}
        lengths = torch.tensor([[len(example["input_ids"])] for example in examples])
        batch["attention_mask"] = (torch.arange(batch["input_ids"].shape[1]) < lengths).long()
        if "labels" in examples[0]:
            batch["labels"] = padded("labels", IGNORED)
        return batch


def maskable(batch: Mapping[str, Any]) -> Tensor:
    """Which tokens of a batch may be masked [B, L]: no pads, and no prompts."""
    is_maskable_BL = torch.ones_like(batch["input_ids"], dtype=torch.bool)
    if batch.get("attention_mask") is not None:
        is_maskable_BL &= batch["attention_mask"].bool()
    if batch.get("labels") is not None:
        is_maskable_BL &= batch["labels"] != IGNORED
    return is_maskable_BL


class MaskedDiffusionTrainer(Trainer):
    """A Trainer whose loss is a masked diffusion objective, by default the bell."""

    def __init__(
        self, *args: Any, mask_id: int, objective: Objective | None = None, **options: Any
    ) -> None:
        super().__init__(*args, **options)
        self.mask_id = mask_id
        self.objective: Objective = objective or Bell()
        # the Trainer divides by the accumulation steps unless the model accepts loss kwargs
        self.model_accepts_loss_kwargs = False
        self._first_row, self._num_rows, self._num_maskable = 0, 0, 0

    def get_batch_samples(
        self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device
    ) -> tuple[list[Any], Any]:
        """The batches of a step, which also counts maskable tokens over all processes."""
        batches, counted = super().get_batch_samples(epoch_iterator, num_batches, device)
        rows = sum(len(batch["input_ids"]) for batch in batches)
        mine = torch.tensor([[rows, sum(int(maskable(batch).sum()) for batch in batches)]])
        found = self.accelerator.gather(mine.to(device)).cpu()
        self._first_row = int(found[: self.accelerator.process_index, 0].sum())
        self._num_rows, self._num_maskable = found.sum(0).tolist()
        return batches, counted

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Any = None,
    ) -> Any:
        """The objective on a microbatch, so that the step's gradient is that of the whole batch."""
        x0_BL, is_maskable_BL = inputs["input_ids"], maskable(inputs)
        rows_B = torch.arange(self._first_row, self._first_row + len(x0_BL))
        self._first_row += len(x0_BL)
        if self._num_rows < int(rows_B[-1]) + 1:
            raise UserError("compute_loss is for training steps only; use evaluate() for the NELBO")
        seed, step = self.args.seed, self.state.global_step
        level = uniform(stream_key(seed, "times", step), torch.arange(self._num_rows))
        order = shuffle(stream_key(seed, "strata", step), self._num_rows)
        t_B = self.objective.times(strata(order, level)[rows_B])
        place_BL = rows_B[:, None] * MOST_TOKENS + torch.arange(x0_BL.shape[1])
        u_BL = uniform(stream_key(seed, "masks", step), place_BL)
        is_drawn_BL = u_BL < (1 - self.objective.schedule.alpha(t_B))[:, None]  # float64: on CPUs
        is_masked_BL = is_drawn_BL.to(x0_BL.device) & is_maskable_BL
        xt_BL = torch.where(is_masked_BL, self.mask_id, x0_BL)
        outputs = model(input_ids=xt_BL, attention_mask=inputs.get("attention_mask"))
        logits_NV = outputs.logits[is_masked_BL].float()
        ce_N = F.cross_entropy(logits_NV, x0_BL[is_masked_BL], reduction="none")
        weight_B = self.objective.weight(t_B).to(ce_N)
        weight_N = weight_B[:, None].expand_as(x0_BL)[is_masked_BL]
        # the Trainer takes the mean over processes and accumulation steps
        parts = self.accelerator.num_processes * self.current_gradient_accumulation_steps
        scale = parts / (max(1, self._num_maskable) * self.objective.normalizer)
        loss = (ce_N * weight_N).sum() * scale
        return (loss, outputs) if return_outputs else loss

    def evaluate(
        self,
        eval_dataset: Any = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> dict[str, float]:
        """The NELBO per token on held-out rows, as ``eval_loss`` and ``eval_nelbo``."""
        rows: Any = self.eval_dataset if eval_dataset is None else eval_dataset
        network: Any = self.model
        if rows is None:
            raise UserError("evaluate needs an eval_dataset")
        began = time.perf_counter()
        ids = [torch.as_tensor(row["input_ids"]) for row in rows]
        starts = [_first_label(row.get("labels")) for row in rows]
        place, size = self.accelerator, self.args.eval_batch_size
        world = World(place.process_index, place.num_processes, place.device)
        found = nelbo(
            network, ids, mask_id=self.mask_id, starts=starts, batch_size=size, world=world
        )
        told = {
            "loss": found.nll,
            "nelbo": found.nll,
            "nelbo_se": found.standard_error,
            "perplexity": found.perplexity,
            "runtime": time.perf_counter() - began,
        }
        metrics = {f"{metric_key_prefix}_{name}": value for name, value in told.items()}
        self.log(metrics)
        on_evaluate = self.callback_handler.on_evaluate
        self.control = on_evaluate(self.args, self.state, self.control, metrics)
        return metrics


def _first_label(labels: Any) -> int:
    """Tokens before the first that may be masked."""
    if labels is None:
        return 0
    is_maskable = torch.as_tensor(labels) != IGNORED
    return int(is_maskable.int().argmax()) if bool(is_maskable.any()) else len(is_maskable)
