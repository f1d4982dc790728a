"""Fuzzing: one table of how many inputs each target gets, and what hostile input looks like."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from bellmask.errors import UserError

BUDGET: dict[str, tuple[int, int]] = {
    # target: (inputs in every run, inputs of the long tests)
    "command lines": (20, 300),
    "options": (20, 400),
    "config files": (20, 400),
    "prompt files": (60, 1500),
    "example files": (60, 1500),
    "chat templates": (30, 500),
    "canvases": (60, 1500),
    "text files": (40, 600),
    "traces": (40, 800),
    "metrics": (20, 500),
    "run folders": (15, 300),
    "checkpoint files": (10, 200),
    "weights to import": (30, 500),
    "evaluations": (20, 400),
    "kept files": (40, 700),
    "judge replies": (40, 700),
    "data caches": (15, 300),
    "pages": (20, 300),
    "tables": (20, 300),
}
"""Their sums, and that all of it is run, are tested in tests/fuzz/test_budget.py."""

SIZES = [pytest.param(0, id="few"), pytest.param(1, id="many", marks=pytest.mark.long)]

TAKEN, REFUSED = "taken", "refused"


def fuzz(
    target: str, size: int, inputs: st.SearchStrategy[Any], check: Callable[[Any], Any]
) -> set[str]:
    """Give ``check`` as many inputs as the table says, the same in every run.

    A UserError with words is an answer like any other; the set says which answers there were.
    """
    outcomes: set[str] = set()
    count = 0

    @settings(
        max_examples=BUDGET[target][size],
        derandomize=True,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.generate],  # shrinking would take minutes; the input is shown as it is
    )
    @given(inputs)
    def attempt(value: Any) -> None:
        nonlocal count
        count += 1
        try:
            check(value)
        except UserError as error:
            outcomes.add(REFUSED if str(error).strip() else "refused without a word")
        else:
            outcomes.add(TAKEN)

    attempt()
    assert count >= BUDGET[target][size], f"only {count} different inputs"
    return outcomes


# --- hostile input ---------------------------------------------------------------------------

NASTY = [
    "", " ", "\x00", "\ufeff", "\ud800", "a\udcffb", "\x1b[2J\x1b]0;x\x07", "\x9b31m", "\r", "\r\n",
    "\u202eevil", "\u2028", "</script><script>alert(1)</script>", "<img src=x onerror=alert(1)>",
    '"><svg onload=alert(1)>', "javascript:alert(1)", "{{ 7 * 7 }}", "{% raw %}", "$\\frac{", "$x$",
    "a|b\\|c\\\\|d", "](http://x)", "[bold]x[/red]", "../../etc/passwd", "/etc/passwd", "~/x",
    "..\\x", "[MASK*3]", "[MASK*99999999999]", "[ mask ]", "<|endoftext|>", "-1", "1e999", "NaN",
    "null", "true", "--out", "-", "=", "a" * 300, "9" * 5000, "e\u0301", "\U0001f469", "\\", "'",
]  # fmt: skip

words = st.sampled_from(NASTY)
texts = st.one_of(
    st.text(st.characters(exclude_categories=()), max_size=30),
    words,
    st.lists(words | st.text(max_size=4), min_size=1, max_size=4).map("".join),
)
"""Any text, halves of surrogate pairs too."""
numbers = st.one_of(
    st.integers(-3, 20),
    st.integers(),
    st.sampled_from([10**18, -(10**18), 10**30, 10**400, 2**63, 2**31]),
    st.floats(),
)
scalars = st.one_of(st.none(), st.booleans(), numbers, texts)
trees = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts, inner, max_size=4),
    max_leaves=8,
)
"""What JSON can hold."""


def _nested(depth: int) -> Any:
    found: Any = 1
    for _ in range(depth):
        found = [found]
    return found


values = st.one_of(trees, st.sampled_from([99, 150, 400]).map(_nested))

PIECES = [
    b"", b"null", b"[]", b"{}", b"{", b"[", b'"', b"1e999", b"NaN", b"-1", b"0", b"\x00", b"\xff",
    b"\xef\xbb\xbf", b"\r\n", b"\n", b"\xc0\x80", b"\xed\xa0\x80", b'"\\ud800"', b"9" * 5000,
    b"[" * 3000, b'{"a":' * 3000, b",", b":", b"true", b"../../x", b"\x80\x04.", b"PK\x03\x04",
]  # fmt: skip


@st.composite
def damaged(draw: st.DrawFn, whole: bytes) -> bytes:
    """Bytes with some pieces deleted, doubled, replaced or cut off."""
    content = whole
    for _ in range(draw(st.integers(1, 3))):
        start = draw(st.integers(0, max(0, len(content) - 1)))
        stop = min(len(content), start + draw(st.integers(0, 30)))
        kind = draw(st.sampled_from(["put", "put", "double", "flip", "cut"]))
        if kind == "put":
            piece = draw(st.sampled_from(PIECES) | st.binary(max_size=8))
            content = content[:start] + piece + content[stop:]
        elif kind == "double":
            content = content[:stop] + content[start:]
        elif kind == "flip" and start < len(content):
            flipped = content[start] ^ (1 << draw(st.integers(0, 7)))
            content = content[:start] + bytes([flipped]) + content[start + 1 :]
        else:
            content = content[:start]
    return content


def _places(tree: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    inside = tree.items() if isinstance(tree, dict) else []
    inside = enumerate(tree[:6]) if isinstance(tree, list) else inside
    return [path, *(place for key, value in inside for place in _places(value, (*path, key)))]


@st.composite
def changed(draw: st.DrawFn, tree: Any, *, most: int = 2) -> Any:
    """A JSON tree with values replaced, keys removed or keys added somewhere."""
    found = copy.deepcopy(tree)
    for _ in range(draw(st.integers(1, most))):
        path = draw(st.sampled_from(_places(found)))
        if not path:
            if draw(st.integers(0, 9)) == 0:
                return draw(values)
            continue
        holder = found
        for key in path[:-1]:
            holder = holder[key]
        kind = draw(st.sampled_from(["put", "put", "put", "remove", "add"]))
        if kind == "remove":
            del holder[path[-1]]
        elif kind == "add" and isinstance(holder, dict):
            holder[draw(texts)] = draw(values)
        else:
            holder[path[-1]] = draw(values)
    return found


def as_json(tree: Any) -> bytes:
    """With every number and half character that JSON's text can write."""
    return json.dumps(tree).encode()


def json_files(tree: Any) -> st.SearchStrategy[bytes]:
    """A JSON file that was changed as a tree or as bytes, or is something else altogether."""
    return st.one_of(
        changed(tree).map(as_json), damaged(as_json(tree)), values.map(as_json), st.binary()
    )
