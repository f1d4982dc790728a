"""Generative perplexity: closed forms, a martingale, and what must be reused or made again."""

from __future__ import annotations

import json
import math
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from counted_progress import Counted

from bellmask import load
from bellmask.data.tokenizers import ByteTokenizer
from bellmask.evaluate.generative import (
    GenerativeRequest,
    Subject,
    cut_row,
    distinct,
    diversity,
    measure,
    measure_cell,
    repetition,
    run_subject,
    text_subject,
    unigram_entropy,
)
from bellmask.evaluate.scorers import ArmRun, TextSample, TextScore
from bellmask.generate.sampler import SamplingDenoiser
from bellmask.generate.settings import Sampling
from bellmask.utils.errors import UserError
from bellmask.utils.progress import NO_PROGRESS

# diversity


def test_the_entropy_of_known_frequencies():
    assert unigram_entropy([7] * 9) == 0 == unigram_entropy([])
    # halves and quarters: 1/2 ln 2 + 2 * 1/4 ln 4
    assert unigram_entropy([1, 1, 5, 9]) == pytest.approx(1.5 * math.log(2))
    draw = np.random.default_rng(1)
    ids = np.minimum(draw.integers(12, size=200), draw.integers(12, size=200)).tolist()
    surprise = [math.log(len(ids) / Counter(ids)[token]) for token in ids]
    assert unigram_entropy(ids) == pytest.approx(math.fsum(surprise) / len(ids))


def test_distinct_is_over_all_samples_and_repetition_within_each():
    # pairs: (1 2) (2 1) | (1 2): two different ones of three
    assert distinct([[1, 2, 1], [1, 2]], 2) == pytest.approx(2 / 3)
    assert distinct([[1, 2, 1], [1, 2]], 1) == pytest.approx(2 / 5)
    assert distinct([[1, 2], [3, 4]], 2) == 1, "no pair spans two samples"
    assert distinct([[1], []], 2) is None
    assert repetition(list(range(50))) == 0
    assert repetition([1, 2, 3, 4, 5, 1, 2, 3, 4]) == pytest.approx(1 / 6)
    assert repetition([1, 2, 3, 9, 1, 2, 3, 8]) == 0, "three in a row are not enough"
    assert repetition([1, 2, 3]) is None
    found = diversity([[5] * 13, list(range(20)), [1, 2]])
    assert found.repetition == pytest.approx((0.9 + 0) / 2), "of the samples that have any fours"
    assert found.distinct_1 == pytest.approx(20 / 35)
    assert found.distinct_2 == pytest.approx(20 / 32), "(1 2) is in two samples"
    assert found.distinct_3 == pytest.approx(19 / 29)


# cells


class LetterScorer:
    """A letter is worth as many nats as its place in the alphabet; spaces are no tokens."""

    name, fingerprint, context, rule = "letters", "letters-1", 64, "by hand"
    calls = 0

    def score(self, samples, *, batch_size=8, progress=None):
        self.calls += 1
        found = []
        for documents in samples:
            ids = [ord(c) - 96 for c in "".join(documents) if c.isalpha()]
            is_long = len(ids) > 1
            found.append(TextScore(float(sum(ids)) * is_long, len(ids) * is_long, ids, False))
        return found


def test_the_numbers_of_a_cell_by_hand():
    samples = [
        TextSample(["ab"], [1, 1, 1, 2], 3.5),
        TextSample(["c", "cc"], [5, 6, 5, 6], 3.5),
        TextSample([""], [9], 3.5),
        TextSample(["z"], [8], 3.5),
    ]
    found = measure_cell(samples, LetterScorer(), 8, NO_PROGRESS)
    assert found["perplexity"] == pytest.approx(math.exp((1 + 2 + 3 + 3 + 3) / 5))
    quarter = -(0.75 * math.log(0.75) + 0.25 * math.log(0.25))
    assert found["entropy"] == pytest.approx((quarter + math.log(2)) / 2), "of the run's own tokens"
    assert found["distinct_1"] == pytest.approx(3 / 5)
    assert found["distinct_2"] == pytest.approx(2 / 3)
    assert found["distinct_3"] == 1
    assert found["repetition"] is None, "no sample has four tokens"
    assert (found["length"], found["calls"]) == (2.5, 3.5)
    assert (found["samples"], found["left_out"], found["cut"]) == (4, 2, 0)
    assert found["counted_tokens"] == [2, 3, 0, 0]
    nothing = measure_cell(samples[2:], LetterScorer(), 8, NO_PROGRESS)
    assert nothing["perplexity"] is nothing["entropy"] is nothing["length"] is None
    assert nothing["left_out"] == 2


