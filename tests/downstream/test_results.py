"""Scores and their errors: by hand, and of contestants who know everything or nothing."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from continuation_tools import EXACT, random_run
from downstream_tools import NOUNS, Stub, tasks

from bellmask.config import RunConfig
from bellmask.downstream.contestants import RunContestant
from bellmask.downstream.continuations import ContinuationScorer
from bellmask.downstream.grading import rouge
from bellmask.downstream.masks import Estimator
from bellmask.downstream.questions import TASKS, Choice
from bellmask.downstream.results import Measured, grade, is_sure, summary
from bellmask.downstream.work import TaskItems, Work
from bellmask.rng import stream_key

Config = Callable[..., RunConfig]


def measure(one: Stub, asked: list[TaskItems], folder: Path, seeds: int = 2) -> dict[str, Measured]:
    work = Work(one, asked, range(seeds), folder)
    work.do()
    return {task.name: grade(work, task) for task in asked}


# --- errors ----------------------------------------------------------------------------------


def test_errors_by_hand() -> None:
    """Three seeds, four questions."""
    mine = np.array([[100, 0, 0, 100], [100, 100, 0, 100], [100, 0, 0, 0]], dtype=float)
    other = np.array([[0, 0, 0, 100], [0, 100, 0, 100], [0, 0, 100, 100]], dtype=float)
    one, two = Measured({"raw": mine}), Measured({"raw": other})
    assert one.mean("raw") == 600 / 12
    # 50, 75, 25 by seed
    assert one.deviation("raw") == pytest.approx(25.0)
    # 100, 100/3, 0, 200/3 by question: mean 50
    spread = (50**2 + (50 / 3) ** 2 + 50**2 + (50 / 3) ** 2) / 3
    assert one.error("raw") == pytest.approx(math.sqrt(spread / 4))
    # 100, 0, -100/3, -100/3 by question
    apart = [100, 0, -100 / 3, -100 / 3]
    mean = sum(apart) / 4
    error = math.sqrt(sum((value - mean) ** 2 for value in apart) / 3 / 4)
    assert one.difference(two, "raw") == pytest.approx((mean, error))
    assert two.difference(one, "raw") == pytest.approx((-mean, error))


def test_paired_errors_are_those_of_a_bootstrap() -> None:
    """Questions drawn again 20,000 times."""
    draw = np.random.default_rng(0)
    easy_B = draw.random(300)
    mine = 100.0 * (draw.random((2, 300)) < easy_B)
    other = 100.0 * (draw.random((2, 300)) < easy_B * 0.9)
    gap, error = Measured({"raw": mine}).difference(Measured({"raw": other}), "raw")
    assert error is not None
    again = draw.integers(300, size=(20_000, 300))
    apart_B = (mine - other).mean(0)
    assert gap == pytest.approx(apart_B.mean())
    assert error == pytest.approx(apart_B[again].mean(1).std(), rel=0.03)


def test_one_seed_or_question_has_no_error() -> None:
    one = Measured({"raw": np.array([[100.0, 0.0]])})
    assert (one.deviation("raw"), one.error("raw")) == (None, 50.0)
    one = Measured({"raw": np.array([[100.0], [0.0]])})
    assert one.deviation("raw") == pytest.approx(math.sqrt(5000))
    assert one.error("raw") is None
    assert one.difference(one, "raw") == (0.0, None)
    assert not is_sure(50.0, None, 100)


def test_a_sure_difference_is_larger_than_its_error() -> None:
    assert is_sure(-1.97, 1.0, 20)
    assert not is_sure(1.95, 1.0, 20)
    assert not is_sure(0.0, 0.0, 20)
    assert not is_sure(-1.97, 1.0, 19), "too few questions to know"


def test_summaries_are_strict_json() -> None:
    one = Measured({"raw": np.array([[100.0]])})
    two = Measured({"raw": np.array([[0.0]])}, num_passes=7, exact_share=0.5)
    found = json.loads(json.dumps(summary(two, one), allow_nan=False))
    assert found["scores"]["raw"] == {
        "mean": 0.0,
        "deviation": None,
        "error": None,
        "difference": {"mean": -100.0, "error": None, "is_sure": False},
    }
    assert (found["num_passes"], found["exact_share"], found["num_cut"]) == (7, 0.5, 0)
    assert "difference" not in summary(one, None)["scores"]["raw"]


# --- scores ----------------------------------------------------------------------------------


def golds(asked: list[TaskItems]) -> set[tuple[str, str]]:
    """(context, continuation) of all that is right."""
    return {
        (item.contexts[item.gold].rstrip(), item.continuations[item.gold])
        for task in asked
        for item in task.items
        if isinstance(item, Choice)
    }


def test_who_knows_all_is_always_right(tmp_path: Path) -> None:
    asked = tasks()
    right = golds(asked)

    def log_p(context: str, continuation: str, seed: int) -> float:
        return -0.001 if (context, continuation) in right else -1000.0

    def text(row: str, seed: int) -> str:
        noun = next(noun for noun in NOUNS if noun in row)
        return f" The {noun} ran under a tree." if row.endswith(".") else f" {noun}"

    found = measure(Stub(log_p, text), asked, tmp_path)
    for name, measured in found.items():
        info = TASKS[name]
        names = list(info.scores)
        if info.gives_length:
            names += [f"{score}_own" for score in info.scores]
        assert list(measured.value_SB) == names
        for values in measured.value_SB.values():
            assert values.shape == (2, 5)
            assert values == pytest.approx(100.0)


def test_who_is_always_wrong_gets_nothing(tmp_path: Path) -> None:
    asked = tasks()
    right = golds(asked)

    def log_p(context: str, continuation: str, seed: int) -> float:
        return -1000.0 if (context, continuation) in right else -0.001

    found = measure(Stub(log_p, lambda row, seed: " xyz"), asked, tmp_path)
    for measured in found.values():
        for values in measured.value_SB.values():
            assert (values == 0).all()


def test_choices_by_sum_token_and_byte(tmp_path: Path) -> None:
    """sol1 is the longer one; labels are 0, 1, 0, 1, 0."""

    def log_p(context: str, continuation: str, seed: int) -> float:
        return -5.0 if continuation == " sat" else -6.0

    (measured,) = measure(Stub(log_p), tasks("piqa"), tmp_path, 1).values()
    assert measured.value_SB["raw"].tolist() == [[0, 100, 0, 100, 0]]
    assert measured.value_SB["per_token"].tolist() == [[100, 0, 100, 0, 100]]
    assert measured.value_SB["per_byte"].tolist() == [[100, 0, 100, 0, 100]]


def test_who_cannot_tell_choices_apart_guesses(tmp_path: Path) -> None:
    """WinoGrande's two choices end alike: a unigram would always take the first."""
    (measured,) = measure(Stub(), tasks("winogrande"), tmp_path, 1).values()
    for values in measured.value_SB.values():
        assert (values == 50).all()


