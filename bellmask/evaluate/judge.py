"""``bellmask judge pairwise A B``: win rates by a judge (the paper's Table 5).

The judge is a model behind an endpoint, which sees both orders, or a local causal LM that compares
likelihoods. Prompts and answers are in :mod:`bellmask.evaluate.judge_prompts`, requests and their
cost in :mod:`bellmask.evaluate.judge_endpoint`. Answers, requests and verdicts are cached: an
interrupted command continues, and no request is sent twice. Win rates have errors over tasks:
turns of one task move together, so a task is a cluster.
"""

from __future__ import annotations

import json
import logging
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import tyro

from bellmask.config.command_line import parse_command
from bellmask.data.readers import cache_folder
from bellmask.evaluate import judge_endpoint, judge_prompts
from bellmask.evaluate.judge_endpoint import Budget, ChatRequest, EndpointOptions, Transcript
from bellmask.evaluate.judge_prompts import Answers, Benchmark, Judged, Pair, Said, Side, Style
from bellmask.evaluate.scorer import TextScorer, load_scorer
from bellmask.evaluate.suite import write_results
from bellmask.generate.answers import default_length
from bellmask.generate.settings import Sampling
from bellmask.storage.loading import OWN, LoadOptions, is_export
from bellmask.storage.run_folder import read_config
from bellmask.utils import stats
from bellmask.utils.console import plural, print_lines
from bellmask.utils.errors import UserError, check_least, refuse
from bellmask.utils.files import check_folder, without_nan, write_text
from bellmask.utils.progress import progress_bar
from bellmask.utils.stats import Estimate, Floats, Labels, clustered_error, plus_minus
from bellmask.utils.store import Store, content_key
from bellmask.utils.table import Table, markdown_page

logger = logging.getLogger(__name__)

# Options

LOCAL = "local:"
Numbers = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class PairwiseOptions(LoadOptions):
    """Let a judge compare the answers of A and B to the same requests, in both orders: win rate,
    non-tie win rate, length-controlled win rate (the paper's Table 5).

    A and B are models (run folders, exports, hub names), which generate answers, or files of
    outputs with instruction and output in each record. The judge is a model behind an
    OpenAI-compatible API, or a local causal LM whose likelihood decides (local:NAME; not a judgment
    of quality). The maximum cost is printed before anything is sent. Answers, requests and verdicts
    are stored in --out: if interrupted, the same command continues, and no request is sent twice.

    Examples:
    bellmask judge pairwise runs/bell runs/base --benchmark mt-bench --judge gpt-4o --max-usd 50

    bellmask judge pairwise runs/bell runs/base --benchmark alpaca-eval --judge gpt-4o --dry-run

    bellmask judge pairwise runs/bell runs/base --benchmark prompts.jsonl --judge local:smollm2

    bellmask judge pairwise A.json B.json --judge my-model --base-url http://localhost:8000/v1
    """

    a: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="A")]
    """Model or file of outputs whose win rate is measured."""
    b: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="B")]
    """Model or file of outputs that A is compared with."""
    judge: str
    """Model name at the endpoint, or local:MODEL (smollm2, an ARM run folder, a Hugging Face
    folder or name) to compare likelihoods."""
    benchmark: str = "alpaca-eval"
    """alpaca-eval (805 instructions; for two files of outputs: those in A), mt-bench (80
    questions, two turns) or a file with instruction, prompt or turns in each record."""
    tasks: int = 0
    """Number of tasks to use, evenly spread over the benchmark; 0 means all."""
    seeds: int = 5
    """Number of sampling seeds: each model answers once per seed."""
    seed: int = 0
    """The first sampling seed; the others follow."""
    length: int | None = None
    """Tokens of an answer; default: enough for most training responses of the run."""
    sampling: Annotated[Sampling, tyro.conf.arg(name="")] = field(default_factory=Sampling)
    """How answers are sampled; the judge always has temperature 0."""
    endpoint: Annotated[EndpointOptions, tyro.conf.arg(name="")] = field(
        default_factory=EndpointOptions
    )
    """Endpoint and rate limits of the judge."""
    price_in: float | None = None
    """US dollars per million input tokens; known for some of OpenAI's models."""
    price_out: float | None = None
    """US dollars per million output tokens."""
    max_usd: float | None = None
    """Spending limit in US dollars; needs prices. The estimate, which must not exceed it, is the
    worst case: every verdict has its maximum length. The actual cost is usually far lower."""
    dry_run: bool = False
    """Print the maximum cost and stop: no model is loaded, no answer written, nothing
    sent. No key is needed."""
    data_dir: str | None = None
    """Folder with alpaca_eval.json (or a model_outputs.json), instead of the hub."""
    out: str = "runs/judge"
    """Folder for judge.json, judge.md and verdicts.jsonl, replaced by the next comparison there,
    and for answers/ and transcript.jsonl, shared by all comparisons there."""
    cache_dir: str | None = None
    """Folder for downloads; default: $BELLMASK_CACHE or ~/.cache/bellmask."""

    @property
    def is_local(self) -> bool:
        """True for a local judge."""
        return self.judge.startswith(LOCAL)


