"""The engine's state on fake pools, under any interleaving of what may happen, against a model of a few lines.

The model: batch *i* of an epoch is made of what the sampler gave as its *i*-th index, is delivered once and in order,
and, with logical workers, by logical worker ``i % count``, whose random state is the number of tickets it made before.
"""

from typing import Any

import pytest
from driver import NOTHING, Driver
from fake_pool import Work
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, precondition, rule
from pool_rules import PoolMachine

pytestmark = pytest.mark.filterwarnings("ignore:worker .* was killed:RuntimeWarning")
ROOM = 1_000_000
ROUNDS = 10
"""More than there are workers to die one after the other."""


class EngineMachine(PoolMachine):
    """See the module."""

    @initialize(
        logicals=st.integers(0, 3),
        local=st.integers(0, 3),
        remote=st.integers(0, 2),
        prefetch=st.integers(1, 8),
        starts_slowly=st.booleans(),
        in_order=st.booleans(),
    )
    def start(self, logicals: int, local: int, remote: int, prefetch: int, starts_slowly: bool, in_order: bool) -> None:
        local = max(local, 1 - remote)
        self.logicals = logicals
        self.in_order = in_order = in_order or logicals > 0  # else the queue of a batch depends on who is slow
        self.options = {
            "logicals": logicals,
            "in_order": in_order,
            "prefetch": max(prefetch, logicals),
            "starts_slowly": starts_slowly,
        }
        self.driver = Driver(local=local, remote=remote, **self.options)
        self.made_before = [0] * logicals
        self.begin(12)

    # -- the model -----------------------------------------------------------------------------------------------

    def expected(self, number: int) -> Work:
        if not self.logicals:
            return Work(self.driver.state.epoch, number, number, 0, 0, None)
        logical = number % self.logicals
        state = self.made_before[logical] + number // self.logicals
        return Work(self.driver.state.epoch, number, number, logical, 0, state)

    def check(self, batch: Any) -> None:
        number = len(self.delivered) if self.in_order else batch.number
        assert number not in self.delivered
        assert batch._replace(worker=0) == self.expected(number)
        self.delivered.append(number)

    # -- the consumer --------------------------------------------------------------------------------------------

    @rule(count=st.integers(0, 30))
    def begin(self, count: int) -> None:
        """Also in the middle of an epoch. Logical workers make what they were sent of it, as torch's do; those that
        never had a worker make all of it, as they would have been sent it."""
        schedule, logicals = self.driver.state.schedule, self.driver.state.logicals
        for logical in range(self.logicals):
            drawn = len(range(logical, schedule.drawn, self.logicals))
            unsent = 0 if logical in logicals._never_placed else schedule.pending(logical)
            self.made_before[logical] += drawn - unsent
        self.driver.begin(count)
        self.driver.state.schedule.max_tries = 1_000_000
        self.count, self.delivered, self.widest = count, [], self.driver.state.schedule.prefetch

    @rule(local=st.integers(0, 3), remote=st.integers(0, 2))
    def resume_elsewhere(self, local: int, remote: int) -> None:
        """Another process goes on by a state of this one, which was in the middle of something and is no more."""
        point = self.driver.state.point()
        self.driver = Driver(local=max(local, 1 - remote), remote=remote, **self.options)
        self.driver.begin(self.count, point)
        assert self.driver.state.point() == point
        self.driver.state.schedule.max_tries = 1_000_000
        self.widest = max(self.widest, self.driver.state.schedule.prefetch, len(point.ahead) + self.widest)

    @rule(times=st.integers(1, 4))
    def take(self, times: int) -> None:
        for _ in range(times):
            batch = self.driver.take()
            if batch is not NOTHING:
                self.check(batch)

    @rule()
    def starve(self) -> None:
        self.driver.fill(starving=True)

    @rule(seconds=st.sampled_from([0.0, 0.5, 5.0]))
    def wait(self, seconds: float) -> None:
        """The consumer looks at what is late; nobody gives up, as workers may come at any time."""
        self.driver.now += seconds
        self.driver.state.late.remake_late(self.driver.state.schedule, self.driver.state.epoch, self.driver.now)
        self.driver.performer.perform()

    @rule(local=st.integers(0, 4), remote=st.integers(0, 3))
    def resize(self, local: int, remote: int) -> None:
        self.driver.resize(max(local, 1 - remote), remote)

    # -- the pools -----------------------------------------------------------------------------------------------

    @precondition(lambda self: self.logicals and self.driver.pools)
    @rule(data=st.data())
    def a_snapshot_arrives(self, data: st.DataObject) -> None:
        self.pool(data).snapshot(data.draw(st.integers(0, self.logicals - 1)))

    @precondition(lambda self: self.driver.pools)
    @rule(data=st.data(), room=st.sampled_from([0, 1, 2, ROOM]))
    def a_pool_is_full(self, data: st.DataObject, room: int) -> None:
        self.pool(data).room = room

    # -- what holds at any time ----------------------------------------------------------------------------------

    @invariant()
    def what_is_on_its_way_is_counted(self) -> None:
        state = self.driver.state
        assert sum(state.placement.load.values()) == len(state.schedule.issued())

    @invariant()
    def no_further_ahead_than_the_prefetch(self) -> None:
        schedule = self.driver.state.schedule
        self.widest = max(self.widest, schedule.prefetch)
        assert schedule.drawn - schedule.delivered <= self.widest

    def teardown(self) -> None:
        if not hasattr(self, "count"):
            return
        for pool in self.driver.pools.values():
            pool.room = ROOM
        for batch in self.driver.finish():
            self.check(batch)
        assert sorted(self.delivered) == list(range(self.count))
        for _ in range(ROUNDS):  # also those that take the place of others, and make again what these were to make
            self.driver.work()
            if all(pool.is_idle for pool in self.driver.pools.values()):
                break
        assert set(self.driver.state.placement.load.values()) <= {0}
        assert all(pool.is_idle for pool in self.driver.pools.values())
        assert self.driver.state.placement.dirty <= set(range(max(1, self.logicals)))


EngineMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestEngineMachine = EngineMachine.TestCase
