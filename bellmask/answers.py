"""A run that answers: prompts and conversations → canvases → responses.

The prompt is written as in training (template, BOS, oldest tokens dropped), the response is a gap
of ``length`` tokens that ends where the model writes EOS. Canvases are padded to a multiple of
:data:`WIDTH` tokens, which depends on the prompt alone; those of one width share a batch. So an
answer does not depend on what else is asked.

B canvases of a batch, L their width.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby

import torch
from torch import Tensor

from bellmask.data.example_rows import begin_row
from bellmask.data.messages import Message
from bellmask.data.templates import PromptEncoder, make_template
from bellmask.data.tokenizer import Ids
from bellmask.data.turns import has_turns
from bellmask.diffusion.orders import Ordered, Shifted
from bellmask.errors import UserError
from bellmask.generate.canvas import Canvas
from bellmask.generate.fill import fill
from bellmask.generate.settings import Sampling
from bellmask.generate.steps import OnStep, Step
from bellmask.run import Run
from bellmask.runfolder import read_description

WIDTH = 32
"""Canvases are padded to a multiple of so many tokens."""
DEFAULT_LENGTH = 64
DEFAULT_STEPS = 64
"""Sampling steps of an answer where none are asked for, as in the paper (App. C.1)."""


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
    num_tokens: int
    """Tokens before the first EOS."""
    nfe: float
    """Network calls in which it took part; mean of the answers of its batch."""
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

    @property
    def is_tuned(self) -> bool:
        """The run has learned to answer; others just continue what they are given."""
        return self.run.config.sft.train is not None

    @cached_property
    def knows_turns(self) -> bool:
        """The run was fine-tuned on conversations, so that earlier turns belong to the prompt."""
        known = read_description(self.run.folder).get("has_turns")
        return has_turns(self.run.config.sft) if known is None else bool(known)

    @cached_property
    def length(self) -> int:
        """Tokens of a response where none is asked for: what most training examples needed."""
        about = read_description(self.run.folder)
        return int(about.get("response_tokens") or min(DEFAULT_LENGTH, self._block // 2))

    @property
    def _block(self) -> int:
        return self.run.config.data.block_length

    def check_length(self, length: int) -> int:
        """The length, if a prompt has room before such a response."""
        if not 1 <= length < self._block:
            raise UserError(
                f"a response can have 1 to {self._block - 1} tokens, got {length}: the run was "
                f"trained on rows of {self._block}, and a prompt needs room too"
            )
        return length

    def question(self, prompt: str) -> Question:
        """A single prompt, written as the run's examples were."""
        return Question((Message("user", prompt),), self.knows_turns)

    def canvas(self, question: Question, length: int | None = None) -> tuple[Canvas, bool]:
        """(the prompt and a gap of ``length`` tokens, whether the prompt was cut)."""
        length = self.check_length(self.length if length is None else length)
        given, is_cut = begin_row(
            self._prompt_ids(question),
            self._block - length,
            self.run.tokenizer,
            self.run.model.first_maskable > 0,
        )
        gap = torch.full((length,), self.run.tokenizer.mask_id)
        row = torch.cat([torch.from_numpy(given), gap])
        return Canvas(row, self.run.tokenizer.mask_id), is_cut

    def _prompt_ids(self, question: Question) -> Ids:
        """By the template; a run that was never fine-tuned gets a single prompt as it is."""
        said = [replace(message, text=sound(message.text)) for message in question.messages]
        if not self.is_tuned and len(said) == 1:
            return self.run.tokenizer.encode(said[0].text)
        return self._encoder.encode_one(said, question.is_conversation)

    def sampling(self, asked: Sampling) -> Sampling:
        """What is asked, with :data:`DEFAULT_STEPS` where steps could be given and are not."""
        has_steps = asked.has_steps and not self.run.framework.is_causal
        return replace(asked, steps=DEFAULT_STEPS) if has_steps and asked.steps is None else asked

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
        """An answer to each; number ``first_sample + i`` has its own noise, whatever the batch.

        ``on_step`` is told of the questions in order, a batch having prompts of one length, and
        does not see padding.
        """
        canvases = [self.canvas(question, length) for question in questions]
        rows = [canvas.ids_L for canvas, _ in canvases]
        sampling = self.sampling(sampling or Sampling())
        groups = [len(row) if on_step else self._group(len(row), sampling) for row in rows]
        size = 1 if self._is_one_by_one else batch_size
        found: dict[int, Answer] = {}
        for numbers in _batches(groups, size, in_order=on_step is not None):
            made = self._fill(
                [rows[n] for n in numbers],
                sampling,
                seed,
                first_sample + torch.tensor(numbers),
                on_step,
            )
            for number, (ids, nfe) in zip(numbers, made, strict=True):
                found[number] = self._answer(ids, nfe, canvases[number][1])
            if on_batch:
                on_batch(len(found))
        return [found[number] for number in range(len(questions))]

    @property
    def _is_one_by_one(self) -> bool:
        """A causal model of our own trunk takes one canvas at a time, without padding."""
        framework = self.run.framework
        return isinstance(framework, Ordered) and not isinstance(framework, Shifted)

    def _width(self, length: int) -> int:
        """Tokens of a padded canvas."""
        return length if self._is_one_by_one else min(-(-length // WIDTH) * WIDTH, self._block)

    def _group(self, length: int, sampling: Sampling) -> Hashable:
        """Canvases that may share a batch: of one width, all padded or none.

        A cache holds what is before the first gap of the batch, so there all gaps begin together.
        """
        width = self._width(length)
        return width, length if sampling.cache != "none" else length == width

    def _fill(
        self,
        rows: Sequence[Tensor],
        sampling: Sampling,
        seed: int,
        samples_B: Tensor,
        on_step: OnStep | None,
    ) -> list[tuple[list[int], float]]:
        """(ids of the gap, network calls) of each row; all are of one group."""
        x_BL, is_real_BL = pad_rows(rows, self._width(len(rows[0])), self.run.tokenizer.pad_id)
        made = fill(
            self.run.model,
            x_BL,
            self.run.framework,
            sampling,
            mask_id=self.run.tokenizer.mask_id,
            seed=seed,
            first_sample=int(samples_B[0]) if self._is_one_by_one else samples_B,
            is_real_BL=None if bool(is_real_BL.all()) else is_real_BL,
            device=self.run.device,
            on_step=on_step and _without_padding(on_step, len(rows[0])),
        )
        is_gap_BL = x_BL == self.run.tokenizer.mask_id
        pairs = zip(made.ids_BL, is_gap_BL, strict=True)
        return [(ids_L[is_gap_L].tolist(), made.nfe) for ids_L, is_gap_L in pairs]

    def _answer(self, ids: list[int], nfe: float, is_cut: bool) -> Answer:
        """The text goes up to the first EOS."""
        tokenizer = self.run.tokenizer
        end = ids.index(tokenizer.eos_id) if tokenizer.eos_id in ids else len(ids)
        text = tokenizer.decode(torch.tensor(ids[:end], dtype=torch.int64).numpy()).strip()
        return Answer(text, tuple(ids), end, nfe, is_cut)


def sound(text: str) -> str:
    """Halves of surrogate pairs, which no tokenizer takes, as question marks; as in training."""
    return text.encode("utf-8", "replace").decode("utf-8")


def _without_padding(on_step: OnStep, length: int) -> OnStep:
    def show(step: Step) -> None:
        on_step(replace(step, ids_BL=step.ids_BL[:, :length]))

    return show


def _batches(groups: Sequence[Hashable], size: int, in_order: bool) -> Iterator[list[int]]:
    """Numbers of canvases of one group, neighbours if ``in_order``, ``size`` at a time."""
    places: dict[Hashable, int] = {}
    for group in groups:
        places.setdefault(group, len(places))
    numbers = list(range(len(groups)))
    if not in_order:
        numbers.sort(key=lambda number: places[groups[number]])
    for _, same in groupby(numbers, key=lambda number: groups[number]):
        together = list(same)
        for start in range(0, len(together), size):
            yield together[start : start + size]


def pad_rows(rows: Sequence[Tensor], width: int, pad_id: int) -> tuple[Tensor, Tensor]:
    """(rows [B, width], True where not padding)."""
    x_BL = torch.full((len(rows), width), pad_id)
    is_real_BL = torch.zeros(len(rows), width, dtype=torch.bool)
    for number, row in enumerate(rows):
        x_BL[number, : len(row)] = row
        is_real_BL[number, : len(row)] = True
    return x_BL, is_real_BL