def check_options(options: PairwiseOptions) -> None:
    """Checks before anything is loaded."""
    check_folder(options.out)
    check_least(options, seeds=1, tasks=0)
    options.sampling.check()
    judge = options.judge.removeprefix(LOCAL)
    a, b = Path(options.a).resolve(), Path(options.b).resolve()
    prices = (options.max_usd, options.price_in, options.price_out)
    is_default = (options.endpoint, *prices) == (EndpointOptions(), None, None, None)
    is_misplaced = options.is_local and not is_default
    problems = {
        "--judge needs a name: MODEL at an endpoint, or local:MODEL": not judge.strip(),
        f"A and B are both {options.a}: there is nothing to compare": a == b,
        "--max-usd, prices and --base-url need a judge at an endpoint": is_misplaced,
    }
    refuse(problems)
    if not options.is_local:
        options.endpoint.check()
        open_budget(options)
        if not options.dry_run:
            options.endpoint.key()
            judge_endpoint.import_openai()


def open_budget(options: PairwiseOptions) -> Budget:
    """The judge's prices, if known, and the spending limit."""
    url = options.endpoint.url()
    prices = judge_endpoint.prices_of(options.judge, url, options.price_in, options.price_out)
    return Budget(prices, options.max_usd, options.judge)


# A judge behind an endpoint.

ORDERS = (True, False)
"""A shown first, B shown first."""


# Paper: Table 5
@dataclass(frozen=True)
class EndpointJudge:
    """A model behind an API; every request and reply is in the transcript."""

    model: str
    style: Style
    options: EndpointOptions
    budget: Budget
    transcript: Transcript

    @property
    def label(self) -> str:
        """Description of the judge for tables."""
        return f"{self.model}, {self.style.name} prompts, both orders"

    def request(self, pair: Pair, a_first: bool) -> ChatRequest:
        """One order of one pair."""
        style, url = self.style, self.options.url()
        messages = style.write(pair, a_first)
        return ChatRequest(self.model, messages, style.max_tokens, style.logprobs, url)

    def announce(self, pairs: Iterable[Pair]) -> list[ChatRequest]:
        """Print the maximum cost, reject it if too high; return the requests to send.

        Each pair in both orders; two equal answers need no judge.
        """
        different = [pair for pair in pairs if not pair.is_same]
        requests = [self.request(pair, a_first) for pair in different for a_first in ORDERS]
        missing = self.transcript.missing(requests)
        print(self.budget.check(missing), flush=True)
        return missing

    def judge(self, pairs: Sequence[Pair]) -> list[Judged]:
        """Send requests that have no stored answer; an error says how to continue.

        Pairs that the endpoint rejects are unreadable; unlike failures, they would be rejected
        again.
        """
        missing, budget = self.announce(pairs), self.budget
        try:
            with (
                closing(judge_endpoint.Endpoint(self.options, budget)) as endpoint,
                progress_bar("judging", "verdicts") as progress,
            ):
                failed = self.transcript.ask_all(missing, endpoint, progress)
        finally:  # requests cost money even if a later one fails
            if budget.prices is not None and missing:
                most = "" if budget.max_usd is None else f" of ${budget.max_usd:g}"
                print(f"spent ${budget.spent:,.4f}{most}", flush=True)
        if failed:
            words = f"{len(failed)} requests failed ({failed[0]}); the same command sends them"
            raise judge_endpoint.EndpointError(words)
        judged = [self._judged(pair) for pair in pairs]
        records = self._records(judged)
        if records and all("refused" in record for record in records):
            why = f"{records[0]['refused']}; they are stored in {self.transcript.store.path}"
            raise UserError(f"the judge rejected all requests: {why}: delete those lines to retry")
        return judged

    def _judged(self, pair: Pair) -> Judged:
        """Outcomes with both verdicts and their keys in the transcript."""
        if pair.is_same:
            return Judged(pair, "tie", 0.5, {"verdicts": [], "requests": []})
        keys = [self.request(pair, a_first).key for a_first in ORDERS]
        first, second = (
            self.style.read(reply.text, reply.top_logprobs) if reply else judge_prompts.UNREADABLE
            for reply in map(self.transcript.reply, keys)
        )
        grounds = {"verdicts": [first.choice, second.choice], "requests": keys}
        return Judged(pair, *judge_prompts.combine(first, second), grounds)

    def _records(self, judged: Sequence[Judged]) -> list[dict[str, Any]]:
        return self.transcript.records(key for one in judged for key in one.grounds["requests"])

    def about(self, judged: Sequence[Judged]) -> tuple[dict[str, Any], list[str]]:
        """(endpoint, prompts, fraction of choices for the answer shown first (one half: unbiased),
        total usage, including earlier commands; notes on rejected requests and omitted settings).
        """
        choices = [choice for one in judged for choice in one.grounds["verdicts"]]
        first, second = choices.count("first"), choices.count("second")
        records = self._records(judged)
        replies = [record["reply"] for record in records if "reply" in record]
        tokens_in = sum(reply["prompt_tokens"] for reply in replies)
        tokens_out = sum(reply["completion_tokens"] for reply in replies)
        about = {
            "endpoint": self.options.url(),
            "style": self.style.name,
            "style_identity": self.style.identity,
            "first_share": first / (first + second) if first + second else None,
            "num_requests": len(replies),
            "tokens_in": tokens_in,
            "tokens_out": tokens_out,
            "usd": self.budget.usd(tokens_in, tokens_out) if self.budget.prices else None,
        }
        cautions = []
        if refusals := [record["refused"] for record in records if "refused" in record]:
            cautions = [f"The judge rejected {len(refusals)} requests ({refusals[0]}): unreadable."]
        changed = {name for record in records for name in record.get("refused_settings", ())}
        # max_tokens is sent all the same, by its newer name
        if names := ", ".join(n for n in judge_endpoint.CHANGEABLE[1:] if n in changed):
            cautions += [f"The judge does not support {names}: requests were sent without."]
        return about, cautions


