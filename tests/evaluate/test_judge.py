"""Answers against the answerer asked directly, files of outputs by hand; judges whose mind is
known; the likelihood judge against a slow reference, one forward pass per token."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from continuation_tools import token_nll
from judge_server import JudgeServer, by_length, error, set_key
from pretrained_tools import save_lm
from tuned_runs import tuned

import bellmask.evaluate.judge as module
from bellmask.data.chat_templates import Message
from bellmask.evaluate.judge import EndpointJudge, LocalJudge
from bellmask.evaluate.judge_endpoint import Budget, EndpointError, EndpointOptions, Transcript
from bellmask.evaluate.judge_prompts import (
    VALUES,
    Benchmark,
    JudgeTask,
    Pair,
    RunSide,
    open_style,
    pairs_of,
    read_outputs,
)
from bellmask.evaluate.scorer import TextScore, load_scorer
from bellmask.generate.answers import Answerer, Question
from bellmask.generate.settings import Sampling
from bellmask.model.pretrained import Backbone
from bellmask.run import load_run
from bellmask.utils.errors import UserError


def benchmark(*turns):
    tasks = [JudgeTask(f"t{n}", said, "all", None, n) for n, said in enumerate(turns)]
    return Benchmark("some", tuple(tasks), "plain")


FIVE = benchmark(("Say 1",), ("Say 2", "Go"), ("Say 3, slowly", "Go on"), ("Say 1",), ("Say 5",))
SAMPLING = Sampling(steps=3)


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


# --- answers of runs -------------------------------------------------------------------------


@pytest.fixture(scope="module")
def runs(zoo, tmp_path_factory):
    """Fine-tuned on conversations, on single prompts, on nothing, and an ARM."""
    folder = tmp_path_factory.mktemp("answering")
    made = {"turns": ("bell", True), "single": ("bell", False), "text": ("bell", None)}
    made |= {"arm": ("arm", None)}
    paths = {name: tuned(zoo / run, folder / name, kind) for name, (run, kind) in made.items()}
    return {name: load_run(path) for name, path in paths.items()}


@pytest.fixture
def side(runs, tmp_path):
    """``side("turns")``: answers of 6 tokens in 3 steps, kept in the test's folder."""

    def build(name="turns", run=None, **changes):
        named = {"sampling": SAMPLING, "length": 6, **changes}
        return RunSide(name, run or runs[name], tmp_path / "answers", **named)

    return build


@pytest.mark.parametrize("name", ["turns", "single", "arm"])
def test_answers_are_those_of_the_run_asked_one_by_one(name, side, runs):
    """By the task's number, whatever else is asked; a second turn after the first's answer."""
    found = side(name).answers(FIVE, [3]).by_seed[3]
    answerer = Answerer(runs[name])
    sampling = SAMPLING.for_causal() if name == "arm" else SAMPLING
    for task, said in zip(FIVE.tasks, found, strict=True):
        earlier = []
        for turn, (asked, text) in enumerate(zip(task.turns, said, strict=True)):
            question = Question((*earlier, Message("user", asked)), name == "turns" or turn > 0)
            number = turn * 2**20 + task.index
            (alone,) = answerer.answer(
                [question], length=6, sampling=sampling, seed=3, samples=[number]
            )
            assert text == alone.text
            earlier += [Message("user", asked), Message("assistant", text)]
    assert len(set(found)) == len(FIVE.tasks), "the same request twice has two answers"


def test_nothing_is_written_twice_whatever_is_asked_first(side, monkeypatch):
    path = side()._store.path
    everything = side().answers(FIVE, [0, 1]).by_seed
    assert everything[0] != everything[1]
    assert len(lines(path)) == 14
    path.unlink()
    some = replace(FIVE, tasks=(FIVE.tasks[4], FIVE.tasks[2]))
    assert side().answers(some, [0]).by_seed[0] == [everything[0][4], everything[0][2]]
    assert side().answers(FIVE, [0, 1]).by_seed == everything, "some of before, others now"
    assert len(lines(path)) == 14
    monkeypatch.delattr(Answerer, "answer")
    assert side().answers(FIVE, [0, 1]).by_seed == everything


