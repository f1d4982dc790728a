"""Answers to a benchmark against the answerer asked directly; files of outputs by hand."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import bellmask.judge.answering as module
from bellmask.answers import Answerer, Question
from bellmask.assemble import train_run
from bellmask.config import RunConfig
from bellmask.data.messages import Message
from bellmask.errors import UserError
from bellmask.generate.settings import Sampling
from bellmask.judge.answering import RunSide, read_outputs
from bellmask.judge.benchmarks import Benchmark, Task
from bellmask.run import Run, load_run
from bellmask.runfolder import Backbone

TURNS = [("Say 1",), ("Say 2", "Go"), ("Say 3 please, slowly", "Go on"), ("Say 1",), ("Say 5",)]
TASKS = tuple(Task(f"t{n}", turns, "all", None, n) for n, turns in enumerate(TURNS))
BENCHMARK = Benchmark("five", TASKS, "plain")
SAMPLING = Sampling(steps=3)


def benchmark(*numbers: int) -> Benchmark:
    """Some of the tasks."""
    return Benchmark("some", tuple(TASKS[number] for number in numbers), "plain")


@pytest.fixture(scope="module")
def runs(
    small_config: Callable[..., RunConfig], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Run]:
    """Fine-tuned on conversations, on single prompts, on nothing, and an ARM."""
    folder = tmp_path_factory.mktemp("answering")
    said = [("user", "Say"), ("assistant", "a b"), ("user", "Go"), ("assistant", "c")]
    talk = {"messages": [{"role": role, "content": text} for role, text in said]}
    for name, record in (("turns", talk), ("single", {"prompt": "Say", "response": "a b"})):
        (folder / f"{name}.jsonl").write_text("\n".join([json.dumps(record)] * 32))
    wide = ["--data.block-length", "96", "--train.steps", "2"]
    configs = {
        name: small_config("--sft.train", str(folder / f"{name}.jsonl"), *wide)
        for name in ("turns", "single")
    }
    configs["text"] = small_config("--train.steps", "2")
    configs["arm"] = small_config("--framework", "arm", *wide)
    for name, config in configs.items():
        train_run(config, folder / name, is_quiet=True)
    return {name: load_run(folder / name) for name in configs}


@pytest.fixture
def side(runs: dict[str, Run], tmp_path: Path) -> Callable[..., RunSide]:
    """``side("turns")``: answers of 6 tokens in 3 steps, kept in the test's folder."""

    def build(name: str = "turns", **changes: Any) -> RunSide:
        named = {"sampling": SAMPLING, "length": 6, **changes}
        return RunSide(name, runs[name], tmp_path / "answers", **named)

    return build


def no_answers(*_: Any, **__: Any) -> Any:
    raise AssertionError("an answer is written anew")


def lines(folder: Path) -> list[dict[str, Any]]:
    texts = [path.read_text() for path in sorted((folder / "answers").glob("*.jsonl"))]
    return [json.loads(line) for text in texts for line in text.splitlines()]


# --- runs ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["turns", "single", "arm"])
def test_answers_are_those_of_the_run_asked_one_by_one(
    name: str, side: Callable[..., RunSide], runs: dict[str, Run]
) -> None:
    """By the task's number, whatever else is asked; a second turn after the first's answer."""
    found = side(name).answers(BENCHMARK, seed=3)
    answerer = Answerer(runs[name])
    sampling = SAMPLING.for_causal() if name == "arm" else SAMPLING
    for task, said in zip(TASKS, found, strict=True):
        earlier: list[Message] = []
        for turn, (asked, text) in enumerate(zip(task.turns, said, strict=True)):
            question = Question((*earlier, Message("user", asked)), name == "turns" or turn > 0)
            number = turn * 2**20 + task.index
            (alone,) = answerer.answer(
                [question], length=6, sampling=sampling, seed=3, first_sample=number
            )
            assert text == alone.text
            earlier += [Message("user", asked), Message("assistant", text)]
    assert len(set(found)) == len(TASKS), "the same request twice has two answers"


def test_some_tasks_have_the_answers_that_they_have_among_all(
    side: Callable[..., RunSide], tmp_path: Path
) -> None:
    everything = side().answers(BENCHMARK, 0)
    for place in tmp_path.glob("answers/*"):
        place.unlink()
    assert side().answers(benchmark(4, 2), 0) == [everything[4], everything[2]]
    assert side().answers(BENCHMARK, 0) == everything, "some of before, others now"
    assert side().answers(BENCHMARK, 1) != everything


