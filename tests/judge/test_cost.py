"""What asking costs: the estimate by hand, and a limit that holds whatever the threads do."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest
from judge_server import VARIABLE, Clock, Drop, JudgeServer, Response, error, good, set_key

from bellmask.errors import UserError
from bellmask.judge.cost import (
    KNOWN_PRICES,
    Prices,
    SpendingLimit,
    SpendingStopped,
    estimate,
    prices_of,
)
from bellmask.judge.endpoint import Endpoint, EndpointOptions, Request
from bellmask.judge.endpoint_options import OPENAI_URL
from bellmask.judge.failures import EndpointError
from bellmask.judge.tokens import TOKENS_PER_MESSAGE, estimate_tokens, most_tokens
from bellmask.judge.transcript import Transcript


@pytest.fixture(autouse=True)
def _key(monkeypatch: pytest.MonkeyPatch) -> None:
    set_key(monkeypatch)


DOLLAR_A_TOKEN = Prices(0.0, 1_000_000.0)


def questions(count: int, max_tokens: int = 2, model: str = "judge") -> list[Request]:
    return [Request(model, (("user", f"q{n}"),), max_tokens=max_tokens) for n in range(count)]


def connect(server: JudgeServer, **named: Any) -> Endpoint:
    clock = Clock()
    options = EndpointOptions(base_url=server.base_url, key_variable=VARIABLE, **named)
    return Endpoint(options, sleep=clock.sleep, now=clock.now)


def test_the_estimate_by_hand() -> None:
    request = Request("gpt-4o", (("system", "x" * 400), ("user", "y" * 1601)), max_tokens=300)
    found = estimate([request, request], KNOWN_PRICES["gpt-4o"])
    tokens_in = 100 + 401 + 2 * TOKENS_PER_MESSAGE
    assert (found.num_requests, found.num_input, found.num_output) == (1, tokens_in, 300)
    assert found.usd == pytest.approx(tokens_in * 2.5e-6 + 300 * 10e-6)
    assert "estimate: 1 requests, about 517 tokens in, at most 300 out" in found.words()
    assert "$0.0043" in found.words()


def test_without_prices_the_estimate_tells_tokens() -> None:
    found = estimate(questions(3), None)
    assert found.usd is None
    assert "dollars unknown" in found.words()
    assert "(prices are not known: give --price-in" in found.words()
    at_home = estimate(questions(1, model="gpt-4o"), None).words()
    assert "known for gpt-4o at OpenAI's own address only, not at --base-url" in at_home
    with pytest.raises(UserError, match=r"which are known for gpt-4o at .*: give --price-in"):
        SpendingLimit(1.0, None, "gpt-4o")
    assert estimate([], None).words().startswith("nothing to ask")


def test_tokens_of_other_letters() -> None:
    assert estimate_tokens("") == 0
    assert estimate_tokens("日本語") == 3
    assert most_tokens("日本語") == 9
    assert most_tokens("abc") == 3


def test_known_prices_are_those_of_one_endpoint() -> None:
    assert prices_of("gpt-4o", OPENAI_URL, None, None) == Prices(2.5, 10.0)
    assert prices_of("gpt-4o-mini", OPENAI_URL, None, None) == Prices(0.15, 0.6)
    assert prices_of("gpt-4-turbo", OPENAI_URL, None, None) == Prices(10.0, 30.0)
    assert prices_of("gpt-4o", "http://localhost:8000/v1", None, None) is None
    assert prices_of("gpt-99", OPENAI_URL, None, None) is None
    assert prices_of("gpt-4o", OPENAI_URL, 1.0, 2.0) == Prices(1.0, 2.0)


@pytest.mark.parametrize(("price_in", "price_out"), [(1.0, None), (None, 1.0)])
def test_one_price_is_no_price(price_in: float | None, price_out: float | None) -> None:
    with pytest.raises(UserError, match="both or neither"):
        prices_of("m", OPENAI_URL, price_in, price_out)


@pytest.mark.parametrize("value", [-1.0, float("nan"), float("inf")])
def test_prices_that_are_none(value: float) -> None:
    with pytest.raises(UserError, match="--price-out"):
        Prices(1.0, value)


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf")])
def test_limits_that_are_none(value: float) -> None:
    with pytest.raises(UserError, match="--max-usd"):
        SpendingLimit(value, DOLLAR_A_TOKEN)


def test_a_limit_needs_prices() -> None:
    with pytest.raises(UserError, match=r"--price-in and --price-out"):
        SpendingLimit(1.0, None)


def test_what_is_too_dear_does_not_begin() -> None:
    limit = SpendingLimit(9.99, DOLLAR_A_TOKEN)
    with pytest.raises(UserError, match=r"9.99 is not enough.*\$10.0000.*nothing was sent"):
        limit.check(estimate(questions(5), DOLLAR_A_TOKEN))
    SpendingLimit(10.0, DOLLAR_A_TOKEN).check(estimate(questions(5), DOLLAR_A_TOKEN))


def spend(
    path: Path, rule: Any, usd: float, *, num_threads: int, count: int = 30, **named: Any
) -> tuple[int, float, int]:
    """Ask until the limit; answers kept, dollars spent, requests the server saw."""
    limit = SpendingLimit(usd, DOLLAR_A_TOKEN)
    with JudgeServer(rule) as server:
        with connect(server, num_threads=num_threads, **named) as endpoint:
            transcript = Transcript(path)
            with pytest.raises(SpendingStopped, match=r"spending limit is reached.*are kept in"):
                transcript.ask_all(questions(count), endpoint, limit=limit)
        return len(transcript), limit.spent, len(server.requests)


@pytest.mark.parametrize("num_threads", [1, 7])
def test_it_stops_before_the_next_answer_could_pass_the_limit(
    num_threads: int, tmp_path: Path
) -> None:
    """Each answer costs $1 and could cost $2: with $4 of 5 spent the next is not asked."""

    def rule(body: dict[str, Any]) -> Response:
        return good("m", usage=(3, 1))

    found = spend(tmp_path / "t", rule, 5.0, num_threads=num_threads)
    assert found == (4, 4.0, 4)


def test_what_is_under_way_counts_at_its_worst(tmp_path: Path) -> None:
    """$2 each: of $7 three answers can be paid, and no fourth is ever sent."""

    def rule(body: dict[str, Any]) -> Response:
        time.sleep(0.02)
        return good("m", usage=(3, 2))

    assert spend(tmp_path / "t", rule, 7.0, num_threads=8) == (3, 6.0, 3)


def test_refusals_are_free_and_lost_answers_are_not(tmp_path: Path) -> None:
    """Each $2 that was lost on the way may have been billed; an error 500 was not."""
    left: list[Response | Drop] = [error(500), error(429), Drop("{"), (200, {}, "garbage")]

    def rule(body: dict[str, Any]) -> Response:
        problem = left.pop(0) if left else good("m", usage=(3, 1))
        if isinstance(problem, Drop):
            raise problem
        return problem

    found = spend(tmp_path / "t", rule, 8.0, num_threads=1)
    assert found == (3, 2 + 2 + 3.0, 2 + 2 + 3)


def test_answers_without_usage_count_at_their_worst(tmp_path: Path) -> None:
    found = spend(tmp_path / "t", lambda body: good("m", usage=None), 5.0, num_threads=3)
    assert found == (2, 4.0, 2)


def test_a_server_that_was_never_reached_costs_nothing() -> None:
    with JudgeServer() as server:
        pass
    limit = SpendingLimit(5.0, DOLLAR_A_TOKEN)
    with connect(server, max_attempts=6) as endpoint, pytest.raises(EndpointError):
        endpoint.ask(questions(1)[0], limit=limit)
    assert limit.spent == 0.0


def test_input_is_paid_too() -> None:
    limit = SpendingLimit(1.0, Prices(1_000.0, 2_000.0))
    request = Request("judge", (("user", "é" * 50),), max_tokens=10)
    assert limit.worst(request) == pytest.approx((100 + TOKENS_PER_MESSAGE) * 1e-3 + 10 * 2e-3)
    with JudgeServer(lambda body: good("m", usage=(40, 3))) as server, connect(server) as endpoint:
        endpoint.ask(request, limit=limit)
    assert limit.spent == pytest.approx(40 * 1e-3 + 3 * 2e-3)


def test_kept_answers_are_free(tmp_path: Path) -> None:
    limit = SpendingLimit(5.0, DOLLAR_A_TOKEN)
    with JudgeServer(lambda body: good("m", usage=(3, 1))) as server, connect(server) as endpoint:
        transcript = Transcript(tmp_path / "t")
        transcript.ask_all(questions(3), endpoint)
        asked = transcript.ask_all(questions(5), endpoint, limit=limit)
    assert (asked.num_kept, asked.num_new, limit.spent) == (3, 2, 2.0)


def test_stopping_ends_the_waiting_for_room() -> None:
    limit, stop = SpendingLimit(2.0, DOLLAR_A_TOKEN), threading.Event()
    request = questions(1)[0]
    ended: list[str] = []

    def wait() -> None:
        try:
            with limit.attempt(request, stop):
                ended.append("went on")
        except Exception as error:
            ended.append(type(error).__name__)

    with limit.attempt(request, stop) as bill:
        thread = threading.Thread(target=wait)
        thread.start()
        stop.set()
        thread.join(10)
        bill.free()
    assert ended == ["Stopped"]
    assert limit.spent == 0.0
