"""The policy of the guide plays in simulated worlds: it raises nothing and passes no limit."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.simulation.kept import truths
from benchmarks.simulation.scenarios import load
from benchmarks.simulation.score import cold_start, play
from dpex.autotune.supervisor import Supervisor

pytestmark = pytest.mark.long
GUIDE = Path(__file__).parents[2] / "docs" / "how-to" / "extend.md"
MOST_LINES = 25


def example() -> str:
    (block,) = [one for one in re.findall(r"```python\n(.*?)```", GUIDE.read_text(), re.DOTALL) if "policy=" in one]
    return block


def test_the_example_is_short() -> None:
    assert len(example().splitlines()) <= MOST_LINES


@pytest.mark.parametrize("name", list(load("development"))[::14])
def test_the_example_keeps_all_limits(name: str) -> None:
    names: dict[str, Any] = {}
    exec(example().partition("config = ")[0], names)
    scenario = load("development")[name]
    config = replace(scenario.config, policy=names["Doubling"])
    start = cold_start(scenario.world, config)
    result = play(scenario, truths("development", scenario), lambda: Supervisor(config, start))
    assert (list(result.errors), list(result.beyond)) == ([], [])
