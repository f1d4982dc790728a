"""Asking a judge over a real server on loopback that misbehaves: nothing that was said is lost,
asked twice or counted twice, every attempt is paid for, and the key is told nobody."""

from __future__ import annotations

import json
import logging
import math
import threading
import time
import traceback
from collections import Counter
from contextlib import closing

import pytest
from judge_server import (
    KEY,
    VARIABLE,
    Clock,
    Drop,
    JudgeServer,
    completion,
    echo,
    error,
    good,
    script,
    set_key,
)

from bellmask.evaluate import judge_endpoint
from bellmask.evaluate.judge_endpoint import (
    OPENAI_URL,
    TOKENS_PER_MESSAGE,
    Budget,
    ChatRequest,
    Endpoint,
    EndpointError,
    EndpointOptions,
    Reply,
    RequestFailed,
    Transcript,
    prices_of,
)
from bellmask.utils.errors import UserError

DOLLAR_A_TOKEN = (0.0, 1_000_000.0)
FREE = Budget(None, None, "judge")


@pytest.fixture(autouse=True)
def _key(monkeypatch):
    set_key(monkeypatch)


def question(text="which?", **named):
    return ChatRequest("judge", (("system", "You judge."), ("user", text)), **named)


def questions(count, **named):
    return [ChatRequest("judge", (("user", f"q{n}"),), **named) for n in range(count)]


def connect(server, clock=None, budget=FREE, **named):
    clock = clock or Clock()

    class Timed(Endpoint):
        now = clock.now

        def sleep(self, stop, seconds):
            clock.sleep(seconds)

    options = EndpointOptions(base_url=server.base_url, **named)
    return closing(Timed(options, budget))


def ask(*responses, request=None, **named):
    clock = Clock()
    with JudgeServer(script(*responses)) as server, connect(server, clock, **named) as endpoint:
        answer = endpoint.ask(request or question())
        return Reply(**answer.pop("reply")), answer, server, clock


def coded(status, code):
    return status, {}, json.dumps({"error": {"message": "no", "code": code}})


# --- one question ----------------------------------------------------------------------------


def test_a_question_arrives_as_it_was_asked_and_the_answer_is_read():
    logprobs = {"m": -0.1, "M": -2.5}
    request = question(max_tokens=7, logprobs=5)
    reply, answer, server, clock = ask(good("m", usage=(21, 1), logprobs=logprobs), request=request)
    said = [("system", "You judge."), ("user", "which?")]
    assert server.requests == [
        {
            "model": "judge",
            "messages": [{"role": role, "content": content} for role, content in said],
            "temperature": 0.0,
            "max_tokens": 7,
            "logprobs": True,
            "top_logprobs": 5,
        }
    ]
    assert server.headers[0]["authorization"] == f"Bearer {KEY}"
    assert reply == Reply("m", logprobs, 21, 1, "stop")
    assert (answer["attempts"], answer["errors"], clock.sleeps) == (1, [], [])
    *_, server, _ = ask(good("x"))
    assert set(server.requests[0]) == {"model", "messages", "temperature", "max_tokens"}


def test_replies_with_something_missing():
    reply, *_ = ask(good("x" * 40, usage=None), request=question("y" * 400))
    tokens = (reply.prompt_tokens, reply.completion_tokens, reply.is_usage_estimated)
    assert tokens == (3 + 100 + 2 * TOKENS_PER_MESSAGE, 10, True)
    reply, _, server, _ = ask((200, {}, completion(None, finish_reason="content_filter")))
    assert (reply.text, reply.finish_reason) == ("", "content_filter")
    assert len(server.requests) == 1
    body = json.loads(completion("m", logprobs={"m": -0.5, "M": -1.0, "x": -3.0, "y": 0.1}))
    top = body["choices"][0]["logprobs"]["content"][0]["top_logprobs"]
    top[1]["logprob"], top[2]["logprob"] = None, math.nan
    reply, *_ = ask((200, {}, json.dumps(body)), request=question(logprobs=3))
    assert reply.top_logprobs == {"m": -0.5, "y": 0.0}


