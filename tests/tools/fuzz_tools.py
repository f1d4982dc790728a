"""Fuzzing: hostile input, and how a check is given much of it."""

from __future__ import annotations

import copy
import json

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from bellmask.utils.errors import UserError

SIZES = [pytest.param(1, id="few"), pytest.param(25, id="many", marks=pytest.mark.long)]
"""Times the number of inputs of a target."""
TAKEN, REFUSED = "taken", "refused"


def fuzz(count, inputs, check, *expected):
    """Give ``check`` so many inputs, the same in every run: some are taken, some refused.

    A UserError with words is an answer like any other.
    """
    outcomes = []

    @settings(
        max_examples=count,
        derandomize=True,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.generate],  # shrinking would take minutes; the input is shown as it is
    )
    @given(inputs)
    def attempt(value):
        try:
            check(value)
        except UserError as error:
            outcomes.append(REFUSED if str(error).strip() else "refused without a word")
        else:
            outcomes.append(TAKEN)

    attempt()
    assert len(outcomes) >= count, f"only {len(outcomes)} different inputs"
    assert set(outcomes) == set(expected or (TAKEN, REFUSED))


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
numbers = (
    st.integers(-3, 20) | st.integers() | st.floats() | st.sampled_from([10**18, 10**400, 2**63])
)
trees = st.recursive(
    st.none() | st.booleans() | numbers | texts,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts, inner, max_size=4),
    max_leaves=8,
)
"""What JSON can hold."""


values = trees | st.sampled_from([99, 400]).map(lambda depth: json.loads("[" * depth + "]" * depth))

PIECES = [
    b"", b"null", b"[]", b"{}", b"{", b"[", b'"', b"1e999", b"NaN", b"-1", b"0", b"\x00", b"\xff",
    b"\xef\xbb\xbf", b"\r\n", b"\n", b"\xc0\x80", b"\xed\xa0\x80", b'"\\ud800"', b"9" * 5000,
    b"[" * 3000, b'{"a":' * 3000, b",", b":", b"true", b"../../x", b"\x80\x04.", b"PK\x03\x04",
]  # fmt: skip


@st.composite
def damaged(draw, whole):
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


def _places(tree, path=()):
    inside = tree.items() if isinstance(tree, dict) else []
    inside = enumerate(tree[:6]) if isinstance(tree, list) else inside
    return [path, *(place for key, value in inside for place in _places(value, (*path, key)))]


@st.composite
def changed(draw, tree):
    """A JSON tree with values replaced, keys removed or keys added somewhere."""
    found = copy.deepcopy(tree)
    for _ in range(draw(st.integers(1, 2))):
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


def as_json(tree):
    """With every number and half character that JSON's text can write."""
    return json.dumps(tree).encode()


def json_files(tree):
    """A JSON file that was changed as a tree or as bytes, or is something else altogether."""
    return st.one_of(
        changed(tree).map(as_json), damaged(as_json(tree)), values.map(as_json), st.binary()
    )
