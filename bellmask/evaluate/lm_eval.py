"""A bellmask run as a model of lm-eval, and lm-eval's tasks evaluated on it.

The only file that imports lm_eval; import it where it is needed. Log-probabilities are those of
:mod:`bellmask.evaluate.continuations`: a lower bound for masked models and AoARMs, exact for
ARMs. Choices of one document share their random numbers. Noise is a function of the seed, the task
and the document: neither the order of requests, nor the batch, nor the global generators (which
lm-eval seeds anew at every call) have a say in it.

A context is plain text; chat templates are not applied.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import json
import logging
import math
import os
import statistics
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import lm_eval.models  # noqa: F401  (names of all other models, before ours is added)
import torch
import tyro
from lm_eval.api.instance import Instance
from lm_eval.api.model import LM
from lm_eval.api.registry import register_model

from bellmask.config.config import parse_options
from bellmask.config.presets import parse_command
from bellmask.data.example_files import Record, read_records
from bellmask.data.tasks import SUFFIXES, VALIDATION, validation_records
from bellmask.evaluate.continuations import (
    Ask,
    ContinuationScorer,
    Estimator,
    OnDone,
    Score,
    add_up,
)
from bellmask.evaluate.paper_tasks import find_in
from bellmask.generate.fill import fill_rows
from bellmask.generate.settings import Sampling
from bellmask.storage.loading import Loaded, load
from bellmask.utils.console import progress_bar
from bellmask.utils.errors import UserError, look_up
from bellmask.utils.files import check_folder, write_text
from bellmask.utils.rng import stream_key

if TYPE_CHECKING:
    from types import ModuleType

# How lm-eval's requests are answered: one description for ``--model_args`` and our own command.

WHERE = "--model_args of the model bellmask"


@dataclass(frozen=True)
class RequestOptions:
    """Names and meaning are those of ``--model_args NAME=VALUE,...`` of lm-eval."""

    checkpoint: str = "latest"
    """latest, best, or a step."""
    weights: Literal["auto", "ema", "raw"] = "auto"
    """auto: the moving average where there is one."""
    estimator: Literal["auto", "exact", "strata", "bernoulli", "diffullama", "left_to_right"] = (
        "auto"
    )
    """How a masked model's log-probability of a continuation is found. auto: all masks of short
    ones, evenly spread mask counts (strata) for longer ones. An ARM is always exact."""
    draws: int = 16
    """Masks per continuation where they are drawn; orders of an AoARM."""
    longest_exact: int = 6
    """Tokens up to which auto takes all masks (2^n - 1 of them)."""
    common: bool = True
    """Choices of a question draw the same masks (common random numbers)."""
    seed: int = 0
    """Of masks and samples; lm-eval's own seeds have no say in them."""
    batch_tokens: int = 8192
    """Tokens per forward pass; changes no result. lm-eval's batch_size is not used."""
    gap: int = 32
    """Tokens to write where the task says no max_gen_toks."""
    rule: Literal["ancestral", "first_hitting", "random", "most_confident", "margin", "entropy"] = (
        "most_confident"
    )
    """Which masked tokens a step of writing reveals, see bellmask generate."""
    steps: int | None = None
    """Steps of writing; default: one token per step."""
    temperature: float | None = None
    """Of writing; default: what the task says, 0 where it does not sample."""

    def check(self) -> RequestOptions:
        """This, or one :class:`UserError`; draws and masks are checked by the estimator."""
        if self.gap < 1:
            raise UserError(f"gap must be at least 1, got {self.gap}")
        if self.steps is not None and self.rule == "first_hitting":
            raise UserError("rule first_hitting has one step per token: no steps")
        return self


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


