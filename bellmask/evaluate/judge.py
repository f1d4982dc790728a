"""``bellmask judge pairwise A B``: win rates by a judge (the paper's Table 5).

The judge is a model behind an endpoint, asked in both orders, or a causal LM here whose likelihood
decides. What it is asked, and the answers that it reads, are in
:mod:`bellmask.evaluate.judge_prompts`; how an endpoint is asked, and what that costs, in
:mod:`bellmask.evaluate.judge_endpoint`; rates and their errors in
:mod:`bellmask.evaluate.judge_stats`. Answers, requests and verdicts are cached: a command that was
stopped continues, and nothing is asked twice.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from bellmask.config.command_line import parse_command
from bellmask.data.readers import cache_folder
from bellmask.evaluate.judge_endpoint import (
    CHANGEABLE,
    CHARACTERS_PER_TOKEN,
    ChatRequest,
    Endpoint,
    EndpointError,
    EndpointOptions,
    Prices,
    SpendingLimit,
    Transcript,
    estimate,
    prices_of,
)
from bellmask.evaluate.judge_prompts import (
    NUM_INSTRUCTIONS,
    SAME,
    UNREADABLE,
    VALUES,
    Benchmark,
    Judged,
    Pair,
    PairOutcome,
    RunSide,
    Said,
    Side,
    Style,
    Verdict,
    alpaca_of_outputs,
    combine,
    first_share,
    open_benchmark,
    open_style,
    pairs_of,
    read_outputs,
)
from bellmask.evaluate.judge_stats import (
    COUNTS,
    PARTS,
    Calibration,
    read_calibration,
    seed_numbers,
    summarize,
)
from bellmask.evaluate.scorer import TextScore, TextScorer, load_scorer
from bellmask.generate.answers import DEFAULT_LENGTH
from bellmask.generate.settings import Sampling
from bellmask.storage.loading import LoadOptions
from bellmask.storage.run_folder import read_description
from bellmask.utils.console import print_lines
from bellmask.utils.errors import UserError
from bellmask.utils.files import check_folder, has_kinds, is_number, without_nan, write_text
from bellmask.utils.progress import NO_PROGRESS, Progress, progress_bar
from bellmask.utils.stats import plus_minus
from bellmask.utils.store import Store, content_key
from bellmask.utils.table import Table, markdown_page

# Options

LOCAL = "local:"
FILES = (".json", ".jsonl", ".gz", ".xz", ".zst", ".parquet", ".arrow")
"""How names of files end; other names are models."""


@dataclass(frozen=True, kw_only=True)
class PairwiseOptions(LoadOptions):
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
    """Say what asking would cost at most, and stop: no model is loaded, no answer written, nothing
    sent. Needs no key."""
    difficulty: str | None = None
    """AlpacaEval's instruction_difficulty.csv; with --gamed also its full length-controlled rate.
    That is calibrated for B = gpt4_1106_preview's outputs."""
    gamed: str | None = None
    """AlpacaEval's df_gamed.csv."""
    data_dir: str | None = None
    """Folder with alpaca_eval.json (or a model_outputs.json), instead of the hub."""
    out: str = "runs/judge"
    """Folder for judge.json, judge.md and verdicts.jsonl, which the next comparison there replaces,
    and for answers/ and transcript.jsonl, which it shares."""
    cache_dir: str | None = None
    """Folder for fetched data; default $BELLMASK_CACHE or ~/.cache/bellmask."""

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
    if not options.judge.removeprefix(LOCAL).strip():
        raise UserError("--judge needs a name: MODEL at an endpoint, or local:MODEL")
    if options.is_local:
        chosen = (options.style, options.max_usd, options.price_in, options.price_out)
        if options.endpoint != EndpointOptions() or chosen != ("auto", None, None, None):
            raise UserError(
                "--style, --max-usd, --price-in, --price-out and how an endpoint is asked "
                f"(--base-url, ...) go with a judge there, not with {options.judge}"
            )
        return
    if options.measure != "per-token":
        raise UserError(f"--measure goes with a local judge, not with {options.judge}")
    options.endpoint.check()
    money(options)
    if not options.dry_run:
        options.endpoint.key()


