"""The task mix: every function on its real validation split, and draws that stay the same."""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from bellmask.data import task_files
from bellmask.data.example_files import RecordSource
from bellmask.data.examples import open_examples
from bellmask.data.task_files import VALIDATION, questions, validation_records
from bellmask.data.tasks import (
    BOOK_WORDS,
    CONTEXT_WORDS,
    MOST_WORDS,
    PASSAGES_PER_BOOK,
    TASKS,
    Question,
    clean_wikihow,
    passages,
    take,
    task_counts,
)
from bellmask.data.wheels import cache_folder
from bellmask.errors import UserError
from bellmask.stage_options import SftOptions

SHARED = Path(os.environ.get("BELLMASK_TEST_DATA", Path(__file__).parents[3] / "shared" / "data"))
PUBLISHED = {
    "hellaswag": 10_042,
    "triviaqa": 7_993,
    "openbookqa": 500,
    "piqa": 1_838,
    "social_iqa": 1_954,
    "winogrande": 1_267,
}


@cache
def real_records(task: str) -> list[dict[str, Any]]:
    pytest.importorskip("pyarrow")
    try:
        return validation_records(task, cache_folder())
    except UserError as error:
        pytest.skip(f"needs a wheel from the package index: {error}")


def lambada_records() -> list[dict[str, Any]]:
    path = SHARED / "lambada" / "lambada_test_openai.jsonl"
    if not path.exists():
        pytest.skip("needs lambada in the folder $BELLMASK_TEST_DATA")
    return [json.loads(line) for line in path.read_text("utf-8").strip().split("\n")]


def asked(task: str, records: list[dict[str, Any]]) -> list[Question]:
    found = list(questions(task, iter(records)))
    assert None not in found
    return [question for question in found if question is not None]


# --- real validation splits ------------------------------------------------------------------


def right_answer(task: str, record: dict[str, Any]) -> str:
    """The answer, read off the raw record in another way."""
    if task == "hellaswag":
        return record["endings"]["0123".index(record["label"])]
    if task == "triviaqa":
        return record["answer"]["value"]
    if task == "openbookqa":
        return record["choices"]["text"]["ABCD".index(record["answerKey"])]
    if task == "piqa":
        return record["sol2"] if record["label"] else record["sol1"]
    if task == "social_iqa":
        return record["answer" + {"1": "A", "2": "B", "3": "C"}[record["label"]]]
    return record["option" + record["answer"]]


@pytest.mark.parametrize("task", PUBLISHED)
def test_every_real_record_is_a_question_with_its_answer(task: str) -> None:
    records = real_records(task)
    found = asked(task, records)
    assert len(records) == len(found) == PUBLISHED[task] == VALIDATION[task].num_records
    sizes = {"hellaswag": 4, "openbookqa": 4, "piqa": 2, "social_iqa": 3, "winogrande": 2}
    for record, question in zip(records, found, strict=True):
        assert question.prompt.endswith("\nAnswer:")
        assert question.answer == question.answer.strip() != ""
        assert len(question.choices) == sizes.get(task, 0)
        assert not question.choices or question.answer in question.choices
        if task == "hellaswag":
            assert question.answer == clean_wikihow(right_answer(task, record))
        else:
            assert question.answer == right_answer(task, record).strip()
        example = question.example
        assert example.response == question.answer
        assert not example.is_conversation


@pytest.mark.parametrize("task", PUBLISHED)
def test_all_that_is_given_is_in_the_prompt_and_the_choices_are_not(task: str) -> None:
    columns = {
        "hellaswag": ("activity_label",),
        "triviaqa": ("question",),
        "openbookqa": ("question_stem",),
        "piqa": ("goal",),
        "social_iqa": ("context", "question"),
        "winogrande": ("sentence",),
    }[task]
    long_choices = 0
    for record, question in zip(real_records(task), asked(task, real_records(task)), strict=True):
        assert all(record[column].strip() in question.prompt for column in columns)
        long_choices += any(c in question.prompt for c in question.choices if len(c) > 30)
    assert long_choices <= len(real_records(task)) // 100


