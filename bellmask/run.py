"""A trained run, loaded: likelihood of texts, samples, infilling, from Python in a few lines."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch

from bellmask.build import build_model, build_schedule
from bellmask.config import RunConfig, load_config
from bellmask.data.blocks import Blocks, load_blocks
from bellmask.data.packing import Row
from bellmask.data.tokenizer import Tokenizer, load_tokenizer
from bellmask.diffusion.schedule import Schedule
from bellmask.errors import UserError
from bellmask.evaluate.errors import collapsed_strata_error
from bellmask.evaluate.likelihood import Likelihood, evaluate
from bellmask.generate.canvas import Canvas, canvas_from_prefix, canvas_from_text, empty_canvas
from bellmask.generate.engine import Generation, generate
from bellmask.generate.grids import uniform_grid
from bellmask.model.transformer import Denoiser
from bellmask.train.checkpoint import CheckpointStore, load_tensors, read_state
from bellmask.train.distributed import World, pick_device

Weights = Literal["auto", "ema", "raw"]


@dataclass(frozen=True)
class TextNll:
    """The NELBO of one text: an upper bound on its -log p, in nats."""

    nll: float
    standard_error: float
    """Of the estimate over masks; more draws make it smaller."""
    num_tokens: int

    @property
    def per_token(self) -> float:
        """Nats per token."""
        return self.nll / self.num_tokens


@dataclass(frozen=True)
class Run:
    """A run's options, tokenizer and weights at one checkpoint."""

    folder: Path
    config: RunConfig
    step: int
    tokenizer: Tokenizer
    model: Denoiser
    schedule: Schedule
    device: torch.device

    def blocks(self) -> tuple[Blocks, Blocks]:
        """The run's training and validation blocks."""
        return load_blocks(self.config.data, self.tokenizer)

    def evaluate(
        self,
        blocks: Blocks,
        *,
        draws: int = 1,
        seed: int = 1234,
        batch_size: int = 64,
        on_batch: Callable[[int], None] | None = None,
    ) -> Likelihood:
        """The NELBO on blocks; see :func:`bellmask.evaluate.likelihood.evaluate`."""
        return evaluate(
            self.model,
            blocks,
            mask_id=self.tokenizer.num_tokens,
            draws=draws,
            seed=seed,
            batch_size=batch_size,
            schedule=self.schedule,
            world=World(device=self.device),
            on_batch=on_batch,
        )

    def nll(self, texts: Sequence[str], *, draws: int = 32, seed: int = 1234) -> list[TextNll]:
        """The NELBO of each text; one longer than a block is cut into blocks, scored apart."""
        rows = [row for number, text in enumerate(texts) for row in self._rows(number, text)]
        blocks = Blocks.from_rows(rows, num_bytes=sum(len(text.encode()) for text in texts))
        result = self.evaluate(blocks, draws=draws, seed=seed)
        total = result.length_B * result.block_nll
        order = np.arange(draws, dtype=np.float64)
        spread = np.array(
            [collapsed_strata_error(ce, order) if draws > 1 else np.nan for ce in result.ce_BR]
        )
        variance = (result.length_B * spread) ** 2
        return [
            TextNll(
                float(total[mine].sum()),
                float(np.sqrt(variance[mine].sum())),
                int(result.length_B[mine].sum()),
            )
            for number in range(len(texts))
            for mine in [blocks.documents == number]
        ]

    def _rows(self, number: int, text: str) -> list[Row]:
        ids, length = self.tokenizer.encode(text), self.config.data.block_length
        if not len(ids):
            raise UserError(f"text number {number} is empty: it has no likelihood")
        pieces = [ids[start : start + length] for start in range(0, len(ids), length)]
        padding = [np.full(length - len(piece), self.tokenizer.pad_id) for piece in pieces]
        return [
            Row(np.concatenate([piece, pad]), len(piece), number)
            for piece, pad in zip(pieces, padding, strict=True)
        ]

    def generate(
        self,
        canvas: Canvas,
        count: int = 1,
        *,
        steps: int = 128,
        temperature: float = 1.0,
        seed: int = 0,
        batch_size: int = 64,
        on_batch: Callable[[int], None] | None = None,
        noise_dtype: torch.dtype = torch.float64,
    ) -> Generation:
        """Fill a canvas ``count`` times; sample i is the same whatever the batch size."""
        parts = []
        for first in range(0, count, batch_size):
            part = generate(
                self.model,
                canvas.repeat(min(batch_size, count - first)),
                uniform_grid(steps),
                mask_id=canvas.mask_id,
                seed=seed,
                first_sample=first,
                schedule=self.schedule,
                temperature=temperature,
                noise_dtype=noise_dtype,
                device=self.device,
            )
            parts.append(part)
            if on_batch:
                on_batch(first + len(part.ids_BL))
        return Generation(
            torch.cat([p.ids_BL for p in parts]),
            sum(p.num_calls for p in parts),
            sum(p.num_rows for p in parts),
        )

    def sample(
        self,
        count: int = 1,
        *,
        prefix: str = "",
        length: int | None = None,
        steps: int = 128,
        temperature: float = 1.0,
        seed: int = 0,
    ) -> list[str]:
        """Texts from nothing, or continuing a prefix, ``length`` tokens in all."""
        length = length or self.config.data.block_length
        canvas = (
            canvas_from_prefix(self.tokenizer, prefix, length)
            if prefix
            else empty_canvas(self.tokenizer, length)
        )
        return self.texts(
            self.generate(canvas, count, steps=steps, temperature=temperature, seed=seed)
        )

    def infill(
        self,
        text: str,
        count: int = 1,
        *,
        steps: int = 128,
        temperature: float = 1.0,
        seed: int = 0,
    ) -> list[str]:
        """Fill the gaps of ``"The [MASK*12] sat on the [MASK*3]."``."""
        canvas = canvas_from_text(self.tokenizer, text)
        return self.texts(
            self.generate(canvas, count, steps=steps, temperature=temperature, seed=seed)
        )

    def texts(self, made: Generation) -> list[str]:
        """Generated ids as text."""
        return [self.tokenizer.decode(row.numpy()) for row in made.ids_BL]


