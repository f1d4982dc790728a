"""Red and blue against sums over all rows of a tiny source; budgets by hand and by scipy."""

from __future__ import annotations

import itertools
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from changed_runs import change_run
from counted_progress import Counted
from scipy import integrate, stats

from bellmask.analyze.decompose import (
    DECOMPOSE,
    DecomposeOptions,
    law_draws,
    law_weights,
    spend,
    split_losses,
)
from bellmask.config.options import ModelOptions
from bellmask.data.toys import ToySource
from bellmask.diffusion.frameworks import Mdm, any_order, arm, sigma_arm
from bellmask.model.transformer import Denoiser
from bellmask.utils.rng import stream_key, uniform_rows

ORDERS = {"arm": torch.arange(4), "sigma_arm": torch.tensor([0, 3, 1, 2])}
FIXED = {"arm": arm(4), "sigma_arm": sigma_arm(ORDERS["sigma_arm"])}
FRAMEWORKS = {"mdm": Mdm(), **FIXED, "aoarm": any_order()}
SOURCES = {
    "sticky": ToySource.sticky(3, 4, stay=0.7),
    "order2": ToySource.order_two(3, 4, sharpness=4.0),
    "hidden": ToySource.hidden(3, 4, num_states=3, stay=0.8),
}
every_framework = pytest.mark.parametrize("name", list(FRAMEWORKS))


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
    known = {"tokenizer": SimpleNamespace(mask_id=3), "device": torch.device("cpu")}
    return SimpleNamespace(framework=FRAMEWORKS[name], model=model, **known)


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


def test_symbols_that_cannot_be_cost_nothing():
    """A shift register: half of all moves have probability 0, log 0 in the KL."""
    move = float64([[0.5, 0.5, 0, 0], [0, 0, 0.5, 0.5], [0.5, 0.5, 0, 0], [0, 0, 0.5, 0.5]])
    source = ToySource.markov(float64([0.25] * 4), move, 4)

    def even(x_BL, rows_N, **_):
        return torch.zeros(len(rows_N), 4)

    red_BL, blue_BL = split_losses(run_of("arm", even), source, *drawn(source, 3))
    own = [math.log(4), *[math.log(2)] * 3]
    for red, blue in zip(red_BL.tolist(), blue_BL.tolist()):
        assert red == pytest.approx(own, abs=1e-12)
        assert blue == pytest.approx([math.log(4) - h for h in own], abs=1e-6)


# budgets


def context_probability(length, context):
    """P(N_c) when t is drawn from the default bell and tokens are masked one by one."""
    law = stats.truncnorm(-5, 5, loc=0.5, scale=0.1)

    def density(t):
        return law.pdf(t) * stats.binom.pmf(context, length, 1 - t)

    return integrate.quad(density, 0, 1, points=[0.3, 0.5, 0.7], epsabs=1e-13)[0]


def test_draws_and_weights_are_those_of_the_laws():
    length = 12
    assert law_weights(length)["base"].tolist() == pytest.approx([1 / 12] * 12)
    assert law_draws(length)["base"].tolist() == pytest.approx([1 / 13] * 12)
    draws = np.array([context_probability(length, context) for context in range(length)])
    assert law_draws(length)["bell"].tolist() == pytest.approx(draws.tolist(), rel=1e-8)
    targets = draws * (length - np.arange(length))
    expected = (targets / targets.sum()).tolist()
    assert law_weights(length)["bell"].tolist() == pytest.approx(expected, rel=1e-8)


def test_spending_by_hand():
    """Base: all contexts alike; the share counts as spent where blue < 5 % of the loss."""
    red, blue = [2.0, 1.9, 0.5, 0.5], [0.103, 0.15, 0.5, 1.5]
    found = spend(float64(red), float64(blue))
    base = found["base"]
    assert base["irreducible"] == pytest.approx(4.9 / 4)
    assert base["reducible"] == pytest.approx(2.253 / 4)
    assert base["reducible_share"] == pytest.approx(2.253 / 7.153)
    assert base["spent_on_nothing"] == pytest.approx(1 / 4)  # 0.103 of 2.103, not 0.15 of 2.05
    held = [4 * 0.103, 3 * 0.15, 2 * 0.5, 1 * 1.5]
    assert base["reducible_per_row"] == pytest.approx(sum(held) / 5)
    rates = [1, 3 / 4, 1 / 2, 1 / 4]
    assert base["mask_rate_mean"] == pytest.approx(0.625)
    assert base["mask_rate_sd"] == pytest.approx(np.std(rates))
    bell, weight = found["bell"], law_weights(4)["bell"].tolist()
    draw = [context_probability(4, context) for context in range(4)]
    assert bell["reducible"] == pytest.approx(np.dot(weight, blue))
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
def runs(zoo, tmp_path_factory):
    """The zoo's run on a sticky chain of 8 symbols and 8 places, also as other runs."""
    folder = tmp_path_factory.mktemp("runs")
    for name in ("mdm", "arm", "sigma_arm", "aoarm"):
        change_run(zoo / "toy", folder / name, {"framework.name": name})
    return folder


def measured(runs, *names):
    options = DecomposeOptions(runs=tuple(str(runs / name) for name in names), rows=80)
    progress = Counted()
    found = DECOMPOSE.measure(options, progress)
    total = 80 * len(names)
    steps = [n + done for n in range(0, total, 80) for done in (64, 80)]
    assert (progress.totals, progress.seen) == ([total], [*steps])
    return found


@pytest.fixture(scope="module")
def numbers(runs):
    return measured(runs, *FRAMEWORKS)


def test_every_framework_has_the_same_red_sum(numbers):
    """H(X) of the sticky chain by hand: ln 8, then 7 moves that stay with 0.8 + 0.2 / 8."""
    stay, move = 0.825, 0.025
    step = -stay * math.log(stay) - 7 * move * math.log(move)
    truth = math.log(8) + 7 * step
    assert numbers["row_entropy"] == pytest.approx(truth, abs=1e-12)
    assert (numbers["row_entropy_se"], numbers["is_closed_form"]) == (0, True)
    assert [run["is_exact"] for run in numbers["runs"]] == [False, True, True, False]
    for run in numbers["runs"]:
        (stage,) = run["stages"]
        assert stage["red_sum"] == pytest.approx(truth, abs=1e-10)
        assert (stage["red_sum_se"], stage["red_se"]) == (0, [0] * 8)
    mdm, arm_run, sigma, aoarm = (run["stages"][0]["red"] for run in numbers["runs"])
    assert mdm == aoarm
    assert arm_run == pytest.approx([math.log(8)] + [step] * 7)
    assert sigma != pytest.approx(arm_run)
