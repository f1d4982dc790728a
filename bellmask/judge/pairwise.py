"""Judges of pairs: a model behind an endpoint, asked in both orders, or a likelihood here."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from bellmask.judge.benchmarks import Benchmark
from bellmask.judge.chat import CHANGEABLE, Reply, Request
from bellmask.judge.cost import cost_of
from bellmask.judge.failures import EndpointError
from bellmask.judge.local import LikelihoodJudge
from bellmask.judge.prompts import UNREADABLE, Style
from bellmask.judge.transcript import Transcript
from bellmask.judge.verdicts import (
    SAME,
    VALUES,
    Judged,
    Outcome,
    Pair,
    Verdict,
    combine,
    first_share,
)
from bellmask.utils.errors import UserError
from bellmask.utils.files import has_kinds, is_number
from bellmask.utils.store import Kept, content_key

if TYPE_CHECKING:
    from bellmask.judge.cost import Prices, SpendingLimit
    from bellmask.judge.endpoint import Endpoint

OnDone = Callable[[int, int], None]
LOCAL_CHUNK = 16
"""Pairs whose likelihoods are computed before they are kept."""
RENAMED = "max_tokens"
"""A setting that a judge who refuses it is sent by another name."""
ORDERS = (True, False)
"""A shown first, B shown first."""


class Judge(Protocol):
    """Whoever decides between two answers."""

    @property
    def label(self) -> str:
        """For every table: who judged, and by what."""
        ...

    def judge(self, pairs: Sequence[Pair], on_done: OnDone | None = None) -> list[Judged]:
        """An outcome for each pair."""
        ...

    def about(self, pairs: Sequence[Pair]) -> dict[str, Any]:
        """What there is to know of its work on these pairs, once they are judged."""
        ...

    def grounds(self, pair: Pair) -> dict[str, Any]:
        """What an outcome rests on."""
        ...

    def cautions(self, pairs: Sequence[Pair]) -> list[str]:
        """What a reader must know."""
        ...


# --- behind an endpoint ----------------------------------------------------------------------


@dataclass(frozen=True)
class EndpointJudge:
    """A model behind an API; every request and reply is in the transcript."""

    model: str
    style: Style
    transcript: Transcript
    place: str
    """The endpoint's name: its base URL."""
    endpoint: Endpoint | None
    """None where nothing will be asked."""
    limit: SpendingLimit | None = None
    prices: Prices | None = None
    """None: not known."""

    @property
    def label(self) -> str:
        """Who judges."""
        return f"{self.model}, {self.style.name} prompts, both orders"

    def check(self, benchmark: Benchmark) -> None:
        """Refuse tasks that cannot be asked about in this style, before they are answered."""
        for task in benchmark.tasks:
            for turn in range(len(task.turns)):
                said = ("",) * (turn + 1)
                self.style.write(Pair(task, turn, said, said), True)

    def request(self, pair: Pair, a_first: bool) -> Request:
        """One order of one pair."""
        return Request(
            self.model,
            self.style.write(pair, a_first),
            max_tokens=self.style.max_tokens,
            logprobs=self.style.logprobs,
            endpoint=self.place,
        )

    def requests(self, pairs: Iterable[Pair]) -> list[Request]:
        """Both orders of each pair; two equal answers need no judge."""
        return [
            self.request(pair, a_first) for pair in pairs if not pair.is_same for a_first in ORDERS
        ]

    def judge(self, pairs: Sequence[Pair], on_done: OnDone | None = None) -> list[Judged]:
        """Asks what was not asked before; all or an error that says how to go on.

        Pairs that the endpoint refuses are unreadable; unlike failures they would be refused again.
        """
        assert self.endpoint is not None
        requests = self.requests(pairs)
        asked = self.transcript.ask_all(requests, self.endpoint, on_done, limit=self.limit)
        if failed := list(asked.failed.values()):
            raise EndpointError(
                f"{len(failed)} requests have no answer ({failed[0]}); the others are kept in "
                f"{self.transcript.path}: the same command asks only for the rest"
            )
        if asked.refused and not self._replies(pairs):
            why = next(iter(asked.refused.values()))
            raise UserError(
                f"the judge at {self.place} answers none of the requests: {why}; that is kept in "
                f"{self.transcript.path}: delete those lines to ask again"
            )
        return [Judged(pair, self._outcome(pair)) for pair in pairs]

    def _outcome(self, pair: Pair) -> Outcome:
        return SAME if pair.is_same else combine(*self._verdicts(pair))

    def _verdicts(self, pair: Pair) -> tuple[Verdict, Verdict]:
        first, second = (self._read(self.request(pair, a_first)) for a_first in ORDERS)
        return first, second

    def _read(self, request: Request) -> Verdict:
        reply = self.transcript.get(request)
        return UNREADABLE if reply is None else self.style.read(reply.text, reply.top_logprobs)

    def about(self, pairs: Sequence[Pair]) -> dict[str, Any]:
        """Place, prompts, liking for a place, and what all the answers took, whenever asked for."""
        replies = self._replies(pairs)
        usd = None if self.prices is None else cost_of(replies, self.prices)
        return {
            "endpoint": self.place,
            "style": self.style.name,
            "style_identity": self.style.identity,
            "first_share": first_share([self._verdicts(p) for p in pairs if not p.is_same]),
            "num_requests": len(replies),
            "tokens_in": sum(reply.prompt_tokens for reply in replies),
            "tokens_out": sum(reply.completion_tokens for reply in replies),
            "usd": usd,
        }

    def spent(self, missing: Sequence[Request]) -> str | None:
        """What this command has spent on requests that were missing; None: prices are not known.

        A limit also counts attempts whose answer was lost, at their worst.
        """
        if self.limit is not None:
            return f"spent ${self.limit.spent:,.4f} of ${self.limit.max_usd:g}"
        if self.prices is None:
            return None
        found = (self.transcript.get(request) for request in missing)
        usd = cost_of([reply for reply in found if reply is not None], self.prices)
        return f"spent ${usd:,.4f}"

    def _replies(self, pairs: Sequence[Pair]) -> list[Reply]:
        unique = {request.key: request for request in self.requests(pairs)}
        found = (self.transcript.get(request) for request in unique.values())
        return [reply for reply in found if reply is not None]

    def grounds(self, pair: Pair) -> dict[str, Any]:
        """Both verdicts, A shown first and B shown first, and their keys in the transcript."""
        if pair.is_same:
            return {"verdicts": [], "requests": []}
        return {
            "verdicts": [verdict.choice for verdict in self._verdicts(pair)],
            "requests": [self.request(pair, a_first).key for a_first in ORDERS],
        }

    def cautions(self, pairs: Sequence[Pair]) -> list[str]:
        """Of requests that were refused, and of those that were asked otherwise."""
        requests, lines = self.requests(pairs), []
        if refused := list(self.transcript.refused(requests).values()):
            lines.append(f"The judge refused {len(refused)} requests ({refused[0]}): unreadable.")
        changed = self.transcript.refused_settings(requests) - {RENAMED}
        if names := ", ".join(name for name in CHANGEABLE if name in changed):
            lines.append(f"The judge does not take {names}: asked without.")
        return lines