def test_a_scorer_without_numbers_is_refused():
    class Broken(LetterScorer):
        def score(self, *args, **more):
            return [TextScore(math.nan, 2, [1, 2], False)]

    with pytest.raises(UserError, match="letters"):
        measure_cell([TextSample(["ab"], [1, 2])], Broken(), 8, NO_PROGRESS)


def subject(drawn, **changes):
    def draw(nfe, seed, progress):
        drawn.append((nfe, seed))
        progress.advance(2)
        return [
            TextSample(["abc"[seed:] + "d"], [seed, 1], float(nfe or 0)),
            TextSample(["dd"], [1, 2]),
        ]

    return replace(Subject("bell", "key", {"is_causal": False}, [4, 8], [0, 1], draw), **changes)


def test_mean_and_deviation_over_seeds(tmp_path):
    progress = Counted()
    (record,) = measure(
        [subject([])],
        LetterScorer(),
        GenerativeRequest(num=2),
        tmp_path,
        progress,
    )
    each = [math.exp((1 + 2 + 3 + 4 + 8) / 6), math.exp((2 + 3 + 4 + 8) / 5)]
    for setting, nfe in zip(record["settings"], (4, 8)):
        assert setting["nfe"] == nfe
        assert [cell["perplexity"] for cell in setting["cells"]] == pytest.approx(each)
        assert setting["mean"]["perplexity"] == pytest.approx(sum(each) / 2)
        assert setting["sd"]["perplexity"] == pytest.approx(abs(each[0] - each[1]) / math.sqrt(2))
        assert setting["mean"]["calls"] == nfe
    assert (progress.totals, progress.done) == ([8], 4)  # half of it is scoring, here by nobody
    (alone,) = measure([subject([], seeds=[0])], LetterScorer(), GenerativeRequest(num=2), tmp_path)
    assert set(alone["settings"][0]["sd"].values()) == {None}


def test_what_is_there_is_not_made_again(tmp_path):
    drawn, scorer, request = [], LetterScorer(), GenerativeRequest(num=2)
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
    measure([subject(drawn, seeds=[0, 1, 2])], scorer, request, tmp_path)
    assert len(drawn) == 10, "only the new seed"


def test_damaged_and_changed_files_are_noticed(tmp_path):
    drawn, scorer, request = [], LetterScorer(), GenerativeRequest(num=2)
    first = measure([subject(drawn)], scorer, request, tmp_path)
    path = tmp_path / "samples" / "bell-key" / "nfe-4-seed-0.jsonl"
    whole = path.read_text()
    assert [json.loads(line)["documents"] for line in whole.splitlines()] == [["abcd"], ["dd"]]
    damaged = [{"documents": [1], "ids": [2]}, {"documents": ["a"], "ids": ["a"]}]
    damaged.append({"documents": ["a"], "ids": [1], "calls": "many"})
    for content in (whole[:20], *map(json.dumps, damaged)):
        drawn.clear()
        path.write_text(content)
        assert measure([subject(drawn)], scorer, request, tmp_path) == first
        assert drawn == [(4, 0)]
        assert path.read_text() == whole
    path.write_text(whole.replace("abcd", "zz"))
    again = measure([subject(drawn)], scorer, request, tmp_path)
    assert len(drawn) == 1
    cell = again[0]["settings"][0]["cells"][0]
    assert cell["perplexity"] == pytest.approx(math.exp((26 + 26 + 4 + 4) / 4))


# runs


def with_data(run, **options):
    return replace(run, config=replace(run.config, data=replace(run.config.data, **options)))


def test_rows_become_documents(zoo):
    eos, bos = ByteTokenizer.eos_id, ByteTokenizer.bos_id
    row = np.array([bos, *b"ab", eos, *b"c", eos], dtype=np.int64)
    packed = load(zoo / "bell")
    wrapped, single = with_data(packed, wrap=True), with_data(packed, packing="unpacked")
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


