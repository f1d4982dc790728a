"""Judges whose mind is known: outcomes counted by hand, each request sent once, in both orders; and
the likelihood judge against a slow reference, one forward pass per token by transformers."""

from __future__ import annotations

import contextlib
import json
from dataclasses import replace

import pytest
import torch
from counted_progress import Counted
from judge_rules import EveryKth, chooses, longer, shown
from judge_server import VARIABLE, JudgeServer, error, good, script, set_key
from pretrained_tools import save_lm

import bellmask.evaluate.judge as module
from bellmask.evaluate.judge import EndpointJudge, LocalJudge, PairwiseOptions
from bellmask.evaluate.judge_endpoint import (
    Endpoint,
    EndpointError,
    EndpointOptions,
    Transcript,
)
from bellmask.evaluate.judge_prompts import (
    Benchmark,
    JudgeTask,
    Pair,
    PairOutcome,
    open_style,
    pairs_of,
)
from bellmask.evaluate.scorer import TextScore, load_scorer
from bellmask.utils.errors import UserError
from bellmask.utils.store import content_key

WORDS = ["a", "bb", "ccc", "dddd", "a", "ffffff", "g", "hhhhhhhh"]
OTHERS = ["aaa", "b", "ccc", "d", "a", "f", "gg", "h h h h"]
BY_LENGTH = ["loss", "win", "tie", "win", "tie", "win", "loss", "win"]
TASKS = [JudgeTask(f"t{n}", (f"request {n}",), "all", None, n) for n in range(8)]
PAIRS = pairs_of(TASKS, [[word] for word in WORDS], [[word] for word in OTHERS])


@pytest.fixture
def judge_at(monkeypatch, tmp_path):
    """``judge_at(server)``; connections are closed with the test."""
    set_key(monkeypatch)
    with contextlib.ExitStack() as stack:

        def build(server, folder=tmp_path, **named):
            options = EndpointOptions(base_url=server.base_url, key_variable=VARIABLE, **named)
            endpoint = stack.enter_context(Endpoint(options, sleep=lambda seconds: None))
            transcript = Transcript(folder / "transcript.jsonl")
            style = open_style("plain", None, folder)
            return EndpointJudge("j", style, transcript, endpoint.name, endpoint)

        yield build


def results(judged):
    return [one.outcome.result for one in judged]


# --- behind an endpoint ----------------------------------------------------------------------


def test_garbage_is_unreadable_kept_and_not_asked_again(judge_at):
    """Every third request; one thread, so that we know which."""
    rule = EveryKth(chooses(longer), 3, lambda: good("Both are lovely."))
    with JudgeServer(rule) as server:
        judged = judge_at(server, num_threads=1).judge(PAIRS)
        judge = judge_at(server)
        assert judge.judge(PAIRS) == judged
        assert len(server.requests) == 12
    # requests 3, 6, 9, 12 of the six pairs that differ: pairs 2, 3, 5, 6 of those
    bad = (1, 3, 6, 7)
    assert results(judged) == ["unreadable" if n in bad else BY_LENGTH[n] for n in range(8)]
    assert judge.grounds(PAIRS[1])["verdicts"] == ["unreadable", "second"]
    assert judge.grounds(PAIRS[2]) == {"verdicts": [], "requests": []}
    lines = [json.loads(line) for line in judge.transcript.path.read_text().splitlines()]
    by_key = {line["key"]: line["request"]["messages"][-1][1] for line in lines}
    for key, order in zip(judge.grounds(PAIRS[0])["requests"], (("a", "aaa"), ("aaa", "a"))):
        assert shown({"messages": [{"content": by_key[key]}]}) == order


def test_what_fails_for_good_is_an_error_and_the_rest_is_kept(judge_at):
    def reply(body):
        return error(500, "broken") if "ffffff" in str(body) else chooses(longer)(body)

    with JudgeServer(reply) as server:
        with pytest.raises(EndpointError, match=r"2 requests have no answer .*HTTP 500: broken"):
            judge_at(server, max_attempts=2).judge(PAIRS)
        assert len(server.requests) == 10 + 2 * 2
        server.reply = chooses(longer)
        assert results(judge_at(server).judge(PAIRS)) == BY_LENGTH
        assert len(server.requests) == 14 + 2


