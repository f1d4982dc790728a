"""A judge's endpoint, against a real server on loopback that misbehaves in every way."""

from __future__ import annotations

import itertools
import json
import logging
import math
import threading
import time
import traceback
from collections.abc import Callable
from email.utils import formatdate
from typing import Any

import pytest
from judge_server import (
    KEY,
    VARIABLE,
    Clock,
    Drop,
    JudgeServer,
    Response,
    completion,
    echo,
    error,
    good,
    set_key,
)

from bellmask.errors import UserError
from bellmask.judge.endpoint import Answer, Endpoint, EndpointOptions, Request
from bellmask.judge.failures import EndpointError, RequestFailed, Stopped
from bellmask.judge.pace import Pace, back_off, retry_after


@pytest.fixture(autouse=True)
def _key(monkeypatch: pytest.MonkeyPatch) -> None:
    set_key(monkeypatch)


def question(text: str = "which?", **named: Any) -> Request:
    return Request("judge", (("system", "You judge."), ("user", text)), **named)


def connect(server: JudgeServer, clock: Clock | None = None, **named: Any) -> Endpoint:
    clock = clock or Clock()
    options = EndpointOptions(base_url=server.base_url, key_variable=VARIABLE, **named)
    return Endpoint(options, sleep=clock.sleep, now=clock.now, wall=clock.now)


def script(*responses: Response | Drop | Callable[[], Response]) -> Callable[..., Response]:
    """One after the other; the last again and again."""
    left = list(responses)

    def reply(body: dict[str, Any]) -> Response:
        response = left.pop(0) if len(left) > 1 else left[0]
        if isinstance(response, Drop):
            raise response
        return response() if callable(response) else response

    return reply


def ask(*responses: Any, request: Request | None = None, **named: Any) -> tuple[Answer, Any, Clock]:
    clock = Clock()
    with JudgeServer(script(*responses)) as server, connect(server, clock, **named) as endpoint:
        return endpoint.ask(request or question()), server, clock


def test_a_question_arrives_as_it_was_asked_and_the_answer_is_read() -> None:
    logprobs = {"m": -0.1, "M": -2.5}
    request = question(temperature=0.5, max_tokens=7, logprobs=5, repeat=3)
    answer, server, clock = ask(good("m", usage=(21, 1), logprobs=logprobs), request=request)
    assert server.requests == [
        {
            "model": "judge",
            "messages": [
                {"role": "system", "content": "You judge."},
                {"role": "user", "content": "which?"},
            ],
            "temperature": 0.5,
            "max_tokens": 7,
            "logprobs": True,
            "top_logprobs": 5,
            "seed": 3,
        }
    ]
    assert server.paths == ["/v1/chat/completions"]
    assert server.headers[0]["authorization"] == f"Bearer {KEY}"
    reply = answer.reply
    assert (reply.text, reply.top_logprobs, reply.finish_reason) == ("m", logprobs, "stop")
    assert (reply.prompt_tokens, reply.completion_tokens) == (21, 1)
    assert not reply.is_usage_estimated
    assert (answer.attempts, answer.errors, clock.sleeps) == (1, (), [])


def test_what_was_not_asked_for_is_not_sent() -> None:
    _, server, _ = ask(good("x"))
    assert set(server.requests[0]) == {"model", "messages", "temperature", "max_tokens"}


def test_keys_tell_every_difference() -> None:
    base = question()
    others = [
        question("Which?"),
        question(temperature=0.1),
        question(max_tokens=5),
        question(logprobs=1),
        question(repeat=1),
        question(endpoint="http://localhost/v1"),
        Request("other", base.messages),
        Request("judge", tuple(reversed(base.messages))),
    ]
    assert len({base.key, *(other.key for other in others)}) == 1 + len(others)
    assert base.key == question(temperature=0).key


def test_missing_usage_is_estimated_and_said_so() -> None:
    answer, _, _ = ask(good("x" * 40, usage=None), request=question("y" * 400))
    assert answer.reply.is_usage_estimated
    assert answer.reply.completion_tokens == 10
    assert 100 <= answer.reply.prompt_tokens <= 130


def test_no_text_is_an_empty_answer() -> None:
    answer, server, _ = ask((200, {}, completion(None, finish_reason="content_filter")))
    assert (answer.reply.text, answer.reply.finish_reason) == ("", "content_filter")
    assert len(server.requests) == 1


