"""The law from progress: known losses, noise, positions of its changes, exact state."""

import json

import pytest
import torch
from sampling_tools import seeded

from bellmask.diffusion.laws import Uniform
from bellmask.diffusion.objectives import Bell, Importance, Nelbo
from bellmask.diffusion.progress import NUM_ROWS, RATES, UNIFORM_SHARE, ProgressLaw
from bellmask.diffusion.theory import bell_test, context_weights

RATE = torch.tensor(RATES, dtype=torch.float64)


def rows_of(nll_K, noise=0.0, seed=0):
    """The same NLL for all rows of a probe, and what differs from row to row."""
    more = torch.randn(len(RATES), NUM_ROWS, dtype=torch.float64, generator=seeded(seed))
    return nll_K[:, None] + noise * more


def after(*curves, noise=0.0):
    law = ProgressLaw()
    for number, nll_K in enumerate(curves):
        law.update(rows_of(nll_K, noise, number))
    return law


@pytest.mark.parametrize("power", [1, 2, 3])
def test_the_law_is_the_moments_of_what_a_row_teaches(power):
    """A fall of (1 - t)^q teaches t (1 - t)^q a row: its fourth power is a Beta(5, 4 q + 1)."""
    a, b = 5, 4 * power + 1
    law = after(5 + 0 * RATE, 5 - (1 - RATE) ** power)
    mean, width = law.parameters
    assert mean == pytest.approx(a / (a + b), abs=0.006)
    deviation = (a * b / (a + b) ** 2 / (a + b + 1)) ** 0.5
    assert width == pytest.approx(max(0.1, deviation), abs=0.006)
    assert law.parameters == [round(mean, 2), round(width, 2)]


def test_token_frequencies_and_noise_do_not_move_it():
    """What falls at rate 1 as well is not use of context; noise leaves t (1 - t): 0.5, 0.15."""
    falling = [7 - 0.5 * n + 0.3 * n * RATE - 0.3 * n for n in range(3)]
    assert after(*falling).parameters == after(RATE, RATE - (1 - RATE)).parameters
    flat = [5 + 0 * RATE - 0.1 * n for n in range(2)]
    assert after(*flat).parameters == [0.5, 0.1], "nothing measured: as at first"
    for count in (2, 3, 10):
        mean, width = after(*[5 + 0 * RATE] * count, noise=0.3).parameters
        assert abs(mean - 0.5) < 0.1
        assert 0.1 <= width <= 0.2


def test_a_diverged_network_leaves_it_as_it_is():
    law = after(5 + 0 * RATE, 5 - (1 - RATE) ** 3)
    before = law.state()
    law.update(rows_of(RATE * torch.nan))
    assert law.state() == before


def test_every_time_can_be_drawn_and_a_later_law_begins_where_it_is_told():
    law, one = ProgressLaw(), 5 + 0 * RATE
    law.update(rows_of(one), 51)
    law.update(rows_of(one - (1 - RATE) ** 3), 101)
    assert [law.at(step).mean for step in (0, 51, 100)] == pytest.approx([0.5] * 3)
    assert law.at(101).mean == law.at(10**6).mean == pytest.approx(law.mean)
    assert law.mean < 0.4
    t = torch.linspace(0, 1, 101, dtype=torch.float64)
    assert float(law.pdf(t).min()) >= UNIFORM_SHARE
    torch.testing.assert_close(law.cdf(law.icdf(t)), t, rtol=0, atol=1e-12)
    assert bell_test(ProgressLaw()).is_bell_shaped
    objective = Bell(law)
    assert objective.at(0).normalizer == pytest.approx(0.5)
    assert objective.at(101).normalizer == pytest.approx(law.mean)
    omega, of_uniform = context_weights(objective, 64), torch.arange(64, 0, -1) / 65
    assert bool((omega > 0.999 * UNIFORM_SHARE * of_uniform).all())
    assert float(omega.sum()) == pytest.approx(64 * law.mean)


def test_it_continues_from_its_state_to_the_last_digit():
    curves = [5 - n * 0.1 * (1 - RATE) ** 2 for n in range(6)]
    whole, half = ProgressLaw(), ProgressLaw()
    for number, nll_K in enumerate(curves):
        whole.update(rows_of(nll_K, 0.01, number), 50 * number)
        if number < 3:
            half.update(rows_of(nll_K, 0.01, number), 50 * number)
    resumed = ProgressLaw()
    resumed.load_state(json.loads(json.dumps(half.state())))
    for number in (3, 4, 5):
        resumed.update(rows_of(curves[number], 0.01, number), 50 * number)
    assert resumed.state() == whole.state()


@pytest.mark.parametrize("objective", [Nelbo, Importance])
def test_objectives_that_weigh_by_the_density_need_a_fixed_law(objective):
    with pytest.raises(ValueError, match="use objective bell"):
        objective(ProgressLaw())
    assert objective(Uniform()).at(3).law == Uniform()