# A judge without an endpoint: the answer that is more likely under a causal LM wins.
#
# It measures how a language model would continue, not quality: fluent and common answers win. Every
# result says so. An answer's log-likelihood is that of request and answer minus that of the request
# alone, which is exact if the answer does not change the tokens of the request; other pairs are
# counted. The order of answers does not matter, so there is one verdict per pair. Cost: one forward
# pass over each conversation with its last answer and one without.
TIE_MARGIN = 1e-5
"""Log-likelihoods, in nats per token, that differ by less are a tie: this is the accuracy of
sums."""
Score = dict[str, Any]
"""Of an answer: its log_likelihood in nats; num_tokens, 0 for an empty answer and where the request
alone fills the model's context; is_exact: the request's tokens are the same with and without the
answer; is_cut: tokens beyond the model's context were dropped."""
EMPTY: Score = {"log_likelihood": 0.0, "num_tokens": 0, "is_exact": True, "is_cut": False}


class LocalJudge:
    """A causal LM's likelihood; outcomes are cached, each as soon as it is there."""

    def __init__(self, scorer: TextScorer, path: Path) -> None:
        self._scorer, self._store = scorer, Store(path)
        self.label = f"likelihood of {scorer.name}, not a judgment of quality"
        self._fingerprint = f"{scorer.fingerprint}/per-token"

    def judge(self, pairs: Sequence[Pair]) -> list[Judged]:
        unique = {self._key(pair): pair for pair in pairs}
        missing = self._store.missing(unique)
        with progress_bar("judging", "verdicts", len(missing)) as progress:
            for key in missing:
                self._store.add([{"key": key, **self._outcome(unique[key])}])
                progress.advance()
        judged = []
        for pair in pairs:
            record = self._store[self._key(pair)]
            grounds = {"likelihood_a": record["a"], "likelihood_b": record["b"]}
            judged.append(Judged(pair, record["result"], record["preference"], grounds))
        return judged

    def _outcome(self, pair: Pair) -> dict[str, Any]:
        """An empty answer (only white space) loses to a non-empty one; two are a tie. If the
        request leaves no room for an answer in the model's context, the pair is unreadable.
        """
        a, b = (self._score(pair, said) for said in (pair.answers_a, pair.answers_b))
        has_a, has_b = (bool(said[-1].strip()) for said in (pair.answers_a, pair.answers_b))
        counts = (a["num_tokens"], b["num_tokens"])
        if pair.is_same or not (has_a or has_b):
            result = "tie"
        elif (has_a and not counts[0]) or (has_b and not counts[1]):
            result = "unreadable"
        elif not (has_a and has_b):
            result = "win" if has_a else "loss"
        else:
            gain = a["log_likelihood"] / counts[0] - b["log_likelihood"] / counts[1]
            result = "tie" if abs(gain) <= TIE_MARGIN else "win" if gain > 0 else "loss"
        about = {"task": pair.task.id, "turn": pair.turn + 1, "a": a, "b": b}
        return about | {"result": result, "preference": judge_prompts.VALUES[result]}

    def _score(self, pair: Pair, said: Said) -> Score:
        """Of the text with the answer minus the text before it, which ends in a colon, so that the
        answer starts a new token.
        """
        if not (answer := said[-1].strip()):
            return EMPTY
        turns = zip(pair.task.turns, said[:-1])
        earlier = [f"Question: {asked}\nAnswer: {reply.strip()}\n\n" for asked, reply in turns]
        text = "".join(earlier) + f"Question: {pair.task.turns[pair.turn]}\nAnswer:"
        before, whole = self._scorer.score([(text,), (f"{text} {answer}",)])
        count = max(0, whole.num_tokens - before.num_tokens)
        return {
            "log_likelihood": before.nll - whole.nll if count else 0.0,
            "num_tokens": count,
            "is_exact": whole.ids[: len(before.ids)] == before.ids,
            "is_cut": whole.is_cut,
        }

    def _key(self, pair: Pair) -> str:
        said = [pair.task.turns[: pair.turn + 1], pair.answers_a, pair.answers_b]
        return content_key("likelihood", self._fingerprint, said)

    def about(self, judged: Sequence[Judged]) -> tuple[dict[str, Any], list[str]]:
        """(fingerprint, notes on truncated or approximate likelihoods); no order, so no bias."""
        both = [one.grounds.values() for one in judged]
        num_cut = sum(any(score["is_cut"] for score in scores) for scores in both)
        num_inexact = sum(not all(score["is_exact"] for score in scores) for scores in both)
        counts = {
            "did not fit into the judge's context: ends of answers do not count": num_cut,
            "are approximate: an answer changes the tokens of its request": num_inexact,
        }
        lines = [f"{n} of {len(judged)} pairs {what}." for what, n in counts.items() if n]
        return {"fingerprint": self._fingerprint}, lines