PASSING = [
    *map(error, (408, 409, 425, 429, 500, 503, 529)),
    (502, {"Content-Type": "text/html"}, "<html>bad gateway</html>"),
    Drop(),
    Drop(completion("half")[:40]),
    *((200, {}, text) for text in ("certainly! {", "", "[1, 2]", "7", "null", "[" * 100_000, "\0")),
    *((200, {}, f'{{"choices": {text}}}') for text in ("[]", '{"0": "m"}', '[{"text": "m"}]')),
    (200, {}, '{"choices": [{"message": {"content": 3}}]}'),
    (200, {}, '{"error": {"message": "overloaded", "code": 502}}'),
]


def late(body):
    time.sleep(0.8)
    return good("late")


def test_what_passes_is_tried_again_after_growing_waits():
    faults = [*PASSING, late]
    reply, answer, server, clock = ask(
        *faults, good("at last"), max_attempts=len(faults) + 1, time_limit=0.4
    )
    assert reply.text == "at last"
    assert answer["attempts"] == len(server.requests) == len(faults) + 1
    assert len(list(filter(None, answer["errors"]))) == len(faults)
    assert answer["errors"][-1] == "no answer within 0.4 s"
    assert 0 < clock.sleeps[0] < clock.sleeps[2] < clock.sleeps[4]
    assert max(clock.sleeps) <= 60


def test_a_server_that_is_not_there_is_told_soon_and_costs_nothing():
    with JudgeServer() as server:
        pass
    budget, clock = Budget(DOLLAR_A_TOKEN, 5.0, "judge"), Clock()
    failing = pytest.raises(EndpointError, match=f"--base-url {server.base_url} ")
    with connect(server, clock, budget) as endpoint, failing:
        endpoint.ask(question(max_tokens=2))
    assert (len(clock.sleeps), budget.spent) == (2, 0.0)


def test_the_wait_an_endpoint_asks_for_is_kept():
    for status in (429, 503):
        *_, server, clock = ask(error(status, headers={"Retry-After": "37"}), good("x"))
        assert sum(clock.sleeps) >= 37
        assert len(server.requests) == 2
    with JudgeServer(script(error(429, headers={"Retry-After": "7200"}))) as server:
        with connect(server) as endpoint, pytest.raises(EndpointError, match="7,200 s"):
            endpoint.ask(question())
        assert len(server.requests) == 1


def test_mistakes_of_the_user_are_told_at_once():
    refusals = {status: error(status, f"no: {KEY}") for status in (400, 401, 402, 403, 404, 422)}
    refusals |= {"credit": coded(429, "insufficient_quota")}
    refusals |= {"too large": error(400, "max_tokens is too large: 1024")}
    for name, response in refusals.items():
        with JudgeServer(script(response)) as server:
            with connect(server) as endpoint, pytest.raises(UserError, match=str(name)) as caught:
                endpoint.ask(question())
            assert len(server.requests) == 1
        assert_no_key(caught.value)
        assert name != 401 or VARIABLE in str(caught.value)


def test_a_local_server_needs_no_key_and_no_proxy(monkeypatch):
    monkeypatch.delenv(VARIABLE)
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    with JudgeServer() as server:
        monkeypatch.setenv("OPENAI_BASE_URL", server.base_url + "/")
        for base_url in (server.base_url, None):
            with closing(Endpoint(EndpointOptions(base_url=base_url), FREE)) as endpoint:
                endpoint.ask(question())
        assert endpoint.name == server.base_url
        assert [h["authorization"] for h in server.headers] == ["Bearer none"] * 2


ADDRESSES = ["localhost:8000/v1", "ftp://host/v1", "http://", "http://[::1/v1", "http://h:99999/v1"]
ADDRESSES += [f"http://me:{KEY}@h/v1", f"http://h/v1?key={KEY}", "http://h/v1/chat/completions"]


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({}, r"OPENAI_API_KEY.*--base-url"),
        *(({"base_url": address}, "--base-url") for address in ADDRESSES),
        ({"requests_per_minute": 0.0}, "--requests-per-minute"),
        ({"time_limit": math.nan}, "--time-limit"),
    ],
)
def test_options_that_cannot_work(options, named, monkeypatch):
    monkeypatch.delenv(VARIABLE)
    made = EndpointOptions(**options)
    with pytest.raises(UserError, match=named) as caught:
        made.check() or made.key()
    assert KEY not in str(caught.value)


def assert_no_key(error):
    """Neither in what is shown of it nor in anything it came from."""
    while error is not None:
        assert KEY not in "".join(traceback.format_exception(error)) + repr(vars(error))
        assert not hasattr(error, "request")
        error = error.__cause__ or error.__context__


