"""Judges whose mind is known: outcomes counted by hand, each request sent once, in both orders."""

from __future__ import annotations

import contextlib
import json
import math
import statistics
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from judge_rules import EveryKth, by_hash, by_hash_of_both, chooses, longer, shown, shown_first
from judge_server import VARIABLE, Drop, JudgeServer, Response, error, good, set_key

import bellmask.judge.pairwise as module
from bellmask.errors import UserError
from bellmask.judge.benchmarks import Benchmark, Task
from bellmask.judge.endpoint import Endpoint
from bellmask.judge.endpoint_options import EndpointOptions
from bellmask.judge.failures import EndpointError
from bellmask.judge.local import AnswerScore, LikelihoodJudge, LocalVerdict
from bellmask.judge.numbers import seed_numbers, summarise
from bellmask.judge.pairwise import EndpointJudge, LocalJudge
from bellmask.judge.prompts import open_style
from bellmask.judge.published_length_control import Calibration
from bellmask.judge.transcript import Transcript
from bellmask.judge.verdicts import Judged, Outcome, Pair, Result

WORDS = ["a", "bb", "ccc", "dddd", "a", "ffffff", "g", "hhhhhhhh"]
OTHERS = ["aaa", "b", "ccc", "d", "a", "f", "gg", "h h h h"]
"""Shorter, longer, the same, longer, the same, longer, shorter, longer."""


def pair(number: int, a: str, b: str) -> Pair:
    task = Task(f"t{number}", (f"request {number}",), "all", None, number)
    return Pair(task, 0, (a,), (b,))


PAIRS = [pair(number, a, b) for number, (a, b) in enumerate(zip(WORDS, OTHERS, strict=True))]


@pytest.fixture(autouse=True)
def _key(monkeypatch: pytest.MonkeyPatch) -> None:
    set_key(monkeypatch)


JudgeAt = Callable[..., EndpointJudge]


@pytest.fixture
def judge_at() -> Iterator[JudgeAt]:
    """``judge_at(server, folder)``; connections are closed with the test."""
    with contextlib.ExitStack() as stack:

        def build(server: JudgeServer, folder: Path, **named: Any) -> EndpointJudge:
            options = EndpointOptions(base_url=server.base_url, key_variable=VARIABLE, **named)
            endpoint = stack.enter_context(Endpoint(options, sleep=lambda seconds: None))
            transcript = Transcript(folder / "transcript.jsonl")
            style = open_style("plain", None, folder)
            return EndpointJudge("j", style, transcript, endpoint.name, endpoint)

        yield build


def results(judged: Sequence[Judged]) -> list[Result]:
    return [one.outcome.result for one in judged]


def by_hand(pick: Callable[[str, str], str], pairs: Sequence[Pair] = PAIRS) -> list[str]:
    """What both orders come to, told in another way: points for A."""
    found = []
    for one in pairs:
        a, b = one.answers_a[0], one.answers_b[0]
        points = {"A": 1, "tie": 0, "B": -1}[pick(a, b)] - {"A": 1, "tie": 0, "B": -1}[pick(b, a)]
        found.append({2: "win", -2: "loss"}.get(0 if a == b else points, "tie"))
    return found


@pytest.mark.parametrize("pick", [longer, shown_first, by_hash, by_hash_of_both])
def test_outcomes_of_a_judge_with_a_rule(
    judge_at: JudgeAt, tmp_path: Path, pick: Callable[[str, str], str]
) -> None:
    with JudgeServer(chooses(pick)) as server:
        judge = judge_at(server, tmp_path)
        judged = judge.judge(PAIRS)
        assert results(judged) == by_hand(pick)
        again = judge_at(server, tmp_path)
        assert again.judge(PAIRS) == judged
    seen = Counter(shown(body) for body in server.requests)
    different = [(a, b) for a, b in zip(WORDS, OTHERS, strict=True) if a != b]
    assert seen == Counter([*different, *((b, a) for a, b in different)])