# Length-controlled win rates between two models, with two terms.
#
# The preference for A is a logistic function of a constant and tanh(length difference / its
# standard deviation); its prediction at difference 0 is the length-controlled win rate. Two terms,
# because instruction difficulties and calibration rows of AlpacaEval's model are specific to its
# own baseline. The fit has no penalty, so that the rate is not pulled to one half; where no finite
# fit exists there is no rate. Swapping A and B turns a rate r into exactly 1 - r.
#
# N judged answers.

SURE = 1e-6
"""A preference this close to 0 or 1 counts as certain in the separation test."""
SMALLEST_STEP = 1e-11
"""Convergence tolerance of the coefficients."""
MAX_STEPS = 100


@dataclass(frozen=True)
class LengthControlled:
    """A length-controlled win rate, between 0 and 1, as stored in judge.json."""

    value: float = float("nan")
    """nan if the effect of length cannot be separated."""
    error: float = float("nan")
    """Standard error over tasks; nan where there is none."""
    note: str | None = None
    """A note on this number."""


# Paper: Table 5
def two_term(
    preference: Floats, length_a: Floats, length_b: Floats, cluster: Labels
) -> LengthControlled:
    """Fit on preferences for A in [0, 1] and lengths of the answers in characters.

    Answers with the same ``cluster`` (turns of one question) are not independent: the error, by the
    delta method on a sandwich variance, sums their scores first.
    """
    y_N, difference_N = preference, length_a - length_b
    if not len(y_N):
        return LengthControlled(note="nothing was judged")
    for word, is_beyond in (("shorter", difference_N < 0), ("longer", difference_N > 0)):
        if is_beyond.all():
            return LengthControlled(note=f"A's answers are all {word} than B's")
    if not difference_N.any():
        note = "all answers have the length of their rivals: the plain win rate"
        return LengthControlled(float(y_N.mean()), clustered_error(y_N, cluster), note)
    x_N = np.tanh(difference_N / difference_N.std(ddof=1))
    if separates(x_N, y_N):
        return LengthControlled(note="wins and losses separate perfectly: no finite fit exists")
    x_N2 = np.stack([np.ones(len(y_N)), x_N], axis=1)
    b_2 = fit(x_N2, y_N)
    rate = float(sigmoid(b_2[:1])[0])
    variance_22 = sandwich(x_N2, y_N, b_2, cluster)
    return LengthControlled(rate, rate * (1 - rate) * float(np.sqrt(variance_22[0, 0])))


