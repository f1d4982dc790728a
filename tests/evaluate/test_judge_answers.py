"""Answers to a benchmark against the answerer asked directly; files of outputs by hand."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from tuned_runs import tuned

from bellmask.data.chat_templates import Message
from bellmask.evaluate.judge_prompts import Benchmark, JudgeTask, RunSide, read_outputs
from bellmask.generate.answers import Answerer, Question
from bellmask.generate.settings import Sampling
from bellmask.model.pretrained import Backbone
from bellmask.run import load_run
from bellmask.utils.errors import UserError

TURNS = [("Say 1",), ("Say 2", "Go"), ("Say 3 please, slowly", "Go on"), ("Say 1",), ("Say 5",)]
TASKS = tuple(JudgeTask(f"t{n}", turns, "all", None, n) for n, turns in enumerate(TURNS))
BENCHMARK = Benchmark("five", TASKS, "plain")
SAMPLING = Sampling(steps=3)


def benchmark(*numbers):
    """Some of the tasks."""
    return Benchmark("some", tuple(TASKS[number] for number in numbers), "plain")


@pytest.fixture(scope="module")
def runs(zoo, tmp_path_factory):
    """Fine-tuned on conversations, on single prompts, on nothing, and an ARM."""
    folder = tmp_path_factory.mktemp("answering")
    made = {"turns": ("bell", True), "single": ("bell", False), "text": ("bell", None)}
    made |= {"arm": ("arm", None)}
    paths = {name: tuned(zoo / run, folder / name, kind) for name, (run, kind) in made.items()}
    return {name: load_run(path) for name, path in paths.items()}


@pytest.fixture
def side(runs, tmp_path):
    """``side("turns")``: answers of 6 tokens in 3 steps, kept in the test's folder."""

    def build(name="turns", run=None, **changes):
        named = {"sampling": SAMPLING, "length": 6, **changes}
        return RunSide(name, run or runs[name], tmp_path / "answers", **named)

    return build


def lines(folder):
    texts = [path.read_text() for path in sorted((folder / "answers").glob("*.jsonl"))]
    return [json.loads(line) for text in texts for line in text.splitlines()]


# --- runs ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["turns", "single", "arm"])
def test_answers_are_those_of_the_run_asked_one_by_one(name, side, runs):
    """By the task's number, whatever else is asked; a second turn after the first's answer."""
    found = side(name).answers(BENCHMARK, seed=3)
    answerer = Answerer(runs[name])
    sampling = SAMPLING.for_causal() if name == "arm" else SAMPLING
    for task, said in zip(TASKS, found, strict=True):
        earlier = []
        for turn, (asked, text) in enumerate(zip(task.turns, said, strict=True)):
            question = Question((*earlier, Message("user", asked)), name == "turns" or turn > 0)
            number = turn * 2**20 + task.index
            (alone,) = answerer.answer(
                [question], length=6, sampling=sampling, seed=3, samples=[number]
            )
            assert text == alone.text
            earlier += [Message("user", asked), Message("assistant", text)]
    assert len(set(found)) == len(TASKS), "the same request twice has two answers"


def test_nothing_is_written_twice_whatever_is_asked_first(side, tmp_path, monkeypatch):
    assert side().missing(BENCHMARK, 0) == 7
    everything = side().answers(BENCHMARK, 0)
    assert (side().missing(BENCHMARK, 0), side().missing(BENCHMARK, 1)) == (0, 7)
    assert side().answers(BENCHMARK, 1) != everything
    assert len(lines(tmp_path)) == 14
    for place in tmp_path.glob("answers/*"):
        place.unlink()
    assert side().answers(benchmark(4, 2), 0) == [everything[4], everything[2]]
    assert side().answers(BENCHMARK, 0) == everything, "some of before, others now"
    assert len(lines(tmp_path)) == 7
    monkeypatch.delattr(Answerer, "answer")
    assert side().answers(BENCHMARK, 0) == everything


