"""Every question to a judge and its answer, one line each; what is there is never asked again."""

from __future__ import annotations

import contextlib
import fcntl
import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from bellmask.judge.chat import Answer, Reply, Request
from bellmask.judge.cost import SpendingLimit
from bellmask.judge.endpoint import Endpoint
from bellmask.judge.failures import EndpointError, RequestFailed, Stopped
from bellmask.utils.errors import UserError
from bellmask.utils.files import has_kinds, is_number, is_whole
from bellmask.utils.store import Kept

MOST_FAILURES = 10
"""In a row, after which the endpoint is taken to be down."""
GRACE_SECONDS = 15.0
"""After Ctrl-C: for answers under way, which are paid for."""


@dataclass(frozen=True)
class Asked:
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
        self._kept = Kept(path, _is_right)

    def __len__(self) -> int:
        return len(self._kept)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return iter(self._kept)

    def get(self, request: Request) -> Reply | None:
        """The kept reply; None where there is none, or a refusal."""
        record = self._kept.get(request.key) or {}
        return Reply(**record["reply"]) if "reply" in record else None

    def refused(self, requests: Iterable[Request]) -> dict[str, str]:
        """Key of each that the endpoint will never answer, and why."""
        records = [self._kept.get(request.key) or {} for request in requests]
        return {record["key"]: record["refused"] for record in records if "refused" in record}

    def refused_settings(self, requests: Iterable[Request]) -> set[str]:
        """Settings that the judge did not take when it answered these."""
        records = [self._kept.get(request.key) or {} for request in requests]
        return {name for record in records for name in record.get("refused_settings", ())}

    def missing(self, requests: Iterable[Request]) -> list[Request]:
        """Those with neither an answer nor a refusal, each once, in their order."""
        unique = {request.key: request for request in requests}
        return [request for key, request in unique.items() if key not in self._kept]

    def add(self, request: Request, answer: Answer) -> None:
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

    def add_refusal(self, request: Request, words: str) -> None:
        """Keep that the endpoint will never answer, and why."""
        about = {"key": request.key, "request": request.to_dict()}
        self._kept.add([{**about, "refused": words, "at": _now()}])

    def ask_all(
        self,
        requests: Iterable[Request],
        endpoint: Endpoint,
        on_done: Callable[[int, int], None] | None = None,
        *,
        limit: SpendingLimit | None = None,
        max_failures: int = MOST_FAILURES,
    ) -> Asked:
        """Ask what is missing, and keep each answer as it comes.

        ``on_done`` gets (done, total), what was kept before included. Errors and Ctrl-C are raised
        after the answers under way have been kept; they say how many there are.
        """
        everything = list({request.key: request for request in requests}.values())
        with _only_asker(self.path):
            self._kept = Kept(self.path, _is_right)  # another process may have answered some
            missing = self.missing(everything)
            kept = len(everything) - len(missing)

            def show(done: int) -> None:
                if on_done is not None:
                    on_done(kept + done, len(everything))

            show(0)
            round_ = _Round(self, missing, endpoint, limit, max_failures)
            failed = round_.run(show)
        return Asked(kept, round_.num_new, failed, self.refused(everything))


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
        missing: list[Request],
        endpoint: Endpoint,
        limit: SpendingLimit | None,
        max_failures: int,
    ) -> None:
        self.transcript, self.endpoint, self.limit = transcript, endpoint, limit
        self.num, self.max_failures = len(missing), max_failures
        self.stop = threading.Event()
        self._todo: queue.SimpleQueue[Request] = queue.SimpleQueue()
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

    def _ask(self, request: Request) -> None:
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

    def _note_failure(self, request: Request, error: RequestFailed) -> None:
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