def money(options: PairwiseOptions) -> tuple[Prices | None, SpendingLimit | None]:
    """The judge's prices, None where they are not known, and what may be spent."""
    url = options.endpoint.url()
    prices = prices_of(options.judge, url, options.price_in, options.price_out)
    if options.max_usd is None:
        return prices, None
    return prices, SpendingLimit(options.max_usd, prices, options.judge)


# A judge behind an endpoint.

ORDERS = (True, False)
"""A shown first, B shown first."""


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
        """For every table: who judged, and how."""
        return f"{self.model}, {self.style.name} prompts, both orders"

    def request(self, pair: Pair, a_first: bool) -> ChatRequest:
        """One order of one pair."""
        return ChatRequest(
            self.model,
            self.style.write(pair, a_first),
            max_tokens=self.style.max_tokens,
            logprobs=self.style.logprobs,
            endpoint=self.place,
        )

    def requests(self, pairs: Iterable[Pair]) -> list[ChatRequest]:
        """Both orders of each pair; two equal answers need no judge."""
        return [
            self.request(pair, a_first) for pair in pairs if not pair.is_same for a_first in ORDERS
        ]

    def judge(self, pairs: Sequence[Pair], progress: Progress = NO_PROGRESS) -> list[Judged]:
        """Asks what was not asked before; all or an error that says how to go on.

        Pairs that the endpoint refuses are unreadable; unlike failures they would be refused again.
        """
        assert self.endpoint is not None
        requests = self.requests(pairs)
        failed = self.transcript.ask_all(requests, self.endpoint, progress)
        if failed:
            raise EndpointError(
                f"{len(failed)} requests have no answer ({failed[0]}); the others are kept in "
                f"{self.transcript.path}: the same command asks only for the rest"
            )
        refusals = self.transcript.refusals(requests)
        if refusals and not self.transcript.replies(requests):
            raise UserError(
                f"the judge at {self.place} answers none of the requests: {refusals[0]}; that is "
                f"kept in {self.transcript.path}: delete those lines to ask again"
            )
        return [
            Judged(pair, SAME if pair.is_same else combine(*self._verdicts(pair))) for pair in pairs
        ]

    def _verdicts(self, pair: Pair) -> tuple[Verdict, Verdict]:
        replies = [self.transcript.reply(self.request(pair, a_first)) for a_first in ORDERS]
        first, second = (
            self.style.read(reply.text, reply.top_logprobs) if reply else UNREADABLE
            for reply in replies
        )
        return first, second

    def about(self, pairs: Sequence[Pair]) -> dict[str, Any]:
        """Place, prompts, liking for a place, and what all the answers took, whenever asked for."""
        replies = self.transcript.replies(self.requests(pairs))
        return {
            "endpoint": self.place,
            "style": self.style.name,
            "style_identity": self.style.identity,
            "first_share": first_share([self._verdicts(p) for p in pairs if not p.is_same]),
            "num_requests": len(replies),
            "tokens_in": sum(reply.prompt_tokens for reply in replies),
            "tokens_out": sum(reply.completion_tokens for reply in replies),
            "usd": None if self.prices is None else self.prices.usd_of(replies),
        }

    def announce(self, pairs: Sequence[Pair]) -> list[ChatRequest]:
        """Say what it will cost at most, and refuse what is too much; what will be asked."""
        missing = self.transcript.missing(self.requests(pairs))
        words, usd = estimate(missing, self.prices)
        print(words, flush=True)
        if self.limit is not None and usd > self.limit.max_usd:
            raise UserError(
                f"--max-usd {self.limit.max_usd:g} is not enough; {words}. Raise it, or ask less; "
                "nothing was sent"
            )
        return missing

    def tell_spent(self, missing: Sequence[ChatRequest]) -> None:
        """Say what this command has spent on requests that were missing, if prices are known.

        A limit also counts attempts whose answer was lost, at their worst.
        """
        if self.prices is None or not missing:
            return
        words = f"spent ${self.prices.usd_of(self.transcript.replies(missing)):,.4f}"
        if self.limit is not None:
            words = f"spent ${self.limit.spent:,.4f} of ${self.limit.max_usd:g}"
        print(words, flush=True)

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
        if refusals := self.transcript.refusals(requests):
            lines.append(f"The judge refused {len(refusals)} requests ({refusals[0]}): unreadable.")
        records = self.transcript.of(requests)
        changed = {name for record in records for name in record.get("refused_settings", ())}
        # max_tokens is sent all the same, by its newer name
        if names := ", ".join(n for n in CHANGEABLE[1:] if n in changed):
            lines.append(f"The judge does not take {names}: asked without.")
        return lines