Scored = tuple[str, Score]
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
        options = parse_arguments(arguments)
        if run is None:
            raise UserError("the model bellmask needs a run: --model_args run=FOLDER")
        self.run = run if isinstance(run, Loaded) else _load(str(run), options, device)
        self.options = options
        self._device = self.run.device
        estimator = Estimator(
            options.estimator, options.draws, options.longest_exact, options.common
        )
        self.scorer = ContinuationScorer(self.run, estimator, batch_tokens=options.batch_tokens)
        self.writer = Writer(self.scorer, options)
        self._scored: list[Scored] = []

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
            asked.append(Request(context, settings, stream, number))
        with progress_bar("writing", "texts", len(requests)) as advance:
            found = self.writer.write(asked, advance)
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

    def _score(self, requests: Sequence[Instance], asks: Sequence[Sequence[Ask]]) -> list[Score]:
        """One score per request; its windows added up."""
        flat = [ask for own in asks for ask in own]
        with progress_bar("scoring", "continuations", len(flat)) as advance:
            parts = iter(self.scorer.score(flat, seed=self.options.seed, on_batch=advance))
        scores = [add_up(list(islice(parts, len(own)))) for own in asks]
        self._scored += [(str(r.task_name), score) for r, score in zip(requests, scores)]
        return scores

    def _is_greedy(self, asks: Sequence[Sequence[Ask]]) -> list[bool]:
        flat = [ask for own in asks for ask in own]
        with progress_bar("is it what the model writes", "continuations", len(flat)) as advance:
            parts = iter(self.scorer.is_greedy(flat, on_batch=advance))
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


def _load(name: str, options: RequestOptions, device: str | None) -> Loaded:
    """lm-eval asks for cuda:0 even where there is none."""
    is_absent = device is None or (device.startswith("cuda") and not torch.cuda.is_available())
    return load(
        name,
        checkpoint=options.checkpoint,
        weights=options.weights,
        device="auto" if is_absent or device is None else device,
    )


def _summary(scores: Sequence[Score]) -> dict[str, Any]:
    noisy = [score.error for score in scores if not score.is_exact and math.isfinite(score.error)]
    return {
        "requests": len(scores),
        "exact_share": sum(score.is_exact for score in scores) / len(scores),
        "median_error": statistics.median(noisy) if noisy else None,
        "tokens": sum(score.num_tokens for score in scores),
        "passes": sum(score.num_passes for score in scores),
    }


# --- evaluating ------------------------------------------------------------------------------


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


# lm-eval's stock tasks on local data: small YAML files that include the stock ones.
#
# Prompts, metrics and filters stay those of lm-eval; only where the documents come from is another
# place: the validation sets inside a wheel, or files in a folder. Nothing asks the hub. Two tasks
# are not scored on the split that lm-eval takes, and have names of their own:
#
# openbookqa_validation  OpenBookQA's validation split (stock openbookqa: test)
# triviaqa_wikipedia     TriviaQA rc.wikipedia.nocontext (stock triviaqa: rc.nocontext)

LOADER = "bellmask.evaluate.lm_eval.load_split"


@dataclass(frozen=True)
class StockTask:
    """A task of lm-eval that can be read from local data."""

    file: str
    """In lm-eval's folder of tasks."""
    stock_name: str
    local_name: str
    """Differs from the stock name where the documents do."""
    split: str
    note: str = ""


TASKS = {
    "lambada": StockTask(
        "lambada/lambada_openai.yaml", "lambada_openai", "lambada_openai", split="test"
    ),
    "openbookqa": StockTask(
        "openbookqa/openbookqa.yaml",
        "openbookqa",
        "openbookqa_validation",
        split="validation",
        note="validation split; stock lm-eval takes the test split",
    ),
    "winogrande": StockTask(
        "winogrande/default.yaml", "winogrande", "winogrande", split="validation"
    ),
    "piqa": StockTask("piqa/piqa.yaml", "piqa", "piqa", split="validation"),
    "social_iqa": StockTask("siqa/siqa.yaml", "social_iqa", "social_iqa", split="validation"),
    "triviaqa": StockTask(
        "triviaqa/default.yaml",
        "triviaqa",
        "triviaqa_wikipedia",
        split="validation",
        note="rc.wikipedia.nocontext; stock lm-eval takes rc.nocontext",
    ),
    "hellaswag": StockTask("hellaswag/hellaswag.yaml", "hellaswag", "hellaswag", "validation"),
}
"""By our names, in the order of the paper's Table 4."""


def task_name(name: str) -> str:
    """Our name of a task given by ours or by one of lm-eval's."""
    names = {n: ours for ours, task in TASKS.items() for n in (task.stock_name, task.local_name)}
    names |= {ours: ours for ours in TASKS}
    return look_up("task with local data", name, names)


