"""Toy tasks and questions on stories: right, different, and asked only where clear."""

from __future__ import annotations

import os
import re
from collections import Counter
from pathlib import Path

import pytest

from bellmask.data.examples import ExampleSource, open_examples
from bellmask.data.story_questions import MOST_WORDS, opening, questions
from bellmask.stage_options import SftOptions

SHARED = Path(os.environ.get("BELLMASK_TEST_DATA", Path(__file__).parents[3] / "shared" / "data"))


def opened(name: str) -> ExampleSource:
    return open_examples(name, SftOptions(train=name), Path("unused"))


def pairs(source: ExampleSource) -> list[tuple[str, str]]:
    return [(example.prompt_messages[-1].text, example.response) for example in source]


# --- toys ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("toy:copy", 20_000),
        ("toy:reverse", 20_000),
        ("toy:sums", 8_100),
        ("toy:sums:1", 100),
        ("toy:sums:3", 20_000),
        ("toy:copy:2", 676),
        ("toy:reverse:12", 20_000),
    ],
)
def test_toys_are_right_and_never_repeat_a_prompt(name: str, count: int) -> None:
    source = opened(name)
    found = pairs(source)
    assert found == pairs(source)
    assert len({prompt for prompt, _ in found}) == len(found) == count
    size = int(name.split(":")[2]) if name.count(":") == 2 else None
    for prompt, response in found:
        given = re.fullmatch(r"(Copy|Reverse|Sum): (.*)\nAnswer:", prompt)
        assert given is not None
        signs = given[2].replace(" ", "")
        if given[1] == "Sum":
            a, b = signs.split("+")
            assert len(a) == len(b) == (size or 2)
            assert int(response.replace(" ", "")) == int(a) + int(b)
        else:
            assert response.split() == list(signs if given[1] == "Copy" else reversed(signs))
            assert len(signs) == size if size else 4 <= len(signs) <= 8


def test_toys_of_all_lengths_come_in_turn() -> None:
    lengths = [len(response.split()) for _, response in pairs(opened("toy:copy"))]
    assert lengths[:10] == [4, 5, 6, 7, 8] * 2
    letters = Counter("".join(r.replace(" ", "") for _, r in pairs(opened("toy:copy:6"))))
    assert len(letters) == 26
    assert max(letters.values()) < 1.1 * min(letters.values())


# --- stories ---------------------------------------------------------------------------------


def asked(story: str) -> list[tuple[str, str]]:
    found = []
    for _, example in questions(story):
        text = example.prompt_messages[0].text
        assert text.startswith(f"Story: {opening(story)}\nQuestion: ")
        assert text.endswith("\nAnswer:")
        found.append((text.split("Question: ")[1].split("\n")[0], example.response))
    return found


def test_stories_are_asked_only_what_they_answer() -> None:
    assert asked("There was a little car named Beep. Beep loved to go fast. The end.") == [
        ("What is the car's name?", "Beep"),
        ("What is Beep?", "a car"),
        ("What did Beep love to do?", "go fast"),
    ]
    assert asked("An old ant called Andy sat. He liked to sit.")[1] == ("What is Andy?", "an ant")
    for unclear in (
        "A boy named Tim met a boy named Tom.",
        "The boy named Tim met the boy named Tom.",
        "Two girls lived here. A girl named Lily sang.",
        "There was a boy. Another boy named Tim came.",
    ):
        assert not [q for q, _ in asked(unclear) if "name?" in q], unclear
    both = asked("A cat named Max met a dog named Max.")
    assert [question for question, _ in both] == [
        "What is the cat's name?",
        "What is the dog's name?",
    ]
    for nothing in (
        "A girl named Lily and Mia sang.",
        "It was named Max.",
        "Tim loved to run. Tim loved to sing.",
        "Tim loved to run, and she loved to sing.",
        "Tim said he loved Max to bits.",
    ):
        assert asked(nothing) == [], nothing


def test_the_opening_is_whole_sentences_of_few_words() -> None:
    story = "One two three. " * 50
    assert opening(story) == ("One two three. " * (MOST_WORDS // 3)).strip()
    assert opening("It said “Go!” Then\nit went. And") == "It said “Go!” Then it went."


def test_real_stories() -> None:
    path = SHARED / "tinystories" / "tinystories.sample.txt"
    if not path.exists():
        pytest.skip("needs tinystories in the folder $BELLMASK_TEST_DATA")
    counts: Counter[str] = Counter()
    found = list(opened(f"stories:{path}").read(counts))
    assert counts["stories"] == 2316
    assert len(found) > 1500
    assert len({number for number, _ in found}) > 700
    for _, example in found:
        text, question = example.prompt_messages[0].text.split("\nQuestion: ")
        assert len(text.split()) <= MOST_WORDS + 1
        words = set(re.findall(r"\w+", example.response))
        assert words - {"a", "an"} <= set(re.findall(r"\w+", text)), "every word is in the story"
        if question.startswith("What did"):
            assert example.response in text
