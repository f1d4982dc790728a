"""A judge without an endpoint: which answer a causal LM finds likelier after the request.

It measures how a language model would have gone on, not quality: fluent and common answers
win. Every result carries :data:`LABEL`. An answer's log-likelihood is that of request and answer
minus that of the request alone, which is exact wherever the tokens of the request stay what they
are when the answer follows; pairs where they do not are counted. There is no order of answers, so
one outcome needs no second verdict. Cost: one forward pass over each conversation with its last
answer and one without.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from bellmask.evaluate.scorers import TextScore, TextScorer
from bellmask.judge.verdicts import SAME, Outcome, Pair
from bellmask.utils.errors import look_up

LABEL = "likelihood of {name}, not a judgement of quality"
TIE_MARGIN = 1e-5
"""Log-likelihoods, in nats per token, that differ by less are a tie: sums are no more exact."""
Measure = Literal["per-token", "raw"]
MEASURES: dict[str, Callable[[AnswerScore], float]] = {
    "per-token": lambda score: score.per_token,
    "raw": lambda score: score.log_likelihood,
}


@dataclass(frozen=True)
class AnswerScore:
    """An answer under the language model, given what was said before."""

    log_likelihood: float
    """Sum over the answer's tokens, in nats."""
    num_tokens: int
    """0 for an empty answer, and where the request alone fills the model's context."""
    is_exact: bool
    """The request's tokens are the same with and without the answer."""
    is_cut: bool
    """Tokens beyond the model's context were dropped."""

    @property
    def per_token(self) -> float:
        """Mean log-likelihood; -inf where there is no token."""
        return self.log_likelihood / self.num_tokens if self.num_tokens else float("-inf")


@dataclass(frozen=True)
class LocalVerdict:
    """A pair under the language model."""

    outcome: Outcome
    a: AnswerScore
    b: AnswerScore


class LikelihoodJudge:
    """``LikelihoodJudge(load_scorer("smollm2")).judge(pairs)``."""

    def __init__(self, scorer: TextScorer, measure: Measure = "per-token") -> None:
        self._value = look_up("measure of likelihood", measure, MEASURES)
        self._scorer, self._measure = scorer, measure
        self.label = LABEL.format(name=scorer.name)
        self.fingerprint = f"{scorer.fingerprint}/{measure}"

    def judge(
        self,
        pairs: Sequence[Pair],
        *,
        batch_size: int = 8,
        on_batch: Callable[[int], None] | None = None,
    ) -> list[LocalVerdict]:
        """A verdict on each pair; ``on_batch`` is told how many texts are scored.

        An empty answer (nothing but white space) loses to one that is not; two are a tie. Where the
        request leaves no room for an answer in the model's context, nothing can be said.
        """
        texts = _texts(pairs)
        samples = [(text,) for text in texts]
        scores = self._scorer.score(samples, batch_size=batch_size, on_batch=on_batch)
        known = dict(zip(texts, scores, strict=True))
        return [self._verdict(pair, known) for pair in pairs]

    def _verdict(self, pair: Pair, known: dict[str, TextScore]) -> LocalVerdict:
        a, b = (_answer_score(pair, said, known) for said in (pair.answers_a, pair.answers_b))
        return LocalVerdict(self._outcome(pair, a, b), a, b)

    def _outcome(self, pair: Pair, a: AnswerScore, b: AnswerScore) -> Outcome:
        has_a, has_b = (bool(said[-1].strip()) for said in (pair.answers_a, pair.answers_b))
        if pair.is_same or not (has_a or has_b):
            return SAME
        if (has_a and not a.num_tokens) or (has_b and not b.num_tokens):
            return Outcome("unreadable", None)
        if not (has_a and has_b):
            return Outcome("win", 1.0) if has_a else Outcome("loss", 0.0)
        better = self._value(a) - self._value(b)
        tokens = 1 if self._measure == "per-token" else max(a.num_tokens, b.num_tokens)
        if abs(better) <= TIE_MARGIN * tokens:
            return SAME
        return Outcome("win", 1.0) if better > 0 else Outcome("loss", 0.0)


def request_text(pair: Pair, said: Sequence[str]) -> str:
    """All before the answer. It ends in a colon, so that the answer's first token is its own."""
    earlier = [
        f"Question: {asked}\nAnswer: {answer.strip()}\n\n"
        for asked, answer in zip(pair.task.turns, said[:-1])
    ]
    return "".join(earlier) + f"Question: {pair.task.turns[pair.turn]}\nAnswer:"


def whole_text(pair: Pair, said: Sequence[str]) -> str:
    """The request with its answer."""
    return f"{request_text(pair, said)} {said[-1].strip()}"


def _texts(pairs: Sequence[Pair]) -> list[str]:
    """Each text once, in order of appearance."""
    found: dict[str, None] = {}
    for pair in pairs:
        for said in (pair.answers_a, pair.answers_b):
            if said[-1].strip():
                found[request_text(pair, said)] = None
                found[whole_text(pair, said)] = None
    return list(found)


def _answer_score(pair: Pair, said: Sequence[str], known: dict[str, TextScore]) -> AnswerScore:
    if not said[-1].strip():
        return AnswerScore(0.0, 0, True, False)
    before, whole = known[request_text(pair, said)], known[whole_text(pair, said)]
    count = max(0, whole.num_tokens - before.num_tokens)
    log_likelihood = before.nll - whole.nll if count else 0.0
    is_exact = whole.ids[: len(before.ids)] == before.ids
    return AnswerScore(log_likelihood, count, is_exact, whole.is_cut)
