"""The model of the law: what it answers by hand, and what holds of any work."""

import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dpex.autotune.law.model import Model, PoolCost, Start
from dpex.autotune.limits import Limits
from dpex.measure.pool_reading import PoolReading
from dpex.measure.reading import Reading
from dpex.measure.settings import Settings

ANYTHING = Limits(local=64, remote=0)


def model(
    *,
    service_s: float = 0.1,
    cpu_s: float = 0.1,
    step_s: float = 0.01,
    step_cpu_s: float = 0.0,
    cpus: float = 16.0,
    others: float = 0.0,
    limits: Limits = ANYTHING,
    now: int = 8,
) -> Model:
    place = PoolCost(service_s=service_s, cpu_s=cpu_s)
    return Model(
        now=Settings(local=now, prefetch=2 * now),
        local=place,
        remote=place,
        step_s=step_s,
        step_cpu_s=step_cpu_s,
        cpus=cpus,
        others=others,
        limits=limits,
    )


def workers(local: int, remote: int = 0) -> Settings:
    return Settings(local=local, remote=remote, prefetch=8)


@pytest.mark.parametrize(
    ("work", "count", "rate"),
    [
        (model(), 5, 50),
        (model(step_s=0.05), 16, 20),
        (model(step_s=0.001, step_cpu_s=0.01), 32, 16 / 0.11),  # 16 CPUs, for workers and steps
        (model(step_s=0.001, others=6.0), 16, 16 * 16 / 22 / 0.1),  # a kernel gives each of 22 threads an equal part
        (model(step_s=0.001, others=6.0), 4, 40),  # 4 workers find 10 CPUs free
        (replace(model(step_s=0.001), measured_rate=60.0), 8, 60),
        (replace(model(step_s=0.001), measured_rate=60.0), 4, 30),
    ],
)
def test_the_rate_is_that_of_the_bottleneck(work: Model, count: int, rate: float) -> None:
    assert work.rate(workers(count)).value == pytest.approx(rate)
    assert work.expected(workers(count)) == pytest.approx((rate, work.step_s))


@pytest.mark.parametrize(
    ("count", "rate", "step_s"),
    [
        (2, 20, 0.02),  # 10 ms of a step are a wait for a CPU
        (4, 40, 0.03),  # twice that beside twice the workers, of which 33 fit in a second
        (1, 10, 0.015),
    ],
)
def test_workers_take_cpus_from_the_training_thread(count: int, rate: float, step_s: float) -> None:
    work = replace(model(step_s=0.01), now=workers(2), step_queued_s=0.01)
    assert work.expected(workers(count)) == pytest.approx((min(rate, 100 / 3), step_s))


def test_cpus_left_to_workers_say_nothing_of_a_machine_alone() -> None:
    busy = replace(model(step_s=0.001, cpus=2.0, others=1.7, cpu_s=0.1), now=workers(2), measured_rate=5.0)
    assert busy.without_others().rate(workers(2)).value == pytest.approx(20.0)
    kept = busy.without_others(keeps_factor=True)
    assert kept.rate(workers(2)).value == pytest.approx(20.0 * max(0.5, 5.0 * 3.7 / 40.0))
    waiting = replace(busy, local=PoolCost(service_s=0.1, cpu_s=0.001))
    assert waiting.without_others().rate(workers(2)).value == pytest.approx(waiting.rate(workers(2)).value)


def test_the_interval_grows_with_the_distance() -> None:
    near, far = (model(step_s=0.001).rate(workers(count)) for count in (8, 16))
    assert (near.high - near.low) / near.value < (far.high - far.low) / far.value


@pytest.mark.parametrize(
    ("work", "best"),
    [
        (model(step_s=0.02), (6, 0)),  # what the step takes, and a reserve
        (model(step_s=0.001), (16, 0)),  # the CPUs
        (model(step_s=0.005, cpus=4, limits=Limits(local=64, remote=40)), (3, 21)),  # a CPU is left to the loop
    ],
)
def test_the_best_is_what_the_step_takes_and_a_reserve(work: Model, best: tuple[int, int]) -> None:
    assert work.best(1.2) == best


def test_few_workers_are_best_where_starting_them_takes_longest() -> None:
    work = replace(model(step_s=0.001, cpu_s=0.01, cpus=2), start=Start(seconds=2, workers=8, batches=10))
    assert work.best(1.2)[0] <= 3
    assert replace(work, start=None).best(1.2)[0] > 20


