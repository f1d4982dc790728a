"""Loss by context count against enumeration and hand-made losses; drops and errors by hand."""

from __future__ import annotations

import json
import math
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch
from changed_runs import change_run
from counted_progress import Counted
from plain_entropy import plain_entropy
from sampling_tools import seeded
from toy_tools import sample, toy_rows

from bellmask.analyze.context import CONTEXT_DROP, DropOptions, context_bins, losses_by_bin
from bellmask.data.blocks import Blocks, Row
from bellmask.data.toys import ExactDenoiser, ToySource
from bellmask.diffusion.frameworks import Mdm, any_order, arm, sigma_arm
from bellmask.evaluate.likelihood import BlockScorer
from bellmask.run import load_run
from bellmask.utils.errors import UserError

MASK, PAD = 50, 49
UNEVEN = ToySource.markov(
    torch.tensor([0.7, 0.2, 0.1], dtype=torch.float64),
    torch.tensor([[0.8, 0.1, 0.1], [0.05, 0.15, 0.8], [0.3, 0.6, 0.1]], dtype=torch.float64),
    length=5,
)
"""Not stationary and not reversible: every place and both sides differ."""


def rows_of(rows, lengths):
    return Blocks.from_rows(
        Row(np.asarray(row), n, b) for b, (row, n) in enumerate(zip(rows, lengths, strict=True))
    )


