"""Settings of sampling: what is refused, what each of them does, and runs that are given them."""

import pytest
import torch
from counted_progress import Counted

from bellmask.data.toys import ExactDenoiser, ToySource
from bellmask.diffusion.frameworks import Mdm, any_order, arm, shifted_arm, sigma_arm
from bellmask.diffusion.schedules import Cosine
from bellmask.generate.fill import fill
from bellmask.generate.rules import RULES, Remasking
from bellmask.generate.sampler import (
    SamplingDenoiser,
    TokenChoice,
    generate,
    generate_in_order,
    uniform_grid,
)
from bellmask.generate.settings import Sampling, sampling_of
from bellmask.run import load_run
from bellmask.utils.errors import UserError

CHAIN = ToySource.sticky(5, 6, 0.5)
MASK = 5
NAN = float("nan")


def canvas(count=4):
    rows = torch.full((count, 6), MASK)
    rows[:, 0] = 2
    return rows


# what does not go


@pytest.mark.parametrize(
    ("settings", "names"),
    [
        ({"steps": 0}, "--steps"),
        ({"steps": 1_000_001}, "--steps"),
        ({"temperature": -0.1}, "--temperature"),
        ({"temperature": NAN}, "--temperature"),
        ({"top_k": 0}, "--top-k"),
        ({"grid": "count", "per_step": 0}, "--per-step"),
        ({"block_length": 0}, "--block-length"),
        ({"top_p": 0.0}, "--top-p"),
        ({"top_p": 1.01}, "--top-p"),
        ({"guidance": -1.0}, "--guidance"),
        ({"rule": "first_hitting", "steps": 5}, "--steps"),
        ({"rule": "first_hitting", "grid": "count"}, "--grid"),
        ({"grid": "count", "steps": 5}, "--per-step"),
        ({"per_step": 2}, "--per-step"),
        ({"remask": 1.1}, "--remask"),
        ({"remask": 0.1, "rule": "margin"}, "--remask"),
        ({"remask_kind": "rescale"}, "--remask-kind"),
        ({"cache": "prefix"}, "--block-length"),
        ({"rule": "most_confidant"}, "most_confident"),
        ({"noise": "float16"}, "float16"),
    ],
)
def test_impossible_settings_are_refused(settings, names):
    with pytest.raises(UserError, match=names):
        sampling_of(settings)


@pytest.mark.parametrize(
    "settings",
    [
        {"steps": 1, "temperature": 0.0, "top_k": 1, "top_p": 1.0, "guidance": 0.0},
        {"rule": "first_hitting", "block_length": 1},
        {"remask": 1.0, "remask_kind": "rescale", "steps": 1_000_000, "grid": "cosine"},
        {"cache": "prefix", "block_length": 1},
    ],
)
def test_possible_ones_are_not(settings):
    assert sampling_of(settings) == Sampling(**settings)


FRAMEWORKS = {"arm": arm(6), "sigma": sigma_arm(torch.arange(6).flip(0)), "any": any_order()}


def test_a_causal_model_has_its_own_order():
    for settings, names in (
        ({"rule": "random", "steps": 5}, "--rule, --steps"),
        ({"block_length": 2, "cache": "prefix"}, "--block-length, --cache"),
        ({"remask": 0.0}, "--remask"),
        ({"guidance": 0.5}, "--guidance"),
    ):
        for framework in FRAMEWORKS.values():
            with pytest.raises(UserError, match=names):
                fill(None, canvas(), framework, Sampling(**settings), mask_id=MASK)


# what each of them does: the settings, the rule, the grid or tokens per step, other options