def separates(x_N: Floats, y_N: Floats) -> bool:
    """True if some threshold on x has all wins on one side and all losses on the other.

    Both may lie on the threshold itself. Then, and only then, the likelihood has no maximum.
    """
    won, lost = x_N[y_N > SURE], x_N[y_N < 1 - SURE]
    if not len(won) or not len(lost):
        return True
    return bool(won.min() >= lost.max() or lost.min() >= won.max())


def sigmoid(x: Floats) -> Floats:
    """1 / (1 + exp(-x)), without overflow."""
    return np.exp(-np.logaddexp(0.0, -x))


def fit(x_NK: Floats, y_N: Floats) -> Floats:
    """Coefficients of a logistic regression on soft labels: Newton steps, halved where one
    increases the summed loss.
    """

    def objective(b_K: Floats) -> float:
        z_N = x_NK @ b_K
        return float((np.logaddexp(0.0, z_N) - y_N * z_N).sum())

    b_K = np.zeros(x_NK.shape[1])
    for _ in range(MAX_STEPS):
        p_N = sigmoid(x_NK @ b_K)
        slope_K = x_NK.T @ (p_N - y_N)
        step_K = -np.linalg.pinv(_bend(x_NK, p_N), hermitian=True) @ slope_K
        now, share = objective(b_K), 1.0
        while objective(b_K + share * step_K) > now and share > SMALLEST_STEP:
            share /= 2
        b_K = b_K + share * step_K
        if np.abs(step_K).max() < SMALLEST_STEP:
            break
    return b_K


def _bend(x_NK: Floats, p_N: Floats) -> Floats:
    """[K, K] curvature of the summed loss."""
    return (x_NK.T * (p_N * (1 - p_N))) @ x_NK


def sandwich(x_NK: Floats, y_N: Floats, b_K: Floats, cluster_N: Labels) -> Floats:
    """[K, K] variance of the coefficients; labels need not be coin tosses, nor rows independent."""
    p_N = sigmoid(x_NK @ b_K)
    bend_KK = _bend(x_NK, p_N)
    _, place_N = np.unique(cluster_N, return_inverse=True)
    count = int(place_N.max()) + 1
    if count < 2:
        return np.full(bend_KK.shape, np.nan)
    score_GK = np.zeros((count, x_NK.shape[1]))
    np.add.at(score_GK, place_N, x_NK * (y_N - p_N)[:, None])
    inverse_KK = np.linalg.pinv(bend_KK, hermitian=True)
    return inverse_KK @ (score_GK.T @ score_GK) @ inverse_KK * (count / (count - 1))


# Win rates of judged pairs → the numbers of judge.json: of each seed, and over seeds (Table 5).

COUNTS = {"wins": "win", "losses": "loss", "ties": "tie", "unreadable": "unreadable"}
ZERO = 1e-12
"""Smaller errors are 0 up to rounding."""


def columns(judged: Sequence[Judged]) -> tuple[Floats, Floats, Floats, Labels]:
    """Of what is readable: preferences for A, characters of A's and B's answers to the turn that
    was judged, and tasks, the clusters of all errors.
    """
    known = [one for one in judged if one.preference is not None]
    y_N = np.array([one.preference for one in known], dtype=np.float64)
    length_a = np.array([len(one.pair.answers_a[-1]) for one in known], dtype=np.float64)
    length_b = np.array([len(one.pair.answers_b[-1]) for one in known], dtype=np.float64)
    return y_N, length_a, length_b, np.array([one.pair.task.index for one in known], dtype=np.int64)


