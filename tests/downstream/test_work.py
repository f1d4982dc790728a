"""Work that is kept: nothing is done twice, nothing depends on how it was cut."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from continuation_tools import EXACT, random_run
from downstream_tools import Stub, answers, by_content, noisy, tasks

from bellmask.config import RunConfig
from bellmask.downstream import work as work_file
from bellmask.downstream.contestants import RunContestant
from bellmask.downstream.continuations import ContinuationScorer
from bellmask.downstream.masks import Estimator
from bellmask.downstream.questions import Choice
from bellmask.downstream.work import TaskItems, Work
from bellmask.errors import UserError
from bellmask.rng import stream_key

Config = Callable[..., RunConfig]
CHOICES = 5 * (4 + 2 + 2 + 3 + 4)
TEXTS = 3 * 5 * 2


def test_every_unit_is_done_once(tmp_path: Path) -> None:
    one = noisy()
    work = Work(one, tasks(), (3, 4), tmp_path)
    total = work.missing()
    told: list[int] = []
    work.do(told.append)
    assert told == sorted(told)
    assert told[-1] == total == len(one.scored) + len(one.written)
    assert work.missing() == 0
    exact = [ask for ask, _ in one.scored if len(ask.target) <= 5]
    assert len(one.scored) == len(exact) + 2 * (CHOICES - _repeats() - len(exact))
    assert len(set(one.scored)) == len(one.scored)
    assert len(one.written) == 2 * TEXTS
    assert len(set(one.written)) == 2 * TEXTS
    work.do(told.append)
    assert len(one.scored) + len(one.written) == total
    again = Work(one, tasks(), (3, 4), tmp_path)
    assert again.missing() == 0
    assert answers(again) == answers(work)


def _repeats() -> int:
    """Choices with the same context, continuation and no noise are one: there are none."""
    pairs = [
        (c, t)
        for task in tasks()
        for item in task.items
        if isinstance(item, Choice)
        for c, t in zip(item.contexts, item.continuations, strict=True)
    ]
    return len(pairs) - len(set(pairs))


def test_units_without_noise_are_shared_by_seeds(tmp_path: Path) -> None:
    one = Stub(by_content)
    first = Work(one, tasks("piqa"), (0, 1, 2), tmp_path)
    first.do()
    assert len(one.scored) == 10
    later = Work(one, tasks("piqa"), (8, 9), tmp_path)
    assert later.missing() == 0
    (task,) = later.tasks
    assert later.scores(task, task.items[0], 9) == first.scores(task, task.items[0], 0)  # type: ignore[arg-type]


def test_a_question_that_comes_twice_is_asked_once(tmp_path: Path) -> None:
    """Where there is no noise that would differ."""
    (task,) = tasks("piqa")
    again = tuple(replace(item, number=item.number + 5) for item in task.items)
    both = [TaskItems("piqa", "choice", task.items + again)]
    assert Work(Stub(by_content), both, (0, 1), tmp_path).missing() == 10
    assert Work(Stub(by_content, longest_exact=0), both, (0, 1), tmp_path).missing() == 40


def test_choices_of_a_question_share_their_noise(tmp_path: Path) -> None:
    one = noisy()
    Work(one, tasks("piqa", "hellaswag"), (0,), tmp_path).do()
    shared = Counter(ask.noise for ask, _ in one.scored)
    assert sorted(shared.values()) == [2] * 5 + [4] * 5


def test_noise_is_a_texts_own(tmp_path: Path) -> None:
    one = noisy()
    Work(one, tasks("lambada", "infilling"), (0, 1), tmp_path).do()
    noise = {(sample, seed) for _, sample, seed, _ in one.written}
    assert len(noise) == len(one.written) == 40
    assert len({seed for _, seed in noise}) == 2
    assert {t for *_, t in one.written} == {1.0, 0.95}
    assert all(t == (0.95 if row.endswith(".") else 1.0) for row, _, _, t in one.written)


@pytest.mark.parametrize("more", ["seeds", "questions", "tasks"])
def test_more_work_does_only_what_is_new(tmp_path: Path, more: str) -> None:
    small: dict[str, Any] = {"names": ("piqa", "infilling"), "limit": 3, "seeds": (0, 1)}
    change = {"seeds": (0, 1, 2), "questions": 5, "tasks": ("lambada", "infilling", "piqa")}[more]
    large = {**small, {"seeds": "seeds", "questions": "limit", "tasks": "names"}[more]: change}

    def build(one: Stub, folder: str, options: dict[str, Any]) -> Work:
        asked = tasks(*options["names"], limit=options["limit"])
        return Work(one, asked, options["seeds"], tmp_path / folder)

    before, after, whole = noisy(), noisy(), noisy()
    build(before, "grown", small).do()
    grown = build(after, "grown", large)
    grown.do()
    once = build(whole, "once", large)
    once.do()
    assert before.scored
    assert after.scored or more == "tasks"
    assert sorted(before.scored + after.scored, key=repr) == sorted(whole.scored, key=repr)
    assert sorted(before.written + after.written) == sorted(whole.written)
    assert answers(grown) == answers(once)


def test_answers_do_not_depend_on_chunks_or_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    for chunk, asked in ((128, tasks()), (3, tasks()[::-1]), (1, tasks()[3:] + tasks()[:3])):
        monkeypatch.setattr(work_file, "CHUNK", chunk)
        one = noisy()
        work = Work(one, asked, (0, 1), tmp_path / str(chunk))
        work.do()
        assert max(Counter(one.calls).values()) <= 10 or chunk < 10
        found.append(answers(work))
    assert found[0] == found[1] == found[2]


def test_batches_hold_several_tasks(tmp_path: Path) -> None:
    """Two seeds: log-probabilities, texts at two temperatures."""
    one = noisy()
    Work(one, tasks(), (0, 1), tmp_path).do()
    assert Counter(one.calls) == {"score": 2, "write": 4}


def test_cheap_and_dear_work_is_mixed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a bar's time left is about right from the start."""
    monkeypatch.setattr(work_file, "CHUNK", 5)
    one = noisy()
    Work(one, tasks(), (0,), tmp_path).do()
    half = len(one.calls) // 2
    first, second = Counter(one.calls[:half]), Counter(one.calls[half:])
    assert min(first["write"], second["write"], first["score"], second["score"]) > 1
    lengths = [ask.length for ask, _ in one.scored]
    half = len(lengths) // 2
    assert sum(lengths[:half]) == pytest.approx(sum(lengths[half:]), rel=0.15)


