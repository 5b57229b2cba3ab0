"""The model of the law: what it answers by hand, and what holds of any work."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dpex.autotune.law.model import Model, Place, Start
from dpex.autotune.law.walls import Walls
from dpex.autotune.types import Settings

ANYTHING = Walls(local=64, remote=0)


def model(
    *,
    service_s: float = 0.1,
    cpu_s: float = 0.1,
    step_s: float = 0.01,
    step_cpu_s: float = 0.0,
    cpus: float = 16.0,
    others: float = 0.0,
    walls: Walls = ANYTHING,
    now: int = 8,
) -> Model:
    place = Place(service_s=service_s, cpu_s=cpu_s)
    return Model(
        now=Settings(local=now, prefetch=2 * now),
        local=place,
        remote=place,
        step_s=step_s,
        step_cpu_s=step_cpu_s,
        cpus=cpus,
        others=others,
        walls=walls,
    )


def workers(local: int, remote: int = 0) -> Settings:
    return Settings(local=local, remote=remote, prefetch=8)


# -- by hand -----------------------------------------------------------------------------------------------------------


def test_workers_limit_the_rate() -> None:
    assert model().rate(workers(5)).value == pytest.approx(50)


def test_the_step_limits_the_rate() -> None:
    assert model(step_s=0.05).rate(workers(16)).value == pytest.approx(20)
    assert model(step_s=0.05).wait(workers(16)).value == 0


def test_cpus_limit_the_rate() -> None:
    """160 batches a second would need 16 CPUs for workers and 1.6 for steps."""
    found = model(step_s=0.001, step_cpu_s=0.01).rate(workers(32))
    assert found.value == pytest.approx(16 / 0.11)


def test_other_programs_leave_fewer_cpus() -> None:
    """A kernel gives each of 16 workers beside 6 busy threads an equal part of 16 CPUs; 4 workers find 10 CPUs free."""
    beside = model(step_s=0.001, others=6.0)
    assert beside.rate(workers(16)).value == pytest.approx(16 * 16 / 22 / 0.1)
    assert beside.free_cpus(4) == 10


def test_wait_is_the_share_of_the_rate_that_is_missing() -> None:
    assert model(step_s=0.01).wait(workers(5)).value == pytest.approx(0.5)


def test_the_rate_is_corrected_by_what_was_measured() -> None:
    measured = replace(model(step_s=0.001), measured_rate=60.0)
    assert measured.rate(workers(8)).value == pytest.approx(60)
    assert measured.rate(workers(4)).value == pytest.approx(30)


def test_the_interval_grows_with_the_distance() -> None:
    near, far = (model(step_s=0.001).rate(workers(count)) for count in (8, 16))
    assert (near.high - near.low) / near.value < (far.high - far.low) / far.value


def test_the_best_is_what_the_step_takes_and_a_reserve() -> None:
    assert model(step_s=0.02).best(1.2) == (6, 0)


def test_the_best_does_not_surpass_the_cpus() -> None:
    assert model(step_s=0.001).best(1.2) == (16, 0)


def test_remote_workers_make_what_local_ones_cannot() -> None:
    """A CPU of the four is left to the training process."""
    found = model(step_s=0.005, cpus=4, walls=Walls(local=64, remote=40)).best(1.2)
    assert found == (3, 21)


def test_few_workers_are_best_where_starting_them_takes_longest() -> None:
    walls = Walls(local=64, remote=0)
    work = replace(model(step_s=0.001, cpu_s=0.01, cpus=2, walls=walls), start=Start(seconds=2, workers=8, batches=10))
    assert work.best(1.2)[0] <= 3
    assert replace(work, start=None).best(1.2)[0] > 20


def test_what_ends_the_stall() -> None:
    """33.5 batches a second of 1.1 CPU seconds need 37 CPUs, of which there are 16."""
    work = replace(model(cpu_s=1.1, service_s=1.1, step_s=1 / 33.5), stages={"load": 0.61, "collate": 0.39})
    found = work.to_end_stall()
    assert (found.rate, found.cpus, found.more_cpus) == pytest.approx((33.5, 36.85, 20.85))
    assert found.cost == pytest.approx(16 / 36.85)
    assert (found.workers, found.stage) == (37, ("load", 0.61))
    assert found.is_cpu_bound


# -- of any work -------------------------------------------------------------------------------------------------------

seconds = st.floats(1e-5, 100.0)


@st.composite
def models(draw: st.DrawFn) -> Model:
    service_s = draw(seconds)
    walls = Walls(
        local=draw(st.integers(1, 64)),
        remote=draw(st.integers(0, 64)),
        memory=draw(st.one_of(st.just(math.inf), st.floats(1e8, 1e11))),
        worker_bytes=draw(st.floats(0, 1e9)),
        batch_bytes=draw(st.floats(0, 1e8)),
    )
    step_s = draw(seconds)
    return Model(
        now=workers(draw(st.integers(1, 64)), draw(st.integers(0, 64))),
        local=Place(service_s=service_s, cpu_s=service_s * draw(st.floats(0, 1))),
        remote=Place(service_s=draw(seconds), cpu_s=0.0),
        step_s=step_s,
        step_cpu_s=step_s * draw(st.floats(0, 1)),
        cpus=draw(st.floats(0.1, 128)),
        others=draw(st.floats(0, 128)),
        walls=walls,
        measured_rate=draw(st.one_of(st.none(), st.floats(1e-3, 1e5))),
        error=draw(st.floats(0, 1)),
        start=draw(st.one_of(st.none(), st.builds(Start, seconds=seconds, workers=st.just(4), batches=st.just(20)))),
    )


counts = st.integers(1, 128)


@given(models(), counts, counts)
def test_more_local_workers_are_never_predicted_slower(work: Model, one: int, other: int) -> None:
    few, many = sorted((one, other))
    assert work.rate(workers(few)).value <= work.rate(workers(many)).value * (1 + 1e-9)


@given(models(), counts, counts)
def test_no_rate_surpasses_the_step_and_its_interval_holds_it(work: Model, local: int, remote: int) -> None:
    found = work.rate(workers(local, remote))
    assert 0 < found.low <= found.value <= found.high <= work.demand * (1 + 1e-9)
    wait = work.wait(workers(local, remote))
    assert 0 <= wait.low <= wait.value <= wait.high <= 1


@given(models())
def test_the_best_is_within_the_walls(work: Model) -> None:
    local, remote = work.best(1.2)
    assert local + remote >= 1
    assert local <= max(1, work.walls.local)
    assert remote <= work.walls.remote


@given(models(), st.floats(1.0, 4.0))
def test_slower_work_never_needs_fewer_cpus(work: Model, factor: float) -> None:
    slower = replace(work, local=replace(work.local, cpu_s=work.local.cpu_s * factor))
    assert work.to_end_stall().cpus <= slower.to_end_stall().cpus
    assert 0 <= work.to_end_stall().cost <= 1
