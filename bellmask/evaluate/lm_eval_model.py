"""A bellmask run as a model of lm-eval, and lm-eval's tasks evaluated on it.

The only file that imports lm_eval; import it where it is needed. Log-probabilities are those of
:mod:`bellmask.evaluate.scorer`: a lower bound for masked models and AoARMs, exact for
ARMs. Choices of one document share their random numbers. Noise is a function of the seed, the task
and the document: neither the order of requests, nor the batch, nor the global generators (which
lm-eval seeds anew at every call) have a say in it.

A context is plain text; chat templates are not applied.
"""

from __future__ import annotations

import contextlib
import io
import logging
import math
import os
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import islice
from pathlib import Path
from typing import Any

import lm_eval.models  # noqa: F401  (names of all other models, before ours is added)
import torch
from lm_eval.api.instance import Instance
from lm_eval.api.model import LM
from lm_eval.api.registry import register_model

from bellmask.config.config import parse_options
from bellmask.evaluate.scorer import (
    Estimator,
    Request,
    RequestOptions,
    Score,
    Scorer,
    add_up,
)
from bellmask.generate.fill import fill_rows
from bellmask.generate.rules import RULES
from bellmask.generate.settings import Sampling
from bellmask.storage.loading import Loaded
from bellmask.utils.errors import UserError, look_up
from bellmask.utils.progress import NO_PROGRESS, Progress, progress_bar
from bellmask.utils.rng import stream_key

WHERE = "--model_args of the model bellmask"


def parse_arguments(given: Mapping[str, Any]) -> RequestOptions:
    """Values as lm-eval parsed them (numbers, True, None or text); unknown names are refused."""
    known = {field.name: field for field in fields(RequestOptions)}
    args = []
    for name, value in given.items():
        look_up("argument of the model bellmask", name, {**known, "run": None})
        option = name.replace("_", "-")
        if isinstance(value, bool):
            args.append(f"--{option}" if value else f"--no-{option}")
        elif value is not None:
            args.append(f"--{option}={value}")
    return parse_options(RequestOptions, None, args, WHERE).check()


# Texts written after contexts, as lm-eval's ``generate_until`` asks for them.
#
# A gap follows the context and is filled one token per step, the surest first; an ARM writes from
# left to right. A masked model is told the size of the gap, not of the answer: what follows EOS or
# the first stop text is cut off. A text depends on the seed, its stream and its number alone.

LENGTHS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
"""Names that tasks have for the most tokens to write; the first that is there counts."""
UNDERSTOOD = (*LENGTHS, "until", "do_sample", "temperature", "top_k", "top_p")


