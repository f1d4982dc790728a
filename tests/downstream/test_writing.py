"""Texts that lm-eval asks for: where they end, what they depend on, how they are sampled."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from bellmask.downstream import writing
from bellmask.downstream.continuations import ContinuationScorer
from bellmask.downstream.harness_options import RequestOptions
from bellmask.downstream.writing import Request, Writer
from bellmask.filling import Filled, fill_rows
from bellmask.generate.settings import Sampling
from bellmask.rng import stream_key
from bellmask.run import Run

pytest.importorskip("lm_eval")

from harness_tools import ask

from bellmask.downstream.harness import BellmaskLM, quiet_lm_eval


def texts(model: BellmaskLM, requests: list[tuple[str, dict[str, Any]]]) -> list[str]:
    asked = [ask("generate_until", request, doc) for doc, request in enumerate(requests)]
    return model.generate_until(asked)


def test_a_text_ends_at_the_first_stop(arm: Run) -> None:
    model = BellmaskLM(run=arm, gap=12)
    (whole,) = texts(model, [("the cat", {})])
    assert len(whole) > 8
    stops = [whole[6:8], whole[3:5], "never there", ""]
    (cut,) = texts(model, [("the cat", {"until": stops})])
    assert cut == whole[: min(whole.find(stop) for stop in stops[:2])]
    assert texts(model, [("the cat", {"until": whole[3:5]})]) == [whole[: whole.find(whole[3:5])]]
    assert texts(model, [("the cat", {"until": ["never there"]})]) == [whole]


def test_a_text_ends_with_eos(masked: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    ids = [*masked.tokenizer.encode(" dog").tolist(), masked.tokenizer.eos_id, 65, 66]
    monkeypatch.setattr(writing, "fill_rows", lambda *_, **__: [Filled(ids, 1.0)])
    assert texts(BellmaskLM(run=masked), [("a", {})]) == [" dog"]


def test_gaps_leave_room_for_the_context(masked: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    rows: list[list[int]] = []

    def fill(_: Run, given: list[torch.Tensor], *__: Any, **___: Any) -> list[Filled]:
        rows.extend(row.tolist() for row in given)
        return [Filled([65], 1.0) for _ in given]

    monkeypatch.setattr(writing, "fill_rows", fill)
    mask, long = masked.tokenizer.mask_id, "abcdefghijklmnopqrstuvwxyz"
    wanted = [("abc", 5), ("abc", 50), (long, 50), (long, 3), ("abc", None)]
    texts(BellmaskLM(run=masked, gap=4), [(c, {"max_gen_toks": n}) for c, n in wanted])
    shown = [bytes(token for token in row if token != mask).decode() for row in rows]
    assert shown == ["abc", "abc", long[-8:], long[-13:], "abc"]
    assert [row.count(mask) for row in rows] == [5, 13, 8, 3, 4]


@pytest.mark.parametrize("name", ["masked", "arm"])
def test_samples_depend_on_the_document_alone(name: str, request: pytest.FixtureRequest) -> None:
    run = request.getfixturevalue(name)
    settings = {"do_sample": True, "temperature": 1.0, "max_gen_toks": 6}
    asked = [ask("generate_until", ("the cat", settings), doc) for doc in range(5)]
    model = BellmaskLM(run=run)
    made = model.generate_until(asked)
    assert len(set(made)) > 1
    torch.manual_seed(3)
    small = BellmaskLM(run=run, batch_tokens=1)
    assert small.generate_until(asked[:1:-2]) == [made[4], made[2]]
    assert BellmaskLM(run=run, seed=1).generate_until(asked) != made
    again, twice = model.generate_until([asked[0], asked[0]])
    assert again == made[0] != twice, "repeats draw apart"
    still = {**settings, "do_sample": False}
    calm = [ask("generate_until", ("the cat", still), doc) for doc in range(2)]
    assert (
        len({*model.generate_until(calm), *BellmaskLM(run=run, seed=1).generate_until(calm)}) == 1
    )


@pytest.mark.parametrize("name", ["masked", "arm"])
def test_texts_are_those_of_one_row_at_a_time(name: str, request: pytest.FixtureRequest) -> None:
    """Two streams, two temperatures, numbers in any order: each row filled by itself."""
    run: Run = request.getfixturevalue(name)
    options = RequestOptions(seed=5)
    writer = Writer(ContinuationScorer(run), options)
    numbers = [7, 3, 1 << 60, 4, 0, 12, 3, 8]
    asked = []
    for n, number in enumerate(numbers):
        settings = {"temperature": 0.5 + n // 2 % 2, "max_gen_toks": 4 + n % 2}
        asked.append(Request("the cat"[: 3 + n % 3], settings, f"task {n % 2}", number))
    told: list[int] = []
    made = writer.write(asked, told.append)
    assert told == sorted(told)
    assert told[-1] == 8
    assert len(set(made)) > 4
    for one, text in zip(asked, made, strict=True):
        gap = [run.tokenizer.mask_id] * int(one.settings["max_gen_toks"])
        given = [*writer.scorer.maker.begin, *run.tokenizer.encode(one.context).tolist()]
        (filled,) = fill_rows(
            run,
            [torch.tensor([*given, *gap])],
            writer.sampling(one.settings),
            longest=run.config.data.block_length,
            seed=stream_key(5, "lm-eval", one.stream),
            first_sample=one.number,
        )
        ids = filled.ids
        ids = ids[: ids.index(run.tokenizer.eos_id)] if run.tokenizer.eos_id in ids else ids
        assert text == run.tokenizer.decode(np.array(ids))


@pytest.mark.parametrize(
    ("settings", "temperature"),
    [
        ({}, 0.0),
        ({"temperature": 0.7}, 0.7),
        ({"temperature": 0.7, "do_sample": False}, 0.0),
        ({"temperature": 0.7, "do_sample": True}, 0.7),
        ({"do_sample": True}, 1.0),
        ({"do_sample": True, "temperature": 0.0}, 0.0),
    ],
)
def test_temperatures(settings: dict[str, Any], temperature: float, masked: Run) -> None:
    writer = BellmaskLM(run=masked).writer
    expected = Sampling("most_confident", "count", temperature=temperature)
    assert writer.sampling(settings) == expected
    more = writer.sampling({**settings, "top_p": 0.9, "top_k": 3})
    assert (more.top_p, more.top_k) == (0.9, 3)
    fixed = BellmaskLM(run=masked, temperature=0.5, rule="random", steps=3).writer.sampling(
        settings
    )
    assert fixed == Sampling("random", steps=3, temperature=0.5)


def test_settings_that_nobody_reads_are_told_once(
    masked: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    model, first = BellmaskLM(run=masked), {"num_beams": 4, "min_p": 0.1, "until": ["."]}
    texts(model, [("a", first), ("b", first)])
    texts(model, [("a", {**first, "penalty": 2})])
    notes = [line for line in capsys.readouterr().err.splitlines() if line.startswith("note:")]
    assert [line.split()[-2].rstrip(":") for line in notes] == ["min_p", "num_beams", "penalty"]


def test_notes_are_told_where_lm_eval_is_silent(
    masked: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    model = BellmaskLM(run=masked)
    with quiet_lm_eval():
        texts(model, [("a", {"min_p": 0.1, "max_gen_toks": 2})])
    assert "note: the model bellmask does not know the generation setting min_p" in (
        capsys.readouterr().err
    )
