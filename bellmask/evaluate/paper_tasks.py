"""The tasks of the paper's Table 4: their prompts, questions, sources and scores.

Five are multiple choice, two want something written behind a prompt, one wants the sentence that is
missing in a story. A record becomes texts, texts become an item that a model can be asked. Records
come from a folder, a wheel or the hub. What a model chose or wrote is scored by pure functions.
:mod:`bellmask.evaluate.paper_suite` asks the models.
"""

from __future__ import annotations

import csv
import functools
import hashlib
import importlib.util
import json
import math
import re
import string
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch

from bellmask.data.chat_templates import response_after
from bellmask.data.example_files import Record, read_records
from bellmask.data.readers import readable_errors, text_stream
from bellmask.data.tasks import (
    PARQUET_BRANCH,
    SUFFIXES,
    VALIDATION,
    WHEEL,
    validation_records,
)
from bellmask.data.tasks import TASKS as TUNED
from bellmask.utils.errors import UserError, look_up
from bellmask.utils.libraries import first_line, quiet
from bellmask.utils.rng import hash_counters, stream_key

# Records of the benchmarks → texts: what is shown, and what is scored or written behind it.
#
# plain   the contexts and continuations of lm-eval's stock tasks, letter by letter, blemishes kept
#         (TriviaQA's second question mark, HellaSwag's lower-case rest of a sentence): for models
#         that were not fine-tuned, and to compare with published numbers.
# tuned   the prompts that fine-tuning uses (:mod:`bellmask.data.tasks`): they end with "Answer:".
#
# A continuation begins with its space, so that context + continuation reads as running text.


@dataclass(frozen=True)
class Texts:
    """A record as text: one (context, continuation) per choice, or just one."""

    contexts: tuple[str, ...]
    continuations: tuple[str, ...]
    gold: int = 0


# Plain: lm-eval's stock tasks


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


# Plain and tuned


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


# Stories


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


# Items

Prompts = Literal["plain", "tuned"]
TaskKind = Literal["choice", "word", "answer", "story"]


@dataclass(frozen=True)
class ChoiceItem:
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


Item = ChoiceItem | Completion | Infilling
SomeItem = TypeVar("SomeItem", ChoiceItem, Completion, Infilling, Item)


# Tasks


@dataclass(frozen=True)
class TaskInfo:
    """A column of Table 4."""

    title: str
    kind: TaskKind
    measure: str
    """What the scores are, in words; all are percentages."""
    scores: tuple[str, ...]
    """Names of its scores; the first is the column's."""
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


