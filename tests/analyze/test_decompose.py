"""Entropies, red and blue against sums over all rows of tiny sources; budgets by hand and scipy."""

from __future__ import annotations

import itertools
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from changed_runs import change_run
from counted_progress import Counted
from law_tools import float64, scipy_gaussian
from plain_entropy import plain_entropy, table_of
from sampling_tools import awake
from scipy import integrate, stats

from bellmask.analyze.decompose import (
    DECOMPOSE,
    DecomposeOptions,
    chain_entropy,
    ordered_chain_entropy,
    row_entropy,
    spend,
    split_losses,
)
from bellmask.data.toys import ToySource
from bellmask.diffusion.frameworks import Mdm, any_order, arm, sigma_arm
from bellmask.utils.rng import stream_key, uniform_rows

FRAMEWORKS = {
    "mdm": Mdm(),
    "arm": arm(4),
    "sigma_arm": sigma_arm(torch.tensor([0, 3, 1, 2])),
    "aoarm": any_order(),
}


def started(transition, length):
    """A chain that starts from its stationary distribution, found by walking on."""
    return ToySource.markov(torch.linalg.matrix_power(transition, 300)[0], transition, length)


SKEWED = float64([[0.6, 0.3, 0.1], [0.05, 0.15, 0.8], [0.5, 0.1, 0.4]])
"""Not reversible: left and right neighbors are not alike."""
REGISTER = float64([[0.5, 0.5, 0, 0], [0, 0, 0.5, 0.5], [0.5, 0.5, 0, 0], [0, 0, 0.5, 0.5]])
STATES = float64([[0.9, 0.1], [0.25, 0.75]])
CHAINS = {
    **{f"skewed {length}": started(SKEWED, length) for length in (1, 2, 5)},
    "register": started(REGISTER, 4),
    "sticky": ToySource.sticky(3, 4, stay=0.7),
    "shared symbols": ToySource(  # state 0 has two symbols of its own
        float64([5 / 7, 2 / 7]), STATES, float64([[0.4, 0.6, 0], [0, 0, 1]]), length=4
    ),
}
NOISY = ToySource(
    float64([0.3, 0.7]), STATES, float64([[0.5, 0.3, 0.2], [0.05, 0.15, 0.8]]), length=4
)


