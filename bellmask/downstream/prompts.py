"""Records of the benchmarks → texts: what is shown, and what is scored or written behind it.

plain   the contexts and continuations of lm-eval's stock tasks, letter by letter, blemishes kept
        (TriviaQA's second question mark, HellaSwag's lower-case rest of a sentence): for models
        that were not fine-tuned, and to compare with published numbers.
tuned   the prompts that fine-tuning uses (:mod:`bellmask.data.tasks`): they end with "Answer:".

A continuation begins with its space, so that context + continuation reads as running text.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from bellmask.data.chat_templates import response_after
from bellmask.data.tasks import TASKS as TUNED

Record = dict[str, Any]


@dataclass(frozen=True)
class Texts:
    """A record as text: one (context, continuation) per choice, or just one."""

    contexts: tuple[str, ...]
    continuations: tuple[str, ...]
    gold: int = 0


# --- plain: lm-eval's stock tasks ------------------------------------------------------------


def _after(context: str, choices: Sequence[str], gold: int) -> Texts:
    """Every choice after the same context and a space."""
    return Texts((context,) * len(choices), tuple(f" {choice}" for choice in choices), gold)


def _lambada(record: Record) -> Texts:
    """What stands behind the passage's last space is wanted (seven times it holds a line end)."""
    passage, _, word = record["text"].rpartition(" ")
    return Texts((passage,), (f" {word}",))


def _hellaswag(record: Record) -> Texts:
    begun = f"{record['ctx_a']} {record['ctx_b'].capitalize()}"
    context = _without_marks(f"{record['activity_label']}: {begun}")
    endings = [_without_marks(ending) for ending in _listed(record["endings"])]
    return _after(context, endings, int(record["label"]))


def _without_marks(text: str) -> str:
    """Without WikiHow's marks as lm-eval does it: pairs of spaces are halved once."""
    text = re.sub(r"\[.*?\]", "", text.strip().replace(" [title]", ". "))
    return text.replace("  ", " ")


def _openbookqa(record: Record) -> Texts:
    choices = record["choices"]
    gold = _listed(choices["label"]).index(record["answerKey"].lstrip())
    return _after(record["question_stem"], _listed(choices["text"]), gold)


def _piqa(record: Record) -> Texts:
    context = f"Question: {record['goal']}\nAnswer:"
    return _after(context, (record["sol1"], record["sol2"]), int(record["label"]))


def _social_iqa(record: Record) -> Texts:
    context = f"Q: {record['context']} {record['question']}\nA:"
    answers = [record[f"answer{letter}"] for letter in "ABC"]
    return _after(context, answers, int(record["label"]) - 1)


def _winogrande(record: Record) -> Texts:
    """Each option in the blank's place; the rest of the sentence is scored."""
    begun, _, rest = record["sentence"].partition("_")
    contexts = (begun + record["option1"], begun + record["option2"])
    return Texts(contexts, (f" {rest.strip()}",) * 2, int(record["answer"]) - 1)


def _triviaqa(record: Record) -> Texts:
    context = f"Question: {record['question']}?\nAnswer:"
    return Texts((context,), (f" {record['answer']['value'].strip()}",))


def _listed(value: Any) -> list[str]:
    """A list as it is: text that looks like one (from a CSV, say) is not taken letter by letter."""
    if isinstance(value, str):
        raise TypeError(f"{value[:20]!r} is text, not a list")
    return list(value)


PLAIN: dict[str, Callable[[Record], Texts]] = {
    "lambada": _lambada,
    "openbookqa": _openbookqa,
    "winogrande": _winogrande,
    "piqa": _piqa,
    "social_iqa": _social_iqa,
    "triviaqa": _triviaqa,
    "hellaswag": _hellaswag,
}


# --- both ------------------------------------------------------------------------------------


def plain_and_tuned(task: str, record: Record) -> tuple[Texts, Texts] | None:
    """Both forms of a record; None where one of them has no usable answer, so that both forms
    always have the same questions.
    """
    question = TUNED[task].question(record)
    if question is None:
        return None
    plain = PLAIN[task](record)
    if not all(text.strip() for text in (*plain.contexts, *plain.continuations)):
        return None
    answers = question.choices or (question.answer,)
    assert answers[plain.gold] == question.answer
    tuned = Texts(
        (question.prompt,) * len(answers),
        tuple(response_after(question.prompt, answer) for answer in answers),
        plain.gold,
    )
    return plain, tuned


# --- stories ---------------------------------------------------------------------------------


def story(record: Record) -> tuple[str, ...] | None:
    """The five sentences of a story, None where one is missing or the right ending is not told.

    ``sentence1`` .. ``sentence5`` (ROCStories), or four sentences, two endings and which of them is
    right (Story Cloze), with the column names of the release or of its copy on the hub.
    """
    columns = {str(name).lower().replace("_", ""): value for name, value in record.items()}
    if "sentence5" in columns:
        sentences = [columns[f"sentence{place}"] for place in range(1, 6)]
    else:
        right = str(columns["answerrightending"]).strip()
        if right not in ("1", "2"):
            return None
        long_name = f"randomfifthsentencequiz{right}"
        ending = columns[long_name if long_name in columns else f"sentencequiz{right}"]
        sentences = [*(columns[f"inputsentence{place}"] for place in range(1, 5)), ending]
    stripped = tuple(sentence.strip() for sentence in sentences)
    return stripped if all(stripped) else None
