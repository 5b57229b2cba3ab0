"""Planted bottlenecks in real loaders on this machine: each is found, and none is sure where there are two.

Other programs may run beside them: `check` accepts what they cause, if the workers were truly kept waiting for a CPU.
"""

from __future__ import annotations

import pytest

from tests.diagnose.planted import CASES, check

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")


DEFAULT = (
    *("consumer", "reading", "computing", "collating", "large objects", "stragglers", "too little memory"),
    *("tiny batches", "slow sampler", "slow start", "reading and collating", "too early"),
)
"""One for each cause. The others plant the same in another place."""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.long] * (name not in DEFAULT)) for name in CASES]
)
def test_the_planted_bottleneck_is_found(name: str) -> None:
    verdict = check(CASES[name]).verdict
    if verdict.cause in {*CASES[name].accepted} - {"consumer", "too-early"}:
        assert verdict.wait_ratio > 0.3