@dataclass(frozen=True)
class WriteRequest:
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

    scorer: Scorer
    options: RequestOptions
    _told: set[str] = field(default_factory=set, init=False, repr=False, compare=False)
    """Settings that were seen before."""

    def write(
        self, requests: Sequence[WriteRequest], progress: Progress = NO_PROGRESS
    ) -> list[str]:
        """A text for each request; settings that nobody reads are told, each once."""
        self._say_ignored(requests)
        groups: dict[tuple[str, Sampling], list[int]] = {}
        for place, request in enumerate(requests):
            group = request.stream, self.sampling(request.settings)
            groups.setdefault(group, []).append(place)
        found: dict[int, str] = {}
        for (stream, sampling), places in groups.items():
            part = [requests[place] for place in places]
            made = fill_rows(
                self.scorer.run,
                [self._row(request) for request in part],
                sampling,
                longest=self._block,
                seed=stream_key(self.options.seed, "lm-eval", stream),
                samples=[request.number for request in part],
                batch_size=max(1, self.options.batch_tokens // self._block),
                progress=progress,
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
        one_by_one = steps is None and RULES[rule].takes_grid
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

    def _row(self, request: WriteRequest) -> torch.Tensor:
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

    def _say_ignored(self, requests: Sequence[WriteRequest]) -> None:
        """On stderr: the log of lm-eval, where it would be looked for, may be switched off."""
        names = {name for request in requests for name in request.settings}
        for name in sorted(names - {*UNDERSTOOD} - self._told):
            print(
                f"note: the model bellmask does not know the generation setting {name}: ignored",
                file=sys.stderr,
            )
        self._told.update(names)


# A run as lm-eval's model.

RequestScore = tuple[str, Score]
"""The task that asked, and the score of one request."""


@register_model("bellmask")
class BellmaskLM(LM):
    """``--model bellmask --model_args run=FOLDER,...``; see :class:`RequestOptions`."""

    def __init__(
        self,
        run: str | Loaded | None = None,
        device: str | None = None,
        batch_size: Any = None,
        max_batch_size: Any = None,
        **arguments: Any,
    ) -> None:
        """``batch_size`` and ``max_batch_size`` are lm-eval's; ``batch_tokens`` is ours."""
        super().__init__()
        options = replace(parse_arguments(arguments), device=_usable(device))
        if run is None:
            raise UserError("the model bellmask needs a run: --model_args run=FOLDER")
        self.run = run if isinstance(run, Loaded) else options.load(str(run))
        self.options = options
        self._device = self.run.device
        estimator = Estimator(
            options.estimator, options.draws, options.longest_exact, options.common
        )
        self.scorer = Scorer(self.run, estimator, batch_tokens=options.batch_tokens)
        self.writer = Writer(self.scorer, options)
        self._scored: list[RequestScore] = []

    def loglikelihood(self, requests: list[Instance]) -> list[tuple[float, bool]]:
        """(log-probability of the continuation, would the model write it) for each."""
        asks = [
            self.scorer.asks(*request.args, noise=noise_number(request)) for request in requests
        ]
        scores = self._score(requests, asks)
        verdicts = self._is_greedy(asks)
        found = [(score.log_probability, is_it) for score, is_it in zip(scores, verdicts)]
        return self._kept("loglikelihood", requests, found)

    def loglikelihood_rolling(self, requests: list[Instance]) -> list[float]:
        """The log-probability of each whole text, after nothing but the run's begin sign."""
        asks = [
            self.scorer.rolling(*request.args, noise=noise_number(request)) for request in requests
        ]
        found = [score.log_probability for score in self._score(requests, asks)]
        return self._kept("loglikelihood_rolling", requests, found)

    def generate_until(self, requests: list[Instance]) -> list[str]:
        """A text for each, up to the first of the task's stop texts or EOS."""
        asked = []
        seen: dict[tuple[Any, ...], int] = {}
        for request in requests:
            context, settings = request.args
            place = (request.task_name, request.doc_id, request.idx)
            place += (context,) if request.doc_id is None else ()
            repeat = seen[place] = seen.get(place, -1) + 1
            number = noise_number(request) if request.doc_id is None else request.doc_id
            stream = f"{request.task_name}/{request.idx}/{repeat}"
            asked.append(WriteRequest(context, settings, stream, number))
        with progress_bar("writing", "texts", len(requests)) as progress:
            found = self.writer.write(asked, progress)
        return self._kept("generate_until", requests, found)

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """Refused: special tokens would come out as plain letters."""
        raise UserError(
            "the model bellmask takes prompts as plain text: leave --apply_chat_template out; "
            "bellmask evaluate --suite paper writes prompts as fine-tuned runs know them"
        )

    @property
    def tokenizer_name(self) -> str:
        """For the caches of lm-eval."""
        return self.run.tokenizer.fingerprint

    def get_model_info(self) -> dict[str, Any]:
        """What lm-eval writes beside its results."""
        return {
            "run": str(self.run.folder),
            "step": self.run.step,
            "framework": self.run.config.framework.name,
            "noise": self.noise_summary(),
        }

    def noise_summary(self) -> dict[str, dict[str, Any]]:
        """By task: what the masks' noise does to log-probabilities, and what they cost.

        lm-eval's own standard errors are over documents. Documents draw apart from one another, so
        that this noise is part of those errors already.
        """
        tasks = sorted({task for task, _ in self._scored})
        return {name: _summary([s for task, s in self._scored if task == name]) for name in tasks}

    def _score(
        self, requests: Sequence[Instance], asks: Sequence[Sequence[Request]]
    ) -> list[Score]:
        """One score per request; its windows added up."""
        flat = [ask for own in asks for ask in own]
        with progress_bar("scoring", "continuations", len(flat)) as progress:
            parts = iter(self.scorer.score(flat, seed=self.options.seed, progress=progress))
        scores = [add_up(list(islice(parts, len(own)))) for own in asks]
        self._scored += [(str(r.task_name), score) for r, score in zip(requests, scores)]
        return scores

    def _is_greedy(self, asks: Sequence[Sequence[Request]]) -> list[bool]:
        flat = [ask for own in asks for ask in own]
        with progress_bar("is it what the model writes", "continuations", len(flat)) as progress:
            parts = iter(self.scorer.is_greedy(flat, progress=progress))
        return [all(list(islice(parts, len(own)))) for own in asks]

    def _kept(self, kind: str, requests: Sequence[Instance], found: list[Any]) -> list[Any]:
        """The same, told to lm-eval's cache."""
        for request, result in zip(requests, found, strict=True):
            self.cache_hook.add_partial(kind, request.args, result)
        return found


def noise_number(request: Instance) -> int:
    """One number for all requests of a document; without a document, one for the text itself."""
    if request.doc_id is None:
        return stream_key(0, "lm-eval text", str(request.args[0])) >> 2
    return stream_key(0, "lm-eval", str(request.task_name), request.doc_id)


def _usable(device: str | None) -> str:
    """lm-eval asks for cuda:0 even where there is none."""
    if device is None or (device.startswith("cuda") and not torch.cuda.is_available()):
        return "auto"
    return device


def _summary(scores: Sequence[Score]) -> dict[str, Any]:
    noisy = [score.error for score in scores if not score.is_exact and math.isfinite(score.error)]
    return {
        "requests": len(scores),
        "exact_share": sum(score.is_exact for score in scores) / len(scores),
        "median_error": statistics.median(noisy) if noisy else None,
        "tokens": sum(score.num_tokens for score in scores),
        "passes": sum(score.num_passes for score in scores),
    }


# Evaluating


@contextlib.contextmanager
def quiet_lm_eval() -> Iterator[None]:
    """Without its log, prints and processes of its own: faults still come as exceptions."""
    import datasets

    logger = logging.getLogger("lm_eval")
    level, had_bars = logger.level, not datasets.are_progress_bars_disabled()
    multiprocessing = os.environ.get("DISABLE_MULTIPROC")
    logger.setLevel(logging.ERROR)
    datasets.disable_progress_bars()
    os.environ["DISABLE_MULTIPROC"] = "1"  # bootstraps take a second
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            yield
    finally:
        logger.setLevel(level)
        if had_bars:
            datasets.enable_progress_bars()
        os.environ.pop("DISABLE_MULTIPROC")
        if multiprocessing is not None:
            os.environ["DISABLE_MULTIPROC"] = multiprocessing


def evaluate_tasks(
    model: LM,
    tasks: Sequence[str],
    *,
    include: Path | None = None,
    limit: int | None = None,
    bootstraps: int = 1000,
) -> dict[str, Any]:
    """lm-eval's results on tasks: those of a folder of YAML files, or the stock ones.

    ``bootstraps``: resamples for standard errors that have no formula, such as perplexity's.
    """
    from lm_eval.evaluator import simple_evaluate
    from lm_eval.tasks import TaskManager

    with quiet_lm_eval():
        manager = TaskManager(
            include_path=None if include is None else str(include), include_defaults=include is None
        )
        _check_names(tasks, manager.all_tasks)
        found = simple_evaluate(
            model=model,
            tasks=list(tasks),
            task_manager=manager,
            limit=limit,
            bootstrap_iters=bootstraps,
            log_samples=False,
        )
    assert found is not None, "a single process"
    return dict(found)


def _check_names(tasks: Sequence[str], known: Sequence[str]) -> None:
    for task in tasks:
        look_up("task of lm-eval", task, dict.fromkeys(known))


def run_command_line(args: Sequence[str]) -> int:
    """lm-eval's own command with these arguments; the model bellmask is known to it."""
    from lm_eval.__main__ import cli_evaluate

    before = sys.argv
    sys.argv = ["lm_eval", *args]
    try:
        cli_evaluate()
    except SystemExit as stop:
        if isinstance(stop.code, str):
            raise UserError(stop.code) from None
        return stop.code or 0
    finally:
        sys.argv = before
    return 0