# A judge without an endpoint: which answer a causal LM finds likelier after the request.
#
# It measures how a language model would have gone on, not quality: fluent and common answers
# win. Every result carries :data:`LABEL`. An answer's log-likelihood is that of request and answer
# minus that of the request alone, which is exact wherever the tokens of the request stay what they
# are when the answer follows; pairs where they do not are counted. There is no order of answers, so
# one outcome needs no second verdict. Cost: one forward pass over each conversation with its last
# answer and one without.
LABEL = "likelihood of {name}, not a judgement of quality"
TIE_MARGIN = 1e-5
"""Log-likelihoods, in nats per token, that differ by less are a tie: sums are no more exact."""
LOCAL_CHUNK = 16
"""Pairs whose likelihoods are computed before they are kept."""
Measure = Literal["per-token", "raw"]
Score = dict[str, Any]
"""Of an answer: its log_likelihood in nats; num_tokens, 0 for an empty answer and where the request
alone fills the model's context; is_exact: the request's tokens are the same with and without the
answer; is_cut: tokens beyond the model's context were dropped."""


class LocalJudge:
    """A causal LM's likelihood; outcomes are kept, so that none is computed twice."""

    def __init__(self, scorer: TextScorer, path: Path, measure: Measure = "per-token") -> None:
        self._scorer, self._measure = scorer, measure
        self._records = Store(path, _is_outcome)
        self.label = LABEL.format(name=scorer.name)
        self._fingerprint = f"{scorer.fingerprint}/{measure}"

    def judge(self, pairs: Sequence[Pair], progress: Progress = NO_PROGRESS) -> list[Judged]:
        """Outcomes of before, then the others some at a time.

        An empty answer (nothing but white space) loses to one that is not; two are a tie. Where the
        request leaves no room for an answer in the model's context, nothing can be said.
        """
        unique = {self._key(pair): pair for pair in pairs}
        left = [(key, pair) for key, pair in unique.items() if key not in self._records]
        progress.start(len(left))
        for start in range(0, len(left), LOCAL_CHUNK):
            chunk = left[start : start + LOCAL_CHUNK]
            texts = _texts([pair for _, pair in chunk])
            scores = self._scorer.score([(text,) for text in texts])
            known = dict(zip(texts, scores, strict=True))
            self._records.add({"key": key, **self._judged(pair, known)} for key, pair in chunk)
            progress.advance(len(chunk))
        records = [self._records[self._key(pair)] for pair in pairs]
        return [
            Judged(pair, PairOutcome(record["result"], record["preference"]))
            for pair, record in zip(pairs, records, strict=True)
        ]

    def _judged(self, pair: Pair, known: Mapping[str, TextScore]) -> dict[str, Any]:
        a, b = (_answer_score(pair, said, known) for said in (pair.answers_a, pair.answers_b))
        outcome = self._outcome(pair, a, b)
        return {
            "task": pair.task.id,
            "turn": pair.turn + 1,
            "result": outcome.result,
            "preference": outcome.preference,
            "a": a,
            "b": b,
        }

    def _outcome(self, pair: Pair, a: Score, b: Score) -> PairOutcome:
        has_a, has_b = (bool(said[-1].strip()) for said in (pair.answers_a, pair.answers_b))
        if pair.is_same or not (has_a or has_b):
            return SAME
        if (has_a and not a["num_tokens"]) or (has_b and not b["num_tokens"]):
            return PairOutcome("unreadable", None)
        if not (has_a and has_b):
            return PairOutcome("win", 1.0) if has_a else PairOutcome("loss", 0.0)
        is_mean = self._measure == "per-token"
        value_a, value_b = (
            one["log_likelihood"] / (one["num_tokens"] if is_mean else 1) for one in (a, b)
        )
        tokens = 1 if is_mean else max(a["num_tokens"], b["num_tokens"])
        if abs(value_a - value_b) <= TIE_MARGIN * tokens:
            return SAME
        return PairOutcome("win", 1.0) if value_a > value_b else PairOutcome("loss", 0.0)

    def _key(self, pair: Pair) -> str:
        said = [pair.task.turns[: pair.turn + 1], pair.answers_a, pair.answers_b]
        return content_key("likelihood", self._fingerprint, said)

    def about(self, pairs: Sequence[Pair]) -> dict[str, Any]:
        """There is no order, so no liking for a place."""
        return {"fingerprint": self._fingerprint}

    def grounds(self, pair: Pair) -> dict[str, Any]:
        """The answers' log-likelihoods and lengths in tokens."""
        record = self._records[self._key(pair)]
        return {f"likelihood_{side}": record[side] for side in "ab"}

    def cautions(self, pairs: Sequence[Pair]) -> list[str]:
        """Of likelihoods that are not quite those of the answers."""
        records = [self._records[self._key(pair)] for pair in pairs]
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


