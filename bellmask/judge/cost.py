"""What asking costs: an estimate before anything is sent, and a limit that is kept while asking."""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from urllib.parse import urlsplit

from bellmask.judge.chat import Reply, Request
from bellmask.judge.failures import EndpointError, Stopped
from bellmask.judge.tokens import most_prompt_tokens, prompt_tokens
from bellmask.utils.errors import UserError

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


def estimate(requests: Iterable[Request], prices: Prices | None) -> Estimate:
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

    def worst(self, request: Request) -> float:
        """Dollars that one attempt can cost."""
        return self.prices.usd(most_prompt_tokens(request.messages), request.max_tokens)

    @contextlib.contextmanager
    def attempt(self, request: Request, stop: threading.Event) -> Iterator[Bill]:
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
