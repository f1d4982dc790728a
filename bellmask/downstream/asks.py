"""What a model is asked: the probability of some tokens, given those before and behind them.

A continuation is tokenised as lm-eval does it: white space at the end of the context moves to the
continuation, and its tokens are those of both together behind the context's own. Where context and
continuation do not fit into the run's block, the oldest tokens of the context go; a continuation
that is too long by itself is cut into windows, each after the tokens before it, whose
log-probabilities add up.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from bellmask.data.tokenizers import Tokenizer
from bellmask.utils.errors import UserError

Tokens = tuple[int, ...]


@dataclass(frozen=True)
class Ask:
    """Tokens whose probability is wanted, between tokens that are shown."""

    given: Tokens
    """Shown before; the run's begin sign included."""
    target: Tokens
    """Scored; never empty."""
    after: Tokens = ()
    """Shown behind: masked models and AoARMs only."""
    noise: int = 0
    """Asks with one number draw the same masks: common random numbers over the choices."""

    @property
    def length(self) -> int:
        """Tokens of the whole row."""
        return len(self.given) + len(self.target) + len(self.after)


@dataclass(frozen=True)
class Score:
    """The log-probability of a target, and what it cost."""

    log_probability: float
    """Nats: minus the NELBO of a masked model or AoARM, a lower bound; exact for an ARM."""
    error: float
    """Standard deviation of the estimate over masks; 0 without noise, nan for a single draw."""
    num_tokens: int
    num_passes: int
    """Rows that went through the network."""
    is_exact: bool
    """The estimate has no noise."""


def add_up(scores: Sequence[Score]) -> Score:
    """The windows of one continuation as one score; their draws share numbers, so errors add."""
    return Score(
        math.fsum(score.log_probability for score in scores),
        math.fsum(score.error for score in scores),
        sum(score.num_tokens for score in scores),
        sum(score.num_passes for score in scores),
        all(score.is_exact for score in scores),
    )


@dataclass(frozen=True)
class AskMaker:
    """Texts → asks, by the tokenizer and the block length of a run."""

    tokenizer: Tokenizer
    block_length: int
    begin: Tokens
    """The begin sign that the run's rows have, or nothing."""

    def asks(
        self, context: str, continuation: str, *, after: str = "", noise: int = 0
    ) -> list[Ask]:
        """One ask, or the windows of a continuation that does not fit."""
        before, target = self.split(context, continuation)
        if not target:
            raise UserError(f"the continuation {continuation!r} has no tokens: nothing to score")
        behind = self.split(context + continuation, after)[1] if after else ()
        return self.windows(before, target, behind, noise)

    def rolling(self, text: str, *, noise: int = 0) -> list[Ask]:
        """The whole text, nothing shown before it but the begin sign; none for an empty text."""
        ids = self.encode(text)
        return self.windows((), ids, (), noise) if ids else []

    def encode(self, text: str) -> Tokens:
        """Tokens of a text; halves of surrogate pairs, which no tokenizer takes, become '?'."""
        return tuple(self.tokenizer.encode(text.encode("utf-8", "replace").decode()).tolist())

    def split(self, context: str, continuation: str) -> tuple[Tokens, Tokens]:
        """(tokens of the context, of the continuation), as lm-eval cuts them."""
        kept = context.rstrip()
        continuation = context[len(kept) :] + continuation
        before = self.encode(kept) if kept else ()
        return before, self.encode(kept + continuation)[len(before) :]

    def windows(self, before: Tokens, target: Tokens, behind: Tokens, noise: int) -> list[Ask]:
        """Rows of a block at most; only the last window sees what is behind."""
        block = self.block_length
        most = block - len(self.begin)
        if len(target) > most:
            size = max(1, block // 2)
            pieces = [target[start : start + size] for start in range(0, len(target), size)]
        else:
            pieces = [target]
        made, seen = [], before
        for number, piece in enumerate(pieces):
            is_last = number == len(pieces) - 1
            room = most - len(piece)
            # half of it, and what the context leaves
            shown = behind[: max(room // 2, room - len(seen))] if is_last else ()
            made.append(
                Ask(self.before(seen, block - len(piece) - len(shown)), piece, shown, noise)
            )
            seen = seen + piece
        return made

    def before(self, tokens: Tokens, room: int) -> Tokens:
        """The begin sign and the last tokens that have room."""
        begin = () if self.begin and tokens[:1] == self.begin else self.begin
        if len(begin) + len(tokens) <= room:
            return begin + tokens
        left = room - len(self.begin)
        return self.begin + tokens[len(tokens) - left :]
