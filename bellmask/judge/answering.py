"""Answers to a benchmark: written by a run, turn by turn, or read from a file of outputs.

An answer depends on the run, the sampling, the seed and the task alone, so it is kept under a key
of those and never written twice. Later turns see the earlier ones with the answers given to them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

from bellmask.data.example_files import Message, Record, read_records
from bellmask.generate.answers import Answerer, Question
from bellmask.generate.settings import Sampling
from bellmask.judge.benchmarks import Benchmark, Task, check_answers, read_tasks
from bellmask.storage.loading import Loaded, run_marks
from bellmask.utils.errors import UserError
from bellmask.utils.files import has_kinds, sound
from bellmask.utils.store import Kept, content_key

FORMAT = 1
"""Raised when code changes what a run answers."""
CHUNK = 64
"""Answers that are written before they are kept."""
MOST_TASKS = 1 << 20
"""Samples of a second turn are numbered from here."""
OUTPUTS = ("output", "response", "answer", "outputs")
"""Columns that hold an answer, or a list with one for each turn."""
OnDone = Callable[[int], None]
Said = tuple[str, ...]
"""One answer for each turn of a task."""
Key = TypeVar("Key")


class Side(Protocol):
    """One of the two that are compared."""

    @property
    def name(self) -> str:
        """What tables call it."""
        ...

    @property
    def is_fixed(self) -> bool:
        """Its answers are the same with every seed."""
        ...

    @property
    def about(self) -> dict[str, Any]:
        """How its answers came about, for the record."""
        ...

    def missing(self, benchmark: Benchmark, seed: int) -> int:
        """Answers that have to be written."""
        ...

    def answers(self, benchmark: Benchmark, seed: int, on_done: OnDone | None = None) -> list[Said]:
        """To each task; ``on_done`` is told how many of :meth:`missing` are written."""
        ...

    def cautions(self, benchmark: Benchmark, seeds: Sequence[int]) -> list[str]:
        """What a reader must know of its answers."""
        ...


# --- runs ------------------------------------------------------------------------------------


class RunSide:
    """A run that answers."""

    is_fixed = False

    def __init__(
        self, name: str, run: Loaded, folder: Path, *, sampling: Sampling, length: int | None
    ) -> None:
        """Answers of ``length`` tokens, by default as in its training, kept in ``folder``."""
        if run.config.framework.name == "sigma_arm":
            why = "is a sigma-ARM, whose fixed order leaves no room for a request before an answer"
            raise UserError(f"{name} {why}; give an mdm, arm or aoarm run")
        self.name, self._answerer = name, Answerer(run)
        asked = sampling.for_causal() if run.framework.is_causal else sampling
        self._sampling = self._answerer.sampling(asked)
        self._length = self._answerer.check_length(
            self._answerer.length if length is None else length
        )
        self.fingerprint = content_key(FORMAT, self._marks(run))
        self._kept = Kept(
            folder / f"{self.fingerprint}.jsonl",
            lambda record: has_kinds(record, {"text": str, "is_cut": bool}),
        )

    def _marks(self, run: Loaded) -> list[Any]:
        """All that decides an answer but the seed and the task."""
        form = [run.config.sft.template, self._answerer.is_tuned, self._answerer.knows_turns]
        rows = [run.config.data.block_length, self._length]
        return [run_marks(run), form, rows, asdict(self._sampling)]

    @property
    def about(self) -> dict[str, Any]:
        """The checkpoint and how it was sampled."""
        run, plain = self._answerer.run, asdict(Sampling())
        sampling = {n: v for n, v in asdict(self._sampling).items() if v != plain[n]}
        return {
            "step": run.step,
            "answer_tokens": self._length,
            "sampling": {"rule": self._sampling.rule, **sampling},
            "answers": self._kept.path.name,
        }

    def missing(self, benchmark: Benchmark, seed: int) -> int:
        """Answers to turns that are not kept from before."""
        return sum(self._key(*place, seed) not in self._kept for place in _places(benchmark))

    def answers(self, benchmark: Benchmark, seed: int, on_done: OnDone | None = None) -> list[Said]:
        """Written now or before; first turns first, as later ones need them."""
        done = 0

        def show(written: int) -> None:
            if on_done:
                on_done(done + written)

        for turn in range(max(len(task.turns) for task in benchmark.tasks)):
            todo = [
                task
                for task, place in _places(benchmark)
                if place == turn and self._key(task, turn, seed) not in self._kept
            ]
            for start in range(0, len(todo), CHUNK):
                chunk = todo[start : start + CHUNK]
                self._write(chunk, turn, seed, show)
                done += len(chunk)
        return [
            tuple(self._said(task, turn, seed) for turn in range(len(task.turns)))
            for task in benchmark.tasks
        ]

    def _write(self, tasks: Sequence[Task], turn: int, seed: int, show: OnDone) -> None:
        made = self._answerer.answer(
            [self._question(task, turn, seed) for task in tasks],
            length=self._length,
            sampling=self._sampling,
            seed=seed,
            samples=[MOST_TASKS * turn + task.index for task in tasks],
            on_batch=show,
        )
        self._kept.add(
            {
                "key": self._key(task, turn, seed),
                "task": task.id,
                "turn": turn + 1,
                "seed": seed,
                "text": answer.text,
                "is_cut": answer.is_cut,
            }
            for task, answer in zip(tasks, made, strict=True)
        )

    def _question(self, task: Task, turn: int, seed: int) -> Question:
        """The turn, after the earlier ones and the run's own answers to them."""
        said: list[Message] = []
        for earlier in range(turn):
            said += [Message("user", task.turns[earlier])]
            said += [Message("assistant", self._said(task, earlier, seed))]
        is_conversation = self._answerer.knows_turns or turn > 0
        return Question((*said, Message("user", task.turns[turn])), is_conversation)

    def _key(self, task: Task, turn: int, seed: int) -> str:
        return content_key(task.turns[: turn + 1], task.index, turn, seed)

    def _said(self, task: Task, turn: int, seed: int) -> str:
        return str(self._kept[self._key(task, turn, seed)]["text"])

    def cautions(self, benchmark: Benchmark, seeds: Sequence[int]) -> list[str]:
        """Requests in a form that the run was not trained for, or that did not fit."""
        lines = []
        if not self._answerer.is_tuned:
            lines.append(f"{self.name} was never fine-tuned: it just continues the requests.")
        elif not self._answerer.knows_turns and any(len(t.turns) > 1 for t in benchmark.tasks):
            lines.append(f"{self.name} was fine-tuned on single requests: turns are new to it.")
        keys = [self._key(*place, seed) for place in _places(benchmark) for seed in seeds]
        if num_cut := sum(self._kept[key]["is_cut"] for key in keys):
            rows = self._answerer.run.config.data.block_length
            lines.append(
                f"{self.name}: {num_cut} of {len(keys)} requests did not fit into rows of {rows} "
                "tokens and lost their oldest tokens."
            )
        return lines


