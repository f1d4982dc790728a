"""Dropout's choice against coins: frequency, independence, seeds, an unbiased mean."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from bellmask.model.dropout import LEVELS, draw_kept, dropout_scale

CPU = torch.device("cpu")
RATES = [0.01, 0.1, 0.25, 0.5, 0.9]


def draw(shape: tuple[int, ...], rate: float, seed: int = 0) -> Tensor:
    torch.manual_seed(seed)
    return draw_kept(shape, rate, CPU)


@pytest.mark.parametrize("rate", RATES)
def test_the_share_of_kept_elements_is_one_minus_the_rate(rate: float) -> None:
    count = 1_000_000
    kept = draw((1000, 1000), rate)
    assert kept.dtype == torch.bool
    error = math.sqrt(rate * (1 - rate) / count)
    # the rate is met to a multiple of 2^-16
    assert abs(kept.double().mean() - (1 - rate)) < 5 * error + 1 / LEVELS


@pytest.mark.parametrize("rate", RATES)
def test_counts_of_many_masks_vary_like_a_binomial(rate: float) -> None:
    """The variance too: a mask of fixed counts, or of copied elements, is not made of coins."""
    torch.manual_seed(1)
    counts = torch.stack([draw_kept((50, 20), rate, CPU).sum() for _ in range(2000)]).double()
    variance = 1000 * rate * (1 - rate)
    assert abs(counts.mean() - 1000 * (1 - rate)) < 5 * math.sqrt(variance / 2000)
    assert abs(counts.var() / variance - 1) < 5 * math.sqrt(2 / 2000)


def test_torchs_seed_decides() -> None:
    first = draw((64, 64), 0.5, seed=3)
    assert torch.equal(first, draw((64, 64), 0.5, seed=3))
    agreement = (first == draw((64, 64), 0.5, seed=4)).double().mean()
    assert abs(agreement - 0.5) < 5 * 0.5 / 64
    torch.manual_seed(3)
    draw_kept((64, 64), 0.5, CPU)
    agreement = (first == draw_kept((64, 64), 0.5, CPU)).double().mean()
    assert abs(agreement - 0.5) < 5 * 0.5 / 64, "a second draw is another one"


def test_numpys_global_generator_is_left_alone() -> None:
    import numpy as np

    before = np.random.get_state()[1].copy()  # noqa: NPY002
    draw((100,), 0.5)
    assert (np.random.get_state()[1] == before).all()  # noqa: NPY002


@pytest.mark.parametrize("shape", [(), (1,), (3,), (5, 1), (7, 3), (2, 3, 5), (0,), (0, 4), (4, 4)])
def test_any_shape(shape: tuple[int, ...]) -> None:
    kept = draw(shape, 0.5)
    assert kept.shape == shape
    assert torch.equal(draw(shape, 0.0), torch.ones(shape, dtype=torch.bool))


@pytest.mark.parametrize("size", [1, 2, 3, 5, 6, 7])
def test_every_element_of_a_size_not_divisible_by_four_is_a_coin(size: int) -> None:
    torch.manual_seed(2)
    kept = torch.stack([draw_kept((size,), 0.3, CPU) for _ in range(4000)]).double()
    assert ((kept.mean(0) - 0.7).abs() < 5 * math.sqrt(0.21 / 4000)).all()


@pytest.mark.parametrize("rate", [0.1, 0.5])
@pytest.mark.parametrize("lag", [1, 2, 3, 4, 5, 64])
def test_neighbours_are_independent(rate: float, lag: int) -> None:
    kept = draw((1_000_000,), rate).double() - (1 - rate)
    correlation = (kept[lag:] * kept[:-lag]).mean() / (rate * (1 - rate))
    assert abs(correlation) < 5e-3


@pytest.mark.parametrize("rate", [0.0, *RATES, 1 / 3])
def test_the_scale_keeps_the_mean(rate: float) -> None:
    """Exactly: the scale is the inverse of the share that the levels keep, over all levels."""
    shares = torch.arange(LEVELS) >= round(rate * LEVELS)
    assert shares.double().mean() * dropout_scale(rate) == pytest.approx(1, abs=1e-12)
    assert dropout_scale(rate) == pytest.approx(1 / (1 - rate), rel=1e-3)
    kept = draw((1000, 1000), rate).double() * dropout_scale(rate)
    assert abs(kept.mean() - 1) < 5 * math.sqrt(rate / (1 - rate) / 1e6) + 1e-12
