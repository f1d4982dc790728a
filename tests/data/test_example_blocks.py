"""Blocks of examples: all of them once, held-out ones apart, keyed by everything that matters."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bellmask.data import blocks as blocks_module
from bellmask.data import example_blocks
from bellmask.data.blocks import Blocks, read_card
from bellmask.data.example_blocks import (
    example_counts,
    load_example_blocks,
)
from bellmask.data.examples import open_examples
from bellmask.data.tokenizer import ByteTokenizer, SymbolTokenizer
from bellmask.errors import UserError
from bellmask.options import DataOptions
from bellmask.stage_options import SftOptions

SHARED = Path(os.environ.get("BELLMASK_TEST_DATA", Path(__file__).parents[3] / "shared" / "data"))
BYTES = ByteTokenizer()


@pytest.fixture
def load(tmp_path: Path) -> Any:
    def run(train: str, valid: str | None = None, length: int = 64, **sft: Any) -> Any:
        data = DataOptions(block_length=length, cache=str(tmp_path / "cache"), valid_fraction=0.1)
        made = load_example_blocks(data, SftOptions(train=train, valid=valid, **sft), BYTES)
        return made.train, made.valid

    return run


def folders(tmp_path: Path) -> list[Path]:
    return sorted((tmp_path / "cache" / "blocks").iterdir())


def decoded(blocks: Blocks) -> list[tuple[str, str]]:
    rows, starts, lengths = blocks.tokens[slice(None)], blocks.starts, blocks.lengths
    assert starts is not None
    return [
        (BYTES.decode(row[:start].astype(np.int64)), BYTES.decode(row[start:stop].astype(np.int64)))
        for row, start, stop in zip(rows, starts.tolist(), lengths.tolist(), strict=True)
    ]


def conversations(path: Path, count: int, turns: int = 3) -> str:
    rows = [
        {
            "messages": [
                {"role": role, "content": f"{role[0]}{n}.{t}"}
                for t in range(turns)
                for role in ("user", "assistant")
            ]
        }
        for n in range(count)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_all_examples_are_there_once_and_held_out_ones_apart(load: Any, tmp_path: Path) -> None:
    train, valid = load("toy:copy:2")
    expected = {
        (e.prompt_messages[0].text, " " + e.response)
        for e in open_examples("toy:copy:2", SftOptions(), tmp_path)
    }
    found = decoded(train) + decoded(valid)
    assert set(found) == expected
    assert len(found) == len(expected) == 676
    assert (len(train), len(valid)) == (608, 68)
    again = load("toy:copy:2")
    assert [len(folders(tmp_path)), again[1].fingerprint] == [1, valid.fingerprint]
    assert train.num_bytes == 608 * 4
    assert valid.num_bytes == 68 * 4
    card = read_card(folders(tmp_path)[0])
    assert example_counts(card) == {"rows": 676, "documents": 676}
    assert card["has_starts"] is True
    assert card["num_response_tokens"] == 676 * 32


def test_rows_are_the_same_in_shards_and_whatever_is_encoded_together(
    load: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = load("toy:sums:1")[0]
    monkeypatch.setattr(blocks_module, "TOKENS_PER_SHARD", 64 * 7)
    monkeypatch.setattr(example_blocks, "EXAMPLES_AT_ONCE", 3)
    monkeypatch.setattr(example_blocks, "VERSION", 10**6)
    cut = load("toy:sums:1")[0]
    assert len(list(folders(tmp_path)[0].glob("tokens-*"))) + len(
        list(folders(tmp_path)[1].glob("tokens-*"))
    ) == 1 + -(-100 // 7)
    for index in (slice(0, 90), slice(33, 41)):
        assert (whole.rows(index) == cut.rows(index)).all()
    assert (whole.starts == cut.starts).all()
    assert (whole.documents == cut.documents).all()


def test_more_examples_do_not_move_the_others(load: Any, tmp_path: Path) -> None:
    few = decoded(join_parts(load(conversations(tmp_path / "a.jsonl", 20), length=128)))
    many = decoded(join_parts(load(conversations(tmp_path / "b.jsonl", 50), length=128)))
    assert [pair for pair in many if pair in set(few)] == few
    assert few != sorted(few, key=lambda p: int(p[1].split(".")[0][2:])), "in a random order"


def join_parts(parts: tuple[Blocks, Blocks]) -> Blocks:
    return blocks_module.join(parts)


def test_a_conversation_is_never_in_both_parts(load: Any, tmp_path: Path) -> None:
    train, valid = load(conversations(tmp_path / "a.jsonl", 40), length=128)
    assert not set(train.documents) & set(valid.documents)
    assert len(train) + len(valid) == 120
    assert len(valid) == 12
    numbers = {response.split(".")[0] for _, response in decoded(train)}
    assert not numbers & {response.split(".")[0] for _, response in decoded(valid)}
    prompt, response = decoded(valid)[2]
    n = response.strip().split(".")[0][1:]
    assert prompt == (
        f"user: u{n}.0\nassistant: a{n}.0\nuser: u{n}.1\nassistant: a{n}.1\n"
        f"user: u{n}.2\nassistant:"
    )
    with pytest.raises(UserError, match=r"3 example\(s\) of 1 document\(s\): too few"):
        load(conversations(tmp_path / "b.jsonl", 1), length=128)


def test_validation_may_be_given(load: Any, tmp_path: Path) -> None:
    train, valid = load("toy:copy:1", "toy:sums:1")
    assert (len(train), len(valid)) == (26, 100)
    with pytest.raises(UserError, match=r"same examples as sft\.train"):
        load("toy:copy:1", "toy:copy:1")


def test_the_cache_is_keyed_by_all_that_matters(tmp_path: Path) -> None:
    data, sft = (
        DataOptions(block_length=64, cache=str(tmp_path / "cache")),
        SftOptions("toy:copy:1"),
    )
    seen = {load_example_blocks(data, sft, BYTES).train.fingerprint}
    seen.add(load_example_blocks(replace(data, block_length=65), sft, BYTES).train.fingerprint)
    for change in ({"round_to": 16}, {"template": "chat"}, {"train": "toy:copy:2"}):
        seen.add(load_example_blocks(data, replace(sft, **change), BYTES).train.fingerprint)  # type: ignore[arg-type]
    seen.add(load_example_blocks(data, sft, BYTES, "{{ messages }}").train.fingerprint)
    seen.add(load_example_blocks(data, sft, BYTES, bos_first=True).train.fingerprint)
    assert len(seen) == len(folders(tmp_path)) == 7


def test_what_was_left_out_is_counted(load: Any, tmp_path: Path) -> None:
    rows = [{"prompt": "p" * n, "response": "r" * m} for n, m in ((1, 1), (1, 60), (50, 9), (1, 2))]
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    load(str(path))
    assert example_counts(read_card(folders(tmp_path)[0])) == {
        "rows": 3,
        "documents": 3,
        "left out: response longer than the block": 1,
        "prompts cut on the left": 1,
    }


def test_answers_in_conversations_are_counted_where_they_became_rows(
    load: Any, tmp_path: Path
) -> None:
    path = conversations(tmp_path / "a.jsonl", 5)
    with Path(path).open("a") as stream:
        stream.write(json.dumps({"prompt": "p", "response": "r"}) + "\n")
        talk = [{"role": "user", "content": "u"}, {"role": "assistant", "content": "a" * 200}]
        stream.write(json.dumps({"messages": talk}) + "\n")
    load(path, length=128)
    counts = example_counts(read_card(folders(tmp_path)[0]))
    assert (counts["rows"], counts["answers in conversations"]) == (16, 15)


def test_mistakes_leave_nothing_behind(load: Any, tmp_path: Path) -> None:
    bad = tmp_path / "bad.jsonl"
    bad.write_text(json.dumps({"prompt": "p", "response": "r" * 99}) + "\n")
    with pytest.raises(UserError, match=r"no example that fits .*=64 \(left out: response longer"):
        load(str(bad))
    bad.write_text('{"prompt": "p", "response": "r"}\n{"prompt"')
    with pytest.raises(UserError, match="record 2 is not JSON"):
        load(str(bad))
    assert folders(tmp_path) == []
    for options, message in (
        ({"length": 32}, r"data\.block_length=32 has no room"),
        ({"round_to": 0}, r"sft\.round_to=0 must be at least 1"),
    ):
        with pytest.raises(UserError, match=message):
            load("toy:copy", **options)
    with pytest.raises(UserError, match="symbols do not have"):
        load_example_blocks(
            DataOptions(cache=str(tmp_path)), SftOptions("toy:copy"), SymbolTokenizer(8)
        )


def test_real_conversations_fill_rows(tmp_path: Path, load: Any) -> None:
    path = SHARED / "sharegpt" / "sharegpt_v3_sample.jsonl"
    if not path.exists():
        pytest.skip("needs sharegpt in the folder $BELLMASK_TEST_DATA")
    train, valid = load(f"sharegpt:{path}", length=512)
    counts = example_counts(read_card(folders(tmp_path)[0]))
    assert counts["rows"] == len(train) + len(valid)
    assert counts["rows"] + counts["left out: response longer than the block"] == 1004
    responses = {
        " " + example.response.strip()
        for example in open_examples(f"sharegpt:{path}", SftOptions(), tmp_path)
    }
    assert all(response in responses for _, response in decoded(train))
    assert not set(train.documents) & set(valid.documents)
