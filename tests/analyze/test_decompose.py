"""Red and blue against sums over all rows of a tiny source; budgets by hand and by scipy."""

import itertools
import json
import math
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from scipy import integrate, stats

from bellmask.analyze.budget import law_draws, law_weights, oracle_draws, spend
from bellmask.analyze.decompose import DECOMPOSE, DecomposeOptions, exact_red, split_losses
from bellmask.analyze.entropy import enumerated_entropy
from bellmask.assemble import train_run
from bellmask.data.toy import ExactDenoiser, ToySource
from bellmask.data.toy_corpora import NUM_ROWS
from bellmask.diffusion.orders import Mdm, any_order, arm, sigma_arm
from bellmask.errors import UserError
from bellmask.model.transformer import Denoiser
from bellmask.options import ModelOptions
from bellmask.rng import stream_key, uniform_rows
from bellmask.run import load_run

FRAMEWORKS = {
    "mdm": Mdm(),
    "arm": arm(4),
    "sigma_arm": sigma_arm(torch.tensor([0, 3, 1, 2])),
    "aoarm": any_order(),
}
SOURCES = {
    "sticky": ToySource.sticky(3, 4, stay=0.7),
    "order2": ToySource.order_two(3, 4, sharpness=4.0),
    "hidden": ToySource.hidden(3, 4, num_states=3, stay=0.8),
}
every_framework = pytest.mark.parametrize("name", list(FRAMEWORKS))


def ignore(done, total):
    pass


def float64(values):
    return torch.tensor(values, dtype=torch.float64)


def model_for(name, seed=1):
    """A causal or masked model with random weights; AoARM's is told what it predicts."""
    options = ModelOptions(num_layers=2, width=16, num_heads=2, dropout=0.0)
    encoding = "literal" if name == "aoarm" else "source"
    model = Denoiser(options, 3, is_causal=name != "mdm", encoding=encoding).eval()
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.data = 0.5 * torch.randn(parameter.shape, generator=generator)
    return model


def run_of(name, model):
    """What a split needs of a run."""
    return SimpleNamespace(
        framework=FRAMEWORKS[name],
        tokenizer=SimpleNamespace(mask_id=3),
        model=model,
        device=torch.device("cpu"),
    )


def drawn(source, count, seed=1):
    rows = torch.arange(count)
    x_BL = source.draw(uniform_rows(stream_key(seed, "rows"), rows, source.num_uniforms))
    return x_BL, uniform_rows(stream_key(seed, "contexts"), rows, source.length)


# splits


class Watched:
    """A model that remembers what it was asked and what it answered."""

    def __init__(self, model):
        self.model, self.calls = model, []

    def __call__(self, x_BL, rows_N, **more):
        answer = self.model(x_BL, rows_N, **more)
        self.calls.append((x_BL, rows_N, more, answer))
        return answer


def predictions(calls, length):
    """(row, {place: symbol} that is seen, place that is asked, log q) of every prediction."""
    for x_BL, rows_N, more, answer in calls:
        log_q_NV = torch.log_softmax(answer.detach().double(), -1)
        for index, log_q_V in zip(rows_N.tolist(), log_q_NV):
            b, slot = divmod(index, length)
            if more.get("positions") is None:
                seen = {i: s for i, s in enumerate(x_BL[b].tolist()) if s != 3}
                yield b, seen, slot, log_q_V
            else:
                places = more["positions"].expand(len(x_BL), -1)[b].tolist()
                target = more["target_positions"].expand(len(x_BL), -1)[b, slot].item()
                held = list(zip(places, x_BL[b].tolist()))[1 : slot + 1]
                yield b, {place - 1: symbol for place, symbol in held}, target - 1, log_q_V