def test_real_text_is_the_validation_blocks_in_groups(zoo):
    run = load(zoo / "bell")
    _, valid = run.blocks()
    request = GenerativeRequest(num=len(valid) // 3, seeds=(0, 1, 2, 3), length=9)
    text = text_subject("real text", run, request)
    assert text.seeds == [0, 1, 2], "as many groups as the text has"
    groups = [text.draw(None, group, NO_PROGRESS) for group in text.seeds]
    assert [len(group) for group in groups] == [request.num] * 3
    rows_seen = sorted(tuple(sample.ids) for group in groups for sample in group)
    spread = valid.spread(3 * request.num)
    assert rows_seen == sorted(tuple(row[:9]) for row in spread.rows(slice(None)).tolist())
    assert {sample.calls for group in groups for sample in group} == {None}
    whole = text_subject("real text", run, GenerativeRequest(num=10**6))
    assert len(whole.draw(None, 0, NO_PROGRESS)) == len(valid), "fewer blocks than asked for"


def test_samples_are_those_of_the_run_and_calls_are_counted(zoo):
    run = load(zoo / "bell")
    request = GenerativeRequest(num=5, nfe=(3, 3, 40), seeds=(4,), batch_size=2)
    made = run_subject("bell", run, "weights", request)
    assert made.settings == [3, 40]
    for nfe in made.settings:
        plain = run.generate(run.canvas(), 5, Sampling(steps=nfe), seed=4)
        progress = Counted()
        samples = made.draw(nfe, 4, progress)
        assert [s.ids for s in samples] == plain.ids_BL.tolist()
        assert samples[0].calls == pytest.approx(plain.num_rows / 5)
        assert samples[0].calls <= min(nfe, 16)
        assert len(progress.seen) == 3 * nfe
        assert progress.done == pytest.approx(5)


def test_where_there_is_no_nfe_to_choose(zoo):
    first = GenerativeRequest(num=2, sampling=Sampling(rule="first_hitting", temperature=0.5))
    for name in ("bell", "arm"):
        made = run_subject(name, load(zoo / name), "w", first)
        assert made.settings == [None]
        assert made.draw(None, 0, NO_PROGRESS)[0].calls == 16
    with pytest.raises(UserError, match="--length 20"):
        run_subject("sigma", load(zoo / "sigma_arm"), "w", GenerativeRequest(num=1, length=20))


def test_other_options_have_other_keys(zoo):
    run, plain = load(zoo / "bell"), GenerativeRequest(num=2)
    requests = [
        plain,
        replace(plain, num=3),
        replace(plain, length=8),
        replace(plain, sampling=Sampling(temperature=0.9)),
    ]
    keys = {run_subject("bell", run, "w", request).key for request in requests}
    keys.add(run_subject("bell", run, "other weights", plain).key)
    keys.add(run_subject("bell", with_data(run, wrap=True), "w", plain).key)
    assert len(keys) == 6
    same = replace(plain, batch_size=1, scorer_batch_size=1, seeds=(9,))
    assert run_subject("bell", run, "w", same).key in keys


def test_an_arm_meets_its_own_entropy(zoo, tmp_path):
    """Of its own samples each token costs on average the entropy of what it was drawn from."""
    run = load(zoo / "arm")
    made = run_subject("arm", run, "w", GenerativeRequest(num=300, seeds=(0,)))
    # the ids themselves: bytes that are no UTF-8 do not come back from text
    ids_BL = torch.tensor([sample.ids for sample in made.draw(None, 0, NO_PROGRESS)])
    begin = torch.full((len(ids_BL), 1), run.tokenizer.mask_id)
    with torch.no_grad():
        logits = run.model(
            torch.cat([begin, ids_BL[:, :-1]], dim=1),
            torch.arange(ids_BL.numel()),
            positions=torch.arange(16),
            target_positions=torch.arange(1, 17),
        ).double()
    law = torch.distributions.Categorical(logits=logits)
    nll = -law.log_prob(ids_BL.flatten())
    error = float((nll - law.entropy()).std()) / math.sqrt(len(nll))
    assert float(nll.mean()) == pytest.approx(float(law.entropy().mean()), abs=4 * error)
    assert error < 0.03
    is_text = [bool((row < 128).all()) for row in ids_BL]
    texts = [bytes(row.tolist()).decode() for row, good in zip(ids_BL, is_text) if good]
    assert len(texts) > 50
    plain = replace(made, draw=lambda *_: [TextSample([text], [1, 2]) for text in texts])
    (record,) = measure(
        [plain], ArmRun(run, context=1024), GenerativeRequest(num=len(texts)), tmp_path
    )
    expected = float(nll.view(ids_BL.shape)[is_text].mean())
    found = math.log(record["settings"][0]["mean"]["perplexity"])
    assert found == pytest.approx(expected, rel=1e-5)


def test_guidance_of_a_causal_lm_leaves_the_first_position_where_it_was():
    seen = []

    class Model:
        first_maskable = 1

        def __call__(self, x_BL, rows_N, **_):
            seen.append(x_BL)
            return torch.zeros(len(rows_N), 9)

    network = SamplingDenoiser(Model(), 9, guidance=1.0)
    canvas = torch.tensor([[4, 5, 9, 9]])
    network.begin(canvas)
    network.logits(canvas, canvas == 9, torch.ones(1))
    assert seen[0].tolist() == [[4, 5, 9, 9], [4, 9, 9, 9]]