Judge = EndpointJudge | LocalJudge


def _texts(pairs: Sequence[Pair]) -> list[str]:
    """Each text once, in order of appearance."""
    both = [
        _with_and_without(pair, said)
        for pair in pairs
        for said in (pair.answers_a, pair.answers_b)
        if said[-1].strip()
    ]
    return list(dict.fromkeys(text for texts in both for text in texts))


def _with_and_without(pair: Pair, said: Said) -> tuple[str, str]:
    """All before the answer, and with it. The first ends in a colon, so that the answer's first
    token is its own.
    """
    earlier = [
        f"Question: {asked}\nAnswer: {answer.strip()}\n\n"
        for asked, answer in zip(pair.task.turns, said[:-1])
    ]
    before = "".join(earlier) + f"Question: {pair.task.turns[pair.turn]}\nAnswer:"
    return before, f"{before} {said[-1].strip()}"


def _answer_score(pair: Pair, said: Said, known: Mapping[str, TextScore]) -> Score:
    if not said[-1].strip():
        return {"log_likelihood": 0.0, "num_tokens": 0, "is_exact": True, "is_cut": False}
    before, whole = (known[text] for text in _with_and_without(pair, said))
    count = max(0, whole.num_tokens - before.num_tokens)
    return {
        "log_likelihood": before.nll - whole.nll if count else 0.0,
        "num_tokens": count,
        "is_exact": whole.ids[: len(before.ids)] == before.ids,
        "is_cut": whole.is_cut,
    }


def _is_outcome(record: dict[str, Any]) -> bool:
    """What a file of outcomes has under a key."""
    sides = {"is_cut": bool, "is_exact": bool}
    value = record.get("preference")
    is_value = value is None or (is_number(value) and 0 <= value <= 1)
    is_result = isinstance(record.get("result"), str) and record["result"] in VALUES
    return is_result and is_value and all(has_kinds(record.get(side), sides) for side in "ab")


