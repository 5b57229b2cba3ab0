"""Which scenario gets worse without a constant: what is compared, what is kept, and the page that is made of it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.simulation.constants import PAGE, WRITE, page
from benchmarks.simulation.scenarios import load
from benchmarks.simulation.without import QUICK, Played, Without, compare, measure, played, read, values_instead, write
from dpex.autotune.constants import Description
from dpex.autotune.constants.groups import described

pytestmark = pytest.mark.long

VOTES = described()["grow.votes"]
WAS = {
    "a": Played(regret=0.02, missed={}, decisions=("1.0 in-process",)),
    "b": Played(regret=0.01, missed={"regret": 0.06}, decisions=()),
}


def test_the_page_says_what_the_constants_say() -> None:
    assert PAGE.read_text() == page(read()), WRITE


def test_quick_scenarios_are_of_the_development_set() -> None:
    assert set(QUICK) <= load().keys()


def test_the_scenario_whose_regret_grows_most_is_told() -> None:
    after = {"a": replace(WAS["a"], regret=0.03), "b": replace(WAS["b"], regret=0.06, decisions=("2.0 in-process",))}
    found = compare(VOTES, 1, WAS, after)
    assert found == Without(
        value=2, instead=1, scenarios=2, different=1, worst="b", target="regret", before=0.01, after=0.06
    )
    assert "off: `b` has a regret of 6.0% instead of 1.0%" in page({"grow.votes": [found]})


def test_else_one_that_misses_what_it_had_met() -> None:
    after = WAS | {"a": replace(WAS["a"], regret=0.024, missed={"decisions": 4.0})}
    found = compare(VOTES, 1, WAS, after)
    assert (found.worst, found.target, found.after, found.different) == ("a", "decisions", 4.0, 0)
    assert "off: `a` misses its target of decisions (4)" in page({"grow.votes": [found]})


def test_else_none() -> None:
    found = compare(VOTES, 1, WAS, WAS)
    assert found.worst == ""
    assert "none gets worse; no decision changes" in page({"grow.votes": [found]})
    assert "none gets worse" not in page({"grow.votes": [replace(found, value=3)]}), "measured of another value"


def test_a_constant_that_cannot_be_switched_off_is_halved_and_doubled() -> None:
    plain = Description(name="x.y", value=3, unit="", low=0, high=9, meaning="", why="", off=None)
    assert values_instead(plain) == (2, 6)
    assert values_instead(replace(plain, value=1)) == (1, 2)
    assert values_instead(replace(plain, value=3.0)) == (1.5, 6.0)
    assert values_instead(replace(plain, off=0)) == (0,)


def test_what_is_kept_is_read_again_in_the_order_of_the_constants(tmp_path: Path) -> None:
    entries = {name: [Without(value=1.0, instead=float("inf"), scenarios=2, different=0)] for name in described()}
    write({**dict(reversed(entries.items())), "gone.away": []}, tmp_path / "kept.json")
    assert list(read(tmp_path / "kept.json").items()) == list(entries.items())


def test_a_constant_is_another_while_its_scenarios_are_played() -> None:
    """Workers that queue for the seeks of a disk are kept where nobody sees that they queue."""
    constant = described()["evaluation.clearly_more"]
    name, found = measure((constant, values_instead(constant)[0]), {"storage-seeks": played("storage-seeks")})
    assert name == "evaluation.clearly_more"
    assert (found.scenarios, found.different, found.worst, found.target) == (1, 1, "storage-seeks", "regret")
    assert found.after > found.before + 0.02
    assert described()["evaluation.clearly_more"] == constant
