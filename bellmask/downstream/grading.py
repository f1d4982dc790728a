"""Was it right? Pure functions from what a model chose or wrote to a score.

Case and punctuation count for LAMBADA's word (DiffuLLaMA compares it as it is) and not for
TriviaQA's answers (normalised as their release does it).
"""

from __future__ import annotations

import functools
import importlib.util
import math
import re
import string
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from bellmask.utils.errors import UserError

# --- multiple choice -------------------------------------------------------------------------

How = Literal["raw", "per_token", "per_byte"]


def choose(
    log_probabilities: Sequence[float],
    how: How,
    *,
    num_tokens: Sequence[int] = (),
    continuations: Sequence[str] = (),
) -> int:
    """The choice with the highest log-probability (summed over tokens), or mean of it; the first
    of equals.

    ``num_tokens`` is needed per token, ``continuations`` per byte: as lm-eval's acc_bytes, without
    the space in front.
    """
    if any(math.isnan(value) for value in log_probabilities):
        raise ValueError(f"a choice without a score: {list(log_probabilities)}")
    sizes: Sequence[int]
    if how == "raw":
        sizes = [1] * len(log_probabilities)
    elif how == "per_token":
        sizes = num_tokens
    elif how == "per_byte":
        texts = [text.removeprefix(" ") for text in continuations]
        sizes = [len(text.encode("utf-8", "surrogatepass")) for text in texts]
    else:
        raise ValueError(f"unknown way to choose: {how!r}")
    means = [value / size for value, size in zip(log_probabilities, sizes, strict=True)]
    return max(range(len(means)), key=lambda place: means[place])


# --- LAMBADA ---------------------------------------------------------------------------------


def is_word(written: str, gold: str) -> bool:
    """All that was written is the gold word (for a gap of the gold length); case counts."""
    return written.strip() == gold.strip()


def begins_with_word(written: str, gold: str) -> bool:
    """The first word that was written is the gold word (for text of any length); case counts.

    A word ends at white space. Punctuation behind it is not held against it, unless the gold word
    has some, too: a passage goes on after its last word. (A gold "word" with a line end inside, of
    which LAMBADA has a few, is compared with as many words.)
    """
    wanted = gold.split()
    found = written.split()[: len(wanted)]
    if found and wanted and not _ends_with_mark(wanted[-1]):
        found[-1] = _without_marks(found[-1])
    return found == wanted


def _without_marks(word: str) -> str:
    while _ends_with_mark(word):
        word = word[:-1]
    return word


def _ends_with_mark(word: str) -> bool:
    return bool(word) and not word[-1].isalnum()


# --- TriviaQA --------------------------------------------------------------------------------

_PUNCTUATION = dict.fromkeys(map(ord, string.punctuation + "\u2018\u2019\u00b4"), " ")


def normalise(text: str) -> str:
    """Lower case, no articles, spaces for punctuation, single spaces: as TriviaQA's own
    ``normalized_aliases``.
    """
    text = text.lower().translate(_PUNCTUATION)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", text).split())


def first_line_of(written: str) -> str:
    """What was written up to the first line end: the answer."""
    return written.split("\n", 1)[0]


def exact_match(written: str, accepted: Sequence[str]) -> bool:
    """The answer is one of the accepted ones, both normalised."""
    answer = normalise(first_line_of(written))
    return bool(answer) and answer in map(normalise, accepted)


def contains(written: str, accepted: Sequence[str]) -> bool:
    """An accepted answer is in the answer, both normalised; whole words: no 'us' in 'house'."""
    answer = f" {normalise(first_line_of(written))} "
    wanted = filter(None, map(normalise, accepted))
    return any(f" {one} " in answer for one in wanted)


# --- stories ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Rouge:
    """F1 of words, pairs of words and the longest common subsequence, in percent."""

    rouge_1: float
    rouge_2: float
    rouge_l: float

    @property
    def rouge_mean(self) -> float:
        """Mean of the three: the column "Infilling" of Table 4."""
        return (self.rouge_1 + self.rouge_2 + self.rouge_l) / 3


def rouge(written: str, gold: str) -> Rouge:
    """How much of a gold sentence was written: rouge-score's F1 with stemmed words."""
    found = _scorer().score(gold, written)
    one, two, longest = (
        100 * float(found[name].fmeasure) for name in ("rouge1", "rouge2", "rougeL")
    )
    return Rouge(one, two, longest)


@functools.cache
def _scorer() -> Any:
    try:
        from rouge_score import rouge_scorer
    except ImportError:
        raise UserError("infilling needs rouge-score: pip install 'bellmask[eval]'") from None
    return rouge_scorer.RougeScorer(["rouge1", "rouge2", "rougeL"], use_stemmer=True)


def check_rouge() -> None:
    """UserError if the package is not there; before long work, not after it."""
    if importlib.util.find_spec("rouge_score") is None:  # importing it takes seconds
        _scorer()