def test_log_probabilities_that_are_none_are_left_out() -> None:
    body = json.loads(completion("m", logprobs={"m": -0.5, "M": -1.0, "x": -3.0}))
    top = body["choices"][0]["logprobs"]["content"][0]["top_logprobs"]
    top[1]["logprob"], top[2]["logprob"] = None, float("nan")
    answer, _, _ = ask((200, {}, json.dumps(body)), request=question(logprobs=3))
    assert answer.reply.top_logprobs == {"m": -0.5}


def sleepy() -> Response:
    time.sleep(0.6)
    return good("late")


FAILURES = {
    "408": error(408),
    "409": error(409),
    "425": error(425),
    "429": error(429),
    "500": error(500),
    "502": (502, {"Content-Type": "text/html"}, "<html>bad gateway</html>"),
    "503": error(503),
    "529": error(529),
    "time-out": sleepy,
    "dropped at once": Drop(),
    "dropped in the body": Drop(completion("half")[:40]),
    "not JSON": (200, {"Content-Type": "application/json"}, "certainly! { the answer"),
    "a web page": (200, {"Content-Type": "text/html"}, "<!doctype html><title>hi</title>"),
    "empty": (200, {}, ""),
    "a list": (200, {}, "[1, 2]"),
    "a number": (200, {}, "7"),
    "null": (200, {}, "null"),
    "no choices": (200, {}, '{"choices": []}'),
    "choices of another shape": (200, {}, '{"choices": {"0": "m"}}'),
    "no message": (200, {}, '{"choices": [{"text": "m"}]}'),
    "text of another type": (200, {}, '{"choices": [{"message": {"content": 3}}]}'),
    "an error with status 200": (200, {}, '{"error": {"message": "overloaded", "code": 502}}'),
    "very deep": (200, {}, "[" * 100_000),
    "wrong letters": (200, {}, "\x00\x01\x02"),
}


@pytest.mark.parametrize("name", FAILURES)
def test_what_passes_is_tried_again(name: str) -> None:
    failure = FAILURES[name]
    limit = 0.3 if name == "time-out" else 10.0
    answer, server, clock = ask(failure, failure, good("at last"), time_limit=limit)
    assert answer.reply.text == "at last"
    assert answer.attempts == len(server.requests) == 3
    assert len(answer.errors) == 2
    assert all(answer.errors)
    assert clock.sleeps == [back_off(question().key, 1), back_off(question().key, 2)]


def test_an_answer_that_drips_has_a_time_limit_as_a_whole() -> None:
    body = completion("slow").encode()

    with JudgeServer() as server:
        handler = server._server.RequestHandlerClass
        calls: list[int] = []

        def drip(self: Any, status: int, headers: Any, content: bytes, missing: int = 0) -> None:
            calls.append(1)
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            for letter in body if len(calls) == 1 else [body]:
                self.wfile.write(bytes([letter]) if isinstance(letter, int) else letter)
                self.wfile.flush()
                time.sleep(0.05)

        handler._send = drip  # type: ignore[attr-defined]
        with connect(server, time_limit=0.4) as endpoint:
            answer = endpoint.ask(question())
    assert answer.reply.text == "slow"
    assert answer.errors == ("no answer within 0.4 s",)


