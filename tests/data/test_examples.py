"""Examples: read from every kind of place, the same each time, refused by name when unfit."""

from __future__ import annotations

import gzip
import json
import os
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hub_tools import FakeHub, install_hub

from bellmask.data.examples import Example, ExampleSource, Message, open_examples, turns
from bellmask.errors import UserError
from bellmask.stage_options import SftOptions

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
        ("[" * 100_000, r"a\.json cannot be read: .*recursion"),
        ('{"prompt": ' + "[" * 100_000, "record 1 cannot be read: .*recursion"),
        ('{"prompt": ' + "1" * 5_000 + "}", "record 1 cannot be read: .*digits"),
        ('[{"prompt": ' + "1" * 5_000 + "}]", r"a\.json cannot be read: .*digits"),
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
        ("sharegpt:hub:name", "'sharegpt:hub:name': write hub:OWNER/NAME"),
        ("no/such.jsonl", "there is no file"),
    ],
)
def test_names_that_lead_nowhere(name: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        opened(name)


def test_other_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("text")
    with pytest.raises(UserError, match=r"\.jsonl, \.json, \.parquet or \.arrow"):
        pairs(opened(tmp_path / "a.txt"))


# --- the hub ---------------------------------------------------------------------------------


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> FakeHub:
    return install_hub(monkeypatch, ROWS)


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


def test_a_hub_that_breaks_off_says_so_in_one_line(hub: FakeHub) -> None:
    hub.error_after = ConnectionError("reset by peer\nmore")
    with pytest.raises(UserError, match=r"owner/set/default/train.*: reset by peer$"):
        pairs(opened("hub:owner/set"))


def test_sharegpt_from_the_hub_is_cleaned_and_grouped_as_from_files(
    hub: FakeHub, tmp_path: Path
) -> None:
    def talk(name: str, *said: str) -> dict[str, Any]:
        sides = ("human", "gpt") * len(said)
        return {"id": name, "conversations": [{"from": s, "value": v} for s, v in zip(sides, said)]}

    hub.rows = [
        talk("a_0", "Hi 1 / 1", "<div>Hello &amp; welcome</div>"),
        talk("b", "Code? 1 / 1", "```pythonCopy codex = 1\n```"),
        talk("a_2", "More?", "Yes<br>no"),
        {"id": "c", "conversations": [{"from": "human", "value": "alone"}]},
    ]
    counts: list[Counter[str]] = [Counter(), Counter()]
    source = opened("sharegpt:hub:owner/set:conf:test")
    found = list(source.read(counts[0]))
    assert hub.asked == [("owner/set", "conf", "test", "c0ffee")]
    assert [(n, e.response) for n, e in found] == [
        (0, "Hello & welcome"),
        (1, "```python\nx = 1\n```"),
        (0, "Yes\nno"),
    ]
    assert all(example.is_conversation for _, example in found)
    path = write_lines(tmp_path / "a.jsonl", hub.rows)
    assert list(opened(f"sharegpt:{path}").read(counts[1])) == found
    assert counts[0] == counts[1]
    assert source.identity != opened("hub:owner/set:conf:test").identity
