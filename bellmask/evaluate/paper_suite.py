"""``bellmask evaluate MODEL... --suite paper``: the benchmarks of the paper's Table 4.

Several contestants (runs, and two baselines that know nothing) are asked the same questions of
several tasks (:mod:`bellmask.evaluate.paper_tasks`). They score choices and write into gaps; what
they did is cached. Scores have a deviation over seeds and an error over questions, and are compared
with those of the first contestant. Tables go to the screen, to Markdown and to LaTeX.
"""

from __future__ import annotations

import hashlib
import json
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from itertools import groupby
from math import isfinite, isnan, nan
from pathlib import Path
from typing import Annotated, Any, Literal, Protocol

import numpy as np
import torch
import tyro
from numpy.typing import NDArray
from torch import Tensor

from bellmask import __version__
from bellmask.config.command_line import parse_command
from bellmask.data.chat_templates import join, response_after
from bellmask.data.example_files import Message
from bellmask.data.readers import cache_folder
from bellmask.data.tokenizers import Tokenizer
from bellmask.evaluate.likelihood import REFERENCE_BLOCKS
from bellmask.evaluate.paper_tasks import (
    CHOICE_SCORES,
    PAPER_TASKS,
    STORY_SCORES,
    ChoiceItem,
    Completion,
    How,
    Infilling,
    Item,
    MissingData,
    Prompts,
    TaskRecords,
    begins_with_word,
    check_rouge,
    choose,
    contains,
    is_word,
    limit_items,
    make_items,
    matches_exactly,
    open_task,
    rouge,
)
from bellmask.evaluate.scorer import (
    Estimator,
    Request,
    RequestMaker,
    Score,
    Scorer,
    Tokens,
    add_up,
)
from bellmask.generate.answers import Answerer
from bellmask.generate.fill import fill_rows
from bellmask.generate.settings import Sampling
from bellmask.storage.loading import Loaded, LoadOptions, run_fingerprint
from bellmask.storage.runs import by_folder
from bellmask.utils.errors import UserError, look_up
from bellmask.utils.files import check_folder, is_number, is_whole, sanitize, write_text
from bellmask.utils.progress import NO_PROGRESS, Progress, progress_bar
from bellmask.utils.rng import shuffle, stream_key, uniform
from bellmask.utils.stats import Floats
from bellmask.utils.store import Store, content_key
from bellmask.utils.table import Bold, Table, markdown_page

# Options

TASK_NAMES = (
    "lambada",
    "openbookqa",
    "winogrande",
    "piqa",
    "social_iqa",
    "infilling",
    "triviaqa",
    "hellaswag",
)
BASELINES = ("random", "unigram")


@dataclass(frozen=True, kw_only=True)
class PaperOptions(LoadOptions):
    """Multiple choice, completion and infilling: the paper's Table 4 for any model bellmask loads.

    Accuracy of OpenBookQA, WinoGrande, PIQA, Social IQA and HellaSwag, last words of LAMBADA,
    answers of TriviaQA, ROUGE of ROCStories' missing sentences. Mean ± deviation over evaluation
    seeds, errors over questions, paired differences to the first model; beside them what guessing
    and a unigram get. Six tasks come in a wheel, so they need no hub. A suite that was stopped goes
    on; more tasks, questions or seeds do only what is new.

    Examples:
    bellmask evaluate runs/base runs/bell --suite paper --skip-missing

    bellmask evaluate runs/bell --suite paper --tasks piqa openbookqa --limit 100

    bellmask evaluate runs/base runs/bell --suite paper --data-dir benchmarks --limit 0
    """

    models: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="MODEL...")]
    """Run folders, exports or names on the hub; others are compared with the first."""
    tasks: tuple[str, ...] = TASK_NAMES
    """Which of lambada openbookqa winogrande piqa social_iqa infilling triviaqa hellaswag."""
    data_dir: str | None = None
    """Folder with <task>.jsonl, .json, .parquet, .arrow or .csv; other tasks are fetched."""
    skip_missing: bool = False
    """Go on without tasks whose data cannot be had; the table says so."""
    limit: int = 500
    """Questions per task, the same ones every time; 0 means all."""
    seeds: int = 5
    """Evaluation seeds: masks of long continuations, and what is sampled."""
    seed: int = 0
    """The first of them; the others follow it."""
    estimator: Literal["auto", "exact", "strata", "bernoulli", "diffullama", "left_to_right"] = (
        "auto"
    )
    """How a masked model's log-probability of a choice is found. auto: all masks of short ones,
    evenly spread mask counts for longer ones. The others for comparison."""
    draws: int = 16
    """Masks per longer choice, the same for all choices of a question; orders of an AoARM."""
    longest_exact: int = 6
    """Tokens up to which auto takes all masks (2^n - 1 of them)."""
    prompts: Literal["auto", "plain", "tuned"] = "auto"
    """plain: lm-eval's. tuned: those of fine-tuning on tasks. auto: tuned for fine-tuned runs."""
    ending: Literal["auto", "none", "eos"] = "auto"
    """eos: a choice is scored with the EOS behind it. auto: so for tuned prompts."""
    baselines: bool = True
    """Rows for guessing and for the unigram of the first model's training text."""
    batch_tokens: int = 8192
    """Tokens per forward pass; changes no score."""
    out: str | None = None
    """Folder for paper.json, paper.md, paper.tex and all answers; default MODEL/paper for a single
    run folder, else runs/paper."""
    cache_dir: str | None = None
    """Folder for fetched data; default $BELLMASK_CACHE or ~/.cache/bellmask."""


