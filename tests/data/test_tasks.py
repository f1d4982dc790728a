"""The task mix: every function on its real validation split, and draws that stay the same."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path

import pyarrow
import pytest

from bellmask.config.options import SftOptions
from bellmask.data import tasks
from bellmask.data import tasks as task_files
from bellmask.data.example_files import RecordSource
from bellmask.data.examples import open_examples
from bellmask.data.tasks import (
    TASKS,
    VALIDATION,
    TaskQuestion,
    clean_wikihow,
    passages,
    questions,
    take,
    task_counts,
    validation_records,
)
from bellmask.utils.errors import UserError

# --- real validation splits ------------------------------------------------------------------


def lettered(text, label, key):
    return text["ABCD".index(key)]


REAL = {
    # records, choices, columns that are given, the answer read off the raw record in another way
    "hellaswag": (10_042, 4, "activity_label", lambda r: r["endings"]["0123".index(r["label"])]),
    "triviaqa": (7_993, 0, "question", lambda r: r["answer"]["value"]),
    "openbookqa": (500, 4, "question_stem", lambda r: lettered(**r["choices"], key=r["answerKey"])),
    "piqa": (1_838, 2, "goal", lambda r: r["sol2"] if r["label"] else r["sol1"]),
    "social_iqa": (1_954, 3, "context question", lambda r: r["answer" + " ABC"[int(r["label"])]]),
    "winogrande": (1_267, 2, "sentence", lambda r: r["option" + r["answer"]]),
}  # fmt: skip
LONG = [pytest.param(n, marks=pytest.mark.long) for n in ("hellaswag", "triviaqa", "social_iqa")]


@pytest.mark.parametrize("task", ["openbookqa", "piqa", "winogrande", *LONG])
def test_every_real_record_is_a_question_with_its_answer(task, fetched):
    records = fetched(lambda cache: validation_records(task, cache))
    found = list(questions(task, iter(records)))
    count, num_choices, columns, right_answer = REAL[task]
    assert len(records) == len(found) == count == VALIDATION[task].num_records
    leaked = 0
    for record, question in zip(records, found, strict=True):
        answer = right_answer(record)
        assert question.answer == (clean_wikihow(answer) if task == "hellaswag" else answer.strip())
        assert question.answer == question.answer.strip() == question.example.response != ""
        assert question.prompt.endswith("\nAnswer:")
        assert all(record[column].strip() in question.prompt for column in columns.split())
        assert len(question.choices) == num_choices
        assert not question.choices or question.answer in question.choices
        leaked += any(c in question.prompt for c in question.choices if len(c) > 30)
        assert not question.example.is_conversation
        if task == "hellaswag":
            marks = r"\[(header|title|step|substeps)\]|  "
            assert not re.search(marks, "|".join([question.prompt, *question.choices]))
    assert leaked <= count // 100, "choices are not part of the prompt"
    if task == "hellaswag":
        first = "Context: Roof shingle removal: A man is sitting on a roof. He"
        assert found[0].prompt == f"{first}\nQuestion: What happens next?\nAnswer:"
    if task == "triviaqa":
        assert found[0].answer == "Sunset Boulevard"
        assert "Sunset Blvd" in found[0].accepted


def test_hellaswag_is_cleaned():
    raw = "[header] How to sit [title] Sit. [step] Slowly : [substeps] Now. "
    assert clean_wikihow(raw) == "How to sit. Sit. Slowly : Now."
    assert clean_wikihow("Why? [title] So.") == "Why? So."


def test_lambada_asks_for_the_last_word(shared_file):
    lines = shared_file("lambada/lambada_test_openai.jsonl").read_text("utf-8").strip()
    records = [json.loads(line) for line in lines.split("\n")]
    found = list(questions("lambada", iter(records)))
    assert len(found) == 5153
    assert found[0].answer == "signs"
    for record, question in zip(records, found, strict=True):
        *context, word = record["text"].split()
        assert question.answer == word.replace("“", '"').replace("”", '"')
        pattern = r"Passage: (.*)\nQuestion: What is the next word\?\nAnswer:"
        left = re.fullmatch(pattern, question.prompt, re.DOTALL)[1]
        assert len(left.split()) == len(context)


def test_records_without_an_answer_are_left_out():
    for task, record in {
        "hellaswag": {"activity_label": "", "ctx_a": "", "ctx_b": "", "endings": [], "label": ""},
        "triviaqa": {"question": "q", "answer": {"value": "<unk>"}},
        "openbookqa": {"question_stem": "q", "choices": {"text": ["a"], "label": ["A"]}},
        "piqa": {"goal": "g", "sol1": "a", "sol2": "b", "label": -1},
        "winogrande": {"sentence": "_", "option1": "a", "option2": "b", "answer": ""},
        "lambada": {"text": "word"},
    }.items():
        assert list(questions(task, iter([record]))) == [None]
    with pytest.raises(UserError, match=r"piqa, record 1.*'goal'.*text"):
        list(questions("piqa", iter([{"text": "a"}])))


# --- novels ----------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [80, 600])
def test_novels_give_passages_that_do_not_overlap(size):
    rest = (" ".join(["and"] * (n % 9)) for n in range(size))
    text = " ".join(f"word{n} {words} end{'x' * n} ." for n, words in enumerate(rest))
    found, again, other = ([r["text"] for r in passages({"text": text}, n)] for n in (3, 3, 4))
    assert found == again != other
    assert (
        len(found) == tasks.PASSAGES_PER_BOOK
        if size == 600
        else 1 < len(found) < tasks.PASSAGES_PER_BOOK
    )
    seen = []
    for text in found:
        assert tasks.CONTEXT_WORDS < len(text.split()) <= tasks.MOST_WORDS
        numbers = [int(n) for n in re.findall(r"word(\d+)", text)]
        assert numbers == list(range(numbers[0], numbers[-1] + 1)), "sentences in a row"
        assert text.endswith(f"end{'x' * numbers[-1]}"), "ends with a word, not a full stop"
        seen += numbers
    assert len(set(seen)) == len(seen)


def test_a_passage_is_left_as_it_is_and_has_at_most_180_words():
    record = {"text": "word " * tasks.BOOK_WORDS}
    assert list(passages(record, 0)) == [record]
    assert list(passages({"text": "word " * (tasks.BOOK_WORDS + 1)}, 0)) == []
    for last, sizes in ((130, {tasks.MOST_WORDS}), (131, set())):
        text = " ".join("and " * (size - 1) + "end." for size in (50, last) * 3)
        assert {len(one["text"].split()) for one in passages({"text": text}, 0)} == sizes


# --- counts ----------------------------------------------------------------------------------


def test_the_mix_has_210_thousand_examples():
    counts = task_counts()
    assert (sum(counts.values()), len(counts)) == (210_000, 7)
    assert (counts["hellaswag"], counts["winogrande"]) == (39_905, 40_398)
    changed = task_counts(("triviaqa=5000", "lambada=0"))
    assert changed == {**counts, "triviaqa": 5000, "lambada": 0}


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (("trivia=5",), "sft.counts 'trivia'.*'triviaqa'"),
        (("piqa",), "TASK=NUMBER.*'piqa'"),
        (("piqa=-1",), "TASK=NUMBER"),
        (("piqa=1", "piqa=2"), "piqa twice"),
        (tuple(f"{name}=0" for name in TASKS), "no task"),
    ],
)
def test_counts_that_cannot_be(given, words):
    with pytest.raises(UserError, match=words):
        task_counts(given)


def test_a_draw_is_fixed_ordered_and_fair():
    items = [TaskQuestion(str(n), "a") for n in range(1000)]
    names = ("piqa", "piqa", "winogrande")
    drawn, again, other = ([int(q.prompt) for q in take(name, items, 300)] for name in names)
    assert drawn == sorted(set(drawn)) == again != other
    assert len(drawn) == 300
    assert 110 < sum(n < 500 for n in drawn) < 190
    assert take("piqa", items, 2000) == items


def test_the_mix_comes_from_the_hub(monkeypatch):
    asked_for = []

    def hub(name, *place):
        asked_for.append((name, *place))
        return RecordSource(name, f"{name}@1", lambda: iter(()), {})

    monkeypatch.setattr(task_files, "hub_records", hub)
    source = open_examples("tasks", SftOptions(train="tasks", counts=("lambada=0",)), Path())
    assert {name for name, *_ in asked_for} == set(TASKS) - {"lambada"}
    assert ("piqa", "ybisk/piqa", None, "train", "refs/convert/parquet") in asked_for
    assert ("openbookqa", "allenai/openbookqa", "main", "train", None) in asked_for
    assert list(source) == []


# --- folders ---------------------------------------------------------------------------------

ONLY = tuple(f"{name}=0" for name in TASKS if name not in ("piqa", "winogrande"))


def test_a_folder_of_files_is_a_mix_and_must_have_every_task(tmp_path):
    name = f"tasks:{tmp_path}"

    def opened(*counts, name=name):
        return open_examples(name, SftOptions(train=name, counts=(*ONLY, *counts)), tmp_path)

    piqa = [{"goal": f"g{n}", "sol1": "a", "sol2": "b", "label": n % 2} for n in range(20)]
    (tmp_path / "piqa.jsonl").write_text("\n".join(map(json.dumps, piqa)))
    with pytest.raises(UserError, match=r"winogrande\.jsonl.*--sft\.counts winogrande=0"):
        opened()
    rows = [
        {"sentence": "x _", "option1": "a", "option2": "b", "answer": a} for a in ("2", "2", "")
    ]
    (tmp_path / "winogrande").mkdir()
    table = pyarrow.Table.from_pylist(rows)
    with pyarrow.ipc.new_stream(tmp_path / "winogrande" / "data.arrow", table.schema) as stream:
        stream.write_table(table)
    (tmp_path / "winogrande" / "state.json").write_text("{}")
    source, counts = opened("piqa=5"), Counter()
    found = list(source.read(counts))
    assert [number for number, _ in found] == list(range(7)), "each example its own document"
    assert [e.response for _, e in found[5:]] == ["b"] * 2
    left_out = "left out: winogrande without an answer"
    assert counts == {"piqa taken": 5, "winogrande taken": 2, left_out: 1}
    assert opened("piqa=6").identity != source.identity
    (tmp_path / "piqa.json").write_text("[]")
    with pytest.raises(UserError, match=r"piqa\.jsonl and piqa\.json"):
        opened()
    with pytest.raises(UserError, match="nowhere"):
        opened(name="tasks:nowhere")
