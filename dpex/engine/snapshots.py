"""Readings of an engine (`EngineView.reading`), and `IteratorCounters`, which adds counts of the machine.

Any thread may take a reading, which neither waits for the consumer nor takes its lock. A reading may therefore mix
counts from before and after a change.

`IteratorCounters` holds the counts of one iterator. When the iterator ends, it keeps the counts and releases the
engine. `IteratorCounters.freeze` takes no lock, because garbage collection may call it at any point. Creating and
freezing the counters reads a few small files in ``/proc``.
"""

from __future__ import annotations

import threading
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from dpex.measure.batch_times import PoolTimes
from dpex.measure.causes import STARTUP
from dpex.measure.consumer_time import Tally
from dpex.measure.ledger import LastReading, Ledger
from dpex.measure.pool_reading import PoolReading
from dpex.measure.reading import EngineReport, Reading
from dpex.measure.settings import LOCAL, WORKER_POOLS
from dpex.stats import LoaderStats
from dpex.system import meter
from dpex.system.clock import monotonic
from dpex.system.meter import MachineCounts

if TYPE_CHECKING:
    from dpex.engine.plan import EnginePlan
    from dpex.engine.pools import Pools
    from dpex.pools.base import WorkerPool
    from dpex.schedule.engine_state import EngineState

SHORT_S = 0.2
"""Iterators younger than this many seconds do not read run queues, which would take a noticeable share of the time."""
REST_S = 1.0
"""Counters that ran for fewer seconds do not rest after a pass, because resting and waking take 1.5 ms each."""


class EngineView:
    """Reads the engine's plan, events and tally; changes nothing."""

    def __init__(self, plan: EnginePlan, state: EngineState, pools: Pools, tally: Tally) -> None:
        self._plan = plan
        self._state = state
        self._pools = pools
        self._tally = tally

    def stats(self) -> LoaderStats:
        tally = self._tally
        found = self.reading(0, Reading())
        return LoaderStats.of(
            found,
            busy_s=max(0.0, tally.inside_s - tally.blocked_s - tally.first_blocked_s),
            first_batch_s=tally.first_batch_s,
        )

    def _pool(self, pool: WorkerPool) -> PoolReading:
        counts, state = pool.counts, self._state
        return pool.times.reading(
            wanted=counts.wanted,
            requested=counts.requested,
            running=counts.running,
            in_flight=state.placement.load.get(pool.name, 0),
            deaths=state.failures.deaths[pool.name],
            nodes_excluded=len(counts.why_excluded),
            why_excluded=dict(counts.why_excluded),
            sharing_ranks=counts.sharing_ranks,
            failed_nodes=tuple(counts.failed.values()),
        )

    def report(self, found: Reading, *, resizing: bool) -> EngineReport:
        """Return the tuner's report: the reading ``found``, and the limits of the pools."""
        pool = self._pools.by_name.get(LOCAL)
        most = None if pool is None else pool.counts.most
        return EngineReport(
            reading=found,
            resizing=resizing,
            refused=self._pools.refused,
            most_local=None if pool is None or most is None else (most, pool.counts.why_most),
        )

    def reading(self, thread: int, read: Reading) -> Reading:
        """Return all counts. ``read``: the counts of the engine whose samples this engine decodes."""
        now, readers = monotonic(), list(read.pools.values())
        plan, state, tally, pools = self._plan, self._state, self._tally, dict(self._pools.by_name)
        schedule = state.schedule
        local, remote = (pools[name].times if name in pools else PoolTimes() for name in WORKER_POOLS)
        feed, pinner, gpu = plan.feed, plan.pinner, plan.gpu
        pinned = {"h2d": 0 if pinner is None else pinner.copied_bytes}
        if feed is not None:
            pinned = {"h2d": feed.staged_bytes, "device": feed.copied_bytes}
        return Reading(
            **tally.counts(now),
            **({} if feed is None else feed.counts()),
            **({} if gpu is None else gpu.counts()),
            at=now,
            epoch=max(0, state.epoch),
            passes=max(1, state.epoch + 1),
            settings=state.placement.settings,
            prefetch=schedule.prefetch,
            ready=schedule.ready,
            in_flight=schedule.in_flight,
            is_capped=state.rules.is_capped,
            batch_bytes=state.rules.nbytes,
            remade=state.failures.remade,
            late=state.late.made_again,
            errors=dict(tally.errors),
            slow_samples=self._pools.slow_samples.found(),
            failed_samples=self._pools.sample_errors.count,
            latest_failed=tuple(self._pools.sample_errors.latest),
            pass_batches=plan.pass_batches,
            start_s=tally.causes[STARTUP] if tally.batches else 0.0,
            starts_anew=plan.starts_anew,
            lanes=plan.lanes,
            moved_bytes={"shm": local.nbytes, "network": remote.nbytes, **pinned},
            pools={name: self._pool(pool) for name, pool in pools.items()},
            read_s=sum(pool.busy_s for pool in readers),
            read_cpu_s=sum(pool.cpu_s for pool in readers),
            pids=_pids(pools.get(LOCAL)) + read.pids,
            thread=thread,
        )


