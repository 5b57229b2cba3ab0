"""The controller's walls: what limits, memory and the cluster allow."""

from __future__ import annotations

from typing import Any

import pytest

from dpex.autotune import limits
from dpex.autotune.config import AutotuneConfig
from dpex.autotune.planner import Bounds
from dpex.autotune.types import Sample, Settings
from dpex.measure.samples import MachineSample, PoolSample

MB = 1e6
WAITING = 0.95
"""Of a worker's time: without other walls twenty workers for each CPU would pay."""
DEEPEST = 4096


def bounds(machine: dict[str, Any], config: dict[str, Any] | None = None, **sample: Any) -> Bounds:
    """For four CPUs, and batches of 10 MB."""
    settings = Settings(local=2, prefetch=4)
    seen = Sample(at=1.0, seconds=1.0, settings=settings, machine=MachineSample(**{"cpus": 4.0} | machine), **sample)
    return limits.bounds(AutotuneConfig(**config or {}), seen, 10 * MB, WAITING)


def test_without_any_other_wall_work_that_waits_may_have_many_workers() -> None:
    found = bounds({})
    assert found.local == AutotuneConfig().max_waiting
    assert found.prefetch == DEEPEST
    assert found.most_prefetch(found.local) == found.prefetch


@pytest.mark.parametrize(("budget", "prefetch"), [(100 * MB, 10), (39 * MB, 3), (5 * MB, 1)])
def test_a_memory_budget_bounds_the_batches_in_flight(budget: float, prefetch: int) -> None:
    found = bounds({"batch_budget": int(budget)})
    assert found.prefetch == prefetch
    assert found.most_prefetch(1) == prefetch


def test_the_smaller_of_budget_and_deepest_holds() -> None:
    assert bounds({"batch_budget": int(100 * MB)}, {"max_prefetch": 4}).prefetch == 4
    assert bounds({"batch_budget": int(30 * MB)}, {"max_prefetch": 4}).prefetch == 3


@pytest.mark.parametrize(("free", "workers"), [(1010 * MB, 10), (510 * MB, 5), (10 * MB, 1), (-500 * MB, 1)])
def test_memory_bounds_the_workers_of_this_machine(free: float, workers: int) -> None:
    """One batch has room beside them; one worker may always stay."""
    assert bounds({"memory_free": int(free), "worker_bytes": 100 * MB}).local == workers


def test_what_workers_and_batches_have_already_is_theirs() -> None:
    """Two workers of 100 MB and three batches of 10 MB, and nothing beside them."""
    held = {"local": PoolSample(requested=2, running=2), "ready": 1, "in_flight": 2}
    found = bounds({"memory_free": 0, "worker_bytes": 100 * MB}, **held)
    assert (found.local, found.memory) == (2, 230 * MB)
    assert found.most_prefetch(2) == 3
    assert found.most_prefetch(1) == 13


def test_fewest_workers_are_kept_whatever_memory_says() -> None:
    assert bounds({"memory_free": int(50 * MB), "worker_bytes": 100 * MB}, {"min_local": 3}).local == 3


@pytest.mark.parametrize(
    ("remote", "config", "most"),
    [
        (PoolSample(), {}, 0),
        (PoolSample(room=6), {}, 6),
        (PoolSample(requested=4, running=4, room=6), {}, 10),
        (PoolSample(requested=4, running=3, unplaced=1, room=0), {}, 3),
        (PoolSample(requested=4, running=4, room=6), {"max_remote": 5}, 5),
        (PoolSample(requested=4, running=4, room=6, granted=7), {}, 7),
        (PoolSample(requested=4, running=4, room=0, granted=2), {}, 2),
        (PoolSample(requested=4, running=4, room=0, granted=2), {"min_remote": 3}, 3),
    ],
)
def test_remote_workers_are_bounded_by_what_the_cluster_has(
    remote: PoolSample, config: dict[str, Any], most: int
) -> None:
    assert bounds({}, config, remote=remote).remote == most


@pytest.mark.parametrize(
    ("wanted", "found"),
    [
        pytest.param(Settings(local=2, prefetch=4), Settings(local=2, prefetch=4), id="as it is"),
        pytest.param(Settings(local=9, prefetch=4), Settings(local=5, prefetch=4), id="more workers beside batches"),
        pytest.param(Settings(local=2, prefetch=90), Settings(local=2, prefetch=34), id="more batches beside workers"),
        pytest.param(Settings(local=1, prefetch=90), Settings(local=1, prefetch=34), id="a worker that still goes"),
    ],
)
def test_what_is_wanted_is_cut_to_what_there_is_memory_for(wanted: Settings, found: Settings) -> None:
    """540 MB in all: two workers of 100 MB, four batches of 10 MB that are drawn, and 300 MB that are free."""
    machine = MachineSample(cpus=4.0, memory_free=int(300 * MB), worker_bytes=100 * MB)
    now = Settings(local=2, prefetch=4)
    workers = PoolSample(requested=2, running=2)
    seen = Sample(at=1.0, seconds=1.0, settings=now, machine=machine, local=workers, ready=2, in_flight=2)
    assert limits.allowed(AutotuneConfig(), seen, 10 * MB, wanted) == found
