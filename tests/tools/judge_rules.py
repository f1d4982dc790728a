"""Judges whose mind is known, for the loopback server: they read our own ("plain") prompts."""

from __future__ import annotations

import hashlib
import re
import threading

from judge_server import good

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


def chooses(pick):
    """A server's rule from one that takes (shown first, shown second) and says A, B or tie."""

    def reply(body):
        return good(f"I have thought.\nVerdict: {pick(*shown(body))}", usage=(100, 10))

    return reply


def longer(first, second):
    return "tie" if len(first) == len(second) else "A" if len(first) > len(second) else "B"


def by_hash(first, second):
    """At random, but the same each time; the order is not looked at."""
    marks = [hashlib.sha256(text.encode()).hexdigest() for text in (first, second)]
    return "A" if marks[0] > marks[1] else "B"


class EveryKth:
    """Another rule's answers, but each k-th question gets something else the first time.

    Asked again, it is answered: whether a question outlives its attempts does not depend on the
    order in which threads come.
    """

    def __init__(self, rule, k, instead):
        self.rule, self.k, self.instead = rule, k, instead
        self.asked = set()
        self._lock = threading.Lock()

    def __call__(self, body):
        with self._lock:
            question = str(body["messages"])
            is_new = question not in self.asked
            self.asked.add(question)
            is_odd = is_new and len(self.asked) % self.k == 0
        return self.instead() if is_odd else self.rule(body)
