"""A bellmask run as a model of lm-eval, two baselines, and lm-eval's tasks evaluated on them.

The only file that imports lm_eval; import it where it is needed. Log-probabilities are those of
:mod:`bellmask.evaluate.scorer`: a lower bound for masked models and AoARMs, exact for ARMs. Choices
of one document share their random numbers. Noise is a function of the seed, the task and the
document: not of the order of requests, the batch or the global generators (which lm-eval reseeds at
every call).

Answers are cached under a key of everything that determines them; a log-probability without noise
is shared by all seeds. Documents of Table 4 (:mod:`bellmask.evaluate.paper_suite`) have additional
data in their column ``bellmask``: the length of a gap and the text after it. Other contexts are
plain text; chat templates are not applied.
"""

from __future__ import annotations

import contextlib
import io
import logging
import math
import os
import statistics
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from functools import partialmethod
from itertools import groupby, islice
from pathlib import Path
from typing import Any, Literal

import lm_eval.models  # noqa: F401  (names of all other models, before ours is added)
import numpy as np
import torch
from lm_eval.api.instance import Instance
from lm_eval.api.model import LM
from lm_eval.api.registry import register_model
from numpy.typing import NDArray

from bellmask.config.config import parse_options
from bellmask.data.chat_templates import Message, join, response_after
from bellmask.data.tasks import BENCHMARKS
from bellmask.evaluate import scorer
from bellmask.evaluate.likelihood import REFERENCE_BLOCKS, unigram_counts
from bellmask.evaluate.scorer import Tokens
from bellmask.generate.answers import Answerer
from bellmask.generate.fill import fill_rows, text_before_eos
from bellmask.generate.rules import RULES
from bellmask.generate.settings import Sampling
from bellmask.storage.loading import Loaded, run_fingerprint
from bellmask.utils.distributed import World
from bellmask.utils.errors import UserError, look_up
from bellmask.utils.files import sanitize
from bellmask.utils.progress import Progress, progress_bar
from bellmask.utils.rng import shuffle, stream_key, uniform
from bellmask.utils.store import Store, content_key

logger = logging.getLogger(__name__)

WHERE = "--model_args of the model bellmask"
FORMAT = 4
"""Increased when code changes the measurement: old answers are not reused."""
BOOTSTRAPS = 1000
"""Resamples for standard errors that have no formula, such as perplexity's."""
CHUNK = 128
"""Requests that are answered before the answers are stored."""
LENGTHS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
"""Names that tasks have for the most tokens to write; the first that is there counts."""
UNDERSTOOD = (*LENGTHS, "until", "do_sample", "temperature", "top_k", "top_p")
OWN_WORDS = {"word": 4, "answer": 8}
"""Room in a gap that tells nothing about the answer, in words of the prompt's mean length; a run
that was fine-tuned on responses has its own length."""


def parse_arguments(given: Mapping[str, Any]) -> scorer.RequestOptions:
    """Values as lm-eval parsed them (numbers, True, None or text); unknown names are rejected."""
    known = {field.name: field for field in fields(scorer.RequestOptions)}
    args = []
    for name, value in given.items():
        look_up("argument of the model bellmask", name, {**known, "run": None})
        option = name.replace("_", "-")
        if isinstance(value, bool):
            args.append(f"--{option}" if value else f"--no-{option}")
        elif value is not None:
            args.append(f"--{option}={value}")
    return parse_options(scorer.RequestOptions, None, args, WHERE).check()


# Requests and answers


class ScoredChoice(tuple[float, bool]):
    """(log-probability, would the model write it), as lm-eval wants it; and what scores per token
    and per byte divide by.
    """

    num_tokens: int
    num_bytes: int

    @staticmethod
    def of(score: scorer.Score, is_greedy: bool, continuation: str) -> ScoredChoice:
        """Bytes are those of lm-eval's acc_bytes: without the space in front."""
        made = ScoredChoice((score.log_probability, is_greedy))
        text = continuation.removeprefix(" ").encode("utf-8", "surrogatepass")
        made.num_tokens, made.num_bytes = score.num_tokens, len(text)
        return made


