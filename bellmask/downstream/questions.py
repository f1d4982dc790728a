"""The tasks of the paper's Table 4, and their questions as items that a model can be asked.

Five are multiple choice, two want something written behind a prompt, one wants the sentence that is
missing in a story. What is shown and scored is in :mod:`bellmask.downstream.prompts`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

import torch

from bellmask.downstream.prompts import Record, Texts, plain_and_tuned, story
from bellmask.utils.errors import UserError, look_up
from bellmask.utils.rng import hash_counters, stream_key

Prompts = Literal["plain", "tuned"]
TaskKind = Literal["choice", "word", "answer", "story"]


# --- items -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Choice:
    """Multiple choice: the continuation that the model finds most likely is its answer."""

    number: int
    """Place of the record in the data set, before any limit."""
    contexts: tuple[str, ...]
    """One per choice; only WinoGrande's (plain prompts) differ."""
    continuations: tuple[str, ...]
    """Each with its leading space."""
    gold: int


@dataclass(frozen=True)
class Completion:
    """Something is to be written after a prompt."""

    number: int
    prompt: str
    answer: str
    """Gold, with its leading space; a gold-length score gives away how many tokens it has."""
    accepted: tuple[str, ...]
    """All that counts as right, without spaces around; the answer is the first."""


@dataclass(frozen=True)
class Infilling:
    """A sentence is missing: before + gold + after is the whole text."""

    number: int
    before: str
    gold: str
    """With its leading space, as ``after``."""
    after: str


Item = Choice | Completion | Infilling
SomeItem = TypeVar("SomeItem", Choice, Completion, Infilling, Item)


# --- tasks -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class TaskInfo:
    """A column of Table 4."""

    title: str
    kind: TaskKind
    measure: str
    """What the scores are, in words; all are percentages."""
    scores: tuple[str, ...]
    """Names of its scores (:mod:`bellmask.downstream.grading`); the first is the column's."""
    note: str
    """One line under the table."""
    gives_length: bool = False
    """The column's score tells the model how many tokens the gold answer has, as DiffuLLaMA does;
    a variant of it does not."""

    @property
    def main_score(self) -> str:
        """The score that is the task's column."""
        return self.scores[0]


CHOICE_SCORES = ("per_token", "raw", "per_byte")
"""DiffuLLaMA takes the choice with the lowest mean cross-entropy of a token: that is the column."""
STORY_SCORES = ("rouge_mean", "rouge_1", "rouge_2", "rouge_l")


def _choice(title: str, num_choices: int, note: str) -> TaskInfo:
    return TaskInfo(title, "choice", f"accuracy, {num_choices} choices", CHOICE_SCORES, note)


TASKS: dict[str, TaskInfo] = {
    "lambada": TaskInfo(
        "LAMBADA",
        "word",
        "last word written exactly",
        ("word",),
        "LAMBADA: the last word of a passage, its number of tokens given",
        gives_length=True,
    ),
    "openbookqa": _choice("Obqa", 4, "Obqa: OpenBookQA without its book of facts"),
    "winogrande": _choice(
        "Wino", 2, "Wino: WinoGrande; plain prompts score the rest of the sentence, as lm-eval does"
    ),
    "piqa": _choice("PIQA", 2, "PIQA: two ways to reach a goal"),
    "social_iqa": _choice("SIQA", 3, "SIQA: Social IQA, three answers"),
    "infilling": TaskInfo(
        "Infilling",
        "story",
        "mean F1 of ROUGE-1, ROUGE-2 and ROUGE-L, words stemmed",
        STORY_SCORES,
        "Infilling: sentence 3 of 5 of ROCStories, its number of tokens given",
        gives_length=True,
    ),
    "triviaqa": TaskInfo(
        "TriQA",
        "answer",
        "an accepted answer is in what was written",
        ("contains", "exact_match"),
        "TriQA: TriviaQA without documents, the answer's number of tokens given",
        gives_length=True,
    ),
    "hellaswag": _choice("HellaSwag", 4, "HellaSwag: which of four sentences comes next"),
}
"""In the order of Table 4."""


# --- records → items -------------------------------------------------------------------------


def make_items(task: str, records: Sequence[Record], prompts: Prompts) -> list[Item]:
    """A task's questions with plain or tuned prompts (stories are the same with both).

    Records without a usable answer are left out: ``len(records) - len(items)`` of them.
    """
    kind = look_up("task", task, TASKS).kind
    is_tuned = look_up("kind of prompts", prompts, {"plain": False, "tuned": True})
    items: list[Item] = []
    for number, record in enumerate(records):
        try:
            found = _MAKERS[kind](task, number, record, is_tuned)
        except (KeyError, TypeError, AttributeError, ValueError, IndexError) as error:
            raise UserError(
                f"{task}, record {number + 1} is not a record of that task: {error!r} in the "
                f"columns {', '.join(map(str, record))}"
            ) from None
        if found is not None:
            items.append(found)
    return items


def _texts(task: str, record: Record, is_tuned: bool) -> Texts | None:
    both = plain_and_tuned(task, record)
    return None if both is None else both[is_tuned]


def _make_choice(task: str, number: int, record: Record, is_tuned: bool) -> Item | None:
    texts = _texts(task, record, is_tuned)
    if texts is None:
        return None
    return Choice(number, texts.contexts, texts.continuations, texts.gold)


def _make_completion(task: str, number: int, record: Record, is_tuned: bool) -> Item | None:
    texts = _texts(task, record, is_tuned)
    if texts is None:
        return None
    answer = texts.continuations[0]
    others = record["answer"].get("aliases") or () if task == "triviaqa" else ()
    accepted = dict.fromkeys([answer.strip(), *(other.strip() for other in others)])
    return Completion(number, texts.contexts[0], answer, tuple(filter(None, accepted)))


def _make_infilling(task: str, number: int, record: Record, is_tuned: bool) -> Item | None:
    sentences = story(record)
    if sentences is None:
        return None
    first, second, third, fourth, fifth = sentences
    return Infilling(number, f"{first} {second}", f" {third}", f" {fourth} {fifth}")


_MAKERS: dict[TaskKind, Callable[[str, int, Record, bool], Item | None]] = {
    "choice": _make_choice,
    "word": _make_completion,
    "answer": _make_completion,
    "story": _make_infilling,
}


def limit_items(task: str, items: Sequence[SomeItem], limit: int) -> list[SomeItem]:
    """``limit`` of a task's items in their order, the same ones every time; 0 takes all.

    Drawn by the items' numbers, so a larger limit has all that a smaller one has.
    """
    if limit < 0:
        raise UserError(f"a limit of {limit} questions: give 0 (all of them) or more")
    if limit == 0 or limit >= len(items):
        return list(items)
    numbers = torch.tensor([item.number for item in items])
    drawn = torch.argsort(hash_counters(stream_key(0, "downstream", task), numbers), stable=True)
    return [items[place] for place in sorted(drawn[:limit].tolist())]
