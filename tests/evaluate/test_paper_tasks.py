"""Table 4's tasks: their documents beside lm-eval's own tasks and fine-tuning, and their scores.

Choosing agrees with lm-eval's accuracies, normalized answers with those of TriviaQA's release.
"""

from __future__ import annotations

import random
import sys

import pytest
from bellmask.evaluate.continuations import Score

from bellmask.data.chat_templates import Example, Template
from bellmask.data.tasks import BENCHMARKS, SCORES, open_task, questions, validation_records
from bellmask.evaluate import paper_tasks
from bellmask.evaluate.lm_eval import STOCK
from bellmask.evaluate.paper_tasks import normalize, rouge, score_choices, write_task
from bellmask.utils.errors import UserError

pytest.importorskip("lm_eval")

from bellmask.evaluate.lm_eval_model import LoadedTasks, ScoredChoice


@pytest.fixture
def some_records(fetched, shared_file):
    """From the whole set; of LAMBADA also the ones with a line end in the word."""

    def load(task, count=100):
        if task == "lambada":
            folder = shared_file("lambada/lambada_test_openai.jsonl").parents[1]
            records = open_task(task, str(folder), folder).records
        else:
            records = fetched(lambda cache: validation_records(task, cache))
        odd = [r for r in records if task == "lambada" and "\n" in r["text"].split(" ")[-1]]
        return [*records[:: max(1, len(records) // count)][:count], *odd]

    return load


def asked(folder, task, records, prompts):
    """lm-eval's task, and by document what it asks."""
    assert write_task(folder, task, records, 0, prompts) == len(records)
    loaded = LoadedTasks(folder, [task])
    requests = {}
    for request in loaded.requests():
        requests.setdefault(request.doc_id, []).append(request)
    return loaded._loaded["tasks"][task], list(requests.values())


@pytest.mark.parametrize("task", STOCK)
def test_documents_say_what_lm_evals_own_task_wants(task, some_records, tmp_path):
    stock, documents = asked(tmp_path, task, some_records(task), "plain")
    for requests in documents:
        doc = requests[0].doc
        about, target = doc["bellmask"], stock.doc_to_target(doc)
        if BENCHMARKS[task].kind == "choice":
            gold = stock.doc_to_text(doc) if task == "winogrande" else target
            assert about["gold"] == int(gold)
            assert BENCHMARKS[task].column.measure == f"accuracy, {len(requests)} choices"
        elif task == "lambada":
            assert requests[0].args[0] + about["answer"] == doc["text"]
        else:
            assert set(doc["answer"]["aliases"]) <= set(about["accepted"])
            assert about["answer"].strip() == about["accepted"][0] == doc["answer"]["value"]


@pytest.mark.parametrize("task", STOCK)
def test_tuned_prompts_are_the_rows_of_fine_tuning(task, some_records, tmp_path):
    records, template = some_records(task), Template()
    _, documents = asked(tmp_path, task, records, "tuned")
    for requests, question in zip(documents, questions(task, records), strict=True):
        example = Example.plain(question.prompt, question.answer)
        prompt, response = template.prompt(example), template.response(example)
        about = requests[0].doc["bellmask"]
        if BENCHMARKS[task].kind == "choice":
            choices = [template.response(Example.plain(prompt, c)) for c in question.choices]
            assert [r.args for r in requests] == [(prompt, choice) for choice in choices]
            assert choices[about["gold"]] == response
        else:
            assert (requests[0].args[0], about["answer"]) == (prompt, response)
            accepted = {question.answer, *map(str.strip, question.accepted)}
            assert (about["accepted"][0], {*about["accepted"]}) == (question.answer, accepted)


def test_the_files_of_a_task_name_its_scores(tmp_path):
    import yaml

    for kind, scores in SCORES.items():
        text = (paper_tasks.Path(paper_tasks.__file__).parent / f"tasks/{kind}.yaml").read_text()
        metrics = yaml.safe_load(text.replace("!function", ""))["metric_list"]
        assert tuple(metric["metric"] for metric in metrics) == scores


def scored(values, tokens, texts):
    pairs = zip(values, tokens, texts, strict=True)
    return [ScoredChoice.of(Score(v, 0.0, n, 1, True), False, text) for v, n, text in pairs]


def test_each_way_to_choose_can_choose_differently():
    texts = [" abc", " abcdefghij", " \u00e9\u00e9\u00e9\u00e9\u00e9"]  # 3, 10 and 10 bytes

    def right(gold, values=(-6.0, -8.0, -7.0)):
        found = score_choices({"bellmask": {"gold": gold}}, scored(values, [2, 3, 1], texts))
        return [name for name, value in found.items() if value]

    assert [right(gold) for gold in range(3)] == [["raw"], ["per_token"], ["per_byte"]]
    assert right(1, (-2.0, -1.0, -1.0)) == ["per_token", "raw", "per_byte"], "the first of equals"
    alike = score_choices({"bellmask": {"gold": 0}}, scored([-1.0] * 3, [2] * 3, texts))
    assert alike == dict.fromkeys(SCORES["choice"], 100 / 3)


def test_choosing_agrees_with_lm_eval(tmp_path):
    draw, letters = random.Random(3), "abc \u00e9\u00df\u6f22"
    records = [
        {f"sol{n}": "x" + "".join(draw.choices(letters, k=draw.randint(1, 9))) for n in (1, 2)}
        | {"goal": "g", "label": draw.randint(0, 1)}
        for _ in range(200)
    ]
    task, documents = asked(tmp_path, "piqa", records, "plain")
    task.config.process_results = None  # lm-eval's own
    task._metric_fn_list = {"acc": None, "acc_bytes": None}
    differing = set()
    for requests in documents:
        texts = [request.args[1] for request in requests]
        found = scored([-draw.uniform(0.5, 1) * len(text) for text in texts], [2, 1], texts)
        ours = score_choices(requests[0].doc, found)
        theirs = task.process_results(requests[0].doc, found)
        assert (ours["raw"], ours["per_byte"]) == (100 * theirs["acc"], 100 * theirs["acc_bytes"])
        differing.add((ours["raw"], ours["per_byte"]))
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
    assert paper_tasks.is_word(written, gold) is is_all
    assert paper_tasks.begins_with_word(written, gold) is is_first


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
    assert paper_tasks.matches_exactly(written, accepted) is is_exact
    assert paper_tasks.contains(written, accepted) is is_inside


def test_answers_are_normalized_as_in_the_release(fetched):
    for record in fetched(lambda cache: validation_records("triviaqa", cache))[::10]:
        answer = record["answer"]
        assert normalize(answer["value"]) == answer["normalized_value"]
        found = {normalize(alias) for alias in answer["aliases"]} - {""}
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
        percent = [100 * score for score in (sum(scores) / 3, *scores)]
        assert list(rouge(written, gold).values()) == pytest.approx(percent)
    monkeypatch.setitem(sys.modules, "rouge_score", None)
    with pytest.raises(UserError, match=r"bellmask\[eval\]"):
        paper_tasks.check_rouge()