# Paper: Table 5
def win_rates(judged: Sequence[Judged]) -> dict[str, Estimate]:
    """Rates with their errors over tasks, of which there are ``n``.

    The win rate is the mean preference for A: ties count half, a judge's probabilities as they are.
    The non-tie rate is wins / (wins + losses), the paper's MT-Bench number (Tab. 5). Unreadable
    verdicts are excluded.
    """
    y_N, _, _, task_N = columns(judged)
    decided = [one for one in judged if one.result in ("win", "loss")]
    won_N = np.array([one.result == "win" for one in decided], dtype=np.float64)
    return {"win_rate": _mean(y_N, task_N), "non_tie": _mean(won_N, columns(decided)[-1])}


def _mean(value_N: Floats, task_N: Labels) -> Estimate:
    if not len(value_N):
        return Estimate(float("nan"), float("nan"), 0)
    return Estimate(float(value_N.mean()), clustered_error(value_N, task_N), len(set(task_N)))


def count_results(judged: Sequence[Judged]) -> dict[str, int]:
    """Numbers of wins, losses, ties and unreadable verdicts."""
    results = Counter(str(one.result) for one in judged)
    return {name: results[result] for name, result in COUNTS.items()}


def seed_numbers(judged: Sequence[Judged]) -> Numbers:
    """Rates of one seed; each headline has a value and its standard error over tasks."""
    rates = win_rates(judged).items()
    return {
        "counts": count_results(judged),
        **{name: {"value": rate.value, "error": rate.se} for name, rate in rates},
        "length_controlled": asdict(two_term(*columns(judged))),
        "mean_length_a": float(np.mean([len(one.pair.answers_a[-1]) for one in judged])),
        "mean_length_b": float(np.mean([len(one.pair.answers_b[-1]) for one in judged])),
    }


def summarize(results: Sequence[Numbers], judged: Sequence[Judged]) -> Numbers:
    """Mean ± deviation over seeds of every headline that there is.

    Length-controlled there is none unless all seeds have one: those that A or B wins outright have
    no fit, and a mean of the others would be biased.
    ``judged`` holds the outcomes of all seeds: errors over tasks come from all of them together,
    around the rate of all. A task is one cluster, whichever the seed.
    """
    rates, pooled = win_rates(judged), two_term(*columns(judged))
    rates["length_controlled"] = Estimate(pooled.value, pooled.error, rates["win_rate"].n)
    found = {
        name: _over_seeds([result[name] for result in results], _known_error(rate))
        for name, rate in rates.items()
    }
    if found["length_controlled"]["count"] < len(results):
        found["length_controlled"] |= dict.fromkeys(("mean", "deviation", "error"), float("nan"))
    return found


def _known_error(rate: Estimate) -> float | None:
    """nan for an error of 0 over few tasks, which is not informative."""
    is_certain = rate.se is not None and rate.se < ZERO
    return float("nan") if is_certain and rate.n < stats.MIN_CLUSTERS else rate.se


def _over_seeds(values: Sequence[Numbers], error: float | None) -> Numbers:
    """Mean ± sample deviation of what is a number (Tab. 5 has five seeds); error over tasks."""
    known = np.array([one["value"] for one in values if np.isfinite(one["value"])])
    return {
        "mean": float(known.mean()) if len(known) else float("nan"),
        "deviation": float(known.std(ddof=1)) if len(known) > 1 else float("nan"),
        "count": len(known),
        "error": error,
    }


# Parts built from options: benchmark, sides and judge.


def chosen_benchmark(options: PairwiseOptions) -> Benchmark:
    """The benchmark, or some of its tasks. Two files of outputs to AlpacaEval hold it."""
    is_asked = options.benchmark == "alpaca-eval" and options.data_dir is None
    if is_asked and Path(options.a).is_file() and Path(options.b).is_file():
        found = judge_prompts.alpaca_of_outputs(Path(options.a))
        logger.info(f"judging answers to the {len(found.tasks)} instructions in {options.a}")
    else:
        cache = cache_folder(options.cache_dir)
        found = judge_prompts.open_benchmark(options.benchmark, options.data_dir, cache)
    return found.some(options.tasks) if options.tasks else found


def open_sides(options: PairwiseOptions) -> list[Side]:
    """A and B under distinct names: files of outputs, or models that generate answers."""
    given = (options.a, options.b)
    short = [Path(name).resolve().name if Path(name).exists() else name for name in given]
    labels = short if short[0] != short[1] else given
    folder = Path(options.out) / "answers"
    return [
        judge_prompts.read_outputs(Path(name), label)
        if Path(name).is_file()
        else judge_prompts.RunSide(
            label, options.load(name), folder, options.sampling, options.length
        )
        for name, label in zip(given, labels, strict=True)
    ]


