"""Planted bottlenecks in real loaders on this machine: each is found, and none is sure where there are two.

Other programs may run beside them: `check` accepts what they cause, if the workers were truly kept waiting for a CPU.
"""

import pytest

from tests.diagnose.planted import CASES, check


@pytest.mark.parametrize("name", CASES)
def test_the_planted_bottleneck_is_found(name: str) -> None:
    found = check(CASES[name])
    if found.verdict.cause in {*CASES[name].accepted} - {"consumer", "too-early"}:
        assert found.facts.wait_ratio > 0.3