def test_what_decides_an_answer_has_a_file_of_its_own(side, runs):
    """Other lengths and sampling; the same weights asked in other words."""
    templates = ("{{ messages[0].content }}", "{{ messages[0].content }}!")
    asked = [replace(runs["turns"], backbone=Backbone({}, text)) for text in templates]
    others = [side(), side(length=7), side(sampling=Sampling(steps=4)), side("single")]
    others += [side(run=run) for run in asked]
    assert len({other.fingerprint for other in others}) == len(others)
    for one, same in (
        (side(sampling=Sampling()), side(sampling=Sampling(steps=64))),
        # steps and rules are the masked models'; they do not even change a causal one's file
        (side("arm", sampling=Sampling(rule="most_confident", steps=3)), side("arm")),
    ):
        assert one.fingerprint == same.fingerprint
    with pytest.raises(UserError, match="96"):
        side(length=96)


def test_cautions_of_answers(side):
    short, long = benchmark(("Say 1",)), benchmark(("Say 2", "Go"), ("Say " + "x" * 200,))
    for name, asked, expected in (
        ("turns", FIVE, ""),
        ("single", FIVE, "fine-tuned on single requests"),
        ("single", short, ""),
        ("text", short, "not fine-tuned"),
        ("turns", long, "2 of 6 requests did not fit"),
    ):
        found = side(name).answers(asked, [0, 1]).cautions
        assert len(found) == bool(expected)
        assert expected in "".join(found)


# --- answers of files ------------------------------------------------------------------------


def write(path, *records):
    path.write_text(json.dumps(records))
    return path


def test_outputs_go_to_their_tasks_whatever_their_order(tmp_path):
    tasks = benchmark(("Add.\n\n1 2",), ("Say 2", "Go"), ("Say 2", "Stop"), ("Hm", "Well"))
    path = write(
        tmp_path / "out.json",
        {"turns": ["Say 2", "Stop"], "outputs": ["c", "d"]},
        {"prompt": "Hm", "response": ["e", "\ud800"]},
        {"instruction": "Add.", "input": "1 2", "output": ""},
        {"turns": ["Say 2", "Go"], "outputs": ["a", "b"]},
        {"question": "Say 2", "answer": ["not", "this"]},
    )
    side = read_outputs(path)
    found = side.answers(tasks, [7]).by_seed[7]
    assert found == [("",), ("a", "b"), ("c", "d"), ("e", "?")]
    assert side.name == "out.json"
    with pytest.raises(UserError, match="0 answers to the 1 turns of task t0"):
        side.answers(benchmark(("Other",)), [0])
    with pytest.raises(UserError, match=r"out\.json has 2 answers to the 3 turns of task t0"):
        side.answers(benchmark(("Say 2", "Go", "On")), [0])


@pytest.mark.parametrize(
    ("records", "named"),
    [
        ([], "no outputs"),
        ([{"instruction": "Say 1"}], "columns instruction"),
        ([{"text": "Say 1", "output": "a"}], "columns text, output"),
        ([{"instruction": "Say 1", "output": 3}], "record 1: the answer"),
        ([{"instruction": "Say 1", "output": answer} for answer in "ab"], "record 2"),
    ],
)
def test_files_that_hold_something_else(tmp_path, records, named):
    with pytest.raises(UserError, match=named):
        read_outputs(write(tmp_path / "o.json", *records))


# --- a judge behind an endpoint --------------------------------------------------------------

WORDS = ["a", "bb", "ccc", "dddd", "a", "ffffff", "g", "hhhhhhhh"]
OTHERS = ["aaa", "b", "ccc", "d", "a", "f", "gg", "h h h h"]
BY_LENGTH = ["loss", "win", "tie", "win", "tie", "win", "loss", "win"]
TASKS = benchmark(*((f"request {n}",) for n in range(8))).tasks
PAIRS = pairs_of(TASKS, [(word,) for word in WORDS], [(word,) for word in OTHERS])


