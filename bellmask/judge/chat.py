"""One question to a chat-completions endpoint and its reply, in the words of that API."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from bellmask.judge.tokens import estimate_tokens, prompt_tokens
from bellmask.utils.errors import UserError
from bellmask.utils.files import is_number, load_json, sound
from bellmask.utils.store import content_key

MAX_TOP_LOGPROBS = 20
"""What the API gives at most."""


@dataclass(frozen=True)
class Request:
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
class Answer:
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


def parameters(request: Request, changes: frozenset[str]) -> dict[str, Any]:
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


def read_reply(body: str, request: Request) -> Reply:
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
        text=sound(text),
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
            found.setdefault(sound(token), float(value))
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
