"""Answers of a run: prompts and conversations → canvases → responses.

The prompt is written as in training (template, BOS, oldest tokens dropped), the response is a gap
of ``length`` tokens that ends where the model writes EOS. An answer does not depend on the other
prompts (:mod:`bellmask.generate.fill`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bellmask.data.chat_templates import Message, PromptEncoder, make_template
from bellmask.data.examples import begin_row
from bellmask.generate.fill import fill_rows, text_before_eos
from bellmask.generate.settings import Sampling
from bellmask.storage.loading import Loaded
from bellmask.storage.run_folder import read_description
from bellmask.utils.errors import UserError
from bellmask.utils.files import sanitize

DEFAULT_LENGTH = 64
ANSWER_STEPS = 64
"""Default number of sampling steps of an answer, as in the paper (App. C.1)."""


def default_length(folder: Path, block_length: int) -> int:
    """Tokens of a response: enough for most training examples."""
    about = read_description(folder)
    return int(about.get("response_tokens") or min(DEFAULT_LENGTH, block_length // 2))


@dataclass(frozen=True)
class Question:
    """A prompt: the conversation so far, ending with the user's message."""

    messages: tuple[Message, ...]
    is_conversation: bool = False
    """Mark roles if the run's template is ``auto``."""
    line: Mapping[str, Any] = field(default_factory=dict)
    """Keys of its line in a file, which are copied to the answer."""

    @staticmethod
    def plain(prompt: str) -> Question:
        return Question((Message("user", prompt),))

    @property
    def text(self) -> str:
        """The prompt as text."""
        if not self.is_conversation:
            return self.messages[-1].text
        return "\n".join(f"{message.role}: {message.text}" for message in self.messages)


@dataclass(frozen=True)
class Answer:
    """The response of the model."""

    text: str
    ids: tuple[int, ...]
    """The whole gap, with EOS."""
    num_tokens: int
    """Tokens before the first EOS."""
    nfe: float
    """Network calls; the mean over its batch."""
    is_cut: bool
    """The prompt was too long and lost its oldest tokens."""


class Answerer:
    """Answers of a run: ``Answerer(run).answer([Question.plain("2 + 2 =")])``."""

    def __init__(self, run: Loaded) -> None:
        self.run = run
        chat = None if run.backbone is None else run.backbone.chat_template
        template = make_template(run.config.sft.template, run.tokenizer, chat)
        self.encoder = PromptEncoder(run.tokenizer, template)

    @property
    def is_tuned(self) -> bool:
        """True if the run was fine-tuned on prompts; others only continue their input."""
        return self.run.config.sft.train is not None

    @cached_property
    def marks_roles(self) -> bool:
        """The run was fine-tuned on conversations, or on single prompts written like them."""
        return bool(read_description(self.run.folder).get("has_turns"))

    @property
    def knows_turns(self) -> bool:
        """It was fine-tuned on later turns too, so that earlier ones belong to the prompt."""
        return self.marks_roles and self.run.config.sft.turns == "all"

    @cached_property
    def length(self) -> int:
        """Default length of a response."""
        return default_length(self.run.folder, self._block)

    @property
    def _block(self) -> int:
        return self.run.config.data.block_length

    def check_length(self, length: int | None) -> int:
        """The length, by default :attr:`length`, if a prompt has room before such a response."""
        length = self.length if length is None else length
        if not 1 <= length < self._block:
            raise UserError(f"a response can have 1 to {self._block - 1} tokens, got {length}")
        return length

    def row(self, question: Question, length: int | None = None) -> tuple[Tensor, bool]:
        """(the prompt and a gap of ``length`` tokens, whether the prompt was cut)."""
        length, tokenizer = self.check_length(length), self.run.tokenizer
        needs_bos = self.run.model.first_maskable > 0
        said = [replace(message, text=sanitize(message.text)) for message in question.messages]
        if not self.is_tuned and len(said) == 1:  # never fine-tuned: a single prompt as it is
            prompt = tokenizer.encode(said[0].text)
        else:
            prompt = self.encoder.encode_one(said, question.is_conversation or self.marks_roles)
        given, is_cut = begin_row(prompt, self._block - length, tokenizer, needs_bos)
        gap = torch.full((length,), tokenizer.mask_id)
        return torch.cat([torch.from_numpy(given), gap]), is_cut

    def sampling(self, asked: Sampling) -> Sampling:
        """The settings, with :data:`ANSWER_STEPS` as the default number of steps."""
        has_steps = asked.has_steps and not self.run.framework.is_causal
        return replace(asked, steps=ANSWER_STEPS) if has_steps and asked.steps is None else asked

    def answer(
        self,
        questions: Sequence[Question],
        *,
        length: int | None = None,
        sampling: Sampling | None = None,
        batch_size: int = 32,
        **options: Any,
    ) -> list[Answer]:
        """An answer to each; the i-th has the noise of sample i, or ``samples[i]``, in any batch.

        ``options`` are those of :func:`fill_rows`: seed, samples, progress, on_step, which gets the
        questions in order, in batches of prompts of one length, without padding.
        """
        rows = [self.row(question, length) for question in questions]
        canvases, asked = [row for row, _ in rows], self.sampling(sampling or Sampling())
        options |= {"longest": self._block, "batch_size": batch_size}
        made = fill_rows(self.run, canvases, asked, **options)
        answers = []
        for one, (_, is_cut) in zip(made, rows, strict=True):
            text, end = text_before_eos(one.ids, self.run.tokenizer)
            answers.append(Answer(text.strip(), tuple(one.ids), end, one.nfe, is_cut))
        return answers
