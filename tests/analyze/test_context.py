"""Loss by context count against enumeration and hand-made losses; drops and errors by hand."""

import json
import math

import numpy as np
import pytest
import torch

from bellmask.analyze.context import (
    CONTEXT_CURVE,
    CONTEXT_DROP,
    CurveOptions,
    DropOptions,
    context_bins,
    losses_by_bin,
)
from bellmask.analyze.entropy import enumerated_entropy
from bellmask.assemble import train_run
from bellmask.data.blocks import Blocks
from bellmask.data.packing import Row
from bellmask.data.toy import ExactDenoiser, ToySource
from bellmask.data.toy_corpora import NUM_ROWS
from bellmask.diffusion.orders import Ordered, any_order, arm, sigma_arm
from bellmask.errors import UserError
from bellmask.evaluate.likelihood import Scorer
from bellmask.model.transformer import Denoiser
from bellmask.run import load_run

MASK, PAD = 50, 49
UNEVEN = ToySource.markov(
    torch.tensor([0.7, 0.2, 0.1], dtype=torch.float64),
    torch.tensor([[0.8, 0.1, 0.1], [0.05, 0.15, 0.8], [0.3, 0.6, 0.1]], dtype=torch.float64),
    length=5,
)
"""Not stationary and not reversible: every place and both sides differ."""


def ignore(done, total):
    pass


def seeded(seed):
    return torch.Generator().manual_seed(seed)


def rows_of(rows, lengths):
    return Blocks.from_rows(
        Row(np.asarray(row), n, b) for b, (row, n) in enumerate(zip(rows, lengths, strict=True))
    )


