"""Who takes part in a suite: what it must be able to do, and a run that can.

A contestant gives log-probabilities of continuations and writes into gaps. Those that know nothing
are in :mod:`bellmask.downstream.baselines`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, Protocol

from torch import Tensor

from bellmask.data.chat_templates import join, response_after
from bellmask.data.example_files import Message
from bellmask.data.tokenizers import Tokenizer
from bellmask.downstream.asks import Ask, Score, Tokens
from bellmask.downstream.continuations import ContinuationScorer
from bellmask.downstream.masks import Estimator
from bellmask.downstream.questions import Prompts
from bellmask.generate.answers import Answerer
from bellmask.generate.fill import fill_rows
from bellmask.generate.settings import Sampling
from bellmask.storage.loading import Loaded, run_marks
from bellmask.utils.errors import UserError
from bellmask.utils.files import sound
from bellmask.utils.store import content_key

OnDone = Callable[[int], None]
Ending = Literal["auto", "none", "eos"]


class Contestant(Protocol):
    """What the suite knows of a model."""

    prompts: Prompts
    """The form of the questions that it is asked."""
    tokenizer: Tokenizer
    block_length: int
    own_length: int | None
    """Tokens of a gap for any answer, as the run was tuned to give; None: the task's."""
    is_model: bool
    """False for baselines, which take no time."""
    is_guess: bool
    """It scores nothing: its choices are guesses."""

    @property
    def fingerprint(self) -> str:
        """Changes when a score or a text may."""
        ...

    @property
    def sees_behind(self) -> bool:
        """It can read what follows a gap."""
        ...

    def about(self) -> dict[str, Any]:
        """Facts for the files."""
        ...

    def pair(self, context: str, continuation: str) -> tuple[Tokens, Tokens]:
        """Tokens of both."""
        ...

    def begin(self, tokens: Tokens, room: int) -> Tokens:
        """How a row begins: the begin sign and the last tokens that have room."""
        ...

    def asks(self, context: str, continuation: str, noise: int) -> list[Ask]:
        """What to ask for a continuation's probability: one ask or several windows."""
        ...

    def is_exact(self, ask: Ask) -> bool:
        """Every seed gives this ask the same score."""
        ...

    def score(self, asks: Sequence[Ask], seed: int, on_batch: OnDone | None = None) -> list[Score]:
        """Log-probabilities."""
        ...

    def write(
        self,
        rows: Sequence[Tensor],
        samples: Sequence[int],
        *,
        seed: int,
        temperature: float,
        on_batch: OnDone | None = None,
    ) -> list[list[int]]:
        """What the masks of each row become; row i has the noise of number ``samples[i]``."""
        ...


class RunContestant:
    """A run; a fine-tuned one is asked the way it was tuned."""

    is_model, is_guess = True, False

    def __init__(
        self,
        run: Loaded,
        estimator: Estimator | None = None,
        *,
        prompts: Literal["auto", "plain", "tuned"] = "auto",
        ending: Ending = "auto",
        batch_tokens: int = 8192,
    ) -> None:
        self.run, self.tokenizer = run, run.tokenizer
        self.block_length = run.config.data.block_length
        self._scorer = ContinuationScorer(run, estimator, batch_tokens=batch_tokens)
        answerer = Answerer(run)
        self._is_tuned = answerer.is_tuned
        self._is_conversation = answerer.is_tuned and answerer.knows_turns
        self._encoder = answerer.encoder
        is_tuned = answerer.is_tuned if prompts == "auto" else prompts == "tuned"
        self.prompts: Prompts = "tuned" if is_tuned else "plain"
        wants_eos = is_tuned if ending == "auto" else ending == "eos"
        self.has_eos = wants_eos and run.tokenizer.eos_id >= 0
        self.own_length = answerer.length if answerer.is_tuned else None
        self.fingerprint = content_key(run_marks(run), repr(self._scorer.estimator))

    @property
    def sees_behind(self) -> bool:
        """All but ARMs do."""
        return self.run.config.framework.name != "arm"

    def about(self) -> dict[str, Any]:
        """Facts for the files."""
        return {
            "step": self.run.step,
            "framework": self.run.config.framework.name,
            "tokenizer": self.tokenizer.fingerprint,
            "prompts": self.prompts,
            "ending": "eos" if self.has_eos else "none",
            "block_length": self.block_length,
        }

    def pair(self, context: str, continuation: str) -> tuple[Tokens, Tokens]:
        """Plain: as lm-eval cuts them. Tuned: apart, by the run's template, as in training
        (:mod:`bellmask.data.examples`).
        """
        maker = self._scorer.maker
        if self.prompts == "plain":
            return maker.split(context, continuation)
        if not self._is_tuned:
            return maker.encode(context), maker.encode(response_after(context, continuation))
        messages = (Message("user", sound(context)),)
        parts = self._encoder.template.parts(messages, self._is_conversation)
        before = tuple(self._encoder.encode([parts])[0].tolist())
        return before, maker.encode(response_after(join(parts), continuation))

    def begin(self, tokens: Tokens, room: int) -> Tokens:
        """How a row begins: the begin sign and the last tokens that have room."""
        return self._scorer.maker.before(tokens, room)

    def asks(self, context: str, continuation: str, noise: int) -> list[Ask]:
        """With the EOS behind the continuation, if it is to be scored."""
        before, target = self.pair(context, continuation)
        if not target:
            raise UserError(f"the choice {continuation!r} has no tokens: nothing to score")
        if self.has_eos:
            target = (*target, self.tokenizer.eos_id)
        return self._scorer.maker.windows(before, target, (), noise)

    def is_exact(self, ask: Ask) -> bool:
        """Short continuations, and any of an ARM."""
        return self._scorer.is_exact(ask)

    def score(self, asks: Sequence[Ask], seed: int, on_batch: OnDone | None = None) -> list[Score]:
        """See :class:`bellmask.downstream.continuations.ContinuationScorer`."""
        return self._scorer.score(asks, seed=seed, on_batch=on_batch)

    def write(
        self,
        rows: Sequence[Tensor],
        samples: Sequence[int],
        *,
        seed: int,
        temperature: float,
        on_batch: OnDone | None = None,
    ) -> list[list[int]]:
        """One token per step, the surest first, as DiffuLLaMA's scripts do; an ARM in order."""
        sampling = Sampling(temperature=temperature)
        if not self.run.framework.is_causal:
            sampling = Sampling(
                rule="most_confident", grid="count", per_step=1, temperature=temperature
            )
        made = fill_rows(
            self.run,
            rows,
            sampling,
            longest=self.block_length,
            seed=seed,
            samples=samples,
            batch_size=max(1, self._scorer.batch_tokens // max(map(len, rows))),
            on_batch=on_batch,
        )
        return [one.ids for one in made]