# The parts that options name: benchmark, calibration, sides and judge.


def chosen_benchmark(options: PairwiseOptions) -> Benchmark:
    """The benchmark, or some of its tasks. Two files of outputs to AlpacaEval hold it."""
    paths = [Path(options.a), Path(options.b)]
    is_asked = options.benchmark == "alpaca-eval" and options.data_dir is None
    is_held = is_asked and all(path.is_file() for path in paths)
    if is_held and not any(read_outputs(path).is_by_id for path in paths):
        found = alpaca_of_outputs(paths[0])
        print(
            f"note: judging answers to the {len(found.tasks)} instructions in {options.a}; for "
            "others give --data-dir or --benchmark FILE",
            file=sys.stderr,
        )
    else:
        cache = cache_folder(options.cache_dir)
        found = open_benchmark(options.benchmark, options.data_dir, cache)
    return found.some(options.tasks) if options.tasks else found


def open_calibration(options: PairwiseOptions, benchmark: Benchmark) -> Calibration | None:
    """What AlpacaEval's full model needs, if its files are given."""
    if options.difficulty is None or options.gamed is None:
        return None
    if benchmark.name != "alpaca-eval":
        raise UserError(
            f"--difficulty goes by a task's place among AlpacaEval's 805 instructions, which "
            f"{options.a} does not hold in full: give their folder, --data-dir FOLDER"
        )
    found = read_calibration(Path(options.difficulty), Path(options.gamed))
    missing = [task.index for task in benchmark.tasks if task.index not in found.difficulty]
    if missing:
        raise UserError(f"{options.difficulty} has no instruction number {missing[0]}")
    return found


def open_sides(options: PairwiseOptions) -> list[Side]:
    """A and B, under names that differ: files of outputs, or models that answer."""
    given = (options.a, options.b)
    short = [Path(name).resolve().name if Path(name).exists() else name for name in given]
    sides: list[Side] = []
    for name, label in zip(given, short if short[0] != short[1] else given, strict=True):
        if Path(name).is_file():
            sides.append(read_outputs(Path(name), label))
            continue
        folder, loaded = Path(options.out) / "answers", options.load(name)
        sides.append(
            RunSide(label, loaded, folder, sampling=options.sampling, length=options.length)
        )
    return sides


@contextlib.contextmanager
def opened_judge(options: PairwiseOptions, benchmark: Benchmark) -> Iterator[Judge]:
    """The judge; its connections are closed at the end."""
    if options.is_local:
        name, option = options.judge.removeprefix(LOCAL), f"--judge {LOCAL}NAME"
        scorer = load_scorer(name, device=options.device, cache=options.cache_dir, option=option)
        yield LocalJudge(scorer, Path(options.out) / "likelihoods.jsonl", options.measure)
        return
    judge = endpoint_judge(options, benchmark)
    with Endpoint(options.endpoint, judge.limit) as endpoint:
        yield replace(judge, endpoint=endpoint)


def endpoint_judge(options: PairwiseOptions, benchmark: Benchmark) -> EndpointJudge:
    """Refuses tasks that cannot be asked about in a style, before they are answered."""
    name = benchmark.style if options.style == "auto" else options.style
    style = open_style(name, options.data_dir, cache_folder(options.cache_dir))
    empty = [("",) * len(task.turns) for task in benchmark.tasks]
    for pair in pairs_of(benchmark.tasks, empty, empty):
        style.write(pair, True)
    prices, limit = money(options)
    transcript = Transcript(Path(options.out) / "transcript.jsonl")
    url = options.endpoint.url()
    return EndpointJudge(options.judge, style, transcript, url, None, limit, prices)


