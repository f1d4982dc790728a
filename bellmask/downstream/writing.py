"""Texts written after contexts, as lm-eval's ``generate_until`` asks for them.

A gap follows the context and is filled one token per step, the surest first; an ARM writes from
left to right. A masked model is told the size of the gap, not of the answer: what follows EOS or
the first stop text is cut off. A text depends on the seed, its stream and its number alone.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from bellmask.downstream.continuations import ContinuationScorer, OnDone
from bellmask.downstream.harness_options import RequestOptions
from bellmask.generate.fill import fill_rows
from bellmask.generate.settings import Sampling
from bellmask.utils.errors import UserError
from bellmask.utils.rng import stream_key

LENGTHS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
"""Names that tasks have for the most tokens to write; the first that is there counts."""
UNDERSTOOD = (*LENGTHS, "until", "do_sample", "temperature", "top_k", "top_p")


@dataclass(frozen=True)
class Request:
    """A text to write."""

    context: str
    settings: Mapping[str, Any]
    """The task's own, by lm-eval's names."""
    stream: str
    """The task, say; its requests are numbered."""
    number: int

    @property
    def length(self) -> int | None:
        """The most tokens that the task wants."""
        given = (self.settings.get(name) for name in LENGTHS)
        return next((int(value) for value in given if value is not None), None)

    @property
    def stops(self) -> list[str]:
        """Texts that end an answer."""
        until = self.settings.get("until") or []
        return [stop for stop in ([until] if isinstance(until, str) else until) if stop]


@dataclass(frozen=True)
class Writer:
    """Writes with a run."""

    scorer: ContinuationScorer
    options: RequestOptions
    _told: set[str] = field(default_factory=set, init=False, repr=False, compare=False)
    """Settings that were seen before."""

    def write(self, requests: Sequence[Request], on_done: OnDone | None = None) -> list[str]:
        """A text for each request; settings that nobody reads are told, each once."""
        self._say_ignored(requests)
        groups: dict[tuple[str, Sampling], list[int]] = {}
        for place, request in enumerate(requests):
            group = request.stream, self.sampling(request.settings)
            groups.setdefault(group, []).append(place)
        found: dict[int, str] = {}
        for (stream, sampling), places in groups.items():

            def advance(done: int, before: int = len(found)) -> None:
                if on_done:
                    on_done(before + done)

            part = [requests[place] for place in places]
            made = fill_rows(
                self.scorer.run,
                [self._row(request) for request in part],
                sampling,
                longest=self._block,
                seed=stream_key(self.options.seed, "lm-eval", stream),
                samples=[request.number for request in part],
                batch_size=max(1, self.options.batch_tokens // self._block),
                on_batch=advance,
            )
            texts = [self._text(one.ids, request.stops) for one, request in zip(made, part)]
            found.update(zip(places, texts, strict=True))
        return [found[place] for place in range(len(requests))]

    def sampling(self, settings: Mapping[str, Any]) -> Sampling:
        """As the task says; without ``do_sample`` a temperature above 0 asks for samples."""
        temperature = float(settings.get("temperature") or 0.0)
        samples = settings.get("do_sample")
        if samples and settings.get("temperature") is None:
            temperature = 1.0
        temperature = temperature if samples or samples is None else 0.0
        if self.options.temperature is not None:
            temperature = self.options.temperature
        rule, steps = self.options.rule, self.options.steps
        one_by_one = steps is None and rule != "first_hitting"
        sampling = Sampling(
            rule=rule,
            grid="count" if one_by_one else "uniform",
            steps=steps,
            temperature=temperature,
            top_k=settings.get("top_k") or None,
            top_p=settings.get("top_p") or None,
        ).check()
        return sampling.for_causal() if self.scorer.is_causal else sampling

    @property
    def _block(self) -> int:
        return self.scorer.run.config.data.block_length

    def _row(self, request: Request) -> torch.Tensor:
        """The context and a gap; half of the block at least is the gap's, if it is asked for."""
        maker = self.scorer.maker
        context = maker.encode(request.context)
        wanted = self.options.gap if request.length is None else request.length
        if wanted < 1:
            raise UserError(f"a task asks for {wanted} tokens of text; at least 1 is possible")
        left = self._block - len(maker.begin) - len(context)
        gap = min(wanted, max(left, self._block // 2))
        given = maker.before(context, self._block - gap)
        return torch.tensor([*given, *[self.scorer.run.tokenizer.mask_id] * gap])

    def _text(self, ids: Sequence[int], stops: Sequence[str]) -> str:
        tokenizer = self.scorer.run.tokenizer
        end = ids.index(tokenizer.eos_id) if tokenizer.eos_id in ids else len(ids)
        text = tokenizer.decode(torch.tensor(ids[:end], dtype=torch.int64).numpy())
        return text[: min([text.find(stop) for stop in stops if stop in text], default=len(text))]

    def _say_ignored(self, requests: Sequence[Request]) -> None:
        """On stderr: the log of lm-eval, where it would be looked for, may be switched off."""
        names = {name for request in requests for name in request.settings}
        for name in sorted(names - {*UNDERSTOOD} - self._told):
            print(
                f"note: the model bellmask does not know the generation setting {name}: ignored",
                file=sys.stderr,
            )
        self._told.update(names)
