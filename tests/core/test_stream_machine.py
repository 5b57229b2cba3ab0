"""Streams on fake pools, under any interleaving of what may happen, against a model of a few lines.

The model: streams are read in turn, the ended ones are passed over, and batch *i* of a stream is made with the state
that *i* batches left. Their datasets have a state, so that they survive deaths, move, and are resumed elsewhere.
"""

from __future__ import annotations

from typing import Any

import pytest
from driver import NOTHING, Driver
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from dpex.core.events import Snapshot
from dpex.core.failures import CRASHES_IN_A_ROW
from dpex.core.logical_log import START
from dpex.core.resume_point import ResumePoint
from dpex.testing import FakePool, Work

pytestmark = pytest.mark.filterwarnings("ignore:worker .* was killed:RuntimeWarning")
INDICES = 10_000
"""A stream's sampler has no end that matters."""


def in_turn(lengths: list[int]) -> list[tuple[int, int]]:
    """Logical worker and number of each batch, in the order of delivery."""
    return [(logical, at) for at in range(max(lengths)) for logical, length in enumerate(lengths) if at < length]


class StreamMachine(RuleBasedStateMachine):
    """See the module."""

    @initialize(
        lengths=st.lists(st.integers(0, 6), min_size=1, max_size=3),
        local=st.integers(1, 3),
        prefetch=st.integers(1, 8),
        starts_slowly=st.booleans(),
    )
    def start(self, lengths: list[int], local: int, prefetch: int, starts_slowly: bool) -> None:
        self.lengths = lengths
        self.expected = in_turn(lengths)
        self.delivered = 0
        self.options = {"prefetch": max(prefetch, len(lengths)), "starts_slowly": starts_slowly}
        self.begin(local, 0, None)

    def begin(self, local: int, remote: int, point: ResumePoint | None) -> None:
        """A process begins, or goes on where another one stood; each stream tells its state before its first batch."""
        streams = len(self.lengths)
        self.driver = Driver(
            logicals=streams, iterable=True, make=self.batch_of, local=local, remote=remote, **self.options
        )
        self.driver.begin(INDICES, point)
        for logical in range(streams if point is None else 0):
            self.driver.tell(Snapshot(logical, *START, 0))
        self.driver.state.schedule.max_tries = 1_000_000

    def batch_of(self, work: Work) -> Work:
        assert work.state is not None
        if work.state >= self.lengths[work.logical]:
            raise StopIteration
        return work

    def check(self, batch: Any) -> None:
        assert (batch.logical, batch.state) == self.expected[self.delivered]
        self.delivered += 1

    # -- the consumer ------------------------------------------------------------------------------------------------

    @rule(times=st.integers(1, 4))
    def take(self, times: int) -> None:
        for _ in range(times):
            batch = self.driver.take()
            if batch is not NOTHING:
                self.check(batch)

    @rule()
    def collect(self) -> None:
        self.driver.collect()

    @rule(local=st.integers(1, 3), remote=st.integers(0, 2))
    def resize(self, local: int, remote: int) -> None:
        self.driver.resize(local, remote)

    @rule(local=st.integers(1, 3), remote=st.integers(0, 2))
    def resume_elsewhere(self, local: int, remote: int) -> None:
        self.begin(local, remote, self.driver.state.point())

    @rule(seconds=st.sampled_from([0.1, 10.0]))
    def time_passes(self, seconds: float) -> None:
        self.driver.now += seconds

    # -- the pools ---------------------------------------------------------------------------------------------------

    def pool(self, data: st.DataObject) -> FakePool:
        return self.driver.pools[data.draw(st.sampled_from(sorted(self.driver.pools)))]

    @rule(data=st.data(), count=st.integers(1, 3))
    def workers_come_up(self, data: st.DataObject, count: int) -> None:
        self.pool(data).start(count)

    @rule(data=st.data(), tickets=st.integers(1, 4))
    def work(self, data: st.DataObject, tickets: int) -> None:
        pool = self.pool(data)
        pool.work(data.draw(st.sampled_from([None, *pool.workers()])), tickets)

    @precondition(lambda self: any(pool.workers() for pool in self.driver.pools.values()))
    @rule(data=st.data())
    def a_worker_dies(self, data: st.DataObject) -> None:
        pool = self.pool(data)
        if pool.workers() and pool.crashes < CRASHES_IN_A_ROW:
            pool.kill(data.draw(st.sampled_from(pool.workers())))

    @rule(data=st.data())
    def a_snapshot_arrives(self, data: st.DataObject) -> None:
        self.pool(data).snapshot(data.draw(st.integers(0, len(self.lengths) - 1)))

    # -- what holds at any time, and in the end ----------------------------------------------------------------------

    @invariant()
    def nothing_is_left_to_be_performed(self) -> None:
        assert self.driver.state.instructions == []
        assert self.driver.performer.fatal is None

    def teardown(self) -> None:
        if not hasattr(self, "expected"):
            return
        for batch in self.driver.finish():
            self.check(batch)
        assert self.delivered == len(self.expected)


StreamMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestStreamMachine = StreamMachine.TestCase
