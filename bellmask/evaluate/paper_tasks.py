"""The tasks of the paper's Table 4 as lm-eval's: their files, documents and scores.

A task is lm-eval's stock task, or for fine-tuned prompts one of our own, with ``tasks/KIND.yaml``
on top: how it is asked and scored in Table 4. Five are multiple choice, two want something written
after a prompt, one the sentence that is missing in a story. What is written goes into a gap of the
gold answer's length; a second task, ``TASK_own``, does not tell that length. A document has a
column ``bellmask`` with all that the model and the scores need to know about a question.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import re
import string
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from bellmask.data.chat_templates import response_after
from bellmask.data.readers import Record
from bellmask.data.tasks import BENCHMARKS, SCORES, TaskQuestion, scored_questions
from bellmask.evaluate.lm_eval import stock_folder, write_overlay
from bellmask.utils.errors import UserError

if TYPE_CHECKING:
    from bellmask.evaluate.lm_eval_model import ScoredChoice

Prompts = Literal["plain", "tuned"]
"""plain: those of lm-eval's stock tasks, for models that were not fine-tuned and to compare with
published numbers. tuned: those of fine-tuning (:mod:`bellmask.data.tasks`)."""
OWN = "_own"
"""Ends the names of a task, and of its scores, whose gap does not have the gold answer's length."""


# Documents and task files


def gaps(task: str) -> tuple[str, ...]:
    """Endings of lm-eval's names of a task: one for each kind of gap."""
    return ("", OWN) if BENCHMARKS[task].gives_length else ("",)


def write_task(
    folder: Path, task: str, records: Sequence[Record], limit: int, prompts: Prompts
) -> int:
    """Write a task's files for lm-eval; the number of its questions."""
    about = BENCHMARKS[task]
    own = Path(__file__).parent / "tasks"
    stock = about.stock if prompts == "plain" else None
    asked = own / "prompts.yaml" if stock is None else stock_folder() / stock.file
    questions = scored_questions(task, records, limit)
    for ending in gaps(task):
        documents = folder / f"{task}{ending}.jsonl"
        with documents.open("wb") as stream:
            for number, question in questions.items():
                document = {
                    **({} if stock is None else records[number]),
                    "bellmask": _about(task, number, records[number], question, prompts, ending),
                }
                text = json.dumps(document, ensure_ascii=False, default=str) + "\n"
                stream.write(text.encode("utf-8", "replace"))  # half surrogate pairs become '?'
        include = [asked, own / f"{about.kind}.yaml"]
        source = {"split": "validation", "files": [str(documents.absolute())]}
        write_overlay(folder, task + ending, include, source)
    return len(questions)


def _about(
    task: str, number: int, record: Record, question: TaskQuestion, prompts: Prompts, ending: str
) -> dict[str, Any]:
    """What a document says of its question beside the columns of the stock task."""
    answer, stock = response_after(question.prompt, question.answer), BENCHMARKS[task].stock
    if prompts == "plain" and stock is not None and stock.target is not None:
        answer = f" {stock.target(record)}"
    accepted = dict.fromkeys(text.strip() for text in (answer, *question.accepted))
    return {
        "task": task,
        "number": number,
        "gap": "own" if ending else "gold",
        "prompt": question.prompt,
        "choices": [response_after(question.prompt, choice) for choice in question.choices],
        "gold": question.gold,
        "answer": answer,
        "accepted": list(filter(None, accepted)),
        "after": question.after,
    }


# Was it right? Scores of one document, in percent, called by lm-eval.


def score_choices(doc: Mapping[str, Any], results: Sequence[ScoredChoice]) -> dict[str, float]:
    """The choice with the highest log-probability, summed or per token or byte, is the gold one;
    the first of equals. Who finds all choices equally likely (a unigram on WinoGrande) guesses.
    """
    if len({(one[0], one.num_tokens) for one in results}) == 1:
        return dict.fromkeys(SCORES["choice"], 100 / len(results))
    means = {
        "per_token": [one[0] / one.num_tokens for one in results],
        "raw": [one[0] for one in results],
        "per_byte": [one[0] / one.num_bytes for one in results],
    }
    gold = doc["bellmask"]["gold"]
    return {how: 100.0 * (mean.index(max(mean)) == gold) for how, mean in means.items()}