def write_overlays(
    folder: Path,
    data_dir: Path | None,
    cache: Path,
    tasks: Sequence[str],
    *,
    limit: int | None = None,
) -> list[str]:
    """Write a YAML file per task into ``folder``; lm-eval's names of the tasks, in order.

    Files of ``data_dir`` come first, then the wheel (kept in the cache, fetched if need be). With a
    limit there are no more documents than that: the first ones, as lm-eval's own limit takes them,
    but without reading the others again and again.
    """
    import yaml

    if data_dir is not None and not data_dir.is_dir():
        raise UserError(f"there is no folder {data_dir} with the data of tasks")
    root = _stock_folder()
    made = {}
    for name in tasks:
        task = TASKS[task_name(name)]
        source = _source(task_name(name), data_dir, cache)
        overlay = {
            "include": str(root / task.file),
            "task": task.local_name,
            "tag": None,
            "dataset_path": LOADER,
            "dataset_name": None,
            "dataset_kwargs": {"split": task.split, "limit": limit, **source},
            "training_split": None,
            "validation_split": None,
            "test_split": None,
            f"{task.split}_split": task.split,
        }
        made[task.local_name] = f"{yaml.safe_dump(overlay)}custom_dataset: !function {LOADER}\n"
    folder.mkdir(parents=True, exist_ok=True)
    for local_name, text in made.items():
        write_text(folder / f"{local_name}.yaml", text)
    return list(made)


def _stock_folder() -> Path:
    spec = importlib.util.find_spec("lm_eval")
    if spec is None or spec.origin is None:
        raise UserError("tasks of lm-eval need the package: pip install 'bellmask[eval]'")
    return Path(spec.origin).parent / "tasks"


def _source(task: str, data_dir: Path | None, cache: Path) -> dict[str, Any]:
    """What :func:`load_split` is given: files, or the cache that holds the wheel."""
    if files := _find(data_dir, task):
        return {"files": [str(path.absolute()) for path in files]}
    if task in VALIDATION:
        return {"wheel_task": task, "cache": str(cache.absolute())}
    place = "DIR" if data_dir is None else str(data_dir)
    raise UserError(
        f"{task} is in no wheel: put {task}.jsonl (.json, .parquet, .arrow, or a folder {task} of "
        f"such files) into {place} and give --data-dir {place}; or read it from the hub with "
        "--stock"
    )


def tasks_with_data(data_dir: Path | None) -> list[str]:
    """Our names of the tasks that a folder or the wheel has documents of."""
    return [name for name in TASKS if name in VALIDATION or _find(data_dir, name)]


def _find(data_dir: Path | None, task: str) -> list[Path]:
    """A task's files in a folder; CSV files have no types, which lm-eval's tasks rely on."""
    found = [] if data_dir is None else find_in(str(data_dir), task)
    for path in found:
        if path.suffix not in SUFFIXES:
            raise UserError(f"{path}: lm-eval's tasks are read from {', '.join(SUFFIXES)} files")
    return found


def load_split(
    split: str,
    files: Sequence[str] = (),
    wheel_task: str | None = None,
    cache: str | None = None,
    limit: int | None = None,
    **_: Any,
) -> dict[str, Any]:
    """The data set of a task, called by lm-eval (with the task's metadata too)."""
    import datasets

    records: list[Record]
    if wheel_task is not None and cache is not None:
        records = validation_records(wheel_task, Path(cache))
    else:
        records = [record for path in files for record in read_records(Path(path))]
    if not records:
        raise UserError(f"{', '.join(files)}: no records")
    return {split: datasets.Dataset.from_list(records[:limit])}


# ``bellmask lm-eval``: tasks of lm-eval on runs, from local data or the hub; and its own command.
#
# ``bellmask lm-eval -- ARGS`` hands everything behind the dashes to lm-eval.

Numbers = dict[str, Any]