def test_tasks_that_a_style_cannot_ask_about_are_refused_first(tmp_path, monkeypatch):
    plain = open_style("plain", None, tmp_path)

    def write(one, a_first):
        if one.turn:
            raise UserError("single turns only")
        return plain.write(one, a_first)

    monkeypatch.setattr(module, "open_style", lambda *_: replace(plain, write=write))
    options = PairwiseOptions(a="a", b="b", judge="j", out=str(tmp_path))
    single, double = TASKS[0], JudgeTask("two", ("q", "r"), "all", None, 0)
    module.endpoint_judge(options, Benchmark("b", (single,), "plain"))
    with pytest.raises(UserError, match="single turns only"):
        module.endpoint_judge(options, Benchmark("b", (single, double), "plain"))


def test_a_judge_that_refuses_everything(judge_at):
    with JudgeServer(script(error(413, "too large"))) as server:
        for _ in range(2):
            with pytest.raises(UserError, match="HTTP 413: too large"):
                judge_at(server).judge(PAIRS)
        assert len(server.requests) == 12, "it would be refused again"


# --- a likelihood ----------------------------------------------------------------------------

TEXT = "Question: why does the cat sit on the mat\nAnswer: the cat saw an old dog run. " * 5
TURNS = ("why does the cat sit", "and the dog")


def pair_of(a, b, *earlier, turns=TURNS):
    said_a, said_b = zip(*earlier, (a, b), strict=True)
    return Pair(JudgeTask("0", tuple(turns), "all", None, 0), len(earlier), said_a, said_b)


def slow_log_likelihood(folder, before, answer):
    """Sum over the answer's tokens of log p(token | all before it), each from its own pass."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    given = [tokenizer.bos_token_id, *tokenizer(before, add_special_tokens=False).input_ids]
    said = tokenizer(answer, add_special_tokens=False).input_ids
    total = 0.0
    with torch.no_grad():
        for place, token in enumerate(said):
            row = torch.tensor([given + said[:place]])
            total += float(model(row).logits[0, -1].double().log_softmax(0)[token])
    return total, len(said)


def test_likelihoods_of_a_language_model(tmp_path):
    """GPT-2's architecture with random weights and a context of 64."""
    folder = save_lm(tmp_path / "lm", "gpt2", TEXT, bos_token="<|begin|>")
    judge = LocalJudge(load_scorer(str(folder), device="cpu"), tmp_path / "l.jsonl")
    assert judge.label == "likelihood of lm, not a judgement of quality"
    first, asked = ("the old dog.", "(no) Cats sit!"), "Question: why does the cat sit\nAnswer:"
    second = ("it ran", "it sat")
    pairs = [pair_of(*first), pair_of(*second, ("the mat ", "a dog"))]
    befores = [
        (asked, asked),
        [f"{asked} {said}\n\nQuestion: and the dog\nAnswer:" for said in ("the mat", "a dog")],
    ]
    for one, answers, before in zip(judge.judge(pairs), (first, second), befores, strict=True):
        scores, means = judge.grounds(one.pair), []
        for side, answer, given in zip("ab", answers, before, strict=True):
            score = scores[f"likelihood_{side}"]
            total, count = slow_log_likelihood(folder, given, " " + answer)
            assert score["log_likelihood"] == pytest.approx(total, abs=1e-3)
            assert (score["num_tokens"], score["is_exact"], score["is_cut"]) == (count, True, False)
            means.append(total / count)
        assert one.outcome.result == ("win" if means[0] > means[1] else "loss")

    words = ["the cat", "a dog saw it", "run", "old mat on the old mat", "dog dog"]
    pairs = [pair_of(a, b) for a in words for b in words]
    together = judge.judge(pairs)
    swapped = judge.judge([pair_of(pair.answers_b[0], pair.answers_a[0]) for pair in pairs])
    mirror = {"win": "loss", "loss": "win", "tie": "tie"}
    assert [mirror[one] for one in results(swapped)] == results(together)
    assert results(together).count("tie") == len(words)


class Counting:
    """A scorer that knows how likely it finds what, and what it was asked."""

    name, fingerprint, context, rule = "counting", "f", 100, ""

    def __init__(self, nll_per_word=None, is_merging=False):
        self.prices, self.is_merging = nll_per_word or {}, is_merging
        self.asked = []

    def score(self, samples, *, batch_size=8, progress=None):
        self.asked += [sample[0] for sample in samples]
        found = []
        for (text,) in samples:
            words = text.split()
            kept = words[: self.context]
            ids = [len(word) for word in kept]
            nll = sum(self.prices.get(word, 1.0) for word in kept)
            ids = [*ids[:-2], 0] if self.is_merging else ids
            found.append(TextScore(nll, len(kept), ids, len(kept) < len(words)))
        return found


