"""Nothing a judge said is lost, asked twice or counted twice, however the asking ends."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from judge_server import (
    KEY,
    VARIABLE,
    Clock,
    Drop,
    JudgeServer,
    ReplyRule,
    Response,
    echo,
    error,
    good,
    set_key,
)

from bellmask.errors import UserError
from bellmask.judge.endpoint import Answer, Endpoint, EndpointOptions, Reply, Request
from bellmask.judge.failures import EndpointError
from bellmask.judge.transcript import Transcript


@pytest.fixture(autouse=True)
def _key(monkeypatch: pytest.MonkeyPatch) -> None:
    set_key(monkeypatch)


def questions(count: int, start: int = 0) -> list[Request]:
    return [Request("judge", (("user", f"q{n}"),)) for n in range(start, start + count)]


def connect(server: JudgeServer, **named: Any) -> Endpoint:
    clock = Clock()
    options = EndpointOptions(base_url=server.base_url, key_variable=VARIABLE, **named)
    return Endpoint(options, sleep=clock.sleep, now=clock.now)


def assert_whole(path: Path, requests: list[Request]) -> None:
    """Each request once in the file, with the answer that belongs to it."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert Counter(line["key"] for line in lines) == Counter(r.key for r in requests)
    for line in lines:
        assert line["reply"]["text"] == "answer to " + line["request"]["messages"][-1][1]


def test_every_answer_is_kept_with_its_request(tmp_path: Path) -> None:
    path, requests, shown = tmp_path / "deep" / "t.jsonl", questions(20), []
    with JudgeServer() as server, connect(server) as endpoint:
        transcript = Transcript(path)
        asked = transcript.ask_all(requests, endpoint, lambda *done: shown.append(done))
        assert (asked.num_kept, asked.num_new, asked.failed) == (0, 20, {})
        assert sorted(server.questions) == sorted(f"q{n}" for n in range(20))
        again = transcript.ask_all(requests, endpoint)
        assert (again.num_kept, again.num_new) == (20, 0)
        assert len(server.requests) == 20
    assert shown[0] == (0, 20)
    assert shown[-1] == (20, 20)
    assert shown == sorted(shown)
    assert_whole(path, requests)
    fresh = Transcript(path)
    kept = [fresh.get(request) for request in requests]
    assert [reply and reply.text for reply in kept] == [f"answer to q{n}" for n in range(20)]
    assert fresh.get(questions(1, start=99)[0]) is None
    assert len(fresh) == 20


def test_a_line_tells_the_whole_story(tmp_path: Path) -> None:
    request = Request("judge", (("user", "who?"),), temperature=0.5, max_tokens=9, logprobs=2)
    left = [error(500, "busy"), Drop("{")]

    def reply(body: dict[str, Any]) -> Response:
        if left:
            problem = left.pop(0)
            if isinstance(problem, Drop):
                raise problem
            return problem
        return good("m", usage=(12, 1), logprobs={"m": -0.25})

    with JudgeServer(reply) as server, connect(server) as endpoint:
        transcript = Transcript(tmp_path / "t.jsonl")
        transcript.ask_all([request], endpoint)
    record = json.loads((tmp_path / "t.jsonl").read_text())
    assert record["key"] == request.key
    assert record["request"] == request.to_dict()
    assert record["request"]["messages"] == [["user", "who?"]]
    assert record["attempts"] == 3
    assert record["errors"][0] == "HTTP 500: busy"
    assert "connection" in record["errors"][1]
    assert record["seconds"] > 0
    assert record["at"].startswith("20")
    expected = Reply("m", {"m": -0.25}, 12, 1, "stop")
    again = Transcript(tmp_path / "t.jsonl")
    assert again.get(request) == transcript.get(request) == expected
    assert (again.refused([request]), again.refused_settings([request])) == ({}, set())


def test_one_question_asked_twice_is_sent_once(tmp_path: Path) -> None:
    with JudgeServer() as server, connect(server) as endpoint:
        asked = Transcript(tmp_path / "t").ask_all(questions(3) * 4, endpoint)
        assert len(server.requests) == asked.num_new == 3
        assert asked.num_kept == 0


def test_never_more_at_once_than_allowed(tmp_path: Path) -> None:
    meeting = threading.Barrier(3, timeout=10)

    def reply(body: dict[str, Any]) -> Response:
        meeting.wait()  # so that three are there, each time
        time.sleep(0.01)  # and a fourth had time to come
        return echo(body)

    with JudgeServer(reply) as server, connect(server, num_threads=3) as endpoint:
        Transcript(tmp_path / "t").ask_all(questions(24), endpoint)
        assert server.most_at_once == 3
        assert len(server.requests) == 24


