"""Streams on fake pools, under any interleaving of what may happen, against a model of a few lines.

The model: streams are read in turn, or in any order, the ended ones are passed over, and batch *i* of a stream is made
with the state that *i* batches left. Their datasets have a state, so that streams survive deaths and resume elsewhere.
"""

from typing import Any

import pytest
from driver import NOTHING, Driver
from fake_pool import Work
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, rule
from pool_rules import PoolMachine

from dpex.schedule.events import Snapshot
from dpex.schedule.progress import START, ResumePoint

pytestmark = pytest.mark.filterwarnings("ignore:worker .* was killed:RuntimeWarning")
INDICES = 10_000
"""A stream's sampler has no end that matters."""


def in_turn(lengths: list[int]) -> list[tuple[int, int]]:
    """Logical worker and number of each batch, in the order of delivery."""
    return [(logical, at) for at in range(max(lengths)) for logical, length in enumerate(lengths) if at < length]


class StreamMachine(PoolMachine):
    """See the module."""

    @initialize(
        lengths=st.lists(st.integers(0, 6), min_size=1, max_size=3),
        local=st.integers(1, 3),
        prefetch=st.integers(1, 8),
        starts_slowly=st.booleans(),
        in_order=st.booleans(),
    )
    def start(self, lengths: list[int], local: int, prefetch: int, starts_slowly: bool, in_order: bool) -> None:
        self.lengths, self.in_order = lengths, in_order
        self.expected = in_turn(lengths)
        self.options = {"prefetch": max(prefetch, len(lengths)), "starts_slowly": starts_slowly, "in_order": in_order}
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
        found = batch.logical, batch.state
        of_the_stream = (each for each in self.expected if each[0] == batch.logical)
        assert found == (self.expected[0] if self.in_order else next(of_the_stream))
        self.expected.remove(found)

    # -- the consumer ------------------------------------------------------------------------------------------------

    @rule(times=st.integers(1, 4))
    def take(self, times: int) -> None:
        for _ in range(times):
            batch = self.driver.take()
            if batch is not NOTHING:
                self.check(batch)

    @rule(local=st.integers(1, 3), remote=st.integers(0, 2))
    def resize(self, local: int, remote: int) -> None:
        self.driver.resize(local, remote)

    @rule(local=st.integers(1, 3), remote=st.integers(0, 2))
    def resume_elsewhere(self, local: int, remote: int) -> None:
        self.begin(local, remote, self.driver.state.point())

    # -- the pools ---------------------------------------------------------------------------------------------------

    @rule(data=st.data())
    def a_snapshot_arrives(self, data: st.DataObject) -> None:
        self.pool(data).snapshot(data.draw(st.integers(0, len(self.lengths) - 1)))

    # -- what holds at any time, and in the end ----------------------------------------------------------------------

    def teardown(self) -> None:
        if not hasattr(self, "expected"):
            return
        for batch in self.driver.finish():
            self.check(batch)
        assert self.expected == []


StreamMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestStreamMachine = StreamMachine.TestCase