@pytest.mark.parametrize("name", CHAINS)
def test_closed_forms_are_plain_sums_and_add_up_to_the_entropy_of_a_row(name):
    source = CHAINS[name]
    torch.testing.assert_close(chain_entropy(source), plain_entropy(source), atol=1e-12, rtol=0)
    every = list(itertools.permutations(range(source.length)))
    for order in every[:: max(1, len(every) // 8)]:
        found = ordered_chain_entropy(source, torch.tensor(order))
        torch.testing.assert_close(found, plain_entropy(source, order), atol=1e-12, rtol=0)
        assert row_entropy(source) == (pytest.approx(float(found.sum()), abs=1e-12), 0.0)


def test_the_entropy_of_a_source_without_an_order_is_sampled():
    truth = -sum(p * math.log(p) for p in table_of(NOISY).values())
    found, error = row_entropy(NOISY)
    assert 0 < error < 0.02
    assert abs(found - truth) < 4 * error
    assert float(plain_entropy(NOISY).sum()) == pytest.approx(truth)


# splits


def split(name, model, source, count):
    """(rows, red, blue), with what a split needs of a run."""
    run = SimpleNamespace(framework=FRAMEWORKS[name], model=model, device=torch.device("cpu"))
    rows = torch.arange(count)
    x_BL = source.draw(uniform_rows(stream_key(1, "rows"), rows, source.num_uniforms))
    u_BL = uniform_rows(stream_key(1, "contexts"), rows, source.length)
    return x_BL, *split_losses(run, source, x_BL, u_BL)


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


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_red_and_blue_add_up_to_the_expected_cross_entropy(name):
    """E over p_data(. | context) of -log q, from the probabilities of all 81 rows."""
    encoding = "literal" if name == "aoarm" else "source"  # AoARM's is told what it predicts
    watched = Watched(awake(2, 3, std=0.5, is_causal=name != "mdm", encoding=encoding))
    source = ToySource.hidden(3, 4, num_states=3, stay=0.8)
    table, found = table_of(source), {}
    x_BL, red_BL, blue_BL = split(name, watched, source, 5)
    assert red_BL.dtype == blue_BL.dtype == torch.float64
    for b, seen, place, log_q_V in predictions(watched.calls, 4):
        assert all(x_BL[b, i] == symbol for i, symbol in seen.items())
        assert place not in seen
        fits = [row for row in table if all(row[i] == symbol for i, symbol in seen.items())]
        p_V = float64([sum(table[row] for row in fits if row[place] == v) for v in range(3)])
        p_V /= p_V.sum()
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
    flat = lambda x_BL, rows_N, **_: torch.zeros(len(rows_N), 4)  # noqa: E731
    _, red_BL, blue_BL = split("arm", flat, CHAINS["register"], 3)
    own = float64([math.log(4), *[math.log(2)] * 3]).expand(3, -1)
    torch.testing.assert_close(red_BL, own)
    torch.testing.assert_close(blue_BL, math.log(4) - own, atol=1e-6, rtol=0)


# budgets


def context_probability(length, context):
    """P(N_c) when t is drawn from the default bell and tokens are masked one by one."""
    law = scipy_gaussian(0.5, 0.1)

    def density(t):
        return law.pdf(t) * stats.binom.pmf(context, length, 1 - t)

    return integrate.quad(density, 0, 1, points=[0.3, 0.5, 0.7], epsabs=1e-13)[0]


def test_spending_by_hand():
    """Base: all contexts alike; the share counts as spent where blue < 5 % of the loss."""
    red, blue = [2.0, 1.9, 0.5, 0.5], [0.103, 0.15, 0.5, 1.5]
    rates, held = np.array([1, 3 / 4, 1 / 2, 1 / 4]), np.array([4 * 0.103, 3 * 0.15, 1.0, 1.5])
    bell = np.array([context_probability(4, context) for context in range(4)])
    draws = {"base": np.full(4, 1 / 5), "bell": bell, "oracle": held / held.sum()}
    weights = {"base": np.full(4, 1 / 4), "bell": bell * rates / (bell @ rates)}
    found = spend(float64(red), float64(blue))
    assert found["most_per_row"] == pytest.approx(1.5)
    for name, weight in weights.items():
        assert found[name]["weights"] == pytest.approx(weight.tolist(), rel=1e-8)
        own, left = weight @ np.array(red), weight @ np.array(blue)
        assert found[name]["irreducible"] == pytest.approx(own)
        assert found[name]["reducible"] == pytest.approx(left)
        assert found[name]["reducible_share"] == pytest.approx(left / (own + left))
        # 0.103 of 2.103, not 0.15 of 2.05
        assert found[name]["spent_on_nothing"] == pytest.approx(weight[0])
    for name, draw in draws.items():
        share = draw / draw.sum()
        deviation = math.sqrt(share @ (rates - share @ rates) ** 2)
        assert found[name]["draws"] == pytest.approx(draw.tolist(), rel=1e-8)
        assert found[name]["reducible_per_row"] == pytest.approx(draw @ held, rel=1e-8)
        assert found[name]["mask_rate_mean"] == pytest.approx(share @ rates, rel=1e-8)
        assert found[name]["mask_rate_sd"] == pytest.approx(deviation, rel=1e-7)
    assert "reducible" not in found["oracle"]  # it has rows, but no weights


def test_every_framework_has_the_same_red_sum(zoo, tmp_path):
    """H(X) of the sticky chain by hand: ln 8, then 7 moves that stay with 0.8 + 0.2 / 8."""
    for name in FRAMEWORKS:
        change_run(zoo / "toy", tmp_path / name, {"framework.name": name})
    folders = tuple(str(tmp_path / name) for name in FRAMEWORKS)
    progress = Counted()
    numbers = DECOMPOSE.measure(DecomposeOptions(runs=folders, rows=80), progress)
    assert (progress.totals, progress.seen[:3]) == ([4 * 80], [64, 80, 80 + 64])
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