# Table 5's layout: win rates of A against B, on the screen and in Markdown.
Numbers = Mapping[str, Any]
TITLES = {
    "win_rate": "win rate (a tie is half a win)",
    "non_tie": "non-tie win rate",
    "length_controlled": "length-controlled, two terms",
    "published_length_controlled": "length-controlled, AlpacaEval's full model",
}


def percent(value: float | None, spread: float | None = None) -> str:
    """``78.27 ± 1.37``; a dash for what is not known."""
    if value is None:
        return "-"
    return plus_minus(100 * value, None if spread is None else 100 * spread)


def tables(numbers: Numbers) -> list[Table]:
    """Table 5's rates, the outcomes of each seed, and those of each category and turn."""
    names = f"{numbers['a']['name']} against {numbers['b']['name']}"
    count = len(numbers["seeds"])
    over = "one seed" if count == 1 else f"mean ± deviation of {count} seeds"
    columns = ["%", over, "standard error over tasks"]
    rates = [_rate_row(n, numbers["over_seeds"][n]) for n in TITLES if n in numbers["over_seeds"]]
    found = [Table(f"{names}, by {numbers['judge']['label']}", columns, rates)]
    outcomes = [
        [
            str(seed),
            *(str(result["counts"][name]) for name in COUNTS),
            *(f"{result[f'mean_length_{side}']:.0f}" for side in "ab"),
        ]
        for seed, result in zip(numbers["seeds"], numbers["results"], strict=True)
    ]
    found += [Table("Outcomes for A", ["seed", *COUNTS, "characters of A", "of B"], outcomes)]
    for name in PARTS:
        word = name.removeprefix("by_")
        rows = [
            [
                label,
                *(str(one[count]) for count in COUNTS),
                *(percent(one[r]["mean"], one[r]["deviation"]) for r in ("win_rate", "non_tie")),
            ]
            for label, one in numbers["over_seeds"][name].items()
        ]
        if len(rows) > 1:
            columns = [word, *COUNTS, "win rate, %", "non-tie, %"]
            found += [Table(f"By {word}, all seeds", columns, rows)]
    return found


def _rate_row(name: str, found: Numbers) -> list[str]:
    if not found.get("is_usable", True):  # a number that rests on no data misleads
        return [TITLES[name], "-", "-"]
    # the full model's published error is the spread of its predictions: no error of the rate
    error = None if name == "published_length_controlled" else found["error"]
    return [TITLES[name], percent(found["mean"], found["deviation"]), percent(error)]


def notes(numbers: Numbers) -> list[str]:
    """What a reader must know."""
    judge, results = numbers["judge"], numbers["results"]
    lines = [f"Benchmark: {numbers['benchmark']['name']}, {numbers['num_tasks']} tasks."]
    lines += [f"Judge: {judge['label']}."]
    if judge["is_local"]:
        lines += ["A likelihood is no opinion: fluent, common answers win, whatever they say."]
    if judge.get("first_share") is not None:
        share = percent(judge["first_share"])
        lines += [f"Of its choices {share} % were for the answer shown first (fair: 50)."]
    if "num_requests" in judge:
        dollars = "" if judge["usd"] is None else f", ${judge['usd']:,.4f} in all"
        lines += [
            f"It answered {judge['num_requests']:,} requests: {judge['tokens_in']:,} tokens in, "
            f"{judge['tokens_out']:,} out{dollars}."
        ]
    if unreadable := sum(result["counts"]["unreadable"] for result in results):
        lines += [f"{unreadable} pairs without a readable verdict are in no rate."]
    if len(results) == 1:
        lines += ["One seed: no deviation."]
    for name in ("length_controlled", "published_length_controlled"):
        why = dict.fromkeys((result.get(name) or {}).get("note") for result in results)
        lines += [f"Win rate, {TITLES[name]}: {note}." for note in why if note]
    return [*lines, *numbers["cautions"]]


# The command

