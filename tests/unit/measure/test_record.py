"""Every field of a record says what it counts and how it adds up; whatever is told of a run agrees with that."""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from types import FrameType
from typing import Any

import pytest

from dpex.diagnose.facts import CallFacts
from dpex.measure.batch_times import CACHE_USE, RECENT, SUMMED, BatchTimes, PoolTimes, encoded_times, loaded_times
from dpex.measure.pool_reading import STAGES, CallSums, PoolReading
from dpex.measure.reading import Reading
from dpex.measure.record import _LEVEL as LEVEL
from dpex.measure.record import _STATE as STATE
from dpex.measure.record import Record, by_name, counter, few_of_many, histogram, latest, level, state
from dpex.telemetry.catalog import BY_NAME

RECORDS = (Reading, PoolReading, CallSums)


@dataclass(frozen=True, kw_only=True)
class Inner(Record):
    made: int = counter("Things.")
    running: int = level("Workers.")


@dataclass(frozen=True, kw_only=True)
class Whole(Record):
    """One field of each kind."""

    seconds: float = counter("Seconds.", "seconds")
    stall_s: float | None = counter("Seconds, where they are known.", "seconds", default=None)
    ready: int = level("Things.")
    is_capped: bool = state("Whether.", default=False)
    at: float = latest("When.")
    sizes: tuple[int, ...] = histogram("Sizes.", (1.0,))
    kept: Sequence[float] = few_of_many("Some.", lambda one, other: [*one, *other][:3])
    errors: Mapping[str, int] = by_name("Errors.")
    inner: Mapping[str, Inner] = by_name("Parts.")


ONE = Whole(
    seconds=2.0,
    ready=3,
    is_capped=True,
    at=5.0,
    sizes=(1, 2),
    kept=[1.0, 2.0],
    errors={"batch": 1},
    inner={"a": Inner(made=4, running=2), "b": Inner(made=1, running=1)},
)
OTHER = Whole(
    seconds=1.0,
    stall_s=0.5,
    ready=1,
    at=4.0,
    sizes=(0, 1, 7),
    kept=[3.0, 4.0],
    errors={"worker": 2},
    inner={"a": Inner(made=10, running=5)},
)


def test_records_of_the_same_time_add_up() -> None:
    assert ONE.plus(OTHER) == Whole(
        seconds=3.0,
        stall_s=0.5,
        ready=4,
        is_capped=True,
        at=5.0,
        sizes=(1, 3, 7),
        kept=[1.0, 2.0, 3.0],
        errors={"batch": 1, "worker": 2},
        inner={"a": Inner(made=14, running=7), "b": Inner(made=1, running=1)},
    )


def test_one_after_the_other_levels_are_those_of_the_later() -> None:
    found = ONE.then(OTHER)
    assert (found.seconds, found.stall_s, found.sizes) == (3.0, 0.5, (1, 3, 7))
    assert (found.ready, found.is_capped) == (1, False)
    assert found.inner == {"a": Inner(made=14, running=5), "b": Inner(made=1, running=0)}


def test_what_is_new_is_never_below_zero() -> None:
    found = ONE.since(OTHER)
    assert (found.seconds, found.stall_s, found.ready, found.sizes) == (1.0, None, 3, (1, 1, 0))
    assert found.errors == {"batch": 1}
    assert found.inner == {"a": Inner(made=0, running=2), "b": Inner(made=1, running=1)}
    assert ONE.then(OTHER).since(ONE).seconds == OTHER.seconds
    assert ONE.since(Whole()) == ONE


def test_at_rest_nothing_goes_on() -> None:
    found = ONE.at_rest()
    assert (found.ready, found.seconds, found.inner["a"]) == (0, 2.0, Inner(made=4))


@pytest.mark.parametrize("record", RECORDS)
def test_every_field_says_what_it_is_and_units_are_in_names(record: type[Record]) -> None:
    declared = record.declared()
    assert list(declared) == [one.name for one in fields(record)]
    for name, quantity in declared.items():
        assert quantity.help.endswith(".")
        assert (quantity.unit == "seconds") >= name.endswith("_s")