@dataclass(frozen=True)
class Gap:
    """A text to write: what the masks of a row become."""

    row: Tokens
    sampling: Sampling
    seed: int
    sample: int
    """Names the noise, together with the seed."""


Size = Callable[[str], tuple[Any, ...]]
"""Of what is behind a key; the first part is the same for what can be answered together."""
Answering = Callable[[Sequence[str], Progress], list[dict[str, Any]]]
"""Keys → the record of each."""


@dataclass
class TaskFacts:
    """Statistics of a task's requests."""

    scores: list[scorer.Score] = field(default_factory=list)
    cut: set[int] = field(default_factory=set)
    """Questions whose gold answer is longer than any gap: it cannot be written."""
    shortened: set[int] = field(default_factory=set)
    """Questions of which not all fits into a row: what is furthest from the answer goes."""

    @property
    def exact_share(self) -> float | None:
        """Of log-probabilities without noise; None where there are none."""
        return statistics.fmean(s.is_exact for s in self.scores) if self.scores else None


def about_question(request: Instance) -> dict[str, Any] | None:
    """What a document of Table 4 says of its question; None for other documents."""
    return request.doc.get("bellmask") if isinstance(request.doc, dict) else None


def noise_number(request: Instance) -> int:
    """One number for all requests of a document; without a document, one for the text itself."""
    if about := about_question(request):
        return stream_key(0, "question", about["task"], about["number"]) % (1 << 62)
    if request.doc_id is None:
        return stream_key(0, "lm-eval text", str(request.args[0])) >> 2
    return stream_key(0, "lm-eval", str(request.task_name), request.doc_id)


# A run as lm-eval's model.