def test_the_key_is_nowhere(caplog, capsys, tmp_path, monkeypatch):
    """Though the server repeats it in answers, errors and bodies that are none."""
    caplog.set_level(logging.DEBUG)
    spelled = completion("it is KEY", finish_reason=KEY, logprobs={KEY: -1.0})
    spelled = spelled.replace("KEY", KEY.replace("-", "\\u002d"))
    rule = script(error(500, KEY), (200, {}, f"<b>{KEY}</b>"), (200, {}, spelled))
    request = question(logprobs=1)
    with JudgeServer(rule) as server, connect(server) as endpoint:
        transcript = Transcript(tmp_path / "t.jsonl")
        transcript.ask_all([request], endpoint)
        shown = repr(endpoint) + repr(endpoint.options) + transcript.path.read_text()
        server.reply = script(error(500, KEY))
        with pytest.raises(RequestFailed) as caught:
            endpoint.ask(question())
        assert server.headers[0]["authorization"].endswith(KEY)
    assert transcript.reply(request.key).text == "it is ***"
    assert_no_key(caught.value)
    printed = capsys.readouterr()
    assert any(record.levelno == logging.DEBUG for record in caplog.records)
    assert KEY not in shown + printed.out + printed.err + caplog.text
    monkeypatch.setenv(VARIABLE, "EMPTY")
    assert ask(good("an EMPTY answer"))[0].text == "an EMPTY answer", "a word, no secret"


# --- many questions --------------------------------------------------------------------------


def test_a_stormy_endpoint_loses_and_doubles_nothing(tmp_path):
    """Every question fails in its own way, up to three times, before it is answered."""
    seen, lock = Counter(), threading.Lock()
    faults = [Drop('{"choices": ['), error(429, headers={"Retry-After": "2"}), error(500)]
    faults += [(200, {}, "??"), error(503, "busy")]

    def reply(body):
        name = body["messages"][-1]["content"]
        time.sleep(0.005)  # so that others come meanwhile
        with lock:
            seen[name] += 1
            number, count = int(name[1:]), seen[name]
        return echo(body) if count > number % 4 else script(faults[(number + count) % 5])(body)

    transcript, requests = Transcript(tmp_path / "t.jsonl"), questions(40)
    with JudgeServer(reply) as server, connect(server, num_threads=6) as endpoint:
        assert transcript.ask_all(requests, endpoint) == []
        assert 1 < server.most_at_once <= 6
    assert seen == {f"q{n}": 1 + n % 4 for n in range(40)}
    kept = [json.loads(line) for line in transcript.path.read_text().splitlines()]
    lines = {line["request"]["messages"][0][1]: line for line in kept}
    assert len(kept) == len(lines) == 40
    for name, line in lines.items():
        assert (line["reply"]["text"], line["attempts"]) == (f"answer to {name}", seen[name])
    assert lines["q3"]["errors"] == ["HTTP 503: busy", lines["q3"]["errors"][1], "HTTP 429: no"]


@pytest.mark.parametrize(
    ("fault", "error_type", "words"),
    [
        (error(500, "down"), EndpointError, r"3 requests in a row.*down.*5 of 200"),
        (error(401, "expired"), UserError, r"401: expired.*5 of 200"),
    ],
)
def test_what_ends_it_keeps_what_came(fault, error_type, words, tmp_path, monkeypatch):
    monkeypatch.setattr(judge_endpoint, "MOST_FAILURES", 3)
    transcript, failing = Transcript(tmp_path / "t.jsonl"), pytest.raises(error_type, match=words)
    with JudgeServer(script(*[echo] * 5, fault)) as server:
        with connect(server, max_attempts=2, num_threads=1) as endpoint, failing:
            transcript.ask_all(questions(200), endpoint)
        assert len(server.requests) < 30  # a thread may be on its way
    assert len(transcript.store) == 5


def test_two_askers_of_one_transcript(tmp_path):
    """The second is refused while the first asks, and then finds its answers."""
    arrived, go = threading.Event(), threading.Event()

    def reply(body):
        arrived.set()
        assert go.wait(10)
        return echo(body)

    path = tmp_path / "t.jsonl"
    first, second = Transcript(path), Transcript(path)
    with JudgeServer(reply) as server, connect(server) as endpoint:
        thread = threading.Thread(target=lambda: first.ask_all(questions(2), endpoint))
        thread.start()
        assert arrived.wait(10)
        with pytest.raises(UserError, match=str(path)):
            second.ask_all(questions(2), endpoint)
        go.set()
        thread.join()
        second.ask_all(questions(3), endpoint)
        assert len(server.requests) == 3