@pytest.mark.parametrize(("asked", "count"), [(6, 3), (2, 2), (9, 9)])
def test_a_server_that_is_not_there(
    asked: int, count: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is given up early, unless the user asks for another number of attempts."""
    with JudgeServer() as server:
        pass
    clock = Clock()
    words = rf"nobody answers at http.* \(connection refused, attempts: {count}\); check --base"
    with (
        connect(server, clock, max_attempts=asked) as endpoint,
        pytest.raises(EndpointError, match=words),
    ):
        endpoint.ask(question())
    assert len(clock.sleeps) == count - 1
    told = capsys.readouterr().err.splitlines()
    assert told[0] == f"note: connection refused; trying again (attempt 2 of {count})"


def test_a_server_that_was_there_is_tried_as_often_as_any() -> None:
    status, headers, body = good("yes")
    with JudgeServer(lambda _: (status, {**headers, "Connection": "close"}, body)) as server:
        endpoint = connect(server)
        endpoint.ask(question())
    with endpoint, pytest.raises(RequestFailed, match=r"no answer after 6 .* connection refused"):
        endpoint.ask(question("again?"))


def test_failures_are_told_at_once_then_every_half_minute(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(RequestFailed):
        ask(error(500, f"oh {KEY}"), max_attempts=8)
    waits = [back_off(question().key, n) for n in range(1, 8)]
    expected, last, now = [], -math.inf, 0.0
    for number, wait in enumerate(waits, start=2):
        if now - last >= 30:
            expected.append(f"note: HTTP 500: oh ***; trying again (attempt {number} of 8)")
            last = now
        now += wait
    assert 2 <= len(expected) < 7
    assert capsys.readouterr().err.splitlines() == expected


def test_it_gives_up_after_the_limit() -> None:
    rule = script(error(500, "out of order"))
    with JudgeServer(rule) as server, connect(server, max_attempts=4) as endpoint:
        with pytest.raises(RequestFailed, match=r"after 4 attempts.*HTTP 500: out of order"):
            endpoint.ask(question())
        assert len(server.requests) == 4


def test_back_off_doubles_up_to_a_limit_and_is_spread_by_key() -> None:
    for attempt, whole in enumerate([1, 2, 4, 8, 16, 32, 60, 60], start=1):
        waits = [back_off(f"key {n}", attempt) for n in range(200)]
        assert whole / 2 <= min(waits) < whole * 0.55
        assert whole * 0.95 < max(waits) < whole
    assert back_off("a", 1) == back_off("a", 1)


@pytest.mark.parametrize("status", [429, 503])
def test_the_wait_an_endpoint_asks_for_is_kept(status: int) -> None:
    _, server, clock = ask(error(status, headers={"Retry-After": "37"}), good("x"))
    assert clock.sleeps == [37.0]
    assert len(server.requests) == 2


def test_the_wait_may_be_a_date() -> None:
    def later() -> Response:
        return error(429, headers={"Retry-After": formatdate(time.time() + 30, usegmt=True)})

    # this test's clock is decades behind; the date is compared with the server's own
    _, _, clock = ask(later, good("x"))
    assert len(clock.sleeps) == 1
    assert 25.0 < clock.sleeps[0] < 32.0
    assert retry_after({"retry-after": formatdate(1_042.0, usegmt=True)}, 1_000.0) == 42.0
    both = {"retry-after": formatdate(5_042.0), "date": formatdate(5_000.0)}
    assert retry_after(both, 1_000.0) == 42.0
    assert retry_after({"retry-after": formatdate(900.0)}, 1_000.0) == 0.0


@pytest.mark.parametrize("value", ["soon", "-3", "nan", "inf", "", "99 Foo 2020"])
def test_a_wait_that_is_not_understood_is_our_own(value: str) -> None:
    assert retry_after({"retry-after": value}, 0.0) is None
    assert retry_after({"retry-after-ms": "250", "retry-after": value}, 0.0) == 0.25


@pytest.mark.parametrize("value", ["0", "0.1"])
def test_a_short_wait_does_not_switch_back_off_off(value: str) -> None:
    _, _, clock = ask(error(429, headers={"Retry-After": value}), good("x"))
    assert clock.sleeps == [back_off(question().key, 1)]


def test_a_wait_of_hours_ends_it() -> None:
    rule = script(error(429, headers={"Retry-After": "7200"}))
    with JudgeServer(rule) as server, connect(server) as endpoint:
        with pytest.raises(EndpointError, match=r"asks to wait 7,200 s"):
            endpoint.ask(question())
        assert len(server.requests) == 1


@pytest.mark.parametrize(
    ("status", "advice"),
    [
        (400, "--judge"),
        (401, f"check the key in the environment variable {VARIABLE}"),
        (402, "credit"),
        (403, "may use this model"),
        (404, "--base-url"),
        (405, "--base-url"),
        (422, "--judge"),
    ],
)
def test_mistakes_of_the_user_are_told_at_once(status: int, advice: str) -> None:
    with JudgeServer(script(error(status, f"no: {KEY}"))) as server:
        with connect(server) as endpoint, pytest.raises(UserError) as caught:
            endpoint.ask(question())
        assert len(server.requests) == 1
    assert advice in str(caught.value)
    assert f"HTTP {status}: no: ***" in str(caught.value)
    assert_no_key(caught.value)


def test_no_credit_is_not_waited_for() -> None:
    body = json.dumps({"error": {"message": "quota", "code": "insufficient_quota"}})
    with JudgeServer(script((429, {}, body))) as server, connect(server) as endpoint:
        with pytest.raises(UserError, match="credit"):
            endpoint.ask(question())
        assert len(server.requests) == 1


def test_a_prompt_that_is_too_long_fails_alone() -> None:
    body = json.dumps({"error": {"message": "too long", "code": "context_length_exceeded"}})
    with JudgeServer(script((400, {}, body))) as server, connect(server) as endpoint:
        with pytest.raises(RequestFailed, match="too long") as caught:
            endpoint.ask(question())
        assert len(server.requests) == 1
    assert caught.value.is_refused


def picky(body: dict[str, Any]) -> Response:
    """A model of the newer kind."""
    if "max_tokens" in body:
        return error(
            400,
            "Unsupported parameter: 'max_tokens' is not supported with this model. "
            "Use 'max_completion_tokens' instead.",
        )
    if "temperature" in body:
        return error(400, "'temperature' does not support 0 with this model.")
    return echo(body)


def test_settings_a_model_does_not_take_are_sent_otherwise() -> None:
    clock = Clock()
    with JudgeServer(picky) as server, connect(server, clock) as endpoint:
        answer = endpoint.ask(question(max_tokens=9))
        again = endpoint.ask(question("and now?"))
    assert answer.attempts == 3
    assert answer.changes == ("max_tokens", "temperature")
    assert again.attempts == 1
    assert server.requests[2]["max_completion_tokens"] == 9
    assert set(server.requests[3]) == {"model", "messages", "max_completion_tokens"}
    assert clock.sleeps == []


def test_a_setting_out_of_range_is_not_dropped() -> None:
    with JudgeServer(script(error(400, "max_tokens is too large: 1024"))) as server:
        with connect(server) as endpoint, pytest.raises(UserError, match="too large"):
            endpoint.ask(question())
        assert len(server.requests) == 1


def test_a_setting_refused_by_every_name_is_told() -> None:
    with JudgeServer(script(error(400, "max_tokens unsupported"))) as server:
        with connect(server) as endpoint, pytest.raises(UserError, match="unsupported"):
            endpoint.ask(question())
        assert len(server.requests) == 2


def test_the_rate_is_kept_retries_included() -> None:
    clock, times = Clock(), []

    def reply(body: dict[str, Any]) -> Response:
        times.append(clock.now())
        return error(500) if len(times) == 3 else echo(body)

    with JudgeServer(reply) as server, connect(server, clock, requests_per_minute=20) as endpoint:
        for n in range(6):
            endpoint.ask(question(str(n)))
    gaps = [after - before for before, after in itertools.pairwise(times)]
    assert gaps == pytest.approx([3.0] * 6)


def test_turns_are_shared_by_threads() -> None:
    pace = Pace(120.0, lambda: 50.0)
    waits: list[float] = []
    threads = [
        threading.Thread(target=lambda: waits.extend(pace.take_turn() for _ in range(25)))
        for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(waits) == pytest.approx([0.5 * n for n in range(200)])


def test_a_wait_holds_every_thread() -> None:
    clock = Clock()
    pace = Pace(None, clock.now)
    assert [pace.take_turn() for _ in range(3)] == [0.0] * 3
    pace.hold(9.0)
    pace.hold(4.0)
    assert [pace.take_turn() for _ in range(3)] == [9.0] * 3
    clock.sleep(9.0)
    assert pace.take_turn() == 0.0


def test_stopping_ends_the_waiting() -> None:
    stop = threading.Event()
    with JudgeServer(script(error(500))) as server:
        options = EndpointOptions(base_url=server.base_url)
        with Endpoint(options, sleep=lambda seconds: stop.set()) as endpoint:
            with pytest.raises(Stopped):
                endpoint.ask(question(), stop=stop)
            with pytest.raises(Stopped):
                endpoint.ask(question(), stop=stop)
        assert len(server.requests) == 1


def test_a_local_server_needs_no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    with JudgeServer() as server:
        with Endpoint(EndpointOptions(base_url=server.base_url)) as endpoint:
            endpoint.ask(question())
        monkeypatch.setenv("OPENAI_BASE_URL", server.base_url + "/")
        with Endpoint(EndpointOptions()) as endpoint:
            endpoint.ask(question())
            assert endpoint.name == server.base_url
        assert [h["authorization"] for h in server.headers] == ["Bearer none"] * 2


def test_a_proxy_is_not_asked_for_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    answer, _, _ = ask(good("x"))
    assert answer.attempts == 1


def test_without_key_and_address_nothing_is_sent() -> None:
    with pytest.raises(UserError, match=r"OPENAI_API_KEY is not set.*--base-url"):
        Endpoint(EndpointOptions())


@pytest.mark.parametrize("name", [KEY, "gsk_abcdef0123456789", "sk-" + "x" * 90])
def test_a_key_given_as_a_variable_is_not_repeated(name: str) -> None:
    options = EndpointOptions(key_variable=name)
    with pytest.raises(UserError) as caught:
        Endpoint(options)
    assert name not in str(caught.value) + repr(options)


@pytest.mark.parametrize(
    "url",
    [
        "localhost:8000/v1",
        "ftp://host/v1",
        "http://",
        "http://[::1/v1",
        "http://host:99999/v1",
        f"http://me:{KEY}@host/v1",
        f"http://host/v1?key={KEY}",
        "http://host/v1/chat/completions",
    ],
)
def test_addresses_that_cannot_work(url: str) -> None:
    with pytest.raises(UserError, match="--base-url") as caught:
        Endpoint(EndpointOptions(base_url=url))
    assert KEY not in str(caught.value)


@pytest.mark.parametrize("key", ["two words", "schlüssel-1234", "sk-\x01-0000000"])
def test_keys_that_cannot_be_sent(key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, key)
    with pytest.raises(UserError, match="is no key") as caught:
        Endpoint(EndpointOptions(key_variable=VARIABLE))
    assert key not in str(caught.value)


@pytest.mark.parametrize(
    "named",
    [
        {"requests_per_minute": 0.0},
        {"num_threads": 0},
        {"time_limit": -1.0},
        {"max_attempts": 0},
        {"time_limit": float("nan")},
    ],
)
def test_options_that_cannot_work(named: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=next(iter(named)).replace("_", "-")):
        EndpointOptions(**named).check()


@pytest.mark.parametrize(
    "named",
    [{"temperature": 2.5}, {"temperature": float("nan")}, {"max_tokens": 0}, {"logprobs": 21}],
)
def test_requests_that_cannot_work(named: dict[str, Any]) -> None:
    with pytest.raises(UserError):
        question(**named)


def assert_no_key(error: BaseException) -> None:
    """Neither in what is shown of it nor in anything it came from."""
    seen: BaseException | None = error
    while seen is not None:
        assert KEY not in "".join(traceback.format_exception(seen)) + repr(vars(seen))
        assert not hasattr(seen, "request")
        seen = seen.__cause__ or seen.__context__


def test_the_key_is_nowhere(
    caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    """Though the server repeats it in answers, errors and bodies that are none."""
    caplog.set_level(logging.DEBUG)
    rule = script(error(500, KEY), (200, {}, f"<b>{KEY}</b>"), good(f"it is {KEY}"))
    with JudgeServer(rule) as server, connect(server) as endpoint:
        answer = endpoint.ask(question())
        shown = repr(endpoint) + repr(endpoint.options) + str(answer)
        server.reply = script(error(500, KEY))
        with pytest.raises(RequestFailed) as caught:
            endpoint.ask(question())
        assert server.headers[0]["authorization"].endswith(KEY)
    assert answer.reply.text == "it is ***"
    assert_no_key(caught.value)
    printed = capsys.readouterr()
    assert any(record.levelno == logging.DEBUG for record in caplog.records)
    assert KEY not in shown + printed.out + printed.err + caplog.text


def test_the_key_is_found_in_every_part_and_spelling() -> None:
    spelt = completion(f"it is {KEY}", finish_reason=KEY, logprobs={KEY: -1.0})
    spelt = spelt.replace(f"it is {KEY}", "it is " + KEY.replace("-", "\\u002d"))
    answer, _, _ = ask((200, {}, spelt), request=question(logprobs=1))
    assert answer.reply.text == "it is ***"
    assert KEY not in str(answer)


def test_short_keys_are_words_and_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "EMPTY")
    answer, _, _ = ask(good("an EMPTY answer"))
    assert answer.reply.text == "an EMPTY answer"