@pytest.fixture
def judge_at(monkeypatch, tmp_path):
    set_key(monkeypatch)
    monkeypatch.setattr("bellmask.evaluate.judge_endpoint.back_off", lambda attempt: 0.0)

    def build(server, **named):
        options = EndpointOptions(base_url=server.base_url, **named)
        transcript = Transcript(tmp_path / "transcript.jsonl")
        style = open_style("plain", tmp_path)
        return EndpointJudge("j", style, options, Budget(None, None, "j"), transcript)

    return build


def results(judged):
    return [one.result for one in judged]


def test_failures_are_asked_again_and_refusals_are_not(judge_at):
    def reply(body):
        return error(500, "broken") if "ffffff" in str(body) else by_length(body)

    with JudgeServer(reply) as server:
        with pytest.raises(EndpointError, match=r"2 requests failed .*HTTP 500: broken"):
            judge_at(server, max_attempts=2).judge(PAIRS)
        assert len(server.requests) == 10 + 2 * 2
        server.reply = by_length
        assert results(judge_at(server).judge(PAIRS)) == BY_LENGTH
        assert len(server.requests) == 14 + 2
    with JudgeServer(lambda body: error(413, "too large")) as server:
        for _ in range(2):
            with pytest.raises(UserError, match="HTTP 413: too large"):
                judge_at(server).judge(PAIRS)
        assert len(server.requests) == 12


# --- a likelihood ----------------------------------------------------------------------------

TEXT = "Question: why does the cat sit on the mat\nAnswer: the cat saw an old dog run. " * 5
TURNS = ("why does the cat sit", "and the dog")


def pair_of(a, b, *earlier, turns=TURNS):
    said_a, said_b = zip(*earlier, (a, b), strict=True)
    return Pair(JudgeTask("0", tuple(turns), "all", None, 0), len(earlier), said_a, said_b)


