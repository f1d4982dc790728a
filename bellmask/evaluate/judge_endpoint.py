"""A judge behind an OpenAI-compatible endpoint: how it is asked, what that costs, what it said.

Requests have a rate limit, back-off and time limits. The ``openai`` package sends and follows the
protocol; retries are ours, so that each attempt is counted against the rate and the spending limit
and told in the transcript. Prices give an estimate before anything is sent, and a limit that is
kept while asking. The transcript holds every request and its answer; what is there is not asked
again. The key is read from the environment and goes into one header: in no text that leaves this
file does it occur.
"""

from __future__ import annotations

import contextlib
import fcntl
import ipaddress
import math
import os
import queue
import re
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from enum import Enum
from pathlib import Path
from types import TracebackType
from typing import Any
from urllib.parse import urlsplit

from bellmask.utils.errors import TrainingError, UserError
from bellmask.utils.files import has_kinds, is_number, is_whole, load_json, sanitize
from bellmask.utils.store import Store, content_key

# Where and how fast to ask a judge, and where its key comes from.

OPENAI_URL = "https://api.openai.com/v1"
NO_KEY = "none"
"""Sent to servers that want no key; the protocol has no way to send nothing."""
_ABOVE_ZERO = ("requests_per_minute", "num_threads", "time_limit", "max_attempts", "max_wait")


@dataclass(frozen=True)
class EndpointOptions:
    """Where and how fast to ask."""

    base_url: str | None = None
    """Address of an OpenAI-compatible API, up to and without /chat/completions; default:
    OPENAI_BASE_URL, else OpenAI's own."""
    key_variable: str = field(default="OPENAI_API_KEY", repr=False)
    """Environment variable that holds the key. Unset with a base URL given: no key is needed."""
    requests_per_minute: float | None = None
    """Rate limit over all threads, retries included; default: none."""
    num_threads: int = 8
    """Requests at the same time."""
    time_limit: float = 120.0
    """Seconds to wait for one answer."""
    max_attempts: int = 6
    """Of one request, before it is given up."""
    max_wait: float = 600.0
    """Seconds: an endpoint that asks to wait longer (Retry-After) ends the command."""

    def check(self) -> None:
        """Refuse what cannot work."""
        for name in _ABOVE_ZERO:
            value = getattr(self, name)
            if value is not None and not 0 < value < float("inf"):
                raise UserError(f"--{name.replace('_', '-')} must be above 0, got {value}")
        self.url()

    def url(self) -> str:
        """The base URL that counts, without a slash at the end."""
        url = (self.base_url or os.environ.get("OPENAI_BASE_URL") or OPENAI_URL).strip()
        advice = "give --base-url like http://localhost:8000/v1"
        try:
            parts = urlsplit(url)
            is_sound = parts.scheme in ("http", "https") and bool(parts.hostname)
            is_sound = is_sound and parts.port != 0
        except ValueError:
            is_sound = False
        if not is_sound:
            raise UserError(f"the judge's base URL is not an http(s) address; {advice}")
        if "@" in parts.netloc or parts.query or parts.fragment:  # may be secrets: not repeated
            raise UserError(f"a base URL holds no password and no question mark; {advice}")
        if parts.path.rstrip("/").endswith("/completions"):
            raise UserError(f"leave /chat/completions off the base URL {url}; {advice}")
        return url.rstrip("/")

    def key(self) -> str:
        """The key, or a placeholder for servers that want none."""
        key = os.environ.get(self.key_variable, "").strip()
        shown = shown_variable(self.key_variable)
        if not key and not (self.base_url or os.environ.get("OPENAI_BASE_URL")):
            raise UserError(
                f"{shown} is not set; put the endpoint's key there, or give --base-url of a "
                "server that needs none"
            )
        if not (key.isascii() and key.isprintable()) or " " in key:
            raise UserError(f"what {shown} holds is no key: it has blanks or strange letters")
        return key or NO_KEY


def shown_variable(name: str) -> str:
    """A variable's name; if it does not look like one it may be the key itself, and is not told."""
    is_name = re.fullmatch(r"[A-Z_][A-Z0-9_]{0,60}", name) is not None
    return f"the environment variable {name}" if is_name else "what --key-variable names"


# When to ask: a rate limit shared by all threads, and how long to wait after a failure.