ANCESTRAL = RULES["ancestral"]
WARM = {"temperature": 0.7, "top_k": 3, "top_p": 0.8, "noise": "float32", "steps": 4}
WARM_CHOICE = TokenChoice(0.7, 3, 0.8, torch.float32)
RESCALE = {"remask": 0.3, "remask_kind": "rescale", "steps": 9}
CASES = {
    "plain": ({}, ANCESTRAL, uniform_grid(128), {}),
    "count": ({"grid": "count", "rule": "margin"}, RULES["margin"], 1, {}),
    "hitting": ({"rule": "first_hitting"}, RULES["first_hitting"], None, {}),
    "rescale": (RESCALE, Remasking(0.3, "rescale"), uniform_grid(9), {}),
    "choice": (WARM, ANCESTRAL, uniform_grid(4), {"choice": WARM_CHOICE}),
    "blocks": ({"block_length": 2, "steps": 6}, ANCESTRAL, uniform_grid(6), {"block_length": 2}),
    "guidance": ({"guidance": 0.9, "steps": 4}, ANCESTRAL, uniform_grid(4), {}),
}


@pytest.mark.parametrize("name", CASES)
def test_filling_does_what_the_settings_say(name):
    settings, rule, grid, options = CASES[name]
    schedule = Cosine()
    model, framework = ExactDenoiser(CHAIN), Mdm(schedule)
    network, told = SamplingDenoiser(model, MASK, guidance=settings.get("guidance", 0.0)), []
    noise = {"seed": 3, "first_sample": 7}
    sampling = Sampling(**settings)
    made = fill(model, canvas(), framework, sampling, mask_id=MASK, on_step=told.append, **noise)
    expected = generate(network, canvas(), grid, rule, schedule=schedule, **noise, **options)
    assert made.ids_BL.equal(expected.ids_BL)
    assert (made.num_calls, made.num_rows) == (expected.num_calls, expected.num_rows)
    assert told[0].first_sample == 7
    assert told[-1].num_steps == len(told) - 1


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_causal_models_are_filled_in_their_order(name):
    model, framework = ExactDenoiser(CHAIN, is_causal=True), FRAMEWORKS[name]
    rows, options = torch.full((9, 6), MASK), {"mask_id": MASK, "seed": 3, "first_sample": 5}
    sampling = Sampling(temperature=0.7, top_k=3, top_p=0.9, noise="float32")
    made = fill(model, rows, framework, sampling, **options)
    choice = TokenChoice(0.7, 3, 0.9, torch.float32)
    expected = generate_in_order(model, rows, framework, choice=choice, **options)
    assert made.ids_BL.equal(expected.ids_BL)
    assert made.num_calls == 6


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


# runs


TEMPLATE = "ab[MASK*7]cd[MASK*3]"


@pytest.fixture(scope="module")
def run(zoo):
    return load_run(zoo / "bell")


@pytest.mark.parametrize(
    "settings",
    [
        {"rule": "first_hitting", "top_k": 20},
        {"remask": 0.4, "steps": 5, "guidance": 1.0},
        {"steps": 6, "block_length": 4, "cache": "prefix", "top_p": 0.9},
    ],
)
def test_a_runs_samples_do_not_depend_on_its_batches(settings, run):
    row, sampling, progress = run.canvas(template=TEMPLATE), Sampling(**settings), Counted()
    whole = run.generate(row, 5, sampling, seed=2)
    parts = run.generate(row, 5, sampling, seed=2, batch_size=2, progress=progress)
    assert progress.seen == [2, 4, 5]
    assert parts.ids_BL.equal(whole.ids_BL)
    assert parts.num_calls > whole.num_calls
    if "cache" not in settings:  # the first call of a block keeps those of all rows
        assert parts.num_rows == whole.num_rows
    assert whole.ids_BL[:, row.is_given_L].tolist() == [[97, 98, 99, 100]] * 5
    assert run.texts(whole) == run.infill(TEMPLATE, 5, seed=2, **settings)


def test_samples_of_a_run(run):
    row = run.canvas(prefix="ab", length=6)
    expected = run.texts(run.generate(row, 2, Sampling(steps=3), seed=1))
    assert run.sample(2, prefix="ab", length=6, seed=1, steps=3) == expected
    assert run.sample(1, length=6, steps=3) != run.sample(1, length=6, steps=3, seed=1)
    with pytest.raises(UserError, match="temperature"):
        run.sample(1, temprature=3)
    with pytest.raises(UserError, match="got 0"):
        run.sample(0)
