"""Asks an OpenAI-compatible endpoint, patiently: rate limit, back-off, time limits, no secrets.

The ``openai`` package sends and follows the protocol; retries are ours, so that each attempt is
counted against the rate and the spending limit and told in the transcript. The key is read from
the environment and goes into one header: in no text that leaves this file does it occur.
"""

from __future__ import annotations

import contextlib
import ipaddress
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from types import TracebackType
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from bellmask.judge.chat import (
    Answer,
    BadBody,
    Reply,
    Request,
    parameters,
    read_reply,
    refused_setting,
)
from bellmask.judge.endpoint_options import EndpointOptions, shown_variable
from bellmask.judge.failures import (
    EndpointError,
    Failure,
    Next,
    RequestFailed,
    Stopped,
    is_nobody_there,
    of_status,
)
from bellmask.judge.pace import Pace, Teller, back_off
from bellmask.utils.errors import UserError

if TYPE_CHECKING:
    from bellmask.judge.cost import SpendingLimit

__all__ = ["Answer", "Endpoint", "EndpointOptions", "Reply", "Request"]

SHORTEST_SECRET = 8
"""Shorter keys (EMPTY, none) are no secrets, and words that may well occur in an answer."""
ATTEMPTS_AT_NOBODY = 3
"""Where no connection was ever accepted, unless the user asks for another number of attempts."""
MOST_BYTES = 16 << 20
"""Of a body; a longer one is no answer."""


def _is_loopback(url: str) -> bool:
    host = urlsplit(url).hostname or ""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")