PAPER_TASKS: dict[str, TaskInfo] = {
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


# Records → items


def make_items(task: str, records: Sequence[Record], prompts: Prompts) -> list[Item]:
    """A task's questions with plain or tuned prompts (stories are the same with both).

    Records without a usable answer are left out: ``len(records) - len(items)`` of them.
    """
    kind = look_up("task", task, PAPER_TASKS).kind
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
    return ChoiceItem(number, texts.contexts, texts.continuations, texts.gold)


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


# Where a downstream task's records come from: ``--data-dir``, a wheel, or the hub; in this order.
#
# The wheel carries six validation splits, so those need no hub. LAMBADA's test split and the
# stories come from a folder or the hub. What is scored is always told (``TaskRecords.origin``), and
# where it is not the split that lm-eval scores, that too.

TABLES = {".csv": ",", ".tsv": "\t"}
"""Suffix → what is between two columns."""


class MissingData(UserError):
    """A task's records are nowhere to be found (``--skip-missing`` goes on without the task)."""


@dataclass(frozen=True)
class TaskRecords:
    """A task's records and what they are."""

    records: list[Record]
    origin: str
    """Which split from where, for the notes under a table."""
    identity: str
    """Hash of the records' content."""


@dataclass(frozen=True)
class _Place:
    """Where a task's records may be."""

    repository: str
    """On the hub, where every data set has a Parquet copy in a branch of its own."""
    config: str = ""
    split: str = "validation"
    """'' takes all splits of the configuration."""
    other_names: tuple[str, ...] = ()
    """How its files are called in public releases."""
    is_flat: bool = False
    """No lists in its records: it may come as CSV."""
    caution: str = ""
    """How the wheel's and the hub's records differ from what lm-eval scores."""
    advice: str = ""
    """Where else it can be had."""


PLACES = {
    "lambada": _Place(
        "EleutherAI/lambada_openai",
        "default",
        "test",
        other_names=("lambada_test_openai", "lambada_test"),
        is_flat=True,
    ),
    "openbookqa": _Place("allenai/openbookqa", "main", caution="lm-eval scores the test split"),
    "winogrande": _Place("allenai/winogrande", "winogrande_xl", is_flat=True),
    "piqa": _Place("ybisk/piqa", is_flat=True),
    "social_iqa": _Place("allenai/social_i_qa", other_names=("siqa",), is_flat=True),
    "infilling": _Place(
        "juletxara/xstory_cloze",
        "en",
        split="",
        other_names=(
            "rocstories",
            "cloze_test_val__spring2016",
            "cloze_test_val__spring2016 - cloze_test_ALL_val",
        ),
        is_flat=True,
        caution="the English Story Cloze validation 2016 of XStoryCloze, 1871 stories",
        advice=" The release itself (cloze_test_val__spring2016.csv) is free, but must be "
        "requested from its authors: https://cs.rochester.edu/nlp/rocstories. A table with the "
        "columns sentence1 .. sentence5 serves too.",
    ),
    "triviaqa": _Place(
        "mandarjoshi/trivia_qa",
        "rc.wikipedia.nocontext",
        caution="the Wikipedia part, rc.wikipedia.nocontext; lm-eval scores rc.nocontext",
    ),
    "hellaswag": _Place("Rowan/hellaswag", other_names=("hellaswag_val",)),
}


def open_task(task: str, data_dir: str | None, cache: Path) -> TaskRecords:
    """A task's records; :class:`MissingData` where neither folder, wheel nor hub has them."""
    place = look_up("downstream task", task, PLACES)
    caution = f" ({place.caution})" if place.caution else ""
    if data_dir is not None and (paths := find_in(data_dir, task)):
        records = [record for path in paths for record in _read(path)]
        others = f" and {len(paths) - 1} more" if len(paths) > 1 else ""
        return _loaded(task, records, f"{paths[0].name}{others} of --data-dir")
    reasons = [] if data_dir is None else [f"{data_dir} has no {_looked_for(task)}"]
    origins: dict[str, Callable[[], list[Record]]] = {}
    if task in VALIDATION:
        label = f"validation split from the wheel {WHEEL.name} {WHEEL.version}{caution}"
        origins[label] = lambda: validation_records(task, cache)
    label = f"{place.split or 'all'} of {place.repository} on the hub{caution}"
    origins[label] = lambda: list(_on_hub(place, task))
    for origin, load in origins.items():
        try:
            return _loaded(task, load(), origin)
        except UserError as error:
            reasons.append(str(error))
    raise MissingData(
        f"{task}: no records. {'; '.join(reasons)}. Give a folder with {_looked_for(task)} by "
        f"--data-dir, or leave the task out.{place.advice}"
    )


def _loaded(task: str, records: list[Record], origin: str) -> TaskRecords:
    if not records:
        raise UserError(f"{task}: there is not one record in {origin}")
    digest = hashlib.sha256()
    for record in records:
        digest.update(json.dumps(record, sort_keys=True, default=str).encode() + b"\n")
    return TaskRecords(records, origin, digest.hexdigest())


# Files of a folder


def find_in(data_dir: str, task: str) -> list[Path]:
    """The files of a task in a folder: <task>.jsonl (and so on), or all in a folder <task>.

    Of a folder with several splits, only the files of the one that is scored.
    """
    root, place = Path(data_dir), PLACES[task]
    if not root.is_dir():
        raise UserError(f"--data-dir {data_dir}: there is no such folder")
    names = (task, *place.other_names)
    paths = [root / f"{name}{suffix}" for name in names for suffix in _suffixes(task)]
    found = [path for path in paths if path.is_file()]
    folders = [root / name for name in names if (root / name).is_dir()]
    if len(found) + len(folders) > 1:
        both = " and ".join(path.name for path in (*found, *folders))
        raise UserError(f"--data-dir {data_dir} has {both} for {task}; keep one")
    if folders:
        inside = sorted(p for p in folders[0].iterdir() if p.suffix in _suffixes(task))
        inside = [p for p in inside if p.name not in ("dataset_info.json", "state.json")]
        return _of_split(inside, place.split or "validation", folders[0])
    return found


SPLITS = {
    "train": r"train(ing)?",
    "validation": r"validation|valid|val|dev|eval",
    "test": r"test",
}


def _of_split(paths: list[Path], split: str, folder: Path) -> list[Path]:
    """Files named after the split, else all, if none is named after the training split."""
    if named := [path for path in paths if _names(path, split)]:
        return named
    if training := [path for path in paths if _names(path, "train")]:
        raise UserError(
            f"{folder} has {training[0].name} but no {split} split, which is what is scored"
        )
    return paths


def _names(path: Path, split: str) -> bool:
    """Whether a file's name has the split as a word of its own: 'validation-00000-of-00001'."""
    return bool(re.search(rf"(?<![a-z])({SPLITS[split]})(?![a-z])", path.name.lower()))


def _suffixes(task: str) -> tuple[str, ...]:
    return (*SUFFIXES, *TABLES) if PLACES[task].is_flat else SUFFIXES


def _looked_for(task: str) -> str:
    """What a folder may hold for a task, in words."""
    first, *rest = _suffixes(task)
    files = f"{task}{first} ({', '.join(rest)}, or a folder {task} of such files)"
    return " or ".join([files, *PLACES[task].other_names])


def _read(path: Path) -> Iterator[Record]:
    return _read_table(path) if path.suffix in TABLES else read_records(path)


def _read_table(path: Path) -> Iterator[Record]:
    """The rows of a table with a header, each with all of its columns."""
    with (
        readable_errors(str(path)),
        path.open("rb") as stream,
        text_stream(stream, "") as lines,
    ):
        rows = csv.DictReader(lines, delimiter=TABLES[path.suffix])
        try:
            for number, row in enumerate(rows, start=1):
                if None in row or None in row.values():
                    width = len(rows.fieldnames or ())
                    raise UserError(f"{path}, row {number} has not {width} columns as the header")
                yield dict(row)
        except csv.Error as error:
            raise UserError(f"{path} is not the table that was expected: {error}") from None


# Files on the hub


def _on_hub(place: _Place, task: str) -> Iterator[Record]:
    """The Parquet files of a configuration and split, downloaded once by the hub's own cache."""
    try:
        import huggingface_hub as hub
    except ImportError:
        raise UserError(
            f"{place.repository} comes from the hub, which needs huggingface_hub: "
            "pip install 'bellmask[eval]'"
        ) from None
    print(f"note: {task}: looking for {place.repository} on the hub", file=sys.stderr)
    where: dict[str, Any] = {"repo_type": "dataset", "revision": PARQUET_BRANCH}
    try:
        with quiet():
            names = hub.list_repo_files(place.repository, **where)
            wanted = _of_place(names, place)
            paths = [Path(hub.hf_hub_download(place.repository, name, **where)) for name in wanted]
    except Exception as error:
        raise UserError(
            f"cannot read {place.repository} on the hub ({first_line(error)})"
        ) from None
    for path in paths:
        yield from read_records(path)


def _of_place(names: Sequence[str], place: _Place) -> list[str]:
    """The Parquet files of a configuration ('' : there is only one) and split, in order."""
    folder = f"{place.config}/" if place.config else ""
    found = sorted(n for n in names if n.startswith(folder) and n.endswith(".parquet"))
    if place.split:
        found = [name for name in found if _names(Path(name.replace("/", "-")), place.split)]
    if not found:
        raise UserError(f"no Parquet file of {folder}{place.split} among its {len(names)} files")
    return found


# Was it right? Pure functions from what a model chose or wrote to a score.
#
# Case and punctuation count for LAMBADA's word (DiffuLLaMA compares it as it is) and not for
# TriviaQA's answers (normalized as their release does it).

# Multiple choice

How = Literal["raw", "per_token", "per_byte"]


def choose(
    log_probabilities: Sequence[float],
    how: How,
    *,
    num_tokens: Sequence[int] = (),
    continuations: Sequence[str] = (),
) -> int:
    """The choice with the highest log-probability (summed over tokens), or mean of it; the first
    of equals.

    ``num_tokens`` is needed per token, ``continuations`` per byte: as lm-eval's acc_bytes, without
    the space in front.
    """
    if any(math.isnan(value) for value in log_probabilities):
        raise ValueError(f"a choice without a score: {list(log_probabilities)}")
    sizes: Sequence[int]
    if how == "raw":
        sizes = [1] * len(log_probabilities)
    elif how == "per_token":
        sizes = num_tokens
    elif how == "per_byte":
        texts = [text.removeprefix(" ") for text in continuations]
        sizes = [len(text.encode("utf-8", "surrogatepass")) for text in texts]
    else:
        raise ValueError(f"unknown way to choose: {how!r}")
    means = [value / size for value, size in zip(log_probabilities, sizes, strict=True)]
    return max(range(len(means)), key=lambda place: means[place])


# LAMBADA's last word


def is_word(written: str, gold: str) -> bool:
    """All that was written is the gold word (for a gap of the gold length); case counts."""
    return written.strip() == gold.strip()


def begins_with_word(written: str, gold: str) -> bool:
    """The first word that was written is the gold word (for text of any length); case counts.

    A word ends at white space. Punctuation behind it is not held against it, unless the gold word
    has some, too: a passage goes on after its last word. (A gold "word" with a line end inside, of
    which LAMBADA has a few, is compared with as many words.)
    """
    wanted = gold.split()
    found = written.split()[: len(wanted)]
    if found and wanted and not _ends_with_mark(wanted[-1]):
        found[-1] = _without_end_marks(found[-1])
    return found == wanted


def _without_end_marks(word: str) -> str:
    while _ends_with_mark(word):
        word = word[:-1]
    return word


def _ends_with_mark(word: str) -> bool:
    return bool(word) and not word[-1].isalnum()


# TriviaQA's answers

_PUNCTUATION = dict.fromkeys(map(ord, string.punctuation + "\u2018\u2019\u00b4"), " ")


def normalise(text: str) -> str:
    """Lower case, no articles, spaces for punctuation, single spaces: as TriviaQA's own
    ``normalized_aliases``.
    """
    text = text.lower().translate(_PUNCTUATION)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", text).split())


def first_line_of(written: str) -> str:
    """What was written up to the first line end: the answer."""
    return written.split("\n", 1)[0]


def matches_exactly(written: str, accepted: Sequence[str]) -> bool:
    """The answer is one of the accepted ones, both normalised."""
    answer = normalise(first_line_of(written))
    return bool(answer) and answer in map(normalise, accepted)


def contains(written: str, accepted: Sequence[str]) -> bool:
    """An accepted answer is in the answer, both normalised; whole words: no 'us' in 'house'."""
    answer = f" {normalise(first_line_of(written))} "
    wanted = filter(None, map(normalise, accepted))
    return any(f" {one} " in answer for one in wanted)


# Sentences of stories


@dataclass(frozen=True)
class Rouge:
    """F1 of words, pairs of words and the longest common subsequence, in percent."""

    rouge_1: float
    rouge_2: float
    rouge_l: float

    @property
    def rouge_mean(self) -> float:
        """Mean of the three: the column "Infilling" of Table 4."""
        return (self.rouge_1 + self.rouge_2 + self.rouge_l) / 3


def rouge(written: str, gold: str) -> Rouge:
    """How much of a gold sentence was written: rouge-score's F1 with stemmed words."""
    found = _scorer().score(gold, written)
    one, two, longest = (
        100 * float(found[name].fmeasure) for name in ("rouge1", "rouge2", "rougeL")
    )
    return Rouge(one, two, longest)


@functools.cache
def _scorer() -> Any:
    try:
        from rouge_score import rouge_scorer
    except ImportError:
        raise UserError("infilling needs rouge-score: pip install 'bellmask[eval]'") from None
    return rouge_scorer.RougeScorer(["rouge1", "rouge2", "rougeL"], use_stemmer=True)


def check_rouge() -> None:
    """UserError if the package is not there; before long work, not after it."""
    if importlib.util.find_spec("rouge_score") is None:  # importing it takes seconds
        _scorer()