FIRST_WAIT = 1.0
LONGEST_BACK_OFF = 60.0


TELL_SECONDS = 30.0


class Teller:
    """Says on stderr that an endpoint fails: the first time, then at most every half minute."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now, self._next = now, -float("inf")
        self._lock = threading.Lock()

    def tell(self, words: str) -> None:
        """A note, unless there was one just now."""
        with self._lock:
            if self._now() < self._next:
                return
            self._next = self._now() + TELL_SECONDS
        print(f"note: {words}", file=sys.stderr, flush=True)


class Pace:
    """Hands out turns: never more than ``per_minute`` in any minute, evenly spaced."""

    def __init__(self, per_minute: float | None, now: Callable[[], float]) -> None:
        self._gap = 60.0 / per_minute if per_minute else 0.0
        self._now = now
        self._next = now()
        self._lock = threading.Lock()

    def take_turn(self) -> float:
        """Seconds until the next free turn, which is now the caller's."""
        with self._lock:
            now = self._now()
            start = max(now, self._next)
            self._next = start + self._gap
            return start - now

    def hold(self, seconds: float) -> None:
        """No further turn for so long: the endpoint asked for it."""
        with self._lock:
            self._next = max(self._next, self._now() + seconds)


def back_off(key: str, attempt: int) -> float:
    """Seconds after the ``attempt``-th failure (from 1): doubling, times a keyed half to one."""
    whole = min(FIRST_WAIT * 2.0 ** (attempt - 1), LONGEST_BACK_OFF)
    share = int(content_key("jitter", key, attempt), 16) / 16**24
    return whole * (0.5 + 0.5 * share)


def retry_after(headers: Mapping[str, str], wall: float) -> float | None:
    """Seconds an endpoint asks to wait; None where it does not say so understandably.

    Seconds or a date. A date is compared with the endpoint's own clock where it tells it.
    """
    milliseconds = _number(headers.get("retry-after-ms"))
    if milliseconds is not None:
        return milliseconds / 1000.0
    value = headers.get("retry-after")
    seconds = _number(value)
    if seconds is not None:
        return seconds
    until = _date(value)
    if until is None:
        return None
    sent = _date(headers.get("date"))
    return max(0.0, until - (wall if sent is None else sent))


def _number(value: str | None) -> float | None:
    """A count that is not negative (nor infinite, nor NaN)."""
    try:
        number = float(value or "")
    except ValueError:
        return None
    return number if 0.0 <= number < float("inf") else None


def _date(value: str | None) -> float | None:
    try:
        date = parsedate_to_datetime(value or "")
    except (ValueError, TypeError):
        return None
    return (date if date.tzinfo else date.replace(tzinfo=UTC)).timestamp()


# How many tokens a text is, without the judge's tokenizer: an estimate and an upper bound.

CHARACTERS_PER_TOKEN = 4
"""Of English text; other letters count as a token each."""
TOKENS_PER_MESSAGE = 8
"""Role and separators, rounded up."""


def estimate_tokens(text: str) -> int:
    """About how many tokens; within a third or so for English prose."""
    num_ascii = sum(letter < "\x80" for letter in text)
    return math.ceil(num_ascii / CHARACTERS_PER_TOKEN + len(text) - num_ascii)


def most_tokens(text: str) -> int:
    """No byte-level tokenizer makes more: a token is at least one byte."""
    return len(text.encode("utf-8", errors="replace"))


def prompt_tokens(messages: Sequence[tuple[str, str]]) -> int:
    """The estimate for a whole prompt."""
    return sum(estimate_tokens(content) + TOKENS_PER_MESSAGE for _, content in messages)


def most_prompt_tokens(messages: Sequence[tuple[str, str]]) -> int:
    """The upper bound for a whole prompt."""
    return sum(most_tokens(content) + TOKENS_PER_MESSAGE for _, content in messages)


# One question to a chat-completions endpoint and its reply, in the words of that API.

MAX_TOP_LOGPROBS = 20
"""What the API gives at most."""


