"""The controller's walls: what limits, memory and the cluster allow; and how long what did not help is remembered."""

from __future__ import annotations

from typing import Any

import pytest

from dpex.autotune.config import AutotuneConfig
from dpex.autotune.limits import Guard
from dpex.autotune.policy import Bounds
from dpex.autotune.types import Sample, Settings
from dpex.measure.samples import HostSample, LaneSample

MB = 1e6
WAITING = 0.95
"""Of a worker's time: without other walls twenty workers for each CPU would pay."""
DEEPEST = 4096


def bounds(host: dict[str, Any], config: dict[str, Any] | None = None, **sample: Any) -> Bounds:
    """For four CPUs, and batches of 10 MB."""
    settings = Settings(local=2, depth=4)
    seen = Sample(at=1.0, seconds=1.0, settings=settings, host=HostSample(**{"cpus": 4.0} | host), **sample)
    return Guard(AutotuneConfig(**config or {})).bounds(seen, 10 * MB, WAITING)


def test_without_any_other_wall_work_that_waits_may_have_many_workers() -> None:
    found = bounds({})
    assert found.local == AutotuneConfig().max_waiting
    assert found.depth == DEEPEST
    assert found.most_depth(found.local) == found.depth


@pytest.mark.parametrize(("budget", "depth"), [(100 * MB, 10), (39 * MB, 3), (5 * MB, 1)])
def test_a_memory_budget_bounds_the_batches_in_flight(budget: float, depth: int) -> None:
    found = bounds({"batch_budget": int(budget)})
    assert found.depth == depth
    assert found.most_depth(1) == depth


def test_the_smaller_of_budget_and_deepest_holds() -> None:
    assert bounds({"batch_budget": int(100 * MB)}, {"max_depth": 4}).depth == 4
    assert bounds({"batch_budget": int(30 * MB)}, {"max_depth": 4}).depth == 3


@pytest.mark.parametrize(("free", "workers"), [(1010 * MB, 10), (510 * MB, 5), (10 * MB, 1), (-500 * MB, 1)])
def test_memory_bounds_the_workers_of_this_machine(free: float, workers: int) -> None:
    """One batch has room beside them; one worker may always stay."""
    assert bounds({"memory_free": int(free), "worker_bytes": 100 * MB}).local == workers


def test_what_workers_and_batches_have_already_is_theirs() -> None:
    """Two workers of 100 MB and three batches of 10 MB, and nothing beside them."""
    held = {"local": LaneSample(requested=2, running=2), "ready": 1, "in_flight": 2}
    found = bounds({"memory_free": 0, "worker_bytes": 100 * MB}, **held)
    assert (found.local, found.memory) == (2, 230 * MB)
    assert found.most_depth(2) == 3
    assert found.most_depth(1) == 13


def test_fewest_workers_are_kept_whatever_memory_says() -> None:
    assert bounds({"memory_free": int(50 * MB), "worker_bytes": 100 * MB}, {"min_local": 3}).local == 3


@pytest.mark.parametrize(
    ("remote", "config", "most"),
    [
        (LaneSample(), {}, 0),
        (LaneSample(room=6), {}, 6),
        (LaneSample(requested=4, running=4, room=6), {}, 10),
        (LaneSample(requested=4, running=3, unplaced=1, room=0), {}, 3),
        (LaneSample(requested=4, running=4, room=6), {"max_remote": 5}, 5),
    ],
)
def test_remote_workers_are_bounded_by_what_the_cluster_has(
    remote: LaneSample, config: dict[str, Any], most: int
) -> None:
    assert bounds({}, config, remote=remote).remote == most


def test_what_did_not_help_is_not_tried_for_a_while_and_then_for_longer() -> None:
    guard = Guard(AutotuneConfig(remember_s=10.0))
    assert not guard.forbids("deeper", 0.0)
    guard.remember("deeper", 0.0)
    assert [guard.forbids("deeper", at) for at in (0.0, 9.9, 10.0)] == [True, True, False]
    guard.remember("deeper", 10.0)
    assert [guard.forbids("deeper", at) for at in (29.9, 30.0)] == [True, False]
    assert not guard.forbids("more local", 10.0)
    guard.remember("deeper", 30.0)
    guard.forget()
    assert not guard.forbids("deeper", 30.0)


def test_where_fewer_were_too_few_a_larger_number_may_still_do() -> None:
    guard = Guard(AutotuneConfig(remember_s=10.0))
    guard.remember("fewer local", 0.0, 3)
    assert [guard.forbids("fewer local", 1.0, count) for count in (2, 3, 4)] == [True, True, False]