@dataclass(frozen=True)
class HarnessOptions:
    """Tasks of lm-eval on runs: its prompts and metrics, on local data, without the hub.

    Six tasks come with a wheel from the package index; LAMBADA is read from --data-dir.
    Log-probabilities of masked models and AoARMs are lower bounds. Standard errors are lm-eval's,
    over documents; documents draw their masks apart, so that the noise of the estimates is part of
    them. How large that noise is, is printed below the scores. Prompts are plain text, without a
    chat template. Behind '--' everything goes to lm-eval itself, which then knows the model
    bellmask.

    Examples:
    bellmask lm-eval runs/base runs/bell --tasks piqa,winogrande --limit 200

    bellmask lm-eval runs/bell --data-dir data --out scores

    bellmask lm-eval runs/bell --stock --tasks arc_easy boolq

    bellmask lm-eval --write-tasks tasks

    bellmask lm-eval -- --model bellmask --model_args run=runs/bell,draws=32 --tasks piqa

    bellmask lm-eval -- ls tasks
    """

    runs: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="RUN...")] = ()
    """Run folders, exports or names on the hub."""
    tasks: tuple[str, ...] = ()
    """Names, with spaces or commas between them: lambada, openbookqa, winogrande, piqa, social_iqa,
    triviaqa, hellaswag; with --stock any of lm-eval's. Default: all of the seven that there is data
    of."""
    limit: int | None = None
    """First documents of each task; default: all."""
    data_dir: str | None = None
    """Folder with TASK.jsonl (.json, .parquet, .arrow) or folders TASK of such files."""
    stock: bool = False
    """lm-eval's own data from the hub, and all of its tasks."""
    requests: Annotated[RequestOptions, tyro.conf.arg(name="")] = field(
        default_factory=RequestOptions
    )
    """How requests are answered."""
    bootstraps: int = 1000
    """Resamples for standard errors that have no formula (perplexity)."""
    cache: str | None = None
    """Folder for what is fetched; default $BELLMASK_CACHE or ~/.cache/bellmask."""
    write_tasks: str | None = None
    """Only write the YAML files of the local tasks into this folder, for lm-eval's
    --include_path."""
    out: str | None = None
    """Folder for results.json; default RUN/lm-eval for a single run, else runs/lm-eval."""
    device: str = "auto"
    """auto, cpu, cuda, ..."""


def _check(options: HarnessOptions) -> None:
    check_folder(options.out)
    check_folder(options.write_tasks, "--write-tasks")
    if not options.runs and options.write_tasks is None:
        raise UserError("lm-eval needs a run folder: bellmask lm-eval RUN")
    if options.write_tasks is not None and (options.runs or options.stock):
        raise UserError("--write-tasks only writes tasks on local data: no run, no --stock")
    if options.limit is not None and options.limit < 1:
        raise UserError(f"--limit must be at least 1, got {options.limit}")
    if options.bootstraps < 1:
        raise UserError(f"--bootstraps must be at least 1, got {options.bootstraps}")
    if options.stock and options.data_dir is not None:
        raise UserError("--stock reads from the hub: it does not go with --data-dir")
    if options.data_dir is not None and not Path(options.data_dir).is_dir():
        raise UserError(f"there is no folder {options.data_dir} to read with --data-dir")
    options.requests.check()


def main(args: Sequence[str]) -> int:
    """Evaluate, print and write; or hand over to lm-eval."""
    if args and args[0] == "--":
        return int(_harness().run_command_line(args[1:]))
    options = parse_command(HarnessOptions, args, command="lm-eval")
    _check(options)
    os.environ.setdefault("TQDM_DISABLE", "1")  # lm-eval's many short bars; ours stay
    harness = _harness()
    if options.write_tasks is not None:
        names = _write_tasks(options, Path(options.write_tasks))
        print(f"written: {options.write_tasks}, for lm-eval's --include_path: {', '.join(names)}")
        return 0
    with tempfile.TemporaryDirectory() as scratch:
        include = None if options.stock else Path(scratch)
        tasks = _stock_names(options) if include is None else _write_tasks(options, include)
        models = _load_models(options, harness)
        found = {
            name: harness.evaluate_tasks(
                model,
                tasks,
                include=include,
                limit=options.limit,
                bootstraps=options.bootstraps,
            )
            for name, model in models.items()
        }
    _conclude(options, models, found)
    return 0


def _harness() -> ModuleType:
    try:
        from bellmask.evaluate import lm_eval as harness
    except ImportError as error:
        if (error.name or "").partition(".")[0] in ("lm_eval", "datasets"):
            raise UserError("lm-eval is not installed: pip install 'bellmask[eval]'") from None
        raise
    return harness


def _given_names(options: HarnessOptions) -> list[str]:
    """Each once, in order."""
    names = [name for given in options.tasks for name in given.split(",") if name]
    if len(set(names)) < len(names):
        raise UserError(f"--tasks names a task twice: {' '.join(names)}")
    return names


