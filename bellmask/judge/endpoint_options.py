"""Where and how fast to ask a judge, and where its key comes from."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from bellmask.utils.errors import UserError

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