@every_framework
def test_red_and_blue_add_up_to_the_expected_cross_entropy(name):
    """E over p_data(. | context) of -log q, from the probabilities of all 81 rows."""
    source = SOURCES["hidden"]
    rows = torch.tensor(list(itertools.product(range(3), repeat=4)))
    p = source.log_probability(rows).exp()
    x_BL, u_BL = drawn(source, 5)
    watched = Watched(model_for(name))
    red_BL, blue_BL = split_losses(run_of(name, watched), source, x_BL, u_BL)
    assert red_BL.dtype == blue_BL.dtype == torch.float64
    found = {}
    for b, seen, place, log_q_V in predictions(watched.calls, 4):
        assert all(x_BL[b, i] == symbol for i, symbol in seen.items())
        assert place not in seen
        fits = torch.ones(len(rows), dtype=torch.bool)
        for i, symbol in seen.items():
            fits &= rows[:, i] == symbol
        p_V = torch.stack([p[fits & (rows[:, place] == v)].sum() for v in range(3)]) / p[fits].sum()
        values = (-(p_V * p_V.log()).sum(), -(p_V * log_q_V).sum())
        found.setdefault((b, len(seen)), []).append((place, torch.stack(values)))
    assert set(found) == set(itertools.product(range(5), range(4)))
    for (b, context), each in found.items():
        assert len({place for place, _ in each}) == (4 - context if name == "mdm" else 1)
        own, total = torch.stack([value for _, value in each]).mean(0).tolist()
        assert float(red_BL[b, context]) == pytest.approx(own, abs=1e-9)
        assert float(red_BL[b, context] + blue_BL[b, context]) == pytest.approx(total, abs=1e-6)
        assert float(blue_BL[b, context]) > 0.01


@every_framework
@pytest.mark.parametrize("kind", list(SOURCES))
def test_the_exact_model_has_nothing_left_to_learn(kind, name):
    """Blue is zero, and red adds up to H(X): within its error, drawn as it is."""
    source = SOURCES[kind]
    exact = ExactDenoiser(source, is_causal=name != "mdm")
    red_BL, blue_BL = split_losses(run_of(name, exact), source, *drawn(source, 600))
    assert float(blue_BL.abs().max()) < 1e-12
    total_B = red_BL.sum(1)
    truth = float(enumerated_entropy(source).sum())
    error = float(total_B.std()) / math.sqrt(600)
    assert abs(float(total_B.mean()) - truth) < 4 * error + 1e-12
    assert error < 0.02 * truth
    order = {"arm": torch.arange(4), "sigma_arm": torch.tensor([0, 3, 1, 2])}.get(name)
    curve = enumerated_entropy(source, order)
    errors = red_BL.std(0) / math.sqrt(600)
    assert bool(((red_BL.mean(0) - curve).abs() < 4 * errors + 1e-12).all())


def test_symbols_that_cannot_be_cost_nothing():
    """A shift register: half of all moves have probability 0, log 0 in the KL."""
    move = float64([[0.5, 0.5, 0, 0], [0, 0, 0.5, 0.5], [0.5, 0.5, 0, 0], [0, 0, 0.5, 0.5]])
    source = ToySource.markov(float64([0.25] * 4), move, 4)

    def even(x_BL, rows_N, **_):
        return torch.zeros(len(rows_N), 4)

    run = SimpleNamespace(
        framework=arm(4), tokenizer=SimpleNamespace(mask_id=4), model=even,
        device=torch.device("cpu"),
    )  # fmt: skip
    red_BL, blue_BL = split_losses(run, source, *drawn(source, 3))
    own = [math.log(4), *[math.log(2)] * 3]
    for red, blue in zip(red_BL.tolist(), blue_BL.tolist()):
        assert red == pytest.approx(own, abs=1e-12)
        assert blue == pytest.approx([math.log(4) - h for h in own], abs=1e-6)


@every_framework
def test_the_red_curve_in_closed_form(name):
    source = SOURCES["sticky"]
    order = {"arm": torch.arange(4), "sigma_arm": torch.tensor([0, 3, 1, 2])}.get(name)
    found = exact_red(source, FRAMEWORKS[name])
    torch.testing.assert_close(found, enumerated_entropy(source, order))
    assert float(found.sum()) == pytest.approx(source.entropy, abs=1e-12)
    assert exact_red(SOURCES["order2"], FRAMEWORKS[name]) is None
    assert exact_red(SOURCES["hidden"], FRAMEWORKS[name]) is None


# budgets


@pytest.mark.parametrize("length", [1, 2, 16, 128])
def test_weights_are_distributions(length):
    weights = law_weights(length)
    assert set(weights) == {"base", "bell"}
    for weight_L in weights.values():
        assert weight_L.shape == (length,)
        assert float(weight_L.sum()) == pytest.approx(1, abs=1e-12)
        assert bool((weight_L >= 0).all())
    assert weights["base"].tolist() == pytest.approx([1 / length] * length)
    assert float(law_draws(length)["base"].sum()) == pytest.approx(length / (length + 1), abs=1e-12)


