"""A judge behind an OpenAI-compatible endpoint: requests, cost, transcript.

Requests have a rate limit, back-off and time limits. The ``openai`` package implements the
protocol; retries are implemented here, so that each attempt counts against the rate and spending
limits and is recorded in the transcript. Prices give an estimate before anything is sent, and a
limit that is enforced while sending. The transcript contains every request and its answer; stored
requests are not sent again. The key is read from the environment and goes into one header: it is
removed from all text that leaves this file.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import random
import re
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

from filelock import FileLock, Timeout

from bellmask.utils.errors import TrainingError, UserError
from bellmask.utils.files import is_finite, is_whole, load_json, sanitize
from bellmask.utils.libraries import import_optional
from bellmask.utils.progress import NO_PROGRESS, Progress
from bellmask.utils.store import Store, content_key

logger = logging.getLogger(__name__)

# Endpoint, rate limits and API key of a judge.

OPENAI_URL = "https://api.openai.com/v1"
KEY = "OPENAI_API_KEY"
"""Environment variable with the key."""
NO_KEY = "none"
"""Sent to servers without a key, because the protocol requires one."""


@dataclass(frozen=True)
class EndpointOptions:
    """Endpoint and rate limits."""

    base_url: str | None = None
    """Base URL of an OpenAI-compatible API, without /chat/completions; default:
    OPENAI_BASE_URL, else OpenAI's own. The key is read from OPENAI_API_KEY; without one, none is
    sent to such a server."""
    requests_per_minute: float | None = None
    """Rate limit over all threads, including retries; default: no limit."""
    num_threads: int = 8
    """Number of concurrent requests."""
    time_limit: float = 120.0
    """Timeout of a request in seconds."""
    max_attempts: int = 6
    """Maximum number of attempts per request."""

    def check(self) -> None:
        for name, value in asdict(self).items():
            if isinstance(value, int | float) and not 0 < value < float("inf"):
                raise UserError(f"--{name.replace('_', '-')} must be above 0, got {value}")
        self.url()

    def url(self) -> str:
        """The effective base URL, without a trailing slash."""
        url = (self.base_url or os.environ.get("OPENAI_BASE_URL") or OPENAI_URL).strip()
        advice = "give --base-url like http://localhost:8000/v1"
        try:
            parts = urlsplit(url)
            is_address = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
        except ValueError:
            is_address = False
        # passwords and queries may be secrets: the address is not repeated
        if not is_address or "@" in parts.netloc or parts.query or parts.fragment:
            words = "the judge's base URL is an http(s) address without password and query"
            raise UserError(f"{words}; {advice}")
        if parts.path.rstrip("/").endswith("/completions"):
            raise UserError(f"the base URL {url} must not end in /chat/completions; {advice}")
        return url.rstrip("/")

    def key(self) -> str:
        """The key, or a placeholder for servers without one."""
        key = os.environ.get(KEY, "").strip()
        if not key and not (self.base_url or os.environ.get("OPENAI_BASE_URL")):
            raise UserError(f"{KEY} is not set; put the endpoint's key there, or give --base-url")
        if not (key.isascii() and key.isprintable()) or " " in key:
            raise UserError(f"{KEY} is not a valid key: it has spaces or unusual characters")
        return key or NO_KEY


# A request to a chat-completions endpoint, and its reply.

CHARACTERS_PER_TOKEN = 4
"""Of English text; other letters count as a token each."""
TOKENS_PER_MESSAGE = 8
"""Role and separators, rounded up."""


def estimate_tokens(text: str) -> int:
    """Approximate number of tokens; within about a third for English prose."""
    num_ascii = sum(letter < "\x80" for letter in text)
    return math.ceil(num_ascii / CHARACTERS_PER_TOKEN + len(text) - num_ascii)


@dataclass(frozen=True)
class ChatRequest:
    """Everything that determines an answer."""

    model: str
    """The judge's name at the endpoint."""
    messages: tuple[tuple[str, str], ...]
    """(role, content) of each."""
    max_tokens: int = 1024
    """Tokens of the answer at most."""
    logprobs: int = 0
    """Number of most likely first tokens to return with log-probabilities; 0: none."""
    endpoint: str = ""
    """The endpoint (:attr:`Endpoint.name`), so that models with one name on two servers are not
    mixed."""

    @property
    def key(self) -> str:
        """Its name in a transcript."""
        return content_key("chat", asdict(self))

    def prompt_tokens(self) -> int:
        """An estimate, without the judge's tokenizer."""
        return sum(estimate_tokens(content) + TOKENS_PER_MESSAGE for _, content in self.messages)

    def most_prompt_tokens(self) -> int:
        """Upper bound for byte-level tokenizers: a token is at least one byte."""
        contents = [content.encode("utf-8", errors="replace") for _, content in self.messages]
        return sum(len(content) + TOKENS_PER_MESSAGE for content in contents)

    def body(self, refused: frozenset[str]) -> dict[str, Any]:
        """The request body, without settings that the model rejected (max_tokens gets its newer
        name).
        """
        messages = [{"role": role, "content": content} for role, content in self.messages]
        body: dict[str, Any] = {"model": self.model, "messages": messages}
        if "temperature" not in refused:  # always the most likely token
            body["temperature"] = 0.0
        limit = "max_completion_tokens" if "max_tokens" in refused else "max_tokens"
        body[limit] = self.max_tokens
        if self.logprobs and "logprobs" not in refused:
            body |= {"logprobs": True, "top_logprobs": self.logprobs}
        return body


