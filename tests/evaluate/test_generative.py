"""Generative perplexity: closed forms, a martingale, and what must be reused or made again."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import numpy as np
import pytest
from continuation_tools import with_data
from counted_progress import Counted

from bellmask import load
from bellmask.data.tokenizers import ByteTokenizer
from bellmask.evaluate.generative import (
    GenerativeOptions,
    Subject,
    TextSample,
    cut_row,
    diversity,
    measure,
    measure_cell,
    run_subject,
    text_subject,
    unigram_entropy,
)
from bellmask.evaluate.scorer import TextScore
from bellmask.generate.settings import Sampling
from bellmask.utils.distributed import World
from bellmask.utils.errors import UserError
from bellmask.utils.progress import NO_PROGRESS


def options(**more):
    return GenerativeOptions(models=(), **more)


def test_diversity_of_known_frequencies():
    assert unigram_entropy([7] * 9) == 0 == unigram_entropy([])
    # halves and quarters: 1/2 ln 2 + 2 * 1/4 ln 4
    assert unigram_entropy([1, 1, 5, 9]) == pytest.approx(1.5 * math.log(2))
    assert diversity([[1], []]) == {
        "distinct_1": 1, "distinct_2": None, "distinct_3": None, "repetition": None
    }  # fmt: skip
    assert diversity([[1, 2, 3, 4, 5, 1, 2, 3, 4]])["repetition"] == pytest.approx(1 / 6)
    assert diversity([[1, 2, 3, 9, 1, 2, 3, 8]])["repetition"] == 0, "three are not enough"
    assert diversity([[5] * 13, list(range(20)), [1, 2]]) == {
        "distinct_1": pytest.approx(20 / 35),
        "distinct_2": pytest.approx(20 / 32),  # (1 2) is in two samples
        "distinct_3": pytest.approx(19 / 29),
        "repetition": pytest.approx((0.9 + 0) / 2),  # of the samples that have any fours
    }


# cells


class LetterScorer:
    """A letter is worth as many nats as its place in the alphabet; spaces are no tokens."""

    name, fingerprint, context, rule = "letters", "letters-1", 64, "by hand"
    calls = 0

    def score(self, samples, progress=NO_PROGRESS):
        self.calls += 1
        progress.advance(len(samples))
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
    quarter = -(0.75 * math.log(0.75) + 0.25 * math.log(0.25))
    found = measure_cell(samples, LetterScorer(), NO_PROGRESS)
    assert found == {
        "perplexity": pytest.approx(math.exp((1 + 2 + 3 + 3 + 3) / 5)),
        "entropy": pytest.approx((quarter + math.log(2)) / 2),  # of the run's own tokens
        "distinct_1": pytest.approx(3 / 5),
        "distinct_2": pytest.approx(2 / 3),
        "distinct_3": 1,
        "repetition": None,  # no sample has four tokens
        "length": 2.5,
        "calls": 3.5,
        "samples": 4,
        "left_out": 2,
        "cut": 0,
        "nll": [3, 9, 0, 0],
        "counted_tokens": [2, 3, 0, 0],
    }
    nothing = measure_cell(samples[2:], LetterScorer(), NO_PROGRESS)
    assert nothing["perplexity"] is nothing["entropy"] is nothing["length"] is None
    broken = LetterScorer()
    broken.score = lambda *_, **__: [TextScore(math.nan, 2, [1, 2], False)]
    with pytest.raises(UserError, match="letters"):
        measure_cell(samples[:1], broken, NO_PROGRESS)


def subject(drawn, **changes):
    def draw(nfe, seed, progress):
        drawn.append((nfe, seed))
        progress.advance(2)
        first = TextSample(["abc"[seed:] + "d"], [seed, 1], float(nfe))
        return [first, TextSample(["dd"], [1, 2])]

    return replace(Subject("bell", "key", {"run": "b"}, [4, 8], [0, 1], 2, draw), **changes)


def test_mean_and_deviation_over_seeds_and_what_is_there_is_not_made_again(tmp_path):
    drawn, scorer, progress = [], LetterScorer(), Counted()
    first = measure([subject(drawn)], scorer, tmp_path, progress)
    assert (progress.totals, progress.done) == ([8], 8)
    each = [math.exp((1 + 2 + 3 + 4 + 8) / 6), math.exp((2 + 3 + 4 + 8) / 5)]
    for setting, nfe in zip(first[0]["settings"], (4, 8)):
        assert setting["nfe"] == setting["mean"]["calls"] == nfe
        assert [cell["perplexity"] for cell in setting["cells"]] == pytest.approx(each)
        assert setting["mean"]["perplexity"] == pytest.approx(sum(each) / 2)
        assert setting["sd"]["perplexity"] == pytest.approx(abs(each[0] - each[1]) / math.sqrt(2))
    assert len(drawn) == scorer.calls == 4
    again = Counted()
    assert measure([subject(drawn)], scorer, tmp_path, again) == first
    assert (len(drawn), scorer.calls, again.done) == (4, 4, 8), "all reused"
    other = LetterScorer()
    other.fingerprint = "letters-2"
    measure([subject(drawn)], other, tmp_path)
    assert (len(drawn), other.calls) == (4, 4), "the samples serve another scorer"
    measure([subject(drawn, key="other weights")], scorer, tmp_path)
    assert len(drawn) == 8
    measure([subject(drawn, seeds=[0, 1, 2])], scorer, tmp_path)
    assert len(drawn) == 10, "only the new seed"
    (alone,) = measure([subject([], seeds=[0])], scorer, tmp_path)
    assert set(alone["settings"][0]["sd"].values()) == {None}


def test_lost_and_changed_samples_are_noticed(tmp_path):
    drawn, scorer, path = [], LetterScorer(), tmp_path / "samples.jsonl"
    first = measure([subject(drawn)], scorer, tmp_path)
    lines = path.read_text().splitlines(keepends=True)
    assert [json.loads(line)["documents"] for line in lines[:2]] == [["abcd"], ["dd"]]
    path.write_text("".join(lines[1:]))
    assert measure([subject(drawn)], scorer, tmp_path) == first
    assert drawn[4:] == [(4, 0)]
    path.write_text("".join(lines).replace("abcd", "zz", 1))
    again = measure([subject(drawn)], scorer, tmp_path)
    cell = again[0]["settings"][0]["cells"][0]
    assert cell["perplexity"] == pytest.approx(math.exp((26 + 26 + 4 + 4) / 4))
    path.write_text('{"key": "a", "documents": 1, "ids": [2], "calls": 1}\n')
    with pytest.raises(UserError, match="line 1"):
        measure([subject(drawn)], scorer, tmp_path)


# runs


def test_rows_become_documents(zoo):
    eos, bos = ByteTokenizer.eos_id, ByteTokenizer.bos_id
    row = np.array([bos, *b"ab", eos, *b"c", eos], dtype=np.int64)
    packed = load(zoo / "bell")
    wrapped, single = with_data(packed, wrap=True), with_data(packed, packing="unpacked")
    assert cut_row(packed, row[1:]).documents == ["ab", "c", ""]
    sample = cut_row(wrapped, row)
    assert sample.documents == ["ab", "c", ""]
    assert sample.ids == row.tolist(), "the entropy is that of the whole row"
    assert cut_row(single, row[1:]) == TextSample(["ab"], [*b"ab"])
    assert cut_row(single, np.array([eos, *b"ab"])).documents == [""]
    assert cut_row(packed, np.array([], dtype=np.int64)).documents == [""]


def test_real_text_is_the_validation_blocks_in_groups(zoo):
    run = load(zoo / "bell")
    _, valid = run.blocks()
    text = text_subject(run, options(num=len(valid) // 3, seeds=4, length=9))
    assert text.seeds == [0, 1, 2], "as many groups as the text has"
    groups = [text.draw(None, group, NO_PROGRESS) for group in text.seeds]
    assert [len(group) for group in groups] == [text.num] * 3 == [len(valid) // 3] * 3
    rows_seen = sorted(tuple(sample.ids) for group in groups for sample in group)
    spread = valid.spread(3 * text.num)
    assert rows_seen == sorted(tuple(row[:9]) for row in spread.rows(slice(None)).tolist())
    assert {sample.calls for group in groups for sample in group} == {None}
    whole = text_subject(run, options(num=10**6))
    assert len(whole.draw(None, 0, NO_PROGRESS)) == whole.num == len(valid)


def test_where_there_is_no_nfe_to_choose(zoo):
    first = options(num=2, sampling=Sampling(rule="first_hitting", temperature=0.5))
    for name in ("bell", "arm"):
        made = run_subject(name, load(zoo / name), first, World())
        assert made.settings == [None]
        assert made.draw(None, 0, NO_PROGRESS)[0].calls == 16
    with pytest.raises(UserError, match="--length 20"):
        run_subject("sigma", load(zoo / "sigma_arm"), options(num=1, length=20), World())


def test_other_options_have_other_keys(zoo):
    def key(run, **more):
        return run_subject("bell", run, options(**{"num": 2, **more}), World()).key

    run = load(zoo / "bell")
    changes = [{"num": 3}, {"length": 8}, {"sampling": Sampling(temperature=0.9)}, {"num": 2}]
    keys = {key(run, **more) for more in changes}
    keys |= {key(load(zoo / "base")), key(with_data(run, wrap=True))}
    assert len(keys) == 6
    assert key(run, batch_size=1, scorer_batch_size=1, seed=9) in keys