@register_model("bellmask")
class BellmaskLM(LM):
    """``--model bellmask --model_args run=FOLDER,...``; see :class:`RequestOptions`."""

    is_model = True
    """False for baselines, which take no time."""

    def __init__(
        self,
        run: str | Loaded | None = None,
        device: str | None = None,
        batch_size: Any = None,
        max_batch_size: Any = None,
        *,
        prompts: Literal["auto", "plain", "tuned"] = "plain",
        ending: Literal["auto", "none", "eos"] = "none",
        greedy: bool = True,
        **arguments: Any,
    ) -> None:
        """``batch_size`` and ``max_batch_size`` are lm-eval's; ``batch_tokens`` is ours.

        auto: a fine-tuned run is asked the way it was tuned, and scores the EOS behind a choice.
        Without ``greedy``, it is not tested whether the model would write a continuation.
        """
        super().__init__()
        if device is None or (device.startswith("cuda") and not torch.cuda.is_available()):
            device = "auto"  # lm-eval asks for cuda:0 even where there is none
        self.options = replace(parse_arguments(arguments), device=device)
        if run is None:
            raise UserError("the model bellmask needs a run: --model_args run=FOLDER")
        self.run = run if isinstance(run, Loaded) else self.options.load(str(run))
        self._device, self.seed, self._has_greedy = self.run.device, self.options.seed, greedy
        self.scorer = scorer.Scorer(self.run, self.options)
        self.maker, self.tokenizer = self.scorer.maker, self.run.tokenizer
        self.block_length = self.maker.block_length
        self.sees_behind = self.run.config.framework.name != "arm"
        self._answerer = Answerer(self.run)
        has_learned = self._answerer.is_tuned
        is_tuned = has_learned if prompts == "auto" else prompts == "tuned"
        self.prompts: Literal["plain", "tuned"] = "tuned" if is_tuned else "plain"
        has_eos = is_tuned if ending == "auto" else ending == "eos"
        self.ending = (self.tokenizer.eos_id,) if has_eos and self.tokenizer.eos_id >= 0 else ()
        self.own_length = self._answerer.length if has_learned else None
        self.progress: Progress | None = None
        """Counts answers; by default there is a bar for each kind of request."""
        self.world = World()
        """Its processes share the requests; the caller sets it."""
        self.facts: defaultdict[str, TaskFacts] = defaultdict(TaskFacts)
        """By task."""
        self._answers = Store(None)
        self._seen_settings: set[str] = set()

    # Log-probabilities

    def loglikelihood(self, requests: list[Instance]) -> list[tuple[float, bool]]:
        """(log-probability of the continuation, would the model write it) for each."""
        windows = [self._windows(request) for request in requests]
        scores = self._scores(requests, windows)
        verdicts = self._is_greedy(windows) if self._has_greedy else [False] * len(windows)
        return [
            ScoredChoice.of(score, is_it, request.args[1])
            for request, score, is_it in zip(requests, scores, verdicts, strict=True)
        ]

    def loglikelihood_rolling(self, requests: list[Instance]) -> list[float]:
        """The log-probability of each whole text, after nothing but the run's start token."""
        windows = [self.maker.rolling(*r.args, noise=noise_number(r)) for r in requests]
        return [score.log_probability for score in self._scores(requests, windows)]

    def _windows(self, request: Instance) -> list[scorer.Request]:
        before, target = self.split(*request.args)
        if not target:
            raise UserError(f"the choice {request.args[1]!r} has no tokens to score")
        self._note_length(request, before, len(target))
        return self.windows(before, target, noise_number(request))

    def windows(self, before: Tokens, target: Tokens, noise: int) -> list[scorer.Request]:
        """What to score: one request, or several where the continuation does not fit into a row."""
        return self.maker.windows(before, target + self.ending, noise)

    def split(self, context: str, continuation: str) -> tuple[Tokens, Tokens]:
        """Tokens of what is shown, and of what is scored or written. Plain: as lm-eval cuts them.
        Tuned: apart, by the run's template, as in training (:mod:`bellmask.data.examples`).
        """
        maker, answerer = self.maker, self._answerer
        if self.prompts == "plain":
            return maker.split(context, continuation)
        if not answerer.is_tuned:
            return maker.encode(context), maker.encode(response_after(context, continuation))
        messages = (Message("user", sanitize(context)),)
        parts = answerer.encoder.template.parts(messages, answerer.marks_roles)
        before = tuple(answerer.encoder.encode([parts])[0].tolist())
        return before, maker.encode(response_after(join(parts), continuation))

    def _note_length(self, request: Instance, before: Tokens, others: int) -> None:
        begun = self.maker.before(before, len(before) + self.block_length)
        about = about_question(request)
        if about and len(begun) + others > self.block_length:
            self.facts[str(request.task_name)].shortened.add(about["number"])

    def _score_key(self, window: scorer.Request) -> str:
        noise = () if self.is_exact(window) else (window.noise, self.seed)
        return content_key("score", window.given, window.target, *noise)

    def is_exact(self, window: scorer.Request) -> bool:
        """Every seed gives it the same score: short continuations, and any of an ARM."""
        return self.scorer.is_exact(window)

    def score(self, windows: Sequence[scorer.Request], progress: Progress) -> list[scorer.Score]:
        return self.scorer.score(windows, seed=self.seed, progress=progress)

    def _scores(
        self, requests: Sequence[Instance], windows: Sequence[Sequence[scorer.Request]]
    ) -> list[scorer.Score]:
        """One score per request; its windows added up."""
        keys = [list(map(self._score_key, own)) for own in windows]
        asked = {
            key: (request, window)
            for request, own_keys, own in zip(requests, keys, windows, strict=True)
            for key, window in zip(own_keys, own, strict=True)
        }

        def answer(chunk: Sequence[str], progress: Progress) -> list[dict[str, Any]]:
            scores = self.score([asked[key][1] for key in chunk], progress)
            for key, score in zip(chunk, scores, strict=True):
                if not math.isfinite(score.log_probability):
                    request = asked[key][0]
                    raise UserError(f"{request.task_name}: a log-probability is not finite")
            return list(map(asdict, scores))

        self._answer(
            "scoring", "continuations", asked, lambda key: (0, asked[key][1].length), answer
        )
        made = []
        for request, own_keys in zip(requests, keys, strict=True):
            records = [self._answers[key] for key in own_keys]
            scores = [scorer.Score(**{k: v for k, v in r.items() if k != "key"}) for r in records]
            made.append(scorer.add_up(scores))
            self.facts[str(request.task_name)].scores.append(made[-1])
        return made

    def _is_greedy(self, windows: Sequence[Sequence[scorer.Request]]) -> list[bool]:
        """All windows of a continuation are what the model would write."""
        flat = [window for own in windows for window in own]
        with self._bar("is it the model's output", "continuations", len(flat)) as progress:
            own = progress.scaled(self.world.size)
            parts = iter(self.world.share(flat, lambda mine: self.scorer.is_greedy(mine, own)))
        return [all(list(islice(parts, len(own)))) for own in windows]

    # Texts. A gap follows the context and is filled one token per step, the surest first, as
    # DiffuLLaMA's scripts do; an ARM writes from left to right. Outside of Table 4 a masked model
    # gets the size of the gap, not of the answer: text after EOS or a stop text is cut off.

    def generate_until(self, requests: list[Instance]) -> list[str]:
        """A text for each, up to the first of the task's stop texts or EOS."""
        # in our log: that of lm-eval, where it would be looked for, may be switched off
        names = {name for request in requests for name in request.args[1]}
        for name in sorted(names - {*UNDERSTOOD} - self._seen_settings):
            logger.warning("the model bellmask ignores the generation setting %s", name)
        self._seen_settings.update(names)
        gaps = self._gaps(requests)
        found = {self._text_key(gap): gap for gap in gaps}

        def size(key: str) -> tuple[Any, ...]:
            gap = found[key]
            together = repr((gap.seed, gap.sampling))
            return together, gap.row.count(self.tokenizer.mask_id), len(gap.row)

        def answer(chunk: Sequence[str], progress: Progress) -> list[dict[str, Any]]:
            return [{"ids": ids} for ids in self.fill([found[key] for key in chunk], progress)]

        self._answer("writing", "texts", found, size, answer)
        return [
            self._text(self._answers[self._text_key(gap)]["ids"], request.args[1])
            for gap, request in zip(gaps, requests, strict=True)
        ]

    def fill(self, gaps: Sequence[Gap], progress: Progress) -> list[list[int]]:
        """What the masks of each row become; all have the same seed and sampling."""
        rows, samples = [torch.tensor(gap.row) for gap in gaps], [gap.sample for gap in gaps]
        size = max(1, self.options.batch_tokens // max(map(len, rows)))
        how: dict[str, Any] = {"seed": gaps[0].seed, "samples": samples, "batch_size": size}
        how |= {"longest": self.block_length, "progress": progress}
        return [one.ids for one in fill_rows(self.run, rows, gaps[0].sampling, **how)]

    def _text_key(self, gap: Gap) -> str:
        return content_key("text", gap.row, asdict(gap.sampling), gap.seed, gap.sample)

    def _gaps(self, requests: Sequence[Instance]) -> list[Gap]:
        repeats: dict[tuple[Any, ...], int] = {}
        made = []
        for request in requests:
            context, settings = request.args
            sampling = self.sampling(settings)
            if about := about_question(request):
                row = self._gap_row(request, about)
                seed = stream_key(self.seed, "downstream") % (1 << 31)
                sample = stream_key(0, "text", about["task"], about["number"], about["gap"])
                made.append(Gap(row, sampling, seed, sample % (1 << 40)))
                continue
            place = (request.task_name, request.doc_id, request.idx, context)
            repeat = repeats[place] = repeats.get(place, -1) + 1
            seed = stream_key(self.seed, "lm-eval", f"{request.task_name}/{request.idx}/{repeat}")
            sample = noise_number(request) if request.doc_id is None else request.doc_id
            made.append(Gap(self._free_row(context, settings), sampling, seed, sample))
        return made

    def _free_row(self, context: str, settings: Mapping[str, Any]) -> Tokens:
        """The context and a gap, which gets at least half of the block if requested."""
        tokens = self.maker.encode(context)
        given = (settings.get(name) for name in LENGTHS)
        wanted = next((int(value) for value in given if value is not None), self.options.gap)
        if wanted < 1:
            raise UserError(f"a task requests {wanted} tokens of text; the minimum is 1")
        left = self.block_length - len(self.maker.begin) - len(tokens)
        return self._row_with(tokens, min(wanted, max(left, self.block_length // 2)))

    def _gap_row(self, request: Instance, about: Mapping[str, Any]) -> Tokens:
        """A row of Table 4, whose gap has the gold answer's length or one that tells nothing about
        it. Where it does not fit, the gap is cut to half of the block, then what is furthest from
        it is left out.
        """
        context, kind = request.args[0], BENCHMARKS[about["task"]].kind
        split = self.maker.split if kind == "story" else self.split
        before, target = split(context, about["answer"])
        after = self.maker.split(context, about["after"])[1] if about["after"] else ()
        behind = after if self.sees_behind else ()
        length, longest = len(target), self.block_length // 2
        if length > longest:
            self.facts[str(request.task_name)].cut.add(about["number"])
        self._note_length(request, before, min(length, longest) + len(behind))
        if about["gap"] == "own" and kind == "story":  # as the story's other four sentences
            length = round((len(before) + len(after)) / 4)
        elif about["gap"] == "own":
            words = OWN_WORDS[kind] * len(before) / max(1, len(context.split()))
            length = self.own_length or math.ceil(words)
        return self._row_with(before, min(max(1, length), longest), behind)

    def _row_with(self, before: Tokens, length: int, behind: Tokens = ()) -> Tokens:
        room = self.block_length - length
        shown = len(self.maker.before(before, self.block_length))
        behind = behind[: max(room // 2, room - shown)]
        given = self.maker.before(before, room - len(behind))
        return (*given, *[self.tokenizer.mask_id] * length, *behind)

    def sampling(self, settings: Mapping[str, Any]) -> Sampling:
        """As the task says; without ``do_sample`` a temperature above 0 asks for samples."""
        temperature, samples = self.options.temperature, settings.get("do_sample")
        if temperature is None:
            default = 1.0 if samples else 0.0
            given = settings.get("temperature")
            temperature = default if given is None or samples is False else float(given)
        rule, steps = self.options.rule, self.options.steps
        how: dict[str, Any] = {name: settings.get(name) or None for name in ("top_k", "top_p")}
        how["grid"] = "count" if steps is None and RULES[rule].takes_grid else "uniform"
        sampling = Sampling(rule, steps=steps, temperature=temperature, **how).check()
        return sampling.for_causal() if self.scorer.is_causal else sampling

    def _text(self, ids: list[int], settings: Mapping[str, Any]) -> str:
        text, _ = text_before_eos(ids, self.tokenizer)
        until = settings.get("until") or []
        stops = [until] if isinstance(until, str) else until
        return text[: min((text.find(s) for s in stops if s and s in text), default=len(text))]

    # The cache

    @property
    def fingerprint(self) -> str:
        """Changes when an answer may."""
        how = self.options
        decides = [how.estimator, how.draws, how.longest_exact, how.common]
        return content_key(FORMAT, run_fingerprint(self.run), decides)

    def store_in(self, folder: Path) -> None:
        """Use, and add to, the answers in a folder."""
        self._answers = Store(folder / f"{self.fingerprint}.jsonl")

    def num_missing(self, requests: Sequence[Instance], seeds: Iterable[int]) -> int:
        """Answers to requests of Table 4 that are not there yet."""
        choices = [request for request in requests if request.request_type == "loglikelihood"]
        texts = [request for request in requests if request.request_type == "generate_until"]
        keys: set[str] = set()
        for seed in seeds:
            self.seed = seed
            keys |= {self._score_key(window) for one in choices for window in self._windows(one)}
            keys |= {self._text_key(gap) for gap in self._gaps(texts)}
        return len(self._answers.missing(keys))

    def _answer(
        self, what: str, unit: str, keys: Iterable[str], size: Size, answer: Answering
    ) -> None:
        """Get and store what is not there yet; processes share a chunk, and each gets all of it."""
        missing, count = self._answers.missing(keys), self.world.size
        with self._bar(what, unit, len(missing)) as progress:
            own = progress.scaled(count)
            for chunk in _chunks(missing, size, CHUNK * count):
                answers = self.world.share(chunk, lambda mine: answer(mine, own))
                pairs = zip(chunk, answers, strict=True)
                self._answers.add({"key": key, **record} for key, record in pairs)

    def _bar(self, what: str, unit: str, total: int) -> contextlib.AbstractContextManager[Progress]:
        if self.progress is not None:
            return contextlib.nullcontext(self.progress)
        return progress_bar(what, unit, total)

    # Attributes that lm-eval requires

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """Rejected: special tokens would become plain text."""
        raise UserError("omit --apply_chat_template: bellmask takes prompts as plain text")

    def get_model_info(self) -> dict[str, Any]:
        """Model information that lm-eval writes with its results."""
        return {
            "run": str(self.run.folder),
            "step": self.run.step,
            "framework": self.run.config.framework.name,
            "noise": self.noise_summary(),
        }

    def noise_summary(self) -> dict[str, dict[str, Any]]:
        """By task: what the masks' noise does to log-probabilities, and what they cost.

        lm-eval's own standard errors are over documents. Documents have independent draws, so those
        errors already include this noise.
        """
        found = {}
        for name, facts in sorted(self.facts.items()):
            scores = facts.scores
            noisy = [s.error for s in scores if not s.is_exact and math.isfinite(s.error)]
            if scores:
                found[name] = {
                    "requests": len(scores),
                    "exact_share": facts.exact_share,
                    "median_error": statistics.median(noisy) if noisy else None,
                    "tokens": sum(score.num_tokens for score in scores),
                    "passes": sum(score.num_passes for score in scores),
                }
        return found


def _chunks(keys: Sequence[str], size: Size, longest: int) -> list[list[str]]:
    """Keys of about one size that are answered together; the first part of a size is the same.

    Cheap and expensive chunks are mixed, so that the remaining time can be estimated.
    """
    chunks = []
    for _, same in groupby(sorted(keys, key=size), key=lambda key: size(key)[0]):
        together = list(same)
        chunks += [together[start : start + longest] for start in range(0, len(together), longest)]
    return [chunks[place] for place in shuffle(stream_key(0, "chunks"), len(chunks)).tolist()]


# Two baselines: the unigram, and guessing.


class UnigramLM(BellmaskLM):
    """Every token of a run by its frequency, whatever the context."""

    is_model = False

    def __init__(self, run: Loaded, log_p_V: NDArray[np.float64]) -> None:
        super().__init__(run)
        self.maker = scorer.RequestMaker(run.tokenizer, self.block_length, ())
        self.log_p_V, self._has_greedy = log_p_V, False
        self.own_length, self.sees_behind = None, True

    @staticmethod
    def of(run: Loaded) -> UnigramLM:
        """Frequencies in (a sample of) the run's training text, one added to each count."""
        train, _ = run.blocks()
        run.check_same_data(train)
        whole = replace(train.spread(REFERENCE_BLOCKS), starts=None)  # prompts count, too
        count_V = unigram_counts(whole, run.tokenizer.num_tokens)
        return UnigramLM(run, np.log(count_V / count_V.sum()))

    def is_exact(self, window: scorer.Request) -> bool:
        return True

    def score(self, windows: Sequence[scorer.Request], progress: Progress) -> list[scorer.Score]:
        sums = [float(self.log_p_V[list(window.target)].sum()) for window in windows]
        return [scorer.Score(s, 0.0, len(w.target), 0, True) for s, w in zip(sums, windows)]

    def fill(self, gaps: Sequence[Gap], progress: Progress) -> list[list[int]]:
        share_V = np.cumsum(np.exp(self.log_p_V))
        made = []
        for gap in gaps:
            count = gap.row.count(self.tokenizer.mask_id)
            u = uniform(stream_key(gap.seed, "unigram", gap.sample), torch.arange(count)).numpy()
            drawn = np.searchsorted(share_V, u * share_V[-1], side="right")
            made.append(drawn.clip(max=len(share_V) - 1).tolist())
        return made


class RandomLM(UnigramLM):
    """Scores all choices equally, so that it guesses; generates tokens uniformly."""

    @staticmethod
    def of(run: Loaded) -> RandomLM:
        size = run.tokenizer.num_tokens
        return RandomLM(run, np.full(size, -np.log(size)))

    def loglikelihood(self, requests: list[Instance]) -> list[tuple[float, bool]]:
        alike = scorer.Score(0.0, 0.0, 1, 0, True)
        return [ScoredChoice.of(alike, False, request.args[1]) for request in requests]


# Evaluating


@contextlib.contextmanager
def quiet_lm_eval() -> Iterator[None]:
    """lm-eval without its log, progress bars, prints and processes; errors are still raised."""
    import datasets
    from tqdm import tqdm

    theirs, begin_bar = logging.getLogger("lm_eval"), tqdm.__init__
    level, had_bars = theirs.level, not datasets.are_progress_bars_disabled()
    theirs.setLevel(logging.ERROR)
    datasets.disable_progress_bars()
    os.environ.setdefault("DISABLE_MULTIPROC", "1")  # bootstraps take a second
    tqdm.__init__ = partialmethod(begin_bar, disable=True)
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            yield
    finally:
        tqdm.__init__ = begin_bar
        theirs.setLevel(level)
        if had_bars:
            datasets.enable_progress_bars()


def _task_manager(tasks: Sequence[str], include: Path | None) -> Any:
    """Knows the tasks of a folder of YAML files, or the stock ones."""
    from lm_eval.tasks import TaskManager

    folder = None if include is None else str(include)
    manager = TaskManager(include_path=folder, include_defaults=include is None)
    for task in tasks:
        look_up("task of lm-eval", task, dict.fromkeys(manager.all_tasks))
    return manager


def evaluate_tasks(
    model: LM, tasks: Sequence[str], include: Path | None = None, limit: int | None = None
) -> dict[str, Any]:
    """lm-eval's results on the first documents of tasks: those of a folder of YAML files, or the
    stock ones. Nothing but on the main process.
    """
    from lm_eval.evaluator import simple_evaluate

    with quiet_lm_eval():
        how = {"task_manager": _task_manager(tasks, include), "log_samples": False}
        how |= {"limit": limit, "bootstrap_iters": BOOTSTRAPS}
        return simple_evaluate(model=model, tasks=list(tasks), **how) or {}


class LoadedTasks:
    """Tasks of a folder of YAML files, asked any number of times."""

    def __init__(self, include: Path, tasks: Sequence[str]) -> None:
        with quiet_lm_eval():
            self._loaded = _task_manager(tasks, include).load(list(tasks))

    def requests(self) -> list[Instance]:
        """All requests to a model."""
        tasks = self._loaded["tasks"].values()
        with quiet_lm_eval():
            for task in tasks:
                task.build_all_requests()
        return [request for task in tasks for request in task.instances]

    def samples(self, model: LM) -> dict[str, list[dict[str, Any]]]:
        """By task: each document with its scores."""
        from lm_eval.evaluator import evaluate

        with quiet_lm_eval():
            found = evaluate(model, self._loaded, bootstrap_iters=0, log_samples=True)
        assert found is not None, "as a single process, also under torchrun"
        return dict(found["samples"])


def run_command_line(args: Sequence[str]) -> int:
    """lm-eval's own command with these arguments, with the model bellmask registered."""
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