def test_a_stormy_endpoint_loses_and_doubles_nothing(tmp_path: Path) -> None:
    """Every question fails in its own way, up to three times, before it is answered."""
    seen: Counter[str] = Counter()
    lock = threading.Lock()

    def reply(body: dict[str, Any]) -> Response:
        name = body["messages"][-1]["content"]
        with lock:
            seen[name] += 1
            number, count = int(name[1:]), seen[name]
        if count > number % 4:
            return echo(body)
        kind = (number + count) % 5
        if kind == 0:
            raise Drop('{"choices": [')
        return [error(429, headers={"Retry-After": "2"}), error(500), (200, {}, "??"), error(503)][
            kind - 1
        ]

    path, requests = tmp_path / "t.jsonl", questions(40)
    with JudgeServer(reply) as server, connect(server, num_threads=6) as endpoint:
        asked = Transcript(path).ask_all(requests, endpoint)
    assert (asked.num_new, asked.failed) == (40, {})
    assert_whole(path, requests)
    assert seen == {f"q{n}": 1 + n % 4 for n in range(40)}
    attempts = {line["request"]["messages"][0][1]: line["attempts"] for line in Transcript(path)}
    assert attempts == seen


def test_what_failed_for_good_is_told_and_asked_again_next_time(tmp_path: Path) -> None:
    bad = {"q2", "q5"}

    def reply(body: dict[str, Any]) -> Response:
        return error(500, "sick") if body["messages"][-1]["content"] in bad else echo(body)

    path, requests = tmp_path / "t.jsonl", questions(8)
    with JudgeServer(reply) as server, connect(server, max_attempts=2) as endpoint:
        transcript = Transcript(path)
        asked = transcript.ask_all(requests, endpoint)
        assert asked.num_new == len(transcript) == 6
        assert set(asked.failed) == {requests[2].key, requests[5].key}
        assert "after 2 attempts" in asked.failed[requests[2].key]
        assert transcript.missing(requests) == [requests[2], requests[5]]
        bad.clear()
        server.requests.clear()
        transcript.ask_all(requests, endpoint)
        assert sorted(server.questions) == ["q2", "q5"]
    assert_whole(path, requests)


def too_long(body: dict[str, Any]) -> Response:
    """Refuses q1 and q4, by way of a temperature that it does not take."""
    if "temperature" in body:
        return error(400, "temperature is not supported")
    is_long = body["messages"][-1]["content"] in ("q1", "q4")
    return error(413, f"too long, {KEY}") if is_long else echo(body)


def test_what_is_refused_for_good_is_kept_and_never_asked_again(tmp_path: Path) -> None:
    path, requests, shown = tmp_path / "t.jsonl", questions(6), []
    with JudgeServer(too_long) as server, connect(server, num_threads=1) as endpoint:
        first = Transcript(path).ask_all(requests, endpoint, lambda *done: shown.append(done))
        assert len(server.requests) == 7
        words = "HTTP 413: too long, ***"
        assert first.refused == {requests[n].key: words for n in (1, 4)}
        assert (first.num_kept, first.num_new, first.failed) == (0, 4, {})
        assert shown[-1] == (6, 6)
        again = Transcript(path)
        assert again.missing(requests) == []
        second = again.ask_all(requests, endpoint)
        assert (second.num_kept, second.num_new, second.failed) == (6, 0, {})
        assert second.refused == first.refused
        assert again.ask_all(requests[2:], endpoint).refused == {requests[4].key: words}
        assert len(server.requests) == 7
    assert [again.get(request) is None for request in requests] == [False, True, False] * 2
    assert again.refused_settings(requests) == {"temperature"}
    assert again.refused_settings(requests[1:2]) == again.refused_settings(questions(1, 9)) == set()
    record = next(record for record in again if record["key"] == requests[4].key)
    assert set(record) == {"key", "request", "refused", "at"}
    assert record["request"] == requests[4].to_dict()


def test_refusals_are_no_failures_in_a_row(tmp_path: Path) -> None:
    with JudgeServer(lambda body: error(413, "no")) as server, connect(server) as endpoint:
        asked = Transcript(tmp_path / "t").ask_all(questions(20), endpoint, max_failures=2)
    assert (len(asked.refused), asked.failed) == (20, {})


def test_an_endpoint_that_is_down_ends_it(tmp_path: Path) -> None:
    with (
        JudgeServer(lambda body: error(500, "down")) as server,
        connect(server, max_attempts=2, num_threads=2) as endpoint,
    ):
        with pytest.raises(EndpointError, match=r"failed 3 requests in a row.*down.*0 of 200"):
            Transcript(tmp_path / "t").ask_all(questions(200), endpoint, max_failures=3)
        assert len(server.requests) <= 2 * (3 + 1)  # the other thread may be on its way


def test_a_mistake_stops_all_and_keeps_what_came(tmp_path: Path) -> None:
    count = iter(range(100))

    def reply(body: dict[str, Any]) -> Response:
        return echo(body) if next(count) < 5 else error(401, "expired")

    path = tmp_path / "t.jsonl"
    with JudgeServer(reply) as server, connect(server, num_threads=1) as endpoint:
        with pytest.raises(UserError, match=r"401: expired.*5 of 50 answers came and are kept"):
            Transcript(path).ask_all(questions(50), endpoint)
        assert len(server.requests) == 6
    assert_whole(path, questions(5))