def _check(options: PaperOptions) -> None:
    check_folder(options.out)
    if not options.models:
        raise UserError("evaluate --suite paper needs at least one model")
    for name in options.tasks:
        look_up("task", name, dict.fromkeys(TASK_NAMES))
    if not options.tasks or len(set(options.tasks)) < len(options.tasks):
        raise UserError("--tasks wants one or more names, each once")
    if options.seeds < 1:
        raise UserError(f"--seeds must be at least 1, got {options.seeds}")
    if options.limit < 0:
        raise UserError(f"--limit must be 0 (all questions) or more, got {options.limit}")
    if options.data_dir is not None and not Path(options.data_dir).is_dir():
        raise UserError(f"--data-dir {options.data_dir}: there is no such folder")
    if "infilling" in options.tasks:
        check_rouge()


# Who takes part in a suite: what it must be able to do, and a run that can.
#
# A contestant gives log-probabilities of continuations and writes into gaps.
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

    def asks(self, context: str, continuation: str, noise: int) -> list[Request]:
        """What to ask for a continuation's probability: one ask or several windows."""
        ...

    def is_exact(self, ask: Request) -> bool:
        """Every seed gives this ask the same score."""
        ...

    def score(
        self, asks: Sequence[Request], seed: int, progress: Progress = NO_PROGRESS
    ) -> list[Score]:
        """Log-probabilities."""
        ...

    def write(
        self,
        rows: Sequence[Tensor],
        samples: Sequence[int],
        *,
        seed: int,
        temperature: float,
        progress: Progress = NO_PROGRESS,
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
        self._scorer = Scorer(run, estimator, batch_tokens=batch_tokens)
        answerer = Answerer(run)
        self._is_tuned = answerer.is_tuned
        self._is_conversation = answerer.is_tuned and answerer.knows_turns
        self._encoder = answerer.encoder
        is_tuned = answerer.is_tuned if prompts == "auto" else prompts == "tuned"
        self.prompts: Prompts = "tuned" if is_tuned else "plain"
        wants_eos = is_tuned if ending == "auto" else ending == "eos"
        self.has_eos = wants_eos and run.tokenizer.eos_id >= 0
        self.own_length = answerer.length if answerer.is_tuned else None
        self.fingerprint = content_key(run_fingerprint(run), repr(self._scorer.estimator))

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
        messages = (Message("user", sanitize(context)),)
        parts = self._encoder.template.parts(messages, self._is_conversation)
        before = tuple(self._encoder.encode([parts])[0].tolist())
        return before, maker.encode(response_after(join(parts), continuation))

    def begin(self, tokens: Tokens, room: int) -> Tokens:
        """How a row begins: the begin sign and the last tokens that have room."""
        return self._scorer.maker.before(tokens, room)

    def asks(self, context: str, continuation: str, noise: int) -> list[Request]:
        """With the EOS behind the continuation, if it is to be scored."""
        before, target = self.pair(context, continuation)
        if not target:
            raise UserError(f"the choice {continuation!r} has no tokens: nothing to score")
        if self.has_eos:
            target = (*target, self.tokenizer.eos_id)
        return self._scorer.maker.windows(before, target, (), noise)

    def is_exact(self, ask: Request) -> bool:
        """Short continuations, and any of an ARM."""
        return self._scorer.is_exact(ask)

    def score(
        self, asks: Sequence[Request], seed: int, progress: Progress = NO_PROGRESS
    ) -> list[Score]:
        """See :class:`bellmask.evaluate.scorer.Scorer`."""
        return self._scorer.score(asks, seed=seed, progress=progress)

    def write(
        self,
        rows: Sequence[Tensor],
        samples: Sequence[int],
        *,
        seed: int,
        temperature: float,
        progress: Progress = NO_PROGRESS,
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
            progress=progress,
        )
        return [one.ids for one in made]


# Two contestants that know nothing, to show what scores are worth: guessing, and the unigram.


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
    def _maker(self) -> RequestMaker:
        return RequestMaker(self.tokenizer, self.block_length, ())

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

    def asks(self, context: str, continuation: str, noise: int) -> list[Request]:
        """As lm-eval cuts them."""
        return self._maker.asks(context, continuation, noise=noise)

    def is_exact(self, ask: Request) -> bool:
        """There is no noise."""
        return True

    def score(
        self, asks: Sequence[Request], seed: int, progress: Progress = NO_PROGRESS
    ) -> list[Score]:
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
        progress: Progress = NO_PROGRESS,
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


# Rows with a gap: what a contestant is shown, and masks where it is to write.
TaskVariant = Literal["gold", "own"]
VARIANTS: tuple[TaskVariant, ...] = ("gold", "own")
"""The gap has the gold answer's length, or one that tells nothing about it."""
OWN_WORDS = {"word": 4, "answer": 8}
"""Room in a gap of the second kind, in words of the prompt's mean length; a run that was tuned to
answer has a length of its own."""
TEMPERATURE = {"word": 1.0, "answer": 1.0, "story": 0.95}
"""As in DiffuLLaMA's scripts."""


def make_row(one: Contestant, kind: str, item: Item, variant: int | TaskVariant) -> Tokens:
    """Given tokens and masks. Where they do not fit, the gap is cut to half of the block, then what
    is furthest from it is left out.
    """
    length = _gold_length(one, item)
    behind: Tokens = ()
    if isinstance(item, Completion):
        before, _ = one.pair(item.prompt, item.answer)
        if variant == "own":
            length = one.own_length or _words(before, item.prompt, OWN_WORDS[kind])
    else:
        assert isinstance(item, Infilling)
        before = _encode(one, item.before)
        after = _encode_after(one, item.before, item.after)
        behind = after if one.sees_behind else ()
        if variant == "own":  # as the story's other four sentences
            length = round((len(before) + len(after)) / 4)
    length = min(max(1, length), _longest(one))
    room = one.block_length - length
    shown = len(one.begin(before, one.block_length))
    behind = behind[: max(room // 2, room - shown)]
    gap = [one.tokenizer.mask_id] * length
    return (*one.begin(before, room - len(behind)), *gap, *behind)


def is_cut(one: Contestant, item: Item) -> bool:
    """The gold answer is longer than any gap: it cannot be written."""
    return _gold_length(one, item) > _longest(one)


def is_shortened(one: Contestant, item: Item) -> bool:
    """Not all that the item shows fits into a row with what is asked for."""
    if isinstance(item, ChoiceItem):
        pairs = map(one.pair, item.contexts, item.continuations)
        return any(
            len(_whole(one, before)) + len(target) > one.block_length for before, target in pairs
        )
    length = min(_gold_length(one, item), _longest(one))
    if isinstance(item, Completion):
        before, behind = one.pair(item.prompt, item.answer)[0], 0
    else:
        before = _encode(one, item.before)
        behind = len(_encode_after(one, item.before, item.after)) if one.sees_behind else 0
    return len(_whole(one, before)) + length + behind > one.block_length


def _whole(one: Contestant, before: Tokens) -> Tokens:
    """With the begin sign, whatever its length."""
    return one.begin(before, len(before) + one.block_length)


def _longest(one: Contestant) -> int:
    return one.block_length // 2


def _gold_length(one: Contestant, item: Item) -> int:
    if isinstance(item, Completion):
        return len(one.pair(item.prompt, item.answer)[1])
    assert isinstance(item, Infilling)
    return len(_encode_after(one, item.before, item.gold))


def _encode_after(one: Contestant, before: str, text: str) -> Tokens:
    """A text's tokens where it stands: alone, some tokenizers put a space in front of it."""
    return _encode(one, before + text)[len(_encode(one, before)) :]


def _words(tokens: Tokens, text: str, count: int) -> int:
    """Tokens of so many words, if they are as long as those of the text."""
    return math.ceil(count * len(tokens) / max(1, len(text.split())))


def _encode(one: Contestant, text: str) -> Tokens:
    return tuple(one.tokenizer.encode(text.encode("utf-8", "replace").decode()).tolist())


# A contestant's work on the tasks: what is missing is done in batches over tasks, and kept.
#
# A unit is one log-probability or one written text, kept under a key of all that decides it
# (:mod:`bellmask.utils.store`): a suite that was stopped goes on, one with more tasks, questions or
# seeds does only what is new. A log-probability without noise is one unit for all seeds. Of units
# only names are held in memory; tokens are made again when their turn comes.
FORMAT = 1
"""Raised when code changes what is measured: what was kept is not used again."""
CHUNK = 128
"""Units that are done before they are written down."""


@dataclass(frozen=True)
class TaskItems:
    """One task's questions, as one kind of prompt shows them."""

    name: str
    kind: str
    items: tuple[Item, ...]


@dataclass(frozen=True)
class _Name:
    """What is kept of a question, but for the seed."""

    key: str
    is_exact: bool
    size: tuple[int, ...]
    """Units of about one size share batches."""

    def with_seed(self, seed: int) -> str:
        """The key that it is kept under."""
        return self.key if self.is_exact else f"{self.key}/{seed}"


@dataclass(frozen=True)
class _Unit:
    """Something that is to be done: an ask to be scored, or a gap to be filled."""

    key: str
    seed: int
    size: tuple[int, ...]
    task: TaskItems
    item: Item
    part: int | TaskVariant
    """Which choice, or which gap."""
    window: int = 0

    @property
    def batch(self) -> tuple[int, float]:
        """Units that can be done at once have the same; log-probabilities have no temperature."""
        return self.seed, -1.0 if isinstance(self.item, ChoiceItem) else TEMPERATURE[self.task.kind]


class SuiteUnits:
    """All units of one contestant."""

    def __init__(
        self,
        contestant: Contestant,
        tasks: Sequence[TaskItems],
        seeds: Sequence[int],
        folder: Path,
    ) -> None:
        """What is done is kept in ``folder``."""
        self.contestant, self.tasks, self.seeds = contestant, tasks, tuple(seeds)
        mark = content_key(FORMAT, contestant.fingerprint)
        self._kept = Store(folder / f"{mark}.jsonl", self._is_unit)
        self._names: dict[tuple[str, int, int | TaskVariant], tuple[_Name, ...]] = {}

    def _is_unit(self, record: dict[str, Any]) -> bool:
        """What a file has under a key: the tokens of a text, or a score."""
        if "ids" in record:
            ids, top = record["ids"], self.contestant.tokenizer.mask_id
            return isinstance(ids, list) and all(is_whole(i) and i <= top for i in ids)
        counts = [record.get(name) for name in ("num_tokens", "num_passes")]
        is_error = record.get("error", "") is None or is_number(record.get("error"))
        is_right = is_number(record.get("log_probability")) and is_error
        return is_right and all(map(is_whole, counts)) and type(record.get("is_exact")) is bool

    def missing(self) -> int:
        """Units that are left to do."""
        return len(self._missing())

    def do(self, progress: Progress = NO_PROGRESS) -> None:
        """Do what is missing."""
        for chunk in _chunks(self._missing()):
            if isinstance(chunk[0].item, ChoiceItem):
                self._kept.add(self._score(chunk, progress))
            else:
                self._kept.add(self._write(chunk, progress))

    def _missing(self) -> list[_Unit]:
        found: dict[str, _Unit] = {}
        for task in self.tasks:
            for item in task.items:
                for part in self._parts(item):
                    for window, name in enumerate(self._named(task, item, part)):
                        for seed in self.seeds[:1] if name.is_exact else self.seeds:
                            key = name.with_seed(seed)
                            if key not in self._kept and key not in found:
                                found[key] = _Unit(key, seed, name.size, task, item, part, window)
        return list(found.values())

    def _parts(self, item: Item) -> Sequence[int | TaskVariant]:
        if not isinstance(item, ChoiceItem):
            return VARIANTS
        return () if self.contestant.is_guess else range(len(item.continuations))

    def _named(self, task: TaskItems, item: Item, part: int | TaskVariant) -> tuple[_Name, ...]:
        place = (task.name, item.number, part)
        if place not in self._names:
            self._names[place] = tuple(self._make_names(task, item, part))
        return self._names[place]

    def _make_names(self, task: TaskItems, item: Item, part: int | TaskVariant) -> Iterator[_Name]:
        if isinstance(item, ChoiceItem):
            for ask in self._asks(task, item, int(part)):
                is_exact = self.contestant.is_exact(ask)
                noise = () if is_exact else (ask.noise,)
                key = content_key("score", ask.given, ask.target, *noise)
                yield _Name(key, is_exact, (ask.length,))
        else:
            row = make_row(self.contestant, task.kind, item, part)
            sample, temperature = _sample(task, item, part), TEMPERATURE[task.kind]
            gap = row.count(self.contestant.tokenizer.mask_id)
            yield _Name(content_key("text", row, sample, temperature), False, (gap, len(row)))

    # Log-probabilities

    def _asks(self, task: TaskItems, item: ChoiceItem, choice: int) -> list[Request]:
        """The choices of a question share their noise."""
        noise = stream_key(0, "question", task.name, item.number) % (1 << 62)
        return self.contestant.asks(item.contexts[choice], item.continuations[choice], noise)

    def _score(self, chunk: list[_Unit], progress: Progress) -> list[dict[str, Any]]:
        asks = []
        for unit in chunk:
            assert isinstance(unit.item, ChoiceItem)
            asks.append(self._asks(unit.task, unit.item, int(unit.part))[unit.window])
        scores = self.contestant.score(asks, chunk[0].seed, progress)
        return [_record(unit, score) for unit, score in zip(chunk, scores, strict=True)]

    def scores(self, task: TaskItems, item: ChoiceItem, seed: int) -> list[Score]:
        """Of an item's choices, with one seed; all must have been done."""
        found = []
        for choice in range(len(item.continuations)):
            names = self._named(task, item, choice)
            found.append(add_up([_score(self._kept[name.with_seed(seed)]) for name in names]))
        return found

    def num_passes(self, task: TaskItems) -> int:
        """Rows through the network for all log-probabilities of a task."""
        keys = {
            name.with_seed(seed)
            for item in task.items
            if isinstance(item, ChoiceItem)
            for part in self._parts(item)
            for name in self._named(task, item, part)
            for seed in self.seeds
        }
        return sum(self._kept[key]["num_passes"] for key in keys)

    # Texts

    def _write(self, chunk: list[_Unit], progress: Progress) -> list[dict[str, Any]]:
        seed, temperature = chunk[0].batch
        written = self.contestant.write(
            [torch.tensor(make_row(self.contestant, u.task.kind, u.item, u.part)) for u in chunk],
            [_sample(unit.task, unit.item, unit.part) for unit in chunk],
            seed=stream_key(seed, "downstream") % (1 << 31),
            temperature=temperature,
            progress=progress,
        )
        return [{"key": unit.key, "ids": ids} for unit, ids in zip(chunk, written, strict=True)]

    def text(self, task: TaskItems, item: Item, variant: TaskVariant, seed: int) -> str:
        """What was written; up to EOS."""
        tokenizer = self.contestant.tokenizer
        (name,) = self._named(task, item, variant)
        ids = self._kept[name.with_seed(seed)]["ids"]
        end = ids.index(tokenizer.eos_id) if tokenizer.eos_id in ids else len(ids)
        return tokenizer.decode(np.array(ids[:end], dtype=np.int64))


def _sample(task: TaskItems, item: Item, part: int | TaskVariant) -> int:
    """Names a text's noise."""
    return stream_key(0, "text", task.name, item.number, part) % (1 << 40)


def _record(unit: _Unit, score: Score) -> dict[str, Any]:
    """For JSON, which has no nan: a single draw has no error."""
    if not isfinite(score.log_probability):
        raise UserError(
            f"{unit.task.name}, question {unit.item.number + 1}: the model gives a choice the "
            f"log-probability {score.log_probability}; its weights are damaged"
        )
    return {"key": unit.key, **asdict(score), "error": None if isnan(score.error) else score.error}


def _score(record: dict[str, Any]) -> Score:
    fields = {name: record[name] for name in Score.__dataclass_fields__}
    return Score(**{**fields, "error": nan if record["error"] is None else record["error"]})


def _chunks(units: Sequence[_Unit]) -> list[list[_Unit]]:
    """Units that are done at once, of about one size, whatever task they belong to.

    Cheap and dear chunks are mixed, so that the time left can be told from the time taken.
    """
    ordered = sorted(units, key=lambda unit: (unit.batch, unit.size))
    chunks = []
    for _, same in groupby(ordered, key=lambda unit: unit.batch):
        together = list(same)
        chunks += [together[start : start + CHUNK] for start in range(0, len(together), CHUNK)]
    return [chunks[place] for place in shuffle(stream_key(0, "chunks"), len(chunks)).tolist()]


# From units to numbers: scores of a contestant on a task, with two kinds of error.
#
# *Deviation* is over evaluation seeds (masks, sampling noise), as the paper's ±; *error* over
# questions: what another sample of questions would change. Differences between contestants are
# paired: the same questions and seeds.
#
# S seeds, B questions; all scores are percentages.
OWN = "_own"
"""Ends the name of a score whose gap does not have the gold answer's length."""
FEWEST_QUESTIONS = 20
"""With fewer, the spread over questions says too little about the error."""
SURE = 1.96
"""A difference of more standard errors is called larger than its error (95 %)."""


@dataclass(frozen=True)
class TaskScores:
    """One contestant on one task."""

    value_SB: dict[str, Floats]
    """Score by name, for each seed and question."""
    num_passes: int = 0
    """Rows through the network for the log-probabilities."""
    exact_share: float | None = None
    """Of log-probabilities without noise; None where there are none."""
    num_cut: int = 0
    """Questions whose gold answer is longer than any gap."""
    num_shortened: int = 0
    """Questions of which not all fits into a row: the oldest tokens go."""

    def mean(self, score: str) -> float:
        """The score."""
        return float(self.value_SB[score].mean())

    def deviation(self, score: str) -> float | None:
        """Standard deviation over seeds; None for one seed."""
        value_S = self.value_SB[score].mean(axis=1)
        return float(value_S.std(ddof=1)) if len(value_S) > 1 else None

    def error(self, score: str) -> float | None:
        """Standard error over questions."""
        return _error(self.value_SB[score].mean(axis=0))

    def difference(self, other: TaskScores, score: str) -> tuple[float, float | None]:
        """(this - the other, standard error over questions), paired."""
        apart_B = self.value_SB[score].mean(axis=0) - other.value_SB[score].mean(axis=0)
        return float(apart_B.mean()), _error(apart_B)


def _error(value_B: Floats) -> float | None:
    if len(value_B) < 2:
        return None
    return float(value_B.std(ddof=1) / math.sqrt(len(value_B)))


def is_sure(difference: float, error: float | None, num_questions: int) -> bool:
    """The difference is larger than its error, and there are enough questions to know that."""
    is_known = error is not None and num_questions >= FEWEST_QUESTIONS
    return is_known and abs(difference) > SURE * (error or 0.0)


def summary(measured: TaskScores, reference: TaskScores | None) -> dict[str, Any]:
    """Numbers for JSON; with a reference also the differences to it."""
    scores: dict[str, Any] = {}
    for name in measured.value_SB:
        scores[name] = {
            "mean": measured.mean(name),
            "deviation": measured.deviation(name),
            "error": measured.error(name),
        }
        if reference is not None:
            gap, error = measured.difference(reference, name)
            scores[name]["difference"] = {
                "mean": gap,
                "error": error,
                "is_sure": is_sure(gap, error, measured.value_SB[name].shape[1]),
            }
    return {
        "scores": scores,
        "num_passes": measured.num_passes,
        "exact_share": measured.exact_share,
        "num_cut": measured.num_cut,
        "num_shortened": measured.num_shortened,
    }


# Grading


def grade(work: SuiteUnits, task: TaskItems) -> TaskScores:
    """All scores of a task; its units must have been done."""
    if task.kind != "choice":
        return _grade_texts(work, task)
    return _guess(work, task) if work.contestant.is_guess else _grade_choices(work, task)


def _grade_choices(work: SuiteUnits, task: TaskItems) -> TaskScores:
    items = [item for item in task.items if isinstance(item, ChoiceItem)]
    right: dict[str, list[list[float]]] = {how: [] for how in CHOICE_SCORES}
    is_exact: list[bool] = []
    for seed in work.seeds:
        found = [work.scores(task, item, seed) for item in items]
        for how in CHOICE_SCORES:
            pairs = zip(items, found, strict=True)
            right[how].append([100.0 * _is_right(item, scores, how) for item, scores in pairs])
        is_exact += [score.is_exact for scores in found for score in scores]
    return TaskScores(
        {how: np.array(values) for how, values in right.items()},
        work.num_passes(task),
        float(np.mean(is_exact)),
        num_shortened=_num_shortened(work, task),
    )


def _guess(work: SuiteUnits, task: TaskItems) -> TaskScores:
    """Choices by chance, in expectation."""
    value = [100.0 / len(item.continuations) for item in task.items if isinstance(item, ChoiceItem)]
    return TaskScores({how: np.array([value] * len(work.seeds)) for how in CHOICE_SCORES})


def _is_right(item: ChoiceItem, scores: list[Score], how: str) -> float:
    """1 or 0; who finds all choices equally likely (a unigram on WinoGrande) guesses."""
    if len({(score.log_probability, score.num_tokens) for score in scores}) == 1:
        return 1 / len(scores)
    ways: dict[str, How] = {"raw": "raw", "per_token": "per_token", "per_byte": "per_byte"}
    picked = choose(
        [score.log_probability for score in scores],
        ways[how],
        num_tokens=[score.num_tokens for score in scores],
        continuations=item.continuations,
    )
    return picked == item.gold


def _grade_texts(work: SuiteUnits, task: TaskItems) -> TaskScores:
    graded = [[_grade_text(work, task, item, seed) for item in task.items] for seed in work.seeds]
    return TaskScores(
        {name: np.array([[one[name] for one in row] for row in graded]) for name in graded[0][0]},
        num_cut=sum(is_cut(work.contestant, item) for item in task.items),
        num_shortened=_num_shortened(work, task),
    )


def _num_shortened(work: SuiteUnits, task: TaskItems) -> int:
    return sum(is_shortened(work.contestant, item) for item in task.items)


def _grade_text(work: SuiteUnits, task: TaskItems, item: Item, seed: int) -> dict[str, float]:
    found: dict[str, float] = {}
    for variant in VARIANTS:
        written = work.text(task, item, variant, seed)
        ending = OWN if variant == "own" else ""
        for name, value in _text_scores(task.kind, item, written, variant).items():
            found[name + ending] = value
    return found


def _text_scores(kind: str, item: Item, written: str, variant: TaskVariant) -> dict[str, float]:
    if isinstance(item, Infilling):
        made = rouge(written, item.gold)
        return {name: getattr(made, name) for name in STORY_SCORES}
    assert isinstance(item, Completion)
    if kind == "word":
        is_right = is_word if variant == "gold" else begins_with_word
        return {"word": 100.0 * is_right(written, item.answer)}
    return {
        "contains": 100.0 * contains(written, item.accepted),
        "exact_match": 100.0 * matches_exactly(written, item.accepted),
    }


# The suite: the same questions for all contestants, differences to the first.


class Suite:
    """What is asked of whom; ``do`` it, then take the ``numbers``."""

    def __init__(
        self,
        contestants: Mapping[str, Contestant],
        tasks: Mapping[str, TaskRecords],
        limit: int,
        seeds: Sequence[int],
        folder: Path,
    ) -> None:
        """``limit`` questions of each task (0: all); what is done is kept in ``folder``."""
        self._loaded, self._seeds = tasks, tuple(seeds)
        items = same_items(tasks, sorted({one.prompts for one in contestants.values()}), limit)
        self._works = {
            name: SuiteUnits(one, items[one.prompts], seeds, folder)
            for name, one in contestants.items()
        }

    def missing(self) -> int:
        """Answers of models that are left to get (baselines take no time)."""
        works = self._works.values()
        return sum(work.missing() for work in works if work.contestant.is_model)

    def do(self, progress: Progress = NO_PROGRESS) -> None:
        """Get them."""
        for work in self._works.values():
            work.do(progress if work.contestant.is_model else NO_PROGRESS)

    def measured(self) -> dict[str, dict[str, TaskScores]]:
        """Scores by contestant and task."""
        return {
            name: {task.name: grade(work, task) for task in work.tasks}
            for name, work in self._works.items()
        }

    def numbers(self) -> dict[str, Any]:
        """All of it, for files and tables."""
        measured = self.measured()
        first, *_ = measured
        tasks = []
        for task in self._works[first].tasks:
            results = {
                name: summary(
                    found[task.name], None if name == first else measured[first][task.name]
                )
                for name, found in measured.items()
            }
            tasks.append({**self._about_task(task), "results": results})
        models = [
            {"name": name, "is_model": work.contestant.is_model, **work.contestant.about()}
            for name, work in self._works.items()
        ]
        return {"models": models, "seeds": list(self._seeds), "tasks": tasks}

    def _about_task(self, task: TaskItems) -> dict[str, Any]:
        info, loaded = PAPER_TASKS[task.name], self._loaded[task.name]
        return {
            "name": task.name,
            "title": info.title,
            "main": info.main_score,
            "measure": info.measure,
            "note": info.note,
            "gives_length": info.gives_length,
            "origin": loaded.origin,
            "identity": loaded.identity,
            "num_questions": len(task.items),
            "num_records": len(loaded.records),
        }


def same_items(
    tasks: Mapping[str, TaskRecords], kinds: Sequence[Prompts], limit: int
) -> dict[Prompts, list[TaskItems]]:
    """The same questions with each kind of prompt, so that differences can be paired."""
    found: dict[Prompts, list[TaskItems]] = {kind: [] for kind in kinds}
    for task, loaded in tasks.items():
        made = {kind: make_items(task, loaded.records, kind) for kind in kinds}
        numbers = set.intersection(*({item.number for item in items} for items in made.values()))
        if not numbers:
            raise UserError(f"{task}: none of {len(loaded.records)} records has a usable answer")
        for kind, items in made.items():
            usable: list[Item] = [item for item in items if item.number in numbers]
            kept = tuple(limit_items(task, usable, limit))
            found[kind].append(TaskItems(task, PAPER_TASKS[task].kind, kept))
    return found


# What a reader must know to compare a table of benchmarks with others.
Numbers = Mapping[str, Any]
MARK = "†"
"""Behind columns whose score tells the model how long the gold answer is."""


def notes(numbers: Numbers) -> list[str]:
    """What a reader must know to compare these numbers with others."""
    tasks = numbers["tasks"]
    lines = _errors(numbers)
    if any(task["gives_length"] for task in tasks):
        lines.append(f"{MARK} The model is told how many tokens the gold answer has.")
    lines += [f"{t['note']}; {t['num_questions']:,} questions, {t['origin']}." for t in tasks]
    lines += [*_estimator(numbers), *_prompts(numbers), *_alike(numbers)]
    lines += [*_cut(numbers), *_shortened(numbers), *_baselines(numbers)]
    return [*lines, *(f"Left out, no data: {name}." for name in numbers["missing"])]


def _errors(numbers: Numbers) -> list[str]:
    seeds = len(numbers["seeds"])
    lines = [f"Mean ± standard deviation over {seeds} evaluation seeds."]
    if seeds == 1:
        lines = ["One evaluation seed: no deviation is known."]
    if len(_models(numbers)) > 1:
        lines.append(
            f"In brackets the change to {numbers['models'][0]['name']}, with * where it is more "
            "than 1.96 standard errors over 20 questions or more (paired; one training run each). "
            "Bold: the best of the models."
        )
    return lines


def _models(numbers: Numbers) -> list[Mapping[str, Any]]:
    return [model for model in numbers["models"] if model["is_model"]]


def _estimator(numbers: Numbers) -> list[str]:
    choices = [task for task in numbers["tasks"] if task["main"] == "per_token"]
    if not choices:
        return []
    how = f"{numbers['estimator']}, {numbers['draws']} masks"
    if numbers["estimator"] == "auto":
        how = f"all masks up to {numbers['longest_exact']} tokens, else {numbers['draws']} of them"
    shares = []
    for model in _models(numbers):
        found = [task["results"][model["name"]]["exact_share"] for task in choices]
        shares.append(f"{100 * sum(found) / len(found):.0f} % of {model['name']}'s")
    return [f"Log-probabilities of choices: {how}; without noise are {', '.join(shares)}."]


def _prompts(numbers: Numbers) -> list[str]:
    what = {"plain": "lm-eval's", "tuned": "those of fine-tuning"}
    names: dict[str, list[str]] = {}
    for model in _models(numbers):
        ending = ", EOS scored behind choices" if model["ending"] == "eos" else ""
        names.setdefault(what[model["prompts"]] + ending, []).append(model["name"])
    return [f"Prompts of {', '.join(mine)}: {form}." for form, mine in names.items()]


def _cut(numbers: Numbers) -> list[str]:
    return [
        f"{model['name']}: {count:,} gold answers of {task['title']} are longer than half of its "
        "block; their gaps are cut."
        for model in _models(numbers)
        for task in numbers["tasks"]
        if (count := task["results"][model["name"]]["num_cut"])
    ]


def _shortened(numbers: Numbers) -> list[str]:
    lines = []
    for model in _models(numbers):
        found = {t["title"]: t["results"][model["name"]]["num_shortened"] for t in numbers["tasks"]}
        counts = ", ".join(f"{title} {count:,}" for title, count in found.items() if count)
        if counts:
            lines.append(
                f"{model['name']}: questions that did not fit into rows of {model['block_length']} "
                f"tokens and lost their oldest ones: {counts}."
            )
    return lines


def _alike(numbers: Numbers) -> list[str]:
    """What makes models hard to compare."""
    models, lines = _models(numbers), []
    if len({model["tokenizer"] for model in models}) > 1:
        lines.append("Tokenizers differ, and scores per token with them: compare per byte.")
    kinds = {model["framework"] for model in models}
    if "arm" in kinds and len(kinds) > 1:
        lines.append("Log-probabilities of an ARM are exact, those of the others bounds.")
    return lines


def _baselines(numbers: Numbers) -> list[str]:
    first = numbers["models"][0]["name"]
    what = {
        "random": "guesses in expectation, and texts of random tokens",
        "unigram": f"each token by its frequency in the training text of {first}",
    }
    here = [model["name"] for model in numbers["models"] if not model["is_model"]]
    return [f"{name}: {what[name]}." for name in here]


# Table 4's layout: models by benchmarks, on the screen, in Markdown and in LaTeX.
NAMES = {
    "per_token": "accuracy, per token",
    "raw": "accuracy, sum",
    "per_byte": "accuracy, per byte",
    "word": "word",
    "contains": "contains an answer",
    "exact_match": "exact match",
    "rouge_mean": "ROUGE, mean",
    "rouge_1": "ROUGE-1",
    "rouge_2": "ROUGE-2",
    "rouge_l": "ROUGE-L",
}


def score_name(score: str) -> str:
    """A score in words."""
    if score.endswith(OWN):
        return f"{NAMES[score.removesuffix(OWN)]}, length not given"
    return NAMES[score]


def value(found: Mapping[str, Any]) -> str:
    """``12.34 ± 0.56``: mean and deviation over seeds."""
    deviation = found["deviation"]
    return f"{found['mean']:.2f}" + ("" if deviation is None else f" ± {deviation:.2f}")


def best_models(numbers: Numbers, task: Mapping[str, Any], score: str) -> set[str]:
    """The models (no baselines) that are best as printed; none where nobody scored, nor of one."""
    means = {
        model["name"]: round(task["results"][model["name"]]["scores"][score]["mean"], 2)
        for model in numbers["models"]
        if model["is_model"]
    }
    top = max(means.values())
    return {name for name, mean in means.items() if mean == top and top > 0 and len(means) > 1}


def _title(task: Mapping[str, Any]) -> str:
    unit = "" if task["name"] == "infilling" else " (%)"
    return task["title"] + unit + (MARK if task["gives_length"] else "")


def main_table(numbers: Numbers) -> Table:
    """Table 4: the main score of each task, and its change to the first row."""
    tasks = numbers["tasks"]
    rows = []
    for model in numbers["models"]:
        cells = [_label(model)]
        for task in tasks:
            found = task["results"][model["name"]]["scores"][task["main"]]
            text = value(found)
            gap = found.get("difference")
            if gap is not None and model["is_model"]:
                text += f" ({signed(gap['mean'], gap['is_sure'])})"
            is_best = model["name"] in best_models(numbers, task, task["main"])
            cells.append(Bold(text) if is_best else text)
        rows.append(cells)
    title = "downstream benchmarks (Table 4)"
    return Table(title, ["model", *map(_title, tasks)], rows, notes(numbers))


def _label(model: Mapping[str, Any]) -> str:
    return model["name"] if model["step"] is None else f"{model['name']}, step {model['step']}"


def signed(gap: float, is_sure: bool) -> str:
    """A change, with a star where it is larger than its error."""
    return f"{_as_printed(gap):+.2f}" + ("*" if is_sure else "")


def _as_printed(number: float) -> float:
    return round(number, 2) + 0.0  # never -0.00


def full_rows(numbers: Numbers) -> tuple[list[str], list[list[str]]]:
    """(columns, rows): every score of every model, with both errors and the paired difference."""
    columns = ["task", "score", "model", "mean", "deviation", "error", "difference ± error"]
    rows = []
    for task in numbers["tasks"]:
        for score in task["results"][numbers["models"][0]["name"]]["scores"]:
            for model in numbers["models"]:
                found = task["results"][model["name"]]["scores"][score]
                row = [task["title"], score_name(score), model["name"], f"{found['mean']:.2f}"]
                row += [_or_dash(found["deviation"]), _or_dash(found["error"])]
                rows.append([*row, _difference(found.get("difference"))])
    return columns, rows


def other_rows(numbers: Numbers) -> tuple[list[str], list[list[str]]]:
    """(columns, rows): the scores that are not in Table 4, models side by side."""
    names = [model["name"] for model in numbers["models"]]
    rows = []
    for task in numbers["tasks"]:
        results = [task["results"][name]["scores"] for name in names]
        for score in results[0]:
            if score != task["main"]:
                label = f"{task['title']}: {score_name(score)}"
                rows.append([label, *(value(found[score]) for found in results)])
    return ["score", *names], rows


def _or_dash(number: float | None) -> str:
    return "-" if number is None else f"{number:.2f}"


def _difference(gap: Mapping[str, Any] | None) -> str:
    if gap is None:
        return "-"
    return f"{_as_printed(gap['mean']):+.2f} ± {_or_dash(gap['error'])}" + (
        " *" if gap["is_sure"] else ""
    )


def show(numbers: Numbers) -> None:
    """Table 4, the other scores and the notes, on the screen."""
    main = main_table(numbers)
    replace(main, notes=()).print()
    Table("other scores", *other_rows(numbers), main.notes).print()


def markdown(numbers: Numbers) -> str:
    """Table 4 and the notes as a page, then every score with its errors."""
    main = replace(main_table(numbers), title="")
    return markdown_page("Downstream benchmarks", main, Table("Every score", *full_rows(numbers)))


# The command


def _load_contestants(options: PaperOptions) -> dict[str, Contestant]:
    """By name: the models, then those that know nothing."""
    estimator = Estimator(options.estimator, options.draws, options.longest_exact).check()
    places = by_folder(options.models)
    for name in BASELINES if options.baselines else ():
        if name in places:
            raise UserError(
                f"a row is called {name} already; rename {places[name]} or give --no-baselines"
            )
    models = {
        name: RunContestant(
            options.load(place),
            estimator,
            prompts=options.prompts,
            ending=options.ending,
            batch_tokens=options.batch_tokens,
        )
        for name, place in places.items()
    }
    first = next(iter(models.values())).run
    return {**models, **(_load_baselines(first) if options.baselines else {})}


def _load_baselines(run: Loaded) -> dict[str, Contestant]:
    found: dict[str, Contestant] = {"random": guesser_for(run)}
    try:
        found["unigram"] = unigram_of(run)
    except UserError as error:
        print(f"note: no unigram without the training text: {error}", file=sys.stderr)
    return found


def _load_tasks(options: PaperOptions) -> tuple[dict[str, TaskRecords], dict[str, str]]:
    """(records by task, why others are missing)."""
    loaded, missing = {}, {}
    for task in options.tasks:
        try:
            loaded[task] = open_task(task, options.data_dir, cache_folder(options.cache_dir))
        except MissingData as error:
            missing[task] = str(error)
            if options.skip_missing:
                print(f"note: left out: {error}", file=sys.stderr)
    if missing and not options.skip_missing:
        raise UserError(f"{' '.join(missing.values())} (--skip-missing goes on without)")
    if not loaded:
        raise UserError("there is no data for any of the tasks")
    return loaded, missing


def _folder(options: PaperOptions) -> Path:
    if options.out:
        return Path(options.out)
    only = Path(options.models[0])
    return only / "paper" if len(options.models) == 1 and only.is_dir() else Path("runs/paper")


def _write(options: PaperOptions, found: dict[str, Any], folder: Path) -> None:
    numbers = {
        "bellmask": __version__,
        "suite": "paper",
        "estimator": options.estimator,
        "draws": options.draws,
        "longest_exact": options.longest_exact,
        "weights": options.weights,
        "limit": options.limit,
        **found,
    }
    folder.mkdir(parents=True, exist_ok=True)
    write_text(folder / "paper.json", json.dumps(numbers, indent=1, allow_nan=False) + "\n")
    write_text(folder / "paper.md", markdown(numbers))
    write_text(folder / "paper.tex", main_table(numbers).latex())
    show(numbers)
    print(f"written: {folder}/paper.json, paper.md, paper.tex; all answers in {folder}/kept")


def main(args: Sequence[str]) -> int:
    """Measure, print, write."""
    options = parse_command(PaperOptions, args, command="evaluate MODEL... --suite paper")
    names = [name for given in options.tasks for name in given.split(",") if name]
    options = replace(options, tasks=tuple(names))
    _check(options)

    contestants = _load_contestants(options)
    loaded, missing = _load_tasks(options)
    folder = _folder(options)
    seeds = range(options.seed, options.seed + options.seeds)
    suite = Suite(contestants, loaded, options.limit, seeds, folder / "kept")
    with progress_bar("paper suite", "answers", suite.missing()) as progress:
        try:
            suite.do(progress)
        except KeyboardInterrupt:
            words = (
                f"interrupted; answers so far are kept in {folder}/kept: the same command goes on"
            )
            raise KeyboardInterrupt(words) from None
    _write(options, {**suite.numbers(), "missing": missing}, folder)
    return 0
