"""A trained run, loaded: likelihood of texts, samples, infilling, from Python in a few lines."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bellmask.build import Network, build_framework, build_rules, build_stored
from bellmask.config.config import RunConfig, load_config
from bellmask.data.blocks import Blocks
from bellmask.data.corpora import find_policy
from bellmask.data.inputs import load_inputs
from bellmask.data.packing import Row
from bellmask.data.tokenizers import Tokenizer
from bellmask.diffusion.frameworks import Framework
from bellmask.evaluate.likelihood import Scorer, evaluate
from bellmask.evaluate.result import Likelihood
from bellmask.generate.canvas import Canvas, begin_canvas, frame_canvas, make_canvas
from bellmask.generate.engine import Generation
from bellmask.generate.fill import fill
from bellmask.generate.settings import Sampling, sampling_of
from bellmask.generate.steps import OnStep
from bellmask.runfolder import Backbone, read_backbone, read_description, read_tokenizer
from bellmask.train.checkpoint import CheckpointStore, load_tensors, read_state
from bellmask.utils.distributed import World, pick_device, pick_precision
from bellmask.utils.errors import UserError, look_up

Weights = Literal["auto", "ema", "raw"]


@dataclass(frozen=True)
class TextNll:
    """The NLL of one text in nats: exact for a fixed order, else an upper bound on -log p."""

    nll: float
    standard_error: float
    """Of the estimate over masks or orders; more draws make it smaller, an exact one has none."""
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
    model: Network
    framework: Framework
    device: torch.device
    backbone: Backbone | None = None
    """Of a run on a causal LM."""

    def blocks(self) -> tuple[Blocks, Blocks]:
        """The run's training and validation blocks."""
        data = load_inputs(self.config, self.tokenizer, self.backbone)
        return data.train, data.valid

    def check_same_data(self, train: Blocks) -> None:
        """Refuse text that is not what the run was trained on."""
        if read_description(self.folder).get("train_fingerprint") != train.fingerprint:
            raise UserError(f"the text of {self.folder} has changed since it was trained")

    def evaluate(
        self,
        blocks: Blocks,
        *,
        draws: int = 1,
        seed: int = 1234,
        batch_size: int = 64,
        row_keys: Tensor | None = None,
        on_batch: Callable[[int], None] | None = None,
    ) -> Likelihood:
        """The NLL (bound) on blocks; see :func:`bellmask.evaluate.likelihood.evaluate`."""
        return evaluate(
            self.model,
            blocks.starting_at(self.model.first_maskable),
            mask_id=self.tokenizer.mask_id,
            framework=self.framework,
            draws=draws,
            seed=seed,
            batch_size=batch_size,
            world=World(device=self.device),
            precision=pick_precision(self.config.train.precision, self.device),
            rules=build_rules(self.config.data, self.tokenizer),
            row_keys=row_keys,
            on_batch=on_batch,
        ).checked(self.folder)

    def scorer(self, blocks: Blocks) -> Scorer:
        """Cross-entropies on blocks in contexts of given size, for curves by context count."""
        return Scorer(
            self.model,
            blocks.starting_at(self.model.first_maskable),
            self.tokenizer.mask_id,
            self.framework,
            World(device=self.device),
            pick_precision(self.config.train.precision, self.device),
            build_rules(self.config.data, self.tokenizer),
        )

    def nll(self, texts: Sequence[str], *, draws: int = 32, seed: int = 1234) -> list[TextNll]:
        """The NLL (bound) of each text; one longer than a block is cut into blocks, scored apart.

        A text's masks are its own: its value does not depend on the others.
        """
        if isinstance(texts, str):
            raise UserError("nll takes a list of texts; for a single one write run.nll([text])")
        if not texts:
            return []
        rows = [row for number, text in enumerate(texts) for row in self._rows(number, text)]
        blocks = Blocks.from_rows(rows, num_bytes=sum(len(text.encode()) for text in texts))
        place = np.arange(len(rows)) - np.searchsorted(blocks.documents, blocks.documents)
        keys = torch.from_numpy(place)
        result = self.evaluate(blocks, draws=draws, seed=seed, row_keys=keys)
        total = result.length_B * result.block_nll
        variance = (result.length_B * result.draw_errors) ** 2
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
        first, tokenizer = self.model.first_maskable, self.tokenizer
        ids, length = tokenizer.encode(text), self.config.data.block_length - first
        if not len(ids):
            raise UserError(f"text number {number} is empty: it has no likelihood")
        begin = np.full(first, tokenizer.bos_id)  # given, so that every token of the text counts
        pieces = [ids[start : start + length] for start in range(0, len(ids), length)]
        padding = [np.full(length - len(piece), tokenizer.pad_id) for piece in pieces]
        return [
            Row(np.concatenate([begin, piece, pad]), first + len(piece), number)
            for piece, pad in zip(pieces, padding, strict=True)
        ]

    def generate(
        self,
        canvas: Canvas,
        count: int = 1,
        sampling: Sampling | None = None,
        *,
        seed: int = 0,
        first_sample: int = 0,
        batch_size: int = 64,
        on_batch: Callable[[int], None] | None = None,
        on_step: OnStep | None = None,
    ) -> Generation:
        """Fill a canvas ``count`` times; sample i is the same whatever the batch size.

        ``first_sample`` is the number of the first one: other numbers, other noise.
        """
        if count < 1:
            raise UserError(f"at least one sample must be asked for, got {count}")
        parts = []
        for first in range(0, count, batch_size):
            part = fill(
                self.model,
                canvas.repeat(min(batch_size, count - first)),
                self.framework,
                sampling or Sampling(),
                mask_id=canvas.mask_id,
                seed=seed,
                first_sample=first_sample + first,
                device=self.device,
                on_step=on_step,
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
        seed: int = 0,
        **settings: Any,
    ) -> list[str]:
        """Texts from nothing, or continuing a prefix, ``length`` tokens in all.

        ``settings`` are fields of :class:`bellmask.generate.settings.Sampling`.
        """
        canvas = self.canvas(prefix=prefix, length=length)
        return self.texts(self.generate(canvas, count, sampling_of(settings), seed=seed))

    @property
    def is_wrapped(self) -> bool:
        """True when the run's rows begin with BOS and end with EOS."""
        if self.config.sft.train is not None:
            return False
        return find_policy(self.config.data, self.config.data.train).wrap

    def canvas(
        self, *, prefix: str = "", template: str | None = None, length: int | None = None
    ) -> Canvas:
        """A row to fill: empty, after a prefix, or with the gaps of a template.

        Where the run's rows are wrapped, BOS and EOS count towards the length; so does the BOS that
        a causal LM predicts the first token from.
        """
        first = self.model.first_maskable
        frame = 2 if self.is_wrapped else first
        inner = (length or self.config.data.block_length) - frame
        if inner < 1:
            raise UserError(f"a length of {length} leaves no room between BOS and EOS")
        canvas = make_canvas(self.tokenizer, inner, prefix=prefix, template=template)
        if self.is_wrapped:
            return frame_canvas(canvas, self.tokenizer, self.framework)
        return begin_canvas(canvas, self.tokenizer) if first else canvas

    def infill(self, text: str, count: int = 1, *, seed: int = 0, **settings: Any) -> list[str]:
        """Fill the gaps of ``"The [MASK*12] sat on the [MASK*3]."``; settings as for ``sample``."""
        canvas = self.canvas(template=text)
        return self.texts(self.generate(canvas, count, sampling_of(settings), seed=seed))

    def texts(self, made: Generation) -> list[str]:
        """Generated ids as text; of a run on single documents, up to the first EOS."""
        rows = [row.numpy() for row in made.ids_BL]
        if self.config.data.packing == "unpacked":
            # a given BOS may have the same id
            start = 1 if self.is_wrapped or self.model.first_maskable else 0
            rows = [row[: start + _first(row[start:] == self.tokenizer.eos_id)] for row in rows]
        return [self.tokenizer.decode(row) for row in rows]


