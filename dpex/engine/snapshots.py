"""Readings of an engine: for the user (`stats`), for the tuner (`look`), for metrics (`sums`).

Any thread may ask; nothing here waits for the consumer or takes its lock, so a value may be from the middle of a
change, right to within the moment that passes meanwhile.
"""

from __future__ import annotations

from dpex.engine.plan import EnginePlan
from dpex.engine.pools import Pools
from dpex.measure.batch_times import RECENT, PoolTimes
from dpex.measure.consumer_time import STARTUP, EngineLook, Tally
from dpex.measure.samples import PoolSample
from dpex.measure.sums import PoolStats, Sums
from dpex.pools.base import WorkerPool
from dpex.schedule.engine_state import EngineState
from dpex.schedule.names import LOCAL, REMOTE, WORKER_POOLS
from dpex.stats import LoaderStats
from dpex.system.clock import monotonic
from dpex.system.gpu.stall import GpuSteps


class EngineView:
    """Reads the engine's plan, events and tally; changes nothing."""

    def __init__(self, plan: EnginePlan, state: EngineState, pools: Pools, tally: Tally) -> None:
        self._plan = plan
        self._state = state
        self._pools = pools
        self._tally = tally

    def stats(self) -> LoaderStats:
        """A snapshot; see `LoaderStats`."""
        tally, schedule = self._tally, self._state.schedule
        return LoaderStats(
            epoch=max(0, self._state.epoch),
            batches=tally.batches,
            prefetch=schedule.prefetch,
            in_flight=schedule.in_flight,
            ready=schedule.ready,
            batch_bytes=self._state.rules.nbytes,
            ready_bytes=schedule.ready * self._state.rules.nbytes,
            wait_s=tally.inside_s,
            own_s=max(0.0, tally.inside_s - tally.blocked_s - tally.first_blocked_s),
            head_s=tally.head_s,
            work_s=tally.work_s,
            first_batch_s=tally.first_batch_s,
            gpu_stall_s=self._plan.gpu.stall_s if self._plan.gpu is not None else None,
            deaths=self._state.failures.deaths.total(),
            remade=self._state.failures.remade,
            late=self._state.late.made_again,
            failed_samples=self._pools.sample_errors.count,
            overlapped_epochs=tally.overlapped_epochs,
            used_ahead=tally.used_ahead,
            dropped_ahead=tally.dropped_ahead,
            why_no_overlap="" if self._plan.overlap is None else self._plan.overlap.why_not,
            pools={name: self._pool(pool) for name, pool in self._pools.by_name.items()},
        )

    def _pool(self, pool: WorkerPool) -> PoolStats:
        counts, state = pool.counts, self._state
        return pool.times.sums(
            wanted=counts.wanted,
            requested=counts.requested,
            running=counts.running,
            in_flight=state.placement.load.get(pool.name, 0),
            deaths=state.failures.deaths[pool.name],
            nodes_left_alone=len(counts.left_alone),
            left_alone=dict(counts.left_alone),
            failed_nodes=tuple(counts.failed.values()),
        )

    def look(self, *, resizing: bool, thread: int) -> EngineLook:
        """See `EngineLook`."""
        now, pools, schedule = monotonic(), dict(self._pools.by_name), self._state.schedule
        steps = self._plan.gpu.steps if self._plan.gpu is not None else GpuSteps()
        return EngineLook(
            at=now,
            epoch=max(0, self._state.epoch),
            times=self._tally.times(now),
            sizes=self._state.placement.sizes,
            resizing=resizing,
            refused=self._state.placement.why_no_remote,
            away_s=self._tally.away_s(now),
            ready=schedule.ready,
            in_flight=schedule.in_flight,
            batch_bytes=self._state.rules.nbytes,
            gpu_stall_s=self._plan.gpu.stall_s if self._plan.gpu is not None else None,
            gpu_steps=steps.number,
            gpu_step_s=steps.seconds,
            feed_wait_s=0.0 if self._plan.feed is None else self._plan.feed.wait_s,
            thread=thread,
            local=_pool_sample(pools[LOCAL]) if LOCAL in pools else PoolSample(),
            remote=_pool_sample(pools[REMOTE]) if REMOTE in pools else PoolSample(),
            pids=_pids(pools.get(LOCAL)),
            most_local=_most(pools.get(LOCAL)),
            has_one_stream=self._state.logicals.has_one_stream,
            pass_batches=self._plan.pass_batches,
            start_s=self._tally.causes[STARTUP] if self._tally.batches else 0.0,
            starts_anew=self._plan.starts_anew,
        )

    def sums(self, thread: int) -> Sums:
        """See `Sums`; ``thread``: the consumer's."""
        state, tally, pools, gpu = self._state, self._tally, dict(self._pools.by_name), self._plan.gpu
        local, remote = (pools[name].times if name in pools else PoolTimes() for name in WORKER_POOLS)
        feed, pinned = self._plan.feed, {"h2d": tally.pinned_bytes}
        if feed is not None:
            pinned = {"h2d": feed.staged_bytes, "device": feed.copied_bytes}
        return tally.sums(
            monotonic(),
            passes=max(1, state.epoch + 1),
            errors=dict(self._tally.errors),
            remade=state.failures.remade,
            late=state.late.made_again,
            moved_bytes={"shm": local.nbytes, "network": remote.nbytes, **pinned},
            pools={name: self._pool(pool) for name, pool in pools.items()},
            ready=state.schedule.ready,
            prefetch=state.schedule.prefetch,
            is_capped=state.rules.is_capped,
            batch_bytes=state.rules.nbytes,
            **({} if feed is None else feed.sums()),
            gpu_stall_s=gpu.total_s if gpu is not None else None,
            gpu_running_stall_s=gpu.stall_s if gpu is not None else None,
            slow_samples=self._pools.slow_samples.found(),
            failed_samples=self._pools.sample_errors.count,
            latest_failed=tuple(self._pools.sample_errors.latest),
            pids=_pids(pools.get(LOCAL)),
            thread=thread,
        )


def _pids(pool: WorkerPool | None) -> tuple[int, ...]:
    """Processes of local workers."""
    return tuple(h.pid for h in getattr(pool, "handles", ()) if h.pid and h.exitcode is None)


def _most(pool: WorkerPool | None) -> tuple[int, str] | None:
    return None if pool is None or pool.counts.most is None else (pool.counts.most, pool.counts.why_most)


def _pool_sample(pool: WorkerPool) -> PoolSample:
    counts, times = pool.counts, pool.times
    return times.stages().narrowed(
        PoolSample,
        **vars(times.link()),
        requested=counts.requested,
        running=counts.running,
        services_s=tuple(times.services_s)[-RECENT:],
    )
