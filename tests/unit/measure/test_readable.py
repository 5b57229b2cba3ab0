"""Numbers as people read them."""

import math

import pytest

from dpex.measure.readable import byte_count, duration, fine_percent, percent, rounded, size


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (0.5, "0.5"), (12, "12"), (12.345, "12.3"), (99.6, "100"), (999.6, "1,000"), (1234.5, "1,234")],
)
def test_numbers_have_three_digits_or_all_before_the_point(value: float, text: str) -> None:
    assert rounded(value) == text
    assert rounded(-value).removeprefix("-") == text


@pytest.mark.parametrize(
    ("ratio", "whole", "fine"),
    [
        (0.0, "0 %", "0 %"),
        (0.004, "0 %", "0.4 %"),
        (0.0381, "4 %", "3.8 %"),
        (0.0994, "10 %", "9.9 %"),
        (0.0996, "10 %", "10 %"),
        (0.381, "38 %", "38 %"),
        (-0.02, "-2 %", "-2.0 %"),
        (1.0, "100 %", "100 %"),
    ],
)
def test_shares_are_whole_percent_or_fine_with_a_decimal(ratio: float, whole: str, fine: str) -> None:
    assert (percent(ratio), fine_percent(ratio)) == (whole, fine)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0009999, "1 ms"),
        (0.0, "0 s"),
        (1e-9, "0 s"),
        (80e-6, "80 µs"),
        (0.0356, "35.6 ms"),
        (0.9996, "1 s"),
        (1.2449, "1.24 s"),
        (3600.0, "3,600 s"),
    ],
)
def test_times_have_the_unit_that_suits_them(seconds: float, text: str) -> None:
    assert duration(seconds) == text


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (999.6, "1 kB"),
        (1500, "1.5 kB"),
        (999_999, "1 MB"),
        (38.5e6, "38.5 MB"),
        (2e12, "2,000 GB"),
        (-3e6, "-3 MB"),
    ],
)
def test_sizes_have_the_unit_that_suits_them(nbytes: float, text: str) -> None:
    assert size(nbytes) == text


@pytest.mark.parametrize("nbytes", [0, 999, 1500, 290_000, 38_500_000, 500_000_000, 16_000_000_000])
def test_a_size_is_read_as_it_is_written(nbytes: int) -> None:
    assert byte_count(size(nbytes)) == nbytes


def test_what_is_without_end_is_told_as_that() -> None:
    assert (rounded(math.inf), duration(math.inf), size(math.inf)) == ("inf", "inf s", "inf GB")
