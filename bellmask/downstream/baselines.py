"""Two contestants that know nothing, to show what scores are worth: guessing, and the unigram."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bellmask.data.tokenizers import Tokenizer
from bellmask.downstream.asks import Ask, AskMaker, Score, Tokens
from bellmask.downstream.contestants import OnDone
from bellmask.downstream.questions import Prompts
from bellmask.evaluate.context_curve import REFERENCE_BLOCKS
from bellmask.storage.loading import Loaded
from bellmask.utils.rng import stream_key, uniform


@dataclass
class Unigram:
    """Every token by its frequency, whatever the context."""

    tokenizer: Tokenizer
    log_p_V: NDArray[np.float64]
    block_length: int
    is_guess: bool = False
    is_model: bool = False
    prompts: Prompts = "plain"
    own_length: int | None = None
    sees_behind: bool = True

    @property
    def fingerprint(self) -> str:
        """Of the frequencies."""
        mark = hashlib.sha256(self.log_p_V.tobytes()).hexdigest()
        return f"unigram/{self.tokenizer.fingerprint}/{mark}"

    @cached_property
    def _maker(self) -> AskMaker:
        return AskMaker(self.tokenizer, self.block_length, ())

    def about(self) -> dict[str, Any]:
        """Facts for the files."""
        none = {"step": None, "framework": None, "ending": "none", "tokenizer": None}
        return {**none, "prompts": self.prompts, "block_length": self.block_length}

    def pair(self, context: str, continuation: str) -> tuple[Tokens, Tokens]:
        """As lm-eval cuts them."""
        return self._maker.split(context, continuation)

    def begin(self, tokens: Tokens, room: int) -> Tokens:
        """The last tokens that have room."""
        return self._maker.before(tokens, room)

    def asks(self, context: str, continuation: str, noise: int) -> list[Ask]:
        """As lm-eval cuts them."""
        return self._maker.asks(context, continuation, noise=noise)

    def is_exact(self, ask: Ask) -> bool:
        """There is no noise."""
        return True

    def score(self, asks: Sequence[Ask], seed: int, on_batch: OnDone | None = None) -> list[Score]:
        """Sums of log-frequencies."""
        return [
            Score(float(self.log_p_V[list(ask.target)].sum()), 0.0, len(ask.target), 0, True)
            for ask in asks
        ]

    def write(
        self,
        rows: Sequence[Tensor],
        samples: Sequence[int],
        *,
        seed: int,
        temperature: float,
        on_batch: OnDone | None = None,
    ) -> list[list[int]]:
        """Tokens drawn by frequency."""
        share_V = np.cumsum(np.exp(self.log_p_V))
        made = []
        for row, sample in zip(rows, samples, strict=True):
            count = int((row == self.tokenizer.mask_id).sum())
            u = uniform(stream_key(seed, "unigram", sample), torch.arange(count)).numpy()
            drawn = np.searchsorted(share_V, u * share_V[-1], side="right")
            made.append(drawn.clip(max=len(share_V) - 1).tolist())
        return made


def unigram_of(run: Loaded) -> Unigram:
    """Frequencies in (a sample of) the run's training text, one added to each count."""
    train, _ = run.blocks()
    run.check_same_data(train)
    train = train.spread(REFERENCE_BLOCKS)
    count_V = np.ones(run.tokenizer.num_tokens)
    for start in range(0, len(train), 4096):
        part = slice(start, start + 4096)
        rows_BL, length_B = train.rows(part), train.row_lengths(part)
        is_real_BL = torch.arange(rows_BL.shape[1]) < length_B[:, None]
        count_V += np.bincount(rows_BL[is_real_BL].numpy(), minlength=len(count_V))
    log_p_V = np.log(count_V / count_V.sum())
    return Unigram(run.tokenizer, log_p_V, run.config.data.block_length)


def guesser_for(run: Loaded) -> Unigram:
    """Guesses choices, writes any token as often as any other."""
    size = run.tokenizer.num_tokens
    log_p_V = np.full(size, -np.log(size))
    return Unigram(run.tokenizer, log_p_V, run.config.data.block_length, is_guess=True)
