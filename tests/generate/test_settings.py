"""Settings of sampling: what is refused, what each of them does, and runs that are given them."""

from pathlib import Path

import pytest
import torch

from bellmask.data.tokenizer import ByteTokenizer
from bellmask.data.toy import ExactDenoiser, ToySource
from bellmask.diffusion.orders import Mdm, any_order, arm, sigma_arm
from bellmask.diffusion.schedule import Cosine
from bellmask.errors import UserError
from bellmask.generate.choice import Choice
from bellmask.generate.engine import generate
from bellmask.generate.fill import fill, make_grid, make_rule
from bellmask.generate.grids import cosine_grid, count_grid, uniform_grid
from bellmask.generate.network import Network
from bellmask.generate.rules import RULES, Remasking
from bellmask.generate.sequential import generate_in_order
from bellmask.generate.settings import Sampling, sampling_of
from bellmask.model.transformer import Denoiser
from bellmask.options import ModelOptions
from bellmask.presets import tiny
from bellmask.run import Run

CHAIN = ToySource.sticky(5, 6, 0.5)
MASK = 5
NAN, INF = float("nan"), float("inf")


def canvas(count: int = 4) -> torch.Tensor:
    rows = torch.full((count, 6), MASK)
    rows[:, 0] = 2
    return rows


# what does not go


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"steps": 0}, "--steps must be from 1 to 1,000,000, got 0"),
        ({"steps": -3}, "--steps must be from 1 to 1,000,000, got -3"),
        ({"temperature": -0.1}, "--temperature must not be negative, got -0.1"),
        ({"temperature": NAN}, "--temperature"),
        ({"temperature": INF}, "--temperature"),
        ({"top_k": 0}, "--top-k must be at least 1, got 0"),
        ({"grid": "count", "per_step": 0}, "--per-step must be at least 1, got 0"),
        ({"block_length": 0}, "--block-length must be at least 1, got 0"),
        ({"top_p": 0.0}, "--top-p must be above 0 and at most 1, got 0.0"),
        ({"top_p": 1.01}, "--top-p must be above 0 and at most 1, got 1.01"),
        ({"top_p": NAN}, "--top-p"),
        ({"guidance": -1.0}, "--guidance must not be negative, got -1.0"),
        ({"guidance": INF}, "--guidance"),
        ({"rule": "first_hitting", "steps": 5}, "one step per token: no --steps or --grid"),
        ({"rule": "first_hitting", "grid": "cosine"}, "one step per token: no --steps or --grid"),
        ({"rule": "first_hitting", "grid": "count"}, "one step per token: no --steps or --grid"),
        ({"grid": "count", "steps": 5}, "give --per-step instead"),
        ({"per_step": 2}, "--per-step goes with --grid count"),
        ({"grid": "cosine", "per_step": 2}, "--per-step goes with --grid count"),
        ({"remask": -0.1}, "--remask is a probability, got -0.1"),
        ({"remask": 1.1}, "--remask is a probability, got 1.1"),
        ({"remask": NAN}, "--remask is a probability"),
        ({"remask": 0.1, "rule": "margin"}, "--remask goes with --rule ancestral, not margin"),
        ({"remask": 0.1, "rule": "first_hitting"}, "--remask goes with --rule ancestral"),
        ({"remask_kind": "rescale"}, "--remask-kind needs --remask"),
        ({"cache": "prefix"}, "give --block-length too"),
    ],
    ids=str,
)
def test_impossible_settings_are_refused(settings, message):
    for refuse in (
        lambda: Sampling(**settings).check(),
        lambda: sampling_of(settings),
        lambda: fill(None, canvas(), Mdm(), Sampling(**settings), mask_id=MASK),
    ):
        with pytest.raises(UserError, match=message):
            refuse()


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"steps": 1, "temperature": 0.0, "top_k": 1, "top_p": 1.0, "guidance": 0.0},
        {"rule": "first_hitting", "block_length": 1},
        {"grid": "count", "per_step": 1, "rule": "margin"},
        {"remask": 0.0},
        {"remask": 1.0, "remask_kind": "rescale", "steps": 9, "grid": "cosine"},
        {"cache": "prefix", "block_length": 1},
    ],
    ids=str,
)
def test_possible_ones_are_not(settings):
    assert sampling_of(settings) == Sampling(**settings)


