"""Standard errors against hand formulas and against simulations whose variance is known."""

import numpy as np
import pytest

from bellmask.evaluate.errors import clustered_error, collapsed_strata_error


def shuffled_strata(count: int, rng: np.random.Generator) -> np.ndarray:
    """One level per stratum of [0, 1), in random order."""
    return (rng.permutation(count) + rng.random(count)) / count


def root_mean_square(values: list[float]) -> float:
    return float(np.sqrt(np.mean(np.square(values))))


def test_even_counts_are_the_pairs_formula():
    """SE^2 = sum (Y_2i - Y_2i-1)^2 / B^2 in order of level."""
    level = np.array([0.9, 0.1, 0.5, 0.3, 0.7, 0.8])
    value = np.array([6.0, 1.0, 3.0, 2.5, 4.0, 9.0])
    # in order: 1, 2.5 | 3, 4 | 9, 6
    expected = np.sqrt(1.5**2 + 1.0**2 + 3.0**2) / 6
    assert collapsed_strata_error(value, level) == pytest.approx(expected, rel=1e-12)


def test_odd_counts_end_in_a_stratum_of_three():
    """Three values with variance s^2 add 3 s^2 to the variance of the sum."""
    level = np.array([0.1, 0.3, 0.5, 0.7, 0.9])
    value = np.array([1.0, 2.5, 3.0, 4.0, 8.0])
    # in order: 1, 2.5 | 3, 4, 8 (mean 5, squares 4 + 1 + 9, over 2)
    expected = np.sqrt(1.5**2 + 3 * 14 / 2) / 5
    assert collapsed_strata_error(value, level) == pytest.approx(expected, rel=1e-12)
    assert collapsed_strata_error(value[2:], level[2:]) == pytest.approx(np.sqrt(21) / 3)


@pytest.mark.parametrize("count", [2, 3, 8, 9])
def test_squared_errors_are_unbiased_for_independent_values(count):
    rng = np.random.default_rng(1)
    squares = [
        collapsed_strata_error(3 * rng.standard_normal(count), rng.random(count)) ** 2
        for _ in range(8000)
    ]
    spread = np.std(squares, ddof=1) / np.sqrt(len(squares))
    assert abs(np.mean(squares) - 9 / count) < 4 * spread
    assert spread < 0.03 * 9 / count


def test_a_trend_over_strata_is_not_noise():
    """Noise of known size around a steep trend: the naive error is ten times too wide."""
    rng, count, noise = np.random.default_rng(2), 200, 0.1
    collapsed, naive = [], []
    for _ in range(400):
        level = shuffled_strata(count, rng)
        value = 4 * level + noise * rng.standard_normal(count)
        collapsed.append(collapsed_strata_error(value, level))
        naive.append(clustered_error(value))
    truth = np.hypot(noise, 4 / count / np.sqrt(12)) / np.sqrt(count)
    assert root_mean_square(collapsed) == pytest.approx(truth, rel=0.05)
    assert min(naive) > 10 * truth


def test_the_trend_is_taken_out_within_clusters_too():
    """trend + effect of a document + noise: Var(mean) = sd_document^2 / D + sd_noise^2 / B."""
    rng, documents, per_document = np.random.default_rng(3), 50, 6
    cluster = np.repeat(np.arange(documents), per_document)
    count = len(cluster)
    clustered, alone, means = [], [], []
    for _ in range(800):
        level = shuffled_strata(count, rng)
        effect = 0.4 * rng.standard_normal(documents)[cluster]
        value = 4 * level + effect + 0.3 * rng.standard_normal(count)
        clustered.append(collapsed_strata_error(value, level, cluster))
        alone.append(collapsed_strata_error(value, level))
        means.append(value.mean())
    truth = np.sqrt(0.4**2 / documents + 0.3**2 / count)
    assert np.std(means) == pytest.approx(truth, rel=0.1)
    assert root_mean_square(clustered) == pytest.approx(truth, rel=0.1)
    assert root_mean_square(alone) < 0.6 * truth


def test_clusters_of_one_give_the_error_of_independent_values():
    rng = np.random.default_rng(4)
    own = [
        collapsed_strata_error(rng.standard_normal(60), rng.random(60), np.arange(60))
        for _ in range(2000)
    ]
    assert root_mean_square(own) == pytest.approx(1 / np.sqrt(60), rel=0.03)


def test_without_clusters_it_is_the_textbook_error():
    """1, 2, 3, 6: mean 3, squares 4 + 1 + 0 + 9, over 3, over 4."""
    assert clustered_error(np.array([1.0, 2, 3, 6])) == pytest.approx(np.sqrt(14 / 3 / 4))


def test_clustered_error_is_the_hand_formula():
    """Residuals -3 -1 0 | 0 -1 5 sum to -4 and 4 within clusters, G / (G - 1) = 2, n = 6."""
    value = np.array([1.0, 4, 3, 3, 9, 4])
    cluster = np.array([7, -2, 7, -2, -2, 7])
    # mean 4; cluster 7: -3, -1, 0; cluster -2: 0, -1, 5
    expected = np.sqrt(2 * (4**2 + 4**2)) / 6
    assert clustered_error(value, cluster) == pytest.approx(expected, rel=1e-12)


def test_clusters_of_one_are_no_clusters():
    value = np.random.default_rng(5).standard_normal(11)
    label = np.random.default_rng(6).permutation(11) * 1000
    assert clustered_error(value, label) == pytest.approx(value.std(ddof=1) / np.sqrt(11))


def test_values_that_repeat_within_a_cluster_count_once():
    value = np.random.default_rng(7).standard_normal(30)
    repeated = clustered_error(np.repeat(value, 5), np.repeat(np.arange(30), 5))
    assert repeated == pytest.approx(value.std(ddof=1) / np.sqrt(30), rel=1e-12)
