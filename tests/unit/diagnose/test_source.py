"""What a diagnosis takes from counts."""

from __future__ import annotations

import pytest

from dpex.diagnose.source import Context, facts_of
from dpex.measure.sums import PoolStats, Sums


@pytest.mark.parametrize(
    ("running", "requested", "workers"), [(0, 2, 2), (1, 4, 4), (4, 4, 4), (3, 2, 3)], ids=lambda number: str(number)
)
def test_local_workers_that_still_started_when_the_pass_ended_count(running: int, requested: int, workers: int) -> None:
    """A script that looks at one batch ends the pass before they all serve, and has not asked for none."""
    sums = Sums(batches=1, pools={"local": PoolStats(running=running, requested=requested)})
    assert facts_of(sums, Context()).workers == workers


def test_of_remote_workers_those_count_that_serve() -> None:
    """There may be no room for the others."""
    sums = Sums(batches=1, pools={"remote": PoolStats(running=1, requested=4)})
    assert facts_of(sums, Context()).workers == 1