@dataclass(frozen=True)
class Reply:
    """A reply."""

    text: str
    top_logprobs: dict[str, float] = field(default_factory=dict)
    """For the first token: tokens and log-probabilities; empty if not requested or not returned."""
    prompt_tokens: int = 0
    completion_tokens: int = 0
    finish_reason: str | None = None
    is_usage_estimated: bool = False
    """The endpoint did not say how many tokens it counted."""


class BadBody(ValueError):
    """A response body that does not follow the API."""


CHANGEABLE = ("max_tokens", "temperature", "logprobs")
REFUSALS = ("unsupported", "not support", "not permitted", "unknown", "unrecognized", "instead")


def read_reply(body: str, request: ChatRequest) -> Reply:
    """The reply in a body; :class:`BadBody` if it is not a chat completion."""
    try:
        content = load_json(body)
        choice = content["choices"][0]
        text = choice["message"]["content"]
        if text is None:  # the API's way to report a refusal or an empty text
            text = choice["message"].get("refusal") or ""
        if not isinstance(text, str):
            raise TypeError
    except (ValueError, KeyError, IndexError, TypeError, AttributeError):
        raise BadBody(f"not a chat completion: {shortened(body)!r}") from None
    reason, usage = choice.get("finish_reason"), content.get("usage")
    reason = reason if isinstance(reason, str) else None
    told = usage if isinstance(usage, dict) else {}
    counts: list[Any] = [told.get(name) for name in ("prompt_tokens", "completion_tokens")]
    is_told = all(map(is_whole, counts))
    read, written = counts if is_told else (request.prompt_tokens(), estimate_tokens(text))
    top = _top_logprobs(choice) if request.logprobs else {}
    return Reply(sanitize(text), top, read, written, reason, is_usage_estimated=not is_told)


def _top_logprobs(choice: dict[str, Any]) -> dict[str, float]:
    """Token and log-probability of the first position; invalid numbers are dropped."""
    try:
        entries = choice["logprobs"]["content"][0]["top_logprobs"]
        known = [entry for entry in entries if is_finite(entry["logprob"])]
        return {sanitize(entry["token"]): min(entry["logprob"], 0.0) for entry in known}
    except (KeyError, IndexError, TypeError, AttributeError):
        return {}


def shortened(text: str, length: int = 300) -> str:
    """One line, not too long."""
    line = " ".join(text[: 4 * length].split())
    return line if len(line) <= length else line[: length - 3] + "..."


# Failures of an attempt: retry, give up, or a user error.

RETRIED = (408, 409, 425, 429)
"""And all of 500 and above."""
GATEWAY_TIME_OUTS = (408, 504, 524)
"""A gateway timed out; the model may have answered."""
NO_CREDIT = ("insufficient_quota", "billing_hard_limit_reached", "billing_not_active")
ABOUT_THE_TEXT = ("context_length_exceeded", "content_filter", "content_policy_violation")
"""Errors caused by the prompt, not the settings: other requests may succeed."""
BILLING = "the account has no credit left, see its billing page"
ADVICE = {
    401: f"check the key in {KEY}",
    402: BILLING,
    403: f"check that the key in {KEY} may use this model",
    404: "check --judge (the model's name) and --base-url (it often ends in /v1)",
}
"""Other statuses point to wrong settings."""


