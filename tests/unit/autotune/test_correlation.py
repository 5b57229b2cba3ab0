"""How long costs stay alike: told from windows, and played back."""

from __future__ import annotations

import math
import random
from statistics import fmean, pvariance

import pytest

from dpex.autotune.constants.levels import CORRELATION
from dpex.autotune.correlation import Correlation, in_correlated_order, variance_of_mean

SPREAD = 0.4


def costs(count: int, length: float, seed: int = 0) -> list[float]:
    """Log-normal costs of mean 1 and standard deviation `SPREAD`, their logarithms a first-order process."""
    rng, sigma = random.Random(seed), math.sqrt(math.log(1.0 + SPREAD**2))
    rho = math.exp(-1.0 / length) if length else 0.0
    state, found = rng.gauss(0.0, 1.0), []
    for _ in range(count):
        state = rho * state + math.sqrt(1.0 - rho * rho) * rng.gauss(0.0, 1.0)
        found.append(math.exp(sigma * state - sigma * sigma / 2))
    return found


def learned(costs: list[float], batches: int) -> Correlation:
    """From windows of so many batches, with a level that is known."""
    correlation = Correlation()
    for start in range(0, len(costs), batches):
        correlation.add(batches, fmean(costs[start : start + batches]), 1.0, 1e9)
    return correlation


@pytest.mark.parametrize(("count", "length"), [(2, 1.0), (20, 5.0), (100, 50.0), (30, 200.0)])
def test_the_variance_of_a_mean_is_the_sum_of_all_correlations(count: int, length: float) -> None:
    summed = sum(math.exp(-abs(a - b) / length) for a in range(count) for b in range(count)) / count**2
    assert variance_of_mean(count, length) == pytest.approx(summed, rel=1e-6)


@pytest.mark.parametrize("count", [1, 2, 50])
def test_without_correlation_it_is_one_over_their_number(count: int) -> None:
    assert variance_of_mean(count, 0.0) == pytest.approx(1.0 / count)
    assert variance_of_mean(count, 1e9) == pytest.approx(1.0)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(("length", "batches"), [(50.0, 200), (20.0, 60), (10.0, 40)])
def test_the_length_is_found_within_a_factor_of_three(length: float, batches: int, seed: int) -> None:
    found = learned(costs(60 * batches, length, seed), batches).length(SPREAD)
    assert length / 3 < found < 3 * length


@pytest.mark.parametrize("seed", range(5))
def test_independent_costs_have_none(seed: int) -> None:
    assert learned(costs(60 * 40, 0.0, seed), 40).length(SPREAD) < 2.0


def test_few_windows_tell_nothing_and_leave_a_doubt() -> None:
    correlation = learned(costs(3 * 40, 0.0), 40)
    assert correlation.length(SPREAD) == 0.0
    assert correlation.cautious_length(0.0) > 10.0
    assert learned(costs(40 * 40, 0.0), 40).cautious_length(0.0) == 0.0


def test_windows_of_another_level_are_forgotten() -> None:
    steady = costs(30 * 40, 0.0)
    correlation = learned(steady, 40)
    for _ in range(2):
        correlation.add(40, 3.0, 1.0, 1e9)
    assert correlation.length(SPREAD) > 10.0
    correlation.forget_latest(2)
    assert correlation.length(SPREAD) < 2.0


@pytest.mark.parametrize(
    ("count", "mean", "level", "known_by"),
    [(0, 1.0, 1.0, 9), (5, 1.0, 0.0, 9), (5, 1.0, math.nan, 9), (5, 99.0, 1.0, 9)],
)
def test_what_is_no_scatter_is_not_taken_for_one(count: float, mean: float, level: float, known_by: float) -> None:
    correlation = Correlation()
    for _ in range(20):
        correlation.add(count, mean, level, known_by)
    assert correlation.length(SPREAD) == 0.0


def test_no_length_is_beyond_what_windows_can_tell() -> None:
    correlation = Correlation()
    for number in range(40):
        correlation.add(10, 0.2 if number % 2 else 1.8, 1.0, 1e9)
    assert correlation.length(SPREAD) <= CORRELATION.longest


def test_a_correlated_order_has_the_values_and_the_correlation() -> None:
    values = [1.0 + 0.01 * number for number in range(400)]
    played = in_correlated_order(values, 20.0)
    assert fmean(played) == pytest.approx(fmean(values), rel=0.01)
    assert set(played) <= set(values)
    mean = fmean(played)
    after = fmean((a - mean) * (b - mean) for a, b in zip(played, played[1:] + played[:1], strict=True))
    assert math.exp(-1 / 7) < after / pvariance(played) < math.exp(-1 / 60)
    assert played == in_correlated_order(values, 20.0)
