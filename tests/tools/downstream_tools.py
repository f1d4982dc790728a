"""Made-up questions of all eight tasks, and contestants that say what a test wants."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from bellmask.data.tokenizer import ByteTokenizer
from bellmask.downstream.asks import Ask, AskMaker, Score, Tokens
from bellmask.downstream.data_sources import Loaded
from bellmask.downstream.questions import Choice, Prompts
from bellmask.downstream.suite import same_items
from bellmask.downstream.work import TaskItems, Work
from bellmask.rng import stream_key

Record = dict[str, Any]
NOUNS = ("cat", "dog", "tree", "moon", "sun")
COUNT = len(NOUNS)


def records(task: str) -> list[Record]:
    """Five records with the published columns."""
    return [_MAKERS[task](number, noun) for number, noun in enumerate(NOUNS)]


_MAKERS: dict[str, Callable[[int, str], Record]] = {
    "lambada": lambda n, noun: {"text": f"the old {noun} sat on the red mat and saw a {noun}"},
    "openbookqa": lambda n, noun: {
        "question_stem": f"the {noun} ran under",
        "choices": {"text": [f"a {noun}", "the sun", "a mat", f"a tree {n}"], "label": [*"ABCD"]},
        "answerKey": "ABCD"[n % 4],
    },
    "winogrande": lambda n, noun: {
        "sentence": f"The {noun} saw the mat because _ was new.",
        "option1": f"the {noun}",
        "option2": "the mat",
        "answer": str(1 + n % 2),
    },
    "piqa": lambda n, noun: {
        "goal": f"see a {noun}",
        "sol1": f"ran to the {noun}",
        "sol2": "sat",
        "label": n % 2,
    },
    "social_iqa": lambda n, noun: {
        "context": f"Ann saw a {noun}.",
        "question": "What then?",
        "answerA": "she ran",
        "answerB": f"took the {noun}",
        "answerC": "sat",
        "label": str(1 + n % 3),
    },
    "infilling": lambda n, noun: {
        f"sentence{place}": f"The {noun} {verb}." for place, verb in enumerate(_VERBS, start=1)
    },
    "triviaqa": lambda n, noun: {
        "question": f"What was old and a {noun}",
        "answer": {"value": noun, "aliases": [f"the {noun}", noun.upper()]},
    },
    "hellaswag": lambda n, noun: {
        "activity_label": "Running",
        "ctx_a": f"A {noun} ran.",
        "ctx_b": "then it",
        "endings": ["sat.", f"saw a {noun}.", "was red and then new.", "ran on."],
        "label": str(n % 4),
    },
}
_VERBS = ("was old", "saw the sun", "ran under a tree", "sat on the mat", "was new then")
TASKS = tuple(_MAKERS)


def loaded(*tasks: str) -> dict[str, Loaded]:
    """The records as the suite takes them."""
    return {task: Loaded(records(task), f"{task} of a test", task) for task in tasks or TASKS}


def write_records(folder: Path) -> Path:
    """As files for ``--data-dir``: one CSV, the rest JSONL."""
    folder.mkdir(parents=True, exist_ok=True)
    for task in TASKS:
        rows = records(task)
        if task == "infilling":
            with (folder / "infilling.csv").open("w", encoding="utf-8", newline="") as stream:
                table = csv.DictWriter(stream, list(rows[0]))
                table.writeheader()
                table.writerows(rows)
        else:
            text = "".join(json.dumps(row) + "\n" for row in rows)
            (folder / f"{task}.jsonl").write_text(text, encoding="utf-8")
    return folder


class Stub:
    """A contestant that scores and writes by functions of texts, and counts what it is asked.

    ``log_p(context, continuation, seed)`` and ``text(row, seed)``, in which ␣ is a mask.
    """

    is_model, is_guess = True, False
    sees_behind = True
    own_length: int | None = None

    def __init__(
        self,
        log_p: Callable[[str, str, int], float] = lambda context, continuation, seed: -1.0,
        text: Callable[[str, int], str] = lambda row, seed: "",
        *,
        prompts: Prompts = "plain",
        block_length: int = 256,
        longest_exact: int = 1000,
        mark: str = "stub",
    ) -> None:
        self.log_p, self.text, self.prompts = log_p, text, prompts
        self.tokenizer, self.block_length = ByteTokenizer(), block_length
        self.longest_exact, self.fingerprint = longest_exact, mark
        self.maker = AskMaker(self.tokenizer, block_length, ())
        self.scored: list[tuple[Ask, int]] = []
        self.written: list[tuple[str, int, int, float]] = []
        self.calls: list[str] = []

    def about(self) -> dict[str, Any]:
        none = {"step": 1, "framework": "stub", "ending": "none", "tokenizer": "bytes"}
        return {**none, "prompts": self.prompts, "block_length": self.block_length}

    def pair(self, context: str, continuation: str) -> tuple[Tokens, Tokens]:
        return self.maker.split(context, continuation)

    def begin(self, tokens: Tokens, room: int) -> Tokens:
        return self.maker.before(tokens, room)

    def asks(self, context: str, continuation: str, noise: int) -> list[Ask]:
        return self.maker.asks(context, continuation, noise=noise)

    def is_exact(self, ask: Ask) -> bool:
        return len(ask.target) <= self.longest_exact

    def decode(self, ids: Sequence[int]) -> str:
        return self.tokenizer.decode(np.array(ids))

    def score(self, asks: Sequence[Ask], seed: int, on_batch: Any = None) -> list[Score]:
        self.calls.append("score")
        self.scored += [(ask, seed) for ask in asks]
        made = []
        for number, ask in enumerate(asks, start=1):
            value = self.log_p(self.decode(ask.given), self.decode(ask.target), seed)
            is_exact = self.is_exact(ask)
            error = 0.0 if is_exact else float("nan")
            made.append(Score(value, error, len(ask.target), 3, is_exact))
            if on_batch:
                on_batch(number)
        return made

    def write(
        self,
        rows: Sequence[Tensor],
        samples: Sequence[int],
        *,
        seed: int,
        temperature: float,
        on_batch: Any = None,
    ) -> list[list[int]]:
        self.calls.append("write")
        made = []
        for row, sample in zip(rows, samples, strict=True):
            shown = self.decode(row.tolist())
            self.written.append((shown, sample, seed, temperature))
            made.append(self.tokenizer.encode(self.text(shown, seed)).tolist())
        if on_batch:
            on_batch(len(rows))
        return made


def tasks(*names: str, limit: int = 0) -> list[TaskItems]:
    """Their questions with plain prompts."""
    return same_items(loaded(*names), ["plain"], limit)["plain"]


def answers(work: Work) -> dict[Any, Any]:
    """All that was measured."""
    found: dict[Any, Any] = {}
    for task in work.tasks:
        for item in task.items:
            for seed in work.seeds:
                place = (task.name, item.number, seed)
                if isinstance(item, Choice):
                    scores = work.scores(task, item, seed)
                    found[place] = [score.log_probability for score in scores]
                else:
                    found[place] = [work.text(task, item, v, seed) for v in ("gold", "own")]
    return found


def by_content(context: str, continuation: str, seed: int) -> float:
    """A log-probability that differs with everything."""
    return -float(stream_key(0, context, continuation, seed) % 1000)


def noisy() -> Stub:
    """Scores and texts that differ with everything; continuations of five bytes have no noise."""

    def log_p(context: str, continuation: str, seed: int) -> float:
        return by_content(context, continuation, seed if len(continuation) > 5 else 0)

    return Stub(log_p, lambda row, seed: str(stream_key(seed, row))[:5], longest_exact=5)