def context_probability(length, context):
    """P(N_c) when t is drawn from the default bell and tokens are masked one by one."""
    law = stats.truncnorm(-5, 5, loc=0.5, scale=0.1)

    def density(t):
        return law.pdf(t) * stats.binom.pmf(context, length, 1 - t)

    return integrate.quad(density, 0, 1, points=[0.3, 0.5, 0.7], epsabs=1e-13)[0]


def test_the_bells_draws_and_weights_are_its_law():
    length = 12
    draws = np.array([context_probability(length, context) for context in range(length)])
    assert law_draws(length)["bell"].tolist() == pytest.approx(draws.tolist(), rel=1e-8)
    targets = draws * (length - np.arange(length))
    expected = (targets / targets.sum()).tolist()
    assert law_weights(length)["bell"].tolist() == pytest.approx(expected, rel=1e-8)
    left = context_probability(length, length)
    assert float(law_draws(length)["bell"].sum()) == pytest.approx(1 - left, abs=1e-10)


def test_the_oracle_draws_rows_by_what_they_hold():
    """Blue 0, 2, 1, 3 on rows of 4, 3, 2, 1 targets: 0, 6, 2, 3; below zero is nothing."""
    assert oracle_draws(float64([0, 2, 1, 3])).tolist() == pytest.approx(
        [0, 6 / 11, 2 / 11, 3 / 11]
    )
    assert oracle_draws(float64([-0.1, 2, 0, 0])).tolist() == [0, 1, 0, 0]


def test_spending_by_hand():
    """Base: all contexts alike; the share counts as spent where blue < 5 % of the loss."""
    red, blue = [2.0, 1.9, 0.5, 0.5], [0.05, 0.15, 0.5, 1.5]
    found = spend(float64(red), float64(blue))
    base = found["base"]
    assert base["irreducible"] == pytest.approx(4.9 / 4)
    assert base["reducible"] == pytest.approx(2.2 / 4)
    assert base["reducible_share"] == pytest.approx(2.2 / 7.1)
    assert base["spent_on_nothing"] == pytest.approx(1 / 4)  # 0.05 of 2.05, not 0.15 of 2.05
    held = [4 * 0.05, 3 * 0.15, 2 * 0.5, 1 * 1.5]
    assert base["reducible_per_row"] == pytest.approx(sum(held) / 5)
    rates = [1, 3 / 4, 1 / 2, 1 / 4]
    assert base["mask_rate_mean"] == pytest.approx(0.625)
    assert base["mask_rate_sd"] == pytest.approx(np.std(rates))
    bell, weight = found["bell"], law_weights(4)["bell"].tolist()
    draw = [context_probability(4, context) for context in range(4)]
    assert bell["weights"] == weight
    assert bell["irreducible"] == pytest.approx(np.dot(weight, red))
    assert bell["reducible"] == pytest.approx(np.dot(weight, blue))
    share = np.dot(weight, blue) / (np.dot(weight, red) + np.dot(weight, blue))
    assert bell["reducible_share"] == pytest.approx(share)
    assert bell["spent_on_nothing"] == pytest.approx(weight[0])
    assert bell["reducible_per_row"] == pytest.approx(np.dot(draw, held), rel=1e-8)
    assert bell["mask_rate_mean"] == pytest.approx(np.dot(draw, rates) / sum(draw), rel=1e-8)
    oracle = found["oracle"]
    share = np.array(held) / sum(held)
    assert oracle["draws"] == pytest.approx(share.tolist())
    assert oracle["reducible_per_row"] == pytest.approx(np.dot(share, held))
    mean = np.dot(share, rates)
    assert oracle["mask_rate_mean"] == pytest.approx(mean)
    assert oracle["mask_rate_sd"] == pytest.approx(np.dot(share, np.square(rates - mean)) ** 0.5)
    assert "reducible" not in oracle  # it has rows, but no weights


# runs