def _stock_names(options: HarnessOptions) -> list[str]:

    ours = {name: task.stock_name for name, task in TASKS.items()}
    return [ours.get(name, name) for name in _given_names(options) or TASKS]


def _write_tasks(options: HarnessOptions, folder: Path) -> list[str]:
    from bellmask.data.readers import cache_folder

    data_dir = None if options.data_dir is None else Path(options.data_dir)
    tasks = _given_names(options) or tasks_with_data(data_dir)
    cache = cache_folder(options.cache)
    return write_overlays(folder, data_dir, cache, tasks, limit=options.limit)


def _load_models(options: HarnessOptions, harness: ModuleType) -> dict[str, BellmaskLM]:
    """All of them before the first is evaluated: some may be refused."""
    from bellmask.storage.runs import by_folder

    device = None if options.device == "auto" else options.device
    return {
        name: harness.BellmaskLM(run=str(folder), device=device, **asdict(options.requests))
        for name, folder in by_folder(options.runs).items()
    }


# --- results ---------------------------------------------------------------------------------


def _conclude(
    options: HarnessOptions, models: Mapping[str, BellmaskLM], found: Mapping[str, Numbers]
) -> None:
    from bellmask import __version__
    from bellmask.utils.files import without_nan, write_text

    kept = ("results", "n-samples", "n-shot", "versions", "higher_is_better", "lm_eval_version")
    notes = {} if options.stock else {t.local_name: t.note for t in TASKS.values() if t.note}
    numbers = {
        "bellmask": __version__,
        "data": "hub" if options.stock else "local",
        "notes": {task: note for task, note in notes.items() if _has(found, task)},
        "limit": options.limit,
        "options": asdict(options.requests),
        "runs": {
            name: {**model.get_model_info(), **{key: found[name].get(key) for key in kept}}
            for name, model in models.items()
        },
    }
    folder = _folder(options)
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps(without_nan(numbers), indent=1, allow_nan=False, default=str)
    write_text(folder / "results.json", text + "\n")
    _show(numbers)
    print(f"written: {folder}/results.json")


def _has(found: Mapping[str, Numbers], task: str) -> bool:
    return any(task in one["results"] for one in found.values())


def _folder(options: HarnessOptions) -> Path:
    if options.out:
        return Path(options.out)
    only = Path(options.runs[0])
    return (only if len(options.runs) == 1 and only.is_dir() else Path("runs")) / "lm-eval"


def _show(numbers: Numbers) -> None:
    from bellmask.utils.console import print_plain_table

    runs = numbers["runs"]
    first = next(iter(runs.values()))["results"]
    rows = [
        [
            f"{task} *" if task in numbers["notes"] else task,
            metric if way == "none" else f"{metric} ({way})",
            *(_cell(run["results"][task], metric, way) for run in runs.values()),
        ]
        for task, result in first.items()
        for metric, _, way in (key.partition(",") for key in result if "," in key)
        if not metric.endswith("_stderr")
    ]
    limit = "" if numbers["limit"] is None else f", first {numbers['limit']:,} documents"
    print_plain_table(f"lm-eval's tasks{limit}", ["task", "metric", *runs], rows)
    for task, note in numbers["notes"].items():
        print(f"* {task}: {note}")
    noise = [
        [name, task, *_noise_cells(one)]
        for name, run in runs.items()
        for task, one in run["noise"].items()
    ]
    if noise:
        columns = ["run", "task", "log-probabilities", "exact", "median error (nats)", "passes"]
        print_plain_table("noise of what is not exact, a part of ± above", columns, noise)


def _cell(result: Numbers, metric: str, way: str) -> str:
    value, error = result[f"{metric},{way}"], result.get(f"{metric}_stderr,{way}")
    return f"{_number(value)} ± {_number(error)}" if isinstance(error, float) else _number(value)


def _number(value: Any) -> str:
    if not isinstance(value, int | float):
        return str(value)
    return f"{value:.4f}" if abs(value) < 100 else f"{value:.4g}"


def _noise_cells(one: Numbers) -> list[str]:
    error = "-" if one["median_error"] is None else f"{one['median_error']:.3f}"
    return [f"{one['requests']:,}", f"{one['exact_share']:.0%}", error, f"{one['passes']:,}"]
