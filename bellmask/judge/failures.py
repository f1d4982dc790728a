"""What went wrong with an attempt, and what follows: again, never again, or a user's mistake."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from bellmask.judge.chat import error_code, error_message
from bellmask.judge.pace import retry_after
from bellmask.utils.errors import TrainingError

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