def test_expected_counts_by_hand(judge_at: JudgeAt, tmp_path: Path) -> None:
    """Written out, so that no helper of this file can hide a mistake."""
    with JudgeServer(chooses(longer)) as server:
        judge = judge_at(server, tmp_path)
        assert results(judge.judge(PAIRS)) == [
            "loss", "win", "tie", "win", "tie", "win", "loss", "win",
        ]  # fmt: skip
        assert judge.about(PAIRS)["first_share"] == 0.5
        about = judge.about(PAIRS)
    assert (about["num_requests"], about["tokens_in"], about["tokens_out"]) == (12, 1200, 120)
    with JudgeServer(chooses(shown_first)) as server:
        judge = judge_at(server, tmp_path / "other")
        assert results(judge.judge(PAIRS)) == ["tie"] * 8
        assert judge.about(PAIRS)["first_share"] == 1.0


def test_garbage_is_unreadable_kept_and_not_asked_again(judge_at: JudgeAt, tmp_path: Path) -> None:
    """Every third request; one thread, so that we know which."""
    rule = EveryKth(chooses(longer), 3, lambda: good("Both are lovely."))
    with JudgeServer(rule) as server:
        judged = judge_at(server, tmp_path, num_threads=1).judge(PAIRS)
        judge = judge_at(server, tmp_path)
        assert judge.judge(PAIRS) == judged
        assert len(server.requests) == 12
    # requests 3, 6, 9, 12 of the six pairs that differ: pairs 2, 3, 5, 6 of those
    assert results(judged) == [
        "loss", "unreadable", "tie", "unreadable", "tie", "win", "unreadable", "unreadable",
    ]  # fmt: skip
    assert judge.grounds(PAIRS[1])["verdicts"] == ["unreadable", "second"]


@pytest.mark.parametrize(
    "instead",
    [
        lambda: error(429, "slow down", {"Retry-After": "0"}),
        lambda: error(500, "oh"),
        lambda: (200, {}, "<html>"),
        pytest.param(lambda: (_ for _ in ()).throw(Drop('{"choi')), id="dropped"),
    ],
)
def test_faults_change_no_outcome(
    judge_at: JudgeAt, tmp_path: Path, instead: Callable[[], Response]
) -> None:
    rule = EveryKth(chooses(longer), 3, instead)
    with JudgeServer(rule) as server:
        judged = judge_at(server, tmp_path).judge(PAIRS)
    assert results(judged) == by_hand(longer)
    lines = [json.loads(line) for line in (tmp_path / "transcript.jsonl").read_text().splitlines()]
    assert len(lines) == len({line["key"] for line in lines}) == 12
    assert sum(line["attempts"] for line in lines) == len(server.requests) == 12 + 12 // 3


def test_what_fails_for_good_is_an_error_and_the_rest_is_kept(
    judge_at: JudgeAt, tmp_path: Path
) -> None:
    def reply(body: dict[str, Any]) -> Response:
        return error(500, "broken") if "ffffff" in str(body) else chooses(longer)(body)

    with JudgeServer(reply) as server:
        with pytest.raises(EndpointError, match=r"2 requests have no answer .*HTTP 500: broken"):
            judge_at(server, tmp_path, max_attempts=2).judge(PAIRS)
        assert len(server.requests) == 10 + 2 * 2
        server.reply = chooses(longer)
        assert results(judge_at(server, tmp_path).judge(PAIRS)) == by_hand(longer)
        assert len(server.requests) == 14 + 2