def load_run(
    folder: str | Path,
    *,
    checkpoint: str = "latest",
    weights: Weights = "auto",
    device: str = "auto",
) -> Run:
    """Load a run folder: the ``latest`` or ``best`` checkpoint, or the one of a step.

    ``weights``: "auto" takes the moving average where there is one, "raw" the trained weights.
    """
    folder = Path(folder)
    if not (folder / "config.json").exists():
        raise UserError(f"{folder} is not a run folder: it has no config.json")
    config = load_config(folder / "config.json")
    store = CheckpointStore(folder / "checkpoints", config.checkpoint, World())
    place = store.find(checkpoint)
    tokenizer = load_tokenizer(config.data.tokenizer)
    _check_tokenizer(folder, tokenizer)
    kind = _which_weights(weights, config)
    model = build_model(config, tokenizer.num_tokens)
    tensors = {f"{kind}.{name}": p.detach() for name, p in model.named_parameters()}
    load_tensors(place, tensors)
    target = pick_device(device)
    return Run(
        folder,
        config,
        read_state(place)["step"],
        tokenizer,
        model.to(target).eval(),
        build_schedule(config.schedule),
        target,
    )


def _which_weights(weights: str, config: RunConfig) -> str:
    if weights == "ema" and not config.optim.ema:
        raise UserError(
            "this run has no moving average of weights (optim.ema is 0); use raw weights"
        )
    return "model" if weights == "raw" or not config.optim.ema else "ema"


def _check_tokenizer(folder: Path, tokenizer: Tokenizer) -> None:
    try:
        known = json.loads((folder / "run.json").read_text())["tokenizer_fingerprint"]
    except (OSError, ValueError, KeyError) as error:
        raise UserError(f"cannot read {folder / 'run.json'}: {error}") from None
    if known != tokenizer.fingerprint:
        raise UserError(
            f"the tokenizer is not the one {folder} was trained with: vocabulary or rules differ"
        )
