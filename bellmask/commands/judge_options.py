"""Options of ``bellmask judge pairwise``, and the parts that they name."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from bellmask.generate.settings import Sampling
from bellmask.judge.endpoint_options import EndpointOptions
from bellmask.utils.errors import UserError
from bellmask.utils.files import check_folder

if TYPE_CHECKING:
    from bellmask.judge.answering import Side
    from bellmask.judge.benchmarks import Benchmark
    from bellmask.judge.cost import Prices, SpendingLimit
    from bellmask.judge.endpoint import Endpoint
    from bellmask.judge.pairwise import EndpointJudge, LocalJudge
    from bellmask.judge.published_length_control import Calibration

LOCAL = "local:"
FILES = (".json", ".jsonl", ".gz", ".xz", ".zst", ".parquet", ".arrow")
"""How names of files end; other names are models."""


@dataclass(frozen=True)
class PairwiseOptions:
    """A judge reads A's and B's answers to the same requests, in both orders, and says which is
    better: win rate, non-tie win rate, length-controlled win rate (the paper's Table 5).

    A and B are models (run folders, exports, hub names) that answer now, or files of outputs, whose
    records have instruction and output. The judge is a model behind an OpenAI-compatible API, or a
    causal LM here whose likelihood decides (local:NAME), which is no judgement of quality. What it
    will cost is said before anything is sent. Answers, requests and verdicts are kept in --out: the
    same command goes on where it was stopped, and nothing is asked twice.

    Examples:
    bellmask judge pairwise runs/bell runs/base --benchmark mt-bench --judge gpt-4o --max-usd 50

    bellmask judge pairwise runs/bell runs/base --benchmark alpaca-eval --judge gpt-4o --dry-run

    bellmask judge pairwise runs/bell runs/base --benchmark prompts.jsonl --judge local:smollm2

    bellmask judge pairwise A.json B.json --judge my-model --base-url http://localhost:8000/v1
    """

    a: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="A")]
    """Model or file of outputs whose win rate is measured."""
    b: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="B")]
    """What it is compared with."""
    judge: str
    """Name of a model at the endpoint, or local:MODEL (smollm2, an ARM run folder, a Hugging Face
    folder or name) for a likelihood."""
    benchmark: str = "alpaca-eval"
    """alpaca-eval (805 instructions; of two files of outputs: those that A holds), mt-bench (80
    questions, two turns) or a file with instruction, prompt or turns in each record."""
    tasks: int = 0
    """Some of the benchmark's tasks, evenly spread; 0 means all."""
    seeds: int = 5
    """Sets of answers of each model, each with noise of its own."""
    seed: int = 0
    """The first of them; the others follow it."""
    length: int | None = None
    """Tokens of an answer; default: what most training responses of a run needed."""
    sampling: Annotated[Sampling, tyro.conf.arg(name="")] = field(default_factory=Sampling)
    """How answers are sampled; the judge is asked at temperature 0."""
    endpoint: Annotated[EndpointOptions, tyro.conf.arg(name="")] = field(
        default_factory=EndpointOptions
    )
    """Where and how fast the judge is asked."""
    style: Literal["auto", "alpaca", "mt-bench", "plain"] = "auto"
    """How the judge is asked; auto: the benchmark's own way."""
    measure: Literal["per-token", "raw"] = "per-token"
    """Of a local judge: mean or sum of an answer's log-likelihood."""
    price_in: float | None = None
    """US dollars per million tokens that the judge reads; known for some of OpenAI's models."""
    price_out: float | None = None
    """The same for tokens that it writes."""
    max_usd: float | None = None
    """Spend at most so many US dollars; needs prices. The estimate, which must fit, is the worst
    case: every verdict as long as it may be. What is spent is mostly far less."""
    dry_run: bool = False
    """Write answers, say what asking would cost, and stop. Needs no key."""
    difficulty: str | None = None
    """AlpacaEval's instruction_difficulty.csv; with --gamed also its full length-controlled rate.
    That is calibrated for B = gpt4_1106_preview's outputs."""
    gamed: str | None = None
    """AlpacaEval's df_gamed.csv."""
    data_dir: str | None = None
    """Folder with alpaca_eval.json (or a model_outputs.json), instead of the hub."""
    checkpoint: str = "latest"
    """latest, best, or a step."""
    weights: Literal["auto", "ema", "raw"] = "auto"
    """auto: the moving average where there is one."""
    out: str = "runs/judge"
    """Folder for judge.json, judge.md and verdicts.jsonl, which the next comparison there replaces,
    and for answers/ and transcript.jsonl, which it shares."""
    cache_dir: str | None = None
    """Folder for fetched data; default $BELLMASK_CACHE or ~/.cache/bellmask."""
    device: str = "auto"
    """auto, cpu, cuda, ..."""

    @property
    def is_local(self) -> bool:
        """The judge is a likelihood."""
        return self.judge.startswith(LOCAL)


def check_options(options: PairwiseOptions) -> None:
    """What can be refused before anything is loaded."""
    check_folder(options.out)
    options.sampling.check()
    if options.seeds < 1 or options.tasks < 0:
        raise UserError("--seeds must be at least 1, --tasks at least 0")
    if (options.difficulty is None) != (options.gamed is None):
        raise UserError("--difficulty and --gamed go together: give both or neither")
    if options.difficulty is not None and options.benchmark != "alpaca-eval":
        raise UserError("--difficulty and --gamed are AlpacaEval's: give --benchmark alpaca-eval")
    if Path(options.a).resolve() == Path(options.b).resolve():
        raise UserError(f"A and B are both {options.a}: there is nothing to compare")
    for name in (options.a, options.b):
        if Path(name).is_file() and not name.endswith(FILES):
            raise UserError(
                f"{name} is neither a run folder nor a file of outputs ({', '.join(FILES)})"
            )
        if name.endswith(FILES) and not Path(name).exists():
            raise UserError(f"there is no file {name}")
    _check_judge(options)


def _check_judge(options: PairwiseOptions) -> None:
    if not options.judge.removeprefix(LOCAL).strip():
        raise UserError("--judge needs a name: MODEL at an endpoint, or local:MODEL")
    if options.is_local:
        only = {"--style": options.style != "auto", "--max-usd": options.max_usd is not None}
        only |= {"--price-in": options.price_in is not None}
        only |= {"--price-out": options.price_out is not None}
        only |= {
            f"--{option.name.replace('_', '-')}": getattr(options.endpoint, option.name)
            != option.default
            for option in fields(EndpointOptions)
        }
        for name in (name for name, is_given in only.items() if is_given):
            raise UserError(f"{name} goes with a judge at an endpoint, not with {options.judge}")
        return
    if options.measure != "per-token":
        raise UserError(f"--measure goes with a local judge, not with {options.judge}")
    options.endpoint.check()
    spending_limit(options)
    prices(options)
    if not options.dry_run:
        options.endpoint.key()


def open_tasks(options: PairwiseOptions) -> Benchmark:
    """The benchmark, or some of its tasks."""
    from bellmask.data.readers import cache_folder
    from bellmask.judge.benchmarks import alpaca_of_outputs, open_benchmark

    if _hold_instructions(options):
        found = alpaca_of_outputs(Path(options.a))
        print(
            f"note: judging answers to the {len(found.tasks)} instructions in {options.a}; for "
            "others give --data-dir or --benchmark FILE",
            file=sys.stderr,
        )
    else:
        cache = cache_folder(options.cache_dir)
        found = open_benchmark(options.benchmark, options.data_dir, cache)
    return found.some(options.tasks) if options.tasks else found


def _hold_instructions(options: PairwiseOptions) -> bool:
    """Two files of outputs to AlpacaEval: nothing need be fetched."""
    from bellmask.judge.answering import read_outputs

    paths = [Path(options.a), Path(options.b)]
    is_asked = options.benchmark == "alpaca-eval" and options.data_dir is None
    if not (is_asked and all(path.is_file() for path in paths)):
        return False
    return all(read_outputs(path).by_turns for path in paths)


def open_calibration(options: PairwiseOptions, benchmark: Benchmark) -> Calibration | None:
    """What AlpacaEval's full model needs, if its files are given."""
    from bellmask.judge.published_length_control import FOLDS, read_calibration

    if options.difficulty is None or options.gamed is None:
        return None
    if benchmark.name != "alpaca-eval":
        raise UserError(
            f"--difficulty goes by a task's place among AlpacaEval's 805 instructions, which "
            f"{options.a} does not hold in full: give their folder, --data-dir FOLDER"
        )
    if len(benchmark.tasks) < FOLDS:
        raise UserError(f"AlpacaEval's full length control needs at least {FOLDS} tasks")
    found = read_calibration(Path(options.difficulty), Path(options.gamed))
    missing = [task.index for task in benchmark.tasks if task.index not in found.difficulty]
    if missing:
        raise UserError(f"{options.difficulty} has no instruction number {missing[0]}")
    return found


def open_sides(options: PairwiseOptions) -> tuple[Side, Side]:
    """A and B, under names that differ."""
    short = [_short(name) for name in (options.a, options.b)]
    names = short if short[0] != short[1] else [options.a, options.b]
    return _open_side(options.a, names[0], options), _open_side(options.b, names[1], options)


def _short(name: str) -> str:
    return Path(name).resolve().name if Path(name).exists() else name


def _open_side(name: str, label: str, options: PairwiseOptions) -> Side:
    """A file of outputs, or a model that answers."""
    from bellmask.judge.answering import RunSide, read_outputs
    from bellmask.storage.loading import load

    if Path(name).is_file():
        return read_outputs(Path(name), label)
    loaded = load(
        name, checkpoint=options.checkpoint, weights=options.weights, device=options.device
    )
    folder = Path(options.out) / "answers"
    return RunSide(label, loaded, folder, sampling=options.sampling, length=options.length)


@contextlib.contextmanager
def opened_judge(
    options: PairwiseOptions, benchmark: Benchmark
) -> Iterator[EndpointJudge | LocalJudge]:
    """The judge; its connections are closed at the end."""
    if options.is_local:
        yield _local_judge(options)
        return
    from bellmask.judge.endpoint import Endpoint

    if options.dry_run:
        yield _endpoint_judge(options, benchmark, None)
        return
    with Endpoint(options.endpoint) as endpoint:
        yield _endpoint_judge(options, benchmark, endpoint)


def _endpoint_judge(
    options: PairwiseOptions, benchmark: Benchmark, endpoint: Endpoint | None
) -> EndpointJudge:
    from bellmask.data.readers import cache_folder
    from bellmask.judge.pairwise import EndpointJudge
    from bellmask.judge.prompts import open_style
    from bellmask.judge.transcript import Transcript

    name = benchmark.style if options.style == "auto" else options.style
    judge = EndpointJudge(
        options.judge,
        open_style(name, options.data_dir, cache_folder(options.cache_dir)),
        Transcript(Path(options.out) / "transcript.jsonl"),
        options.endpoint.url(),
        endpoint,
        spending_limit(options),
        prices(options),
    )
    judge.check(benchmark)
    return judge


def _local_judge(options: PairwiseOptions) -> LocalJudge:
    from bellmask.evaluate.load_scorer import load_scorer
    from bellmask.judge.local import LikelihoodJudge
    from bellmask.judge.pairwise import LocalJudge

    name = options.judge.removeprefix(LOCAL)
    option = f"--judge {LOCAL}NAME"
    scorer = load_scorer(name, device=options.device, cache=options.cache_dir, option=option)
    path = Path(options.out) / "likelihoods.jsonl"
    return LocalJudge(LikelihoodJudge(scorer, options.measure), path)


def prices(options: PairwiseOptions) -> Prices | None:
    """Of the judge; None where they are not known."""
    from bellmask.judge.cost import prices_of

    url = options.endpoint.url()
    return prices_of(options.judge, url, options.price_in, options.price_out)


def spending_limit(options: PairwiseOptions) -> SpendingLimit | None:
    """None where none is asked for."""
    from bellmask.judge.cost import SpendingLimit

    if options.max_usd is None:
        return None
    return SpendingLimit(options.max_usd, prices(options), options.judge)