@pytest.fixture(scope="module")
def runs(small_config, tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    toy = "--data.tokenizer symbols:8 --data.block-length 6 --train.steps 4 --data.train".split()
    options = {
        "bell": ["toy:sticky", "--checkpoint.keep-steps", "2", "4"],
        "arm": ["toy:sticky", "--framework", "arm"],
        "sigma": ["toy:sticky", "--framework", "sigma_arm"],
        "aoarm": ["toy:sticky", "--framework", "aoarm"],
        "hidden": ["toy:hidden"],
    }
    with pytest.MonkeyPatch.context() as patch:
        for split in NUM_ROWS:
            patch.setitem(NUM_ROWS, split, 64)
        for name, more in options.items():
            train_run(small_config(*toy, *more), folder / name, is_quiet=True)
    train_run(small_config("--train.steps", "2"), folder / "text", is_quiet=True)
    return folder


def measured(runs, *names, **more):
    options = DecomposeOptions(tuple(str(runs / name) for name in names), **{"rows": 80, **more})
    return DECOMPOSE.measure(options, ignore)


@pytest.fixture(scope="module")
def numbers(runs):
    return measured(runs, "bell", "arm", "sigma", "aoarm")


def test_every_framework_has_the_same_red_sum(numbers):
    """H(X) of the sticky chain by hand: ln 8, then 5 moves that stay with 0.8 + 0.2 / 8."""
    stay, move = 0.825, 0.025
    truth = math.log(8) + 5 * (-stay * math.log(stay) - 7 * move * math.log(move))
    assert numbers["row_entropy"] == pytest.approx(truth, abs=1e-12)
    assert (numbers["row_entropy_se"], numbers["is_closed_form"]) == (0, True)
    assert (numbers["source"], numbers["block_length"], numbers["num_symbols"]) == (
        "toy:sticky", 6, 8,
    )  # fmt: skip
    assert [run["framework"] for run in numbers["runs"]] == ["mdm", "arm", "sigma_arm", "aoarm"]
    assert [run["is_exact"] for run in numbers["runs"]] == [False, True, True, False]
    for run in numbers["runs"]:
        for stage in run["stages"]:
            assert stage["red_sum"] == pytest.approx(truth, abs=1e-10)
            assert (stage["red_sum_se"], stage["red_se"]) == (0, [0] * 6)
    mdm, arm_run, sigma, aoarm = (run["stages"][-1]["red"] for run in numbers["runs"])
    assert mdm == aoarm
    assert arm_run == pytest.approx([math.log(8)] + [(truth - math.log(8)) / 5] * 5)
    assert sigma != pytest.approx(arm_run)


def own_split(folder, step, name, count=80):
    run = load_run(folder / name, checkpoint=str(step))
    source = ToySource.sticky(8, 6, 0.8) if name != "hidden" else ToySource.hidden(8, 6)
    rows = torch.arange(count)
    x_BL = source.draw(uniform_rows(stream_key(1234, "decompose rows"), rows, source.num_uniforms))
    u_BL = uniform_rows(stream_key(1234, "decompose contexts"), rows, 6)
    return [part.numpy() for part in split_losses(run, source, x_BL, u_BL)]


def test_a_stage_is_the_mean_over_rows_with_its_error(runs, numbers):
    """80 rows in batches of 64, the same at all checkpoints and in all runs."""
    for run, name in zip(numbers["runs"], ("bell", "arm", "sigma", "aoarm")):
        assert [stage["step"] for stage in run["stages"]] == ([2, 4] if name == "bell" else [4])
        for stage in run["stages"]:
            _, blue = own_split(runs, stage["step"], name)
            assert stage["blue"] == pytest.approx(blue.mean(0).tolist(), abs=1e-6)
            expected = blue.std(0, ddof=1) / math.sqrt(80)
            assert stage["blue_se"] == pytest.approx(expected.tolist(), rel=1e-4, abs=1e-7)
            total = blue.sum(1)
            assert stage["blue_sum"] == pytest.approx(total.mean(), abs=1e-6)
            assert stage["blue_sum_se"] == pytest.approx(
                total.std(ddof=1) / math.sqrt(80), rel=1e-4
            )
            assert ("spend" in stage) == (name == "bell")
    stage = numbers["runs"][0]["stages"][0]
    assert stage["spend"] == spend(float64(stage["red"]), float64(stage["blue"]))


def test_red_of_a_hidden_source_is_drawn(runs):
    found = measured(runs, "hidden", rows=300)
    (stage,) = found["runs"][0]["stages"]
    red, _ = own_split(runs, 4, "hidden", 300)
    assert stage["red"] == pytest.approx(red.mean(0).tolist())
    assert stage["red_se"] == pytest.approx(
        (red.std(0, ddof=1) / math.sqrt(300)).tolist(), abs=1e-12
    )
    error = red.sum(1).std(ddof=1) / math.sqrt(300)
    assert stage["red_sum_se"] == pytest.approx(error)
    assert found["row_entropy_se"] > 0
    assert not found["is_closed_form"]
    both = math.hypot(error, found["row_entropy_se"])
    assert abs(stage["red_sum"] - found["row_entropy"]) < 4 * both
    assert "±" in DECOMPOSE.tables(found)[0].title


def test_the_exact_model_in_place_of_a_runs_own(runs, monkeypatch):
    """The whole analysis, blue zero throughout."""
    source = ToySource.sticky(8, 6, 0.8)

    def load(folder, **more):
        run = load_run(folder, **more)
        return replace(run, model=ExactDenoiser(source, is_causal=run.framework.is_causal))

    monkeypatch.setattr("bellmask.analyze.runs.load", load)
    for run in measured(runs, "arm", "sigma", "aoarm", rows=4)["runs"]:
        assert run["stages"][0]["blue"] == pytest.approx([0] * 6, abs=1e-12)


def test_tables_say_what_was_measured(numbers):
    sums, *contexts, by_weight, by_row = DECOMPOSE.tables(numbers)
    assert f"H(X) = {numbers['row_entropy']:.4f} exactly" in sums.title
    last = numbers["runs"][0]["stages"][-1]
    red, blue = f"{last['red_sum']:.4f} ± 0.0000", f"{last['blue_sum']:.4f}"
    assert sums.rows[0] == ["bell, step 4", red, f"{blue} ± {last['blue_sum_se']:.4f}"]
    assert [table.title.split(":")[0] for table in contexts] == [
        "bell", "arm", "sigma_arm", "aoarm",
    ]  # fmt: skip
    assert contexts[0].columns == ["observed tokens", "red", "blue, step 2", "blue, step 4"]
    assert [row[0] for row in contexts[0].rows] == ["0", "1", "3", "4", "5"]
    cell = f"{last['blue'][3]:.4f} ± {last['blue_se'][3]:.4f}"
    assert contexts[0].rows[2][1:4:2] == [f"{last['red'][3]:.4f}", cell]
    assert [row[0] for row in by_weight.rows] == ["bell, step 2", "bell, step 4"]
    laws = last["spend"]
    assert by_weight.rows[1][1].startswith(f"{laws['base']['reducible']:.4f} (")
    assert by_weight.rows[1][4] == f"{laws['bell']['spent_on_nothing']:.0%}"
    assert by_row.rows[1][1:4] == [
        f"{laws[law]['reducible_per_row']:.3f}" for law in ("base", "bell", "oracle")
    ]
    figure = DECOMPOSE.figure(numbers)
    red_labels, blue_labels, _ = (axes.get_legend_handles_labels()[1] for axes in figure.axes)
    assert red_labels == ["MDM, AoARM", "arm", "sigma_arm"]
    assert blue_labels[:3] == ["bell, step 2", "bell, step 4", "arm, step 4"]
    assert json.loads(json.dumps(numbers, allow_nan=False)) == numbers


def test_progress_counts_rows_of_all_checkpoints(runs):
    told = []
    options = DecomposeOptions((str(runs / "bell"), str(runs / "arm")), rows=70)
    DECOMPOSE.measure(options, lambda *n: told.append(n))
    assert told == [(n, 210) for n in (64, 70, 134, 140, 204, 210)]


@pytest.mark.parametrize(
    ("names", "more", "words"),
    [
        (["text"], {}, r"salad\.txt, whose conditionals nobody knows; train on a toy: --data"),
        (["bell", "text"], {}, "whose conditionals nobody knows"),
        (["bell", "hidden"], {}, "different text or tokenizers"),
        (["bell"], {"checkpoints": (3,)}, r"no checkpoint at step 3; it has 2, 4 \("),
        (["bell"], {"rows": 1}, "--rows must be at least 2, got 1"),
        ([], {}, "at least one run folder"),
    ],
)
def test_what_cannot_be_measured_is_refused(runs, names, more, words):
    with pytest.raises(UserError, match=words):
        measured(runs, *names, **more)