def test_what_decides_an_answer_has_a_file_of_its_own(side, runs):
    """Other lengths and sampling; the same weights used otherwise, or asked in other words."""
    run, config = runs["turns"], runs["turns"].config
    others = [
        side(length=7),
        side(sampling=Sampling(steps=4)),
        side(sampling=Sampling(steps=3, temperature=0.5)),
        side("single"),
        side(
            run=replace(run, config=replace(config, train=replace(config.train, precision="bf16")))
        ),
        side(
            run=replace(
                run, config=replace(config, model=replace(config.model, time_input="sigma"))
            )
        ),
        side(run=replace(run, backbone=Backbone({}, "{{ messages[0].content }}"))),
        side(run=replace(run, backbone=Backbone({}, "{{ messages[0].content }}!"))),
    ]
    assert len({side().fingerprint, *(other.fingerprint for other in others)}) == 9
    assert side("x", replace(run)).fingerprint == side().fingerprint
    assert side(sampling=Sampling()).fingerprint == side(sampling=Sampling(steps=64)).fingerprint
    # steps and rules are the masked models'; they do not even change a causal one's file
    found = side("arm", sampling=Sampling(rule="most_confident", steps=3, temperature=0.7))
    assert found.fingerprint == side("arm", sampling=Sampling(temperature=0.7)).fingerprint
    assert len(found.answers(benchmark(0), 0)) == 1
    with pytest.raises(UserError, match="96"):
        side(length=96)


def test_cautions(side):
    for name, turns, expected in (
        ("turns", BENCHMARK, ""),
        ("single", BENCHMARK, "fine-tuned on single requests"),
        ("single", benchmark(0, 4), ""),
        ("text", benchmark(0), "never fine-tuned"),
    ):
        one = side(name)
        one.answers(turns, 0)
        found = one.cautions(turns, [0])
        assert len(found) == bool(expected)
        assert expected in "".join(found)
    long = JudgeTask("long", ("Say " + "x" * 200,), "all", None, 9)
    one, with_long = side(), Benchmark("long", (TASKS[1], long), "plain")
    for seed in (0, 1):
        one.answers(with_long, seed)
    (line,) = one.cautions(with_long, [0, 1])
    assert "2 of 6 requests did not fit into rows of 96 tokens" in line


# --- files -----------------------------------------------------------------------------------


def write(path, *records):
    path.write_text(json.dumps(records))
    return path


def test_outputs_go_to_their_tasks_whatever_their_order(tmp_path):
    turns = [("Add.\n\n1 2",), ("Say 2", "Go"), ("Say 2", "Stop"), ("Hm", "Well")]
    tasks = tuple(JudgeTask(str(n), said, "all", None, n) for n, said in enumerate(turns))
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
    assert (side.name, side.missing(BENCHMARK, 0)) == ("out.json", 0)
    # as FastChat writes them
    answers = [
        {"question_id": n, "choices": [{"index": 0, "turns": [f"a{n}", "b"]}]} for n in (0, 1, 3, 2)
    ]
    said = read_outputs(write(tmp_path / "model.json", *answers)).answers(
        Benchmark("b", tasks[1:], "plain"), 0
    )
    assert said == [("a1", "b"), ("a2", "b"), ("a3", "b")]


@pytest.mark.parametrize(
    ("records", "named"),
    [
        ([], "no outputs"),
        ([{"instruction": "Say 1"}], "columns instruction"),
        ([{"text": "Say 1", "output": "a"}], "columns text, output"),
        ([{"instruction": "Say 1", "output": 3}], "record 1: an answer is int"),
        ([{"instruction": "Say 1", "output": answer} for answer in "ab"], "record 2"),
        ([{"question_id": 1, "choices": []}], "no choices with turns"),
    ],
)
def test_files_that_hold_something_else(tmp_path, records, named):
    with pytest.raises(UserError, match=named):
        read_outputs(write(tmp_path / "o.json", *records))


def test_outputs_that_do_not_cover_the_benchmark(tmp_path):
    records = [{"instruction": "Say 1", "output": "a"}, {"instruction": "Say 2", "output": "b"}]
    side = read_outputs(write(tmp_path / "o.json", *records))
    with pytest.raises(UserError, match="2 of the 3 tasks of some, the first of them t2"):
        side.answers(benchmark(0, 2, 4), 0)
    with pytest.raises(UserError, match=r"o\.json, task t1: 1 answers to 2 turns"):
        side.answers(benchmark(0, 1), 0)
