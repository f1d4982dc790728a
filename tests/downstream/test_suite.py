"""Several contestants: the same questions, differences to the first, progress, one order."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from downstream_tools import TASKS, Stub, loaded, records

from bellmask.downstream.data_sources import Loaded
from bellmask.downstream.questions import Choice
from bellmask.downstream.suite import Suite, same_items
from bellmask.errors import UserError
from bellmask.rng import stream_key


def random_stub(mark: str, **more: Any) -> Stub:
    def log_p(context: str, continuation: str, seed: int) -> float:
        return -1.0 - stream_key(seed, mark, context, continuation) % 100

    def text(row: str, seed: int) -> str:
        return (" dog", " moon", " cat")[stream_key(seed, mark, row) % 3]

    return Stub(log_p, text, mark=mark, longest_exact=0, **more)


def test_all_models_get_the_same_questions() -> None:
    found = same_items(loaded(), ["plain", "tuned"], 3)
    for plain, tuned in zip(found["plain"], found["tuned"], strict=True):
        assert (plain.name, plain.kind) == (tuned.name, tuned.kind)
        assert len(plain.items) == 3
        assert [item.number for item in plain.items] == [item.number for item in tuned.items]
        for one, two in zip(plain.items, tuned.items, strict=True):
            if isinstance(one, Choice):
                assert isinstance(two, Choice)
                assert one.gold == two.gold
    assert [task.name for task in found["plain"]] == list(TASKS)
    more = same_items(loaded(), ["plain"], 4)["plain"]
    for few, many in zip(found["plain"], more, strict=True):
        assert set(few.items) < set(many.items)


def test_records_without_answers_are_left_out() -> None:
    rows = records("piqa")
    rows[1]["label"] = -1
    found = same_items({"piqa": Loaded(rows, "", "")}, ["plain", "tuned"], 0)
    assert [item.number for item in found["tuned"][0].items] == [0, 2, 3, 4]
    for row in rows:
        row["label"] = -1
    with pytest.raises(UserError, match="piqa: none of 5 records has a usable answer"):
        same_items({"piqa": Loaded(rows, "", "")}, ["plain"], 0)


def test_progress_counts_what_is_left_of_models(tmp_path: Path) -> None:
    base, bell, guesser = random_stub("base"), random_stub("bell"), random_stub("random")
    guesser.is_model, guesser.is_guess = False, True  # type: ignore[misc]
    all_three = {"base": base, "bell": bell, "random": guesser}
    suite = Suite(all_three, loaded(), 0, (0, 1), tmp_path)
    total = suite.missing()
    told: list[int] = []
    suite.do(told.append)
    assert told == sorted(told)
    done = [len(one.scored) + len(one.written) for one in (base, bell)]
    assert total == sum(done) == told[-1]
    assert done[0] in told
    assert guesser.written
    assert not guesser.scored
    assert suite.missing() == 0
    suite.do()
    more = Suite({**all_three, "third": random_stub("third")}, loaded(), 0, (0, 1), tmp_path)
    assert more.missing() == done[0]


def test_numbers(tmp_path: Path) -> None:
    models = {"base": random_stub("base"), "bell": random_stub("bell", prompts="tuned")}
    suite = Suite(models, loaded(), 0, (7, 8), tmp_path)
    suite.do()
    found = json.loads(json.dumps(suite.numbers(), allow_nan=False))
    assert found["seeds"] == [7, 8]
    assert [(m["name"], m["prompts"], m["is_model"]) for m in found["models"]] == [
        ("base", "plain", True),
        ("bell", "tuned", True),
    ]
    measured = suite.measured()
    assert [task["name"] for task in found["tasks"]] == list(TASKS)
    for task in found["tasks"]:
        assert (task["num_questions"], task["num_records"]) == (5, 5)
        assert (task["origin"], task["identity"]) == (f"{task['name']} of a test", task["name"])
        assert list(task["results"]) == ["base", "bell"]
        for score, base in task["results"]["base"]["scores"].items():
            assert "difference" not in base
            bell = task["results"]["bell"]["scores"][score]
            apart = (
                measured["bell"][task["name"]].value_SB[score]
                - measured["base"][task["name"]].value_SB[score]
            ).mean(0)
            assert bell["difference"]["mean"] == pytest.approx(bell["mean"] - base["mean"])
            error = (sum((apart - apart.mean()) ** 2) / 4 / 5) ** 0.5
            assert bell["difference"]["error"] == pytest.approx(error)


def test_numbers_do_not_depend_on_the_order_of_tasks(tmp_path: Path) -> None:
    found = []
    for number, names in enumerate((TASKS, TASKS[::-1])):
        folder = tmp_path / str(number)
        suite = Suite({"base": random_stub("base")}, loaded(*names), 4, (0, 1), folder)
        suite.do()
        found.append({task["name"]: task for task in suite.numbers()["tasks"]})
    assert found[0] == found[1]


def test_a_stopped_suite_gives_the_same_numbers(tmp_path: Path) -> None:
    def build(folder: str) -> tuple[Suite, dict[str, Stub]]:
        models = {name: random_stub(name) for name in ("base", "bell")}
        return Suite(models, loaded(), 0, (0, 1), tmp_path / folder), models

    whole, asked = build("whole")
    whole.do()
    stopped, before = build("stopped")
    place = stopped.missing() * 3 // 4

    def stop(done: int) -> None:
        if done >= place:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        stopped.do(stop)
    assert before["bell"].calls
    resumed, after = build("stopped")
    resumed.do()
    assert resumed.numbers() == whole.numbers()
    assert not after["base"].calls
    done = [len(m["bell"].scored) + len(m["bell"].written) for m in (asked, after)]
    assert 0 < done[1] < done[0]