@dataclass(frozen=True)
class ChatRequest:
    """Everything that decides an answer."""

    model: str
    """The judge's name at the endpoint."""
    messages: tuple[tuple[str, str], ...]
    """(role, content) of each."""
    temperature: float = 0.0
    """0: the likeliest token each time, as far as the endpoint keeps that promise."""
    max_tokens: int = 1024
    """Tokens of the answer at most."""
    logprobs: int = 0
    """Log-probabilities of the first token: of the so many likeliest; 0: none."""
    repeat: int = 0
    """Asks the same again: sent as the seed, unless 0."""
    endpoint: str = ""
    """Where it is asked (:attr:`Endpoint.name`): two servers' models of one name are not mixed."""

    def __post_init__(self) -> None:
        if not self.model.strip():
            raise UserError("the judge needs a model name: --judge MODEL")
        if not self.messages:
            raise UserError("a request to the judge needs at least one message")
        if not 0.0 <= self.temperature <= 2.0:
            raise UserError(f"the judge's temperature must be in [0, 2], got {self.temperature}")
        if self.max_tokens < 1:
            raise UserError(f"the judge's answer needs at least 1 token, got {self.max_tokens}")
        if not 0 <= self.logprobs <= MAX_TOP_LOGPROBS:
            raise UserError(
                f"an endpoint gives 0 to {MAX_TOP_LOGPROBS} top log-probabilities, "
                f"not {self.logprobs}"
            )

    def to_dict(self) -> dict[str, Any]:
        """All fields, for JSON."""
        return {
            "model": self.model,
            "messages": [list(message) for message in self.messages],
            "temperature": float(self.temperature),
            "max_tokens": self.max_tokens,
            "logprobs": self.logprobs,
            "repeat": self.repeat,
            "endpoint": self.endpoint,
        }

    @property
    def key(self) -> str:
        """Its name in a transcript."""
        return content_key("chat", self.to_dict())


@dataclass(frozen=True)
class Reply:
    """What came back."""

    text: str
    top_logprobs: dict[str, float] = field(default_factory=dict)
    """Of the first token: token and log-probability; empty where none were asked or given."""
    prompt_tokens: int = 0
    completion_tokens: int = 0
    finish_reason: str | None = None
    is_usage_estimated: bool = False
    """The endpoint did not say how many tokens it counted."""


@dataclass(frozen=True)
class ChatAnswer:
    """A reply and how it was got."""

    reply: Reply
    attempts: int
    errors: tuple[str, ...]
    """What went wrong on the way."""
    seconds: float
    changes: tuple[str, ...] = ()
    """Settings the model refused: not sent, but max_tokens, which has a newer name."""


class BadBody(ValueError):
    """A body that is not what the API promises."""


def parameters(request: ChatRequest, changes: frozenset[str]) -> dict[str, Any]:
    """The body to send; ``changes`` name the settings the model refused."""
    messages = [{"role": role, "content": content} for role, content in request.messages]
    body: dict[str, Any] = {"model": request.model, "messages": messages}
    if "temperature" not in changes:
        body["temperature"] = request.temperature
    limit = "max_completion_tokens" if "max_tokens" in changes else "max_tokens"
    body[limit] = request.max_tokens
    if request.logprobs and "logprobs" not in changes:
        body |= {"logprobs": True, "top_logprobs": request.logprobs}
    if request.repeat and "seed" not in changes:
        body["seed"] = request.repeat
    return body


REFUSALS = ("unsupported", "not support", "not permitted", "unknown", "unrecognized", "instead")
CHANGEABLE = ("max_tokens", "temperature", "logprobs", "seed")


def refused_setting(message: str, sent: dict[str, Any]) -> str | None:
    """The setting that a model says it does not take, of those that can be sent otherwise."""
    lowered = message.lower()
    if not any(words in lowered for words in REFUSALS):
        return None
    return next((name for name in CHANGEABLE if name in sent and name in lowered), None)