def test_a_torn_line_is_asked_again(tmp_path: Path) -> None:
    path, requests = tmp_path / "t.jsonl", questions(6)
    with JudgeServer() as server, connect(server, num_threads=1) as endpoint:
        Transcript(path).ask_all(requests, endpoint)
        path.write_bytes(path.read_bytes()[:-30])
        server.requests.clear()
        asked = Transcript(path).ask_all(requests, endpoint)
        assert (asked.num_kept, asked.num_new) == (5, 1)
        assert server.questions == ["q5"]
    assert_whole(path, requests)


def test_two_askers_of_one_transcript(tmp_path: Path) -> None:
    """The second is refused while the first asks, and then finds its answers."""
    arrived, go = threading.Event(), threading.Event()

    def reply(body: dict[str, Any]) -> Response:
        arrived.set()
        assert go.wait(10)
        return echo(body)

    path = tmp_path / "t.jsonl"
    first, second = Transcript(path), Transcript(path)
    with JudgeServer(reply) as server, connect(server) as endpoint:
        thread = threading.Thread(target=lambda: first.ask_all(questions(2), endpoint))
        thread.start()
        assert arrived.wait(10)
        with pytest.raises(UserError, match="another process is asking"):
            second.ask_all(questions(2), endpoint)
        go.set()
        thread.join()
        assert second.ask_all(questions(3), endpoint).num_kept == 2
        assert len(server.requests) == 3


@pytest.mark.parametrize(
    ("method", "rule"), [("add", echo), ("add_refusal", lambda body: error(413, "too long"))]
)
def test_a_file_that_cannot_be_written_is_an_error_not_a_silence(
    method: str, rule: ReplyRule, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(self: Transcript, request: Request, what: Answer | str) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Transcript, method, full)
    with JudgeServer(rule) as server, connect(server, num_threads=2) as endpoint:
        with pytest.raises(OSError, match="No space left"):
            Transcript(tmp_path / "t").ask_all(questions(30), endpoint)
        assert len(server.requests) <= 4


PROGRAM = """
import sys
from pathlib import Path
from bellmask.judge.endpoint import Endpoint, EndpointOptions, Request
from bellmask.judge.transcript import Transcript

url, path, variable = sys.argv[1:]
requests = [Request("judge", (("user", f"q{n}"),)) for n in range(40)]
try:
    with Endpoint(EndpointOptions(base_url=url, key_variable=variable, num_threads=4)) as endpoint:
        Transcript(Path(path)).ask_all(requests, endpoint)
except KeyboardInterrupt as stop:
    print(stop)
    sys.exit(130)
"""


def interrupted(server: JudgeServer, path: Path, sign: signal.Signals) -> tuple[int, str]:
    """Ask in a process that gets a signal after a dozen questions."""
    command = [sys.executable, "-c", PROGRAM, server.base_url, str(path), VARIABLE]
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=dict(os.environ, OPENAI_LOG="debug"),
    )
    deadline = time.monotonic() + 60
    while len(server.requests) < 12 and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.005)
    process.send_signal(sign)
    output, _ = process.communicate(timeout=60)
    return process.returncode, output


def slow_echo(body: dict[str, Any]) -> Response:
    time.sleep(0.05)
    return echo(body)


def test_after_a_kill_only_the_rest_is_asked(tmp_path: Path) -> None:
    path, requests = tmp_path / "t.jsonl", questions(40)
    with JudgeServer(slow_echo) as server:
        code, output = interrupted(server, path, signal.SIGKILL)
        assert code == -signal.SIGKILL
        kept = len(Transcript(path))
        assert 12 - 4 <= kept < 40  # at most what was under way is lost
        time.sleep(0.1)  # for what the killed process had sent
        server.requests.clear()
        with connect(server) as endpoint:
            asked = Transcript(path).ask_all(requests, endpoint)
        assert (asked.num_kept, asked.num_new) == (kept, 40 - kept)
        assert len(server.requests) == 40 - kept
    assert_whole(path, requests)
    assert KEY not in output


def test_an_interrupt_keeps_even_what_was_under_way(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    with JudgeServer(slow_echo) as server:
        code, output = interrupted(server, path, signal.SIGINT)
        assert code == 130
        kept = len(Transcript(path))
        assert kept == len(server.requests) < 40
    assert f"interrupted; {kept} of 40 answers came and are kept" in output
    assert "HTTP Request" in output  # the package's own log was on
    assert KEY not in output


def test_the_key_is_in_no_file(tmp_path: Path) -> None:
    """Though the server repeats it."""
    replies = iter([error(500, KEY), good(f"your key is {KEY}")])
    with JudgeServer(lambda body: next(replies)) as server, connect(server) as endpoint:
        Transcript(tmp_path / "t.jsonl").ask_all(questions(1), endpoint)
        assert server.headers[0]["authorization"] == f"Bearer {KEY}"
    written = [file.read_text() for file in tmp_path.rglob("*") if file.is_file()]
    assert len(written) == 1
    assert "your key is ***" in written[0]
    assert KEY not in written[0]
