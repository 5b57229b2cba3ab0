"""The constants of the law are few, and the page that tells of them is up to date."""

from dataclasses import fields

from benchmarks.simulation.constants import PAGE, WRITE, meanings, page, read
from dpex.autotune.constants import Constants

MOST = 35


def test_there_are_few_and_each_says_what_it_means() -> None:
    names = [field.name for field in fields(Constants)]
    assert len(names) <= MOST
    assert list(meanings()) == names
    assert all(meaning.endswith(".") for meaning in meanings().values())


def test_the_page_is_up_to_date() -> None:
    assert PAGE.read_text() == page(read()), f"run {WRITE}"


def test_what_was_measured_is_told() -> None:
    told = page({"depth": {"instead": "1", "all": 0.0133, "world": "one gets worse"}})
    (row,) = [line for line in told.splitlines() if line.startswith("| `depth`")]
    assert row.endswith("| 1 | 1.33 % |  | one gets worse |")