def test_seeds_are_graded_apart(tmp_path: Path) -> None:
    """Seed 0 finds the first choice most likely, seed 1 the second, if there is noise."""

    def log_p(context: str, continuation: str, seed: int) -> float:
        return -1.0 if (continuation != " sat") == (seed == 0) else -100.0

    noisy = Stub(log_p, longest_exact=0)
    (measured,) = measure(noisy, tasks("piqa"), tmp_path).values()
    assert measured.value_SB["raw"].tolist() == [[100, 0, 100, 0, 100], [0, 100, 0, 100, 0]]
    assert (measured.exact_share, measured.num_passes) == (0.0, 3 * 20)
    mixed = Stub(log_p, longest_exact=4, mark="mixed")
    (measured,) = measure(mixed, tasks("piqa"), tmp_path).values()
    assert (measured.exact_share, measured.num_passes) == (0.5, 3 * 15)


def test_texts_are_graded_by_variant(tmp_path: Path) -> None:
    """More than the word is wrong in a gap of its length only."""
    asked = tasks("lambada", "triviaqa", "infilling")

    def text(row: str, seed: int) -> str:
        return " the sun was. It" if seed % 2 else " dog, and more"

    seeds = range(4)
    work = Work(Stub(text=text), asked, seeds, tmp_path)
    work.do()
    odd = [stream_key(seed, "downstream") % 2 for seed in seeds]
    found = {task.name: grade(work, task) for task in asked}
    words = found["lambada"].value_SB
    assert (words["word"] == 0).all()
    dog, sun = [0, 100, 0, 0, 0], [0, 0, 0, 0, 100]
    assert words["word_own"].tolist() == [[0] * 5 if one else dog for one in odd]
    for ending in ("", "_own"):
        answers = found["triviaqa"].value_SB
        assert answers["contains" + ending].tolist() == [sun if one else dog for one in odd]
        assert (answers["exact_match" + ending] == 0).all()
        stories = found["infilling"].value_SB
        for number, one in enumerate(odd):
            for place, noun in enumerate(NOUNS):
                wanted = rouge(text("", one), f"The {noun} ran under a tree.")
                for name in ("rouge_1", "rouge_2", "rouge_l", "rouge_mean"):
                    value = stories[name + ending][number, place]
                    assert value == pytest.approx(getattr(wanted, name))