def read_reply(body: str, request: ChatRequest) -> Reply:
    """The reply in a body; :class:`BadBody` where it is not a chat completion."""
    if not body.strip():
        raise BadBody("an empty body")
    try:
        content = load_json(body)
    except ValueError:
        raise BadBody(f"not JSON: {shortened(body)!r}") from None
    if isinstance(content, dict) and content.get("error"):
        raise BadBody(f"an error instead of an answer: {error_message(body)}")
    try:
        choice = content["choices"][0]
        text = choice["message"]["content"]
        if text is None:  # the API's way to say that it refuses, or that no text was made
            text = choice["message"].get("refusal") or ""
        if not isinstance(text, str):
            raise TypeError
    except (KeyError, IndexError, TypeError, AttributeError):
        raise BadBody(f"JSON, but no chat completion: {shortened(body)!r}") from None
    reason = choice.get("finish_reason")
    counts = _usage(content)
    return Reply(
        text=sanitize(text),
        top_logprobs=_top_logprobs(choice) if request.logprobs else {},
        prompt_tokens=counts[0] if counts else prompt_tokens(request.messages),
        completion_tokens=counts[1] if counts else estimate_tokens(text),
        finish_reason=reason if isinstance(reason, str) else None,
        is_usage_estimated=counts is None,
    )


def _usage(content: dict[str, Any]) -> tuple[int, int] | None:
    usage = content.get("usage")
    if not isinstance(usage, dict):
        return None
    counts = [usage.get(name) for name in ("prompt_tokens", "completion_tokens")]
    if not all(type(count) is int and count >= 0 for count in counts):
        return None
    return counts[0], counts[1]  # type: ignore[return-value]


def _top_logprobs(choice: dict[str, Any]) -> dict[str, float]:
    """Token and log-probability of the first position; what is no number is left out."""
    try:
        entries = choice["logprobs"]["content"][0]["top_logprobs"]
        pairs = [(entry["token"], entry["logprob"]) for entry in entries]
    except (KeyError, IndexError, TypeError):
        return {}
    found: dict[str, float] = {}
    for token, value in pairs:
        is_logprob = is_number(value) and math.isfinite(value) and value <= 0
        if isinstance(token, str) and is_logprob:
            found.setdefault(sanitize(token), float(value))
    return found


def error_message(body: str) -> str:
    """What an endpoint says is wrong: its message where there is one, else how the body begins."""
    try:
        error = load_json(body)
        error = error.get("error", error)
        message = error if isinstance(error, str) else error["message"]
        if not isinstance(message, str):
            raise TypeError
    except (ValueError, KeyError, TypeError, AttributeError):
        message = body
    return shortened(message) or "nothing"


def error_code(body: str) -> str:
    """The API's word for what is wrong, or nothing."""
    try:
        error = load_json(body)["error"]
        return str(error.get("code") or error.get("type") or "")
    except (ValueError, KeyError, TypeError, AttributeError):
        return ""


def shortened(text: str, length: int = 300) -> str:
    """One line, not too long."""
    line = " ".join(text[: 4 * length].split())
    return line if len(line) <= length else line[: length - 3] + "..."


# What went wrong with an attempt, and what follows: again, never again, or a user's mistake.

RETRIED = (408, 409, 425, 429)
"""And all of 500 and above."""
GATEWAY_TIME_OUTS = (408, 504, 524)
"""Someone on the way lost patience; the model may have answered."""
NO_CREDIT = ("insufficient_quota", "billing_hard_limit_reached", "billing_not_active")
ABOUT_THE_TEXT = ("context_length_exceeded", "content_filter", "content_policy_violation")
"""The prompt's fault, not the settings': other requests may do well."""


class EndpointError(TrainingError):
    """Asking cannot go on; what was answered is kept. Exit code 1."""


class RequestFailed(Exception):
    """One request got no answer; others may."""

    def __init__(self, message: str, *, is_refused: bool) -> None:
        super().__init__(message)
        self.is_refused = is_refused
        """The endpoint will not answer this one; else it failed too often."""


def is_nobody_there(error: BaseException | None) -> bool:
    """Whether a refused connection is behind an error."""
    while error is not None and not isinstance(error, ConnectionRefusedError):
        error = error.__cause__ or error.__context__
    return error is not None


class Stopped(Exception):
    """Asked to stop before an answer came."""


class Next(Enum):
    """What follows a failure."""

    AGAIN = "again"
    NEVER = "never"
    """This request has no answer."""
    MEND = "mend"
    """The user has to change something."""


@dataclass(frozen=True)
class Failure:
    """An attempt without an answer."""

    words: str
    then: Next
    wait: float | None = None
    """Seconds the endpoint asks to wait."""
    may_be_billed: bool = False
    """The endpoint may have made an answer that was lost on the way."""
    refusal: str = ""
    """What the endpoint said of a request it does not take."""
    is_nobody: bool = False
    """Nobody listens there: the connection was refused."""