def open_judge(options: PairwiseOptions, benchmark: Benchmark) -> EndpointJudge | LocalJudge:
    """An endpoint's, or a local one."""
    if not options.is_local:
        return endpoint_judge(options, benchmark)
    name = options.judge.removeprefix(LOCAL)
    scorer = load_scorer(name, device=options.device, cache=options.cache_dir)
    return LocalJudge(scorer, Path(options.out) / "likelihoods.jsonl")


def endpoint_judge(options: PairwiseOptions, benchmark: Benchmark) -> EndpointJudge:
    """Reject tasks that a style does not support, before they are answered."""
    style = judge_prompts.open_style(benchmark.style, cache_folder(options.cache_dir))
    empty = [("",) * len(task.turns) for task in benchmark.tasks]
    for pair in judge_prompts.pairs_of(benchmark.tasks, empty, empty):
        style.write(pair, True)
    transcript = Transcript(Path(options.out) / "transcript.jsonl")
    return EndpointJudge(options.judge, style, options.endpoint, open_budget(options), transcript)


# Table 5's layout: win rates of A against B, on the screen and in Markdown.
TITLES = {
    "win_rate": "win rate (a tie is half a win)",
    "non_tie": "non-tie win rate",
    "length_controlled": "length-controlled, two terms",
}


def percent(value: float | None, spread: float | None = None) -> str:
    """``78.27 ± 1.37``; a dash for unknown values."""
    if value is None:
        return "-"
    return plus_minus(100 * value, None if spread is None else 100 * spread)


def tables(numbers: Numbers) -> list[Table]:
    """Table 5's rates, and the outcomes of each seed."""
    names = f"{numbers['a']['name']} against {numbers['b']['name']}"
    count = len(numbers["seeds"])
    over = "one seed" if count == 1 else f"mean ± deviation of {count} seeds"
    rates = []
    for name, title in TITLES.items():
        rate = numbers["over_seeds"][name]
        rates.append([title, percent(rate["mean"], rate["deviation"]), percent(rate["error"])])
    outcomes = []
    for seed, result in zip(numbers["seeds"], numbers["results"], strict=True):
        counts = [str(result["counts"][name]) for name in COUNTS]
        lengths = [f"{result[f'mean_length_{side}']:.0f}" for side in "ab"]
        outcomes.append([str(seed), *counts, *lengths])
    title = f"{names}, by {numbers['judge']['label']}"
    return [
        Table(title, ["%", over, "standard error over tasks"], rates, notes(numbers)),
        Table("Outcomes for A", ["seed", *COUNTS, "characters of A", "of B"], outcomes),
    ]


def notes(numbers: Numbers) -> list[str]:
    """Notes under the tables."""
    judge, results = numbers["judge"], numbers["results"]
    lines = [f"Benchmark: {numbers['benchmark']['name']}, {numbers['num_tasks']} tasks."]
    if judge.get("first_share") is not None:
        share = percent(judge["first_share"])
        lines += [f"It chose the answer shown first in {share} % of its choices (unbiased: 50)."]
    if "num_requests" in judge:
        dollars = "" if judge["usd"] is None else f", ${judge['usd']:,.4f} in all"
        lines += [
            f"It answered {judge['num_requests']:,} requests: {judge['tokens_in']:,} tokens in, "
            f"{judge['tokens_out']:,} out{dollars}."
        ]
    if unreadable := sum(result["counts"]["unreadable"] for result in results):
        lines += [f"{unreadable} pairs without a readable verdict are excluded from all rates."]
    why = Counter(result["length_controlled"]["note"] for result in results)
    seeds = f"of {plural(len(results), 'seed')}"
    lines += [f"Length-controlled, {count} {seeds}: {note}." for note, count in why.items() if note]
    return [*lines, *numbers["cautions"]]


# The command


def seeds_of(options: PairwiseOptions) -> list[int]:
    """Outputs in files do not depend on the seed: one seed is enough."""
    is_one = all(Path(name).is_file() for name in (options.a, options.b))
    return [options.seed + number for number in range(1 if is_one else options.seeds)]


