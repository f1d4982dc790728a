"""Examples: read from every kind of place, the same each time, refused by name when unfit."""

from __future__ import annotations

import gzip
import json
import os
import sys
import types
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bellmask.data.examples import Example, ExampleSource, Message, open_examples, turns
from bellmask.errors import UserError
from bellmask.options import SftOptions

SHARED = Path(os.environ.get("BELLMASK_TEST_DATA", Path(__file__).parents[3] / "shared" / "data"))


def opened(source: Path | str, **options: Any) -> ExampleSource:
    given = SftOptions(**{"train": str(source), **options})
    return open_examples(str(source), given, Path("unused"))


def pairs(source: ExampleSource) -> list[tuple[str, str]]:
    return [(example.prompt_messages[-1].text, example.response) for example in source]


def write_lines(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


# --- examples --------------------------------------------------------------------------------


def test_a_conversation_gives_one_example_per_answer() -> None:
    said = [Message("system", "s"), Message("user", "a"), Message("assistant", "b")]
    said += [Message("user", "c"), Message("assistant", "d")]
    first, second = turns(said)
    assert first.messages == tuple(said[:3])
    assert second.messages == tuple(said)
    assert second.response == "d"
    assert second.prompt_messages == tuple(said[:4])
    assert first.is_conversation
    assert not Example.plain("a", "b").is_conversation


def test_an_example_must_end_with_an_answer() -> None:
    for messages in ((), (Message("assistant", "a"),), (Message("user", "a"),) * 2):
        with pytest.raises(ValueError, match="ends with what the assistant says"):
            Example(messages)


# --- files -----------------------------------------------------------------------------------

ROWS: list[dict[str, Any]] = [
    {"prompt": "p", "response": "r"},
    {"instruction": "i", "input": "x", "output": "o"},
    {"instruction": "i", "input": "", "output": "o"},
    {"question": "q?", "answer": "a", "id": 7},
    {"messages": [{"role": "user", "content": "u"}, {"role": "assistant", "content": "v"}]},
    {"conversations": [{"from": "human", "value": "h"}, {"from": "gpt", "value": "g"}]},
]
FOUND = [("p", "r"), ("i\n\nx", "o"), ("i", "o"), ("q?", "a"), ("u", "v"), ("h", "g")]


def test_all_column_names_are_known_in_every_format(tmp_path: Path) -> None:
    lines = write_lines(tmp_path / "a.jsonl", ROWS)
    (tmp_path / "b.json").write_text(json.dumps(ROWS, indent=1))
    (tmp_path / "c.jsonl.gz").write_bytes(gzip.compress(lines.read_bytes()))
    (tmp_path / "d.json").write_text(lines.read_text())
    for name in ("a.jsonl", "b.json", "c.jsonl.gz", "d.json"):
        source = opened(tmp_path / name)
        assert pairs(source) == pairs(source) == FOUND
        assert [example.is_conversation for example in source] == [False] * 4 + [True] * 2


def test_parquet_and_arrow_hold_examples_too(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    for name, rows in (("pairs", ROWS[:1] * 3), ("lists", ROWS[4:5])):
        table = pyarrow.Table.from_pylist(rows)
        parquet.write_table(table, tmp_path / f"{name}.parquet")
        with pyarrow.ipc.new_stream(tmp_path / f"{name}.arrow", table.schema) as stream:
            stream.write_table(table)
    for kind in ("parquet", "arrow"):
        assert pairs(opened(tmp_path / f"pairs.{kind}")) == FOUND[:1] * 3
        assert pairs(opened(tmp_path / f"lists.{kind}")) == FOUND[4:5]


def test_documents_are_records_and_drops_are_counted(tmp_path: Path) -> None:
    chat = [{"role": r, "content": c} for r, c in (("user", "1"), ("assistant", "2")) * 2]
    rows = [ROWS[0], {"prompt": "p", "response": " "}, {"messages": chat}, {"messages": []}]
    counts: Counter[str] = Counter()
    numbers = [n for n, _ in opened(write_lines(tmp_path / "a.jsonl", rows)).read(counts)]
    assert numbers == [0, 2, 2]
    assert counts == {"left out: no response": 1, "left out: nobody answers": 1}


def test_the_identity_is_the_content(tmp_path: Path) -> None:
    names = {name: write_lines(tmp_path / f"{name}.jsonl", ROWS[:2]) for name in "ab"}
    names["c"] = write_lines(tmp_path / "c.jsonl", ROWS[:1])
    ids = {name: opened(path).identity for name, path in names.items()}
    assert ids["a"] == ids["b"] != ids["c"]
    assert pairs(opened(tmp_path / "[ac].jsonl")) == FOUND[:2] + FOUND[:1]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"text": "a", "n": 1}', r"record 1 has the columns text, n; .*prompt and response"),
        ('{"prompt": 3, "response": "a"}', "record 1: column 'prompt' holds int, not text"),
        ('{"messages": "hello"}', "'messages' is not a list of turns"),
        ('{"prompt": "a", "response": "b"}\n{"prompt"', "record 2 is not JSON"),
        ("[1]", "record 1 is not a JSON object"),
        ('["a"', "is not JSON"),
    ],
)
def test_what_is_no_example_is_named(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "a.json"
    path.write_text(text)
    with pytest.raises(UserError, match=message):
        pairs(opened(path))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("taks", r"unknown examples 'taks' \(tasks, "),
        ("toy:copi", "did you mean 'copy'"),
        ("toy:copy:99", "a number from 1 to 12"),
        ("toy:sums:x", "a number from 1 to 9"),
        ("stories:", "what comes after stories: is missing"),
        ("hub:name", "write hub:OWNER/NAME"),
        ("no/such.jsonl", "there is no file"),
    ],
)
def test_names_that_lead_nowhere(name: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        opened(name)


def test_other_files_and_counts_out_of_place_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("text")
    with pytest.raises(UserError, match=r"\.jsonl, \.json, \.parquet or \.arrow"):
        pairs(opened(tmp_path / "a.txt"))
    with pytest.raises(UserError, match=r"sft\.counts is for the task mix"):
        opened("toy:copy", counts=("piqa=3",))


# --- the hub ---------------------------------------------------------------------------------


class FakeHub:
    """Stands for ``datasets`` and ``huggingface_hub``: rows, and what was asked."""

    def __init__(self, rows: list[dict[str, Any]]) -> None:
        self.rows, self.commit, self.asked = rows, "c0ffee", []  # type: ignore[var-annotated]
        self.error: Exception | None = None

    def dataset_info(self, repository: str, revision: str | None) -> Any:
        if self.error:
            raise self.error
        return types.SimpleNamespace(sha=self.commit)

    def load_dataset(self, *args: Any, **named: Any) -> Iterator[dict[str, Any]]:
        self.asked.append((*args, named["split"], named["revision"]))
        return iter(self.rows)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> FakeHub:
    fake = FakeHub(ROWS)
    data = types.SimpleNamespace(load_dataset=fake.load_dataset)
    monkeypatch.setitem(sys.modules, "datasets", data)
    api = types.SimpleNamespace(HfApi=lambda: fake)
    monkeypatch.setitem(sys.modules, "huggingface_hub", api)
    return fake


def test_hub_rows_are_read_at_their_commit(hub: FakeHub) -> None:
    source = opened("hub:owner/set:conf:test")
    assert not hub.asked, "known before any row is read"
    assert pairs(source) == FOUND
    assert hub.asked == [("owner/set", "conf", "test", "c0ffee")]
    assert pairs(opened("hub:owner/set")) == FOUND
    assert hub.asked[1] == ("owner/set", None, "train", "c0ffee")
    hub.commit = "decade"
    assert opened("hub:owner/set:conf:test").identity != source.identity


def test_a_hub_out_of_reach_gives_advice(hub: FakeHub) -> None:
    hub.error = ConnectionError("not known\nmore")
    with pytest.raises(UserError, match=r"owner/set.*\(not known\)\. Offline\?") as caught:
        opened("hub:owner/set")
    assert "\n" not in str(caught.value)