def of_status(status: int, headers: Mapping[str, str], body: str, wall: float) -> Failure:
    """What an HTTP status says."""
    message, code = error_message(body), error_code(body)
    words = f"HTTP {status}: {message}"
    if status == 429 and code in NO_CREDIT:
        return Failure(f"{words}; the account has no credit left, see its billing page", Next.MEND)
    if status in RETRIED or status >= 500:
        wait = retry_after(headers, wall)
        return Failure(words, Next.AGAIN, wait, may_be_billed=status in GATEWAY_TIME_OUTS)
    if status == 413 or code in ABOUT_THE_TEXT or "maximum context length" in message:
        return Failure(words, Next.NEVER)
    if status in (400, 422):
        return Failure(f"{words}; {ADVICE[400]}", Next.MEND, refusal=body)
    return Failure(f"{words}; {ADVICE.get(status, ADVICE[404])}", Next.MEND)


ADVICE = {
    400: "check --judge (the model's name) and the settings of the judge",
    401: "check the key in {variable}",
    402: "the account has no credit left, see its billing page",
    403: "check that the key in {variable} may use this model",
    404: "check --judge (the model's name) and --base-url (it often ends in /v1)",
}


# Asking: one endpoint, shared by threads, and its retries.

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
        request: ChatRequest,
        *,
        limit: SpendingLimit | None = None,
        stop: threading.Event | None = None,
    ) -> ChatAnswer:
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
                return ChatAnswer(outcome, attempts, tuple(errors), seconds, tuple(sorted(changes)))
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

    def _has_changed(self, request: ChatRequest, sent: frozenset[str], failure: Failure) -> bool:
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
        request: ChatRequest,
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

    def _exchange(self, request: ChatRequest, changes: frozenset[str]) -> Reply | Failure:
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


# What asking costs: an estimate before anything is sent, and a limit that is kept while asking.

MILLION = 1_000_000


@dataclass(frozen=True)
class Prices:
    """US dollars per million tokens."""

    input: float
    output: float

    def __post_init__(self) -> None:
        for option, value in (("--price-in", self.input), ("--price-out", self.output)):
            if not (math.isfinite(value) and value >= 0):
                raise UserError(f"{option} is in US dollars per million tokens, got {value}")

    def usd(self, num_input: int, num_output: int) -> float:
        """Of so many tokens."""
        return (num_input * self.input + num_output * self.output) / MILLION


# OpenAI's published prices as of 2025, without discounts (cached input, batches). They may have
# changed since: --price-in and --price-out go first.
KNOWN_PRICES = {
    "gpt-4o": Prices(2.50, 10.00),
    "gpt-4o-2024-08-06": Prices(2.50, 10.00),
    "gpt-4o-mini": Prices(0.15, 0.60),
    "gpt-4o-mini-2024-07-18": Prices(0.15, 0.60),
    "gpt-4-turbo": Prices(10.00, 30.00),
    "gpt-4-turbo-2024-04-09": Prices(10.00, 30.00),
    "gpt-4-1106-preview": Prices(10.00, 30.00),
}


def prices_of(
    model: str, base_url: str, price_in: float | None, price_out: float | None
) -> Prices | None:
    """Prices as given, else those known of OpenAI's own endpoint, else None: unknown."""
    if (price_in is None) != (price_out is None):
        raise UserError("--price-in and --price-out go together: give both or neither")
    if price_in is not None and price_out is not None:
        return Prices(price_in, price_out)
    is_openai = urlsplit(base_url).hostname == "api.openai.com"
    return KNOWN_PRICES.get(model) if is_openai else None


def why_unknown(model: str) -> str:
    """Why there are no prices."""
    if model in KNOWN_PRICES:
        return f"known for {model} at OpenAI's own address only, not at --base-url"
    return "not known"


def cost_of(replies: Iterable[Reply], prices: Prices) -> float:
    """Dollars that these answers cost."""
    return sum(prices.usd(reply.prompt_tokens, reply.completion_tokens) for reply in replies)