def test_hellaswag_is_cleaned() -> None:
    found = asked("hellaswag", real_records("hellaswag"))
    for question in found:
        for text in (question.prompt, *question.choices):
            assert not re.search(r"\[(header|title|step|substeps)\]|  ", text)
    first = "Context: Roof shingle removal: A man is sitting on a roof. He"
    assert found[0].prompt == f"{first}\nQuestion: What happens next?\nAnswer:"
    raw = "[header] How to sit [title] Sit. [step] Slowly : [substeps] Now. "
    assert clean_wikihow(raw) == "How to sit. Sit. Slowly : Now."
    assert clean_wikihow("Why? [title] So.") == "Why? So."


def test_trivia_has_other_ways_to_answer() -> None:
    found = asked("triviaqa", real_records("triviaqa"))
    assert found[0].answer == "Sunset Boulevard"
    assert "Sunset Blvd" in found[0].accepted


def test_lambada_asks_for_the_last_word() -> None:
    records = lambada_records()
    found = asked("lambada", records)
    assert len(found) == 5153
    for record, question in zip(records, found, strict=True):
        word = record["text"].split()[-1].replace("“", '"').replace("”", '"')
        assert question.answer == word
        assert not re.search(r"\s", word)
        middle = "\nQuestion: What is the next word?\nAnswer:"
        assert question.prompt.startswith("Passage: ")
        assert question.prompt.endswith(middle)
        left = question.prompt.removeprefix("Passage: ").removesuffix(middle)
        assert len(left.split()) == len(record["text"].split()) - 1
    assert found[0].answer == "signs"


def test_records_without_an_answer_are_left_out() -> None:
    for task, record in {
        "hellaswag": {"activity_label": "", "ctx_a": "", "ctx_b": "", "endings": [], "label": ""},
        "triviaqa": {"question": "q", "answer": {"value": "<unk>"}},
        "openbookqa": {"question_stem": "q", "choices": {"text": ["a"], "label": ["A"]}},
        "piqa": {"goal": "g", "sol1": "a", "sol2": "b", "label": -1},
        "winogrande": {"sentence": "_", "option1": "a", "option2": "b", "answer": ""},
        "lambada": {"text": "word"},
    }.items():
        assert list(questions(task, iter([record]))) == [None]
    with pytest.raises(UserError, match=r"piqa, record 1 is not .*'goal'.* columns text"):
        list(questions("piqa", iter([{"text": "a"}])))


# --- novels ----------------------------------------------------------------------------------


def novel(size: int) -> dict[str, str]:
    rest = (" ".join(["and"] * (n % 9)) for n in range(size))
    return {"text": " ".join(f"word{n} {words} end{'x' * n} ." for n, words in enumerate(rest))}


@pytest.mark.parametrize("size", [80, 600])
def test_novels_give_passages_that_do_not_overlap(size: int) -> None:
    found = [record["text"] for record in passages(novel(size), 3)]
    assert found == [record["text"] for record in passages(novel(size), 3)]
    assert found != [record["text"] for record in passages(novel(size), 4)]
    assert len(found) == PASSAGES_PER_BOOK if size == 600 else 1 < len(found) < PASSAGES_PER_BOOK
    seen: Counter[str] = Counter()
    for text in found:
        assert CONTEXT_WORDS < len(text.split()) <= MOST_WORDS
        numbers = [int(n) for n in re.findall(r"word(\d+)", text)]
        assert numbers == list(range(numbers[0], numbers[-1] + 1)), "sentences in a row"
        assert text.endswith(f"end{'x' * numbers[-1]}"), "ends with a word, not a full stop"
        seen.update(re.findall(r"word\d+", text))
    assert max(seen.values()) == 1


def test_a_passage_is_left_as_it_is() -> None:
    record = {"text": "word " * BOOK_WORDS}
    assert list(passages(record, 0)) == [record]
    assert list(passages({"text": "word " * (BOOK_WORDS + 1)}, 0)) == []


# --- counts ----------------------------------------------------------------------------------


