"""Exact match: fakes that know all, nothing or half; errors and pairs against plain arithmetic."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from counted_progress import Counted
from example_tools import encode_example
from sampling_tools import SAMPLINGS, awake

from bellmask.config.presets import tiny
from bellmask.data.blocks import Blocks
from bellmask.data.chat_templates import Example, Template
from bellmask.data.examples import ExampleRules
from bellmask.data.tokenizers import ByteTokenizer
from bellmask.diffusion.frameworks import Mdm
from bellmask.evaluate.exact_match import ExactMatch, Exam
from bellmask.generate.settings import Sampling
from bellmask.run import Run

BYTES = ByteTokenizer()
BLOCK = 48
PAIRS = [
    ("Say a\nAnswer:", "Abc"),
    ("Say b, please\nAnswer:", "x y  zz"),
    ("Say c\nAnswer:", "a rather long answer"),
    ("Say d\nAnswer:", "q"),
]


def rows_of(pairs, *, block=BLOCK, round_to=8):
    rules = ExampleRules(block, round_to)
    return Blocks.from_rows(
        [
            encode_example(Example.plain(*pair), BYTES, Template(), rules, number)
            for number, pair in enumerate(pairs)
        ]
    )


class Writer:
    """Sure of the text that ``says`` gives for a prompt, then of EOS; notes what it was shown."""

    first_maskable = 0

    def __init__(self, says, sureness=1e4):
        self.says, self.sureness, self.widths = says, sureness, []

    def __call__(self, x_BL, rows_N, *, t_B, mask):
        batch, length = x_BL.shape
        self.widths.append((batch, length))
        wanted_BL = torch.full((batch, length), BYTES.eos_id)
        for row, ids_L in enumerate(x_BL.tolist()):
            text, start = self.answer(ids_L)
            ids = BYTES.encode(" " + text)[: length - start]
            wanted_BL[row, start : start + len(ids)] = torch.from_numpy(ids)
        one_hot = torch.nn.functional.one_hot(wanted_BL.flatten()[rows_N], BYTES.num_tokens)
        return self.sureness * one_hot.float()

    def answer(self, ids_L):
        """(what it writes, where); the prompt ends with a colon."""
        start = ids_L.index(ord(":")) + 1
        return self.says[BYTES.decode(np.array(ids_L[:start]))], start


def run_with(model):
    return Run(Path("nowhere"), tiny(), 1, BYTES, model, Mdm(), torch.device("cpu"))


TRUTH = dict(PAIRS)


def exam(length, sampling=None, pairs=PAIRS, **more):
    return Exam(rows_of(pairs), BYTES, length, sampling or Sampling(), (), **more)


def answers_of(says, *, length=24, sampling=None, seeds=(0,)):
    """Of a model that is sure of what it says, to PAIRS."""
    run, asked = run_with(Writer(says)), exam(length, sampling)
    answers = [asked.ask(run, seed) for seed in seeds]
    # no batch is wider than the rows
    assert {width for _, width in run.model.widths} <= {32, BLOCK}
    return asked.grade(answers)


@pytest.mark.parametrize(("length", "rule"), [(21, "ancestral"), (24, "most_confident")])
def test_who_knows_the_answers_has_one(length, rule):
    found = answers_of(TRUTH, length=length, sampling=Sampling(rule), seeds=(0, 7))
    assert found.expected == tuple(answer for _, answer in PAIRS)
    assert found.answers == (found.expected,) * 2
    assert (found.share, found.seed_shares, found.seed_deviation) == (1, [1, 1], 0)
    assert found.standard_error == 0


def test_white_space_at_the_ends_does_not_count_and_what_does_not_fit_is_wrong():
    says = {**TRUTH, "Say a\nAnswer:": "  Abc\n", "Say b, please\nAnswer:": "x y z"}
    assert answers_of(says).is_right_SB.tolist() == [[True, False, True, True]]
    found = answers_of(TRUTH, length=8)
    assert found.is_right_SB.tolist() == [[True, True, False, True]]
    assert found.answers[0][2] == "a rathe"
    spaced = exam(8, pairs=[("P\nAnswer:", "  ends with space ")])
    assert spaced.grade([]).expected == ("ends with space",)


def test_gaps_have_one_length_and_a_long_prompt_loses_its_oldest_tokens():
    run = run_with(Writer(TRUTH))
    fixed = exam(24).canvases(run)
    assert [int((row == BYTES.mask_id).sum()) for row in fixed] == [24] * 4
    for canvas, (prompt, _) in zip(fixed, PAIRS):
        assert BYTES.decode(canvas[canvas != BYTES.mask_id].numpy()) == prompt
    for first, shown in ((0, list(b"nswer:")), (1, [BYTES.bos_id, *b"swer:"])):
        run.model.first_maskable = first
        (canvas,) = exam(BLOCK - 6, pairs=PAIRS[1:2]).canvases(run)
        assert canvas.tolist() == shown + [BYTES.mask_id] * (BLOCK - 6)


@pytest.fixture(scope="module")
def unsure():
    """A run of random weights: what it writes depends on all it sees."""
    return run_with(awake(num_tokens=BYTES.num_tokens, std=1.0))


@pytest.mark.parametrize(
    "sampling",
    [
        *(SAMPLINGS[::3]),
        *(pytest.param(one, marks=pytest.mark.long) for one in SAMPLINGS),
    ],
)
def test_no_answer_depends_on_its_batch(unsure, sampling):
    asked, progress = exam(24, sampling, PAIRS * 2), Counted()
    whole = asked.ask(unsure, 3)
    assert len(set(whole)) > 4  # it is unsure
    assert replace(asked, batch_size=3).ask(unsure, 3, progress) == whole
    assert progress.done == 8
    assert exam(24, sampling, PAIRS[:2]).ask(unsure, 3) == whole[:2]
    assert asked.ask(unsure, 4) != whole


ANSWERS = (("a", "b", "x", "d"), ("a", "x", "x", "d"), ("a", "b", "x", "x"))
MINE = ExactMatch(("a", "b", "c", "d"), ANSWERS, (0, 1, 2, 3), "f")


def test_views_are_plain_arithmetic():
    one = ExactMatch(("a",), (("a",),), (0,))
    assert one.share == 1
    assert math.isnan(one.standard_error)
    assert math.isnan(one.seed_deviation)
    assert MINE.share_B.tolist() == pytest.approx([1, 2 / 3, 0, 2 / 3])
    assert MINE.seed_shares == [0.75, 0.5, 0.5]
    assert MINE.share == pytest.approx(7 / 12)
    mean = 7 / 12
    assert MINE.seed_deviation == pytest.approx(
        math.sqrt(((0.75 - mean) ** 2 + 2 * (0.5 - mean) ** 2) / 2)
    )
    squares = sum((value - mean) ** 2 for value in (1, 2 / 3, 0, 2 / 3))
    assert MINE.standard_error == pytest.approx(math.sqrt(squares / 3) / 2)


def test_differences_are_paired_by_example():
    other = replace(MINE, answers=(("a", "x", "c", "x"),))
    value, error = MINE.difference(other)
    each = [0, 2 / 3, -1, 2 / 3]
    assert value == pytest.approx(sum(each) / 4)
    assert error == pytest.approx(np.std(each, ddof=1) / 2)
    for stranger in (replace(MINE, fingerprint="g"), replace(MINE, expected=("a", "b", "c", "e"))):
        with pytest.raises(ValueError, match="the same examples"):
            MINE.difference(stranger)