class EndpointError(TrainingError):
    """No more requests can be sent; answers so far are stored. Exit code 1."""


class RequestFailed(Exception):
    """One request failed too often; others may succeed."""


class Stopped(Exception):
    """Asked to stop before an answer came."""


@dataclass(frozen=True)
class Failure:
    """An attempt without an answer.

    Errors of the ``openai`` package contain headers with the key, so they are converted to text at
    once.
    """

    words: str
    then: Literal["again", "never", "mistake"] = "again"
    """Retry; give up this request; the user must change something."""
    wait: float = 0.0
    """Seconds to wait, as requested by the endpoint."""
    may_be_billed: bool = False
    """The endpoint may have made an answer that was lost on the way."""
    setting: str | None = None
    """A setting that the model does not support."""
    is_nobody: bool = False
    """No server there: the connection was refused."""


def status_failure(error: Any, sent: Mapping[str, Any]) -> Failure:
    """Meaning of an HTTP status; ``error`` is from the ``openai`` package."""
    status, said = error.status_code, error.body
    message = said.get("message") if isinstance(said, dict) else said
    message = shortened(message if isinstance(message, str) else error.response.text) or "nothing"
    code, words = str(error.code or error.type or ""), f"HTTP {status}: {message}"
    if status == 429 and code in NO_CREDIT:
        return Failure(f"{words}; {BILLING}", "mistake")
    if status in RETRIED or status >= 500:
        is_lost = status in GATEWAY_TIME_OUTS
        said = error.response.headers.get("retry-after", "")  # a date is ignored
        wait = float(said) if re.fullmatch(r"\d{1,9}(\.\d+)?", said) else 0.0
        return Failure(words, wait=wait, may_be_billed=is_lost)
    if status == 413 or code in ABOUT_THE_TEXT or "maximum context length" in message:
        return Failure(words, "never")
    setting, text = None, error.response.text.lower()
    if status in (400, 422) and any(words in text for words in REFUSALS):
        setting = next((name for name in CHANGEABLE if name in sent and name in text), None)
    advice = ADVICE.get(status, "check --judge (the model's name) and the settings of the judge")
    return Failure(f"{words}; {advice}", "mistake", setting=setting)


FIRST_WAIT, LONGEST_WAIT = 1.0, 60.0
LONGEST_RETRY_AFTER = 600.0
"""In seconds; a longer one ends the command."""


def back_off(attempt: int) -> float:
    """Seconds after the ``attempt``-th failure (from 1): doubling, times a random half to one."""
    return min(FIRST_WAIT * 2.0 ** (attempt - 1), LONGEST_WAIT) * random.uniform(0.5, 1.0)


# Sending requests: one endpoint, shared by threads, with retries.

SHORTEST_SECRET = 8
"""Shorter keys (EMPTY, none) are not secrets and may occur in an answer."""
ATTEMPTS_AT_NOBODY = 3
"""If no connection was ever accepted, unless the user sets the number of attempts."""
TELL_SECONDS = 30.0
"""Between two notes that an endpoint fails."""


