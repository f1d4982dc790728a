"""A conversation with a run: what was said, what is asked next, how answers are drawn.

Each answer gets the next sample number, so none is drawn from the noise of another, and all of
them follow from the seed.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from bellmask.answers import Answer, Answerer, Question
from bellmask.data.example_files import Message
from bellmask.generate.settings import Sampling
from bellmask.generate.steps import OnStep
from bellmask.utils.errors import UserError


@dataclass(frozen=True)
class Turn:
    """What was asked and what was answered."""

    asked: str
    answered: str

    @property
    def messages(self) -> tuple[Message, Message]:
        """As both sides said it."""
        return Message("user", self.asked), Message("assistant", self.answered)


@dataclass
class Talk:
    """``talk.ask("Hello")``, ``talk.retry()``, ``talk.reset()``; fields may be set in between."""

    answerer: Answerer
    has_memory: bool
    """Earlier turns are part of the prompt; else each line is asked alone."""
    length: int
    sampling: Sampling
    seed: int = 0
    system: str = ""
    """Said to the model before all else."""
    number: int = 0
    """Of the next answer's sample."""
    turns: tuple[Turn, ...] = ()
    _last: tuple[str, tuple[Turn, ...]] | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        self.answerer.check_length(self.length)
        self.set_sampling()

    def set_length(self, length: int) -> None:
        """Tokens of an answer from now on."""
        self.length = self.answerer.check_length(length)

    def set_sampling(self, **settings: float) -> None:
        """Other sampling settings from now on."""
        asked = replace(self.sampling, **settings)  # type: ignore[arg-type]
        if "steps" in settings and self.answerer.run.framework.is_causal:
            raise UserError("this run writes token by token: there are no steps to choose")
        self.sampling = self.answerer.sampling(asked.check())

    def reset(self) -> None:
        """Forget what was said."""
        self.turns, self._last = (), None

    def ask(self, text: str, on_step: OnStep | None = None) -> Answer:
        """Say something; question and answer are remembered once the answer is whole."""
        return self._answer(text, self.turns, on_step)

    def retry(self, on_step: OnStep | None = None) -> Answer:
        """Another answer to the last question, in place of the first."""
        if self._last is None:
            raise UserError("nothing has been asked yet")
        return self._answer(*self._last, on_step)

    def question(self, text: str, before: tuple[Turn, ...]) -> Question:
        """All that the model is given."""
        said = [Message("system", self.system)] if self.system else []
        if self.has_memory:
            said += [message for turn in before for message in turn.messages]
        is_conversation = self.has_memory or self.answerer.knows_turns
        return Question((*said, Message("user", text)), is_conversation)

    def _answer(self, text: str, before: tuple[Turn, ...], on_step: OnStep | None) -> Answer:
        self._last = text, before
        number, self.number = self.number, self.number + 1
        (answer,) = self.answerer.answer(
            [self.question(text, before)],
            length=self.length,
            sampling=self.sampling,
            seed=self.seed,
            first_sample=number,
            on_step=on_step,
        )
        self.turns = (*before, Turn(text, answer.text))
        return answer