# --- here ------------------------------------------------------------------------------------


class LocalJudge:
    """A causal LM's likelihood; outcomes are kept, so that none is computed twice."""

    def __init__(self, judge: LikelihoodJudge, path: Path) -> None:
        self._judge, self._kept, self.label = judge, Kept(path, _is_outcome), judge.label

    def judge(self, pairs: Sequence[Pair], on_done: OnDone | None = None) -> list[Judged]:
        """Outcomes of before, then the others some at a time."""
        unique = {self._key(pair): pair for pair in pairs}
        left = [(key, pair) for key, pair in unique.items() if key not in self._kept]
        for start in range(0, len(left), LOCAL_CHUNK):
            chunk = left[start : start + LOCAL_CHUNK]
            found = self._judge.judge([pair for _, pair in chunk])
            self._kept.add(
                {
                    "key": key,
                    "task": pair.task.id,
                    "turn": pair.turn + 1,
                    "result": verdict.outcome.result,
                    "preference": verdict.outcome.preference,
                    "a": asdict(verdict.a),
                    "b": asdict(verdict.b),
                }
                for (key, pair), verdict in zip(chunk, found, strict=True)
            )
            if on_done:
                on_done(len(unique) - len(left) + start + len(chunk), len(unique))
        return [Judged(pair, self._outcome(pair)) for pair in pairs]

    def _outcome(self, pair: Pair) -> Outcome:
        record = self._kept[self._key(pair)]
        return Outcome(record["result"], record["preference"])

    def _key(self, pair: Pair) -> str:
        said = [pair.task.turns[: pair.turn + 1], pair.answers_a, pair.answers_b]
        return content_key("likelihood", self._judge.fingerprint, said)

    def about(self, pairs: Sequence[Pair]) -> dict[str, Any]:
        """There is no order, so no liking for a place."""
        return {"fingerprint": self._judge.fingerprint}

    def grounds(self, pair: Pair) -> dict[str, Any]:
        """The answers' log-likelihoods and lengths in tokens."""
        record = self._kept[self._key(pair)]
        return {f"likelihood_{side}": record[side] for side in "ab"}

    def cautions(self, pairs: Sequence[Pair]) -> list[str]:
        """Of likelihoods that are not quite those of the answers."""
        records = [self._kept[self._key(pair)] for pair in pairs]
        lines = []
        if cut := sum(record["a"]["is_cut"] or record["b"]["is_cut"] for record in records):
            lines.append(
                f"{cut} of {len(pairs)} pairs did not fit into the judge's context: the end of "
                "the answer was cut off and not counted (unreadable where nothing was left of it)."
            )
        other = sum(not (record["a"]["is_exact"] and record["b"]["is_exact"]) for record in records)
        if other:
            lines.append(
                f"In {other} of {len(pairs)} pairs the request's tokens change when the answer "
                "follows, so its likelihood is a little off."
            )
        return lines


def _is_outcome(record: dict[str, Any]) -> bool:
    """What a file of outcomes has under a key."""
    sides = {"is_cut": bool, "is_exact": bool}
    value = record.get("preference")
    is_value = value is None or (is_number(value) and 0 <= value <= 1)
    is_result = isinstance(record.get("result"), str) and record["result"] in VALUES
    return is_result and is_value and all(has_kinds(record.get(side), sides) for side in "ab")