def test_the_second_turn_sees_what_the_run_itself_said_in_the_first(
    side: Callable[..., RunSide], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Question] = []
    real = Answerer.answer

    def spy(self: Answerer, questions: Any, **more: Any) -> Any:
        asked.extend(questions)
        return real(self, questions, **more)

    monkeypatch.setattr(Answerer, "answer", spy)
    ((first, _),) = side().answers(benchmark(1), 0)
    assert [question.is_conversation for question in asked] == [True, True]
    said = (Message("user", "Say 2"), Message("assistant", first), Message("user", "Go"))
    assert asked[1].messages == said


def test_nothing_is_written_twice(
    side: Callable[..., RunSide], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = side()
    assert first.missing(BENCHMARK, 0) == 7
    found = first.answers(BENCHMARK, 0)
    assert (first.missing(BENCHMARK, 0), first.missing(BENCHMARK, 1)) == (0, 7)
    assert len(lines(tmp_path)) == 7
    monkeypatch.setattr(Answerer, "answer", no_answers)
    again = side()
    assert again.missing(BENCHMARK, 0) == 0
    assert again.answers(BENCHMARK, 0) == found
    assert len(lines(tmp_path)) == 7


def test_a_side_that_was_killed_goes_on(
    side: Callable[..., RunSide], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = side().answers(BENCHMARK, 0)
    (path,) = tmp_path.glob("answers/*")
    path.unlink()
    monkeypatch.setattr(module, "CHUNK", 2)
    real, calls = Answerer.answer, []

    def failing(self: Answerer, questions: Any, **more: Any) -> Any:
        calls.append(len(questions))
        if len(calls) == 3:
            raise KeyboardInterrupt
        return real(self, questions, **more)

    monkeypatch.setattr(Answerer, "answer", failing)
    with pytest.raises(KeyboardInterrupt):
        side().answers(BENCHMARK, 0)
    assert len(lines(tmp_path)) == 4
    with path.open("a") as stream:
        stream.write('{"key": "torn')
    told: list[int] = []
    again = side()
    assert again.missing(BENCHMARK, 0) == 3
    assert again.answers(BENCHMARK, 0, told.append) == whole
    assert calls == [2, 2, 1, 1, 2]
    assert told == sorted(told)
    assert told[-1] == 3
    assert len({line["key"] for line in lines(tmp_path)}) == len(lines(tmp_path)) == 7


def test_what_decides_an_answer_has_a_file_of_its_own(
    side: Callable[..., RunSide], runs: dict[str, Run], tmp_path: Path
) -> None:
    plain = side().fingerprint
    assert RunSide("x", runs["turns"], tmp_path, sampling=SAMPLING, length=6).fingerprint == plain
    others = [
        side(length=7),
        side(sampling=Sampling(steps=4)),
        side(sampling=Sampling(steps=3, temperature=0.5)),
        side("single"),
    ]
    assert len({plain, *(other.fingerprint for other in others)}) == 5
    assert side(sampling=Sampling()).fingerprint == side(sampling=Sampling(steps=64)).fingerprint


def test_what_decides_the_network_has_a_file_of_its_own(
    runs: dict[str, Run], tmp_path: Path
) -> None:
    """Weights are the same; how they are used, and how turns are written, is not."""
    run, config = runs["turns"], runs["turns"].config
    others = [
        replace(run, config=replace(config, train=replace(config.train, precision="bf16"))),
        replace(run, config=replace(config, model=replace(config.model, time_input="sigma"))),
        replace(run, backbone=Backbone({}, "{{ messages[0].content }}")),
        replace(run, backbone=Backbone({}, "{{ messages[0].content }}!")),
    ]
    named: dict[str, Any] = {"sampling": SAMPLING, "length": 6}
    sides = [RunSide("x", one, tmp_path, **named) for one in (run, *others, replace(run))]
    marks = [one.fingerprint for one in sides]
    assert len(set(marks)) == 5
    assert marks[0] == marks[-1]


def test_a_causal_run_takes_what_is_asked_of_masked_ones(side: Callable[..., RunSide]) -> None:
    """Steps and rules are the others'; they do not even change its answers' file."""
    found = side("arm", sampling=Sampling(rule="most_confident", steps=3, temperature=0.7))
    assert found.fingerprint == side("arm", sampling=Sampling(temperature=0.7)).fingerprint
    assert len(found.answers(benchmark(0), 0)) == 1


def test_lengths(side: Callable[..., RunSide]) -> None:
    assert side(length=None).about["answer_tokens"] >= 1
    with pytest.raises(UserError, match="1 to 95 tokens, got 96"):
        side(length=96)


def test_cautions(side: Callable[..., RunSide]) -> None:
    long = Task("long", ("Say " + "x" * 200,), "all", None, 9)
    for name, turns, expected in (
        ("turns", BENCHMARK, []),
        ("single", BENCHMARK, ["single was fine-tuned on single requests: turns are new to it."]),
        ("single", benchmark(0, 4), []),
        ("text", benchmark(0), ["text was never fine-tuned: it just continues the requests."]),
    ):
        one = side(name)
        one.answers(turns, 0)
        assert one.cautions(turns, [0]) == expected
    one, with_long = side(), Benchmark("long", (TASKS[1], long), "plain")
    for seed in (0, 1):
        one.answers(with_long, seed)
    (line,) = one.cautions(with_long, [0, 1])
    assert "2 of 6 requests did not fit into rows of 96 tokens" in line


# --- files -----------------------------------------------------------------------------------


def write(path: Path, *records: dict[str, Any]) -> Path:
    path.write_text(json.dumps(records))
    return path


def test_outputs_go_to_their_tasks_whatever_their_order(tmp_path: Path) -> None:
    tasks = (
        Task("0", ("Add.\n\n1 2",), "all", None, 0),
        Task("1", ("Say 2", "Go"), "all", None, 1),
        Task("2", ("Say 2", "Stop"), "all", None, 2),
        Task("3", ("Hm", "Well"), "all", None, 3),
    )
    path = write(
        tmp_path / "out.json",
        {"turns": ["Say 2", "Stop"], "outputs": ["c", "d"]},
        {"prompt": "Hm", "response": ["e", "\ud800"]},
        {"instruction": "Add.", "input": "1 2", "output": ""},
        {"turns": ["Say 2", "Go"], "outputs": ["a", "b"]},
        {"question": "Say 2", "answer": ["not", "this"]},
    )
    side = read_outputs(path)
    found = side.answers(Benchmark("b", tasks, "plain"), 7)
    assert found == [("",), ("a", "b"), ("c", "d"), ("e", "?")]
    assert (side.name, side.is_fixed, side.missing(BENCHMARK, 0)) == ("out.json", True, 0)


def test_answers_as_fastchat_writes_them(tmp_path: Path) -> None:
    answers = [
        {"question_id": n, "choices": [{"index": 0, "turns": [f"a{n}", "b"]}]} for n in (1, 2)
    ]
    path = tmp_path / "model.jsonl"
    path.write_text("\n".join(map(json.dumps, answers)))
    tasks = tuple(Task(str(n), ("q", "r"), "all", None, n) for n in (2, 1))
    assert read_outputs(path, "m").answers(Benchmark("b", tasks, "plain"), 0) == [
        ("a2", "b"),
        ("a1", "b"),
    ]


@pytest.mark.parametrize(
    ("records", "message"),
    [
        ([], "holds no outputs"),
        ([{"instruction": "Say 1"}], "has the columns instruction; an output needs"),
        ([{"text": "Say 1", "output": "a"}], "has the columns text, output; a task needs"),
        ([{"instruction": "Say 1", "output": 3}], "record 1: an answer is int, not text"),
        ([{"instruction": "Say 1", "outputs": [None]}], "an answer is NoneType, not text"),
        (
            [{"instruction": "Say 1", "output": "a"}, {"instruction": "Say 1", "output": "b"}],
            "record 2 answers otherwise",
        ),
        ([{"question_id": 1, "choices": []}], "no choices with turns"),
    ],
)
def test_files_that_hold_something_else(
    tmp_path: Path, records: list[dict[str, Any]], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        read_outputs(write(tmp_path / "o.json", *records))


def test_outputs_that_do_not_cover_the_benchmark(tmp_path: Path) -> None:
    records = [{"instruction": "Say 1", "output": "a"}, {"instruction": "Say 2", "output": "b"}]
    side = read_outputs(write(tmp_path / "o.json", *records))
    with pytest.raises(
        UserError, match="no output for 2 of the 3 tasks of some, the first of them t2"
    ):
        side.answers(benchmark(0, 2, 4), 0)
    with pytest.raises(UserError, match=r"o\.json, task t1: 1 answers to 2 turns"):
        side.answers(benchmark(0, 1), 0)
