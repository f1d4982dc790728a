"""A chat-completions server on loopback that answers as a test wants and counts what it saw, and
judges whose mind is known: they read our own ("plain") prompts."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import socket
import ssl
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

SHARED = Path(os.environ.get("BELLMASK_TEST_DATA", Path(__file__).parents[3] / "shared" / "data"))
ALPACA = SHARED / "alpaca_eval"
needs_alpaca = pytest.mark.skipif(
    not ALPACA.exists(), reason="needs alpaca_eval in $BELLMASK_TEST_DATA"
)
KEY = "sk-a-very-secret-key-0123456789"
VARIABLE = "OPENAI_API_KEY"
"""Environment variable of the key in tests."""


class Drop(Exception):
    """Raised by a rule: the connection ends after so much of a body."""

    def __init__(self, part=""):
        super().__init__(part)
        self.part = part


def completion(text, *, usage=(10, 5), logprobs=None, finish_reason="stop"):
    """A body as the API describes it."""
    message = {"role": "assistant", "content": text}
    choice = {"index": 0, "message": message, "finish_reason": finish_reason}
    if logprobs is not None:
        top = [{"token": t, "logprob": p, "bytes": list(t.encode())} for t, p in logprobs.items()]
        choice["logprobs"] = {"content": [{**top[0], "top_logprobs": top}]}
    body = {"id": "c-1", "object": "chat.completion", "choices": [choice]}
    if usage is not None:
        names = ("prompt_tokens", "completion_tokens", "total_tokens")
        body["usage"] = dict(zip(names, (*usage, sum(usage)), strict=True))
    return json.dumps(body)


def good(text, **named):
    """Status, headers and body of a normal answer."""
    return 200, {"Content-Type": "application/json"}, completion(text, **named)


def error(status, message="no", headers=None):
    """An error in the API's shape."""
    return status, headers or {}, json.dumps({"error": {"message": message, "type": "test"}})


def echo(body):
    """The answer to a question is told by the question."""
    return good("answer to " + body["messages"][-1]["content"])


def script(*responses):
    """A rule: responses, rules or faults one after the other; the last again and again."""
    left, lock = list(responses), threading.Lock()

    def reply(body):
        with lock:
            response = left.pop(0) if len(left) > 1 else left[0]
        if isinstance(response, Drop):
            raise response
        return response(body) if callable(response) else response

    return reply


class JudgeServer:
    """``with JudgeServer(rule) as server``: what it saw is in its attributes.

    A rule takes the parsed body of a request and gives (status, headers, body).
    """

    def __init__(self, reply=echo):
        self.reply = reply
        self.requests, self.headers = [], []
        self.most_at_once = self._at_once = 0
        self._lock = threading.Lock()
        self._server = _Server(("127.0.0.1", 0), type("Handler", (_Handler,), {"judge": self}))
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,))
        self.base_url = f"http://127.0.0.1:{self._server.server_address[1]}/v1"

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def answer(self, body, headers):
        with self._lock:
            self.requests.append(body)
            self.headers.append(headers)
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

    def handle_error(self, request, client_address):
        """Clients that went away are part of the tests."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    timeout = 10
    disable_nagle_algorithm = True

    def do_POST(self):
        assert self.path == "/v1/chat/completions"
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        headers = {name.lower(): value for name, value in self.headers.items()}
        try:
            status, extra, text = self.judge.answer(body, headers)
        except Drop as drop:
            self._send(200, {}, drop.part.encode(), missing=100)
            self.close_connection = True
            with contextlib.suppress(OSError):
                self.connection.shutdown(socket.SHUT_RDWR)
            return
        self._send(status, extra, text.encode())

    def _send(self, status, headers, body, missing=0):
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body) + missing)}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)
        self.wfile.flush()

    def log_message(self, *_):
        """Quiet."""


def set_key(monkeypatch):
    """A key in the environment, and nothing else there that a judge would read."""
    for name in ("OPENAI_API_KEY", "OPENAI_BASE_URL", "OPENAI_LOG", "OPENAI_ORG_ID"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(VARIABLE, KEY)
    monkeypatch.setattr(ssl, "create_default_context", _context)


def skip_certificates():
    """Reading them, which loopback does not need, takes longer than most tests."""
    ssl.create_default_context = _context


@functools.cache
def _context(*_, **__):
    return ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)


class Clock:
    """Time that passes only by sleeping."""

    def __init__(self):
        self.time, self.sleeps = 1_000.0, []
        self._lock = threading.Lock()

    def now(self):
        return self.time

    def sleep(self, seconds):
        with self._lock:
            self.sleeps.append(seconds)
            self.time += seconds


SHOWN = re.compile(
    r"(?:=== Request\n(?P<request>.*?)\n\n)?"
    r"=== (?:Answer|Conversation) A\n(?P<first>.*?)\n\n"
    r"=== (?:Answer|Conversation) B\n(?P<second>.*?)\n\n"
    r"(?:=== A right answer.*?\n\n)?=== Your task",
    re.DOTALL,
)


def shown(body):
    """What the judge sees as A and as B: an answer, or a conversation."""
    found = SHOWN.fullmatch(body["messages"][-1]["content"].rpartition("\n")[0])
    assert found is not None, body["messages"][-1]["content"]
    return found["first"], found["second"]


def by_length(body):
    """The longer answer, in a thought or two."""
    first, second = shown(body)
    choice = "tie" if len(first) == len(second) else "A" if len(first) > len(second) else "B"
    return good(f"I have thought.\nVerdict: {choice}", usage=(100, 10))