def test_a_start_grows_with_workers_beyond_the_cpus() -> None:
    start = Start(seconds=0.2, workers=2, batches=10)
    assert [start.seconds_with(workers, 2.0) for workers in (1, 2, 4, 14)] == pytest.approx([0.2, 0.2, 0.3, 0.8])


def test_what_ends_the_stall() -> None:
    """33.5 batches a second of 1.1 CPU seconds need 37 CPUs, of which there are 16."""
    found = model(cpu_s=1.1, service_s=1.1, step_s=1 / 33.5).to_end_stall()
    assert (found.rate, found.cpus, found.more_cpus) == pytest.approx((33.5, 36.85, 20.85))
    assert found.cost == pytest.approx(16 / 36.85)
    assert found.workers == 37


def measured(*, is_full: bool = False, **pools: PoolReading) -> Model:
    """The model of 100 batches, for each of which the training process takes 20 ms of CPU time."""
    work = Reading(later_batches=100, trainer_cpu_s=2.0, cpus=8.0, pools=pools)
    known: dict[str, Any] = {"others": 0.0, "limits": Limits(), "measured_rate": None, "error": 0.1}
    return Model.of(work, now=workers(4), step_s=0.05, is_full=is_full, **known)


MADE = PoolReading(tickets=100, load_s=10.0, load_cpu_s=6.0)
SENT = PoolReading(tickets=100, load_s=20.0, load_cpu_s=4.0, transit_s=1.0)


def test_a_pool_without_batches_takes_the_cost_of_another() -> None:
    found = measured(local=MADE, remote=PoolReading())
    assert found.local == found.remote
    assert (found.local.service_s, found.local.cpu_s) == pytest.approx((0.1, 0.06))


def test_the_way_from_a_remote_worker_is_part_of_its_time() -> None:
    found = measured(local=MADE, remote=SENT)
    assert (found.remote.service_s, found.remote.cpu_s) == pytest.approx((0.21, 0.04))


def test_full_cpus_explain_the_time_of_workers_of_this_machine() -> None:
    found = measured(is_full=True, local=MADE, remote=replace(SENT, load_cpu_s=16.0))
    assert (found.local.service_s, found.remote.service_s) == pytest.approx((0.06, 0.21))


def test_batches_made_in_process_are_no_part_of_steps() -> None:
    assert measured(local=MADE).step_cpu_s == pytest.approx(0.02)
    assert measured(inline=replace(MADE, load_cpu_s=1.5)).step_cpu_s == pytest.approx(0.005)


seconds = st.floats(1e-5, 100.0)


@st.composite
def models(draw: st.DrawFn) -> Model:
    service_s = draw(seconds)
    limits = Limits(
        local=draw(st.integers(1, 64)),
        remote=draw(st.integers(0, 64)),
        memory=draw(st.one_of(st.just(math.inf), st.floats(1e8, 1e11))),
        worker_bytes=draw(st.floats(0, 1e9)),
        batch_bytes=draw(st.floats(0, 1e8)),
    )
    step_s = draw(seconds)
    return Model(
        now=workers(draw(st.integers(1, 64)), draw(st.integers(0, 64))),
        local=PoolCost(service_s=service_s, cpu_s=service_s * draw(st.floats(0, 1))),
        remote=PoolCost(service_s=draw(seconds), cpu_s=0.0),
        step_s=step_s,
        step_cpu_s=step_s * draw(st.floats(0, 1)),
        cpus=draw(st.floats(0.1, 128)),
        others=draw(st.floats(0, 128)),
        limits=limits,
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
    rate, step_s = work.expected(workers(local, remote))
    assert 0 < rate <= found.value
    assert rate * step_s <= 1.0 + 1e-9


@given(models())
def test_the_best_is_within_the_limits(work: Model) -> None:
    local, remote = work.best(1.2)
    assert local + remote >= 1
    assert local <= max(1, work.limits.local)
    assert remote <= work.limits.remote


@given(models(), st.floats(1.0, 4.0))
def test_slower_work_never_needs_fewer_cpus(work: Model, factor: float) -> None:
    slower = replace(work, local=replace(work.local, cpu_s=work.local.cpu_s * factor))
    assert work.to_end_stall().cpus <= slower.to_end_stall().cpus
    assert 0 <= work.to_end_stall().cost <= 1