@dataclass(frozen=True)
class Estimate:
    """About how much a set of requests will cost. No failed attempts are counted."""

    num_requests: int
    num_input: int
    """Tokens, estimated: four characters are one."""
    num_output: int
    """Tokens, if each answer is as long as it may be."""
    usd: float | None
    """None: prices unknown."""
    model: str = ""
    """Who is asked."""

    def words(self) -> str:
        """One sentence."""
        if not self.num_requests:
            return "nothing to ask: all answers are kept from before"
        size = f"about {self.num_input:,} tokens in, at most {self.num_output:,} out"
        why = f"prices are {why_unknown(self.model)}: give --price-in and --price-out"
        cost = f"dollars unknown ({why})" if self.usd is None else f"at most about ${self.usd:,.4f}"
        return f"estimate: {self.num_requests:,} requests, {size}, {cost}"


def estimate(requests: Iterable[ChatRequest], prices: Prices | None) -> Estimate:
    """Before anything is sent."""
    unique = list({request.key: request for request in requests}.values())
    num_input = sum(prompt_tokens(request.messages) for request in unique)
    num_output = sum(request.max_tokens for request in unique)
    usd = prices.usd(num_input, num_output) if prices else None
    return Estimate(len(unique), num_input, num_output, usd, unique[0].model if unique else "")


class SpendingStopped(EndpointError):
    """The spending limit is reached; what was answered is kept."""


class SpendingLimit:
    """Dollars that one command may spend.

    What is under way counts as if it took every token it may (a token for each byte of the prompt,
    the longest answer), what has ended by the usage that was reported. Attempts whose answer was
    lost may have been billed: they stay at their worst. Answers kept from before are free.
    """

    def __init__(self, max_usd: float, prices: Prices | None, model: str = "") -> None:
        if not (math.isfinite(max_usd) and max_usd > 0):
            raise UserError(f"--max-usd must be above 0, got {max_usd}")
        if prices is None:
            raise UserError(
                f"--max-usd needs the judge's prices, which are {why_unknown(model)}: give "
                "--price-in and --price-out (US dollars per million tokens)"
            )
        self.max_usd, self.prices = max_usd, prices
        self.spent = 0.0
        self._under_way: dict[int, float] = {}
        self._settled = threading.Condition()

    def check(self, estimate: Estimate) -> None:
        """Refuse to begin what would not be finished."""
        if estimate.usd is not None and estimate.usd > self.max_usd:
            raise UserError(
                f"--max-usd {self.max_usd:g} is not enough; {estimate.words()}. Raise it, or ask "
                "less; nothing was sent"
            )

    def worst(self, request: ChatRequest) -> float:
        """Dollars that one attempt can cost."""
        return self.prices.usd(most_prompt_tokens(request.messages), request.max_tokens)

    @contextlib.contextmanager
    def attempt(self, request: ChatRequest, stop: threading.Event) -> Iterator[Bill]:
        """Sets the worst case aside while an attempt is under way; then spends what the bill says.

        Waits while attempts under way may still leave room; raises SpendingStopped if none does.
        """
        bill = Bill(self.worst(request), self.prices)
        with self._settled:
            while not self._fits(bill.usd):
                if stop.is_set():
                    raise Stopped
                if not self._under_way:
                    raise SpendingStopped(self._words(bill.usd))
                self._settled.wait(0.5)
            self._under_way[id(bill)] = bill.usd
        try:
            yield bill
        finally:
            with self._settled:
                del self._under_way[id(bill)]
                self.spent += bill.usd
                self._settled.notify_all()

    def _fits(self, usd: float) -> bool:
        return self.spent + sum(self._under_way.values()) + usd <= self.max_usd

    def _words(self, usd: float) -> str:
        return (
            f"the spending limit is reached: ${self.spent:,.4f} of --max-usd {self.max_usd:g} "
            f"used, and the next request may cost ${usd:,.4f}"
        )


class Bill:
    """What one attempt costs: its worst case until something better is known."""

    def __init__(self, worst: float, prices: Prices) -> None:
        self.usd = worst
        self._prices = prices

    def used(self, reply: Reply) -> None:
        """An answer came, with its usage (where the endpoint tells none, the worst case stays)."""
        if not reply.is_usage_estimated:
            self.usd = self._prices.usd(reply.prompt_tokens, reply.completion_tokens)

    def free(self) -> None:
        """The endpoint refused."""
        self.usd = 0.0


# Every question to a judge and its answer, one line each; what is there is never asked again.