@pytest.fixture
def outcome(tmp_path):
    def judged(a, b, measure="per-token", **prices):
        path = tmp_path / content_key(a, b, measure, prices)
        return LocalJudge(Counting(prices), path, measure).judge([pair_of(a, b)])[0].outcome

    return judged


def test_per_token_and_raw_can_disagree(outcome, tmp_path):
    """Two tokens of 2 nats against five of 1: likelier per token, less likely as a whole."""
    assert outcome("x x", "y y y y y", x=2.0) == PairOutcome("loss", 0.0)
    assert outcome("x x", "y y y y y", "raw", x=2.0) == PairOutcome("win", 1.0)
    raw, mean = (LocalJudge(Counting(), tmp_path / "l", m).about([]) for m in ("raw", "per-token"))
    assert raw != mean


def test_ties_and_empty_answers(outcome):
    tie = PairOutcome("tie", 0.5)
    assert outcome("x", "y", x=1.0 + 1e-7) == tie
    assert outcome("x " * 10, "y " * 10, "raw", x=1.0 + 5e-6) == tie, "sums are less exact"
    assert outcome("x", "y", x=1.001) == PairOutcome("loss", 0.0)
    for measure in ("per-token", "raw"):
        assert outcome("", "x", measure).result == "loss"
        assert outcome("x", " \n", measure).result == "win"
        assert outcome("", " ", measure) == outcome("", "", measure) == tie


def test_a_request_that_fills_the_context_cannot_be_judged(tmp_path):
    scorer = Counting()
    scorer.context = 12  # the request has 7 words
    long = pair_of("x", "y", turns=["w " * 20])
    judge = LocalJudge(scorer, tmp_path / "l.jsonl")
    cut, fits, none = judge.judge([pair_of("x " * 9, "y"), pair_of("x", "y z"), long])
    scores = judge.grounds(cut.pair)
    assert (scores["likelihood_a"]["num_tokens"], scores["likelihood_a"]["is_cut"]) == (5, True)
    assert not scores["likelihood_b"]["is_cut"]
    assert not judge.grounds(fits.pair)["likelihood_a"]["is_cut"]
    assert none.outcome == PairOutcome("unreadable", None)


def test_each_text_is_scored_once_and_merged_tokens_are_marked(tmp_path):
    pairs = [pair_of("x", "y"), pair_of("y", "x"), pair_of("x", "")]
    for is_merging in (False, True):
        scorer = Counting(is_merging=is_merging)
        judge = LocalJudge(scorer, tmp_path / f"{is_merging}.jsonl")
        judge.judge(pairs)
        assert judge.grounds(pairs[0])["likelihood_a"]["is_exact"] is not is_merging
        assert len(scorer.asked) == len(set(scorer.asked)) == 3


def test_likelihoods_are_computed_once(tmp_path, monkeypatch):
    """Words cost a nat each, so none is likelier; "dddd" costs less, "ffffff" more."""
    monkeypatch.setattr(module, "LOCAL_CHUNK", 3)
    path, progress, prices = tmp_path / "l.jsonl", Counted(), {"dddd": 0.5, "ffffff": 2.0}
    first, second = Counting(prices), Counting(prices)
    judge = LocalJudge(first, path)
    judged = judge.judge([*PAIRS, *PAIRS], progress)
    expected = ["tie", "tie", "tie", "win", "tie", "loss", "tie", "tie"]
    assert results(judged) == expected * 2
    assert len(first.asked) == len(set(first.asked))
    assert (progress.totals, progress.seen) == ([8], [3, 6, 8])
    with path.open("a") as stream:
        stream.write('{"key"')
    (more,) = pairs_of([JudgeTask("t99", ("request 99",), "all", None, 99)], [["ffffff"]], [["y"]])
    again = LocalJudge(second, path)
    assert results(again.judge([more, *PAIRS])) == ["loss", *expected]
    assert all("request 99" in text for text in second.asked)
    assert judge.grounds(PAIRS[3])["likelihood_a"]["log_likelihood"] == -0.5
    assert judge.cautions(PAIRS) == []


def test_cautions_of_likelihoods(tmp_path):
    scorer = Counting(is_merging=True)
    scorer.context = 7  # "Question: request 7 Answer:" and three words
    judge = LocalJudge(scorer, tmp_path / "l.jsonl")
    judge.judge(PAIRS)
    cut, inexact = judge.cautions(PAIRS)
    assert cut.startswith("1 of 8 pairs did not fit")
    assert inexact.startswith("In 8 of 8 pairs")
