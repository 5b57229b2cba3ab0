"""How many workers make a short pass the quickest, where each pass starts workers of its own."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from dpex.autotune.runtime.allowed import MOST, quickest
from dpex.autotune.types import Sample, Settings
from dpex.measure.samples import MachineSample, PoolSample

WAITING = PoolSample(tickets=10, load_s=0.16, cpu_s=0.005)
SHORT = Sample(
    at=1.0,
    seconds=0.3,
    settings=Settings(local=2, prefetch=4),
    batches=10,
    work_s=0.0,
    local=WAITING,
    machine=MachineSample(cpus=2.0),
    pass_batches=20,
    start_s=0.1,
    starts_anew=True,
)


def test_a_pass_takes_its_start_and_its_batches() -> None:
    found = quickest(SHORT)
    assert found is not None
    assert 3 <= found <= 6  # one saves 0.16 s of 0.32 with a second one, and each costs some 0.01 s


def test_the_longer_the_pass_the_more_workers() -> None:
    numbers = [quickest(replace(SHORT, pass_batches=batches)) for batches in (2, 20, 200, 600)]
    assert numbers == sorted(numbers, key=lambda number: number or 0)
    assert numbers[0] == 2
    assert numbers[-1] is not None
    assert 20 < numbers[-1] <= MOST


def test_work_that_computes_has_no_more_than_the_cpus_serve() -> None:
    computing = PoolSample(tickets=10, load_s=0.16, cpu_s=0.16)
    assert quickest(replace(SHORT, local=computing, pass_batches=40)) == 2


def test_a_slow_step_needs_one_worker() -> None:
    assert quickest(replace(SHORT, work_s=0.5)) == 1


@pytest.mark.parametrize("long", [{"pass_batches": 100_000}, {"work_s": 10.0}])
def test_a_long_pass_is_left_to_the_law(long: dict[str, Any]) -> None:
    assert quickest(replace(SHORT, **long)) is None


@pytest.mark.parametrize(
    "unknown",
    [{"starts_anew": False}, {"pass_batches": 0}, {"start_s": 0.0}, {"local": PoolSample()}, {"batches": 0}],
)
def test_nothing_is_said_where_it_is_not_known(unknown: dict[str, Any]) -> None:
    assert quickest(replace(SHORT, **unknown)) is None