def _first(is_here: NDArray[np.bool_]) -> int:
    """Where the first True is; the length if there is none."""
    return int(is_here.argmax()) if is_here.any() else len(is_here)


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
    if not folder.exists():
        raise UserError(f"there is no folder {folder}")
    if not (folder / "config.json").exists():
        raise UserError(f"{folder} is not a run folder: it has no config.json")
    config = load_config(folder / "config.json")
    store = CheckpointStore(folder / "checkpoints", config.checkpoint, World())
    place = store.find(checkpoint)
    tokenizer = read_tokenizer(folder)
    kind = _which_weights(weights, config)
    backbone = read_backbone(folder)
    if backbone is None and config.model.backbone == "causal_lm":
        raise UserError(f"{folder} is damaged: it has no backbone.json")
    model = build_stored(place, config, tokenizer.num_tokens, backbone)
    tensors = {f"{kind}.{name}": p.detach() for name, p in model.named_parameters()}
    load_tensors(place, tensors)
    target = pick_device(device)
    return Run(
        folder,
        config,
        read_state(place)["step"],
        tokenizer,
        model.to(target).eval(),
        build_framework(config),
        target,
        backbone,
    )


def _which_weights(weights: str, config: RunConfig) -> str:
    look_up("weights", weights, {"auto": 0, "ema": 0, "raw": 0})
    if weights == "ema" and not config.optim.ema:
        raise UserError(
            "this run has no moving average of weights (optim.ema is 0); use raw weights"
        )
    return "model" if weights == "raw" or not config.optim.ema else "ema"