def test_a_run_is_asked_as_by_hand(small_config: Config, tmp_path: Path) -> None:
    """Sums over windows, of masks that the question's number and the seed decide."""
    run = random_run(small_config(*EXACT, "--data.block-length", "32"))
    estimator = Estimator(draws=3, longest_exact=3)
    long = tuple(" " + word * 20 for word in ("cat", "do"))
    asked = [TaskItems("piqa", "choice", (Choice(7, ("a mat",) * 2, long, 0),))]
    asked += tasks("social_iqa", limit=2)
    found = []
    for batch_tokens in (8192, 64):
        one = RunContestant(run, estimator, batch_tokens=batch_tokens)
        work = Work(one, asked, (5, 6), tmp_path / str(batch_tokens))
        work.do()
        found.append(work)
    scorer = ContinuationScorer(run, estimator)
    for task in asked:
        for item in task.items:
            assert isinstance(item, Choice)
            noise = stream_key(0, "question", task.name, item.number) % (1 << 62)
            for seed in (5, 6):
                wanted = []
                for context, text in zip(item.contexts, item.continuations, strict=True):
                    asks = scorer.asks(context, text, noise=noise)
                    wanted.append(sum(s.log_probability for s in scorer.score(asks, seed=seed)))
                for work in found:
                    scores = work.scores(task, item, seed)
                    assert [s.log_probability for s in scores] == pytest.approx(wanted, rel=1e-5)


def test_passes_are_counted_once(tmp_path: Path) -> None:
    one = noisy()
    work = Work(one, tasks("piqa", "openbookqa"), (0, 1, 2), tmp_path)
    work.do()
    assert sum(work.num_passes(task) for task in work.tasks) == 3 * len(one.scored)


def test_texts_end_at_eos(tmp_path: Path) -> None:
    one = Stub()
    end = one.tokenizer.eos_id
    one.write = lambda rows, *_, **__: [[*b" dog", end, *b" cat"] for _ in rows]  # type: ignore[method-assign]
    work = Work(one, tasks("lambada"), (0,), tmp_path)
    work.do()
    assert work.text(work.tasks[0], work.tasks[0].items[0], "own", 0) == " dog"


@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_a_damaged_model_is_told(tmp_path: Path, value: float) -> None:
    one = Stub(lambda context, continuation, seed: value)
    work = Work(one, tasks("piqa"), (0,), tmp_path)
    with pytest.raises(UserError, match=r"piqa, question .* damaged"):
        work.do()
    assert not list(tmp_path.iterdir())


def test_what_is_kept_is_strict_json(tmp_path: Path) -> None:
    work = Work(noisy(), tasks("piqa", "lambada"), (0,), tmp_path)
    work.do()
    (path,) = tmp_path.iterdir()

    def refuse(word: str) -> None:
        raise AssertionError(word)

    lines = path.read_text(encoding="utf-8").splitlines()
    read = [json.loads(line, parse_constant=refuse) for line in lines]
    assert len({one["key"] for one in read}) == len(read) == 10 + 10
    assert any("error" in one and one["error"] is None for one in read), "of a single draw"


def test_other_models_have_files_of_their_own(tmp_path: Path) -> None:
    for mark in ("one", "two"):
        one = Stub(mark=mark)
        work = Work(one, tasks("piqa"), (0,), tmp_path)
        assert work.missing() == 10
        work.do()
    assert len(list(tmp_path.iterdir())) == 2


def test_who_guesses_is_not_asked(tmp_path: Path) -> None:
    one = Stub()
    one.is_guess = True  # type: ignore[misc]
    work = Work(one, tasks("piqa", "lambada"), (0,), tmp_path)
    work.do()
    assert not one.scored
    assert len(one.written) == 10
