"""A trained run in Python: likelihood of texts, samples, infilling, answers, in a few lines."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, overload

from bellmask.evaluate.likelihood import evaluate_run, scorer_of, text_nll
from bellmask.generate.answers import Answerer, Question
from bellmask.generate.fill import decode_samples, fill_canvas, run_canvas
from bellmask.generate.settings import sampling_of
from bellmask.model.transformer import describe_size
from bellmask.storage import loading
from bellmask.storage.build import describe_learning
from bellmask.storage.loading import Loaded, Weights


class Run(Loaded):
    """A run's options, tokenizer and weights at one checkpoint, with methods to use them."""

    # each is a function of a Loaded, documented where it is defined
    evaluate = evaluate_run
    scorer = scorer_of
    nll = text_nll
    canvas = run_canvas
    generate = fill_canvas
    texts = decode_samples

    def sample(
        self,
        count: int = 1,
        *,
        prefix: str = "",
        length: int | None = None,
        seed: int = 0,
        **settings: Any,
    ) -> list[str]:
        """Sample texts, optionally continuing a prefix; ``length`` tokens in total.

        ``settings`` are fields of :class:`bellmask.generate.settings.Sampling`.
        """
        canvas = self.canvas(prefix=prefix, length=length)
        return self.texts(self.generate(canvas, count, sampling_of(settings), seed=seed))

    def infill(self, text: str, count: int = 1, *, seed: int = 0, **settings: Any) -> list[str]:
        """Fill the gaps of ``"The [MASK*12] sat on the [MASK*3]."``; settings as for ``sample``."""
        canvas = self.canvas(template=text)
        return self.texts(self.generate(canvas, count, sampling_of(settings), seed=seed))

    @overload
    def answer(self, prompts: str, **options: Any) -> str: ...
    @overload
    def answer(self, prompts: Sequence[str], **options: Any) -> list[str]: ...
    def answer(
        self,
        prompts: str | Sequence[str],
        *,
        length: int | None = None,
        seed: int = 0,
        **settings: Any,
    ) -> str | list[str]:
        """A response to a prompt, or to each of several; settings as for ``sample``."""
        if isinstance(prompts, str):
            return self.answer([prompts], length=length, seed=seed, **settings)[0]
        questions, sampling = [*map(Question.plain, prompts)], sampling_of(settings)
        answers = Answerer(self).answer(questions, length=length, sampling=sampling, seed=seed)
        return [answer.text for answer in answers]

    def __str__(self) -> str:
        data, tokenizer = self.config.data, self.tokenizer
        text = self.config.sft.train or data.train
        return (
            f"Run {self.folder}, step {self.step:,} of {self.config.train.steps:,}\n"
            f"  network    {describe_size(self.model)}\n"
            f"  training   {describe_learning(self.config)}\n"
            f"  data       {text}, blocks of {data.block_length}\n"
            f"  tokenizer  {tokenizer.num_tokens:,} tokens, mask {tokenizer.mask_id}"
        )


def load(
    name: str | Path, *, checkpoint: str = "latest", weights: Weights = "auto", device: str = "auto"
) -> Run:
    """Load a run folder, a folder that ``bellmask export --format hf`` wrote, or OWNER/NAME.

    ``checkpoint``: latest, best or a step; ``weights``: "auto" uses the moving average if there is
    one, "raw" the trained weights. An export contains one checkpoint with one kind of weights;
    requesting others is an error.
    """
    loaded = loading.load(name, checkpoint=checkpoint, weights=weights, device=device)
    return Run(*(getattr(loaded, field.name) for field in fields(loaded)))


load_run = load
"""Alias of :func:`load`."""