def test_answers_that_do_not_fit_are_counted(tmp_path: Path) -> None:
    """Sentences of 26 and 27 bytes; the nouns have three or four and a space."""
    found = measure(Stub(block_length=52), tasks("infilling", "triviaqa"), tmp_path)
    lengths = [len(f" The {noun} ran under a tree.") for noun in NOUNS]
    assert {name: measured.num_cut for name, measured in found.items()} == {
        "infilling": sum(length > 26 for length in lengths),
        "triviaqa": 0,
    }
    assert 0 < found["infilling"].num_cut < 5


def test_guessing_is_right_once_in_so_many(tmp_path: Path) -> None:
    one = Stub()
    one.is_guess = True  # type: ignore[misc]
    found = measure(one, tasks(), tmp_path, 3)
    choices = {"openbookqa": 4, "winogrande": 2, "piqa": 2, "social_iqa": 3, "hellaswag": 4}
    for name, count in choices.items():
        for values in found[name].value_SB.values():
            assert values.shape == (3, 5)
            assert (values == 100 / count).all()
        assert (found[name].num_passes, found[name].exact_share) == (0, None)


def test_accuracies_of_a_run_by_hand(small_config: Config, tmp_path: Path) -> None:
    run = random_run(small_config(*EXACT, "--data.block-length", "64"))
    estimator = Estimator(draws=2, longest_exact=3)
    asked = tasks("piqa", "winogrande")
    work = Work(RunContestant(run, estimator), asked, (0, 1), tmp_path)
    work.do()
    scorer = ContinuationScorer(run, estimator)
    for task in asked:
        measured = grade(work, task)
        for seed in (0, 1):
            for place, item in enumerate(task.items):
                assert isinstance(item, Choice)
                noise = stream_key(0, "question", task.name, item.number) % (1 << 62)
                sums, tokens, sizes = [], [], []
                for context, text in zip(item.contexts, item.continuations, strict=True):
                    (ask,) = scorer.asks(context, text, noise=noise)
                    sums.append(scorer.score([ask], seed=seed)[0].log_probability)
                    tokens.append(len(ask.target))
                    sizes.append(len(text.strip()))
                for how, by in (("raw", [1] * 2), ("per_token", tokens), ("per_byte", sizes)):
                    is_right = int(np.argmax(np.array(sums) / np.array(by))) == item.gold
                    assert measured.value_SB[how][seed, place] == 100 * is_right