MOST_FAILURES = 10
"""In a row, after which the endpoint is taken to be down."""
GRACE_SECONDS = 15.0
"""After Ctrl-C: for answers under way, which are paid for."""


@dataclass(frozen=True)
class RequestResults:
    """What became of the requests of one call."""

    num_kept: int
    """Answers and refusals that were there before."""
    num_new: int
    """Answers that came."""
    failed: dict[str, str] = field(default_factory=dict)
    """Key of each request that failed, and why; they are asked again next time."""
    refused: dict[str, str] = field(default_factory=dict)
    """Of each that the endpoint will never answer (too long, filtered), now or before."""


class Transcript:
    """Answers and refusals by request, in a file that only grows."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._kept = Store(path, _is_right)

    def __len__(self) -> int:
        return len(self._kept)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return iter(self._kept)

    def get(self, request: ChatRequest) -> Reply | None:
        """The kept reply; None where there is none, or a refusal."""
        record = self._kept.get(request.key) or {}
        return Reply(**record["reply"]) if "reply" in record else None

    def refused(self, requests: Iterable[ChatRequest]) -> dict[str, str]:
        """Key of each that the endpoint will never answer, and why."""
        records = [self._kept.get(request.key) or {} for request in requests]
        return {record["key"]: record["refused"] for record in records if "refused" in record}

    def refused_settings(self, requests: Iterable[ChatRequest]) -> set[str]:
        """Settings that the judge did not take when it answered these."""
        records = [self._kept.get(request.key) or {} for request in requests]
        return {name for record in records for name in record.get("refused_settings", ())}

    def missing(self, requests: Iterable[ChatRequest]) -> list[ChatRequest]:
        """Those with neither an answer nor a refusal, each once, in their order."""
        unique = {request.key: request for request in requests}
        return [request for key, request in unique.items() if key not in self._kept]

    def add(self, request: ChatRequest, answer: ChatAnswer) -> None:
        """Keep an answer; it is on disk when this returns."""
        record = {
            "key": request.key,
            "request": request.to_dict(),
            "reply": asdict(answer.reply),
            "attempts": answer.attempts,
            "errors": list(answer.errors),
            "refused_settings": list(answer.changes),
            "seconds": round(answer.seconds, 3),
            "at": _now(),
        }
        self._kept.add([record])

    def add_refusal(self, request: ChatRequest, words: str) -> None:
        """Keep that the endpoint will never answer, and why."""
        about = {"key": request.key, "request": request.to_dict()}
        self._kept.add([{**about, "refused": words, "at": _now()}])

    def ask_all(
        self,
        requests: Iterable[ChatRequest],
        endpoint: Endpoint,
        on_done: Callable[[int, int], None] | None = None,
        *,
        limit: SpendingLimit | None = None,
        max_failures: int = MOST_FAILURES,
    ) -> RequestResults:
        """Ask what is missing, and keep each answer as it comes.

        ``on_done`` gets (done, total), what was kept before included. Errors and Ctrl-C are raised
        after the answers under way have been kept; they say how many there are.
        """
        everything = list({request.key: request for request in requests}.values())
        with _only_asker(self.path):
            self._kept = Store(self.path, _is_right)  # another process may have answered some
            missing = self.missing(everything)
            kept = len(everything) - len(missing)

            def show(done: int) -> None:
                if on_done is not None:
                    on_done(kept + done, len(everything))

            show(0)
            round_ = _Round(self, missing, endpoint, limit, max_failures)
            failed = round_.run(show)
        return RequestResults(kept, round_.num_new, failed, self.refused(everything))


def _is_right(record: dict[str, Any]) -> bool:
    """A line that holds a refusal, or a reply with all of its parts."""
    if "reply" not in record:
        return isinstance(record.get("refused"), str)
    kinds = {"text": str, "top_logprobs": dict, "is_usage_estimated": bool}
    reply, names = record["reply"], record.get("refused_settings", [])
    return (
        has_kinds(reply, kinds)
        and reply.keys() <= Reply.__dataclass_fields__.keys()
        and all(map(is_number, reply["top_logprobs"].values()))
        and all(is_whole(reply.get(name, 0)) for name in ("prompt_tokens", "completion_tokens"))
        and isinstance(reply.get("finish_reason"), str | None)
        and isinstance(names, list)
        and all(isinstance(name, str) for name in names)
    )


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


@contextlib.contextmanager
def _only_asker(path: Path) -> Iterator[None]:
    """Two processes on one transcript would ask the same."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab") as stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise UserError(
                f"another process is asking for {path}; wait for it, then run this again: "
                "it finds the answers there"
            ) from None
        yield