def _pids(pool: WorkerPool | None) -> tuple[int, ...]:
    return tuple(h.pid for h in getattr(pool, "handles", ()) if h.pid and h.exitcode is None)


# -- counts of one loader, for its diagnosis ---------------------------------------------------------------------------


class CounterSource(Protocol):
    """An iterator's engine, as `IteratorCounters` reads it."""

    def reading(self) -> Reading:
        """Return the counts so far. Any thread may call it."""


class _Baseline(NamedTuple):
    """The machine's counts at the start of a period. ``past``: earlier counts. ``is_resting``: counting is paused.

    ``workers_s``: CPU seconds that local workers had spent for batches.
    """

    machine: MachineCounts
    wall_s: float
    workers_s: float = 0.0
    past: Reading = Reading()
    is_resting: bool = False


def _of_machine(found: Reading) -> dict[str, Any]:
    names = ("trainer_cpu_s", "trainer_queued_s", "others_s", "others_over_s")
    return {name: getattr(found, name) for name in names}


class IteratorCounters(LastReading[Reading]):
    """The counts of one iterator, also after its end. The training thread makes it, and any thread may read it.

    The iterator of persistent workers has many passes. Between two of them its counters may `rest`.
    """

    def __init__(self, source: CounterSource) -> None:
        super().__init__(partial(self._measured, source))
        self._base = Reading()
        self._thread = threading.get_native_id()
        self._from = self._baseline(Reading())

    def read(self) -> Reading:
        """Return the counts since this object was made, or since `restart`."""
        return super().read().since(self._base)

    def restart(self) -> None:
        self._base = super().read()

    def rest(self) -> None:
        """Pause the machine's counts until `wake`, after a pass. In the first `REST_S` of counting, do nothing."""
        base = self._from
        if not base.is_resting and monotonic() - base.machine.at >= REST_S:
            self._from = base._replace(past=Reading(**_of_machine(super().read())), is_resting=True)

    def wake(self) -> None:
        """Continue the machine's counts, because a pass begins."""
        base = self._from
        if base.is_resting:
            self._from = self._baseline(super().read())._replace(past=base.past)

    def _baseline(self, found: Reading) -> _Baseline:
        """Start a period of the machine's counts. Run-queue times of workers count from the start of each worker."""
        machine = meter.read_machine((), found.thread or self._thread, found.pids)
        return _Baseline(machine, found.wall_s, found.local.cpu_s)

    def _measured(self, source: CounterSource) -> Reading:
        """Return the counts, and the counts of the machine."""
        found, base = source.reading(), self._from
        is_short = not base.is_resting and monotonic() - base.machine.at < SHORT_S
        thread = found.thread or self._thread
        now = meter.read_own_cpu() if is_short else meter.read_machine(found.pids, thread, found.pids)
        part = now.part(base.machine, found.wall_s - base.wall_s)  # the share that belongs to passes
        found = now.completed(found, base.machine, part, part, found.local.cpu_s - base.workers_s)
        past = base.past if base.is_resting else base.past.plus(Reading(**_of_machine(found)))
        return replace(found, **_of_machine(past))


class LoaderCounters:
    def __init__(self) -> None:
        self._iterators: Ledger[IteratorCounters] = Ledger(one_after_the_other)
        self.epochs: int = 0
        """Count of epochs that have begun, including epochs without measurements."""

    def add_iterator(self, source: CounterSource) -> IteratorCounters:
        """Return new counters for an iterator's engine. Call `IteratorCounters.freeze` when the iterator has ended."""
        counters = IteratorCounters(source)
        self._iterators.add(counters)
        return counters

    def read(self) -> Reading:
        return self._iterators.read()

    def rest(self) -> None:
        """Pause the machine's counts until `wake`, because a pass of persistent workers has ended."""
        for counters in self._iterators.entries:
            counters.rest()

    def wake(self) -> None:
        """Continue the machine's counts, because another pass of persistent workers begins."""
        self.epochs += 1
        for counters in self._iterators.entries:
            counters.wake()

    def restart(self) -> None:
        for counters in self._iterators.clear():
            counters.restart()


def one_after_the_other(past: Reading, counters: Reading) -> Reading:
    """Add up counts. The latest iterator that got a batch determines the levels."""
    return past.then(counters) if counters.batches else counters.then(past)