def score_text(doc: Mapping[str, Any], results: Sequence[str]) -> dict[str, float]:
    """What was written into the gap, by the kind of task."""
    about, (written,) = doc["bellmask"], results
    kind = BENCHMARKS[about["task"]].kind
    if kind == "story":
        return rouge(written, about["answer"])
    if kind == "word":
        is_right = begins_with_word if about["gap"] == "own" else is_word
        return {"word": 100.0 * is_right(written, about["answer"])}
    return {
        "contains": 100.0 * contains(written, about["accepted"]),
        "exact_match": 100.0 * matches_exactly(written, about["accepted"]),
    }


# LAMBADA's last word. Case and punctuation count: DiffuLLaMA compares it as it is.


def is_word(written: str, gold: str) -> bool:
    """All that was written is the gold word (for a gap of the gold length)."""
    return written.strip() == gold.strip()


def begins_with_word(written: str, gold: str) -> bool:
    """The first word that was written is the gold word (for text of any length).

    A word ends at white space. Punctuation behind it is not held against it, unless the gold word
    has some, too: a passage goes on after its last word. (A gold "word" with a line end inside, of
    which LAMBADA has a few, is compared with as many words.)
    """
    wanted = gold.split()
    found = written.split()[: len(wanted)]
    if found and wanted and wanted[-1][-1].isalnum():
        found[-1] = re.sub(r"[\W_]+\Z", "", found[-1])
    return found == wanted


# TriviaQA's answers, normalized as their release does it.

_PUNCTUATION = dict.fromkeys(map(ord, string.punctuation + "\u2018\u2019\u00b4"), " ")


def normalize(text: str) -> str:
    """Lower case, no articles, spaces for punctuation, single spaces: as TriviaQA's own
    ``normalized_aliases``.
    """
    text = text.lower().translate(_PUNCTUATION)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", text).split())


def _normalized(written: str, accepted: Sequence[str]) -> Iterator[tuple[str, str]]:
    """The answer, which is the first line, beside each accepted one."""
    answer = normalize(written.split("\n", 1)[0])
    return ((answer, wanted) for wanted in map(normalize, accepted) if wanted)


def matches_exactly(written: str, accepted: Sequence[str]) -> bool:
    """The answer is one of the accepted ones, both normalized."""
    return any(answer == wanted for answer, wanted in _normalized(written, accepted))


def contains(written: str, accepted: Sequence[str]) -> bool:
    """An accepted answer is in the answer, both normalized; whole words: no 'us' in 'house'."""
    return any(f" {wanted} " in f" {answer} " for answer, wanted in _normalized(written, accepted))


# Sentences of stories


def rouge(written: str, gold: str) -> dict[str, float]:
    """rouge-score's F1 of stemmed words, pairs of words and the longest common subsequence, in
    percent; the mean of the three is the column "Infilling" of Table 4.
    """
    found = _rouge_scorer().score(gold, written)
    one, two, longest = (
        100 * float(found[name].fmeasure) for name in ("rouge1", "rouge2", "rougeL")
    )
    mean = (one + two + longest) / 3
    return {"rouge_mean": mean, "rouge_1": one, "rouge_2": two, "rouge_l": longest}


@functools.cache
def _rouge_scorer() -> Any:
    from rouge_score import rouge_scorer

    return rouge_scorer.RougeScorer(["rouge1", "rouge2", "rougeL"], use_stemmer=True)


def check_rouge() -> None:
    """UserError if the package is not there; before long work, not after it."""
    if importlib.util.find_spec("rouge_score") is None:
        raise UserError("infilling needs rouge-score: pip install 'bellmask[eval]'")
