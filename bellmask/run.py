"""A trained run in Python: likelihood of texts, samples, infilling, answers, in a few lines."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from torch import Tensor

from bellmask.data.blocks import Blocks
from bellmask.evaluate.likelihood import (
    Scorer,
    TextNll,
    evaluate_run,
    scorer_of,
    text_nll,
)
from bellmask.evaluate.result import Likelihood
from bellmask.generate.answers import Answerer
from bellmask.generate.canvas import Canvas, OnStep
from bellmask.generate.fill import decode_samples, fill_canvas, run_canvas
from bellmask.generate.sampler import Generation
from bellmask.generate.settings import Sampling, sampling_of
from bellmask.storage import loading
from bellmask.storage.loading import Loaded, Weights
from bellmask.utils.errors import UserError


class Run(Loaded):
    """A run's options, tokenizer and weights at one checkpoint, and what can be done with them."""

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
        return evaluate_run(
            self,
            blocks,
            draws=draws,
            seed=seed,
            batch_size=batch_size,
            row_keys=row_keys,
            on_batch=on_batch,
        )

    def scorer(self, blocks: Blocks) -> Scorer:
        """Cross-entropies on blocks in contexts of given size, for curves by context count."""
        return scorer_of(self, blocks)

    def nll(self, texts: Sequence[str], *, draws: int = 32, seed: int = 1234) -> list[TextNll]:
        """The NLL (bound) of each text; one longer than a block is cut into blocks, scored apart.

        A text's masks are its own: its value does not depend on the others.
        """
        return text_nll(self, texts, draws=draws, seed=seed)

    def canvas(
        self, *, prefix: str = "", template: str | None = None, length: int | None = None
    ) -> Canvas:
        """A row to fill: empty, after a prefix, or with the gaps of a template."""
        return run_canvas(self, prefix=prefix, template=template, length=length)

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
        """Fill a canvas ``count`` times; see :func:`bellmask.generate.fill.fill_canvas`."""
        return fill_canvas(
            self,
            canvas,
            count,
            sampling,
            seed=seed,
            first_sample=first_sample,
            batch_size=batch_size,
            on_batch=on_batch,
            on_step=on_step,
        )

    def texts(self, made: Generation) -> list[str]:
        """Generated ids as text; of a run on single documents, up to the first EOS."""
        return decode_samples(self, made)

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

    def infill(self, text: str, count: int = 1, *, seed: int = 0, **settings: Any) -> list[str]:
        """Fill the gaps of ``"The [MASK*12] sat on the [MASK*3]."``; settings as for ``sample``."""
        canvas = self.canvas(template=text)
        return self.texts(self.generate(canvas, count, sampling_of(settings), seed=seed))

    def answer(
        self, prompts: Sequence[str], *, length: int | None = None, seed: int = 0, **settings: Any
    ) -> list[str]:
        """A response to each prompt, asked as in fine-tuning; settings as for ``sample``."""
        if isinstance(prompts, str):
            raise UserError("answer takes a list of prompts; for one write run.answer([prompt])")
        answerer = Answerer(self)
        questions = [answerer.question(prompt) for prompt in prompts]
        sampling = sampling_of(settings)
        answers = answerer.answer(questions, length=length, sampling=sampling, seed=seed)
        return [answer.text for answer in answers]


def _as_run(loaded: Loaded) -> Run:
    return Run(*(getattr(loaded, field.name) for field in fields(loaded)))


def load(
    name: str | Path,
    *,
    checkpoint: str = "latest",
    weights: Weights = "auto",
    device: str = "auto",
) -> Run:
    """Load a run folder, a folder that ``bellmask export --format hf`` wrote, or OWNER/NAME.

    ``checkpoint``: latest, best or a step; ``weights``: "auto" takes the moving average where there
    is one, "raw" the trained weights. An export holds one checkpoint's weights of one kind; asking
    it for others is an error.
    """
    return _as_run(loading.load(name, checkpoint=checkpoint, weights=weights, device=device))


def load_run(
    folder: str | Path,
    *,
    checkpoint: str = "latest",
    weights: Weights = "auto",
    device: str = "auto",
) -> Run:
    """Load a run folder; see :func:`load`."""
    return _as_run(loading.load_run(folder, checkpoint=checkpoint, weights=weights, device=device))