def masks_as_loss(x_BL, rows_N, targets_N, **_):
    """A model whose loss is the number of masks in the row."""
    return (x_BL == MASK).sum(1).double()[rows_N // x_BL.shape[1]]


# bins


@pytest.mark.parametrize("num_bins", [1, 2, 3, 7, 16, 200])
@pytest.mark.parametrize("length", [1, 2, 3, 5, 16, 37, 128])
def test_bins_hold_every_context_once_and_none_alone(length, num_bins):
    bins = context_bins(length, num_bins)
    assert bins[0] == (0, 0)
    assert [n for low, high in bins for n in range(low, high + 1)] == list(range(length))
    assert len(bins) == 1 + min(num_bins, length - 1)
    sizes = {high - low + 1 for low, high in bins[1:]}
    assert not sizes or max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize("num_bins", [0, -3])
def test_no_bin_is_refused(num_bins):
    with pytest.raises(UserError, match=f"--bins must be at least 1, got {num_bins}"):
        context_bins(16, num_bins)


# losses


def test_the_exact_models_loss_in_a_bin_is_the_mean_entropy_of_its_contexts():
    truth = enumerated_entropy(UNEVEN).numpy()
    bins = [(0, 0), (1, 2), (3, 4), (1, 4)]
    scorer = Scorer(ExactDenoiser(UNEVEN), UNEVEN.blocks(8000, seeded(1)), 3)
    values = losses_by_bin(scorer, bins, seed=5, batch_size=4000)
    assert values.shape == (4, 8000)
    for value, (low, high) in zip(values, bins):
        error = value.std() / math.sqrt(len(value))
        assert abs(value.mean() - truth[low : high + 1].mean()) < 4 * error
        assert error < 0.01
    # the bins differ by more than the tolerance: a wrong bin would be seen
    assert truth[0] - truth[1:3].mean() > 0.1
    assert truth[1:3].mean() - truth[3:].mean() > 0.1


def test_every_context_of_a_bin_is_asked_alike():
    """The loss tells the number of masks, L - N_c: 4000 blocks, 3 or 4 contexts in a bin."""
    blocks = rows_of(np.zeros((4000, 8), dtype=np.int64), [8] * 4000)
    bins = [(0, 0), (1, 3), (4, 7)]
    values = losses_by_bin(Scorer(masks_as_loss, blocks, MASK), bins, seed=1, batch_size=1000)
    for value, (low, high) in zip(values, bins):
        found, counts = np.unique(8 - value, return_counts=True)
        assert found.tolist() == list(range(low, high + 1))
        share = 1 / (high - low + 1)
        spread = math.sqrt(4000 * share * (1 - share))
        assert np.abs(counts - 4000 * share).max() <= 4 * spread


def test_a_short_block_is_asked_what_it_can_be_and_left_out_beyond():
    """Lengths 1, 3, 8: the contexts of a bin end at L_b - 1."""
    lengths = [1, 3, 8] * 200
    rows = [[0] * n + [PAD] * (8 - n) for n in lengths]
    bins = [(0, 0), (1, 4), (5, 7)]
    scorer = Scorer(masks_as_loss, rows_of(rows, lengths), MASK)
    values = losses_by_bin(scorer, bins, seed=3, batch_size=64)
    for start, length in enumerate((1, 3, 8)):
        for value, (low, high) in zip(values[:, start::3], bins):
            if length <= low:
                assert np.isnan(value).all()
            else:
                expected = set(range(low, min(high, length - 1) + 1))
                assert set((length - value).tolist()) == expected


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
    x_BL = UNEVEN.sample(40, seeded(2))
    lengths = [1 + b % 5 for b in range(40)]
    padded = torch.where(torch.arange(5) < torch.tensor(lengths)[:, None], x_BL, 0)
    bins = [(0, 0), (1, 2), (3, 4)]
    framework = arm(5) if order == (0, 1, 2, 3, 4) else sigma_arm(torch.tensor(order))
    exact = ExactDenoiser(UNEVEN, is_causal=True)
    scorer = Scorer(exact, rows_of(padded.numpy(), lengths), 3, framework)
    values = losses_by_bin(scorer, bins, seed=0, batch_size=16)
    for x_L, length, value in zip(x_BL, lengths, values.T):
        slots = chain_rule(UNEVEN, x_L, [place for place in order if place < length])
        for (low, high), found in zip(bins, value):
            mine = slots[low : high + 1]
            if mine:
                assert found == pytest.approx(sum(mine) / len(mine), abs=1e-12)
            else:
                assert math.isnan(found)


def test_random_orders_have_the_entropies_of_masked_rows():
    truth = enumerated_entropy(UNEVEN).numpy()
    exact = ExactDenoiser(UNEVEN, is_causal=True)
    scorer = Scorer(exact, UNEVEN.blocks(3000, seeded(4)), 3, any_order())
    bins = [(0, 0), (1, 2), (3, 4)]
    for value, (low, high) in zip(losses_by_bin(scorer, bins, 1, 1000), bins):
        error = value.std() / math.sqrt(len(value))
        assert abs(value.mean() - truth[low : high + 1].mean()) < 4 * error


@pytest.mark.parametrize("framework", [None, Ordered(None)], ids=["mdm", "aoarm"])
def test_contexts_depend_on_the_seed_and_the_block_alone(framework):
    """Not on the batch; other seeds bring other ones."""
    exact = ExactDenoiser(UNEVEN, is_causal=framework is not None)
    scorer = Scorer(exact, UNEVEN.blocks(50, seeded(6)), 3, framework)
    bins = context_bins(5, 2)
    whole = losses_by_bin(scorer, bins, seed=1, batch_size=64)
    np.testing.assert_allclose(losses_by_bin(scorer, bins, 1, batch_size=7), whole, rtol=1e-12)
    assert not np.allclose(losses_by_bin(scorer, bins, 2, batch_size=64), whole)


# runs


@pytest.fixture(scope="module")
def runs(small_config, tmp_path_factory):
    """Masked and causal runs with two checkpoints (base: three), and one on padded rows.

    Documents are lines, which span blocks: errors are clustered.
    """
    folder = tmp_path_factory.mktemp("runs")
    common = "--data.documents line --train.steps 6 --checkpoint.keep-steps 2 6".split()
    options = {
        "bell": [],
        "base": ["4", "--objective", "nelbo", "--law", "uniform"],
        "arm": ["--framework", "arm"],
        "other": ["--data.packing", "unpacked", "--data.block-length", "40"],
    }
    for name, more in options.items():
        train_run(small_config(*common, *more), folder / name, is_quiet=True)
    return folder


def measured(analysis, runs, *names, **more):
    kind = CurveOptions if analysis is CONTEXT_CURVE else DropOptions
    options = kind(tuple(str(runs / name) for name in names), **{"bins": 3, "blocks": 150, **more})
    return analysis.measure(options, ignore)


def by_hand(folder, step, bins, count):
    """(losses [C, B], documents [B], lengths [B]) of a run on rows spread over the text."""
    run = load_run(folder, checkpoint=str(step))
    valid = run.blocks()[1]
    places = [round(number * (len(valid) - 1) / (count - 1)) for number in range(count)]
    tokens, length = valid.rows(torch.tensor(places)).numpy(), valid.lengths[places]
    blocks = Blocks(tokens, length, valid.documents[places], "by hand")
    return losses_by_bin(run.scorer(blocks), bins, 1234, 64), blocks.documents, length


def between_documents(value, document):
    """The error of a mean over documents: residuals added up within each, then squared."""
    sums = [
        sum(v - value.mean() for v, d in zip(value, document) if d == number)
        for number in set(document.tolist())
    ]
    scale = len(sums) / (len(sums) - 1)
    return math.sqrt(scale * sum(s * s for s in sums)) / len(value)


def is_plain_json(found):
    return json.loads(json.dumps(found, allow_nan=False)) == found


def test_a_drop_is_the_paired_difference_of_two_stages(runs):
    found = measured(CONTEXT_DROP, runs, "bell", "arm")
    assert is_plain_json(found)
    bins = [(0, 0), (1, 5), (6, 10), (11, 15)]
    assert [run["name"] for run in found["runs"]] == ["bell", "arm"]
    assert [run["is_exact"] for run in found["runs"]] == [False, True]
    assert (found["blocks"], found["block_length"]) == (150, 16)
    _, document, _ = by_hand(runs / "bell", 2, bins, 150)
    assert found["documents"] == len(set(document.tolist()))
    for run in found["runs"]:
        first, last = run["stages"]
        assert ([first["step"], last["step"]], "drop" in first) == ([2, 6], False)
        before, document, _ = by_hand(runs / run["run"], 2, bins, 150)
        after, _, _ = by_hand(runs / run["run"], 6, bins, 150)
        assert 20 < len(set(document.tolist())) < 150
        for number, point in enumerate(last["drop"]):
            difference = before[number] - after[number]
            assert (point["low"], point["high"]) == bins[number]
            assert point["value"] == pytest.approx(difference.mean(), abs=1e-9)
            assert point["se"] == pytest.approx(between_documents(difference, document), rel=1e-6)
            values = [stage["nll"][number]["value"] for stage in (first, last)]
            assert point["value"] == pytest.approx(values[0] - values[1], abs=1e-9)
            assert values == pytest.approx([before[number].mean(), after[number].mean()])
            errors = [stage["nll"][number]["se"] for stage in (first, last)]
            assert errors[0] == pytest.approx(between_documents(before[number], document), rel=1e-6)
            assert 0 < point["se"] < 0.9 * math.hypot(*errors)


def test_what_was_learned_until_the_last_checkpoint_and_where(runs):
    """The rise: what the upper half of the bins learned, less what N_c = 0 did."""
    stages = measured(CONTEXT_DROP, runs, "base")["runs"][0]["stages"]
    assert [stage["step"] for stage in stages] == [2, 4, 6]
    bins = [(0, 0), (1, 5), (6, 10), (11, 15)]
    last, document, _ = by_hand(runs / "base", 6, bins, 150)
    for stage in stages[:2]:
        later = by_hand(runs / "base", stage["step"], bins, 150)[0] - last
        found = [point["value"] for point in stage["to_last"]]
        assert found == pytest.approx(later.mean(1).tolist(), abs=1e-9)
        rise = (later[2] + later[3]) / 2 - later[0]
        assert stage["rise"]["value"] == pytest.approx(rise.mean(), abs=1e-9)
        assert stage["rise"]["se"] == pytest.approx(between_documents(rise, document), rel=1e-6)
    assert "to_last" not in stages[2]
    assert "rise" not in stages[2]


def test_tokens_count_alike_in_blocks_of_different_lengths(runs):
    """Lines of 20 to 60 bytes in blocks of 40; the error by the delta method."""
    found = measured(CONTEXT_CURVE, runs, "other", blocks=40)
    bins = [(0, 0), (1, 13), (14, 26), (27, 39)]
    values, _, length = by_hand(runs / "other", 6, bins, 40)
    assert length.min() < 30 < 40 == length.max()
    for point, value in zip(found["runs"][0]["stages"][0]["nll"], values, strict=True):
        there = ~np.isnan(value)
        weight, count = length[there] / length[there].sum(), there.sum()
        mean = (weight * value[there]).sum()
        assert point["value"] == pytest.approx(mean, abs=1e-9)
        residual = count * weight * (value[there] - mean)
        assert point["se"] == pytest.approx(residual.std(ddof=1) / math.sqrt(count), rel=1e-6)
    assert count < 40


def test_blocks_that_are_documents_are_not_clustered(small_config, tmp_path, monkeypatch):
    for split in ("train", "valid"):
        monkeypatch.setitem(NUM_ROWS, split, 64)
    toy = "--data.train toy:sticky --data.tokenizer symbols:8 --train.steps 2".split()
    train_run(small_config(*toy), tmp_path / "toy", is_quiet=True)
    found = measured(CONTEXT_CURVE, tmp_path, "toy", blocks=0)
    assert found["blocks"] == 64
    bins = [(0, 0), (1, 5), (6, 10), (11, 15)]
    values, _, _ = by_hand(tmp_path / "toy", 2, bins, 64)
    points = found["runs"][0]["stages"][0]["nll"]
    expected = values.std(axis=1, ddof=1) / 8
    assert [point["se"] for point in points] == pytest.approx(expected.tolist())


def test_all_masked_runs_and_checkpoints_see_the_same_contexts(runs, monkeypatch):
    seen, forward = {}, Denoiser.forward

    def recorded(self, x_BL, *args, **more):
        seen.setdefault(self, []).append(x_BL.clone())
        return forward(self, x_BL, *args, **more)

    monkeypatch.setattr(Denoiser, "forward", recorded)
    told = []
    options = DropOptions((str(runs / "bell"), str(runs / "base")), bins=3, blocks=70, seed=9)
    CONTEXT_DROP.measure(options, lambda *n: told.append(n))
    assert told == [(n, 5) for n in range(6)]
    assert len(seen) == 5
    first, *others = seen.values()
    assert len(first) == 4 * 2
    assert all(torch.equal(a, b) for mine in others for a, b in zip(first, mine, strict=True))
    seen.clear()
    measured(CONTEXT_CURVE, runs, "base", blocks=70, seed=10)
    (last,) = seen.values()
    assert not all(torch.equal(a, b) for a, b in zip(first, last, strict=True))


def test_a_curve_is_the_last_checkpoint_unless_another_is_asked_for(runs):
    for asked, step in (((6, 2), 6), ((2,), 2)):
        found = measured(CONTEXT_CURVE, runs, "bell", checkpoints=asked, blocks=30)
        (stage,) = found["runs"][0]["stages"]
        assert stage["step"] == step
        values, _, _ = by_hand(runs / "bell", step, [(0, 0)], 30)
        assert stage["nll"][0]["value"] == pytest.approx(values.mean(), abs=1e-9)


def test_both_references_are_there(runs):
    """Add-one smoothed counts, and each place's own with 100 counts of the unigram."""
    found = measured(CONTEXT_CURVE, runs, "bell", "arm")
    assert is_plain_json(found)
    train, valid = load_run(runs / "bell").blocks()
    train_x, valid_x = train.rows(slice(None)).numpy(), valid.rows(slice(None)).numpy()
    valid_x = valid_x[[round(n * (len(valid_x) - 1) / 149) for n in range(150)]]
    num_tokens = load_run(runs / "bell").tokenizer.num_tokens
    unigram = np.bincount(train_x.ravel(), minlength=num_tokens) + 1.0
    unigram /= unigram.sum()
    expected = -np.log(unigram[valid_x]).mean()
    assert found["unigram_cross_entropy"] == pytest.approx(expected, rel=1e-9)
    own = [np.bincount(column, minlength=num_tokens) + 100 * unigram for column in train_x.T]
    losses = [-np.log(p[x] / p.sum()) for p, x in zip(own, valid_x.T)]
    assert found["position_wise_cross_entropy"] == pytest.approx(np.mean(losses), rel=1e-9)
    curve, reference = CONTEXT_CURVE.tables(found)
    assert reference.rows == [
        ["unigram", f"{expected:.3f}"],
        ["position-wise", f"{np.mean(losses):.3f}"],
    ]
    assert curve.columns == ["observed tokens", "bell, step 6", "arm, step 6"]
    assert [row[0] for row in curve.rows] == ["0", "1-5", "6-10", "11-15"]
    point = found["runs"][1]["stages"][0]["nll"][2]
    assert curve.rows[2][2] == f"{point['value']:.3f} ± {point['se']:.3f}"
    axes = CONTEXT_CURVE.figure(found).axes[0]
    labels = axes.get_legend_handles_labels()[1]
    assert {"bell, step 6 (bound)", "arm, step 6 (exact)"} < set(labels)
    heights = [line.get_ydata()[0] for line in axes.lines if line.get_linestyle() in ("--", ":")]
    assert heights == pytest.approx([expected, np.mean(losses)])


def test_the_table_and_the_figure_of_drops_name_the_stages(runs):
    found = measured(CONTEXT_DROP, runs, "bell", "arm")
    bell, arm_table = CONTEXT_DROP.tables(found)
    assert bell.title.startswith("bell: fall of the NLL")
    assert arm_table.title.startswith("arm: ")
    assert bell.columns == ["observed tokens", "2 to 6"]
    point = found["runs"][0]["stages"][1]["drop"][0]
    assert bell.rows[0] == ["0", f"{point['value']:.3f} ± {point['se']:.3f}"]
    panels = CONTEXT_DROP.figure(found).axes
    assert [axes.get_title() for axes in panels] == ["bell", "arm"]
    assert panels[0].get_legend_handles_labels()[1] == ["step 2 to 6"]


@pytest.mark.parametrize(
    ("analysis", "names", "more", "words"),
    [
        (
            CONTEXT_DROP,
            ["bell"],
            {"checkpoints": (6,)},
            "a drop needs two or more --checkpoints",
        ),
        (
            CONTEXT_DROP,
            ["bell"],
            {"checkpoints": (2, 5)},
            r"no checkpoint at step 5; it has 2, 6 \(",
        ),
        (
            CONTEXT_CURVE,
            ["bell"],
            {"checkpoints": (3,)},
            r"no checkpoint at step 3; it has 2, 6 \(",
        ),
        (
            CONTEXT_CURVE,
            ["bell", "other"],
            {},
            "bell and .*other have different text or tokenizers",
        ),
        (CONTEXT_DROP, ["arm", "other"], {}, "different text or tokenizers"),
        (CONTEXT_CURVE, [], {}, "at least one run folder"),
        (CONTEXT_CURVE, ["none"], {}, "none is not a run folder: it has no config.json"),
        (CONTEXT_CURVE, ["bell"], {"blocks": -1}, "--blocks must be 0 or at least 2"),
        (CONTEXT_CURVE, ["bell"], {"batch_size": 0}, "--batch-size at least 1"),
        (CONTEXT_CURVE, ["bell"], {"bins": 0}, "--bins must be at least 1"),
    ],
    ids=lambda value: value if isinstance(value, str) else getattr(value, "name", ""),
)
def test_what_cannot_be_measured_is_refused(runs, analysis, names, more, words):
    with pytest.raises(UserError, match=words):
        measured(analysis, runs, *names, **more)


def test_a_run_without_checkpoints_is_refused(runs, tmp_path):
    for name in ("config.json", "run.json", "tokenizer.json"):
        (tmp_path / name).write_text((runs / "bell" / name).read_text())
    with pytest.raises(UserError, match="has no checkpoint"):
        measured(CONTEXT_CURVE, tmp_path, ".")


def test_runs_that_share_a_name_are_told_apart_by_their_folders(runs, small_config, tmp_path):
    again = "--data.documents line --train.seed 2 --checkpoint.keep-steps 3".split()
    train_run(small_config(*again), tmp_path / "second", is_quiet=True)
    found = measured(CONTEXT_DROP, runs, "bell", "arm", tmp_path / "second", blocks=20)
    steps = {run["name"]: [stage["step"] for stage in run["stages"]] for run in found["runs"]}
    assert steps == {"bell (bell)": [2, 6], "arm": [2, 6], "bell (second)": [3, 6]}