def test_a_pair_the_endpoint_refuses_is_unreadable(judge_at: JudgeAt, tmp_path: Path) -> None:
    """Too long for the judge, say: it would be refused every time, so the others go on."""

    def reply(body: dict[str, Any]) -> Response:
        if shown(body)[0] == "hhhhhhhh":
            return (
                400,
                {},
                json.dumps({"error": {"message": "x", "code": "context_length_exceeded"}}),
            )
        return chooses(longer)(body)

    with JudgeServer(reply) as server:
        judge = judge_at(server, tmp_path)
        assert results(judge.judge(PAIRS)) == [*by_hand(longer)[:-1], "unreadable"]
        (line,) = judge.cautions(PAIRS)
        assert line.startswith("The judge refused 1 requests (HTTP 400: x)")
        assert judge.about(PAIRS)["num_requests"] == 11
        assert judge.cautions(PAIRS[:-1]) == [], "other pairs were not refused"
        assert len(server.requests) == 12
        again = judge_at(server, tmp_path)
        assert results(again.judge(PAIRS)) == results(judge.judge(PAIRS))
        assert again.cautions(PAIRS) == [line]
        assert len(server.requests) == 12, "it would be refused again"
        server.reply = lambda body: (413, {}, "too large")
        message = r"answers none of the requests: HTTP 413: too large; .* delete those lines"
        for _ in range(2):
            with pytest.raises(UserError, match=message):
                judge_at(server, tmp_path / "none").judge(PAIRS)
        assert len(server.requests) == 24


def test_a_judge_that_does_not_take_a_setting_is_told(judge_at: JudgeAt, tmp_path: Path) -> None:
    """By the records: also of answers that were there before. A newer name is no change."""

    def reply(body: dict[str, Any]) -> Response:
        for name in ("max_tokens", "logprobs", "temperature"):
            if name in body:
                return error(400, f"{name} is not supported")
        return chooses(longer)(body)

    with JudgeServer(chooses(longer)) as server:
        judge = judge_at(server, tmp_path)
        judge = replace(judge, style=replace(judge.style, logprobs=5))
        judge.judge(PAIRS[:2])
        server.reply = reply
        judge.judge(PAIRS)
        assert len(server.requests) > 12
    assert judge.cautions(PAIRS[:2]) == []
    for place in (judge.transcript, Transcript(tmp_path / "transcript.jsonl")):
        (line,) = replace(judge, transcript=place).cautions(PAIRS)
        assert line == "The judge does not take temperature, logprobs: asked without."


def test_probabilities_are_averaged_over_both_orders(judge_at: JudgeAt, tmp_path: Path) -> None:
    """AlpacaEval's way: p(m) of the first shown is 0.9 for "bb", else 0.3."""

    def reply(body: dict[str, Any]) -> Response:
        first = body["messages"][0]["content"]
        chance = 0.9 if first == "bb" else 0.3
        assert body["top_logprobs"] == 5
        tops = {"m": math.log(chance) - 1, "M": math.log(1 - chance) - 1, "The": -0.5}
        return good("m", logprobs=tops)

    alpaca = open_style("plain", None, tmp_path)
    from bellmask.judge.prompts import read_alpaca

    style = replace(
        alpaca,
        write=lambda one, a_first: (("user", (one.answers_a if a_first else one.answers_b)[0]),),
        read=read_alpaca,
        logprobs=5,
    )
    with JudgeServer(reply) as server:
        judge = replace(judge_at(server, tmp_path), style=style)
        judged = judge.judge(PAIRS[:2])
    assert [one.outcome.preference for one in judged] == pytest.approx([0.5, (0.9 + 0.7) / 2])
    assert results(judged) == ["tie", "win"]


def test_tasks_that_a_style_cannot_ask_about_are_refused_first(
    judge_at: JudgeAt, tmp_path: Path
) -> None:
    two = Task("two", ("q", "r"), "all", None, 0)

    def write(one: Pair, a_first: bool) -> Any:
        if len(one.task.turns) != 1:
            raise UserError("single turns only")
        return (("user", "x"),)

    with JudgeServer() as server:
        judge = judge_at(server, tmp_path)
        judge.check(Benchmark("b", (two,), "plain"))
        strict = replace(judge, style=replace(judge.style, write=write))
        with pytest.raises(UserError, match="single turns only"):
            strict.check(Benchmark("b", (PAIRS[0].task, two), "plain"))
        assert not server.requests