HELP = """Judge models by their answers.

usage: bellmask judge pairwise A B --judge MODEL [options]    (add --help for all of them)

examples:
  bellmask judge pairwise runs/bell runs/base --benchmark mt-bench --judge gpt-4o --dry-run
  bellmask judge pairwise runs/bell runs/base --benchmark prompts.jsonl --judge local:smollm2
"""
BySeed = dict[int, list[Pair]]


def seeds_of(options: PairwiseOptions) -> list[int]:
    """Files say the same every time: then one seed is all."""
    is_one = all(Path(name).is_file() for name in (options.a, options.b))
    return [options.seed + number for number in range(1 if is_one else options.seeds)]


def _dry_run(options: PairwiseOptions, benchmark: Benchmark) -> None:
    """What asking costs at most. No model is loaded: its answers are as long as they may be."""
    if options.is_local:
        print("dry run: a likelihood costs no dollars; nothing was asked")
        return
    judge = endpoint_judge(options, benchmark)
    given = (options.a, options.b)
    longest = {name: _longest_answer(name, options) for name in given if not Path(name).is_file()}

    def answers(name: str, seed: int) -> list[Said]:
        if name not in longest:
            return read_outputs(Path(name)).answers(benchmark, seed)
        size = CHARACTERS_PER_TOKEN * longest[name]  # no two are the same: each will be asked
        return [
            tuple(f"{seed}.{task.index}.{given.index(name)} ".ljust(size, "x") for _ in task.turns)
            for task in benchmark.tasks
        ]

    sides = [[answers(name, seed) for name in given] for seed in seeds_of(options)]
    judge.announce([pair for both in sides for pair in pairs_of(benchmark.tasks, *both)])
    for name, length in longest.items():
        print(f"answers of {name} count as {length} tokens each, the longest they may be")
    print("dry run: no answer was written, nothing was asked")


def _longest_answer(name: str, options: PairwiseOptions) -> int:
    """Tokens, without loading the model."""
    if options.length is not None:
        return options.length
    if not (Path(name) / "run.json").is_file():
        raise UserError(
            f"there is no run or export in {name}; of a model on the hub an estimate needs to know "
            "how long answers may be: give --length (tokens)"
        )
    return int(read_description(Path(name)).get("response_tokens") or DEFAULT_LENGTH)


def _answered(sides: Sequence[Side], benchmark: Benchmark, seeds: Sequence[int]) -> BySeed:
    """Pairs by seed; what has not been answered before is answered now."""
    work = [(seed, side, side.missing(benchmark, seed)) for seed in seeds for side in sides]
    said: dict[int, list[Any]] = {seed: [] for seed in seeds}
    with progress_bar("answering", "answers", sum(count for *_, count in work)) as progress:
        for seed, side, _ in work:
            said[seed].append(side.answers(benchmark, seed, progress))
    return {seed: pairs_of(benchmark.tasks, *both) for seed, both in said.items()}


@contextlib.contextmanager
def _goes_on(what: str, folder: Path) -> Iterator[None]:
    """Ctrl-C says what is kept."""
    try:
        yield
    except KeyboardInterrupt as stop:
        words = f"interrupted; {what} so far are kept in {folder}: the same command goes on"
        raise KeyboardInterrupt(str(stop) or words) from None


def _judged(judge: Judge, pairs: BySeed, folder: Path) -> dict[int, list[Judged]]:
    """All seeds at once, so that threads are never idle between them; says what it will cost, and
    what it did.
    """
    everything = [pair for mine in pairs.values() for pair in mine]
    missing = judge.announce(everything) if isinstance(judge, EndpointJudge) else []
    try:
        with _goes_on("likelihoods", folder), progress_bar("judging", "verdicts") as progress:
            found = iter(judge.judge(everything, progress))
    finally:  # money is gone after a failure, too
        if isinstance(judge, EndpointJudge):
            judge.tell_spent(missing)
    return {seed: [next(found) for _ in mine] for seed, mine in pairs.items()}


