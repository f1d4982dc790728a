"""A run that answers: prompts and conversations → canvases → responses.

The prompt is written as in training (template, BOS, oldest tokens dropped), the response is a gap of
``length`` tokens that ends where the model writes EOS. Canvases are padded to a multiple of
:data:`WIDTH` tokens, which depends on the prompt alone; those of one width share a batch. So an
answer does not depend on what else is asked.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from bellmask.data.example_rows import begin_row
from bellmask.data.messages import Message
from bellmask.data.templates import PromptEncoder, make_template
from bellmask.errors import UserError
from bellmask.generate.canvas import Canvas
from bellmask.generate.fill import fill
from bellmask.generate.settings import Sampling
from bellmask.generate.steps import OnStep
from bellmask.run import Run
from bellmask.runfolder import read_description

WIDTH = 32
"""Canvases are padded to a multiple of so many tokens."""
DEFAULT_LENGTH = 64


@dataclass(frozen=True)
class Question:
    """Something to be answered: what was said so far, the user's words last."""

    messages: tuple[Message, ...]
    is_conversation: bool = False
    """Roles are marked where the run's template is ``auto``."""

    @staticmethod
    def plain(prompt: str) -> Question:
        """A single prompt."""
        return Question((Message("user", prompt),))


@dataclass(frozen=True)
class Answer:
    """What the model wrote."""

    text: str
    ids: tuple[int, ...]
    """The whole gap, with EOS."""
    nfe: int
    """Network calls in which it took part."""
    is_cut: bool
    """The prompt was too long and lost its oldest tokens."""


class Answerer:
    """Asks a run; ``Answerer(run).answer([Question.plain("2 + 2 =")])``."""

    def __init__(self, run: Run) -> None:
        self.run = run
        template = None if run.backbone is None else run.backbone.chat_template
        self._encoder = PromptEncoder(
            run.tokenizer, make_template(run.config.sft.template, run.tokenizer, template)
        )

    @cached_property
    def length(self) -> int:
        """Tokens of a response where none is asked for: what most training examples needed."""
        about = read_description(self.run.folder)
        return int(about.get("response_tokens") or min(DEFAULT_LENGTH, self._block // 2))

    @property
    def _block(self) -> int:
        return self.run.config.data.block_length

    def canvas(self, question: Question, length: int | None = None) -> tuple[Canvas, bool]:
        """(the prompt and a gap of ``length`` tokens, whether the prompt was cut)."""
        length = length or self.length
        if not 1 <= length < self._block:
            raise UserError(
                f"a response of {length} tokens leaves no room for a prompt: the run was trained "
                f"on rows of {self._block}"
            )
        ids = self._encoder.encode_one(question.messages, question.is_conversation)
        given, is_cut = begin_row(
            ids, self._block - length, self.run.tokenizer, self.run.model.first_maskable > 0
        )
        gap = torch.full((length,), self.run.tokenizer.mask_id)
        row = torch.cat([torch.from_numpy(given), gap])
        return Canvas(row, self.run.tokenizer.mask_id), is_cut

    def answer(
        self,
        questions: Sequence[Question],
        *,
        length: int | None = None,
        sampling: Sampling | None = None,
        seed: int = 0,
        first_sample: int = 0,
        batch_size: int = 32,
        on_batch: Callable[[int], None] | None = None,
        on_step: OnStep | None = None,
    ) -> list[Answer]:
        """An answer to each; number ``first_sample + i`` has its own noise, whatever the batch."""
        canvases = [self.canvas(question, length) for question in questions]
        found: dict[int, Answer] = {}
        for numbers in _batches([len(canvas) for canvas, _ in canvases], batch_size):
            rows = [canvases[number][0].ids_L for number in numbers]
            width = -(-len(rows[0]) // WIDTH) * WIDTH
            x_BL, is_real_BL = pad_rows(rows, width, self.run.tokenizer.pad_id)
            made = fill(
                self.run.model,
                x_BL,
                self.run.framework,
                sampling or Sampling(),
                mask_id=self.run.tokenizer.mask_id,
                seed=seed,
                first_sample=first_sample + torch.tensor(numbers),
                is_real_BL=None if bool(is_real_BL.all()) else is_real_BL,
                device=self.run.device,
                on_step=on_step,
            )
            for place, number in enumerate(numbers):
                is_gap_L = x_BL[place] == self.run.tokenizer.mask_id
                ids = made.ids_BL[place][is_gap_L].tolist()
                nfe = round(made.num_rows / len(numbers))
                found[number] = Answer(self._text(ids), tuple(ids), nfe, canvases[number][1])
            if on_batch:
                on_batch(len(found))
        return [found[number] for number in range(len(questions))]

    def _text(self, ids: list[int]) -> str:
        """Up to the first EOS."""
        tokenizer = self.run.tokenizer
        end = ids.index(tokenizer.eos_id) if tokenizer.eos_id in ids else len(ids)
        return tokenizer.decode(torch.tensor(ids[:end], dtype=torch.int64).numpy()).strip()


def _batches(lengths: Sequence[int], size: int) -> Iterator[list[int]]:
    """Numbers of canvases that are padded to one width, ``size`` at a time."""
    by_width: dict[int, list[int]] = {}
    for number, length in enumerate(lengths):
        by_width.setdefault(-(-length // WIDTH), []).append(number)
    for _, numbers in sorted(by_width.items()):
        for start in range(0, len(numbers), size):
            yield numbers[start : start + size]


def pad_rows(rows: Sequence[Tensor], width: int, pad_id: int) -> tuple[Tensor, Tensor]:
    """(rows [B, width], True where not padding)."""
    x_BL = torch.full((len(rows), width), pad_id)
    is_real_BL = torch.zeros(len(rows), width, dtype=torch.bool)
    for number, row in enumerate(rows):
        x_BL[number, : len(row)] = row
        is_real_BL[number, : len(row)] = True
    return x_BL, is_real_BL
