"""Rows with a gap: its length, what is shown around it, what they must not depend on."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from downstream_tools import Stub

from bellmask.data.tokenizer import ByteTokenizer, Ids
from bellmask.downstream.gaps import is_cut, is_shortened, make_row
from bellmask.downstream.questions import Choice, Completion, Infilling

WORD = Completion(0, "the old cat saw a", " dog", ("dog",))
STORY = Infilling(0, "One sat. Two ran.", " Three was very new.", " Four saw. Five.")
MASK = "␣"


def row(one: Stub, kind: str, item: Completion | Infilling, variant: str) -> str:
    return one.decode(make_row(one, kind, item, variant))  # type: ignore[arg-type]


@pytest.mark.parametrize("gold", [" dog", " é", " elephants"])
def test_a_gold_gap_has_the_gold_length(gold: str) -> None:
    one = Stub()
    item = replace(WORD, answer=gold)
    assert row(one, "word", item, "gold") == WORD.prompt + MASK * len(gold.encode())
    story = replace(STORY, gold=gold)
    gap = MASK * len(gold.encode())
    assert row(one, "story", story, "gold") == STORY.before + gap + STORY.after


def test_an_own_gap_does_not_know_the_gold_answer() -> None:
    one = Stub()
    golds = (" dog", " a very much longer answer")
    for kind, words in (("word", 4), ("answer", 8)):
        rows = {row(one, kind, replace(WORD, answer=gold), "own") for gold in golds}
        # 17 bytes for 5 words
        assert rows == {WORD.prompt + MASK * -(-words * 17 // 5)}
    rows = {row(one, "story", replace(STORY, gold=gold), "own") for gold in golds}
    assert rows == {STORY.before + MASK * 8 + STORY.after}, "33 bytes in four sentences"


def test_a_tuned_run_has_a_length_of_its_own() -> None:
    one = Stub()
    one.own_length = 11
    assert row(one, "word", WORD, "own").count(MASK) == 11
    assert row(one, "answer", WORD, "own").count(MASK) == 11
    assert row(one, "word", WORD, "gold").count(MASK) == 4
    assert row(one, "story", STORY, "own").count(MASK) == 8


def test_who_cannot_see_behind_is_shown_nothing_there() -> None:
    one = Stub()
    one.sees_behind = False
    for variant, gap in (("gold", 20), ("own", 8)):
        assert row(one, "story", STORY, variant) == STORY.before + MASK * gap


def test_what_is_furthest_from_the_gap_is_left_out() -> None:
    one = Stub(block_length=16)
    assert row(one, "word", WORD, "gold") == "old cat saw a"[-12:] + MASK * 4
    assert row(one, "word", replace(WORD, answer=" " * 30), "gold") == "at saw a" + MASK * 8
    assert row(one, "story", STORY, "own") == "ran." + MASK * 8 + " Fou"
    short = replace(STORY, before="Hi.", gold=" No", after=" abcdefghijklmnop")
    assert row(one, "story", short, "gold") == "Hi." + MASK * 3 + " abcdefghi"
    short = replace(STORY, before="abcdefghijklmnop", gold=" No", after="!")
    assert row(one, "story", short, "gold") == "efghijklmnop" + MASK * 3 + "!"


def test_answers_that_no_gap_can_hold_are_known() -> None:
    one = Stub(block_length=16)
    assert not is_cut(one, replace(WORD, answer=" 1234567"))
    assert is_cut(one, replace(WORD, answer=" 12345678"))
    assert is_cut(one, STORY)
    assert not is_cut(Stub(), STORY)


def test_a_gap_has_one_token_at_least() -> None:
    one = Stub()
    assert row(one, "word", replace(WORD, answer=""), "gold").count(MASK) == 1
    story = replace(STORY, before="a", after="")
    assert row(one, "story", story, "own") == "a" + MASK


def test_broken_letters_are_question_marks() -> None:
    one = Stub()
    story = replace(STORY, before="a\ud800b", gold=" c", after=" d\udc00")
    assert row(one, "story", story, "gold") == "a?b" + MASK * 2 + " d?"


class Prefixed(ByteTokenizer):
    """Puts a space in front of every text, as SentencePiece does."""

    def encode(self, text: str) -> Ids:
        return np.concatenate([[32], super().encode(text)])


def test_a_tokenizers_leading_space_is_not_doubled() -> None:
    """The row is the running text, masks in place of the gold's own tokens."""
    one = Stub()
    one.tokenizer = Prefixed()
    gap = MASK * len(STORY.gold.encode())
    assert row(one, "story", STORY, "gold") == " " + STORY.before + gap + STORY.after


def test_questions_that_do_not_fit_are_known() -> None:
    """By one token: WORD has 17 + 4 bytes, STORY 17 + 20 + 16, the choice 3 + 5."""
    choice = Choice(0, ("who", "who"), (" I", " they"), 0)
    for item, size in ((WORD, 21), (STORY, 53), (choice, 8)):
        assert not is_shortened(Stub(block_length=size), item)
        assert is_shortened(Stub(block_length=size - 1), item)
    blind = Stub(block_length=40)
    assert is_shortened(blind, STORY)
    blind.sees_behind = False
    assert not is_shortened(blind, STORY), "what is behind is not shown"
