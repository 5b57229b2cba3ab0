"""Planted bottlenecks in real loaders on this machine: each is found, and none is sure where there are two."""

from __future__ import annotations

import pytest

from tests.diagnose.planted import CASES, Case

pytestmark = [pytest.mark.alone, pytest.mark.filterwarnings("ignore:This DataLoader will create")]


@pytest.mark.parametrize("name", CASES)
def test_the_planted_bottleneck_is_found(name: str) -> None:
    case: Case = CASES[name]
    diagnosis = case.run()
    verdict = diagnosis.verdict
    assert verdict.cause in case.accepted, str(diagnosis)
    assert case.where in verdict.where
    if verdict.cause not in ("consumer", "too-early"):
        assert verdict.lost_ratio > 0.3