def masks_as_loss(x_BL, rows_N, targets_N, **_):
    """A model whose loss is the number of masks in the row."""
    return (x_BL == MASK).sum(1).double()[rows_N // x_BL.shape[1]]


@pytest.mark.parametrize("length", [1, 2, 5, 16, 37])
def test_bins_hold_every_context_once_and_none_alone(length):
    for num_bins in (1, 2, 3, 7, 200):
        bins = context_bins(length, num_bins)
        assert bins[0] == (0, 0)
        assert [n for low, high in bins for n in range(low, high + 1)] == list(range(length))
        assert len(bins) == 1 + min(num_bins, length - 1)
        sizes = {high - low + 1 for low, high in bins[1:]}
        assert not sizes or max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize("framework", [Mdm(), any_order()], ids=["mdm", "aoarm"])
def test_the_exact_models_loss_in_a_bin_is_the_mean_entropy_of_its_contexts(framework):
    truth = plain_entropy(UNEVEN).numpy()
    bins = [(0, 0), (1, 2), (3, 4), (1, 4)]
    exact = ExactDenoiser(UNEVEN, is_causal=framework.is_causal)
    scorer = BlockScorer(exact, toy_rows(UNEVEN, 8000, seeded(1)), 3, framework)
    values = losses_by_bin(scorer, bins, seed=5, batch_size=4000)
    for value, (low, high) in zip(values, bins):
        error = value.std() / math.sqrt(len(value))
        assert abs(value.mean() - truth[low : high + 1].mean()) < 4 * error
        assert error < 0.01
    in_other_batches = losses_by_bin(scorer, bins, seed=5, batch_size=3001)
    np.testing.assert_allclose(in_other_batches, values, rtol=1e-12)


def test_a_short_block_is_asked_what_it_can_be_and_left_out_beyond():
    """Lengths 1, 3, 8: the contexts of a bin end at L_b - 1."""
    lengths = [1, 3, 8] * 200
    rows = [[0] * n + [PAD] * (8 - n) for n in lengths]
    scorer = BlockScorer(masks_as_loss, rows_of(rows, lengths), MASK)
    values = losses_by_bin(scorer, [(0, 0), (1, 4), (5, 7)], seed=3, batch_size=64)
    expected = {1: [{0}, set(), set()], 3: [{0}, {1, 2}, set()], 8: [{0}, {1, 2, 3, 4}, {5, 6, 7}]}
    for start, (length, contexts) in enumerate(expected.items()):
        found = [value[~np.isnan(value)] for value in values[:, start::3]]
        assert [set((length - value).tolist()) for value in found] == contexts
        assert all(len(value) in (0, 200) for value in found)


def chain_rule(source, x_L, order):
    """-log p of each symbol given those before it in the order, from marginals of whole rows."""
    seen, total, found = torch.full((1, len(x_L)), source.num_tokens), 0.0, []
    for place in order:
        seen[0, place] = x_L[place]
        now = float(source.log_probability(seen))
        found.append(total - now)
        total = now
    return found


@pytest.mark.parametrize("order", [(0, 1, 2, 3, 4), (3, 0, 4, 2, 1)], ids=["arm", "sigma"])
def test_a_causal_bin_is_the_mean_of_its_slots(order):
    """Blocks of 1 to 5 tokens: pads come last and a bin has only what a block has."""
    x_BL = sample(UNEVEN, 40, seeded(2))
    lengths = [1 + b % 5 for b in range(40)]
    padded = torch.where(torch.arange(5) < torch.tensor(lengths)[:, None], x_BL, 0)
    bins = [(0, 0), (1, 2), (3, 4)]
    framework = arm(5) if order == (0, 1, 2, 3, 4) else sigma_arm(torch.tensor(order))
    exact = ExactDenoiser(UNEVEN, is_causal=True)
    scorer = BlockScorer(exact, rows_of(padded.numpy(), lengths), 3, framework)
    values = losses_by_bin(scorer, bins, seed=0, batch_size=16)
    for x_L, length, value in zip(x_BL, lengths, values.T):
        slots = chain_rule(UNEVEN, x_L, [place for place in order if place < length])
        for (low, high), found in zip(bins, value):
            mine = slots[low : high + 1]
            truth = sum(mine) / len(mine) if mine else math.nan
            assert found == pytest.approx(truth, abs=1e-12, nan_ok=True)


def by_hand(folder, step, bins, count):
    """(losses [C, B], documents [B]) of a run on rows spread over the text."""
    run = load_run(folder, checkpoint=str(step))
    valid = run.blocks()[1]
    places = [round(number * (len(valid) - 1) / (count - 1)) for number in range(count)]
    tokens, length = valid.rows(torch.tensor(places)).numpy(), valid.lengths[places]
    blocks = Blocks(tokens, length, valid.documents[places], "by hand")
    return losses_by_bin(run.scorer(blocks), bins, 1234, 64), blocks.documents


def between_documents(value, document):
    """The error of a mean over documents: residuals added up within each, then squared."""
    sums = [
        sum(v - value.mean() for v, d in zip(value, document) if d == number)
        for number in set(document.tolist())
    ]
    scale = len(sums) / (len(sums) - 1)
    return math.sqrt(scale * sum(s * s for s in sums)) / len(value)


BINS = [(0, 0), (1, 5), (6, 10), (11, 15)]


def test_a_drop_is_the_paired_difference_of_two_stages(zoo, tmp_path):
    """The rise: what the upper half of the bins learned until the end, less what N_c = 0 did.

    Documents are lines, which span blocks: errors are clustered. The last checkpoint is another's.
    """
    folder = change_run(zoo / "steps", tmp_path / "steps", {"data.documents": "line"})
    last = zoo / "base/checkpoints/step-000000060"
    shutil.copytree(last, folder / "checkpoints/step-000000090")
    progress = Counted()
    options = DropOptions(runs=(str(folder),), bins=3, blocks=40)
    with pytest.raises(UserError, match=r"needs two --checkpoints; of .*steps \[30\] are chosen"):
        CONTEXT_DROP.measure(replace(options, checkpoints=(30,)), progress)
    found = CONTEXT_DROP.measure(options, progress)
    assert (progress.totals, progress.done) == ([3], 3)
    assert json.loads(json.dumps(found, allow_nan=False)) == found
    (run,) = found["runs"]
    steps = [stage["step"] for stage in run["stages"]]
    assert (found["blocks"], found["block_length"], steps) == (40, 16, [30, 60, 90])
    values, (document, *_) = zip(*(by_hand(folder, step, BINS, 40) for step in steps))
    assert found["documents"] == len(set(document.tolist())) < 30

    def check(points, value_CB):
        assert [(point["low"], point["high"]) for point in points] == BINS
        for point, value in zip(points, value_CB, strict=True):
            assert point["value"] == pytest.approx(value.mean(), abs=1e-9)
            assert point["se"] == pytest.approx(between_documents(value, document), rel=1e-6)

    for number, (stage, value) in enumerate(zip(run["stages"], values, strict=True)):
        check(stage["nll"], value)
        if number:
            check(stage["drop"], values[number - 1] - value)
        if number < 2:
            later = value - values[2]
            check(stage["to_last"], later)
            rise = (later[2] + later[3]) / 2 - later[0]
            assert stage["rise"]["value"] == pytest.approx(rise.mean(), abs=1e-9)
            assert stage["rise"]["se"] == pytest.approx(between_documents(rise, document), rel=1e-6)
    assert ("drop" in run["stages"][0], "rise" in run["stages"][2]) == (False, False)
    (table,) = CONTEXT_DROP.tables(found)
    assert table.columns[1:] == ["30 to 60", "60 to 90"]
