"""The suite against closed forms, a martingale, and what must be reused or made again."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bellmask.assemble import train_run
from bellmask.config import RunConfig
from bellmask.data.tokenizer import ByteTokenizer
from bellmask.errors import UserError
from bellmask.evaluate.generative import (
    Request,
    Sample,
    Subject,
    cut_row,
    measure,
    measure_cell,
    run_subject,
    sampling_for,
    text_subject,
)
from bellmask.evaluate.scorers import ArmRun, TextScore
from bellmask.generate.settings import Sampling
from bellmask.report.quality_plots import quality_diversity_figure
from bellmask.report.quality_tables import markdown, notes, paper_rows, rows
from bellmask.run import Run, load_run


class LetterScorer:
    """A letter is worth as many nats as its place in the alphabet; spaces are no tokens."""

    name, fingerprint, context, rule = "letters", "letters-1", 64, "by hand"
    calls = 0

    def score(
        self,
        samples: Sequence[Sequence[str]],
        *,
        batch_size: int = 8,
        on_batch: Callable[[int], None] | None = None,
    ) -> list[TextScore]:
        self.calls += 1
        found = []
        for documents in samples:
            ids = [ord(c) - 96 for c in "".join(documents) if c.isalpha()]
            is_long = len(ids) > 1
            found.append(TextScore(float(sum(ids)) * is_long, len(ids) * is_long, ids, False))
        return found


def ignore(_: float) -> None:
    pass


def test_the_numbers_of_a_cell_by_hand() -> None:
    samples = [
        Sample(["ab"], [1, 1, 1, 2], 3.5),
        Sample(["c", "cc"], [5, 6, 5, 6], 3.5),
        Sample([""], [9], 3.5),
        Sample(["z"], [8], 3.5),
    ]
    found = measure_cell(samples, LetterScorer(), 8, ignore)
    assert found["perplexity"] == pytest.approx(math.exp((1 + 2 + 3 + 3 + 3) / 5))
    quarter = -(0.75 * math.log(0.75) + 0.25 * math.log(0.25))
    assert found["entropy"] == pytest.approx((quarter + math.log(2)) / 2), "of the run's own tokens"
    assert found["distinct_1"] == pytest.approx(3 / 5)
    assert found["distinct_2"] == pytest.approx(2 / 3)
    assert found["distinct_3"] == 1
    assert found["repetition"] is None, "no sample has four tokens"
    assert found["length"] == 2.5
    assert found["calls"] == 3.5
    assert (found["samples"], found["left_out"]) == (4, 2)
    assert found["counted_tokens"] == [2, 3, 0, 0]


def test_a_cell_of_nothing_has_no_numbers() -> None:
    found = measure_cell(
        [Sample([""], [], 1.0), Sample(["q"], [3], 1.0)], LetterScorer(), 8, ignore
    )
    assert found["perplexity"] is found["entropy"] is found["length"] is None
    assert found["left_out"] == 2


def test_a_scorer_without_numbers_is_refused() -> None:
    class Broken(LetterScorer):
        def score(self, *args: Any, **more: Any) -> list[TextScore]:
            return [TextScore(math.nan, 2, [1, 2], False)]

    with pytest.raises(UserError, match="no finite likelihood"):
        measure_cell([Sample(["ab"], [1, 2])], Broken(), 8, ignore)


def subject(drawn: list[Any], **changes: Any) -> Subject:
    def draw(nfe: int | None, seed: int, on_part: Callable[[float], None]) -> list[Sample]:
        drawn.append((nfe, seed))
        on_part(2)
        return [Sample(["abc"[seed:] + "d"], [seed, 1], float(nfe or 0)), Sample(["dd"], [1, 2])]

    plain = Subject("bell", "key", {"is_causal": False}, [4, 8], [0, 1], draw)
    return replace(plain, **changes)


def test_mean_and_deviation_over_seeds(tmp_path: Path) -> None:
    told: list[tuple[int, int]] = []
    (record,) = measure(
        [subject([])], LetterScorer(), Request(num=2), tmp_path, lambda a, b: told.append((a, b))
    )
    each = [math.exp((1 + 2 + 3 + 4 + 8) / 6), math.exp((2 + 3 + 4 + 8) / 5)]
    for setting, nfe in zip(record["settings"], (4, 8)):
        assert setting["nfe"] == nfe
        assert [cell["perplexity"] for cell in setting["cells"]] == pytest.approx(each)
        assert setting["mean"]["perplexity"] == pytest.approx(sum(each) / 2)
        assert setting["sd"]["perplexity"] == pytest.approx(abs(each[0] - each[1]) / math.sqrt(2))
        assert setting["mean"]["calls"] == nfe
    assert told[0] == (0, 8)
    assert told[-1] == (8, 8)
    assert told == sorted(told)
    one = replace(subject([]), seeds=[0])
    (alone,) = measure([one], LetterScorer(), Request(num=2), tmp_path)
    assert set(alone["settings"][0]["sd"].values()) == {None}


def test_what_is_there_is_not_made_again(tmp_path: Path) -> None:
    drawn: list[Any] = []
    scorer, request = LetterScorer(), Request(num=2)
    first = measure([subject(drawn)], scorer, request, tmp_path)
    assert len(drawn) == scorer.calls == 4
    assert measure([subject(drawn)], scorer, request, tmp_path) == first
    assert len(drawn) == scorer.calls == 4, "all reused"

    other = LetterScorer()
    other.fingerprint = "letters-2"
    measure([subject(drawn)], other, request, tmp_path)
    assert (len(drawn), other.calls) == (4, 4), "the samples serve another scorer"

    measure([subject(drawn, key="other weights")], scorer, request, tmp_path)
    assert len(drawn) == 8
    assert measure([subject(drawn, seeds=[0, 1, 2])], scorer, request, tmp_path)
    assert len(drawn) == 10, "only the new seed"


def test_damaged_and_changed_files_are_noticed(tmp_path: Path) -> None:
    drawn: list[Any] = []
    scorer, request = LetterScorer(), Request(num=2)
    first = measure([subject(drawn)], scorer, request, tmp_path)
    path = tmp_path / "samples" / "bell-key" / "nfe-4-seed-0.jsonl"
    kept = path.read_text()
    assert [json.loads(line)["documents"] for line in kept.splitlines()] == [["abcd"], ["dd"]]
    path.write_text(kept[:20])
    assert measure([subject(drawn)], scorer, request, tmp_path) == first
    assert drawn[4:] == [(4, 0)]
    assert path.read_text() == kept
    path.write_text(kept.replace("abcd", "zz"))
    again = measure([subject(drawn)], scorer, request, tmp_path)
    assert len(drawn) == 5
    cell = again[0]["settings"][0]["cells"][0]
    assert cell["perplexity"] == pytest.approx(math.exp((26 + 26 + 4 + 4) / 4))


@pytest.fixture(scope="module")
def make_run(
    small_config: Callable[..., RunConfig], tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., Run]:
    known: dict[tuple[str, ...], Run] = {}

    def make(*args: str) -> Run:
        if args not in known:
            folder = tmp_path_factory.mktemp("runs") / "run"
            train_run(small_config(*args), folder, is_quiet=True)
            known[args] = load_run(folder, device="cpu")
        return known[args]

    return make


def test_rows_become_documents(make_run: Callable[..., Run]) -> None:
    eos, bos = ByteTokenizer.eos_id, ByteTokenizer.bos_id
    row = np.array([bos, *b"ab", eos, *b"c", eos], dtype=np.int64)
    packed, wrapped = make_run(), make_run("--data.wrap", "True")
    single = make_run("--data.packing", "unpacked", "--data.documents", "line")
    assert cut_row(packed, row[1:])[1] == ["ab", "c", ""]
    ids, documents = cut_row(wrapped, row)
    assert documents == ["ab", "c", ""]
    assert ids.tolist() == row.tolist(), "the entropy is that of the whole row"
    one_sign = ByteTokenizer()
    one_sign.bos_id = eos  # as GPT-2 has it: the given BOS ends no document
    row[0] = eos
    assert cut_row(replace(wrapped, tokenizer=one_sign), row)[1] == ["ab", "c", ""]
    ids, documents = cut_row(single, row[1:])
    assert documents == ["ab"]
    assert ids.tolist() == [*b"ab"]
    assert cut_row(single, np.array([eos, *b"ab"]))[1] == [""]
    assert cut_row(packed, np.array([], dtype=np.int64))[1] == [""]


def test_real_text_is_the_validation_blocks_in_groups(make_run: Callable[..., Run]) -> None:
    run = make_run()
    _, valid = run.blocks()
    request = Request(num=len(valid) // 3, seeds=(0, 1, 2, 3), length=9)
    text = text_subject("real text", run, request)
    assert text.seeds == [0, 1, 2], "as many groups as the text has"
    groups = [text.draw(None, group, ignore) for group in text.seeds]
    assert [len(group) for group in groups] == [request.num] * 3
    rows_seen = sorted(tuple(sample.ids) for group in groups for sample in group)
    spread = valid.spread(3 * request.num)
    assert rows_seen == sorted(tuple(row[:9]) for row in spread.rows(slice(None)).tolist())
    assert {sample.calls for group in groups for sample in group} == {None}
    whole = text_subject("real text", run, Request(num=10**6))
    assert len(whole.draw(None, 0, ignore)) == len(valid), "fewer blocks than asked for"


def test_samples_are_those_of_the_run_and_calls_are_counted(make_run: Callable[..., Run]) -> None:
    run = make_run()
    request = Request(num=5, nfe=(3, 3, 40), seeds=(4,), batch_size=2)
    made = run_subject("bell", run, "weights", request)
    assert made.settings == [3, 40]
    for nfe in made.settings:
        plain = run.generate(run.canvas(), 5, Sampling(steps=nfe), seed=4)
        samples = made.draw(nfe, 4, ignore)
        assert [s.ids for s in samples] == plain.ids_BL.tolist()
        assert samples[0].calls == pytest.approx(plain.num_rows / 5)
        assert samples[0].calls <= min(nfe, 16)


def test_where_there_is_no_nfe_to_choose(make_run: Callable[..., Run]) -> None:
    run, arm = make_run(), make_run("--framework", "arm")
    assert Sampling().has_steps
    assert not Sampling(rule="first_hitting").has_steps
    first = Request(num=2, sampling=Sampling(rule="first_hitting", temperature=0.5))
    made = run_subject("bell", run, "w", first)
    assert made.settings == [None]
    assert made.draw(None, 0, ignore)[0].calls == 16
    causal = run_subject("arm", arm, "w", first)
    assert causal.settings == [None]
    assert causal.draw(None, 0, ignore)[0].calls == 16
    kept = sampling_for(arm, first.sampling, None)
    assert (kept.rule, kept.temperature) == ("ancestral", 0.5)


def test_other_options_have_other_keys(make_run: Callable[..., Run]) -> None:
    run, plain = make_run(), Request(num=2)
    keys = {
        run_subject("bell", run, mark, request).key
        for mark, request in (
            ("w", plain),
            ("other weights", plain),
            ("w", replace(plain, num=3)),
            ("w", replace(plain, length=8)),
            ("w", replace(plain, sampling=Sampling(temperature=0.9))),
            ("w", replace(plain, sampling=Sampling(noise="float32"))),
        )
    }
    assert len(keys) == 6
    same = replace(plain, batch_size=1, scorer_batch_size=1, seeds=(9,))
    assert run_subject("bell", run, "w", same).key in keys


def test_what_a_run_cannot_do_is_said_before_anything_is_sampled(
    make_run: Callable[..., Run],
) -> None:
    sigma = make_run("--framework", "sigma_arm")
    with pytest.raises(UserError, match="has an order for 16 tokens; --length 20"):
        run_subject("sigma", sigma, "w", Request(num=1, length=20))


def test_an_arm_meets_its_own_entropy(make_run: Callable[..., Run], tmp_path: Path) -> None:
    """Of its own samples each token costs on average the entropy of what it was drawn from."""
    toy = ["--data.train", "toy:order2", "--data.tokenizer", "symbols:8", "--optim.lr", "0.02"]
    run = make_run(*toy, "--framework", "arm", "--train.steps", "40")
    made = run_subject("arm", run, "w", Request(num=300, seeds=(0,)))
    (record,) = measure([made], ArmRun(run, context=1024), Request(num=300), tmp_path)
    nll = math.log(record["settings"][0]["mean"]["perplexity"])
    ids_BL = torch.tensor([sample.ids for sample in made.draw(None, 0, ignore)])
    begin = torch.full((len(ids_BL), 1), run.tokenizer.mask_id)
    with torch.no_grad():
        logits = run.model(
            torch.cat([begin, ids_BL[:, :-1]], dim=1),
            torch.arange(ids_BL.numel()),
            positions=torch.arange(16),
            target_positions=torch.arange(1, 17),
        ).double()
    law = torch.distributions.Categorical(logits=logits)
    surprise = -law.log_prob(ids_BL.flatten()) - law.entropy()
    error = float(surprise.std()) / math.sqrt(len(surprise))
    assert nll == pytest.approx(float(law.entropy().mean()), abs=4 * error)
    assert nll == pytest.approx(float((surprise + law.entropy()).mean()), rel=1e-5)
    assert error < 0.02


def a_setting(nfe: int | None, perplexity: float | None, **more: Any) -> dict[str, Any]:
    values = {"perplexity": perplexity, "entropy": 5.4321, "calls": 7.0, "length": 60.0}
    names = ("distinct_1", "distinct_2", "distinct_3", "repetition")
    mean = {**dict.fromkeys(names, 0.25), **values}
    deviation = {**dict.fromkeys(mean, None), "perplexity": 1.25, "entropy": 0.01}
    cell = {"samples": 9, "left_out": 0, "cut": 0, **more}
    cell |= {"perplexity": perplexity, "length": 10.0}
    return {"nfe": nfe, "mean": mean, "sd": deviation, "cells": [cell]}


def test_the_tables_never_show_a_perplexity_alone() -> None:
    runs = [
        {"name": "base", "is_causal": False, "settings": [a_setting(512, 56.51), a_setting(8, 90)]},
        {"name": "arm", "is_causal": True, "settings": [a_setting(None, 30.0, cut=2)]},
    ]
    numbers = {
        "scorer": {"name": "gpt2-large", "rule": "how"},
        "counting": "so",
        "sampling": {"noise": "float32"},
        "how": "ancestral sampling",
        "num": 9,
        "over": "5 seeds",
        "runs": runs,
        "real_text": [{"name": "real text", "settings": [a_setting(None, None, left_out=9)]}],
    }
    columns, table = paper_rows(numbers)
    assert columns == ["NFE", "8", "512", "no NFE to choose"]
    assert table[0] == ["base", "90.00 ± 1.25 (5.43)", "56.51 ± 1.25 (5.43)", ""]
    assert table[1] == ["arm", "", "", "30.00 ± 1.25 (5.43)"]
    columns, table = rows(numbers)
    assert len(table) == 4
    assert table[3][:3] == ["real text", "-", "-"]
    assert columns[-1] == "nats per sample"
    assert [row[-1] for row in table] == ["40.3", "45.0", "34.0", "-"], "10 tokens each"
    assert all(len(row) == len(columns) for row in table)
    lines = notes(numbers)
    assert sum("one network call per token" in line for line in lines) == 1
    assert "arm: 2 of 9 samples cut by the scorer" in lines
    assert "real text: 9 of 9 samples too short to count" in lines
    assert any("float32" in line for line in lines)
    assert "| base | 512 | 56.51 ± 1.25 | 5.432 ± 0.010 |" in markdown(numbers)
    axes = quality_diversity_figure(numbers).axes[0]
    assert axes.get_yscale() == "log"
    assert [text.get_text() for text in axes.texts] == ["8", "512"]