def test_grounds_lead_to_the_transcript(judge_at: JudgeAt, tmp_path: Path) -> None:
    with JudgeServer(chooses(longer)) as server:
        judge = judge_at(server, tmp_path)
        judge.judge(PAIRS)
    found = judge.grounds(PAIRS[0])
    assert found["verdicts"] == ["second", "first"]
    lines = [json.loads(line) for line in (tmp_path / "transcript.jsonl").read_text().splitlines()]
    by_key = {line["key"]: line["request"]["messages"][-1][1] for line in lines}
    for key, order in zip(found["requests"], (("a", "aaa"), ("aaa", "a")), strict=True):
        assert shown({"messages": [{"content": by_key[key]}]}) == order
    assert judge.grounds(PAIRS[2]) == {"verdicts": [], "requests": []}


# --- a likelihood ----------------------------------------------------------------------------


class Longest(LikelihoodJudge):
    """Finds longer answers likelier; counts what it is asked."""

    def __init__(self) -> None:
        self.label, self.fingerprint = "likelihood of a ruler", "ruler"
        self.asked: list[Pair] = []

    def judge(self, pairs: Sequence[Pair], **_: Any) -> list[LocalVerdict]:  # type: ignore[override]
        self.asked += pairs
        found = []
        for one in pairs:
            a, b = (len(said[-1]) for said in (one.answers_a, one.answers_b))
            value = 0.5 if a == b else float(a > b)
            outcome = Outcome({0.5: "tie", 1.0: "win", 0.0: "loss"}[value], value)  # type: ignore[arg-type]
            scores = [AnswerScore(-1.0, n, n != 8, n == 6) for n in (a, b)]
            found.append(LocalVerdict(outcome, *scores))
        return found


def test_likelihoods_are_computed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LOCAL_CHUNK", 3)
    path, first, told = tmp_path / "l.jsonl", Longest(), []
    judge = LocalJudge(first, path)
    judged = judge.judge([*PAIRS, *PAIRS], lambda done, total: told.append((done, total)))
    assert results(judged) == by_hand(longer) * 2
    assert first.asked == PAIRS
    assert told == [(3, 8), (6, 8), (8, 8)]
    with path.open("a") as stream:
        stream.write('{"key"')
    second = Longest()
    more = pair(99, "x", "yy")
    assert results(LocalJudge(second, path).judge([more, *PAIRS])) == ["loss", *by_hand(longer)]
    assert second.asked == [more]
    assert judge.label == "likelihood of a ruler"
    assert judge.grounds(PAIRS[0])["likelihood_b"]["num_tokens"] == 3
    lines = judge.cautions(PAIRS)
    assert lines[0].startswith("1 of 8 pairs did not fit")
    assert "the end of the answer was cut off" in lines[0]
    assert lines[1].startswith("In 1 of 8 pairs")


# --- numbers ---------------------------------------------------------------------------------


def judged_as(values: str, category: str = "all") -> list[Judged]:
    """``"wlt?"``: a win, a loss, a tie and something unreadable, in answers of other lengths."""
    names: dict[str, tuple[Result, float | None]] = {
        "w": ("win", 1.0), "l": ("loss", 0.0), "t": ("tie", 0.5), "?": ("unreadable", None),
    }  # fmt: skip
    found = []
    for number, letter in enumerate(values):
        task = Task(str(number), ("q",), category, None, number)
        a, b = "x" * (number % 3 + 1), "y" * (number % 2 + 1)
        found.append(Judged(Pair(task, 0, (a,), (b,)), Outcome(*names[letter])))
    return found


def test_numbers_of_a_seed() -> None:
    found = seed_numbers(judged_as("wwlt?w"), None)
    assert found["counts"] == {"wins": 3, "losses": 1, "ties": 1, "unreadable": 1}
    assert found["win_rate"]["value"] == pytest.approx(3.5 / 5)
    assert found["non_tie"]["value"] == pytest.approx(3 / 4)
    assert found["mean_length_a"] == pytest.approx((1 + 2 + 3) / 3)
    assert found["mean_length_b"] == pytest.approx(1.5)
    assert "published_length_controlled" not in found
    nothing = seed_numbers(judged_as("??"), None)
    assert math.isnan(nothing["length_controlled"]["value"])
    assert math.isnan(nothing["win_rate"]["value"])