class Endpoint:
    """One endpoint and one model there; threads may share it. Close it at the end."""

    now = staticmethod(time.monotonic)
    sleep = staticmethod(threading.Event.wait)
    """Until the event, or so many seconds."""

    def __init__(self, options: EndpointOptions, budget: Budget) -> None:
        self.options, self.budget = options, budget
        self.name = options.url()
        """Base URL, which identifies the endpoint."""
        key = options.key()
        self._openai = import_openai()
        # a proxy cannot reach this machine
        is_remote = urlsplit(self.name).hostname not in ("localhost", "127.0.0.1", "::1")
        http, limit = self._openai.DefaultHttpxClient(trust_env=is_remote), options.time_limit
        self._client = self._openai.OpenAI(
            api_key=key, base_url=self.name, max_retries=0, timeout=limit, http_client=http
        )
        self._gap = 60.0 / options.requests_per_minute if options.requests_per_minute else 0.0
        self._next_turn, self._next_note = self.now(), self.now()
        self._was_reached = False
        self._refused: frozenset[str] = frozenset()
        """Settings that the model does not support."""
        self._lock = threading.Lock()

    def close(self) -> None:
        self._client.close()

    def ask(self, request: ChatRequest, stop: threading.Event | None = None) -> dict[str, Any]:
        """``reply`` with usage, or ``refused`` with the reason, after as many attempts as the
        options allow.

        Raises UserError (a setting is wrong), EndpointError (further requests are pointless),
        RequestFailed (no answer to this one) or Stopped (``stop`` was set).
        """
        stop = stop or threading.Event()
        errors: list[str] = []
        failures = 0
        while True:
            self._wait_for_turn(stop)
            refused = self._refused
            # its maximum cost is reserved during an attempt
            worst, outcome = self.budget.reserve(request, stop), None
            try:
                outcome = self._exchange(request, refused)
            finally:
                self.budget.settle(worst, outcome)
            if isinstance(outcome, Reply):
                self._was_reached = True
                record = {"reply": asdict(outcome), "attempts": len(errors) + 1, "errors": errors}
                return record | {"refused_settings": sorted(refused)}
            errors.append(outcome.words)
            self._was_reached |= not outcome.is_nobody
            if outcome.then == "never":
                return {"refused": outcome.words}
            if outcome.setting is not None:
                with self._lock:
                    self._refused |= {outcome.setting}
                continue
            failures += 1
            self._raise_if_final(outcome, failures)
            self._tell(f"{outcome.words}; trying again (attempt {failures + 1} of {self._most()})")
            with self._lock:  # other threads wait too, if the endpoint requests it
                self._next_turn = max(self._next_turn, self.now() + outcome.wait)
            self._pause(max(back_off(failures), outcome.wait), stop)

    def _wait_for_turn(self, stop: threading.Event) -> None:
        """Never more requests in a minute than allowed, evenly spaced."""
        with self._lock:
            now = self.now()
            start = max(now, self._next_turn)
            self._next_turn = start + self._gap
        self._pause(start - now, stop)

    def _pause(self, seconds: float, stop: threading.Event) -> None:
        if seconds > 0 and not stop.is_set():
            self.sleep(stop, seconds)
        if stop.is_set():
            raise Stopped

    def _tell(self, words: str) -> None:
        """Log a note, at most once per interval."""
        with self._lock:
            if self.now() < self._next_note:
                return
            self._next_note = self.now() + TELL_SECONDS
        logger.info("%s", words)

    def _most(self) -> int:
        has_default = self.options.max_attempts == EndpointOptions.max_attempts
        is_short = has_default and not self._was_reached
        return ATTEMPTS_AT_NOBODY if is_short else self.options.max_attempts

    def _raise_if_final(self, failure: Failure, failures: int) -> None:
        where = f"the judge at {self.name}"
        if failure.then == "mistake":
            raise UserError(f"{where} rejects requests: {failure.words}")
        if failure.wait > LONGEST_RETRY_AFTER:
            raise EndpointError(f"{where} asks to wait {failure.wait:,.0f} s ({failure.words})")
        if failures < self._most():
            return
        if not self._was_reached:
            raise EndpointError(f"no server responds at --base-url {self.name} ({failure.words})")
        raise RequestFailed(f"no answer after {failures} attempts; last: {failure.words}")

    def _exchange(self, request: ChatRequest, refused: frozenset[str]) -> Reply | Failure:
        """Send a request and read the reply. Any copy of the key in it is removed."""
        sdk, sent = self._openai, request.body(refused)
        try:
            response = self._client.chat.completions.with_raw_response.create(**sent)
            reply = read_reply(self._clean(response.text), request)
            return replace(reply, text=self._clean(reply.text))
        except BadBody as error:
            return Failure(self._clean(str(error)), may_be_billed=True)
        except sdk.APIStatusError as error:
            failure = status_failure(error, sent)
            return replace(failure, words=self._clean(failure.words))
        except sdk.APIConnectionError as error:
            cause = error.__cause__ or error
            words = self._clean(str(cause)) or type(error).__name__
            is_sent = type(cause).__name__ not in NOT_SENT
            is_nobody = not is_sent and "refused" in words
            words = f"the connection failed: {words}"
            if isinstance(error, sdk.APITimeoutError):
                words = f"no answer within {self.options.time_limit:g} s"
            return Failure(words, may_be_billed=is_sent, is_nobody=is_nobody)

    def _clean(self, text: str) -> str:
        key: str = self._client.api_key
        return text.replace(key, "***") if len(key) >= SHORTEST_SECRET else text


def import_openai() -> Any:
    """The openai package."""
    return import_optional("openai", "a judge at an endpoint", "judge")


