"""Settings of sampling: what is refused, and what samples of a run depend on."""

from dataclasses import replace

import pytest
import torch
from counted_progress import Counted

from bellmask.data.toys import ExactDenoiser, ToySource
from bellmask.diffusion.frameworks import Mdm, any_order, arm, shifted_arm, sigma_arm
from bellmask.diffusion.schedules import Cosine
from bellmask.generate.fill import fill
from bellmask.generate.rules import RULES, Remasking
from bellmask.generate.sampler import SamplingDenoiser, generate, uniform_grid
from bellmask.generate.settings import Sampling, sampling_of
from bellmask.run import load_run
from bellmask.utils.errors import UserError

MASK = 5
BAD = [
    ({"steps": 0}, "--steps"),
    ({"temperature": float("nan")}, "--temperature"),
    ({"top_p": 1.01}, "--top-p"),
    ({"rule": "first_hitting", "steps": 5}, "--steps"),
    ({"rule": "first_hitting", "grid": "count"}, "--grid"),
    ({"grid": "count", "steps": 5}, "--per-step"),
    ({"per_step": 2}, "--per-step"),
    ({"remask": 0.1, "rule": "margin"}, "--remask"),
    ({"remask_kind": "rescale"}, "--remask-kind"),
    ({"cache": "prefix"}, "--block-length"),
    ({"rule": "most_confidant"}, "most_confident"),
    ({"noise": "float16"}, "float16"),
    ({"temprature": 1}, "temperature"),
]
GOOD = [
    {"steps": 1, "temperature": 0.0, "top_k": 1, "top_p": 1.0, "guidance": 0.0},
    {"rule": "first_hitting", "block_length": 1},
    {"remask": 1.0, "remask_kind": "rescale", "steps": 1_000_000, "grid": "cosine"},
    {"cache": "prefix", "block_length": 1},
]


def test_impossible_settings_are_refused_and_others_are_not():
    for settings, names in BAD:
        with pytest.raises(UserError, match=names):
            sampling_of(settings)
    for settings in GOOD:
        assert sampling_of(settings) == Sampling(**settings)


def test_a_causal_model_has_its_own_order():
    rows = torch.full((4, 6), MASK)
    for settings, names in (
        ({"rule": "random", "steps": 5}, "--rule, --steps"),
        ({"block_length": 2, "cache": "prefix"}, "--block-length, --cache"),
        ({"remask": 0.0}, "--remask"),
    ):
        for framework in (arm(6), sigma_arm(torch.arange(6).flip(0)), any_order()):
            with pytest.raises(UserError, match=names):
                fill(None, rows, framework, Sampling(**settings), mask_id=MASK)


def test_filling_does_what_the_settings_say():
    """Those of which no frozen command has samples."""
    model, schedule = ExactDenoiser(ToySource.sticky(5, 6, 0.5)), Cosine()
    rows, noise = torch.full((9, 6), MASK), {"seed": 3, "first_sample": 7}
    rescaled = {"remask": 0.3, "remask_kind": "rescale", "steps": 9}
    for settings, rule, grid in (
        ({}, RULES["ancestral"], uniform_grid(128)),
        ({"grid": "count", "rule": "margin"}, RULES["margin"], 1),
        ({"grid": "count", "per_step": 4}, RULES["ancestral"], 4),
        (rescaled, Remasking(0.3, "rescale"), uniform_grid(9)),
    ):
        made = fill(model, rows, Mdm(schedule), Sampling(**settings), mask_id=MASK, **noise)
        network = SamplingDenoiser(model, MASK)
        expected = generate(network, rows, grid, rule, schedule=schedule, **noise)
        assert made.ids_BL.equal(expected.ids_BL)
        assert made.num_rows == expected.num_rows


def test_a_causal_lm_writes_left_to_right_after_a_first_token():
    """What it is asked: the next token, from what is before it; pads come behind all."""
    asked = []

    def model(x_BL, rows_N, **_):
        asked.append([divmod(row, 6)[1] for row in rows_N.tolist()])
        return torch.zeros(len(rows_N), 5)

    model.first_maskable = 1
    options = {"mask_id": MASK, "is_real_BL": torch.arange(6) < torch.tensor([[6], [4]])}
    rows = torch.tensor([[2, MASK, MASK, MASK, MASK, MASK], [2, 1, MASK, MASK, 0, 0]])
    made = fill(model, rows, shifted_arm(6), Sampling(), **options)
    assert asked == [[1, 2], [2, 3], [3], [4], [5]]
    assert made.ids_BL[1, 4:].tolist() == [0, 0]
    for bad, names in (([[MASK, 1, MASK]], "BOS"), ([[2, MASK, 1]], "prefix")):
        with pytest.raises(UserError, match=names):
            fill(model, torch.tensor(bad), shifted_arm(6), Sampling(), mask_id=MASK)
    with pytest.raises(UserError, match="unpadded"):
        fill(ExactDenoiser(ToySource.sticky(5, 6, 0.5)), rows, arm(6), Sampling(), **options)


TEMPLATE = "ab[MASK*7]cd[MASK*3]"


@pytest.mark.parametrize(
    "settings",
    [
        {"remask": 0.4, "steps": 5, "guidance": 1.0},
        {"steps": 6, "block_length": 4, "cache": "prefix", "top_p": 0.9},
    ],
)
def test_a_runs_samples_do_not_depend_on_its_batches(settings, zoo):
    run = load_run(zoo / "bell")
    row, sampling, progress = run.canvas(template=TEMPLATE), Sampling(**settings), Counted()
    whole = run.generate(row, 5, sampling, seed=2)
    parts = run.generate(row, 5, sampling, seed=2, batch_size=2, progress=progress)
    assert progress.done == 5
    assert progress.seen == sorted(progress.seen)
    assert {2, 4, 5} <= set(progress.seen)
    assert parts.ids_BL.equal(whole.ids_BL)
    assert parts.num_calls > whole.num_calls
    if "cache" not in settings:  # the first call of a block keeps those of all rows
        assert parts.num_rows == whole.num_rows
    assert whole.ids_BL[:, row != run.tokenizer.mask_id].tolist() == [[97, 98, 99, 100]] * 5
    assert run.texts(whole) == run.infill(TEMPLATE, 5, seed=2, **settings)
    whole.ids_BL[:, 2] = run.tokenizer.eos_id  # of single documents the text ends there
    alone = replace(run, config=run.config.with_options({"data.packing": "unpacked"}))
    assert [run.texts(whole)[0][:2], *alone.texts(whole)] == ["ab"] * 6
    assert len(run.texts(whole)[0]) > 2
    found = run.sample(2, prefix="ab", length=6, seed=1, **settings)
    row = run.canvas(prefix="ab", length=6)
    assert found == run.texts(run.generate(row, 2, sampling, seed=1))
    assert found != run.sample(2, prefix="ab", length=6, seed=2, **settings)