def _cautions(options: PairwiseOptions, sides: Sequence[Side], benchmark: Benchmark) -> list[str]:
    """What a reader must know of the comparison itself."""
    lines = []
    marks = [side.fingerprint for side in sides if isinstance(side, RunSide)]
    if len(marks) == 2 and marks[0] == marks[1]:
        lines.append("A and B are the same model: all their answers are.")
    if options.difficulty is not None:
        lines.append("AlpacaEval's full model holds for B = gpt4_1106_preview's outputs only.")
        if (count := len(benchmark.tasks)) < NUM_INSTRUCTIONS:
            lines.append(
                f"AlpacaEval's full model is calibrated on all {NUM_INSTRUCTIONS} instructions; "
                f"with {count} of them it is no leaderboard number."
            )
    return lines


def _verdict_line(judge: Judge, seed: int, one: Judged) -> str:
    """What was said, who won, and what that rests on."""
    record = {
        "seed": seed,
        "task": one.pair.task.id,
        "turn": one.pair.turn + 1,
        "category": one.pair.task.category,
        "result": one.outcome.result,
        "preference": one.outcome.preference,
        "a": one.pair.answers_a[-1],
        "b": one.pair.answers_b[-1],
        **judge.grounds(one.pair),
    }
    return json.dumps(record) + "\n"


def _pairwise(options: PairwiseOptions) -> None:
    check_options(options)
    benchmark = chosen_benchmark(options)
    calibration = open_calibration(options, benchmark)
    if options.dry_run:
        _dry_run(options, benchmark)
        return
    seeds, folder = seeds_of(options), Path(options.out)
    with opened_judge(options, benchmark) as judge:
        sides = open_sides(options)
        with _goes_on("answers", folder / "answers"):
            pairs = _answered(sides, benchmark, seeds)
        judged = _judged(judge, pairs, folder)

    everything = [pair for seed in seeds for pair in pairs[seed]]
    results = [seed_numbers(judged[seed], calibration) for seed in seeds]
    cautions = [line for side in sides for line in side.cautions(benchmark, seeds)]
    cautions += [*judge.cautions(everything), *_cautions(options, sides, benchmark)]
    numbers = without_nan(
        {
            "a": {"name": sides[0].name, "given": options.a, **sides[0].about},
            "b": {"name": sides[1].name, "given": options.b, **sides[1].about},
            "benchmark": {"name": benchmark.name, "identity": benchmark.identity},
            "num_tasks": len(benchmark.tasks),
            "judge": {
                "label": judge.label,
                "is_local": options.is_local,
                **judge.about(everything),
            },
            "seeds": seeds,
            "over_seeds": summarize(results, [judged[seed] for seed in seeds]),
            "results": results,
            "cautions": cautions,
        }
    )
    folder.mkdir(parents=True, exist_ok=True)
    verdicts = [_verdict_line(judge, seed, one) for seed, mine in judged.items() for one in mine]
    write_text(folder / "verdicts.jsonl", "".join(verdicts))
    main_table, *others = tables(numbers)
    with_notes = replace(main_table, title="", notes=notes(numbers))
    write_text(folder / "judge.md", markdown_page(main_table.title, with_notes, *others))
    write_text(folder / "judge.json", json.dumps(numbers, indent=1, allow_nan=False) + "\n")
    for table in (main_table, *others):
        table.print()
    print_lines(notes(numbers))
    print(f"written: judge.json, judge.md and verdicts.jsonl in {folder}", file=sys.stderr)


def main(args: Sequence[str]) -> int:
    """Hand over to the kind of judgement."""
    if not args or args[0] in ("-h", "--help"):
        print(HELP)
        return 0
    kind, *rest = args
    if kind != "pairwise":
        raise UserError(f"there is one kind of judgement: bellmask judge pairwise A B; not {kind}")
    _pairwise(parse_command(PairwiseOptions, rest, command="judge pairwise"))
    return 0
