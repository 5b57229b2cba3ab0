"""A measured quantity: what it takes to call it moved."""

from __future__ import annotations

import math
import random

import pytest

from dpex.autotune.noise import Level


def level(*windows: float, count: float = 10, spread: float = 0.0) -> Level:
    made = Level()
    for mean in windows:
        made.add(mean * count, count, spread)
    return made


def test_it_is_the_mean_per_thing() -> None:
    made = Level()
    made.add(3.0, 1)
    made.add(9.0, 3)
    assert made.value == 3.0
    assert made.weight == 4


def test_it_knows_nothing_at_first() -> None:
    made = Level()
    assert not made.known
    assert math.isnan(made.value)
    assert made.get(7.0) == 7.0
    assert not made.has_moved(1.0, 100)


def test_two_windows_far_away_are_a_move_and_one_is_not() -> None:
    made = level(1.0, 1.0, 1.0, 1.0)
    assert not made.has_moved(20.0, 10)
    made.add(20.0, 10)
    assert made.has_moved(20.0, 10)


def test_three_windows_not_so_far_away_are_a_move() -> None:
    made = level(*[1.0] * 12)
    for _ in range(2):
        assert not made.has_moved(12.5, 10)
        made.add(12.5, 10)
    assert made.has_moved(12.5, 10)


@pytest.mark.parametrize("factor", [0.5, 2.0])
def test_down_is_a_move_as_up_is(factor: float) -> None:
    made = level(1.0, 1.0, 1.0, 1.0)
    made.add(10 * factor, 10)
    assert made.has_moved(10 * factor, 10)


def test_a_single_slow_thing_is_no_move() -> None:
    made = level(*[1.0] * 6)
    made.add(50.0, 1)
    assert not made.has_moved(50.0, 1)


def test_noise_is_no_move_however_long_one_looks() -> None:
    rng = random.Random(1)
    made = Level()
    for number in range(2_000):
        total = 10 * rng.gauss(1.0, 0.2)
        assert number < 10 or not made.has_moved(total, 10)  # its noise must be known first
        made.add(total, 10)
    assert made.value == pytest.approx(1.0, rel=0.1)


def test_the_first_windows_of_another_level_do_not_count_as_its_noise() -> None:
    made = level(*[1.0] * 8)
    moved = []
    for _ in range(4):
        moved.append(made.has_moved(50.0, 10))
        made.add(50.0, 10)
    assert moved[1]


def test_what_varies_by_itself_must_move_further() -> None:
    narrow, wide = level(*[1.0] * 8), level(*[1.0] * 8)
    for made in (narrow, wide):
        made.add(16.0, 10)
    assert narrow.has_moved(16.0, 10, spread=0.1)
    assert not wide.has_moved(16.0, 10, spread=2.0)


def test_after_a_move_only_the_latest_counts() -> None:
    made = level(*[1.0] * 8, 4.0)
    made.restart(40.0, 10)
    made.add(40.0, 10)
    assert made.value == 4.0


def test_a_window_in_which_it_moved_counts_only_if_it_is_nearer_to_the_new_level() -> None:
    mostly_old = level(*[1.0] * 8, 1.5)
    mostly_old.restart(80.0, 10)
    mostly_old.add(80.0, 10)
    assert mostly_old.value == 8.0


def test_loosened_it_follows_the_next_window_half_way() -> None:
    made = level(*[1.0] * 8)
    made.loosen()
    made.add(30.0, 10)
    assert made.value == pytest.approx(2.0)


def test_what_is_below_nothing_counts_in_the_mean_and_is_told_as_nothing() -> None:
    made = level(0.3, -0.1, -0.1, -0.1)
    assert made.value == pytest.approx(0.0)
    made.add(-10.0, 10)
    assert made.value == 0.0
    made.add(100.0, 10)
    assert made.value == pytest.approx((0.3 - 0.3 - 1.0 + 10.0) / 6), "errors in both directions cancel out"


def test_a_fall_to_less_than_nothing_is_a_fall_to_nothing() -> None:
    made = level(1.0, 1.0, 1.0, 1.0)
    made.add(-1.0, 10)
    assert made.has_moved(-1.0, 10)
    made.restart(-1.0, 10)
    made.add(-1.0, 10)
    assert made.value == 0.0