@pytest.mark.parametrize("record", [Reading, PoolReading])
def test_every_metric_of_a_record_is_in_the_catalogue(record: type[Record]) -> None:
    for quantity in record.declared().values():
        if not quantity.metric:
            continue
        metric = BY_NAME[quantity.metric]
        assert metric.unit == quantity.unit
        assert (metric.kind == "histogram") == bool(quantity.total)
        assert (metric.kind == "gauge") == (quantity.rule in (LEVEL, STATE))
        if quantity.stage:
            assert quantity.stage in STAGES


def test_the_calls_of_a_diagnosis_keep_the_names_of_the_counts() -> None:
    known = {one.name for one in fields(CallSums)}
    assert {one.name for one in fields(CallFacts)} - known == {"name", "all_wall_s", "all_cpu_s"}


def test_what_a_pool_counts_is_told() -> None:
    times = PoolTimes()
    first = BatchTimes(4, 1.0, 0.25, 0.5, 0.125, calls=(("load", 3, 0.5, 0.25, 1),))
    times.count(BatchTimes(*encoded_times(first, encode_s=0.25, cpu_s=0.5, nbytes=100, ended_at=3.0)))
    times.count(BatchTimes(4, 1.0, calls=(("load", 1, 0.5, 0.25, 1),)))
    pool = times.reading(running=2)
    assert (pool.tickets, pool.load_s, pool.collate_s, pool.encode_s) == (2, 2.0, 0.5, 0.25)
    assert (pool.load_cpu_s, pool.collate_cpu_s, pool.encode_cpu_s, pool.cpu_s) == (0.25, 0.125, 0.125, 0.5)
    assert pool.calls == {"load": CallSums(calls=4, wall_s=1.0, cpu_s=0.5, drawing=2)}
    assert (pool.running, sum(pool.services), pool.services_s) == (2, 2, (1.75, 1.0))


def test_times_are_packed_by_name() -> None:
    loaded = {name: number for number, name in enumerate(BatchTimes._fields[: BatchTimes._fields.index("cache_hits")])}
    CACHE_USE.take()
    CACHE_USE.hits, CACHE_USE.misses, CACHE_USE.saved_s = 20, 30, 40.0
    times = loaded_times(**loaded)
    assert times == BatchTimes(**loaded, cache_hits=20, cache_misses=30, cache_saved_s=40.0)  # type: ignore[arg-type]
    sent = encoded_times(times, encode_s=0.5, cpu_s=100.0, nbytes=7, ended_at=9.0)
    cpu_s = 100.0 - times.load_cpu_s - times.collate_cpu_s
    assert BatchTimes(*sent) == times._replace(encode_s=0.5, encode_cpu_s=cpu_s, nbytes=7, ended_at=9.0)
    with pytest.raises(TypeError, match="positional"):
        loaded_times(*loaded.values())


def test_the_times_of_a_batch_add_up_to_those_of_its_pool() -> None:
    stages = {f"{stage}{kind}" for stage in STAGES for kind in ("_s", "_cpu_s")}
    assert set(SUMMED) == stages | {"transit_s", "cache_hits", "cache_misses", "cache_saved_s"}


@pytest.mark.parametrize("count", [1, RECENT - 1, RECENT, RECENT + 1, 3 * RECENT])
def test_all_batches_are_in_the_sums(count: int) -> None:
    times = PoolTimes()
    for number in range(count):
        times.count(BatchTimes(load_s=1.0, transit_s=0.5, nbytes=number))
    found = times.reading()
    assert (found.tickets, found.load_s, found.transit_s) == (count, count, 0.5 * count)
    assert (times.nbytes, len(times.services_s)) == (count * (count - 1) // 2, count)


def test_another_thread_reads_sums_of_the_same_batches() -> None:
    """As it would at each line of `count`."""
    times, seen = PoolTimes(), []

    def look(frame: FrameType, event: str, _: Any) -> Any:
        seen.append(times.reading())
        return look if frame.f_code is PoolTimes.count.__code__ else None

    before = sys.gettrace()
    sys.settrace(look)
    try:
        for _ in range(RECENT + 1):
            times.count(BatchTimes(load_s=1.0, collate_s=1.0))
    finally:
        sys.settrace(before)
    assert len(seen) > 5 * RECENT
    assert all(found.tickets == found.load_s == found.collate_s for found in seen)