NOT_SENT = {"ConnectError", "ConnectTimeout", "PoolTimeout", "ProxyError"}
"""Errors before a request reached the endpoint, which therefore cannot have billed it."""


# Cost: an estimate before anything is sent, and a limit enforced while sending.


Prices = tuple[float, float]
"""US dollars per million tokens, read and written."""
# OpenAI's published prices as of 2025, without discounts (cached input, batches). They may have
# changed since: --price-in and --price-out go first.
KNOWN_PRICES: dict[str, Prices] = {
    **dict.fromkeys(("gpt-4o", "gpt-4o-2024-08-06"), (2.5, 10.0)),
    **dict.fromkeys(("gpt-4o-mini", "gpt-4o-mini-2024-07-18"), (0.15, 0.6)),
    **dict.fromkeys(("gpt-4-turbo", "gpt-4-turbo-2024-04-09", "gpt-4-1106-preview"), (10.0, 30.0)),
}


def prices_of(
    model: str, base_url: str, price_in: float | None, price_out: float | None
) -> Prices | None:
    """Prices as given, else those known of OpenAI's own endpoint, else None: unknown."""
    if (price_in is None) != (price_out is None):
        raise UserError("--price-in and --price-out must be given together")
    if price_in is not None and price_out is not None:
        if not all(math.isfinite(price) and price >= 0 for price in (price_in, price_out)):
            raise UserError("--price-in and --price-out are US dollars per million tokens")
        return price_in, price_out
    is_openai = urlsplit(base_url).hostname == "api.openai.com"
    return KNOWN_PRICES.get(model) if is_openai else None


class Budget:
    """Expenses of one command, and their limit.

    Requests in flight count with their maximum cost (a token per byte of the prompt, the longest
    answer), finished ones with their reported usage. Attempts with a lost answer may have been
    billed, so they keep their maximum cost. Stored answers are free.
    """

    def __init__(self, prices: Prices | None, max_usd: float | None, model: str) -> None:
        if max_usd is not None and not (math.isfinite(max_usd) and max_usd > 0):
            raise UserError(f"--max-usd must be above 0, got {max_usd}")
        if max_usd is not None and prices is None:
            raise UserError(f"--max-usd needs prices of {model}: give --price-in and --price-out")
        self.prices, self.max_usd, self.model = prices, max_usd, model
        self.spent = 0.0
        self._under_way: list[float] = []
        self._settled = threading.Condition()

    def usd(self, num_input: int, num_output: int) -> float:
        """Cost of these tokens; 0 if prices are unknown."""
        price_in, price_out = self.prices or (0.0, 0.0)
        return (num_input * price_in + num_output * price_out) / 1_000_000

    def check(self, requests: Sequence[ChatRequest]) -> str:
        """Maximum cost of requests, without failed attempts; an error if it exceeds the limit."""
        if not requests:
            return "no requests to send: all answers are stored already"
        num_input = sum(request.prompt_tokens() for request in requests)
        num_output = sum(request.max_tokens for request in requests)
        usd = self.usd(num_input, num_output)
        cost = f"at most about ${usd:,.4f}"
        if self.prices is None:
            why = f"no prices are known for {self.model} there: give --price-in and --price-out"
            cost = f"dollars unknown ({why})"
        size = f"about {num_input:,} tokens in, at most {num_output:,} out"
        words = f"estimate: {len(requests):,} requests, {size}, {cost}"
        if self.max_usd is not None and usd > self.max_usd:
            hint = "nothing was sent: increase it, or reduce --tasks or --seeds"
            raise UserError(f"--max-usd {self.max_usd:g} is not enough; {words}; {hint}")
        return words

    def reserve(self, request: ChatRequest, stop: threading.Event) -> float:
        """Reserve the maximum cost of an attempt. Waits while running attempts may still free
        budget; raises EndpointError otherwise.
        """
        usd = self.usd(request.most_prompt_tokens(), request.max_tokens)
        most = math.inf if self.max_usd is None else self.max_usd
        with self._settled:
            while self.spent + sum(self._under_way) + usd > most:
                if stop.is_set():
                    raise Stopped
                if not self._under_way:
                    words = f"{most:g} used, and the next request may cost ${usd:,.4f}"
                    words = f"${self.spent:,.4f} of --max-usd {words}"
                    raise EndpointError(f"the spending limit is reached: {words}")
                self._settled.wait(0.5)
            self._under_way.append(usd)
        return usd

    def settle(self, worst: float, outcome: Reply | Failure | None) -> None:
        """Record the cost of an attempt (its maximum if unknown) and release the reservation."""
        usd = worst
        if isinstance(outcome, Failure):
            usd = worst if outcome.may_be_billed else 0.0
        elif outcome is not None and not outcome.is_usage_estimated:
            usd = self.usd(outcome.prompt_tokens, outcome.completion_tokens)
        with self._settled:
            self._under_way.remove(worst)
            self.spent += usd
            self._settled.notify_all()