def test_misspelt_settings_are_refused():
    with pytest.raises(UserError, match="unknown setting 'temprature'; did you mean 'temperature'"):
        sampling_of({"temprature": 1.0})
    with pytest.raises(UserError, match="unknown rule 'most_confidant'"):
        fill(None, canvas(), Mdm(), Sampling(rule="most_confidant"), mask_id=MASK)
    with pytest.raises(UserError, match="unknown grid 'cosin'"):
        fill(None, canvas(), Mdm(), Sampling(grid="cosin"), mask_id=MASK)


@pytest.mark.parametrize(
    "settings",
    [
        {"remask": 0.1, "remask_kind": "recale"},
        {"block_length": 2, "cache": "prefx"},
        {"noise": "float16"},
        {"noise": "flaot64"},
    ],
    ids=str,
)
def test_misspelt_values_are_refused(settings):
    with pytest.raises(UserError, match="unknown"):
        fill(ExactDenoiser(CHAIN), canvas(), Mdm(), sampling_of(settings), mask_id=MASK)


FRAMEWORKS = {"arm": arm(6), "sigma": sigma_arm(torch.arange(6).flip(0)), "any": any_order()}


@pytest.mark.parametrize("name", FRAMEWORKS)
@pytest.mark.parametrize(
    "settings",
    [
        {"rule": "random"},
        {"rule": "first_hitting"},
        {"grid": "cosine"},
        {"grid": "count", "per_step": 2},
        {"steps": 5},
        {"remask": 0.1},
        {"remask": 0.0},
        {"block_length": 2},
        {"block_length": 2, "cache": "prefix"},
        {"guidance": 0.5},
    ],
    ids=str,
)
def test_a_causal_model_has_its_own_order(name, settings):
    named = [f"--{key.replace('_', '-')}" for key in settings]
    with pytest.raises(UserError, match=f"{', '.join(named)}: for masked models only"):
        fill(None, canvas(), FRAMEWORKS[name], Sampling(**settings), mask_id=MASK)


# what each of them does


CASES = {
    "plain": ({}, RULES["ancestral"], uniform_grid(128), {}),
    "steps": ({"steps": 3}, RULES["ancestral"], uniform_grid(3), {}),
    "cosine": ({"steps": 3, "grid": "cosine"}, RULES["ancestral"], cosine_grid(3), {}),
    "count": ({"grid": "count", "rule": "margin"}, RULES["margin"], count_grid(5), {}),
    "pairs": ({"grid": "count", "per_step": 2, "rule": "random"}, RULES["random"], None, {}),
    "hitting": ({"rule": "first_hitting"}, RULES["first_hitting"], None, {}),
    "entropy": ({"rule": "entropy", "steps": 3}, RULES["entropy"], uniform_grid(3), {}),
    "confident": ({"rule": "most_confident", "steps": 3}, RULES["most_confident"], 3, {}),
    "cap": ({"remask": 0.3, "steps": 9}, Remasking(0.3), uniform_grid(9), {}),
    "rescale": (
        {"remask": 0.3, "remask_kind": "rescale", "steps": 9},
        Remasking(0.3, "rescale"),
        uniform_grid(9),
        {},
    ),
    "choice": (
        {"temperature": 0.7, "top_k": 3, "top_p": 0.8, "noise": "float32", "steps": 4},
        RULES["ancestral"],
        uniform_grid(4),
        {"choice": Choice(0.7, 3, 0.8, torch.float32)},
    ),
    "blocks": ({"block_length": 2, "steps": 6}, RULES["ancestral"], 6, {"block_length": 2}),
    "guidance": ({"guidance": 0.9, "steps": 4}, RULES["ancestral"], uniform_grid(4), {}),
}


@pytest.mark.parametrize("schedule", [None, Cosine()], ids=["linear", "cosine"])
@pytest.mark.parametrize("name", CASES)
def test_filling_does_what_the_settings_say(name, schedule):
    settings, rule, grid, options = CASES[name]
    model, framework = ExactDenoiser(CHAIN), Mdm() if schedule is None else Mdm(schedule)
    if isinstance(grid, int):
        grid = uniform_grid(grid)
    if settings.get("grid") == "count":
        grid = count_grid(5, settings.get("per_step", 1), schedule)
    network = Network(model, MASK, guidance=settings.get("guidance", 0.0))
    told = []
    made = fill(
        model,
        canvas(),
        framework,
        Sampling(**settings),
        mask_id=MASK,
        seed=3,
        first_sample=7,
        on_step=told.append,
    )
    expected = generate(
        network, canvas(), grid, rule, schedule=schedule, seed=3, first_sample=7, **options
    )
    assert made.ids_BL.equal(expected.ids_BL)
    assert (made.num_calls, made.num_rows) == (expected.num_calls, expected.num_rows)
    assert told[0].first_sample == 7
    assert told[-1].num_steps == len(told) - 1