def test_a_rate_at_equal_length_that_no_answer_is_near_says_so() -> None:
    short = [
        replace(one, pair=replace(one.pair, answers_b=("y" * (5 + number),)))
        for number, one in enumerate(judged_as("wlwl"))
    ]
    found = seed_numbers(short, None)["length_controlled"]
    assert "all shorter than B's" in found["note"]
    assert found["note"].endswith("the fitted rate is in judge.json only")
    assert 0 < found["value"] < 1
    assert not found["is_usable"]
    sound = seed_numbers(judged_as("wlwlwl"), None)
    assert sound["length_controlled"]["note"] is None
    assert sound["length_controlled"]["is_usable"]
    separated = seed_numbers(judged_as("wwwwww"), None)
    assert "separate perfectly" in separated["length_controlled"]["note"]
    assert not separated["length_controlled"]["is_usable"]
    both = [judged_as("wlwlwl"), judged_as("wwwwww")]
    for results, is_usable in (([sound, sound], True), ([sound, separated], False)):
        assert summarise(results, both)["length_controlled"]["is_usable"] is is_usable


def test_a_length_control_that_cannot_be_had_does_not_lose_the_rest() -> None:
    import numpy as np

    files = Calibration(dict.fromkeys(range(9), 0.0), np.zeros((1, 3)), np.zeros(1), {})
    found = seed_numbers(judged_as("wl"), files)
    assert found["non_tie"]["value"] == 0.5
    assert "at least 5" in found["published_length_controlled"]["note"]
    assert math.isnan(found["published_length_controlled"]["value"])


def over(*seeds: str) -> dict[str, Any]:
    judged = [judged_as(values) for values in seeds]
    return summarise([seed_numbers(one, None) for one in judged], judged)


def test_outcomes_that_agree_are_no_certainty() -> None:
    """An error of 0 is shown from 20 tasks on only; seeds that disagree are not each certain."""
    for seeds in (("ww", "ll"), ("ww",), ("w" * 19,)):
        found = over(*seeds)
        assert math.isnan(found["non_tie"]["error"])
        assert math.isnan(found["win_rate"]["error"])
        assert math.isnan(found["by_turn"]["1"]["win_rate"]["error"])
    assert over("w" * 20)["non_tie"]["error"] == 0
    assert math.isnan(over("w" * 19 + "t")["non_tie"]["error"]), "19 tasks have a winner"
    # a seed of wins only is no certainty when the other one lost: means of each task over seeds
    found = over("www", "wll")
    means = [1, 0.5, 0.5]
    assert found["non_tie"]["error"] == pytest.approx(statistics.stdev(means) / 3**0.5)


def test_numbers_over_seeds() -> None:
    found = over("wwl", "wll", "ttt")
    assert found["win_rate"]["mean"] == pytest.approx((2 / 3 + 1 / 3 + 1 / 2) / 3)
    assert found["win_rate"]["deviation"] == pytest.approx(1 / 6)
    # of the tasks' means over seeds
    means = [(1 + 1 + 0.5) / 3, (1 + 0 + 0.5) / 3, (0 + 0 + 0.5) / 3]
    assert found["win_rate"]["error"] == pytest.approx(statistics.stdev(means) / 3**0.5)
    assert found["non_tie"]["mean"] == pytest.approx(1 / 2)
    assert (found["non_tie"]["count"], found["win_rate"]["count"]) == (2, 3)
    # two seeds have winners, for each task
    assert found["non_tie"]["error"] == pytest.approx(statistics.stdev([1, 0.5, 0]) / 3**0.5)
    part = found["by_category"]["all"]
    assert [part[name] for name in ("wins", "losses", "ties")] == [3, 3, 3]
    assert part["win_rate"]["mean"] == pytest.approx(1 / 2)
