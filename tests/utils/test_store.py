"""Results kept by key: torn lines, killed writers, damage, and what counts twice."""

from __future__ import annotations

import json
import os

import pytest

from bellmask.utils.errors import UserError
from bellmask.utils.store import Store, content_key


def test_kept_is_there_again(tmp_path):
    path = tmp_path / "deep" / "kept.jsonl"
    kept = Store(path)
    assert (len(kept), "a" in kept, kept.missing(["a", "a"])) == (0, False, ["a"])
    assert not path.exists(), "nothing is written before there is something"
    odd = "na\u00efve \U0001f600 \u2028 \x00"
    kept.add([{"key": "a", "value": 1.5}, {"key": "b", "text": odd}])
    kept.add([])
    again = Store(path)
    assert again == kept
    assert again["b"]["text"] == odd
    assert again["a"] == {"key": "a", "value": 1.5}
    assert again.get_or_make("a", lambda: 1 / 0) == again["a"]
    assert again.missing(["c", "a", "d", "c"]) == ["c", "d"]
    assert path.read_bytes().count(b"\n") == 2
    assert again.get_or_make("c", lambda: {"value": 2}) == {"key": "c", "value": 2}
    assert Store(path)["c"]["value"] == 2


def test_of_two_with_one_key_the_first_counts(tmp_path):
    """Also of two writers."""
    path = tmp_path / "kept.jsonl"
    one, other = Store(path), Store(path)
    one.add([{"key": "a", "value": 1}, {"key": "a", "value": 2}])
    one.add([{"key": "a", "value": 3}])
    other.add([{"key": "b", "value": 2}, {"key": "a", "value": 4}])
    with path.open("a") as stream:
        stream.write('{"key": "a", "value": 5}\n')
    assert one["a"]["value"] == 1
    assert {record["key"]: record["value"] for record in Store(path).values()} == {"a": 1, "b": 2}


def test_every_torn_end_is_dropped_and_written_over(tmp_path):
    """Cut after any number of bytes: whole lines count, and the file is whole after one more."""
    path = tmp_path / "kept.jsonl"
    Store(path).add([{"key": "a", "v": "\u00e9"}, {"key": "b", "v": 2}])
    whole = path.read_bytes()
    for size in range(len(whole) + 1):
        path.write_bytes(whole[:size])
        kept = Store(path)
        assert len(kept) == whole[:size].count(b"\n")
        kept.add([{"key": "b", "v": 2}, {"key": "c", "v": 3}])
        assert path.read_bytes().endswith(b"\n")
        keys = [json.loads(line)["key"] for line in path.read_bytes().split(b"\n")[:-1]]
        assert keys == (["a"] if "a" in keys else []) + ["b", "c"]
        assert len(Store(path)) == len(keys)


def test_a_write_that_failed_leaves_no_damage(tmp_path, monkeypatch):
    """The disk was full for a while: what was half written is dropped by the next record."""
    path = tmp_path / "kept.jsonl"
    kept = Store(path)
    kept.add([{"key": "a"}])

    def full(handle):
        os.ftruncate(handle, path.stat().st_size - 4)
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(OSError, match="No space left"):
            kept.add([{"key": "b"}])
    assert "b" not in kept
    kept.add([{"key": "c"}])
    assert list(Store(path)) == ["a", "c"]


@pytest.mark.parametrize(
    "line", [b'{"key": "b"', b"null", b'{"value": 1}', b'{"key": 3}', b"[1]", b'"key"', b"\xff\xfe"]
)
def test_a_damaged_line_is_named(tmp_path, line):
    path = tmp_path / "kept.jsonl"
    content = b'{"key": "a"}\n' + line + b'\n{"key": "c"}\n'
    path.write_bytes(content)
    with pytest.raises(UserError, match=r"kept\.jsonl.* line 2"):
        Store(path)
    assert path.read_bytes() == content, "nothing is thrown away"


def test_equal_content_equal_key():
    held, turned = {"x": 1, "y": [1.5, None]}, {"y": [1.5, None], "x": 1}
    one = content_key("a", held, (1, 2))
    assert one == content_key("a", turned, [1, 2])
    assert len(one) == 24
    other = {**held, "x": "1"}
    others = [("a", held, (2, 1)), ("a", other, (1, 2)), ("a", held, 1, 2), ("b", held, (1, 2))]
    assert len({one, *(content_key(*parts) for parts in others)}) == 5