def test_the_mix_has_210_thousand_examples() -> None:
    counts = task_counts()
    assert sum(counts.values()) == 210_000
    assert len(counts) == 7
    assert counts["hellaswag"] == 39_905
    assert counts["winogrande"] == 40_398
    changed = task_counts(("triviaqa=5000", "lambada=0"))
    assert changed == {**counts, "triviaqa": 5000, "lambada": 0}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (("trivia=5",), "unknown task in sft.counts 'trivia'; did you mean 'triviaqa'"),
        (("piqa",), "write TASK=NUMBER such as triviaqa=5000, not 'piqa'"),
        (("piqa=-1",), "write TASK=NUMBER"),
        (("piqa=1", "piqa=2"), "names piqa twice"),
        (tuple(f"{name}=0" for name in TASKS), "leaves no task"),
    ],
)
def test_counts_that_cannot_be(given: tuple[str, ...], message: str) -> None:
    with pytest.raises(UserError, match=message):
        task_counts(given)


def test_a_draw_is_fixed_ordered_and_fair() -> None:
    items = [Question(str(n), "a") for n in range(1000)]
    drawn = [int(question.prompt) for question in take("piqa", items, 300)]
    assert drawn == sorted(set(drawn))
    assert len(drawn) == 300
    assert drawn == [int(question.prompt) for question in take("piqa", items, 300)]
    assert drawn != [int(question.prompt) for question in take("winogrande", items, 300)]
    assert 110 < sum(n < 500 for n in drawn) < 190
    assert take("piqa", items, 2000) == items


def test_the_mix_comes_from_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    asked_for = []

    def hub(name: str, *place: str | None) -> RecordSource:
        asked_for.append((name, *place))
        return RecordSource(name, f"{name}@1", lambda: iter(()), {})

    monkeypatch.setattr(task_files, "hub_records", hub)
    source = open_examples("tasks", SftOptions(train="tasks", counts=("lambada=0",)), Path())
    assert {name for name, *_ in asked_for} == set(TASKS) - {"lambada"}
    assert ("piqa", "ybisk/piqa", None, "train", "refs/convert/parquet") in asked_for
    assert ("openbookqa", "allenai/openbookqa", "main", "train", None) in asked_for
    assert list(source) == []


# --- folders ---------------------------------------------------------------------------------

PIQA = [{"goal": f"g{n}", "sol1": "a", "sol2": "b", "label": n % 2} for n in range(20)]
ONLY = tuple(f"{name}=0" for name in TASKS if name not in ("piqa", "winogrande"))


def test_a_folder_of_files_is_a_mix(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    (tmp_path / "piqa.jsonl").write_text("\n".join(map(json.dumps, PIQA)))
    rows = [{"sentence": "x _", "option1": "a", "option2": "b", "answer": "2"}] * 3
    rows.append({**rows[0], "answer": ""})
    (tmp_path / "winogrande").mkdir()
    table = pyarrow.Table.from_pylist(rows)
    with pyarrow.ipc.new_stream(tmp_path / "winogrande" / "data.arrow", table.schema) as stream:
        stream.write_table(table)
    (tmp_path / "winogrande" / "state.json").write_text("{}")
    name = f"tasks:{tmp_path}"
    options = SftOptions(train=name, counts=(*ONLY, "piqa=5"))
    source = open_examples(name, options, tmp_path)
    counts: Counter[str] = Counter()
    found = list(source.read(counts))
    assert [number for number, _ in found] == list(range(8)), "each example its own document"
    assert [e.response for _, e in found[5:]] == ["b"] * 3
    assert counts == {
        "piqa taken": 5,
        "winogrande taken": 3,
        "left out: winogrande without an answer": 1,
    }
    other = SftOptions(train=name, counts=(*ONLY, "piqa=6"))
    assert open_examples(name, other, tmp_path).identity != source.identity


def test_a_folder_must_have_every_task(tmp_path: Path) -> None:
    (tmp_path / "piqa.jsonl").write_text(json.dumps(PIQA[0]))
    name = f"tasks:{tmp_path}"
    with pytest.raises(UserError, match=r"has no winogrande\.jsonl.*--sft\.counts winogrande=0"):
        open_examples(name, SftOptions(train=name, counts=ONLY), tmp_path)
    (tmp_path / "piqa.json").write_text("[]")
    with pytest.raises(UserError, match=r"both piqa\.jsonl and piqa\.json"):
        open_examples(name, SftOptions(train=name, counts=(*ONLY, "winogrande=0")), tmp_path)
    with pytest.raises(UserError, match="there is no folder"):
        open_examples("tasks:nowhere", SftOptions(train="tasks:nowhere"), tmp_path)