def _dry_run(options: PairwiseOptions, benchmark: Benchmark) -> None:
    """Maximum cost of the requests. No model is loaded: its answers count with their maximum
    length.
    """
    if options.is_local:
        print("dry run: a local judge costs nothing; nothing was computed")
        return
    seeds, sides, lines = seeds_of(options), [], []
    for side in (options.a, options.b):
        if Path(side).is_file():
            sides.append(judge_prompts.read_outputs(Path(side)).answers(benchmark, seeds))
            continue
        length = _longest_answer(side, options)
        size = judge_endpoint.CHARACTERS_PER_TOKEN * length
        by_seed = {
            seed: [  # all pairs differ, so each is sent
                tuple(f"{seed}.{task.index}.{len(sides)} ".ljust(size, "x") for _ in task.turns)
                for task in benchmark.tasks
            ]
            for seed in seeds
        }
        sides.append(Answers(by_seed, {}))
        lines.append(f"answers of {side} count as {length} tokens each, their maximum length")
    pairs = _pairs(benchmark, sides)
    endpoint_judge(options, benchmark).announce(pair for mine in pairs.values() for pair in mine)
    print_lines([*lines, "dry run: no answer was written, nothing was sent"])


def _longest_answer(name: str, options: PairwiseOptions) -> int:
    """Tokens, without loading the model."""
    if options.length is not None:
        return options.length
    if not (Path(name) / "run.json").is_file():
        raise UserError(f"there is no run {name}; of a hub model give --length")
    config = read_config(Path(name), OWN if is_export(Path(name)) else "")
    return default_length(Path(name), config.data.block_length)


def _pairs(benchmark: Benchmark, sides: Sequence[Answers]) -> dict[int, list[Pair]]:
    a, b = (side.by_seed for side in sides)
    return {seed: judge_prompts.pairs_of(benchmark.tasks, a[seed], b[seed]) for seed in a}


def _pairwise(options: PairwiseOptions) -> None:
    check_options(options)
    benchmark = chosen_benchmark(options)
    if options.dry_run:
        _dry_run(options, benchmark)
        return
    judge, seeds, folder = open_judge(options, benchmark), seeds_of(options), Path(options.out)
    sides = open_sides(options)
    try:
        answers = [side.answers(benchmark, seeds) for side in sides]
        pairs = _pairs(benchmark, answers)
        # all seeds at once, so that threads do not idle between seeds
        everything = judge.judge([pair for mine in pairs.values() for pair in mine])
    except KeyboardInterrupt as stop:
        words = f"interrupted; answers so far are in {folder}, and the same command continues"
        raise KeyboardInterrupt(str(stop) or words) from None

    found = iter(everything)
    judged = {seed: [next(found) for _ in mine] for seed, mine in pairs.items()}
    results = [seed_numbers(mine) for mine in judged.values()]
    about_judge, cautions = judge.about(everything)
    cautions = [line for side in answers for line in side.cautions] + cautions
    if answers[0].about.get("answers", "a") == answers[1].about.get("answers", "b"):
        cautions.append("A and B are the same model: all their answers are the same.")
    numbers = {
        "a": {"name": sides[0].name, "given": options.a, **answers[0].about},
        "b": {"name": sides[1].name, "given": options.b, **answers[1].about},
        "benchmark": {"name": benchmark.name, "identity": benchmark.identity},
        "num_tasks": len(benchmark.tasks),
        "judge": {"label": judge.label, "is_local": options.is_local, **about_judge},
        "seeds": seeds,
        "over_seeds": summarize(results, everything),
        "results": results,
        "cautions": cautions,
    }
    numbers = without_nan(numbers)
    verdicts = [
        {
            "seed": seed,
            "task": one.pair.task.id,
            "turn": one.pair.turn + 1,
            "category": one.pair.task.category,
            "result": one.result,
            "preference": one.preference,
            "a": one.pair.answers_a[-1],
            "b": one.pair.answers_b[-1],
            **one.grounds,
        }
        for seed, mine in judged.items()
        for one in mine
    ]
    main_table, outcomes = tables(numbers)
    page = markdown_page(main_table.title, replace(main_table, title=""), outcomes)
    write_results(folder, numbers, "judge", md=page)
    write_text(folder / "verdicts.jsonl", "".join(json.dumps(one) + "\n" for one in verdicts))
    for table in (outcomes, main_table):
        table.print()
    print(f"written: judge.json, judge.md and verdicts.jsonl in {folder}", file=sys.stderr)


def main(args: Sequence[str]) -> int:
    """``judge pairwise ...``; pairwise is the only kind."""
    kind, *rest = args or ["--help"]
    if kind in ("-h", "--help"):
        rest = ["--help"]
    elif kind != "pairwise":
        raise UserError(f"unknown kind of judgment {kind}; use bellmask judge pairwise A B")
    _pairwise(parse_command(PairwiseOptions, rest, command="judge pairwise"))
    return 0
