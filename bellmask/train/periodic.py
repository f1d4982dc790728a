"""What a training does now and then: validate, write samples, save."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import torch

from bellmask.config.config import RunConfig
from bellmask.config.options import Interval
from bellmask.data.blocks import Blocks
from bellmask.data.tokenizers import Tokenizer
from bellmask.diffusion.frameworks import Framework
from bellmask.evaluate.likelihood import evaluate
from bellmask.model.attention import AttentionRules
from bellmask.storage.build import Network
from bellmask.storage.checkpoint import FORMAT, Saver
from bellmask.train.parallel import ParallelPlan, is_sharded
from bellmask.train.trainer import Action, Trainer, TrainState
from bellmask.utils.distributed import World, autocast
from bellmask.utils.files import write_text


@dataclass
class Periodic:
    """The actions of one training; ``trainer`` is set when there is one."""

    config: RunConfig
    folder: Path
    world: World
    tokenizer: Tokenizer
    framework: Framework
    rules: AttentionRules
    valid_blocks: Blocks
    placing: ParallelPlan
    saver: Saver
    run_id: str
    trainer: Trainer | None = None

    def actions(self) -> list[Action]:
        """Validation before samples before checkpoint, so that a checkpoint knows its NLL."""
        validation, checkpoint = self.config.validation, self.config.checkpoint
        return [
            Action(
                Interval.parse(validation.every),
                self._validate,
                also_last=validation.every != "never",
            ),
            Action(
                Interval.parse(validation.samples_every),
                self._write_samples,
                also_last=validation.samples_every != "never",
            ),
            Action(
                Interval.parse(checkpoint.every),
                self._save,
                at_steps=checkpoint.keep_steps,
                also_when_stopped=True,
            ),
        ]

    def _validate(self, state: TrainState) -> None:
        assert self.trainer is not None
        options = self.config.validation
        with state.evaluating() as model:
            result = evaluate(
                model,
                self.valid_blocks,
                mask_id=self.tokenizer.mask_id,
                draws=options.draws,
                seed=options.seed,
                batch_size=options.batch_size,
                framework=self.framework,
                world=self.world,
                precision=self.placing.precision,
                rules=self.rules,
                in_step=is_sharded(model),
            )
        state.nll = result.nll if math.isfinite(result.nll) else None
        self.trainer.record("validation", result.summary())
        self.trainer.display.validated(state.step, result.nll, result.standard_error)
        if self.world.is_main:
            with self.trainer.writing():
                result.save(self.folder / "validation" / f"step-{state.step:09d}.npz")

    def _write_samples(self, state: TrainState) -> None:
        """The main process's work; of a model that is cut, all call it together, alike."""
        if not (self.world.is_main or is_sharded(state.model)):
            return
        # weights that are cut are gathered in the run's precision, others are whole and float32
        precision = self.placing.precision if is_sharded(state.model) else torch.float32
        with state.evaluating() as model, autocast(self.world.device, precision):
            texts = training_samples(
                model,  # type: ignore[arg-type]
                self.config,
                self.tokenizer,
                self.framework,
                self.valid_blocks,
                self.world.device,
            )
        if self.world.is_main:
            assert self.trainer is not None
            with self.trainer.writing():
                write_text(self.folder / "samples" / f"step-{state.step:09d}.txt", texts)

    def _save(self, state: TrainState) -> None:
        assert self.trainer is not None
        if self.world.is_main:
            with self.trainer.writing():
                self.trainer.metrics.sync()
                self.trainer.skipped.sync()
        scalars = {"format": FORMAT, "run": self.run_id, "mask_id": self.tokenizer.mask_id}
        scalars |= state.scalars()
        self.saver.save(state.step, state.tensors(), scalars)


# Samples written while a run trains: free text, or answers to the first validation prompts.

SEPARATOR = "\n\n--------\n\n"


def training_samples(
    model: Network,
    config: RunConfig,
    tokenizer: Tokenizer,
    framework: Framework,
    valid: Blocks,
    device: torch.device,
) -> str:
    """``validation.num_samples`` texts, from the same noise each time."""
    # by default no samples are written, and the sampler need not be loaded
    from bellmask.generate.canvas import begin_canvas, empty_canvas
    from bellmask.generate.fill import fill
    from bellmask.generate.settings import Sampling

    options = config.validation
    is_real_BL = None
    if config.sft.train is None:
        length = config.data.block_length - model.first_maskable
        canvas = empty_canvas(tokenizer, length)
        canvas = begin_canvas(canvas, tokenizer) if model.first_maskable else canvas
        x_BL = canvas.repeat(options.num_samples)
    else:
        rows = slice(0, options.num_samples)
        place = torch.arange(valid.block_length)
        is_real_BL = place < valid.row_lengths(rows)[:, None]
        is_given_BL = place < valid.row_starts(rows)[:, None]
        x_BL = torch.where(is_real_BL & ~is_given_BL, tokenizer.mask_id, valid.rows(rows))
    made = fill(
        model,
        x_BL,
        framework,
        Sampling(steps=None if framework.is_causal else options.sample_steps),
        mask_id=tokenizer.mask_id,
        is_real_BL=is_real_BL,
        seed=options.seed,
        device=device,
    )
    return SEPARATOR.join(tokenizer.decode(row.numpy()) for row in made.ids_BL) + "\n"