def test_a_file_that_cannot_be_written_is_an_error_not_a_silence(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with JudgeServer(echo) as server, connect(server, num_threads=2) as endpoint:
        with pytest.raises(OSError, match="No space left"):
            Transcript(tmp_path / "t").ask_all(questions(30), endpoint)
        assert len(server.requests) <= 4


# --- money -----------------------------------------------------------------------------------


def test_the_estimate_by_hand():
    request = ChatRequest("gpt-4o", (("system", "x" * 400), ("user", "y" * 1601)), max_tokens=300)
    prices = prices_of("gpt-4o", OPENAI_URL, None, None)
    tokens_in = 100 + 401 + 2 * TOKENS_PER_MESSAGE
    usd = tokens_in * 2.5e-6 + 300 * 10e-6
    words = Budget(prices, 1.01 * usd, "gpt-4o").check([request])
    assert f"1 requests, about {tokens_in} tokens in, at most 300 out" in words
    assert f"${usd:.4f}" in words
    with pytest.raises(UserError, match=r"--max-usd .* reduce --tasks or --seeds"):
        Budget(prices, 0.99 * usd, "gpt-4o").check([request])
    foreign = ChatRequest("j", (("user", "日本語"),), max_tokens=10)
    assert foreign.prompt_tokens() == 3 + TOKENS_PER_MESSAGE
    assert "dollars unknown" in FREE.check([foreign])
    worst = Budget((1_000.0, 2_000.0), 1.0, "j").reserve(foreign, threading.Event())
    assert worst == pytest.approx((9 + TOKENS_PER_MESSAGE) * 1e-3 + 10 * 2e-3), "a token a byte"


def test_prices_are_those_of_one_endpoint():
    assert prices_of("gpt-4o-mini", OPENAI_URL, None, None) == (0.15, 0.6)
    assert prices_of("gpt-4o", "http://localhost:8000/v1", None, None) is None
    assert prices_of("gpt-99", OPENAI_URL, None, None) is None
    assert prices_of("gpt-4o", OPENAI_URL, 1.0, 2.0) == (1.0, 2.0)
    for price_in, price_out in ((1.0, None), (None, 1.0), (-1.0, 1.0), (1.0, math.nan)):
        with pytest.raises(UserError, match="--price"):
            prices_of("m", OPENAI_URL, price_in, price_out)


def slowly(body):
    time.sleep(0.02)
    return good("m", usage=(3, 2))


LOST = [error(500), error(429), Drop("{"), (200, {}, "garbage")]


@pytest.mark.parametrize(
    ("usd", "num_threads", "rule", "expected"),
    [
        pytest.param(5, 1, [good("m", usage=(3, 1))], (4, 4, 4), id="the next could pass it"),
        pytest.param(5, 7, [good("m", usage=(3, 1))], (4, 4, 4), id="whatever the threads"),
        pytest.param(7, 8, [slowly], (3, 6, 3), id="what is under way counts at its worst"),
        pytest.param(5, 3, [good("m", usage=None)], (2, 4, 2), id="so does a bill not told"),
        pytest.param(
            8, 1, [*LOST, good("m", usage=(3, 1))], (3, 2 + 2 + 3, 2 + 2 + 3), id="and lost answers"
        ),
        pytest.param(5, 2, [error(408), good("m", usage=(3, 1))], (2, 4, 3), id="and time-outs"),
    ],
)
def test_the_limit_holds(usd, num_threads, rule, expected, tmp_path):
    """A dollar a token, two at most: (answers kept, dollars spent, requests the server saw).

    Lost answers may have been billed; an error 500 was not.
    """
    budget, transcript = Budget(DOLLAR_A_TOKEN, usd, "judge"), Transcript(tmp_path / "t")
    server, stopping = JudgeServer(script(*rule)), pytest.raises(EndpointError, match="--max-usd")
    with server, connect(server, None, budget, num_threads=num_threads) as endpoint, stopping:
        transcript.ask_all(questions(30, max_tokens=2), endpoint)
    assert (len(transcript.store), budget.spent, len(server.requests)) == expected
