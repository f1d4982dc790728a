"""A chat-completions server on loopback that answers as a test wants and counts what it saw."""

from __future__ import annotations

import contextlib
import functools
import json
import socket
import ssl
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

KEY = "sk-a-very-secret-key-0123456789"
VARIABLE = "TEST_JUDGE_KEY"
"""Environment variable of the key in tests."""

Response = tuple[int, dict[str, str], str]
ReplyRule = Callable[[dict[str, Any]], Response]


class Drop(Exception):
    """Raised by a rule: the connection ends after so much of a body."""

    def __init__(self, part: str = "") -> None:
        super().__init__(part)
        self.part = part


def completion(
    text: str | None,
    *,
    usage: tuple[int, int] | None = (10, 5),
    logprobs: dict[str, float] | None = None,
    finish_reason: str = "stop",
) -> str:
    """A body as the API describes it."""
    choice: dict[str, Any] = {
        "index": 0,
        "message": {"role": "assistant", "content": text},
        "finish_reason": finish_reason,
    }
    if logprobs is not None:
        top = [{"token": t, "logprob": p, "bytes": list(t.encode())} for t, p in logprobs.items()]
        choice["logprobs"] = {"content": [{**top[0], "top_logprobs": top}]}
    body: dict[str, Any] = {"id": "c-1", "object": "chat.completion", "choices": [choice]}
    if usage is not None:
        names = ("prompt_tokens", "completion_tokens", "total_tokens")
        body["usage"] = dict(zip(names, (*usage, sum(usage)), strict=True))
    return json.dumps(body)


def good(text: str, **named: Any) -> Response:
    """Status, headers and body of a normal answer."""
    return 200, {"Content-Type": "application/json"}, completion(text, **named)


def error(status: int, message: str = "no", headers: dict[str, str] | None = None) -> Response:
    """An error in the API's shape."""
    return status, headers or {}, json.dumps({"error": {"message": message, "type": "test"}})


def echo(body: dict[str, Any]) -> Response:
    """The answer to a question is told by the question."""
    return good("answer to " + body["messages"][-1]["content"])


class JudgeServer:
    """``with JudgeServer(rule) as server``: what it saw is in its attributes."""

    def __init__(self, reply: ReplyRule = echo) -> None:
        self.reply = reply
        self.requests: list[dict[str, Any]] = []
        """Parsed bodies in the order they came."""
        self.headers: list[dict[str, str]] = []
        self.paths: list[str] = []
        self.most_at_once = 0
        self._at_once = 0
        self._lock = threading.Lock()
        self._server = _Server(("127.0.0.1", 0), _handler(self))
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,))

    @property
    def base_url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}/v1"

    @property
    def questions(self) -> list[str]:
        """The last message of each request."""
        return [body["messages"][-1]["content"] for body in self.requests]

    def __enter__(self) -> JudgeServer:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def answer(self, body: dict[str, Any], headers: dict[str, str], path: str) -> Response:
        with self._lock:
            self.requests.append(body)
            self.headers.append(headers)
            self.paths.append(path)
            self._at_once += 1
            self.most_at_once = max(self.most_at_once, self._at_once)
        try:
            return self.reply(body)
        finally:
            with self._lock:
                self._at_once -= 1


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 64

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Clients that went away are part of the tests."""


def _handler(server: JudgeServer) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        timeout = 10
        disable_nagle_algorithm = True

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            headers = {name.lower(): value for name, value in self.headers.items()}
            try:
                status, extra, text = server.answer(body, headers, self.path)
            except Drop as drop:
                self._send(200, {}, drop.part.encode(), missing=100)
                self.close_connection = True
                with contextlib.suppress(OSError):
                    self.connection.shutdown(socket.SHUT_RDWR)
                return
            self._send(status, extra, text.encode())

        def _send(
            self, status: int, headers: dict[str, str], body: bytes, missing: int = 0
        ) -> None:
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(body) + missing))
            self.end_headers()
            self.wfile.write(body)
            self.wfile.flush()

        def log_message(self, *_: Any) -> None:
            """Quiet."""

    return Handler


def set_key(monkeypatch: pytest.MonkeyPatch) -> None:
    """A key in the environment, and nothing else there that a judge would read."""
    for name in ("OPENAI_API_KEY", "OPENAI_BASE_URL", "OPENAI_LOG", "OPENAI_ORG_ID"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(VARIABLE, KEY)
    # reading certificates, which loopback does not need, takes longer than most tests
    monkeypatch.setattr(ssl, "create_default_context", _context)


@functools.cache
def _context(*_: Any, **__: Any) -> ssl.SSLContext:
    return ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)


class Clock:
    """Time that passes only by sleeping."""

    def __init__(self, start: float = 1_000.0) -> None:
        self.time = start
        self.sleeps: list[float] = []
        self._lock = threading.Lock()

    def now(self) -> float:
        return self.time

    def sleep(self, seconds: float) -> None:
        with self._lock:
            self.sleeps.append(seconds)
            self.time += seconds