def test_rules_and_grids_by_name():
    for name, rule in RULES.items():
        assert make_rule(Sampling(rule=name)) is rule
    assert make_rule(Sampling(remask=0.0)) == Remasking(0.0, "cap")
    assert make_grid(Sampling(grid="count")) == 1
    assert make_grid(Sampling(grid="count", per_step=9)) == 9
    assert make_grid(Sampling(rule="first_hitting")) is None


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_causal_models_are_filled_in_their_order(name):
    model, framework = ExactDenoiser(CHAIN, is_causal=True), FRAMEWORKS[name]
    rows, options = torch.full((9, 6), MASK), {"mask_id": MASK, "seed": 3, "first_sample": 5}
    sampling = Sampling(temperature=0.7, top_k=3, top_p=0.9, noise="float32")
    made = fill(model, rows, framework, sampling, **options)
    choice = Choice(0.7, 3, 0.9, torch.float32)
    expected = generate_in_order(model, rows, framework, choice=choice, **options)
    assert made.ids_BL.equal(expected.ids_BL)
    assert made.num_calls == 6


# runs


def run(**more) -> Run:
    tokenizer = ByteTokenizer()
    options = ModelOptions(num_layers=2, width=16, num_heads=2, dropout=0.0, **more)
    model, draw = Denoiser(options, tokenizer.num_tokens), torch.Generator().manual_seed(8)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=draw) * 0.3)
    return Run(Path(), tiny(), 1, tokenizer, model.eval(), Mdm(), torch.device("cpu"))


RUN_SETTINGS = [
    {"steps": 5},
    {"rule": "first_hitting", "top_k": 20},
    {"rule": "entropy", "steps": 5, "temperature": 0.5},
    {"remask": 0.4, "steps": 5, "guidance": 1.0},
    {"steps": 6, "block_length": 4, "cache": "prefix", "top_p": 0.9},
]


@pytest.mark.parametrize("settings", RUN_SETTINGS, ids=str)
def test_a_runs_samples_do_not_depend_on_its_batches(settings):
    loaded, done = run(), []
    row, sampling = loaded.canvas(template="ab[MASK*7]cd[MASK*3]"), Sampling(**settings)
    whole = loaded.generate(row, 5, sampling, seed=2)
    parts = loaded.generate(row, 5, sampling, seed=2, batch_size=2, on_batch=done.append)
    assert done == [2, 4, 5]
    assert parts.ids_BL.equal(whole.ids_BL)
    assert parts.num_calls > whole.num_calls
    if "cache" not in settings:  # the first call of a block keeps those of all rows
        assert parts.num_rows == whole.num_rows
    assert whole.ids_BL[:, row.is_given_L].tolist() == [[97, 98, 99, 100]] * 5
    assert loaded.texts(whole) == loaded.infill("ab[MASK*7]cd[MASK*3]", 5, seed=2, **settings)


def test_a_run_says_what_it_does_not_understand():
    loaded, timed = run(), run(modulation="time")
    assert loaded.sample(2, prefix="ab", length=6, seed=1, steps=3) == loaded.texts(
        loaded.generate(loaded.canvas(prefix="ab", length=6), 2, Sampling(steps=3), seed=1)
    )
    assert loaded.sample(1, length=6, steps=3) != loaded.sample(1, length=6, steps=3, seed=1)
    with pytest.raises(UserError, match="unknown setting 'step'"):
        loaded.sample(1, step=3)
    with pytest.raises(UserError, match="at least one sample must be asked for, got 0"):
        loaded.sample(0)
    with pytest.raises(UserError, match="time-conditioned"):
        timed.infill("ab[MASK*7]", block_length=2, cache="prefix")
    assert timed.infill("ab[MASK*7]", block_length=2)[0].startswith("ab")