def test_likelihoods_of_a_language_model(tmp_path):
    """GPT-2's architecture with random weights and a context of 64."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = save_lm(tmp_path / "lm", "gpt2", TEXT, bos_token="<|begin|>")
    judge = LocalJudge(load_scorer(str(folder), device="cpu"), tmp_path / "l.jsonl")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    def encode(text):
        return tokenizer(text, add_special_tokens=False).input_ids

    assert judge.label == "likelihood of lm, not a judgment of quality"
    answers, asked = ("it ran", "(no) Cats sit!"), "Question: why does the cat sit\nAnswer:"
    (found,) = judge.judge([pair_of(*answers, ("the mat ", "a dog"))])
    means = []
    for score, earlier, answer in zip(found.grounds.values(), ("the mat", "a dog"), answers):
        before = encode(f"{asked} {earlier}\n\nQuestion: and the dog\nAnswer:")
        said = encode(f" {answer}")
        nll = token_nll(model, [tokenizer.bos_token_id, *before, *said])
        total, count = -sum(nll[len(before) :]), len(said)
        assert score["log_likelihood"] == pytest.approx(total, abs=1e-3)
        assert (score["num_tokens"], score["is_exact"], score["is_cut"]) == (count, True, False)
        means.append(total / count)
    assert found.result == ("win" if means[0] > means[1] else "loss")


class Counting:
    """A scorer that knows how likely it finds what, and what it was asked."""

    name, fingerprint = "counting", "f"

    def __init__(self, nll_per_word=None, is_merging=False, context=100):
        self.prices, self.is_merging, self.context = nll_per_word or {}, is_merging, context
        self.asked = []

    def score(self, samples):
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


@pytest.mark.parametrize(
    ("a", "b", "price", "expected"),
    [
        ("x x", "y y y y y", 2.0, "loss"),  # less likely per token
        ("x", "y", 1.0 + 1e-7, "tie"),
        ("x " * 10, "y " * 10, 1.0 + 5e-6, "tie"),  # sums are less exact
        ("x", "y", 1.001, "loss"),
        ("y", "x", 1.001, "win"),
        ("", "x", 9.0, "loss"),
        ("x", " \n", 9.0, "win"),
        ("", " ", 9.0, "tie"),
        ("x", "x", 9.0, "tie"),
        ("x " * 99, "y", 2.0, "loss"),  # cut
    ],
)
def test_the_likelier_answer_wins(a, b, price, expected, tmp_path):
    """A word costs a nat; "x" has a price of its own."""
    judge = LocalJudge(Counting({"x": price}), tmp_path / "l.jsonl")
    (found,) = judge.judge([pair_of(a, b)])
    assert (found.result, found.preference) == (expected, VALUES[expected])
    is_cut = [score["is_cut"] for score in found.grounds.values()]
    assert is_cut == [len(a) > 100, False]


def test_likelihoods_are_computed_once(tmp_path):
    """Words cost a nat each, so none is likelier; "dddd" costs less, "ffffff" more."""
    path, prices = tmp_path / "l.jsonl", {"dddd": 0.5, "ffffff": 2.0}
    first, second = Counting(prices), Counting(prices)
    judged = LocalJudge(first, path).judge([*PAIRS, *PAIRS])
    expected = ["tie", "tie", "tie", "win", "tie", "loss", "tie", "tie"]
    assert results(judged) == expected * 2
    assert len(first.asked) == 4 * len(PAIRS), "with and without each answer, once"
    assert judged[3].grounds["likelihood_a"]["log_likelihood"] == -0.5
    (more,) = pairs_of([JudgeTask("t9", ("request 99",), "all", None, 9)], [("ffffff",)], [("y",)])
    again = LocalJudge(second, path)
    assert results(again.judge([more, *PAIRS])) == ["loss", *expected]
    assert all("request 99" in text for text in second.asked)
    assert again.about(judged)[1] == []


def test_cautions_of_likelihoods(tmp_path):
    """A context of "Question: request 7 Answer:" and three words."""
    judge = LocalJudge(Counting(is_merging=True, context=7), tmp_path / "l.jsonl")
    judged = judge.judge([*PAIRS, pair_of("x", "y", turns=["w " * 20])])
    cut, inexact = judge.about(judged)[1]
    assert cut.startswith("2 of 9 pairs did not fit into the judge's context: ")
    assert inexact.startswith("8 of 9 pairs are approximate: ")
    assert (judged[-1].result, judged[-1].preference) == ("unreadable", None)


# --- tables ----------------------------------------------------------------------------------


def test_tables_and_notes():
    """One seed has no deviation; what rests on no data is hidden."""

    def rate(mean, deviation=None, error=None):
        return {"mean": mean, "deviation": deviation, "error": error}

    counts = {"wins": 3, "losses": 1, "ties": 2, "unreadable": 3}
    result = {"counts": counts, "mean_length_a": 12.4, "mean_length_b": 100.6}
    over = {
        "win_rate": rate(0.7827, 0.0137, 0.05),
        "non_tie": rate(0.5, 0.0, None),
        "length_controlled": rate(None),
    }
    asked = {"num_requests": 1200, "tokens_in": 34567, "tokens_out": 89, "usd": 0.0169}
    numbers = {name: {"name": name} for name in ("a", "b", "benchmark")} | {
        "num_tasks": 80,
        "judge": {"label": "j", "is_local": False, "first_share": 0.625, **asked},
        "seeds": [0, 1],
        "over_seeds": over,
        "results": [result | {"length_controlled": {"note": "same"}}] * 2,
        "cautions": ["x was never fine-tuned."],
    }
    rates, outcomes = module.tables(numbers)
    shown_rates = [["78.27 ± 1.37", "5.00"], ["50.00 ± 0.00", "-"], ["-", "-"]]
    assert [row[1:] for row in rates.rows] == shown_rates
    assert outcomes.rows == [[seed, "3", "1", "2", "3", "12", "101"] for seed in "01"]
    text = "\n".join(module.notes(numbers))
    for words in ("benchmark, 80 tasks", "62.50 %", "6 pairs without", "never fine-tuned", "same"):
        assert text.count(words) == 1
    assert "1,200 requests: 34,567 tokens in, 89 out, $0.0169" in text
