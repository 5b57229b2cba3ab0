"""What may happen in fake pools, as rules of a Hypothesis machine."""

from driver import Driver
from fake_pool import FakePool
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from dpex.schedule.placement import CRASHES_IN_A_ROW


class PoolMachine(RuleBasedStateMachine):
    """A ``driver``, and what its workers may do. What the consumer does, and what holds, a subclass says."""

    driver: Driver

    def pool(self, data: st.DataObject) -> FakePool:
        return self.driver.pools[data.draw(st.sampled_from(sorted(self.driver.pools)))]

    @rule()
    def collect(self) -> None:
        self.driver.collect()

    @rule(seconds=st.sampled_from([0.1, 10.0]))
    def time_passes(self, seconds: float) -> None:
        self.driver.now += seconds

    @precondition(lambda self: self.driver.pools)
    @rule(data=st.data(), count=st.integers(1, 3))
    def workers_come_up(self, data: st.DataObject, count: int) -> None:
        self.pool(data).start(count)

    @precondition(lambda self: self.driver.pools)
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

    @invariant()
    def nothing_is_left_to_be_performed(self) -> None:
        assert self.driver.state.placement.instructions == []
        assert self.driver.performer.fatal is None