_GOES_ON, _ENDED = "goes on", "ended"
"""What a thread tells after each request, and at its end."""


class _Round:
    """Threads that ask, each keeping what it gets; the caller's thread watches."""

    def __init__(
        self,
        transcript: Transcript,
        missing: list[ChatRequest],
        endpoint: Endpoint,
        limit: SpendingLimit | None,
        max_failures: int,
    ) -> None:
        self.transcript, self.endpoint, self.limit = transcript, endpoint, limit
        self.num, self.max_failures = len(missing), max_failures
        self.stop = threading.Event()
        self._todo: queue.SimpleQueue[ChatRequest] = queue.SimpleQueue()
        self._results: queue.SimpleQueue[BaseException | str] = queue.SimpleQueue()
        self._writing = threading.Lock()
        self._failed: dict[str, str] = {}
        self.num_new = self._num_refused = self._in_a_row = 0
        for request in missing:
            self._todo.put(request)

    def run(self, show: Callable[[int], None]) -> dict[str, str]:
        """Why each request that failed did."""
        num_threads = min(self.endpoint.options.num_threads, self.num)
        # daemons: after a second Ctrl-C nobody waits for them
        threads = [threading.Thread(target=self._work, daemon=True) for _ in range(num_threads)]
        try:
            for thread in threads:
                thread.start()
            error = self._watch(num_threads, show)
        except KeyboardInterrupt:
            self.stop.set()
            self._wait_for(threads)
            raise KeyboardInterrupt(f"interrupted; {self._words()}") from None
        finally:
            self.stop.set()
        for thread in threads:
            thread.join()
        if isinstance(error, UserError | EndpointError):
            raise type(error)(f"{error}; {self._words()}")
        if error is not None:
            raise error
        return self._failed

    def _work(self) -> None:
        """A thread: no signal reaches it, so an answer that came is kept."""
        while not self.stop.is_set():
            try:
                request = self._todo.get_nowait()
            except queue.Empty:
                break
            try:
                self._ask(request)
            except Stopped:
                break
            except BaseException as error:
                self.stop.set()
                self._results.put(error)
            else:
                self._results.put(_GOES_ON)
        self._results.put(_ENDED)

    def _ask(self, request: ChatRequest) -> None:
        """Ask, and keep what comes of it; raises what ends it all."""
        try:
            answer = self.endpoint.ask(request, limit=self.limit, stop=self.stop)
        except RequestFailed as error:
            with self._writing:
                self._note_failure(request, error)
            return
        with self._writing:
            self.transcript.add(request, answer)
            self.num_new += 1
            self._in_a_row = 0

    def _watch(self, num_threads: int, show: Callable[[int], None]) -> BaseException | None:
        """Until all threads have ended; the error that stopped them, if any."""
        first: BaseException | None = None
        while num_threads:
            result = self._results.get()
            if isinstance(result, BaseException):
                first = first or result
            num_threads -= result == _ENDED
            show(self.num_new + self._num_refused)
        return first

    def _note_failure(self, request: ChatRequest, error: RequestFailed) -> None:
        """Raises if this was one failure too many."""
        if error.is_refused:
            self.transcript.add_refusal(request, str(error))
            self._num_refused += 1
            return
        self._failed[request.key] = str(error)
        self._in_a_row += 1
        if self._in_a_row >= self.max_failures and not self.stop.is_set():
            self.stop.set()
            words = f"failed {self.max_failures} requests in a row: {error}"
            raise EndpointError(f"the judge at {self.endpoint.name} {words}")

    def _wait_for(self, threads: list[threading.Thread]) -> None:
        deadline = time.monotonic() + GRACE_SECONDS
        for thread in threads:
            if thread.is_alive():
                thread.join(max(0.0, deadline - time.monotonic()))

    def _words(self) -> str:
        return (
            f"{self.num_new} of {self.num} answers came and are kept in {self.transcript.path}; "
            "the same command asks only for the rest"
        )