def _places(benchmark: Benchmark) -> Iterable[tuple[Task, int]]:
    """All turns of all tasks."""
    return ((task, turn) for task in benchmark.tasks for turn in range(len(task.turns)))


# --- files -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class FileSide:
    """Outputs of a model that is not here."""

    name: str
    by_turns: dict[Said, Said]
    """What the user says, or its first turn alone → what was answered."""
    by_id: dict[str, Said]
    """The same of records that tell a task by its number."""
    is_fixed: bool = True

    @property
    def about(self) -> dict[str, Any]:
        """A file tells nothing of how it came about."""
        return {"outputs": len(self.by_turns) + len(self.by_id)}

    def missing(self, benchmark: Benchmark, seed: int) -> int:
        """None: it writes nothing."""
        return 0

    def answers(self, benchmark: Benchmark, seed: int, on_done: OnDone | None = None) -> list[Said]:
        """As they are in the file."""
        found = {task.id: said for task in benchmark.tasks if (said := self._said(task))}
        absent = [task.id for task in benchmark.tasks if task.id not in found]
        if absent:
            raise UserError(
                f"{self.name} has no output for {len(absent)} of the {len(benchmark.tasks)} tasks "
                f"of {benchmark.name}, the first of them {absent[0]}"
            )
        check_answers(benchmark, list(found.values()), self.name)
        return list(found.values())

    def _said(self, task: Task) -> Said | None:
        known = (self.by_turns.get(task.turns), self.by_turns.get(task.turns[:1]))
        return known[0] or known[1] or self.by_id.get(task.id)

    def cautions(self, benchmark: Benchmark, seeds: Sequence[int]) -> list[str]:
        """Nothing is known of it."""
        return []


def read_outputs(path: Path, name: str | None = None) -> FileSide:
    """A file of outputs, by default called like the file.

    Records hold what was asked, as in a file of tasks (AlpacaEval's model_outputs.json), and the
    answer or answers (:data:`OUTPUTS`); or a task's number and answers, as FastChat writes them
    (question_id, choices).
    """
    records = list(read_records(path))
    if not records:
        raise UserError(f"{path} holds no outputs")
    places = [f"{path}, record {number}" for number in range(1, len(records) + 1)]
    if "choices" in records[0]:
        numbers = [str(record.get("question_id")) for record in records]
        said = list(map(_fastchat_answers, records, places))
        return FileSide(name or path.name, {}, _unique(numbers, said, places))
    said = list(map(_answers, records, places))
    turns = [task.turns for task in read_tasks(path)]
    return FileSide(name or path.name, _unique(turns, said, places), {})


def _unique(keys: Iterable[Key], said: Iterable[Said], places: Iterable[str]) -> dict[Key, Said]:
    found: dict[Key, Said] = {}
    for key, answers, place in zip(keys, said, places, strict=True):
        if found.setdefault(key, answers) != answers:
            raise UserError(f"{place} answers otherwise what an earlier record has answered")
    return found


def _answers(record: Record, place: str) -> Said:
    column = next((name for name in OUTPUTS if record.get(name) is not None), None)
    if column is None:
        raise UserError(
            f"{place} has the columns {', '.join(map(str, record)) or '(none)'}; an output needs "
            f"what was asked and one of {', '.join(OUTPUTS)}"
        )
    return _texts(record[column], place)


def _fastchat_answers(record: Record, place: str) -> Said:
    try:
        return _texts(record["choices"][0]["turns"], place)
    except (KeyError, IndexError, TypeError):
        raise UserError(f"{place} has no choices with turns, unlike the first record") from None


def _texts(value: Any, place: str) -> Said:
    texts = value if isinstance(value, list) else [value]
    for text in texts:
        if not isinstance(text, str):
            raise UserError(f"{place}: an answer is {type(text).__name__}, not text")
    return tuple(map(sound, texts))