class Endpoint:
    """One endpoint; threads may share it. Close it, or use it in a ``with``."""

    def __init__(
        self,
        options: EndpointOptions,
        *,
        sleep: Callable[[float], None] | None = None,
        now: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        options.check()
        self.options = options
        self.name = options.url()
        """Base URL: what tells this endpoint from others."""
        key = options.key()
        self._openai = _openai()
        self._client = self._openai.OpenAI(
            api_key=key,
            base_url=self.name,
            max_retries=0,
            timeout=options.time_limit,
            # a proxy for the world outside cannot reach a server on this machine
            http_client=self._openai.DefaultHttpxClient(trust_env=not _is_loopback(self.name)),
        )
        self._pace = Pace(options.requests_per_minute, now)
        self._teller, self._was_reached = Teller(now), False
        self._sleep, self._now, self._wall = sleep, now, wall
        self._changes: dict[str, frozenset[str]] = {}
        """By model: settings it does not take. max_tokens goes by its newer name, others unsent."""
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return f"Endpoint({self.name})"

    def __enter__(self) -> Endpoint:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Let the connections go."""
        self._client.close()

    def ask(
        self,
        request: Request,
        *,
        limit: SpendingLimit | None = None,
        stop: threading.Event | None = None,
    ) -> Answer:
        """The answer, after as many attempts as it takes and the options allow.

        Raises UserError (a setting is wrong), EndpointError (asking makes no sense any more),
        RequestFailed (no answer to this one) or Stopped (``stop`` was set).
        """
        stop = stop or threading.Event()
        errors: list[str] = []
        start, attempts, failures = self._now(), 0, 0
        while True:
            self._pause(self._pace.take_turn(), stop)
            changes = self._changes.get(request.model, frozenset())
            outcome = self._attempt(request, changes, limit, stop)
            attempts += 1
            if isinstance(outcome, Reply):
                self._was_reached = True
                seconds = self._now() - start
                return Answer(outcome, attempts, tuple(errors), seconds, tuple(sorted(changes)))
            errors.append(outcome.words)
            self._was_reached |= not outcome.is_nobody
            if self._has_changed(request, changes, outcome):
                continue
            failures += 1
            self._raise_if_final(outcome, failures)
            count = f"attempt {failures + 1} of {self._most_attempts()}"
            self._teller.tell(f"{outcome.words}; trying again ({count})")
            if outcome.wait:
                self._pace.hold(outcome.wait)
            self._pause(max(back_off(request.key, failures), outcome.wait or 0.0), stop)

    def _pause(self, seconds: float, stop: threading.Event) -> None:
        if seconds > 0 and not stop.is_set():
            (self._sleep or stop.wait)(seconds)
        if stop.is_set():
            raise Stopped

    def _most_attempts(self) -> int:
        has_default = self.options.max_attempts == EndpointOptions.max_attempts
        is_short = has_default and not self._was_reached
        return ATTEMPTS_AT_NOBODY if is_short else self.options.max_attempts

    def _raise_if_final(self, failure: Failure, failures: int) -> None:
        where = f"the judge at {self.name}"
        if failure.then is Next.MEND:
            raise UserError(f"{where} refuses: {failure.words}")
        if failure.then is Next.NEVER:
            raise RequestFailed(failure.words, is_refused=True)
        if failure.wait is not None and failure.wait > self.options.max_wait:
            raise EndpointError(
                f"{where} asks to wait {failure.wait:,.0f} s ({failure.words}); "
                "run the same command again later"
            )
        if not self._was_reached and failures >= self._most_attempts():
            raise EndpointError(
                f"nobody answers at {self.name} ({failure.words}, attempts: {failures}); check "
                "--base-url and that the server runs"
            )
        if failures >= self.options.max_attempts:
            raise RequestFailed(
                f"no answer after {failures} attempts; last: {failure.words}", is_refused=False
            )

    def _has_changed(self, request: Request, sent: frozenset[str], failure: Failure) -> bool:
        """Whether the model refused a setting that is from now on sent otherwise, or not at all."""
        if not failure.refusal:
            return False
        refused = refused_setting(failure.refusal, parameters(request, sent))
        if refused is None:
            return False
        with self._lock:
            known = self._changes.get(request.model, frozenset())
            self._changes[request.model] = known | {refused}
        return True

    def _attempt(
        self,
        request: Request,
        changes: frozenset[str],
        limit: SpendingLimit | None,
        stop: threading.Event,
    ) -> Reply | Failure:
        """One attempt, with its money set aside for as long as it is under way."""
        if limit is None:
            return self._exchange(request, changes)
        with limit.attempt(request, stop) as bill:
            outcome = self._exchange(request, changes)
            if isinstance(outcome, Reply):
                bill.used(outcome)
            elif not outcome.may_be_billed:
                bill.free()
            return outcome

    def _exchange(self, request: Request, changes: frozenset[str]) -> Reply | Failure:
        """Send and read. Errors are turned into words here: they hold headers, hence the key."""
        sdk = self._openai
        try:
            body = self._clean(self._send(parameters(request, changes)))
            reply = read_reply(body, request)
            return replace(reply, text=self._clean(reply.text))
        except BadBody as error:
            return Failure(self._clean(str(error)), Next.AGAIN, may_be_billed=True)
        except sdk.APIStatusError as error:
            status, headers = error.status_code, error.response.headers
            failure = of_status(status, headers, error.response.text, self._wall())
            words = failure.words.replace("{variable}", shown_variable(self.options.key_variable))
            refusal = self._clean(failure.refusal)
            return replace(failure, words=self._clean(words), refusal=refusal)
        except (sdk.APITimeoutError, TimeoutError) as error:
            words = f"no answer within {self.options.time_limit:g} s"
            return Failure(words, Next.AGAIN, may_be_billed=_was_sent(error))
        except (sdk.APIConnectionError, *_http_errors(sdk)) as error:
            why = self._clean(str(error.__cause__ or error)) or type(error).__name__
            is_nobody = is_nobody_there(error)
            words = "connection refused" if is_nobody else f"the connection failed: {why}"
            sent = _was_sent(error)
            return Failure(words, Next.AGAIN, may_be_billed=sent, is_nobody=is_nobody)

    def _send(self, sent: Mapping[str, Any]) -> str:
        """The body of the reply; its reading has a time limit as a whole, not only per piece."""
        deadline = time.monotonic() + self.options.time_limit
        pieces: list[bytes] = []
        size = 0
        create = self._client.chat.completions.with_streaming_response.create
        with create(**sent) as response, contextlib.closing(response.iter_bytes()) as stream:
            for piece in stream:
                pieces.append(piece)
                size += len(piece)
                if time.monotonic() > deadline:
                    raise TimeoutError
                if size > MOST_BYTES:
                    raise BadBody(f"a body of more than {MOST_BYTES >> 20} MB")
        return b"".join(pieces).decode("utf-8", errors="replace")

    def _clean(self, text: str) -> str:
        """A text without the key, should a server repeat it."""
        key: str = self._client.api_key
        return text.replace(key, "***") if len(key) >= SHORTEST_SECRET else text


def _openai() -> Any:
    try:
        import openai
    except ImportError:
        raise UserError(
            "asking a judge at an endpoint needs openai: pip install 'bellmask[judge]'"
        ) from None
    return openai


def _was_sent(error: BaseException) -> bool:
    """Whether the request can have reached the endpoint, which then may have worked on it."""
    names = {kind.__name__ for kind in type(error.__cause__ or error).__mro__}
    return not names & {"ConnectError", "ConnectTimeout", "PoolTimeout", "ProxyError"}


def _http_errors(sdk: Any) -> tuple[type[Exception], ...]:
    """What the package's own HTTP library (httpx, since openai 3 httpx2) raises while reading."""
    roots = (kind.__module__.partition(".")[0] for kind in sdk.DefaultHttpxClient.__mro__)
    library = sys.modules[next(root for root in roots if root.startswith("httpx"))]
    return (library.HTTPError, library.StreamError)
