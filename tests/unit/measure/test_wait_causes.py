"""Wall time is split into wait, transfer and work, and the wait by cause: nothing twice, nothing lost."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from waiting import ManualClock

from dpex.measure.batch_times import BatchTimes
from dpex.measure.causes import (
    COLLATE,
    DISPATCH,
    ENCODE,
    H2D,
    READ,
    SAMPLER,
    STARTUP,
    STRAGGLER,
    TIMED,
    TRANSFORM,
    TRANSIT,
    UNKNOWN,
    by_stage,
)
from dpex.measure.consumer_time import LONG_S, NONE_YET, Tally, split
from dpex.measure.pool_reading import STEP_BUCKETS
from dpex.measure.reading import WAIT_BUCKETS, Reading

MAKING = BatchTimes(load_s=0.4, load_cpu_s=0.1, collate_s=0.1, encode_s=0.2, transit_s=0.3)
seconds = st.floats(0.0, 100.0)
makings = st.builds(
    BatchTimes, load_s=seconds, load_cpu_s=seconds, collate_s=seconds, encode_s=seconds, transit_s=seconds
)


class Consumer:
    """A training loop on a clock turned by hand."""

    def __init__(self, **options: Any) -> None:
        self.clock = ManualClock(100.0)
        self.tally = Tally(**options)
        self.blocked_by: list[tuple[float, int]] = []
        self.began = self.clock()

    def step(self, work_s: float) -> None:
        self.clock.advance(work_s)

    def call(
        self, *waits: tuple[float, int], making: BatchTimes | None = None, busy_s: float = 0.0, decode_s: float = 0.0
    ) -> None:
        """One call of next(): waits, each with its cause, then the batch."""
        tally, clock = self.tally, self.clock
        tally.enter(clock())
        clock.advance(busy_s)
        for wait_s, cause in waits:
            tally.block(clock(), cause)
            clock.advance(wait_s)
            tally.unblock(clock())
        tally.batches += 1
        if tally.pending_s:
            tally.explain(making)
        clock.advance(decode_s)
        tally.leave(decode_s, clock(), over=False)

    def end(self, wait_s: float = 0.0) -> None:
        """The call that finds the pass over."""
        self.tally.enter(self.clock())
        self.tally.block(self.clock(), NONE_YET)
        self.clock.advance(wait_s)
        self.tally.unblock(self.clock())
        self.tally.leave(None, self.clock(), over=True)

    @property
    def reading(self) -> Reading:
        return Reading(**self.tally.counts(self.clock()))

    @property
    def causes(self) -> dict[int, float]:
        return {TIMED.index(name): value for name, value in self.reading.causes.items() if value > 1e-12}

    @property
    def accounted_s(self) -> float:
        return self.reading.wall_s


def test_a_wait_is_split_in_proportion_to_the_batchs_stages() -> None:
    assert dict(split(2.0, MAKING)) == pytest.approx(
        {READ: 0.6, TRANSFORM: 0.2, COLLATE: 0.2, ENCODE: 0.4, TRANSIT: 0.6}
    )


def test_more_cpu_time_than_wall_time_is_no_negative_reading() -> None:
    """Two clocks, or a library that computes in several threads."""
    assert by_stage(BatchTimes(load_s=1.0, load_cpu_s=1.5)) == (0.0, 1.0, 0.0, 0.0, 0.0)


@pytest.mark.parametrize("making", [None, BatchTimes()])
def test_nothing_known_of_the_batch_is_said(making: BatchTimes | None) -> None:
    assert split(2.0, making) == [(UNKNOWN, 2.0)]


@given(waited_s=seconds, making=makings)
def test_the_parts_add_up(waited_s: float, making: BatchTimes) -> None:
    parts = split(waited_s, making)
    assert sum(part for _, part in parts) == pytest.approx(waited_s)
    assert all(part >= 0 for _, part in parts)


def test_each_cause_gets_what_was_planted() -> None:
    consumer = Consumer()
    consumer.call()
    consumer.call((1.0, STRAGGLER), busy_s=0.25)
    consumer.call((2.0, H2D), (0.5, STRAGGLER))
    consumer.call((4.0, STARTUP))
    consumer.call((8.0, NONE_YET), making=BatchTimes(collate_s=1.0))
    consumer.call((16.0, NONE_YET))
    consumer.call((1.0, NONE_YET), (32.0, STRAGGLER), (1.0, NONE_YET), making=BatchTimes(encode_s=1.0))
    assert consumer.causes == pytest.approx(
        {STRAGGLER: 33.5, H2D: 2.0, STARTUP: 4.0, COLLATE: 9.0, UNKNOWN: 16.25, ENCODE: 1.0}
    )
    assert consumer.accounted_s == pytest.approx(consumer.clock() - consumer.began)


def test_a_wait_for_an_inline_batch_is_split_by_its_stages() -> None:
    consumer = Consumer()
    consumer.call()
    consumer.tally.enter(consumer.clock())
    consumer.clock.advance(1.0)
    consumer.tally.made_here(load_s=0.5, load_cpu_s=0.25, collate_s=0.25)
    consumer.tally.leave(0.0, consumer.clock(), over=False)
    assert consumer.causes == pytest.approx({READ: 0.25, TRANSFORM: 0.25, COLLATE: 0.25, UNKNOWN: 0.25})


def test_drawing_and_dispatch_in_a_wait_have_causes_of_their_own() -> None:
    consumer = Consumer()
    clock, tally = consumer.clock, consumer.tally

    def busy(cause: int, began: float) -> None:
        clock.advance(1.0)
        tally.busy(cause, began, clock())

    busy(SAMPLER, clock())  # before the pass
    tally.enter(clock())
    busy(DISPATCH, clock())  # in the first call, which is the start's
    tally.leave(0.0, clock(), over=False)
    before = clock()
    busy(DISPATCH, clock())  # by another thread, in a step
    tally.enter(clock())
    busy(DISPATCH, before)  # by another thread, which began before
    busy(SAMPLER, clock())
    busy(DISPATCH, clock())
    tally.block(clock(), STRAGGLER)
    busy(DISPATCH, clock())  # by another thread, in a wait
    tally.unblock(clock())
    tally.leave(0.0, clock(), over=False)
    assert consumer.causes == {STARTUP: 1.0, SAMPLER: 1.0, DISPATCH: 1.0, STRAGGLER: 1.0, UNKNOWN: 1.0}
    assert tally.counts(clock())["work_s"] == 1.0


def test_a_draw_behind_the_opening_of_a_batch_counts_once() -> None:
    consumer = Consumer()
    consumer.call()
    clock, tally = consumer.clock, consumer.tally
    tally.enter(clock())
    clock.advance(0.25)  # the batch is opened
    began = clock()
    clock.advance(2.0)
    tally.busy(SAMPLER, began, clock())
    tally.leave(0.25, clock(), over=False)
    assert consumer.causes == {SAMPLER: 2.0}
    assert tally.counts(clock())["transfer_s"] == 0.25


def test_a_long_wait_is_put_down_as_it_lasts_by_the_batch_before() -> None:
    consumer = Consumer()
    consumer.call()
    consumer.call((0.125, NONE_YET), making=BatchTimes(load_s=1.0))
    consumer.tally.enter(consumer.clock())
    for _ in range(3):
        consumer.tally.block(consumer.clock(), NONE_YET)
        consumer.clock.advance(2 * LONG_S)
        consumer.tally.unblock(consumer.clock())
    assert consumer.causes == pytest.approx({READ: 0.125 + 4 * LONG_S})


def test_a_start_a_step_and_a_caused_wait_count_while_they_last() -> None:
    consumer = Consumer()
    consumer.tally.enter(consumer.clock())
    consumer.clock.advance(5.0)
    assert consumer.causes == {STARTUP: 5.0}
    consumer.tally.leave(0.0, consumer.clock(), over=False)
    consumer.step(0.75)
    assert consumer.reading.work_s == 0.75
    assert consumer.causes == {STARTUP: 5.0}
    consumer.tally.enter(consumer.clock())
    consumer.tally.block(consumer.clock(), STRAGGLER)
    consumer.clock.advance(7.0)
    assert consumer.causes == {STARTUP: 5.0, STRAGGLER: 7.0}


def test_between_passes_nothing_is_counted() -> None:
    consumer = Consumer()
    consumer.call((1.0, NONE_YET))
    consumer.end(2.0)
    before = consumer.accounted_s
    consumer.step(100.0)
    assert consumer.accounted_s == before == 3.0
    consumer.call((4.0, NONE_YET))
    assert consumer.causes == {STARTUP: 5.0, UNKNOWN: 2.0}


def test_a_broken_off_epoch_caps_its_last_step_and_shrinks_none() -> None:
    consumer = Consumer()
    for _ in range(4):
        consumer.call()
        consumer.step(0.5)
    consumer.step(100.0)  # a validation, after `break`
    worked_s = consumer.reading.work_s
    assert worked_s == 1.5 + 10 * 1.5 / 4
    consumer.tally.begin_pass(consumer.clock())
    consumer.step(100.0)
    assert consumer.reading.work_s == worked_s
    consumer.call((4.0, NONE_YET))
    assert consumer.causes == {STARTUP: 4.0}
    assert consumer.reading.work_s == worked_s


calls = st.lists(
    st.tuples(
        st.floats(0.0, 3.0),
        st.lists(st.tuples(st.floats(0.0, 3.0), st.sampled_from([NONE_YET, STRAGGLER, H2D, STARTUP])), max_size=4),
        st.none() | makings,
        st.floats(0.0, 1.0),
        st.floats(0.0, 1.0),
    ),
    min_size=1,
    max_size=12,
)


@given(calls=calls)
def test_whatever_happens_every_second_is_counted_once(calls: list[Any]) -> None:
    consumer = Consumer()
    seen = dict.fromkeys(TIMED, 0.0)
    for number, (work_s, waits, making, busy_s, decode_s) in enumerate(calls):
        if number:
            consumer.step(work_s)
        consumer.call(*waits, making=making, busy_s=busy_s, decode_s=decode_s)
        now = consumer.reading.causes
        assert all(now[name] >= earlier - 1e-9 for name, earlier in seen.items())
        seen = dict(now)
    assert consumer.accounted_s == pytest.approx(consumer.clock() - consumer.began)


def test_histograms_count_where_they_are_kept() -> None:
    consumer = Consumer(detailed=True)
    consumer.call((9.0, NONE_YET))
    for wait_s in (0.0, 0.002, 60.0):
        consumer.step(0.2)
        consumer.call((wait_s, STRAGGLER))
    tally = consumer.tally
    assert sum(tally.waits) == sum(tally.steps) == 3
    assert (tally.waits[0], tally.waits[3], tally.waits[-1]) == (1, 1, 1)
    assert tally.waited_s == pytest.approx(60.002)
    assert tally.steps[STEP_BUCKETS.index(0.25)] == 3
    plain = Consumer()
    plain.call()
    plain.call()
    assert sum(plain.tally.waits) == 0
    assert len(plain.tally.waits) == len(WAIT_BUCKETS) + 1


def test_steps_count_once_they_have_ended() -> None:
    """A look in the middle of the third step finds two steps, and their seconds."""
    consumer = Consumer()
    for _ in range(3):
        consumer.call(busy_s=0.001)
        consumer.step(0.05)
    reading = consumer.reading
    assert (reading.later_batches, reading.step_count) == (2, 2)
    assert (reading.stepped_s, reading.stepping_s) == (pytest.approx(0.1), pytest.approx(0.15))
    assert reading.since(reading).step_count == 0