# Every request to a judge and its answer, one line each; stored requests are not sent again.

MOST_FAILURES = 10
"""Consecutive failures after which the endpoint counts as down."""


class Transcript:
    """Answers and refusals by request, in a file that only grows."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.store = Store(path, _is_right)

    def records(self, keys: Iterable[str]) -> list[dict[str, Any]]:
        """Stored records of these requests, each once."""
        return [self.store[key] for key in dict.fromkeys(keys) if key in self.store]

    def reply(self, key: str) -> Reply | None:
        """The stored reply; None if there is none, or for a refusal."""
        found = [Reply(**record["reply"]) for record in self.records([key]) if "reply" in record]
        return found[0] if found else None

    def missing(self, requests: Iterable[ChatRequest]) -> list[ChatRequest]:
        """Requests without an answer or refusal, each once, in order."""
        unique = {request.key: request for request in requests}
        return [unique[key] for key in self.store.missing(unique)]

    def ask_all(
        self, requests: Iterable[ChatRequest], endpoint: Endpoint, progress: Progress = NO_PROGRESS
    ) -> list[str]:
        """Send missing requests and store each answer on arrival; return the reasons of failures.

        ``progress`` counts the missing ones. Errors and Ctrl-C are raised after the answers in
        flight, which are paid for, have been stored.
        """
        self.path.parent.mkdir(parents=True, exist_ok=True)
        try:  # two processes with one transcript would send the same requests
            lock = FileLock(self.path.with_suffix(".lock")).acquire(blocking=False)
        except Timeout:
            raise UserError(f"another process is using {self.path}; wait for it") from None
        with lock:
            self.store = Store(self.path, _is_right)  # another process may have answered some
            missing = self.missing(requests)
            progress.start(len(missing))
            try:
                return self._ask_missing(missing, endpoint, progress)
            except (KeyboardInterrupt, UserError, EndpointError) as error:
                count = sum("reply" in r for r in self.records(r.key for r in missing))
                raise type(error)(
                    f"{str(error) or 'interrupted'}; {count} of {len(missing)} answers arrived and "
                    f"are stored in {self.path}; the same command sends only the rest"
                ) from None

    def _ask_missing(
        self, requests: Sequence[ChatRequest], endpoint: Endpoint, progress: Progress
    ) -> list[str]:
        failed: list[str] = []
        in_a_row, stop, lock = 0, threading.Event(), threading.Lock()

        def ask(request: ChatRequest) -> str | None:
            """Reason of failure. Signals do not reach threads, so answers that arrive are
            stored.
            """
            try:
                answer = endpoint.ask(request, stop)
                at = datetime.now(UTC).isoformat(timespec="seconds")
                record = {"key": request.key, "request": asdict(request), **answer, "at": at}
                with lock:
                    self.store.add([record])
            except RequestFailed as error:
                return str(error)
            except BaseException:
                stop.set()
                raise
            return None

        with ThreadPoolExecutor(endpoint.options.num_threads) as pool:
            asked = [pool.submit(ask, request) for request in requests]
            try:
                for future in as_completed(asked):
                    with contextlib.suppress(Stopped):  # another thread's error follows
                        failure = future.result()
                        in_a_row = in_a_row + 1 if failure else 0
                        failed += [failure] if failure else []
                    if in_a_row == MOST_FAILURES:
                        words = f"failed {in_a_row} requests in a row: {failed[-1]}"
                        raise EndpointError(f"the judge at {endpoint.name} {words}")
                    progress.advance()
            finally:  # leaving the pool waits for requests in flight
                stop.set()
                pool.shutdown(wait=False, cancel_futures=True)
        return failed


def _is_right(record: dict[str, Any]) -> bool:
    """A line that holds a refusal, or the parts of a reply."""
    return "refused" in record or isinstance(Reply(**record["reply"]).text, str)
